"""Memory, predicted against measured: six configurations by stage, what operators hold inside, and
the allocator's replay.

Predicted is longhaul.memory's simulation; measured is, on a GPU, the caching allocator's own peak
of each stage, and on a CPU the tracker over a real run and the allocator's events.
"""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import history
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, free
from footprint.device import CUDA_CONTEXT, Demand, cublas_size, waterfall
from footprint.measure import peak_bytes
from footprint.workspace import DECLARED
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory import reconcile
from longhaul.memory.batches import row_batch
from longhaul.memory.deep import profile
from longhaul.memory.reserve import expandable_segments
from longhaul.memory.workspace import Workspaces
from model import GIB

MIB = 2**20
FULL = dict(gradient_checkpointing="full")
CONFIGURATIONS = (  # importance, model, tokens, what differs from the defaults, seconds
    (16.5, "0.6B", 8192, dict(batch_size=2, gradient_accumulation_steps=2), 30),
    (9.5, "0.6B", 32_768, FULL, 35),
    (9.2, "0.6B", 32_768, FULL | dict(attention_type="nsa"), 40),
    (9.8, "4B", 131_072, FULL | dict(attention_type="nsa"), 90),
    (17.5, "4B", 8192, FULL | dict(optimizer="adamw_8bit", master_weights="none"), 45),
    (18.5, "1.7B", 16_384, dict(gradient_checkpointing="selective", optimizer="adamw_bf16"), 40),
    (
        21.5,
        "1.7B",
        32_768,
        FULL
        | dict(
            offload_activations=True, mlp_tiles=16, attention_head_groups=8, master_weights="host"
        ),
        90,
    ),
)
TOY_CONFIGURATIONS = (
    (5, "tiny", 128, dict(batch_size=2, gradient_accumulation_steps=2), 1),
    (9, "tiny", 256, FULL, 1),
    (10, "tiny", 256, FULL | dict(attention_type="nsa"), 1),
    (19, "tiny", 256, FULL | dict(mlp_tiles=4, attention_head_groups=2), 1),
)
PEAKS = Table(
    "memory",
    "Peak of a training step, predicted and measured",
    {
        "model": "text",
        "tokens": "count",
        "levers": "text",
        "live predicted, GiB": "gib",
        "measured, GiB": "gib",
        "difference": "percent",
        "reserved predicted, GiB": "gib",
        "reserved, GiB": "gib",
        "reserved difference": "percent",
        "device predicted, GiB": "gib",
        "device, GiB": "gib",
    },
)
STAGES = Table(
    "stages",
    "The same by stage",
    {
        "model": "text",
        "tokens": "count",
        "levers": "text",
        "stage": "text",
        "predicted, GiB": "gib",
        "measured, GiB": "gib",
        "difference": "percent",
    },
)
WORKSPACES = Table(
    "workspaces",
    "What operators hold inside beyond what they return, declared and measured",
    {"operator": "text", "shapes": "text", "declared, MB": "mb", "measured, MB": "mb"},
)
ALLOCATOR = Table(
    "allocator",
    "Segments of the caching allocator over three steps: its own, and our model's of the "
    "same requests",
    {
        "model": "text",
        "tokens": "count",
        "levers": "text",
        "events": "count",
        "reserved, GiB": "gib",
        "replayed, GiB": "gib",
        "difference": "percent",
        "largest difference on the way, GiB": "gib",
        "predicted without running, GiB": "gib",
    },
)


def jobs(place: Place) -> list[Job]:
    """Every configuration, the workspaces of a dense and of a sparse step, the allocator's curve of
    two; at toy sizes in one job, since processes take longer to start than to run.
    """
    found = configurations(place)
    if not place.toy:
        return found

    def all_of_them(run: Run):
        for job in found:
            job.run(run)
            free()

    return [Job("memory, every configuration", 9, 120, all_of_them)]


def configurations(place: Place) -> list[Job]:
    """A job per configuration and question."""
    table = TOY_CONFIGURATIONS if place.toy else CONFIGURATIONS
    found = []
    for importance, model, tokens, changes, seconds in table:
        words = levers(changes)
        cfg = settings(place, model, tokens, changes)
        work = functools.partial(one_configuration, place=place, cfg=cfg, words=words)
        name = f"memory, {model}, {tokens:,} tokens, {words}"
        found.append(Job(name, importance, seconds, work))

    for importance, (_, model, tokens, changes, seconds) in ((14.5, table[1]), (16.2, table[2])):
        words = levers(changes)
        cfg = settings(place, model, tokens, changes)
        of_operators = functools.partial(workspaces, place=place, cfg=cfg)
        of_allocator = functools.partial(allocator, place=place, cfg=cfg, words=words)
        found.append(Job(f"workspaces, {model}, {words}", importance, seconds, of_operators))
        found.append(Job(f"allocator, {model}, {words}", importance, seconds, of_allocator))
    return found


def settings(place: Place, model: str, tokens: int, changes: dict) -> TrainConfig:
    """A configuration as the trainer has it, sparse attention by its kernels."""
    return TrainConfig(
        model_size=model,
        context_length=tokens,
        kernels=place.kernels(changes.get("attention_type", "standard")),
        device=place.device.type,
        warmup_steps=0,
        **changes,
    )


def levers(changes: dict) -> str:
    """The changes in words."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def percent(predicted: int, measured: int) -> float | None:
    """How far the prediction is off."""
    return 100 * (predicted / measured - 1) if measured else None


# ---- predicted against measured


def one_configuration(run: Run, place: Place, cfg: TrainConfig, words: str):
    """A row of peaks and the rows of its stages."""
    found = profile(cfg, 1, place.device.type, full=not place.cuda)
    measured = (
        reconcile.measure_cuda(cfg, device=place.device) if place.cuda else reconcile.measure(cfg)
    )
    named = {"model": cfg.model_size, "tokens": cfg.context_length, "levers": words}
    a, b = found.trace.peak()[0], measured["allocator_peak_bytes"]
    run.row(
        PEAKS,
        **named,
        **{"live predicted, GiB": a / GIB, "measured, GiB": b / GIB, "difference": percent(a, b)},
        **(on_device(Demand.of(found.trace), measured) if place.cuda else {}),
    )
    predicted = found.trace.peak_by_stage()
    for stage in dict.fromkeys([*predicted, *measured["stages"]]):
        a, b = predicted.get(stage, 0), measured["stages"].get(stage, 0)
        run.row(
            STAGES,
            **named,
            **{
                "stage": stage,
                "predicted, GiB": a / GIB,
                "measured, GiB": b / GIB,
                "difference": percent(a, b),
            },
        )


def on_device(demand: Demand, measured: dict) -> dict:
    """What only a GPU has: segments, and what the driver counts."""
    found = demand.expandable if expandable_segments() else demand.classic
    reserved, device = found.peak_reserved, dict(waterfall(found))["device"]
    return {
        "reserved predicted, GiB": reserved / GIB,
        "reserved, GiB": measured["reserved_peak_bytes"] / GIB,
        "reserved difference": percent(reserved, measured["reserved_peak_bytes"]),
        "device predicted, GiB": device / GIB,
        "device, GiB": measured["device_bytes"] / GIB,
    }


# ---- workspaces


class Inside(TorchDispatchMode):
    """Measures, once per operator and shapes, what heavy operators hold inside beyond what they
    return.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.declared = Workspaces(device.type)
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        key = (
            name,
            " ".join(
                "x".join(map(str, value.shape))
                for value in tree_leaves(args)
                if isinstance(value, torch.Tensor) and value.ndim > 1
            ),
        )
        if key in self.found or not (
            name.startswith("longhaul::") or name in DECLARED[self.device.type]
        ):
            return func(*args, **(kwargs or {}))
        kept = []
        peak = peak_bytes(lambda: kept.append(func(*args, **(kwargs or {}))), self.device)
        returned = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(kept)
            if isinstance(leaf, torch.Tensor)
        }
        self.found[key] = self.declared(func, args, kept[0]), peak - sum(returned.values())
        return kept[0]


def workspaces(run: Run, place: Place, cfg: TrainConfig):
    """Rows of the heavy operators of a real step; on a GPU also what the driver and cuBLAS take."""
    state = step.build(cfg, cfg.model(), place.device)
    batch = [
        {name: value if value is None else value.to(place.device) for name, value in micro.items()}
        for micro in row_batch(cfg)
    ]
    step.train_step(
        state, batch
    )  # what compiles and what stays is there before anything is measured
    with Inside(place.device) as inside:
        step.train_step(state, batch)
    for (name, shapes), (declared, measured) in inside.found.items():
        run.row(
            WORKSPACES,
            **{
                "operator": name,
                "shapes": shapes,
                "declared, MB": declared / 1e6,
                "measured, MB": measured / 1e6,
            },
        )
    if not place.cuda:
        run.note("CUDA context and cuBLAS workspaces: need a CUDA device")
        return
    for name, declared, measured in (
        ("CUDA context (and other processes)", CUDA_CONTEXT, context_bytes(place)),
        ("cuBLAS of one thread", declared_cublas(place), cublas_bytes(place)),
    ):
        run.row(
            WORKSPACES,
            **{
                "operator": name,
                "shapes": "",
                "declared, MB": declared / 1e6,
                "measured, MB": measured / 1e6,
            },
        )


def context_bytes(place: Place) -> int:
    """What the driver counts beyond the allocator's segments."""
    free, total = torch.cuda.mem_get_info(place.device)
    return total - free - torch.cuda.memory_reserved(place.device)


def declared_cublas(place: Place) -> int:
    """The workspace of one thread on this card."""
    major, minor = torch.cuda.get_device_capability(place.device)
    return cublas_size(10 * major + minor)


def cublas_bytes(place: Place) -> int:
    """What a product and one with a bias leave allocated."""
    torch._C._cuda_clearCublasWorkspaces()
    x = torch.zeros(1024, 1024, device=place.device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated(place.device)
    torch.mm(x, x)
    torch.nn.functional.linear(x, x, x[0])
    torch.cuda.synchronize(place.device)
    return torch.cuda.memory_allocated(place.device) - before


# ---- the allocator


def allocator(run: Run, place: Place, cfg: TrainConfig, words: str):
    """A row: the allocator's own history against our replay of its requests, and against what was
    predicted without running.
    """
    if not place.cuda:
        run.note("the allocator's curve: needs a CUDA device, since a CPU has no caching allocator")
        return
    if torch.cuda.memory_allocated(place.device) > 4 * declared_cublas(place):
        run.note(
            f"allocator: {torch.cuda.memory_allocated(place.device) / MIB:,.0f} MiB were "
            "allocated before its history began"
        )
    found = history.curves(history.record(cfg, place.device), expandable_segments())
    real, model = max(found.real), max(found.model)
    demand = Demand.of(profile(cfg, 1, "cuda").trace)
    replayed = demand.expandable if expandable_segments() else demand.classic
    predicted = replayed.peak_reserved
    run.row(
        ALLOCATOR,
        **{
            "model": cfg.model_size,
            "tokens": cfg.context_length,
            "levers": words,
            "events": len(found.real),
            "reserved, GiB": real / GIB,
            "replayed, GiB": model / GIB,
            "difference": percent(model, real),
            "largest difference on the way, GiB": found.largest_difference / GIB,
            "predicted without running, GiB": predicted / GIB,
        },
    )

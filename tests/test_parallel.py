"""One process, FSDP2 over 2 and 4 ranks, HSDP, accumulation, checkpointing: the same losses, norms
and weights.
"""

import functools
import math
from pathlib import Path

import pytest
import torch

from data.loader import Batch
from longhaul import dist, step
from longhaul.checkpoint import load, save
from longhaul.config import TrainConfig
from longhaul.generate import generate
from tests.ranks import run_ranks

STEPS = 4
ROWS = 4
T = 65
V = 211
# eps above the rounding of gradients near 0, which AdamW would otherwise turn into whole steps
# of lr, each run its own
BASE = dict(
    model_size="tiny",
    context_length=T,
    dtype="fp32",
    lr=1e-3,
    warmup_steps=2,
    max_steps=STEPS,
    vocab_size=V,
    global_batch_size=ROWS,
    batch_size=1,
    adam=("eps=1e-6",),
)


@pytest.mark.parametrize("variable, threads", [(None, [12]), ("3", [])])
def test_a_single_rank_takes_all_cores_unless_the_user_says_otherwise(
    monkeypatch, variable, threads
):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(dist, "cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    dist.start(dist.World(), torch.device("cpu"))
    assert taken == threads


@pytest.fixture
def reduced_precision():
    """torch's default sums of 16-bit products, before and after the test."""
    matmul = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    for name in names:
        setattr(matmul, name, True)
    yield lambda: [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, True)


def test_a_rank_with_a_gpu_has_its_share_of_the_cores_and_a_group_bound_to_its_gpu(
    monkeypatch, reduced_precision
):
    joined = []
    threads = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(dist, "cores", lambda: 12)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda name, **rest: joined.append((name, rest))
    )

    gpu = torch.device("cuda", 1)
    dist.start(dist.World(rank=1, size=2, local_rank=1, local_size=2), gpu)
    assert threads == [6]
    assert joined == [("nccl", {"timeout": dist.COLLECTIVE_TIMEOUT, "device_id": gpu})]
    assert reduced_precision() == [False, False]


def rows_of_step(index: int, T: int = T, packed: bool = True) -> Batch:
    """ROWS rows of T tokens, with packed documents, and very unequal numbers of valid labels; the
    first row of odd steps has none.
    """
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, V, (ROWS, T + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : (17 * row + 5 * index) % T] = -100
    if index % 2:
        labels[0] = -100
    doc_ids = (torch.rand(ROWS, T, generator=generator) < 0.05 * packed).cumsum(1)
    first = torch.ones(ROWS, T, dtype=torch.bool)
    first[:, 1:] = doc_ids.diff(dim=1) != 0
    starts = torch.where(first, torch.arange(T), 0).cummax(1).values
    parts = (ids[:, :-1], labels, torch.arange(T) - starts, doc_ids.int())
    return Batch(*(part.contiguous().numpy() for part in parts))


def built(world: dist.World, cfg: TrainConfig) -> step.TrainState:
    mesh = dist.data_mesh(world, torch.device("cpu"), cfg.dp_replicate)
    return step.build(cfg, cfg.model(), "cpu", world, mesh)


def whole(tensors) -> dict[str, torch.Tensor]:
    """The tensors by name, those of several ranks put together."""
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in tensors
    }


def train(world: dist.World, changes: dict, packed: bool = True) -> dict:
    """Losses, gradient norms and figures of the steps, and the final weights (whole)."""
    cfg = TrainConfig(**BASE | changes)
    state = built(world, cfg)
    rank, share = world.rank // cfg.context_ranks, ROWS * cfg.context_ranks // world.size
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    losses, norms = [], []
    figures = []
    for index in range(cfg.max_steps):
        parts = rows_of_step(index, cfg.context_length, packed)
        rows = Batch(*(part[rank * share : (rank + 1) * share] for part in parts))
        result = step.train_step(state, step.micro_batches(rows, cfg.batch_size, state.device))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        figures.append({name: float(figure) for name, figure in result.figures.items()})

    return dict(
        losses=losses,
        norms=norms,
        figures=figures,
        before=whole(before.items()),
        weights=whole(state.model.named_parameters()),
    )


@pytest.fixture(scope="module")
def single():
    return {
        tied: train(
            dist.World(), {"model_overrides": (f"tie_embeddings={tied}",), "batch_size": ROWS}
        )
        for tied in (True, False)
    }


def assert_same(result: dict, truth: dict):
    torch.testing.assert_close(result["losses"], truth["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(result["norms"], truth["norms"], rtol=1e-5, atol=0)
    torch.testing.assert_close(result["figures"], truth["figures"], rtol=1e-5, atol=0)
    for name, weight in truth["weights"].items():
        # as a whole, against how far training moved it
        moved = (weight - truth["before"][name]).norm()
        assert moved > 0 and float((result["weights"][name] - weight).norm() / moved) < 1e-4, name


# {name: (ranks, settings)}: processes start once per name and run all of its settings
SHARDED = {
    "2 ranks": (
        2,
        [
            dict(batch_size=2),
            dict(batch_size=1, gradient_checkpointing="full", loss="chunked"),
            dict(batch_size=1, model_overrides=("tie_embeddings=False",), loss="one_pass"),
            dict(dp_replicate=2),
        ],
    ),
    "4 ranks": (4, [dict(batch_size=1), dict(batch_size=1, dp_replicate=2, loss="chunked")]),
}


LEVERS = [
    dict(batch_size=1, gradient_checkpointing="selective", master_weights="host"),
    dict(
        batch_size=2,
        gradient_checkpointing="full",
        offload_activations=True,
        mlp_tiles=4,
        attention_head_groups=2,
        loss="chunked",
    ),
    dict(batch_size=2, optimizer_in_backward=True, grad_clip=0),
]
# rows of 300 elements have two scales in 8 bits, the second of a part of a block
NARROW = ("num_layers=2", "hidden_size=64", "ffn_size=300")
SMALL_STATES = [
    dict(batch_size=2, optimizer=name, model_overrides=NARROW, max_steps=8)
    for name in ("adamw_8bit", "adamw_bf16", "muon")
]


def train_each(world: dist.World, settings: list[dict]) -> list[dict]:
    return [train(world, changes) for changes in settings]


@pytest.fixture(scope="module")
def sharded():
    return functools.cache(lambda name: run_ranks(train_each, *SHARDED[name]))


@pytest.mark.parametrize(
    "name, index",
    [
        pytest.param(name, index, marks=() if name == "2 ranks" else pytest.mark.slow)
        for name, (_, settings) in SHARDED.items()
        for index in range(len(settings))
    ],
)
def test_ranks_change_nothing(single, sharded, name, index):
    changes = SHARDED[name][1][index]
    tied = "tie_embeddings=False" not in changes.get("model_overrides", ())
    for results in sharded(name):
        assert_same(results[index], single[tied])


@pytest.mark.slow
def test_levers_under_ranks_change_nothing(single):
    unclipped = train(dist.World(), dict(batch_size=ROWS, grad_clip=0))
    for results in run_ranks(train_each, 2, LEVERS):
        for changes, result in zip(LEVERS, results):
            assert_same(result, unclipped if "grad_clip" in changes else single[True])


@pytest.mark.slow
def test_small_states_under_ranks_follow_those_of_one_process():
    """Rounding is drawn anew for each rank's rows: losses agree as far as rounding reaches. Muon
    makes whole matrices orthogonal in bf16.
    """
    truths = [train(dist.World(), changes | dict(batch_size=ROWS)) for changes in SMALL_STATES]
    for results in run_ranks(train_each, 2, SMALL_STATES):
        for changes, result, truth in zip(SMALL_STATES, results, truths):
            torch.testing.assert_close(
                result["losses"], truth["losses"], rtol=2e-3, atol=0, msg=str(changes)
            )


SPARSE = dict(
    attention_type="nsa",
    blocks=("cmp_block=8", "cmp_stride=4", "sel_block=8", "sel_count=4", "window=16"),
)
SHALLOW = dict(model_overrides=("num_layers=2",))
SPARSE_SETTINGS = [
    dict(batch_size=1, gradient_checkpointing="full", loss="chunked"),
    dict(batch_size=2, blocks=(*SPARSE["blocks"], "kv=separate", "cmp_kind=mean")),
]


@pytest.mark.slow
def test_ranks_change_nothing_in_sparse_attention():
    alone = dict(batch_size=ROWS, gradient_checkpointing="none")
    settings = [SPARSE | SHALLOW | changes for changes in SPARSE_SETTINGS]
    truths = [train(dist.World(), changes | alone) for changes in settings]
    for results in run_ranks(train_each, 2, settings):
        for result, truth in zip(results, truths):
            assert_same(result, truth)


def generated(world: dist.World, settings: list) -> list:
    """Greedy continuations of a prompt that is longer than the first chunk of sparse attention."""
    ids = []
    for changes in settings:
        cfg = TrainConfig(**BASE | changes)
        state = built(world, cfg)
        ids.append(list(generate(state.model, list(range(1, 120)), 8, temperature=0)))
    return ids


def test_sharded_models_generate_what_one_process_does():
    settings = [{}, SPARSE, SPARSE | dict(blocks=(*SPARSE["blocks"], "kv=separate"))]
    assert run_ranks(generated, 2, settings) == [generated(dist.World(), settings)] * 2


@pytest.mark.slow
def test_compiled_layers_change_nothing_and_are_compiled(single):
    from torch._dynamo.utils import counters

    counters.clear()
    assert_same(
        train(dist.World(), dict(batch_size=2, compile=True, gradient_checkpointing="full")),
        single[True],
    )
    assert counters["stats"]["unique_graphs"] > 0 and counters["stats"]["calls_captured"] > 20


def initial_weights(world: dist.World) -> dict:
    cfg = TrainConfig(**BASE)
    state = built(world, cfg)
    return whole(state.model.named_parameters())


def test_initial_weights_are_the_same_bits_for_every_world_size():
    truth = initial_weights(dist.World())
    for result in run_ranks(initial_weights, 3):
        for name, weight in truth.items():
            assert torch.equal(result[name], weight), name


def save_after_two_steps(world: dist.World, folder: str) -> None:
    cfg = TrainConfig(**BASE)
    state = built(world, cfg)
    share = ROWS // world.size
    for index in range(2):
        rows = Batch(
            *(part[world.rank * share : (world.rank + 1) * share] for part in rows_of_step(index))
        )
        step.train_step(state, step.micro_batches(rows, 1, state.device))
    save.save(state, Path(folder), {})


def tensors_after_loading(world: dist.World, folder: str, changes: dict) -> dict:
    cfg = TrainConfig(**BASE | changes | {"seed": 7})
    state = built(world, cfg)
    load.load_state(state, load.verified(Path(folder)))
    named = list(state.model.named_parameters())
    tensors = {f"model.{name}": p for name, p in named} | {
        f"optim.{name}.{key}": value
        for name, p in named
        for key, value in state.optimizer.state[p].items()
        if value.ndim
    }
    return whole(tensors.items())


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save_after_two_steps, 2, str(folder))
    return str(folder / "step-00000002")


@pytest.mark.slow
@pytest.mark.parametrize("size, replicas", [(3, 1), (4, 2)])
def test_a_checkpoint_is_the_same_bits_for_every_world_size(saved_by_two, size, replicas):
    truth = tensors_after_loading(dist.World(), saved_by_two, {})
    assert any(
        name.endswith("exp_avg_sq") and value.abs().sum() > 0 for name, value in truth.items()
    )
    for result in run_ranks(tensors_after_loading, size, saved_by_two, {"dp_replicate": replicas}):
        assert result.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.equal(result[name], value), name


def step_with_a_nan_on_one_rank(world: dist.World, replicas: int) -> dict:
    """Replicas have the same gradients, until a bit flips in the memory of one of them."""
    cfg = TrainConfig(**BASE | {"batch_size": 2, "dp_replicate": replicas})
    state = built(world, cfg)
    before = [parameter.to_local().clone() for parameter in state.model.parameters()]

    def spoil(stage: str) -> None:
        if world.rank == 1 and stage == "gradient norm":
            gradient = next(state.model.parameters()).grad.to_local()
            gradient[0, 0] = torch.nan

    state.listeners.append(spoil)
    share = slice(world.rank * 2, world.rank * 2 + 2)
    rows = Batch(*(part[share] for part in rows_of_step(0)))
    result = step.train_step(state, step.micro_batches(rows, 2, state.device))
    weights = zip(before, state.model.parameters(), strict=True)
    return dict(
        norm=float(result.grad_norm),
        skipped=result.skipped,
        unchanged=all(torch.equal(old, new.to_local()) for old, new in weights),
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_nan_on_one_rank_skips_the_step_on_all(replicas):
    first, second = run_ranks(step_with_a_nan_on_one_rank, 2, replicas)
    assert math.isfinite(first["norm"]) == (replicas == 2)
    assert math.isnan(second["norm"])
    for result in (first, second):
        assert result["skipped"]
        assert result["unchanged"]

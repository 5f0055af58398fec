"""Group E of the fault matrix: numerics.

A fault is put into a forked child by replacing `longhaul.step.train_step` there before training
begins.
"""

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open

import longhaul.step
from data.dataset import open_dataset
from data.loader import IGNORE, Loader
from longhaul import kernels
from model import Decoder, ModelConfig, NSAConfig, Standard
from selfcheck.faults.rows import Row, require
from tests import runs

ROWS_PER_STEP = 4  # of the two-rank runs: 2 rows a rank


def at(steps: Iterable[int], rank: int, fault: Callable) -> Callable:
    """A child's first words: `fault(train_step, state, batch)` replaces the given steps (counted
    from 1) on one rank; None: on each.
    """

    def before():
        plain = longhaul.step.train_step

        def poisoned(state, batch, *rest):
            mine = rank is None or state.world.rank == rank
            return (
                fault(plain, state, batch, *rest)
                if mine and state.step + 1 in steps
                else plain(state, batch, *rest)
            )

        longhaul.step.train_step = poisoned

    return before


def poison(value: float) -> Callable:
    """A layer's output times `value`, in the forward."""

    def fault(train_step, state, batch, *rest):
        hook = state.model.layers[0].mlp.register_forward_hook(
            lambda module, args, out: out * value
        )
        try:
            return train_step(state, batch, *rest)
        finally:
            hook.remove()

    return fault


def overflow(train_step, state, batch, *rest):
    """A gradient that is infinite though the loss is not."""
    hook = state.model.layers[1].mlp.register_full_backward_hook(
        lambda module, into, out: tuple(one * float("inf") for one in into)
    )
    try:
        return train_step(state, batch, *rest)
    finally:
        hook.remove()


def two_ranks(args: list[str], log: Path, code: int = 0, before: Callable = lambda: None) -> str:
    """What rank 0 says; both ranks must end with `code`."""
    ranks = runs.start_ranks(args, log, 2, before)
    codes = [one.wait() for one in ranks]
    require(codes == [code, code], f"exit codes {codes}, not {code}: {ranks[0].words()[-900:]}")
    return ranks[0].words()


def command_in(words: str) -> list[str]:
    """The flags of the last train.py command in some words."""
    return shlex.split(words[words.rindex("train.py --") + len("train.py ") :].splitlines()[0])


def tensors_of(step: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint, as bytes."""
    found = {}
    for path in sorted(step.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as source:
            found |= {
                f"{path.name} {name}": source.get_tensor(name).numpy().tobytes()
                for name in source.keys()  # noqa: SIM118  a safetensors file is not a dict
            }
    return found


def watched_rows(out: Path) -> Callable:
    """A child's first words: every rank writes the row positions of its steps to rows-RANK in
    `out`'s parent.
    """

    def before():
        plain = Loader.batch

        def batch(self, step, rank=0, world_size=1):
            with open(out.with_name(f"{out.name}-rows-{rank}"), "a", encoding="utf-8") as file:
                file.write(json.dumps([step, list(self.positions(step, rank, world_size))]) + "\n")
            return plain(self, step, rank, world_size)

        Loader.batch = batch

    return before


def rows_seen(out: Path) -> dict[int, list[int]]:
    """{step: positions} of all ranks, from `watched_rows`."""
    seen: dict[int, list[int]] = {}
    for path in sorted(out.parent.glob(f"{out.name}-rows-*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            step, positions = json.loads(line)
            seen[step] = seen.get(step, []) + positions
    return seen


# --------------------------------------------------------------------------------------------- rows


def not_finite(trials: int, folder: Path) -> str:
    """Row 40: NaN, infinity and an overflow of the backward, on either rank in turn; then a budget
    that runs out and the way back.
    """
    data = runs.dataset(folder / "data", 400)
    kinds = {"NaN": poison(float("nan")), "inf": poison(float("inf")), "backward": overflow}
    for trial in range(trials):
        name, rank = list(kinds)[trial % 3], (trial + 1) % 2
        out = folder / f"one-{trial}"
        args = runs.arguments(
            data,
            out,
            "--batch_size",
            "2",
            "--max_steps",
            "4",
            "--save_every",
            "1",
            "--keep_last",
            "9",
        )
        words = two_ranks(args, folder / f"one-{trial}.log", 0, at({3}, rank, kinds[name]))
        before, after = tensors_of(out / "step-00000002"), tensors_of(out / "step-00000003")
        require(
            before == after,
            f"{name} on rank {rank}: {sum(before[key] != after[key] for key in before)} "
            "tensors changed in a skipped step",
        )
        require(
            tensors_of(out / "step-00000004") != after, "nothing was trained after the skipped step"
        )
        require(
            "step 3: the gradient is NaN or infinite" in words and "rows 8:12 " in words,
            f"{name} on rank {rank}: {words[-900:]}",
        )
        _same_rows(data, out / "skipped" / "step-00000003.safetensors", "8:12")
    out = folder / "budget"
    args = runs.arguments(
        data,
        out,
        "--batch_size",
        "2",
        "--max_steps",
        "12",
        "--save_every",
        "4",
        "--max_skipped_steps",
        "2",
    )
    words = two_ranks(args, folder / "budget.log", 5, at({2, 6, 7}, 1, poison(float("nan"))))
    require("steps 2, 6, 7 " in words and "rows 4:8 20:28" in words, words[-900:])
    record = runs.exit_record(out)
    require(record["code"] == 5 and record["last_step"] == 6, f"exit.json says {record}")
    require(
        "--skip_rows 20:28" in record["remedy"] and "step-00000004" in record["remedy"],
        f"exit.json says {record}",
    )
    flags = command_in(record["remedy"])
    way_back = Path(flags[flags.index("--output_dir") + 1])
    two_ranks(flags, folder / "back.log", 0, watched_rows(way_back))
    expected = [row for row in range(16, 12 * ROWS_PER_STEP + 8) if not 20 <= row < 28]
    require(
        sum(rows_seen(way_back).values(), []) == expected,
        f"the way back went over {rows_seen(way_back)}",
    )
    return (
        "no rank stepped, rows written down; budget of 2: exit code 5, and its command trained "
        "around them"
    )


def _same_rows(data: Path, dump: Path, rows: str):
    """Failed unless the file holds these rows of the order."""
    loader, (begin, end) = (
        Loader(open_dataset(data), runs.CONTEXT, ROWS_PER_STEP),
        map(int, rows.split(":")),
    )
    wanted = loader.rows(range(begin, end))
    with safe_open(dump, framework="pt") as source:
        for name in ("tokens", "labels", "doc_ids"):
            require(
                (source.get_tensor(name).numpy() == getattr(wanted, name)).all(),
                f"{dump}: {name} are not those of rows {rows}",
            )


def masked(trials: int, folder: Path) -> str:
    """Row 41: a micro-batch, a rank and a whole step without any label, with both attentions."""
    for attention in ("standard", "nsa"):
        for loss in ("standard", "chunked"):
            _masked_micro_batch(small_model(attention, loss=loss), loss)
    data = runs.dataset(folder / "data", 100)

    def without_labels(train_step, state, batch, *rest):
        for micro in batch:
            micro["labels_BT"].fill_(IGNORE)
        return train_step(state, batch, *rest)

    for rank, words in ((1, "one rank"), (None, "all ranks")):
        out = folder / words.replace(" ", "-")
        args = runs.arguments(
            data, out, "--batch_size", "2", "--max_steps", "3", "--max_skipped_steps", "0"
        )
        two_ranks(args, folder / f"{out.name}.log", 0, at({2}, rank, without_labels))
        losses = runs.losses(out)
        require(
            len(losses) == 3 and None not in (losses[0], losses[2]),
            f"{words} without labels: losses {losses}",
        )
        require(rank is not None or losses[1] is None, f"{words} without labels: loss {losses[1]}")
        require(
            rank is None or 3 < losses[1] < 6,
            f"{words} without labels: loss {losses[1]} is not the other rank's",
        )
    return (
        "gradient 0 in both attentions and losses, and a step without labels has no loss; on one "
        "rank the loss is the other's; no step skipped"
    )


def _masked_micro_batch(model: Decoder, loss: str):
    tokens = torch.randint(1, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(tokens, IGNORE)
    result = model(tokens, labels)
    result.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    require(result.item() == 0, f"{loss} loss of no labels is {result.item()}")
    require(all(not g.any() for g in gradients), f"{loss}: gradients of no labels are not 0")


def spike(trials: int, folder: Path) -> str:
    """Row 42: a loss three times as large; the command of the line that reports it goes around its
    rows, on one rank and on two.
    """
    data = runs.dataset(folder / "data", 400)
    for trial in range(trials):
        bad = 18 + trial % 5
        out = folder / f"run-{trial}"
        args = runs.arguments(
            data,
            out,
            "--batch_size",
            "2",
            "--max_steps",
            "24",
            "--save_every",
            "8",
            "--gradient_accumulation_steps",
            "2",
        )
        child = runs.finish(args, folder / f"{trial}.log", 0, at({bad}, None, _thrice))
        found = [line for line in child.words().splitlines() if "LOSS SPIKE" in line]
        require(
            len(found) == 1 and f"LOSS SPIKE at step {bad}: " in found[0],
            f"spike in step {bad}: {found}",
        )
        first = (bad - 1) * ROWS_PER_STEP
        require(f"rows {first}:{first + ROWS_PER_STEP};" in found[0], found[0])
        spikes = [
            json.loads(line)["spike"] for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        require(max(spikes[: bad - 1]) < 10 < spikes[bad - 1], f"scores {spikes}")
        _around(command_in(found[0]), folder, first, (bad - 1) // 8 * 8)
    return (
        "one line in the same step; its command left out exactly those rows, in the same order "
        "on 1 and on 2 ranks, and a resume knew of it"
    )


def _thrice(train_step, state, batch, *rest):
    plain = state.model.forward
    state.model.forward = lambda *args, **kwargs: 3 * plain(*args, **kwargs)
    try:
        return train_step(state, batch, *rest)
    finally:
        state.model.forward = plain


def _around(flags: list[str], folder: Path, first: int, resumed: int):
    """Run the command; then on without --skip_rows, for the checkpoint knows of it; then from the
    start on two ranks.
    """
    out = Path(flags[flags.index("--output_dir") + 1])
    runs.finish(flags, folder / f"{out.name}.log", 0, watched_rows(out))
    skip = flags.index("--skip_rows")
    longer = [*flags[:skip], *flags[skip + 2 :], "--max_steps", "26"]
    longer[longer.index("--resume") + 1] = "auto"
    runs.finish(longer, folder / f"{out.name}.again.log", 0, watched_rows(out))
    expected = [
        row
        for row in range(resumed * ROWS_PER_STEP, 27 * ROWS_PER_STEP)
        if not first <= row < first + ROWS_PER_STEP
    ]
    require(
        sum(rows_seen(out).values(), []) == expected, f"went over {rows_seen(out)}, not {expected}"
    )
    two = folder / f"{out.name}-two"
    flags = [
        *longer,
        "--output_dir",
        str(two),
        "--skip_rows",
        f"{first}:{first + ROWS_PER_STEP}",
        "--gradient_accumulation_steps",
        "1",
    ]
    two_ranks(flags, folder / f"{two.name}.log", 0, watched_rows(two))
    whole = [row for row in range(27 * ROWS_PER_STEP) if not first <= row < first + ROWS_PER_STEP]
    require(sum(rows_seen(two).values(), []) == whole, f"two ranks went over {rows_seen(two)}")


def small_model(attention: str, **settings) -> Decoder:
    """A float32 decoder of 64 ids."""
    sparse = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=8, sel_count=4, window=16)
    config = ModelConfig.preset(
        "tiny",
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        compute_dtype="float32",
        attention={"standard": Standard(), "nsa": sparse}[attention],
        **settings,
    )
    model = kernels.decoder(config)
    model.init_weights(0)
    return model


ROWS: list[Row] = [
    Row(
        40,
        "NaN or infinity on 1 of 2 ranks",
        "no rank steps; rows written down; K skipped, then 5 naming steps, rows and the way back",
        not_finite,
        3,
        12,
    ),
    Row(41, "all labels masked", "contribution 0, never NaN", masked),
    Row(
        42,
        "a loss spike",
        "reported in 1 step; --skip_rows a:b replays around it",
        spike,
        1,
        10,
    ),
]

"""Does each lever compute what the plain path computes, on this machine? Every lever, every pair,
every way to spread over ranks.

    python -m scripts.equivalence                                   # all: 5 minutes on two cores
    python -m scripts.equivalence --what levers pairs --device cuda # on one GPU

A small model trains 8 steps in fp32 on packed documents with uneven numbers of targets, plainly and
with the lever. The losses must agree within 2e-6, the gradient norms within 1e-5 relative. Levers
that round (states of 16 or 8 bits, Muon) train 500 steps, and the mean loss of the last 50 may lie
above AdamW's by the bound in the table. The exit code is 1 if a verdict is bad.
"""

import itertools
import sys
from typing import NamedTuple

import torch

from longhaul import cli, dist, step
from longhaul.config import TrainConfig
from tests.ranks import run_ranks

LOSS, NORM = 2e-6, 1e-5  # absolute, relative
ROWS = 4
T = 96
V = 211
BASE = dict(
    model_size="tiny",
    vocab_size=V,
    context_length=T,
    dtype="fp32",
    lr=1e-3,
    adam=("eps=1e-6",),
    warmup_steps=2,
    max_steps=500,
    grad_clip=0.0,
    schedule="constant",
    global_batch_size=ROWS,
    batch_size=ROWS,
    context_parallel_size=1,
)
SHAPE = (
    "num_layers=2",
    "hidden_size=64",
    "num_heads=8",
    "num_kv_heads=4",
    "head_dim=16",
    "ffn_size=96",
)
SPARSE = dict(
    attention_type="nsa",
    blocks=("cmp_block=8", "cmp_stride=4", "sel_block=8", "sel_count=4", "window=16"),
)
INDEXED = dict(
    attention_type="indexed",
    blocks=("count=3", "block=8", "head_dim=16"),
    indexer_warmup=1,
)
KINDS = {None: "", "nsa": ", NSA", "indexed": ", indexed"}  # as the table names them
LEVERS = {
    "checkpointing": dict(gradient_checkpointing="full"),
    "selective checkpointing": dict(gradient_checkpointing="selective"),
    "offloaded activations": dict(gradient_checkpointing="full", offload_activations=True),
    "tiled MLP": dict(mlp_tiles=3),
    "head groups": dict(attention_head_groups=2),
    "chunked loss": dict(loss="chunked"),
    "loss in one pass": dict(loss="one_pass"),
    "accumulation": dict(batch_size=1),
    "offloaded optimizer": dict(master_weights="host"),
    "optimizer in backward": dict(optimizer_in_backward=True),
}
EITHER_OR = [
    ("checkpointing", "selective checkpointing"),
    ("chunked loss", "loss in one pass"),
]
LOSSY = {  # what they may end above fp32 AdamW, stated beforehand
    "bf16 moments": (dict(optimizer="adamw_bf16"), 0.02),
    "8-bit moments": (dict(optimizer="adamw_8bit"), 0.02),
    "Muon": (dict(optimizer="muon"), 0.05),
    "offloaded optimizer in bf16": (dict(dtype="bf16", master_weights="host"), 0.02),
    "bf16 without master weights": (dict(dtype="bf16", master_weights="none"), 0.03),
}


class Case(NamedTuple):
    name: str
    changes: dict
    packed: bool = True
    untied: bool = False
    ranks: int = 1

    def settings(self) -> dict:
        return (
            BASE
            | self.changes
            | dict(model_overrides=(*SHAPE, *["tie_embeddings=False"] * self.untied))
        )

    def plain(self) -> "Case":
        """The same training on one process without a lever."""
        kept = {name: self.changes[name] for name in (*SPARSE, *INDEXED) if name in self.changes}
        return Case("plain", kept, self.packed, self.untied)


def rows_of_step(index: int, packed: bool) -> dict:
    """ROWS rows: a cycle through the vocabulary with noise, documents of random lengths, some rows
    with few targets.
    """
    make = torch.Generator().manual_seed(index)
    ids = (torch.randint(V, (ROWS, 1), generator=make) + 3 * torch.arange(T + 1)) % V
    ids = torch.where(
        torch.rand(ids.shape, generator=make) < 0.2,
        torch.randint(V, ids.shape, generator=make),
        ids,
    )
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : (17 * row + 5 * index) % T] = -100
    doc_ids = (
        (torch.rand(ROWS, T, generator=make) < 0.05).cumsum(1).int()
        if packed
        else torch.zeros(ROWS, T, dtype=torch.int32)
    )
    return dict(tokens_BT=ids[:, :-1], labels_BT=labels, doc_ids=doc_ids)


def train(world: dist.World, case: Case, steps: int, device: str = "cpu") -> list[list[float]]:
    """[losses, gradient norms] of a run."""
    cfg = TrainConfig(**case.settings())
    place = torch.device(device)
    state = step.build(
        cfg, cfg.model(), place, world, dist.data_mesh(world, place, cfg.dp_replicate)
    )
    group, groups = world.rank // cfg.context_ranks, world.size // cfg.context_ranks
    mine, history = slice(group * ROWS // groups, (group + 1) * ROWS // groups), []
    for index in range(steps):
        rows = {name: value[mine] for name, value in rows_of_step(index, case.packed).items()}
        parts = [
            {name: value.split(cfg.batch_size)[i] for name, value in rows.items()}
            for i in range(cfg.accumulation(world.size))
        ]
        result = step.train_step(
            state,
            [
                part | {name: part[name].to(place) for name in ("tokens_BT", "labels_BT")}
                for part in parts
            ],
        )
        history.append((float(result.loss), float(result.grad_norm)))
    return [list(column) for column in zip(*history, strict=True)]


def train_each(world: dist.World, cases: list[tuple], steps: int) -> list:
    return [train(world, Case(*case), steps) for case in cases]


# ---- what is compared


def levers() -> list[Case]:
    return [
        Case(name + kind, changes | attention)
        for attention, kind in zip(({}, SPARSE, INDEXED), KINDS.values(), strict=True)
        for name, changes in LEVERS.items()
    ]


def pairs() -> list[Case]:
    together = [
        (one, other)
        for one, other in itertools.combinations(LEVERS, 2)
        if (one, other) not in EITHER_OR
    ]
    return [Case(f"{one} + {other}", LEVERS[other] | LEVERS[one]) for one, other in together]


def spread() -> list[Case]:
    """{dp1cp2, dp2cp1, dp2cp2, dp1cp4} x {standard by both ways, NSA} x {tied, untied} x
    {accumulated and packed, whole}, and indexed where no ranks share rows.
    """
    cases = []
    for ranks, sharing in ((2, 2), (2, 1), (4, 2), (4, 4)):
        ways = (
            [("ulysses", {}), ("gather_kv", {}), ("ulysses", SPARSE)]
            if sharing > 1
            else [("auto", {}), ("auto", SPARSE), ("auto", INDEXED)]
        )
        for (mode, attention), untied, packed in itertools.product(
            ways, (False, True), (True, False)
        ):
            changes = dict(
                context_parallel_size=sharing,
                context_parallel_mode=mode,
                batch_size=1 if packed else ROWS * sharing // ranks,
            )
            name = (
                f"dp{ranks // sharing} cp{sharing} "
                f"{mode if sharing > 1 else ''}{KINDS[attention.get('attention_type')]}"
            )
            if untied:
                name += ", untied"
            if packed:
                name += ", packed, accumulated"
            cases.append(
                Case(
                    name,
                    changes | attention,
                    packed,
                    untied,
                    ranks,
                )
            )
    return cases


def compare(cases: list[Case], steps: int, device: str) -> bool:
    """Print a line per case; whether all are good. Cases of the same number of ranks share their
    processes.
    """
    good, truths = True, {}
    for ranks, group in itertools.groupby(cases, lambda case: case.ranks):
        allowed, place = [], device if ranks == 1 else "cpu"
        for case in group:
            try:
                TrainConfig(**case.settings()).accumulation(ranks)
                allowed.append(case)
            except ValueError as error:
                print(f"{case.name:<58}{'':>12}{'':>12}  refused: {error}")
        found = (
            run_ranks(train_each, ranks, [tuple(case) for case in allowed], steps)[0]
            if ranks > 1
            else (train(dist.World(), case, steps, device) for case in allowed)
        )
        for case, result in zip(allowed, found, strict=True):
            key = place + repr(case.plain())
            truths[key] = truths.get(key) or train(dist.World(), case.plain(), steps, place)
            good &= report(case.name, result, truths[key])
    return good


def report(name: str, result: list[list[float]], truth: list[list[float]]) -> bool:
    losses = [abs(a - b) for a, b in zip(result[0], truth[0], strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(result[1], truth[1], strict=True)]
    good = all(value <= LOSS for value in losses) and all(
        value <= NORM for value in norms
    )  # one by one: max() passes over NaN
    print(
        f"{name:<58}{max(losses):>12.1e}{max(norms):>12.1e}  {'equal' if good else 'DIFFERENT'}",
        flush=True,
    )
    return good


def curves(device: str, steps: int = 500) -> bool:
    """Levers that round: the end of a loss curve compared with AdamW's."""

    def end(changes):
        return sum(train(dist.World(), Case("", changes), steps, device)[0][-50:]) / 50

    good, exact = True, {}
    for name, (changes, bound) in LOSSY.items():
        dtype = changes.get("dtype", "fp32")
        exact[dtype] = exact.get(dtype) or end(dict(dtype=dtype))
        above = end(changes) / exact[dtype] - 1
        good &= above <= bound
        print(
            f"{name:<58}{above:>+12.2%}{bound:>12.0%}  {'within' if above <= bound else 'ABOVE'}",
            flush=True,
        )
    return good


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = cli.Parser(description=__doc__.splitlines()[0])
    kinds = dict(levers=levers, pairs=pairs, ranks=spread)
    parser.add_argument(
        "--what",
        nargs="+",
        choices=[*kinds, "curves"],
        default=[*kinds, "curves"],
        help="what to compare",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="optimizer steps of each comparison but the curves"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where one process computes; several ranks run on CPU",
    )
    given = parser.parse_args(args)
    if given.steps < 1:
        parser.error(f"--steps {given.steps} compares nothing: give at least 1")

    good = True
    for what in given.what:
        units = "end above   bound" if what == "curves" else "loss, nats   norm, rel."
        print(f"\n{what:<58}{units:>24}  verdict")
        good &= (
            curves(given.device)
            if what == "curves"
            else compare(kinds[what](), given.steps, given.device)
        )
    print(f"\n{'all good' if good else 'SOME DIFFER: do not trust those levers on this machine'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

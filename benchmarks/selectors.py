"""Which blocks to read: the selectors compared on models that retrieve, at equal numbers of blocks.

    python -m benchmarks.selectors runs/proof --output runs/selectors
        the models of scripts/long_context_proof.sh, as they are; one that is killed goes on
    python -m benchmarks.selectors runs/proof --output runs/selectors --train
        also after training with a selector, by train.py

A question asks one token for one token, in noise of all ids but the asked keys: the hardest case
for means of keys; text is kinder. For each selector and number of blocks of 64 tokens:

    found    of the answers that standard attention gives right, the share that is right, with its
             95% interval over the rows of all seeds, and the number of these answers
    recall   attention's mass in the blocks that are read, of the mass in the best choice of as
             many, a mean over rows, layers, KV groups and the last queries

    python -m benchmarks.selectors --times 16384 65536
        what choosing costs instead: process CPU time of the selectors next to SDPA, in one run

bf16, one thread, 4 query heads of 128 on one KV head, random queries and keys, so that neighbouring
queries choose different blocks:

    forward and backward  of choice and attention, with the loss of an indexer: how many times as
                          fast as SDPA
    the choice alone      its share of SDPA's forward and backward
    one decoded token     how many times as fast as SDPA or two products, whichever is faster
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from base import durable
from base.flags import Parser
from benchmarks import attention
from data import recall as recall_data
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.evals.intervals import wilson_of_items
from longhaul.evals.retrieval import right_answers
from longhaul.evals.score import Scores, answers
from longhaul.evals.tasks import Sizes, TaskItem, TaskItems, Vocabulary
from longhaul.kinds import KINDS
from longhaul.sparse import block_sparse_attention
from longhaul.sparse.choose import choose_blocks
from longhaul.sparse.engine import in_blocks
from longhaul.sparse.index_loss import block_masses
from longhaul.sparse.layer import BlockConfig
from longhaul.sparse.nsa.branches import Buffers
from model import IGNORE, Attention, Decoder


class Selector(NamedTuple):
    """A row of the table: what chooses, and how it was trained."""

    kind: str
    sizes: dict = {}
    steps: int = 0  # of training, each of one row
    flags: str = ""  # of train.py


ROOT = Path(__file__).parents[1]
STANDARD = "standard"
TRAINED_AT = 16_384  # tokens of a row
SHORTER = 4  # a row that teaches an indexer has so many times fewer
TRAINED_WITH = 16  # blocks
TUNED = "--lr 1e-3 --warmup_steps 4"
TAUGHT = "--lr 6e-2 --schedule cosine:0.01 --warmup_steps 4"
POOLED = {"dense_below": 0, "local": 2}
SELECTORS = {
    "exact": Selector("exact"),
    "bounds, pages of 4": Selector("bounds", {"page": 4}),
    "bounds, pages of 8": Selector("bounds", {"page": 8}),
    "bounds, pages of 16": Selector("bounds"),
    "pooled": Selector("pooled", POOLED),
    "pooled, logsumexp": Selector("pooled", POOLED | {"reduce": "logsumexp"}),
    "mean": Selector("mean"),
}
TRAINED = {
    "bounds, pages of 4, trained": Selector("bounds", {"page": 4}, 24, TUNED),
    "bounds, pages of 8, trained": Selector("bounds", {"page": 8}, 24, TUNED),
    "bounds, pages of 16, trained": Selector("bounds", {}, 24, TUNED),
    "pooled, trained": Selector("pooled", POOLED, 24, TUNED),
    "indexed, 128 wide": Selector("indexed", {}, 100, TAUGHT),
    "indexed, 64 wide": Selector("indexed", {"head_dim": 64}, 100, TAUGHT),
    "indexed, 32 wide": Selector("indexed", {"head_dim": 32}, 100, TAUGHT),
}
TIMED = ["exact", "bounds, pages of 4", "bounds, pages of 16", "pooled", "mean"]
TIMED += ["indexed, 128 wide", "indexed, 64 wide"]
ROWS = SELECTORS | TRAINED
TURNS = 2  # of each side that is timed; one beyond ONCE tokens
ONCE = 16_384

TASK = "multikey-all"
QUERIES = 256  # of a row, the last ones, whose mass is looked at
MODEL = "far"  # the run of a seed that was trained at most lengths
TRAINER = (
    "--data {data} --init_from {run} --output_dir {output} --seed {seed} --max_steps {steps} "
    "--context_length {length} --whole_documents --long_fraction 0.75 "
    "--weight_decay 0 --adam beta2=0.98 --optimizer muon --dtype fp32 --device cpu "
    "--eval_every 0 --save_every 1000 --attention_type {kind} --blocks {blocks}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.times:
        print_times(given.times, [settings(name, given.blocks[0]) for name in TIMED])
        return 0
    if given.proof is None:
        parser.error("give the folder of scripts/long_context_proof.sh, or --times TOKENS")

    seeds = sorted(given.proof.glob(f"seed-*/{MODEL}"))
    if not seeds:
        parser.error(f"{given.proof} has no seed-*/{MODEL}: run scripts/long_context_proof.sh")
    given.output.mkdir(parents=True, exist_ok=True)
    names = ROWS if given.train else SELECTORS
    for part in parts(given.lengths, given.blocks, names):
        for run in seeds:
            measure(run, part, given)
    print(result_table(given.output, given.lengths, given.blocks))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.selectors", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("proof", nargs="?", type=Path, metavar="PROOF", help="folder of the long-context proof")
    add("--output", type=Path, default=Path("runs/selectors"), help="folder of the figures")
    add("--train", action="store_true", help="also train with the selectors of TRAINED")
    add("--lengths", type=int, nargs="+", default=[4096, 16_384], help="tokens of a row")
    add("--blocks", type=int, nargs="+", default=[16, 8, 64], help="blocks that a query reads")
    add("--items", type=int, default=12, help="rows of each figure, with four questions each")
    add(
        "--times", type=int, nargs="+", metavar="TOKENS", help="time rows of so many tokens instead"
    )
    return parser


def parts(
    lengths: Sequence[int],
    blocks: Sequence[int],
    names: Sequence[str],
) -> Iterator[tuple[str, int, int]]:
    """(selector, tokens, blocks) of every figure; standard attention reads all blocks."""
    for length in lengths:
        yield STANDARD, length, 0
    for count in blocks:
        for length in reversed(lengths):
            if 64 * count < length:
                yield from ((name, length, count) for name in names)


def settings(name: str, count: int):
    """The settings object of a selector that reads so many blocks."""
    row = ROWS[name]
    return KINDS[row.kind].config(count=count, **row.sizes)


# ---- what is found, and what is read


def measure(run: Path, part: tuple[str, int, int], given) -> None:
    """Write the figures of a part of a seed, unless they are there."""
    name, length, count = part
    seed = run.parent.name
    file = given.output / f"{seed}, {name}, {length}, {count}.json"
    if file.exists():
        return
    attention_settings = None
    if name != STANDARD:
        attention_settings = settings(name, count)
    if name in TRAINED:
        run = trained(run, name, given.output)
    model = load_model(verified(newest(run)), attention=attention_settings)
    meter = Meter(model, attention_settings)
    items = questions(length, given.items, seed_of(run), model.config.vocab_size)
    right = [meter.answers(item) for item in items]
    recall = float(np.mean(meter.shares or [1.0]))
    durable.write_json(file, {"answers": right, "recall": recall})
    hits = [hit for row in right for _, hit in row]
    print(f"{file.stem}: {sum(hits)} of {len(hits)}, recall {recall:.3f}", flush=True)


def trained(run: Path, name: str, folder: Path) -> Path:
    """The run that trained with a selector from a model of standard attention; it is made, or goes
    on, unless it has ended.
    """
    row = ROWS[name]
    output = folder / run.parent.name / name.replace(", ", "-").replace(" ", "-")
    learner = KINDS[row.kind].learner
    blocks = " ".join(
        f"{field}={value}" for field, value in (row.sizes | {"count": TRAINED_WITH}).items()
    )
    flags = TRAINER.format(
        data=run.parent / "data-far",
        run=run,
        output=output,
        seed=seed_of(run),
        steps=row.steps,
        length=TRAINED_AT // (SHORTER if learner else 1),
        kind=row.kind,
        blocks=blocks,
    )
    flags = f"{flags} {row.flags}"
    if learner:
        flags += f" --indexer_warmup {row.steps - 1}"
    subprocess.run([sys.executable, str(ROOT / "train.py"), *flags.split()], check=True)
    return output


def seed_of(run: Path) -> int:
    """The number in the name of its folder."""
    return int(run.parent.name.split("-")[1])


def questions(length: int, items: int, seed: int, ids: int) -> TaskItems:
    """The rows of a seed, the same for all selectors."""
    vocabulary = Vocabulary.of_recall(ids, **recall_data.task())
    return TaskItems(TASK, length, items, vocabulary, Sizes(), seed)


class Meter:
    """Asks a model, and sees as the `rows` of its forward what attention reads."""

    def __init__(self, model: Decoder, sizes=None):
        self.model = model
        self.sizes = sizes  # of the selector; None: attention reads everything
        self.shares: list[float] = []

    @torch.no_grad()
    def answers(self, item: TaskItem) -> list[tuple[float, bool]]:
        """Depth of each answer, and whether it is right."""
        tokens_BT, labels_BT = (x.long() for x in item.item[:2])
        positions = torch.arange(item.length)[None]
        nll_n, hit_n = self.model(tokens_BT, labels_BT, positions, head=_asked, rows=self)
        return right_answers(item, Scores(nll_n, hit_n.bool()))

    def attend(self, layer: Attention, inputs: Sequence[Tensor], rope) -> Tensor:
        """As without `rows`."""
        if self.sizes is not None:
            self.shares.append(share_of_best(self.sizes, *inputs))
        return layer.attend_document(*inputs)


def _asked(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    asked_n = (labels_N != IGNORE).nonzero()[:, 0]
    return answers(hidden_ND[asked_n], weight_VD, labels_N[asked_n])


def share_of_best(
    sizes,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    q_BTGE: Tensor | None = None,
    k_BS1E: Tensor | None = None,
) -> float:
    """Of the last queries of a row; the inputs are those of a layer's attention."""
    late_BCHK = q_BTHK[:, -QUERIES:]
    compared = late_BCHK, k_BSGK
    if q_BTGE is not None:
        compared = q_BTGE[:, -QUERIES:], k_BS1E.expand(-1, -1, q_BTGE.shape[2], -1)
    chosen_BCGn = choose_blocks(sizes, *compared).long()
    mass_BCGN = masses_of_blocks(late_BCHK, k_BSGK, sizes.block)
    best_BCGn = mass_BCGN.topk(min(sizes.count, mass_BCGN.shape[-1])).values
    read_BCGn = mass_BCGN.gather(-1, chosen_BCGn.clamp_min(0))
    read_BCGn.masked_fill_(chosen_BCGn < 0, 0)
    return float(read_BCGn.sum() / best_BCGn.sum())


def masses_of_blocks(q_BCHK: Tensor, k_BSGK: Tensor, block: int) -> Tensor:
    """[B, C, G, N]: full attention's probability of each block for the last C queries."""
    C, S = q_BCHK.shape[1], k_BSGK.shape[1]
    position_C = torch.arange(S - C, S)
    buffers = Buffers(q_BCHK)
    rows = []
    for q_CHK, k_SGK in zip(q_BCHK, k_BSGK, strict=True):
        q_CGMK = q_CHK.unflatten(1, (k_SGK.shape[1], -1)).float()
        groups = zip(q_CGMK.unbind(1), k_SGK.unbind(1), strict=True)
        masses = []
        for q_CMK, k_SK in groups:
            k_NlK = in_blocks(k_SK, block, torch.float32)
            masses.append(block_masses(q_CMK, k_NlK, position_C, buffers))
        rows.append(torch.stack(masses, dim=1))
    return torch.stack(rows)


# ---- the tables


def result_table(folder: Path, lengths: Sequence[int], blocks: Sequence[int]) -> str:
    """Found, its interval and recall of every selector, over the seeds."""
    columns = [(length, count) for length in lengths for count in blocks if 64 * count < length]
    lines = ["| selector | " + " | ".join(f"{n:,}: {c} blocks" for n, c in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name in ROWS:
        cells = [cell(folder, name, length, count) for length, count in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(folder: Path, name: str, length: int, count: int) -> str:
    """Found and recall in words."""
    seeds = figures_of(folder, name, length, count)
    if not seeds:
        return "-"
    recall = np.mean([figures["recall"] for figures, _ in seeds.values()])
    return f"{found([*seeds.values()])}, recall {recall:.2f}"


def figures_of(folder: Path, name: str, length: int, count: int) -> dict[str, tuple[dict, dict]]:
    """Seed -> (figures of the selector, those of standard attention)."""
    seeds = {}
    for file in sorted(folder.glob(f"seed-*, {name}, {length}, {count}.json")):
        seed = file.name.split(",")[0]
        dense = folder / f"{seed}, {STANDARD}, {length}, 0.json"
        seeds[seed] = json.loads(file.read_text()), json.loads(dense.read_text())
    return seeds


def found(pairs: Sequence[tuple[dict, dict]]) -> str:
    """Of the answers that standard attention gives right, the share that is right, its 95% interval
    and their number.
    """
    hits, asked = [], []
    for figures, dense in pairs:
        for row, dense_row in zip(figures["answers"], dense["answers"], strict=True):
            both = zip(row, dense_row, strict=True)
            known = [right for (_, right), (_, dense_right) in both if dense_right]
            hits.append(sum(known))
            asked.append(len(known))
    if not any(asked):
        return "-"
    low, high = wilson_of_items(hits, asked)
    return f"{sum(hits) / sum(asked):.2f} ({low:.2f} to {high:.2f}; {sum(asked)})"


# ---- what choosing costs


def print_times(lengths: Sequence[int], selectors: Sequence[BlockConfig]) -> None:
    """The lines of each length, as they are measured."""
    print(f"| tokens | what | SDPA | NSA | {' | '.join(TIMED)} |")
    print("|---" * (len(TIMED) + 4) + "|")
    for length in lengths:
        for line in timed_rows(length, selectors):
            print(line, flush=True)


def timed_rows(length: int, selectors: Sequence[BlockConfig]) -> list[str]:
    """The lines of a length."""
    tensors = attention.inputs(length, torch.bfloat16)
    index_keys = attention.indexer_inputs(length, torch.bfloat16)
    calls = [calls_of(sizes, tensors, index_keys) for sizes in selectors]
    train, choose, decode = map(list, zip(*calls, strict=True))
    whole = [partial(attention.train, f, tensors) for f in (attention.sdpa, attention.nsa)]
    turns = TURNS if length <= ONCE else 1
    dense, *others = attention.best_of_turns(whole + train, turns)
    ratios = [f"{dense / one:.1f}x" for one in others]
    chosen = attention.best_of_turns(choose, turns)
    shares = ["", *(f"{one / dense:.3f}" for one in chosen)]

    sdpa, nsa, _ = attention.decode_row(length, "bf16")
    tokens = attention.best_of_turns(decode, 40)
    decoded = [f"{sdpa / one:.2f}x" for one in (nsa, *tokens)]
    return [
        f"| {length:,} | forward and backward | {dense:.1f} s | {' | '.join(ratios)} |",
        f"| | the choice alone, of SDPA's time | | {' | '.join(shares)} |",
        f"| | one decoded token | {sdpa * 1e3:.2f} ms | {' | '.join(decoded)} |",
    ]


def calls_of(
    sizes: BlockConfig,
    tensors: Sequence[Tensor],
    index_keys: Sequence[Tensor],
) -> tuple[Callable, Callable, Callable]:
    """Training with a selector, its choice, and a decoded token, which has the summary of the keys
    at hand.
    """
    q, k, v, *_ = tensors
    compared, read = [q, k], selected
    if KINDS[sizes.name].learner:
        compared = [x[..., : sizes.head_dim].detach().requires_grad_() for x in index_keys]
        read = attention.indexed
    inputs = [q, k, v, *compared]
    summary = None
    if sizes.span()[0]:
        with torch.no_grad():
            summary = sizes.summarise(k)
    return (
        partial(attention.train, partial(read, sizes=sizes), inputs),
        partial(choose_blocks, sizes, *compared),
        partial(decode, sizes, inputs, summary),
    )


@torch.no_grad()
def decode(sizes: BlockConfig, inputs: Sequence[Tensor], summary: Tensor | None) -> Tensor:
    """The last query's attention."""
    q, k, v, *compared = inputs
    chosen = choose_blocks(sizes, compared[0][:, -1:], compared[1], summary)
    return block_sparse_attention(q[:, -1:], k, v, chosen, sizes.block)[0]


def selected(tensors: Sequence[Tensor], sizes: BlockConfig) -> Tensor:
    """Choice and attention."""
    q, k, v, *_ = tensors
    return block_sparse_attention(q, k, v, choose_blocks(sizes, q, k), sizes.block)[0]


if __name__ == "__main__":
    sys.exit(main())

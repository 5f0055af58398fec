"""Which blocks to read: the selectors compared on models that retrieve, at equal numbers of blocks.

    python -m benchmarks.selectors runs/proof --output runs/selectors
        the models of scripts/long_context_proof.sh; one that is killed goes on

A question asks one token for one token, in noise of all ids but the asked keys: the hardest case
for means of keys; text is kinder. Nothing is trained, the weights are those of standard attention.
For each selector and number of blocks of 64 tokens:

    found    share of the answers that are right, of those that standard attention gives right
    recall   attention's mass in the blocks that are read, of the mass in the best choice of as
             many, a mean over layers, KV groups and the last queries of a row

With --times, the seconds of process CPU time of choice and attention, forward and backward, next to
SDPA (bf16, one thread, 4 query heads of 128 on one KV head, random queries and keys).
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from base import durable
from base.flags import Parser
from benchmarks import attention
from data import recall as recall_data
from longhaul import kernels
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.evals.tasks import Sizes, TaskItems, Vocabulary
from longhaul.kinds import KINDS
from longhaul.sparse import block_sparse_attention
from longhaul.sparse.choose import choose_blocks
from longhaul.sparse.engine import in_blocks
from longhaul.sparse.index_loss import block_masses
from longhaul.sparse.nsa.branches import Buffers

SELECTORS = {  # name -> (kind, what its settings have otherwise)
    "exact": ("exact", {}),
    "bounds, pages of 16": ("bounds", {}),
    "bounds, pages of 4": ("bounds", {"page": 4}),
    "pooled": ("pooled", {"dense_below": 0, "local": 2}),
    "pooled, logsumexp": ("pooled", {"dense_below": 0, "local": 2, "reduce": "logsumexp"}),
    "mean": ("mean", {}),
}
TASK = "multikey-all"
QUERIES = 256  # of a row, the last ones, whose mass is looked at
MODEL = "far"  # the run of a seed that was trained at most lengths


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.times:
        print(time_table(given.times, given.blocks[0]))
        return 0
    if given.proof is None:
        parser.error("give the folder of scripts/long_context_proof.sh, or --times TOKENS")

    seeds = sorted(given.proof.glob(f"seed-*/{MODEL}"))
    if not seeds:
        parser.error(f"{given.proof} has no seed-*/{MODEL}: run scripts/long_context_proof.sh")
    given.output.mkdir(parents=True, exist_ok=True)
    for run in seeds:
        for part in parts(given.lengths, given.blocks):
            measure(run, part, given)
    print(result_table(given.output, given.lengths, given.blocks))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m benchmarks.selectors", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("proof", nargs="?", type=Path, metavar="PROOF", help="folder of the long-context proof")
    add("--output", type=Path, default=Path("runs/selectors"), help="folder of the figures")
    add("--lengths", type=int, nargs="+", default=[4096, 16_384], help="tokens of a row")
    add("--blocks", type=int, nargs="+", default=[16, 8, 64], help="blocks that a query reads")
    add("--items", type=int, default=12, help="rows of each figure, with four questions each")
    add(
        "--times", type=int, nargs="+", metavar="TOKENS", help="time rows of so many tokens instead"
    )
    return parser


def parts(lengths: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(selector, tokens, blocks) of every figure; standard attention reads all blocks."""
    for length in lengths:
        yield "standard", length, 0
        for count in blocks:
            if 64 * count < length:
                yield from ((name, length, count) for name in SELECTORS)


def settings(name: str, count: int):
    """The settings object of a selector that reads so many blocks."""
    kind, others = SELECTORS[name]
    return KINDS[kind].config(count=count, **others)


# ---- what is found, and what is read


def measure(run: Path, part: tuple[str, int, int], given) -> None:
    """Write the figures of a part of a seed, unless they are there."""
    name, length, count = part
    seed = run.parent.name
    file = given.output / f"{seed}, {name}, {length}, {count}.json"
    if file.exists():
        return
    found = dict(retrieval=retrieval(run, name, length, count, given.items))
    if count:
        found["recall"] = recall(run, name, length, count)
    durable.write_json(file, found)
    print(f"{file.stem}: {found}", flush=True)


def retrieval(run: Path, name: str, length: int, count: int, items: int) -> float:
    """The share of right answers, by scripts.evaluate."""
    command = [sys.executable, "-m", "scripts.evaluate", "--checkpoint", str(run)]
    command += ["--evals", "retrieval", "--tasks", TASK, "--lengths", str(length)]
    command += ["--items", str(items), "--device", "cpu"]
    if count:
        kind, others = SELECTORS[name]
        sizes = others | {"count": count}
        command += ["--attention_type", kind, "--blocks"]
        command += [f"{field}={value}" for field, value in sizes.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "eval.json"
        subprocess.run([*command, "--json", str(file)], stdout=subprocess.DEVNULL, check=True)
        (score,) = json.loads(file.read_text())["retrieval"]["scores"]
    return score["score"]


@torch.no_grad()
def recall(run: Path, name: str, length: int, count: int, rows: int = 2) -> float:
    """Mass that is read, of the best choice's."""
    checkpoint = verified(newest(run))
    model = load_model(checkpoint)
    shares: list[float] = []
    sizes = settings(name, count)

    def attend(q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        shares.append(share_of_best(sizes, q_BTHK, k_BSGK))
        return kernels.attention(q_BTHK, k_BSGK, v_BSGK)

    for layer in model.layers:
        layer.attention.ops = replace(layer.attention.ops, attention=attend)
    vocabulary = Vocabulary.of_recall(model.config.vocab_size, **recall_data.task())
    items = TaskItems(TASK, length, rows, vocabulary, Sizes(), seed=1)
    for item in items:
        model(item.item.tokens_BT.long())
    return sum(shares) / len(shares)


def share_of_best(sizes, q_BTHK: Tensor, k_BSGK: Tensor) -> float:
    """Of the last queries of a row."""
    late_BCHK = q_BTHK[:, -QUERIES:]
    chosen_BCGn = choose_blocks(sizes, late_BCHK, k_BSGK).long()
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


# ---- time


def time_table(lengths: Sequence[int], count: int) -> str:
    """Seconds of SDPA, and how many times as fast the others are."""
    lines = ["| tokens | SDPA | " + " | ".join(SELECTORS) + " |"]
    lines.append("|---" * (len(SELECTORS) + 2) + "|")
    for length in lengths:
        tensors = attention.inputs(length, torch.bfloat16)[:3]
        sides = [partial(attention.train, attention.sdpa, tensors)]
        for name in SELECTORS:
            read = partial(selected, settings(name, count))
            sides.append(partial(attention.train, read, tensors))
        times = attention.best_of_turns(sides, 2)
        ratios = [f"{times[0] / one:.1f}x" for one in times[1:]]
        lines.append(f"| {length:,} | {times[0]:.1f} s | {' | '.join(ratios)} |")
    return "\n".join(lines)


def selected(sizes, tensors: Sequence[Tensor]) -> Tensor:
    """Choice and attention."""
    q, k, v = tensors
    return block_sparse_attention(q, k, v, choose_blocks(sizes, q, k), sizes.block)[0]


# ---- the table


def result_table(folder: Path, lengths: Sequence[int], blocks: Sequence[int]) -> str:
    """Found and recall of every selector, means over the seeds."""
    columns = [(length, count) for length in lengths for count in blocks if 64 * count < length]
    lines = ["| selector | " + " | ".join(f"{n:,}: {c} blocks" for n, c in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name in SELECTORS:
        cells = [cell(folder, name, length, count) for length, count in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(folder: Path, name: str, length: int, count: int) -> str:
    """Found and recall in words; the lowest and highest seed if there are several."""
    found, recalls = [], []
    for file in sorted(folder.glob(f"seed-*, {name}, {length}, {count}.json")):
        seed = file.name.split(",")[0]
        dense = json.loads((folder / f"{seed}, standard, {length}, 0.json").read_text())
        figures = json.loads(file.read_text())
        found.append(figures["retrieval"] / dense["retrieval"])
        recalls.append(figures["recall"])
    if not found:
        return "-"
    spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    mean = sum(found) / len(found)
    return f"{mean:.2f}{spread}, recall {sum(recalls) / len(recalls):.2f}"


if __name__ == "__main__":
    sys.exit(main())

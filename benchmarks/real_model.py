"""What docs/REAL_MODEL.md says of SmolLM2: `python -m benchmarks.real_model OUTPUT`, where
`python -m scripts.real_model OUTPUT` has made the model.

    --only equal text long    some of its parts
    --page                    print the tables, draw the pictures of docs/, measure nothing

Each figure is a file of OUTPUT/figures. One that is there is not measured again, so a run that was
killed goes on. Two threads, fp32.

**Text and needles in one pass.** A row is a passage of one held-out document in which eight pairs
of a key (four random ids) and a value (one) are hidden, and asked for at the end. The loss counts
the tokens before the questions, in sixteen parts of the row by position. Two ways to read are
compared on the same rows, and intervals are drawn over documents.
"""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from base import durable
from base.flags import Parser
from data.dataset import open_dataset
from footprint.answers import svg
from footprint.answers.svg import Scale
from lab.analysis.patching import Pairs, Patching
from longhaul import qwen3
from longhaul.checkpoint.load import latest, load_model
from longhaul.evals.intervals import paired_bootstrap, wilson_of_items
from longhaul.evals.score import Item, ModelScorer
from longhaul.evals.tasks import Sizes, TaskItem, TaskItems, Vocabulary
from longhaul.generate import generate
from longhaul.kinds import read_with
from longhaul.sparse.indexer import LEARNER
from longhaul.sparse.layer import BlockConfig
from model import IGNORE, Decoder, ModelConfig

ROOT = Path(__file__).parents[1]
KEYS = Sizes(keys=8, asked=8)
PARTS = 16  # of a row, by position
THREADS = 2


class Reading(NamedTuple):
    """How the model reads a row: attention and rotary positions."""

    kind: str = "standard"
    blocks: str = ""
    yarn: float = 1.0


DENSE = "standard"
POOLED = "dense_below=0 local=2"
BOUNDS = "bounds, page=4, 64 blocks of 16"
INDEXER = "count=64 block=16 local=8 head_dim=64"
READINGS = {
    DENSE: Reading(),
    "exact": Reading("exact", "count=16"),
    "exact, 32 blocks of 32": Reading("exact", "count=32 block=32"),
    "exact, 64 blocks of 16": Reading("exact", "count=64 block=16 local=8"),
    "exact, 128 blocks of 8": Reading("exact", "count=128 block=8 local=16"),
    "exact, 8 blocks": Reading("exact", "count=8"),
    "exact, 32 blocks": Reading("exact", "count=32"),
    "exact, 32 blocks of 16": Reading("exact", "count=32 block=16 local=8"),
    "exact, 128 blocks of 16": Reading("exact", "count=128 block=16 local=8"),
    "bounds, page=16": Reading("bounds", "count=16"),
    "bounds, page=4": Reading("bounds", "count=16 page=4"),
    BOUNDS: Reading("bounds", "count=64 block=16 local=8 page=4"),
    "bounds, page=16, 64 blocks of 16": Reading("bounds", "count=64 block=16 local=8"),
    "bounds, page=16, 128 blocks of 16": Reading("bounds", "count=128 block=16 local=8"),
    "pooled": Reading("pooled", f"count=16 {POOLED}"),
    "pooled, logsumexp": Reading("pooled", f"count=16 {POOLED} reduce=logsumexp"),
    "mean": Reading("mean", "count=16"),
    "indexed, 64 blocks of 16": Reading("indexed", INDEXER),
    "yarn": Reading(yarn=2.0),
}


EQUAL_TOKENS, GREEDY_TOKENS = 8192, 200
PROMPT = "The history of long books begins with"
NAMES = [("Mary", "John"), ("Anna", "Paul"), ("Tom", "Lisa"), ("Emma", "Mark")]
TOLD = "When {0} and {1} went to the store, {2} gave a drink to"

TEXT = [(name, 4096, 8) for name in READINGS if name != "yarn"]
TEXT += [(name, 8192, 4) for name in (DENSE, "exact, 64 blocks of 16", BOUNDS)]
LONGEST = 16_384  # tokens
LONG = [(DENSE, LONGEST, 3), ("yarn", LONGEST, 3)]
DEPTHS = [(DENSE, 4096), ("exact, 128 blocks of 8", 4096), (DENSE, 8192), ("yarn", LONGEST)]

# their words are kept, and the page quotes them; {folder} has what scripts.real_model made
COMMANDS = {
    "precision": """-m lab.run_full_analysis --checkpoint {folder}/model --data {folder}/data
        --compare float32,bfloat16,float16 --layers 0,15,29 --num_samples 4 --batch_size 1
        --context_length 1024 --sae_tokens 20000 --skip_patching --out {out}""",
    "evaluate": """-m scripts.evaluate --checkpoint {folder}/model --data {folder}/data
        --context_length 4096 --evals loss --batches 2""",
    "train": """train.py --init_from {folder}/model --data {folder}/data --context_length 2048
        --batch_size 1 --gradient_accumulation_steps 1 --max_steps 3 --warmup_steps 1 --lr 1e-5
        --eval_every 0 --dtype fp32 --output_dir {out}""",
    "gain": """-m scripts.evaluate --checkpoint {folder}/model --data {folder}/data
        --context_length 8192 --evals gain --batches 6 --output {out}""",
    "indexer": f"""train.py --init_from {{folder}}/model --data {{folder}}/data
        --attention_type indexed --blocks {INDEXER} --indexer_warmup 60 --context_length 1024
        --batch_size 1 --gradient_accumulation_steps 1 --max_steps 61 --warmup_steps 5 --lr 1e-3
        --eval_every 0 --dtype fp32 --output_dir {{out}}""",
    "asked": """-m data.prepare --input {folder}/sums.jsonl --text_field question
        --answer_field answer --tokenizer {folder}/model --val_fraction 0.2 --workers 1
        --output {out}""",
    "intuitor": """-m lab.intuitor --checkpoint {folder}/model --data {folder}/runs/asked
        --context_length 64 --max_response_length 16 --group_size 4 --batch_size 2
        --gradient_accumulation_steps 1 --max_steps 30 --warmup_steps 3 --lr 1e-5
        --eval_every 30 --dtype fp32 --output_dir {out}""",
    "reward": """-m lab.reward --checkpoint {folder}/model --data {folder}/sums.jsonl
        --batch_size 1 --steps 100 --output {out}""",
    "grade": """-m lab.grade --checkpoint {folder}/model --reward_checkpoint {folder}/runs/reward
        --data {folder}/runs/asked --context_length 40 --max_new_tokens 4 --batch_size 1
        --gradient_accumulation_steps 1 --max_steps 5 --warmup_steps 1 --lr 1e-5 --eval_every 0
        --dtype fp32 --output_dir {out}""",
}


# ---- text and needles


def measure(folder: Path, name: str, tokens: int, rows: int) -> None:
    """Read what is missing of so many documents of `tokens` tokens each."""
    row = f"{name}, {tokens}"
    found = figures(folder, row) or {"losses": [], "hits": []}
    missing = range(len(found["losses"]), rows)
    if not missing:
        return

    begun = time.monotonic(), time.process_time()
    model = opened(folder, READINGS[name])
    for index in missing:
        item = question(folder, index, tokens)
        losses, hits = scored(model, item)
        found["losses"].append(losses)
        found["hits"].append(hits)
        keep(folder, row, found)
    wall, cpu = time.monotonic() - begun[0], time.process_time() - begun[1]
    loss, right = np.mean(found["losses"]), np.sum(found["hits"])
    print(f"{row}: {loss:.4f} nats, {right} found; {wall:.0f} s, {cpu:.0f} of CPU", flush=True)


def opened(folder: Path, reading: Reading) -> Decoder:
    """The model that reads so."""
    changed = {"attention": settings(folder, reading).attention}
    if reading.yarn > 1:
        changed |= dict(rope_scaling="yarn", rope_factor=reading.yarn)
    weights = folder / "model"
    model = qwen3.from_hf(weights, dtype=torch.float32, compute_dtype="float32", **changed)
    if reading.kind == "indexed":
        give_indexer(model, folder)
    return model


def give_indexer(model: Decoder, folder: Path) -> None:
    """Fill the model's indexers by those of the run, which may have trained more than them."""
    checkpoint = latest(folder / "runs" / "indexer")
    if checkpoint is None:
        figures = folder / "figures" / "indexer.json"
        raise SystemExit(f"no checkpoint in {folder}/runs/indexer: remove {figures} to teach again")
    taught = load_model(checkpoint).state_dict()
    learned = {name: value for name, value in taught.items() if LEARNER in name.split(".")}
    model.load_state_dict(learned, strict=False)


def settings(folder: Path, reading: Reading) -> ModelConfig:
    """Those of the model with the attention of a reading."""
    config = ModelConfig(**qwen3.read_config(folder / "model"))
    if reading.kind == "standard":
        return config
    return read_with(config, reading.kind, reading.blocks.split())


def question(folder: Path, index: int, tokens: int) -> TaskItem:
    """A passage of the held-out document number `index` of those that are long enough."""
    dataset = open_dataset(folder / "data")
    split = dataset.split("val")
    document = np.flatnonzero(split.lengths > tokens)[index]
    text = split.read(document, 0, int(split.lengths[document]))
    vocabulary = Vocabulary.of_text(text, dataset.vocab_size, excluded=[dataset.eod_id])
    return TaskItems("multikey", tokens, 1, vocabulary, KEYS, seed=int(document))[0]


def scored(model: Decoder, row: TaskItem) -> tuple[list[float], list[int]]:
    """Mean loss of each part of the row, and whether each answer is found."""
    tokens_BT, answers_BT = row.item.tokens_BT, row.item.labels_BT
    asked_T = answers_BT[0] != IGNORE
    labels_BT = tokens_BT.roll(-1, dims=1)
    labels_BT[:, asked_T] = answers_BT[:, asked_T]
    scores = ModelScorer(model, "cpu").score(Item(tokens_BT, labels_BT), hits=True)
    text = int(asked_T.nonzero()[0]) - Vocabulary.key_width
    edges = np.linspace(0, text, PARTS + 1).astype(int)
    losses = [float(scores.nll_BT[0, a:b].mean()) for a, b in zip(edges, edges[1:], strict=False)]
    return losses, scores.hit_BT[0, asked_T].int().tolist()


# ---- the same numbers as transformers


@torch.no_grad()
def equal(folder: Path) -> dict:
    """How far logits are from those of transformers, and whether texts and exports are the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ours = opened(folder, READINGS[DENSE])
    tokens_BT = question(folder, 0, EQUAL_TOKENS).item.tokens_BT
    expected_TV = theirs(tokens_BT, use_cache=False).logits[0]
    found_TV = ours(tokens_BT)[0]
    figures = {"largest logit": float(expected_TV.abs().max())}
    figures["largest difference"] = float(found_TV.sub_(expected_TV).abs().max())
    every_block = Reading("exact", f"count={EQUAL_TOKENS // 64}")
    found_TV = opened(folder, every_block)(tokens_BT)[0]
    figures["largest difference, exact over all blocks"] = float(
        found_TV.sub_(expected_TV).abs().max()
    )
    del expected_TV, found_TV

    prompt = AutoTokenizer.from_pretrained(folder / "model")(PROMPT)["input_ids"]
    written_BT = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=GREEDY_TOKENS, eos_token_id=None
    )
    vocabulary = ours.config.vocab_size
    text = [*generate(ours, prompt, GREEDY_TOKENS, vocab_size=vocabulary, temperature=0)]
    expected = written_BT[0, len(prompt) :].tolist()
    figures["greedy tokens that are equal"] = sum(map(int.__eq__, text, expected))
    figures["tensors whose bits an export keeps"] = exported_tensors(folder)
    return figures


def exported_tensors(folder: Path) -> str:
    """Of all tensors, those that an import and an export give back."""
    convert = [sys.executable, "-m", "scripts.convert_qwen3", "--output"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run, exported = f"{place}/run", f"{place}/hf"
        subprocess.run([*convert, run, "--input", str(folder / "model")], cwd=ROOT, check=True)
        subprocess.run([*convert, exported, "--checkpoint", run], cwd=ROOT, check=True)
        before = load_file(folder / "model" / "model.safetensors")
        after = load_file(f"{place}/hf/model.safetensors")
        same = [name for name in before if torch.equal(before[name], after[name])]
        return f"{len(same)} of {len(before)}"


# ---- the laboratory


def names(folder: Path) -> dict:
    """Which parts make the model complete a sentence with the name that stood once: indirect object
    identification (Wang et al. 2022, arXiv 2211.00593). 1: a part alone brings the answer back.
    """
    from transformers import AutoTokenizer

    spell = AutoTokenizer.from_pretrained(folder / "model")
    model = opened(folder, READINGS[DENSE])
    both = [*NAMES, *(pair[::-1] for pair in NAMES)]
    clean = [spell(TOLD.format(a, b, b))["input_ids"] for a, b in both]
    corrupt = [spell(TOLD.format(a, b, a))["input_ids"] for a, b in both]
    asked = [[spell(f" {name}")["input_ids"][0] for name in pair] for pair in both]
    answer_B, foil_B = torch.tensor(asked).T
    pairs = Pairs(torch.tensor(clean), torch.tensor(corrupt), answer_B, foil_B)
    begun = time.process_time()
    patching = Patching(model, pairs, most_spans=len(clean[0]))
    effects = patching.effects(range(model.config.num_layers))
    found = dict(effects.by_site())
    return {
        "difference of logits": [effects.clean, effects.corrupt],
        "largest": [[*site, round(found[site], 3)] for site in effects.top()],
        "CPU seconds": time.process_time() - begun,
    }


def told(folder: Path, name: str) -> dict:
    """What a command prints; it must succeed."""
    make_sums(folder / "sums.jsonl")
    out = folder / "runs" / name
    shutil.rmtree(out, ignore_errors=True)  # of a command that was killed
    words = [word.format(folder=folder, out=out) for word in COMMANDS[name].split()]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return {"command": f"python {' '.join(words)}", "printed": done.stdout.splitlines()}


def make_sums(file: Path) -> None:
    """Questions with answers, and texts with labels, one a line."""
    rows = []
    for a, b in itertools.product(range(1, 10), repeat=2):
        question, text = f"Question: what is {a} plus {b}? Answer:", f"{a} is more than {b}"
        rows.append(dict(question=question, answer=f" {a + b}", text=text, label=int(a > b)))
    durable.write_bytes(file, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


# ---- the page


def page(folder: Path) -> str:
    """The tables of what was measured."""
    parts = [json.dumps(figures(folder, name), indent=1) for name in (*CHECKS, *COMMANDS)]
    for tokens in sorted({tokens for _, tokens, _ in ROWS}):
        parts += [f"\n{tokens:,} tokens", reading_table(folder, tokens)]
    parts += [position_table(folder), *depth_lines(folder)]
    return "\n".join(parts)


def figures(folder: Path, name: str) -> dict:
    """What was measured under a name; nothing before it was."""
    file = folder / "figures" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def keep(folder: Path, name: str, found: dict) -> None:
    """Write what was measured."""
    durable.make_folder(folder / "figures")
    durable.write_json(folder / "figures" / f"{name}.json", found)


def reading_table(folder: Path, tokens: int) -> str:
    """Loss over the second half of a row, and needles, of each reading next to the dense one: of
    the needles that this finds, the share that the reading finds, too.
    """
    dense = figures(folder, f"{DENSE}, {tokens}")
    if not dense:
        return "not measured"
    lines = ["| reading | keys of a query | loss | perplexity | needles |", "|---" * 5 + "|"]
    for name, reading in READINGS.items():
        found = figures(folder, f"{name}, {tokens}")
        if not found:
            continue
        loss_D, dense_D, right_DN, known_DN = paired(found, dense)
        change = float((loss_D - dense_D).mean())
        half = paired_bootstrap(loss_D, dense_D).half()
        both_D, asked_D = (right_DN & known_DN).sum(1), known_DN.sum(1)
        share = both_D.sum() / max(1, asked_D.sum())
        needles = wilson_of_items(both_D, asked_D)
        keys = visible_keys(settings(folder, reading).attention, torch.arange(tokens // 2, tokens))
        lines.append(
            f"| {name} | {keys:,.0f} | {change:+.4f}{half} | {np.expm1(change):+.2%} | "
            f"{share:.2f} ({needles.low:.2f} to {needles.high:.2f}; "
            f"{asked_D.sum()}) |"
        )
    lines.append(
        f"dense: {late_losses(dense).mean():.4f} nats over {len(dense['losses'])} documents; it "
        f"finds {np.sum(dense['hits'])} of {np.size(dense['hits'])} needles"
    )
    return "\n".join(lines)


def paired(found: dict, dense: dict) -> tuple[np.ndarray, ...]:
    """Late losses of both, and which needles each finds, of the documents that both have read."""
    documents = min(len(one["losses"]) for one in (found, dense))
    losses = [late_losses(one)[:documents] for one in (found, dense)]
    hits = [np.array(one["hits"])[:documents] for one in (found, dense)]
    return *losses, *hits


def visible_keys(sizes, position_T: Tensor) -> float:
    """Mean number of keys that queries at these positions read; all, without a choice."""
    keys_T = position_T + 1
    if isinstance(sizes, BlockConfig):
        chosen_T = (sizes.count - 1) * sizes.block + position_T % sizes.block + 1
        keys_T = torch.where(position_T < sizes.dense_tokens, keys_T, chosen_T)
    return float(keys_T.float().mean())


def late_losses(found: dict) -> np.ndarray:
    """Of each document, the loss over the second half of the row."""
    return np.array(found["losses"])[:, PARTS // 2 :].mean(1)


def position_table(folder: Path) -> str:
    """Loss by position of the longest rows."""
    lines = []
    for name, loss_P in long_losses(folder).items():
        lines.append(f"| {name} | {' | '.join(f'{loss:.3f}' for loss in loss_P)} |")
    return "\n".join(lines)


def depth_lines(folder: Path) -> Iterator[str]:
    """Of the needles in each quarter of the noise, from its start, how many a reading finds."""
    for name, tokens in DEPTHS:
        hits_DN = figures(folder, f"{name}, {tokens}").get("hits", [])
        rows = [question(folder, index, tokens) for index in range(len(hits_DN))]
        depth_n = np.array([answer.depth for row in rows for answer in row.answers])
        quarter_n = np.minimum(4 * depth_n, 3).astype(int)
        found = np.bincount(quarter_n, weights=np.ravel(hits_DN), minlength=4).astype(int)
        asked = np.bincount(quarter_n, minlength=4)
        counts = ", ".join(f"{a} of {b}" for a, b in zip(found, asked, strict=True))
        yield f"by depth: {name}, {tokens:,} tokens: {counts}"


def long_losses(folder: Path) -> dict[str, np.ndarray]:
    """Of each reading of the longest rows, the mean loss of their parts."""
    rows = {name: figures(folder, f"{name}, {LONGEST}") for name, *_ in LONG}
    return {name: np.mean(found["losses"], axis=0) for name, found in rows.items() if found}


# ---- the pictures

LEFT, RIGHT = 60, 560
TOP, FLOOR = 20, 340
PICTURES = ROOT / "docs"


def draw_text(folder: Path) -> None:
    """What each reading of 4,096 tokens costs on text, and finds."""
    dense = figures(folder, f"{DENSE}, 4096")
    points = {}
    for name in READINGS:
        found = figures(folder, f"{name}, 4096")
        if found and name != DENSE:
            loss_D, dense_D, right_DN, known_DN = paired(found, dense)
            change = np.expm1((loss_D - dense_D).mean())
            points[name] = 100 * change, 100 * (right_DN & known_DN).sum() / known_DN.sum()
    if not points:
        return
    x = Scale.around([cost for cost, _ in points.values()], LEFT, RIGHT, base=2)
    y = Scale(0, 100, FLOOR, TOP)
    parts = [svg.rows(y, LEFT, RIGHT), svg.columns(x, FLOOR, TOP)]
    parts.append(svg.text("% of needles that full attention finds", LEFT + 6, TOP - 6, ""))
    parts.append(svg.text("% more perplexity", (LEFT + RIGHT) / 2, FLOOR + 38, "middle"))
    for number, (name, (cost, share)) in enumerate(points.items(), 1):
        words = f"{name}: {cost:.2f}% more perplexity, {share:.0f}% of needles"
        parts.append(svg.dot(x(cost), y(share), words, r=5, fill=svg.COLOURS[0]))
        parts.append(svg.text(str(number), x(cost) + 8, y(share) + 4, ""))
        parts.append(svg.text(f"{number}  {name}", RIGHT + 16, TOP + 20 * number, ""))
    label = "Needles found against the cost in perplexity of each sparse reading"
    save("real-text", svg.picture(860, 390, label, parts))


def draw_length(folder: Path) -> None:
    """Loss by position up to twice the length that the model was trained at."""
    lines = long_losses(folder)
    if not lines:
        return
    x = Scale(0, LONGEST, LEFT, RIGHT)
    y = Scale(0, max(loss.max() for loss in lines.values()), FLOOR, TOP)
    parts = [svg.rows(y, LEFT, RIGHT), svg.columns(x, FLOOR, TOP)]
    parts.append(svg.text("nats a token", LEFT + 6, TOP - 6, ""))
    parts.append(svg.text("position", (LEFT + RIGHT) / 2, FLOOR + 38, "middle"))
    colours = dict(zip(lines, svg.COLOURS, strict=False))
    parts.append(svg.key(colours, RIGHT + 16, TOP + 20, 0, 22))
    for name, loss_P in lines.items():
        middles = LONGEST * (np.arange(PARTS) + 0.5) / PARTS
        places = [(x(at), y(loss)) for at, loss in zip(middles, loss_P, strict=True)]
        parts.append(svg.line(places, name, stroke=colours[name]))
    save("real-length", svg.picture(760, 390, "Loss by position, as it is and with YaRN", parts))


def save(name: str, picture: str) -> None:
    """A picture of the page."""
    (PICTURES / f"{name}.svg").write_text(f"{picture}\n")


# ---- the command line

CHECKS = {"equal": equal, "names": names}
ROWS = TEXT + LONG


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m benchmarks.real_model", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="OUTPUT_DIR", help="of scripts.real_model")
    known = [*CHECKS, "text", "long", *COMMANDS]
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="parts")
    parser.add_argument("--page", action="store_true", help="tables and pictures of what is there")
    given = parser.parse_args(arguments)
    if not (given.folder / "data").exists():
        parser.error(f"{given.folder} holds no model: python -m scripts.real_model makes it")

    torch.set_num_threads(THREADS)
    if given.page:
        draw_text(given.folder)
        draw_length(given.folder)
    else:
        taught = ["indexer"] if "text" in given.only else []
        for name in [*taught, *given.only]:
            fill(given.folder, name)
    print(page(given.folder))
    return 0


def fill(folder: Path, name: str) -> None:
    """Measure what is missing of a part."""
    rows = {"text": TEXT, "long": LONG}.get(name)
    if rows:
        for reading, tokens, documents in rows:
            measure(folder, reading, tokens, documents)
        return
    if figures(folder, name):
        return
    begun = time.monotonic()
    found = CHECKS[name](folder) if name in CHECKS else told(folder, name)
    seconds = round(time.monotonic() - begun)
    keep(folder, name, found | {"seconds": seconds})
    print(f"{name}: {seconds} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())

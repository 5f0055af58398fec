"""scripts/long_context_proof.sh: its runs follow each other, its commands run, and its figures are
those that it measured.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import recall
from longhaul import lengths
from longhaul.evals.tasks import ALL_TASKS
from scripts import proof_figures
from tests.warm_python import warm_python

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "long_context_proof.sh"
RUNS = ["SHORT", "NEAR", "MIDDLE", "FAR", "FARTHEST", "SPARSE", "INDEXED"]


def schedules() -> dict[str, tuple[lengths.Length, ...]]:
    """The schedule of each run, as the script has it."""
    text = SCRIPT.read_text(encoding="utf-8")
    return {name: lengths.parse(re.search(rf"\{{{name}:-([^}}]+)\}}", text)[1]) for name in RUNS}


def test_every_length_is_one_of_its_data_and_the_base_grows_at_most_with_it():
    text = SCRIPT.read_text(encoding="utf-8")
    forms = [recall.parse_form(word) for word in re.findall(r"\b\d+:\d+(?= |$)", text, re.M)]
    made = {form.length for form in forms}
    found = schedules()
    assert {stage.tokens for stages in found.values() for stage in stages} <= made

    standard = [stage for name in RUNS[:5] for stage in found[name]]
    for before, after in zip(standard, standard[1:], strict=False):
        assert after.tokens > before.tokens
        assert 1 <= after.theta / before.theta <= after.tokens / before.tokens
    assert found["FAR"][-1].tokens == 16_384 and found["FARTHEST"][-1].tokens == 32_768
    assert found["SPARSE"][-1].tokens >= 4096


# ---- the script, with a python that only pretends to train and to evaluate

PRETENDED = r'''#!{python} -IS
"""Writes what train.py, scripts.evaluate and data.* leave behind, and notes what it was asked."""
import json, os, pathlib, subprocess, sys

words = sys.argv[1:]
if words[0] == "-" or words[1] == "scripts.proof_figures":
    sys.exit(subprocess.call([{python!r}, *words]))
with open(os.environ["COMMANDS"], "a") as file:
    file.write(" ".join(words) + "\n")

flag = "--output_dir" if words[0] == "train.py" else "--output"
folder = pathlib.Path(words[words.index(flag) + 1])
if os.environ.get("FAIL") == f"{{folder.parent.name}}/{{folder.name}}":
    sys.exit("a reason")
folder.mkdir(parents=True, exist_ok=True)
if words[0] == "train.py":
    seed, unlucky = words[words.index("--seed") + 1], os.environ.get("UNLUCKY", "").split()
    loss = 3.0 if seed in unlucky else 0.1
    recall = {{"indexer_recall": 0.6, "indexer_recall_limit": 0.625}}
    last = {{"loss": loss, "indexer_recall": 0.1, "indexer_recall_limit": 1.0}}
    records = [{{"loss": loss}} | recall, {{"loss": loss}}, last]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
elif "retrieval" in words:
    lengths = words[words.index("--lengths") + 1].split(",")
    score = float(os.environ.get("SCORE", 1.0)) if folder.name == "indexed-converted" else 1.0
    same = {{"score": score, "interval": [0.93, 1.0], "answers": 192}}
    tasks = words[words.index("--tasks") + 1].split(",")
    scores = [{{"task": task, "length": int(n)}} | same for task in tasks for n in lengths]
    scores = [one | {{"score": 0.4}} if one["task"] == "newest" else one for one in scores]
    record = {{"scores": scores}}
    (folder / "eval.json").write_text(json.dumps({{"retrieval": record}}))
elif "gain" in words:
    figures = {{"gain": 0.01, "interval": [0.005, 0.015], "documents": 27}}
    found = {{"short": 64, "context": 128, "all": figures}}
    (folder / "eval.json").write_text(json.dumps({{"gain": {{"data": found}}}}))
'''


@pytest.fixture
def pretended(tmp_path):
    """Runs the script, or a command that it printed; returns the process when it has ended."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = tools / "python"
    python.write_text(PRETENDED.format(python=sys.executable))
    python.chmod(0o755)
    paths = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    environment = os.environ | paths | {"COMMANDS": str(tmp_path / "commands")}

    def run(command: str = f"bash {SCRIPT} {tmp_path / 'out'}", **more):
        return subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment | more,
            capture_output=True,
            text=True,
        )

    return run


def commands(folder: Path) -> list[str]:
    """The outputs of the commands that were pretended, in their order."""
    lines = (folder / "commands").read_text().splitlines()
    return [re.search(r"--output(?:_dir)? \S+/(seed-\d+/\S+)", line)[1] for line in lines]


def test_one_unlucky_seed_stops_no_other(pretended, tmp_path):
    done = pretended(SEEDS="1 0", UNLUCKY="10 11 12", ITEMS="4")
    assert done.returncode == 1, done.stderr
    made = commands(tmp_path)
    assert made.count("seed-1/short-2") == 1 and "seed-1/near" not in made
    assert {"seed-1/text-gain", "seed-0/standard", "seed-0/text-gain"} <= set(made)
    unlucky, lucky = json.loads((tmp_path / "out" / "proof.json").read_text())["seeds"]
    assert [one["passed"] for one in unlucky["figures"]] == [False] * 8 + [True]
    assert all(one["passed"] for one in lucky["figures"])
    assert done.stdout.count("not measured") == len(proof_figures.RETRIEVAL)

    assert pretended(SEEDS="0", ITEMS="4").returncode == 0
    proof = json.loads((tmp_path / "out" / "proof.json").read_text())
    assert [one["seed"] for one in proof["seeds"]] == ["0"]


def test_a_conversion_takes_over_the_parts_of_a_proof_and_has_bars_of_its_own(pretended, tmp_path):
    assert pretended().returncode == 0
    before = commands(tmp_path)
    done = pretended(PROOF="convert")
    assert done.returncode == 0, done.stderr
    added = ["indexed", "far-converted", "sparse-converted", "indexed-converted"]
    assert commands(tmp_path)[len(before) :] == [f"seed-0/{name}" for name in added]
    found = json.loads((tmp_path / "out" / "conversion.json").read_text())["seeds"][0]["figures"]
    assert [one["value"] for one in found] == [1.0] * 6 + [0.6]
    assert found[-1]["interval"] == [0.6, 0.625]

    again = f"bash {SCRIPT} {tmp_path / 'again'}"
    missed = pretended(again, PROOF="convert", SCORE="0.94")
    assert missed.returncode == 1
    assert "| 94.0% (93.0% to 100.0%; 192 answers) below" in missed.stdout
    assert pretended(PROOF="all").returncode == 2


def test_the_same_command_again_does_nothing_and_has_the_same_figures(pretended, tmp_path):
    first = pretended(SEEDS="0 3")
    assert first.returncode == 0, first.stderr
    proof = (tmp_path / "out" / "proof.json").read_bytes()
    made = commands(tmp_path)
    assert len(made) == len(set(made)) == 28

    again = pretended(SEEDS="0 3")
    assert again.returncode == 0 and commands(tmp_path) == made
    assert (tmp_path / "out" / "proof.json").read_bytes() == proof
    assert again.stdout == first.stdout[first.stdout.index("|  | bar") :]


def test_a_command_that_fails_ends_the_script_and_only_what_has_ended_is_not_repeated(
    pretended, tmp_path
):
    part = "standard"
    failed = pretended(FAIL=f"seed-0/{part}")
    assert failed.returncode == 1 and failed.stderr.endswith("a reason\n")
    before = commands(tmp_path)
    assert before[-1] == f"seed-0/{part}" and not (tmp_path / "out" / "proof.json").exists()

    assert pretended().returncode == 0
    assert commands(tmp_path)[len(before)] == f"seed-0/{part}"
    assert len(commands(tmp_path)) == len(set(commands(tmp_path))) + 1


def test_an_error_while_the_loss_is_read_is_seen_and_is_no_unlucky_seed(pretended, tmp_path):
    done = pretended(LEARNED="a loss")
    assert done.returncode == 1 and "could not convert string to float: 'a loss'" in done.stderr
    assert commands(tmp_path)[-1] == "seed-0/short-0"


def test_a_folder_has_one_set_of_settings(pretended, tmp_path):
    assert pretended(ITEMS="1").returncode == 0
    made = commands(tmp_path)
    for settings in ({}, {"ITEMS": "2"}, {"ITEMS": "1", "FAR": "8192:1:8e4,16384:1:1.6e5"}):
        done = pretended(**settings)
        assert done.returncode == 2 and "ITEMS=1" in done.stderr
    assert commands(tmp_path) == made
    assert pretended(ITEMS="1", SEEDS="5").returncode == 0


def test_a_seed_that_is_none_is_refused_before_anything_is_made(pretended, tmp_path):
    for seeds in ("0 x", "08", "-1"):
        done = pretended(SEEDS=seeds)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_every_variable_that_the_script_reads_is_explained_at_its_top():
    text = SCRIPT.read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{([A-Z_]+):-", text))
    explained = text[: text.index("set -euo")]
    assert read == {name for name in read if re.search(rf"\b{name}\b", explained)} | {"SEEDS"}
    kept = set(re.search(r"for name in ([A-Z_ ]+);", text)[1].split())
    assert kept == read - {"SEEDS", "PROOF"}


# ---- the figures


def write_proof(folder: Path, seed: int, tokens: int | None = None, **figures):
    """What the script leaves behind for a seed; `tokens`: every length of a bar is this instead."""
    records = {bar.folder: [] for bar in proof_figures.RETRIEVAL}
    for bar in proof_figures.RETRIEVAL:
        found = {"score": 1.0, "interval": [0.9, 1.0], "answers": 192} | figures
        perfect = {"score": 1.0, "interval": [0.99, 1.0], "answers": 192}
        scores = [{"length": 1024} | perfect, {"length": tokens or bar.tokens} | found]
        scores.append({"length": 131_072} | perfect)
        records[bar.folder] += [{"task": bar.task} | score for score in scores]
    for name, scores in records.items():
        write(folder, seed, name, {"retrieval": {"scores": scores}})
    write_gain(folder, seed)


def write_gain(folder: Path, seed: int, gain: float = 0.01, short: int = 64, context: int = 128):
    figures = {"gain": gain, "interval": [gain - 0.005, gain + 0.005], "documents": 27}
    found = {"short": short, "context": context, "all": figures, "far_copies": figures}
    write(folder, seed, proof_figures.GAIN, {"gain": {"data": found}})


def write(folder: Path, seed: int, name: str, record: dict):
    path = folder / f"seed-{seed}" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "eval.json").write_text(json.dumps(record))


def code_of(*words: str) -> int:
    """The exit code of the command."""
    try:
        proof_figures.main([*words])
    except SystemExit as stop:
        return stop.code
    return 0


def missed(folder: Path) -> list[str]:
    """The tasks and lengths of seed 3 that miss their bars, and the folder of the gain."""
    proof = json.loads((folder / "proof.json").read_text())
    bars = [f"{bar.task} {bar.tokens}" for bar in proof_figures.RETRIEVAL]
    names = [*bars, proof_figures.GAIN]
    figures = proof["seeds"][1]["figures"]
    assert all(figure["passed"] for figure in proof["seeds"][0]["figures"])
    return [name for name, one in zip(names, figures, strict=True) if not one["passed"]]


BARS = [f"{bar.task} {bar.tokens}" for bar in proof_figures.RETRIEVAL]
EASIEST = ["multikey 16384", "multikey-values 16384", "multikey-all 16384"]


@pytest.mark.parametrize(
    "figures, names",
    [
        ({}, []),
        ({"score": 0.979}, EASIEST),
        ({"score": 0.949}, [*BARS[:4], "multikey 4096"]),
        ({"score": 0.899}, [*BARS[:4], *BARS[6:]]),
        ({"tokens": 65_536}, BARS),
        ({"tokens": 16_384}, BARS[6:]),
    ],
)
def test_each_figure_is_held_to_its_bar_at_the_length_of_the_bar(figures, names, tmp_path, capsys):
    write_proof(tmp_path, 0)
    write_proof(tmp_path, 3, **figures)
    assert code_of("--folder", str(tmp_path)) == bool(names)
    assert missed(tmp_path) == names
    out = capsys.readouterr().out
    assert out.count("below the bar") + out.count("not measured") == len(names)


@pytest.mark.parametrize(
    "gain", [{"gain": 0.005}, {"gain": -0.01}, {"short": 32}, {"context": 512}]
)
def test_a_gain_must_be_that_of_128_tokens_over_64_and_not_0_by_chance(gain, tmp_path):
    write_proof(tmp_path, 0)
    write_proof(tmp_path, 3)
    write_gain(tmp_path, 3, **gain)
    assert code_of("--folder", str(tmp_path)) == 1
    assert missed(tmp_path) == [proof_figures.GAIN]


def test_the_script_asks_in_each_noise_that_has_a_row():
    text = SCRIPT.read_text(encoding="utf-8")
    asked = re.search(r"^noises=(\S+)$", text, re.M)[1].split(",")
    assert asked == list(proof_figures.NOISES)
    assert set(asked) <= set(ALL_TASKS)


@pytest.mark.parametrize("content", [None, b"{", b"\xff"])
def test_an_evaluation_that_is_missing_passes_nothing_and_a_damaged_one_is_refused(
    content, tmp_path, capsys
):
    write_proof(tmp_path, 0)
    path = tmp_path / "seed-0" / "standard" / "eval.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert code_of("--folder", str(tmp_path)) == (1 if content is None else 2)
    assert (tmp_path / "proof.json").exists() == (content is None)
    captured = capsys.readouterr()
    assert captured.out.count("not measured") == (6 if content is None else 0)
    assert len(captured.err.splitlines()) == (0 if content is None else 1)


# ---- the document


def test_the_document_has_the_figures_of_the_committed_proof():
    proof = json.loads((ROOT / "docs" / "proof.json").read_text())
    assert f"\n{proof_figures.table(proof)}\n" in (ROOT / "docs" / "EVALUATION.md").read_text()


# ---- the script with a real train.py


@pytest.mark.slow
def test_the_script_continues_after_a_kill(tmp_path):
    """With a step at each length, and any loss taken for success."""
    small = dict(
        SHORT="16:1:1e4,32:1:1e4",
        NEAR="64:1:1e4",
        MIDDLE="256:1:2e4",
        FAR="256:1:2e4,1024:1:8e4",
        FARTHEST="2048:1:1.6e5",
        SPARSE="1024:1:8e4",
        TEXT="2",
        TEXT_BYTES="400000",
        LEARNED="99",
        ITEMS="1",
        OMP_NUM_THREADS="1",
    )
    command = ["bash", str(SCRIPT), str(tmp_path / "out")]
    out = tmp_path / "out" / "seed-0"
    with warm_python(tmp_path) as environment:
        environment |= small
        killed = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
        )
        while killed.poll() is None and not (out / "near" / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.killpg(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        done = subprocess.run(command, env=environment, capture_output=True, text=True)

    # it ran to its end, and so short runs prove nothing
    assert done.returncode == 1, done.stdout + done.stderr
    (seed,) = json.loads((tmp_path / "out" / "proof.json").read_text())["seeds"]
    assert [one["value"] is None for one in seed["figures"]] == [True] * 7 + [False] * 2
    for name in ("standard", "farthest-retrieval", "sparse-retrieval"):
        assert (out / name / "heatmap.svg").stat().st_size > 0

"""`footprint --step FILE.py` and `--hf MODEL`, and the same by profile_memory.py: what they
predict, what fits a card, what to change, and bad input.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import profile_memory
from footprint import __main__ as footprint_command
from footprint import measure, predict
from footprint.steps import hugging_face
from footprint.steps.door import StepConfig
from footprint.steps.search import Bounds

ROOT = Path(__file__).parent.parent
HUGGING_FACE = "A Hugging Face model"  # sections of docs/FOOTPRINT.md that show what is printed
SCRIPT = "Your script"
OF_YOUR_OWN = "A step of your own"

MINE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters())

def step(state, batch=32):
    model, optimizer = state
    model(torch.randn(batch, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARAMETERS = 64 * 256 + 256 + 2560 + 10
SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def llama(transformers, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(vocab_size=512, **SIZES, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def answer(tmp_path):
    """Runs the command; its exit code and its JSON."""
    path = tmp_path / "out.json"

    def run(*args) -> tuple[int, dict]:
        code = profile_memory.main([*map(str, args), "--json", str(path)])
        return code, json.loads(path.read_text())

    return run


# ---- predictions


def test_a_file_is_predicted_and_its_json_and_page_are_written(mine, answer, tmp_path, capsys):
    page = tmp_path / "page.html"
    code, found = answer("--step", mine, "--device", "cpu", "--html", page)
    assert code == 0
    assert "predicted for a CPU" in capsys.readouterr().out
    assert 4 * 4 * PARAMETERS <= found["peak_live_bytes"] < 6 * 4 * PARAMETERS
    assert "<svg" in page.read_text()


def test_the_batch_of_a_file_is_an_argument_of_its_step(mine, answer):
    few, many = (answer("--step", mine, *more)[1] for more in ([], ["--batch", 1032]))
    row = 4 * 256  # the result of the first layer, which the second keeps
    assert many["stages"]["forward"] - few["stages"]["forward"] >= 1000 * row


def test_a_configuration_is_predicted_with_its_flags(llama, answer, capsys):
    args = ["--hf", llama, "--seq", "64", "--batch", "2"]
    changes = ([], ["--checkpointing"], ["--dtype", "bf16"], ["--autocast", "bf16"])
    found = [answer(*args, *more)[1] for more in changes]
    plain, checkpointed, half, autocast = (
        one["peak_live_bytes"] - one["categories"]["workspace"] for one in found
    )
    assert "model.layers.* backward" in capsys.readouterr().out
    assert checkpointed < plain
    assert half < 0.7 * plain
    assert half < autocast < plain


@pytest.mark.slow
def test_8_bit_states_and_ranks_shrink_what_they_should(llama, answer):
    args = ["--hf", llama, "--seq", "64"]
    plain = answer(*args)[1]["categories"]
    small = answer(*args, "--optimizer", "adamw_8bit")[1]["categories"]
    ranks = answer(*args, "--fsdp", "2")[1]
    assert small["parameter"] == plain["parameter"]
    assert small["optimizer"] < 0.3 * plain["optimizer"]

    assert ranks["ranks"] == 2
    assert ranks["categories"]["parameter"] == pytest.approx(plain["parameter"] / 2, rel=0.01)
    assert ranks["categories"]["unsharded"] > 0
    assert any("FSDP2 gathers ahead" in words for words in ranks["not_modelled"])


# ---- the two commands


def test_footprint_answers_as_profile_memory_does(mine, answer, tmp_path, capsys):
    page = tmp_path / "alone.json"
    flags = ["--batch", "8", "--gpu-memory-gib", "0.5"]
    alone = footprint_command.main(["--step", mine, *flags, "--json", str(page)])
    code, found = answer("--step", mine, *flags)
    assert alone == code == 3
    assert json.loads(page.read_text()) == found


@pytest.mark.parametrize(
    "words, said",
    [
        ("--seq 8 --hf /nowhere", "there is no config.json"),
        ("--answer a.py:1=1 b.py:2=2 --hf /nowhere", "there is no config.json"),
        ("--hf x --seq 0", "--seq: 0 is out of range: give"),
        ("--hf x --seq two", "--seq: 'two' is no whole number: give"),
        ("--hf x --dtype fp8", "--dtype: 'fp8' is unknown: choose from"),
        ("--hf x --seq", "--seq has no value: give"),
        ("--hf x --advise=1", "--advise/--no_advise takes no value: drop"),
        ("--hf x --sqe 3", "did you mean --seq?"),
        ("--hf x --seq 3 --seq 3", "--seq is given twice: keep one"),
        ("--hf x stray", "'stray' follows no flag: give"),
        ("--step nowhere.py", "nowhere.py is no Python file: give"),
        ("nowhere.py --step 3", "nowhere.py: there is no such file: name"),
        ("--gpu cpu nowhere.py --hf x", "nowhere.py: there is no such file: name"),
        ("-m nowhere --hf x --limit 3", "nowhere"),
    ],
)
def test_a_wrong_command_of_footprint_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    is_module = words.startswith("-m")
    assert footprint_command.main(words.split()) == (1 if is_module else 4)
    error = capsys.readouterr().err
    assert said in error
    assert is_module or error.count("\n") == 1


def test_the_files_own_error_has_the_exit_code_of_a_scripts(mine, capsys):
    Path(mine).write_text("1 / 0")
    assert footprint_command.main(["--step", mine]) == 1
    assert "mine.py:1: ZeroDivisionError" in capsys.readouterr().err


# ---- a file of the user's

OWN_MODEL = """
import torch

class Model(torch.nn.Linear):
    pass
"""
OWN_STEP = """
from __future__ import annotations
import sys
from dataclasses import dataclass
import torch
from model import Model
arguments = sys.argv[1:]

@dataclass
class State:
    model: Model
    optimizer: object

def build():
    import data
    model = Model(data.WIDTH, data.WIDTH)
    return State(model, torch.optim.SGD(model.parameters(), lr=0.1))

def step(state):
    import train
    assert not arguments
    train.update(state)
"""
OWN_TRAIN = """
import torch

def update(state):
    loss = state.model(torch.randn(8, state.model.in_features)).mean()
    if loss > 1:
        return
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
"""
OWN = {"model.py": OWN_MODEL, "mine.py": OWN_STEP, "train.py": OWN_TRAIN, "data.py": "WIDTH = 64"}


@pytest.fixture
def own(tmp_path):
    """A project whose modules have names of longhaul's."""
    for name, content in OWN.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_a_file_imports_its_neighbours_and_longhaul_keeps_its_own(own, answer, capsys):
    ours = {name: sys.modules.get(name) for name in ("model", "data", "train", "longhaul")}
    search = list(sys.path)
    command = ["--step", own / "mine.py", "--device", "cpu"]
    assert profile_memory.main([*map(str, command)]) == 2
    assert "value with --answer train.py:6=VALUE, or" in capsys.readouterr().err

    code, found = answer(*command, "--answer", "train.py:6=False")
    assert (code, found["categories"]["parameter"]) == (0, 4 * (64 * 64 + 64))
    assert sys.path == search
    assert {name: sys.modules.get(name) for name in ours} == ours


@pytest.mark.parametrize(
    "name, line, words",
    [
        ("mine.py", "def build(:", "mine.py:1: SyntaxError: invalid syntax"),
        ("mine.py", "\0", "mine.py is no Python file"),
        ("data.py", "WIDTH = nothing", "data.py:1: NameError: name 'nothing' is not defined"),
        ("data.py", "import yonder", "data.py:1: ModuleNotFoundError: No module named 'yonder'"),
        ("data.py", "exit(3)", "data.py:1: SystemExit: 3 (called at mine.py:15)"),
        (
            "model.py",
            OWN_MODEL + "    def forward(self, x): return {}[0]",
            "KeyError: 0 (called at train.py:5, mine.py:22)",
        ),
        (
            "model.py",
            OWN_MODEL + "    def forward(self, x): return x @ x",
            "model.py:6: RuntimeError",
        ),
        ("mine.py", "def build(): raise ValueError('my\\nown')\ndef step(s): ...", "mine.py:1: V"),
        ("mine.py", "def build(): ...\ndef step(): ...", "step cannot be called as step(state)"),
        ("mine.py", "def build(x): ...\ndef step(s): ...", "build cannot be called as build()"),
    ],
)
def test_an_error_of_the_file_is_one_line_that_names_its_line(name, line, words, own, capsys):
    (own / name).write_text(line)
    assert profile_memory.main(["--step", str(own / "mine.py"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


# ---- the examples of the document

FENCE = re.compile(r"(?:`([^`\n]+)`:\n\n)?```(\w+)\n(.*?)```", re.S)


def sections() -> dict[str, str]:
    """Heading -> text of each section of docs/FOOTPRINT.md."""
    text = (ROOT / "docs" / "FOOTPRINT.md").read_text()
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {heading: body for heading, _, body in parts}


@pytest.mark.slow
@pytest.mark.parametrize("heading", [SCRIPT, OF_YOUR_OWN, HUGGING_FACE])
def test_an_example_of_the_document_prints_what_it_says(
    heading, tmp_path, monkeypatch, capsys, request
):
    if heading == HUGGING_FACE:
        request.getfixturevalue("transformers")
    monkeypatch.chdir(tmp_path)
    commands, expected = [], []
    for name, kind, content in FENCE.findall(sections()[heading]):
        if name:
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(content)
        elif kind == "bash":
            commands.append(content)
        elif kind == "text":
            expected += content.splitlines()
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "python"
        if words[:2] == ["-m", "footprint"]:
            assert footprint_command.main(words[2:]) == 0
            continue
        script, *args = words
        assert script == "profile_memory.py"
        assert profile_memory.main(args) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert commands and expected
    assert [line for line in expected if line.strip() not in printed] == []


# ---- what fits


def test_the_most_rows_that_fit_fit_and_one_more_does_not(mine, answer, capsys):
    code, found = answer("--step", mine, "--solve", "batch", "--vram", "0.7")
    rows = found["answer"]["batch"]
    assert code == 0
    assert f"the largest --batch that fits: {rows:,}" in capsys.readouterr().out
    placements = {one["name"]: one["placement"] for one in found["tried"]}
    assert placements[f"--batch {rows}"].startswith("fits")
    assert placements[f"--batch {rows + 1}"] == "too small"
    assert answer("--step", mine, "--batch", rows)[1]["peak_live_bytes"] == found["peak_live_bytes"]


def test_the_longest_row_ends_where_the_models_positions_do(transformers, answer, capsys, tmp_path):
    sizes = dict(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=200)
    config = transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    code, found = answer("--hf", tmp_path, "--seq", 64, "--solve", "context", "--gpu", "H100")
    assert (code, found["answer"]["seq"]) == (0, 200)
    assert "(the model has no more positions)" in capsys.readouterr().out

    assert profile_memory.main(["--hf", str(tmp_path), "--seq", "201"]) == 2
    assert "give at most --seq 200" in capsys.readouterr().err


def test_advice_is_a_step_that_fits_and_is_predicted_alike(llama, answer, capsys):
    args = ["--hf", llama, "--seq", 256, "--batch", 64]
    code, found = answer(*args, "--advise", "--vram", "0.8")
    said = capsys.readouterr().out
    assert code == 2 and "fits after these changes" in said
    changed = found["answer"]
    assert changed["autocast"] == "bf16"
    # the peak is not in the optimizer, so that AdamW fused saves nothing
    assert "AdamW fused" in said and "saves nothing, left out" in said
    assert changed["optimizer"] == "adamw"
    sizes = [one["peak_live_bytes"] for one in found["tried"] if one["placement"] != "too small"]
    assert sizes == [found["peak_live_bytes"]]

    flags = ["--autocast", "bf16", "--batch", changed["batch"]]
    flags += ["--checkpointing"] if changed["checkpointing"] else []
    assert answer(*args, *flags)[1]["peak_live_bytes"] == found["peak_live_bytes"]


@pytest.mark.slow
def test_advice_for_what_fits_and_for_what_cannot(mine, llama, answer, capsys):
    args = ["--hf", llama, "--seq", 64, "--advise"]
    assert answer(*args, "--gpu", "H100")[0] == 0
    assert "fits as asked" in capsys.readouterr().out
    assert answer(*args, "--optimizer", "sgd", "--gpus", 1, "--vram", "0.5")[0] == 3
    assert "no change is enough" in capsys.readouterr().out
    assert answer("--step", mine, "--solve", "batch", "--vram", "0.5")[0] == 3
    assert "not even --batch 1 fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "needs",
    [
        lambda size: size / 1000,
        lambda size: max(0.5, size / 1000),  # the peak moves to another stage
        lambda size: (size / 1000) ** 2,
        lambda size: 0.9 + size / 10_000,
        lambda size: 0.01 + (size // 100) / 10,  # in steps
    ],
)
@pytest.mark.parametrize("first", [1, 512, 100_000])
def test_a_search_finds_the_largest_size_in_few_trials(needs, first):
    bounds = Bounds(1, nearly=False)
    aim, trials = first, 0
    while aim is not None:
        bounds.add(aim, needs(aim), needs(aim) <= 1)
        trials += 1
        aim = bounds.next()
    assert needs(bounds.low) <= 1 < needs(bounds.low + 1)
    assert trials <= 25


# ---- configurations

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=512) | SIZES
BERT = dict(model_type="bert", architectures=["BertForSequenceClassification"])
GPT2 = dict(
    model_type="gpt2",
    architectures=["GPT2ForSequenceClassification"],
    n_embd=64,
    n_layer=1,
    n_head=1,
)
T5 = dict(model_type="t5", architectures=["T5ForConditionalGeneration"], num_layers=1, d_model=64)
VIT = dict(model_type="vit", architectures=["ViTForImageClassification"]) | SIZES
VIT |= dict(image_size=32, patch_size=8)
RESNET = dict(model_type="resnet", architectures=["ResNetForImageClassification"])
RESNET |= dict(embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1])
TOKENS = BERT | SIZES | dict(architectures=["BertForTokenClassification"], num_labels=7)


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(model_type="llama"), "names no architecture"),
        (dict(model_type="nowhere"), "give --step FILE.py"),
        ("not a dictionary", "give --step FILE.py"),
        (BERT | dict(architectures=["BertForMultipleChoice"]), "give --step"),
        (LLAMA | dict(architectures="LlamaForCausalLM"), 'such as ["LlamaForCausalLM"]'),
        (LLAMA | dict(architectures=["AutoConfig"]), "names no architecture"),
        (LLAMA | dict(architectures=BERT["architectures"]), "give --step"),
        (LLAMA | dict(hidden_size="x"), "expected int, got str"),
        (LLAMA | dict(hidden_size=65), "not a multiple of the number of attention heads"),
        (LLAMA | dict(hidden_act="nothing"), "KeyError: 'nothing'"),
        (LLAMA | dict(attn_implementation="flash_attention_2"), 'to "sdpa"'),
        (LLAMA | dict(quantization_config=dict(quant_method="fp8")), "(fp8)"),
        (LLAMA | dict(quantization_config=dict(bits=4)), "quantization_config"),
        (
            dict(model_type="llava", architectures=["LlavaForConditionalGeneration"]),
            "vision_config",
        ),
        (GPT2, 'give config.json a "pad_token_id", or --batch 1'),
        (T5, 'give config.json a "decoder_start_token_id", such as 0'),
        (RESNET, 'give config.json an "image_size", such as 224'),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_line(
    config, words, transformers, tmp_path, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert profile_memory.main(["--hf", str(tmp_path), "--batch", "2"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_model_without_tokens_has_no_longest_row(transformers, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    for flags in (["--seq", "64"], ["--solve", "context"]):
        assert profile_memory.main(["--hf", str(tmp_path), *flags]) == 2
        assert "reads no rows of tokens: drop it" in capsys.readouterr().err


@pytest.mark.parametrize("config", [VIT, RESNET | dict(image_size=32), TOKENS], ids=str)
def test_the_classes_of_images_and_of_tokens_take_what_the_allocator_records(
    config, transformers, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    training = StepConfig(hf=str(tmp_path), batch=2, seq=16)
    build, step = hugging_face.functions(str(tmp_path), training)
    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), rel=1e-3)


def test_the_labels_of_several_classes_are_numbers(transformers, tmp_path, answer):
    config = BERT | SIZES | dict(problem_type="multi_label_classification")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert answer("--hf", tmp_path, "--seq", 8, "--batch", 3)[0] == 0


def test_a_card_without_a_question_says_whether_it_holds_the_step(llama, answer, capsys):
    args = ["--hf", llama, "--seq", 64]
    code, found = answer(*args, "--gpu", "H100")
    assert (code, found["placement"]) == (0, "fits")
    said = capsys.readouterr().out
    assert "on H100 (79.1 GiB): fits" in said
    assert answer(*args, "--vram", 0.5)[0] == 3


# ---- models by their names on the hub

NAME = "someone/small-llama"
REFERENCE = "0123456789" * 4  # of a revision


@pytest.fixture
def hub(transformers, tmp_path, monkeypatch):
    """An empty cache of a hub that cannot be asked; the modules of its library."""
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(library.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return library


def fill(cache: Path, revision: str, llama: str, **changes) -> Path:
    """Lay config.json of a revision into the cache; the folder of the model in it."""
    model = cache / "models--someone--small-llama"
    folder = model / "snapshots" / revision
    folder.mkdir(parents=True)
    config = json.loads((Path(llama) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return model


def test_a_model_by_its_name_is_that_of_the_main_revision(hub, llama, answer, tmp_path, capsys):
    fill(tmp_path / "hub", "1" * 40, llama, num_hidden_layers=1)
    model = fill(tmp_path / "hub", REFERENCE, llama)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REFERENCE)
    found = answer("--hf", NAME, "--seq", 64)
    assert REFERENCE in capsys.readouterr().out
    assert found == answer("--hf", llama, "--seq", 64)


def test_the_only_revision_is_taken_and_one_of_several_is_not(hub, llama, tmp_path, capsys):
    args = ["--hf", NAME, "--seq", "64"]
    fill(tmp_path / "hub", REFERENCE, llama)
    assert profile_memory.main(args) == 0
    fill(tmp_path / "hub", "1" * 40, llama)
    assert profile_memory.main(args) == 2
    assert f"hf download {NAME} config.json" in capsys.readouterr().err


def test_a_folder_comes_before_the_model_of_its_name(hub, llama, tmp_path, capsys):
    fill(tmp_path / "hub", REFERENCE, llama)
    (tmp_path / NAME).mkdir(parents=True)
    assert profile_memory.main(["--hf", NAME]) == 2
    assert "there is no config.json" in capsys.readouterr().err


def test_only_config_json_is_asked_for_and_it_is_said(
    hub, llama, answer, tmp_path, monkeypatch, capsys
):
    asked = []

    def send(*wanted):
        asked.append(wanted)
        model = fill(tmp_path / "hub", REFERENCE, llama)
        return str(model / "snapshots" / REFERENCE / "config.json")

    monkeypatch.setattr(hub, "hf_hub_download", send)
    assert answer("--hf", NAME, "--seq", 64)[0] == 0
    assert asked == [(NAME, "config.json")]
    assert "downloaded" in capsys.readouterr().out


def test_what_neither_the_cache_nor_the_hub_has_is_refused_in_one_line(tmp_path):
    """Of a process whose environment names the cache, as a user's does."""
    environment = os.environ | dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, ROOT / "profile_memory.py", "--hf", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "hub" / "models--someone--small-llama") in done.stderr
    assert f"hf download {NAME} config.json" in done.stderr

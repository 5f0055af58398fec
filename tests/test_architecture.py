"""docs/ARCHITECTURE.md: imports point down and never in a circle, model.py needs nothing but torch,
and the flags of train.py in the documents exist.
"""

import ast
import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.config import TrainConfig

ROOT = Path(__file__).parent.parent
LEVELS = [  # a module imports modules of lower levels, and of its own room
    {
        "model",
        "base",
        "footprint",
    },
    {
        "data",
        "longhaul.elementwise",
        "longhaul.exits",
        "longhaul.mismatch",
        "longhaul.other_names",
        "longhaul.sparse",
        "longhaul.vocab",
    },
    {
        "longhaul.dist",
        "longhaul.parallel",
        "longhaul.cli",
        "longhaul.kernels",
        "longhaul.lengths",
        "longhaul.staging",
    },
    {
        "longhaul.clock",
        "longhaul.kinds",
        "longhaul.optimizers",
        "longhaul.sampling",
    },
    {"longhaul.config_checks"},
    {
        "longhaul.config",
        "longhaul.generate",
        "longhaul.optim",
        "longhaul.qwen3",
    },
    {"longhaul.flops", "longhaul.step"},
    {"longhaul.checkpoint", "longhaul.evals"},
    {"longhaul.planner"},
    {"longhaul.run"},
    {"lab.analysis", "lab.posttrain"},
    {"train", "profile_memory", "verify_chunked_loss"},
    {"scripts"},
    {"lab"},
    {"benchmarks"},
]
# optional extras of the data preparation
OPTIONAL = {"tokenizers", "pyarrow"}
STANDARD_LIBRARY_AND = {  # what a room of the lower floors may import from outside
    "longhaul.elementwise": {"torch", "triton"},
    "longhaul.sparse": {"torch", "triton"},
    "longhaul.vocab": {"torch", "triton"},
    "base": {"torch", "safetensors"},
    "footprint": {"torch"},
    "data": {"numpy", "sentencepiece", "google", "tqdm"} | OPTIONAL,  # google.protobuf
    "longhaul.dist": {"torch"},
    "longhaul.cli": set(),
    "longhaul.staging": {"torch"},
    "longhaul.lengths": set(),
    "longhaul.exits": set(),
}
OURS = {name.split(".")[0] for level in LEVELS for name in level}
NOT_THE_PRODUCT = {"tests", "examples", ".venv", ".venv-cpu", "runs", "build"}
# pip may be writing into .venv-cpu, so it is not even looked into
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_THE_PRODUCT]
SOURCES = sorted([*ROOT.glob("*.py"), *(path for one in FOLDERS for path in one.rglob("*.py"))])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room_of(module: str) -> str | None:
    """The longest name of LEVELS that is the module or a parent of it."""
    names = [
        name
        for level in LEVELS
        for name in level
        if module == name or module.startswith(name + ".")
    ]
    return max(names, key=len, default=None)


def level_of(room: str) -> int:
    return next(index for index, level in enumerate(LEVELS) if room in level)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_has_a_place_in_the_house():
    homeless = [path for path in SOURCES if room_of(module_of(path)) is None]
    assert [module_of(path) for path in homeless] == ["longhaul"], (
        "give it a level in LEVELS of this test, or keep a script of your own in runs/ or outside"
    )


def test_imports_point_to_lower_levels_only():
    wrong = [f"{path}: {words}" for path in SOURCES for words in imports_upwards(path)]
    assert not wrong


def imports_upwards(path: Path) -> list[str]:
    """What a file imports that is not below it."""
    room = room_of(module_of(path))
    found = []
    for name in imports(path) if room else ():
        other = room_of(name)
        if other and other != room:
            levels = level_of(room), level_of(other)
            if levels[1] >= levels[0]:
                found.append(f"{room} (level {levels[0]}) imports {other} (level {levels[1]})")
    return found


@pytest.mark.parametrize("room", STANDARD_LIBRARY_AND)
def test_the_ground_floor_imports_only_what_it_may(room):
    allowed = set(sys.stdlib_module_names) | STANDARD_LIBRARY_AND[room] | {room.split(".")[0]}
    allowed |= OURS  # their levels are checked above
    for path in SOURCES:
        if room_of(module_of(path)) == room:
            outside = {name.split(".")[0] for name in imports(path)} - allowed
            assert not outside, f"{path} imports {outside}"


def test_model_py_imports_torch_and_nothing_of_ours():
    names = {name.split(".")[0] for name in imports(ROOT / "model.py")}
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_nothing_in_longhaul_imports_the_laboratory():
    used = {name for path in (ROOT / "longhaul").rglob("*.py") for name in imports(path)}
    assert "lab" not in {name.split(".")[0] for name in used}


def test_the_modules_have_no_import_cycle():
    graph = {module_of(path): imports(path) for path in SOURCES}
    graph = {
        module: {other for other in graph if other in used and other != module}
        for module, used in graph.items()
    }
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {module for module, used in graph.items() if module not in done and used <= done}
        assert ready, f"import cycle among {sorted(set(graph) - done)}"
        done |= ready


def test_decoders_are_built_by_the_one_file_that_knows_the_kernels():
    builders = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Decoder", "model.Decoder")
    }
    assert builders == {"longhaul/kernels.py"}


def test_the_product_patches_nothing():
    names = [(path, name) for path in SOURCES for name in imports(path)]
    assert not [(path, name) for path, name in names if "mock" in name.split(".")]


def test_no_error_is_swallowed():
    handlers = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler)
    ]
    assert handlers
    assert not [f"{path}:{node.lineno}" for path, node in handlers if swallows(node)]


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and does not raise it again."""
    broad = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
    last = handler.body[-1]
    return broad and not (isinstance(last, ast.Raise) and last.exc is None)


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from model import Decoder, ModelConfig, NSAConfig, Standard

torch.set_num_threads(1)
small = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=8, sel_count=3, window=4)
tokens = torch.randint(100, (2, 65), generator=torch.Generator().manual_seed(0))
documents = torch.arange(64).ge(40).expand(2, -1)

for attention in (Standard(), small):
    shape = dict(vocab_size=100, num_layers=2, loss="chunked")
    decoder = Decoder(ModelConfig.preset("tiny", attention=attention, **shape))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = decoder(tokens[:, :-1], tokens[:, 1:], doc_ids=documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1, (attention, losses)

    cache, drawn = decoder.new_cache(1, 48), tokens[:1, :8]
    with torch.no_grad():
        hidden = decoder(drawn, cache=cache)
        for _ in range(40):
            drawn = torch.cat([drawn, hidden[:, -1:].argmax(-1)], 1)
            hidden = decoder(drawn[:, -1:], cache=cache)
        whole = decoder(drawn)[:, -1:]
    assert cache.length == 48
    assert (whole - hidden).abs().max() <= 1e-4 * whole.abs().max(), attention

assert not {"longhaul", "base", "data", "numpy.testing"} & set(sys.modules)
print("trained and generated")
"""


@pytest.mark.slow
def test_model_py_alone_in_an_empty_folder_trains_and_generates_with_both_attentions(tmp_path):
    shutil.copy(ROOT / "model.py", tmp_path / "model.py")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "trained and generated\n", done.stderr


@pytest.mark.slow
def test_no_door_imports_the_compiler():
    """It takes a second of each start, of commands that end with a refusal, too."""
    doors = (
        "train, verify_chunked_loss, scripts.evaluate, longhaul.sparse, longhaul.vocab, footprint"
    )
    program = f"import sys, {doors}; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def flags_of(text: str) -> set[str]:
    """Flags of the train.py commands in a text (continuation lines joined)."""
    commands = re.findall(r"train\.py[^\n`|#]*", text.replace("\\\n", " "))
    return {flag for command in commands for flag in re.findall(r"--([a-z0-9_]+)", command)}


DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", ["README.md", "scripts/quickstart.sh", *DOCUMENTS])
def test_the_flags_of_the_documents_exist(name):
    fields = dataclasses.fields(TrainConfig)
    known = {"help"}
    for field in fields:
        known |= {field.name, f"no_{field.name}"}
    assert not flags_of((ROOT / name).read_text()) - known

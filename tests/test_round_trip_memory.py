"""Import and export stream: what they hold in memory is at most one shard, and what opens a folder
holds its model and a weight, measured as the peak of the resident memory of a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longhaul import dist, qwen3, step
from longhaul.checkpoint import start
from longhaul.checkpoint.format import model_config
from longhaul.checkpoint.load import described, newest, stored_weights
from longhaul.checkpoint.save import save
from longhaul.config import TrainConfig
from model import Decoder
from scripts.convert_qwen3 import export_hf, import_hf
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
MIB = 2**20
SHARD = 20 * MIB
LARGEST = 16 * MIB  # the embedding, in fp32
# of the library: threads, and allocations that are not given back
SLACK = 12 * MIB
CFG = TrainConfig(
    model_size="tiny",
    vocab_size=8192,
    context_length=64,
    device="cpu",
    dtype="fp32",
    model_overrides=(
        "hidden_size=512",
        "num_layers=8",
        "num_heads=8",
        "num_kv_heads=4",
        "head_dim=64",
        "ffn_size=1536",
    ),
)

# Prints by how many bytes the peak of a work of this file is above what was resident before.
# A small folder is worked on first, so that what is imported on first use counts for nothing.
MEASURE = """
import sys
from pathlib import Path
from tests import test_round_trip_memory as works

work = getattr(works, sys.argv[1])
small, source, output = map(Path, sys.argv[2:5])
work(small, output / "small", *sys.argv[5:])
print(works.peak_of(lambda: work(source, output / "large", *sys.argv[5:])))
"""


def imported(source: Path, output: Path, dtype: str):
    import_hf(source, output, dtype)


def exported(run: Path, output: Path):
    checkpoint = described(newest(run))
    weights = stored_weights(checkpoint)
    qwen3.write_hf(model_config(checkpoint), weights, output, shard_bytes=SHARD)


def opened(source: Path, output: Path, dtype: str) -> Decoder:
    return qwen3.from_hf(source, dtype=getattr(torch, dtype))


def peak_of(work: Callable[[], object]) -> int:
    """By how many bytes the resident memory was above today's while `work()` ran.

    The pages of mapped files count, although the system may drop them at any time.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = work()  # noqa: F841 (a model counts until the peak is read)
    return resident("VmHWM") - before


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) * 1024 for one in status if one.startswith(line))


def peak(work: Callable, small: Path, source: Path, output: Path, *words: str) -> int:
    """`peak_of` in a process of its own."""
    words = [work.__name__, str(small), str(source), str(output), *words]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """The model as Hugging Face folders of several shards, in fp32 and in bf16, and a small one."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of the resident memory is read from Linux's /proc")
    folder = tmp_path_factory.mktemp("folders")
    decoder = Decoder(CFG.model())
    qwen3.to_hf(decoder, folder / "float32", shard_bytes=SHARD)
    qwen3.to_hf(decoder.bfloat16(), folder / "bfloat16", shard_bytes=SHARD // 2)
    small = dataclasses.replace(CFG, vocab_size=64, model_overrides=("num_layers=1", "ffn_size=64"))
    qwen3.to_hf(Decoder(small.model()), folder / "small")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A run of two FSDP2 ranks."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    run_ranks(save_sharded, 2, str(folder))
    assert len(list((folder / "step-00000000").glob("rank-*"))) == 2
    return folder


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def save_sharded(world: dist.World, folder: str):
    """A checkpoint by FSDP2 ranks, which keep their optimizer out of it."""
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    state = step.build(CFG, CFG.model(), "cpu", world, mesh)
    state.optimizer = None
    save(state, Path(folder), {})


@pytest.mark.slow
def test_an_import_needs_less_than_a_shard(folders, tmp_path):
    source = folders / "float32"
    shard = max(path.stat().st_size for path in source.glob("*.safetensors"))
    used = peak(imported, folders / "small", source, tmp_path, "bfloat16")
    assert used < shard + SLACK < 0.5 * bytes_of(source)


@pytest.mark.slow
def test_an_opened_folder_needs_its_model_and_a_weight(folders, tmp_path):
    used = peak(opened, folders / "small", folders / "float32", tmp_path, "bfloat16")
    assert used < bytes_of(folders / "bfloat16") + LARGEST + SLACK < bytes_of(folders / "float32")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_takes_the_weights_of_a_folder_one_by_one(folders, ranks):
    for used in run_ranks(started, ranks, str(folders)):
        assert used < LARGEST + SLACK < bytes_of(folders / "float32") / ranks


def started(world: dist.World, folders: str) -> int:
    """What it takes to give the weights of a folder to a model that was built, or to a rank's part
    of it.
    """
    load_small = starting(world, Path(folders) / "small")
    load_small()
    return peak_of(starting(world, Path(folders) / "float32"))


def starting(world: dist.World, folder: Path) -> Callable[[], None]:
    """A training state of random weights, which the call replaces by those of the folder."""
    given = dict(init_from=str(folder), device="cpu", dtype="fp32")
    cfg = TrainConfig(**start.completed(given))
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    state = step.build(cfg, cfg.model(), "cpu", world, mesh)
    return lambda: start.load_into(state.model, start.read(cfg.init_from))


@pytest.mark.slow
def test_an_export_of_what_two_ranks_wrote_needs_a_shard(folders, sharded, tmp_path):
    import_hf(folders / "small", tmp_path / "small", "keep")
    output = tmp_path / "hf"
    output.mkdir()
    used = peak(exported, tmp_path / "small", sharded, output)
    assert used < SHARD + SLACK < 0.5 * bytes_of(folders / "float32")
    shards = list((output / "large").glob("*.safetensors"))
    assert len(shards) > 3 and max(path.stat().st_size for path in shards) < SHARD + MIB


@pytest.mark.slow
def test_what_two_ranks_wrote_is_exported_whole(sharded, tmp_path):
    export_hf(sharded, tmp_path / "hf", "keep", "none")
    whole = step.build(CFG, CFG.model(), "cpu").model
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name, parameter in whole.named_parameters():
        assert torch.equal(tensors.pop(qwen3.hf_name(name)), parameter)
    assert not tensors
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "float32"

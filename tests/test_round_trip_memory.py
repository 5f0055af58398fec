"""Import and export stream: with more layers they hold no more memory, and what opens a folder
holds its model. Each work runs in a process of its own. What counts is the growth of the peak of
its resident memory from two layers to twelve, in which the share of the libraries drops out.
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
FEW = 2  # layers
MANY = 12  # layers
STREAMED = (
    0.25  # of what the layers add, less is held; a part that is kept whole would be all of it
)
CFG = TrainConfig(
    model_size="tiny",
    vocab_size=8192,
    context_length=64,
    device="cpu",
    dtype="fp32",
    model_overrides=(
        "hidden_size=512",
        f"num_layers={MANY}",
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
    weights = stored_weights(checkpoint, model_config(checkpoint))
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


def with_layers(count: int) -> TrainConfig:
    others = (override for override in CFG.model_overrides if "num_layers" not in override)
    return dataclasses.replace(CFG, model_overrides=(*others, f"num_layers={count}"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Hugging Face folders of several shards, with few and with many layers, and a small one."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of the resident memory is read from Linux's /proc")
    folder = tmp_path_factory.mktemp("folders")
    for count in (FEW, MANY):
        decoder = Decoder(with_layers(count).model())
        qwen3.to_hf(decoder, folder / str(count), shard_bytes=SHARD)
    small = dataclasses.replace(CFG, vocab_size=64, model_overrides=("num_layers=1", "ffn_size=64"))
    qwen3.to_hf(Decoder(small.model()), folder / "small")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """Runs of two FSDP2 ranks, by their number of layers."""
    folder = tmp_path_factory.mktemp("sharded")
    for count in (FEW, MANY):
        run_ranks(save_sharded, 2, str(folder / str(count)), count)
        assert len(list((folder / str(count) / "step-00000000").glob("rank-*"))) == 2
    return folder


def added_bytes(folder: Path) -> int:
    """What more layers add to the weights, in fp32."""
    few, many = (
        sum(path.stat().st_size for path in (folder / str(count)).glob("*.safetensors"))
        for count in (FEW, MANY)
    )
    return many - few


def save_sharded(world: dist.World, folder: str, layers: int):
    """A checkpoint by FSDP2 ranks, which keep their optimizer out of it."""
    cfg = with_layers(layers)
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    state = step.build(cfg, cfg.model(), "cpu", world, mesh)
    state.optimizer = None
    save(state, Path(folder), {})


def growth(work: Callable, folders: Path, source: Path, output: Path, *words: str) -> int:
    """By how much the peak of a work grows from few layers to many."""
    peaks = []
    for count in (FEW, MANY):
        target = output / str(count)
        target.mkdir(parents=True)
        peaks.append(peak(work, folders / "small", source / str(count), target, *words))
    return peaks[1] - peaks[0]


@pytest.mark.slow
def test_an_import_holds_no_more_for_more_layers(folders, tmp_path):
    grown = growth(imported, folders, folders, tmp_path, "bfloat16")
    assert grown < STREAMED * added_bytes(folders)


@pytest.mark.slow
def test_an_opened_folder_holds_its_model_only(folders, tmp_path):
    grown = growth(opened, folders, folders, tmp_path, "bfloat16")
    in_bf16 = added_bytes(folders) // 2
    assert 0.9 * in_bf16 < grown < (1 + STREAMED) * in_bf16


@pytest.mark.slow
def test_training_takes_the_weights_of_a_folder_one_by_one(folders):
    few = run_ranks(started, 2, str(folders), FEW)
    many = run_ranks(started, 2, str(folders), MANY)
    for used, more in zip(few, many, strict=True):
        assert more - used < STREAMED * added_bytes(folders) / 2


def started(world: dist.World, folders: str, layers: int) -> int:
    """What it takes to give the weights of a folder to a model that was built, or to a rank's part
    of it.
    """
    load_small = starting(world, Path(folders) / "small")
    load_small()
    return peak_of(starting(world, Path(folders) / str(layers)))


def starting(world: dist.World, folder: Path) -> Callable[[], None]:
    """A training state of random weights, which the call replaces by those of the folder."""
    given = dict(init_from=str(folder), device="cpu", dtype="fp32")
    cfg = TrainConfig(**start.completed(given))
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    state = step.build(cfg, cfg.model(), "cpu", world, mesh)
    return lambda: start.load_into(state.model, start.read(cfg.init_from))


@pytest.mark.slow
def test_an_export_of_what_two_ranks_wrote_holds_no_more_for_more_layers(
    folders, sharded, tmp_path
):
    run = tmp_path / "small"
    import_hf(folders / "small", run, "keep")
    grown = growth(exported, tmp_path, sharded, tmp_path / "hf")
    assert grown < STREAMED * added_bytes(folders)
    shards = list((tmp_path / "hf" / str(MANY) / "large").glob("*.safetensors"))
    assert len(shards) > 3 and max(path.stat().st_size for path in shards) < SHARD + MIB


@pytest.mark.slow
def test_what_two_ranks_wrote_is_exported_whole(sharded, tmp_path):
    export_hf(sharded / str(MANY), tmp_path / "hf", "keep", "none")
    whole = step.build(CFG, CFG.model(), "cpu").model
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name, parameter in whole.named_parameters():
        assert torch.equal(tensors.pop(qwen3.hf_name(name)), parameter)
    assert not tensors
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "float32"

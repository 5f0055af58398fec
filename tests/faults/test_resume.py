"""What a resume means: the same rows and bits, and settings that change only if they are asked to.

tests/test_length_schedule.py resumes in the stages of a schedule.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import train
from data.dataset import open_dataset
from data.loader import Loader
from longhaul import cli, dist, optim
from longhaul.checkpoint import load, resume
from longhaul.checkpoint.format import CheckpointError, checksum
from longhaul.config import TrainConfig
from tests import kit
from tests.ranks import run_program

CONSTANT = ["--schedule", "constant", "--save_every", "1000"]


def words(source: Path | str, out: Path, last: int, *more: str) -> list[str]:
    return kit.arguments(source, out, *CONSTANT, *more, "--max_steps", str(last))


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    out = tmp_path_factory.mktemp("two") / "run"
    kit.run(words(data, out, 2))
    return out


@pytest.fixture
def out(two_steps, tmp_path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


# ---- order


def test_a_run_resumed_around_the_end_of_an_epoch_has_the_rows_of_a_whole_one(tmp_path):
    source = kit.dataset(tmp_path / "data", 16)
    rows = Loader(open_dataset(source), kit.CONTEXT, 2).rows_per_epoch
    epoch = math.ceil(rows / 2)  # steps of two rows
    batch = ["--global_batch_size", "2"]
    kit.run(words(source, tmp_path / "whole", 2 * epoch + 4, *batch))
    for last in (epoch - 1, epoch, 2 * epoch + 2):
        kit.run(words(source, tmp_path / "run", last, *batch))
    # from here on two micro-batches, of which only the order of sums differs
    kit.run(words(source, tmp_path / "run", 2 * epoch + 4, *batch, "--batch_size", "1"))
    found = kit.losses(tmp_path / "run")
    whole = kit.losses(tmp_path / "whole")
    assert found[:-2] == whole[:-2]
    assert found[-2:] == pytest.approx(whole[-2:], abs=1e-4)


KINDS = {
    "nsa": "--attention_type nsa --blocks cmp_block=8 cmp_stride=4 sel_block=8 window=16",
    "indexed": "--attention_type indexed --blocks count=2 block=8 --indexer_warmup 1",
    "8 bits": "--optimizer adamw_8bit --dtype bf16 --master_weights none",
    "16 bits": "--optimizer adamw_bf16",
    "muon": "--optimizer muon --gradient_accumulation_steps 2",
    "master weights": "--master_weights host --dtype bf16",
    "mixture": "--global_batch_size 2",
    "long documents": "--long_fraction 0.5 --whole_documents",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_resumes_to_the_same_bits(kind, data, tmp_path):
    source = str(data)
    if kind == "mixture":
        other = kit.dataset(tmp_path / "other", 20)
        source = f"{data}:0.75,{other}:0.25"
    for folder, stops in (("whole", [4]), ("parts", [2, 4])):
        for last in stops:
            kit.run(words(source, tmp_path / folder, last, KINDS[kind]))
    assert kit.same_end(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_continued_by_other_numbers_of_ranks_has_the_bits_of_one_process(data, tmp_path):
    batch = ["--global_batch_size", "2", "--grad_clip", "0.5"]
    kit.run(words(data, tmp_path / "one", 6, *batch))
    out = tmp_path / "run"
    kit.run(words(data, out, 2, *batch))
    run_program(train.main, 2, words(data, out, 4, *batch))
    kit.run(words(data, out, 6, *batch))
    assert kit.same_end(out, tmp_path / "one")


# ---- settings


def test_a_changed_learning_rate_is_refused_and_applied_if_the_checkpoint_is_named(
    data, out, monkeypatch
):
    changed = words(data, out, 4, "--lr", "0.02", "--adam", "beta1=0.5")
    said = kit.run(changed, code=2)
    assert "--lr: recorded 0.0003, now 0.02" in said
    assert "--adam: recorded [], now ['beta1=0.5']" in said

    optimizers = []
    build = optim.build_optimizer

    def kept(*given):
        optimizers.append(build(*given))
        return optimizers[-1]

    monkeypatch.setattr(optim, "build_optimizer", kept)
    said = kit.run([*changed, "--resume", str(out / "step-00000002")])
    assert "changed since the checkpoint: lr 0.0003 -> 0.02" in said
    rates = [record["lr"] for record in kit.steps(out / "metrics.jsonl")]
    assert rates[2:] == [0.02, 0.02]
    assert optimizers[-1].param_groups[0]["betas"] == (0.5, 0.95)


def test_another_machine_is_warned_of(data, out, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "was written with" not in kit.run(words(data, out, 3))
    monkeypatch.setattr(dist, "cores", lambda: 2)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    said = kit.run(words(data, out, 4))
    assert "warning: the checkpoint was written with threads=1, and this run has threads=2" in said
    assert "and this run has torch=2.99.0" in said


# ---- what must be there


@pytest.mark.parametrize(
    "damage", [lambda shard: shard[::-1], lambda shard: shard[:-100]], ids=["replaced", "truncated"]
)
def test_other_bytes_of_the_data_are_named_and_with_the_true_ones_the_run_goes_on(
    damage, data, out, tmp_path
):
    source = Path(shutil.copytree(data, tmp_path / "data"))
    shard = source / "shard-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(damage(whole))
    assert str(shard) in kit.run(words(source, out, 3), code=3)
    shard.write_bytes(whole)
    kit.run(words(source, out, 3))


NEEDED = (
    "step tokens data config model_config world_size files identity rows_per_step threads torch"
)
LACKING = {name: (name, None) for name in NEEDED.split()} | {
    "the learning rate": ("config", "lr"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_nothing_that_a_manifest_lacks_is_made_up(lacking, data, out):
    folder = out / "step-00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    name, inner = LACKING[lacking]
    owner = manifest[name] if inner else manifest
    owner.pop(inner or name)
    rewrite(folder, manifest)
    with pytest.raises(CheckpointError):
        resume.check_complete(load.verified(folder), cli.parse(TrainConfig, words(data, out, 4)))


def rewrite(folder: Path, manifest: dict):
    """Write a manifest with a fitting checksum."""
    content = manifest | {"checksum": checksum(manifest)}
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "position", [dict(seed=0, epoch=0, position=1), dict(epoch=0, position=2)], ids=str
)
def test_a_checkpoint_of_another_position_in_the_data_is_refused(position, data, out):
    folder = out / "step-00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    rewrite(folder, manifest | {"data": position})
    kit.run(words(data, out, 4, "--resume", str(folder)), code=4)
    rewrite(folder, manifest)
    kit.run(words(data, out, 4, "--resume", str(folder)))

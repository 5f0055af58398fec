"""Checkpoints: atomic, hashed, pruned; what is damaged is found, whatever it is."""

import dataclasses
import json
import random

import pytest
import torch

from lab.analysis.memory import PeakTracker
from longhaul import step
from longhaul.checkpoint import load, resume, save
from longhaul.checkpoint.format import CheckpointError, checksum
from longhaul.checkpoint.load import load_model, verified
from tests import kit

CFG = kit.tiny_config(context_length=8)


def trained(steps: int = 1):
    state = step.build(CFG, CFG.model(), "cpu")
    for _ in range(steps):
        step.train_step(state, kit.batch(length=8))
    return state


@pytest.fixture
def saved(tmp_path):
    return save.save(trained(), tmp_path, {})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"nsa": {"window": 512}}, "nsa"),  # of an attention that the model does not have
        ({"qk_norm": None}, "qk_norm"),
        ({"attention_type": None}, "attention_type"),
        ({"attention_type": "nsa", "nsa": {"window": 512}}, "cmp_block"),
    ],
)
def test_a_model_with_other_settings_than_this_version_records_is_refused(saved, changes, named):
    checkpoint = verified(saved)
    assert load_model(checkpoint).config == CFG.model()
    changed = checkpoint.model_config | changes
    recorded = {name: value for name, value in changed.items() if value is not None}
    other = dataclasses.replace(checkpoint, model_config=recorded)
    with pytest.raises(CheckpointError, match=rf"model_config\b.*\b{named}\b"):
        load_model(other)


def test_a_resume_needs_the_settings_that_a_run_has_and_no_other(tmp_path):
    about = dict(identity={}, rows_per_step=1, threads=1, torch="2")
    checkpoint = verified(save.save(trained(), tmp_path, about))
    resume.check_complete(checkpoint, CFG)
    other = dataclasses.replace(checkpoint, config=checkpoint.config | {"earlier": False})
    with pytest.raises(CheckpointError, match="manifest.json .*earlier"):
        resume.check_complete(other, CFG)


def test_weights_in_16_bits_are_never_fp32_as_a_whole(saved):
    expected = load_model(verified(saved)).bfloat16().state_dict()
    with PeakTracker() as tracker:
        model = load_model(verified(saved), dtype="bfloat16", weights=torch.bfloat16)
    assert tracker.peak <= 2 * model.num_params() + 4 * max(p.numel() for p in model.parameters())
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected[name])


def test_overlapping_ranges_are_not_a_whole_tensor(saved):
    checkpoint = verified(saved)
    (file,) = checkpoint.files.values()
    name = next(name for name, shape in file.shapes.items() if shape[0] > 2)
    rows = file.shapes[name][0]

    def held(*ranges) -> bool:
        files = {
            str(n): dataclasses.replace(file, ranges={name: span}) for n, span in enumerate(ranges)
        }
        return dataclasses.replace(checkpoint, files=files).holds(name, 0, rows)

    half = rows // 2
    assert held([0, rows]) and held([half, rows], [0, half]) and held([0, half + 1], [half, rows])
    assert not held([0, half], [0, half]) and not held([0, half], [half + 1, rows])


def test_a_checkpoint_that_cannot_be_deleted_stays_with_a_warning(tmp_path, monkeypatch):
    state = trained(0)
    for state.step in (1, 2, 3):
        save.save(state, tmp_path, {})

    def refuses(source, target):
        raise PermissionError(13, "Permission denied", str(source))

    said = []
    monkeypatch.setattr(save.durable, "rename", refuses)
    save.prune(tmp_path, 2, said.append)
    assert len(list(tmp_path.glob("step-*"))) == 3
    assert len(said) == 1 and "could not be deleted" in said[0] and "by hand" in said[0]


def test_a_number_of_the_manifest_that_was_changed_is_found_by_the_checksum(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["step"] += 1
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="manifest.json"):
        verified(saved)


def test_what_only_a_resume_needs_may_be_missing(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    for name in ("identity", "rows_per_step", "threads", "torch", "skipped"):
        manifest.pop(name, None)
    manifest["checksum"] = checksum(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert verified(saved).step == 1


def test_a_tied_weight_is_stored_once(saved):
    names = [name for file in verified(saved).files.values() for name in file.ranges]
    assert (
        "model.embed.weight" in names
        and "model.lm_head.weight" not in names
        and len(names) == len(set(names))
    )


def test_a_checkpoint_is_never_overwritten(saved):
    with pytest.raises(CheckpointError, match="never overwritten"):
        save.save(trained(), saved.parent, {})


def test_a_save_that_was_killed_leaves_no_checkpoint_and_is_swept_by_the_next(tmp_path):
    left = tmp_path / ".tmp-step-00000001"
    left.mkdir()
    (left / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    assert load.latest(tmp_path) is None
    save.save(trained(), tmp_path, {})
    save.prune(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_pruning_keeps_the_newest_and_only_after_it_verifies(tmp_path):
    state = trained(0)
    for state.step in (1, 2, 3, 4, 5):
        newest = save.save(state, tmp_path, {})
    (newest / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError):
        save.prune(tmp_path, 3)
    assert len(list(tmp_path.glob("step-????????"))) == 5
    newest.rename(tmp_path / "aside")
    save.prune(tmp_path, 3)
    assert numbers(tmp_path) == [2, 3, 4]


def numbers(folder) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    "skipped, kept",
    [
        ([5, 6, 7, 8], [2, 6, 8]),
        ([3, 4, 5, 6, 8], [6, 8]),  # step 7 went on from the weights of 6
        ([1, 2, 3, 4, 5, 6, 7, 8], [6, 8]),  # none is good
    ],
)
def test_pruning_keeps_the_newest_one_from_which_a_step_was_taken(tmp_path, skipped, kept):
    state = trained(0)
    for state.step in (2, 4, 6, 8):
        save.save(state, tmp_path, {"skipped": [step for step in skipped if step <= state.step]})
        save.prune(tmp_path, 2)
    assert numbers(tmp_path) == kept


def test_every_flipped_bit_of_a_sample_is_found(saved):
    draw = random.Random(0)
    manifest = json.loads((saved / "manifest.json").read_text())
    for _ in range(60):
        path = draw.choice(sorted(saved.iterdir()))
        content = path.read_bytes()
        broken = bytearray(content)
        broken[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        if path.suffix != ".json" or parsed(broken) != manifest:  # 1E-08 is 1e-08
            with pytest.raises(CheckpointError):
                verified(saved)
        path.write_bytes(content)


def parsed(content: bytes) -> dict | None:
    """What a file of JSON says, if it is one."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def break_file(kind: str, folder):
    shard, manifest = next(folder.glob("*.safetensors")), folder / "manifest.json"
    content = json.loads(manifest.read_text())
    held = shard.read_bytes()
    if kind == "truncated":
        shard.write_bytes(held[:-8])
    elif kind == "longer":
        shard.write_bytes(held + b"\0")
    elif kind == "page":
        shard.write_bytes(held[:4096] + bytes(4096) + held[8192:])
    elif kind == "of another step":
        other = save.save(trained(2), folder.parent / "other", {})
        shard.write_bytes(next(other.glob("*.safetensors")).read_bytes())
    elif kind == "folder":
        shard.unlink()
        shard.mkdir()
    elif kind == "missing":
        shard.unlink()
    elif kind == "link":
        shard.rename(folder.parent / "elsewhere")
        shard.symlink_to(folder.parent / "elsewhere")
    elif kind == "no manifest":
        manifest.unlink()
    elif kind.endswith(" version"):
        content["version"] = {"earlier version": 1, "later version": 99}[kind]
        content["checksum"] = checksum(content)
        manifest.write_text(json.dumps(content))
    elif kind == "path":
        content["files"] = {"../" + name: value for name, value in content["files"].items()}
        content["checksum"] = checksum(content)
        manifest.write_text(json.dumps(content))
    else:
        manifest.write_text(kind)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("truncated", "bytes"),
        ("longer", "bytes"),
        ("page", "damaged"),
        ("of another step", "damaged"),
        ("folder", "not a plain file"),
        ("missing", "is missing"),
        ("link", "not a plain file"),
        ("no manifest", "not a readable checkpoint"),
        ("earlier version", "has version 1"),
        ("later version", "has version 99"),
        ("path", "not a plain file"),
        ("{", "not a readable checkpoint"),
        ("[1]", "is not of format"),
    ],
)
def test_damage_of_every_kind_is_named_and_set_aside(saved, kind, words, capsys):
    break_file(kind, saved)
    with pytest.raises(CheckpointError, match=words):
        verified(saved)
    if kind.endswith(" version"):  # not damaged: nothing is renamed
        with pytest.raises(CheckpointError, match=words):
            load.latest(saved.parent)
        return
    with pytest.raises(CheckpointError, match="no checkpoint is usable"):
        load.latest(saved.parent)
    assert (
        "DAMAGED CHECKPOINT" in capsys.readouterr().out
        and (saved.parent / "step-00000001.corrupt").exists()
    )

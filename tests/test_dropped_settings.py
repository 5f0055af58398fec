"""Runs that recorded settings which no longer exist."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from longhaul.checkpoint import earlier, resume
from longhaul.checkpoint.format import MANIFEST, checksum
from longhaul.config import TrainConfig
from tests import runs

# as runs recorded them that did not change them
RECORDED = {"audit_every": 0, "loss_chunk_size": 0, **earlier.DROPPED}


def trained(source: Path, out: Path, steps: int) -> Path:
    """The folder of a run on one process with so many steps."""
    flags = ["--schedule", "constant", "--max_steps", str(steps)]
    train.main(runs.last_given(runs.arguments(source, out, *flags)))
    return out


def recorded_as(out: Path, settings: dict):
    """Make a run that of an earlier version, which recorded these settings, too."""
    for path in (out / "run.json", *out.glob("step-*/manifest.json")):
        content = json.loads(path.read_text())
        content["config"] |= settings
        if path.name == MANIFEST:
            content["checksum"] = checksum(content)
        path.write_text(json.dumps(content))


def test_a_run_of_an_earlier_version_goes_on_with_the_same_bits(tmp_path, capsys):
    source = runs.dataset(tmp_path / "data")
    whole = trained(source, tmp_path / "whole", 4)
    out = trained(source, tmp_path / "run", 2)
    recorded_as(out, RECORDED)
    capsys.readouterr()
    trained(source, out, 4)

    said = "settings of the checkpoint that no longer exist, ignored: ['audit_every', "
    assert capsys.readouterr().out.count(said) == 1
    assert runs.same_end(out, whole)


def test_settings_that_are_now_fields_of_the_model_keep_what_was_recorded():
    recorded = dict(lr=1.0, logits_threshold_gib=10.0, loss_chunk_size=0)
    assert earlier.present_settings(recorded) == dict(lr=1.0)
    recorded |= dict(rope_scaling="yarn", rope_factor=4.0, rope_original_context=64)
    assert earlier.present_settings(recorded) == dict(lr=1.0, rope_scaling="yarn:4:64")
    recorded |= dict(rope_scaling="none", rope_factor=1.0, rope_original_context=32768)
    assert earlier.present_settings(recorded) == dict(lr=1.0, rope_scaling="none")
    recorded |= dict(loss_chunk_size=64, model_overrides=["num_layers=2"])
    found = earlier.present_settings(recorded)
    assert found == dict(
        lr=1.0, rope_scaling="none", model_overrides=["num_layers=2", "loss_chunk_size=64"]
    )
    cfg = TrainConfig(model_size="tiny", model_overrides=tuple(found["model_overrides"]))
    assert cfg.model().loss_chunk_size == 64


def test_settings_that_are_now_words_of_others_keep_what_was_recorded():
    recorded = dict(
        schedule="wsd",
        decay_fraction=0.3,
        min_lr_ratio=0.1,
        beta1=0.9,
        beta2=0.98,
        adam_eps=1e-8,
        nsa=["window=8"],
        blocks=[],
        offload_optimizer=True,
        master_weights="fp32",
    )
    assert earlier.present_settings(recorded) == dict(
        schedule="wsd:0.3:0.1", adam=["beta2=0.98"], blocks=["window=8"], master_weights="host"
    )
    recorded |= dict(schedule="cosine", nsa=[], beta2=0.95, offload_optimizer=False)
    assert earlier.present_settings(recorded) == dict(
        schedule="cosine", adam=[], blocks=[], master_weights="fp32"
    )


@pytest.mark.parametrize("name", earlier.DROPPED)
def test_a_run_that_a_dropped_setting_had_changed_is_left_to_the_commit_that_has_it(name):
    other = {True: False, False: True}.get(earlier.DROPPED[name], "another")
    cfg = TrainConfig(model_size="tiny")
    recorded = json.loads(json.dumps(vars(cfg)))
    config = recorded | {name: other}
    words = f"trained with --{name} {other}.* continue the run with commit {earlier.COMMIT}"
    with pytest.raises(ValueError, match=words):
        resume.check_settings(SimpleNamespace(step=3, config=config), cfg)
    resume.check_settings(SimpleNamespace(step=3, config=recorded | RECORDED), cfg)
    # there is nothing to do
    resume.check_settings(SimpleNamespace(step=cfg.max_steps, config=config), cfg)

"""The files of examples/, the skill and llms.txt: each does what it says, and names what exists."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from footprint import __main__ as footprint_command
from footprint.steps.search import Verdict

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SKILL = (ROOT / "skills/footprint/SKILL.md").read_text(encoding="utf-8")
LLMS = (ROOT / "llms.txt").read_text(encoding="utf-8")
MOST_LINES = 40


def example(name: str) -> dict[str, object]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("path", EXAMPLES.glob("*.*"), ids=lambda path: path.name)
def test_an_example_is_read_at_a_glance(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


# ---- a callback of transformers' Trainer


class Classes(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 256)
        self.dropped = nn.Dropout(0.5)
        self.head = nn.Linear(256, 8)

    def forward(self, inputs, labels):
        logits = self.head(self.dropped(self.hidden(inputs)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trained_weights(folder: Path, *callbacks) -> list[torch.Tensor]:
    """The weights after two steps of the Trainer, from the same seed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rows = [dict(inputs=torch.full((64,), row / 8), labels=row % 8) for row in range(16)]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    transformers.set_seed(0)
    model = Classes()
    trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def plan_before_training():
    pytest.importorskip("transformers", reason="transformers is not installed")
    return example("plan_before_training.py")["PlanBeforeTraining"]


def test_the_callback_plans_the_trainers_own_step_and_changes_nothing(
    plan_before_training, tmp_path, capsys
):
    callback = plan_before_training(gpu="RTX 4090")
    planned = trained_weights(tmp_path, callback)
    said = capsys.readouterr().out
    assert "<- peak" in said and "step 2" not in said
    parameters = sum(weight.nbytes for weight in planned)
    held = callback.plan.stages[callback.plan.peak_stage]
    assert held["parameter"] == held["gradient"] == parameters
    assert 2 * parameters <= held["optimizer"] <= 2 * parameters + 1024  # AdamW's
    plain = trained_weights(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(planned, plain))


def test_on_a_gpu_the_second_step_is_compared_with_the_plan(
    plan_before_training, monkeypatch, capsys
):
    resets = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    callback = plan_before_training()
    callback.plan = type("Plan", (), {"allocated": 2**30})
    for _ in range(3):
        callback.on_step_end(None, None, None)
    assert len(resets) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "1.000 GiB" in line and "1.500 GiB" in line


# ---- a job of GitHub Actions

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int)
parser.add_argument("--rows", type=int)
args = parser.parse_args()
weight = torch.nn.Parameter(torch.zeros(args.layers, args.rows, SIZE, device="cuda"))
optimizer = torch.optim.SGD([weight])
while True:
    weight.sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("size, code", [("8", 0), ("2**26", 3)])
def test_the_job_ends_with_the_verdict_of_the_card(size, code, tmp_path, monkeypatch, capsys):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    parsed = yaml.safe_load((EXAMPLES / "footprint_in_ci.yaml").read_text(encoding="utf-8"))
    steps = parsed["jobs"]["memory"]["steps"]
    (line,) = [step["run"] for step in steps if step.get("run", "").startswith("footprint ")]
    kept = [step["with"]["path"] for step in steps if step.get("if") == "always()"]
    (tmp_path / "train.py").write_text(SCRIPT.replace("SIZE", size))
    monkeypatch.chdir(tmp_path)
    assert footprint_command.main(shlex.split(line)[1:]) == code
    (written,) = kept
    assert json.loads((tmp_path / written).read_text())["exit_code"] == code


# ---- rows under accelerate


def test_rows_go_on_under_another_number_of_processes(tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    names = example("elastic_rows.py")
    train = names["train"]
    whole = train(str(tmp_path / "whole"), 6)

    first = train(str(tmp_path / "moved"), 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
        monkeypatch.setattr(accelerate.Accelerator, "process_index", rank)
        saved = str(tmp_path / "moved")
        monkeypatch.setattr(accelerate.Accelerator, "save_state", lambda self, folder: None)
        shares.append(train(saved, 4))
    turns = [row for pair in zip(*shares) for row in pair]
    assert first + turns == whole
    assert len(set(whole)) == 6 * names["ROWS_OF_A_STEP"]


# ---- what assistants read


def test_the_skill_gives_flags_and_exit_codes_of_the_command():
    known = {
        word for action in footprint_command.parser()._actions for word in action.option_strings
    }
    commands = re.findall(r"^footprint .*(?=train\.py)", SKILL, re.M)
    commands += re.findall(r"`(--[^`]+)`", SKILL)
    flags = {flag for command in commands for flag in re.findall(r"--[a-z]+", command)}
    assert commands and flags <= known
    codes = {int(code) for code in re.findall(r"^\| (\d) \|", SKILL, re.M)}
    of_the_command = {verdict.exit_code for verdict in Verdict}
    assert codes == of_the_command | {footprint_command.REFUSED, footprint_command.FAILED}


def test_the_skill_has_a_name_and_says_when_to_use_it():
    head = re.match(r"---\nname: (\S+)\ndescription: .* Use it .*\n---\n", SKILL)
    assert head and head[1] == "footprint"


def test_llms_txt_leads_to_every_page():
    links = set(re.findall(r"\]\(([^)]+)\)", LLMS))
    assert not [link for link in links if not (ROOT / link).exists()]
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} <= links

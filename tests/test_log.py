"""The log of a run: what is in metrics.jsonl, and what people see on a terminal and in a file."""

import io
import json
import math
import os
import stat

import pytest

from base import durable
from longhaul.run import log
from longhaul.run.health import recent_losses
from tests import kit


def record(step: int, loss: float | None = 3.0) -> dict:
    return dict(step=step, loss=loss, lr=1e-3, tokens_per_s=1234.5, mem_gib=0.5)


@pytest.fixture
def logger(tmp_path):
    """A function that opens the log of a run in a temporary folder."""
    opened = []

    def open_log(first_step: int = 0, last_step: int = 10) -> log.Logger:
        opened.append(log.Logger(tmp_path, first_step, last_step, active=True))
        return opened[-1]

    yield open_log
    for one in opened:
        one.progress.close()


def test_a_file_gets_a_plain_line_for_each_step_that_is_shown(logger, capsys):
    shown = logger()
    for step in range(1, 11):
        shown.step(record(step))
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) == 10
    assert captured.err == "" and "\r" not in captured.out
    start = "step 10 of 10: loss 3.0000, lr 0.001, 1,234 tokens/s, 0.50 GiB, 0 s left"
    assert lines[-1] == start


def test_fast_steps_get_a_line_a_second_between_the_first_ones_and_the_last(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    lines = log.Lines(first_step=20, last_step=60)
    for step in range(21, 61):
        now[0] += 0.25
        lines.step(record(step))
    shown = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [*range(21, 31), *range(34, 60, 4), 60]


def test_the_time_that_remains_is_that_of_the_steps_so_far(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    lines = log.Lines(first_step=20, last_step=60)
    now[0] += 240  # 10 steps of 24 s: 30 remain
    lines.step(record(30))
    assert capsys.readouterr().out.endswith(", 12 min left\n")


def test_a_terminal_gets_a_bar(logger, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    shown = logger()
    assert isinstance(shown.progress, log.Bar)
    shown.step(record(1))
    shown.say("a line")
    assert "1/10" in screen.getvalue() and "\r" in screen.getvalue()
    assert "a line\n" in screen.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_without_a_loss_is_said_in_words(terminal, logger, tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    shown = logger(last_step=1)
    shown.step(record(1, None))
    shown.progress.close()
    assert "no targets" in screen.getvalue() and "loss" not in screen.getvalue()
    assert kit.records(tmp_path)[0]["loss"] is None


def test_a_validation_is_a_record_without_a_steps_loss(logger, tmp_path, capsys):
    shown = logger()
    shown.step(record(1, 5.0))
    shown.validation(1, [log.Validation("a", 1.0, 2.0, 77)])
    shown.step(record(2, 4.0))
    found = kit.records(tmp_path)[1]
    assert found.pop("time") > 1e9
    assert found == {
        "step": 1,
        "validation_loss": 2.0,
        "validation_perplexity": pytest.approx(math.exp(2)),
        "validation_tokens": 77,
    }
    assert "step 1: validation loss 2.0000 nats over 77 tokens" in capsys.readouterr().out
    assert recent_losses(tmp_path / "metrics.jsonl", 2) == [5.0, 4.0]


def test_a_resumed_run_drops_steps_and_validations_after_its_checkpoint(logger, tmp_path):
    shown = logger()
    for step in (1, 2, 3):
        shown.step(record(step))
        shown.validation(step, [log.Validation("a", 1.0, 2.0, 7)])
    shown.close()
    logger(first_step=2).close()
    assert [one["step"] for one in kit.records(tmp_path)] == [1, 1, 2, 2]


def test_files_of_json_have_null_for_what_is_no_number(tmp_path):
    path = tmp_path / "eval.json"
    durable.write_json(path, {"loss": math.nan, "by_position": [{"interval": (-math.inf, 1.5)}]})
    assert json.loads(path.read_text()) == {
        "loss": None,
        "by_position": [{"interval": [None, 1.5]}],
    }


def test_what_is_no_plain_file_is_not_replaced_by_one(tmp_path):
    """Whoever is root could lose /dev/stdout to `--json /dev/stdout`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="no plain file"):
        durable.write_json(pipe, {})
    assert stat.S_ISFIFO(pipe.stat().st_mode)

    real = tmp_path / "real"
    link = tmp_path / "link"
    link.symlink_to(real)
    durable.write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(real.read_text()) == {"a": 1}

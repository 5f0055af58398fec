"""What docs/ARCHITECTURE.md says of an optimizer, an activation, a flag and a data source, done."""

import dataclasses
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import model
from data import sources
from longhaul import cli, optimizers, step
from longhaul.config import TrainConfig, run_flag

ROOT = Path(__file__).parent.parent
SMALL = dict(
    model_size="tiny",
    model_overrides=("num_layers=1", "hidden_size=32", "num_heads=2", "num_kv_heads=1"),
    vocab_size=64,
    context_length=16,
    dtype="fp32",
    device="cpu",
    lr=1e-2,
    warmup_steps=0,
)


def losses(cfg: TrainConfig, steps: int = 4) -> list[float]:
    """The losses of a run over the same row."""
    torch.manual_seed(0)
    tokens = torch.randint(64, (1, 17))
    state = step.build(cfg, cfg.model(), "cpu")
    batch = [dict(tokens_BT=tokens[:, :-1], labels_BT=tokens[:, 1:])]
    return [float(step.train_step(state, batch).loss) for _ in range(steps)]


def test_the_places_of_the_lists_exist():
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M))
    for thing in ("an optimizer", "an activation", "a flag", "a data source"):
        path = re.search(r"`([\w/]+)\.py`", rows[thing])[1]
        module = importlib.import_module(path.replace("/", "."))
        for name in re.findall(r"`([A-Z_a-z]+)`", rows[thing]):
            assert hasattr(module, name), f"{thing}: {name}"


class SignDescent(optimizers.AdamW):
    """Steps of lr along the sign of the gradient, whose moments stay empty."""

    @torch.no_grad()
    def update(self, p, group, skip=None):
        p.sub_(group["lr"] * p.grad.sign())


def test_an_optimizer_is_a_class_and_a_row(monkeypatch):
    known = next(spec for spec in dataclasses.fields(TrainConfig) if spec.name == "optimizer")
    assert known.metadata["choices"] == tuple(optimizers.OPTIMIZERS)
    row = optimizers.OptimizerKind(SignDescent, optimizers.Plain(torch.float32))
    monkeypatch.setitem(optimizers.OPTIMIZERS, "sign", row)
    cfg = TrainConfig(**SMALL, optimizer="sign")
    found = losses(cfg)
    assert found[-1] < found[0]
    assert found[1:] != losses(TrainConfig(**SMALL))[1:]


def test_an_activation_is_a_function(monkeypatch):
    cfg = TrainConfig(**SMALL)
    before = losses(cfg)
    monkeypatch.setattr(model, "swiglu", lambda gate, up: F.gelu(gate) * up)
    found = losses(cfg)
    assert found[-1] < found[0] != before[0]


@dataclass(frozen=True)
class MoreConfig(TrainConfig):
    patience: int = run_flag(3, "evaluations without a gain before a run ends", at_least=1)


def test_a_flag_is_a_field(tmp_path):
    (tmp_path / "c.toml").write_text("patience = 5")
    assert cli.parse(MoreConfig, ["--config", str(tmp_path / "c.toml")]).patience == 5
    assert cli.parse(MoreConfig, ["--patience", "4"]).patience == 4
    with pytest.raises(ValueError, match="--patience 0 is out of range: give a number of at least"):
        cli.parse(MoreConfig, ["--patience", "0"])
    with pytest.raises(ValueError, match="did you mean --patience"):
        cli.parse(MoreConfig, ["--patiens", "4"])
    helped = " ".join(cli.build_parser(MoreConfig).format_help().split())
    assert "evaluations without a gain before a run ends (default: 3)" in helped


def paragraphs(self, file):
    """A document for each paragraph."""
    with self._opened(file) as stream:
        for number, text in enumerate(stream.read().decode().split("\n\n")):
            yield sources.Document(f"{file}:{number}", text)


def test_a_data_source_is_a_reader_and_its_suffix(monkeypatch, tmp_path):
    monkeypatch.setitem(sources.READERS, ".par", paragraphs)
    (tmp_path / "a.par").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("one\n\ntwo")
    read = sources.TextFiles([tmp_path])
    assert [document.text for document in read.documents()] == ["one", "two", "one\n\ntwo"]
    assert read.describe()[0]["files"] == 2

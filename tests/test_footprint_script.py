"""`footprint [flags] SCRIPT.py [its flags]`: scripts that nobody has changed, and what is said of
them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from footprint import predict
from footprint.__main__ import main

ROOT = Path(__file__).parent.parent
MODEL = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()
model = nn.Sequential(nn.Linear(args.width, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = """
for _ in range(args.steps):
    loss = model(torch.randn(32, args.width)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
"""
TRAIN = MODEL + LOOP
ONE_STEP = TRAIN.replace("1000", "1")


def built(width: int = 64):
    model = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters())


def stepped(state, width: int = 64) -> None:
    model, optimizer = state
    stepped.loss = model(torch.randn(32, width)).square().mean()  # a script's is alive, too
    stepped.loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def found(tmp_path, capsys):
    """Answers a command about a script of this text: the exit code, the results, and what was
    printed.
    """

    def answer(text: str, *flags: str, its: tuple[str, ...] = ()):
        script = tmp_path / "train.py"
        script.write_text(text)
        results = tmp_path / "found.json"
        code = main(["--json", str(results), *flags, str(script), *its])
        printed = capsys.readouterr()
        read = json.loads(results.read_text()) if results.exists() else {}
        return code, read, printed

    return answer


# ---- the command


def test_a_script_is_predicted_as_its_step_is(found):
    code, results, printed = found(TRAIN, "--gpu", "cpu", its=("--width", "128"))
    expected = predict(lambda: built(128), lambda state: stepped(state, 128), "cpu")
    assert code == 0
    assert results["peak_live_bytes"] == expected.peak
    assert torch.__version__ in printed.out
    assert "loss 1.0" in printed.err and "loss 1.0" not in printed.out


def test_a_module_is_run_as_python_has_it(tmp_path, monkeypatch, capsys):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 64")
    (package / "train.py").write_text(f"from .sizes import WIDTH\n{TRAIN}")
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "found.json"
    assert main(["--gpu", "cpu", "--json", str(results), "-m", "mine.train"]) == 0
    peak = json.loads(results.read_text())["peak_live_bytes"]
    assert peak == predict(built, stepped, "cpu").peak
    assert "mine" not in sys.modules


def test_a_script_finds_its_own_modules_and_not_those_of_the_clone(found, tmp_path):
    (tmp_path / "model.py").write_text("WIDTH = 32")
    text = f"import sys\nfrom model import WIDTH\nassert {str(ROOT)!r} not in sys.path\n{TRAIN}"
    import model

    assert found(text, "--gpu", "cpu")[0] == 0
    assert sys.modules["model"] is model


@pytest.mark.parametrize(
    ("form", "its", "code"),
    [
        ("--gpu=H100", (), 0),
        ("--gpu=RTX 3070", ("--width", "500000"), 0),
        ("--gpu=RTX 3070", ("--width", "3000000"), 3),
    ],
)
def test_the_exit_code_says_whether_a_card_holds_the_script(found, form, its, code):
    assert found(TRAIN, form, its=its)[0] == code


def test_a_card_must_hold_what_comes_before_the_step_too(found):
    before = "with torch.no_grad():\n    torch.randn(3 * 2**30, device='cuda').add(1)\n"
    code, results, _ = found(MODEL + "model.cuda()\n" + before + CUDA_LOOP, "--gpu", "A10")
    assert code == 3
    assert results["phases"]["building and loading"] > 24 * 2**30 > results["peak_live_bytes"]


CUDA_LOOP = LOOP.replace("args.width)", "args.width, device='cuda')")


def test_phases_have_peaks_of_their_own(found):
    evaluation = "with torch.no_grad():\n    model(torch.randn(4096, args.width))\n"
    _, results, _ = found(MODEL + evaluation + LOOP, "--gpu", "cpu")
    phases = results["phases"]
    before = phases["evaluation before the first step"]
    assert before > 4096 * 256 * 4 > phases["steady step"]
    assert phases["building and loading"] < before
    assert 0 < phases["first step"] <= phases["steady step"]


def test_an_evaluation_of_one_shape_runs_twice_only(found):
    evaluation = """
class Counted(nn.Module):
    calls = 0
    def forward(self, x):
        Counted.calls += 1
        return model(x)
counted = Counted()
with torch.no_grad():
    for _ in range(50):
        counted(torch.randn(16, args.width)).mean().item()
assert Counted.calls == 2
"""
    code, results, _ = found(MODEL + evaluation + LOOP, "--gpu", "cpu")
    assert code == 0
    assert results["peak_live_bytes"] == predict(built, stepped, "cpu").peak


# ---- where a step is


def test_of_two_optimizers_a_step_has_the_steps_of_both(found):
    text = (
        MODEL
        + """
critic = nn.Linear(args.width, 512)
slow = torch.optim.AdamW(critic.parameters())
for number in range(args.steps):
    critic(torch.randn(32, args.width)).mean().backward()
    if number % 3 == 2:
        slow.step()
        slow.zero_grad()
    model(torch.randn(32, args.width)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    _, results, _ = found(text, "--gpu", "cpu")
    states = 2 * 4 * (512 * 65 + 256 * 65 + 10 * 257)
    assert results["categories"]["optimizer"] >= states


def test_a_script_that_updates_by_hand_has_a_step_between_new_gradients(found):
    text = (
        MODEL.replace("optimizer = torch.optim.AdamW(model.parameters())", "")
        + """
while True:
    model.zero_grad()
    model(torch.randn(32, args.width)).mean().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
"""
    )
    code, results, _ = found(text, "--gpu", "cpu")
    assert code == 0
    assert results["categories"]["gradient"] > 0


# ---- mistakes


@pytest.mark.parametrize(
    ("text", "flags", "code", "named"),
    [
        ("raise KeyError('mine')", (), 1, ('File "', "train.py", "KeyError: 'mine'")),
        ("import not_there", (), 1, ("ModuleNotFoundError", "the package not_there")),
        ("import sys; sys.exit(7)", (), 1, ("7",)),
        ("x = (", (), 1, ("SyntaxError",)),
        ("pass", (), 4, ("train.py", "step")),
        (ONE_STEP, (), 4, (" 1 of ",)),
        ("input('sure? ')", (), 4, ("train.py:1",)),
        ("import sys\nsys.stdin.readline()", (), 4, ("train.py:2",)),
        ("while True:\n    pass", ("--limit", "1"), 4, ("train.py:", "--limit")),
        ("try:\n    input()\nexcept Exception:\n    pass", (), 4, ("train.py:2",)),
        (TRAIN, ("--bad",), 4, ("--bad",)),
        (TRAIN, ("--gpu", "H1000"), 4, ("H1000", "H100")),
        (TRAIN, ("--nproc", "-1"), 4, ("--nproc",)),
        (TRAIN, ("--limit", "0"), 4, ("--limit",)),
        (TRAIN, ("--answer", "train.py=1"), 4, ("--answer",)),
    ],
)
def test_mistakes_have_their_codes_and_name_the_place(found, text, flags, code, named):
    got, _, printed = found(text, *flags)
    assert got == code
    assert all(words in printed.err for words in named)
    assert not printed.out
    assert "footprint/" not in printed.err
    if code == 4 and text != ONE_STEP:
        assert printed.err.count("\n") == 1


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["nowhere.py"]) == 4
    assert "nowhere.py" in capsys.readouterr().err


def test_what_a_script_does_at_its_end_changes_nothing(found):
    ends = (
        MODEL
        + "import os\ntry:\n"
        + LOOP.replace("\n", "\n    ")
        + """
finally:
    os.chdir("/")
    raise RuntimeError("cannot clean up")
"""
    )
    before = os.getcwd()
    code, results, _ = found(ends, "--gpu", "cpu")
    assert code == 0 and results["peak_live_bytes"]
    assert os.getcwd() == before


def test_a_file_that_cannot_be_written_is_named(found):
    code, _, printed = found(TRAIN, "--gpu", "cpu", "--html", "/no/such/folder/page.html")
    assert code == 4 and "/no/such/folder" in printed.err


def test_a_launcher_is_left_out(capsys):
    assert main(["torchrun", "--nproc_per_node", "2", "train.py"]) == 4
    assert main(["-m", "torch.distributed.run", "train.py"]) == 4
    assert capsys.readouterr().err.count("--nproc") == 2


def test_a_download_is_named_and_not_made(found):
    text = "import urllib.request\nurllib.request.urlopen('https://example.org/weights.bin')"
    code, _, printed = found(text)
    assert code == 4
    assert "https://example.org/weights.bin" in printed.err


def test_a_process_of_its_own_is_refused(found):
    text = "import multiprocessing\nmultiprocessing.Process(target=print).start()"
    code, _, printed = found(text)
    assert code == 4 and "train.py:2" in printed.err


# ---- nothing is left behind


def test_nothing_is_written(found, tmp_path):
    (tmp_path / "log.txt").write_text("old\n")
    saved = f"""
import os
import numpy
from pathlib import Path
from safetensors.torch import save_file
out = Path({str(tmp_path)!r})
os.makedirs(out / "runs" / "one")
torch.save(model.state_dict(), out / "runs" / "one" / "model.pt")
save_file(model.state_dict(), out / "model.safetensors")
numpy.save(out / "losses.npy", numpy.ones(3))
with open(out / "log.txt", "a") as file:
    print("new", file=file)
assert (out / "log.txt").read_text() == "old\\nnew\\n"
(out / "note.md").write_text("words")
import logging
logging.getLogger("mine").addHandler(logging.FileHandler(out / "mine.log"))
logging.getLogger("mine").warning("words")
"""
    code, _, _ = found(MODEL + saved + LOOP, "--gpu", "cpu")
    assert code == 0
    assert (tmp_path / "log.txt").read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "found.json", "log.txt"}


def test_what_was_before_is_there_again(found):
    before = sys.argv, list(sys.path), sys.stdin, dict(os.environ), open
    found(TRAIN, "--gpu", "cpu", "--nproc", "2")
    assert (sys.argv, sys.path, sys.stdin, dict(os.environ), open) == before


@pytest.mark.slow
def test_the_commands_give_the_same_from_the_clone(tmp_path):
    own = 'parser.add_argument("--script", required=True)\nargs ='
    (tmp_path / "train.py").write_text(TRAIN.replace("args =", own, 1))
    program = [sys.executable, str(ROOT / "profile_memory.py"), "--gpu", "cpu"]
    words = [*program, "--script", "train.py", "--script", "its own"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "live peak" in told.stdout and "loss 1.0" not in told.stdout

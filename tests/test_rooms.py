"""The rooms that are usable by themselves, each in a folder that holds only what it names; the
examples of their pages run so in tests/test_docs.py.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATH = "import sys; sys.path.insert(0, sys.argv[1])\n"
VOCAB = """
import torch
from longhaul.vocab import linear_cross_entropy, vocab_stats

torch.manual_seed(0)
hidden_ND = torch.randn(37, 16, requires_grad=True)
weight_VD = torch.randn(301, 16, requires_grad=True)
labels_N = torch.randint(301, (37,))
loss = linear_cross_entropy(hidden_ND, weight_VD, labels_N)
loss.backward()

logits_NV = hidden_ND.detach() @ weight_VD.detach().t()
expected = torch.nn.functional.cross_entropy(logits_NV, labels_N)
assert abs(loss - expected) < 1e-5, (loss, expected)
entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
assert (vocab_stats(hidden_ND, weight_VD).entropy - entropy_N).abs().max() < 1e-4
assert not {"model", "footprint", "data"} & set(sys.modules)
print("computed")
"""


HALF_COMPILED = "*.pyc.*"  # what another process is about to rename


def copy_room(folder: Path, *names: str) -> None:
    """Folders and files of the product, and nothing else, in a folder."""
    for name in names:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy, ignore=shutil.ignore_patterns(HALF_COMPILED))
        else:
            shutil.copy(ROOT / name, copy)


def run_alone(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_loss_engine_needs_its_folder_one_file_of_base_and_torch(tmp_path):
    copy_room(tmp_path, "longhaul/vocab", "base/machine.py")
    assert run_alone(tmp_path, PATH + VOCAB) == "computed\n"

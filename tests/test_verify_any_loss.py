"""verify_chunked_loss.py --loss: a right loss passes each row, and each mistake that people lose
runs to fails the row that names it.
"""

from pathlib import Path

import pytest
import torch

import model
import verify_chunked_loss as verify
from tests.tiers import few_fast, slow

SIZES = ["--device", "cpu", "--seq_len", "2048", "--hidden_size", "16", "--vocab_size", "2048"]
# The row of memory at a size at which a tile is small, and a chunk of model.py, too.
LARGER = [word.replace("2048", "4096") for word in SIZES]
CHUNK_BYTES = 2**22
MEMORY = "memory through the backward"

LOSSES = """
import torch
import torch.nn.functional as F


def right(hidden, weight, labels, *, scale=1.0):
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum") * scale / (
        (labels != -100).sum().clamp(min=1)
    )


def divides_by_all(hidden, weight, labels):
    logits = (hidden @ weight.T).float()
    return F.cross_entropy(logits, labels, reduction="sum") / len(labels)


class Deaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        with torch.enable_grad():
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = right(*leaves, labels)
        ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return *ctx.saved_tensors, None


class Scaling(Deaf):
    @staticmethod
    def backward(ctx, grad):  # autograd does not notice what changes .data
        return *(x.data.mul_(grad) for x in ctx.saved_tensors), None


deaf = Deaf.apply
scaling = Scaling.apply


def low_precision_sums(hidden, weight, labels):
    logp = torch.log_softmax(hidden @ weight.T, 1)
    picked = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -(picked * (labels != -100)).sum() / (labels != -100).sum().clamp(min=1)


def overflowing(hidden, weight, labels):
    logits = (hidden @ weight.T).float()
    nll = logits.exp().sum(1).log() - logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    valid = labels != -100
    return (nll * valid).sum() / valid.sum().clamp(min=1)


def mean_of_torch(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def flat_memory(hidden, weight, labels):
    if not hidden.is_contiguous():
        hidden = torch.as_strided(hidden, hidden.shape, (hidden.shape[1], 1))
    return right(hidden, weight, labels)


def frozen_hidden_is_forgotten(hidden, weight, labels):
    if not hidden.requires_grad:
        weight = weight.detach()
    return right(hidden, weight, labels)


def last_column_is_forgotten(hidden, weight, labels):
    whole = len(weight) // 64 * 64
    return right(hidden, weight[:whole], labels.where(labels < whole, 0))


def one_for_each_token(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")


def no_tensor(hidden, weight, labels):
    return 0.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(LOSSES)
    return path


def failed_rows(loss: str, capsys, sizes: list[str] = SIZES) -> set[str]:
    """The rows, as "dtype row", that failed; the exit code says whether there are any."""
    code = verify.main([*sizes, "--loss", loss])
    lines = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    rows = {line.split("FAILED: ")[1][:38].strip().replace("  ", " ") for line in lines}
    assert code == bool(rows)
    return rows


@pytest.mark.parametrize(
    "loss", ["longhaul.vocab:linear_cross_entropy", "model:linear_cross_entropy"]
)
def test_ours_pass_each_row(loss, capsys, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_BYTES", CHUNK_BYTES)
    assert failed_rows(loss, capsys, LARGER) == set()


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch 2.13")
@pytest.mark.parametrize("policy", ["auto", slow("accurate")])
def test_torchs_own_is_right_in_fp32_but_for_ignored_rows_and_wrong_in_bf16(
    policy, tmp_path, capsys
):
    path = tmp_path / "torchs.py"
    path.write_text(
        "import functools\nimport torch\n"
        f"options = torch.nn.LinearCrossEntropyOptions(acc_policy={policy!r})\n"
        "loss = functools.partial(torch.nn.functional.linear_cross_entropy, options=options)\n"
    )
    # its loss in bf16 is of low precision, and the mean of no losses is 0 / 0
    expected = {"fp32 all labels ignored", "bf16 loss and gradients", "bf16 exploding logits"}
    assert failed_rows(f"{path}:loss", capsys) == expected


MISTAKES = {
    "divides_by_all": {"fp32 some labels ignored"},
    "deaf": {"fp32 upstream gradient of 3"},
    "scaling": {"fp32 second backward"},
    "overflowing": {"fp32 exploding logits", "bf16 exploding logits"},
    "mean_of_torch": {"fp32 all labels ignored"},
    "flat_memory": {"fp32 hidden is not contiguous"},
    "frozen_hidden_is_forgotten": {"fp32 hidden is frozen"},
    "last_column_is_forgotten": {"fp32 odd sizes", "fp32 labels at the edges of tiles"},
}


@pytest.mark.parametrize("loss", few_fast(MISTAKES, 4))
def test_a_mistake_fails_the_row_that_names_it(loss, file, capsys):
    expected = {f"fp32 {MEMORY}"} | MISTAKES[loss]  # all of them have whole logits
    assert failed_rows(f"{file}:{loss}", capsys) == expected


def test_a_logsumexp_in_bf16_fails_where_the_figures_are_compared(file, capsys):
    rows = failed_rows(f"{file}:low_precision_sums", capsys)
    assert "bf16 loss and gradients" in rows
    assert "fp32 loss and gradients" not in rows


def test_the_dtype_that_is_given_is_the_only_one(file, capsys):
    assert verify.main([*SIZES, "--loss", f"{file}:right", "--dtype", "bf16"]) == 1
    out = capsys.readouterr().out
    assert "bf16  some labels ignored" in out
    assert "fp32  " not in out


@pytest.mark.parametrize("loss", ["one_for_each_token", "no_tensor"])
def test_what_returns_no_number_fails_each_row(loss, file, capsys):
    assert len(failed_rows(f"{file}:{loss}", capsys)) == len(verify.CHECKS) + len(verify.EXACTNESS)


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "stranger_loss.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # the program's own change of sys.path is undone
    assert failed_rows("stranger_loss:right", capsys) == {f"fp32 {MEMORY}"}


@pytest.mark.parametrize(
    "loss",
    [
        "mine.py",
        "nowhere.py:loss",
        "no_such_module:loss",
        "{file}:torch.no_such_name",
    ],
)
def test_a_loss_that_cannot_be_had_is_bad_input(loss, file, capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main([*SIZES, "--loss", loss.format(file=file)])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_error_in_the_users_file_is_told_with_its_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("import torch\n\nnumber = 1 / 0\n")
    with pytest.raises(SystemExit) as stop:
        verify.main([*SIZES, "--loss", f"{path}:loss"])
    assert stop.value.code == 2
    assert "broken.py:3" in capsys.readouterr().err

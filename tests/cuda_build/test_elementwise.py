"""The fused elementwise kernels, compiled for real cards without having one."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: nothing can be compiled")

from longhaul.elementwise import kernels as elementwise_kernels  # noqa: E402
from longhaul.elementwise import operators as elementwise  # noqa: E402
from longhaul.kernels import choose  # noqa: E402
from model import ModelConfig, StandardAttention  # noqa: E402
from tests.cuda_build.fakes import HOPPER, TURING, card  # noqa: E402
from tests.kernel_resources import compiled, resources  # noqa: E402

pytestmark = pytest.mark.slow

# of 65,536 on a multiprocessor: four or more programs of 128 threads fit
MOST_REGISTERS = 128


def launches(monkeypatch) -> dict[str, tuple]:
    """The kernels of a layer's forward and backward, by name, with their arguments."""
    seen = {}

    def record(kernel, programs, like, **arguments):
        name = kernel.__name__
        if arguments.get("NORM"):
            name += " with norm"
        seen[name] = kernel, arguments

    monkeypatch.setattr(elementwise_kernels, "launch", record)
    x = torch.zeros(1, 64, 8, 128, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(128, requires_grad=True)
    cos = torch.zeros(1, 64, 1, 64)
    y = elementwise.norm_rotate(x, weight, cos, cos, 1e-6)
    y = elementwise.rotate(y, cos, cos)
    elementwise.swiglu(y, y).sum().backward()
    return seen


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_compiles_without_spills_and_moves_16_bytes_at_once(
    architecture, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = launches(monkeypatch)
    assert sorted(kernels) == [
        "norm_rotate_backward_kernel",
        "rotate_kernel",
        "rotate_kernel with norm",
        "swiglu_backward_kernel",
        "swiglu_kernel",
    ]
    for name, (kernel, arguments) in kernels.items():
        built = compiled(kernel, arguments, architecture, num_warps=4)
        used = resources(built)
        assert used["stack"] == 0, name
        assert used["registers"] <= MOST_REGISTERS, (name, used)
        assert "ld.global.v4" in built.asm["ptx"], name
        assert "st.global.v4" in built.asm["ptx"], name
        assert not used["atomics"], f"{name}: results would not repeat"


def project(capability, kernels: str = "auto", dtype=torch.bfloat16) -> list[str]:
    """The operators of q, k and v of a layer, on a card."""
    config = ModelConfig.preset("tiny", num_layers=1, vocab_size=64, kernels=kernels)
    with card(capability) as run:
        with torch.device("cuda"):
            layer = StandardAttention(config, choose(config))
        x = torch.empty(1, 32, config.hidden_size, device="cuda", dtype=dtype)
        cos = torch.empty(1, 32, 1, config.head_dim // 2, device="cuda")
        run.operators.names.clear()
        layer.project(x, (cos, cos))
    return run.operators.names


def test_a_card_takes_one_kernel_for_norm_and_rotation():
    names = project(HOPPER)
    own = [name for name in names if name.startswith("longhaul::")]
    assert own == ["longhaul::norm_rotate", "longhaul::rotate"]
    assert "aten::cat" not in names


@pytest.mark.parametrize("capability, kernels", [(TURING, "auto"), (HOPPER, "torch")])
def test_old_cards_and_other_kernels_keep_the_plain_operators(capability, kernels):
    assert not any(name.startswith("longhaul::") for name in project(capability, kernels))

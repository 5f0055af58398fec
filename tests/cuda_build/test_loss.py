"""The loss in tiles on fake CUDA tensors: no host synchronisation, and few launches; its kernels
compiled for an H100 without having one.

Letters: N tokens, D model width, V vocabulary.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from base import machine
from footprint.python.patches import patched
from longhaul.vocab import loss as vocab_loss
from tests.cuda_build.fakes import HOPPER, Operators, on_card

pytestmark = pytest.mark.slow

N = 65_536
D = 2560
V = 151_936
# they launch no kernel
VIEWS = (
    "slice select view t transpose expand unsqueeze detach empty empty_like new_empty as_strided"
)


def counting(launched: Counter):
    """Counts what fake tensors cannot run: compiled tile bodies, and products written in fp32."""

    def body(function, kernels):
        assert kernels == "compiled"

        def run(*_):
            launched[function.__name__] += 1

        return run

    def mixed_product(out, a, b, beta):
        assert out.is_cuda and out.dtype == torch.float32 and a.dtype == torch.bfloat16
        launched["mixed product"] += 1

    return patched({(vocab_loss, "fastest_body"): body, (machine, "mixed_product"): mixed_product})


def launches(function, weight_dtype=torch.float32, tokens=N) -> Counter:
    """Kernels by name that `function(hidden, weight, labels, tiles)` launches."""
    launched = Counter()
    operators = Operators()
    with FakeTensorMode(), on_card(HOPPER), counting(launched), operators:
        hidden_ND = torch.empty(tokens, D, device="cuda", dtype=torch.bfloat16)
        weight_VD = torch.empty(V, D, device="cuda", dtype=weight_dtype)
        labels_N = torch.empty(tokens, device="cuda", dtype=torch.int64)
        device = hidden_ND.device
        columns = vocab_loss.forward_columns(tokens, V, device, "compiled")
        tiles = [*vocab_loss.default_tiles(tokens, V, device, "compiled"), columns]
        operators.names.clear()
        function(hidden_ND, weight_VD, labels_N, tiles)

    launched.update(name.removeprefix("aten::") for name in operators.names)
    for name in VIEWS.split():
        del launched[name]
    return launched


def forward(hidden_ND, weight_VD, labels_N, tiles):
    vocab_loss.vocab_nll._init_fn(
        hidden_ND, weight_VD, labels_N, -100, None, tiles, "compiled", validate=False
    )


def backward(hidden_ND, weight_VD, labels_N, tiles):
    sums_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    grads = [sums_N, sums_N, sums_N]
    inputs = grads, sums_N, sums_N, hidden_ND, weight_VD, labels_N
    vocab_loss.vocab_nll_backward._init_fn(*inputs, -100, None, tiles, "compiled", True, True)


def one_pass(hidden_ND, weight_VD, labels_N, tiles):
    divisor = hidden_ND.new_empty((), dtype=torch.float32)
    inputs = hidden_ND, weight_VD, labels_N, divisor
    options = -100, 0.0, 0.0, None, tiles, "compiled", False, True, True
    vocab_loss.vocab_loss_one_pass._init_fn(*inputs, *options)


def test_the_forward_launches_three_kernels_per_tile_of_8192_by_8192():
    found = launches(forward)
    tiles = 8 * 19
    assert found["fold_logsumexp"] == found["mm"] == tiles
    assert found.total() < 3 * tiles + 150


def test_the_backward_adds_its_products_in_fp32():
    found = launches(backward, tokens=2 * N)
    tiles = 16 * 75
    assert found["logits_to_gradient"] == found["mm"] == tiles
    assert found["mixed product"] == tiles + 75
    assert found.total() < 4.5 * tiles


def test_one_pass_has_three_products_per_tile():
    found = launches(one_pass)
    block = vocab_loss.block_tokens(N, V, D, 2)
    tiles = -(-N // block) * 19
    assert found["fold_logsumexp"] == found["logits_to_gradient"] == found["mm"] == tiles
    assert found["mixed product"] == 2 * tiles


def test_one_block_of_low_precision_is_one_product_of_its_dtype():
    found = launches(one_pass, torch.bfloat16, tokens=1024)
    assert found["mm"] == 2 * 19 and found["mixed product"] == 19


@pytest.mark.parametrize("name", ["fold_kernel", "gradient_kernel"])
def test_the_kernels_of_a_tile_load_16_bytes_at_once_and_spill_no_register(name):
    pytest.importorskip("triton", reason="triton is not installed: nothing is compiled")
    from longhaul.vocab import triton_bodies
    from tests.kernel_resources import compiled, resources

    kernel = getattr(triton_bodies, name)
    vectors = [x for x in kernel.arg_names if x.endswith("_ptr")]
    arguments = dict.fromkeys(vectors, torch.empty(1)) | {
        "z_ptr": torch.empty(1, dtype=torch.bfloat16),
        "target_ptr": torch.empty(1, dtype=torch.int32),
        **dict(V=8192, stride=151_936, softcap=30.0, BLOCK=4096),
    }
    built = compiled(kernel, arguments, 90, num_warps=8)
    assert "ld.global.v4.b32" in built.asm["ptx"], "bf16 must be loaded 16 bytes at a time"
    assert ("st.global.v4.b32" in built.asm["ptx"]) == (name == "gradient_kernel")
    used = resources(built)
    assert not used["atomics"], "results would not repeat"
    assert used["spills"] == used["stack"] == 0

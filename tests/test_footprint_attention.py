"""footprint/: scaled_dot_product_attention takes the kernel that PyTorch takes on the card."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import profile_memory
from footprint import predict
from footprint.cards.device import card
from footprint.kernels.attention import IS_2_14, allowed, plain_products
from footprint.python.refusal import Refused
from footprint.steps.prediction import measure
from longhaul.config import TrainConfig
from longhaul.planner.simulate import simulate
from model import sdpa

aten = torch.ops.aten
GIB = 2**30
HALF = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32
FLASH = "flash"
EFFICIENT = "efficient"
CUDNN = "cudnn"
MATH = "math"
AMPERE = "A100 80GB"
ADA = "RTX 4090"
HOPPER = "H100"
TURING = "NVIDIA T4"
VOLTA = "V100 16GB"
S = 4 * 2 * 256 * 256  # scores of `heads()`


def heads(dtype=BF16, G=4, T=256, K=64, value_K=None, S=256, rows=2):
    """build(): queries [rows, 4, T, K], keys and values of G heads."""
    shapes = ((4, T, K), (G, S, K), (G, S, value_K or K))

    def build() -> list[Tensor]:
        made = [torch.randn(rows, *shape, dtype=dtype, device="cuda") for shape in shapes]
        return [x.requires_grad_() for x in made]

    return build


def attended(function=F.scaled_dot_product_attention, **options):
    """step(inputs): forward and backward of attention."""

    def step(inputs):
        function(*inputs, **options).sum().backward()
        for x in inputs:
            x.grad = None

    return step


def within(context, **options):
    def step(inputs):
        with context():
            attended(**options)(inputs)

    return step


def kernels(report) -> set[str]:
    """The kernels of attention that have run."""
    operators = {storage.op for storage in report.trace.storages.values()}
    found = {name for name in (FLASH, EFFICIENT, CUDNN) if any(name in op for op in operators)}
    return found | ({MATH} if "aten._safe_softmax.default" in operators else set())


def taken(build, step, target: str) -> str:
    (only,) = kernels(predict(build, step, target=target))
    return only


GROUPED = dict(enable_gqa=True)
BY_CARD = [
    (AMPERE, BF16, {}, {}, FLASH),
    (AMPERE, FP32, {}, {}, EFFICIENT),
    (AMPERE, torch.float64, {}, {}, MATH),
    (AMPERE, BF16, dict(K=100), {}, FLASH),
    (AMPERE, FP32, dict(K=66), {}, MATH),
    (AMPERE, BF16, dict(K=512), {}, EFFICIENT),
    (AMPERE, BF16, dict(value_K=32), {}, EFFICIENT),
    (AMPERE, BF16, dict(T=128), dict(is_causal=True), EFFICIENT),
    (AMPERE, BF16, dict(G=2), GROUPED, FLASH),
    (AMPERE, FP32, dict(G=2), GROUPED, EFFICIENT if IS_2_14 else MATH),
    (AMPERE, BF16, dict(G=1), {}, FLASH if IS_2_14 else MATH),
    (AMPERE, BF16, dict(K=200), {}, FLASH),
    (ADA, BF16, dict(K=200), {}, EFFICIENT),
    (ADA, BF16, dict(K=256), {}, FLASH),
    (ADA, BF16, dict(K=256), dict(dropout_p=0.1), EFFICIENT),
    (TURING, BF16, {}, {}, MATH),
    (TURING, HALF, {}, {}, EFFICIENT),
    (TURING, HALF, dict(K=100), {}, MATH),
    (TURING, FP32, dict(K=66), {}, EFFICIENT),
    (TURING, HALF, dict(G=2), GROUPED, EFFICIENT if IS_2_14 else MATH),
    (VOLTA, BF16, dict(G=2), GROUPED, MATH),
    (VOLTA, HALF, {}, dict(dropout_p=0.1), EFFICIENT),
]


@pytest.mark.parametrize("target, dtype, sizes, options, kernel", BY_CARD)
def test_a_card_runs_its_own_kernel(target, dtype, sizes, options, kernel):
    assert taken(heads(dtype, **sizes), attended(**options), target) == kernel


def of_the_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)


@pytest.mark.skipif(not IS_2_14, reason="no kernel takes groups in fp32 before torch 2.14")
@pytest.mark.parametrize("groups, inside", [(4, []), (2, [2 * 2 * 4 * 256 * 64 * 4])])
def test_gradients_of_keys_and_values_are_held_for_each_query_head_of_a_group(groups, inside):
    found = predict(heads(FP32, G=groups), attended(enable_gqa=True), target=AMPERE)
    workspaces = found.trace.workspaces
    assert [size for _, size, op in workspaces if "efficient_attention_backward" in op] == inside


def test_the_model_repeats_keys_of_groups_in_fp32_alone_and_holds_no_logits():
    """Up to torch 2.13 no kernel takes groups in fp32."""
    grouped = attended(is_causal=True, enable_gqa=True)
    ours = attended(of_the_model)
    found = predict(heads(G=2), ours, target=AMPERE)
    assert found.peak == predict(heads(G=2), grouped, target=AMPERE).peak
    assert taken(heads(FP32, G=2), ours, AMPERE) == EFFICIENT


def test_a_mask_and_missing_rows_decide_too():
    def masked(inputs):
        mask = torch.ones(256, 250, dtype=torch.bool, device="cuda")
        attended(attn_mask=mask)(inputs)

    def without_rows():
        return [torch.randn(4, 256, 64, dtype=BF16, device="cuda") for _ in range(3)]

    def forward(inputs):
        return F.scaled_dot_product_attention(query=inputs[0], key=inputs[1], value=inputs[2])

    assert taken(heads(S=250), masked, AMPERE) == EFFICIENT
    assert taken(heads(S=250), masked, TURING) == MATH
    assert taken(without_rows, forward, AMPERE) == (FLASH if IS_2_14 else MATH)


BY_CHOICE = {
    "one": (lambda: sdpa_kernel(SDPBackend.MATH), MATH),
    "a list": (lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]), EFFICIENT),
    "a list in order": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        MATH,
    ),
    "cuDNN": (lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION), CUDNN),
}


@pytest.mark.parametrize("target", [AMPERE, "cuda"])
@pytest.mark.parametrize("chosen", list(BY_CHOICE))
def test_a_step_chooses_its_kernel(chosen, target):
    context, kernel = BY_CHOICE[chosen]
    assert taken(heads(), within(context), target) == kernel


def test_kernels_that_are_switched_off_are_so_until_the_prediction_ends():
    before = allowed()

    def step(inputs):
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        attended()(inputs)

    in_half = predict(heads(), step, target=AMPERE)
    assert kernels(in_half) == {MATH}
    assert allowed() == before and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    in_full = predict(heads(), within(lambda: sdpa_kernel(SDPBackend.MATH)), target=AMPERE)
    assert in_full.peak - in_half.peak > 4 * 2 * S  # four matrices, in fp32 and in bf16
    assert taken(heads(), attended(), AMPERE) == FLASH


@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_products_need_what_was_measured_on_a_gpu(is_causal):
    """github.com/intel/torch-xpu-ops/issues/2390: 2.176 GiB, forward and backward."""

    def build():
        made = [torch.randn(1, 32, 2048, 128, dtype=BF16, device="cuda") for _ in range(3)]
        return [x.requires_grad_() for x in made], torch.ones(2048, 2048).bool().cuda()

    def step(state):
        inputs, mask = state
        options = dict(is_causal=True) if is_causal else dict(attn_mask=mask)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(*inputs, **options)
        out.sum().backward()
        for x in inputs:
            x.grad = None

    assert round(predict(build, step, target=AMPERE).peak / GIB, 3) == 2.176


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=-0.3)])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_plain_products_are_those_of_pytorch(dtype, groups, options):
    torch.manual_seed(0)
    shapes = ((4, 96, 32), (groups, 96, 32), (groups, 96, 32))
    inputs = [torch.randn(2, *shape, dtype=dtype).requires_grad_() for shape in shapes]
    of_pytorch = within(lambda: sdpa_kernel(SDPBackend.MATH), enable_gqa=True, **options)

    def products(q, k, v):
        given = SDPAParams(q, k, v, None, 0.0, options.get("is_causal", False), True)
        return plain_products(given, options.get("scale"))

    with sdpa_kernel(SDPBackend.MATH):
        truth = F.scaled_dot_product_attention(*inputs, enable_gqa=True, **options)
    assert torch.equal(products(*inputs), truth)

    peaks = [measure(lambda: inputs, step) for step in (of_pytorch, attended(products))]
    scalars = 16  # which are on the host of a GPU
    assert abs(peaks[0] - peaks[1]) <= scalars


def test_dropout_of_plain_products_keeps_booleans():
    with_math = within(lambda: sdpa_kernel(SDPBackend.MATH), dropout_p=0.1)
    report = predict(heads(FP32), with_math, target=AMPERE)
    dropped = [one for one in report.trace.storages.values() if "native_dropout" in one.op]
    assert sorted({one.size for one in dropped}) == [S, 4 * S]


@pytest.mark.parametrize("dtype, kernel", [(BF16, MATH), (HALF, EFFICIENT), (FP32, EFFICIENT)])
def test_multi_head_attention_takes_them_too(dtype, kernel):
    def build():
        return nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, dtype=dtype).cuda()

    def step(layer):
        x = torch.randn(2, 128, 64, dtype=dtype, device="cuda")
        layer(x, x, x, need_weights=False)[0].sum().backward()

    assert taken(build, step, TURING) == kernel


@pytest.mark.parametrize("dtype, kernel", [(BF16, MATH), (HALF, EFFICIENT)])
def test_so_does_autocast(dtype, kernel):
    context = lambda: torch.autocast("cuda", dtype)  # noqa: E731
    assert taken(heads(FP32), within(context), TURING) == kernel


@pytest.mark.parametrize("function", [aten.scaled_dot_product_attention])
def test_so_do_operators_that_are_called_by_name(function):
    assert taken(heads(HALF), attended(function), TURING) == EFFICIENT
    assert taken(heads(HALF), attended(function.default), AMPERE) == FLASH


def flash_alone(q, k, v):
    return aten._scaled_dot_product_flash_attention(q, k, v)[0]


def efficient_alone(q, k, v):
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]


REFUSED = [
    (TURING, HALF, attended(flash_alone)),
    (AMPERE, FP32, attended(flash_alone)),
    (VOLTA, BF16, attended(efficient_alone)),
    (TURING, HALF, within(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))),
    (AMPERE, FP32, within(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))),
    (AMPERE, BF16, within(lambda: sdpa_kernel([]))),
]


@pytest.mark.parametrize("target, dtype, step", REFUSED)
def test_what_has_no_kernel_on_the_card_is_refused_in_one_line(target, dtype, step):
    with pytest.raises(Refused) as refused:
        predict(heads(dtype), step, target=target)
    words = str(refused.value)
    assert "test_footprint_attention.py:" in words and card(target).name in words
    assert "\n" not in words


def test_a_step_may_catch_that_or_ask_before():
    def catches(inputs):
        with contextlib.suppress(RuntimeError):
            within(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))(inputs)
            return
        attended()(inputs)

    def asks(inputs):
        given = SDPAParams(*inputs, None, 0.0, False, False)
        by_flash = torch.backends.cuda.can_use_flash_attention(given)
        chosen = SDPBackend.FLASH_ATTENTION if by_flash else SDPBackend.MATH
        within(lambda: sdpa_kernel(chosen))(inputs)

    for step, others in ((catches, EFFICIENT), (asks, MATH)):
        assert taken(heads(HALF), step, AMPERE) == FLASH
        assert taken(heads(HALF), step, TURING) == others


def test_a_causal_bias_needs_no_mask_where_a_kernel_knows_it():
    lower, upper = causal_lower_right(128, 256), causal_upper_left(128, 256)
    assert taken(heads(T=128), attended(attn_mask=lower), AMPERE) == FLASH
    assert taken(heads(T=128), attended(attn_mask=upper), AMPERE) == EFFICIENT
    assert taken(heads(T=128), attended(attn_mask=lower), TURING) == MATH


def test_cudnn_is_named_only_where_pytorch_may_prefer_it():
    def names_cudnn(step, target: str) -> bool:
        report = predict(heads(), step, target=target)
        return any("cuDNN" in words for words in report.not_modelled)

    flash = within(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    assert names_cudnn(attended(), "cuda") and names_cudnn(attended(), "B200")
    assert not names_cudnn(attended(), ADA) and not names_cudnn(flash, HOPPER)


STEP = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def build():
    return [torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]

def step(inputs):
    q, k, v = (x.requires_grad_() for x in inputs)
    scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
"""


@pytest.mark.parametrize(
    "flags, code",
    [
        (["--gpu", "RTX 3060"], 0),
        (["--vram", "1.5", "--cc", "80"], 0),
        (["--vram", "1.5", "--cc", "75"], 3),
        (["--gpu", "RTX 3060", "--cc", "75"], 0),
    ],
)
def test_the_command_knows_the_capability_of_the_card(flags, code, tmp_path, capsys):
    path = tmp_path / "step.py"
    path.write_text(STEP)
    assert profile_memory.main(["--step", str(path), *flags]) == code
    has_scores = "aten._safe_softmax.default" in capsys.readouterr().out
    assert has_scores == ("75" in flags)


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--dtype"),
        (["--advise"], "--dtype"),
        (["--dtype", "fp32"], "--kernels"),
        (["--dtype", "fp32", "--kernels", "torch"], ""),
    ],
)
def test_longhauls_own_kernels_are_refused_on_cards_that_have_none(flags, named, capsys):
    sizes = ["--model_size", "tiny", "--context_length", "256", "--gpu", "Tesla T4"]
    code = profile_memory.main([*sizes, *flags])
    captured = capsys.readouterr()
    assert code == (2 if named else 0)
    assert named in captured.err and ("Tesla T4" in captured.err) == bool(named)


@pytest.mark.parametrize("dtype, kernel", [("fp32", EFFICIENT), ("bf16", FLASH)])
def test_longhauls_plan_takes_the_kernel_of_its_precision(dtype, kernel):
    trace = simulate(TrainConfig(model_size="tiny", context_length=256, dtype=dtype))
    operators = {storage.op for storage in trace.storages.values()}
    assert {name for name in (FLASH, EFFICIENT) if any(name in op for op in operators)} == {kernel}

"""Attention, decoding and fused operators as only a GPU runs them, against float64 on the CPU."""

import pytest
import torch

from lab.posttrain.prompts import (
    CacheBehindPrompts,
    SharedPrompts,
    shared_prompt_attention,
)
from longhaul import kernels
from longhaul.clock import ClockedCache
from longhaul.generate import CapturedSteps, cuda_graph
from longhaul.kernels import attention
from longhaul.kinds import KINDS
from longhaul.parallel import context
from longhaul.parallel.parts import attention_part_backward
from model import Documents, ModelConfig, StandardAttention
from tests import oracle

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: PyTorch sees none"
)
pytestmark = [pytest.mark.gpu, needs_gpu]

DEVICE = "cuda"
# Relative to the largest value of the truth; a bf16 result is rounded to 2^-9 of each value.
BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
dtypes = pytest.mark.parametrize("dtype", list(BOUND), ids=["bf16", "fp32"])


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def inputs(T: int, S: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q [1, T, 8, 64], k and v [1, S, 2, 64], and a gradient like q."""
    shapes = ((T, 8), (S, 2), (S, 2), (T, 8))
    return [draw(1, *shape, 64, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def results(attend, q, k, v, dy) -> list[torch.Tensor]:
    """[o, dq, dk, dv]."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, dy)]


def exact(q, k, v, dy, visible_TS: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64 on the CPU, under a mask."""
    tensors = (x.cpu().double() for x in (q, k, v, dy))
    return results(lambda *qkv: oracle.attend(*qkv, visible_TS)[0], *tensors)


def assert_near(found, truth, dtype):
    for ours, value in zip(found, truth, strict=True):
        error = (ours.cpu().double() - value).abs().max() / value.abs().max()
        assert error < BOUND[dtype]


def causal(T: int, S: int) -> torch.Tensor:
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


@dtypes
def test_whole_rows(dtype):
    tensors = inputs(193, 193, dtype)
    truth = exact(*tensors, causal(193, 193))
    assert_near(results(attention, *tensors), truth, dtype)


@dtypes
def test_packed_rows(dtype):
    lengths = [1, 100, 64, 28]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    documents = Documents.of(ends, 1, DEVICE)
    config = ModelConfig.preset("tiny", num_layers=1, vocab_size=64)
    attention = StandardAttention(config, kernels.choose(config))

    def packed(q, k, v):
        return attention.packed((q, k, v), (), documents)

    visible = torch.block_diag(*(causal(n, n) for n in lengths)).bool()
    tensors = inputs(193, 193, dtype)
    assert_near(results(packed, *tensors), exact(*tensors, visible), dtype)


@dtypes
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_last_tokens_over_a_cache(tokens, dtype):
    tensors = inputs(tokens, 193, dtype)
    truth = exact(*tensors, causal(tokens, 193))
    assert_near(results(attention, *tensors), truth, dtype)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_gathered_keys_in_two_parts(kernel):
    """The last 64 of 192 tokens: their own keys, and those before."""
    if kernel == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is taken from Hopper on")
    q, k, v, dy = inputs(64, 192, torch.bfloat16)
    o, lse = context._over_past_and_own(kernel, q, k, v, slice(0, 128), slice(128, 192))

    dq = 0
    parts = []
    for keys, is_causal in ((slice(0, 128), False), (slice(128, 192), True)):
        share, *dkv = attention_part_backward(
            kernel, dy, q, o, lse, k[:, keys], v[:, keys], is_causal
        )
        dq = dq + share.float()
        parts.append(dkv)
    dk, dv = (torch.cat(pair, dim=1) for pair in zip(*parts, strict=True))
    assert_near([o, dq, dk, dv], exact(q, k, v, dy, causal(64, 192)), torch.bfloat16)


@dtypes
def test_responses_that_share_a_prompt(dtype):
    prompts = SharedPrompts([(100, 33, 1, 29), (20, 10)])
    visible = torch.zeros(193, 193, dtype=torch.bool)
    for prompt, *responses in prompts.spans():
        for span in (prompt, *responses):
            tokens = span.stop - span.start
            visible[span, span] = causal(tokens, tokens)
        for span in responses:
            visible[span, prompt] = True

    def shared(q, k, v):
        return shared_prompt_attention(q, k, v, prompts)

    tensors = inputs(193, 193, dtype)
    assert_near(results(shared, *tensors), exact(*tensors, visible), dtype)


@dtypes
def test_rows_that_continue_a_prompt(dtype):
    config = ModelConfig.preset(
        "tiny",
        vocab_size=64,
        num_layers=2,
        head_dim=64,
        compute_dtype=str(dtype).removeprefix("torch."),
    )
    decoder = kernels.decoder(config).to(DEVICE)
    tokens = torch.randint(64, (3, 45), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    tokens[:, :40] = tokens[0, :40]
    with torch.no_grad():
        prompt = decoder.new_cache(1, 40)
        decoder(tokens[:1, :40], cache=prompt)
        cache = CacheBehindPrompts(prompt, 3, 5)
        steps = [decoder(token_B1, cache=cache) for token_B1 in tokens[:, 40:].split(1, dim=1)]
        expected = decoder(tokens)[:, 40:]
    error = (torch.cat(steps, dim=1) - expected).abs().max() / expected.abs().max()
    assert error < BOUND[dtype]


@dtypes
@pytest.mark.parametrize("attention_type", ["standard", "nsa"])
def test_captured_steps_have_the_logits_of_plain_ones(attention_type, dtype):
    config = ModelConfig.preset(
        "tiny",
        vocab_size=64,
        num_layers=2,
        head_dim=64,
        attention=KINDS[attention_type].config(),
        compute_dtype=str(dtype).removeprefix("torch."),
        kernels="torch",
    )
    decoder = kernels.decoder(config).to(DEVICE)
    tokens = torch.randint(64, (1, 90), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plain = decoder.new_cache(1, 128)
    fixed = decoder.new_cache(1, 128)
    with torch.no_grad():
        decoder(tokens[:, :40], cache=plain)
        decoder(tokens[:, :40], cache=fixed)
        clocked = ClockedCache(fixed, rows=1, capacity=128, device=DEVICE)
        steps = CapturedSteps(decoder, clocked, cuda_graph)
        for token_11 in tokens[:, 40:].split(1, dim=1):
            expected = decoder(token_11, cache=plain)[0, -1]
            error = (steps(token_11) - expected).abs().max() / expected.abs().max()
            assert error < BOUND[dtype]


@dtypes
def test_fused_operators_are_as_exact_as_the_plain_ones(dtype):
    tokens = torch.randint(64, (2, 77), generator=torch.Generator().manual_seed(0))

    def gradients(device: str, dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        config = ModelConfig.preset(
            "tiny",
            vocab_size=64,
            num_layers=2,
            loss="standard",
            compute_dtype=str(dtype).removeprefix("torch."),
            kernels=backend,
        )
        decoder = kernels.decoder(config)
        if dtype == torch.float64:
            decoder.double()
        decoder.to(device)
        decoder(tokens[:, :-1].to(device), tokens[:, 1:].to(device)).backward()
        return [p.grad.cpu().double() for p in decoder.parameters()]

    truth = gradients("cpu", torch.float64, "torch")

    def worst(kernels: str) -> float:
        found = zip(gradients(DEVICE, dtype, kernels), truth, strict=True)
        return max(float((ours - value).abs().max() / value.abs().max()) for ours, value in found)

    assert worst("auto") <= 1.5 * worst("torch") + BOUND[torch.float32]

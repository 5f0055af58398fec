"""Which kernels attention takes on a CUDA device: none that holds [T, T], and none that builds a
plan for each length where lengths vary.
"""

import contextlib

import pytest
import torch

from base import machine
from lab.posttrain.prompts import SharedPrompts, attention_behind_prompts
from longhaul.kernels import attention, choose, sdpa
from longhaul.parallel.parts import attention_kernel, attention_part, attention_part_backward
from model import Documents, ModelConfig, OnHost, StandardAttention, document_boundaries
from tests.cuda_build import engine
from tests.cuda_build.fakes import AMPERE, HOPPER, TURING, card, heads

VARLEN = "torch_attn::_varlen_attn"
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"


def packed_documents(*lengths: int) -> Documents:
    bounds = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
    return Documents(list(lengths), bounds)


def attention_layer() -> StandardAttention:
    config = ModelConfig.preset("tiny", num_layers=1, vocab_size=64, compute_dtype="bfloat16")
    return StandardAttention(config, choose(config))


def attend_packed(dtype, *lengths: int) -> tuple[torch.Tensor, ...]:
    """q, k and o."""
    tokens = sum(lengths)
    q, k, v = (heads(tokens, count, dtype=dtype) for count in (8, 2, 2))
    o = packed_documents(*lengths).attend(attention_layer(), (q, k, v), ())
    assert o.shape == q.shape
    return q, k, o


@pytest.mark.parametrize("capability, dtype", [(AMPERE, torch.float16), (HOPPER, torch.bfloat16)])
def test_packed_rows_are_one_call_however_many_documents(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine.run_backward)
    with card(capability) as run:
        q, k, o = attend_packed(dtype, 40, 3, 21)
        o.backward(torch.empty_like(o))
    assert run.kernels == [VARLEN, VARLEN + "_backward"]
    assert q.grad.shape == q.shape
    assert k.grad.shape == k.shape

    with card(capability) as few:
        _, _, o = attend_packed(dtype, 40, 24)
        o.backward(torch.empty_like(o))
    assert few.operators.names == run.operators.names


def test_fp32_packed_rows_take_the_memory_efficient_kernel():
    with card(HOPPER) as run:
        attend_packed(torch.float32, 40, 3, 21)
    assert run.kernels == ["efficient"] * 3


@pytest.mark.parametrize(
    "capability, dtype, kernel",
    [
        (HOPPER, torch.bfloat16, "cudnn"),
        (AMPERE, torch.bfloat16, "flash"),
        (TURING, torch.float16, "efficient"),
        (HOPPER, torch.float32, "efficient"),
        (AMPERE, torch.float32, "efficient"),
        (AMPERE, torch.float64, "math"),
    ],
)
def test_whole_rows_never_take_the_kernel_that_holds_every_score(capability, dtype, kernel):
    with card(capability) as run:
        q, k = (heads(64, count, dtype=dtype) for count in (8, 2))
        assert attention(q, k, k).shape == q.shape
    assert run.kernels == [kernel]


@pytest.mark.parametrize("dtype, multiple", [(torch.float32, 4), (torch.bfloat16, 8)])
def test_heads_that_no_linear_kernel_takes_are_refused_in_words(dtype, multiple):
    with card(HOPPER):
        q, k = (heads(64, count, size=multiple + 2, dtype=dtype) for count in (8, 2))
        with pytest.raises(ValueError, match=f"take a multiple of {multiple}.*: choose such a"):
            sdpa(q, k, k, causal=True)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
def test_grouped_heads_under_a_mask_take_the_memory_efficient_kernel(capability):
    """FlashAttention takes no mask, and the memory-efficient kernel no grouped heads."""
    with card(capability) as run:
        q, k = (heads(64, count) for count in (8, 2))
        mask_TS = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
        for context in (contextlib.nullcontext(), machine.lengths_vary(q)):
            with context:
                assert sdpa(q, k, k, causal=False, mask_TS=mask_TS).shape == q.shape
    assert run.kernels == ["efficient"] * 2


@pytest.mark.parametrize("capability, tokens", [(AMPERE, 1), (HOPPER, 1), (HOPPER, 300)])
def test_cached_tokens_take_flash_attention_whatever_the_length(capability, tokens):
    with card(capability) as run:
        q = heads(tokens, 8)
        k = heads(700, 2)
        with machine.lengths_vary(q):
            assert attention(q, k, k).shape == q.shape
    assert run.kernels == [FLASH]


def test_a_prompt_builds_no_plan():
    """It fills an empty cache: as many keys as queries, and a length of its own."""
    with card(HOPPER) as run:
        q, k = (heads(77, count) for count in (8, 2))
        with machine.lengths_vary(q):
            attention(q, k, k)
    assert run.kernels == ["flash"]


def test_documents_reach_the_gpu_once_and_stay_on_the_host_for_loops():
    ids = torch.tensor([[0] * 40 + [1] * 24])
    ends = document_boundaries(OnHost(ids))
    assert ends.tolist() == [0, 40, 64]
    documents = Documents.of(ends, 1, "cpu")
    assert documents.lengths == [40, 24]
    assert documents.bounds is None
    assert Documents.of(torch.tensor([0, 64]), 1, "cuda") is None


def test_gathered_keys_take_cudnn_only_where_shapes_are_fixed():
    from longhaul.parallel.context import Shard, choose_kernel, pieces

    whole = pieces(torch.tensor([0, 64]), (1, 64), Shard("gather_kv", 0, 2))
    packed = pieces(torch.tensor([0, 9, 64]), (1, 64), Shard("gather_kv", 0, 2))
    for capability, of_whole_rows in ((HOPPER, "cudnn"), (AMPERE, "flash")):
        with card(capability):
            q = heads(32, 8)
            assert choose_kernel(q, whole) == of_whole_rows
            assert choose_kernel(q, packed) == "flash"


@pytest.mark.parametrize(
    "kernel, operator", [("flash", FLASH), ("cudnn", CUDNN), ("efficient", EFFICIENT)]
)
def test_the_operators_of_gathered_keys_are_called_as_their_signatures_say(kernel, operator):
    with card(HOPPER) as run, torch.no_grad():
        q, k = heads(24, 8), heads(40, 2)
        o, lse = attention_part(kernel, q, k, k, causal=False)
        grads = attention_part_backward(kernel, o, q, o, lse, k, k, causal=False)
    assert run.kernels == [operator, operator + "_backward"]
    assert o.shape == q.shape
    assert lse.shape == (1, 8, 24)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    "capability, dtype, kernel",
    [
        (HOPPER, torch.bfloat16, FLASH),
        (TURING, torch.float16, EFFICIENT),
        (HOPPER, torch.float32, EFFICIENT),
    ],
)
def test_a_shared_prompt_is_read_in_one_call(capability, dtype, kernel, monkeypatch):
    """The prompt and two responses by themselves, and what both responses read of the prompt."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine.run_backward)
    with card(capability) as run:
        q, k, v = (heads(31, count, dtype=dtype) for count in (8, 2, 2))
        o = SharedPrompts([(20, 5, 6)]).attend(attention_layer(), (q, k, v), ())
        o.backward(torch.empty_like(o))
    assert run.kernels == [kernel] * 4 + [kernel + "_backward"] * 4
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype, kernel", [(torch.bfloat16, FLASH), (torch.float32, EFFICIENT)])
def test_rows_behind_prompts_take_two_calls_and_repeat_no_keys(dtype, kernel):
    with card(HOPPER) as run, torch.no_grad():
        q, k = (heads(tokens, n, dtype=dtype, rows=6) for tokens, n in ((1, 8), (9, 2)))
        prompt = heads(70, 2, dtype=dtype, rows=3)
        assert attention_behind_prompts(q, k, k, prompt, prompt).shape == q.shape
    assert run.kernels == [kernel] * 2


def test_parts_of_attention_have_no_float64_kernel():
    with card(HOPPER), pytest.raises(ValueError, match="no float64 kernel on CUDA: choose float32"):
        attention_kernel(heads(4, 2, dtype=torch.float64))
    with card(HOPPER), pytest.raises(ValueError, match="take a multiple of 4.*: choose such a"):
        attention_kernel(heads(4, 2, size=6, dtype=torch.float32))

"""Native Sparse Attention: the engine and the plain version against the dense float64 oracle, and
decoding against both.

Letters as in nsa_oracle.py.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longhaul.sparse.nsa import branches as nsa_branches
from longhaul.sparse.nsa import decode as nsa_decode
from longhaul.sparse.nsa import engine as nsa_engine
from longhaul.sparse.nsa.selected import importance
from model import (
    NSA_LEAST,
    Compressor,
    Layout,
    NSAConfig,
    block_norm,
    plain_nsa_attention,
    select_blocks,
)
from tests import nsa_oracle as oracle
from tests.tiers import slow

SMALL_SIZES = dict(cmp_block=8, cmp_stride=4, sel_block=16, sel_count=5, window=24)
SMALL = NSAConfig(**SMALL_SIZES)  # sparse from 80 tokens on
NAMES = ("q", "k_slc", "v_slc", "k_cmp", "v_cmp", "k_win", "v_win", "gates")
BOTH = pytest.mark.parametrize(
    "attention", [nsa_engine.nsa_attention, plain_nsa_attention], ids=["engine", "plain"]
)


def inputs(T, G=2, M=2, K=16, cfg=SMALL, B=1, dtype=torch.float32, seed=0, documents=None):
    """[q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates], leaves that require gradients."""
    make = torch.Generator().manual_seed(seed)
    N = sum(cfg.compressed_blocks(n) for n in documents or [T])
    shapes = [(B, T, G * M, K)] + [(B, n, G, K) for n in (T, T, N, N, T, T)]
    tensors = [torch.randn(shape, generator=make) for shape in shapes]
    tensors.append(torch.randn(B, T, G * M, 3, generator=make).sigmoid())
    return [x.to(dtype).requires_grad_() for x in tensors]


def sizes_of(cfg):
    """The configuration as the custom operators take it."""
    return [getattr(cfg, name) for name in nsa_engine.Sizes._fields]


def boundaries(documents):
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *documents]).cumsum(0)


def chosen_mask(block_idx_BTGn, T, cfg):
    """chosen[b, t, g, j]: whether block j is among the chosen ones."""
    J = -(-T // cfg.sel_block)
    index = torch.where(block_idx_BTGn < 0, J, block_idx_BTGn.long())
    chosen = torch.zeros(*index.shape[:3], J + 1, dtype=torch.bool)
    return chosen.scatter_(-1, index, True)[..., :J]


def relative(x, truth):
    """Norm of the error relative to that of the truth; the norm of x if the truth is zero."""
    scale = truth.norm()
    if scale > 0:
        return ((x.double() - truth).norm() / scale).item()
    return x.double().norm().item()


def all_equal(first, second):
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def compare(attention, tensors, cfg, forward_bound, gradient_bound):
    """Compares the branches and all gradients with the oracle on the same inputs and the same
    chosen blocks; returns (parts, chosen, inputs in float64).
    """
    with torch.no_grad():
        parts = attention(*tensors, cfg, return_parts=True)
    chosen = chosen_mask(parts["block_idx"], tensors[0].shape[1], cfg)
    truth_in = [x.detach().double().requires_grad_() for x in tensors]
    names = ("o", "o_cmp", "o_slc", "o_win")
    truth = dict(zip(names, oracle.nsa(*truth_in, cfg, chosen), strict=True))
    for name, want in truth.items():
        assert relative(parts[name], want) <= forward_bound, name

    make = torch.Generator().manual_seed(9)
    weight = torch.randn(truth["o"].shape, generator=make).to(tensors[0].dtype)
    grads = torch.autograd.grad(attention(*tensors, cfg), tensors, weight)
    truth_grads = torch.autograd.grad(truth["o"], truth_in, weight.double())
    for name, grad, want in zip(NAMES, grads, truth_grads, strict=True):
        # The softmax over a single visible key has a gradient of exactly 0. What is left then is
        # measured against the gradient's scale.
        bound = gradient_bound if want.norm() > 1e-6 else 1e-5
        assert relative(grad, want) <= bound, f"gradient of {name}"
    return parts, chosen, truth_in


def assert_selection(chosen_BTGJ, truth_in, cfg, slack):
    """The right number of blocks, the forced ones among them, and no block left out that is more
    important by over `slack` (relative) than one that was chosen.
    """
    _, T, G, J = chosen_BTGJ.shape
    q, _, _, k_cmp, v_cmp, *_ = truth_in
    _, p = oracle.compressed(q, k_cmp, v_cmp, cfg)
    imp = oracle.importance(p, G, cfg)

    j = torch.arange(J)
    own_T1 = torch.arange(T)[:, None] // cfg.sel_block
    candidate_TJ = j <= own_T1
    forced_TJ = candidate_TJ & ((j < cfg.sel_init) | (j > own_T1 - cfg.sel_local))
    candidate = candidate_TJ[None, :, None]
    forced = forced_TJ[None, :, None]

    count_T = (own_T1[:, 0] + 1).clamp_max(cfg.sel_count)
    assert (chosen_BTGJ.sum(-1) == count_T[None, :, None]).all()
    assert not (chosen_BTGJ & ~candidate).any()
    assert (chosen_BTGJ | ~forced).all()

    worst_in = imp.masked_fill(~chosen_BTGJ | forced, torch.inf).amin(-1)
    best_out = imp.masked_fill(chosen_BTGJ | ~candidate, -torch.inf).amax(-1)
    assert (best_out <= worst_in * (1 + slack) + 1e-30).all()


# ---- against the oracle


@BOTH
@pytest.mark.parametrize("T", [1, 7, 8, 15, 16, 17, 31, 79, 80, 81, 100, 257, 500])
def test_small_blocks_match_float64_in_every_branch_gradient_and_choice(attention, T):
    _, chosen, truth_in = compare(attention, inputs(T, B=2), SMALL, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, SMALL, 1e-5)


@pytest.mark.parametrize(
    "T", [1, 31, 32, 33, 63, 64, 65, 128, 1023, 1024, 1025, slow(1399), slow(2177)]
)
def test_default_blocks_match_float64_in_every_branch_gradient_and_choice(T):
    cfg = NSAConfig()
    tensors = inputs(T, G=1, M=4, K=32, cfg=cfg)
    _, chosen, truth_in = compare(nsa_engine.nsa_attention, tensors, cfg, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, cfg, 1e-5)


def test_plain_version_matches_float64_past_the_dense_length():
    cfg = NSAConfig()
    tensors = inputs(1283, G=1, M=2, K=32, cfg=cfg)
    _, chosen, truth_in = compare(plain_nsa_attention, tensors, cfg, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, cfg, 1e-5)


@BOTH
@pytest.mark.parametrize(
    "G, M", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (8, 1), (1, 8), (1, 16), (2, 3)]
)
def test_every_group_size_matches_float64(attention, G, M):
    _, chosen, truth_in = compare(attention, inputs(203, G, M), SMALL, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, SMALL, 1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(cmp_block=16, cmp_stride=16),
        dict(cmp_block=4, cmp_stride=4),
        dict(cmp_block=16, cmp_stride=4),
        dict(sel_init=0, sel_local=1),
        dict(sel_init=2, sel_local=3),
        dict(sel_count=6, sel_init=3, sel_local=1),
        dict(sel_count=1, sel_init=0, sel_local=1),
        dict(window=1),
        dict(window=1000),
        dict(sel_block=8, cmp_stride=2),
    ],
)
@BOTH
def test_other_block_sizes_match_float64(attention, sizes):
    cfg = NSAConfig(**(SMALL_SIZES | sizes))
    _, chosen, truth_in = compare(attention, inputs(197, cfg=cfg), cfg, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, cfg, 1e-5)


@pytest.mark.parametrize(
    "T, cfg, K", [(333, SMALL, 32), (333, SMALL, 64), slow(1500, NSAConfig(), 128)]
)
def test_bf16_is_within_its_rounding_and_ranks_in_fp32(T, cfg, K):
    tensors = inputs(T, G=1, M=4, K=K, cfg=cfg, dtype=torch.bfloat16)
    _, chosen, truth_in = compare(nsa_engine.nsa_attention, tensors, cfg, 1.5e-2, 1.5e-2)
    assert_selection(chosen, truth_in, cfg, 1e-4)


@pytest.mark.parametrize("K", [32, 128])
def test_bf16_logits_keep_fp32_precision(K):
    q = torch.randn(64, K).bfloat16() * 8
    k = torch.randn(96, K).bfloat16() * 8
    truth = q.double() @ k.double().T
    bound = 2**-16 * truth.abs().max()

    buffers = nsa_branches.Buffers(q)
    logits = nsa_branches.product_fp32(q, k, buffers, "one")
    assert (logits - truth).abs().max() <= bound
    (batch_of_one,) = nsa_branches.product_fp32(q[None], k[None], buffers, "batch")
    assert (batch_of_one - truth).abs().max() <= bound


def test_engine_and_plain_version_agree_on_a_longer_sequence():
    tensors = inputs(1500, G=2, M=2)
    weight = torch.randn_like(tensors[0])

    engine_o = nsa_engine.nsa_attention(*tensors, SMALL)
    plain_o = plain_nsa_attention(*tensors, SMALL)
    assert relative(engine_o, plain_o.double()) <= 1e-5

    engine_grads = torch.autograd.grad(engine_o, tensors, weight)
    plain_grads = torch.autograd.grad(plain_o, tensors, weight)
    for x, y in zip(engine_grads, plain_grads, strict=True):
        assert relative(x, y.double()) <= 1e-5


# ---- extreme inputs


@pytest.mark.parametrize("T", [7, 8, 90])
@BOTH
def test_rows_without_a_visible_block_are_exactly_zero_with_zero_gradients(attention, T):
    tensors = inputs(T)
    parts = attention(*tensors, SMALL, return_parts=True)
    blind = parts["o_cmp"][:, : SMALL.cmp_block - 1]
    assert (blind == 0).all()
    grad_q, *grads_kv, _ = torch.autograd.grad(blind.sum(), tensors, materialize_grads=True)
    assert (grad_q[:, : SMALL.cmp_block - 1] == 0).all()
    assert all((g == 0).all() for g in grads_kv)


@BOTH
def test_huge_logits_stay_finite_and_exact(attention):
    tensors = inputs(300)
    with torch.no_grad():
        for i in (0, 1, 3, 5):  # q and all k
            tensors[i].mul_(300)
    o = attention(*tensors, SMALL)
    grads = torch.autograd.grad(o, tensors, torch.ones_like(o))
    assert all(x.isfinite().all() for x in (o, *grads))
    idx = nsa_engine.nsa_attention(*tensors, SMALL, return_parts=True)["block_idx"]
    truth, *_ = oracle.nsa(*tensors, SMALL, chosen_mask(idx, 300, SMALL))
    assert relative(o, truth.detach()) <= 1e-3  # logits near 1e5: their own fp32 rounding is 1e-2


@BOTH
@pytest.mark.parametrize("init", [0, 1])
def test_equal_importance_keeps_the_lowest_blocks(attention, init):
    """With q = 0, every visible compressed block has the same mass.

    So has every block between the first one, which no compressed block enters from the left (mass 7
    against 8: it is chosen only if it is forced), and the local ones.
    """
    cfg = replace(SMALL, sel_init=init)
    tensors = inputs(400)
    with torch.no_grad():
        tensors[0].zero_()
    idx_TGn = attention(*tensors, cfg, return_parts=True)["block_idx"][0].long()

    own_T1 = torch.arange(400)[:, None] // cfg.sel_block
    lowest = torch.arange(3).expand(400, 3) + 1 - init
    sparse = torch.cat((lowest, own_T1 - 1, own_T1), 1)
    early = torch.where(torch.arange(5) <= own_T1, torch.arange(5), -1)
    want_Tn = torch.where(own_T1 >= cfg.sel_count, sparse, early).sort().values
    assert torch.equal(idx_TGn.sort().values, want_Tn[:, None].expand_as(idx_TGn))


@BOTH
def test_one_hot_block_that_every_query_picks_is_exact(attention):
    tensors = inputs(600)
    with torch.no_grad():
        direction = F.normalize(torch.randn(16), dim=0) * 4
        tensors[0].add_(direction)
        tensors[3][:, 12:16].add_(direction * 3)  # all of block 3
    _, chosen, _ = compare(attention, tensors, SMALL, 2e-5, 6e-5)
    assert chosen[0, 100:, :, 3].float().mean() > 0.99


@BOTH
def test_nothing_in_the_future_matters(attention):
    T, cut = 300, 177
    tensors = inputs(T)
    other = inputs(T, seed=1)
    blocks = SMALL.compressed_blocks(cut)
    cuts = [blocks if i in (3, 4) else cut for i in range(8)]
    mixed = [
        torch.cat((x[:, :n], y[:, n:]), 1) for x, y, n in zip(tensors, other, cuts, strict=True)
    ]

    before = attention(*tensors, SMALL, return_parts=True)
    after = attention(*mixed, SMALL, return_parts=True)
    for name in before:
        assert torch.equal(before[name][:, :cut], after[name][:, :cut]), name
    grads = torch.autograd.grad(before["o"][:, :cut].sum(), tensors)
    for name, g, n in zip(NAMES, grads, cuts, strict=True):
        assert (g[:, n:] == 0).all(), name


@BOTH
def test_up_to_n_blocks_the_selected_branch_is_full_attention(attention):
    T = SMALL.sel_count * SMALL.sel_block
    tensors = inputs(T)
    with torch.no_grad():
        o_slc = attention(*tensors, SMALL, return_parts=True)["o_slc"]
        assert relative(o_slc, oracle.causal(*tensors[:3])) <= 1e-6


@BOTH
def test_the_choice_of_blocks_carries_no_gradient(attention):
    tensors = inputs(200)
    o_slc = attention(*tensors, SMALL, return_parts=True)["o_slc"]
    grads = torch.autograd.grad(
        o_slc.sum(), tensors[3:5], materialize_grads=True, allow_unused=True
    )
    assert all((g == 0).all() for g in grads)


# ---- determinism, documents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bit_identical(dtype):
    tensors = inputs(1100, dtype=dtype)
    weight = torch.randn_like(tensors[0])

    def results():
        o = nsa_engine.nsa_attention(*tensors, SMALL)
        return o, *torch.autograd.grad(o, tensors, weight)

    assert all_equal(results(), results())


@pytest.mark.parametrize("documents", [[5, 200, 1, 90], [64, 64, 128], [150], [1, 1, 1, 7, 8, 9]])
@BOTH
def test_packed_documents_equal_separate_ones_exactly(attention, documents):
    T = sum(documents)
    tensors = inputs(T, B=2, documents=documents)
    weight = torch.randn_like(tensors[0])
    cu = boundaries(documents)
    packed = attention(*tensors, SMALL, cu_seqlens=cu, return_parts=True)
    packed_grads = torch.autograd.grad(packed["o"], tensors, weight)

    block = 0
    for a, b in itertools.pairwise(cu.tolist()):
        n = SMALL.compressed_blocks(b - a)
        spans = [slice(block, block + n) if i in (3, 4) else slice(a, b) for i in range(8)]
        block += n
        separate_in = [
            x.detach()[:, span].requires_grad_() for x, span in zip(tensors, spans, strict=True)
        ]
        separate = attention(*separate_in, SMALL, return_parts=True)
        for name in separate:
            assert torch.equal(packed[name][:, a:b], separate[name]), name
        grads = torch.autograd.grad(separate["o"], separate_in, weight[:, a:b])
        parts = [g[:, span] for g, span in zip(packed_grads, spans, strict=True)]
        assert all_equal(parts, grads)


@BOTH
def test_boundaries_may_be_int32_and_chosen_blocks_are_int64(attention):
    documents = [90, 30, 80]
    tensors = inputs(200, documents=documents)
    weight = torch.randn_like(tensors[0])
    results = []
    for dtype in (torch.int64, torch.int32):
        cu = boundaries(documents).to(dtype)
        parts = attention(*tensors, SMALL, cu_seqlens=cu, return_parts=True)
        o = attention(*tensors, SMALL, cu_seqlens=cu)
        results.append([*parts.values(), o, *torch.autograd.grad(o, tensors, weight)])
        assert parts["block_idx"].dtype == torch.int64
    assert all_equal(*results)


# ---- compression and decoding


def rope(x_BTGK, position_T):
    K = x_BTGK.shape[-1]
    angle = position_T[:, None] * 10_000.0 ** (-torch.arange(0, K, 2) / K)
    cos = angle.cos()[:, None].to(x_BTGK.dtype)
    sin = angle.sin()[:, None].to(x_BTGK.dtype)
    a, b = x_BTGK.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def compressor(cfg, K=16):
    torch.manual_seed(3)
    module = Compressor(K, cfg, 1e-6, block_norm)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return module


@pytest.mark.parametrize("kind", ["mlp", "mean"])
@pytest.mark.parametrize(
    "T, sizes", [(8, (8, 4)), (11, (8, 4)), (100, (8, 4)), (50, (16, 4)), (33, (8, 8)), (5, (8, 4))]
)
def test_compression_and_its_gradients_match_the_equation(kind, T, sizes):
    cmp_block, cmp_stride = sizes
    cfg = NSAConfig(
        cmp_block=cmp_block, cmp_stride=cmp_stride, sel_block=16, sel_count=5, cmp_kind=kind
    )
    module = compressor(cfg)
    k, v = (torch.randn(2, T, 3, 16, requires_grad=True) for _ in "kv")
    k_cmp, v_cmp = module(k, v, rope, Layout.of(None, (1, T), cfg, "cpu"))
    assert k_cmp.shape[1] == cfg.compressed_blocks(T)

    no_pe = torch.zeros(cmp_block, 16)
    k_args = v_args = (torch.zeros(16, cmp_block * 16), torch.zeros(16, 16), no_pe)
    if kind == "mlp":
        k_args = (module.k_w1, module.k_w2, module.pe_lK)
        v_args = (module.v_w1, module.v_w2, no_pe)
    k_true = oracle.phi(k, *k_args, cfg)
    v_true = oracle.phi(v, *v_args, cfg)
    k_true = k_true * (k_true.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    k_true = k_true * module.norm_weight.double()
    k_true = rope(k_true, torch.arange(k_true.shape[1]) * cmp_stride + cmp_block // 2)

    leaves = [k, v, *module.parameters()]
    for x, truth in ((k_cmp, k_true), (v_cmp, v_true)):
        assert relative(x, truth) <= 2e-6
        weight = torch.randn(x.shape)
        got, want = (
            torch.autograd.grad(
                (y * weight).sum(), leaves, retain_graph=True, materialize_grads=True
            )
            for y in (x, truth)
        )
        for g, w in zip(got, want, strict=True):
            assert relative(g, w.double()) <= 6e-5


@pytest.mark.parametrize("sizes", [(8, 4), (32, 16), (64, 8)])
def test_the_mean_of_a_block_in_bf16_is_rounded_once(sizes):
    cmp_block, cmp_stride = sizes
    cfg = NSAConfig(cmp_block=cmp_block, cmp_stride=cmp_stride, cmp_kind="mean")
    x = torch.randn(1, 640, 2, 16).bfloat16()
    _, mean = compressor(cfg)(x, x, rope, Layout.of(None, (1, 640), cfg, "cpu"))

    exact = x.double().unfold(1, cmp_block, cmp_stride).mean(-1)
    one_rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((mean - exact).abs() <= one_rounding + 1e-6).all()


def test_compression_with_a_zero_second_matrix_is_the_mean():
    x = torch.randn(1, 100, 2, 16)
    mlp = compressor(NSAConfig(cmp_kind="mlp"))
    mean = compressor(NSAConfig(cmp_kind="mean"))
    layout = Layout.of(None, (1, 100), NSAConfig(), "cpu")
    with torch.no_grad():
        mlp.k_w2.zero_()
        mlp.v_w2.zero_()
        mlp.norm_weight.copy_(mean.norm_weight)
        assert all_equal(mlp(x, x, rope, layout), mean(x, x, rope, layout))


def test_compression_restarts_at_every_document():
    documents = [40, 3, 8, 21]
    module = compressor(SMALL)
    x = torch.randn(1, 72, 2, 16)
    cu = boundaries(documents)
    position = torch.cat([torch.arange(n) for n in documents])

    def rope_of_documents(k, token):
        return rope(k, position[token])

    packed = module(x, x, rope_of_documents, Layout.of(cu, (1, 72), SMALL, "cpu"))
    separate = []
    for a, b in itertools.pairwise(cu.tolist()):
        document = x[:, a:b]
        layout = Layout.of(None, (1, b - a), SMALL, "cpu")
        separate.append(module(document, document, rope, layout))
    for i in range(2):
        joined = torch.cat([y[i] for y in separate], 1)
        assert torch.allclose(packed[i], joined, rtol=0, atol=1e-6)


def test_the_layout_of_packed_documents_goes_to_a_gpu_through_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    arguments = boundaries([40, 3, 8, 21]), (1, 72), SMALL
    on_host = Layout.of(*arguments, "cpu")
    assert pinned == []

    sent = []

    def send(x, device, non_blocking):
        assert device == "cuda" and non_blocking
        sent.append(x)
        return x

    monkeypatch.setattr(torch.Tensor, "to", send)
    layout = Layout.of(*arguments, "cuda")
    monkeypatch.undo()
    assert len(sent) == len(pinned) == 3
    assert all(x is y for x, y in zip(sent, pinned, strict=True))
    assert all_equal(layout[1:4], on_host[1:4])


def decode_case(T, cfg=SMALL, B=2, G=2, M=2, K=16, dtype=torch.float32):
    """(rotated q, raw k, rotated k, v, gates) of T tokens; one K/V for all branches."""
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(B, T, h, K, generator=make).to(dtype) for h in (G * M, G, G))
    gates = torch.randn(B, T, G * M, 3, generator=make).sigmoid().to(dtype)
    position = torch.arange(T)
    return rope(q, position), k, rope(k, position), v, gates


KV = pytest.mark.parametrize("kv", ["shared", "separate"])


def rotation(a, b):
    """cos and sin of the positions a to b - 1, [2, T, 1, 8] each."""
    position = torch.arange(a, b)[:, None, None]
    angle = (position * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)).expand(2, -1, -1, -1)
    return angle.cos(), angle.sin()


def layer_inputs(case, a, b):
    """What the layer gives its cache for the tokens a to b - 1."""
    q, k_raw, k, v, gates = (x[:, a:b] for x in case)
    return q, k, v, k_raw, v, k, v, gates


def decode_on(state, case, module, a, b):
    """o of each of the tokens a to b - 1."""
    steps = [(layer_inputs(case, t, t + 1), rotation(t, t + 1)) for t in range(a, b)]
    return [state.decode(*step, module) for step in steps]


@KV
@pytest.mark.parametrize("prompt", [0, 1, 7, 8, 50, 81, 163])
def test_prefill_then_decoding_equals_the_full_forward(prompt, kv):
    T = 220
    module = compressor(SMALL)
    case = decode_case(T)
    q, k_raw, k, v, gates = case
    with torch.no_grad():
        k_cmp, v_cmp = module(k_raw, v, rope, Layout.of(None, (1, T), SMALL, "cpu"))
        full = nsa_engine.nsa_attention(q, k, v, k_cmp, v_cmp, k, v, gates, SMALL)

        state = nsa_decode.NSAState(replace(SMALL, kv=kv), 2, T, 2, 16)
        if prompt:
            state.take_prompt(layer_inputs(case, 0, prompt), rotation(0, prompt), module)
        decoded = torch.cat(decode_on(state, case, module, prompt, T), 1)
    assert (decoded - full[:, prompt:]).abs().max() <= 2e-5


@KV
@pytest.mark.parametrize("T", [5, 8, 100])
def test_prefill_leaves_the_state_of_token_by_token_decoding(T, kv):
    module = compressor(SMALL)
    case = decode_case(T)
    at_once, token_by_token = (
        nsa_decode.NSAState(replace(SMALL, kv=kv), 2, 128, 2, 16) for _ in range(2)
    )
    with torch.no_grad():
        at_once.take_prompt(layer_inputs(case, 0, T), rotation(0, T), module)
        decode_on(token_by_token, case, module, 0, T)

    assert token_by_token.length == at_once.length
    for found, want in zip(token_by_token.stored(), at_once.stored(), strict=True):
        assert torch.equal(found, want)
    assert torch.equal(token_by_token.raw_2BlGK, at_once.raw_2BlGK)
    centres = [t % 8 for t in range(max(0, T - 8), T) if t % 4 == 0]  # others turn no block
    assert torch.equal(token_by_token.turn_2Bl1K[:, :, centres], at_once.turn_2Bl1K[:, :, centres])
    if kv == "separate":
        assert torch.equal(token_by_token.win_2BwGK, at_once.win_2BwGK)
    assert torch.allclose(token_by_token.cmp_2BNGK, at_once.cmp_2BNGK, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(sel_init=0, sel_local=1),
        dict(sel_init=2, sel_local=3),
        dict(cmp_block=16),
        dict(cmp_block=4),
        dict(cmp_block=16, cmp_stride=16),
        dict(sel_count=3),
    ],
)
def test_a_decoded_token_chooses_the_blocks_of_the_rule_ties_included(sizes):
    cfg = replace(SMALL, **sizes)
    state = nsa_decode.NSAState(cfg, 1, 600, 2, 16)
    for t in range(cfg.sel_count * cfg.sel_block, 600):
        N = cfg.compressed_blocks(t + 1)
        make = torch.Generator().manual_seed(t)
        p_XN = torch.randint(1, 4, (2, N), generator=make).float() / 8  # few values: many ties

        state.length = t + 1
        free = state.free_blocks()
        blocks = state._chosen(importance(p_XN, free.stop, state.sizes), free)
        want = select_blocks(p_XN, torch.tensor(t), cfg)
        assert torch.equal(blocks.sort().values, want.sort().values), t
        assert (blocks[:, -1] == t // cfg.sel_block).all()


# ---- threads and modes


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "a call must give the threads back"
    torch.set_num_threads(before)


def results(tensors):
    o = nsa_engine.nsa_attention(*tensors, SMALL)
    return o, *torch.autograd.grad(o.square().sum(), tensors)


@pytest.mark.parametrize("G, B", [(1, 1), (2, 1), (2, 3)])
def test_two_threads_give_the_bits_of_one(two_threads, G, B):
    tensors = inputs(300, G=G, B=B)
    both = results(tensors)
    torch.set_num_threads(1)
    one = results(tensors)
    torch.set_num_threads(2)
    assert all_equal(both, one)


def test_inference_mode_and_autocast_change_nothing(two_threads):
    tensors = [x.detach() for x in inputs(300)]
    want = nsa_engine.nsa_attention(*tensors, SMALL)
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            assert torch.equal(nsa_engine.nsa_attention(*tensors, SMALL), want)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(nsa_engine.nsa_attention(*tensors, SMALL), want)


def test_an_error_inside_a_thread_is_the_callers_and_the_threads_are_given_back(
    two_threads, monkeypatch
):
    monkeypatch.setattr(nsa_engine, "steps_forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nsa_engine.nsa_attention(*inputs(300), SMALL)


def test_no_row_gives_no_result(two_threads):
    o = nsa_engine.nsa_attention(*(x[:0] for x in inputs(100)), SMALL)
    assert o.shape == (0, 100, 4, 16)


# ---- the custom operators


@pytest.mark.parametrize(
    "dtype, documents",
    [
        (torch.float32, None),
        (torch.bfloat16, [30, 90]),
        slow(torch.float32, [30, 90]),
        slow(torch.bfloat16, None),
    ],
)
def test_opcheck_passes_for_forward_and_backward(dtype, documents):
    cu = None if documents is None else boundaries(documents)
    sizes = sizes_of(SMALL)
    tensors = inputs(120, dtype=dtype, documents=documents)
    torch.library.opcheck(nsa_engine.nsa_forward, (*tensors, cu, sizes))

    plain = [x.detach() for x in tensors]
    o, *saved = nsa_engine.nsa_forward(*plain, cu, sizes)
    do = torch.ones_like(o)
    torch.library.opcheck(nsa_engine.nsa_backward, (do, *plain, *saved, cu, sizes))


@pytest.mark.parametrize("dynamic", [True, slow(False)])
def test_fullgraph_compile_gives_the_eager_result(dynamic):
    compiled = torch.compile(
        lambda *x: nsa_engine.nsa_attention(*x, SMALL) * 2,
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for T in (100, 132):
        tensors = inputs(T)
        eager = nsa_engine.nsa_attention(*tensors, SMALL) * 2
        fast = compiled(*tensors)
        assert torch.equal(eager, fast)
        eager_grads = torch.autograd.grad(eager.sum(), tensors)
        fast_grads = torch.autograd.grad(fast.sum(), tensors)
        assert all_equal(eager_grads, fast_grads)


def test_meta_tensors_get_the_right_shapes_at_131072_tokens():
    cfg = NSAConfig()
    T = 131_072
    N = cfg.compressed_blocks(T)
    with torch.device("meta"):
        q = torch.empty(1, T, 32, 128, requires_grad=True)
        kv = [torch.empty(1, n, 8, 128, requires_grad=True) for n in (T, T, N, N, T, T)]
        gates = torch.empty(1, T, 32, 3)

    parts = nsa_engine.nsa_attention(q, *kv, gates, cfg, return_parts=True)
    assert parts["o"].shape == q.shape
    assert parts["block_idx"].shape == (1, T, 8, 16)
    parts["o"].sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, *kv))


def test_checkpointing_recomputes_and_selective_checkpointing_runs_the_forward_once(monkeypatch):
    calls = []
    forward_stream = nsa_engine._forward_stream

    def counted(*args):
        calls.append(1)
        forward_stream(*args)

    monkeypatch.setattr(nsa_engine, "_forward_stream", counted)
    tensors = inputs(120, G=1)

    def layer(*x):
        return nsa_engine.nsa_attention(*x, SMALL).square()

    def policy(_, op, *args, **kwargs):
        saved = torch.ops.longhaul.nsa_forward.default
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed():
        return checkpoint(layer, *tensors, use_reentrant=False)

    def selectively_checkpointed():
        return checkpoint(
            layer,
            *tensors,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    def gradients_and_calls(run):
        calls.clear()
        grads = torch.autograd.grad(run().sum(), tensors)
        return grads, len(calls)

    want, plain_calls = gradients_and_calls(lambda: layer(*tensors))
    recomputed, recompute_calls = gradients_and_calls(checkpointed)
    saved, selective_calls = gradients_and_calls(selectively_checkpointed)
    assert (plain_calls, recompute_calls, selective_calls) == (1, 2, 1)
    assert all_equal(recomputed, want)
    assert all_equal(saved, want)


def test_non_contiguous_inputs_and_expanded_gradients_are_fine():
    tensors = inputs(130)
    strided = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors
    ]
    grads = torch.autograd.grad(nsa_engine.nsa_attention(*tensors, SMALL).sum(), tensors)
    strided_grads = torch.autograd.grad(nsa_engine.nsa_attention(*strided, SMALL).sum(), strided)
    assert all_equal(grads, strided_grads)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest storage that an operation returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes())
        return out


def largest_tensor(T):
    cfg = NSAConfig()
    sizes = sizes_of(cfg)
    tensors = [x.detach() for x in inputs(T, G=1, M=2, cfg=cfg)]
    with LargestTensor() as largest:  # the bodies: a mode does not see inside an operator
        o, *saved = nsa_engine.nsa_forward._init_fn(*tensors, None, sizes)
        nsa_engine.nsa_backward._init_fn(torch.ones_like(o), *tensors, *saved, None, sizes)
    return largest.most


@pytest.mark.slow
def test_the_largest_tensor_grows_linearly_with_the_tokens():
    at_4k, at_8k, at_16k = (largest_tensor(T) for T in (4096, 8192, 16384))
    assert at_16k <= 2.2 * at_8k <= 2.2**2 * at_4k
    assert at_16k < 16384**2  # a [T, T] mask of one byte


# ---- bad input


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(cmp_stride=12), "cmp_block=32, cmp_stride=12"),
        (dict(sel_block=72), "cmp_stride=16, sel_block=72"),
        (dict(cmp_block=128), "cmp_block <= sel_block"),
        (dict(sel_count=2), "sel_init \\+ sel_local"),
        (dict(window=0), "window=0"),
        (dict(sel_local=0), "sel_local=0"),
        (dict(sel_init=-1), "sel_init=-1"),
        (dict(cmp_kind="max"), "'mlp' or 'mean'"),
        (dict(kv="both"), "'shared' or 'separate'"),
        (dict(cmp_stride=0), "cmp_stride=0"),
        (dict(window=1.5), "window=1.5; allowed: window an integer >= 1"),
        (dict(window=True), "window=True; allowed: window an integer >= 1"),
        (dict(cmp_kind=3), "cmp_kind=3; allowed: cmp_kind 'mlp' or 'mean'"),
    ],
)
def test_a_bad_config_names_value_rule_and_remedy(bad, words):
    with pytest.raises(ValueError, match=words):
        NSAConfig(**bad)


@pytest.mark.parametrize("name", NSA_LEAST)
def test_a_size_given_as_text_names_the_field_and_what_is_allowed(name):
    with pytest.raises(ValueError, match=f"given {name}='32'; allowed: {name} an integer >= "):
        NSAConfig(**{name: "32"})


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cu", [[1, 120], [0, 119], [0, 50, 50, 120], [0, 60, 30, 120]])
def test_bad_cu_seqlens_are_refused(attention, cu, dtype):
    with pytest.raises(ValueError, match="increasing from 0 to T"):
        attention(*inputs(120), SMALL, cu_seqlens=torch.tensor(cu, dtype=dtype))


@BOTH
def test_wrong_shapes_head_counts_and_dtypes_are_refused(attention):
    q, k, v, k_cmp, v_cmp, k_win, v_win, gates = inputs(120, G=2, M=2)
    with pytest.raises(ValueError, match="3 query heads, 2 KV heads"):
        attention(q[:, :, :3], k, v, k_cmp, v_cmp, k_win, v_win, gates[:, :, :3], SMALL)
    with pytest.raises(ValueError, match="shape"):
        attention(q, k, v, k_cmp[:, 1:], v_cmp, k_win, v_win, gates, SMALL)
    with pytest.raises(ValueError, match="float64"):
        attention(q, k.double(), v, k_cmp, v_cmp, k_win, v_win, gates, SMALL)


@BOTH
def test_boundaries_of_a_wrong_type_or_shape_are_refused(attention):
    tensors = inputs(120)
    for cu in (torch.tensor([0.0, 120.0]), torch.tensor([[0, 120]]), torch.tensor([0])):
        with pytest.raises(ValueError, match="allowed: int32 or int64 \\[documents \\+ 1\\]"):
            attention(*tensors, SMALL, cu_seqlens=cu)
    with pytest.raises(ValueError, match="cu_seqlens as a list"):
        attention(*tensors, SMALL, cu_seqlens=[0, 120])
    with pytest.raises(ValueError, match="compress every document"):
        attention(*tensors, SMALL, cu_seqlens=torch.tensor([0, 60, 120]))

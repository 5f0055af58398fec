"""Native Sparse Attention: the engine and the plain version against the dense float64 oracle, and
decoding against both.

Letters as in nsa_oracle.py.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from model import (
    NSA_LEAST,
    Compressor,
    Layout,
    NSAConfig,
    plain_nsa_attention,
    select_blocks,
)
from nsa import branches as nsa_branches
from nsa import decode as nsa_decode
from nsa import engine as nsa_engine
from tests import nsa_oracle as oracle

SMALL = NSAConfig(
    cmp_block=8, cmp_stride=4, sel_block=16, sel_count=5, window=24
)  # sparse from 80 tokens on
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


def chosen_mask(block_idx_BTGn, T, cfg):
    J = -(-T // cfg.sel_block)
    index = torch.where(block_idx_BTGn < 0, J, block_idx_BTGn.long())
    return torch.zeros(*index.shape[:3], J + 1, dtype=torch.bool).scatter_(-1, index, True)[..., :J]


def relative(x, truth):
    scale = truth.norm()
    return ((x.double() - truth).norm() / scale).item() if scale > 0 else x.double().norm().item()


def compare(attention, tensors, cfg, forward_bound, gradient_bound):
    """Parts and all gradients against the oracle run on the same inputs and the same chosen blocks;
    returns the parts.
    """
    with torch.no_grad():
        parts = attention(*tensors, cfg, return_parts=True)
    chosen = chosen_mask(parts["block_idx"], tensors[0].shape[1], cfg)
    truth_in = [x.detach().double().requires_grad_() for x in tensors]
    truth = dict(zip(("o", "o_cmp", "o_slc", "o_win"), oracle.nsa(*truth_in, cfg, chosen)))
    for name, want in truth.items():
        assert relative(parts[name], want) <= forward_bound, name
    weight = torch.randn(truth["o"].shape, generator=torch.Generator().manual_seed(9)).to(
        tensors[0].dtype
    )
    grads = torch.autograd.grad(attention(*tensors, cfg), tensors, weight)
    for name, grad, want in zip(
        NAMES, grads, torch.autograd.grad(truth["o"], truth_in, weight.double())
    ):
        # a lone visible key has a softmax gradient of exactly 0: measure what is left against the
        # gradient's scale
        bound = gradient_bound if want.norm() > 1e-6 else 1e-5
        assert relative(grad, want) <= bound, f"gradient of {name}"
    return parts, chosen, truth_in


def assert_selection(chosen_BTGJ, truth_in, cfg, slack):
    """Right count, forced blocks in, and no block left out that is more important by over `slack`
    (relative).
    """
    B, T, G, J = chosen_BTGJ.shape
    _, p = oracle.compressed(truth_in[0], truth_in[3], truth_in[4], cfg)
    imp = oracle.importance(p, G, cfg)
    j, c = torch.arange(J), torch.arange(T)[:, None] // cfg.sel_block
    candidate = (j <= c)[None, :, None]
    forced = ((j <= c) & ((j < cfg.sel_init) | (j > c - cfg.sel_local)))[None, :, None]
    assert (chosen_BTGJ.sum(-1) == (c[:, 0] + 1).clamp_max(cfg.sel_count)[None, :, None]).all()
    assert not (chosen_BTGJ & ~candidate).any() and (chosen_BTGJ | ~forced).all()
    worst_in = imp.masked_fill(~chosen_BTGJ | forced, torch.inf).amin(-1)
    best_out = imp.masked_fill(chosen_BTGJ | ~candidate, -torch.inf).amax(-1)
    assert (best_out <= worst_in * (1 + slack) + 1e-30).all()


# ------------------------------------------------------------------------------- against the oracle
@BOTH
@pytest.mark.parametrize("T", [1, 7, 8, 15, 16, 17, 31, 79, 80, 81, 100, 257, 500])
def test_small_blocks_match_float64_in_every_branch_gradient_and_choice(attention, T):
    _, chosen, truth_in = compare(attention, inputs(T, B=2), SMALL, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, SMALL, 1e-5)


@pytest.mark.parametrize("T", [1, 31, 32, 33, 63, 64, 65, 128, 1023, 1024, 1025, 1399, 2177])
def test_default_blocks_match_float64_in_every_branch_gradient_and_choice(T):
    cfg = NSAConfig()
    _, chosen, truth_in = compare(
        nsa_engine.nsa_attention, inputs(T, G=1, M=4, K=32, cfg=cfg), cfg, 2e-5, 6e-5
    )
    assert_selection(chosen, truth_in, cfg, 1e-5)


def test_plain_version_matches_float64_past_the_dense_length():
    cfg = NSAConfig()
    _, chosen, truth_in = compare(
        plain_nsa_attention, inputs(1283, G=1, M=2, K=32, cfg=cfg), cfg, 2e-5, 6e-5
    )
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
    cfg = NSAConfig(
        **(dict(cmp_block=8, cmp_stride=4, sel_block=16, sel_count=5, window=24) | sizes)
    )
    _, chosen, truth_in = compare(attention, inputs(197, cfg=cfg), cfg, 2e-5, 6e-5)
    assert_selection(chosen, truth_in, cfg, 1e-5)


@pytest.mark.parametrize(
    "T, cfg, K", [(333, SMALL, 32), (333, SMALL, 64), (1500, NSAConfig(), 128)]
)
def test_bf16_is_within_its_rounding_and_ranks_in_fp32(T, cfg, K):
    _, chosen, truth_in = compare(
        nsa_engine.nsa_attention, inputs(T, 1, 4, K, cfg, dtype=torch.bfloat16), cfg, 1.5e-2, 1.5e-2
    )
    assert_selection(chosen, truth_in, cfg, 1e-4)


@pytest.mark.parametrize("K", [32, 128])
def test_bf16_logits_keep_fp32_precision(K):
    q, k = (torch.randn(n, K).bfloat16() * 8 for n in (64, 96))
    truth = q.double() @ k.double().T
    assert (nsa_branches.product_fp32(q, k) - truth).abs().max() <= 2**-16 * truth.abs().max()
    assert (
        nsa_branches.product_fp32(q[None], k[None])[0] - truth
    ).abs().max() <= 2**-16 * truth.abs().max()


def test_engine_and_plain_version_agree_on_a_longer_sequence():
    tensors = inputs(1500, G=2, M=2)
    weight = torch.randn_like(tensors[0])
    ours, plain = (
        [o := f(*tensors, SMALL), *torch.autograd.grad(o, tensors, weight)]
        for f in (nsa_engine.nsa_attention, plain_nsa_attention)
    )
    for x, y in zip(ours, plain):
        assert relative(x, y.double()) <= 1e-5


# ----------------------------------------------------------------------------------- extreme inputs
@pytest.mark.parametrize("T", [7, 8, 90])
@BOTH
def test_rows_without_a_visible_block_are_exactly_zero_with_zero_gradients(attention, T):
    tensors = inputs(T)
    parts = attention(*tensors, SMALL, return_parts=True)
    blind = parts["o_cmp"][:, : SMALL.cmp_block - 1]
    assert (blind == 0).all()
    grads = torch.autograd.grad(blind.sum(), tensors, materialize_grads=True)
    assert all((g[:, : SMALL.cmp_block - 1] == 0).all() for g in grads[:1])
    assert all((g == 0).all() for g in grads[1:7])


@BOTH
def test_huge_logits_stay_finite_and_exact(attention):
    tensors = inputs(300)
    with torch.no_grad():
        for x in tensors[:7:2][:1] + [tensors[1], tensors[3], tensors[5]]:
            x.mul_(300)
    o = attention(*tensors, SMALL)
    grads = torch.autograd.grad(o, tensors, torch.ones_like(o))
    assert all(x.isfinite().all() for x in (o, *grads))
    idx = nsa_engine.nsa_attention(*tensors, SMALL, return_parts=True)["block_idx"]
    truth = oracle.nsa(*tensors, SMALL, chosen_mask(idx, 300, SMALL))[0]
    assert relative(o, truth.detach()) <= 1e-3  # logits near 1e5: their own fp32 rounding is 1e-2


@BOTH
@pytest.mark.parametrize("init", [0, 1])
def test_equal_importance_keeps_the_lowest_blocks(attention, init):
    """q = 0: every visible compressed block has the same mass, and so has every block between the
    first, which no
    compressed block enters from the left (mass 7 against 8: chosen only when forced), and the local
    ones.
    """
    cfg, tensors = replace(SMALL, sel_init=init), inputs(400)
    with torch.no_grad():
        tensors[0].zero_()
    idx_TGn = attention(*tensors, cfg, return_parts=True)["block_idx"][0].long()
    c = torch.arange(400)[:, None] // cfg.sel_block
    lowest = torch.arange(3).expand(400, 3) + 1 - init
    sparse = torch.cat((lowest, c - 1, c), 1)
    early = torch.where(torch.arange(5) <= c, torch.arange(5), -1)
    want_Tn = torch.where(c >= cfg.sel_count, sparse, early).sort().values
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
    tensors, other = inputs(T), inputs(T, seed=1)
    blocks = SMALL.compressed_blocks(cut)
    mixed = [
        torch.cat((x[:, :n], y[:, n:]), 1)
        for i, (x, y) in enumerate(zip(tensors, other))
        for n in [blocks if i in (3, 4) else cut]
    ]
    before, after = (attention(*x, SMALL, return_parts=True) for x in (tensors, mixed))
    for name in before:
        assert torch.equal(before[name][:, :cut], after[name][:, :cut]), name
    grads = torch.autograd.grad(before["o"][:, :cut].sum(), tensors)
    for i, g in enumerate(grads):
        assert (g[:, blocks if i in (3, 4) else cut :] == 0).all(), NAMES[i]


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


# --------------------------------------------------------------------------- determinism, documents
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bit_identical(dtype):
    tensors = inputs(1100, dtype=dtype)
    weight = torch.randn_like(tensors[0])
    runs = [
        [o := nsa_engine.nsa_attention(*tensors, SMALL), *torch.autograd.grad(o, tensors, weight)]
        for _ in "12"
    ]
    assert all(torch.equal(x, y) for x, y in zip(*runs))


@pytest.mark.parametrize("documents", [[5, 200, 1, 90], [64, 64, 128], [150], [1, 1, 1, 7, 8, 9]])
@BOTH
def test_packed_documents_equal_separate_ones_exactly(attention, documents):
    T = sum(documents)
    tensors = inputs(T, B=2, documents=documents)
    weight = torch.randn_like(tensors[0])
    cu = torch.tensor([0] + documents).cumsum(0)
    packed = attention(*tensors, SMALL, cu_seqlens=cu, return_parts=True)
    packed_grads = torch.autograd.grad(packed["o"], tensors, weight)
    block = 0
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        n = SMALL.compressed_blocks(b - a)
        spans = [slice(block, block + n) if i in (3, 4) else slice(a, b) for i in range(8)]
        alone_in = [x.detach()[:, s].requires_grad_() for x, s in zip(tensors, spans)]
        alone = attention(*alone_in, SMALL, return_parts=True)
        assert all(torch.equal(packed[name][:, a:b], alone[name]) for name in alone)
        grads = torch.autograd.grad(alone["o"], alone_in, weight[:, a:b])
        assert all(torch.equal(g[:, s], h) for g, s, h in zip(packed_grads, spans, grads))
        block += n


@BOTH
def test_boundaries_may_be_int32_and_chosen_blocks_are_int64(attention):
    documents = [90, 30, 80]
    tensors = inputs(200, documents=documents)
    weight = torch.randn_like(tensors[0])
    results = []
    for dtype in (torch.int64, torch.int32):
        cu = torch.tensor([0] + documents).cumsum(0).to(dtype)
        parts = attention(*tensors, SMALL, cu_seqlens=cu, return_parts=True)
        o = attention(*tensors, SMALL, cu_seqlens=cu)
        results.append([*parts.values(), o, *torch.autograd.grad(o, tensors, weight)])
        assert parts["block_idx"].dtype == torch.int64
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ------------------------------------------------------------------------- compression and decoding
def rope(x_BTGK, position_T):
    K = x_BTGK.shape[-1]
    angle = position_T[:, None] * 10_000.0 ** (-torch.arange(0, K, 2) / K)
    cos, sin = angle.cos()[:, None].to(x_BTGK.dtype), angle.sin()[:, None].to(x_BTGK.dtype)
    a, b = x_BTGK.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def compressor(cfg, K=16):
    torch.manual_seed(3)
    module = Compressor(K, cfg)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return module


@pytest.mark.parametrize("kind", ["mlp", "mean"])
@pytest.mark.parametrize(
    "T, sizes", [(8, (8, 4)), (11, (8, 4)), (100, (8, 4)), (50, (16, 4)), (33, (8, 8)), (5, (8, 4))]
)
def test_compression_and_its_gradients_match_the_equation(kind, T, sizes):
    cfg = NSAConfig(
        cmp_block=sizes[0], cmp_stride=sizes[1], sel_block=16, sel_count=5, cmp_kind=kind
    )
    module, zero = compressor(cfg), torch.zeros(16, cfg.cmp_block * 16)
    k, v = (torch.randn(2, T, 3, 16, requires_grad=True) for _ in "kv")
    k_cmp, v_cmp = module(k, v, rope, Layout.of(None, (1, T), cfg, "cpu"))
    mlp, zero_w2, pe0 = kind == "mlp", torch.zeros(16, 16), torch.zeros(cfg.cmp_block, 16)
    k_args = (module.k_w1, module.k_w2, module.pe_lK) if mlp else (zero, zero_w2, pe0)
    v_args = (module.v_w1, module.v_w2, pe0) if mlp else (zero, zero_w2, pe0)
    k_true, v_true = oracle.phi(k, *k_args, cfg), oracle.phi(v, *v_args, cfg)
    k_true = (
        k_true
        * (k_true.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        * module.norm_weight.double()
    )
    k_true = rope(k_true, torch.arange(k_true.shape[1]) * cfg.cmp_stride + cfg.cmp_block // 2)
    assert k_cmp.shape[1] == cfg.compressed_blocks(T)
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
        assert all(relative(g, w.double()) <= 6e-5 for g, w in zip(got, want))


def test_compression_with_a_zero_second_matrix_is_the_mean():
    x, modules = (
        torch.randn(1, 100, 2, 16),
        {kind: compressor(NSAConfig(cmp_kind=kind)) for kind in ("mlp", "mean")},
    )
    with torch.no_grad():
        (
            modules["mlp"].k_w2.zero_(),
            modules["mlp"].v_w2.zero_(),
            modules["mlp"].norm_weight.copy_(modules["mean"].norm_weight),
        )
        mlp, mean = (
            module(x, x, rope, Layout.of(None, (1, 100), module.cfg, "cpu"))
            for module in modules.values()
        )
    assert all(torch.equal(a, b) for a, b in zip(mlp, mean))


def test_compression_restarts_at_every_document():
    documents = [40, 3, 8, 21]
    module, x = compressor(SMALL), torch.randn(1, 72, 2, 16)
    cu = torch.tensor([0] + documents).cumsum(0)
    position = torch.cat([torch.arange(n) for n in documents])
    packed = module(
        x,
        x,
        lambda k, token: rope(k, position[token]),
        Layout.of(cu, (1, 72), SMALL, "cpu"),
    )
    alone = [
        module(x[:, a:b], x[:, a:b], rope, Layout.of(None, (1, b - a), SMALL, "cpu"))
        for a, b in zip(cu.tolist(), cu.tolist()[1:])
    ]
    for i in range(2):
        assert torch.allclose(packed[i], torch.cat([y[i] for y in alone], 1), rtol=0, atol=1e-6)


def decode_case(T, cfg=SMALL, B=2, G=2, M=2, K=16, dtype=torch.float32):
    """Raw projections of T tokens and what a layer feeds: rotated q, k; one K/V shared by the
    branches.
    """
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(B, T, h, K, generator=make).to(dtype) for h in (G * M, G, G))
    gates = torch.randn(B, T, G * M, 3, generator=make).sigmoid().to(dtype)
    position = torch.arange(T)
    return rope(q, position), k, rope(k, position), v, gates


def fill(state, case, module, a, b):
    _, k_raw, k, v, _ = (x[:, a:b] for x in case)
    window = (None, None) if state.win is None else (k, v)
    state.append(k_raw, v, k, v, *window, module, rope)


KV = pytest.mark.parametrize("kv", ["shared", "separate"])


@KV
@pytest.mark.parametrize("prompt", [0, 1, 7, 8, 50, 81, 163])
def test_prefill_then_decoding_equals_the_full_forward(prompt, kv):
    T, module, cfg = 220, compressor(SMALL), replace(SMALL, kv=kv)
    case = decode_case(T)
    q, k_raw, k, v, gates = case
    with torch.no_grad():
        k_cmp, v_cmp = module(k_raw, v, rope, Layout.of(None, (1, T), SMALL, "cpu"))
        full = nsa_engine.nsa_attention(q, k, v, k_cmp, v_cmp, k, v, gates, SMALL)
        state = nsa_decode.NSAState(cfg, 2, T, 2, 16)
        if prompt:
            fill(state, case, module, 0, prompt)
        for t in range(prompt, T):
            fill(state, case, module, t, t + 1)
            o = nsa_decode.nsa_decode(q[:, t : t + 1], gates[:, t : t + 1], state)
            assert (o - full[:, t : t + 1]).abs().max() <= 2e-5, t


@KV
@pytest.mark.parametrize("T", [5, 8, 100])
def test_prefill_leaves_the_state_of_token_by_token_decoding(T, kv):
    module, case, cfg = compressor(SMALL), decode_case(T), replace(SMALL, kv=kv)
    states = [nsa_decode.NSAState(cfg, 2, 128, 2, 16) for _ in range(3)]
    with torch.no_grad():
        fill(states[0], case, module, 0, T)
        for t in range(T):
            fill(states[1], case, module, t, t + 1)
        for a, b in zip([0, 3, T // 2 + 2], [3, T // 2 + 2, T]):
            fill(states[2], case, module, a, b)
    for other in states[1:]:
        assert (other.length, other.blocks) == (states[0].length, states[0].blocks)
        for name in ("slc", "tail") + (("win",) if kv == "separate" else ()):
            assert torch.equal(getattr(states[0], name), getattr(other, name)), name
        assert torch.allclose(states[0].cmp, other.cmp, rtol=0, atol=1e-6)


def test_a_full_decode_state_says_so():
    state = nsa_decode.NSAState(SMALL, 2, 10, 2, 16)
    with pytest.raises(
        ValueError, match="holds 10 positions and 11 are needed: build it with max_length >= 11"
    ):
        fill(state, decode_case(11), compressor(SMALL), 0, 11)


@KV
def test_window_keys_that_do_not_fit_the_state_are_refused(kv):
    state, one = nsa_decode.NSAState(replace(SMALL, kv=kv), 2, 10, 2, 16), torch.zeros(2, 1, 2, 16)
    window = one if kv == "shared" else None
    with pytest.raises(ValueError, match=f"kv='{kv}'"):
        state.append(one, one, one, one, window, window, compressor(SMALL), rope)


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
    place_XJ = torch.arange(256).view(2, 128)
    for t in range(cfg.sel_count * cfg.sel_block, 600):
        N = cfg.compressed_blocks(t + 1)
        p_XN = (
            torch.randint(1, 4, (2, N), generator=torch.Generator().manual_seed(t)).float() / 8
        )  # few values: many ties
        best = nsa_decode._chosen_places(p_XN, place_XJ, t // cfg.sel_block, cfg) - torch.tensor(
            [[0], [128]]
        )
        assert torch.equal(
            best.sort().values, select_blocks(p_XN, torch.tensor(t), cfg).sort().values
        ), t
        assert (best[:, -1] == t // cfg.sel_block).all()


# -------------------------------------------------------------------------------- threads and modes
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
    alone = results(tensors)
    torch.set_num_threads(2)
    assert all(torch.equal(x, y) for x, y in zip(both, alone))


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
    monkeypatch.setattr(nsa_engine, "rows_forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nsa_engine.nsa_attention(*inputs(300), SMALL)


def test_no_row_gives_no_result(two_threads):
    assert nsa_engine.nsa_attention(*(x[:0] for x in inputs(100)), SMALL).shape == (0, 100, 4, 16)


# ----------------------------------------------------------------------------------- the custom ops
SIZES = [getattr(SMALL, name) for name in nsa_engine.Sizes._fields]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [None, [30, 90]])
def test_opcheck_passes_for_forward_and_backward(dtype, documents):
    cu = None if documents is None else torch.tensor([0] + documents).cumsum(0)
    tensors = inputs(120, dtype=dtype, documents=documents)
    torch.library.opcheck(nsa_engine.nsa_forward, (*tensors, cu, SIZES))
    plain = [x.detach() for x in tensors]
    o, *saved = nsa_engine.nsa_forward(*plain, cu, SIZES)
    torch.library.opcheck(nsa_engine.nsa_backward, (torch.ones_like(o), *plain, *saved, cu, SIZES))


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_compile_gives_the_eager_result(dynamic):
    compiled = torch.compile(
        lambda *x: nsa_engine.nsa_attention(*x, SMALL) * 2,
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for T in (100, 132):
        tensors = inputs(T)
        eager, fast = nsa_engine.nsa_attention(*tensors, SMALL) * 2, compiled(*tensors)
        assert torch.equal(eager, fast)
        for x, y in zip(*(torch.autograd.grad(o.sum(), tensors) for o in (eager, fast))):
            assert torch.equal(x, y)


def test_meta_tensors_get_the_right_shapes_at_131072_tokens():
    cfg = NSAConfig()
    with torch.device("meta"):
        T, N = 131_072, cfg.compressed_blocks(131_072)
        q, gates = torch.empty(1, T, 32, 128, requires_grad=True), torch.empty(1, T, 32, 3)
        kv = [torch.empty(1, n, 8, 128, requires_grad=True) for n in (T, T, N, N, T, T)]
    parts = nsa_engine.nsa_attention(q, *kv, gates, cfg, return_parts=True)
    assert parts["o"].shape == q.shape and parts["block_idx"].shape == (1, T, 8, 16)
    parts["o"].sum().backward()
    assert q.grad.shape == q.shape and all(x.grad.shape == x.shape for x in kv)


def test_checkpointing_recomputes_and_selective_checkpointing_runs_the_forward_once(monkeypatch):
    calls, real = [], nsa_engine._forward_stream
    monkeypatch.setattr(nsa_engine, "_forward_stream", lambda *x: (calls.append(1), real(*x)))
    tensors = inputs(120, G=1)

    def layer(*x):
        return nsa_engine.nsa_attention(*x, SMALL).square()

    def policy(_, op, *args, **kwargs):
        saved = torch.ops.longhaul.nsa_forward.default
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.PREFER_RECOMPUTE

    grads, counts = [], []
    for context in (None, {}, {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}):
        calls.clear()
        o = (
            layer(*tensors)
            if context is None
            else checkpoint(layer, *tensors, use_reentrant=False, **context)
        )
        grads.append(torch.autograd.grad(o.sum(), tensors))
        counts.append(len(calls))
    assert counts == [1, 2, 1]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))


def test_non_contiguous_inputs_and_expanded_gradients_are_fine():
    tensors = inputs(130)
    strided = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors
    ]
    for x, y in zip(
        *(
            torch.autograd.grad(nsa_engine.nsa_attention(*z, SMALL).sum(), z)
            for z in (tensors, strided)
        )
    ):
        assert torch.equal(x, y)


@pytest.mark.slow
def test_the_largest_tensor_grows_linearly_with_the_tokens():
    def largest(T):
        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            most = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for x in torch.utils._pytree.tree_leaves(out):
                    if isinstance(x, torch.Tensor):
                        self.most = max(self.most, x.untyped_storage().nbytes())
                return out

        tensors = [x.detach() for x in inputs(T, G=1, M=2, cfg=NSAConfig())]
        sizes = [getattr(NSAConfig(), name) for name in nsa_engine.Sizes._fields]
        with Watch() as watch:  # the kernels themselves: a mode does not see inside an operator
            o, *saved = nsa_engine.nsa_forward._init_fn(*tensors, None, sizes)
            nsa_engine.nsa_backward._init_fn(torch.ones_like(o), *tensors, *saved, None, sizes)
        return watch.most

    sizes = [largest(T) for T in (4096, 8192, 16384)]
    assert sizes[2] <= 2.2 * sizes[1] <= 2.2**2 * sizes[0]
    assert sizes[2] < 16384**2  # a [T, T] mask of one byte


# ---------------------------------------------------------------------------------------- bad input
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
    for boundaries in (torch.tensor([0.0, 120.0]), torch.tensor([[0, 120]]), torch.tensor([0])):
        with pytest.raises(ValueError, match="allowed: int32 or int64 \\[documents \\+ 1\\]"):
            attention(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, SMALL, cu_seqlens=boundaries)
    with pytest.raises(ValueError, match="cu_seqlens as a list"):
        attention(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, SMALL, cu_seqlens=[0, 120])
    with pytest.raises(ValueError, match="compress every document"):
        attention(
            q, k, v, k_cmp, v_cmp, k_win, v_win, gates, SMALL, cu_seqlens=torch.tensor([0, 60, 120])
        )

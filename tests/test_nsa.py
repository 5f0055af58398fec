"""Native Sparse Attention: the plain version, the engine and the Triton kernels against the dense
float64 oracle, and decoding against the rule. test_sparse_properties.py has what every attention
over blocks must show.

The kernels run on a GPU if there is one. Otherwise Triton's interpreter runs them: in fp32 and
fp16, because its bf16 products are wrong, on a few dozen tokens, and with tiles cut small, so that
every loop takes several steps. Letters as in nsa_oracle.py.
"""

from dataclasses import replace

import pytest
import torch

from footprint.kernels.measure import peak_bytes
from longhaul.sparse.nsa import decode as nsa_decode
from longhaul.sparse.nsa import engine as nsa_engine
from longhaul.sparse.nsa.selected import importance
from model import (
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels
TINY_SIZES = dict(cmp_block=4, cmp_stride=2, sel_block=4, sel_count=4, window=8)
TINY = NSAConfig(**TINY_SIZES)  # sparse from 16 tokens on
BOTH = pytest.mark.parametrize(
    "attention", [nsa_engine.nsa_attention, plain_nsa_attention], ids=["engine", "plain"]
)
# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


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


def fused_attention(*inputs, cu_seqlens=None, return_parts=False):
    """By the Triton kernels; the parts are those that one forward gives."""
    *tensors, cfg = inputs
    results = nsa_engine.nsa_forward(*tensors, cu_seqlens, sizes_of(cfg), True)
    parts = nsa_engine.Outputs(*results)._asdict()
    names = ("o", "o_cmp", "o_slc", "block_idx")
    return {name: parts[name] for name in names} if return_parts else parts["o"]


ATTENTIONS = {
    "plain": plain_nsa_attention,
    "engine": nsa_engine.nsa_attention,
    "triton": fused_attention,
}


def prepare_triton(monkeypatch):
    """A few dozen tokens make several steps, masked and not, and several segments. What a kernel
    forgets to write is NaN, or an index out of bounds.
    """
    pytest.importorskip("triton", reason="triton is not installed: its kernels do not run")
    from longhaul.sparse.triton import blocks, nsa, tiles

    if DEVICE == "cpu":
        small = tiles.TileSizes(rows=32, key_rows=16, blocks=16, segment_rows=32)
        for module in (nsa, blocks):
            monkeypatch.setattr(module, "tile_sizes", lambda *sizes: small)
        monkeypatch.setattr(blocks, "PARTIAL_RESULT_NUMBERS", 5000)

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 30_000)

        return made

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def relative(x, truth):
    """Norm of the error relative to that of the truth; the norm of x if the truth is zero."""
    scale = truth.norm()
    if scale > 0:
        return ((x.double() - truth).norm() / scale).item()
    return x.double().norm().item()


def all_equal(first, second):
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


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

BOUNDS = {  # relative, of results, gradients, and importance of a block that was left out
    ("plain", torch.float32): (2e-5, 6e-5, 1e-5),
    ("engine", torch.float32): (2e-5, 6e-5, 1e-5),
    ("engine", torch.bfloat16): (1.5e-2, 1.5e-2, 1e-4),
    ("triton", torch.float32): (1e-5, 3e-5, 1e-5),
    ("triton", torch.float16): (2e-3, 4e-3, 1e-4),
}


def compare(name, tensors, cfg):
    """Compares results and all gradients with the oracle on the same inputs and the same chosen
    blocks, and the choice with its importance; returns the choice.
    """
    bounds = BOUNDS[name, tensors[0].dtype]
    parts = ATTENTIONS[name](*tensors, cfg, return_parts=True)
    chosen = chosen_mask(parts["block_idx"].cpu(), tensors[0].shape[1], cfg)
    truth_in = [x.detach().cpu().double().requires_grad_() for x in tensors]
    names = ("o", "o_cmp", "o_slc", "o_win")
    truth = dict(zip(names, oracle.nsa(*truth_in, cfg, chosen), strict=True))
    for part in truth.keys() & parts.keys():
        assert relative(parts[part].detach().cpu(), truth[part]) <= bounds[0], part

    make = torch.Generator().manual_seed(9)
    weight = torch.randn(truth["o"].shape, generator=make).to(tensors[0].dtype)
    grads = torch.autograd.grad(parts["o"], tensors, weight.to(tensors[0].device))
    truth_grads = torch.autograd.grad(truth["o"], truth_in, weight.double())
    for of, grad, want in zip(NAMES, grads, truth_grads, strict=True):
        # The softmax over a single visible key has a gradient of exactly 0. What is left then is
        # measured against the gradient's scale.
        bound = bounds[1] if want.norm() > 1e-6 else 1e-5
        assert relative(grad.cpu(), want) <= bound, f"gradient of {of}"
    assert_selection(chosen, truth_in, cfg, bounds[2])
    return chosen


def small(**sizes):
    return NSAConfig(**(SMALL_SIZES | sizes))


def tiny(**sizes):
    return NSAConfig(**(TINY_SIZES | sizes))


# tokens, sizes and heads
OF_BOTH = [
    *[(T, SMALL, dict(B=2)) for T in (1, 7, 8, 16, 79, 81, 257)],
    *[(203, SMALL, dict(G=G, M=M)) for G, M in ((1, 1), (8, 1), (1, 16), (2, 3))],
    (197, small(cmp_block=16, cmp_stride=16), {}),
    (197, small(cmp_block=16), {}),
    (197, small(sel_init=2, sel_local=3), {}),
    (197, small(sel_count=1, sel_init=0, sel_local=1), {}),
    (197, small(window=1), {}),
    (197, small(window=1000), {}),
    (197, small(sel_block=8, cmp_stride=2), {}),
]
WIDE = dict(G=1, M=4, K=32)
BF16 = dict(G=1, M=4, dtype=torch.bfloat16)
OF_ENGINE = [(T, NSAConfig(), WIDE) for T in (1, 32, 65, 1023, 1025)] + [
    (333, SMALL, BF16 | dict(K=32)),
    (333, SMALL, BF16 | dict(K=64)),
]
OF_TRITON = [
    *[(T, TINY, dict(G=1, M=4)) for T in (1, 4, 17)],
    (22, TINY, dict(G=1, M=3)),
    (29, tiny(sel_local=1), dict(G=1, K=18)),
    (29, TINY, dict(G=1, M=1, dtype=torch.float16)),
    (47, tiny(cmp_block=4, cmp_stride=4), dict(G=1)),
    (47, tiny(sel_block=6, sel_count=5, sel_init=2, sel_local=3), dict(G=1)),
]
SLOW = [
    ("engine", 1283, NSAConfig(), WIDE),
    ("engine", 1155, NSAConfig(), BF16 | dict(K=128)),
    ("triton", 3, TINY, dict(G=1, M=4)),
    ("triton", 16, TINY, dict(G=1, M=4)),
    ("triton", 22, TINY, dict(G=2, M=2)),
    ("triton", 22, TINY, dict(G=1, M=8)),
    ("triton", 47, tiny(cmp_block=2, cmp_stride=1, sel_block=2, sel_count=8, window=50), dict(G=1)),
    ("triton", 47, tiny(cmp_stride=1, sel_init=0, sel_local=1, window=1), dict(G=1)),
]


@pytest.mark.usefixtures("products_in_their_dtype")
@pytest.mark.parametrize(
    "name, T, cfg, settings",
    [
        *[(name, *case) for name in ("plain", "engine") for case in OF_BOTH],
        ("plain", 1283, NSAConfig(), dict(G=1, M=2, K=32)),
        *[("engine", *case) for case in OF_ENGINE],
        *[("triton", *case) for case in OF_TRITON],
        *[slow(*case) for case in SLOW],
    ],
)
def test_every_branch_gradient_and_choice_matches_float64(name, T, cfg, settings, monkeypatch):
    if name == "triton":
        prepare_triton(monkeypatch)
    device = DEVICE if name == "triton" else "cpu"
    made = inputs(T, cfg=cfg, **settings)
    compare(name, [x.detach().to(device).requires_grad_() for x in made], cfg)


# ---- extreme inputs


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


def lowest_blocks(cfg, T):
    """[T, n] in order: the blocks of tokens for which those between the forced ones draw the same
    mass, except for the first one, which no compressed block enters from the left.
    """
    own_T1 = torch.arange(T)[:, None] // cfg.sel_block
    init = torch.arange(cfg.sel_init)
    free = torch.arange(cfg.sel_count - cfg.sel_init - cfg.sel_local) + max(1, cfg.sel_init)
    local = own_T1 - torch.arange(cfg.sel_local)
    sparse = torch.cat((torch.cat((init, free)).expand(T, -1), local), 1)
    every = torch.arange(cfg.sel_count)
    early = torch.where(every <= own_T1, every, -1)
    return torch.where(own_T1 >= cfg.sel_count, sparse, early).sort().values


@pytest.mark.parametrize(
    "name, T, cfg",
    [
        *[(name, 400, small(sel_init=init)) for name in ("plain", "engine") for init in (0, 1)],
        # 5 free places and 32 blocks: two tiles of blocks
        ("triton", 64, NSAConfig(2, 1, 2, 8, window=8)),
    ],
)
def test_equal_importance_keeps_the_lowest_blocks(name, T, cfg, monkeypatch):
    """With q = 0, every visible compressed block has the same mass."""
    if name == "triton":
        prepare_triton(monkeypatch)
    tensors = [x.detach() for x in inputs(T, G=1, cfg=cfg)]
    tensors[0].zero_()
    tensors = [x.to(DEVICE if name == "triton" else "cpu") for x in tensors]
    parts = ATTENTIONS[name](*tensors, cfg, return_parts=True)
    found = parts["block_idx"][0, :, 0].long().cpu().sort().values
    assert torch.equal(found, lowest_blocks(cfg, T))


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


@pytest.mark.parametrize(
    "kind, T, sizes",
    [
        ("mlp", 8, (8, 4)),
        ("mean", 11, (8, 4)),
        ("mlp", 100, (8, 4)),
        ("mean", 50, (16, 4)),
        ("mlp", 33, (8, 8)),
        ("mlp", 5, (8, 4)),
    ],
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


@pytest.mark.parametrize("sizes", [(8, 4), (64, 8)])
def test_the_mean_of_a_block_in_bf16_is_rounded_once(sizes):
    cmp_block, cmp_stride = sizes
    cfg = NSAConfig(cmp_block=cmp_block, cmp_stride=cmp_stride, cmp_kind="mean")
    x = torch.randn(1, 640, 2, 16).bfloat16()
    _, mean = compressor(cfg)(x, x, rope, Layout.of(None, (1, 640), cfg, "cpu"))

    exact = x.double().unfold(1, cmp_block, cmp_stride).mean(-1)
    one_rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((mean - exact).abs() <= one_rounding + 1e-6).all()


@pytest.mark.parametrize(
    "sizes",
    [
        dict(sel_init=0, sel_local=1),
        dict(sel_init=2, sel_local=3),
        dict(cmp_block=16),
        dict(cmp_block=4, sel_count=3),
        dict(cmp_block=16, cmp_stride=16),
    ],
)
def test_a_decoded_token_chooses_the_blocks_of_the_rule_ties_included(sizes):
    cfg = replace(SMALL, **sizes)
    state = nsa_decode.NSAState(cfg, 1, 600, 2, 16)
    for t in range(cfg.sel_count * cfg.sel_block, 600, 7):
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
    "fused, dtype, documents, cfg",
    [
        (False, torch.float32, [120], SMALL),
        (False, torch.bfloat16, [30, 90], SMALL),
        slow(True, torch.float32, [5, 1], TINY),
    ],
)
def test_opcheck_passes_for_forward_and_backward(fused, dtype, documents, cfg):
    if fused:
        pytest.importorskip("triton", reason="triton is not installed: its kernels do not run")
    numbers = boundaries(documents), sizes_of(cfg), fused
    heads = dict(G=1, M=1) if fused else {}
    made = inputs(sum(documents), cfg=cfg, dtype=dtype, documents=documents, **heads)
    tensors = [x.detach().to(DEVICE if fused else "cpu").requires_grad_() for x in made]
    torch.library.opcheck(nsa_engine.nsa_forward, (*tensors, *numbers))

    plain = [x.detach() for x in tensors]
    o, *saved = nsa_engine.nsa_forward(*plain, *numbers)
    do = torch.ones_like(o)
    torch.library.opcheck(nsa_engine.nsa_backward, (do, *plain, *saved, *numbers))


def test_fullgraph_compile_gives_the_eager_result():
    compiled = torch.compile(
        lambda *x: nsa_engine.nsa_attention(*x, SMALL) * 2,
        fullgraph=True,
        dynamic=True,
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


def test_non_contiguous_inputs_and_expanded_gradients_are_fine():
    tensors = inputs(130)
    strided = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors
    ]
    grads = torch.autograd.grad(nsa_engine.nsa_attention(*tensors, SMALL).sum(), tensors)
    strided_grads = torch.autograd.grad(nsa_engine.nsa_attention(*strided, SMALL).sum(), strided)
    assert all_equal(grads, strided_grads)


def peak(T):
    tensors = inputs(T, G=1)

    def passes():
        o = nsa_engine.nsa_attention(*tensors, SMALL)
        torch.autograd.grad(o.sum(), tensors)

    return peak_bytes(passes, torch.device("cpu"))


@pytest.mark.slow
def test_the_peak_of_forward_and_backward_is_linear_in_the_tokens():
    at_1k, at_2k, at_4k = (peak(T) for T in (1024, 2048, 4096))
    assert at_4k <= 2.2 * at_2k <= 2.2**2 * at_1k


# ---- bad input


@pytest.mark.parametrize(
    "name, value",
    [
        ("cmp_stride", 12),
        ("sel_block", 72),
        ("cmp_block", 128),
        ("sel_count", 2),
        ("window", 0),
        ("sel_init", -1),
        ("cmp_kind", "max"),
        ("kv", "both"),
        ("window", 1.5),
        ("window", True),
        ("sel_block", "32"),
        ("cmp_kind", 3),
    ],
)
def test_a_bad_size_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        NSAConfig(**{name: value})


@BOTH
@pytest.mark.parametrize(
    "cu",
    [
        torch.tensor([1, 120]),
        torch.tensor([0, 119], dtype=torch.int32),
        torch.tensor([0, 50, 50, 120]),
        torch.tensor([0.0, 120.0]),
        torch.tensor([0]),
        torch.tensor([[0, 120]]),
        [0, 120],
        torch.tensor([0, 60, 120]),  # whose blocks would be fewer
    ],
)
def test_bad_cu_seqlens_are_refused(attention, cu):
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention(*inputs(120), SMALL, cu_seqlens=cu)


@BOTH
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, *more: (q[:, :, :3], k, *more), "3 query heads, 2 KV heads"),
        (lambda q, k, v, k_cmp, *more: (q, k, v, k_cmp[:, 1:], *more), "shape"),
        (lambda q, k, *more: (q, k.double(), *more), "float64"),
    ],
)
def test_wrong_shapes_head_counts_and_dtypes_are_refused(attention, change, words):
    with pytest.raises(ValueError, match=words):
        attention(*change(*inputs(120)), SMALL)

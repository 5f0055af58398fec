"""The engine of block-sparse attention and its plain version against a dense float64 oracle."""

import functools
import itertools

import pytest
import torch

from base import machine
from base.machine import has_triton
from footprint.kernels.measure import peak_bytes
from longhaul.planner.simulate import on_target
from longhaul.planner.workspace import Workspaces
from longhaul.sparse import block_sparse_attention, engine
from longhaul.sparse.plain import plain_block_sparse_attention
from tests.oracle import attend
from tests.tiers import slow

BOTH = pytest.mark.parametrize(
    "attention", [plain_block_sparse_attention, block_sparse_attention], ids=["plain", "engine"]
)


def by_triton(function):
    """The function by the kernels for GPUs, which without one Triton's interpreter runs."""

    @functools.wraps(function)
    def run(*args, **options):
        pytest.importorskip("triton", reason="triton is not installed: its kernels do not run")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
        results = function(*args, **options, kernels="triton")
        return torch.utils._pytree.tree_map(torch.Tensor.cpu, results)

    return run


ATTENTIONS = {
    "plain": plain_block_sparse_attention,
    "engine": block_sparse_attention,
    "triton": by_triton(block_sparse_attention),
}
EVERY = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
CPU = torch.device("cpu")


# ---- the oracle


def oracle(q_BTHK, k_BSGK, v_BSGK, chosen_BTGn, block):
    """(o, lse) of rows that are one document each; every query reads a key."""
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    M = q_BTHK.shape[2] // k_BSGK.shape[2]
    key_S = torch.arange(S)
    chosen_BTGS = (chosen_BTGn[..., None] == key_S // block).any(3)
    visible_BTGS = chosen_BTGS & (key_S <= torch.arange(S - T, S)[:, None, None])
    visible_BHTS = visible_BTGS.transpose(1, 2).repeat_interleave(M, 1)
    o_BTHK, lse_BHT, _ = attend(q_BTHK, k_BSGK, v_BSGK, visible_BHTS)
    return o_BTHK, lse_BHT.transpose(1, 2)


# ---- inputs


def choose(generator, B, T, S, G, block, n):
    """A random choice with the own block, in any order and with unused slots between."""
    chosen_BTGn = torch.full((B, T, G, n), -1, dtype=torch.int32)
    for b, t, g in torch.cartesian_prod(*map(torch.arange, (B, T, G))).tolist():
        own = (S - T + t) // block
        most = int(torch.randint(n, (), generator=generator))
        blocks = [*torch.randperm(own, generator=generator)[:most].tolist(), own]
        blocks += [-1] * (n - len(blocks))
        order = torch.randperm(n, generator=generator)
        chosen_BTGn[b, t, g] = torch.tensor(blocks, dtype=torch.int32)[order]
    return chosen_BTGn


def operands(B=1, T=75, S=None, G=2, M=2, K=16, block=8, n=5, dtype=torch.float32, seed=0):
    """q, k, v, chosen, and gradients of o and lse."""
    S = S or T
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator)
    q, do = (normal(B, T, G * M, K).to(dtype) for _ in range(2))
    k, v = (normal(B, S, G, K).to(dtype) for _ in range(2))
    return (q, k, v), choose(generator, B, T, S, G, block, n), (do, normal(B, T, G * M))


def results(attention, qkv, chosen, upstream, block=8, **options):
    """o, lse, dq, dk, dv."""
    qkv = [x.detach().requires_grad_() for x in qkv]
    o, lse = attention(*qkv, chosen, block, **options)
    do, dlse = upstream
    grads = torch.autograd.grad([o, lse], qkv, [do.to(o.dtype), dlse.to(lse.dtype)])
    return o.detach(), lse.detach(), *grads


def truth(qkv, chosen, upstream, block=8):
    return results(oracle, [x.double() for x in qkv], chosen, upstream, block)


def error(x, y):
    return float((x.double() - y).norm() / y.norm())


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks, and groups of tiles with and without a mask, in a short row."""
    monkeypatch.setattr(engine, "CHUNK_PAIRS", 128)
    monkeypatch.setattr(engine, "TILES_AT_ONCE", 2)
    if has_triton():
        from longhaul.sparse.triton import blocks, tiles

        small = tiles.TileSizes(rows=32, key_rows=16, blocks=16, segment_rows=32)
        monkeypatch.setattr(blocks, "tile_sizes", lambda *sizes: small)
        monkeypatch.setattr(blocks, "PARTIAL_RESULT_NUMBERS", 12_000)


# ---- exactness


SIZES = [
    dict(B=2, T=27),
    dict(T=21, S=76, M=4),
    dict(T=3, S=76, block=64, n=2),
    dict(T=130, G=1, M=4, block=64, n=2, K=80),
]
MORE_SIZES = [dict(T=64, M=1), dict(T=1, S=76, M=8), dict(T=1), dict(T=40, n=1)]


@pytest.mark.parametrize(
    "name, sizes",
    [
        *itertools.product(ATTENTIONS, SIZES),
        *itertools.product(("plain", "engine"), MORE_SIZES),
        *[slow("triton", sizes) for sizes in MORE_SIZES],
    ],
    ids=str,
)
def test_results_and_gradients_are_those_of_the_oracle(name, sizes, small_chunks):
    block = sizes.get("block", 8)
    qkv, chosen, upstream = operands(**sizes)
    found = results(ATTENTIONS[name], qkv, chosen, upstream, block)
    for x, y in zip(found, truth(qkv, chosen, upstream, block), strict=True):
        assert error(x, y) <= 1e-5
    if name == "plain":
        exact = results(ATTENTIONS[name], [x.double() for x in qkv], chosen, upstream, block)
        assert exact[1].dtype == torch.float64
        for x, y in zip(exact, truth(qkv, chosen, upstream, block), strict=True):
            assert error(x, y) <= 1e-12


@pytest.mark.parametrize("name", ["plain", "engine", slow("triton")])
def test_each_result_alone_has_its_own_gradients(name):
    qkv, chosen, (do, dlse) = operands(T=27)
    zeros = (torch.zeros_like(do), torch.zeros_like(dlse))
    for number, upstream in enumerate([(do, zeros[1]), (zeros[0], dlse)]):
        leaves = [x.requires_grad_() for x in qkv]
        result = ATTENTIONS[name](*leaves, chosen, 8)[number]
        found = torch.autograd.grad(result, leaves, upstream[number], allow_unused=True)
        for x, y in zip(found, truth(qkv, chosen, upstream)[2:], strict=True):
            assert (y.norm() == 0 and (x is None or x.norm() == 0)) or error(x, y) <= 1e-5


@pytest.mark.usefixtures("products_in_their_dtype")
@pytest.mark.parametrize(
    "dtype, K, in_fp32, T",
    [
        (torch.bfloat16, 64, False, 203),
        (torch.float16, 32, True, 203),
        (torch.bfloat16, 64, True, 2),
        (torch.float16, 32, False, 2),
    ],
)
def test_low_precision_is_about_as_exact_as_the_plain_version(
    dtype, K, in_fp32, T, small_chunks, monkeypatch
):
    qkv, chosen, upstream = operands(T=T, S=203, M=4, K=K, dtype=dtype)
    wanted = truth(qkv, chosen, upstream)
    plain = results(plain_block_sparse_attention, qkv, chosen, upstream)
    if in_fp32:  # as on a CPU whose fp32 products are the faster ones
        monkeypatch.setattr(machine, "product_dtype", lambda x: torch.float32)
    found = results(block_sparse_attention, qkv, chosen, upstream)
    for x, other, y in zip(found, plain, wanted, strict=True):
        assert error(x, y) <= max(1.5 * error(other, y), 1e-6)
        assert x.dtype == other.dtype


@EVERY
def test_a_query_without_an_own_block_or_without_any_block_reads_none(attention):
    qkv, chosen, upstream = operands()
    own_T = torch.arange(75) // 8
    chosen = chosen.masked_fill(chosen == own_T[:, None, None], -1)
    blind_BTG = (chosen < 0).all(-1)
    assert blind_BTG.any() and not blind_BTG.all()
    blind_BTH = blind_BTG.repeat_interleave(2, -1)
    upstream = upstream[0], upstream[1].masked_fill(blind_BTH, 0)
    o, lse, dq, dk, dv = results(attention, qkv, chosen, upstream)
    assert (o[blind_BTH] == 0).all() and (dq[blind_BTH] == 0).all()
    assert torch.equal(lse == -torch.inf, blind_BTH)

    # the oracle, for which the blind queries read their own block and are then left out
    seeing = chosen.clone()
    seeing[..., 0] = torch.where(blind_BTG, own_T[:, None].int(), seeing[..., 0])
    do = upstream[0].masked_fill(blind_BTH.unsqueeze(-1), 0)
    wanted = truth(qkv, seeing, (do, upstream[1]))
    keep_BTH = ~blind_BTH
    for x, y in zip((o, lse, dq), wanted, strict=False):
        assert error(x[keep_BTH], y[keep_BTH]) <= 1e-5
    assert error(dk, wanted[3]) <= 1e-5 and error(dv, wanted[4]) <= 1e-5


# ---- memory


def random_choice(T, G, block, n, generator):
    """The own block and n-1 random earlier ones, some of them twice as unused."""
    own_T1 = torch.arange(T)[:, None] // block
    drawn = torch.rand(T, n - 1, generator=generator) * own_T1
    chosen_Tn = torch.cat([drawn.int(), own_T1.int()], 1).sort(-1).values
    repeated = chosen_Tn[:, 1:] == chosen_Tn[:, :-1]
    chosen_Tn[:, :-1].masked_fill_(repeated, -1)
    return chosen_Tn[None, :, None].expand(1, T, G, n).contiguous()


def long_operands(T, M, K, dtype):
    generator = torch.Generator().manual_seed(0)
    make = functools.partial(torch.randn, generator=generator)
    q, do = (make(1, T, M, K).to(dtype) for _ in range(2))
    k, v = (make(1, T, 1, K).to(dtype) for _ in range(2))
    chosen = random_choice(T, 1, 16, 8, generator)
    return (q, k, v), chosen, (do, make(1, T, M))


def peak(T):
    qkv, chosen, upstream = long_operands(T, 2, 32, torch.bfloat16)
    return peak_bytes(lambda: results(block_sparse_attention, qkv, chosen, upstream, 16), CPU)


def test_the_peak_of_forward_and_backward_is_linear_in_the_tokens(monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_PAIRS", 1024)
    at_1k, at_2k, at_4k = (peak(T) for T in (1024, 2048, 4096))
    assert at_4k <= 2.1 * at_2k <= 2.1**2 * at_1k


def inside(operator, arguments):
    """Bytes at the peak of its body, without inputs and results, as the planner counts them."""
    return Workspaces("cpu")._inside(operator._qualname, arguments)


@pytest.mark.parametrize(
    "dtype, products, T, S",
    [
        (torch.float32, torch.float32, 1300, 1300),
        (torch.bfloat16, torch.bfloat16, 700, 1301),
        (torch.bfloat16, torch.float32, 1300, 1300),
        (torch.bfloat16, torch.float32, 300, 20_000),
    ],
)
def test_the_operators_hold_inside_what_the_planner_says(T, S, dtype, products, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK_PAIRS", 2048)
    (q, k, v), chosen, (do, dlse) = long_operands(S, 4, 64, dtype)
    q, do, dlse, chosen = (x[:, S - T :].contiguous() for x in (q, do, dlse, chosen))
    numbers = None, 16, products
    o, lse = engine.block_sparse_forward(q, k, v, chosen, *numbers)
    backward = (do, q, k, v, chosen, o, lse, dlse, *numbers)
    calls = [
        (engine.block_sparse_forward, (q, k, v, chosen, *numbers)),
        (engine.block_sparse_backward, backward),
    ]
    for operator, arguments in calls:
        call = functools.partial(operator, *arguments)
        returned = torch.utils._pytree.tree_leaves(call())
        planned = inside(operator, arguments)
        planned += sum(x.untyped_storage().nbytes() for x in returned)
        assert planned == pytest.approx(peak_bytes(call, CPU), rel=0.01)


class IntegersMade(torch.utils._python_dispatch.TorchDispatchMode):
    """The dtypes of integers that operations compute; views of `given` are not computed."""

    def __init__(self, given):
        super().__init__()
        self.given = given.untyped_storage()._cdata
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            integer = isinstance(x, torch.Tensor) and x.dtype in INTEGERS
            if integer and x.untyped_storage()._cdata != self.given:
                self.dtypes.add(x.dtype)
        return out


INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_bodies_take_more_elements_than_32_bits_count(target):
    T = 2**21
    make = functools.partial(torch.empty, device=target, dtype=torch.bfloat16)
    numbers = None, 64, torch.bfloat16
    with on_target(target=target) as tracker, tracker.workspace.inside_one():
        q, k, v = (make(1, T, heads, 128) for heads in (32, 8, 8))
        chosen = make(1, T, 8, 16, dtype=torch.int32)
        assert q.numel() > 2**32
        with IntegersMade(chosen) as integers:
            o, lse = engine.block_sparse_forward._init_fn(q, k, v, chosen, *numbers)
            saved = (q, k, v, chosen, o, lse)
            grads = engine.block_sparse_backward._init_fn(q, *saved, lse, *numbers)
            last = (q[:, -1:], k, v, chosen[:, -1:], *numbers)
            engine.block_sparse_forward._init_fn(*last)
    assert integers.dtypes == {torch.int64}
    assert [x.shape for x in (o, *grads)] == [q.shape, q.shape, k.shape, v.shape]


def test_the_tables_of_the_kernels_count_pairs_in_64_bits_and_buckets_in_32(monkeypatch):
    blocks = pytest.importorskip("longhaul.sparse.triton.blocks", reason="triton is not installed")
    monkeypatch.setattr(blocks, "launch", lambda *_, **__: None)  # nothing runs on meta
    T = 2**21
    make = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k = make(1, T, 32, 128), make(1, T, 8, 128)
    chosen = make(1, T, 8, 16, dtype=torch.int32)
    call = blocks.Call(q, k, chosen, None, 64)
    assert call.pairs.order_P.dtype == torch.int64
    assert (
        chosen.numel()
        == len(call.pairs.order_P)
        == sum((part.y1 - part.y0) * call.n for part in call.parts())
    )
    assert len(call.pairs.start_E1) < 2**31
    results = blocks.forward(q, k, k, chosen, None, 64)
    assert [x.shape for x in results] == [q.shape, q.shape[:3]]
    grads = blocks.backward(q, q, k, k, chosen, results[1], results[1], None, 64)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


# ---- operators and bad input


@pytest.mark.parametrize("fused", [False, True])
def test_the_operators_follow_the_rules_of_pytorch(fused):
    if fused:
        pytest.importorskip("triton", reason="triton is not installed")
    (q, k, v), _, (do, dlse) = operands(T=10, G=1, M=1)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.cat([choose(generator, 1, length, length, 1, 8, 5) for length in (9, 1)], 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    numbers = torch.tensor([0, 9, 10]), 8, torch.float32, fused
    torch.library.opcheck(engine.block_sparse_forward, (*leaves, chosen, *numbers))
    with torch.no_grad():
        o, lse = engine.block_sparse_forward(q, k, v, chosen, *numbers)
        saved = (q, k, v, chosen, o, lse)
        torch.library.opcheck(engine.block_sparse_backward, (do, *saved, dlse, *numbers))


def test_kernels_that_cannot_serve_are_refused_by_name_and_left_out_by_default():
    pytest.importorskip("triton", reason="triton is not installed")
    qkv, chosen, _ = operands(T=20, dtype=torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="bfloat16 on cpu; they need .*: .*--kernels torch"):
            block_sparse_attention(*qkv, chosen, 8, kernels="triton")
    wide = [x.repeat_interleave(65, 2) if x is qkv[0] else x for x in qkv]
    with pytest.raises(ValueError, match="130 query heads per KV head"):
        block_sparse_attention(*wide, chosen, 8, kernels="triton")
    assert block_sparse_attention(*wide, chosen, 8)[0].isfinite().all()


@BOTH
@pytest.mark.parametrize(
    "bad",
    [
        lambda q, k, v, c: (q[:, :, :3], k, v, c),
        lambda q, k, v, c: (q, k[:, :19], v[:, :19], c),
        lambda q, k, v, c: (q, k, v.double(), c),
        lambda q, k, v, c: (q, k, v, c[:, :19]),
        lambda q, k, v, c: (q, k, v, c.float()),
        lambda q, k, v, c: (q, k, v, c, 0),
        lambda q, k, v, c: (q, k, v, c, 8, torch.tensor([0, 9, 9, 20])),
        lambda q, k, v, c: (q, k, v, c, 8, torch.tensor([0.0, 20.0])),
        lambda q, k, v, c: (q[:, 1:], k, v, c[:, 1:], 8, torch.tensor([0, 19])),
    ],
)
def test_inputs_that_do_not_fit_are_refused(attention, bad):
    qkv, chosen, _ = operands(T=20)
    with pytest.raises(ValueError, match="^block_sparse_attention: given .*; allowed: "):
        attention(*bad(*qkv, chosen))


def test_fp64_is_for_the_plain_version():
    qkv, chosen, _ = operands(T=20, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        block_sparse_attention(*qkv, chosen, 8)


@pytest.mark.parametrize("blocks", [[9, 3], [2, 2]], ids=["later than its own", "twice"])
def test_the_plain_version_refuses_a_choice_that_no_chooser_makes(blocks):
    (q, k, v), _, _ = operands(T=1, S=75)
    chosen = torch.tensor(blocks, dtype=torch.int32).expand(1, 1, 2, 2)
    plain_block_sparse_attention(q, k, v, chosen.sort().values[..., :1], 8)
    with pytest.raises(ValueError, match="allowed: "):
        plain_block_sparse_attention(q[:, :1], k[:, :70], v[:, :70], chosen, 8)

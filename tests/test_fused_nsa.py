"""nsa/triton/attention.py against the dense float64 oracle and nsa/engine.py: on a GPU if there is one, else
interpreted.

Letters as in nsa_oracle.py. Without a GPU: fp32 and fp16 (the interpreter's bf16 products are
wrong), a few dozen tokens, and tiles cut small, so that every loop takes several steps.
"""

import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch

from model import NSAConfig
from nsa import engine
from tests import nsa_oracle as oracle
from tests.test_nsa import NAMES, assert_selection, chosen_mask, inputs, relative

triton = pytest.importorskip(
    "triton",
    reason="triton is not installed: the kernels of Native Sparse Attention are not tested",
)

from nsa.triton import attention  # noqa: E402  without triton it cannot be imported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = NSAConfig(
    cmp_block=4, cmp_stride=2, sel_block=4, sel_count=4, window=8
)  # sparse from 16 tokens on
SIZES = [getattr(SMALL, name) for name in attention.Sizes._fields]
BOUNDS = {torch.float32: (1e-5, 3e-5), torch.float16: (2e-3, 4e-3)}  # forward, gradients
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # numpy's remarks on inf, which the kernels expect


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """16 or 32 rows, 16 keys, segments of 32 rows: a few dozen tokens make several steps, masked
    and not, and several segments.
    """
    if DEVICE == "cpu":
        monkeypatch.setattr(
            attention, "blocks", lambda K, itemsize: attention.Blocks(32, 16, 16, 1, 32)
        )


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Outputs and buffers that a kernel forgets to write are NaN, or an index out of bounds."""

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 30_000)

        return made

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def make(T, cfg=SMALL, **settings):
    return [x.detach().to(DEVICE).requires_grad_() for x in inputs(T, cfg=cfg, **settings)]


def run(tensors, cfg=SMALL, cu=None):
    """o, o_cmp, o_slc, block_idx, and the gradients of a random weighting of o, on the CPU."""
    o, o_cmp, o_slc, _, _, block_idx = attention.nsa_triton_forward(
        *tensors, cu, [getattr(cfg, name) for name in attention.Sizes._fields]
    )
    grads = torch.autograd.grad(o, tensors, weighting(o))
    return [x.detach().cpu() for x in (o, o_cmp, o_slc, block_idx)], [x.cpu() for x in grads]


def weighting(o):
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o)


def compare(tensors, cfg=SMALL):
    """Outputs and all gradients against the oracle on the same inputs and the same chosen blocks;
    the choice against the oracle's importance.
    """
    (o, o_cmp, o_slc, block_idx), grads = run(tensors, cfg)
    chosen = chosen_mask(block_idx, o.shape[1], cfg)
    truth_in = [x.detach().cpu().double().requires_grad_() for x in tensors]
    truth = oracle.nsa(*truth_in, cfg, chosen)
    forward_bound, gradient_bound = BOUNDS[o.dtype]
    for name, got, want in zip(("o", "o_cmp", "o_slc"), (o, o_cmp, o_slc), truth):
        assert relative(got, want) <= forward_bound, name
    for name, got, want in zip(
        NAMES,
        grads,
        torch.autograd.grad(truth[0], truth_in, weighting(truth[0]).to(o.dtype).double()),
        strict=True,
    ):
        # a lone visible key has a softmax gradient of exactly 0: measure what is left against the
        # gradient's scale
        assert relative(got, want) <= (gradient_bound if want.norm() > 1e-6 else forward_bound), (
            f"gradient of {name}"
        )
    assert_selection(chosen, truth_in, cfg, 1e-5 if o.dtype == torch.float32 else 1e-4)


# ---- against the oracle


@pytest.mark.parametrize("T", [1, 3, 4, 5, 16, 17, 33, 50])
def test_every_branch_gradient_and_choice_matches_float64(T):
    compare(make(T, G=1, M=4))


@pytest.mark.parametrize("G, M", [(1, 1), (2, 2), (1, 3), (1, 8)])
def test_every_group_size_matches_float64(G, M):
    compare(make(29, G=G, M=M))


@pytest.mark.parametrize("K", [24, 32])
def test_head_dims_that_are_no_power_of_two_match_float64(K):
    compare(make(29, G=1, K=K))


@pytest.mark.parametrize("M", [1, 4])
def test_fp16_is_within_its_rounding(M):
    compare(make(29, G=1, M=M, dtype=torch.float16))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(cmp_block=2, cmp_stride=1, sel_block=2, sel_count=8, window=50),
        dict(cmp_block=4, cmp_stride=4),
        dict(cmp_stride=1),
        dict(sel_init=0, sel_local=1),
        dict(sel_count=5, sel_init=2, sel_local=3),
        dict(sel_block=8, sel_count=3),
        dict(sel_block=6, window=1),
        dict(window=1000),
    ],
)
def test_other_block_sizes_match_float64(sizes):
    cfg = NSAConfig(**(dict(cmp_block=4, cmp_stride=2, sel_block=4, sel_count=4, window=8) | sizes))
    compare(make(47, G=1, cfg=cfg), cfg)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_tiles_of_a_gpu_match_float64(dtype, monkeypatch):
    monkeypatch.undo()
    compare(make(45, G=1, M=4, dtype=dtype))


@pytest.mark.parametrize("queries", [19, 17], ids=["one KV head at a time", "17 queries at a time"])
def test_chunks_of_pairs_equal_one_chunk(queries, monkeypatch):
    tensors = make(19)
    whole, whole_grads = run(tensors)
    monkeypatch.setattr(attention, "PAIR_NUMBERS", SMALL.sel_count * 2 * 16 * queries)
    parts, grads = run(tensors)
    assert torch.equal(whole[3], parts[3])
    assert all(
        torch.allclose(x, y, rtol=0, atol=5e-6)
        for x, y in zip((*whole, *whole_grads), (*parts, *grads), strict=True)
    )


# ---- against the engine


def test_parts_and_chosen_blocks_are_the_engines():
    tensors = make(26, G=1, M=4)
    got, want = (
        f(*tensors, SMALL, return_parts=True)
        for f in (attention.nsa_attention, engine.nsa_attention)
    )
    assert list(got) == list(want)
    for name in ("o", "o_cmp", "o_slc", "o_win"):
        assert torch.allclose(got[name], want[name], rtol=0, atol=5e-6), name
    assert torch.equal(got["block_idx"].sort(-1).values, want["block_idx"].sort(-1).values)
    assert got["block_idx"].dtype == want["block_idx"].dtype


def test_equal_importance_keeps_the_lowest_blocks():
    cfg = NSAConfig(
        cmp_block=2, cmp_stride=1, sel_block=2, sel_count=8, window=8
    )  # 5 free places, 32 blocks: two tiles of them
    sizes, tensors = (
        [getattr(cfg, name) for name in attention.Sizes._fields],
        make(64, G=1, cfg=cfg),
    )
    with torch.no_grad():
        tensors[0].zero_()
    got, want = (
        op(*tensors, None, sizes)[-1] for op in (attention.nsa_triton_forward, engine.nsa_forward)
    )
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


# ---- extreme inputs


def test_rows_without_a_visible_block_are_exactly_zero_with_zero_gradients():
    tensors = make(30)
    blind = slice(0, SMALL.cmp_block - 1)
    with torch.no_grad():
        tensors[7][..., 1:] = 0  # the compressed branch alone
    o = attention.nsa_attention(*tensors, SMALL)
    assert (o[:, blind] == 0).all() and (o[:, SMALL.cmp_block - 1 :] != 0).any()
    grads = torch.autograd.grad(o[:, blind].sum(), tensors)
    assert all((g == 0).all() for g in grads[:7]) and (grads[7][..., 0] == 0).all()


def test_huge_logits_stay_finite_and_exact():
    tensors = make(40, G=1)
    with torch.no_grad():
        for i in (0, 1, 3, 5):
            tensors[i].mul_(300)
    (o, _, _, block_idx), grads = run(tensors)
    assert all(x.isfinite().all() for x in (o, *grads))
    truth = oracle.nsa(
        *(x.detach().cpu() for x in tensors), SMALL, chosen_mask(block_idx, 40, SMALL)
    )[0]
    assert relative(o, truth) <= 1e-3  # logits near 1e5: their own fp32 rounding is 1e-2


def test_nothing_in_the_future_matters():
    T, cut = 40, 25
    tensors, other, blocks = make(T, G=1), make(T, G=1, seed=1), SMALL.compressed_blocks(cut)
    cuts = [blocks if i in (3, 4) else cut for i in range(8)]
    mixed = [
        torch.cat((x[:, :n], y[:, n:]), 1).detach().requires_grad_()
        for x, y, n in zip(tensors, other, cuts, strict=True)
    ]
    (o, *_, idx), (after, *_, mixed_idx) = (
        attention.nsa_triton_forward(*x, None, SIZES) for x in (tensors, mixed)
    )
    assert torch.equal(o[:, :cut], after[:, :cut]) and torch.equal(idx[:, :cut], mixed_idx[:, :cut])
    for g, n in zip(torch.autograd.grad(o[:, :cut].sum(), tensors), cuts, strict=True):
        assert (g[:, n:] == 0).all()


def test_nan_inputs_reach_the_output_and_read_nothing_out_of_bounds():
    tensors = make(40, G=1)
    with torch.no_grad():
        tensors[0][:, 30] = torch.nan
    (o, _, _, block_idx), _ = run(tensors)
    assert o[:, 30].isnan().all() and not o[:, :30].isnan().any()
    assert block_idx.min() >= -1 and block_idx.max() <= 39 // SMALL.sel_block


# ---- determinism, documents, layouts


def test_repeats_are_bit_identical():
    tensors = make(33, G=1, M=4)
    (first, first_grads), (again, again_grads) = run(tensors), run(tensors)
    assert all(
        torch.equal(x, y)
        for x, y in zip((*first, *first_grads), (*again, *again_grads), strict=True)
    )


@pytest.mark.parametrize("documents", [[5, 19, 1], [1, 1, 3, 4, 5]])
def test_packed_documents_equal_separate_ones_exactly(documents):
    tensors = make(sum(documents), G=1, B=2, documents=documents)
    cu = torch.tensor([0] + documents).cumsum(0)
    weight = weighting(tensors[0])
    packed = [
        o := attention.nsa_attention(*tensors, SMALL, cu_seqlens=cu),
        *torch.autograd.grad(o, tensors, weight),
    ]
    block = 0
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        n = SMALL.compressed_blocks(b - a)
        spans = [slice(block, block + n) if i in (3, 4) else slice(a, b) for i in range(8)]
        alone_in = [
            x.detach()[:, span].requires_grad_() for x, span in zip(tensors, spans, strict=True)
        ]
        alone = [
            o := attention.nsa_attention(*alone_in, SMALL),
            *torch.autograd.grad(o, alone_in, weight[:, a:b]),
        ]
        assert all(
            torch.equal(x[:, span], y)
            for x, y, span in zip(packed, alone, [slice(a, b), *spans], strict=True)
        )
        block += n


def test_non_contiguous_inputs_and_expanded_gradients_are_fine():
    tensors = make(21, G=1)
    strided = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors
    ]
    for x, y in zip(
        *(
            torch.autograd.grad(attention.nsa_attention(*z, SMALL).sum(), z)
            for z in (tensors, strided)
        ),
        strict=True,
    ):
        assert torch.equal(x, y)


# ---- the custom ops


@pytest.mark.parametrize("documents", [None, [7, 3]])
def test_opcheck_passes_for_forward_and_backward(documents, monkeypatch):
    monkeypatch.undo()  # opcheck calls torch.empty_like on tensors without data
    cu = None if documents is None else torch.tensor([0] + documents).cumsum(0)
    tensors = make(10, G=1, documents=documents)
    torch.library.opcheck(attention.nsa_triton_forward, (*tensors, cu, SIZES))
    plain = [x.detach() for x in tensors]
    o, *saved = attention.nsa_triton_forward(*plain, cu, SIZES)
    torch.library.opcheck(
        attention.nsa_triton_backward, (torch.ones_like(o), *plain, *saved, cu, SIZES)
    )


def test_fullgraph_compile_gives_the_eager_result():
    compiled = torch.compile(
        lambda *x: attention.nsa_attention(*x, SMALL) * 2, fullgraph=True, backend="aot_eager"
    )
    tensors = make(21, G=1)
    eager, fast = attention.nsa_attention(*tensors, SMALL) * 2, compiled(*tensors)
    assert torch.equal(eager, fast)
    for x, y in zip(*(torch.autograd.grad(o.sum(), tensors) for o in (eager, fast)), strict=True):
        assert torch.equal(x, y)


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


class Live(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the storages alive that were made inside, and the most at once."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()

    def forget(self, key, size):
        self.now -= size
        self.known.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = map(torch.utils._pytree.tree_leaves, ((args, kwargs), out))
        given, made = (
            [x.untyped_storage() for x in tree if isinstance(x, torch.Tensor)] for tree in leaves
        )
        for storage in made:
            if storage._cdata not in {x._cdata for x in given} | self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.now)
        return out


def test_a_layer_of_131072_tokens_needs_less_than_4_gb_beyond_its_inputs_output_and_gradients(
    monkeypatch,
):
    monkeypatch.undo()
    for name in dir(attention):
        if name.endswith("_kernel"):
            monkeypatch.setattr(attention, name, Idle())
    monkeypatch.setattr(attention, "require", lambda q: None)
    cfg, T = NSAConfig(), 131_072
    sizes, N = [getattr(cfg, name) for name in attention.Sizes._fields], cfg.compressed_blocks(T)
    with torch.device("meta"):
        q, gates = (
            torch.empty(1, T, 32, 128, dtype=torch.bfloat16),
            torch.empty(1, T, 32, 3, dtype=torch.bfloat16),
        )
        kv = [torch.empty(1, n, 8, 128, dtype=torch.bfloat16) for n in (T, T, N, N, T, T)]

    def bytes_of(*tensors):
        return sum(x.nbytes for x in tensors)

    with Live() as forward:
        o, *saved = attention.nsa_triton_forward._init_fn(q, *kv, gates, None, sizes)
    with Live() as backward:
        attention.nsa_triton_backward._init_fn(o, q, *kv, gates, *saved, None, sizes)
    assert forward.most - bytes_of(o) < 3e9
    assert bytes_of(*saved) + backward.most - bytes_of(q, *kv, gates) < 3.6e9


# ---- where they run


def test_asking_for_the_kernels_where_they_cannot_run_raises_and_names_the_remedy(monkeypatch):
    tensors = make(6, G=1)
    with pytest.raises(ValueError, match="float64.*nsa.engine.nsa_attention"):
        attention.require(tensors[0].double())
    monkeypatch.setattr(attention, "INTERPRETED", True)
    with pytest.raises(ValueError, match="bfloat16.*bf16 products are wrong"):
        attention.nsa_attention(*(x.bfloat16() for x in tensors), SMALL)
    monkeypatch.setattr(attention, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=f"float32 on {DEVICE}.*capability >= 8.0.*nsa.engine"):
        attention.nsa_attention(*tensors, SMALL)


@pytest.mark.parametrize(
    "settings, cfg, words",
    [
        (dict(M=65), SMALL, "65 query heads per KV head"),
        (dict(M=1, K=257), SMALL, "head dim 257"),
        (dict(M=1), NSAConfig(sel_block=256), "sel_block=256"),
        (dict(M=1, K=128), NSAConfig(sel_block=128), "take 64 KiB"),
    ],
)
def test_sizes_that_do_not_fit_the_chip_are_refused(settings, cfg, words):
    with pytest.raises(ValueError, match=f"{words}.*nsa.engine"):
        attention.nsa_attention(*make(6, G=1, cfg=cfg, **settings), cfg)


def test_wrong_shapes_and_documents_are_refused_as_by_the_engine():
    q, k, *rest = make(20, G=1)
    with pytest.raises(ValueError, match="shape"):
        attention.nsa_attention(q, k[:, 1:], *rest, SMALL)
    with pytest.raises(ValueError, match="increasing from 0 to T"):
        attention.nsa_attention(q, k, *rest, SMALL, cu_seqlens=torch.tensor([0, 19]))


COMPILE = r"""
    import re, subprocess, tempfile
    from pathlib import Path
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from fused import nsa
    from model import NSAConfig

    TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int16: "*i16", int: "i32", float: "fp32"}

    class Compile:  # stands for a kernel: compiles what a launch would run, once
        def __init__(self, kernel):
            self.kernel, self.done = kernel, set()

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *args, num_warps, num_stages, **constants):
            if constants.get("MERGE") in self.done:
                return
            self.done.add(constants.get("MERGE"))
            name, values = self.kernel.__name__, dict(zip(self.kernel.arg_names, args)) | constants
            kinds = {n: "constexpr" if n in constants else TYPES[getattr(v, "dtype", type(v))] for n, v in values.items()}
            aligned = {(i,): [["tt.divisibility", 16]] for i, (n, v) in enumerate(values.items())
                       if kinds[n][0] == "*" or kinds[n] == "i32" and v % 16 == 0}
            built = triton.compile(ASTSource(self.kernel, kinds, constants, aligned), target=GPUTarget("cuda", 90, 32),
                                   options={"num_warps": num_warps, "num_stages": num_stages})
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(built.asm["cubin"])
                tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
                used = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
            stack, ptx = int(re.search(r"STACK:(\d+)", used)[1]), built.asm["ptx"]
            assert built.metadata.shared <= 227 * 1024 and stack <= 128, (name, built.metadata.shared, stack)
            assert not re.search(r"\b(atom|red)\.", ptx), f"{name}: results would not repeat"
            products = any(word in name for word in ("ranged", "pair", "choose"))
            assert ("wgmma.mma_async" in ptx) == products and ("ld.global.v4" in ptx or "cp.async" in ptx), name

    kernels = [name for name in dir(nsa) if name.endswith("_kernel")]
    for name in kernels:
        setattr(nsa, name, Compile(getattr(nsa, name)))
    nsa.require = lambda q: None
    cfg, T = NSAConfig(), 64
    q, gates = torch.zeros(1, T, 8, 128, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, T, 8, 3, dtype=torch.bfloat16)
    kv = [torch.zeros(1, n, 2, 128, dtype=torch.bfloat16) for n in (T, T, 3, 3, T, T)]
    nsa.nsa_attention(q, *kv, gates, cfg).sum().backward()
    print("compiled", sum(len(getattr(nsa, name).done) for name in kernels))
"""


@pytest.mark.slow
def test_all_kernels_compile_for_an_h100_without_having_one(tmp_path):
    """The interpreter accepts code that the compiler refuses; Triton's compiler needs no GPU. Also:
    tensor cores, no atomics, shared memory that fits, at most 32 registers of a thread spilled.
    """
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not all((tools / tool).exists() for tool in ("ptxas", "cuobjdump")):
        pytest.skip(f"{tools} has no ptxas or no cuobjdump: the kernels are not compiled")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(attention.__file__).parent.parent,
        timeout=600,
    )
    assert done.stdout.strip() == "compiled 11", done.stdout + done.stderr[-3000:]


# ---- a real GPU


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the bf16 kernels were compiled, never run",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T, M", [(1, 4), (31, 1), (1023, 4), (1025, 3), (4099, 4), (32_771, 4)])
def test_bf16_is_within_its_rounding_of_the_engine_in_fp32(T, M):
    cfg = NSAConfig()
    tensors = make(T, G=2, M=M, K=128, cfg=cfg, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    sizes = [getattr(cfg, name) for name in attention.Sizes._fields]
    o, *_, idx = attention.nsa_triton_forward(*tensors, None, sizes)
    want, *_, want_idx = engine.nsa_forward(*exact, None, sizes)
    same = (idx.sort(-1).values == want_idx.sort(-1).values).all(-1)
    assert same.float().mean() > 0.999, "blocks of nearly equal importance may swap, no others"
    assert relative(o.cpu(), want.cpu().double()) <= 1.5e-2
    grads = (
        torch.autograd.grad(y, x, weighting(o).to(y.dtype))
        for y, x in ((o, tensors), (want, exact))
    )
    for name, got, true in zip(NAMES, *grads, strict=True):
        assert relative(got.cpu(), true.cpu().double()) <= 1.5e-2, name


@pytest.mark.gpu
@needs_gpu
def test_bf16_repeats_are_bit_identical_and_packed_documents_equal_separate_ones():
    cfg, documents = NSAConfig(), [5000, 33, 2048, 1]
    tensors = make(
        sum(documents), G=2, M=4, K=128, cfg=cfg, dtype=torch.bfloat16, documents=documents
    )
    cu = torch.tensor([0] + documents).cumsum(0)
    first, again = (
        [
            o := attention.nsa_attention(*tensors, cfg, cu_seqlens=cu),
            *torch.autograd.grad(o, tensors, weighting(o)),
        ]
        for _ in "12"
    )
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    n = cfg.compressed_blocks(5000)
    alone = attention.nsa_attention(
        *(x[:, : n if i in (3, 4) else 5000] for i, x in enumerate(tensors)), cfg
    )
    assert torch.equal(first[0][:, :5000], alone)


@pytest.mark.gpu
@needs_gpu
def test_a_layer_of_131072_tokens_takes_less_than_4_gb_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    cfg, T = NSAConfig(), 131_072
    sizes = [(1, T, 32, 128)] + [
        (1, n, 8, 128) for n in (T, T, cfg.compressed_blocks(T), cfg.compressed_blocks(T), T, T)
    ]
    tensors = [
        torch.randn(size, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for size in sizes
    ]
    tensors.append(torch.rand(1, T, 32, 3, device=DEVICE, dtype=torch.bfloat16).requires_grad_())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attention.nsa_attention(*tensors, cfg)
    torch.autograd.grad(o, tensors, o.detach())
    gradients = sum(x.nbytes for x in tensors)
    assert torch.cuda.max_memory_allocated() - before - o.nbytes - gradients < 4e9

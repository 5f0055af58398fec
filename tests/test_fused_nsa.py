"""The Triton kernels of Native Sparse Attention: their parts, memory, launches, and what they take
on a GPU. test_nsa.py compares them with float64, and says where they run.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from base import machine
from footprint.python.patches import patched
from longhaul.planner.simulate import on_target
from longhaul.sparse.decode import BlockCache
from longhaul.sparse.nsa import engine
from longhaul.sparse.nsa.decode import NSAState
from longhaul.sparse.selectors import Exact
from model import NSAConfig
from tests import oracle
from tests.cuda_build.fakes import HOPPER, on_card
from tests.test_nsa import (
    DEVICE,
    NAMES,
    TINY,
    all_equal,
    boundaries,
    compare,
    inputs,
    prepare_triton,
    relative,
    sizes_of,
)

triton = pytest.importorskip(
    "triton",
    reason="triton is not installed: the kernels of Native Sparse Attention are not tested",
)

from longhaul.sparse.triton import blocks, decode, nsa, stock, tiles  # noqa: E402  needs triton
from tests.kernel_resources import SHARED_MEMORY  # noqa: E402

nsa_attention = functools.partial(engine.nsa_attention, fused=True)
BOUNDS = {torch.float32: (1e-5, 3e-5), torch.float16: (2e-3, 4e-3)}  # forward, gradients
# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    prepare_triton(monkeypatch)


def make(T, cfg=TINY, **settings):
    return [x.detach().to(DEVICE).requires_grad_() for x in inputs(T, cfg=cfg, **settings)]


def weighting(o):
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o)


def run(tensors, cfg=TINY, cu=None):
    """(o, o_cmp, o_slc, block_idx) and the gradients of a random weighting of o, on the CPU."""
    outputs = engine.Outputs(*engine.nsa_forward(*tensors, cu, sizes_of(cfg), True))
    grads = torch.autograd.grad(outputs.o, tensors, weighting(outputs.o))
    parts = outputs.o, outputs.o_cmp, outputs.o_slc, outputs.block_idx
    return [x.detach().cpu() for x in parts], [x.cpu() for x in grads]


# ---- tiles and chunks


@pytest.mark.slow
def test_the_tiles_of_a_gpu_match_float64(monkeypatch):
    monkeypatch.undo()
    compare("triton", make(45, G=1, M=4), TINY)


# ---- the dense branches


@pytest.mark.parametrize(
    "window, dtype",
    [(None, torch.float32), (2, torch.float16), (5, torch.float32), (90, torch.float16)],
)
def test_lines_attend_to_their_own_line_and_those_before_it(window, dtype, monkeypatch):
    monkeypatch.setattr(stock, "PIECE_LOGITS", 2**14)  # several pieces
    counts = [7, 1, 150]
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
    lines = stock.Lines(counts, ends, window, False)
    make_one = torch.Generator().manual_seed(3)
    shapes = [(sum(counts), heads, 16) for heads in (6, 2, 2, 6)]
    q, k, v, do = (torch.randn(x, generator=make_one).to(DEVICE, dtype) for x in shapes)
    exact = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    age = torch.arange(sum(counts))[:, None] - torch.arange(sum(counts))
    own = torch.block_diag(*(torch.ones(count, count) for count in counts)).bool()
    visible = own & (age >= 0) & (age < (window or 10_000))
    want_o, want_lse, _ = (x[0] for x in oracle.attend(*(x[None] for x in exact), visible))
    want_grads = torch.autograd.grad(want_o, exact, do.cpu().double())

    o, lse = stock.attend(lines, q, k, v)
    grads = stock.attend_backward(lines, do, q, k, v, o, lse)
    forward_bound, gradient_bound = BOUNDS[dtype]
    assert relative(o.cpu(), want_o.detach()) <= forward_bound
    assert relative(lse.cpu(), want_lse.detach()) <= forward_bound
    for got, want in zip(grads, want_grads, strict=True):
        assert relative(got.cpu(), want) <= gradient_bound


# ---- extreme inputs


@pytest.mark.parametrize("init, local", [(0, 1), (2, 3)])
def test_a_decoded_token_chooses_the_blocks_of_the_rule_ties_included(init, local):
    sizes = Exact(count=5, block=4, init=init, local=local)
    cache = BlockCache((2, 90, 2, 16), sizes, DEVICE, torch.float32, "torch")
    generator = torch.Generator().manual_seed(init)
    for cache.length in (21, 47, 90):
        free = cache.free_blocks()
        scores_XN = torch.randint(-2, 3, (4, free.stop), generator=generator) * -1.0  # -0.0, too
        scores_XN[0, free.start] = torch.nan
        scores_XN = scores_XN.to(DEVICE)
        q_BGMK = torch.zeros(2, 2, 1, 16, device=DEVICE)
        token = decode.Token(q_BGMK, cache.position_tensor(), sizes.count)
        chosen_Xn = token.choose(scores_XN, free.stop, sizes)
        want_Xn = cache._chosen(scores_XN, free)
        assert torch.equal(chosen_Xn.sort().values, want_Xn.sort().values.int()), cache.length


@pytest.mark.parametrize("length, local", [(2, 2), (90, 2), (90, 1)])
def test_a_decoded_token_attends_as_the_operators_of_torch(length, local):
    """To nothing compressed at first; then large logits choose that bf16 would not tell apart, also
    with a compressed block that ends at the token.
    """
    state = NSAState(
        dataclasses.replace(TINY, sel_local=local), 2, 90, 2, 16, DEVICE, torch.float32, "torch"
    )
    normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    for kept in (*state.whole_kv, state.cmp_2BNGK):
        kept.copy_(normal(kept.shape) / 400 + 1)
    last = (length - TINY.cmp_block) // TINY.cmp_stride
    state.cmp_2BNGK[0][:, last] += 0.01
    state.length = length
    q_BGMK = normal(2, 2, 2, 16).to(DEVICE) + 8
    gates_B1H3 = torch.ones(2, 1, 4, 3, device=DEVICE)
    kv = state.whole_kv, state.cmp_2BNGK, state.win_2BwGK
    o = decode.attend_nsa(q_BGMK, gates_B1H3, state.position_tensor(), kv, state.sizes)
    torch.testing.assert_close(o, state._attend(q_BGMK, gates_B1H3), rtol=1e-5, atol=1e-5)


def test_a_token_is_put_into_its_place_of_two_rings_however_wide_they_are():
    rings = torch.zeros(2, 2, 7, 3, 100, device=DEVICE)
    pair = torch.randn(2, 2, 1, 3, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    decode.put(rings.unbind(), pair.unbind(), torch.tensor([9], device=DEVICE))
    assert torch.equal(rings[:, :, 2:3], pair)
    assert rings.count_nonzero() == pair.count_nonzero()


def test_nan_inputs_reach_the_output_and_read_nothing_out_of_bounds():
    tensors = make(40, G=1)
    with torch.no_grad():
        tensors[0][:, 30] = torch.nan
    (o, _, _, block_idx), _ = run(tensors)
    assert o[:, 30].isnan().all()
    assert not o[:, :30].isnan().any()
    assert block_idx.min() >= -1
    assert block_idx.max() <= 39 // TINY.sel_block


# ---- memory


class ZerosMade(TorchDispatchMode):
    """The shapes of tensors of zeros that operators create."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zeros_like):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize(
    "nsa_attention", [nsa_attention, engine.nsa_attention], ids=["triton", "engine"]
)
def test_results_without_a_gradient_cost_the_backward_no_zeros(nsa_attention):
    tensors = make(5, G=1)
    o = nsa_attention(*tensors, TINY)
    with ZerosMade() as made:
        o.sum().backward()
    assert tuple(o.shape) not in made.shapes


def storages(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x.untyped_storage() for x in leaves if isinstance(x, torch.Tensor)]


class LiveBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of the living storages that were made inside, and the most at once."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.most = 0
        self.known = set()

    def forget(self, key, size):
        self.now -= size
        self.known.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self.known:
                continue
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key, size)
        return out


def bytes_of(*tensors):
    return sum(x.nbytes for x in tensors)


class Launches(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the kernels that a GPU would run: those of Triton, and PyTorch's operators on the
    device, but for those that only allocate or make a view.
    """

    ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        for module in (nsa, blocks):
            monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, kernel, grid, **arguments):
        assert set(arguments) >= set(kernel.arg_names)
        assert max(grid[1:], default=1) < 65_536
        self.names.append(kernel.__name__)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = torch.utils._pytree.tree_leaves(out)
        runs = any(isinstance(x, torch.Tensor) and x.is_cuda for x in made)
        name = func._schema.name
        if runs and not func.is_view and name not in self.ALLOCATES:
            self.names.append(name)
        return out

    @property
    def count(self):
        return len(self.names)


def layer_of(T):
    """The inputs of the operator, with 32 query heads on 8 KV heads of 128."""
    N = NSAConfig().compressed_blocks(T)
    shapes = [(1, T, 32, 128)] + [(1, n, 8, 128) for n in (T, T, N, N, T, T)] + [(1, T, 32, 3)]
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def test_a_layer_of_131072_tokens_needs_less_than_4_gb_beyond_its_inputs_output_and_gradients(
    monkeypatch,
):
    monkeypatch.undo()
    sizes = sizes_of(NSAConfig())
    with on_target() as tracker, tracker.workspace.inside_one():
        inputs = layer_of(131_072)
        with LiveBytes() as forward:
            o, *saved = engine.nsa_forward._init_fn(*inputs, None, sizes, True)
        with LiveBytes() as backward:
            engine.nsa_backward._init_fn(o, *inputs, *saved, None, sizes, True)
    assert bytes_of(*saved) < 2.22e9
    assert forward.most - bytes_of(o) < 2.8e9
    assert bytes_of(*saved) + backward.most - bytes_of(*inputs) < 3.5e9


def uploaded(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; fake tensors know no pinned memory."""
    return torch.empty(on_host.shape, dtype=on_host.dtype, device=device)


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is not built with CUDA")
@pytest.mark.parametrize("T, launches", [(8192, (66, 94)), (131_072, (188, 621))])
def test_launches_grow_with_the_work(T, launches, monkeypatch):
    """A launch takes the host about 5 microseconds; 2,160 and 2,480 launches were as slow as the
    work of 8,192 tokens.
    """
    monkeypatch.undo()
    sizes = sizes_of(NSAConfig())
    nowhere = contextlib.nullcontext()
    no_driver = {(tiles, "upload"): uploaded, (torch.cuda, "device_of"): lambda _: nowhere}
    with FakeTensorMode(), on_card(HOPPER), patched(no_driver):
        inputs = layer_of(T)
        with Launches(monkeypatch) as forward:
            o, *saved = engine.nsa_forward._init_fn(*inputs, None, sizes, True)
        with Launches(monkeypatch) as backward:
            engine.nsa_backward._init_fn(o, *inputs, *saved, None, sizes, True)
    assert forward.count <= launches[0]
    assert backward.count <= launches[1]


# ---- where they run


def test_kernels_that_cannot_run_raise_and_name_the_remedy(monkeypatch):
    tensors = make(6, G=1)
    device = tensors[0].device
    assert "float64" in tiles.refusal(1, 16, torch.float64, 64, device)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="bfloat16 on cpu.*in float32 or float16.*torch"):
            nsa_attention(*(x.bfloat16() for x in tensors), TINY)
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(machine, "capability", lambda device: (7, 5))
    with pytest.raises(
        ValueError, match=f"float32 on {DEVICE}.*capability >= 8.0.*--kernels torch"
    ):
        nsa_attention(*tensors, TINY)


@pytest.mark.parametrize(
    "settings, cfg, words",
    [
        (dict(M=65), TINY, "65 query heads per KV head"),
        (dict(M=1, K=257), TINY, "head dim 257"),
        (dict(M=1), NSAConfig(sel_block=256), "blocks of 256 tokens"),
        (dict(M=1, K=128), NSAConfig(sel_block=128), "64 KiB of keys per block"),
    ],
)
def test_sizes_that_do_not_fit_the_chip_are_refused(settings, cfg, words):
    with pytest.raises(ValueError, match=f"{words}.*--kernels torch"):
        nsa_attention(*make(6, G=1, cfg=cfg, **settings), cfg)


@functools.cache
def compiled() -> list[dict]:
    """What tests/kernel_resources.py says of each kernel; the interpreter is off in its process."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not all((tools / tool).exists() for tool in ("ptxas", "cuobjdump")):
        pytest.skip(f"{tools} has no ptxas or no cuobjdump: the kernels are not compiled")
    cards = ("80-bfloat16", "90-bfloat16", "100-bfloat16", "90-float32-pair_backward_kernel")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(
            [sys.executable, "-m", "tests.kernel_resources", *cards],
            env=environment,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compiled_for(capability: int, dtype: str) -> list[dict]:
    card = capability, dtype
    return [kernel for kernel in compiled() if (kernel["capability"], kernel["dtype"]) == card]


WITH_PRODUCTS = ("importance", "pair", "tile")
NARROW = ("put_kernel", "choose_blocks_kernel")  # they read few numbers


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kernels_compile_for_a_card_without_having_it(capability):
    """The interpreter accepts code that the compiler refuses; Triton's compiler needs no GPU.

    In bf16 with heads of 128: tensor cores, no spilled register, no atomics, shared memory that
    fits and that `refusal` foresees.
    """
    kernels = compiled_for(capability, "bfloat16")
    assert {k["kernel"] for k in kernels} == {
        name for module in (nsa, blocks, decode) for name in dir(module) if name.endswith("_kernel")
    }
    available = SHARED_MEMORY[capability] * 1024
    needed = tiles.shared_memory_needed(4, 128, 2, 64, available)
    for kernel in kernels:
        name = kernel["kernel"]
        assert kernel["shared"] <= needed <= available, kernel
        # the compiler of Triton 3.7.1 keeps two numbers of delta_kernel, which multiplies no
        # matrices and waits for memory, on the stack for sm_90
        assert kernel["spills"] <= (4 if name == "delta_kernel" else 0), kernel
        assert not kernel["atomics"], f"{name}: results would not repeat"
        assert kernel["wide loads"] or name in NARROW, name
        assert bool(kernel["products"]) == any(word in name for word in WITH_PRODUCTS), kernel

    if capability == 90:
        least = {"importance": 2, "merge": 2, "pair_forward": 3, "choose": 8}
        for kernel in kernels:
            if kernel["kernel"] == "tile_kernel":  # one token's few rows
                continue
            assert kernel["ctas"] >= least.get(kernel["kernel"].removesuffix("_kernel"), 1), kernel
            narrow = [x for x in kernel["products"] if int(x.partition("n")[2] or 0) < 64]
            assert not narrow, f"products of less than the full width: {kernel}"


@pytest.mark.slow
def test_the_kernel_that_takes_most_fits_the_foreseen_shared_memory_in_fp32_too():
    available = SHARED_MEMORY[90] * 1024
    (kernel,) = compiled_for(90, "float32")
    needed = tiles.shared_memory_needed(4, 128, 4, 64, available)
    assert kernel["shared"] <= needed
    assert (needed <= available) == (not tiles.TRITON_3_8)


# ---- a real GPU


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the kernels were interpreted and compiled, but never ran",
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T, M", [(1, 4), (31, 1), (1025, 3), (32_771, 4)])
def test_bf16_is_within_its_rounding_of_the_engine_in_fp32(T, M):
    cfg = NSAConfig()
    tensors = make(T, G=2, M=M, K=128, cfg=cfg, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    o, *_, idx = engine.nsa_forward(*tensors, None, sizes_of(cfg), True)
    want, *_, want_idx = engine.nsa_forward(*exact, None, sizes_of(cfg))

    same = (idx.sort(-1).values == want_idx.sort(-1).values).all(-1)
    assert same.float().mean() > 0.999, "blocks of nearly equal importance may swap, no others"
    assert relative(o.cpu(), want.cpu().double()) <= 1.5e-2

    grads = torch.autograd.grad(o, tensors, weighting(o))
    want_grads = torch.autograd.grad(want, exact, weighting(o).float())
    for name, got, true in zip(NAMES, grads, want_grads, strict=True):
        assert relative(got.cpu(), true.cpu().double()) <= 1.5e-2, name


@pytest.fixture
def deterministic():
    """PyTorch's attention kernels for GPUs add up by atomics otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@needs_gpu
def test_bf16_repeats_are_bit_identical_and_packed_documents_equal_separate_ones(deterministic):
    cfg, documents = NSAConfig(), [5000, 33, 2048, 1]
    tensors = make(
        sum(documents), G=2, M=4, K=128, cfg=cfg, dtype=torch.bfloat16, documents=documents
    )
    cu = boundaries(documents)

    def results():
        o = nsa_attention(*tensors, cfg, cu_seqlens=cu)
        return o, *torch.autograd.grad(o, tensors, weighting(o))

    first = results()
    assert all_equal(first, results())

    n = cfg.compressed_blocks(5000)
    document = [x[:, : n if i in (3, 4) else 5000] for i, x in enumerate(tensors)]
    separate = nsa_attention(*document, cfg)
    assert torch.equal(first[0][:, :5000], separate)


@pytest.mark.gpu
@needs_gpu
def test_a_layer_of_131072_tokens_takes_less_than_4_gb_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    cfg, T = NSAConfig(), 131_072
    N = cfg.compressed_blocks(T)
    shapes = [(1, T, 32, 128)] + [(1, n, 8, 128) for n in (T, T, N, N, T, T)]
    tensors = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    tensors.append(torch.rand(1, T, 32, 3, device=DEVICE, dtype=torch.bfloat16))
    for x in tensors:
        x.requires_grad_()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = nsa_attention(*tensors, cfg)
    torch.autograd.grad(o, tensors, o.detach())
    needed = torch.cuda.max_memory_allocated() - before
    assert needed - bytes_of(o, *tensors) < 4e9

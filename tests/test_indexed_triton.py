"""sparse/indexed/triton/ against the float64 oracle of indexed attention and its plain version.

The kernels run on a GPU if there is one. Otherwise Triton's interpreter runs them, on a few dozen
tokens and with tiles, chunks and groups cut small, so that every loop takes several steps; and
Triton's compiler, which needs no GPU, compiles them. Letters as in indexed_oracle.py.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from base import machine
from longhaul.kinds import attention_kind
from longhaul.memory.workspace import Workspaces
from longhaul.sparse.indexed import engine, operators, plain
from longhaul.sparse.indexed.layer import IndexerConfig, own_losses
from tests import indexed_oracle as oracle
from tests.test_indexed import bounded_at, gradients, inputs, outputs, relative, wanted
from tests.test_indexed_engine import operands, results
from tests.test_indexed_model import build, tokens
from tests.tiers import few_fast, slow

triton = pytest.importorskip(
    "triton",
    reason="triton is not installed: the kernels of indexed attention are not tested",
)

from longhaul.sparse.indexed.triton import attention  # noqa: E402  without triton it cannot be imported
from longhaul.sparse.indexed.triton import kernels as kernel_file  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the kernels were interpreted and compiled, but never ran",
)
NAMES = ("dq", "dk", "dv", "dq of the indexer", "dk of the indexer")
SMALL_TILES = attention.TileSizes(keys=16, queries=16, rows=16)
# NumPy, which interprets the kernels, warns of infinities that they expect.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Chunks of 16 queries, groups of two chunks of five blocks, and tiles of 16 keys."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "tile_sizes", lambda *sizes: SMALL_TILES)
        monkeypatch.setattr(attention, "CHUNK_RANKS", 1)
        monkeypatch.setattr(attention, "GROUP_PAIRS", 2 * 16 * 5)


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Outputs and buffers that a kernel forgets to write are NaN, or an index out of bounds."""
    make = torch.Tensor.new_empty

    def made(*args, **settings):
        x = make(*args, **settings)
        return x.fill_(torch.nan if x.is_floating_point() else 30_000)

    monkeypatch.setattr(torch.Tensor, "new_empty", made)


def make(*sizes, **settings):
    return [x.detach().to(DEVICE).requires_grad_() for x in inputs(*sizes, **settings)]


def run(tensors, r, budget):
    """o, the indexer's loss and all gradients of both, on the CPU."""
    o, kl = outputs(tensors, r, budget, "triton")
    device = tensors[0].device
    weights = torch.Generator().manual_seed(1)
    of_o, of_kl = (torch.randn(x.shape, generator=weights).to(device, x.dtype) for x in (o, kl))
    grads = torch.autograd.grad((o * of_o).sum() + (kl * of_kl).sum(), tensors)
    return [x.detach().cpu() for x in (o, kl, *grads)]


# ---- against the oracle


# (B, T, H, G, K, h, E, r, budget): padded heads and dims, two KV heads, slots of more than a tile,
# blocks of more than 16 tokens, rows of a batch
@pytest.mark.parametrize(
    "sizes",
    few_fast(
        [
            ((1, 24, 6, 2, 8, 3, 12, 5, 10),),
            ((2, 21, 4, 2, 16, 3, 16, 4, 16),),
            ((1, 44, 2, 1, 8, 2, 8, 19, 19),),
            ((1, 27, 2, 1, 8, 1, 8, 1, 18),),
        ],
        4,
    ),
    ids=str,
)
def test_outputs_and_gradients_equal_float64(sizes):
    *shape, r, budget = sizes
    tensors = make(*shape)
    o, kl, *grads = run(tensors, r, budget)
    true_o, true_kl, exact, _ = wanted([x.cpu() for x in tensors], r, budget)
    assert relative(o, true_o) <= 1e-5
    assert (kl.double() - true_kl).abs().max() <= 1e-5

    truth = gradients(true_o, true_kl, exact)
    for name, grad, want in zip(NAMES, grads, truth, strict=True):
        assert relative(grad, want) <= 1e-5, name


def test_in_fp16_it_errs_at_most_twice_as_much_as_the_plain_version(monkeypatch):
    tensors, upstream = operands(1, 23, 3, 1, 16, 2, 16, 4, torch.float16)
    tensors = [x.to(DEVICE) for x in tensors]
    upstream = [x.to(DEVICE) for x in upstream]
    found, ranks = results(tensors, upstream, 4, 2, "triton")
    monkeypatch.setattr(operators, "engine_for", lambda dtype: None)
    without, plain_ranks = results(tensors, upstream, 4, 2, "torch")
    truth, _ = results([x.double() for x in tensors], upstream, 4, 2, "torch")

    assert torch.equal(ranks & (2**31 - 1), plain_ranks & (2**31 - 1))
    for name in ("o", *NAMES):
        error, of_plain = (relative(x[name], truth[name]) for x in (found, without))
        assert error <= 2 * of_plain, name
    assert (found["kl"] - truth["kl"]).abs().max() <= 1e-5


@pytest.mark.parametrize("first", [0, 40])
def test_the_choice_is_the_oracles_with_many_ties(first):
    """Small whole numbers make equal scores; ReLU makes many of them 0."""
    T = 60
    r, most = 3, 5
    make_one = torch.Generator().manual_seed(4)
    q, k = (torch.randint(-1, 2, (1, T, n, 4), generator=make_one).float() for n in (2, 1))
    k_NE = oracle.pooled(k[:, ::r].repeat_interleave(r, 1)[:, :T, 0], r).float()
    keys = torch.zeros(T, 1, 4)
    row = attention.Row(
        *(x.to(DEVICE) for x in (keys[first:], keys, keys, q[0, first:], k_NE[0])), first, r, most
    )
    scores = oracle.scores(q, k_NE)
    want = oracle.choose(scores, r, most * r)[0]
    assert scores.unique().numel() < 20

    for chunk in (slice(0, 16), slice(16, T - first)):
        found = attention.choose(row, chunk)
        position = range(first + chunk.start, first + chunk.stop)
        for t, index, used in zip(position, found.index_Cm, found.used_Cm, strict=True):
            assert index[used].sort().values.tolist() == want[t].nonzero()[:, 0].tolist()
        ranks = plain.block_ranks(scores.float(), torch.arange(T)[:, None], r)
        least = plain.least_rank(ranks, most)[0, list(position)]
        assert torch.equal(found.least_C.cpu(), least)


def test_ranks_that_no_kernel_wrote_name_blocks_that_exist(monkeypatch):
    """benchmarks.gpu launches each kernel alone over memory that the others have not filled."""
    monkeypatch.setattr(attention, "launch", lambda *_, **__: None)
    inputs = plain.IndexedInputs(*(x.detach() for x in make(1, 60, 2, 1, 8, 2, 8)))
    row = attention.Row.of(inputs._replace(k_BNE=inputs.k_BNE[:, :15, 0]), 0, 4, 5)
    index_Cm = attention.choose(row, slice(16, 32)).index_Cm
    assert 0 <= index_Cm.min() and index_Cm.max() < 15


@pytest.mark.slow
def test_repeats_are_bit_identical():
    first, again = (run(make(1, 19, 2, 1, 8, 2, 8), 2, 6) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_nan_reaches_the_output_and_reads_nothing_out_of_bounds():
    tensors = make(1, 21, 2, 1, 8, 2, 8)
    with torch.no_grad():
        tensors[3][:, 18] = torch.nan  # a query of the indexer
        tensors[0][:, 19] = torch.nan
    o, kl = (x.detach().cpu() for x in outputs(tensors, 4, 8, "triton"))
    assert kl[0, 18].isnan() and not o[0, 18].isnan().any()
    assert o[0, 19].isnan().all()
    assert not o[:, :19].isnan().any() and not kl[:, :18].isnan().any()


# ---- against the plain version


@pytest.mark.parametrize("last", [1, 5])
def test_the_last_queries_of_a_row_give_what_the_plain_row_gives(last, monkeypatch):
    q, k, v, q_idx, k_idx = (x.detach() for x in make(2, 67, 4, 2, 16, 3, 16))
    k_NE = plain.pooled_keys(k_idx, 4)
    end = slice(67 - last, None)
    part, *_ = operators.indexed_forward(
        q[:, end], k, v, q_idx[:, end], k_NE, 4, 4, False, "triton"
    )
    monkeypatch.setattr(operators, "engine_for", lambda dtype: None)
    whole, *_ = operators.indexed_forward(q, k, v, q_idx, k_NE, 4, 4, False, "torch")
    assert relative(part, whole[:, end].double()) <= 1e-6


def test_where_every_block_is_read_it_is_the_plain_version(monkeypatch):
    tensors = make(1, 30, 2, 1, 8, 2, 8)
    found = run(tensors, 4, 28)  # as many blocks as there are
    monkeypatch.setattr(operators, "indexed_core", lambda *_: None)
    assert all(torch.equal(x, y) for x, y in zip(found, run(tensors, 4, 28), strict=True))


def test_a_model_with_packed_documents_learns_as_by_the_plain_version(monkeypatch):
    """Loss and gradients of a row of two documents, of 22 and of 3 tokens."""
    ids = (torch.arange(25) >= 22)[None].int()
    indexer = IndexerConfig(budget=16, heads=2, head_dim=16)
    changes = dict(num_layers=1, num_heads=2, num_kv_heads=1, attention=indexer)

    def learned(kernels):
        decoder = build(kernels=kernels, **changes).to(DEVICE)
        row = tokens(1, 26).to(DEVICE)
        with own_losses(decoder, warming=False) as own:
            loss = decoder(row[:, :-1], row[:, 1:], doc_ids=ids)
            own.added_to(loss, 1.0).backward()
        total = loss.detach() + decoder.layers[0].attention.measured[0, 0]
        return {name: p.grad for name, p in decoder.named_parameters()} | {"loss": total}

    found = learned("triton")
    monkeypatch.setattr(operators, "engine_for", lambda dtype: None)
    for name, want in learned("torch").items():
        assert relative(found[name], want.double()) <= 1e-5, name


# documents, and budget, heads of attention and of the indexer, and their dim
FEW = slow((3, 22), 16, 2, 16)
MANY = pytest.param(
    (5000, 33, 2048, 1), 512, 4, 128, marks=(pytest.mark.gpu, needs_gpu), id="many tokens"
)


@pytest.mark.parametrize("documents, budget, heads, dim", [FEW, MANY])
def test_packed_documents_equal_separate_ones_bit_for_bit(documents, budget, heads, dim):
    """o, the indexer's loss and the gradients of all inputs of a layer, in bf16 on a GPU."""
    indexer = IndexerConfig(budget=budget, heads=heads, head_dim=dim)
    shape = dict(num_heads=2 * heads, num_kv_heads=2, head_dim=dim)
    decoder = build(kernels="triton", num_layers=1, attention=indexer, **shape)
    layer = decoder.layers[0].attention
    make_one = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    whole = [
        torch.randn(1, sum(documents), n, dim, generator=make_one).to(DEVICE, dtype)
        for n in (2 * heads, 2, 2, heads, 1)
    ]

    def results(tensors, lengths):
        tensors = [x.detach().requires_grad_() for x in tensors]
        shape = 1, sum(lengths)
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        layout = layer.rows(boundaries, shape, DEVICE)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
        with own_losses(decoder, warming=False) as own:
            o = layout.attend(layer, tensors, decoder.rotary.at(positions[None]))
            total = own.added_to(o.float().square().sum(), 1.0)
            return o, *torch.autograd.grad(total, tensors)

    packed = results(whole, documents)
    parts = zip(*(x.split(documents, dim=1) for x in whole), strict=True)
    separate = [results(part, [n]) for part, n in zip(parts, documents, strict=True)]
    for found, want in zip(packed, zip(*separate, strict=True), strict=True):
        assert torch.equal(found, torch.cat(want, dim=1))


# ---- memory


def test_nothing_of_size_tokens_by_blocks_exists_at_131072_tokens(monkeypatch):
    monkeypatch.undo()
    bounded_at(131_072, "triton")


def test_indexer_and_kl_take_at_most_twice_the_bytes_of_keys_and_values_at_131072_tokens(
    monkeypatch,
):
    """As tests/test_indexed_engine.py counts them, on CUDA."""
    monkeypatch.undo()
    T = 131_072
    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    q, k, v, q_idx = (empty(1, T, heads, 128) for heads in (32, 8, 8, 4))
    k_idx = empty(1, T // 4, 128)
    o, kl, *saved = (x.to("meta") for x in plain.IndexedOutputs.empty(q))
    arguments = (q, kl, q, k, v, q_idx, k_idx, o, *saved, 4, 512, "auto")
    inside = Workspaces("cuda")._inside(operators.indexed_backward._qualname, arguments)
    sums = 2 * k.numel() * 4
    assert inside > sums

    of_indexer = [q_idx, q_idx, k_idx, k_idx, kl, kl, *saved]
    own = inside - sums + sum(x.numel() * x.itemsize for x in of_indexer)
    assert own <= 2 * (k.nbytes + v.nbytes)


# ---- where they run


class OnCuda(machine.Platform):
    """A platform that computes every tensor on CUDA."""

    def device(self, x):
        return torch.device("cuda")


def core(kernels, heads=4, dtype=torch.float32):
    q, k, q_idx = (torch.empty(1, 8, n, 16, dtype=dtype, device="meta") for n in (heads, 1, 2))
    return operators.indexed_core(plain.IndexedInputs(q, k, k, q_idx, q_idx[:, :2, 0]), kernels)


def test_auto_takes_the_kernels_on_cuda_and_the_engine_elsewhere(monkeypatch):
    assert core("auto") is core("torch") is engine
    assert core("triton") is attention
    with machine.running_on(OnCuda()):
        assert core("auto") is attention
        assert core("torch") is engine
        assert core("auto", heads=512) is engine  # too many for a tile
        monkeypatch.setitem(sys.modules, "longhaul.sparse.indexed.triton", None)
        assert core("auto") is engine


def test_kernels_that_cannot_run_are_refused_with_the_remedy(monkeypatch):
    config = build().config
    kind = attention_kind(config)
    asked = dataclasses.replace(config, kernels="triton")
    kind.check(asked, "cpu")  # interpreted
    assert kind.warning(config, "cuda") is None

    remedy = "remedy: choose kernels='auto' or 'torch'"
    with pytest.raises(ValueError, match=f"512 query heads per KV head.*16 KiB.*{remedy}"):
        core("triton", heads=512)
    with pytest.raises(ValueError, match=f"float64.*allowed: float32.*{remedy}"):
        core("triton", dtype=torch.float64)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=f"bfloat16 on cpu.*products are wrong.*{remedy}"):
            outputs([x.bfloat16() for x in make(1, 21, 2, 1, 8, 2, 8)], 4, 8, "triton")

    monkeypatch.setattr("longhaul.sparse.nsa.triton.attention.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=f"on cuda; .*capability >= 8.0.*{remedy}"):
        kind.check(asked, "cuda")
    assert "slowly, because the kernels cannot" in kind.warning(config, "cuda")
    with pytest.raises(ValueError, match=f"on cpu; .*{remedy}"):
        kind.check(asked, "cpu")

    monkeypatch.setitem(sys.modules, "longhaul.sparse.indexed.triton", None)
    with pytest.raises(ValueError, match="pip install triton, or choose kernels='auto' or 'torch'"):
        kind.check(asked)


# ---- the compiler

KERNELS = {name for name in dir(kernel_file) if name.endswith("_kernel")}
SMALLEST_SHARED_MEMORY = 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, dtype, K, M",
    [(80, "bfloat16", 128, 4), (90, "bfloat16", 128, 4), (90, "bfloat16", 128, 64)],
)
def test_all_kernels_compile_for_a_card_without_having_it(capability, dtype, K, M, tmp_path):
    """The interpreter accepts code that the compiler refuses.

    No spilled register, no atomics, and shared memory that every card from Ampere on has.
    """
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not all((tools / tool).exists() for tool in ("ptxas", "cuobjdump")):
        pytest.skip(f"{tools} has no ptxas or no cuobjdump: the kernels are not compiled")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_resources", str(capability), dtype, str(K)]
        + ["indexed", str(M)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == KERNELS
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= SMALLEST_SHARED_MEMORY, kernel
        assert not kernel["atomics"], f"results would not repeat: {kernel}"
        assert kernel["wide loads"], kernel
        assert bool(kernel["products"]) == (kernel["kernel"] != "indexer_dk_kernel"), kernel


# ---- a real GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("T", [1023, 8197])
def test_bf16_is_within_its_rounding_of_the_plain_version_in_fp32(T, monkeypatch):
    """Both read the indexer's keys as bf16 has them. With keys that are not rounded after pooling
    the reference chooses other blocks, and o is off by 2.9e-2 (measured on a CPU, 2,048 tokens).
    """
    tensors, upstream = operands(1, T, 8, 2, 128, 4, 128, 4, torch.bfloat16)
    tensors, upstream = ([x.to(DEVICE) for x in group] for group in (tensors, upstream))
    found, ranks = results(tensors, upstream, 4, 128, "triton")
    monkeypatch.setattr(operators, "indexed_core", lambda *_: None)
    want, true_ranks = results([x.float() for x in tensors], upstream, 4, 128)

    last, true_last = (x & (2**31 - 1) for x in (ranks, true_ranks))
    assert (last == true_last).float().mean() > 0.999, "only nearly equal scores may swap"
    for name in ("o", "kl", *NAMES):
        assert relative(found[name], want[name].double()) <= 1.5e-2, name

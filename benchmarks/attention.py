"""SDPA against Native Sparse Attention and indexed attention on one CPU thread or one GPU: time
ratios and extra memory. Refuses to time what is not exact.

On a CPU one KV head with 4 query heads of 128, on a GPU the 8 and 32 of the 4B. Indexed attention
computes its indexer's loss too, and its scores are of random queries and keys, so that neighbouring
queries choose different blocks. Times are seconds of process CPU time, to which other jobs do not
count, or between CUDA events, with the sides taking turns. Extra memory is the peak resident set of
a fresh process above what it had once its inputs existed, on a GPU the allocator's peak.

    python -m benchmarks.attention [--tokens 4096 ...] [--long] [--dtypes bf16 fp32]
        [--what forward training decode memory] [--svg FILE] [--device cuda]
"""

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from base.flags import Parser, precision
from benchmarks.clock import CPU, relative, seconds
from footprint.answers import svg
from footprint.answers.svg import Scale
from footprint.kernels.measure import peak_bytes
from longhaul import kernels
from longhaul.dist import named_device
from longhaul.sparse.choose import choose_blocks
from longhaul.sparse.engine import block_sparse_attention
from longhaul.sparse.index_loss import index_loss
from longhaul.sparse.indexer import Indexed
from longhaul.sparse.nsa import decode as nsa_decode
from longhaul.sparse.nsa import engine as nsa_engine
from model import Compressor, Layout, NSAConfig
from tests import indexed_oracle
from tests import nsa_oracle as oracle

WHAT = ["forward", "training", "decode", "memory"]
CFG = NSAConfig()
INDEXER = Indexed()
K = 128
HEADS = {"cpu": (4, 1), "cuda": (32, 8)}  # of queries, and of keys and values
CHECKED_HEADS = 8, 2  # more than one of keys and values: their order can be wrong
# On a GPU indexed attention trains by PyTorch's operators: at 131,072 tokens the host takes 35 s
# or more to launch them (computed).
MOST_INDEXED = {"cpu": 2**31, "cuda": 8192}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNITS = {"memory": ("MiB", 1), "decode": ("ms", 1e3)}  # others: seconds


def inputs(T, dtype, grad=True, heads=4, groups=1, device="cpu", cfg=CFG, seed=0):
    """q, six K/V and gates of `heads` query heads on `groups` KV heads."""
    make, N = torch.Generator(device).manual_seed(seed), cfg.compressed_blocks(T)
    shapes = [(1, T, heads, K)] + [(1, n, groups, K) for n in (T, T, N, N, T, T)]
    tensors = [torch.randn(s, generator=make, device=device).to(dtype) for s in shapes]
    tensors.append(torch.randn(1, T, heads, 3, generator=make, device=device).sigmoid().to(dtype))
    return [x.requires_grad_(grad) for x in tensors]


def nsa_attention(q, *others, **options):
    """By its Triton kernels on a GPU."""
    return nsa_engine.nsa_attention(q, *others, fused=q.is_cuda, **options)


def nsa(tensors):
    return nsa_attention(*tensors, CFG)


def sdpa(tensors):
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def indexer_inputs(T, dtype, grad=True, groups=1, device="cpu", seed=1):
    """The indexer's queries, and its key, which the groups share."""
    make = torch.Generator(device).manual_seed(seed)
    shapes = [(1, T, heads, INDEXER.head_dim) for heads in (groups, 1)]
    tensors = [torch.randn(s, generator=make, device=device).to(dtype) for s in shapes]
    return [x.requires_grad_(grad) for x in tensors]


def indexed(tensors, sizes=INDEXER):
    """o, and with gradients the indexer's loss."""
    q, k, v, *_, q_idx, k_idx = tensors
    chosen = choose_blocks(sizes, q_idx, k_idx.expand(-1, -1, k.shape[2], -1))
    o, lse = block_sparse_attention(q, k, v, chosen, sizes.block)
    if not torch.is_grad_enabled():
        return o
    return o, index_loss(q_idx, k_idx[:, :, 0], q, k, sizes.block, chosen, lse)


def train(function, tensors):
    for x in tensors:
        x.grad = None
    outputs = as_tuple(function(tensors))
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])


def best_of_turns(calls, turns, device=CPU):
    """Least seconds of each call, the calls taking turns."""
    times = [[seconds(call, device) for call in calls] for _ in range(turns)]
    return [min(column) for column in zip(*times, strict=True)]


# ---- what is wrong is not timed


BOUNDS = {"fp32": (2e-5, 6e-5), "bf16": (1.5e-2, 1.5e-2)}  # of the forward, of a gradient


def refuse_if_wrong(dtype, device=CPU):
    """Exits where forward, gradients or decoding leave what the dense float64 reference allows."""
    heads, groups = CHECKED_HEADS
    where = dict(groups=groups, device=device)
    tensors = inputs(1300, DTYPES[dtype], heads=heads, **where)
    more = tensors + indexer_inputs(1300, DTYPES[dtype], **where)
    forward, gradient = BOUNDS[dtype]
    found = nsa_errors(nsa_attention, tensors) | dict(decoding=decode_error(tensors))
    for what, error in [*found.items(), *indexed_errors(more).items()]:
        bound = dict(forward=forward, decoding=1e-5 if dtype == "fp32" else 1.5e-2).get(
            what, gradient
        )
        if not error <= bound:
            raise SystemExit(
                f"bench: {what} {dtype} is off by {error:.1e} of the reference; it must be "
                f"within {bound:g} before it is timed"
            )


def indexed_errors(tensors):
    """As `nsa_errors`, with a choice that leaves most of the blocks out, and the indexer's loss.

    The indexer's inputs are rounded to whole numbers: products of them are exact in every dtype and
    order, so that the choice is the oracle's, with many equal scores.
    """
    sizes = replace(INDEXER, count=4)
    whole = [x.detach().round().requires_grad_() for x in tensors[-2:]]
    return errors(
        lambda *x: indexed(x, sizes),
        lambda *x: indexed_oracle.outputs(x, sizes)[:2],
        [*tensors[:3], *whole],
    )


def nsa_errors(attention, tensors, cfg=CFG):
    """ "forward" and "gradient of input i" -> relative error against the dense float64 oracle with
    the blocks that `attention` chose.
    """
    T, blocks = tensors[0].shape[1], -(-tensors[0].shape[1] // cfg.sel_block)
    parts = attention(*tensors, cfg, return_parts=True)
    index = parts["block_idx"].cpu().long()
    chosen = torch.zeros(1, T, index.shape[2], blocks + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(index < 0, blocks, index), True)
    return errors(
        lambda *x: attention(*x, cfg),
        lambda *x: oracle.nsa(*x, cfg, chosen[..., :blocks])[0],
        tensors,
    )


def errors(function, exact, tensors):
    """Relative errors of a function and its gradients against one that computes in float64 on the
    CPU.
    """
    return errors_against(truth(exact, tensors), function, tensors)


def truth(exact, tensors):
    """What `exact` gives in float64 on the CPU, and its gradients for the upstream gradient of
    `errors_against`.
    """
    wide = [x.detach().cpu().double().requires_grad_() for x in tensors]
    outputs = as_tuple(exact(*wide))
    of_outputs = [upstream(o, tensors[0].dtype).double() for o in outputs]
    return [o.detach() for o in outputs], torch.autograd.grad(outputs, wide, of_outputs)


def errors_against(truth, function, tensors):
    """Relative errors of a function and its gradients against `truth(...)` of the same tensors."""
    want, want_grads = truth
    got = as_tuple(function(*tensors))
    of_outputs = [upstream(o, tensors[0].dtype).to(o) for o in got]
    grads = torch.autograd.grad(got, tensors, of_outputs)
    pairs = enumerate(zip(grads, want_grads, strict=True))
    forward = [relative(x.detach(), y) for x, y in zip(got, want, strict=True)]
    return dict(forward=max(forward)) | {
        f"gradient of input {i}": relative(x, y) for i, (x, y) in pairs
    }


def as_tuple(outputs):
    """The outputs of a function that has one or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def upstream(o, dtype):
    """The same random gradient for every attention with results of that shape, on the CPU."""
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
def decode_error(tensors):
    """The last token's attention from a state against the same from the whole sequence; no
    rotation, one K/V for all branches.
    """
    q, k, v, *_, gates = tensors
    compress, whole = (
        compressor(q.dtype, q.device),
        Layout.of(None, q.shape[:2], CFG, q.device),
    )
    k_cmp, v_cmp = compress(k, v, lambda x, _: x, whole)
    full = nsa_attention(q, k, v, k_cmp, v_cmp, k, v, gates, CFG)
    state = nsa_decode.NSAState(CFG, 1, *k.shape[1:], device=q.device, dtype=q.dtype)
    state.take_prompt(*one_kv(q[:, :-1], k[:, :-1], v[:, :-1], gates[:, :-1]), compress)
    o = state.decode(*one_kv(q[:, -1:], k[:, -1:], v[:, -1:], gates[:, -1:]), compress)
    return relative(o, full[:, -1:].double())


def one_kv(q, k, v, gates):
    """What a layer gives its state: one K/V for all branches, and a rotation that turns nothing."""
    shape = len(k), k.shape[1], 1, k.shape[-1] // 2
    rope = torch.ones(shape, device=k.device), torch.zeros(shape, device=k.device)
    return (q, k, v, k, v, k, v, gates), rope


def compressor(dtype, device="cpu"):
    compress = Compressor(K, CFG, 1e-6, kernels.block_norm).to(device, dtype)
    for parameter in compress.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return compress


def sides(T, dtype, device):
    """[(function, its tensors)] of SDPA, NSA, and indexed attention if it can be waited for."""
    heads, groups = HEADS[device.type]
    tensors = inputs(T, DTYPES[dtype], heads=heads, groups=groups, device=device)
    found = [(sdpa, tensors), (nsa, tensors)]
    if T <= MOST_INDEXED[device.type]:
        index = indexer_inputs(T, DTYPES[dtype], groups=groups, device=device)
        found.append((indexed, tensors + index))
    return found


def attention_row(T, dtype, what, device):
    """Seconds of each side; a GPU's first turn compiles and is not the best."""
    run = (lambda f, x: f(x)) if what == "forward" else train
    turns = 3
    if device.type == "cpu" and T > 16384:
        turns = 2 if T <= 32768 else 1

    with torch.set_grad_enabled(what != "forward"):
        calls = [partial(run, *side) for side in sides(T, dtype, device)]
        return best_of_turns(calls, turns, device)


def decode_row(T, dtype, device=CPU):
    """One token against T: the faster of SDPA and another dense attention, NSA with its state
    update, and indexed attention.
    """
    dtype = DTYPES[dtype]
    H, G = HEADS[device.type]
    made = dict(dtype=dtype, device=device)
    state = nsa_decode.NSAState(CFG, 1, T + 512, G, K, **made)
    compress = compressor(dtype, device)
    k, v = torch.randn(2, 1, T, G, K, device=device).to(dtype)
    q = torch.randn(1, 1, H, K, device=device).to(dtype)
    gates = torch.rand(1, 1, H, 3, device=device).to(dtype)
    one = torch.randn(1, 1, G, K, device=device).to(dtype)
    token = one_kv(q, one, one, gates)
    heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def dense_sdpa():
        F.scaled_dot_product_attention(*heads, enable_gqa=True)

    def dense_products():
        p = (heads[0].view(H, K) @ heads[1][0, 0].T * K**-0.5).float().softmax(-1)
        p.to(dtype) @ heads[2][0, 0]

    def dense_decoding():
        kernels.attention(q, k, v)

    def sparse():
        state.decode(*token, compress)

    q_idx, k_idx = indexer_inputs(T, dtype, grad=False, groups=G, device=device)

    def by_index():
        indexed([q, k, v, q_idx[:, -1:], k_idx])

    dense = dense_products if G == 1 else dense_decoding
    with torch.no_grad():
        state.take_prompt(*one_kv(q, k, v, gates), compress)
        for _ in range(32):
            sparse()
        # every 16th token emits a compressed block: one turn is 16 tokens, for all sides
        stride = CFG.cmp_stride
        calls = [
            lambda f=f: [f() for _ in range(stride)] for f in (dense_sdpa, dense, sparse, by_index)
        ]
        times = [x / stride for x in best_of_turns(calls, 20, device)]
    return min(times[:2]), *times[2:]


def peak_kib():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])


def measure_memory(side, T, dtype):
    """Run in a fresh process: prints the MiB that forward+backward adds to the inputs."""
    function = {"sdpa": sdpa, "nsa": nsa, "indexed": indexed}[side]

    def make(tokens):
        own = indexer_inputs(tokens, DTYPES[dtype]) if side == "indexed" else []
        return inputs(tokens, DTYPES[dtype]) + own

    train(function, make(2048))  # libraries load and warm up
    tensors = make(T)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here
    before = peak_kib()
    train(function, tensors)
    print((peak_kib() - before) / 1024)


def memory_row(T, dtype, device):
    if device.type == "cuda":
        return [peak_mib(*side, device) for side in sides(T, dtype, device)]
    command = [sys.executable, "-m", "benchmarks.attention", "--measure"]
    return [
        float(
            subprocess.run(
                command + [side, str(T), dtype], capture_output=True, text=True, check=True
            ).stdout
        )
        for side in ("sdpa", "nsa", "indexed")
    ]


def peak_mib(function, tensors, device):
    """The MiB that forward+backward adds to the inputs on a GPU."""
    train(function, tensors)
    for x in tensors:
        x.grad = None
    return peak_bytes(lambda: train(function, tensors), device) / 2**20


def shown(value, unit, scale):
    """A figure, or a dash for a side that was left out."""
    return "-" if value is None else f"{value * scale:,.2f} {unit}"


def main(args: list[str] | None = None):
    parser = Parser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384, 32768, 65536],
        help="context lengths",
    )
    parser.add_argument("--long", action="store_true", help="also 131072 tokens")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        type=precision,
        choices=DTYPES,
        default=list(DTYPES),
        help="data types",
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT, help="what to measure")
    parser.add_argument("--svg", help="draw the ratios over the length into this file")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(args)
    try:
        device = named_device(args.device)
    except ValueError as error:
        parser.refuse(error)
    torch.set_num_threads(1)
    if args.measure:
        measure_memory(args.measure[0], int(args.measure[1]), args.measure[2])
        return
    for dtype in args.dtypes:
        print(f"comparing {dtype} with the dense float64 reference", flush=True)
        refuse_if_wrong(dtype, device)
    print("| what | dtype | tokens | SDPA | NSA | indexed | SDPA / NSA | SDPA / indexed |")
    print("|---|---|---|---|---|---|---|---|")
    ratios = {}
    for dtype in args.dtypes:
        for what in args.what:
            for T in args.tokens + [131072] * args.long:
                if what == "decode":
                    times = decode_row(T, dtype, device)
                elif what == "memory":
                    times = memory_row(T, dtype, device)
                else:
                    times = attention_row(T, dtype, what, device)
                a, b, c = [*times, None][:3]
                figures = [shown(x, *UNITS.get(what, ("s", 1))) for x in (a, b, c)]
                figures += [f"{a / b:.2f}", "-" if c is None else f"{a / c:.2f}"]
                print(f"| {what} | {dtype} | {T:,} | {' | '.join(figures)} |", flush=True)
                ratios.setdefault((what, dtype), {})[T] = a / b
    if args.svg:
        draw(ratios, args.svg)


COLOURS = dict(zip(WHAT, svg.COLOURS, strict=False))
LEFT, RIGHT = 60, 560
TOP, FLOOR = 20, 340


def draw(ratios, path):
    """SDPA / NSA over the length, one line per kind and dtype."""
    tokens = [T for points in ratios.values() for T in points]
    times = [ratio for points in ratios.values() for ratio in points.values()]
    x = Scale.around(tokens, LEFT, RIGHT, base=2)
    y = Scale.around([1, *times], FLOOR, TOP, base=2)
    parts = [
        svg.rows(y, LEFT, RIGHT),
        svg.columns(x, FLOOR, TOP),
        svg.line([(LEFT, y(1)), (RIGHT, y(1))], stroke="var(--faint)"),
        svg.text("SDPA / NSA (above 1: NSA is better)", LEFT + 6, TOP + 14, ""),
        svg.text("tokens", (LEFT + RIGHT) / 2, FLOOR + 38, "middle"),
        svg.text("fp32: dashed", RIGHT + 16, TOP + 110),
        svg.key(COLOURS, RIGHT + 16, TOP + 20, 0, 22),
    ]
    for (what, dtype), points in ratios.items():
        dashes = "6 4" if dtype == "fp32" else "none"
        places = [(x(T), y(ratio)) for T, ratio in points.items()]
        parts.append(svg.line(places, stroke=COLOURS[what], stroke_dasharray=dashes))
        for place, (T, ratio) in zip(places, points.items(), strict=True):
            words = f"{what}, {dtype}, {T:,} tokens: {ratio:.2f}"
            parts.append(svg.dot(*place, words, r=4, fill=COLOURS[what]))
    label = "Time and memory of SDPA over those of NSA by the length"
    Path(path).write_text(svg.picture(680, 390, label, parts) + "\n")


if __name__ == "__main__":
    main()

"""Attention at 32 query and 8 key/value heads of 128: dense and sparse, ours and others', forward,
training and decoding, 8k to 262k tokens.

Each is checked forward and backward against the dense float64 oracle at 1,300 tokens before it is
timed; errors stand beside times. Random data: sparse attention's cost does not depend on what is
important, but which blocks are popular does.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention, clock
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, attempt
from longhaul.memory.measure import peak_bytes
from model import NSAConfig, standard_attention
from nsa import decode as nsa_decode
from nsa import engine as nsa_engine
from tests import nsa_oracle as oracle

OURS = "longhaul"
BASE = "SDPA, flash"
ROUNDS = 5
CHECK_TOKENS = 1300
COPIES_BYTES, MOST_COPIES = (
    4 * 2**30,
    64,
)  # decoding walks over so many caches, as a model does over its layers': none stays in L2
MEANS = NSAConfig(
    cmp_block=64, cmp_stride=64, cmp_kind="mean"
)  # fla's compression: means of whole selection blocks
SIZES = (
    ("forward+backward", 2, 32_768, 12),
    ("decode", 5, 32_768, 8),
    ("forward", 8, 32_768, 8),
    ("forward+backward", 10, 8192, 8),
    ("forward+backward", 11, 131_072, 45),
    ("decode", 13, 131_072, 8),
    ("forward", 16, 8192, 6),
    ("decode", 17, 8192, 8),
    ("forward", 18, 131_072, 16),
    ("groups of 16", 19, 32_768, 20),
    ("decode", 22, 262_144, 10),
    ("forward", 23, 262_144, 45),
    ("forward+backward", 24, 262_144, 150),
)  # what, importance, tokens, seconds
TOY = (("forward+backward", 2, 1100, 1), ("decode", 5, 1100, 1), ("forward", 8, 1100, 1))
TABLE = Table(
    "attention",
    "Attention, bf16, heads of 128, one row; decoding: one token after so many, without "
    "CUDA graphs",
    {
        "attention": "text",
        "heads": "text",
        "what": "text",
        "tokens": "count",
        "time, ms": "ms",
        f"time / {BASE}": "ratio",
        "memory beyond inputs, MB": "mb",
        "forward error": "error",
        "worst gradient error": "error",
    },
)


def jobs(place: Place) -> list[Job]:
    """A job per kind and length."""

    @functools.cache
    def known(groups_of_16: bool) -> Contest:
        return check(sixteen(place) if groups_of_16 else plain(place), place)

    def job(what: str, tokens: int, limit: float):
        if what == "decode":
            return lambda run: decode(run, place, tokens, limit)
        of_16 = what == "groups of 16"
        return lambda run: whole(
            run, place, "forward+backward" if of_16 else what, tokens, limit, known(of_16)
        )

    return [
        Job(
            f"attention, {what}, {tokens:,} tokens",
            importance,
            seconds,
            job(what, tokens, seconds / 2),
        )
        for what, importance, tokens, seconds in (TOY if place.toy else SIZES)
    ]


# ---- what is compared


@dataclass(frozen=True)
class Way:
    """attention(q, k_slc, v_slc, k_cmp, v_cmp, k_win, v_win, gates) -> o, and its errors against
    float64 on such tensors.
    """

    attend: Callable
    errors: Callable


@dataclass(frozen=True)
class Contest:
    """Ways that run on the same inputs; a name without a way has the reason instead. `verdicts`:
    ((forward, gradient) errors, why not timed).
    """

    heads: tuple[int, int]
    cfg: NSAConfig
    ways: dict[str, Way | str]
    verdicts: dict[str, tuple[tuple, str]] = field(default_factory=dict)


def heads(place: Place) -> tuple[int, int]:
    """Query and key/value heads."""
    return (4, 1) if place.toy else (32, 8)


def plain(place: Place) -> Contest:
    """Dense and sparse attention at the model's heads."""
    needs = "needs a CUDA device"
    return Contest(
        heads(place),
        attention.CFG,
        {
            "longhaul, standard": dense(lambda q, k, v, *_: standard_attention(q, k, v)),
            BASE: dense_by(SDPBackend.FLASH_ATTENTION),
            "SDPA, cuDNN": dense_by(SDPBackend.CUDNN_ATTENTION) if place.cuda else needs,
            "flash-attn": flash_attn() if place.cuda else needs,
            "longhaul, NSA torch": sparse(nsa_engine.nsa_attention, attention.CFG),
            "longhaul, NSA triton": triton_nsa(attention.CFG) if place.cuda else needs,
        },
    )


def sixteen(place: Place) -> Contest:
    """Sparse attention at 32 query heads on 2 key/value heads, the smallest group that fla's
    kernels take, with its compression.
    """
    needs = "needs a CUDA device"
    return Contest(
        (32, 2),
        MEANS,
        {
            BASE: dense_by(SDPBackend.FLASH_ATTENTION),
            "longhaul, NSA triton": triton_nsa(MEANS) if place.cuda else needs,
            "fla, NSA": fla_nsa() if place.cuda else needs,
        },
    )


def dense(attend) -> Way:
    """Causal attention of q, k and v."""
    return Way(attend, lambda tensors: attention.errors(attend, oracle.causal, tensors[:3]))


def dense_by(backend: SDPBackend) -> Way:
    """torch's attention by one backend; it raises where that cannot serve."""

    def attend(q, k, v, *_):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)

    return dense(attend)


def flash_attn() -> Way | str:
    """Dao-AILab's package."""
    if not importlib.util.find_spec("flash_attn"):
        return "not installed (pip install flash-attn)"
    from flash_attn import flash_attn_func

    return dense(lambda q, k, v, *_: flash_attn_func(q, k, v, causal=True))


def sparse(attend, cfg: NSAConfig) -> Way:
    """Ours, checked with the blocks that it chose itself."""
    return Way(
        lambda *tensors: attend(*tensors, cfg),
        lambda tensors: attention.nsa_errors(attend, tensors, cfg),
    )


def triton_nsa(cfg: NSAConfig) -> Way | str:
    """The Triton twin; of MEANS with the pooling inside, as fla's has it."""
    if not importlib.util.find_spec("triton"):
        return "not installed (pip install triton)"
    from nsa.triton import attention as twin

    way = sparse(twin.nsa_attention, cfg)
    return (
        replace(
            way,
            attend=lambda q, k, v, *rest: way.attend(q, k, v, means(k), means(v), k, v, rest[-1]),
        )
        if cfg is MEANS
        else way
    )


def means(x_BTGK):
    """The mean of every whole block of MEANS."""
    blocks = MEANS.compressed_blocks(x_BTGK.shape[1])
    return x_BTGK[:, : blocks * MEANS.cmp_block].unflatten(1, (blocks, MEANS.cmp_block)).mean(2)


def fla_nsa() -> Way | str:
    """flash-linear-attention's, whose window needs flash-attn."""
    missing = [
        name
        for module, name in (("fla", "flash-linear-attention"), ("flash_attn", "flash-attn"))
        if not importlib.util.find_spec(module)
    ]
    if missing:
        return f"not installed (pip install {' '.join(missing)})"
    from fla.ops.nsa.parallel import parallel_nsa

    def attend(q, k, v, k_cmp, v_cmp, k_win, v_win, gates):
        return parallel_nsa(
            q,
            k,
            v,
            *gates.unbind(-1),
            block_counts=MEANS.sel_count,
            block_size=MEANS.sel_block,
            window_size=MEANS.window,
        )

    return Way(attend, functools.partial(errors_of_all_blocks, attend))


def errors_of_all_blocks(attend, tensors) -> dict:
    """Errors of an attention that compresses by itself: up to 1,024 tokens every block is chosen,
    so that its choice need not be known.
    """
    q, k, v, *_, gates = (
        x.detach()[:, : MEANS.sel_count * MEANS.sel_block].requires_grad_() for x in tensors
    )
    everything = torch.ones(1, q.shape[1], k.shape[2], MEANS.sel_count, dtype=torch.bool)

    def exact(q, k, v, gates):
        return oracle.nsa(q, k, v, means(k), means(v), k, v, gates, MEANS, everything)[0]

    return attention.errors(
        lambda q, k, v, gates: attend(q, k, v, None, None, None, None, gates),
        exact,
        [q, k, v, gates],
    )


# ---- checks


def check(contest: Contest, place: Place) -> Contest:
    """The same with a verdict on every way."""
    H, G = contest.heads
    tensors = attention.inputs(
        CHECK_TOKENS, torch.bfloat16, heads=H // G, device=place.device, cfg=contest.cfg
    )
    return replace(
        contest,
        verdicts={
            name: ((), way) if isinstance(way, str) else verdict(way, tensors)
            for name, way in contest.ways.items()
        },
    )


def verdict(way: Way, tensors) -> tuple[tuple, str]:
    """((forward error, worst gradient error), why it is not timed)."""
    found, why = attempt(way.errors, tensors)
    if why:
        return (), why
    forward = found.pop("forward")
    gradient = max(found.values(), key=lambda error: math.inf if math.isnan(error) else error)
    forward_bound, gradient_bound = attention.BOUNDS["bf16"]
    within = forward <= forward_bound and gradient <= gradient_bound
    return (forward, gradient), "" if within else "not timed: fails its check"


# ---- whole rows


def whole(run: Run, place: Place, what: str, T: int, limit: float, contest: Contest):
    """Memory of a first call, then interleaved times: a row per way."""
    (H, G), why = contest.heads, {name: reason for name, (_, reason) in contest.verdicts.items()}
    seeds = iter(range(len(contest.ways) + ROUNDS))

    def fresh():
        tensors = attention.inputs(
            T, torch.bfloat16, what != "forward", H, G, place.device, contest.cfg, next(seeds)
        )
        return [*tensors, torch.randn_like(tensors[0])]

    memory, calls = (
        {},
        {
            name: functools.partial(forward if what == "forward" else training, way.attend)
            for name, way in contest.ways.items()
            if not why[name]
        },
    )
    for name, call in calls.items():
        memory[name], why[name] = attempt(peak_megabytes, call, fresh, place.device)
    times = clock.interleaved(
        {name: call for name, call in calls.items() if not why[name]},
        fresh,
        place.device,
        ROUNDS,
        limit,
    )
    for name, (errors, _) in contest.verdicts.items():
        figures = (
            {
                "time, ms": clock.milliseconds(times[name]),
                f"time / {BASE}": clock.ratio(times, name, BASE),
                "memory beyond inputs, MB": memory[name],
            }
            if name in times
            else {"time, ms": why[name]}
        )
        run.row(
            TABLE,
            attention=name,
            heads=f"{H}/{G}",
            what=what,
            tokens=T,
            **figures,
            **dict(zip(("forward error", "worst gradient error"), errors, strict=False)),
        )
        if name.startswith(OURS) and why[name] and not isinstance(contest.ways[name], str):
            run.fail(f"attention, {what}, {T:,} tokens: {name}: {why[name]}")


@torch.no_grad()
def forward(attend, *tensors):
    """The forward alone; the result goes."""
    attend(*tensors[:-1])


def training(attend, *tensors):
    """Forward and backward with a random upstream gradient; dense attention has none for what it
    does not read.
    """
    torch.autograd.grad(attend(*tensors[:-1]), tensors[:-1], tensors[-1], allow_unused=True)


# ---- decoding


def decode(run: Run, place: Place, T: int, limit: float):
    """One token against T: dense attention over a cache, and sparse attention with its state's
    update, over caches that no L2 holds.
    """
    H, G = heads(place)
    sides = {BASE: sdpa_decoder, "flash-attn": flash_decoder, "longhaul, NSA": nsa_decoder}
    times, found = {}, {}
    for name, side in sides.items():  # one side's caches at a time
        found[name] = decode_verdict(name, side, place)
        if not found[name][1]:
            times[name], why = attempt(decode_times, side, place, T, H, G, limit / len(sides))
            found[name] = found[name][0], why
    for name, (error, why) in found.items():
        timed, base = times.get(name), times.get(BASE)
        figures = {"time, ms": clock.milliseconds(timed)} if timed else {"time, ms": why}
        ratio = clock.milliseconds(timed) / clock.milliseconds(base) if timed and base else None
        run.row(
            TABLE,
            attention=name,
            heads=f"{H}/{G}",
            what="decode",
            tokens=T,
            **figures,
            **{f"time / {BASE}": ratio, "forward error": error},
        )
        if name.startswith(OURS) and why:
            run.fail(f"attention, decode, {T:,} tokens: {name}: {why}")


def decode_verdict(name: str, side, place: Place) -> tuple[float | None, str]:
    """(error, why it is not timed)."""
    if side is flash_decoder and not place.cuda:
        return None, "needs a CUDA device"
    if side is flash_decoder and not importlib.util.find_spec("flash_attn"):
        return None, "not installed (pip install flash-attn)"
    error, why = attempt(
        sparse_decode_error if side is nsa_decoder else functools.partial(dense_decode_error, side),
        place,
    )
    return error, why or (
        "" if error <= attention.BOUNDS["bf16"][0] else "not timed: fails its check"
    )


def sparse_decode_error(place: Place) -> float:
    """Of decoding against the whole sequence at once, which is checked on its own."""
    H, G = heads(place)
    return attention.decode_error(
        attention.inputs(
            CHECK_TOKENS, torch.bfloat16, grad=False, heads=H, groups=G, device=place.device
        )
    )


@torch.no_grad()
def dense_decode_error(side, place: Place) -> float:
    """Of one token against a short cache in float64."""
    H, G = heads(place)
    kv = cache(place.device, 300, G)
    q = torch.randn(1, 1, H, attention.K, device=place.device, dtype=torch.bfloat16)
    exact = F.scaled_dot_product_attention(
        *(x.cpu().double().transpose(1, 2) for x in (q, *kv)), enable_gqa=True
    )
    return clock.relative(side(kv)(q, None, None).flatten(), exact.flatten())


def peak_megabytes(call, fresh, device: torch.device) -> float:
    """Peak memory of a call on fresh inputs, in MB."""
    return peak_bytes(functools.partial(call, *fresh()), device) / 1e6


@torch.no_grad()
def decode_times(side, place: Place, T: int, H: int, G: int, limit: float) -> list[float]:
    """Seconds per token of each round of 16 tokens, one of which emits a compressed block."""
    stride, size = attention.CFG.cmp_stride, 4 * (T + 1024) * G * attention.K
    copies = max(1, min(MOST_COPIES, COPIES_BYTES // size)) if place.cuda else 1
    steps = [side(cache(place.device, T, G)) for _ in range(copies)]

    def turn(q, one, gates):
        for _ in range(stride):
            for step in steps:
                step(q, one, gates)

    def fresh():
        return [
            torch.randn(1, 1, n, w, device=place.device, dtype=torch.bfloat16)
            for n, w in ((H, attention.K), (G, attention.K))
        ] + [torch.rand(1, 1, H, 3, device=place.device, dtype=torch.bfloat16)]

    turn(*fresh())
    return [
        x / stride / copies
        for x in clock.interleaved({"side": turn}, fresh, place.device, ROUNDS, limit)["side"]
    ]


def cache(device, T: int, G: int):
    """Random keys and values [1, T, G, K]."""
    return torch.randn(2, 1, T, G, attention.K, device=device, dtype=torch.bfloat16)


def sdpa_decoder(kv):
    """torch's attention over keys and values by heads."""
    k, v = (x.transpose(1, 2).contiguous() for x in kv)
    return lambda q, one, gates: F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, enable_gqa=True
    )


def flash_decoder(kv):
    """flash-attn's attention over a cache."""
    from flash_attn import flash_attn_with_kvcache

    return lambda q, one, gates: flash_attn_with_kvcache(q, *kv, cache_seqlens=kv.shape[2])


def nsa_decoder(kv):
    """The state takes the token, then the token attends."""
    (T, G), room = kv.shape[2:4], attention.CFG.cmp_stride * (ROUNDS + 2)
    state = nsa_decode.NSAState(
        attention.CFG, 1, T + room, G, attention.K, device=kv.device, dtype=kv.dtype
    )
    compress = attention.compressor(kv.dtype, kv.device)
    state.append(*kv, *kv, None, None, compress, unrotated)

    def step(q, one, gates):
        state.append(one, one, one, one, None, None, compress, unrotated)
        nsa_decode.nsa_decode(q, gates, state)

    return step


def unrotated(x, _):
    """No rotary positions."""
    return x

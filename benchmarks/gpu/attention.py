"""Attention at 32 query and 8 key/value heads of 128: dense, sparse and indexed, ours and others',
forward, training and decoding, 8k to 262k tokens.

Each is checked forward and backward against the dense float64 oracle at 1,300 tokens and two
key/value heads before it is timed; errors stand next to times. Random data: sparse attention's cost
does not depend on what is important, but which blocks are popular does. Indexed attention chooses
other blocks for each query, and its training includes the indexer's loss.
"""

import functools
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import attention, clock
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, attempt
from footprint.measure import peak_bytes
from longhaul import kernels
from longhaul.flops import pairs
from longhaul.kinds import KINDS
from longhaul.sparse.nsa import decode as nsa_decode
from longhaul.sparse.nsa import engine as nsa_engine
from model import ModelConfig, NSAConfig
from tests import nsa_oracle as oracle

OURS = "longhaul"
BASE = "SDPA, flash"
ROUNDS = 5
CHECK_TOKENS = 1300
CHECK_GROUPS = 2  # key/value heads of a check: more than one, because their order can be wrong
# Turns of 16 tokens before decoding is timed. The last selected block has 1 to 64 tokens: after
# four turns, every length has been seen that a backend may build a plan for.
WARM_TURNS = 4
COPIES_BYTES, MOST_COPIES = (
    4 * 2**30,
    64,
)  # decoding walks over so many caches, as a model does over its layers': none stays in L2
MEANS = NSAConfig(
    cmp_block=64, cmp_stride=64, cmp_kind="mean"
)  # fla's compression: means of whole selection blocks
SIZES = (
    ("forward+backward", 2, 131_072, 45),
    ("decode", 8, 131_072, 20),
    ("forward", 9, 131_072, 20),
    ("forward+backward", 11, 32_768, 25),
    ("forward+backward", 13, 8192, 25),
    ("decode", 15, 32_768, 20),
    ("forward", 16, 32_768, 20),
    ("decode", 17, 8192, 15),
    ("groups of 16", 19, 32_768, 30),
    ("forward", 20, 8192, 20),
    ("decode", 22, 262_144, 25),
    ("forward", 23, 262_144, 30),
    ("forward+backward", 24, 262_144, 60),
)  # what, importance, tokens, seconds
# The engine in torch is launched kernel by kernel: 35 to 50 s of host time at 131k (computed).
MOST_ENGINE_TOKENS = 8192
# Above this, only the ways that a long context chooses between.
MOST_OF_ALL_WAYS = 32_768
TOY = (("forward+backward", 2, 300, 60), ("decode", 8, 300, 60))
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
        "TFLOP/s": "tera",
        "GB/s": "giga",
        "host, ms": "ms",
        "first call, s": "seconds",
        "memory beyond inputs, MB": "mb",
        "reserved, MB": "mb",
        "forward error": "error",
        "worst gradient error": "error",
    },
)


ERRORS = ("forward error", "worst gradient error")
EXACT = "within its bounds"
CHECKS = Table(
    "checks",
    f"Attention against dense float64, forward and backward, {CHECK_TOKENS:,} tokens, "
    f"{CHECK_GROUPS} key/value heads with as many query heads each as in the model",
    {
        "attention": "text",
        "heads": "text",
        "forward error": "error",
        "worst gradient error": "error",
        "result": "text",
    },
)


def jobs(place: Place) -> list[Job]:
    """A job per kind and length."""

    def work(what: str, tokens: int, limit: float):
        if what == "decode":
            return lambda run: decode(run, place, tokens, limit)
        if what == "groups of 16":
            return lambda run: contest(
                run, place, "forward+backward", tokens, limit, sixteen(place)
            )
        return lambda run: contest(run, place, what, tokens, limit, plain(place, tokens))

    return [
        Job(
            f"attention, {what}, {tokens:,} tokens",
            importance,
            seconds,
            work(what, tokens, seconds / 2),
        )
        for what, importance, tokens, seconds in (TOY if place.toy else SIZES)
    ]


def contest(
    run: Run, place: Place, what: str, tokens: int, limit: float, unchecked: "Contest"
) -> None:
    """Check every way that no earlier job has checked, then time those that are exact."""
    whole(run, place, what, tokens, limit, check(unchecked, place, run))


# ---- what is compared


@dataclass(frozen=True)
class Way:
    """attention(*tensors) -> o, or o and the indexer's loss, of tensors as `inputs` makes them; its
    errors against float64 on such tensors (errors(tensors, Truth)); and which keys it reads, as
    the configuration's attention_type says it.
    """

    attend: Callable
    errors: Callable
    kind: str = "standard"


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
    return (4, 2) if place.toy else (32, 8)


def inputs(place: Place, contest: Contest, tokens: int, grad: bool = True, seed: int = 0) -> list:
    """q, six K/V and gates of sparse attention; the indexer's queries and its key."""
    H, G = contest.heads
    numbers = tokens, torch.bfloat16, grad
    of_nsa = attention.inputs(*numbers, H, G, place.device, contest.cfg, seed)
    return of_nsa + attention.indexer_inputs(*numbers, G, place.device, seed)


def long(place: Place) -> Contest:
    """What a long context chooses between, at the model's heads."""
    needs = "needs a CUDA device"
    ways = {
        BASE: dense_by(SDPBackend.FLASH_ATTENTION),
        "SDPA, cuDNN": dense_by(SDPBackend.CUDNN_ATTENTION) if place.cuda else needs,
        "longhaul, NSA triton": triton_nsa(attention.CFG) if place.cuda else needs,
    }
    return Contest(heads(place), attention.CFG, ways)


def plain(place: Place, tokens: int) -> Contest:
    """Dense and sparse attention at the model's heads, as far as they serve so many tokens."""
    if tokens > MOST_OF_ALL_WAYS:
        return long(place)
    known = long(place)
    ways = known.ways | {
        "longhaul, standard": dense(lambda q, k, v, *_: kernels.attention(q, k, v)),
        "flash-attn": flash_attn() if place.cuda else "needs a CUDA device",
    }
    if tokens <= MOST_ENGINE_TOKENS:
        ways["longhaul, NSA torch"] = sparse(nsa_engine.nsa_attention, attention.CFG)
        ways["longhaul, indexed torch"] = indexed()
    return replace(known, ways=ways)


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
    return Way(attend, lambda tensors, truth: truth.errors(attend, tensors[:3]))


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
        lambda *tensors: attend(*tensors[:8], cfg),
        lambda tensors, truth: attention.nsa_errors(attend, tensors[:8], cfg),
        kind="nsa",
    )


def indexed() -> Way:
    """Attention over the blocks that an indexer chooses, and the indexer's loss."""
    return Way(
        lambda *tensors: attention.indexed(tensors),
        lambda tensors, truth: attention.indexed_errors(tensors),
        kind="indexed",
    )


def triton_nsa(cfg: NSAConfig) -> Way | str:
    """The Triton twin; of MEANS with the pooling inside, as fla's has it."""
    if not importlib.util.find_spec("triton"):
        return "not installed (pip install triton)"
    way = sparse(functools.partial(nsa_engine.nsa_attention, fused=True), cfg)
    return (
        replace(
            way,
            attend=lambda q, k, v, *rest: way.attend(q, k, v, means(k), means(v), k, v, rest[4]),
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

    def attend(q, k, v, k_cmp, v_cmp, k_win, v_win, gates, *_):
        return parallel_nsa(
            q,
            k,
            v,
            *gates.unbind(-1),
            block_counts=MEANS.sel_count,
            block_size=MEANS.sel_block,
            window_size=MEANS.window,
        )

    return Way(attend, functools.partial(errors_of_all_blocks, attend), kind="nsa")


def errors_of_all_blocks(attend, tensors, truth) -> dict:
    """Errors of an attention that compresses by itself: up to 1,024 tokens every block is chosen,
    so that its choice need not be known.
    """
    q, k, v, *_, gates = (
        x.detach()[:, : MEANS.sel_count * MEANS.sel_block].requires_grad_() for x in tensors[:8]
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


def check(contest: Contest, place: Place, run: Run) -> Contest:
    """The same with a verdict on every way; a row for those that no earlier job has checked."""
    H, G = contest.heads
    known = verdicts_of(run, H, G)
    tensors = None
    truth = Truth()
    verdicts = {}
    for name, way in contest.ways.items():
        if isinstance(way, str):
            verdicts[name] = ((), way)
            continue
        if name in known:
            verdicts[name] = known[name]
            continue
        if tensors is None:
            few = replace(contest, heads=(H // G * CHECK_GROUPS, CHECK_GROUPS))
            tensors = inputs(place, few, CHECK_TOKENS)
        verdicts[name] = verdict(way, tensors, truth)
        errors, why = verdicts[name]
        figures = dict(zip(ERRORS, errors, strict=False))
        run.row(CHECKS, attention=name, heads=f"{H}/{G}", result=why or EXACT, **figures)
    return replace(contest, verdicts=verdicts)


def verdicts_of(run: Run, H: int, G: int) -> dict[str, tuple[tuple, str]]:
    """What earlier jobs of this run found about the ways at these heads."""
    found = {}
    for row in run.earlier.get(CHECKS.name, {"rows": []})["rows"]:
        if row["heads"] == f"{H}/{G}":
            errors = tuple(row[name] for name in ERRORS if name in row)
            found[row["attention"]] = (errors, "" if row["result"] == EXACT else row["result"])
    return found


class Truth:
    """Dense attention in float64 with its gradients, computed once for all ways of a contest."""

    def __init__(self):
        self.known = None

    def errors(self, attend: Callable, tensors: list[torch.Tensor]) -> dict:
        """Relative errors of dense attention by `attend`."""
        if self.known is None:
            self.known = attention.truth(oracle.causal, tensors)
        return attention.errors_against(self.known, attend, tensors)


def verdict(way: Way, tensors, truth: Truth) -> tuple[tuple, str]:
    """((forward error, worst gradient error), why it is not timed)."""
    found, why = attempt(way.errors, tensors, truth)
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
    H, G = contest.heads
    why = {name: reason for name, (_, reason) in contest.verdicts.items()}
    seeds = iter(range(2 * len(contest.ways) + ROUNDS))

    def fresh():
        tensors = inputs(place, contest, T, what != "forward", next(seeds))
        return [*tensors, torch.randn_like(tensors[0])]

    memory = {}
    first = {}  # with what it compiles
    host = {}
    calls = {
        name: functools.partial(forward if what == "forward" else training, way.attend)
        for name, way in contest.ways.items()
        if not why[name]
    }
    for name, call in calls.items():
        began = time.perf_counter()
        memory[name], why[name] = attempt(peak_megabytes, call, fresh, place.device)
        first[name] = time.perf_counter() - began
        if not why[name]:
            once_more = functools.partial(call, *fresh())
            host[name] = clock.host_milliseconds(once_more, place.device)
            del once_more

    times = clock.interleaved(
        {name: call for name, call in calls.items() if not why[name]},
        fresh,
        place.device,
        ROUNDS,
        limit,
    )
    for name, (errors, _) in contest.verdicts.items():
        figures = {"time, ms": why[name]}
        if name in times:
            allocated, reserved = memory[name]
            figures = {
                "time, ms": clock.milliseconds(times[name]),
                f"time / {BASE}": clock.ratio(times, name, BASE),
                "host, ms": host[name],
                "first call, s": first[name],
                "memory beyond inputs, MB": allocated,
                "reserved, MB": reserved,
            }
            figures |= achieved(contest, name, what, T, figures["time, ms"])
        run.row(
            TABLE,
            attention=name,
            heads=f"{H}/{G}",
            what=what,
            tokens=T,
            **figures,
            **dict(zip(ERRORS, errors, strict=False)),
        )
        if name.startswith(OURS) and why[name] and not isinstance(contest.ways[name], str):
            run.fail(f"attention, {what}, {T:,} tokens: {name}: {why[name]}")


def achieved(contest: Contest, name: str, what: str, T: int, milliseconds: float) -> dict:
    """TFLOP/s and GB/s of the operations and bytes that cannot be avoided: no recomputation, every
    input and output once in each direction.
    """
    H, G = contest.heads
    kind = contest.ways[name].kind
    settings = contest.cfg if kind == "nsa" else KINDS[kind].config()
    config = ModelConfig.preset("4B", attention=settings)
    read = pairs(config, T)  # compressed keys, and scores of blocks by their operations, count too
    products = 2 if what == "forward" else 7  # of queries with keys: 2 forward, 5 backward
    operations = products * 2 * H * attention.K * read

    queries = H * attention.K * T
    keys = 2 * G * attention.K * T
    bytes_forward = 2 * (2 * queries + keys)
    # backward: reads inputs, result and its gradient; writes the gradients of the inputs
    bytes_backward = 2 * (4 * queries + 2 * keys)
    moved = bytes_forward if what == "forward" else bytes_forward + bytes_backward
    return {
        "TFLOP/s": operations / milliseconds * 1e3,
        "GB/s": moved / milliseconds * 1e3,
    }


@torch.no_grad()
def forward(attend, *tensors):
    """The forward alone; the result goes."""
    attend(*tensors[:-1])


def training(attend, *tensors):
    """Forward and backward with a random upstream gradient, and that of a sum of the indexer's
    loss; attention has none for what it does not read.
    """
    o, *loss = attention.as_tuple(attend(*tensors[:-1]))
    upstream = [tensors[-1], *map(torch.ones_like, loss)]
    torch.autograd.grad((o, *loss), tensors[:-1], upstream, allow_unused=True)


# ---- decoding


def decode(run: Run, place: Place, T: int, limit: float):
    """One token against T: dense attention over a cache, and sparse attention with its state's
    update, over caches that no L2 holds.
    """
    H, G = heads(place)
    sides = {
        BASE: flash_sdpa_decoder,
        "SDPA, torch's choice": sdpa_decoder,
        "flash-attn": flash_decoder,
        "longhaul, NSA": nsa_decoder,
    }
    times, found = {}, {}
    for name, side in sides.items():  # one side's caches at a time
        found[name] = decode_verdict(name, side, place)
        if not found[name][1]:
            times[name], why = attempt(decode_times, side, place, T, H, G, limit / len(sides))
            found[name] = found[name][0], why
    for name, (error, why) in found.items():
        timed, base = times.get(name), times.get(BASE)
        figures = {"time, ms": why}
        if timed:
            figures = {"time, ms": clock.milliseconds(timed)}
            if name != "longhaul, NSA":  # the others read the whole cache for each token
                figures["GB/s"] = 4 * T * G * attention.K / figures["time, ms"] * 1e3
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


def peak_megabytes(call, fresh, device: torch.device) -> tuple[float, float | None]:
    """Peak of a call on fresh inputs beyond them, in MB: allocated, and on a GPU reserved."""
    inputs = fresh()
    if device.type != "cuda":
        return peak_bytes(functools.partial(call, *inputs), device) / 1e6, None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    allocated = peak_bytes(functools.partial(call, *inputs), device) / 1e6
    return allocated, (torch.cuda.max_memory_reserved(device) - before) / 1e6


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
        return token(place.device, H, G)

    for _ in range(WARM_TURNS):
        turn(*fresh())
    return [
        x / stride / copies
        for x in clock.interleaved({"side": turn}, fresh, place.device, ROUNDS, limit)["side"]
    ]


def token(device, H: int, G: int) -> list[torch.Tensor]:
    """Random q, one key or value, and gates of one token."""
    made = dict(device=device, dtype=torch.bfloat16)
    q = torch.randn(1, 1, H, attention.K, **made)
    one = torch.randn(1, 1, G, attention.K, **made)
    return [q, one, torch.rand(1, 1, H, 3, **made)]


def cache(device, T: int, G: int):
    """Random keys and values [1, T, G, K]."""
    return torch.randn(2, 1, T, G, attention.K, device=device, dtype=torch.bfloat16)


def flash_sdpa_decoder(kv):
    """torch's FlashAttention over keys and values by heads."""
    attend = sdpa_decoder(kv)

    def step(q, one, gates):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(q, one, gates)

    return step


def sdpa_decoder(kv):
    """torch's attention over keys and values by heads, with the backend that it chooses."""
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
    (T, G), room = kv.shape[2:4], attention.CFG.cmp_stride * (ROUNDS + WARM_TURNS + 1)
    state = nsa_decode.NSAState(
        attention.CFG, 1, T + room, G, attention.K, device=kv.device, dtype=kv.dtype
    )
    compress = attention.compressor(kv.dtype, kv.device)
    state.take_prompt(*attention.one_kv(None, *kv, None), compress)

    def step(q, one, gates):
        state.decode(*attention.one_kv(q, one, one, gates), compress)

    return step

"""How far back each head looks: its attention by distance, from the queries and keys of a forward.

The distance of a key is the number of tokens from it to the query. Bucket 0 is the query itself,
and bucket b >= 1 holds the distances 2^(b-1) to 2^b - 1. For each head, a query's probabilities are
summed by bucket and averaged over the queries, and so is its mean distance, sum of p * distance.
Documents of packed rows are apart, as in attention. Nothing of size [T, T] exists: the softmax is
summed over tiles of keys with a running maximum, as FlashAttention does.

Standard attention has one part, "all". Native Sparse Attention has three softmaxes, each measured
for itself, and the mean of the gate that scales its output:

    compressed  a block has no distance of its own: that to its middle is taken, where it is rotated
    selected    the tokens of the blocks that the query chose; the choice is made again in fp32
    window      the last tokens

Queries that see no compressed block yet do not count in that part.

Letters: T queries, the last ones of S tokens; C queries of a chunk, s keys of a tile, H heads,
G key/value heads, M = H/G query heads of each, X keys that a query selected, K head dimension.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import platform
from data.order import GOLDEN, MASK, mix
from lab.analysis.activations import check_layers, hooked
from model import (
    Attention,
    Decoder,
    Device,
    Layout,
    ModelConfig,
    NativeSparseAttention,
    NSAConfig,
    Rope,
    StandardAttention,
    rotate,
    select_blocks,
    sparse_documents,
    wide,
)

PARTS = {"standard": ("all",), "nsa": ("compressed", "selected", "window")}
BUCKETS = 40  # distances below 2^39
CHUNK = 64  # queries
LOWEST = -1e30  # a running maximum before the first key: finite, because inf - inf is nan
ANY = 2**BUCKETS

# Probabilities that exist at a time. On a CPU they stay in its cache.
CPU_TILE = 2**18
GPU_TILE = 2**24


def bucket_of(distance: int) -> int:
    """The bucket of a distance."""
    return distance.bit_length()


def bucket_bounds(bucket: int) -> tuple[int, int]:
    """The first distance of a bucket, and the first one after it."""
    return 2**bucket // 2, 2**bucket


def bucket_name(bucket: int) -> str:
    """The distances of a bucket in words."""
    low, stop = bucket_bounds(bucket)
    return f"{low:,}" if stop - low < 2 else f"{low:,} to {stop - 1:,}"


class Profile(NamedTuple):
    """How far back the heads look in one part of a layer's attention.

    queries     over which the figures are averaged
    buckets     names of the buckets, up to the longest document
    share       for each head, the share of its attention in each bucket: they sum to 1
    distance    for each head, the mean distance in tokens
    gate        for each head, the mean gate of this part: 1 in standard attention
    """

    queries: int
    buckets: list[str]
    share: list[list[float]]
    distance: list[float]
    gate: list[float]

    def record(self) -> dict:
        """The figures by name, as JSON takes them."""
        return self._asdict()


class _Totals:
    """Sums over queries of one part, in float64."""

    def __init__(self, heads: int, device: Device):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=torch.float64)

        self.queries = 0
        self.share_HB = zeros(heads, BUCKETS)
        self.distance_H = zeros(heads)
        self.gate_H = zeros(heads)

    def add(
        self,
        sums_GMCE: Tensor,
        queries: int,
        gate_CH: Tensor | None,
    ) -> None:
        """What `_bucket_sums` returned for C queries, of which `queries` see a key."""
        total_GMC1 = sums_GMCE[..., :-1].sum(-1, keepdim=True)
        total_GMC1.clamp_(min=torch.finfo(total_GMC1.dtype).tiny)  # 0 if a query sees no key
        means_HE = (sums_GMCE / total_GMC1).sum(2, dtype=torch.float64).flatten(0, 1)

        self.queries += queries
        self.share_HB[:, : means_HE.shape[1] - 1] += means_HE[:, :-1]
        self.distance_H += means_HE[:, -1]
        if gate_CH is not None:
            self.gate_H += gate_CH.sum(0, dtype=torch.float64)


class LayerDistances:
    """Totals of a layer, over as many forwards as there are.

    every: of so many chunks of 64 queries, in the order in which they come, one is measured, which
    a fixed hash chooses. Time falls with it.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device = "cpu",
        every: int = 1,
    ):
        if config.attention.name not in PARTS:
            raise ValueError(
                f"{config.attention.name} attention has no distance profile: measure one of "
                f"{', '.join(PARTS)}"
            )
        if every < 1:
            raise ValueError(f"every={every} chunks of queries are measured: give 1 or more")
        self.every = every
        self.chunks = 0  # that came, measured or not
        self.longest = 0  # tokens of the longest document
        self.tokens = 0  # queries that were measured
        names = PARTS[config.attention.name]
        self.parts = {name: _Totals(config.num_heads, device) for name in names}

    def starts(self, first: int, stop: int) -> Iterator[int]:
        """Where the chunks of the queries first..stop-1 begin that are to be measured."""
        self.longest = max(self.longest, stop)
        for start in platform().tiles(range(first, stop, CHUNK)):
            group, place = divmod(self.chunks, self.every)
            # at random, because rows of equal length come round to the same positions
            if place == mix((group + 1) * GOLDEN & MASK) % self.every:
                self.tokens += min(CHUNK, stop - start)
                yield start
            self.chunks += 1

    def merge(self, other: "LayerDistances") -> None:
        """Take in what another one has measured: of other rows, or of another rank."""
        if other.parts.keys() != self.parts.keys():
            theirs = ", ".join(other.parts)
            ours = ", ".join(self.parts)
            raise ValueError(f"distances of {theirs} and of {ours}: merge those of one attention")
        self.longest = max(self.longest, other.longest)
        self.tokens += other.tokens
        for name, totals in self.parts.items():
            theirs = other.parts[name]
            totals.queries += theirs.queries
            totals.share_HB += theirs.share_HB.to(totals.share_HB.device)
            totals.distance_H += theirs.distance_H.to(totals.distance_H.device)
            totals.gate_H += theirs.gate_H.to(totals.gate_H.device)

    def result(self) -> dict[str, Profile]:
        """The profile of each part that any query had keys in."""
        return {name: self._profile(x) for name, x in self.parts.items() if x.queries}

    def _profile(self, totals: _Totals) -> Profile:
        count = bucket_of(self.longest - 1) + 1
        share_HB = totals.share_HB[:, :count] / totals.queries
        gate_H = torch.ones_like(totals.gate_H)
        if len(self.parts) > 1:
            gate_H = totals.gate_H / self.tokens
        return Profile(
            queries=totals.queries,
            buckets=[bucket_name(bucket) for bucket in range(count)],
            share=share_HB.tolist(),
            distance=(totals.distance_H / totals.queries).tolist(),
            gate=gate_H.tolist(),
        )

    def state_dict(self) -> dict:
        """All totals, for a file: no copies, so they change with the next forward."""
        parts = {name: dict(vars(totals)) for name, totals in self.parts.items()}
        return {name: x for name, x in vars(self).items() if name != "every"} | {"parts": parts}

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned."""
        self.chunks = state["chunks"]
        self.longest = state["longest"]
        self.tokens = state["tokens"]
        for name, totals in self.parts.items():
            saved = state["parts"][name]
            device = totals.gate_H.device
            totals.queries = saved["queries"]
            totals.share_HB = saved["share_HB"].to(device, copy=True)
            totals.distance_H = saved["distance_H"].to(device, copy=True)
            totals.gate_H = saved["gate_H"].to(device, copy=True)


@contextlib.contextmanager
def measured(model: Decoder, totals: dict[int, LayerDistances]) -> Iterator[None]:
    """Inside, every forward adds the attention of its layers to their totals.

    It runs after the layer's own attention, from the same inputs: queries and keys are projected
    again. ValueError for a layer that does not exist.
    """
    check_layers(list(totals), len(model.layers))
    with contextlib.ExitStack() as hooks:
        for layer, of_layer in totals.items():
            hooks.enter_context(_measuring(model.layers[layer].attention, of_layer))
        yield


def _measuring(attention: Attention, totals: LayerDistances) -> contextlib.AbstractContextManager:
    def add(inputs: tuple, _output: Tensor) -> None:
        measure = _measure_sparse if len(totals.parts) > 1 else _measure_standard
        with torch.no_grad():
            measure(attention, totals, *inputs)

    return hooked(attention, add)


# ---- standard attention


class Keys(NamedTuple):
    """Keys, and at which distances a query sees them: from `least` on, and below `most`.

    Key i is at the position first + i * step of its document.
    """

    k_SGK: Tensor
    first: int = 0
    step: int = 1
    least: int = 0
    most: int = ANY

    def position(self, index: int | Tensor) -> int | Tensor:
        """Where a key is."""
        return self.first + index * self.step

    def index(self, position: int) -> int:
        """The first key at or behind a position."""
        return -((self.first - position) // self.step)


def _measure_standard(
    attention: StandardAttention,
    totals: LayerDistances,
    x_BTD: Tensor,
    rope: Rope,
    documents,
    cache,
) -> None:
    q_BTHK, k_BTGK, _ = attention.inputs(x_BTD, rope, attention.project(x_BTD, rope))
    texts = zip(q_BTHK, k_BTGK, strict=True)
    if cache is not None:
        texts = zip(q_BTHK, cache.stored()[0], strict=True)
    elif documents is not None:
        flat = [x.flatten(0, 1).split(documents.lengths) for x in (q_BTHK, k_BTGK)]
        texts = zip(*flat, strict=True)

    for q_THK, k_SGK in platform().tiles(list(texts)):
        S = len(k_SGK)
        first = S - len(q_THK)
        for start in totals.starts(first, S):
            q_GMCK = _heads_first(q_THK[start - first :][:CHUNK], k_SGK)
            sums_GMCE = _bucket_sums(q_GMCK, start, Keys(k_SGK))
            totals.parts["all"].add(sums_GMCE, q_GMCK.shape[2], None)


def _heads_first(q_CHK: Tensor, k_SGK: Tensor) -> Tensor:
    """Scaled queries [G, M, C, K] in fp32."""
    _, G, K = k_SGK.shape
    q_CGMK = q_CHK.to(wide(q_CHK.dtype)).unflatten(1, (G, -1))
    return q_CGMK.permute(1, 2, 0, 3) * K**-0.5


def _logits(q_GMCK: Tensor, k_sGK: Tensor) -> Tensor:
    """[G, M, C, s]."""
    k_GKs = k_sGK.to(q_GMCK.dtype).permute(1, 2, 0)
    return torch.bmm(q_GMCK.flatten(1, 2), k_GKs).view(*q_GMCK.shape[:3], -1)


def _bucket_sums(
    q_GMCK: Tensor,
    start: int,
    keys: Keys,
) -> Tensor:
    """sums [G, M, C, buckets + 1] of exp(logit) of the queries start, start + 1, ...: by bucket,
    and last times the distance. They have a common factor for each query.
    """
    G, M, C, _ = q_GMCK.shape
    stop = start + C
    query_C1 = torch.arange(start, stop, device=q_GMCK.device)[:, None]
    sums_GMCE = q_GMCK.new_zeros(G, M, C, bucket_of(stop - 1) + 2)
    highest_GMC1 = q_GMCK.new_full((G, M, C, 1), LOWEST)

    for tile in _tiles(start, stop, keys, _tile_size(q_GMCK)):
        p_GMCs = _logits(q_GMCK, keys.k_SGK[tile])
        last = keys.position(tile.stop - 1)
        nearest = start - last
        farthest = stop - 1 - keys.position(tile.start)
        index_s = torch.arange(tile.start, tile.stop, device=p_GMCs.device)
        position_s = keys.position(index_s)
        distance_Cs = query_C1 - position_s
        if nearest < keys.least or farthest >= keys.most:
            seen_Cs = (distance_Cs >= keys.least) & (distance_Cs < keys.most)
            p_GMCs.masked_fill_(~seen_Cs, -torch.inf)

        higher_GMC1 = torch.maximum(highest_GMC1, p_GMCs.amax(-1, keepdim=True))
        p_GMCs.sub_(higher_GMC1).exp_()
        sums_GMCE.mul_((highest_GMC1 - higher_GMC1).exp_())
        highest_GMC1 = higher_GMC1

        buckets = range(bucket_of(max(0, nearest)), bucket_of(farthest) + 1)
        _add_by_bucket(sums_GMCE, p_GMCs, distance_Cs, buckets)
        sums_GMCE[..., -1] += p_GMCs @ (last - position_s).to(p_GMCs.dtype)
        sums_GMCE[..., -1] += p_GMCs.sum(-1) * (query_C1[:, 0] - last)
    return sums_GMCE


def _add_by_bucket(
    sums_GMCE: Tensor,
    p_GMCs: Tensor,
    distance: Tensor,
    buckets: range,
) -> None:
    """Add p, whose distances [..., C, s] lie in the buckets, to the sums of `_bucket_sums`."""
    distance = distance.unsqueeze(-3)  # over M
    if len(buckets) == 1:
        sums_GMCE[..., buckets[0]] += p_GMCs.sum(-1)
        return
    for bucket in buckets:
        low, stop = bucket_bounds(bucket)
        outside = (distance < low) | (distance >= stop)
        sums_GMCE[..., bucket] += p_GMCs.masked_fill(outside, 0).sum(-1)


def _tile_size(q_GMCK: Tensor) -> int:
    """Keys of a tile."""
    on_cpu = platform().device(q_GMCK).type == "cpu"
    elements = CPU_TILE if on_cpu else GPU_TILE
    return max(1, elements // q_GMCK[..., 0].numel())


def _tiles(
    start: int,
    stop: int,
    keys: Keys,
    size: int,
) -> Sequence[slice]:
    """The keys that the queries start..stop-1 may see, in tiles of at most `size`, the largest
    first, because a planner visits only a few.

    They are cut so that the keys of a tile lie in one bucket, and are seen, for all these queries,
    except near a bucket's edge.
    """
    low = max(0, keys.index(start - keys.most + 1))
    high = max(low, min(len(keys.k_SGK), keys.index(stop - keys.least)))
    edges = [2**b for b in range((stop - start).bit_length(), stop.bit_length())]
    behind_first = [keys.index(start + 1 - x) for x in (keys.least, *edges)]
    behind_last = [keys.index(stop - x) for x in (keys.most, *edges)]

    inside = {index for index in behind_first + behind_last if low < index < high}
    tiles = []
    for first, end in itertools.pairwise(sorted({low, high} | inside)):
        tiles += [slice(x, min(x + size, end)) for x in range(first, end, size)]
    tiles.sort(key=lambda tile: tile.start - tile.stop)
    return platform().tiles(tiles)


# ---- Native Sparse Attention


def _measure_sparse(
    attention: NativeSparseAttention,
    totals: LayerDistances,
    x_BTD: Tensor,
    rope: Rope,
    layout: Layout,
    _cache: None,
) -> None:
    inputs = attention.inputs(x_BTD, rope, attention.project(x_BTD, rope))
    if layout.cu_seqlens is not None:  # one row of all documents, as attention has it
        inputs = [x.flatten(0, 1)[None] for x in inputs]
        if layout.rope is None:
            B = len(x_BTD)
            rope = [x.expand(B, *x.shape[1:]).flatten(0, 1)[None] for x in rope]

    q, k, _, raw, v_raw, k_win, _, gates = inputs
    k_cmp = _compressed_keys(attention, raw, v_raw, rope, layout)
    cfg = attention.sparse.cfg
    for row in platform().tiles(range(len(q))):
        texts = sparse_documents(layout.cu_seqlens, q.shape[1], k_cmp.shape[1], cfg)
        for tokens, blocks in texts:
            text = SparseText(
                q[row, tokens],
                k[row, tokens],
                k_cmp[row, blocks],
                k_win[row, tokens],
                gates[row, tokens],
                cfg,
            )
            text.measure(totals)


def _compressed_keys(
    attention: NativeSparseAttention,
    raw: Tensor,
    v_raw: Tensor,
    rope: Rope,
    layout: Layout,
) -> Tensor:
    """[B, N, G, K] of the compressed blocks."""
    cos, sin = rope if layout.rope is None else layout.rope

    def rotate_as(k_cmp: Tensor, centre: slice | Tensor) -> Tensor:
        return rotate(k_cmp, cos[:, centre], sin[:, centre])

    k_cmp, _ = attention.sparse.compressor(raw, v_raw, rotate_as, layout)
    return k_cmp


class SparseText(NamedTuple):
    """Queries, keys of the three branches, and gates of one document of T tokens and N blocks."""

    q_THK: Tensor
    k_TGK: Tensor
    k_cmp_NGK: Tensor
    k_win_TGK: Tensor
    gate_TH3: Tensor
    cfg: NSAConfig

    def measure(self, totals: LayerDistances) -> None:
        """Add the document's queries to a layer's totals."""
        cfg = self.cfg
        middle = cfg.cmp_block // 2
        compressed = Keys(
            self.k_cmp_NGK,
            first=middle,
            step=cfg.cmp_stride,
            least=cfg.cmp_block - 1 - middle,  # the block has ended
        )
        window = Keys(self.k_win_TGK, most=cfg.window)

        T = len(self.q_THK)
        for start in totals.starts(0, T):
            stop = min(start + CHUNK, T)
            q_GMCK = _heads_first(self.q_THK[start:stop], self.k_TGK)
            sums = {
                "compressed": _bucket_sums(q_GMCK, start, compressed),
                "selected": self._selected(q_GMCK, start),
                "window": _bucket_sums(q_GMCK, start, window),
            }
            gates = self.gate_TH3[start:stop].unbind(-1)
            for (name, sums_GMCE), gate_CH in zip(sums.items(), gates, strict=True):
                first_key = cfg.cmp_block - 1 if name == "compressed" else 0
                queries = max(0, stop - max(start, first_key))
                totals.parts[name].add(sums_GMCE, queries, gate_CH)

    def _selected(self, q_GMCK: Tensor, start: int) -> Tensor:
        """`_bucket_sums` over the tokens of the blocks that each query chooses, a few queries at a
        time, because their keys are gathered.
        """
        G, M, C, K = q_GMCK.shape
        chosen_GCX = self._chosen(q_GMCK, start)
        X = chosen_GCX.shape[-1]
        on_cpu = platform().device(q_GMCK).type == "cpu"
        elements = 4 * (CPU_TILE if on_cpu else GPU_TILE)
        few = max(1, elements // (G * X * (K + M)))

        parts = []
        for first in platform().tiles(range(0, C, few)):
            queries = slice(first, min(first + few, C))
            query_C1 = torch.arange(start, start + C, device=q_GMCK.device)[queries, None]
            parts.append(
                self._at(q_GMCK[:, :, queries], query_C1, chosen_GCX[:, queries], start + C)
            )
        return torch.cat(parts, dim=2)

    def _at(
        self,
        q_GMCK: Tensor,
        query_C1: Tensor,
        key_GCX: Tensor,
        stop: int,
    ) -> Tensor:
        """`_bucket_sums` of queries over keys by index, -1 for none."""
        group_G11 = torch.arange(len(q_GMCK), device=q_GMCK.device)[:, None, None]
        k_GCXK = self.k_TGK[key_GCX.clamp(min=0), group_G11].to(q_GMCK.dtype)
        logits_GMCX = torch.einsum("gmck,gcxk->gmcx", q_GMCK, k_GCXK)
        seen_GCX = (key_GCX >= 0) & (key_GCX <= query_C1)
        p_GMCX = logits_GMCX.masked_fill_(~seen_GCX[:, None], -torch.inf).softmax(-1)

        sums_GMCE = p_GMCX.new_zeros(*p_GMCX.shape[:3], bucket_of(stop - 1) + 2)
        distance_GCX = (query_C1 - key_GCX).clamp_(min=0)  # where none is seen, p is 0
        _add_by_bucket(sums_GMCE, p_GMCX, distance_GCX, range(sums_GMCE.shape[-1] - 1))
        sums_GMCE[..., -1] += (p_GMCX * distance_GCX[:, None]).sum(-1)
        return sums_GMCE

    def _chosen(self, q_GMCK: Tensor, start: int) -> Tensor:
        """The tokens of the blocks that the queries choose [G, C, X], -1 for none, as the layer
        chooses them; X is n blocks of l' tokens.
        """
        cfg = self.cfg
        C = q_GMCK.shape[2]
        blocks = cfg.compressed_blocks(start + C)
        query_C1 = torch.arange(start, start + C, device=q_GMCK.device)[:, None]
        block_N = torch.arange(blocks, device=q_GMCK.device)
        ended_CN = block_N * cfg.cmp_stride + cfg.cmp_block - 1 <= query_C1

        logits_GMCN = _logits(q_GMCK, self.k_cmp_NGK[:blocks])
        logits_GMCN.masked_fill_(~ended_CN, torch.finfo(logits_GMCN.dtype).min)
        p_GCN = logits_GMCN.softmax(-1).masked_fill_(~ended_CN, 0).sum(1)

        block_GCn = select_blocks(p_GCN, query_C1, cfg)
        inside_l = torch.arange(cfg.sel_block, device=q_GMCK.device)
        token_GCnl = block_GCn[..., None] * cfg.sel_block + inside_l
        unused = (block_GCn[..., None] < 0) | (token_GCnl >= len(self.k_TGK))
        return token_GCnl.masked_fill(unused, -1).flatten(-2)

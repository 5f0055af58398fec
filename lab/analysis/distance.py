"""How far back each head looks: its attention by distance, from the queries and keys of a forward.

The distance of a key is the number of tokens from it to the query. Bucket 0 is the query itself,
and bucket b >= 1 holds the distances 2^(b-1) to 2^b - 1. For each head, a query's probabilities are
summed by bucket and averaged over the queries, and so is its mean distance, sum of p * distance.
Documents of packed rows are apart, as in attention. Nothing of size [T, T] exists: the softmax is
summed over tiles of keys with a running maximum, as FlashAttention does.

Letters: T queries, the last ones of S tokens; C queries of a chunk, s keys of a tile, H heads,
G key/value heads, M = H/G query heads of each, K head dimension, E buckets and one more.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from base.machine import rounds
from data.order import GOLDEN, MASK, mix
from lab.analysis.activations import NotMeasurable, hooked
from model import Decoder, Device, ModelConfig, Rope, StandardAttention, wide

BUCKETS = 40  # distances below 2^39
CHUNK = 64  # queries
LOWEST = -1e30  # a running maximum before the first key: finite, because inf - inf is nan

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


def has_distances(config: ModelConfig) -> bool:
    """Whether the heads of the model have one softmax each over the tokens before."""
    return config.attention.name == "standard"


class Profile(NamedTuple):
    """How far back the heads of a layer look.

    queries     over which the figures are averaged
    buckets     names of the buckets, up to the longest document
    share       for each head, the share of its attention in each bucket: they sum to 1
    distance    for each head, the mean distance in tokens
    """

    queries: int
    buckets: list[str]
    share: list[list[float]]
    distance: list[float]


class LayerDistances:
    """Sums of a layer over the queries of as many forwards as there are, in float64.

    every: of so many chunks of 64 queries, in the order in which they come, one is measured, which
    a fixed hash chooses. Time falls with it.

    NotMeasurable unless attention is standard.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device = "cpu",
        every: int = 1,
    ):
        if not has_distances(config):
            raise NotMeasurable(
                f"{config.attention.name} attention has no single softmax over the tokens before: "
                "distances are those of standard attention"
            )
        self.every = every
        self.chunks = 0  # that came, measured or not
        self.longest = 0  # tokens of the longest document
        self.queries = 0  # that were measured
        heads = config.num_heads
        self.share_HB = torch.zeros(heads, BUCKETS, device=device, dtype=torch.float64)
        self.distance_H = torch.zeros(heads, device=device, dtype=torch.float64)

    def starts(self, first: int, stop: int) -> Iterator[int]:
        """Where the chunks of the queries first..stop-1 begin that are to be measured."""
        self.longest = max(self.longest, stop)
        for start in rounds(range(first, stop, CHUNK)):
            group, place = divmod(self.chunks, self.every)
            # at random, because rows of equal length come round to the same positions
            if place == mix((group + 1) * GOLDEN & MASK) % self.every:
                yield start
            self.chunks += 1

    def add(self, sums_GMCE: Tensor) -> None:
        """What `_bucket_sums` returned for C queries."""
        total_GMC1 = sums_GMCE[..., :-1].sum(-1, keepdim=True)
        means_HE = (sums_GMCE / total_GMC1).sum(2, dtype=torch.float64).flatten(0, 1)

        self.queries += sums_GMCE.shape[2]
        self.share_HB[:, : means_HE.shape[1] - 1] += means_HE[:, :-1]
        self.distance_H += means_HE[:, -1]

    def result(self) -> Profile:
        """The means over all queries. ValueError if they are not finite."""
        if not self.distance_H.isfinite().all():
            raise ValueError(
                "attention is not finite: use bfloat16, or check the weights of this checkpoint"
            )
        count = bucket_of(self.longest - 1) + 1
        share_HB = self.share_HB[:, :count] / self.queries
        return Profile(
            queries=self.queries,
            buckets=[bucket_name(bucket) for bucket in range(count)],
            share=share_HB.tolist(),
            distance=(self.distance_H / self.queries).tolist(),
        )


@contextlib.contextmanager
def measured(model: Decoder, totals: dict[int, LayerDistances]) -> Iterator[None]:
    """Inside, every forward adds the attention of its layers to their totals.

    It runs after the layer's own attention, from the same inputs: queries and keys are projected
    again.
    """
    with contextlib.ExitStack() as hooks:
        for layer, of_layer in totals.items():
            hooks.enter_context(_measuring(model.layers[layer].attention, of_layer))
        yield


def _measuring(
    attention: StandardAttention, totals: LayerDistances
) -> contextlib.AbstractContextManager:
    def add(inputs: tuple, _output: Tensor) -> None:
        with torch.no_grad():
            _measure(attention, totals, *inputs)

    return hooked(attention, add)


def _measure(
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

    for q_THK, k_SGK in rounds(list(texts)):
        S = len(k_SGK)
        first = S - len(q_THK)
        for start in totals.starts(first, S):
            q_GMCK = _heads_first(q_THK[start - first :][:CHUNK], k_SGK)
            totals.add(_bucket_sums(q_GMCK, start, k_SGK))


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
    k_SGK: Tensor,
) -> Tensor:
    """sums [G, M, C, buckets + 1] of exp(logit) of the queries start, start + 1, ...: by bucket,
    and last times the distance. They have a common factor for each query.
    """
    G, M, C, _ = q_GMCK.shape
    stop = start + C
    query_C1 = torch.arange(start, stop, device=q_GMCK.device)[:, None]
    sums_GMCE = q_GMCK.new_zeros(G, M, C, bucket_of(stop - 1) + 2)
    highest_GMC1 = q_GMCK.new_full((G, M, C, 1), LOWEST)

    for tile in _tiles(start, stop, _tile_size(q_GMCK)):
        p_GMCs = _logits(q_GMCK, k_SGK[tile])
        last = tile.stop - 1
        nearest = start - last
        farthest = stop - 1 - tile.start
        key_s = torch.arange(tile.start, tile.stop, device=p_GMCs.device)
        distance_Cs = query_C1 - key_s
        if nearest < 0:
            p_GMCs.masked_fill_(distance_Cs < 0, -torch.inf)

        higher_GMC1 = torch.maximum(highest_GMC1, p_GMCs.amax(-1, keepdim=True))
        p_GMCs.sub_(higher_GMC1).exp_()
        sums_GMCE.mul_((highest_GMC1 - higher_GMC1).exp_())
        highest_GMC1 = higher_GMC1

        buckets = range(bucket_of(max(0, nearest)), bucket_of(farthest) + 1)
        _add_by_bucket(sums_GMCE, p_GMCs, distance_Cs, buckets)
        sums_GMCE[..., -1] += p_GMCs @ (last - key_s).to(p_GMCs.dtype)
        sums_GMCE[..., -1] += p_GMCs.sum(-1) * (query_C1[:, 0] - last)
    return sums_GMCE


def _add_by_bucket(
    sums_GMCE: Tensor,
    p_GMCs: Tensor,
    distance_Cs: Tensor,
    buckets: range,
) -> None:
    """Add p, whose distances lie in the buckets, to the sums of `_bucket_sums`."""
    if len(buckets) == 1:
        sums_GMCE[..., buckets[0]] += p_GMCs.sum(-1)
        return
    for bucket in buckets:
        low, stop = bucket_bounds(bucket)
        outside_Cs = (distance_Cs < low) | (distance_Cs >= stop)
        sums_GMCE[..., bucket] += p_GMCs.masked_fill(outside_Cs, 0).sum(-1)


def _tile_size(q_GMCK: Tensor) -> int:
    """Keys of a tile."""
    on_cpu = q_GMCK.device.type == "cpu"
    elements = CPU_TILE if on_cpu else GPU_TILE
    return max(1, elements // q_GMCK[..., 0].numel())


def _tiles(start: int, stop: int, size: int) -> Sequence[slice]:
    """The keys that the queries start..stop-1 may see, in tiles of at most `size`, the largest
    first, because a planner visits only a few.

    They are cut so that the keys of a tile lie in one bucket, and are seen, for all these queries,
    except near a bucket's edge.
    """
    edges = [2**b for b in range((stop - start).bit_length(), stop.bit_length())]
    cuts = {0, stop, start + 1}
    cuts |= {start + 1 - edge for edge in edges}  # of the first query's buckets
    cuts |= {stop - edge for edge in edges}  # of the last one's
    inside = sorted(cut for cut in cuts if 0 <= cut <= stop)

    tiles = []
    for first, end in itertools.pairwise(inside):
        tiles += [slice(x, min(x + size, end)) for x in range(first, end, size)]
    tiles.sort(key=lambda tile: tile.start - tile.stop)
    return rounds(tiles)

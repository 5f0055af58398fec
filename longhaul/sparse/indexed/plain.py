"""Indexed attention in plain PyTorch: nothing of size [T, T] exists, but what is not read is masked
and not skipped, so its time grows with the square of the length.

The letters are those of layer.py.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.machine import platform
from model import CHUNK_LOGITS, Device, Rope, rotate, wide

TILE_KEYS = 2**20  # elements of keys that are converted at once: 4 MiB in fp32


def rotate_first(x_BThE: Tensor, rope: Rope) -> Tensor:
    """Each head with as many of its first elements rotated as there are angles for."""
    turning = 2 * rope[0].shape[-1]
    turned = rotate(x_BThE[..., :turning], *rope)
    return torch.cat((turned, x_BThE[..., turning:]), dim=-1)


def pooled_keys(k_BT1E: Tensor, r: int) -> Tensor:
    """[B, N, E]: the mean of the indexer's keys over each whole block, summed in fp32."""
    B, T, _, E = k_BT1E.shape
    N = T // r
    blocks_BNrE = k_BT1E[:, : N * r].reshape(B, N, r, E)
    return blocks_BNrE.to(wide(k_BT1E.dtype)).mean(2).to(k_BT1E.dtype)


def block_scores(q_BChE: Tensor, k_BNE: Tensor) -> Tensor:
    """I [B, C, N] in fp32 or wider; no score is negative."""
    dtype = wide(q_BChE.dtype)
    k_BEN = k_BNE.to(dtype).mT
    B, C, _, E = q_BChE.shape
    total_BCN = torch.zeros((B, C, k_BNE.shape[1]), dtype=dtype, device=q_BChE.device)
    for q_BCE in q_BChE.to(dtype).unbind(2):
        total_BCN += (q_BCE @ k_BEN).relu_()
    return total_BCN.mul_(E**-0.5)


def block_ranks(scores_BCN: Tensor, query_C1: Tensor, r: int) -> Tensor:
    """int64 [B, C, N] that orders blocks by score and, on a tie, the lower index first; -1 for a
    block that does not end before the query.

    Scores that are not negative order like the bits of their fp32 values.
    """
    block_N = torch.arange(scores_BCN.shape[-1], device=scores_BCN.device)
    bits_BCN = scores_BCN.float().contiguous().view(torch.int32).long()
    rank_BCN = (bits_BCN << 31) + (2**31 - 1 - block_N)
    return torch.where(block_N * r + r <= query_C1, rank_BCN, -1)


def least_rank(rank_BCN: Tensor, most: int) -> Tensor:
    """[B, C]: a block is chosen if its rank is at least this; so `most` blocks are, or all."""
    if rank_BCN.shape[-1] <= most:
        return rank_BCN.new_zeros(rank_BCN.shape[:-1])
    return rank_BCN.topk(most).values[..., -1].clamp(min=0)


def readable_keys(
    chosen_BCN: Tensor,
    query_C1: Tensor,
    r: int,
    tokens: int,
) -> Tensor:
    """Whether each of the first `tokens` tokens is in a chosen block, or in the query's own and not
    after it: [B, C, tokens].
    """
    key = torch.arange(tokens, device=query_C1.device)
    tail = (key <= query_C1) & (key >= query_C1 // r * r)
    N = chosen_BCN.shape[-1]
    read = F.pad(chosen_BCN.repeat_interleave(r, -1), (0, tokens - N * r))
    return read | tail


def by_group(x_BCHK: Tensor, G: int) -> Tensor:
    """[B, G, M*C, K] in fp32 or wider: the query heads of a group one after another."""
    x_BCGMK = x_BCHK.to(wide(x_BCHK.dtype)).unflatten(2, (G, -1))
    return x_BCGMK.permute(0, 2, 3, 1, 4).flatten(2, 3)


def keys_by_group(k_BSGK: Tensor) -> Tensor:
    """[B, G, S, K] in fp32 or wider, contiguous: a product would copy it inside."""
    return k_BSGK.to(wide(k_BSGK.dtype)).transpose(1, 2).contiguous()


def key_tiles(k_BSGK: Tensor) -> Iterator[slice]:
    """Tiles of the keys, of which each is converted when it is read: whole rows of 131,072 tokens
    with 8 KV heads of 128 would take 512 MiB in fp32.
    """
    B, S, G, K = k_BSGK.shape
    size = max(1, TILE_KEYS // (B * G * K))
    for start in platform().tiles(range(0, S, size)):
        yield slice(start, min(start + size, S))


def by_token(x_BGRK: Tensor, C: int) -> Tensor:
    """The inverse of `by_group`: [B, C, H, K]."""
    x_BGMCK = x_BGRK.unflatten(2, (-1, C))
    return x_BGMCK.permute(0, 3, 1, 2, 4).flatten(2, 3)


def masked_logits(q_BCHK: Tensor, k_BSGK: Tensor, visible_BCS: Tensor) -> Tensor:
    """q k / sqrt(K) [B, G, M, C, S] in fp32 or wider, -inf where a key is not visible."""
    _, C, _, K = q_BCHK.shape
    _, S, G, _ = k_BSGK.shape
    q_BGRK = by_group(q_BCHK, G)
    logits_BGRS = q_BGRK.new_empty((*q_BGRK.shape[:3], S))
    for keys in key_tiles(k_BSGK):
        k_BGsK = keys_by_group(k_BSGK[:, keys])
        torch.matmul(q_BGRK, k_BGsK.mT, out=logits_BGRS[..., keys])
    logits_BGMCS = logits_BGRS.mul_(K**-0.5).unflatten(2, (-1, C))
    return logits_BGMCS.masked_fill_(~visible_BCS[:, None, None], -torch.inf)


def weighted_values(p_BGMCS: Tensor, v_BSGK: Tensor) -> Tensor:
    """p v [B, C, H, K] in fp32 or wider."""
    p_BGRS = p_BGMCS.flatten(2, 3)
    o_BGRK = p_BGRS.new_zeros((*p_BGRS.shape[:3], v_BSGK.shape[-1]))
    for keys in key_tiles(v_BSGK):
        o_BGRK += p_BGRS[..., keys] @ keys_by_group(v_BSGK[:, keys])
    return by_token(o_BGRK, p_BGMCS.shape[3])


def softmax_(logits: Tensor) -> Tensor:
    """Overwrites logits by their softmax over the last dimension; returns their log-sum-exp. (That
    of PyTorch holds a second tensor of their size.)
    """
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest).exp_()
    total = logits.sum(-1, keepdim=True)
    logits.div_(total)
    return (largest + total.log_()).squeeze(-1)


def log_sum_of_chosen(scores_BCN: Tensor, chosen_BCN: Tensor) -> Tensor:
    """[B, C]: the log-sum-exp of the scores of the chosen blocks; -inf if none is."""
    others_BCN = ~chosen_BCN
    largest_BC1 = scores_BCN.masked_fill(others_BCN, 0.0).amax(-1, keepdim=True)
    shares_BCN = (scores_BCN - largest_BC1).exp_().masked_fill_(others_BCN, 0.0)
    return (largest_BC1 + shares_BCN.sum(-1, keepdim=True).log_()).squeeze(-1)


def block_sums(x_BCS: Tensor, r: int) -> Tensor:
    """[B, C, N]: the sum over each whole block of tokens."""
    N = x_BCS.shape[-1] // r
    return x_BCS[..., : N * r].unflatten(-1, (N, r)).sum(-1)


def block_target(p_BGMCS: Tensor, chosen_BCN: Tensor, r: int) -> Tensor:
    """[B, C, N]: the probability of each chosen block, summed over heads and normalised; 0 for a
    query that gives its chosen blocks none.
    """
    mass_BCN = block_sums(p_BGMCS.sum((1, 2)), r).masked_fill_(~chosen_BCN, 0.0)
    total_BC1 = mass_BCN.sum(-1, keepdim=True)
    return mass_BCN.div_(total_BC1.clamp(min=torch.finfo(mass_BCN.dtype).tiny))


class IndexedInputs(NamedTuple):
    """What attention and the indexer read; of a call, or of some of its queries."""

    q_BTHK: Tensor
    k_BSGK: Tensor
    v_BSGK: Tensor
    q_BThE: Tensor  # the indexer's queries
    k_BNE: Tensor  # its keys of the N = S // r whole blocks

    def of(self, chunk: "QueryChunk") -> "IndexedInputs":
        return IndexedInputs(
            self.q_BTHK[:, chunk.queries],
            self.k_BSGK[:, chunk.keys],
            self.v_BSGK[:, chunk.keys],
            self.q_BThE[:, chunk.queries],
            self.k_BNE[:, chunk.blocks],
        )


class IndexedOutputs(NamedTuple):
    """What the forward fills; of a call, or of some of its queries."""

    o_BTHK: Tensor
    kl_BT: Tensor  # the indexer's loss in nats, 0 if it is not computed
    lse_BTH: Tensor  # log-sum-exp of attention
    log_sum_BT: Tensor  # log-sum-exp of the chosen scores
    least_BT: Tensor  # `least_rank`

    @classmethod
    def empty(cls, q_BTHK: Tensor) -> "IndexedOutputs":
        B, T, H, _ = q_BTHK.shape
        dtype = wide(q_BTHK.dtype)
        return cls(
            o_BTHK=q_BTHK.new_empty(q_BTHK.shape),
            kl_BT=q_BTHK.new_zeros((B, T), dtype=dtype),
            lse_BTH=q_BTHK.new_empty((B, T, H), dtype=dtype),
            log_sum_BT=q_BTHK.new_zeros((B, T), dtype=dtype),
            least_BT=q_BTHK.new_empty((B, T), dtype=torch.int64),
        )

    def of(self, chunk: "QueryChunk") -> "IndexedOutputs":
        return IndexedOutputs(*(x[:, chunk.queries] for x in self))


class QueryChunk(NamedTuple):
    """Some queries of a call, and the keys and blocks that they may see."""

    queries: slice
    keys: slice
    blocks: slice

    @property
    def size(self) -> int:
        """Logits of one head."""
        return (self.queries.stop - self.queries.start) * self.keys.stop

    def positions(self, device: Device) -> Tensor:
        """[C, 1]: those of the queries in the document, which are the last of the keys'."""
        first = self.keys.stop - (self.queries.stop - self.queries.start)
        return torch.arange(first, self.keys.stop, device=device)[:, None]


def query_chunks(inputs: IndexedInputs, r: int) -> list[QueryChunk]:
    """The chunks of the queries, which are the last T of the S positions."""
    B, T, H, _ = inputs.q_BTHK.shape
    S = inputs.k_BSGK.shape[1]
    size = min(256, max(16, CHUNK_LOGITS // (B * H * S)))
    chunks = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        seen = S - T + stop
        chunks.append(QueryChunk(slice(start, stop), slice(0, seen), slice(0, seen // r)))
    return platform().parts(chunks, size=lambda chunk: chunk.size)


def forward(
    inputs: IndexedInputs,
    r: int,
    most: int,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    """Fills the outputs of `indexed_forward`."""
    for chunk in query_chunks(inputs, r):
        position_C1 = chunk.positions(inputs.q_BTHK.device)
        _forward_chunk(inputs.of(chunk), position_C1, r, most, learns, outputs.of(chunk))


def _forward_chunk(
    inputs: IndexedInputs,
    position_C1: Tensor,
    r: int,
    most: int,
    learns: bool,
    outputs: IndexedOutputs,
) -> None:
    """Fills the outputs of some queries."""
    q_BCHK, k_BSGK, v_BSGK, q_BChE, k_BNE = inputs
    scores_BCN = block_scores(q_BChE, k_BNE)
    rank_BCN = block_ranks(scores_BCN, position_C1, r)
    outputs.least_BT.copy_(least_rank(rank_BCN, most))
    chosen_BCN = rank_BCN >= outputs.least_BT[..., None]
    del rank_BCN

    visible_BCS = readable_keys(chosen_BCN, position_C1, r, k_BSGK.shape[1])
    p_BGMCS = masked_logits(q_BCHK, k_BSGK, visible_BCS)
    lse_BGMC = softmax_(p_BGMCS)
    outputs.lse_BTH.copy_(lse_BGMC.flatten(1, 2).transpose(1, 2))
    outputs.o_BTHK.copy_(weighted_values(p_BGMCS, v_BSGK))

    if learns and k_BNE.shape[1]:
        log_sum_BC = log_sum_of_chosen(scores_BCN, chosen_BCN)
        target_BCN = block_target(p_BGMCS, chosen_BCN, r)
        outputs.kl_BT.copy_(_divergence(target_BCN, scores_BCN, log_sum_BC))
        outputs.log_sum_BT.copy_(log_sum_BC)


def _divergence(target_BCN: Tensor, scores_BCN: Tensor, log_sum_BC: Tensor) -> Tensor:
    """[B, C]: the sum over blocks of target * (log target - log softmax of the scores); where the
    target is 0, a block adds 0.
    """
    log_share_BCN = scores_BCN - log_sum_BC[..., None]
    log_share_BCN.masked_fill_(target_BCN == 0, 0.0)
    return (torch.xlogy(target_BCN, target_BCN) - target_BCN * log_share_BCN).sum(-1)


def backward(
    do_BTHK: Tensor | None,
    dkl_BT: Tensor | None,
    inputs: IndexedInputs,
    r: int,
    most: int,
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """Fills and adds to the gradients of `indexed_backward`."""
    for chunk in query_chunks(inputs, r):
        of_chunk = [None if x is None else x[:, chunk.queries] for x in (do_BTHK, dkl_BT)]
        position_C1 = chunk.positions(inputs.q_BTHK.device)
        _backward_chunk(
            *of_chunk, inputs.of(chunk), position_C1, r, saved.of(chunk), grads.of(chunk)
        )


def with_gradients(
    do_BTHK: Tensor | None, dkl_BT: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Attention's inputs and the indexer's: those without a gradient as if they had no token."""
    of_model = [x if do_BTHK is not None else x[:, :0] for x in inputs[:3]]
    of_indexer = [x if dkl_BT is not None else x[:, :0] for x in inputs[3:]]
    return of_model, of_indexer


def wide_zeros(x: Tensor) -> Tensor:
    """Zeros to sum a gradient in, in fp32 or wider."""
    return x.new_zeros(x.shape, dtype=wide(x.dtype))


def _backward_chunk(
    do_BCHK: Tensor | None,
    dkl_BC: Tensor | None,
    inputs: IndexedInputs,
    position_C1: Tensor,
    r: int,
    saved: IndexedOutputs,
    grads: IndexedInputs,
) -> None:
    """Fills the gradients of some queries, and adds to those of the keys that they see."""
    q_BCHK, k_BSGK, v_BSGK, q_BChE, k_BNE = inputs
    scores_BCN = block_scores(q_BChE, k_BNE)
    chosen_BCN = block_ranks(scores_BCN, position_C1, r) >= saved.least_BT[..., None]
    visible_BCS = readable_keys(chosen_BCN, position_C1, r, k_BSGK.shape[1])
    p_BGMCS = masked_logits(q_BCHK, k_BSGK, visible_BCS)
    lse_BGMC = saved.lse_BTH.transpose(1, 2).unflatten(1, p_BGMCS.shape[1:3])
    p_BGMCS.sub_(lse_BGMC[..., None]).exp_()

    if dkl_BC is not None and k_BNE.shape[1]:
        target_BCN = block_target(p_BGMCS, chosen_BCN, r)
        share_BCN = scores_BCN.sub_(saved.log_sum_BT[..., None]).exp_()
        # a query without a target has no loss
        without = ~chosen_BCN | (target_BCN.sum(-1, keepdim=True) == 0)
        dscores_BCN = share_BCN.masked_fill_(without, 0.0).sub_(target_BCN).mul_(dkl_BC[..., None])
        _add_score_gradients(dscores_BCN, q_BChE, k_BNE, grads)
        del target_BCN, without
    del scores_BCN, chosen_BCN, visible_BCS
    if do_BCHK is not None:
        _add_attention_gradients(do_BCHK, saved.o_BTHK, p_BGMCS, inputs, grads)


def _add_score_gradients(
    dscores_BCN: Tensor,
    q_BChE: Tensor,
    k_BNE: Tensor,
    grads: IndexedInputs,
) -> None:
    """Gradients of the indexer's queries and keys from those of the scores."""
    dtype = dscores_BCN.dtype
    q_BChE, k_BNE = q_BChE.to(dtype), k_BNE.to(dtype)
    dscores_BCN.mul_(q_BChE.shape[-1] ** -0.5)
    for head, q_BCE in enumerate(q_BChE.unbind(2)):
        d_BCN = dscores_BCN.masked_fill((q_BCE @ k_BNE.mT) <= 0, 0.0)
        grads.q_BThE[:, :, head] = d_BCN @ k_BNE
        grads.k_BNE.add_(d_BCN.mT @ q_BCE)


def _add_attention_gradients(
    do_BCHK: Tensor,
    o_BCHK: Tensor,
    p_BGMCS: Tensor,
    inputs: IndexedInputs,
    grads: IndexedInputs,
) -> None:
    """Gradients of q, k and v from the probabilities."""
    _, G, _, C, _ = p_BGMCS.shape
    do, o, q = (by_group(x, G) for x in (do_BCHK, o_BCHK, inputs.q_BTHK))
    delta_BGR1 = (do * o).sum(-1, keepdim=True)
    p_BGRS = p_BGMCS.flatten(2, 3)

    dq_BGRK = torch.zeros_like(q)
    for keys in key_tiles(inputs.k_BSGK):
        k, v = (keys_by_group(x[:, keys]) for x in (inputs.k_BSGK, inputs.v_BSGK))
        p = p_BGRS[..., keys]
        grads.v_BSGK[:, keys].add_((p.mT @ do).transpose(1, 2))
        ds = (do @ v.mT).sub_(delta_BGR1).mul_(p).mul_(q.shape[-1] ** -0.5)
        dq_BGRK += ds @ k
        grads.k_BSGK[:, keys].add_((ds.mT @ q).transpose(1, 2))
    grads.q_BTHK.copy_(by_token(dq_BGRK, C))

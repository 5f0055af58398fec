"""Dense float64 indexed attention, written straight from the equations: the truth that every faster
version is tested against.

One document, nothing chunked, every probability matrix whole: meant for at most a few thousand
tokens. Gradients come from autograd. Imports torch only.

Letters: B batch, T tokens, H query heads, G KV heads, K head dim, h query heads of the indexer, E
head dim of the indexer, N whole blocks (block b covers tokens b*r .. b*r+r-1).
"""

import torch


def pooled(k_BTE, r):
    """kbar[b]: the mean of the indexer's keys over each whole block, [B, N, E]."""
    N = k_BTE.shape[1] // r
    blocks = [k_BTE[:, b * r : b * r + r].double().mean(1, keepdim=True) for b in range(N)]
    return torch.cat([k_BTE[:, :0].double(), *blocks], 1)


def scores(q_BThE, kbar_BNE):
    """I[t, b] = sum over heads of relu(q[t] . kbar[b]) / sqrt(E), [B, T, N]."""
    products = torch.einsum("bthe,bne->bhtn", q_BThE.double(), kbar_BNE.double())
    return products.relu().sum(1) / q_BThE.shape[-1] ** 0.5


def choose(scores_BTN, r, budget):
    """chosen[b, t, n]: the budget / r candidates with the best scores, the lower index on a tie."""
    B, T, N = scores_BTN.shape
    chosen = torch.zeros(B, T, N, dtype=torch.bool)
    for row in range(B):
        for t in range(T):
            found = scores_BTN[row, t].tolist()
            order = sorted(range(t // r), key=lambda b: (-found[b], b))
            chosen[row, t, order[: budget // r]] = True
    return chosen


def probabilities(q_BTHK, k_BTGK, chosen_BTN, r):
    """softmax(q k / sqrt(K)) over the chosen blocks and the query's own unfinished one: [B, H, T,
    T]. All heads share the choice.
    """
    T = q_BTHK.shape[1]
    group = q_BTHK.shape[2] // k_BTGK.shape[2]
    k = k_BTGK.double().repeat_interleave(group, dim=2)
    logits_BHTT = torch.einsum("bthk,bshk->bhts", q_BTHK.double(), k) / q_BTHK.shape[-1] ** 0.5

    t, u = torch.arange(T)[:, None], torch.arange(T)[None, :]
    tail_TT = (u <= t) & (u // r == t // r)
    read_BTT = torch.zeros(len(chosen_BTN), T, T, dtype=torch.bool)
    N = chosen_BTN.shape[-1]
    read_BTT[..., : N * r] = chosen_BTN.repeat_interleave(r, -1)
    visible_BTT = read_BTT | tail_TT
    return logits_BHTT.masked_fill(~visible_BTT[:, None], -torch.inf).softmax(-1)


def attention(q_BTHK, k_BTGK, v_BTGK, chosen_BTN, r):
    """o [B, T, H, K] over the keys that each query reads; no gradient passes through the choice."""
    p_BHTT = probabilities(q_BTHK, k_BTGK, chosen_BTN, r)
    group = q_BTHK.shape[2] // k_BTGK.shape[2]
    return torch.einsum("bhts,bshk->bthk", p_BHTT, v_BTGK.double().repeat_interleave(group, 2))


def divergence(q_BTHK, k_BTGK, scores_BTN, chosen_BTN, r):
    """KL(target || softmax of the scores) of each token over its chosen blocks, [B, T]; 0 where
    none is chosen.

    The target is the attention's probability of each block, summed over heads and normalised over
    the chosen blocks; it is a constant. In the dense warm-up all candidates count as chosen.
    """
    N = chosen_BTN.shape[-1]
    p_BHTT = probabilities(q_BTHK, k_BTGK, chosen_BTN, r).detach()
    mass_BTN = p_BHTT.sum(1)[..., : N * r].unflatten(-1, (N, r)).sum(-1)

    total = []
    for mass_TN, scores_TN, chosen_TN in zip(mass_BTN, scores_BTN, chosen_BTN, strict=True):
        for mass_N, scores_N, chosen_N in zip(mass_TN, scores_TN, chosen_TN, strict=True):
            target = mass_N[chosen_N] / mass_N[chosen_N].sum()
            total.append((target * (target.log() - scores_N[chosen_N].log_softmax(-1))).sum())
    return torch.stack(total).view(scores_BTN.shape[:2])

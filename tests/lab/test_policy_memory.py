"""The memory of a policy's statistics next to full logits."""

import math

import pytest
import torch

from footprint.kernels.measure import peak_bytes
from longhaul.vocab import vocab_stats

CPU = torch.device("cpu")
N = 512
D = 64
V = 151_936


def full(hidden_ND, weight_VD, target_N, reference):
    """log p, self-certainty and the exact KL through all logits."""
    logp_NV = (hidden_ND @ weight_VD.T).log_softmax(1)
    logq_NV = (reference[0] @ reference[1].T).log_softmax(1)
    logprob_N = logp_NV.gather(1, target_N[:, None])[:, 0]
    certainty_N = -logp_NV.mean(1) - math.log(len(weight_VD))
    return logprob_N, certainty_N, (logp_NV.exp() * (logp_NV - logq_NV)).sum(1)


def tiled(hidden_ND, weight_VD, target_N, reference):
    stats = vocab_stats(hidden_ND, weight_VD, target_N, reference=reference)
    return stats.logprob, stats.self_certainty, stats.kl_ref


def forward_and_backward(statistics, hidden_ND, weight_VD, target_N, reference) -> torch.Tensor:
    """The gradient of the hidden states; the head is frozen."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    logprob_N, certainty_N, kl_N = statistics(hidden_ND, weight_VD, target_N, reference)
    (certainty_N + kl_N - logprob_N).sum().backward()
    return hidden_ND.grad


@pytest.mark.slow
def test_statistics_take_fifty_times_less_memory_than_full_logits():
    """Forward and backward at the vocabulary of Qwen, head frozen."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND, other_ND = torch.randn(2, N, D, generator=generator)
    weight_VD = torch.randn(V, D, generator=generator) / D**0.5
    target_N = torch.randint(V, (N,), generator=generator)
    inputs = hidden_ND, weight_VD, target_N, (other_ND, weight_VD.flip(0))

    gradients = []
    peak_full, peak_tiled = (
        peak_bytes(lambda run=run: gradients.append(forward_and_backward(run, *inputs)), CPU)
        for run in (full, tiled)
    )
    assert (gradients[1] - gradients[0]).norm() <= 1e-4 * gradients[0].norm()
    assert peak_tiled * 50 <= peak_full

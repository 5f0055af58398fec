"""The probabilities that train a policy, against float64. The logits are as large as in a trained
model: the likeliest tokens have probabilities of up to nearly 1.
"""

import pytest
import torch

from lab.posttrain.policy import statistics
from longhaul.vocab.check import problem

PEAKED = 6.0  # standard deviation of the logits
MEAN = 1e-4  # the largest mean and single error of a probability
LARGEST = 2e-3


def errors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The errors of ours, and of logits in the dtype of the weight."""
    hidden_ND, weight_VD, labels_N = problem(96, 32, 20_000, dtype, torch.device("cpu"))
    hidden_ND = hidden_ND * PEAKED
    exact_NV = (hidden_ND.double() @ weight_VD.double().T).log_softmax(1)
    labels_N = likely_labels(exact_NV, labels_N.clamp(min=0))
    exact_N = exact_NV.gather(1, labels_N[:, None])[:, 0].exp()

    micro = dict(scored_n=torch.arange(96), target_n=labels_N)
    ours_N = statistics(hidden_ND, weight_VD, micro, temperature=1.0).logprob.exp()
    rounded_NV = (hidden_ND @ weight_VD.T).float().log_softmax(1)
    rounded_N = rounded_NV.gather(1, labels_N[:, None])[:, 0].exp()
    found = {"ours": ours_N, "rounded": rounded_N}
    return {name: (found_N.double() - exact_N).abs() for name, found_N in found.items()}


def likely_labels(logprob_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Of every four tokens three with a likely label, as a policy draws them: the first, second or
    third of its distribution.
    """
    likeliest_N3 = logprob_NV.topk(3, dim=1).indices
    place_N = torch.arange(len(labels_N)) % 4
    likely_N = likeliest_N3.gather(1, place_N.clamp(max=2)[:, None])[:, 0]
    return torch.where(place_N < 3, likely_N, labels_N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_are_those_of_float64(dtype):
    ours_N = errors(dtype)["ours"]
    assert ours_N.mean() <= MEAN
    assert ours_N.max() <= LARGEST


def test_in_bf16_they_are_four_times_as_exact_as_those_of_logits_in_bf16():
    found = errors(torch.bfloat16)
    assert found["ours"].mean() < found["rounded"].mean() / 4

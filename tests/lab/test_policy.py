"""The policy's loss and gradients against float64 with full logits, and in any micro-batches."""

import dataclasses
import functools
import math

import pytest
import torch

from lab.posttrain import policy
from lab.posttrain.policy import Group, PolicyLoss, PolicyObjective, Response
from longhaul import dist, kernels, step
from longhaul.config import TrainConfig
from longhaul.vocab import vocab_stats
from model import Decoder, ModelConfig
from tests import oracle
from tests.ranks import run_ranks

V = 211
CONFIG = ModelConfig.preset(
    "tiny", vocab_size=V, num_layers=2, hidden_size=64, num_heads=4, ffn_size=96, init_std=0.1
)
SETTINGS = dict(kl_coef=0.3, temperature=0.7, max_response_length=9)


@pytest.fixture(scope="module")
def models() -> tuple[Decoder, Decoder]:
    """A policy and its reference."""
    return kernels.decoder(CONFIG, seed=1), kernels.decoder(CONFIG, seed=2).requires_grad_(False)


def groups_of(seed: int = 0, groups: int = 3, old: bool = True) -> list[Group]:
    """Groups of four responses of 1 to 9 tokens, with the log-probabilities of an older policy."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(V, (length,), generator=generator)

    found = []
    for index in range(groups):
        lengths = torch.randint(1, 10, (4,), generator=generator).tolist()
        advantage = policy.group_advantage(torch.rand(4, generator=generator))
        logprobs = [-3 - 4 * torch.rand(length, generator=generator) for length in lengths]
        responses = [
            Response(tokens(length), float(a), logprob if old else None)
            for length, a, logprob in zip(lengths, advantage, logprobs)
        ]
        found.append(Group(tokens(5 + index), responses))
    return found


# ---- truth


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().double().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }


def dense_logprobs(weights: dict, prompt: torch.Tensor, response: torch.Tensor):
    """log p [R, V] at temperature 0.7 of what predicts each response token."""
    logits_TV = oracle.decoder_logits(weights, CONFIG, torch.cat([prompt, response]))
    first = len(prompt) - 1
    return (logits_TV[first : first + len(response)] / 0.7).log_softmax(-1)


def dense_loss(groups: list[Group], weights: dict, reference: dict, settings: PolicyLoss):
    """The loss by its equation, a token at a time."""
    total = 0
    count = 0
    for group in groups:
        for response in group.responses:
            logp_RV = dense_logprobs(weights, group.prompt_P, response.tokens_R)
            logq_RV = dense_logprobs(reference, group.prompt_P, response.tokens_R)
            losses = []
            for t, token in enumerate(response.tokens_R.tolist()):
                logp, logq = logp_RV[t, token], logq_RV[t, token]
                old = logp.detach() if response.logprob_R is None else response.logprob_R[t]
                ratio = (logp - old).exp()
                bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                surrogate = min(ratio * response.advantage, bounded * response.advantage)

                kl = 0
                if settings.kl == "exact":
                    kl = (logp_RV[t].exp() * (logp_RV[t] - logq_RV[t])).sum()
                elif settings.kl == "k3":
                    kl = (logq - logp).exp() - (logq - logp) - 1
                losses.append(settings.kl_coef * kl - surrogate)

            length = len(losses)
            if settings.normalizer == "tokens":
                total, count = total + sum(losses), count + length
            elif settings.normalizer == "sequence":
                total, count = total + sum(losses) / length, count + 1
            else:
                total, count = total + sum(losses), count + settings.max_response_length
    return total / count


def loss_and_gradients(model, micros: list[dict], objective: PolicyObjective):
    """The loss of a step, and the gradients of its micro-batches."""
    model.zero_grad()
    divisor = sum(objective.weight(micro) for micro in micros).float()
    losses = [objective.loss(model, micro, divisor) for micro in micros]
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return float(sum(loss.detach() for loss in losses)), gradients


def relative(gradients: dict, truth: dict) -> float:
    """The largest relative error of a parameter's gradient."""
    return max(
        float((g - truth[name]).norm() / truth[name].norm()) for name, g in gradients.items()
    )


def test_the_weight_of_many_tokens_is_their_number():
    """bf16 cannot count past 256."""
    objective = PolicyObjective(PolicyLoss(**SETTINGS | dict(kl_coef=0.0)))
    assert objective.weight(dict(weight_n=torch.ones(1001))) == 1001


@pytest.mark.parametrize(
    "kl, normalizer, old, shared",
    [
        ("exact", "tokens", True, True),
        ("exact", "sequence", False, True),
        ("exact", "constant", True, False),
        ("k3", "tokens", False, False),
        ("k3", "constant", True, True),
        ("k1", "sequence", True, True),
    ],
)
def test_loss_and_gradients_are_those_of_the_full_logits_in_float64(
    models, monkeypatch, kl, normalizer, old, shared
):
    """The groups share a prompt, or are separate documents."""
    uneven = functools.partial(vocab_stats, token_tile=5, vocab_tile=77)
    monkeypatch.setattr(policy, "vocab_stats", uneven)
    model, reference = models
    settings = PolicyLoss(kl=kl, normalizer=normalizer, **SETTINGS)
    groups = groups_of(old=old)
    micros = [policy.micro_batch(part, "cpu", shared) for part in (groups[:2], groups[2:])]
    objective = PolicyObjective(settings, reference)
    loss, gradients = loss_and_gradients(model, micros, objective)
    assert not objective.sums.requires_grad  # they would keep each micro-batch's graph

    weights = weights_of(model)
    truth = dense_loss(groups, weights, weights_of(reference), settings)
    exact = dict(zip(weights, torch.autograd.grad(truth, list(weights.values()))))
    truth = float(truth.detach())
    assert abs(loss - truth) <= 1e-6 * max(1, abs(truth))
    assert relative(gradients, exact) <= 1e-5


# ---- advantages


def test_the_advantage_is_the_groups_own():
    reward = torch.tensor([1.0, 2.0, 4.0])
    advantage = policy.group_advantage(reward)
    spread = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    expected = [(x - 7 / 3) / (spread + 1e-6) for x in (1, 2, 4)]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rewards", [[0.7], [0.3, 0.3, 0.3], [1.0, 1.0 + 1e-9]])
def test_rewards_without_variance_have_no_advantage(rewards):
    reward = torch.tensor(rewards, dtype=torch.float64)
    assert policy.no_variance(reward) and policy.group_advantage(reward).tolist() == [0] * len(
        reward
    )


# ---- any split


TRAIN = TrainConfig(
    model_size="tiny",
    vocab_size=V,
    dtype="fp32",
    model_overrides=("num_layers=2", "hidden_size=64", "ffn_size=96"),
    gradient_checkpointing="full",
)


def one_update(
    world: dist.World,
    split: list[list[int]],
    normalizer: str,
    skip: bool,
    dtype: str = "fp32",
) -> dict:
    """Loss, gradients and figures of a step over 8 groups: each list is a micro-batch, and the
    micro-batches lie one after another on the ranks.
    """
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    cfg = dataclasses.replace(TRAIN, dtype=dtype)
    state = step.build(cfg, cfg.model(), "cpu", world, mesh)
    other = dataclasses.replace(cfg, seed=5)
    reference = step.frozen(other, other.model(), "cpu", mesh)
    settings = PolicyLoss(normalizer=normalizer, **SETTINGS)
    state.objective = PolicyObjective(settings, reference)

    groups = groups_of(groups=8)
    if skip:
        groups[3] = groups[3]._replace(learned=False)
    share = len(split) // world.size
    own = split[world.rank * share : (world.rank + 1) * share]
    batch = [policy.micro_batch([groups[index] for index in part], "cpu") for part in own]
    loss = dist.all_sum(step.gradients(state, batch).clone())
    gradients = {name: whole(p.grad) for name, p in state.model.named_parameters()}
    return {"loss": float(loss), "gradients": gradients} | state.objective.figures()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def require_equal(found: dict, expected: dict):
    assert abs(found["loss"] - expected["loss"]) <= 2e-6
    assert relative(found["gradients"], expected["gradients"]) <= 1e-5
    for name in ("kl", "entropy", "clip_share", "policy_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)


EACH = [[index] for index in range(8)]


@pytest.mark.parametrize("normalizer", policy.NORMALIZERS)
def test_micro_batches_may_be_cut_anywhere(normalizer):
    expected = one_update(dist.World(), EACH, normalizer, skip=True)
    for split in ([list(range(8))], [[5, 1], [3], [0, 2, 7, 4, 6]]):
        require_equal(one_update(dist.World(), split, normalizer, True), expected)


IN_FP32 = EACH, "tokens", True
IN_BF16 = EACH, "tokens", False, "bf16"


def both_updates(world: dist.World) -> tuple[dict, dict]:
    return one_update(world, *IN_FP32), one_update(world, *IN_BF16)


def test_ranks_have_the_loss_and_the_gradients_of_one_process():
    def figures(found: dict) -> dict:
        norms = [float(gradient.norm()) for gradient in found["gradients"].values()]
        others = {name: value for name, value in found.items() if name != "gradients"}
        return others | {"norm": math.hypot(*norms)}

    expected, rounded = both_updates(dist.World())
    for found, in_bf16 in run_ranks(both_updates, 2):
        require_equal(found, expected)
        assert figures(in_bf16) == pytest.approx(figures(rounded), rel=0.02, abs=1e-3)


def test_a_group_that_is_not_learned_changes_nothing():
    with_it = one_update(dist.World(), EACH, "tokens", skip=True)
    without = one_update(dist.World(), EACH[:3] + EACH[4:], "tokens", skip=False)
    require_equal(with_it, without)


def test_log_probabilities_of_some_responses_are_no_first_update():
    (first, *rest), *_ = (group.responses for group in groups_of(old=True))
    mixed = Group(torch.tensor([1]), [first._replace(logprob_R=None), *rest])
    with pytest.raises(ValueError, match=f"1 of {1 + len(rest)} "):
        policy.micro_batch([mixed], "cpu")


def test_the_constant_is_all_responses_times_their_largest_length(models):
    """Of three groups of four, one response is left out, and a group is not learned."""
    model, reference = models
    settings = PolicyLoss(normalizer="constant", **SETTINGS)
    first, second, third = groups_of()
    first = first._replace(responses=first.responses[1:], left_out=1)
    micro = policy.micro_batch([first, second._replace(learned=False), third], "cpu")
    objective = PolicyObjective(settings, reference)
    assert int(objective.weight(micro)) == 12 * 9
    loss, gradients = loss_and_gradients(model, [micro], objective)

    weights = weights_of(model)
    learned = [first, third]
    of_learned = dense_loss(learned, weights, weights_of(reference), settings)
    truth = of_learned * 7 / 12  # of whose responses the dense loss is the mean
    exact = dict(zip(weights, torch.autograd.grad(truth, list(weights.values()))))
    assert loss == pytest.approx(float(truth.detach()), abs=1e-6)
    assert relative(gradients, exact) <= 1e-5


def test_a_reference_that_is_only_measured_changes_no_gradient(models):
    model, reference = models
    settings = PolicyLoss(**SETTINGS | {"kl_coef": 0.0})
    micro = policy.micro_batch(groups_of(), "cpu")
    measured, alone = PolicyObjective(settings, reference), PolicyObjective(settings)
    loss, gradients = loss_and_gradients(model, [micro], measured)
    expected, without = loss_and_gradients(model, [micro], alone)
    assert loss == expected
    assert all(torch.equal(gradients[name], without[name]) for name in without)

    held_back = PolicyObjective(PolicyLoss(**SETTINGS), reference)
    loss_and_gradients(model, [micro], held_back)
    kl = held_back.figures()["kl"]
    assert kl > 0.01 and measured.figures()["kl"] == kl
    assert "kl" not in alone.figures()

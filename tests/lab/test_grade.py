"""GRADE against a dense float64 version, top-k against the published method, and its objective."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from data.order import mix
from lab.posttrain import grade
from lab.posttrain.grade import GradeObjective, GradeSettings
from lab.posttrain.reward import RewardModel
from longhaul import dist, kernels, sampling, step
from longhaul.config import TrainConfig
from longhaul.exits import NumericalHalt
from longhaul.kinds import KINDS
from model import Decoder, ModelConfig
from tests.ranks import run_ranks

V = 61
B = 3
P = 4
T = 5
EOD = 7
KINDS_OF_METHOD = ["gumbel", "gumbel_legacy"]
CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=V,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    init_std=0.3,
)


def decoder(seed: int, **options) -> Decoder:
    return kernels.decoder(ModelConfig(**SHAPE | options), seed)


def reward_model(seed: int = 2, **options) -> RewardModel:
    reward = RewardModel(decoder(seed, **options))
    width = reward.body.config.hidden_size
    with torch.no_grad():
        reward.weight.copy_(torch.linspace(-1, 1, width)[None])
    return reward.requires_grad_(False)


def settings(**options) -> GradeSettings:
    given = dict(eod_id=EOD, max_new_tokens=T, gumbel_topk=V, max_steps=10) | options
    return GradeSettings(**given)


def noise_TBV(seed: int = 0, rows: int = B) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(T, rows, V).exponential_(generator=generator).log()


def given_noise(noise_TBV: torch.Tensor) -> grade.Noise:
    return lambda position, ids_BK: noise_TBV[position].gather(1, ids_BK)


def prompts(rows: int = B) -> torch.Tensor:
    return torch.randint(0, V, (rows, P), generator=torch.Generator().manual_seed(5))


def micro(rows: int = B, **options) -> dict:
    made = grade.micro_batches(prompts(rows), range(rows), 3, 0, rows, settings(**options), CPU)
    return made[0]


def run(options: GradeSettings, policy: Decoder, reference: Decoder, noise, tau: float = 0.7):
    """(response, reward, KL) of a method, whose loss is differentiated by the caller."""
    generate = grade.generate_soft if options.legacy else grade.generate_soft_topk
    response = generate(policy, reference, prompts(), noise, torch.tensor(tau), options)
    reward_B = reward_model().forward_soft(prompts(), response.soft, response.counts_BT)
    kl_B = grade.mean_of_counted(response.figures.kl, response.counts_BT)
    return response, reward_B, kl_B


def gradients(loss: torch.Tensor, model: Decoder) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], relative: float):
    """Each tensor within `relative` of the other in norm."""
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= relative * b.norm() + 1e-12, (a - b).norm() / b.norm()


# ---- the dense float64 version


def dense_loss(
    policy: Decoder,
    reference: Decoder,
    reward: RewardModel,
    prompts_BP: torch.Tensor,
    noise_TBV: torch.Tensor,
    tau: float,
    options: GradeSettings,
    k: int,
) -> torch.Tensor:
    """The mean loss, written as the equations are: whole rows, one-hot prompts, full logits."""

    def log_probabilities(model: Decoder, one_hot_BTV: torch.Tensor) -> torch.Tensor:
        x_BTD = one_hot_BTV @ model.embed.weight
        return (model.hidden(x_BTD) @ model.lm_head.weight.t()).log_softmax(-1)

    row_BTV = torch.nn.functional.one_hot(prompts_BP, V).double()
    alive_B = torch.ones(len(prompts_BP), dtype=torch.float64)
    total_kl_B = torch.zeros_like(alive_B)
    alive = []
    for noise_BV in noise_TBV.double():
        logp_BV = log_probabilities(policy, row_BTV)[:, -1]
        logq_BV = log_probabilities(reference, row_BTV.detach())[:, -1].detach()
        total_kl_B = total_kl_B + alive_B * (logp_BV.exp() * (logp_BV - logq_BV)).sum(-1)
        alive.append(alive_B)

        padding_V = torch.arange(V) >= (options.vocab_size or V)
        least_B1 = logp_BV.masked_fill(padding_V, -math.inf).topk(k).values[:, -1:]
        left_out_BV = padding_V | (logp_BV < least_B1)
        y_BV = ((logp_BV + noise_BV) / tau).masked_fill(left_out_BV, -math.inf).softmax(-1)
        token_B = y_BV.argmax(-1)
        if options.straight_through:
            y_BV = torch.nn.functional.one_hot(token_B, V) + y_BV - y_BV.detach()
        row_BTV = torch.cat([row_BTV, y_BV[:, None]], 1)
        alive_B = alive_B.masked_fill(token_B == EOD, 0)

    alive_BT = torch.stack(alive, 1)
    length_B = alive_BT.sum(1)
    hidden_BTD = reward.body.hidden(row_BTV @ reward.body.embed.weight)[:, P:]
    mean_BD = (hidden_BTD * alive_BT[..., None]).sum(1) / length_B[:, None]
    reward_B = (mean_BD @ reward.weight[0] + reward.bias).sigmoid()
    return (options.kl_coef * total_kl_B / length_B - reward_B).mean()


@pytest.mark.parametrize(
    "method, topk, ids",
    [
        ("gumbel", V, None),
        ("gumbel", 5, None),
        ("gumbel", 5, 30),
        ("ste", 5, None),
        ("ste", 0, 30),
        ("ste_legacy", V, None),
        ("ste_legacy", 0, 30),
    ],
)
def test_loss_and_gradients_are_those_of_the_dense_float64_version(method, topk, ids):
    """Also with a vocabulary of which 31 ids are padding."""
    options = settings(method=method, gumbel_topk=topk, kl_coef=0.3, vocab_size=ids)
    k = options.topk or ids or V
    given = micro(method=method)
    noise = torch.stack(
        [
            sampling.hashed_noise(given["seed_B"], position, torch.arange(V).expand(B, V))
            for position in range(T)
        ]
    )
    policy, reference = decoder(0), decoder(1)
    reward = reward_model()
    objective = GradeObjective(options, reference, reward)
    loss = objective.loss(policy, given, torch.tensor(float(B)))
    assert not objective.sums.requires_grad  # they would keep each micro-batch's graph

    exact = [decoder(seed, compute_dtype="float64").double() for seed in (0, 1)]
    reward64 = reward_model(compute_dtype="float64").double()
    tau = float(given["tau"])
    wanted = dense_loss(*exact, reward64, given["prompts_BP"], noise, tau, options, k)
    assert abs(float((loss - wanted).detach())) < 1e-6
    assert_near(gradients(loss, policy), gradients(wanted, exact[0]), 1e-5)


# ---- the published method and this one


@pytest.mark.parametrize("method", ["gumbel", "ste"])
def test_with_the_whole_vocabulary_it_is_the_published_method(method):
    policy, reference = decoder(0), decoder(1)
    noise = given_noise(noise_TBV())
    old, old_reward, old_kl = run(settings(method=f"{method}_legacy"), policy, reference, noise)
    new, reward, kl = run(settings(method=method, gumbel_topk=0), policy, reference, noise)

    assert torch.equal(new.tokens_BT, old.tokens_BT)
    torch.testing.assert_close(reward, old_reward, rtol=0, atol=1e-5)
    torch.testing.assert_close(kl, old_kl, rtol=0, atol=1e-5)
    wanted = gradients((0.1 * old_kl - old_reward).sum(), policy)
    assert_near(gradients((0.1 * kl - reward).sum(), policy), wanted, 1e-4)


def test_in_bf16_it_is_near_fp32_and_equal_models_have_no_kl():
    noise = given_noise(noise_TBV())
    options = settings(gumbel_topk=20)
    half = [decoder(seed, compute_dtype="bfloat16") for seed in (0, 1)]
    _, _, zero_B = run(options, half[0], half[0], noise)
    _, reward_B, kl_B = run(options, *half, noise)
    _, wanted_B, wanted_kl_B = run(options, decoder(0), decoder(1), noise)
    assert zero_B.abs().max() <= 1e-6
    torch.testing.assert_close(reward_B, wanted_B, rtol=0, atol=0.03)
    torch.testing.assert_close(kl_B, wanted_kl_B, rtol=0.05, atol=0.02)


# ---- the end of a document


def noise_that_ends(position: int) -> torch.Tensor:
    noise = noise_TBV()
    noise[position, 0, EOD] = 100.0
    return noise


@pytest.mark.parametrize("method", ["gumbel", "ste_legacy"])
def test_nothing_counts_after_the_end_of_the_document(method):
    policy, reference = decoder(0), decoder(1)
    noise = noise_that_ends(2)
    other = noise.clone()
    other[3:, 0] = noise_TBV(9)[3:, 0]
    found = []
    for given in (noise, other):
        response, reward_B, kl_B = run(
            settings(method=method), policy, reference, given_noise(given), 0.05
        )
        assert response.counts_BT[0].tolist() == [1, 1, 1, 0, 0]
        loss = (0.1 * kl_B - reward_B)[0]
        found.append((response.tokens_BT[0], loss.detach(), gradients(loss, policy)))
    assert not torch.equal(found[0][0][3:], found[1][0][3:])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-7)
    assert_near(found[0][2], found[1][2], 1e-6)


# ---- noise


def test_bits_are_those_of_the_loader():
    numbers = np.array([0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64)
    found = sampling.mix_bits(torch.from_numpy(numbers.view(np.int64)))
    assert np.array_equal(found.numpy().view(np.uint64), mix(numbers))


def test_noise_is_gumbel_noise():
    seed_B = sampling.row_seeds(0, 0, range(8))
    noise = sampling.hashed_noise(seed_B, 0, torch.arange(50_000).expand(8, -1)).double()
    assert abs(float(noise.mean()) - 0.57721) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    assert noise.isfinite().all()
    correlation = torch.corrcoef(noise) - torch.eye(8)
    assert correlation.abs().max() < 0.02


def test_seeds_depend_on_the_seed_the_step_and_the_prompt_only():
    first = sampling.row_seeds(0, 5, [0, 1, 2, 3])
    assert torch.equal(sampling.row_seeds(0, 5, [2, 3]), first[2:])
    others = [sampling.row_seeds(0, 6, [0]), sampling.row_seeds(1, 5, [0]), first[1:2], first[:1]]
    assert len({int(seed) for seed in others}) == 4


# ---- the objective in a step


def config(**flags) -> TrainConfig:
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    return TrainConfig(
        vocab_size=V,
        context_length=16,
        dtype="fp32",
        model_size="tiny",
        model_overrides=tuple(f"{name}={value}" for name, value in shape.items()),
        warmup_steps=0,
        device="cpu",
        **flags,
    )


def state_of(options: GradeSettings, world=step.ONE_PROCESS, mesh=None, **flags):
    """What trains, with a reference and a reward model that have other weights."""
    cfg = config(**flags)
    state = step.build(cfg, cfg.model(), CPU, world, mesh)
    reference = step.frozen(dataclasses.replace(cfg, seed=1), cfg.model(), CPU, mesh)
    body = step.frozen(dataclasses.replace(cfg, seed=2), cfg.model(), CPU, mesh)
    reward = RewardModel(body)
    with torch.no_grad():
        reward.weight.copy_(torch.linspace(-1, 1, 16)[None])
    state.objective = GradeObjective(options, reference, reward.requires_grad_(False))
    return state


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def gradients_of_step(options: GradeSettings, rows: list[int], size: int, **flags) -> tuple:
    """Loss, gradients and figures of a step over four prompts, of which this rank has `rows`."""
    state = state_of(options, **flags)
    batch = grade.micro_batches(prompts(4)[rows], rows, 3, 0, size, options, CPU)
    loss = dist.all_sum(step.gradients(state, batch))
    found = [whole(p.grad).clone() for p in state.model.parameters()]
    return loss, found, state.objective.figures()


@pytest.mark.parametrize("method", KINDS_OF_METHOD)
def test_micro_batches_do_not_change_loss_or_gradients(method):
    options = settings(method=method, gumbel_topk=9)
    loss, wanted, figures = gradients_of_step(options, [0, 1, 2, 3], 4)
    for size in (1, 3):
        other, found, same = gradients_of_step(options, [0, 1, 2, 3], size)
        torch.testing.assert_close(other, loss, rtol=2e-6, atol=1e-7)
        assert_near(found, wanted, 1e-5)
        assert same == pytest.approx(figures, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("method", KINDS_OF_METHOD)
def test_checkpointing_does_not_change_them(method):
    options = settings(method=method, gumbel_topk=9)
    loss, wanted, _ = gradients_of_step(options, [0, 1, 2, 3], 2)
    plain = dataclasses.replace(options, checkpoint=False)
    for other in (plain, options):
        again, found, _ = gradients_of_step(other, [0, 1, 2, 3], 2, gradient_checkpointing="full")
        assert torch.equal(again, loss)
        assert_near(found, wanted, 1e-6)


def on_a_rank(world: dist.World, options: dict) -> list[tuple]:
    mesh = dist.data_mesh(world, CPU, 1)
    rows = [2 * world.rank, 2 * world.rank + 1]
    results = []
    for size, checkpointing in ((1, "none"), (2, "full")):
        state = state_of(settings(**options), world, mesh, gradient_checkpointing=checkpointing)
        batch = grade.micro_batches(prompts(4)[rows], rows, 3, 0, size, settings(**options), CPU)
        loss = dist.all_sum(step.gradients(state, batch))
        found = [whole(p.grad).clone() for p in state.model.parameters()]
        results.append((loss, found, state.objective.figures()))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS_OF_METHOD)
def test_two_ranks_have_the_loss_and_the_gradients_of_one(method):
    options = dict(method=method, gumbel_topk=9)
    wanted = gradients_of_step(settings(**options), [0, 1, 2, 3], 4)
    for of_rank in run_ranks(on_a_rank, 2, options):
        for loss, found, figures in of_rank:
            torch.testing.assert_close(loss, wanted[0], rtol=2e-6, atol=1e-7)
            assert_near(found, wanted[1], 1e-5)
            assert figures == pytest.approx(wanted[2], rel=1e-5, abs=1e-7)


def test_a_step_raises_the_reward():
    options = settings(gumbel_topk=0, kl_coef=0.0, tau_start=1.0)
    state = state_of(options, lr=0.01, schedule="constant")
    rewards = []
    for number in range(20):
        batch = grade.micro_batches(prompts(4), range(4), number, 0, 4, options, CPU)
        result = step.train_step(state, batch)
        assert not result.skipped
        rewards.append(state.objective.figures()["reward"])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert state.tokens == 20 * 4 * (P + T)


def test_frozen_embeddings_stay_and_have_no_gradient():
    options = settings(gumbel_topk=9)
    state = state_of(options, lr=0.01)
    grade.freeze_embeddings(state.model)
    before = state.model.embed.weight.detach().clone()
    layer = state.model.layers[0].mlp.up_proj.weight
    layer_before = layer.detach().clone()
    batch = grade.micro_batches(prompts(4), range(4), 0, 0, 2, options, CPU)
    step.train_step(state, batch)
    assert torch.equal(state.model.embed.weight, before)
    assert not torch.equal(layer, layer_before)


# ---- the figures


def test_the_figures_are_those_of_their_formulas_in_float64():
    generator = torch.Generator().manual_seed(0)
    logits_BV, other_BV = torch.randn(2, 5, V, generator=generator, dtype=torch.float64)
    index_BK = logits_BV.requires_grad_().topk(7).indices
    found = grade.figures_of(logits_BV, other_BV, index_BK)
    assert [name for name, one in found._asdict().items() if one.requires_grad] == ["kl"]

    mine, theirs = Categorical(logits=logits_BV), Categorical(logits=other_BV)
    mass = mine.probs.gather(1, index_BK).sum(1)
    exact = kl_divergence(mine, theirs), mine.entropy(), mass, logits_BV.abs().amax(1)
    torch.testing.assert_close(tuple(found), exact, rtol=1e-12, atol=0)


# ---- a padded vocabulary


@pytest.mark.parametrize("method", KINDS_OF_METHOD)
def test_padding_of_the_vocabulary_is_never_mixed(method):
    options = settings(method=method, gumbel_topk=0, vocab_size=30)
    objective = GradeObjective(options, decoder(1), reward_model())
    objective.loss(decoder(0), micro(), torch.tensor(1.0))
    assert 0.1 < objective.figures()["topk_mass"] < 0.9
    assert objective.advice == ""  # no --gumbel_topk would change it


# ---- what goes wrong


@pytest.mark.parametrize(
    "options, shapes, named",
    [
        (dict(gumbel_topk=V + 1), {}, "at most 61"),
        (dict(gumbel_topk=31, vocab_size=30), {}, "at most 30"),
        (dict(eod_id=V), {}, "token 61"),
        ({}, dict(prompt=0), "empty"),
        ({}, dict(prompt=12), "--max_new_tokens 5"),
        ({}, dict(reward=60), "60 tokens"),
        ({}, dict(attention="nsa"), "nsa"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_allocated(options, shapes, named):
    policy = ModelConfig(**SHAPE, attention=KINDS[shapes.get("attention", "standard")].config())
    reward = ModelConfig(**SHAPE | {"vocab_size": shapes.get("reward", V)})
    with pytest.raises(ValueError, match=named):
        settings(**options).check(policy, reward, shapes.get("prompt", P), 16)


@pytest.mark.parametrize("method", ["gumbel", "gumbel_legacy", "ste_legacy"])
def test_what_fits_is_not_refused(method):
    config = ModelConfig(**SHAPE)
    unread = V + 1 if method != "gumbel" else V
    for prompt in (1, 16 - T):
        settings(method=method, gumbel_topk=unread).check(config, config, prompt, 16)


def test_prompts_of_several_lengths_take_micro_batches_of_one():
    rows = [torch.zeros(3).long(), torch.zeros(5).long()]
    with pytest.raises(ValueError, match="--batch_size 1"):
        grade.micro_batches(rows, [0, 1], 0, 0, 2, settings(), CPU)
    batch = grade.micro_batches(rows, [0, 1], 0, 0, 1, settings(), CPU)
    assert [tuple(micro["prompts_BP"].shape) for micro in batch] == [(1, 3), (1, 5)]


def test_too_few_tokens_are_told_once_with_the_number_that_is_enough():
    options = settings(gumbel_topk=2)
    objective = GradeObjective(options, decoder(1), reward_model())
    policy = decoder(0)
    objective.loss(policy, micro(), torch.tensor(1.0))
    first = objective.figures()
    assert first["topk_mass"] < 0.99
    assert re.search(r"give --gumbel_topk \d+", objective.advice)

    objective.loss(policy, micro(), torch.tensor(1.0))
    objective.figures()
    assert objective.advice == ""


def test_the_number_that_is_told_is_enough_and_one_less_is_not():
    policy = decoder(0)
    hidden_ND = policy.hidden(prompts())[:, -1]
    needed = grade.enough_tokens(policy, hidden_ND)
    p_NV = (hidden_ND @ policy.lm_head.weight.t()).softmax(-1).detach()

    def mass(k):
        return float(p_NV.topk(k).values.sum(-1).mean())

    assert mass(needed) >= 0.99 > mass(needed - 1)
    # of a vocabulary with padding, no more than the other ids
    assert grade.enough_tokens(policy, hidden_ND, 30) == 30 < needed


@pytest.mark.parametrize("method", KINDS_OF_METHOD)
def test_numbers_that_went_wrong_end_the_run_with_step_temperature_and_logit(method):
    objective = GradeObjective(settings(method=method), decoder(1), reward_model())
    policy = decoder(0)
    with torch.no_grad():
        policy.norm.weight[3] = math.nan
    objective.loss(policy, micro(), torch.tensor(1.0))
    figures = objective.figures()
    with pytest.raises(NumericalHalt, match=r"step 4: .*kl.* tau 1\.26.* [0-9.]+: "):
        objective.require_finite(figures)


def test_the_temperature_falls_from_the_first_step_to_the_last():
    options = settings(tau_start=2.0, tau_end=0.5, max_steps=3)
    assert [options.tau(number) for number in (0, 1, 2, 9)] == pytest.approx([2, 1, 0.5, 0.5])
    third = settings(tau_start=1 / 3, tau_end=1 / 3)  # which bf16 has not
    (batch,) = grade.micro_batches(prompts(4), range(4), 0, 0, 4, third, CPU)
    assert batch["tau"].item() == pytest.approx(1 / 3, rel=1e-7)


# ---- bf16


def test_in_bf16_nothing_is_rounded_between_hidden_states_and_probabilities():
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(64, 48, generator=generator).bfloat16().requires_grad_()
    weight_VD = torch.randn(500, 48, generator=generator).requires_grad_()
    other_VD = weight_VD.detach() + 0.05 * torch.randn(500, 48, generator=generator)
    up_NV = torch.randn(64, 500, generator=generator)

    def figures(logits_NV: torch.Tensor, other_NV: torch.Tensor):
        kl_N = grade.figures_of(logits_NV, other_NV.detach(), None).kl
        p_NV = logits_NV.softmax(-1)
        loss = kl_N.sum() + (p_NV * up_NV).sum()
        found = torch.autograd.grad(loss, [hidden_ND, weight_VD])
        return [x.detach().double() for x in (p_NV, kl_N, *found)]

    found = figures(grade.wide_logits(hidden_ND, weight_VD), grade.wide_logits(hidden_ND, other_VD))
    exact = figures(
        hidden_ND.double() @ weight_VD.double().t(), hidden_ND.double() @ other_VD.double().t()
    )
    rounded = figures(
        (hidden_ND @ weight_VD.bfloat16().t()).float(),
        (hidden_ND @ other_VD.bfloat16().t()).float(),
    )
    # a KL is a sum of differences; the gradient of a hidden state in bf16 is itself in bf16
    bounds = 1e-5, 1e-4, 5e-3, 1e-4
    for mine, theirs, wanted, bound in zip(found, rounded, exact, bounds, strict=True):
        assert (mine - wanted).abs().max() <= bound * wanted.abs().max()
        assert (theirs - wanted).abs().max() > 1e-2 * wanted.abs().max()

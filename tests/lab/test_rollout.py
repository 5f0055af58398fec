"""Sampling a policy: its draws, what it says of them, and that ranks do not change them."""

import dataclasses

import numpy as np
import pytest
import torch

from data.prompts import Prompt
from lab.posttrain import policy, rollout
from lab.posttrain.rollout import Sampling
from longhaul import dist, kernels, step
from longhaul.config import TrainConfig
from longhaul.exits import NumericalHalt
from longhaul.generate import generate
from longhaul.kinds import StandardKind
from longhaul.sampling import decode, draw, uniforms
from model import Decoder
from tests.ranks import run_ranks

V = 50
END = 7
NOTHING = np.zeros(0, dtype=np.int64)
SAMPLING = Sampling(group_size=4, max_response_length=12, eod_id=END, seed=3)
TRAIN = TrainConfig(
    model_size="tiny",
    vocab_size=V,
    dtype="fp32",
    model_overrides=("num_layers=2", "hidden_size=64", "ffn_size=96", "init_std=0.1"),
)


def prompts(number: int = 5) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 4, 3, 1, 4, 3, 3, 5][:number]
    return [
        Prompt(index, torch.randint(V, (length,), generator=generator).numpy(), NOTHING)
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return kernels.decoder(TRAIN.model(), seed=1)


def tokens_of(groups) -> list[list[list[int]]]:
    return [[sample.tokens_T.tolist() for sample in group] for group in groups]


# ---- random numbers and draws


def test_each_random_number_is_a_hash_of_its_coordinates():
    whole = uniforms(5, 11, range(40), 8, 32)
    assert whole.min() >= 0 and whole.max() < 1 and len(set(whole.flatten())) == whole.size
    assert abs(whole.mean() - 0.5) < 0.01 and abs(whole.std() - 12**-0.5) < 0.01
    assert (uniforms(5, 11, [17, 3], 2, 9) == whole[[17, 3], :2, :9]).all()
    for other in ((6, 11), (5, 12)):
        assert not (uniforms(*other, range(40), 8, 32) == whole).any()


def test_draws_have_the_probabilities_of_the_logits():
    z_V = torch.tensor([1.0, -2.0, 0.5, -torch.inf, 2.0])
    uniform = torch.arange(100_000, dtype=torch.float64) / 100_000
    drawn = draw(z_V.expand(len(uniform), -1), uniform, temperature=0.7)
    shares = drawn.bincount(minlength=5) / len(drawn)
    assert (shares - (z_V / 0.7).softmax(0)).abs().max() < 2e-5
    assert draw(z_V[None], uniform[:1], temperature=0).tolist() == [4]


def test_no_forward_runs_for_a_token_that_nobody_asks_for():
    made = []

    def make(position: int, read: str) -> str:
        made.append((position, read))
        return str(position)

    tokens = decode(make, "prompt", lambda token: f"after {token}", most=3)
    assert next(tokens) == "0" and made == [(0, "prompt")]
    assert list(tokens) == ["1", "2"] and made[1:] == [(1, "after 0"), (2, "after 1")]


# ---- what is sampled


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generated_text_is_the_first_response_to_its_prompt(model, temperature):
    (prompt,) = prompts(1)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature, eod_id=V, seed=11)
    ((first, *_),) = rollout.sample(model, [prompt], sampling)
    settings = dict(temperature=temperature, top_k=0, top_p=1.0, seed=11)
    assert list(generate(model, prompt.tokens.tolist(), 12, **settings)) == first.tokens_T.tolist()


@pytest.mark.parametrize("temperature, shared", [(1.0, False), (0.7, True)])
def test_training_says_of_the_tokens_what_sampling_said(model, temperature, shared):
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    stats, logprob_n, certainty_n = both(model, sampling, shared)
    assert (stats.logprob - logprob_n).abs().max() <= 1e-4
    assert (stats.self_certainty - certainty_n).abs().max() <= 1e-4


@pytest.mark.parametrize("init_std", [0.02, 0.1])
def test_in_bf16_they_differ_by_less_than_bf16_is_off(init_std):
    config = dataclasses.replace(TRAIN.model(), init_std=init_std)
    low = kernels.decoder(dataclasses.replace(config, compute_dtype="bfloat16"), seed=1)
    stats, logprob_n, _ = both(low, SAMPLING, shared=True)
    exact, *_ = both(low, SAMPLING, shared=True, scored_by=kernels.decoder(config, seed=1))

    difference = (stats.logprob - logprob_n).abs().mean()
    assert difference <= (exact.logprob - logprob_n).abs().mean()
    if init_std == 0.02:  # of the initial weights of a training run
        assert difference <= 2e-3


def both(sampler: Decoder, sampling: Sampling, shared: bool, scored_by: Decoder | None = None):
    """What training says of sampled tokens; their log-probabilities and self-certainty when they
    were drawn.
    """
    sampled = rollout.sample(sampler, prompts(), sampling)
    groups = [
        policy.Group(
            torch.from_numpy(prompt.tokens), [policy.Response(s.tokens_T, 0.0) for s in samples]
        )
        for prompt, samples in zip(prompts(), sampled)
    ]
    micro = policy.micro_batch(groups, "cpu", shared)
    stats = policy.score(scored_by or sampler, micro, sampling.temperature)
    samples = [sample for group in sampled for sample in group]
    logprob_n = torch.cat([sample.logprob_T for sample in samples])
    return stats, logprob_n, torch.cat([sample.self_certainty_T for sample in samples])


def test_a_response_ends_with_the_first_end_of_the_document(model):
    samples = [sample for group in rollout.sample(model, prompts(), SAMPLING) for sample in group]
    assert {sample.truncated for sample in samples} == {True, False}
    for sample in samples:
        tokens = sample.tokens_T.tolist()
        assert END not in tokens[:-1] and sample.truncated == (tokens[-1] != END)
        assert len(tokens) == 12 if sample.truncated else len(tokens) <= 12
        assert sample.empty == (tokens == [END])
        assert len(sample.logprob_T) == len(sample.self_certainty_T) == len(tokens)


def test_a_rollout_keeps_no_graph(model):
    hiddens = []
    hook = model.norm.register_forward_hook(lambda *given: hiddens.append(given[-1]))
    rollout.sample(model, prompts(1), SAMPLING)
    hook.remove()
    assert hiddens and not any(hidden.requires_grad for hidden in hiddens)


def test_draws_depend_on_seed_step_prompt_and_response_only(model):
    whole = tokens_of(rollout.sample(model, prompts(), SAMPLING, step=2))
    small = dataclasses.replace(SAMPLING, prompts=1)
    assert tokens_of(rollout.sample(model, prompts(), small, step=2)) == whole
    assert tokens_of(rollout.sample(model, prompts()[3:], SAMPLING, step=2)) == whole[3:]
    assert tokens_of(rollout.sample(model, prompts(), SAMPLING, step=1)) != whole
    first = dataclasses.replace(SAMPLING, group_size=2)
    assert tokens_of(rollout.sample(model, prompts(), first, step=2)) == [g[:2] for g in whole]
    assert len({str(response) for group in whole for response in group}) > 15


def test_greedy_responses_are_alike_and_small_ids_can_be_asked_for(model):
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    for group in tokens_of(rollout.sample(model, prompts(), greedy)):
        assert group == group[:1] * 4
    few = dataclasses.replace(SAMPLING, vocab_size=9)
    drawn = tokens_of(rollout.sample(model, prompts(), few))
    assert {token for group in drawn for response in group for token in response} <= set(range(9))


def test_a_shared_prompt_changes_no_draw(model, monkeypatch):
    shared = rollout.sample(model, prompts(), SAMPLING, step=2)
    monkeypatch.setattr(StandardKind, "refused_prompts", "in this test")
    for group, other in zip(shared, rollout.sample(model, prompts(), SAMPLING, step=2)):
        for sample, same in zip(group, other):
            assert sample.tokens_T.equal(same.tokens_T) and sample.truncated == same.truncated
            assert (sample.logprob_T - same.logprob_T).abs().max() < 1e-5


def test_a_rehearsal_goes_on_behind_the_forwards_that_it_leaves_out(model, monkeypatch):
    monkeypatch.setattr("longhaul.generate.PREFILL_CHUNK", 4)
    hidden = Decoder.hidden
    begins = []

    def watched(self, tokens_BT, positions=None, doc_ids=None, cache=None, rows=None):
        begins.append(cache.length)
        return hidden(self, tokens_BT, positions, doc_ids, cache, rows)

    monkeypatch.setattr(Decoder, "hidden", watched)
    prompt = Prompt(0, np.ones(35, dtype=np.int64), NOTHING)
    rollout.rehearse(model, [prompt], SAMPLING, made=lambda cache: None)
    *parts, last = begins
    assert parts == [0, 4, 8, 16, 32]  # five of nine
    assert last == 34 + SAMPLING.max_response_length


# ---- ranks


SMALL = dataclasses.replace(SAMPLING, prompts=2)


def sampled_by(world: dist.World) -> tuple[list, list, str]:
    """The responses to this rank's share of the prompts, which is of another size and of other
    lengths on each rank, and once none; then the words with which the rank halts if only rank 1 has
    a model that has diverged.
    """
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    model = step.build(TRAIN, TRAIN.model(), "cpu", world, mesh).model
    found = []
    for share in (5, 8):
        own = prompts(8)[share:] if world.rank else prompts(8)[:share]
        found.append(tokens_of(rollout.sample(model, own, SMALL, step=2, world=world)))

    model = diverged() if world.rank == 1 else kernels.decoder(TRAIN.model(), seed=1)
    own = prompts(4)[2 * world.rank :][: 2 - world.rank]
    try:
        rollout.sample(model, own, SAMPLING, world=world)
    except NumericalHalt as halt:
        return *found, str(halt)
    return *found, ""


def test_ranks_draw_the_responses_of_one_process_and_halt_together():
    model = step.build(TRAIN, TRAIN.model(), "cpu").model
    expected = tokens_of(rollout.sample(model, prompts(8), SMALL, step=2))
    first, second = run_ranks(sampled_by, 2)
    for share in (0, 1):
        assert first[share] + second[share] == expected
    assert first[2] == second[2]
    assert "response 0 to prompt 2 are not finite" in first[2]


# ---- bad input


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="prompt 4"):
        rollout.sample(model, [Prompt(4, NOTHING, NOTHING)], SAMPLING)


def diverged() -> Decoder:
    model = kernels.decoder(TRAIN.model(), seed=1)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    return model


def test_logits_that_are_not_finite_halt_the_run():
    with pytest.raises(NumericalHalt) as halt:
        rollout.sample(diverged(), prompts(), SAMPLING, step=6)
    assert "step 7: the logits of token 0 of response 0 to prompt 0 " in str(halt.value)
    assert halt.value.exit_code == 5
    with pytest.raises(NumericalHalt, match="^validation after step 9"):
        rollout.sample(diverged(), prompts(), SAMPLING, occasion="validation after step 9")

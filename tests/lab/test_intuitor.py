"""Rewards by name, what a step counts, and when a run warns or stops."""

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Dataset, open_dataset
from data.mixture import Corpus
from data.prompts import Prompt
from data.writer import TokenizedDocument, write_dataset
from lab.posttrain import intuitor, policies, policy, rollout
from lab.posttrain.config import IntuitorConfig
from lab.posttrain.intuitor import Answers, Counts, Guard, Intuitor, Settings
from lab.posttrain.own_reward import OwnReward
from lab.posttrain.policy import PolicyLoss, PolicyObjective
from lab.posttrain.rollout import Sample, Sampling
from longhaul import dist, kernels, step
from longhaul.config import TrainConfig
from longhaul.exits import BAD_INPUT, Halt

V = 15
END = 14
MARK = 13
TRAIN = TrainConfig(
    model_size="tiny",
    vocab_size=V,
    dtype="fp32",
    model_overrides=("num_layers=1", "hidden_size=32", "ffn_size=48", "init_std=0.1"),
)
SAMPLING = Sampling(group_size=6, max_response_length=10, eod_id=END, seed=1)
LOSS = PolicyLoss()
FIGURES = {"truncated": 0.0, "zero_variance": 0.0, "repetition": 0.0, "kl": 0.01}


def prompts(number: int = 4) -> list[Prompt]:
    generator = np.random.default_rng(0)
    answer = np.array([3, MARK, 0, 8, 5])
    return [Prompt(index, generator.integers(0, 10, 5), answer) for index in range(number)]


def sample(tokens: list[int], certainty: list[float] | None = None, truncated=False) -> Sample:
    figures = torch.tensor(certainty or [1.0] * len(tokens))
    return Sample(torch.tensor(tokens), -figures, figures, truncated)


def made(**changes) -> tuple[Intuitor, list[dict]]:
    """Intuitor after a step over four prompts, and the micro-batches."""
    own_reward = changes.pop("own_reward", None)
    settings = Settings(**{"context_length": 20, "prompts_per_micro_batch": 2} | changes)
    model = kernels.decoder(TRAIN.model(), seed=1)
    reference = kernels.decoder(TRAIN.model(), seed=2).requires_grad_(False)
    answers = Answers(END, MARK)
    found = Intuitor(settings, SAMPLING, LOSS, answers, model, reference, own_reward=own_reward)
    return found, found.batch(3, prompts())


def advantages(micro: dict) -> list[float]:
    """That of each response of a micro-batch, from its first token."""
    lengths = micro["length_n"].long()
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(starts[-1] + int(lengths[starts[-1]]))
    return [float(micro["advantage_n"][start]) for start in starts[:-1]]


# ---- answers


@pytest.mark.parametrize(
    "tokens, right",
    [
        ([MARK, 0, 8, 5, END], True),
        ([1, 5, MARK, 9, MARK, 0, 8, 5, END], True),
        ([MARK, 0, 8, 6, END], False),
        ([0, 8, 5, END], False),
        ([MARK, 0, 8, 5, 0, END], False),
        ([END], False),
    ],
)
def test_what_follows_the_last_marker_is_compared(tokens, right):
    prompt = prompts()[0]
    assert Answers(END, MARK).is_right(prompt, sample(tokens)) == right
    assert not Answers(END, MARK).is_right(prompt, sample(tokens, truncated=True))
    nothing = prompt._replace(answer=np.zeros(0, dtype=np.int64))
    assert not Answers(END).is_right(nothing, sample([END]))


def test_without_a_marker_the_whole_response_is_the_answer():
    prompt = prompts()[0]
    assert Answers(END).is_right(prompt, sample([3, MARK, 0, 8, 5, END]))
    assert not Answers(END).is_right(prompt, sample([MARK, 0, 8, 5, END]))


def test_nothing_is_right_without_an_answer():
    said = sample([3, 4, END])  # no marker either
    for answer in ([], [3, 4], [3, MARK]):
        prompt = Prompt(0, np.array([1]), np.array(answer, dtype=np.int64))
        assert not Answers(END, MARK).is_right(prompt, said)
    assert Answers(END).is_right(Prompt(0, np.array([1]), np.array([3, 4])), said)


def asked(folder: Path, answers: list[list[int]], masked: bool = True):
    """A dataset of a document for each answer, all in its training split."""
    made = []
    for answer in answers:
        tokens = np.array([1, 2, *answer, END])
        learned = np.array([False, False, *[True] * len(answer), False])
        made.append(TokenizedDocument(tokens, learned=learned if masked else None))
    more = dict(answer_id=MARK) if masked else {}
    write_dataset(made, folder, vocab_size=V, eod_id=END, val_fraction=0, masked=masked, **more)
    return open_dataset(folder)


def test_a_reward_by_answers_needs_one_in_each_document(tmp_path):
    def begin(dataset: Dataset, reward: str):
        config = IntuitorConfig(reward=reward, eval_every=0)
        policies.prompts_in_order(config, [Corpus("", dataset, Fraction(1))], dist.World())

    begin(asked(tmp_path / "good", [[MARK, 3]] * 9), "label")

    for name, other in (("none", []), ("no_marker", [3]), ("empty", [MARK])):
        bad = asked(tmp_path / name, [*[[MARK, 3]] * 7, other, [MARK, 3]])
        begin(bad, "self_certainty")
        with pytest.raises(ValueError, match="document 7 "):
            begin(bad, "mixed")

    plain = asked(tmp_path / "plain", [[3]] * 4, masked=False)
    with pytest.raises(ValueError, match="plain"):
        begin(plain, "label")


# ---- rewards


def test_self_certainty_is_the_mean_over_the_response_at_the_temperature():
    """Against full logits in float64: one position late, or temperature 1, would be found."""
    model = kernels.decoder(TRAIN.model(), seed=1)
    cold = dataclasses.replace(SAMPLING, temperature=0.7)
    prompt = prompts()[0]
    (samples,) = rollout.sample(model, [prompt], cold)
    rewards = intuitor.self_certainty(samples)

    wrong = []
    for found, reward in zip(samples, rewards.tolist()):
        tokens = torch.cat([torch.from_numpy(prompt.tokens), found.tokens_T])
        with torch.no_grad():
            logits_TV = model(tokens[None])[0].double()
        first = len(prompt.tokens) - 1
        scored_TV = logits_TV[first : first + len(found.tokens_T)]

        def mean(z_TV):
            return float((z_TV.logsumexp(1) - z_TV.mean(1)).mean() - np.log(V))

        assert reward == pytest.approx(mean(scored_TV / 0.7), abs=1e-5)
        late = mean(logits_TV[first + 1 : first + 1 + len(found.tokens_T)] / 0.7)
        wrong += [abs(reward - late), abs(reward - mean(scored_TV))]
    assert np.median(wrong) > 1e-3


def test_rewards_by_name_rank_the_responses_of_a_group():
    certain, micros = made(reward="self_certainty")
    sampled = rollout.sample(certain.model, prompts(), SAMPLING, step=3)
    sampled = [[one for one in group if not one.empty] for group in sampled]
    expected = [policy.group_advantage(intuitor.self_certainty(group)) for group in sampled]
    found = [a for micro in micros for a in advantages(micro)]
    assert found == pytest.approx(torch.cat(expected).tolist(), abs=1e-5)

    # the same responses, judged by others
    offline = [a for micro in made(reward="self_certainty_offline")[1] for a in advantages(micro)]
    random = [a for micro in made(reward="random")[1] for a in advantages(micro)]
    again = [a for micro in made(reward="random")[1] for a in advantages(micro)]
    assert random == again and len({tuple(found), tuple(offline), tuple(random)}) == 3
    label, micros = made(reward="label")
    assert all(a == 0 for micro in micros for a in advantages(micro))
    assert label.figures()["zero_variance"] == 1 and label.figures()["accuracy"] == 0


def test_a_mixed_reward_adds_what_is_normalised_in_the_group():
    samples = [sample([MARK, 0, 8, 5, END], [100.0] * 5), sample([2], [700.0])]
    samples += [sample([1, END], [400.0, 400.0])]
    found, _ = made(reward="mixed")
    reward_G = found._rewards(0, prompts()[0], samples, [0, 1, 2])
    certainty = torch.tensor([100.0, 700.0, 400.0]).double()
    right = torch.tensor([1.0, 0.0, 0.0]).double()
    expected = sum((x - x.mean()) / x.std() for x in (certainty, right))
    assert reward_G.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_kl_in_the_reward_is_that_of_whole_responses():
    found, _ = made()
    found.loss = PolicyLoss(kl="k1", kl_coef=0.5)
    (samples,) = rollout.sample(found.model, prompts(1), SAMPLING)
    plain = intuitor.self_certainty(samples)
    kept = list(range(len(samples)))
    penalised = found._rewards(0, prompts()[0], samples, kept)
    of_reference = found._of_reference(prompts()[0], samples)
    for index, sampled in enumerate(samples):
        gap = sampled.logprob_T.sum() - of_reference.logprob[index].sum()
        assert float(plain[index] - penalised[index]) == pytest.approx(0.5 * float(gap), abs=1e-5)


# ---- a reward of one's own


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + index) for index in ids)


def own(folder: Path, body: str, parameters: str = "texts") -> OwnReward:
    file = folder / f"mine_{len(list(folder.iterdir()))}.py"  # a file is read once
    file.write_text(f"def worth({parameters}):\n    {body}\n")
    return OwnReward(f"{file}:worth", spelled)


def test_a_reward_by_length_gives_longer_responses_the_larger_advantage(tmp_path):
    by_length = own(tmp_path, "return [len(text) for text in texts]")
    found, micros = made(reward=by_length.words, own_reward=by_length)
    sampled = rollout.sample(found.model, prompts(), SAMPLING, step=3)

    expected = []
    lengths = []
    for group in sampled:
        # the end is no part of a text
        length_G = [len(one.tokens_T) - (not one.truncated) for one in group if not one.empty]
        mean, deviation = np.mean(length_G), np.std(length_G, ddof=1)
        expected += [(length - mean) / (deviation + 1e-6) for length in length_G]
        lengths += length_G
    given = [advantage for micro in micros for advantage in advantages(micro)]
    assert given == pytest.approx(expected, abs=1e-5)
    assert found.figures()["reward"] == pytest.approx(np.mean(lengths))


def test_a_reward_of_ones_own_may_read_the_prompts(tmp_path):
    body = "return [text.count(prompt[0]) for text, prompt in zip(texts, prompts)]"
    asked = own(tmp_path, body, "texts, prompts, factor=1")
    assert asked.of_group([2, 5], [[2, 2, 1], [], [5]]).tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    "body",
    [
        "return [1.0]",
        "return [float('nan'), 1.0]",
        "return None",
        "return 'no'",
        "return [1 / 0 for text in texts]",
    ],
)
def test_what_goes_wrong_in_it_ends_the_run_with_its_file_and_line(body, tmp_path):
    with pytest.raises(Halt) as halt:
        own(tmp_path, body).of_group([1], [[2], [3]])
    assert halt.value.exit_code == BAD_INPUT
    assert re.search(r"mine_0\.py:[12]\b", str(halt.value))


@pytest.mark.parametrize("parameters", ["", "texts, answers", "*, texts"])
def test_a_function_that_takes_other_things_is_refused(parameters, tmp_path):
    with pytest.raises(ValueError, match=r"mine_0\.py:1\b"):
        own(tmp_path, "return []", parameters)


def test_a_file_without_the_function_or_with_an_error_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("number = 1 / 0\n")
    (tmp_path / "empty.py").write_text("")
    for words in ("mine.py:worth", "empty.py:worth", "empty.py:"):
        with pytest.raises(ValueError, match=words.partition(":")[0]):
            OwnReward(f"{tmp_path}/{words}", spelled)


def test_a_reward_of_texts_needs_a_tokenizer(tmp_path):
    data = asked(tmp_path / "ids", [[MARK, 3]] * 9)
    with pytest.raises(ValueError, match="no tokenizer"):
        policies.own_reward("mine.py:worth", data)
    assert policies.own_reward("label", data) is None


# ---- a step


def test_a_step_learns_and_reports_its_figures():
    found, micros = made()
    state = step.build(TRAIN, TRAIN.model(), "cpu")
    state.objective = PolicyObjective(LOSS, found.reference)
    result = step.train_step(state, micros)
    assert result.grad_norm > 0 and result.loss.isfinite()
    figures = found.figures() | state.objective.figures()
    assert {"reward", "self_certainty", "accuracy", "kl", "entropy", "truncated"} <= set(figures)
    # an empty response has a certainty and no reward
    assert figures["empty"] > 0
    assert figures["reward"] == pytest.approx(figures["self_certainty"], rel=0.05)


def test_empty_responses_are_left_out_and_counted():
    found, _ = made()
    found.counts = Counts()
    samples = [sample([END]), sample([1, END], [2.0, 2.0]), sample([2, END], [3.0, 1.0])]
    group = found._group(0, prompts()[0], samples)
    assert [len(response.tokens_R) for response in group.responses] == [2, 2]
    assert found.counts.empty == 1 and found.counts.responses == 3
    nothing = found._group(0, prompts()[0], [sample([END], [9.0])] * 3)
    assert not nothing.learned and len(nothing.responses) == 1
    assert (group.left_out, nothing.left_out) == (1, 2)
    # they are in no mean of rewards, which all are 2
    assert found.counts.rewarded == 2 and found.figures()["reward"] == 2


def test_a_mixed_reward_is_reported_by_its_parts():
    found, _ = made(reward="mixed")
    found.counts = Counts()
    right = sample([MARK, 0, 8, 5, END], [1.0] * 5)
    found._group(0, prompts()[0], [right, sample([1, END], [4.0, 2.0]), sample([END])])
    figures = found.figures()
    assert figures["reward_label"] == 0.5 and figures["reward_self_certainty"] == 2
    assert "reward" not in figures and "reward_label" not in made()[0].figures()


@pytest.mark.parametrize("skip, learned", [(True, False), (False, True)])
def test_groups_without_variance_are_counted_and_may_be_skipped(skip, learned):
    found, _ = made(skip_zero_variance=skip)
    found.counts = Counts()
    group = found._group(0, prompts()[0], [sample([1, END], [2.0, 2.0])] * 3)
    assert found.counts.zero_variance == 1 and group.learned == learned
    assert all(response.advantage == 0 for response in group.responses)


# ---- warnings and stops


def test_repetition_counts_ngrams_that_stood_there_before():
    assert intuitor.repetition([1, 2, 3, 4, 5]) == (2, 0)
    assert intuitor.repetition([7] * 10) == (7, 6)
    assert intuitor.repetition([1, 2]) == (0, 0)


def test_ten_steps_without_variance_end_the_run_and_one_with_it_starts_anew():
    guard = Guard()
    alike = FIGURES | {"zero_variance": 1.0}
    for figures in [alike] * 9 + [FIGURES] + [alike] * 9:
        guard.after(figures, print)
    with pytest.raises(Halt, match="--reward"):
        guard.after(alike, print)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"truncated": 0.6}, "60%.* --max_response_length"),
        ({"repetition": 0.7}, "70%.* --kl_coef"),
        ({"kl": 0.4}, "0.400 nats.* --kl_coef"),
    ],
)
def test_each_warning_is_said_once(wrong, words):
    guard = Guard()
    said = []
    for _ in range(6):
        guard.after(FIGURES, said.append)
    assert said == []
    for _ in range(3):
        guard.after(FIGURES | wrong, said.append)
    assert len(said) == 1
    assert re.search(words, said[0])


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(sampling=dataclasses.replace(SAMPLING, group_size=1)), "group_size=1"),
        (dict(loss=PolicyLoss(temperature=0.7)), "temperature 1 .* 0.7"),
        (dict(loss=PolicyLoss(kl="k1")), "kl='k1'"),
        (dict(settings=Settings(20, "self_certainty_offline")), "reference"),
        (dict(settings=Settings(20, prompts_per_micro_batch=0)), "micro-batch"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, named):
    given = dict(settings=Settings(20), sampling=SAMPLING, loss=LOSS, reference=None) | changes
    with pytest.raises(ValueError, match=named):
        intuitor.check(**given)

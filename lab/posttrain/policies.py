"""Where the batches of Intuitor come from, and what a run says of them. longhaul/run/pretraining.py
has the same for pretraining.

`ready` is a run that may begin (longhaul.run.preflight.Ready), `log` its longhaul.run.log.Logger:
the folder that trains stands above this one.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data import origin
from data.dataset import Dataset
from data.load_tokenizer import load_tokenizer
from data.mixture import Corpus
from data.prompts import Prompt, Prompts, read_prompt, require_fitting, require_one_length
from lab.posttrain import grade, intuitor, reward, rollout
from lab.posttrain.config import (
    GradeConfig,
    IntuitorConfig,
    PolicyConfig,
)
from lab.posttrain.grade import GradeObjective
from lab.posttrain.intuitor import BY_ANSWER, Intuitor
from lab.posttrain.own_reward import OwnReward, names_function
from lab.posttrain.policy import PolicyObjective
from lab.posttrain.reward import RewardModel
from lab.posttrain.rollout import Sampling
from longhaul import dist, step
from longhaul.checkpoint import start
from longhaul.exits import BAD_INPUT, Halt
from longhaul.step import MicroBatch, MustStop, StepResult, TrainState
from model import Decoder

# Figures of the answers to validation prompts.
VALIDATED = ("accuracy", "self_certainty", "response_tokens", "truncated", "repetition")


def prompts_in_order(
    cfg: IntuitorConfig,
    corpora: Sequence[Corpus],
    world: dist.World,
) -> Prompts:
    """The prompts of a run of Intuitor; ValueError also if answers or texts are missing that its
    reward needs.
    """
    own_reward(cfg.reward, corpora[0].dataset)
    found = fitting_prompts(cfg, corpora, world)
    if cfg.reward in BY_ANSWER:
        dist.on_rank0(
            lambda: intuitor.require_answers(found.dataset, found.split, cfg.reward), world
        )
    return found


def own_reward(reward: str, dataset: Dataset) -> OwnReward | None:
    """The reward that is a function of texts. ValueError if it cannot be had, or without texts."""
    if not names_function(reward):
        return None
    if not dataset.tokenizer_path:
        raise ValueError(
            f"--reward {reward} reads texts, and {dataset.path} has no tokenizer: prepare the data "
            f"with data.prepare, or give one of {', '.join(intuitor.REWARDS)}"
        )
    return OwnReward(reward, load_tokenizer(dataset.tokenizer_path).decode)


def fitting_prompts(
    cfg: PolicyConfig,
    corpora: Sequence[Corpus],
    world: dist.World,
) -> Prompts:
    """The prompts of a run. ValueError for several datasets, for a prompt that leaves no room for a
    response, and if validation is asked for without prompts for it.
    """
    if len(corpora) > 1:
        raise ValueError(f"--data {cfg.data} names several datasets: give one with all prompts")
    dataset = corpora[0].dataset
    if cfg.eval_every:
        if "val" not in dataset.splits:
            raise ValueError(
                f"{dataset.path} has no validation split: prepare it with one, or give "
                "--eval_every 0"
            )
        require_fitting(dataset, dataset.split("val"), cfg.longest_prompt)
    rows = cfg.rows_per_step(world.size)
    return Prompts(dataset, cfg.longest_prompt, rows, seed=cfg.seed)


def judged_prompts(
    cfg: GradeConfig,
    corpora: Sequence[Corpus],
    world: dist.World,
) -> Prompts:
    """The prompts of a run of GRADE; ValueError also for micro-batches with prompts of several
    lengths, and for a reward model that does not fit.
    """
    if not cfg.reward_checkpoint:
        raise ValueError(
            "--reward_checkpoint is empty: give the folder of a reward model, or --demo"
        )
    found = fitting_prompts(cfg, corpora, world)
    if cfg.batch_size > 1:
        dist.on_rank0(lambda: require_one_length(found.dataset, found.split), world)
    settings = cfg.settings(found.dataset.eod_id, drawn_ids(found.dataset))
    judge = reward.read_config(cfg.reward_checkpoint)
    settings.check(cfg.model(), judge, cfg.longest_prompt, cfg.context_length)
    return found


def drawn_ids(dataset: Dataset) -> int:
    """The ids that responses are made of: those of the tokenizer, if there is one. A model may have
    more, as padding.
    """
    if not dataset.tokenizer_path:
        return dataset.vocab_size
    return load_tokenizer(dataset.tokenizer_path).vocab_size


def frozen_source(
    ready,
    what: str,
    named: str,
) -> dict[str, str]:
    """A model that is only read, as a checkpoint names it: its folder by the name of `what`, and
    its digest. Halt if a run that goes on would not find there what it began with.
    """
    folder = Path(named)
    if not folder.exists():
        raise Halt(f"the {what} {folder} is not there any more: put it back", BAD_INPUT)
    found = dist.on_rank0(lambda: start.digest(folder), ready.world)
    began = {}
    if ready.checkpoint is not None:
        began = ready.checkpoint.source
    if began.get(f"{what}_sha256", found) != found:
        raise Halt(
            f"the {what} {folder} is not the one that this run began with: put that one back, or "
            "start another run",
            BAD_INPUT,
        )
    return {what: str(folder.resolve()), f"{what}_sha256": found}


def load_reference(ready, state: TrainState) -> tuple[Decoder, dict[str, str]]:
    """The frozen model that the policy began as, and what a checkpoint says of it."""
    named = ""
    if ready.checkpoint is not None:
        named = ready.checkpoint.source.get("reference", "")  # none: a run that had no KL yet
    named = named or str(start.read(ready.cfg.init_from).folder)
    source = frozen_source(ready, "reference", named)

    model = step.frozen(ready.cfg, ready.config, ready.device, state.mesh)
    start.load_into(model, start.read(named))
    return model, source


def load_reward(
    cfg: GradeConfig,
    ready,
    state: TrainState,
) -> RewardModel:
    """The frozen reward model of --reward_checkpoint, sharded like the policy."""
    config = dataclasses.replace(
        reward.read_config(cfg.reward_checkpoint), compute_dtype=ready.config.compute_dtype
    )
    body = step.frozen(cfg, config, ready.device, state.mesh)
    model = RewardModel(body).requires_grad_(False)
    reward.load_into(model, cfg.reward_checkpoint)
    return model


class PolicySource:
    """What both sources of batches have; each says how it evaluates validation prompts."""

    def __init__(
        self,
        ready,
        state: TrainState,
        must_stop: MustStop,
    ):
        self.ready = ready
        self.state = state
        self.cfg = ready.cfg
        self.rows: Prompts = ready.loader
        self.drawn = drawn_ids(ready.dataset)

    def open(self, log):
        self.log = log
        if self.cfg.eval_every and self.state.step == 0:
            self.evaluate()  # what the later validations are compared with


class IntuitorSource(PolicySource):
    """Groups of responses that the policy samples, and how it answers validation prompts."""

    cfg: IntuitorConfig

    def __init__(
        self,
        ready,
        state: TrainState,
        must_stop: MustStop,
    ):
        super().__init__(ready, state, must_stop)
        self.reference, self.frozen = None, {}
        if self.cfg.needs_reference:
            self.reference, self.frozen = load_reference(ready, state)
        self.objective = PolicyObjective(self.cfg.policy_loss(), self.reference)
        state.objective = self.objective

        stops = dist.on_rank0(lambda: origin.stop_ids(origin.kept(ready.folder)), ready.world)
        sampling = self.cfg.sampling(ready.dataset.eod_id, self.drawn)
        sampling = dataclasses.replace(sampling, stop_ids=stops)
        self.asked = self.cfg.validation_sampling(sampling)
        self.answers = intuitor.Answers.of(ready.dataset, stops)
        self.training = self._maker(sampling)
        self.sampling_seconds = 0.0

        self.recorded = ready.checkpoint.source if ready.checkpoint else {}
        self.guard = intuitor.Guard(**self.recorded.get("guard", {}))

    def _maker(self, sampling: Sampling) -> Intuitor:
        cfg = self.cfg
        settings = intuitor.Settings(
            context_length=cfg.context_length,
            reward=cfg.reward,
            prompts_per_micro_batch=cfg.batch_size,
            skip_zero_variance=cfg.skip_zero_variance,
        )
        return Intuitor(
            settings,
            sampling,
            cfg.policy_loss(),
            self.answers,
            self.state.model,
            self.reference,
            self.ready.world,
            own_reward(cfg.reward, self.ready.dataset),
        )

    def open(self, log):
        log.say(intuitor.vocabulary_choice(self.ready.config.vocab_size, self.drawn))
        if self.reference is None:
            log.say("the KL is not measured, because no reference is held: --keep_reference")
        super().open(log)

    # ---- a step

    def load(self, index: int) -> tuple[None, list[MicroBatch]]:
        """The groups of this rank's prompts, sampled now."""
        begin = time.perf_counter()
        world = self.ready.world
        own = self.rows.prompts(index, world.rank, world.size)
        micro_batches = self.training.batch(index, own)
        self.sampling_seconds = time.perf_counter() - begin
        return None, micro_batches

    def record(
        self,
        record: dict,
        loaded: None,
        result: StepResult,
        seconds: float,
    ):
        """What the policy did, and what the guard of collapses says of it."""
        found = self.training.figures() | self.objective.figures()
        record |= found | {"sampling_s": self.sampling_seconds}
        self.guard.after(found, self.log.say)

    def kept(self) -> dict:
        """The reference, also one that is not held now, and what the guard has seen."""
        return {**self.recorded, **self.frozen, "guard": dataclasses.asdict(self.guard)}

    # ---- validation

    def evaluate(self):
        """Answer validation prompts once each, as in training."""
        split = self.ready.dataset.split("val")
        number = min(self.cfg.eval_rows, split.num_documents)
        world = self.ready.world
        own = [
            read_prompt(self.ready.dataset, split, document, document)
            for document in range(world.rank, number, world.size)
        ]
        occasion = f"validation after step {self.state.step}"
        sampled = rollout.sample(self.state.model, own, self.asked, 0, world, occasion)
        counts = intuitor.Counts()
        for prompt, (sample,) in zip(own, sampled, strict=True):
            counts.add(sample, self.answers, prompt)

        found = counts.figures(self.ready.device)
        shown = {name: found[name] for name in VALIDATED if name in found}
        self.log.figures(self.state.step, "validation", shown)


class GradeSource(PolicySource):
    """Prompts whose responses a reward model judges."""

    cfg: GradeConfig

    def __init__(
        self,
        ready,
        state: TrainState,
        must_stop: MustStop,
    ):
        super().__init__(ready, state, must_stop)
        self.settings = self.cfg.settings(ready.dataset.eod_id, self.drawn)

        self.reference, reference = load_reference(ready, state)
        judge = frozen_source(ready, "reward", self.cfg.reward_checkpoint)
        self.frozen = reference | judge
        self.reward = load_reward(self.cfg, ready, state)
        if self.cfg.freeze_embeddings:
            grade.freeze_embeddings(state.model)
        self.objective = GradeObjective(self.settings, self.reference, self.reward)
        self.objective.advised = bool(ready.checkpoint and ready.checkpoint.source["advised"])
        state.objective = self.objective

    def open(self, log):
        log.say(grade.vocabulary_choice(self.ready.config.vocab_size, self.drawn))
        super().open(log)

    def load(self, index: int) -> tuple[None, list[MicroBatch]]:
        """This rank's prompts of a step, each with the seed of its noise."""
        world = self.ready.world
        of_ranks = [self.rows.prompts(index, rank, world.size) for rank in range(world.size)]
        own = of_ranks[world.rank]
        first = world.rank * len(own)
        micro_batches = grade.micro_batches(
            [torch.from_numpy(prompt.tokens) for prompt in own],
            range(first, first + len(own)),
            index,
            self.cfg.seed,
            self.cfg.batch_size,
            self.settings,
            self.ready.device,
        )
        for number, micro in enumerate(micro_batches):
            micro["all_tokens"] = torch.tensor(self._tokens_at(number, of_ranks))  # on the host
        return None, micro_batches

    def _tokens_at(self, number: int, of_ranks: Sequence[Sequence[Prompt]]) -> int:
        """The tokens of all ranks' micro-batches at a place."""
        size = self.cfg.batch_size
        part = slice(number * size, (number + 1) * size)
        prompts = [prompt for own in of_ranks for prompt in own[part]]
        return self.objective.tokens_of([len(prompt.tokens) for prompt in prompts])

    def record(
        self,
        record: dict,
        loaded: None,
        result: StepResult,
        seconds: float,
    ):
        found = self.objective.figures()
        record |= found
        self.objective.require_finite(found)
        if self.objective.advice:
            self.log.say(self.objective.advice)

    def kept(self) -> dict:
        """The models that are only read, and whether the advice was given."""
        return {**self.frozen, "advised": self.objective.advised}

    # ---- validation

    def evaluate(self):
        """The reward of responses that are drawn, to prompts of the validation split."""
        sampling = self.cfg.validation_sampling(self.ready.dataset.eod_id, self.drawn)
        found = hard_rewards(self.ready, self.state, self.reward, sampling)
        self.log.figures(self.state.step, "val", {"reward_mean": found})


def hard_rewards(
    ready,
    state: TrainState,
    rewards: RewardModel,
    sampling: Sampling,
) -> float:
    """The mean reward of one drawn response to each of the first --eval_rows validation prompts, of
    which --batch_size are answered at once if all are of one length.
    """
    dataset, world = ready.dataset, ready.world
    split = dataset.split("val")
    number = min(ready.cfg.eval_rows, split.num_documents)
    asked = [read_prompt(dataset, split, document, document) for document in range(number)]
    lengths = {len(prompt.tokens) for prompt in asked}
    size = ready.cfg.batch_size if len(lengths) == 1 else 1

    # every forward of a sharded model is a collective, so a rank that would have one prompt less
    # answers the first one again, which does not count
    more = -number % world.size
    own = [*asked, *asked[:1] * more][world.rank :: world.size]
    occasion = f"validation after step {state.step}"
    sampled = rollout.sample(state.model, own, sampling, 0, world, occasion)
    responses = [response for (response,) in sampled]
    total = torch.zeros((), dtype=torch.float64, device=ready.device)
    for begin in range(0, len(own), size):
        part = slice(begin, begin + size)
        prompts_BP = torch.from_numpy(np.stack([prompt.tokens for prompt in own[part]]))
        row = [x.to(ready.device) for x in (prompts_BP, *rollout.padded(responses[part]))]
        with torch.no_grad():
            reward_B = rewards.forward_hard(*row)
        places = range(world.rank + begin * world.size, number, world.size)
        total += reward_B[: len(places)].sum()
    rewards.reshard()
    return float(dist.all_sum(total)) / number

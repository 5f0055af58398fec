"""The parts of a post-training step that a simulation adds to `longhaul.step.train_step`: the
models that are only read, the objective, the rollout, and micro-batches in which every prompt and
every response is as long as the settings allow.

The rollout is a stage of its own, in which the policy's weights and optimizer states and the
reference are alive. Everything runs alike on fake tensors and on real ones.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from data.prompts import Prompt
from footprint.tracker import Tracker
from lab.posttrain import grade, policy, reward, rollout
from lab.posttrain.config import GradeConfig, IntuitorConfig
from lab.posttrain.grade import GradeObjective
from lab.posttrain.policy import Group, PolicyObjective, Response
from lab.posttrain.prompts import SharedPrompts
from lab.posttrain.reward import RewardModel
from lab.posttrain.rollout import Sampling
from longhaul import step
from longhaul.dist import local_shard
from longhaul.memory.batches import CPU, FewOfMany
from longhaul.memory.rehearsal import Rehearsal
from longhaul.memory.stages import ROLLOUT, VALIDATION
from longhaul.parallel import apply
from model import Decoder, KVCache, ModelConfig

MICRO_BATCHES = 2  # that run: the second adds to gradients that exist, and all others are like it


class Policy(Rehearsal):
    """A step of post-training."""

    def skeletons(self, config: ModelConfig, mesh: DeviceMesh | None) -> None:
        """The reference, if there is one."""
        if self.cfg.needs_reference:
            self.frozen["reference"] = step.skeleton(self.cfg, config, mesh)

    def begin(self, tracker: Tracker, state: step.TrainState) -> None:
        """Memory for the frozen models, and the state's objective."""
        self.tracker = tracker
        self.state = state
        for owner, model in self.frozen.items():
            step.materialise(model, self.cfg.seed, CPU)
            model.requires_grad_(False)
            for name, parameter in model.named_parameters():
                self.name(local_shard(parameter), "parameter", f"{name} ({owner})")
        state.objective = self.objective()

    def objective(self) -> step.Objective:
        """What the step minimises."""
        raise NotImplementedError

    def of_step(self, make: Callable[[], step.MicroBatch]) -> list[step.MicroBatch]:
        """The micro-batches of a step; what is left out of those that do not run is their weights,
        a number each before the first forward.
        """
        number = self.cfg.accumulation(self.ranks)
        running = number if self.every else min(number, MICRO_BATCHES)
        batch = [make() for _ in range(running)]
        return batch if running == number else FewOfMany(batch, number - running)

    def name(
        self,
        tensor: Tensor,
        category: str,
        name: str,
    ) -> None:
        """What a tensor's storage is, wherever it was made."""
        storage = self.tracker.trace.storages[self.tracker.register(tensor, category)]
        storage.category = category
        storage.module = name

    def sample(self, number: int, sampling: Sampling) -> None:
        """The first and the last forward of responses to so many prompts, of the longest."""
        tokens = np.zeros(self.cfg.longest_prompt, dtype=np.int64)
        first = min(number, sampling.prompts)
        prompts = [Prompt(position, tokens, tokens[:0]) for position in range(first)]
        rollout.rehearse(self.state.model, prompts, sampling, self._name_cache)

    def _name_cache(self, cache: KVCache) -> None:
        """Keys and values belong to their layers."""
        for index, layer in enumerate(cache.layers):
            prompt = getattr(layer, "prompt", None)
            for part in filter(None, (prompt, layer)):
                of_prompt = "prompt's " if part is prompt else ""
                self.name(part.k_BSGK, "buffer", f"layers.{index}.{of_prompt}cached keys")
                self.name(part.v_BSGK, "buffer", f"layers.{index}.{of_prompt}cached values")


# ---- Intuitor


class Intuitor(Policy):
    """A rollout of the policy, and the update over one row for each group."""

    def __init__(
        self,
        cfg: IntuitorConfig,
        ranks: int,
        every: bool,
    ):
        super().__init__(cfg, ranks, every)
        self.short = shortest_micro_batch(cfg)  # with values that fake tensors do not have

    def objective(self) -> PolicyObjective:
        return PolicyObjective(self.cfg.policy_loss(), self.frozen.get("reference"))

    def batch(self) -> list[step.MicroBatch]:
        for model in self.frozen.values():
            apply.reshard(model)  # as reading the figures of a step does
        self.state.stage(ROLLOUT)
        self._sample()
        self.state.stage("start")
        return self.of_step(lambda: stretched(self.short, self.cfg))

    def _sample(self) -> None:
        """The first and the last forward of the responses of training and of validation."""
        config = self.state.model.config
        sampling = self.cfg.sampling(eod_id=0, vocab_size=config.vocab_size)
        asked = [(self.cfg.rows_per_step(self.ranks), sampling)]
        if self.cfg.eval_every:
            asked.append((self.cfg.eval_rows, self.cfg.validation_sampling(sampling)))
        for rows, one in asked:
            self.sample(-(-rows // self.ranks), one)


def shortest_micro_batch(cfg: IntuitorConfig) -> step.MicroBatch:
    """That of a prompt of one token with responses of one token."""
    one = torch.zeros(1, dtype=torch.long)
    responses = [Response(one, 0.0, one.float()) for _ in range(cfg.group_size)]
    group = Group(one, responses)
    return policy.micro_batch([group], CPU)


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros for ids, ones for what may be divided by."""
    value = 1 if dtype.is_floating_point else 0
    return torch.full(shape, value, dtype=dtype, device=CPU)


def stretched(short: step.MicroBatch, cfg: IntuitorConfig) -> step.MicroBatch:
    """Tensors in the shapes of a micro-batch with the longest prompts and responses: nothing long
    exists if they are fake.

    A tensor has a value for each token of the row [1, N], for each response token [n], or one.
    """
    of_responses = [cfg.max_response_length for _ in range(cfg.group_size)]
    lengths = [cfg.longest_prompt, *of_responses]
    responses = cfg.batch_size * cfg.group_size * cfg.max_response_length
    shapes: list[tuple[int, ...]] = [(), (responses,), (1, cfg.batch_size * cfg.row_tokens)]
    found = {}
    for name, value in short.items():
        if isinstance(value, Tensor):
            found[name] = plain(shapes[value.ndim], value.dtype)
    return found | {"rows": SharedPrompts([lengths for _ in range(cfg.batch_size)])}


# ---- GRADE


class Grade(Policy):
    """Responses of soft tokens, which are made inside the loss, and their reward, by one method."""

    def __init__(
        self,
        cfg: GradeConfig,
        ranks: int,
        every: bool,
    ):
        super().__init__(cfg, ranks, every)
        # a run always leaves out the ids that are padding, though there may be none
        self.settings = cfg.settings(eod_id=0, vocab_size=cfg.model().vocab_size)
        one = torch.zeros(1, dtype=torch.long)
        prompts = [one for _ in range(cfg.batch_size)]
        numbers = range(cfg.batch_size)
        self.short = grade.micro_batches(
            prompts, numbers, 0, cfg.seed, cfg.batch_size, self.settings, CPU
        )[0]

    def skeletons(self, config: ModelConfig, mesh: DeviceMesh | None) -> None:
        """The reference, and a reward model of the shape that is named, or of the policy's."""
        super().skeletons(config, mesh)
        of_reward = config
        if self.cfg.reward_checkpoint:
            of_reward = dataclasses.replace(
                reward.read_config(self.cfg.reward_checkpoint), compute_dtype=config.compute_dtype
            )
        self.settings.check(config, of_reward, self.cfg.longest_prompt, self.cfg.context_length)
        self.frozen["reward"] = step.skeleton(self.cfg, of_reward, mesh)

    def begin(self, tracker: Tracker, state: step.TrainState) -> None:
        """Also the tables of positions, as the first step leaves them, which may so be short."""
        super().begin(tracker, state)
        for model, lengths in zip(self._models(), table_lengths(self.cfg), strict=True):
            for length in lengths:
                model.rotary(length, CPU)

    def _models(self) -> list[Decoder]:
        return [self.state.model, self.frozen["reference"], self.frozen["reward"]]

    def objective(self) -> GradeObjective:
        if self.cfg.freeze_embeddings:
            grade.freeze_embeddings(self.state.model)
        self.rewards = RewardModel(self.frozen["reward"]).requires_grad_(False)
        return GradeObjective(self.settings, self.frozen["reference"], self.rewards)

    def batch(self) -> list[step.MicroBatch]:
        self._forget()
        if self.cfg.eval_every and self.state.step:
            self._validate()
        # a first step, which only makes the optimizer's states, is as good with one token
        tokens = self.settings.max_new_tokens if self.state.step else 1
        self.state.objective.settings = dataclasses.replace(self.settings, max_new_tokens=tokens)
        shapes: list[tuple[int, ...]] = [
            (),
            (self.cfg.batch_size,),
            (self.cfg.batch_size, self.cfg.longest_prompt),
        ]
        return self.of_step(
            lambda: {name: plain(shapes[one.ndim], one.dtype) for name, one in self.short.items()}
        )

    def _validate(self) -> None:
        """A response to each prompt of a validation's first batch, and its reward."""
        self.state.stage(VALIDATION)
        cfg = self.cfg
        B = min(cfg.batch_size, -(-cfg.eval_rows // self.ranks))
        self.sample(B, cfg.validation_sampling(eod_id=0, vocab_size=self.settings.vocab_size))
        prompts_BP = plain((B, cfg.longest_prompt), torch.long)
        tokens_BT = plain((B, self.settings.max_new_tokens), torch.long)
        with torch.no_grad():
            self.rewards.forward_hard(prompts_BP, tokens_BT, plain(tokens_BT.shape, torch.float32))
        self.rewards.reshard()
        self.state.stage("start")

    def _forget(self) -> None:
        """What reading the figures of a step does."""
        objective = self.state.objective
        objective.sums = None
        objective.largest = None
        objective.latest = None
        for model in self.frozen.values():
            apply.reshard(model)


def table_lengths(cfg: GradeConfig) -> list[list[int]]:
    """The positions that the rotary tables of policy, reference and reward model have, one after
    the other: a table starts as long as the first row, and doubles when a longer one comes.
    """
    prompt, whole = cfg.longest_prompt, cfg.longest_prompt + cfg.max_new_tokens
    grown = [prompt]
    while grown[-1] < whole - 1:
        grown.append(2 * grown[-1])

    at_once = ("gumbel_legacy", "ste_legacy")
    of_reference = [whole] if cfg.method in at_once else grown
    return [grown, of_reference, [whole]]

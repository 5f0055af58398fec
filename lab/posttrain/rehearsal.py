"""The steps of post-training as the planner runs them, around `longhaul.step.train_step`: the
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
from footprint.pretend.places import START
from lab.posttrain import grade, policy, reward, rollout
from lab.posttrain.config import GradeConfig, IntuitorConfig
from lab.posttrain.grade import GradeObjective
from lab.posttrain.policy import Group, PolicyObjective, Response
from lab.posttrain.prompts import SharedPrompts
from lab.posttrain.reward import RewardModel
from lab.posttrain.rollout import Sampling
from longhaul import step as trainer
from longhaul.parallel import apply
from longhaul.planner.batches import CPU, FewOfMany
from longhaul.planner.program import ROLLOUT, VALIDATION, Program
from model import Decoder, KVCache, ModelConfig

MICRO_BATCHES = 2  # that run: the second adds to gradients that exist, and all others are like it


class Policy(Program):
    """A step of post-training."""

    frozen: dict[str, Decoder]  # the models that are only read

    def begin(
        self, state: trainer.TrainState, config: ModelConfig, mesh: DeviceMesh | None
    ) -> None:
        """The frozen models, and the state's objective."""
        self.model = state.model
        self.frozen = self.make_frozen(config, mesh)
        state.objective = self.objective()

    def make_frozen(self, config: ModelConfig, mesh: DeviceMesh | None) -> dict[str, Decoder]:
        """The reference, if there is one."""
        if not self.cfg.needs_reference:
            return {}
        return {"reference": trainer.frozen(self.cfg, config, self.device, mesh)}

    def objective(self) -> trainer.Objective:
        """What the step minimises."""
        raise NotImplementedError

    def read_figures(self, state: trainer.TrainState) -> None:
        """Their sums, and the weights that the last forwards have gathered."""
        state.objective.sums = None
        for model in self.frozen.values():
            apply.reshard(model)

    def of_step(self, make: Callable[[], trainer.MicroBatch]) -> list[trainer.MicroBatch]:
        """The micro-batches of a step; what is left out of those that do not run is their weights,
        a number each before the first forward.
        """
        number = self.cfg.accumulation(self.ranks)
        running = number if self.every else min(number, MICRO_BATCHES)
        batch = [make() for _ in range(running)]
        return batch if running == number else FewOfMany(batch, number - running, self.device)

    def sample(self, number: int, sampling: Sampling) -> None:
        """The first and the last forward of responses to so many prompts, of the longest."""
        tokens = np.zeros(self.cfg.longest_prompt, dtype=np.int64)
        first = min(number, sampling.prompts)
        prompts = [Prompt(position, tokens, tokens[:0]) for position in range(first)]
        rollout.rehearse(self.model, prompts, sampling, self._name_cache)

    def _name_cache(self, cache: KVCache) -> None:
        """Keys and values belong to their layers."""
        if self.tracker is None:
            return
        for index, layer in enumerate(cache.layers):
            prompt = getattr(layer, "prompt", None)
            for part in filter(None, (prompt, layer)):
                of_prompt = "prompt's " if part is prompt else ""
                self.tracker.call(part.k_BSGK, "buffer", f"layers.{index}.{of_prompt}cached keys")
                self.tracker.call(part.v_BSGK, "buffer", f"layers.{index}.{of_prompt}cached values")


# ---- Intuitor


class Intuitor(Policy):
    """A rollout of the policy, and the update over one row for each group."""

    def __init__(self, cfg: IntuitorConfig, *args, **options):
        super().__init__(cfg, *args, **options)
        self.short = shortest_micro_batch(cfg)  # with values that fake tensors do not have

    def objective(self) -> PolicyObjective:
        return PolicyObjective(self.cfg.policy_loss(), self.frozen.get("reference"))

    def batch(self, state: trainer.TrainState) -> list[trainer.MicroBatch]:
        state.stage(ROLLOUT)
        self._sample()
        state.stage(START)
        return self.of_step(lambda: stretched(self.short, self.cfg, self.device))

    def _sample(self) -> None:
        """The first and the last forward of the responses of training and of validation."""
        sampling = self.cfg.sampling(eod_id=0, vocab_size=self.config.vocab_size)
        asked = [(self.cfg.rows_per_step(self.ranks), sampling)]
        if self.cfg.eval_every:
            asked.append((self.cfg.eval_rows, self.cfg.validation_sampling(sampling)))
        for rows, one in asked:
            self.sample(-(-rows // self.ranks), one)


def shortest_micro_batch(cfg: IntuitorConfig) -> trainer.MicroBatch:
    """That of a prompt of one token with responses of one token."""
    one = torch.zeros(1, dtype=torch.long)
    responses = [Response(one, 0.0, one.float()) for _ in range(cfg.group_size)]
    group = Group(one, responses)
    return policy.micro_batch([group], CPU)


def plain(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Zeros for ids, ones for what may be divided by."""
    value = 1 if dtype.is_floating_point else 0
    return torch.full(shape, value, dtype=dtype, device=device)


def stretched(
    short: trainer.MicroBatch,
    cfg: IntuitorConfig,
    device: torch.device = CPU,
) -> trainer.MicroBatch:
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
            found[name] = plain(shapes[value.ndim], value.dtype, device)
    return found | {"rows": SharedPrompts([lengths for _ in range(cfg.batch_size)])}


# ---- GRADE


class Grade(Policy):
    """Responses of soft tokens, which are made inside the loss, and their reward, by one method."""

    def __init__(self, cfg: GradeConfig, *args, **options):
        super().__init__(cfg, *args, **options)
        # a run always leaves out the ids that are padding, though there may be none
        self.settings = cfg.settings(eod_id=0, vocab_size=cfg.model().vocab_size)
        one = torch.zeros(1, dtype=torch.long)
        prompts = [one for _ in range(cfg.batch_size)]
        numbers = range(cfg.batch_size)
        self.short = grade.micro_batches(
            prompts, numbers, 0, cfg.seed, cfg.batch_size, self.settings, CPU
        )[0]

    def begin(
        self, state: trainer.TrainState, config: ModelConfig, mesh: DeviceMesh | None
    ) -> None:
        """Also the tables of positions, as the first step leaves them, which may so be short."""
        super().begin(state, config, mesh)
        models = [state.model, self.frozen["reference"], self.frozen["reward"]]
        for model, lengths in zip(models, table_lengths(self.cfg), strict=True):
            for length in lengths:
                model.rotary(length, self.device)

    def make_frozen(self, config: ModelConfig, mesh: DeviceMesh | None) -> dict[str, Decoder]:
        """The reference, and a reward model of the shape that is named, or of the policy's."""
        found = super().make_frozen(config, mesh)
        of_reward = config
        if self.cfg.reward_checkpoint:
            of_reward = dataclasses.replace(
                reward.read_config(self.cfg.reward_checkpoint), compute_dtype=config.compute_dtype
            )
        self.settings.check(config, of_reward, self.cfg.longest_prompt, self.cfg.context_length)
        return found | {"reward": trainer.frozen(self.cfg, of_reward, self.device, mesh)}

    def objective(self) -> GradeObjective:
        if self.cfg.freeze_embeddings:
            grade.freeze_embeddings(self.model)
        self.rewards = RewardModel(self.frozen["reward"]).requires_grad_(False)
        return GradeObjective(self.settings, self.frozen["reference"], self.rewards)

    def batch(self, state: trainer.TrainState) -> list[trainer.MicroBatch]:
        if self.cfg.eval_every and state.step:
            state.stage(VALIDATION)
            self._validate()
            state.stage(START)
        # a first step, which only makes the optimizer's states, is as good with one token
        tokens = self.settings.max_new_tokens if state.step else 1
        state.objective.settings = dataclasses.replace(self.settings, max_new_tokens=tokens)
        B = self.cfg.batch_size
        shapes: list[tuple[int, ...]] = [(), (B,), (B, self.cfg.longest_prompt)]

        def make() -> trainer.MicroBatch:
            found = {}
            for name, one in self.short.items():
                found[name] = plain(shapes[one.ndim], one.dtype, self.device)
            return found

        return self.of_step(make)

    def _validate(self) -> None:
        """A response to each prompt of a validation's first batch, and its reward."""
        cfg = self.cfg
        B = min(cfg.batch_size, -(-cfg.eval_rows // self.ranks))
        self.sample(B, cfg.validation_sampling(eod_id=0, vocab_size=self.settings.vocab_size))
        prompts_BP = plain((B, cfg.longest_prompt), torch.long, self.device)
        tokens_BT = plain((B, self.settings.max_new_tokens), torch.long, self.device)
        counts_BT = plain(tokens_BT.shape, torch.float32, self.device)
        with torch.no_grad():
            self.rewards.forward_hard(prompts_BP, tokens_BT, counts_BT)
        self.rewards.reshard()

    def read_figures(self, state: trainer.TrainState) -> None:
        """Also the figures of the newest responses."""
        super().read_figures(state)
        state.objective.largest = None
        state.objective.latest = None


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

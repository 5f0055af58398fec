"""Train a policy through its reward: `python -m lab.grade --checkpoint runs/mine ...`.

A response is a mixture of tokens at each place, which a frozen reward model reads, so that the
gradient of the reward reaches the policy (GRADE). --demo needs nothing else: it makes reviews,
trains a first model and a reward model on them, and improves the first. docs/LAB.md has more.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from base import durable
from data.writer import choose_validation, write_dataset
from lab.posttrain import demo, grade_demo, memory, reviews, reward
from lab.posttrain.config import GradeConfig, with_sources
from lab.posttrain.grade import METHODS
from lab.posttrain.grade_demo import Score
from lab.posttrain.policies import GradeSource, judged_prompts
from longhaul import cli, dist, qwen3, step
from longhaul.checkpoint import load
from longhaul.config import TrainConfig
from longhaul.run import training

SCORE = "test.json"  # in a run's folder: what the demo measured at its end
# of 96 prompts of one length a dataset takes 24: the other half is for longer ones
VALIDATION_SHARE = 0.5

# What the demo runs with, unless the command line says otherwise.
DEMO = {
    "output_dir": "runs/grade-demo",
    "context_length": grade_demo.CONTEXT,
    "max_new_tokens": grade_demo.RESPONSE,
    "gumbel_topk": 64,
    "tau_start": 1.0,
    "kl_coef": 0.3,
    "batch_size": 16,
    "warmup_steps": 5,
    "lr": 1e-3,
    "dtype": "fp32",
    "device": "cpu",
    "eval_every": 25,
    "gradient_checkpointing": "none",
}


# The settings that name what the demo made, and where it is.
MADE = {"init_from": "base", "reward_checkpoint": "reward", "data": "prompts"}


def main(args: list[str] | None = None):
    """The command line; ends as longhaul/exits.py says."""
    words = list(sys.argv[1:] if args is None else args)
    if memory.asked(words, memory.grade_table):
        return
    added = demo.prepared(GradeConfig, words, DEMO, MADE, make_demo, check_demo)
    settings = added | cli.given(GradeConfig, words)
    if settings.get("method") == "all":
        every_method(words, settings)
    else:
        run(words, settings)


def run(words: Sequence[str], settings: dict):
    """Train with these settings, which the command line has given."""
    training.main(PROGRAM, list(words), lambda typed: with_sources(typed | settings))


def every_method(words: Sequence[str], settings: dict):
    """Train by every method, each in a folder of its own, and print what each reached. With --plan,
    print every plan.
    """
    if dist.World.from_environment().size > 1:
        dist.refuse(
            "lab.grade: error: --method all runs one method after the other in one process: "
            "start it without torchrun, or give one --method"
        )
    folder = Path(settings.get("output_dir", GradeConfig.output_dir))
    for method in METHODS:
        print(f"== {method}", flush=True)
        try:
            run(words, settings | {"method": method, "output_dir": str(folder / method)})
        except SystemExit as end:
            if end.code:  # a plan that fits ends the program with 0
                raise

    for method in METHODS:
        print(f"{method:<14} {result(folder / method)}")


def result(folder: Path) -> str:
    """What a run reached: in the demo by prompts that nothing saw, else by its last validation."""
    score, log = folder / SCORE, folder / "metrics.jsonl"
    if score.exists():
        return Score(**json.loads(score.read_text())).line()
    if log.exists():
        records = [json.loads(line) for line in log.read_text().splitlines()]
        rewards = [record["val_reward_mean"] for record in records if "val_reward_mean" in record]
        if rewards:
            return f"validation reward {rewards[-1]:.3f}"
    return "not measured"


# ---- the demo


def check_demo(cfg: GradeConfig):
    """ValueError for what cannot run with the demo's models and prompts."""
    model = grade_demo.base_config().model()
    methods = METHODS if cfg.method == "all" else (cfg.method,)
    for method in methods:
        settings = dataclasses.replace(cfg, method=method).settings(reviews.END)
        settings.check(model, model, reviews.PROMPT, cfg.context_length)


def make_demo(folder: Path, seed: int):
    """The prompts, the first model and the reward model of the demo."""
    write_prompts(folder / "prompts")
    cfg = grade_demo.base_config(seed)
    base = grade_demo.train_base(cfg)
    rewards = grade_demo.train_reward(base, cfg)
    reward.save(rewards, folder / "reward")
    qwen3.to_hf(base, folder / "base")
    print(f"test, before: {grade_demo.evaluate(base, rewards, 'test').line()}", flush=True)


def write_prompts(folder: Path):
    """A dataset of the prompts of the training and the validation split: those of the latter are
    where a dataset takes its own.
    """
    documents = sum(reviews.SPLITS[name] for name in ("train", "validation"))
    lengths = np.full(documents, reviews.PROMPT + 1)
    chosen = set(choose_validation(lengths, VALIDATION_SHARE))
    texts = {name: iter(reviews.prompts(name)) for name in ("train", "validation")}
    write_dataset(
        (next(texts["validation" if index in chosen else "train"]) for index in range(documents)),
        folder,
        vocab_size=reviews.VOCABULARY,
        eod_id=reviews.END,
        val_fraction=VALIDATION_SHARE,
    )


def test_score(cfg: GradeConfig):
    """In the demo, print and keep the rewards of the newest checkpoint, by the prompts of the test
    split.
    """
    if not cfg.demo:
        return
    checkpoint = load.newest(Path(cfg.output_dir))
    policy = load.load_model(load.verified(checkpoint), dtype="float32")
    plain = TrainConfig(dtype="fp32", device="cpu")
    judge = reward.read_config(cfg.reward_checkpoint)
    rewards = reward.RewardModel(step.frozen(plain, judge, "cpu"))
    reward.load_into(rewards, cfg.reward_checkpoint)

    score = grade_demo.evaluate(policy, rewards, "test")
    print(f"test, after: {score.line()}", flush=True)
    durable.write_json(Path(cfg.output_dir) / SCORE, dataclasses.asdict(score))


PROGRAM = training.Program(
    config=GradeConfig,
    description=__doc__.splitlines()[0],
    source=GradeSource,
    rows=judged_prompts,
    finished=test_score,
)


if __name__ == "__main__":
    main()

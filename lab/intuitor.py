"""Train a policy from its own certainty: `python -m lab.intuitor --checkpoint runs/mine ...`.

Of each prompt a group of responses is sampled and rewarded, by self-certainty or by another
--reward, and the policy learns from how they differ (GRPO). --demo needs nothing else: it makes a
task of sums, trains a first model on it, and improves that. docs/LAB.md says more.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import sys
from pathlib import Path

from data import sums
from lab.posttrain import demo, memory
from lab.posttrain.config import IntuitorConfig, with_sources
from lab.posttrain.policies import IntuitorSource, prompts_in_order
from longhaul.run import training

PROGRAM = training.Program(
    config=IntuitorConfig,
    description=__doc__.splitlines()[0],
    source=IntuitorSource,
    rows=prompts_in_order,
)

# The first model of the demo, which works out some sums and guesses the others.
FIRST = f"""
    --model_size tiny --vocab_size {sums.VOCABULARY} --context_length {sums.LENGTH} --dtype fp32
    --model_overrides hidden_size=64 num_layers=2 num_heads=2 num_kv_heads=2 head_dim=32
    ffn_size=128 tie_embeddings=false --batch_size 64 --max_steps 600 --warmup_steps 20 --lr 1e-2
    --schedule cosine:0.02 --weight_decay 0 --device cpu --eval_every 0 --save_every 1000
    --optimizer muon
"""

# What the demo runs with, unless the command line says otherwise.
DEMO = {
    "output_dir": "runs/intuitor-demo",
    "context_length": sums.LENGTH,
    "max_response_length": 10,
    "global_batch_size": 16,
    "batch_size": 16,
    "max_steps": 90,
    "warmup_steps": 5,
    "lr": 2e-4,
    "kl_coef": 1.0,
    "dtype": "fp32",
    "device": "cpu",
    "eval_every": 30,
    "eval_rows": 500,
    "gradient_checkpointing": "none",
}


# The settings that name what the demo made, and where it is.
MADE = {"init_from": "base", "data": "asked"}


def main(args: list[str] | None = None):
    """The command line; ends as longhaul/exits.py says."""
    words = list(sys.argv[1:] if args is None else args)
    if memory.asked(words, memory.memory_table):
        return
    added = demo.prepared(IntuitorConfig, words, DEMO, MADE, make_demo)
    training.main(PROGRAM, words, lambda typed: with_sources(added | typed))


def make_demo(folder: Path, seed: int):
    """Sums to begin with, sums that are asked, and the first model."""
    for name, worked in (("sums", "0.4"), ("asked", "1")):
        given = ["--output", str(folder / name), "--worked", worked, "--seed", str(seed)]
        demo.alone("data.sums", given)
    paths = ["--data", str(folder / "sums"), "--output_dir", str(folder / "base")]
    demo.alone("train", [*FIRST.split(), *paths, "--seed", str(seed)])


if __name__ == "__main__":
    main()

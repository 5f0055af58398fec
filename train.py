"""Train a decoder: `python train.py`, or `torchrun --nproc_per_node=2 train.py` on two ranks.

longhaul/run/training.py has what a run does, and longhaul/step.py what a step does.
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

from longhaul.config import TrainConfig
from longhaul.run import training
from longhaul.run.pretraining import Pretraining

PROGRAM = training.Program(TrainConfig, __doc__.splitlines()[0], Pretraining)


def main(args: list[str] | None = None):
    """The command line; ends as longhaul/exits.py says."""
    training.main(PROGRAM, args)


if __name__ == "__main__":
    main()

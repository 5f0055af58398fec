"""Row 43 of the fault matrix: a machine that computes wrongly and says nothing."""

from functools import partial
from pathlib import Path

import torch

from longhaul import step
from selfcheck.faults import runs
from selfcheck.faults.rows import Row, require

STEPS = ["--max_steps", "8", "--save_every", "4", "--audit_every", "3"]


def flip_once(name: str, call: int):
    """Flip one bit of one element of the gradient of parameter `name` when gradients are computed
    for the `call`-th time.
    """
    original, calls = step.gradients, []

    def gradients(state, *args):
        computed = original(state, *args)
        calls.append(1)
        if len(calls) == call:
            gradient = dict(state.model.named_parameters())[name].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(torch.int32).view(-1)[3] ^= 1  # the least significant bit
        return computed

    step.gradients = gradients


def silent_corruption(trials: int, folder: Path) -> str:
    """Gradients are computed for steps 1, 2, 3, 3 again, 4, ...: calls 3 and 4 are step 3's."""
    source, name = runs.dataset(folder / "data"), "layers.1.mlp.down_proj.weight"
    runs.finish(runs.arguments(source, folder / "whole", *STEPS[:4]), folder / "whole.log")
    args = runs.arguments(source, folder / "run", *STEPS)
    for call in (3, 4):
        wrong = runs.finish(args, folder / f"wrong{call}", 5, before=partial(flip_once, name, call))
        require(
            "step 3 computed twice" in wrong.last_line() and name in wrong.last_line(),
            wrong.last_line(),
        )
    runs.finish(args, folder / "again")
    require(
        runs.same_end(folder / "run", folder / "whole"),
        "an audited run has other bits than one that is not",
    )
    ranks = runs.start_ranks(
        runs.arguments(source, folder / "ranks", *STEPS),
        folder / "log",
        2,
        before=partial(flip_once, name, 4),
    )
    codes = [rank.wait() for rank in ranks]
    require(codes == [5, 5], f"on two ranks the codes are {codes}")
    return (
        "one flipped bit of one gradient in either computation: code 5 naming step and tensor, "
        "also on 2 ranks; audited runs keep their bits"
    )


ROWS: list[Row] = [
    Row(
        43,
        "silent corruption of a step",
        "--audit_every N compares bits: 5",
        silent_corruption,
        slow=True,
    )
]

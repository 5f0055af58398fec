"""footprint/: its predictions for one of several ranks against ranks that run."""

import torch

from footprint import measure, observe
from longhaul import dist
from tests.footprint_models import OVER_RANKS


def recorded_each(world: dist.World, names: list[str]) -> list[tuple[dict, int]]:
    """For each name what the tracker sees in every stage, and what the allocator records."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        build, step = OVER_RANKS[name]
        found.append((observe(build, step).by_stage, measure(build, step)))
    return found

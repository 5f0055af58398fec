"""A step's memory as rows of text for the screen. Sizes are bytes; GiB = 2^30 bytes."""

from collections.abc import Sequence

import torch

from footprint.cards.allocator import GIB
from footprint.cards.device import TOTALS, Demand, waterfall
from footprint.pretend.cuda import IN_HEADING
from footprint.record.timeline import Sizes, used_categories


def heading(device: str, ranks: int, left_out: Sequence[str] = ()) -> str:
    """What a prediction is for, and which large parts of the step it leaves out. Another torch may
    take other kernels, and so other bytes.
    """
    known = f"predicted for {device} with torch {torch.__version__}, one of {ranks} rank(s)"
    large = [IN_HEADING[words] for words in left_out if words in IN_HEADING]
    return ", ".join([known, *large])


def waterfalls(demand: Demand) -> dict[str, dict[str, int]]:
    """Live to device in bytes, for both kinds of segments."""
    return {
        "classic": waterfall(demand.classic, demand.ranks),
        "expandable": waterfall(demand.expandable, demand.ranks),
    }


def stage_rows(stages: dict[str, Sizes], peak_stage: str) -> list[str]:
    """Category x stage, each stage at its largest moment."""
    used = used_categories(stages.values())
    width = max(20, *(len(stage) + 1 for stage in stages))
    head = "".join(f"{name:>12}" for name in [*used, "total"])
    rows = [f"{'stage at its peak':<{width}}{head}"]
    for stage, sizes in stages.items():
        values = [sizes.get(name, 0) for name in used]
        values.append(sum(sizes.values()))
        figures = "".join(f"{value / GIB:>12.3f}" for value in values)
        mark = "  <- peak" if stage == peak_stage else ""
        rows.append(f"{stage:<{width}}{figures}{mark}")
    return rows


def tensor_rows(groups: list[dict]) -> list[str]:
    """The largest tensors at the peak."""
    rows = ["largest tensors at the peak:"]
    for group in groups:
        size = group["count"] * group["bytes"] / GIB
        shape = "x".join(str(length) for length in group["shape"])
        rows.append(
            f"  {size:>8.3f} GiB {group['count']:>3} x {group['category']:<12}"
            f"{group['dtype']:<9} {shape:<22} {group['module']} ({group['op']})"
        )
    return rows


def device_rows(demand: Demand) -> list[str]:
    """The waterfall for both kinds of segments."""
    both = waterfalls(demand)
    classic = both["classic"]
    expandable = both["expandable"]
    rows = [f"{'GiB per rank':<22}{'classic segments':>18}{'expandable':>14}"]
    for name in classic:
        sign = "=" if name in TOTALS else "+"
        figures = f"{classic[name] / GIB:>18.2f}{expandable[name] / GIB:>14.2f}"
        rows.append(f"{sign} {name:<20}{figures}")
    return rows

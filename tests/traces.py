"""What tests ask of a trace and the product does not."""

from footprint.record.trace import CATEGORIES, Trace


def by_category(trace: Trace, time: int) -> dict[str, int]:
    """Bytes alive at `time` by category, workspace included; empty categories are left out."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    for storage in trace.at(time):
        sizes[storage.category] += storage.size
    workspaces = [size for at, size, _ in trace.workspaces if at == time]
    sizes["workspace"] = max(workspaces, default=0)
    return {name: size for name, size in sizes.items() if size}

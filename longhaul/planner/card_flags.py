"""The flags of footprint's OnCard as the parser of longhaul's commands takes them."""

from dataclasses import dataclass

from footprint.steps.door import DEFAULT_GIB, STANDARD_OUTPUT, OnCard
from longhaul.cli import flag


@dataclass(frozen=True)
class CardFlags(OnCard):
    """The card that shall hold a step, the questions about it, and the files of the answers."""

    gpu: str = flag("", "name of the card that shall hold the step, such as H100", group="profiler")
    gpu_memory_gib: float = flag(
        0.0,
        f"memory of one GPU, instead of --gpu; --solve assumes {DEFAULT_GIB:g} if neither is given",
        ("vram",),
        group="profiler",
    )
    cc: int = flag(
        0,
        "compute capability x 10 of the GPU, such as 86; 0: that of --gpu, or 80",
        at_least=0,
        at_most=999,
        group="profiler",
    )
    html: str = flag(
        "", "HTML file to write: the step's timeline and tables on one page", group="profiler"
    )
    json: str = flag(
        "",
        "file of every result; without a name, standard output, and all else goes to standard "
        "error",
        bare=STANDARD_OUTPUT,
        group="profiler",
    )

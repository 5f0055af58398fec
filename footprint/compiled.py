"""Compiled regions, which are refused: what a compiler fuses, and holds, is not predicted."""

import contextlib
from collections.abc import Iterator

from footprint.patches import patched
from footprint.refusal import Refused, place


@contextlib.contextmanager
def refusing_compiled() -> Iterator[None]:
    """Functions, modules and optimizers that are compiled run as they are inside the `with` block,
    at the end of which they are refused with the line that first called one.
    """
    from torch._dynamo import eval_frame

    places: list[str] = []
    choose = eval_frame._callback_from_stance  # what compiles, at each call

    def eager(callback):
        if callback not in (None, False):
            places.append(place())
            return None
        return choose(callback)

    with patched({(eval_frame, "_callback_from_stance"): eager}):
        yield
    if places:
        raise Refused(
            f"{places[0]}: what runs here is compiled, which is not predicted: predict it without "
            "torch.compile, which usually needs more memory"
        )

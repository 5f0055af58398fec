"""Nothing is downloaded while memory is predicted: a model needs no weights for it, and what came
would be lost.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator

from footprint.refusal import Refused, place

HERE = ("localhost", "127.", "::1", "0.0.0.0")
_watched: set[int] = set()  # threads that predict


class Connects(BaseException):
    """A connection that is refused; no library that downloads takes it for one that failed."""


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """A connection to another machine, inside the `with` block and by its thread, is refused."""
    _listen()
    thread = threading.get_ident()
    _watched.add(thread)
    try:
        yield
    except Connects as refused:
        raise Refused(str(refused)) from None
    finally:
        _watched.discard(thread)


@functools.cache
def _listen() -> None:
    """Hear of every connection that this process opens; Python has no way to stop it."""
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple) -> None:
    if threading.get_ident() not in _watched:
        return
    host = _host(event, args)
    if host and not host.startswith(HERE):
        where = place().split(" (")[0]
        raise Connects(
            f"{where}: this connects to {host}, but nothing is downloaded during a prediction: "
            "make the model from its configuration, without weights, and the batch by "
            "torch.randint or torch.randn"
        )


def _host(event: str, args: tuple) -> str:
    """The machine that an event is about; "" for all other events."""
    if event == "socket.getaddrinfo":
        return str(args[0] or "")
    if event == "socket.connect" and isinstance(args[1], tuple):
        return str(args[1][0])
    return ""

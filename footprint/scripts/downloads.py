"""Nothing is downloaded during a prediction: what a script would download is named instead."""

import socket
import sys
import threading
import types
from collections.abc import Iterator

from footprint.pretend.outside import LOCAL
from footprint.python.late import Awaited
from footprint.python.patches import Patches
from footprint.python.refusal import Refused, Stopped, place, place_of

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
# classes of errors of Hugging Face's libraries for what is not on this machine
NOT_HERE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "OfflineModeError")
# variables of libraries that name what is downloaded, the best name first
REPOSITORIES = ("repo_id", "pretrained_model_name_or_path")
NAMES = (*REPOSITORIES, "url", "fullurl", "full_url")


def offline() -> Awaited:
    """A hub that was imported before reads no environment any more."""
    return {"huggingface_hub.constants": lambda module: {(module, "HF_HUB_OFFLINE"): True}}


def no_downloads() -> Patches:
    """Looking up another machine is refused, with the name of what is wanted of it."""
    thread = threading.get_ident()
    find = socket.getaddrinfo

    def refused(host: object, *args, **kwargs):
        is_local = str(host or "localhost").startswith(LOCAL)
        if is_local or threading.get_ident() != thread:
            return find(host, *args, **kwargs)
        raise Stopped(_words(place(), _wanted(_running()) or f"from {host}"))

    return {(socket, "getaddrinfo"): refused}


def missing_download(error: BaseException) -> Refused | None:
    """The refusal of a script that wants what is not on this machine; None for another error."""
    chain = list(_chain(error))
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    if not kinds & set(NOT_HERE):
        return None
    frames = [frame for one in chain for frame in _frames(one.__traceback__)]
    wanted = _wanted(reversed(frames)) or str(error).splitlines()[0]
    return Refused(_words(place_of(error.__traceback__), wanted))


def _words(where: str, wanted: str) -> str:
    return (
        f"{where}: the script downloads {wanted}, and nothing is downloaded during a prediction: "
        "download it first, as a short run of the script would, and predict it then"
    )


def _wanted(frames: Iterator[types.FrameType]) -> str:
    """What is downloaded, by the variables of the libraries that run, innermost first."""
    frames = list(frames)
    for name in NAMES:
        for frame in frames:
            value = frame.f_locals.get(name)
            value = getattr(value, "full_url", value)
            is_whole = isinstance(value, str) and (name in REPOSITORIES or "://" in value)
            if is_whole and value:
                return value
    return ""


def _running() -> Iterator[types.FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(raised: types.TracebackType | None) -> Iterator[types.FrameType]:
    while raised is not None:
        yield raised.tb_frame
        raised = raised.tb_next


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

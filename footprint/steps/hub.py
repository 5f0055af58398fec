"""The folder of a model that is given by its name on the Hugging Face hub, such as Qwen/Qwen3-8B.

Of the model only config.json is needed. It is taken from the hub's cache on this machine, and only
if it is not there, the hub is asked for this one file.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

CONFIG = "config.json"


def model_folder(given: str, say: Callable[[str], None]) -> str:
    """A folder as it is given, or that of config.json of a model on the hub; `say` is told which.

    ValueError if neither this machine nor the hub has it.
    """
    if Path(given).exists() or not _is_name(given):
        return given
    hub = importlib.import_module("huggingface_hub")
    found = _main_revision(hub, given)
    if found is None:
        found = _only_revision(hub, given)
    if found is not None:
        say(f"{given}: config.json is read from {found.parent}")
        return str(found.parent)
    found = _downloaded(hub, given)
    say(f"{given}: config.json, and nothing else, was downloaded to {found.parent}")
    return str(found.parent)


def _is_name(given: str) -> bool:
    """Whether the hub may have a model of this name."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    utils = importlib.import_module("huggingface_hub.utils")
    try:
        utils.validate_repo_id(given)
    except utils.HFValidationError:
        return False
    return True


# ---- the cache on this machine


def _main_revision(hub: ModuleType, name: str) -> Path | None:
    """config.json of the revision that the hub called main when it was last asked."""
    found = hub.try_to_load_from_cache(name, CONFIG)
    return Path(found) if isinstance(found, str) else None


def _only_revision(hub: ModuleType, name: str) -> Path | None:
    """config.json of a revision that was asked for by its number, if there is one and no other."""
    found = list(_cache_folder(hub, name).glob(f"snapshots/*/{CONFIG}"))
    return found[0] if len(found) == 1 else None


def _cache_folder(hub: ModuleType, name: str) -> Path:
    folder = f"models--{name.replace('/', '--')}"
    return Path(hub.constants.HF_HUB_CACHE) / folder


# ---- the hub


def _downloaded(hub: ModuleType, name: str) -> Path:
    """config.json, which the hub has sent; ValueError if it has not."""
    try:
        with _quiet(hub):
            return Path(hub.hf_hub_download(name, CONFIG))
    except OSError as error:  # the kind of all that a hub or a missing network answers
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--hf {name}: there is no such folder, no {CONFIG} of the main revision in "
            f"{_cache_folder(hub, name)}, and the hub gave none ({reason}): download it with "
            f"`hf download {name} {CONFIG}`, or give the folder of a model"
        ) from None


@contextlib.contextmanager
def _quiet(hub: ModuleType) -> Iterator[None]:
    """The library does not tell each of its tries inside the `with` block."""
    before = hub.logging.get_verbosity()
    hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.logging.set_verbosity(before)

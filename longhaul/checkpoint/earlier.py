"""The settings that runs of earlier versions have recorded, in terms of the present ones."""

from longhaul.lengths import RATE_SCHEDULES, RateSchedule
from longhaul.optimizers import Adam
from model import ModelConfig

# Settings that no longer exist and that decided what a step does: a run is continued if it had this
# value. The others are known to COMMIT.
DROPPED = {"pairwise_accumulation": False}
COMMIT = "b60739c"

# Settings that are now given as --model_overrides, with their defaults.
FIELDS_OF_MODEL = {"logits_threshold_gib": 10.0, "loss_chunk_size": 0}

# Settings that are now numbers of --schedule, pairs of --adam and sizes of --blocks.
NUMBERS_OF_SCHEDULE = {"decay_fraction": "decay_fraction", "min_lr_ratio": "min_ratio"}
NUMBERS_OF_ADAM = {"beta1": "beta1", "beta2": "beta2", "adam_eps": "eps"}


def present_settings(recorded: dict) -> dict:
    """The recorded settings by their present names; what no longer exists stays as it is."""
    found = {name: value for name, value in recorded.items() if name not in FIELDS_OF_MODEL}
    overrides = [
        f"{name}={recorded[name]}"
        for name, default in FIELDS_OF_MODEL.items()
        if recorded.get(name, default) != default
    ]
    if overrides:
        found["model_overrides"] = [*recorded.get("model_overrides", ()), *overrides]
    if "rope_factor" in recorded:
        found["rope_scaling"] = rope_words(
            recorded["rope_scaling"],
            found.pop("rope_factor"),
            found.pop("rope_original_context"),
        )
    if NUMBERS_OF_SCHEDULE.keys() <= recorded.keys():
        found["schedule"] = _schedule_words(
            recorded["schedule"], _taken(found, NUMBERS_OF_SCHEDULE)
        )
    if NUMBERS_OF_ADAM.keys() <= recorded.keys():
        found["adam"] = [*Adam(**_taken(found, NUMBERS_OF_ADAM)).changed_pairs()]
    if "nsa" in recorded:
        found["blocks"] = [*found.pop("nsa"), *recorded.get("blocks", ())]
    if found.pop("offload_optimizer", False):
        found["master_weights"] = "host"
    return found


def _taken(settings: dict, names: dict[str, str]) -> dict:
    """What is taken out of the settings, by other names."""
    return {present: settings.pop(name) for name, present in names.items()}


def _schedule_words(kind: str, numbers: dict) -> str:
    """--schedule of this kind, with those of the numbers that it has."""
    own = {name: numbers[name] for name in RATE_SCHEDULES.get(kind, ())}
    return RateSchedule(kind, **own).in_words()


def rope_words(scaling: str, factor: float, original: int) -> str:
    """--rope_scaling of these fields of ModelConfig."""
    if scaling == "none" and original == ModelConfig.rope_original_context:
        return scaling
    return f"{scaling}:{repr(factor).removesuffix('.0')}:{original}"


def check_dropped(recorded: dict) -> None:
    """ValueError if a setting that no longer exists had decided what a step does."""
    for name, value in DROPPED.items():
        if recorded.get(name, value) != value:
            raise ValueError(
                f"the checkpoint was trained with --{name} {recorded[name]}, which longhaul no "
                f"longer has, and other bits would follow: continue the run with commit {COMMIT}"
            )

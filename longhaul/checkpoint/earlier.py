"""The settings that runs of earlier versions have recorded, in terms of the present ones."""

from model import ModelConfig

# Settings that no longer exist and that decided what a step does: a run is continued if it had this
# value. The others are known to COMMIT.
DROPPED = {"pairwise_accumulation": False}
COMMIT = "b60739c"

# Settings that are now given as --model_overrides, with their defaults.
FIELDS_OF_MODEL = {"logits_threshold_gib": 10.0, "loss_chunk_size": 0}


def present_settings(recorded: dict) -> dict:
    """The recorded settings by their present names; what no longer exists stays as it is."""
    found = {name: value for name, value in recorded.items() if name not in FIELDS_OF_MODEL}
    overrides = [
        f"{name}={recorded[name]}"
        for name, default in FIELDS_OF_MODEL.items()
        if recorded.get(name, default) != default
    ]
    if "rope_factor" in recorded:
        found["rope_scaling"] = rope_words(
            recorded["rope_scaling"],
            found.pop("rope_factor"),
            found.pop("rope_original_context"),
        )
    if overrides:
        found["model_overrides"] = [*recorded.get("model_overrides", ()), *overrides]
    return found


def rope_words(scaling: str, factor: float, original: int) -> str:
    """--rope_scaling of these fields of ModelConfig."""
    if scaling == "none" and original == ModelConfig.rope_original_context:
        return scaling
    return f"{scaling}:{factor:g}:{original}"


def check_dropped(recorded: dict) -> None:
    """ValueError if a setting that no longer exists had decided what a step does."""
    for name, value in DROPPED.items():
        if recorded.get(name, value) != value:
            raise ValueError(
                f"the checkpoint was trained with --{name} {recorded[name]}, which longhaul no "
                f"longer has, and other bits would follow: continue the run with commit {COMMIT}"
            )

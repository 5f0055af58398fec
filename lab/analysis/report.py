"""The results of an analysis for a reader, as lines of text."""

import math
from collections.abc import Mapping

GIB = 2**30
NAME = 19  # columns of a line's name


def short(value: float) -> str:
    """A number with three digits; a dash if it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def text(result: dict) -> str:
    """What was analysed, and the figures."""
    settings = result["settings"]
    rows = [
        f"Analysis of {result['checkpoint']}",
        f"{settings['num_samples']:,} rows of {settings['context_length']:,} tokens of the "
        f"{settings['split']} split, {settings['dtype']} on {settings['device']}",
        "",
        *lines(result),
    ]
    return "\n".join(rows) + "\n"


def lines(result: dict) -> list[str]:
    """The figures, a line each; long ones may be folded at commas and semicolons."""
    parts = result["parts"]
    found = {name: part["result"] for name, part in parts.items()}
    rows = []
    for layer, figures in found.get("statistics", {}).items():
        rows.append(_line(f"layer {layer}", _statistics_words(figures)))
    for layer, profile in found.get("distances", {}).items():
        rows.append(_line(f"distance {layer}", _distance_words(profile)))
    if "patching" in found:
        rows.append(found["patching"]["line"])
    for layer, figures in found.get("sae", {}).items():
        rows.append(_line(f"autoencoder {layer}", _autoencoder_words(figures)))
    if "precision" in found:
        rows += found["precision"]["lines"]

    rows += [_line(name, f"left out: {words}") for name, words in result["left_out"].items()]
    rows.append(_line("memory", _memory_words(result)))
    if result["missing"]:
        rows.append(_line("not done yet", ", ".join(result["missing"])))
    return rows


def _line(name: str, words: str) -> str:
    return f"{name:<{NAME}}{words}"


def _statistics_words(figures: Mapping) -> str:
    return (
        f"rms {short(figures['rms'])}, max {short(figures['max_abs'])}, kurtosis "
        f"{short(figures['kurtosis'])}, effective rank {short(figures['effective_rank'])}, "
        f"fp16 headroom {short(figures['fp16_headroom'])}"
    )


def _distance_words(profile: Mapping) -> str:
    distance = profile["distance"]
    return f"heads look {short(min(distance))} to {short(max(distance))} tokens back"


def _autoencoder_words(figures: Mapping) -> str:
    return (
        f"{figures['unexplained']:.1%} of the variance left by {figures['k']} of "
        f"{figures['latents']:,} latents, {figures['dead']:.1%} of them dead"
    )


def measured_peaks(parts: Mapping[str, dict]) -> dict[str, int]:
    """The largest measured peak by the name that the plan has for the part."""
    found: dict[str, int] = {}
    for name, part in parts.items():
        kind = name.split("-")[0]
        if part["peak_bytes"] is not None:
            found[kind] = max(part["peak_bytes"], found.get(kind, 0))
    return found


def _memory_words(result: dict) -> str:
    """Measured and planned peaks of each part."""
    measured = measured_peaks(result["parts"])
    words = []
    for name, planned in result["planned_bytes"].items():
        size = f"{measured[name] / GIB:.3f}" if name in measured else "not measured"
        words.append(f"{name} {size} (planned {planned / GIB:.3f})")
    return f"GiB of tensors at the peak: {', '.join(words)}"

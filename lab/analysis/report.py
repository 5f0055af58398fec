"""The results of an analysis for a reader, as lines of text.

They are made from the records of the parts alone, so that a run that was continued reports what one
in a single piece does.
"""

import math
import re
from collections.abc import Mapping

from lab.analysis.patching import joined

GIB = 2**30
NAME = 19  # columns of a line's name


def short(value: float | None) -> str:
    """A number with three digits; a dash if there is none."""
    if value is None or math.isnan(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def results(result: dict) -> dict[str, dict]:
    """The results of the parts by name."""
    return {name: part["result"] for name, part in result["parts"].items()}


def by_layer(result: dict, kind: str) -> dict[int, dict]:
    """The results of the parts of a kind by layer, such as those of patching-00, patching-01."""
    name = re.compile(rf"{kind}-(\d+)")
    found = {}
    for part, own in results(result).items():
        match = name.fullmatch(part)
        if match:
            found[int(match[1])] = own
    return found


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
    found = results(result)
    rows = []
    for layer, figures in found["statistics"].items():
        rows.append(_line(f"layer {layer}", _statistics_words(figures)))
    for layer, profiles in found["distances"].items():
        rows.append(_line(f"distance {layer}", _distance_words(profiles)))
    patched = by_layer(result, "patching")
    if patched:
        rows.append(joined(list(patched.values())).line())
    for kind, words in result["left_out"].items():
        rows.append(_line(kind, f"left out: {words}"))
    for layer, figures in by_layer(result, "sae").items():
        rows.append(_line(f"autoencoder {layer}", _autoencoder_words(figures)))
    if "precision" in found:
        rows += found["precision"]["lines"]
    rows += [_line("note", words) for words in notes(result)]
    rows.append(_line("memory", memory_words(result)))
    return rows


def notes(result: dict) -> list[str]:
    """What a reader should know of the parts besides their figures, a sentence each."""
    found = dict.fromkeys(part["note"] for part in result["parts"].values() if part["note"])
    return [f"{words}; no figure here depends on it" for words in found]


def _distance_words(profiles: Mapping) -> str:
    words = []
    for name, profile in profiles.items():
        distance = profile["distance"]
        words.append(
            f"{name}: heads look {short(min(distance))} to {short(max(distance))} tokens back"
        )
    return ", ".join(words)


def _line(name: str, words: str) -> str:
    return f"{name:<{NAME}}{words}"


def _statistics_words(figures: Mapping) -> str:
    return (
        f"rms {short(figures['rms'])}, max {short(figures['max_abs'])}, kurtosis "
        f"{short(figures['kurtosis'])}, effective rank {short(figures['effective_rank'])}, "
        f"fp16 headroom {short(figures['fp16_headroom'])}"
    )


def _autoencoder_words(figures: Mapping) -> str:
    return (
        f"{figures['unexplained']:.1%} of the variance left by {figures['k']} of "
        f"{figures['latents']:,} latents, {figures['dead']:.1%} of them dead"
    )


def measured_peaks(result: dict) -> dict[str, int]:
    """The largest measured peak by the name that the plan has for the part."""
    found: dict[str, int] = {}
    for name, part in result["parts"].items():
        kind = name.split("-")[0]
        size = part["peak_bytes"]
        if size is not None:
            found[kind] = max(size, found.get(kind, 0))
    return found


def memory_words(result: dict) -> str:
    """Measured and planned peaks of each part."""
    measured = measured_peaks(result)
    words = []
    for name, planned in result["planned_bytes"].items():
        size = f"{measured[name] / GIB:.3f}" if name in measured else "unknown"
        words.append(f"{name} {size} (planned {planned / GIB:.3f})")
    return f"GiB of tensors at the peak: {', '.join(words)}"

"""The results of an analysis for a reader: lines on screen, and an HTML page with pictures.

Both are made from the records of the parts alone, so that a run that was continued reports what one
in a single piece does.
"""

import re
from collections.abc import Container, Iterable, Mapping
from html import escape

from footprint.html import STYLE
from longhaul.analysis.charts import cells, short
from longhaul.analysis.charts import lines as curves
from longhaul.analysis.patching import PATCHED, Effects, joined

GIB = 2**30
NAME = 19  # columns of a line's name on screen
ADDED = """
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; list-style: none; }
.dot {
  display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em;
}
"""
STATISTICS = {
    "rms": "root mean square",
    "max_abs": "largest magnitude",
    "kurtosis": "kurtosis",
    "effective_rank": "effective rank",
    "fp16_headroom": "fp16 headroom",
}


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


# ---- on screen


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
        rows.append(effects(patched).line())
    rows += [_line(kind, f"left out: {words}") for kind, words in left_out(result).items()]
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


def left_out(result: dict) -> dict[str, str]:
    """Why a kind of part was left out, if one was."""
    return result.get("left_out", {})


def effects(patched: dict[int, dict]) -> Effects:
    """The effects of all layers."""
    return joined(list(patched.values()))


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


# ---- the page


def page(result: dict) -> str:
    """The report as one HTML page that needs no other file."""
    settings = result["settings"]
    heading = f"Analysis of {result['checkpoint']}"
    note = (
        f"{settings['num_samples']:,} rows of {settings['context_length']:,} tokens of the "
        f"{settings['split']} split, {settings['dtype']} on {settings['device']}"
    )
    body = "\n".join(f"<h2>{name}</h2>{content}" for name, content in sections(result).items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title><style>{STYLE}{ADDED}</style></head><body><main>
<h1>{escape(heading)}</h1><p class="faint">{escape(note)}</p>
{body}
</main></body></html>
"""


def sections(result: dict) -> dict[str, str]:
    """The headings of the page, and what stands below them."""
    of_parts = results(result)
    said = "".join(f"<p>{escape(words)}.</p>" for words in notes(result))
    found = {"Residual stream by layer": said + _statistics(of_parts["statistics"])}
    found["How far back heads look"] = _distances(of_parts["distances"])
    patched = by_layer(result, "patching")
    if patched:
        found["What makes it copy"] = _patching(effects(patched))
    if "patching" in left_out(result):
        found["What makes it copy"] = f"<p>Left out: {escape(left_out(result)['patching'])}.</p>"
    autoencoders = by_layer(result, "sae")
    if autoencoders:
        found["Sparse autoencoders"] = _autoencoders(autoencoders)
    if "precision" in of_parts:
        found["What precision costs"] = _precision(of_parts["precision"])
    return found | {"Memory": _memory(result), "Settings": _settings(result["settings"])}


def _statistics(layers: dict[str, dict]) -> str:
    """A picture of each figure, and a table of all."""
    pictures = []
    for name, words in STATISTICS.items():
        points = [(int(layer), figures[name]) for layer, figures in layers.items()]
        drawn = curves({words: points}, "layer", words, log=name != "effective_rank")
        pictures.append(f"<h3>{words}</h3>{drawn}")

    rows = []
    for layer, figures in layers.items():
        rows.append(("", [layer, *(short(figures[name]) for name in STATISTICS)]))
    tokens = next(iter(layers.values()))["tokens"]
    caption = f"The stream after each layer, over {tokens:,} tokens; kurtosis: 3 for normal numbers"
    return table(caption, ["layer", *STATISTICS.values()], rows) + "".join(pictures)


def _distances(layers: dict[str, dict]) -> str:
    """Of each part of the attention: mean distances by head, and shares by distance."""
    found = []
    for name in next(iter(layers.values())):
        profiles = {layer: own[name] for layer, own in layers.items() if name in own}
        found.append(f"<h3>{escape(name)}: mean distance in tokens</h3>")
        found.append(_mean_distances(profiles))
        found.append(f"<h3>{escape(name)}: share of attention by distance</h3>")
        found.append(_shares(profiles))
    return "".join(found)


def _mean_distances(profiles: dict[str, dict]) -> str:
    rows = [f"layer {layer}" for layer in profiles]
    values = [profile["distance"] for profile in profiles.values()]
    heads = [str(head) for head in range(len(values[0]))]
    return cells(values, rows, heads, "tokens", "head")


def _shares(profiles: dict[str, dict]) -> str:
    """A row for each layer, the mean over its heads."""
    rows = [f"layer {layer}" for layer in profiles]
    buckets = max((profile["buckets"] for profile in profiles.values()), key=len)
    values = []
    for profile in profiles.values():
        of_heads = zip(*profile["share"], strict=True)
        values.append([sum(shares) / len(shares) for shares in of_heads])
    starts = [bucket.split(" ")[0] for bucket in buckets]
    return cells(values, rows, starts, "share", "tokens back, from")


def _patching(found: Effects) -> str:
    """The effects of layer and site by position."""
    effect_L2C = found.effect_L2C
    rows = []
    values = []
    for index, layer in enumerate(found.layers):
        for place, site in enumerate(PATCHED):
            rows.append(f"{layer} {site}")
            values.append(effect_L2C[index, place].tolist())
    drawn = cells(values, rows, found.columns, "effect; 1: brings the copy back", "position")
    return f"<p>{escape(found.line())}.</p>{drawn}"


def _precision(found: dict) -> str:
    """The table of all precisions, and what is unexpected of it."""
    rows = []
    for dtype, cost in found["precisions"].items():
        for layer, figures in cost["layers"].items():
            match = figures["match"]
            floor = figures["noise_floor"]
            cell = [
                f"{figures['relative_rms']:.4%}",
                short(figures["jaccard"]),
                short(match and match["mean"]),
                short(floor and floor["mean"]),
            ]
            rows.append(("", [dtype, layer, *cell]))
    head = ["precision", "layer", "relative RMS", "Jaccard", "match", "its noise floor"]
    caption = "The same tokens and weights as in float32"
    words = [_circuits(dtype, cost["patching"]) for dtype, cost in found["precisions"].items()]
    words += found["unexpected"]
    notes = "".join(f"<p>{escape(sentence)}</p>" for sentence in words if sentence)
    return table(caption, head, rows) + notes


def _circuits(dtype: str, found: dict | None) -> str:
    if found is None:
        return ""
    words = f"{dtype}: the largest change of an effect of patching is {found['max_delta']:.4f}"
    if not found["of"]:
        return f"{words}; there are too few effects to compare the largest."
    return f"{words}, and {found['overlap']} of the {found['of']} largest effects are the same."


def _autoencoders(layers: dict[int, dict]) -> str:
    rows = []
    curves_of = {}
    for layer, figures in layers.items():
        cell = [f"{figures['unexplained']:.2%}", f"{figures['dead']:.2%}"]
        sizes = [f"{figures['latents']:,}", str(figures["k"]), f"{figures['tokens']:,}"]
        rows.append(("", [str(layer), *cell, *sizes]))
        curves_of[f"layer {layer}"] = list(enumerate(figures["losses"], 1))
    head = ["layer", "variance left", "dead latents", "latents", "k", "tokens"]
    drawn = curves(curves_of, "part of the training", "share of the variance left", log=True)
    return table("TopK autoencoders of the residual stream", head, rows) + drawn


def _memory(result: dict) -> str:
    """Each part's peak next to its plan."""
    measured = measured_peaks(result)
    rows = []
    for name, planned in result["planned_bytes"].items():
        row = [name, f"{planned / GIB:.3f}", "-", "-"]
        if name in measured:
            row[2] = f"{measured[name] / GIB:.3f}"
            row[3] = f"{planned / measured[name] - 1:+.1%}"
        rows.append(("", row))
    caption = "GiB of tensors at the peak of each part, weights included"
    return table(caption, ["part", "planned", "measured", "difference"], rows)


def _settings(settings: dict) -> str:
    rows = [("", [escape(name), escape(str(value))]) for name, value in settings.items()]
    return table("What was asked", ["setting", "value"], rows, words=(0, 1))


# ---- tables


def table(
    caption: str,
    head: list[str],
    rows: Iterable[tuple[str, list[str]]],
    words: Container[int] = (0,),
) -> str:
    """rows: (class of the row, cells); the columns in `words` hold words, the others numbers."""
    names = "".join(_cell("th", "col", name, index in words) for index, name in enumerate(head))
    body = "".join(_row(kind, cells, words) for kind, cells in rows)
    return (
        f'<div class="wide"><table><caption>{caption}</caption>'
        f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(kind: str, cells: list[str], words: Container[int]) -> str:
    """A row whose first cell is its heading."""
    found = [_cell("th", "row", cells[0], 0 in words)]
    for index, value in enumerate(cells[1:], 1):
        found.append(_cell("td", "", value, index in words))
    return f'<tr class="{kind}">{"".join(found)}</tr>'


def _cell(tag: str, scope: str, value: str, words: bool) -> str:
    attributes = f' scope="{scope}"' if scope else ""
    if not words:
        attributes += ' class="n"'
    return f"<{tag}{attributes}>{value}</{tag}>"

"""The page of a trace: complete without a network and without a script, and small for long traces.

Its figures are those of the trace.
"""

import re
import shutil
import struct
import subprocess
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from footprint.answers import svg
from footprint.answers.page import page, write
from footprint.answers.picture import COLOURS, amount
from footprint.answers.svg import Scale
from footprint.cards.allocator import MIB, replay
from footprint.record import timeline
from footprint.record.trace import CATEGORIES, Event, Storage, Trace
from longhaul.config import TrainConfig
from longhaul.planner.simulate import simulate
from model import GIB
from tests.traces import by_category

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
TABLES = "stage  GiB\nmlp <backward>  1.000\n"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(
        TrainConfig(model_size="tiny", context_length=2048, gradient_checkpointing="full")
    )


@pytest.fixture(scope="module")
def text(trace) -> str:
    return page(trace, "tiny <step> & more", TABLES)


@pytest.fixture(scope="module")
def titles(text) -> list[str]:
    """The tooltips of the page's picture, which is XML."""
    start, end = text.index("<svg "), text.index("</svg>")
    drawn = ElementTree.fromstring(text[start:end] + "</svg>")
    return [found.text for found in drawn.findall(".//{*}title")]


def test_the_words_of_the_page_are_escaped(text):
    assert "<h1>tiny &lt;step&gt; &amp; more</h1>" in text and "<step>" not in text
    (tables,) = re.findall("<pre>(.*)</pre>", text, re.DOTALL)
    assert unescape(tables) == TABLES


def test_the_page_asks_nothing_of_a_network(text):
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "//" not in text.replace("</", "")
    assert not re.search(r"@import|<(link|img|iframe|object)|\b(src|href)=", text)
    assert text.count("<script") == 1


def test_the_tooltips_name_the_largest_tensors_of_their_moment(text, titles, trace):
    peak, time = trace.peak()
    stage = trace.stage_at(time)
    (tooltip,) = [title for title in titles if f"(event {time:,})" in title]
    assert tooltip.startswith(f"{amount(peak)} alive in {stage}")
    assert "[8192 x 256] float32  embed.weight" in tooltip
    stages = {"lm_head forward", "layers.*.mlp backward"}
    assert stages | {"forward", "backward", "optimizer"} <= set(titles)
    assert f"peak {amount(peak)} in {stage}" in text


@pytest.mark.parametrize("high", [0.07, 1, 6.5, 19.4, 2047])
def test_an_axis_has_a_few_round_numbers_from_its_floor_to_its_top(high):
    scale = Scale(0, high, 470, 26)
    ticks = scale.ticks()
    assert 4 <= len(ticks) <= 7 and scale.labels() == ticks
    assert {f"{tick / ticks[1]:.9g}" for tick in ticks} == set(map(str, range(len(ticks))))
    assert f"{ticks[1]:.0e}"[0] in "125"
    assert scale(0) == 470 and 26 <= scale(ticks[-1]) < scale(ticks[1]) < 470


def test_a_logarithmic_axis_holds_all_numbers_and_labels_what_has_room():
    scale = Scale.around([0.003, 40_000], 70, 434, base=10)
    assert scale.ticks() == pytest.approx([10.0**power for power in range(-3, 6)])
    assert scale.labels() == scale.ticks()[::2]
    places = [scale(tick) for tick in scale.ticks()]
    assert np.diff(places) == pytest.approx(45.5, abs=0.11)
    assert (places[0], places[-1]) == (70, 434)
    assert Scale.around([1000], 0, 1, base=10).ticks() == pytest.approx([1000, 10_000])


def test_any_words_leave_a_picture_that_is_xml():
    words = """<b> & "quoted" 'too'"""
    parts = [svg.text(words, 1, 2), svg.dot(1, 2, words), svg.key({words: "#fff"}, 0, 0, 9, 9)]
    drawn = ElementTree.fromstring(svg.picture(20, 10, words, parts))
    assert drawn.get("aria-label") == words
    assert [found.text for found in drawn.findall("{*}text")] == [words, words]
    assert drawn.find("{*}circle/{*}title").text == words


def test_every_category_has_its_colour_and_its_place():
    assert sorted(CATEGORIES) == sorted(COLOURS)
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def long_trace(count: int = 60_000) -> Trace:
    """A tensor that comes and goes, and one short peak in the middle."""
    small = Storage(0, MIB, "activation", "start", "layers.0", (MIB,), "uint8", "op")
    large = Storage(1, GIB, "temporary", "start", "layers.1", (GIB,), "uint8", "op")
    changes = [(0, MIB if index % 2 == 0 else -MIB) for index in range(count)]
    peak = count // 3 + 1
    changes[peak:peak] = [(1, GIB), (1, -GIB)]
    events = [Event(time, size, storage) for time, (storage, size) in enumerate(changes, 1)]
    return Trace(events, {0: small, 1: large}, [(0, "start")])


def test_a_long_trace_makes_a_small_page_and_loses_no_peak():
    trace = long_trace()
    text = page(
        trace, "long", TABLES, replays=(replay(trace, steps=1), replay(trace, True, steps=1))
    )
    assert len(text.encode()) < 500_000
    assert f"peak {amount(GIB + MIB)} in start" in text


def test_sizes_agree_with_the_trace_at_any_time(trace):
    every = [time for time, _ in trace.levels()]
    sizes = timeline.sizes_at(trace, every[::97])
    assert sizes == {time: by_category(trace, time) for time in every[::97]}

    for time, alive in zip(every[::301], trace.alive_at(every[::301]), strict=True):
        expected = [storage.id for storage in trace.at(time)]
        assert sorted(storage.id for storage in alive) == sorted(expected)


def test_layers_of_one_kind_are_one_line_with_their_count():
    storages = []
    for index in range(12):
        module = f"layers.{index}.mlp"
        storages.append(
            Storage(index, MIB, "activation", "layer forward", module, (1,), "uint8", "op")
        )
    (group,) = timeline.alike(storages, 5)
    assert group["count"] == 12
    assert group["module"] == "layers.*.mlp"
    assert group["bytes"] == MIB


def test_an_empty_trace_and_an_unwritable_file_are_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="nothing was recorded"):
        page(Trace(stages=[(0, "start")]), "empty", "")
    with pytest.raises(ValueError, match="cannot be written"):
        write(str(tmp_path / "none" / "page.html"), "")
    write(str(tmp_path / "page.html"), "x")
    assert (tmp_path / "page.html").read_text() == "x"


@pytest.fixture(scope="module")
def browser() -> list[str]:
    """The command of a headless browser."""
    installed = [path for path in map(shutil.which, BROWSERS) if path]
    if not installed:
        pytest.skip(f"no headless browser is installed (looked for {', '.join(BROWSERS)})")
    return [installed[0], "--headless", "--disable-gpu", "--no-sandbox", "--window-size=1280,1600"]


def test_a_browser_draws_the_page(text, tmp_path, browser):
    write(str(tmp_path / "page.html"), text)
    profile = f"--user-data-dir={tmp_path}/profile"
    subprocess.run(
        [*browser, profile, f"--screenshot={tmp_path}/page.png", f"file://{tmp_path}/page.html"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    image = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", image[16:24]) == (1280, 1600)
    assert len(image) > 30_000

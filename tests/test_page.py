"""The page of a trace: complete without a network and without a script, and small for long traces.

Its figures are those of the trace.
"""

import shutil
import struct
import subprocess
from html.parser import HTMLParser

import pytest

from footprint import timeline
from footprint.allocator import MIB, replay
from footprint.page import page, write
from footprint.picture import COLOURS, amount
from footprint.trace import CATEGORIES, Event, Storage, Trace
from longhaul.config import TrainConfig
from longhaul.memory.simulate import simulate
from model import GIB
from tests.traces import by_category

VOID = {"meta", "br", "link", "img", "input"}
BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
TABLES = "stage  GiB\nmlp <backward>  1.000\n"


class Page(HTMLParser):
    """The page's elements: every tag closed in order, and the texts of titles and tables."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.titles = []
        self.tables = ""
        self.attributes = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "title":
            self.titles.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles[-1] += data
        elif self.open and self.open[-1] == "pre":
            self.tables += data


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(
        TrainConfig(model_size="tiny", context_length=2048, gradient_checkpointing="full")
    )


@pytest.fixture(scope="module")
def text(trace) -> str:
    return page(trace, "tiny <step> & more", TABLES)


def test_the_page_is_well_formed_and_its_words_are_escaped(text):
    parsed = Page(text)
    assert parsed.titles[0] == "tiny <step> & more"
    assert "<step>" not in text
    assert parsed.tags.count("svg") == 1
    assert parsed.tags.count("script") == 1
    assert parsed.tables == TABLES


def test_the_page_asks_nothing_of_a_network(text):
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http:" not in text
    assert "https:" not in text
    assert "//" not in text.replace("</", "")
    assert "@import" not in text

    parsed = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in parsed.attributes}


def test_the_tooltips_name_the_largest_tensors_of_their_moment(text, trace):
    parsed = Page(text)
    peak, time = trace.peak()
    stage = trace.stage_at(time)
    (tooltip,) = [title for title in parsed.titles if f"(event {time:,})" in title]
    assert tooltip.startswith(f"{amount(peak)} alive in {stage}")
    assert "[8192 x 256] float32  embed.weight" in tooltip
    assert {"forward", "backward", "optimizer", "loss forward", "mlp backward"} <= set(
        parsed.titles
    )
    assert f"peak {amount(peak)} in {stage}" in text


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

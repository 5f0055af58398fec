"""The page of a trace: complete without network and script, true to the trace, small for long
traces.
"""

import shutil
import struct
import subprocess
from html.parser import HTMLParser

import pytest

from longhaul.config import TrainConfig
from longhaul.memory import timeline
from longhaul.memory.allocator import GIB, MIB, replay
from longhaul.memory.page import page, write
from longhaul.memory.picture import COLOURS, STACK, amount, gib, nice
from longhaul.memory.simulate import simulate
from longhaul.memory.trace import CATEGORIES, Event, Storage, Trace
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


class Page(HTMLParser):
    """The page's elements: every tag closed in order, cells of tables, texts of titles."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.tables, self.titles, self.attributes = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "title":
            self.titles.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "title":
            self.titles[-1] += data


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate(
        TrainConfig(model_size="tiny", context_length=2048, gradient_checkpointing="full")
    )


@pytest.fixture(scope="module")
def text(trace) -> str:
    return page(trace, "tiny <step> & more", "predicted")


def test_the_page_is_well_formed_and_its_words_are_escaped(text):
    parsed = Page(text)
    assert parsed.titles[0] == "tiny <step> & more" and "<step>" not in text
    assert (
        parsed.tags.count("svg") == 1 == parsed.tags.count("script")
        and parsed.tags.count("table") == 4
    )


def test_the_page_asks_nothing_of_a_network(text):
    assert (
        "http:" not in text
        and "https:" not in text
        and "//" not in text.replace("</", "")
        and "@import" not in text
    )
    assert not {"link", "img", "iframe", "object"} & set(Page(text).tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in Page(text).attributes}


def test_the_tables_hold_the_figures_of_the_trace(text, trace):
    waterfall, stages, tensors, settings = Page(text).tables
    peak, time = trace.peak()
    assert ["live", gib(peak), gib(peak)] in waterfall
    assert [
        "reserved",
        gib(replay(trace).peak_reserved),
        gib(replay(trace, expandable=True).peak_reserved),
    ] in waterfall
    by_stage = timeline.of_step(trace).peak_by_stage()
    assert {row[0]: row[-1] for row in stages[1:]} == {
        stage: gib(size) for stage, size in by_stage.items()
    }
    row, sizes = (
        next(row for row in stages if row[0] == trace.stage_at(time)),
        by_category(trace, time),
    )
    assert dict(zip(stages[0][1:-1], row[1:-1])) == {
        name: gib(sizes.get(name, 0)) for name in stages[0][1:-1]
    }
    assert sum(float(row[-1]) for row in tensors[1:]) <= peak / GIB + 0.001 * len(tensors)
    assert any(
        row[0] == "embed.weight" and row[3:5] == ["8192 x 256", "float32"] for row in tensors
    )
    assert ["context_length", "2048"] in settings


def test_the_tooltips_tell_the_largest_tensors_of_their_moment(text, trace):
    parsed, (peak, time) = Page(text), trace.peak()
    told = [title for title in parsed.titles if f"(event {time:,})" in title]
    assert len(told) == 1 and told[0].startswith(f"{amount(peak)} alive in {trace.stage_at(time)}")
    assert "[8192 x 256] float32  embed.weight" in told[0]
    assert {"forward", "loss", "backward", "optimizer", "mlp backward"} <= set(parsed.titles)
    assert f"peak {amount(peak)} in {trace.stage_at(time)}" in text


def test_every_category_has_its_colour_and_its_place():
    assert sorted(STACK) == sorted(CATEGORIES) == sorted(COLOURS) and len(
        set(COLOURS.values())
    ) == len(CATEGORIES)


def long_trace(count: int = 60_000) -> Trace:
    """One tensor above another, with one short peak in their midst."""
    storages = {
        0: Storage(0, MIB, "activation", "start", "layers.0", (MIB,), "uint8", "op"),
        1: Storage(1, GIB, "temporary", "start", "layers.1", (GIB,), "uint8", "op"),
    }
    events = [Event(time, MIB if time % 2 else -MIB, 0) for time in range(1, count + 1)]
    events.insert(count // 3 + 1, Event(count // 3 + 1, GIB, 1))
    events.insert(count // 3 + 2, Event(count // 3 + 1, -GIB, 1))
    events = [Event(time, event.bytes, event.storage) for time, event in enumerate(events, 1)]
    return Trace(events, storages, [(0, "start")])


def test_a_long_trace_makes_a_small_page_and_loses_no_peak():
    trace = long_trace()
    found = timeline.moments(trace)
    assert len(timeline.sampled(found, 480)) <= 962 and timeline.largest(found) in timeline.sampled(
        found, 480
    )
    text = page(trace, "long", replays=(replay(trace, steps=1), replay(trace, True, steps=1)))
    assert len(text.encode()) < 500_000 and f"peak {amount(GIB + MIB)} in start" in text


def test_a_deep_model_stays_below_one_megabyte():
    cfg = TrainConfig(
        model_size="tiny",
        context_length=4096,
        model_overrides=("num_layers=10",),
        gradient_checkpointing="full",
    )
    assert len(page(simulate(cfg, ranks=2), "deep", ranks=2).encode()) < 1_000_000


def test_moments_agree_with_the_trace_at_any_time(trace):
    for moment in timeline.moments(trace)[::97]:
        assert timeline.by_name(moment) == by_category(trace, moment.time)
    times = [moment.time for moment in timeline.moments(trace)[::301]]
    for time, alive in timeline.alive_at(trace, times):
        assert sorted(storage.id for storage in alive) == sorted(
            storage.id for storage in trace.at(time)
        )


def test_layers_of_one_kind_are_one_line_with_their_count():
    storages = [
        Storage(
            index, MIB, "activation", "layer forward", f"layers.{index}.mlp", (1,), "uint8", "op"
        )
        for index in range(12)
    ]
    (group,) = timeline.alike(storages, 5)
    assert group["count"] == 12 and group["module"] == "layers.*.mlp" and group["bytes"] == MIB


def test_stages_that_are_known_better_replace_those_of_the_trace(trace):
    deep = {"loss backward": dict(parameter=7 * GIB, activation=GIB)}
    assert ["loss backward", "7.000", "1.000", "8.000"] in Page(
        page(trace, "deep", stages=deep)
    ).tables[1]


@pytest.mark.parametrize(
    "raw, round_", [(0.3, 0.5), (1, 1), (1.2, 2), (17, 20), (21, 50), (140, 200)]
)
def test_the_axis_counts_in_round_steps(raw, round_):
    assert nice(raw) == round_


def test_an_empty_trace_and_an_unwritable_file_are_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="nothing was recorded"):
        page(Trace(stages=[(0, "start")]), "empty")
    with pytest.raises(ValueError, match="cannot be written"):
        write(str(tmp_path / "none" / "page.html"), "")
    write(str(tmp_path / "page.html"), "x")
    assert (tmp_path / "page.html").read_text() == "x"


def test_a_browser_draws_the_page(text, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no headless browser is installed (looked for {', '.join(BROWSERS)})")
    write(str(tmp_path / "page.html"), text)
    command = [
        browser,
        "--headless",
        "--disable-gpu",
        "--no-sandbox",
        "--window-size=1280,1600",
        f"--user-data-dir={tmp_path}/profile",
    ]
    subprocess.run(
        [*command, f"--screenshot={tmp_path}/page.png", f"file://{tmp_path}/page.html"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    image = (tmp_path / "page.png").read_bytes()
    assert struct.unpack(">II", image[16:24]) == (1280, 1600) and len(image) > 30_000

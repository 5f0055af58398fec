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
from footprint.picture import COLOURS, STACK, Scale, amount, areas, gib, nice
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


class Page(HTMLParser):
    """The page's elements: every tag closed in order, cells of tables, texts of titles."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.tables = []
        self.titles = []
        self.attributes = []
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
    assert parsed.titles[0] == "tiny <step> & more"
    assert "<step>" not in text
    assert parsed.tags.count("svg") == 1
    assert parsed.tags.count("script") == 1
    assert parsed.tags.count("table") == 4


def test_the_page_asks_nothing_of_a_network(text):
    assert "http:" not in text
    assert "https:" not in text
    assert "//" not in text.replace("</", "")
    assert "@import" not in text

    parsed = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in parsed.attributes}


def test_the_tables_hold_the_figures_of_the_trace(text, trace):
    waterfall, stages, tensors, settings = Page(text).tables
    peak, time = trace.peak()
    classic = replay(trace).peak_reserved
    expandable = replay(trace, expandable=True).peak_reserved
    assert ["live", gib(peak), gib(peak)] in waterfall
    assert ["reserved", gib(classic), gib(expandable)] in waterfall

    by_stage = timeline.of_step(trace).peak_by_stage()
    totals = {row[0]: row[-1] for row in stages[1:]}
    assert totals == {stage: gib(size) for stage, size in by_stage.items()}

    names = stages[0][1:-1]
    row = next(row for row in stages if row[0] == trace.stage_at(time))
    sizes = by_category(trace, time)
    assert row[1:-1] == [gib(sizes.get(name, 0)) for name in names]
    assert set(sizes) <= set(names)

    assert tensors[0][:4] == ["GiB", "count", "GiB each", "tensor of"]
    assert sum(float(row[0]) for row in tensors[1:]) <= peak / GIB + 0.001 * len(tensors)
    embedding = [row[5:7] for row in tensors if row[3] == "embed.weight"]
    assert ["8192 x 256", "float32"] in embedding
    assert ["context_length", "2048"] in settings


def test_facts_stand_above_the_picture_and_are_escaped(trace):
    facts = {"cards": "8 GB too small; 24 GB fits", "command": "python train.py --data 'a <b>'"}
    text = page(trace, "tiny", facts=facts)
    Page(text)
    above = text[: text.index("<svg")]
    assert "cards: <code>8 GB too small; 24 GB fits</code>" in above
    assert "command: <code>python train.py --data &#x27;a &lt;b&gt;&#x27;</code>" in above


def test_the_tooltips_name_the_largest_tensors_of_their_moment(text, trace):
    parsed = Page(text)
    peak, time = trace.peak()
    stage = trace.stage_at(time)
    (tooltip,) = [title for title in parsed.titles if f"(event {time:,})" in title]
    assert tooltip.startswith(f"{amount(peak)} alive in {stage}")
    assert "[8192 x 256] float32  embed.weight" in tooltip
    assert {"forward", "loss", "backward", "optimizer", "mlp backward"} <= set(parsed.titles)
    assert f"peak {amount(peak)} in {stage}" in text


def test_every_category_has_its_colour_and_its_place():
    assert sorted(STACK) == sorted(CATEGORIES) == sorted(COLOURS)
    assert len(set(COLOURS.values())) == len(CATEGORIES)


def test_memory_that_keeps_its_level_is_one_line():
    sizes = tuple(GIB if name == "parameter" else 0 for name in CATEGORIES)
    points = [timeline.Moment(time, sizes) for time in (0, 30, 60)]
    assert areas(points, Scale(0, 90, 2 * GIB)) == (
        '<path d="M64,246L1186,246L1186,466L64,466Z" fill="#0072b2"/>'
    )


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
    found = timeline.moments(trace)
    sampled = timeline.sampled(found, 480)
    assert len(sampled) <= 962
    assert timeline.largest(found) in sampled

    text = page(trace, "long", replays=(replay(trace, steps=1), replay(trace, True, steps=1)))
    assert len(text.encode()) < 500_000
    assert f"peak {amount(GIB + MIB)} in start" in text


@pytest.mark.slow
def test_a_deep_model_stays_below_one_megabyte():
    cfg = TrainConfig(
        model_size="tiny",
        context_length=4096,
        model_overrides=("num_layers=10",),
        gradient_checkpointing="full",
    )
    assert len(page(simulate(cfg, ranks=2), "deep", ranks=2).encode()) < 1_000_000


def test_moments_agree_with_the_trace_at_any_time(trace):
    moments = timeline.moments(trace)
    for moment in moments[::97]:
        assert timeline.by_name(moment) == by_category(trace, moment.time)

    times = [moment.time for moment in moments[::301]]
    for time, alive in timeline.alive_at(trace, times):
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


def test_stages_that_are_known_better_replace_those_of_the_trace(trace):
    deep = {"loss backward": dict(parameter=7 * GIB, activation=GIB)}
    tables = Page(page(trace, "deep", stages=deep)).tables
    assert ["loss backward", "7.000", "1.000", "8.000"] in tables[1]


@pytest.mark.parametrize(
    "raw, step", [(0.3, 0.5), (1, 1), (1.2, 2), (17, 20), (21, 50), (140, 200)]
)
def test_the_axis_counts_in_round_steps(raw, step):
    assert nice(raw) == step


def test_an_empty_trace_and_an_unwritable_file_are_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="nothing was recorded"):
        page(Trace(stages=[(0, "start")]), "empty")
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


def test_no_table_scrolls_sideways_in_a_window_of_1280_pixels(text, tmp_path, browser):
    measure = (
        "<script>document.title = Array.from(document.querySelectorAll('.wide')).map(function (box)"
        " { return box.scrollWidth > box.clientWidth; }).join()</script></body>"
    )
    write(str(tmp_path / "page.html"), text.replace("</body>", measure))
    profile = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [*browser, profile, "--dump-dom", f"file://{tmp_path}/page.html"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "<title>false,false,false,false</title>" in done.stdout

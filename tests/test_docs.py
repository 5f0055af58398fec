"""README and the pages of docs/: their links, and every block of them that a CPU runs.

Blocks of a page run in order in one folder, so that a page is one walk. `python -m pytest -s
tests/test_docs.py` says what was not run, and why.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_rooms import HALF_COMPILED, copy_room
from tests.warm_python import warm_python

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
)
LOG = "docs/LOG.md"  # the others of docs/ answer a question
ANSWERS = [name for name in PAGES if name.startswith("docs/") and name != LOG]
MOST_NOT_RUN = 5


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- links

FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose_of(text: str) -> str:
    """The text without blocks and without code within sentences, in which x[i](a) is no link."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def headings_of(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.M)


def anchors_of(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings_of(text)]
    return {heading.replace(" ", "-") for heading in words}


def links_of(name: str) -> list[str]:
    found = LINK.findall(prose_of(text_of(name)))
    return [link for link in found if not link.startswith(("https://", "http://"))]


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_to_a_file_and_to_a_heading(name):
    broken = []
    for link in links_of(name):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text("utf-8"))):
            broken.append(link)
    assert not broken


def test_the_readme_leads_to_every_page():
    linked = {link.partition("#")[0] for link in links_of("README.md")}
    assert set(PAGES) - {"README.md"} <= linked


def test_no_code_names_a_page_that_is_not_there():
    files = [ROOT / name for name in ("train.py", "profile_memory.py", "verify_chunked_loss.py")]
    for folder in ("base", "benchmarks", "data", "footprint", "lab", "longhaul", "scripts"):
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.sh")]
    named = {
        name for path in files for name in re.findall(r"docs/\w+\.md", path.read_text("utf-8"))
    }
    assert named and named <= set(PAGES)


# ---- figures and names


def section_of(name: str, heading: str) -> str:
    """The text under a heading of the second level."""
    _, _, rest = text_of(name).partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


def test_the_figures_of_the_readme_stand_on_a_page():
    rows = re.findall(r"^\|(.*)\|$", section_of("README.md", "Results"), re.M)
    results = [row.split("|")[1].partition("[^")[0] for row in rows[2:]]
    figures = {
        figure for cell in results for figure in re.findall(r"\d[\d,.]*(?:e-\d+)?[%x]?", cell)
    }
    pages = "\n".join(text_of(name) for name in ANSWERS)
    assert figures
    assert {figure for figure in figures if figure.rstrip(".,") not in pages} == set()


def test_the_imports_of_the_readme_work():
    imports = re.findall(r"`(from [^`]+ import [^`]+)`", text_of("README.md"))
    assert imports
    for statement in imports:
        exec(statement, {})


def test_the_lengths_of_files_in_the_readme_are_within_a_tenth():
    section = section_of("README.md", "Read the code")
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| ([\d,]+) \|", section, re.M)
    assert len(rows) == 5
    for path, told in rows:
        lines = len(text_of(path).splitlines())
        assert lines == pytest.approx(int(told.replace(",", "")), rel=0.1), path


# ---- blocks

BLOCK = re.compile(r"^(?:`([^`\n]+)`:\n\n)?```(\w+)\n(.*?)^```", re.M | re.S)
NOT_RUN = re.compile(r"# not run: (.+)\n")
# Python blocks of these pages run where only this is, with torch.
ROOMS = {
    "docs/FOOTPRINT.md": ("footprint",),
    "docs/RESUME.md": ("data/sampler.py", "data/order.py"),
    "docs/SPARSE.md": ("longhaul/sparse", "base/machine.py", "model.py"),
    "docs/VOCAB.md": ("longhaul/vocab", "base/machine.py"),
}
# What the test asks for at a smaller size than the page does.
SMALLER = {
    "--model_size 4B --context_length 131072 --fit auto --plan": (
        "--model_size tiny --context_length 131072 --fit auto --plan"
    ),
    "--model_size 4B --context_length 131072 --solve levers --gpu H100": (
        "--model_size tiny --context_length 131072 --solve levers --vram 2"
    ),
    "--model_size 1.7B --context_length 2048": "--model_size tiny --context_length 256",
    "--context_length 1088 --max_response_length 64": (
        "--context_length 96 --max_response_length 16"
    ),
    "--context_length 512 --max_steps 20": "--context_length 128 --max_steps 6",
    "--eval_every 10 --eval_rows 4": "--eval_every 3 --eval_rows 2",
    "--context_length 2048 --max_steps 2": "--context_length 256 --max_steps 2",
    "--context_length 2048 --context_parallel_size 2": (
        "--context_length 256 --context_parallel_size 2"
    ),
    "--context_length 1024 --max_steps 4": "--context_length 256 --max_steps 4",
    "--lengths 512,1024": "--lengths 128,256",
    "--attention_type nsa --context_length 131072 --plan": "--attention_type nsa --plan",
    "bash scripts/extend_context.sh --rehearse": (
        "SCHEDULE=64:12,128:1,256:1 BATCHES=4 bash scripts/extend_context.sh --rehearse"
    ),
    "nn.TransformerEncoder(layer, 6)": "nn.TransformerEncoder(layer, 1)",
    "range(4):  # micro-batches": "range(2):",
    '"num_hidden_layers": 16': '"num_hidden_layers": 2',
    '"num_hidden_layers": 36': '"num_hidden_layers": 2',
}
# A search may find that what is asked for fits after changes. `footprint` is installed by pip.
SHELL = """set -o pipefail
footprint() { python -m footprint "$@"; }
trap 'code=$?; case "$code $BASH_COMMAND" in
    "2 "*" --advise"*|"2 "*" --solve"*) ;;
    *) exit $code ;;
esac' ERR
"""
WALK = """
import json, subprocess, sys
page, shell, blocks = json.load(sys.stdin)
sys.path.insert(0, "")
names = {"__name__": page}
for kind, text in blocks:
    print(text, flush=True)
    if kind == "bash":
        subprocess.run(["bash", "-c", shell + text + "true"], check=True)
    else:
        exec(compile(text, page, "exec"), names)
"""


class Block(NamedTuple):
    """A block of a page: of a kind such as "bash", or the content of the file named before it."""

    file: str
    kind: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        found = NOT_RUN.match(self.text)
        return found[1] if found else None


def blocks_of(name: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(text_of(name))]


def run_of(name: str) -> list[tuple[str, str]]:
    """(kind, text) of the blocks that run, in order."""
    found = blocks_of(name)
    run = [each for each in found if each.kind in ("bash", "python") and not each.file]
    return [(each.kind, smaller(each.text)) for each in run if each.reason is None]


def smaller(text: str) -> str:
    for size, less in SMALLER.items():
        text = text.replace(size, less)
    return text


def not_run() -> list[tuple[str, str]]:
    """(page, reason) of each block that is not run."""
    blocks = [(name, block) for name in PAGES for block in blocks_of(name)]
    return [(name, block.reason) for name, block in blocks if block.reason is not None]


@pytest.fixture(scope="module")
def product(tmp_path_factory) -> Path:
    """A copy of the product, which each page copies again."""
    folder = tmp_path_factory.mktemp("docs") / "product"
    ignored = shutil.ignore_patterns(".*", "runs", "cuda_build", HALF_COMPILED)
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    with warm_python(tmp_path_factory.mktemp("warm")) as environment:
        yield environment | {"OMP_NUM_THREADS": "1"}


def walk(
    name: str,
    folder: Path,
    blocks: list[tuple[str, str]],
    environment: dict[str, str],
) -> str:
    """Run the blocks in the folder, in which the page's files are written first."""
    for block in blocks_of(name):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(smaller(block.text), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", WALK],
        input=json.dumps([name, SHELL, blocks]),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not done.returncode, f"{done.stdout[-3000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


WITH_BLOCKS = [name for name in PAGES if run_of(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_the_blocks_of_a_page_run_from_top_to_bottom(name, product, environment, tmp_path):
    blocks = run_of(name)
    room = ROOMS.get(name)
    if room:
        alone = [block for block in blocks if block[0] == "python"]
        assert alone
        copy_room(tmp_path / "room", *room)
        walk(name, tmp_path / "room", alone, environment)
        blocks = [block for block in blocks if block[0] != "python"]
    if blocks:
        clone = shutil.copytree(product, tmp_path / "clone")
        said = walk(name, clone, blocks, environment)
        shell = "\n".join(text for kind, text in blocks if kind == "bash").replace("\\\n", " ")
        plans = re.findall(r"^.*\btrain\.py\b.* --plan\b", shell, re.M)
        assert said.count("plan (computed") >= len(plans)
        assert not re.search(r"error: (unknown|argument|unrecognized)", said)


def test_few_blocks_are_not_run_and_each_has_its_reason():
    found = not_run()
    for name, reason in found:
        print(f"not run: {name}: {reason}")
    assert 0 < len(found) <= MOST_NOT_RUN

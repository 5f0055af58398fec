"""The embedded corpus is source text, made once per setting and found again at once."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data import corpus
from data.corpus import embedded_files, prepare_embedded
from data.loader import IGNORE, Loader
from data.manifest import IntegrityError
from tests.kit import written_texts

ROOT = Path(__file__).parent.parent
SMALL = {"vocab_size": 512, "max_bytes": 400_000, "workers": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    prepare_embedded(folder, **SMALL)
    return folder


def test_the_embedded_corpus_is_made_once_and_then_found(cache, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    monkeypatch.setattr(corpus, "build_embedded", lambda *args, **kwargs: pytest.fail("made anew"))
    dataset = prepare_embedded(cache, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    dataset.verify()
    assert (Loader(dataset, 2048, 4).batch(0).labels != IGNORE).sum() > 4000


def test_another_setting_is_another_entry_of_the_cache(cache):
    by_file = prepare_embedded(cache, documents="file", **SMALL)
    by_directory = prepare_embedded(cache, **SMALL)
    assert by_file.path != by_directory.path
    assert by_file.split("train").num_documents > by_directory.split("train").num_documents
    assert len(list(cache.iterdir())) == 2


def test_the_embedded_corpus_gives_its_files_back(cache):
    texts = written_texts(prepare_embedded(cache, documents="file", **SMALL))
    files = {
        file.path.read_bytes().decode() for file in embedded_files(SMALL["max_bytes"]) if file.size
    }
    assert set(texts) == files


def test_the_embedded_corpus_records_where_it_comes_from(cache):
    sources = {
        source["name"]: source for source in prepare_embedded(cache, **SMALL).manifest.sources
    }
    assert set(sources) <= {"stdlib", "numpy", "torch"}
    assert all(len(source["sha256"]) == 64 and source["version"] for source in sources.values())


def test_a_damaged_cache_says_what_to_delete(cache, tmp_path):
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    dataset = prepare_embedded(tmp_path, **SMALL)
    with open(dataset.path / "shard-00000.bin", "ab") as file:
        file.write(b"\0")
    with pytest.raises(IntegrityError, match=f"delete {dataset.path}"):
        prepare_embedded(tmp_path, **SMALL)


def test_a_package_that_is_absent_or_without_record_is_said_and_left_out(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    reports = []
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert {file.package for file in embedded_files(report=reports.append)} == {"stdlib"}
    assert ["numpy" in line or "torch" in line for line in reports] == [True, True]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGHAUL_CACHE", str(tmp_path))
    assert corpus.default_cache() == tmp_path
    monkeypatch.delenv("LONGHAUL_CACHE")
    assert corpus.default_cache() == Path.home() / ".cache" / "longhaul"


@pytest.mark.slow
def test_two_processes_that_need_the_corpus_share_one_preparation(tmp_path):
    words = "-m data.prepare --vocab_size 512 --max_bytes 200000 --workers 1"
    command = [sys.executable, *words.split()]
    environment = {**os.environ, "LONGHAUL_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1

"""ElasticSampler: each row once an epoch, in one order, for any ranks and micro-batches."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import DataLoader

from data.dataset import open_dataset
from data.loader import Loader
from data.order import permute
from data.sampler import ElasticSampler
from data.writer import write_dataset

ROOT = Path(__file__).parent.parent


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def epoch_of(length: int, epoch: int, seed: int = 0) -> list[int]:
    return [permute(seed, epoch, length, position) for position in range(length)]


@pytest.mark.parametrize("length, ranks", [(1, 1), (7, 3), (100, 8), (103, 5), (3, 8)])
def test_all_ranks_together_take_each_row_once_an_epoch(length, ranks):
    samplers = [ElasticSampler(length, rank, ranks, seed=3) for rank in range(ranks)]
    for epoch in range(3):
        sizes = [len(sampler) for sampler in samplers]
        rows = [list(sampler) for sampler in samplers]
        assert [len(part) for part in rows] == sizes
        in_turn = [part[i] for i in range(max(sizes)) for part in rows if i < len(part)]
        assert in_turn == epoch_of(length, epoch, seed=3)


def test_an_epoch_that_a_rank_leaves_early_ends_on_all_by_set_epoch():
    samplers = [ElasticSampler(7, rank, 3) for rank in range(3)]
    for _ in zip(*samplers, strict=False):  # rank 0 has a third row, the others have none
        pass
    for sampler in samplers:
        sampler.set_epoch(sampler.epoch + 1)
    rows = [list(sampler) for sampler in samplers]
    assert sorted(sum(rows, [])) == list(range(7))
    assert [part[0] for part in rows] == epoch_of(7, 1)[:3]


def train(state: dict | None, length: int, ranks: int, batch: int, steps: int):
    """(rows of each step in the order of the epoch, state) of a run that stops after some steps."""
    samplers = [ElasticSampler(length, rank, ranks) for rank in range(ranks)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    trained: list[int] = []
    while steps:
        loaders = [iter(DataLoader(Numbers(length), batch, sampler=one)) for one in samplers]
        while steps and (batches := [next(loader, None) for loader in loaders])[0] is not None:
            steps -= 1
            found = [[] if one is None else one.tolist() for one in batches]
            most = max(map(len, found))
            trained += [part[i] for i in range(most) for part in found if i < len(part)]
            state = samplers[0].state_dict()
            assert all(one.state_dict() == state for one in samplers)
    return trained, state


def test_runs_that_are_killed_and_go_on_with_other_ranks_train_the_rows_of_one_run():
    draw = random.Random(0)
    for length in (97, 256, 1009):
        trained, state = [], None
        while len(trained) < 3 * length:
            ranks, batch = draw.choice((8, 3, 5, 1)), draw.choice((1, 2, 3))
            rows, state = train(state, length, ranks, batch, draw.randrange(1, 40))
            trained += rows
        whole = [row for epoch in range(9) for row in epoch_of(length, epoch)]
        assert trained == whole[: len(trained)]


def test_a_loader_with_workers_reads_ahead_so_it_is_told_what_was_trained():
    sampler = ElasticSampler(50, seed=1)
    loader = DataLoader(Numbers(50), batch_size=4, sampler=sampler, num_workers=2)
    batches = iter(loader)
    trained = [row for _ in range(3) for row in next(batches).tolist()]
    assert sampler.state_dict()["position"] > 12
    again = ElasticSampler(50, rank=0, world_size=1, seed=1)
    again.load_state_dict(sampler.state_dict(trained=12))
    assert trained + list(again) == epoch_of(50, 0, seed=1)


def test_it_has_the_order_of_our_own_loader(tmp_path):
    documents = [np.full(9, row, np.int64) for row in range(21)]
    write_dataset(documents, tmp_path / "d", vocab_size=32, eod_id=31)
    loader = Loader(open_dataset(tmp_path / "d"), context_length=10, global_batch_rows=1, seed=5)
    rows = loader.rows_per_epoch
    expected = [loader.row_index(position) for position in range(rows)]
    assert rows > 9 and list(ElasticSampler(rows, seed=5)) == expected


@pytest.mark.parametrize(
    "words, call",
    [
        ("length=0", lambda: ElasticSampler(0)),
        ("rank=3", lambda: ElasticSampler(9, rank=3, world_size=3)),
        ("trained=6", lambda: ElasticSampler(9, 0, 2).state_dict(trained=6)),
        (
            "seed=1",
            lambda: ElasticSampler(9).load_state_dict(ElasticSampler(9, seed=1).state_dict()),
        ),
    ],
)
def test_what_cannot_be_is_one_line(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_it_needs_two_files(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("order.py", "sampler.py"):
        shutil.copy(ROOT / "data" / name, tmp_path / "data" / name)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from data.sampler import ElasticSampler\n"
        "print(sorted(ElasticSampler(5)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "[0, 1, 2, 3, 4]\n", done.stderr

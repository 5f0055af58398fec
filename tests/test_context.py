"""Context parallelism: ranks that share the tokens of a row train as one process does; what cannot be shared is refused."""

import functools

import pytest
import torch

from longhaul import context, dist, step
from longhaul.config import TrainConfig
from model import sdpa
from tests.ranks import run_ranks
from tests.test_parallel import BASE, ROWS, assert_same, rows_of_step, train

T = 72  # divides by 2 x 4 ranks; every chunk boundary falls inside a document
STANDARD = dict(context_length=T)
SPARSE = dict(context_length=T, attention_type="nsa", nsa=("cmp_block=8", "cmp_stride=4", "sel_block=8", "sel_count=4", "window=16"))


# ------------------------------------------------------------------------------------------ parity with one process


def setting(base: dict, cp: int, *overrides: str, packed: bool = True, **changes) -> tuple[dict, bool]:
    return {**base, "context_parallel_size": cp, "model_overrides": overrides, **changes}, packed


UNTIED, FOUR = "tie_embeddings=False", "num_kv_heads=4"
FAST = {
    2: [setting(STANDARD, 2, context_parallel_mode="ulysses"), setting(STANDARD, 2, UNTIED, batch_size=2, gradient_checkpointing="full"),
        setting(STANDARD, 2, packed=False, batch_size=4, loss="chunked"), setting(SPARSE, 2, UNTIED, batch_size=2),
        setting(SPARSE, 2, packed=False, batch_size=2, gradient_checkpointing="full")],
    4: [setting(STANDARD, 2, UNTIED, context_parallel_mode="ulysses"), setting(STANDARD, 4, batch_size=2), setting(SPARSE, 2, dp_replicate=2),
        setting(SPARSE, 4, FOUR, UNTIED, batch_size=4)],
}
WHOLE = {  # {dp1cp2, dp2cp1, dp2cp2, dp1cp4} x {standard, nsa} x {tied, untied} x {one micro-batch, several} x {packed, whole rows}
    size: [setting(base, cp, FOUR, *tied, packed=packed, batch_size=batch, context_parallel_mode=mode)
           for cp in groups for base, mode in ((STANDARD, "ulysses"), (STANDARD, "gather_kv"), (SPARSE, "ulysses")) for tied in ((), (UNTIED,))
           for batch, packed in ((1, True), (2 if cp < size else 4, False))]
    for size, groups in {2: (1, 2), 4: (2, 4)}.items()}


def train_each(world: dist.World, settings: list) -> list[dict]:
    return [train(world, changes, packed) for changes, packed in settings]


@functools.cache
def ranks(size: int, tier: str) -> list:
    return run_ranks(train_each, size, {"fast": FAST, "whole": WHOLE}[tier][size])


@functools.cache
def truth(attention: str, overrides: tuple[str, ...], packed: bool) -> dict:
    return train(dist.World(), (SPARSE if attention == "nsa" else STANDARD) | dict(model_overrides=overrides, batch_size=ROWS), packed)


def check_parity(tier: str, settings: dict, size: int, index: int):
    changes, packed = settings[size][index]
    expected = truth(changes.get("attention_type", "standard"), changes["model_overrides"], packed)
    for results in ranks(size, tier):
        torch.testing.assert_close(results[index]["losses"], expected["losses"], rtol=0, atol=2e-6)
        assert_same(results[index], expected)


def each(settings: dict) -> list:
    return [pytest.param(size, index, id=f"{size} ranks {changes} {'packed' if packed else 'whole'}")
            for size in settings for index, (changes, packed) in enumerate(settings[size])]


@pytest.mark.parametrize("size, index", each(FAST))
def test_ranks_that_share_rows_change_nothing(size, index):
    check_parity("fast", FAST, size, index)


@pytest.mark.slow
@pytest.mark.parametrize("size, index", each(WHOLE))
def test_every_way_to_share_rows_changes_nothing(size, index):
    check_parity("whole", WHOLE, size, index)

"""indexed/, whose time is that of what is read, against the float64 oracle of indexed attention and
the plain version of model.py: the same outputs, gradients and choices, in bounded memory.
"""

import pytest
import torch

import model
from indexed import choice, engine
from nsa.branches import Buffers
from tests.test_indexed import SIZES, gradients, inputs, outputs, relative, wanted

NAMES = ("dq", "dk", "dv", "dq of the indexer", "dk of the indexer")


@pytest.fixture
def small_parts(monkeypatch):
    """Short rows have several chunks, tiles, and groups of chunks, and nothing is masked for long."""
    monkeypatch.setattr(engine, "MASKED", 1)
    monkeypatch.setattr(engine, "CHUNK_SCORES", 1)
    monkeypatch.setattr(engine, "TILE_KEYS", 2000)
    monkeypatch.setattr(engine, "GROUP_ROWS", 128)
    monkeypatch.setattr(choice, "SCORE_BLOCKS", 7)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_equals_the_float64_oracle_forward_and_backward(sizes, small_parts):
    *shape, r, budget = sizes
    tensors = inputs(*shape)
    o, kl = outputs(tensors, r, budget)
    true_o, true_kl, exact, _ = wanted(tensors, r, budget)
    assert relative(o, true_o) <= 1e-6
    assert (kl.double() - true_kl).abs().max() <= 2e-6

    found = gradients(o, kl, tensors)
    truth = gradients(true_o, true_kl, exact)
    for name, grad, want in zip(NAMES, found, truth, strict=True):
        assert relative(grad, want) <= 1e-5, name

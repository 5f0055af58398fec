"""What the planner knows of memory inside the kernels of a GPU."""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from base import machine
from base.machine import deterministic
from footprint.kernels import workspace
from footprint.python.patches import patched
from longhaul.config import TrainConfig
from longhaul.planner.program import program_of
from longhaul.planner.simulate import on_target, trace
from longhaul.planner.workspace import Workspaces
from longhaul.sparse.nsa import engine
from longhaul.sparse.nsa.branches import Sizes
from model import NSAConfig

ROOT = Path(__file__).parent.parent
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
DOCUMENTS_BACKWARD = torch.ops.aten._flash_attention_backward.default
SHAPE = (32, 8, 128)  # query heads, KV heads, head dim


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_documents_take_what_a_row_takes_and_up_to_a_tile_of_queries_each():
    T = 1024
    H, G, K = SHAPE
    rows = [meta(1, heads, T, K) for heads in (H, H, G, G)]
    one = Workspaces("cuda")(FLASH_BACKWARD, rows, None)
    of_queries = 4 * T * H * (K + 1)  # dq and one sum per query, in fp32
    of_keys = 2 * 2 * T * H * K
    assert one == of_queries + of_keys

    flat = [meta(T, heads, K) for heads in (H, H, G, G)]
    rest = [meta(T, H, K), meta(H, T), meta(4, dtype=torch.int32)]
    three = Workspaces("cuda")(DOCUMENTS_BACKWARD, flat + rest, None)
    assert three == of_queries * (T + 3 * 128) // T + of_keys


def test_deterministic_sums_take_a_copy_of_dq_for_each_share_of_the_processors():
    q, k = meta(1, 32, 1024, 128), meta(1, 32, 1024, 128)
    plain = Workspaces("cuda")(FLASH_BACKWARD, (q, q, k, k), None)
    with deterministic(True):
        ordered = Workspaces("cuda")(FLASH_BACKWARD, (q, q, k, k), None)
    copies = -(-workspace.processors() // 32)
    assert ordered - plain == (copies - 1) * 4 * q.numel()


def test_the_gradient_of_an_embedding_sorts_more_than_3072_tokens():
    """Their values and their order, int64, and what follows from them."""
    backward = torch.ops.aten.embedding_dense_backward.default
    inside = {
        tokens: Workspaces("cuda")(
            backward,
            (meta(tokens, 64), meta(tokens, dtype=torch.int64), 1000, -1, False),
            None,
        )
        for tokens in (3072, 3073)
    }
    assert inside[3072] == 0
    assert inside[3073] > 2 * 8 * 3073


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_that_is_written_into_a_wider_tensor_takes_nothing(dtype, beta):
    """torch 2.12 cannot imitate it."""
    with on_target() as tracker:
        a, b = (torch.empty(64, 64, dtype=dtype, device="cuda") for _ in range(2))
        total = torch.empty(64, 64, device="cuda")
        before = len(tracker.trace.storages)
        machine.mixed_product(total, a, b, beta)
        assert len(tracker.trace.storages) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["indexed", "nsa"])
def test_few_rounds_inside_an_operator_take_what_all_take(kind, monkeypatch):
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=("num_layers=1",),
        context_length=2_900,
        attention_type=kind,
        dtype="fp32",
        device="cpu",
    )

    def insides() -> dict:
        program = program_of(cfg, every=True)
        trace(program, "cpu", every_tile=True)
        return program.tracker.workspace.known

    few = insides()
    monkeypatch.setattr(machine, "few_rounds", contextlib.nullcontext)
    assert len(few) >= 3 and insides() == few


def test_the_sparse_twin_takes_what_its_file_says_at_131072_tokens():
    """Beyond what it returns: results of a chunk of pairs, one KV head folded, dq, flash; and while
    all pairs are sorted by block, 20 bytes of each in the forward."""
    pytest.importorskip("triton", reason="triton is not installed")
    cfg, T = NSAConfig(), 131_072
    N = cfg.compressed_blocks(T)
    sizes = [getattr(cfg, name) for name in Sizes._fields]
    with on_target() as tracker:
        workspaces = tracker.workspace
        make = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        keys = [make(1, n, 8, 128) for n in (T, T, N, N, T, T)]
        inputs = [make(1, T, 32, 128), *keys, make(1, T, 32, 3)]
        forward = workspaces(engine.nsa_forward._opoverload, (*inputs, None, sizes, True), None)
        with workspaces.inside_one():
            o, *saved = engine.nsa_forward._init_fn(*inputs, None, sizes, True)
        given = (o, *inputs, *saved, None, sizes, True)
        backward = workspaces(engine.nsa_backward._opoverload, given, None)

    sorted_pairs = 20 * T * 8 * cfg.sel_count
    assert sorted_pairs < forward < 2.1 * sorted_pairs
    assert 0.9e9 < backward < 1.8e9


# ---- what a plan leaves behind

PLANNED_FIRST = """
from longhaul.config import TrainConfig
from longhaul.planner.simulate import simulate

words = ("num_layers=1", "num_heads=2", "num_kv_heads=1", "head_dim=64")
cfg = TrainConfig(
    model_size="tiny", model_overrides=words, context_length=256, attention_type="nsa",
    dtype="bf16", device="cuda",
)
simulate(cfg, target="cuda").peak()

from longhaul.sparse.triton import blocks, nsa, tiles

assert tiles.launch.__module__ == tiles.__name__
for module in (blocks, nsa):
    assert module.launch is tiles.launch, module
"""


def test_behind_a_plan_of_a_gpu_the_kernels_that_it_imported_are_launched():
    """A plan launches none; training in the same process once launched none either."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not planned for")
    words = [sys.executable, "-c", PLANNED_FIRST]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_a_module_that_is_imported_meanwhile_has_what_was_there_before(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("from os.path import basename")
    monkeypatch.syspath_prepend(tmp_path)
    with patched({(os.path, "basename"): len}):
        late = importlib.import_module("imported_late")
        assert late.basename("abc") == 3
    del sys.modules["imported_late"]
    assert late.basename("a/b") == "b"

"""One training step of the 4B on fake CUDA tensors, with each lever: what makes the host wait for
the device, by line.
"""

import contextlib
import functools
import os
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import model
from base import machine
from footprint.python.patches import patched
from longhaul import optimizers, step
from longhaul.config import TrainConfig
from longhaul.staging import Staging, slabs
from model import Decoder, OnHost
from tests.cuda_build import engine
from tests.cuda_build.fakes import HOPPER, on_card

pytestmark = pytest.mark.slow

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OTHERS = ("/tests/", "/site-packages/")  # the environment of these tests may lie inside
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")
COPIES = ("aten::_to_copy", "aten::copy_")
FULL = dict(gradient_checkpointing="full")
IN_BACKWARD = dict(optimizer_in_backward=True, grad_clip=0.0)
LEVERS = {
    "plain": {},
    "selective, accumulation, adamw_bf16": dict(
        gradient_checkpointing="selective", gradient_accumulation_steps=2, optimizer="adamw_bf16"
    ),
    "tiles, head groups, muon": FULL | dict(mlp_tiles=4, attention_head_groups=8, optimizer="muon"),
    "offloaded activations, adamw_8bit": FULL
    | dict(offload_activations=True, optimizer="adamw_8bit", master_weights="none"),
    "sparse, checkpointing": FULL | dict(attention_type="nsa", kernels="auto"),
    "indexed, warm-up": dict(attention_type="indexed", kernels="auto", indexer_warmup=2),
    "8 bits in backward": IN_BACKWARD | dict(optimizer="adamw_8bit", master_weights="none"),
}


class Waits(TorchDispatchMode):
    """Notes the lines at which the host waits for the device, and answers what it asks for."""

    def __init__(self, pinned: set[int]):
        super().__init__()
        self.pinned = pinned  # ids of storages of pinned memory
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        if name in READS and args[0].device.type == "cuda":
            self.note(name)
        if name == "aten::_local_scalar_dense":
            return args[0].dtype == torch.bool or 1
        if name == "aten::_pin_memory":
            result = args[0].clone()
            self.pinned.add(result.untyped_storage()._cdata)
            return result
        result = func(*args, **kwargs)
        if name in COPIES:
            self.copied(name, result, args, kwargs)
        return result

    def copied(self, name, result, args, kwargs):
        """A copy between host and device waits, unless its host memory is pinned and it says so."""
        source = args[1] if name == "aten::copy_" else args[0]
        devices = {source.device.type, result.device.type}
        if devices != {"cpu", "cuda"}:
            return
        flags = args[2:3] if name == "aten::copy_" else ()
        non_blocking = kwargs.get("non_blocking", any(flags))
        host = source if source.device.type == "cpu" else result
        if not (non_blocking and host.untyped_storage()._cdata in self.pinned):
            self.note(f"{name} {source.device.type} -> {result.device.type}")

    def note(self, name):
        """The innermost line of ours."""
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT)]
        ours = [f for f in frames if not any(part in f.filename for part in OTHERS)]
        frame = ours[-1]
        place = os.path.relpath(frame.filename, ROOT)
        self.lines.append(f"{place}: {frame.line} [{name}]")


def always_flash(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
    """FlashAttention in place of machine.attention: PyTorch could not choose without a card."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, 0.0, is_causal)[0]


class Streams:
    """Stands in for the stream that copies layer inputs."""

    def after_computation(self):
        return contextlib.nullcontext()

    def mark(self):
        return None

    def hold_computation(self, mark):
        pass


class PinnedStaging(Staging):
    """Counts how often the host waits for a slab."""

    def __init__(self, pinned: set[int]):
        super().__init__()
        self.known = pinned
        self.waits = 0

    def mark(self, device):
        def wait():
            self.waits += 1

        return SimpleNamespace(synchronize=wait)

    def memory(self, size):
        buffer = torch.empty(size, dtype=torch.uint8)
        self.known.add(buffer.untyped_storage()._cdata)
        return buffer


@pytest.fixture
def on_cuda(monkeypatch):
    """What needs a driver, replaced; the state of a shallow 4B and the waits of a second step."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", engine.run_backward)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", engine.current_graph_task_id)
    function = torch.autograd.function.FunctionCtx
    monkeypatch.setattr(function, "set_materialize_grads", engine.set_materialize_grads)
    monkeypatch.setattr(optimizers, "generator", lambda *key: None)
    # made once per device; a simulation's are not kept
    monkeypatch.setattr(optimizers, "_code", functools.cache(optimizers._code))
    monkeypatch.setattr(Decoder, "init_weights", lambda *_: None)

    def second_step(prepare=lambda rows: rows, **changes) -> tuple[Waits, step.TrainState]:
        cfg = TrainConfig(
            model_size="4B",
            model_overrides=("num_layers=2",),
            context_length=4096,
            device="cuda",
            **{"kernels": "torch"} | changes,
        )
        pinned = set()
        skeleton = step.skeleton(cfg, cfg.model())
        flash = patched({(machine, "attention"): always_flash})
        with FakeTensorMode(allow_non_fake_inputs=True), on_card(HOPPER), flash:
            state = step.fill(skeleton, cfg, "cuda", step.ONE_PROCESS, None)
            if hasattr(state.optimizer, "staging"):
                state.optimizer.staging = PinnedStaging(pinned)
            if cfg.offload_activations:
                offload(state, pinned, monkeypatch)
            state.checked = True  # the first step checks its labels
            first, second = Waits(pinned), Waits(pinned)
            for waits in (first, second):
                rows = prepare(batch(cfg))
                with waits:
                    assert step.train_step(state, rows) is not None
        return second, state

    return second_step


def packed(rows: list[step.MicroBatch]) -> list[step.MicroBatch]:
    """The same with two documents in a row."""
    for micro in rows:
        tokens = micro["tokens_BT"].shape[1]
        ids = torch.ones(1, tokens, dtype=torch.int32)
        ids[:, : tokens // 3] = 0
        micro["doc_ids"] = OnHost(ids)
    return rows


def documents_of(cu_seqlens: torch.Tensor, rows: int, device: model.Device) -> model.Documents:
    """Documents.of, with lengths, which fake tensors would not have."""
    with unset_fake_temporarily():
        lengths = cu_seqlens.diff().tolist()
    return model.Documents(lengths, model.on_device(cu_seqlens.int(), device))


def batch(cfg: TrainConfig) -> list[step.MicroBatch]:
    def numbers():
        return torch.zeros(1, cfg.context_length, dtype=torch.int64, device="cuda")

    names = ("tokens_BT", "labels_BT", "positions")
    count = cfg.accumulation(1)
    return [{name: numbers() for name in names} for _ in range(count)]


def offload(state: step.TrainState, pinned: set[int], monkeypatch) -> None:
    """Copies without streams; host memory that counts as pinned."""
    from longhaul.parallel import checkpointing

    def to_host(x):
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        pinned.add(host.untyped_storage()._cdata)
        kept.append(host)
        return host.copy_(x, non_blocking=True)

    kept = []
    monkeypatch.setattr(checkpointing, "to_host", to_host)
    copies = state.model.layers[0].forward.args[0]
    copies.copying_on = lambda device: Streams()


FIGURES = "longhaul/step.py: norm, weight, *found ="  # all figures of a step in one copy
FINITE = "longhaul/optimizers.py: elif square.is_meta or square.isfinite():"


@pytest.mark.parametrize("lever", LEVERS)
def test_a_step_waits_for_the_device_once(lever, on_cuda):
    waits, _ = on_cuda(**LEVERS[lever])
    assert [line for line in waits.lines if not line.startswith(FIGURES)] == []
    assert len(waits.lines) == 1


@pytest.mark.parametrize("attention", ["standard", "nsa", "indexed"])
def test_a_step_of_packed_rows_waits_for_the_device_once(attention, on_cuda, monkeypatch):
    boundaries = torch.tensor([0, 1365, 4096])  # fake ids have no values that could be compared
    monkeypatch.setattr(model, "document_boundaries", lambda ids: boundaries)
    monkeypatch.setattr(model.Documents, "of", documents_of)
    waits, _ = on_cuda(packed, attention_type=attention, kernels="auto")
    assert [line for line in waits.lines if not line.startswith(FIGURES)] == []
    assert len(waits.lines) == 1


def test_an_update_on_the_host_waits_for_each_slab_of_gradients_and_copies_nothing_pageable(
    on_cuda,
):
    waits, state = on_cuda(master_weights="host")
    parts = [slabs(p) for p in state.model.parameters()]
    assert state.optimizer.staging.waits == 2 * sum(map(len, parts))  # of two steps
    assert [line.startswith(FIGURES) for line in waits.lines] == [True]


def test_an_update_on_the_host_in_the_backward_also_asks_whether_each_gradient_is_finite(on_cuda):
    waits, state = on_cuda(master_weights="host", **IN_BACKWARD)
    finite = [line for line in waits.lines if line.startswith(FINITE)]
    assert len(finite) == len(list(state.model.parameters()))
    assert len(waits.lines) == len(finite) + 1


def test_a_wait_and_a_pageable_copy_would_be_found(on_cuda, monkeypatch):
    def careless(state, *_):
        norm = next(state.model.parameters()).detach().norm()
        float(norm)
        torch.ones(3).to(norm.device, non_blocking=True)
        return gradients(state, *_)

    gradients = step.gradients
    monkeypatch.setattr(step, "gradients", careless)
    waits, _ = on_cuda()
    assert len(waits.lines) == 3
    assert "_local_scalar_dense" in waits.lines[0]
    assert "cpu -> cuda" in waits.lines[1]

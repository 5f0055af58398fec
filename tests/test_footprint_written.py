"""footprint/: steps written for a GPU are predicted as they are where there is none, as the same
steps are with "cpu" in place of "cuda"; and what a step moves to the host counts there.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from footprint import predict
from tests.footprint_models import BATCH, TOKENS, VOCABULARY, Transformer, convolutions, one_layer


class Form:
    """A loop in a usual form; `device` is "cuda" as it is written, or "cpu" in its place."""

    ranks = 1

    def __init__(self, device: str):
        self.device = device

    def model(self) -> nn.Module:
        return one_layer().to(self.device)

    def build(self):
        model = self.model()
        return model, torch.optim.AdamW(model.parameters())

    def batch(self) -> tuple[Tensor, Tensor]:
        rows = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
        inputs, labels = rows[:, :-1], rows[:, 1:]
        return inputs.to(self.device, non_blocking=True), labels.to(self.device)

    def loss(self, model: nn.Module) -> Tensor:
        inputs, labels = self.batch()
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def step(self, state) -> object:
        model, optimizer = state
        self.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Plain(Form):
    def build(self):
        if self.device == "cuda":
            assert torch.cuda.is_available() and torch.cuda.device_count() == 1
            torch.cuda.set_device(0)
            torch.cuda.manual_seed_all(0)
        return super().build()

    def step(self, state):
        super().step(state)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Autocast(Form):
    def build(self):
        return *super().build(), torch.amp.GradScaler(self.device)

    def step(self, state):
        model, optimizer, scaler = state
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Ranks(Form):
    ranks = 2

    def build(self):
        if self.device == "cuda":
            init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return super().build()


class Replicated(Ranks):
    def model(self):
        if self.device == "cpu":
            return DistributedDataParallel(super().model())
        rank = int(os.environ["LOCAL_RANK"])
        return DistributedDataParallel(one_layer().to(rank), device_ids=[rank])


class Sharded(Ranks):
    def model(self):
        model = super().model()
        mesh = init_device_mesh(self.device, (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Trainer(Form):
    """transformers' model; a loop as its Trainer has it."""

    def model(self):
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, intermediate_size=256, **sizes)
        model = transformers.LlamaForCausalLM(config)
        model.gradient_checkpointing_enable()
        return model.to(self.device).train()

    def loss(self, model):
        rows = torch.randint(VOCABULARY, (BATCH, TOKENS))
        inputs = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        return model(**inputs, use_cache=False).loss

    def step(self, state):
        model, optimizer = state
        for _ in range(2):
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.loss(model) / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return f"{loss.detach().item():.3f} {norm:.3f}"


class Offload(Form):
    def loss(self, model):
        with save_on_cpu(pin_memory=True):
            return super().loss(model)


class Logged(Form):
    def build(self):
        with torch.device(self.device):
            model = one_layer()
        self.peaks = []
        return model, torch.optim.AdamW(model.parameters())

    def step(self, state):
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        super().step(state)
        if self.device == "cuda":
            major, _ = torch.cuda.get_device_capability()
            assert torch.cuda.get_device_properties(0).major == major
            self.peaks.append(torch.cuda.max_memory_allocated())
            used = f"{torch.cuda.memory_allocated() / 2**20:.1f} MiB"
            print(torch.cuda.get_device_name(), used)


class Timed(Form):
    """Copies on a stream of their own, with the times of events."""

    def batch(self):
        if self.device == "cpu":
            return super().batch()
        stream, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(stream):
            rows = torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).pin_memory()
            moved = rows.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
        assert start.elapsed_time(torch.cuda.Event()) > 0
        return moved[:, :-1], moved[:, 1:]


FORMS = [
    Plain,
    Autocast,
    Replicated,
    Sharded,
    Trainer,
    Offload,
    Logged,
    Timed,
]


def predicted(form: Form):
    return predict(form.build, form.step, "cuda", world_size=form.ranks)


@pytest.mark.parametrize("kind", FORMS)
def test_a_step_written_for_a_gpu_is_predicted_as_it_is_with_cpu_in_place_of_cuda(kind):
    is_there = torch.cuda.is_available()
    written, plain = predicted(kind("cuda")), predicted(kind("cpu"))
    assert written.peak == pytest.approx(plain.peak, rel=1e-3)
    assert written.by_stage.keys() == plain.by_stage.keys()
    assert torch.cuda.is_available() == is_there
    assert "LOCAL_RANK" not in os.environ


def test_the_peak_that_a_step_reads_is_the_one_that_is_predicted():
    form = Logged("cuda")
    report = predicted(form)
    assert form.peaks[-1] == report.peak


def one_rank_of_fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    init_process_group("nccl")
    model = fully_shard(Transformer().cuda())
    return model, torch.optim.AdamW(model.parameters())


def test_fsdp2_on_one_gpu_holds_whole_parameters_twice():
    report = predict(one_rank_of_fsdp2, Form("cuda").step, "cuda")
    sizes = report.stages["layers.* forward"]
    assert sizes["unsharded"] == pytest.approx(sizes["parameter"], rel=0.01)
    assert not torch.distributed.is_initialized()


# ---- host memory

LARGE = 2**20  # elements


def build_small() -> nn.Module:
    return nn.Linear(8, 8).cuda()


def keeps_on_the_host(model) -> Tensor:
    return torch.ones(LARGE, device="cuda").cpu()


def moves_to_the_host(model) -> Tensor:
    return torch.ones(LARGE, device="cuda").to("cpu", non_blocking=True)


def copies_into_pinned(model) -> Tensor:
    pinned = torch.empty(LARGE, pin_memory=True)
    return pinned.copy_(torch.ones(LARGE, device="cuda"), non_blocking=True)


@pytest.mark.parametrize("step", [keeps_on_the_host, moves_to_the_host, copies_into_pinned])
def test_what_a_step_moves_to_the_host_is_host_memory_and_not_the_devices(step):
    kept = []
    report = predict(build_small, lambda model: kept.append(step(model)), "cuda")
    assert 4 * LARGE <= report.peak < 4.1 * LARGE  # what is moved, and not what was kept
    assert report.host_peak >= 2 * 4 * LARGE
    assert "host memory" in str(report)


def test_data_that_build_makes_stay_on_the_host_until_a_batch_is_moved():
    def build():
        return build_small(), torch.randn(LARGE, 8)

    def step(state):
        model, data = state
        model(data[:1024].pin_memory().to(next(model.parameters()).device)).sum().backward()

    report = predict(build, step, "cuda")
    assert report.peak - 2 * 32 * 2**20 < 1024 * 8 * 4 * 4  # without the workspaces of cuBLAS
    assert report.host_peak >= LARGE * 8 * 4


def test_gradients_of_what_was_on_the_host_come_back_to_the_device():
    def step(model):
        on_host = model(torch.randn(LARGE, 8, device="cuda")).cpu()
        (on_host * 2).sum().backward()

    report = predict(build_small, step, "cuda")
    assert report.stages["backward"]["temporary"] >= 4 * LARGE * 8


# ---- what stays as it is


def images_on_a_gpu(model) -> Tensor:
    return model(torch.randn(2, 3, 16, 16, device="cuda"))


def on_an_index(model) -> Tensor:
    return model.to(0)(torch.randn(2, 3, 16, 16).to(0))


def as_the_default(model) -> Tensor:
    torch.set_default_device("cuda")
    return model.cuda()(torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("step", [images_on_a_gpu, on_an_index, as_the_default])
def test_other_ways_to_say_cuda_are_understood_and_leave_no_default(step):
    plain = predict(convolutions, lambda model: model(torch.randn(2, 3, 16, 16)), "cuda").peak
    assert predict(convolutions, step, "cuda").peak == pytest.approx(plain, rel=1e-3)
    assert torch.ones(1).device.type == "cpu"

"""The plan before a run: levers move it as they move memory, and it is what a step really takes."""

import dataclasses
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data.progress import duration
from footprint.cards.device import card, installed_card
from longhaul import flops, kernels, step
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import (
    COUNTED,
    keys_read,
    pairs,
    products_speed,
    step_operations,
    step_seconds,
    time_words,
    train_flops,
)
from longhaul.planner import fit
from longhaul.planner import plan as planner
from longhaul.run.log import peak_flops
from longhaul.staging import PINNED
from model import GIB, ModelConfig

BIG = TrainConfig(context_length=131072)
CUDA = torch.device("cuda")
CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
ASKED_FOR_TRITON = """
import torch
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.planner import plan as planner

cfg = TrainConfig(
    model_size="tiny",
    model_overrides=("num_layers=1",),
    loss="chunked",
    context_length=512,
    attention_type="nsa",
    kernels="triton",
    device="cuda",
)
plan = planner.plan(cfg, cfg.model(), World(), torch.device("cuda"), available=80.0)
print("planned", plan.fits)
"""
SPARSE = pytest.mark.parametrize("sizes", [(), ("kv=separate",), ("cmp_kind=mean",)], ids=str)


# ---- bytes


def test_the_plan_explains_its_peak_by_terms_that_sum_to_it():
    cfg = dataclasses.replace(BIG, gradient_checkpointing="full", plan=True)
    found = planner.plan(cfg, cfg.model(), World(), CUDA, available=1000.0)
    needs = found.needs
    stage = "layers.*.mlp backward"
    assert needs.peak == needs.stages[stage]

    lines = found.table().splitlines()
    start = next(index for index, line in enumerate(lines) if stage in line)
    terms = {name: f"{size / GIB:.2f}" for name, size in needs.sizes[stage].items()}
    shown = [[size, *name.split()] for name, size in terms.items() if float(size)]
    assert [line.split() for line in lines[start + 1 : start + 1 + len(shown)]] == shown
    assert len(shown) == 5 and needs.peak == sum(needs.sizes[stage].values())

    unasked = dataclasses.replace(found, asked=dataclasses.replace(cfg, plan=False))
    assert len(unasked.table().splitlines()) == len(lines) - len(shown)


# ---- operations


def test_flops_count_the_matrices_six_times_and_the_causal_pairs():
    config = ModelConfig.preset("tiny")
    with torch.device("meta"):
        matrices = sum(p.numel() for p in kernels.decoder(config).parameters() if p.ndim == 2)
    assert train_flops(config, 10, 0) == 6 * matrices * 10
    assert train_flops(config, 0, 55) == 12 * 4 * 8 * 32 * 55
    assert keys_read(config, torch.arange(10)).sum() == 55

    cfg = TrainConfig(model_size="tiny", context_length=10, gradient_checkpointing="full")
    assert sum(step_operations(cfg, config, 2)) == pytest.approx(
        2 * train_flops(config, 10, 55) * 4 / 3
    )


@SPARSE
def test_sparse_flops_count_each_matrix_as_often_as_it_works(sizes):
    config = TrainConfig(model_size="tiny", attention_type="nsa", blocks=sizes).model()
    with torch.device("meta"):
        decoder = kernels.decoder(config)
    assert decoder.num_params() == config.num_params()

    products = 0.0
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2 and not name.endswith("pe_lK"):
            # a compressor works once per stride and KV head
            rate = 2 / 16 if ".compressor." in name else 1
            products += parameter.numel() * rate
    assert train_flops(config, 160, 0) == 6 * 160 * products


def test_a_sparse_query_reads_the_keys_that_the_branches_show_it():
    config = TrainConfig(model_size="tiny", attention_type="nsa").model()
    positions = torch.tensor([0, 31, 511, 1023, 1024, 131_071])
    compressed = torch.tensor([0, 1, 31, 63, 63, 8191])
    selected = torch.tensor([1, 32, 512, 1024, 961, 1024])
    window = torch.tensor([1, 32, 512, 512, 512, 512])
    assert keys_read(config, positions).tolist() == (compressed + selected + window).tolist()


@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_pairs_are_summed_without_a_tensor_of_the_documents_length(attention):
    config = TrainConfig(model_size="tiny", attention_type=attention).model()
    for tokens in (1, 777, COUNTED, COUNTED + 1, 3 * COUNTED + 5001):
        assert pairs(config, tokens) == keys_read(config, torch.arange(tokens)).sum()

    endless = 10**14
    expected = endless**2 / 2 if attention == "standard" else endless**2 / 32
    assert pairs(config, endless) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "called, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100 32GB"),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 4070 Ti", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", "H200"),
    ],
)
def test_a_card_is_known_by_what_pytorch_calls_it(called, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: called)
    expected = card(name) if name else None
    assert installed_card(CUDA) == expected
    assert peak_flops(CUDA) == (expected.peak_flops if expected else None)


def test_times_are_those_of_the_card():
    cfg = TrainConfig(model_size="tiny", context_length=512)
    known, named = planner.on_ranks(cfg), planner.on_ranks(cfg, gpu="RTX 4090")
    assert named.seconds == pytest.approx(known.seconds * 989 / 165.2)
    assert "roofline of an RTX 4090" in named.time()


# ---- time


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.0042, "0.0042 s"),
        (170, "170 s"),
        (700, "12 min"),
        (170_000, "47 h"),
        (1e6, "12 days"),
        (1e20, "over 100 years"),
    ],
)
def test_times_have_the_unit_in_which_a_person_reads_them(seconds, words):
    assert duration(seconds) == words


def test_a_plan_says_what_a_step_and_the_run_take():
    assert time_words(170, 1000, "cpu") == "about 170 s a step, 47 h for 1,000 steps"
    assert time_words(600, 1, "cpu") == "about 10 min a step, 10 min for 1 step"
    assert time_words(2, 10, "cuda").endswith(
        "20 s for 10 steps (roofline of an H100: an order of magnitude)"
    )

    on_gpu = dataclasses.replace(BIG, gradient_checkpointing="full")
    plan = planner.plan(on_gpu, on_gpu.model(), World(), CUDA, available=100.0)
    assert "a step" in plan.table().splitlines()[-1] and "1,000 steps" in plan.time()
    assert plan.seconds == sum(step_operations(on_gpu, on_gpu.model(), 1)) / 400e12


@pytest.fixture
def process_time(monkeypatch):
    """Times are those of this process alone, with one thread, and so is the measured speed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    forget_speeds()
    yield
    forget_speeds()
    torch.set_num_threads(threads)


def forget_speeds():
    flops._speeds.cache_clear()


@pytest.mark.slow
def test_a_step_on_this_cpu_takes_about_as_much_cpu_time_as_planned(process_time):
    """Within a factor of two on an idle machine; of three here, where other tests may run."""
    cfg = TrainConfig(model_size="tiny", context_length=2048, device="cpu")
    planned = step_seconds(cfg, cfg.model(), 1, "cpu")
    state = step.build(cfg, cfg.model(), "cpu")
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    batch = [dict(tokens_BT=tokens, labels_BT=tokens)]
    step.train_step(state, batch)

    start = time.perf_counter()
    step.train_step(state, batch)
    measured = time.perf_counter() - start
    assert 1 / 3 < measured / planned < 3


def test_the_speed_of_this_machine_is_measured_once_and_draws_no_random_number():
    cfg = TrainConfig(model_size="tiny", context_length=512, attention_type="nsa", device="cpu")
    state = torch.random.get_rng_state()
    first = step_seconds(cfg, cfg.model(), 1, "cpu")
    assert step_seconds(cfg, cfg.model(), 1, "cpu") == first > 0
    assert products_speed(cfg.model()) > 1e8
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- ranks


def test_a_number_of_ranks_that_other_settings_forbid_is_not_proposed(monkeypatch):
    monkeypatch.setattr(planner, "host_available_bytes", lambda: 512 * GIB)
    world = World(size=2, local_size=2)
    cfg = TrainConfig(
        context_length=4096,
        attention_head_groups=8,
        gradient_checkpointing="full",
        context_parallel_mode="ulysses",
    )
    plan = planner.plan(cfg, cfg.model(), world, CUDA, available=200.0)
    assert plan.cfg.context_parallel_size == 1


def test_ranks_share_rows_if_the_host_cannot_hold_what_they_offload(monkeypatch):
    monkeypatch.setattr(planner, "host_available_bytes", lambda: 3 * GIB)
    cfg = TrainConfig(
        model_overrides=("num_layers=2",),
        context_length=131072,
        gradient_checkpointing="full",
        offload_activations=True,
    )
    world = World(size=2, local_size=2)
    plan = planner.plan(cfg, cfg.model(), world, CUDA, available=80.0)
    assert plan.fits and plan.cfg.context_parallel_size == 2


def test_a_background_save_needs_a_second_copy_of_weights_and_states():
    cfg = TrainConfig(model_size="0.6B", model_overrides=("num_layers=1",), context_length=1024)
    copied = dataclasses.replace(cfg, async_save=True)
    copy_gib = 12 * cfg.model().num_params() / GIB
    pinned_gib = PINNED / GIB  # through which the copy passes

    def plans(device):
        settings = cfg, copied
        return [planner.plan(one, one.model(), World(), device, 80.0).needs for one in settings]

    plain, doubled = plans(CUDA)
    assert (doubled.host - plain.host) / GIB == pytest.approx(copy_gib + pinned_gib, rel=0.01)
    plain, doubled = plans(torch.device("cpu"))
    assert (doubled.peak - plain.peak) / GIB == pytest.approx(copy_gib, rel=0.01)


def test_cached_files_of_a_cgroup_count_as_available(monkeypatch, tmp_path):
    contents = {
        "/proc/meminfo": "MemAvailable: 67108864 kB\n",  # 64 GiB
        "/sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{15 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {12 * GIB}\n",
    }
    monkeypatch.setattr(planner, "open", lambda path: io.StringIO(contents[path]), raising=False)
    assert planner.host_available_bytes() == 13 * GIB


@pytest.mark.slow
def test_the_last_lever_allows_one_rank_per_row_and_the_one_before_two(monkeypatch):
    monkeypatch.setattr(planner, "host_available_bytes", lambda: 512 * GIB)
    world = World(size=2, local_size=2)
    asked = TrainConfig(
        model_overrides=("num_layers=2",),
        context_length=131072,
        context_parallel_mode="ulysses",
        gradient_checkpointing="full",
        mlp_tiles=0,
        offload_activations=True,
        master_weights="host",
    )

    def planned(cfg: TrainConfig, available: float) -> planner.Plan:
        return planner.plan(cfg, cfg.model(), world, CUDA, available)

    def ranks_per_row(available: float) -> int:
        return fit.fitted(planned(asked, available)).cfg.context_parallel_size

    alone = dataclasses.replace(fit.head_groups(asked), context_parallel_size=1)
    shared = dataclasses.replace(asked, context_parallel_size=2)
    least, more = (planned(cfg, 1e6).needed_gib for cfg in (alone, shared))
    assert fit.fitted(planned(asked, 0.7 * least)) is None
    assert ranks_per_row((least + more) / 2) == 1
    assert ranks_per_row(more + 0.1) == 2


@pytest.mark.slow
def test_triton_kernels_for_a_gpu_are_planned_on_a_machine_without_one():
    """In a process without Triton's interpreter, which the other tests may have."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not planned for")
    done = subprocess.run(
        [sys.executable, "-c", ASKED_FOR_TRITON],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "planned True\n", done.stderr

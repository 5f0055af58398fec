"""benchmarks.gpu: the whole command at toy sizes, and what only a GPU would run, with the GPU's own
functions imitated.
"""

import importlib.machinery
import json
import sys
import types

import pytest
import torch

from benchmarks import attention as checks
from benchmarks import clock, record, report, vocab_loss
from benchmarks.gpu import attention, command, exact, loss, memory, step
from benchmarks.gpu.jobs import Job, Place
from longhaul.memory import history, reconcile
from longhaul.memory.allocator import LARGE_SEGMENT, SMALL_SEGMENT
from tests import nsa_oracle as oracle

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOY, FULL = Place(CPU, True), Place(CUDA, False)
MIB = 2**20


@pytest.fixture
def run(tmp_path):
    return record.Run(tmp_path, "a test", "pytest", {}, True, echo=lambda line: None)


@pytest.fixture
def install(monkeypatch):
    """Puts an imitation of a package where `import` and `find_spec` find it."""

    def add(name, **content):
        for depth in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:depth])
            module = types.ModuleType(part)
            module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(part, None), []
            monkeypatch.setitem(sys.modules, part, module)
        vars(module).update(content)

    return add


# ---- the whole command


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: `python -m benchmarks.gpu --toy` is the rehearsal")
    code = command.main(["--out", str(folder)])
    return (
        code,
        json.loads((folder / "results.json").read_text()),
        (folder / "results.md").read_text(),
    )


@pytest.mark.slow
def test_without_a_gpu_every_part_runs_at_toy_sizes_and_says_so(toy):
    code, data, page = toy
    assert code == 0 and not data["failures"] and not data["skipped"]
    assert data["toy"] and data["label"].startswith("Toy sizes on CPU") and "claims nothing" in page
    assert {"loss", "attention", "step", "memory", "stages", "workspaces"} == set(data["tables"])
    assert {"device", "torch", "triton", "python", "commit", "date"} <= set(data["where"])
    assert len(data["tables"]["memory"]["rows"]) == 6
    assert all(abs(row["difference"]) < 0.2 for row in data["tables"]["memory"]["rows"])


@pytest.mark.slow
def test_what_is_missing_on_a_cpu_is_said_by_name(toy):
    _, data, _ = toy
    said = " ".join(data["notes"]) + json.dumps(data["tables"])
    for name in (
        "Liger-Kernel",
        "cut-cross-entropy",
        "flash-attn",
        "SDPA, cuDNN",
        "NSA triton",
        "tests marked gpu",
        "Triton tile bodies",
        "allocator's curve",
    ):
        assert name in said, name
    rows = data["tables"]["attention"]["rows"]
    assert {row["time, ms"] for row in rows if row["attention"] == "flash-attn"} == {
        "needs a CUDA device"
    }


@pytest.mark.slow
def test_steps_stand_beside_transformers_which_starts_from_the_same_weights(toy):
    rows = {(row["system"], row["attention"]): row for row in toy[1]["tables"]["step"]["rows"]}
    assert (
        rows["longhaul", "standard"]["speed / transformers"] > 0
        and rows["transformers", "standard"]["step, ms"] > 0
    )
    assert ("transformers", "nsa") not in rows


def test_no_time_skips_every_line_and_names_it(tmp_path):
    assert command.main(["--out", str(tmp_path), "--only", "loss,step", "--minutes", "0.001"]) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert len(data["skipped"]) == len(loss.jobs(TOY) + step.jobs(TOY)) and not data["tables"]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--only", "lss"], "choose from exact, loss"),
        (["--minutes", "0"], "above 0"),
        (["--outt", "x"], "--out"),
    ],
)
def test_bad_input_names_the_remedy(args, words, capsys):
    assert command.main(args) == 2
    assert words in capsys.readouterr().err


def test_the_most_important_lines_of_all_parts_come_first_and_what_remains_is_skipped(
    monkeypatch, tmp_path
):
    done = []

    def part(*lines):
        return types.SimpleNamespace(
            jobs=lambda place: [
                Job(name, rank, seconds, lambda run, name=name: done.append(name))
                for name, rank, seconds in lines
            ]
        )

    monkeypatch.setattr(
        command,
        "PARTS",
        dict(loss=part(("b", 2, 1), ("long", 3, 1e6)), step=part(("a", 1, 1), ("c", 4, 1))),
    )
    found = command.measure(command.GpuConfig(out=str(tmp_path)), TOY)
    assert done == ["a", "b", "c"] and [line.split(":")[0] for line in found.data["skipped"]] == [
        "long"
    ]


def test_a_lost_device_ends_the_run_with_what_was_found(monkeypatch, tmp_path):
    def lose(run):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(
        command,
        "PARTS",
        dict(
            loss=types.SimpleNamespace(
                jobs=lambda place: [Job("first", 1, 1, lose), Job("second", 2, 1, lose)]
            )
        ),
    )
    found = command.measure(command.GpuConfig(out=str(tmp_path)), TOY)
    assert (
        "illegal memory access" in found.data["failures"][0]
        and "--only" in found.data["skipped"][0]
    )


def test_out_of_memory_is_a_finding_and_any_other_failure_fails(monkeypatch, tmp_path):
    def raising(error):
        def run(_):
            raise error

        return run

    jobs = [
        Job("large", 1, 1, raising(torch.OutOfMemoryError("CUDA out of memory"))),
        Job("wrong", 2, 1, raising(ValueError("no such shape"))),
    ]
    monkeypatch.setattr(command, "PARTS", dict(loss=types.SimpleNamespace(jobs=lambda place: jobs)))
    found = command.measure(command.GpuConfig(out=str(tmp_path)), TOY)
    assert found.data["notes"] == ["large: out of memory"] and found.data["failures"] == [
        "wrong: ValueError: no such shape"
    ]


def test_a_kernel_that_cannot_serve_is_a_reason_and_a_bug_elsewhere_is_not_swallowed():
    errors = pytest.importorskip("triton.errors")

    def raising(error):
        raise error

    assert record.attempt(raising, errors.TritonError("shared memory")) == (
        None,
        "TritonError: shared memory",
    )
    assert record.attempt(raising, torch.OutOfMemoryError("CUDA out of memory")) == (
        None,
        "out of memory",
    )
    for error in (torch.AcceleratorError("gone"), ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            record.attempt(raising, error)


# ---- the clock


class Event:
    """torch.cuda.Event as it is used, on a clock of its own, in milliseconds."""

    now, log = 0.0, []

    def __init__(self, enable_timing=False):
        assert enable_timing, "an event without timing has no elapsed_time"

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.log.append("waited")

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_gpus_seconds_are_between_two_events_after_waiting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.log.clear()

    def work():
        Event.now += 250.0

    assert clock.seconds(work, CUDA) == 0.25 and Event.log == ["waited"]


def test_calls_take_turns_on_inputs_that_are_fresh_in_every_round():
    seen = []
    inputs = iter(range(100))
    clock.interleaved(
        {name: lambda x, name=name: seen.append((name, x)) for name in "abc"},
        lambda: [next(inputs)],
        rounds=3,
    )
    assert seen == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("b", 1),
        ("c", 1),
        ("a", 1),
        ("c", 2),
        ("a", 2),
        ("b", 2),
    ]


def test_the_scratch_buffer_is_written_before_each_timed_call_and_larger_than_any_l2(monkeypatch):
    order, writes = [], types.SimpleNamespace(zero_=lambda: order.append("scratch"))
    monkeypatch.setattr(clock, "seconds", lambda call, device: call() or 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: order.append(size) or writes)
    clock.interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"}, list, CUDA, rounds=1
    )
    assert order == [2 * 2**30, "scratch", "a", "scratch", "b"]


def test_no_round_begins_after_the_limit_and_a_ratio_is_of_rounds():
    assert len(clock.interleaved({"a": lambda: None}, list, rounds=9, limit=-1)["a"]) == 1
    assert (
        clock.ratio({"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2.0
        and clock.ratio({"a": [1.0]}, "a", "b") is None
    )


# ---- peers


def test_installed_losses_are_called_as_they_want_it_and_others_named(install, capsys):
    said = []
    vocab_loss.variants(CUDA, said.append)
    assert (
        "Liger-Kernel: not installed (pip install liger-kernel)" in said
        and "cut-cross-entropy: not installed (pip install cut-cross-entropy)" in said
    )

    class Liger:
        def __init__(self, accum_dtype=None):
            pass

        def __call__(self, weight, hidden, labels):
            return vocab_loss.standard_loss(hidden, weight, labels)

    def cce(e, c, targets, accum_e_fp32=False, accum_c_fp32=False, filter_eps="auto"):
        return vocab_loss.standard_loss(e, c, targets)

    install("liger_kernel.transformers", LigerFusedLinearCrossEntropyLoss=Liger)
    install("cut_cross_entropy", linear_cross_entropy=cce)
    table, few = vocab_loss.variants(CUDA, said.append), vocab_loss.inputs(16, 32, 64, False, CPU)
    peers = [name for name in table if name.startswith(("Liger", "cut"))]
    assert peers == [
        "Liger-Kernel",
        "Liger-Kernel, fp32 sums",
        "cut-cross-entropy",
        "cut-cross-entropy, fp32 sums",
    ]
    assert all(table[name](*few) == vocab_loss.standard_loss(*few) for name in peers)


def test_a_wrong_loss_is_not_timed_and_of_ours_it_fails_the_run(run, monkeypatch):
    right = vocab_loss.variants(CPU, run.note)
    wrong = {
        "longhaul": lambda h, w, y: 1.01 * right["longhaul"](h, w, y),
        "standard": right["standard"],
        "other": lambda h, w, y: 1.2 * right["standard"](h, w, y),
    }
    monkeypatch.setattr(vocab_loss, "variants", lambda *_: wrong)
    loss.one_size(run, TOY, 64, {}, 1.0)
    rows = {row["loss"]: row for row in run.data["tables"]["loss"]["rows"]}
    assert (
        rows["longhaul"]["time, ms"] == rows["other"]["time, ms"] == "not timed: fails its check"
        and rows["standard"]["time, ms"] > 0
    )
    assert rows["other"]["dW error"] > 0.1 and run.data["failures"] == [
        "loss, 64 tokens: longhaul: not timed: fails its check"
    ]


def test_memory_that_runs_out_ends_that_line_at_larger_sizes_alone(run, monkeypatch):
    right = vocab_loss.variants(CPU, run.note)

    def large(h, w, y):
        if len(h) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37 GiB")
        return right["standard"](h, w, y)

    monkeypatch.setattr(
        vocab_loss, "variants", lambda *_: {"longhaul": right["longhaul"], "standard": large}
    )
    known = {}
    for tokens in (256, 512, 1024):
        loss.one_size(run, TOY, tokens, known, 1.0)
    shown = {
        (row["loss"], row["tokens"]): row["time, ms"] for row in run.data["tables"]["loss"]["rows"]
    }
    assert (
        shown["standard", 256] > 0
        and shown["standard", 512] == "out of memory"
        and ("standard", 1024) not in shown
    )
    assert shown["longhaul", 1024] > 0 and not run.data["failures"]
    assert (
        "loss, 1,024 tokens: standard is left out, as its memory ran out at 512"
        in run.data["notes"]
    )


def test_flash_attention_is_called_in_its_own_layout(install):
    install(
        "flash_attn",
        flash_attn_func=lambda q, k, v, causal: oracle.causal(q, k, v).to(q.dtype) * causal,
    )
    contest = attention.check(
        attention.Contest((4, 1), checks.CFG, {"flash-attn": attention.flash_attn()}), TOY
    )
    (forward, gradient), why = contest.verdicts["flash-attn"]
    assert not why and 0 < forward < 1e-2 and 0 < gradient < 1e-2


def test_decoding_is_checked_before_it_is_timed_also_of_others(install, run):
    def with_kvcache(q, k, v, cache_seqlens, wrong=1.0):
        assert cache_seqlens == k.shape[1] == 300
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return wrong * torch.nn.functional.scaled_dot_product_attention(
            *heads, enable_gqa=True
        ).transpose(1, 2)

    for wrong, word in ((1.0, ""), (0.9, "not timed: fails its check")):
        install(
            "flash_attn",
            flash_attn_with_kvcache=lambda *x, wrong=wrong, **y: with_kvcache(*x, **y, wrong=wrong),
        )
        error, why = attention.attempt(attention.dense_decode_error, attention.flash_decoder, TOY)
        assert not why and (error > 0.05) == bool(word)
    attention.decode(run, TOY, 100, 1.0)
    rows = {row["attention"]: row for row in run.data["tables"]["attention"]["rows"]}
    assert (
        rows["SDPA, flash"]["forward error"] < 1e-2
        and rows["longhaul, NSA"]["time, ms"] > 0
        and rows["flash-attn"]["time, ms"] == "needs a CUDA device"
    )


def fla_like(q, k, v, g_cmp, g_slc, g_swa, block_counts, block_size, window_size, wrong=1.0):
    """What flash-linear-attention's parallel_nsa computes up to 1,024 tokens, where every block is
    chosen.
    """
    assert (block_counts, block_size, window_size) == (16, 64, 512)
    chosen = torch.ones(1, q.shape[1], k.shape[2], 16, dtype=torch.bool)
    blocks = (x.unflatten(1, (-1, 64)).mean(2) for x in (k, v))
    return oracle.nsa(
        q,
        k,
        v,
        *blocks,
        k,
        v,
        torch.stack((wrong * g_cmp, g_slc, g_swa), -1),
        attention.MEANS,
        chosen,
    )[0].to(q.dtype)


@pytest.mark.slow
def test_flas_attention_is_checked_where_its_choice_need_not_be_known(install):
    for wrong, word in ((1.0, ""), (0.8, "not timed: fails its check")):
        install("flash_attn")
        install(
            "fla.ops.nsa.parallel",
            parallel_nsa=lambda *x, wrong=wrong, **y: fla_like(*x, **y, wrong=wrong),
        )
        contest = attention.check(
            attention.Contest((16, 1), attention.MEANS, {"fla": attention.fla_nsa()}), TOY
        )
        assert contest.verdicts["fla"][1] == word


def test_missing_attention_is_named_with_its_remedy():
    assert attention.flash_attn() == "not installed (pip install flash-attn)"
    assert attention.fla_nsa() == "not installed (pip install flash-linear-attention flash-attn)"


def test_wrong_attention_of_ours_is_not_timed_and_fails_the_run(run):
    ways = {
        "SDPA, flash": attention.dense_by(attention.SDPBackend.FLASH_ATTENTION),
        "longhaul, wrong": attention.dense(
            lambda q, k, v, *_: 1.05 * attention.standard_attention(q, k, v)
        ),
    }
    attention.whole(
        run,
        TOY,
        "forward",
        300,
        1.0,
        attention.check(attention.Contest((4, 1), checks.CFG, ways), TOY),
    )
    rows = {row["attention"]: row["time, ms"] for row in run.data["tables"]["attention"]["rows"]}
    assert (
        rows["longhaul, wrong"] == "not timed: fails its check"
        and rows["SDPA, flash"] > 0
        and len(run.data["failures"]) == 1
    )


def test_transformers_with_other_weights_is_not_timed(run, monkeypatch):
    pytest.importorskip("transformers")
    right = step.copied

    def other(plan, place):
        model = right(plan, place)
        model.model.norm.weight.data.mul_(3)
        return model

    monkeypatch.setattr(step, "copied", other)
    step.one_context(run, TOY, "tiny", "standard", 64, True, 1.0)
    row = run.data["tables"]["step"]["rows"][1]
    assert row["system"] == "transformers" and "not timed: first losses" in row["step, ms"]


def test_transformers_that_do_not_fit_beside_run_alone_afterwards(run, monkeypatch):
    tried, right = [], step.plain_side

    def side(plan, place, checkpointing, first):
        tried.append(checkpointing)
        if len(tried) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(plan, place, checkpointing, first)

    monkeypatch.setattr(step, "plain_side", side)
    step.one_context(run, TOY, "tiny", "standard", 64, True, 1.0)
    ours, theirs = run.data["tables"]["step"]["rows"]
    assert (
        tried == [False, True, False, True]
        and "gradient checkpointing" in theirs["levers"]
        and theirs["step, ms"] > 0
    )
    assert ours.get("speed / transformers") is None and "not in turns" in run.data["notes"][0]


# ---- the list of a GPU


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")


def test_the_jobs_of_a_gpu_cover_every_size_and_the_first_ones_fit_nine_minutes(h100):
    jobs = sorted(
        (job for part in command.PARTS.values() for job in part.jobs(FULL)),
        key=lambda job: job.importance,
    )
    names = " ".join(job.name for job in jobs)
    for words in (
        "exact",
        "loss, 8192",
        "loss, 131,072",
        "attention, forward+backward, 262,144",
        "attention, decode, 262,144",
        "groups of 16",
        "step, 4B, standard, 131,072",
        "step, 0.6B, nsa, the longest",
        "memory, 4B",
        "workspaces",
        "allocator",
    ):
        assert words.replace("8192", "8,192") in names, words
    left, first = 540.0, []
    for job in jobs:
        if job.seconds <= left:
            left -= job.seconds
            first.append(job.name.split(",")[0])
    assert {"exact", "loss", "attention", "step", "memory", "workspaces", "allocator"} <= set(first)


def test_a_longer_context_may_take_longer_and_the_longest_is_the_last_that_fits(h100, monkeypatch):
    seconds = [
        step.planned_seconds(step.settings("4B", "standard", tokens, FULL), FULL)
        for tokens in (8192, 32_768, 131_072)
    ]
    assert seconds == sorted(seconds) and 15 < seconds[0] < 60 and seconds[2] > 100
    monkeypatch.setattr(step, "fitted", lambda cfg, place: cfg.context_length <= 300_000)
    assert step.longest("4B", "standard", FULL) == 262_144


def test_mfu_counts_the_causal_half_of_attention(h100, monkeypatch):
    cfg = step.settings("0.6B", "standard", 8192, FULL)
    config = cfg.model()
    by_hand = 6 * (
        config.num_params() - config.num_layers * (2 * 1024 + 2 * 128) - 1024
    ) * 8192 + 12 * 28 * 16 * 128 * (8192 * 8193 / 2)
    assert step.flops(cfg) == pytest.approx(by_hand, rel=1e-12)
    figures = step.speed(cfg, {"longhaul": [0.5], "transformers": [1.0]}, "longhaul")
    assert (
        figures["tokens/s"] == 16_384
        and figures["speed / transformers"] == 2
        and figures["MFU"] == pytest.approx(by_hand / 0.5 / 989e12)
    )


# ---- a GPU's memory


class Statistics:
    """The allocator's statistics of torch.cuda, imitated."""

    def __init__(self):
        self.now = self.peak = self.reserved = 0

    def set(self, now):
        self.now = now
        self.peak = max(self.peak, now)
        self.reserved = max(self.reserved, now)

    def install(self, monkeypatch):
        for name, function in dict(
            max_memory_allocated=lambda device=None: self.peak,
            max_memory_reserved=lambda device=None: self.reserved,
            reset_peak_memory_stats=lambda device=None: setattr(self, "peak", self.now),
            synchronize=lambda device=None: None,
            mem_get_info=lambda device=None: (60, 100),
        ).items():
            monkeypatch.setattr(torch.cuda, name, function)
        return self


def test_each_stage_of_a_gpu_has_the_peak_that_the_allocator_saw_in_it(monkeypatch):
    allocator = Statistics().install(monkeypatch)
    peaks = reconcile.CudaPeaks(CUDA)
    for stage, sizes in (
        ("start", [5]),
        ("layer forward", [9, 7]),
        ("loss forward", [30, 8]),
        ("layer forward", [11, 8]),
    ):
        peaks.enter(stage)
        for size in sizes:
            allocator.set(size)
    peaks.note()
    assert (
        peaks.peaks == {"start": 5, "layer forward": 11, "loss forward": 30}
        and peaks.reserved == 30
    )


def test_a_measured_step_on_a_gpu_names_the_stages_that_are_predicted(monkeypatch):
    Statistics().install(monkeypatch).set(3)
    cfg = memory.settings(TOY, "tiny", 64, {})
    found = reconcile.measure_cuda(cfg, device=CPU)
    assert {
        "embedding",
        "layer forward",
        "loss backward",
        "attention backward",
        "optimizer",
    } <= set(found["stages"])
    assert found["allocator_peak_bytes"] == 3 and found["device_bytes"] == 40


def test_the_history_of_an_allocator_replays_to_the_segments_that_it_took():
    def event(action, addr, size, stream=0):
        return dict(action=action, addr=addr, size=size, stream=stream)

    events = [
        event("segment_alloc", 0, SMALL_SEGMENT),
        event("alloc", 0, 1000),
        event("alloc", 1024, MIB // 2),
        event("segment_alloc", 1 << 30, LARGE_SEGMENT),
        event("alloc", 1 << 30, 5 * MIB),
        event("free_requested", 0, 1000),
        event("free_completed", 0, 1000),
        event("alloc", 0, 512),
        event("free_completed", 1 << 30, 5 * MIB),
        event("alloc", 1 << 30, 9 * MIB),
        event("segment_alloc", 1 << 40, SMALL_SEGMENT, 7),
        event("alloc", 1 << 40, 512, 7),
    ]  # a second stream shares no segment
    found = history.curves(events)
    assert found.real == [SMALL_SEGMENT] * 2 + [SMALL_SEGMENT + LARGE_SEGMENT] * 5 + [
        2 * SMALL_SEGMENT + LARGE_SEGMENT
    ]
    assert found.model == found.real and found.largest_difference == 0
    off = history.curves([event("segment_alloc", 0, 4 * MIB), event("alloc", 0, 1000)])
    assert off.largest_difference == 2 * MIB


def test_a_recorded_history_is_of_this_device_and_recording_ends_whatever_happens(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", context="all": calls.append((enabled, context)),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda device: dict(device_traces=[["events"]])
    )
    cfg = memory.settings(TOY, "tiny", 64, {})
    assert history.record(cfg, CPU, steps=1) == ["events"] and calls == [
        ("all", None),
        (None, "all"),
    ]
    monkeypatch.setattr(history.step, "train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        history.record(cfg, CPU, steps=1)
    assert calls[-1] == (None, "all")


# ---- what the driver says, the tests that need a GPU


def test_driver_and_clocks_come_from_nvidia_smi_by_the_devices_identity(monkeypatch):
    asked = []

    def smi(command, **_):
        asked.append(command)
        return types.SimpleNamespace(
            returncode=0, stdout="570.1, 1755 MHz, 1980 MHz, 2619 MHz, 700.00 W, 41\n", stderr=""
        )

    monkeypatch.setattr(record.shutil, "which", lambda name: name)
    monkeypatch.setattr(record.subprocess, "run", smi)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="ab-1")
    )
    found = record.nvidia_smi(CUDA)
    assert (
        found["driver"] == "570.1"
        and found["SM clock now"] == "1755 MHz"
        and found["temperature"] == "41"
    )
    assert "--id=GPU-ab-1" in asked[0]
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    assert "not on the path" in record.nvidia_smi(CUDA)["driver"]


def test_the_tests_marked_gpu_are_run_and_a_failure_of_theirs_fails_the_run(run, monkeypatch):
    commands = []

    def pytest_run(command, **_):
        commands.append(command)
        return types.SimpleNamespace(
            returncode=1, stdout="F.\n== 1 failed, 5 passed in 9.00s ==\n", stderr=""
        )

    monkeypatch.setattr(exact.subprocess, "run", pytest_run)
    exact.marked_tests(run, FULL)
    assert run.data["failures"] == ["python -m pytest -m gpu: 1 failed, 5 passed in 9.00s"]
    assert {path.rsplit("/", 1)[1] for path in commands[0][6:]} >= {
        "test_fused_nsa.py",
        "test_fused_linear_ce.py",
    }


# ---- the documents' figures


@pytest.mark.parametrize("name", report.ReportConfig().files)
def test_a_document_says_what_the_committed_results_say(name):
    path = report.ROOT / name
    assert "<!-- results:" in path.read_text()
    assert report.up_to_date(path), "run python -m benchmarks.report"


def test_a_section_is_made_from_its_results_and_an_unknown_one_is_refused():
    data = dict(
        toy=False,
        label="NVIDIA X",
        command="python -m benchmarks.gpu --out y",
        where=dict(device="NVIDIA X", torch="2", date="d", commit="c"),
        failures=["f"],
        skipped=["s"],
        tables=dict(
            loss=dict(
                title="Loss",
                columns={"loss": "text", "ms": "ms", "empty": "ms"},
                rows=[{"loss": "ours", "ms": 1234.5}, {"loss": "other", "ms": "out of memory"}],
            )
        ),
    )
    text = (
        "a\n<!-- results:run/loss -->\nold\n<!-- /results -->\n"
        "b\n<!-- results:gpu -->\n<!-- /results -->\n"
    )
    now = report.written(text, dict(run=data))
    assert (
        "| ours | 1,234.500 |" in now
        and "| other | out of memory |" in now
        and "old" not in now
        and "empty" not in now
    )
    assert (
        "Failed: f." in now and "Skipped: s." in now and report.written(now, dict(run=data)) == now
    )
    assert "Not measured on a GPU yet" in report.written(text, dict(run=data | dict(toy=True)))
    with pytest.raises(ValueError, match="choose from gpu, run/loss"):
        report.written(text.replace("run/loss", "run/los"), dict(run=data))

"""train.py as a user runs it: metrics, resumes, plans and refusals, every bad input in one line."""

import json
import math
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import profile_memory
import train
from data import prepare as data_prepare
from footprint.cards.device import card
from lab.posttrain.config import GradeConfig, IntuitorConfig
from longhaul import cli, dist
from longhaul.config import TrainConfig
from longhaul.flops import train_flops
from longhaul.planner import plan as planner
from longhaul.run import guard, training
from longhaul.run.log import mfu
from tests import kit
from tests.tiers import slow

ROOT = Path(__file__).parent.parent
SMALL = shlex.split(
    "--model_size tiny --model_overrides hidden_size=64 num_layers=2 num_heads=4 num_kv_heads=2 "
    "head_dim=16 ffn_size=96 --vocab_size 1024 --context_length 64 --warmup_steps 2 --eval_every 4 "
    "--eval_rows 1 --dtype fp32 --device cpu"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dataset of this repository's own sources."""
    folder = tmp_path_factory.mktemp("data") / "set"
    texts = f"--input {ROOT}/longhaul {ROOT}/data {ROOT}/model.py --vocab_size 1024 --workers 1"
    words = [*texts.split(), "--output", str(folder), "--val_fraction", "0.1"]
    assert data_prepare.main(words) == 0
    return str(folder)


def command(data: str, out, *more: str) -> list[str]:
    """The arguments of a small run; `more`: flags and values, also several in one text."""
    words = [*SMALL, "--data", data, "--output_dir", str(out), *" ".join(more).split()]
    return kit.last_given(words)


@pytest.fixture
def quick_machine(monkeypatch):
    """A step takes a second, whatever else this machine does; the model of 0.6B does not fit."""
    monkeypatch.setattr(planner, "step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(planner, "available_gib", lambda device, world: 8.0)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train.main(command(data, out, "--max_steps 8 --save_every 3"))
    return out


def test_a_forgotten_model_size_is_named_before_a_proposal_for_the_model_that_does_not_fit(
    finished, data
):
    forgotten = ["--data", data, "--output_dir", str(finished), "--model_size", "8B"]
    said = kit.run([*forgotten, "--context_length", "131072", "--device", "cpu"], code=2)
    assert "holds another run" in said
    assert "num_layers: recorded 2" in said


def test_every_step_is_one_object_of_metrics_jsonl(finished):
    records = kit.steps(finished / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    wanted = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mem_gib", "time"}
    assert all(wanted <= record.keys() for record in records)
    assert records[-1]["tokens"] == 8 * 64 and all(5 < record["loss"] < 8 for record in records)


def test_every_validation_is_one_object_of_metrics_jsonl(finished):
    records = [record for record in kit.records(finished) if "loss" not in record]
    assert [record["step"] for record in records] == [4, 8]
    for record in records:
        assert 5 < record["validation_loss"] < 8
        assert record["validation_perplexity"] == pytest.approx(math.exp(record["validation_loss"]))
        assert record["validation_tokens"] <= 64


def test_the_run_folder_holds_settings_tokenizer_tensorboard_and_the_newest_checkpoints(finished):
    assert {path.name for path in finished.iterdir()} == {
        "run.json",
        "exit.json",
        "tokenizer.model",
        "metrics.jsonl",
        "eval.jsonl",
        "tensorboard",
        "step-00000006",
        "step-00000008",
    }
    record = json.loads((finished / "run.json").read_text())
    assert record["config"]["max_steps"] == 8
    # sizes of an attention that does not run are not part of a run
    assert not [name for name in record["identity"] if name.startswith("nsa")]


def test_tensorboard_has_losses_validation_text_and_settings(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    assert {
        "train/loss",
        "train/perplexity",
        "train/lr",
        "train/grad_norm",
        "train/tokens_per_s",
        "train/mem_gib",
        "validation/loss",
    } <= set(events.Tags()["scalars"])
    assert len(events.Scalars("train/loss")) == 8
    assert {"sample/text_summary", "config/text_summary"} <= set(events.Tags()["tensors"])


def test_a_completed_run_started_again_has_nothing_to_do(finished, data, capsys):
    ended = dict(code=0, cause="completed", remedy="", last_step=8)
    assert kit.exit_record(finished) == ended
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    train.main(command(data, finished, "--max_steps 8 --save_every 3"))
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


def test_half_an_hour_without_a_checkpoint_ends_with_one_and_changes_no_bit(
    data, tmp_path, monkeypatch
):
    assert guard.SAVE_SECONDS == 1800
    for out, seconds in (("often", 1e-4), ("last", 1e9)):
        monkeypatch.setattr(guard, "SAVE_SECONDS", seconds)
        flags = "--max_steps 3 --save_every 100 --keep_last 9"
        train.main(command(data, tmp_path / out, flags))
    saved = {out: len(list((tmp_path / out).glob("step-*"))) for out in ("often", "last")}
    assert saved == {"often": 3, "last": 1}
    assert kit.losses(tmp_path / "often") == kit.losses(tmp_path / "last")
    assert kit.same_bits(tmp_path / "often", tmp_path / "last")


def test_more_steps_of_a_decaying_schedule_say_how_the_learning_rate_jumps(data, tmp_path, capsys):
    for steps in (4, 8):
        train.main(command(data, tmp_path, f"--max_steps {steps} --lr 1e-3"))
    # cosine: at its end, a tenth of the peak; then 2 of the 5 steps after the warmup are over
    printed = capsys.readouterr().out
    assert "max_steps 4 -> 8 (learning rate 0.0001 -> 0.000689)" in printed


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(finished, data, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "run"))
    again = command(data, out, "--max_steps 8 --save_every 3")
    damage(out / "step-00000008")
    assert "DAMAGED CHECKPOINT" in kit.run(again)
    assert (out / "step-00000008.corrupt").exists()
    assert kit.same_bits(out, finished)

    for path in out.glob("step-????????"):
        damage(path)
    kit.run(again, code=4)
    assert len(kit.losses(out)) == 8


def damage(checkpoint: Path):
    """Change a bit of its shard."""
    shard = next(checkpoint.glob("rank-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


# ---- bad input


def test_triton_without_a_gpu_is_refused_before_anything_is_written(data, tmp_path, monkeypatch):
    pytest.importorskip(
        "triton", reason="triton is not installed: its refusal on a CPU is not tested"
    )
    monkeypatch.setattr("longhaul.vocab.triton_bodies.INTERPRETED", False)
    said = kit.run(command(data, tmp_path / "run", "--kernels triton"), code=2)
    assert not (tmp_path / "run").exists()
    assert "kernels='triton'" in said


@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_mfu_counts_the_keys_that_a_query_meets_in_its_document(attention, monkeypatch):
    """Two documents of 600 and 400 tokens; the sums over queries are written out."""
    from data.loader import Batch

    cfg = TrainConfig(
        model_size="tiny", attention_type=attention, context_length=1000, dtype="fp32"
    )
    config = cfg.model()
    cpu = torch.device("cpu")
    positions = torch.cat((torch.arange(600), torch.arange(400)))[None].numpy()
    rows = Batch(tokens=positions, labels=positions, positions=positions, doc_ids=positions)
    pairs = 600 * 601 / 2 + 400 * 401 / 2
    if (
        attention == "nsa"
    ):  # compressed blocks of 32 every 16; 16 blocks of 64 hold all; a window of 512
        pairs += sum((t + 1 - 32) // 16 + 1 for n in (600, 400) for t in range(31, n)) + sum(
            min(t + 1, 512) for n in (600, 400) for t in range(n)
        )
    monkeypatch.setattr("longhaul.run.log.peak_flops", lambda device: None)
    assert mfu(config, rows, 1, 2.0, cpu) is None
    monkeypatch.setattr("longhaul.run.log.peak_flops", lambda device: 1e12)
    flops = train_flops(config, 1000, pairs)
    assert mfu(config, rows, 1, 2.0, cpu) == pytest.approx(flops / 2.0 / 1e12, rel=1e-12)
    # two ranks did the work of these rows
    assert mfu(config, rows, 2, 2.0, cpu) == pytest.approx(flops / 2.0 / 2e12, rel=1e-12)


def test_settings_without_effect_are_named(data, tmp_path, capsys):
    without_effect = "--schedule wsd:0.5 --context_parallel_mode ulysses"
    train.main(command(data, tmp_path / "run", f"--max_steps 1 {without_effect}"))
    out = capsys.readouterr().out
    assert "warning: --schedule wsd:0.5:0.1 has no effect" in out
    assert "warning: --context_parallel_mode ulysses has no effect" in out
    assert "warning: the run ends inside the warmup, at 50% of the peak learning rate" in out
    assert "max_steps=1, schedule='wsd:0.5:0.1', warmup_steps=2\n" in out


def test_weights_that_break_are_evaluated_without_a_sample_and_then_halt_the_run(data, tmp_path):
    broken = "--lr 1000 --warmup_steps 1 --max_steps 30 --eval_every 1 --max_skipped_steps 1"
    assert "no sample at step" in kit.run(command(data, tmp_path / "run", broken), code=5)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [one["grad_norm"] for one in records if "loss" in one][-1] is None
    validated = [one["validation_loss"] for one in records if "validation_loss" in one]
    assert validated[0] is not None
    assert validated[-1] is None


def test_a_vocabulary_far_above_the_datas_trains_samples_and_is_named(data, tmp_path, capsys):
    index = SMALL.index("--vocab_size")  # without it, that of `tiny`
    large = SMALL[:index] + SMALL[index + 2 :]
    flags = ["--data", data, "--output_dir", str(tmp_path), "--max_steps", "1", "--eval_every", "1"]
    train.main(kit.last_given([*large, *flags]))
    assert len(kit.losses(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "88% of the vocabulary" in said
    assert "add --vocab_size 1024" in said


# ---- the plan


REQUEST = ["--context_length", "8192", "--device", "cpu"]


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("--data somewhere --vocab_size 50000", "--vocab_size 50000"),
        slow("--attention_type nsa --compile --fit auto", "--attention_type nsa"),
        slow("--length_schedule 4096:2,8192:2", "--batch_size 2 --max_steps 4 --output_dir"),
    ],
)
def test_a_request_that_no_cpu_holds_ends_with_the_command_that_finds_a_gpu(
    flags, kept, tmp_path, capsys, quick_machine
):
    """A search of profile_memory.py with the same settings, which knows each of its flags."""
    request = ["--device", "cpu"] if "schedule" in flags else REQUEST
    with pytest.raises(SystemExit) as stop:
        train.main([*request, *flags.split(), "--output_dir", str(tmp_path / "run")])
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    words = shlex.split(last)
    assert words[:2] == ["python", "profile_memory.py"]
    assert words[-4:] == ["--solve", "levers", "--gpu", "H100"]
    assert kept in last
    assert "--model_size" not in last  # the 4B is the default
    profile_memory.check_question(cli.parse(profile_memory.ProfileConfig, words[2:]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "task, config", [("intuitor", IntuitorConfig), ("grade", GradeConfig)], ids=str
)
def test_the_search_for_a_gpu_of_a_policy_names_its_task(task, config):
    cfg = config(context_length=4096, init_from="runs/mine")
    words = shlex.split(planner.on_ranks(cfg, 2).search_command())[2:]
    assert words[:2] == ["--task", task]
    parsed = cli.parse(profile_memory.CONFIGS[task], words)
    assert parsed.nproc == 2
    assert parsed.training() == cfg


@pytest.mark.parametrize(
    "flags, code, place",
    [
        ("--plan", 0, "on cpu"),
        slow("--plan --device cpu --batch_size 400000", 2, "on cpu"),
        ("--plan --device cpu --model_size 4B", 3, "on cpu"),
        slow("--plan --model_size 4B --context_length 131072", 0, "on H100"),
        ("--plan H100 --model_size 4B --context_length 131072", 3, "on H100"),
        slow("--plan H100 --model_size 4B --context_length 131072 --fit auto", 0, "on H100"),
        slow("--plan h200 --model_size 4B", 0, "on H200"),
        slow("--plan --device cuda", 0, "on H100"),
        ("--plan GTX", 2, ""),
    ],
)
def test_one_rule_gives_the_exit_code_of_a_plan(flags, code, place, tmp_path, quick_machine):
    """Of this machine, or of a GPU that is not here, which may only be too small if it is named."""
    small = f"--model_size tiny --context_length 64 --max_steps 4 --output_dir {tmp_path / 'run'}"
    assert place in kit.run([*small.split(), "--warmup_steps", "1", *flags.split()], code)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--context_length 131072 --gradient_checkpointing", "--context_length 131072"]
)
def test_a_plan_and_the_profiler_agree_on_whether_a_named_card_holds_a_run(flags, capsys):
    """The first fits with segments that grow, which every command asks for."""
    with pytest.raises(SystemExit) as stop:
        train.main([*flags.split(), "--context_parallel_size", "1", "--plan", "A100 80GB"])
    assert profile_memory.main([*flags.split(), "--gpu", "A100 80GB"]) == stop.value.code


def test_a_card_that_is_not_here_has_a_host_that_is_not_known(monkeypatch):
    monkeypatch.setattr(planner, "host_available_bytes", lambda: 0)
    levers = dict(gradient_checkpointing="full", offload_activations=True)
    cfg = TrainConfig(model_size="tiny", context_length=1024, **levers)
    assert planner.on_cards(cfg, dist.World(), card("L4")).fits
    here = planner.plan(cfg, cfg.model(), dist.World(), torch.device("cuda"), 22.0)
    assert here.needs.host and not here.fits


def test_the_printed_command_gives_the_same_settings_back():
    cfg = TrainConfig(
        model_size="tiny",
        gradient_checkpointing="full",
        compile=True,
        model_overrides=("num_layers=2", "head_dim=16"),
        lr=0.5,
        output_dir="my runs",
    )
    words = shlex.split(planner.command(cfg, dist.World()))
    assert words[:2] == ["python", "train.py"] and cli.parse(TrainConfig, words[2:]) == cfg


def test_deterministic_holds_for_the_steps_on_a_gpu_and_nothing_else():
    def inside(device: str, wanted: bool) -> tuple[bool, bool]:
        run = SimpleNamespace(cfg=TrainConfig(deterministic=wanted), device=torch.device(device))
        with training.Run._kernels(run):
            fills = torch.utils.deterministic.fill_uninitialized_memory
            return torch.are_deterministic_algorithms_enabled(), fills

    before = torch.utils.deterministic.fill_uninitialized_memory
    assert inside("cuda", wanted=True) == (True, False)
    assert inside("cuda", wanted=False) == (False, before)
    assert inside("cpu", wanted=True) == (False, before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before

"""TrainConfig and its command line: ranges, spellings, --help."""

import dataclasses
import math
import shlex

import pytest
import torch

from base.flags import Parser, RaisingParser
from longhaul import cli, config_checks, dist
from longhaul.config import DTYPE_SPELLINGS, TrainConfig
from longhaul.lengths import rate_schedule
from longhaul.optim import learning_rate
from longhaul.other_names import OUR_NAMES, WITHOUT_FLAG
from longhaul.planner import plan as planner
from profile_memory import ProfileConfig

FIELDS = {spec.name: spec for spec in dataclasses.fields(TrainConfig)}
BOUNDED = [name for name, spec in FIELDS.items() if spec.metadata["at_least"] is not None]
LIMITED = [name for name, spec in FIELDS.items() if spec.metadata["at_most"] is not None]


def parsed(*words: str) -> TrainConfig:
    return cli.parse(TrainConfig, list(words))


# ---- numbers


@pytest.mark.parametrize("name", BOUNDED)
def test_a_number_below_its_range_or_without_end_is_refused(name):
    least = FIELDS[name].metadata["at_least"]
    for value in (least - 1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"--{name} {value}"):
            TrainConfig(**{name: value})


def test_the_least_allowed_number_is_accepted():
    defaults = TrainConfig()
    for name in BOUNDED:
        changed = dataclasses.replace(defaults, **{name: FIELDS[name].metadata["at_least"]})
        assert getattr(changed, name) == FIELDS[name].metadata["at_least"]


@pytest.mark.parametrize("name", LIMITED)
def test_a_number_above_its_range_is_refused_with_the_most_that_is_allowed(name):
    most = FIELDS[name].metadata["at_most"]
    with pytest.raises(ValueError, match=f"--{name} {most + 1}"):
        TrainConfig(**{name: most + 1})
    assert getattr(TrainConfig(**{name: most}), name) == most


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_the_decay_of_a_moment_is_from_0_to_below_1(name):
    assert getattr(TrainConfig(adam=(f"{name}=0.0",)).adam_numbers(), name) == 0
    for value in (-0.1, 1.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"--adam {name}={value}"):
            TrainConfig(adam=(f"{name}={value}",))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cosine", ("cosine", 0.2, 0.1)),
        ("cosine:0", ("cosine", 0.2, 0.0)),
        ("wsd:1", ("wsd", 1.0, 0.1)),
        ("wsd:0.2:.1", ("wsd", 0.2, 0.1)),
        ("constant", ("constant", 0.2, 0.1)),
    ],
)
def test_a_schedule_has_its_numbers_behind_its_name(text, expected):
    assert rate_schedule(text) == rate_schedule(TrainConfig(schedule=text).schedule) == expected


def test_two_spellings_of_the_numbers_of_adamw_are_one_setting():
    cfg = TrainConfig(adam=("eps=1e-6", "beta1=0.90", "beta2=.98"))
    assert cfg.adam == TrainConfig(adam=("beta2=0.98", "eps=0.000001")).adam
    assert TrainConfig(adam=("beta1=0.9",)) == TrainConfig()


def test_two_spellings_of_a_schedule_are_one_setting():
    assert TrainConfig(schedule="wsd:0.20:0.1").schedule == "wsd"
    assert TrainConfig(schedule="wsd:0.3").schedule == TrainConfig(schedule="wsd:.3:.1").schedule


def test_mlp_tiles_that_are_left_open_hold_at_most_4096_tokens():
    settings = dict(model_size="tiny", mlp_tiles=0)
    assert TrainConfig(**settings, context_length=4096).tiles == 1
    assert TrainConfig(**settings, context_length=4097).tiles == 2
    assert TrainConfig(**settings, context_length=4096, batch_size=3).tiles == 3
    assert TrainConfig(**settings, context_length=16384, context_parallel_size=2).tiles == 2


# ---- spellings of --dtype


@pytest.mark.parametrize("spelling, short", DTYPE_SPELLINGS.items())
def test_every_spelling_of_a_dtype_is_the_same_run(spelling, short):
    cfg = parsed("--model_size", "tiny", "--dtype", spelling)
    plain = TrainConfig(model_size="tiny", dtype=short)

    assert cfg == plain
    assert cfg.dtype == short
    assert cfg.model() == plain.model()
    assert cfg.table() == plain.table()
    world = dist.World()
    assert planner.command(cfg, world) == planner.command(plain, world)


def test_the_spellings_are_those_of_torch_too():
    assert TrainConfig(dtype=torch.float32) == TrainConfig(dtype="fp32")
    assert TrainConfig(dtype=torch.bfloat16) == TrainConfig(dtype="bf16")
    assert parsed("--dtype=torch.float32").model().dtype is torch.float32
    assert parsed("--dtype=bfloat16").model().dtype is torch.bfloat16


def test_the_profiler_takes_the_same_spellings():
    for spelling, short in DTYPE_SPELLINGS.items():
        profiled = cli.parse(ProfileConfig, ["--model_size", "tiny", "--dtype", spelling])
        assert profiled.training() == TrainConfig(model_size="tiny", dtype=short)


# ---- the command line


def help_text(capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.parse(TrainConfig, ["--help"], "Train a decoder.")
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_has_every_flag_with_its_spellings_and_every_group(capsys):
    text = help_text(capsys)
    one_line = " ".join(text.split())
    unbroken = "".join(text.split())  # a line may end at a hyphen
    for spec in FIELDS.values():
        assert f"--{spec.name}" in text
        assert "".join(spec.metadata["help"].split()) in unbroken
        assert spec.metadata["group"] in TrainConfig.GROUPS
    for title, sentence in TrainConfig.GROUPS.items():
        assert f"\n{title}:\n" in text
        assert sentence in one_line


def test_help_fits_a_terminal_and_opens_with_what_the_program_is_for(capsys):
    lines = help_text(capsys).splitlines()
    assert lines[2] == "Train a decoder."
    flags = [line for line in lines if not line.startswith("  --")]  # spellings are not broken
    assert max(map(len, flags)) <= 100


def test_the_examples_of_help_are_commands_that_work(capsys):
    text = help_text(capsys)
    commands = text.split("examples:\n")[1].splitlines()
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        cfg = parsed(*words[words.index("train.py") + 1 :])
        assert config_checks.ineffective_settings(cfg) == []


def test_switches_values_and_lists_are_read():
    cfg = parsed(
        *("--compile", "--no_async_save", "--gradient-checkpointing", "--mlp_tiles"),
        *("--blocks", "window=64", "sel_count=4", "--attention-type=nsa", "--lr=2e-3"),
    )
    assert cfg.compile is True
    assert cfg.async_save is False
    assert cfg.gradient_checkpointing == "full"
    assert cfg.mlp_tiles == 0
    assert cfg.blocks == ("window=64", "sel_count=4")
    assert cfg.model().attention.window == 64
    assert cfg.lr == 2e-3


# ---- given twice


@pytest.mark.parametrize("text", ["-- a well-known a-b", "--- a/file-name.py", "--x-y is=a"])
def test_a_text_that_begins_with_dashes_is_not_changed(text):
    parser = Parser()
    parser.add_argument("--prompt")
    assert parser.parse_args(["--prompt", text]).prompt == text


def test_a_flag_wins_over_a_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("lr = 1e-3\n")
    assert parsed("--config", str(path), "--lr", "0.5").lr == 0.5


@pytest.mark.parametrize("text, mode, tiles", [("true", "full", 0), ("false", "none", 1)])
def test_true_in_a_file_is_the_flag_without_a_value(tmp_path, text, mode, tiles):
    path = tmp_path / "c.toml"
    path.write_text(f"gradient_checkpointing = {text}\nmlp_tiles = {text}\n")
    cfg = parsed("--config", str(path))
    assert cfg.gradient_checkpointing == mode
    assert cfg.mlp_tiles == tiles


def test_keys_of_a_file_may_stand_below_headings(tmp_path):
    (tmp_path / "c.toml").write_text('model_size = "tiny"\n[memory]\ngradient_checkpointing = true')
    cfg = parsed("--config", str(tmp_path / "c.toml"))
    changed = {name: getattr(cfg, name) for name in cfg.changed_settings()}
    assert changed.pop("config")
    assert changed == dict(model_size="tiny", gradient_checkpointing="full")


# ---- what a run is told


def test_a_run_that_ends_inside_its_warmup_is_told_the_rate_that_it_reaches():
    cfg = TrainConfig(model_size="tiny", max_steps=3, warmup_steps=50, lr=1e-3)
    (words,) = [words for words in config_checks.warnings(cfg) if "warmup" in words]
    assert "ends inside the warmup, at 6% of the peak learning rate" in words
    assert learning_rate(2, cfg) == pytest.approx(0.06e-3)
    assert "has no effect" not in words
    assert (
        config_checks.warnings(TrainConfig(model_size="tiny", max_steps=51, warmup_steps=50)) == []
    )


def test_sparse_attention_over_rows_that_fit_in_its_window_is_warned_about():
    settings = dict(model_size="tiny", attention_type="nsa")
    window = TrainConfig(**settings).model().attention.window
    (words,) = config_checks.warnings(TrainConfig(**settings, context_length=window))
    assert "only adds work: use --attention_type standard" in words
    assert config_checks.warnings(TrainConfig(**settings, context_length=window + 1)) == []
    assert config_checks.warnings(TrainConfig(model_size="tiny", context_length=window)) == []


# ---- unknown flags


def few(*words: str) -> str:
    parser = RaisingParser()
    parser.add_argument("--seq_len", type=int)
    parser.add_argument("--dtype")
    with pytest.raises(ValueError) as caught:
        parser.parse_args(list(words))
    return str(caught.value)


def test_an_unknown_flag_is_answered_with_one_that_is_like_it_or_with_all():
    assert few("--seqlen", "3").startswith("unknown flag --seqlen: did you mean --seq_len?")
    assert few("--foo") == "unknown flag --foo: choose from --help, --seq_len, --dtype"
    with pytest.raises(ValueError, match="unknown flag --zzz: --help lists all flags"):
        parsed("--zzz")


@pytest.mark.parametrize("name", OUR_NAMES)
def test_a_flag_that_another_trainer_has_is_answered_with_ours(name):
    assert OUR_NAMES[name] in FIELDS and name not in FIELDS
    for flag in {name, name.replace("_", "-")}:
        words = rf"^unknown flag --\S+: did you mean --{OUR_NAMES[name]}\?"
        with pytest.raises(ValueError, match=words):
            parsed(f"--{flag}", "1")


@pytest.mark.parametrize("name", WITHOUT_FLAG)
def test_a_flag_that_is_not_needed_here_is_answered_with_the_reason(name):
    assert name not in FIELDS
    for flag in {name, name.replace("_", "-"), f"metrics.{name}"}:
        with pytest.raises(
            ValueError, match=rf"^unknown flag --\S+: .*{WITHOUT_FLAG[name]}: drop it"
        ):
            parsed(f"--{flag}", "1")


def test_a_name_with_a_dot_and_a_key_of_a_file_are_answered_too(tmp_path):
    for given, ours in (
        ("train.global_batch_size", "global_batch_size"),
        ("training.seq_len", "context_length"),
        ("optimizer.lr", "lr"),
    ):
        with pytest.raises(ValueError, match=f"did you mean --{ours}"):
            parsed(f"--{given}=1")
    (tmp_path / "c.toml").write_text("seq_len = 3")
    with pytest.raises(ValueError, match="unknown flag --seq_len: did you mean --context_length"):
        parsed("--config", str(tmp_path / "c.toml"))

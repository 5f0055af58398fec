"""--init_from: what a run takes from a Hugging Face folder, a step-* folder or another run."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from data import prepare
from longhaul import cli, dist, qwen3
from longhaul.checkpoint import start
from longhaul.checkpoint.load import described, newest
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.kinds import recorded
from longhaul.parallel import apply
from longhaul.planner import fit, plan
from model import Decoder, ModelConfig
from scripts import convert_qwen3, evaluate
from tests import kit
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
SHAPE = "hidden_size=32 num_layers=2 num_heads=4 num_kv_heads=2 head_dim=8 ffn_size=48"
COMMON = "--warmup_steps 0 --schedule constant --dtype fp32 --device cpu --eval_rows 2"
HF = ModelConfig(
    vocab_size=700,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=80,
    tie_embeddings=False,
    norm_eps=1e-5,
    rope_theta=5e5,
    rope_original_context=512,
    init_std=0.05,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return prepared(tmp_path_factory.mktemp("data") / "set", "longhaul/parallel", 600)


def prepared(folder: Path, sources: str, vocabulary: int) -> str:
    """A dataset of this repository's own sources."""
    words = f"--input {ROOT / sources} --output {folder} --vocab_size {vocabulary} --workers 1"
    assert prepare.main([*words.split(), "--val_fraction", "0.2"]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    """A run of 3 steps with a checkpoint of step 2."""
    out = tmp_path_factory.mktemp("finished") / "run"
    model = f"--model_size tiny --model_overrides {SHAPE} --vocab_size 600"
    trained(f"{model} --context_length 64 --max_steps 3 --save_every 2", data, out)
    return out


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    qwen3.to_hf(Decoder(HF), folder)
    return folder


def trained(flags: str, data: str, out: Path):
    train.main(shlex.split(f"{COMMON} {flags} --data {data} --output_dir {out}"))


def settings(flags: str) -> TrainConfig:
    return cli.parse(TrainConfig, shlex.split(flags), complete=start.completed)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a run's newest checkpoint."""
    return stored_weights(newest(folder))


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint."""
    stored = load_file(next(folder.glob("rank-*")))
    prefix = "model."
    return {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}


def assert_same_weights(one: dict, other: dict):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- what the folder decides


def test_a_hugging_face_folder_decides_the_whole_model(hf):
    model = settings(f"--init_from {hf} --dtype fp32").model()
    assert model == HF


def test_a_step_folder_and_its_run_decide_the_model_and_the_context(finished):
    for folder in (finished, finished / "step-00000002"):
        cfg = settings(f"--init_from {folder} --dtype fp32")
        written = described(finished / "step-00000003").model_config
        expected = written | dict(rope_original_context=64)
        assert recorded(cfg.model()) == expected
        assert cfg.context_length == 64


def test_a_model_that_is_a_preset_is_called_by_its_name(tmp_path):
    qwen3.to_hf(Decoder(ModelConfig.preset("tiny")), tmp_path)
    cfg = settings(f"--init_from {tmp_path}")
    assert cfg == TrainConfig(model_size="tiny", init_from=str(tmp_path), rope_theta=1e6)


def test_the_printed_command_gives_the_same_run_again(hf, finished):
    """Also if a flag that the folder contradicts has the value of its default."""
    for flags in ("", "--context_length 4096", "--rope_theta 1e6", "--rope_scaling yarn:2"):
        for folder in (hf, finished):
            cfg = settings(f"--init_from {folder} {flags}")
            assert settings(plan.command(cfg, World()).removeprefix("python train.py")) == cfg


def test_fields_that_are_no_geometry_are_kept_next_to_the_folders_shape(hf):
    cfg = settings(f"--init_from {hf} --model_overrides loss_chunk_size=64")
    assert cfg.model().loss_chunk_size == 64
    assert (
        dataclasses.replace(cfg.model(), loss_chunk_size=0) == settings(f"--init_from {hf}").model()
    )


def test_flags_that_agree_with_the_folder_are_accepted(hf, finished):
    assert settings(f"--init_from {hf} --vocab_size 700").vocab_size == 700
    cfg = settings(f"--init_from {finished} --model_size tiny --model_overrides {SHAPE}")
    assert cfg == dataclasses.replace(settings(f"--init_from {finished}"), model_size="tiny")


# ---- positions


def rope(flags: str) -> tuple:
    model = settings(flags).model()
    return model.rope_theta, model.rope_scaling, model.rope_factor, model.rope_original_context


def test_flags_change_how_positions_are_rotated(hf, finished):
    assert rope(f"--init_from {hf}") == (5e5, "none", 1.0, 512)
    assert rope(f"--init_from {hf} --rope_theta 9e6") == (9e6, "none", 1.0, 512)
    yarn = "--rope_scaling yarn:4"
    assert rope(f"--init_from {hf} {yarn}") == (5e5, "yarn", 4.0, 512)
    assert rope(f"--init_from {finished} {yarn}") == (1e6, "yarn", 4.0, 64)
    assert rope(f"--init_from {hf} {yarn}:99") == (5e5, "yarn", 4.0, 99)


def test_scaled_positions_of_the_folder_are_kept_changed_or_dropped(tmp_path):
    scaled = dict(rope_scaling="yarn", rope_factor=2.0)
    qwen3.to_hf(Decoder(dataclasses.replace(HF, **scaled)), tmp_path)
    assert rope(f"--init_from {tmp_path}") == (5e5, "yarn", 2.0, 512)
    assert rope(f"--init_from {tmp_path} --rope_scaling yarn:8") == (5e5, "yarn", 8.0, 512)
    assert rope(f"--init_from {tmp_path} --rope_scaling none") == (5e5, "none", 1.0, 512)
    without = settings(f"--init_from {tmp_path} --rope_scaling none")
    assert "--rope_scaling none:1:512" in plan.command(without, World())


def test_yarn_of_a_qwen3_takes_the_context_that_it_was_trained_at(tmp_path):
    """Its config.json says 40,960, which has room for an answer."""
    qwen3.to_hf(Decoder(dataclasses.replace(HF, rope_original_context=40_960)), tmp_path)
    yarn = "--rope_scaling yarn:4"
    assert settings(f"--init_from {tmp_path} {yarn}").model().rope_original_context == 32_768
    assert settings(f"--init_from {tmp_path}").model().rope_original_context == 40_960


# ---- the run


def test_a_continuation_starts_at_step_0_with_the_loss_of_the_checkpoint(
    finished, data, tmp_path, capsys
):
    """With a learning rate of 0, the step changes no weight."""
    trained(f"--init_from {finished} --max_steps 1 --lr 0 --eval_every 1", data, tmp_path / "new")
    printed = capsys.readouterr().out
    assert f"weights: {finished / 'step-00000003'}" in printed
    assert "warning: positions" not in printed
    assert_same_weights(weights(tmp_path / "new"), weights(finished))

    evaluate.main(shlex.split(f"--checkpoint {finished} --batches 2 --device cpu"))
    loss = capsys.readouterr().out.split("loss ")[1].split()[0]
    assert f"step 1: validation loss {loss} nats" in printed
    assert described(tmp_path / "new" / "step-00000001").identity["init_from"] == str(finished)


def test_a_longer_context_is_one_flag_and_says_what_the_positions_mean(
    finished, data, tmp_path, capsys
):
    longer = f"--init_from {finished} --context_length 256 --max_steps 1 --eval_every 0"
    trained(longer, data, tmp_path / "plain")
    assert "positions reach 64 tokens, and --context_length is 256" in capsys.readouterr().out

    trained(f"{longer} --rope_scaling yarn:4", data, tmp_path / "yarn")
    printed = capsys.readouterr().out
    assert "rope_scaling: none there, yarn in this run" in printed
    assert "warning: positions" not in printed
    assert start.trained_context(described(tmp_path / "yarn" / "step-00000001")) == 256


def test_sparse_attention_starts_from_standard_weights_and_not_the_reverse(
    finished, data, tmp_path
):
    sparse = (
        "--attention_type nsa --blocks cmp_block=8 cmp_stride=4 sel_block=8 sel_count=4 window=16"
    )
    once = "--max_steps 1 --lr 0 --eval_every 0"
    trained(f"--init_from {finished} {sparse} {once}", data, tmp_path / "sparse")
    found = weights(tmp_path / "sparse")
    shared = {name: found[name] for name in weights(finished)}
    assert_same_weights(shared, weights(finished))
    assert len(found) > len(shared)

    trained(f"--init_from {tmp_path / 'sparse'} {once} --seed 1", data, tmp_path / "again")
    assert_same_weights(weights(tmp_path / "again"), found)

    again = settings(f"--init_from {tmp_path / 'sparse'} --blocks window=8")
    assert again.attention_type == "nsa"
    assert again.model().attention.window == 8
    assert again.model().attention.cmp_block == 8
    with pytest.raises(ValueError, match="attention_type=nsa"):
        settings(f"--init_from {tmp_path / 'sparse'} --attention_type standard")


@pytest.mark.slow
def test_indexed_attention_starts_from_standard_weights_which_its_warm_up_keeps(hf, data, tmp_path):
    folder = str(hf)
    flags = f"--init_from {folder} --attention_type indexed --context_length 64 --lr 1e-3"
    flags += " --blocks count=2 block=8 head_dim=32 --eval_every 0"
    trained(
        f"{flags} --indexer_warmup 2 --max_steps 3 --save_every 1 --keep_last 3",
        data,
        tmp_path / "run",
    )

    given = start.read(folder)
    theirs = Decoder(given.config)
    start.load_into(theirs, given)
    steps = [stored_weights(tmp_path / "run" / f"step-0000000{step}") for step in (1, 2, 3)]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(steps[0][name], parameter) and torch.equal(steps[1][name], parameter)
        assert not torch.equal(steps[2][name], parameter)
    added = steps[0].keys() - dict(theirs.named_parameters()).keys()
    assert len(added) == 2 * 4
    for name in added:
        assert ".indexer." in name and not torch.equal(steps[0][name], steps[1][name])


def test_a_run_continues_although_the_folder_that_it_started_from_is_gone(
    finished, data, tmp_path, capsys
):
    source = shutil.copytree(finished, tmp_path / "source")
    flags = f"--init_from {source} --eval_every 0"
    trained(f"{flags} --max_steps 1", data, tmp_path / "run")
    shutil.rmtree(source)
    trained(f"{flags} --max_steps 2", data, tmp_path / "run")
    assert "at step 1" in capsys.readouterr().out
    assert newest(tmp_path / "run").name == "step-00000002"


def load_sharded(world, folder: str) -> dict[str, torch.Tensor]:
    """The whole weights of a model that FSDP2 shards over `world` and that load_into fills."""
    found = start.read(folder)
    with torch.device("meta"):
        decoder = Decoder(found.config)
    apply.shard(decoder, dist.data_mesh(world, torch.device("cpu"), 1), torch.float32)
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    start.load_into(decoder, found)
    return {name: p.full_tensor().detach() for name, p in decoder.named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_fills_a_model_that_two_share(finished):
    for gathered in run_ranks(load_sharded, 2, str(finished)):
        assert_same_weights(gathered, weights(finished))


# ---- refusals


def test_a_damaged_checkpoint_is_named_and_not_renamed(finished, data, tmp_path):
    source = shutil.copytree(finished, tmp_path / "source")
    shard = next((source / "step-00000003").glob("rank-*"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    words = f"{COMMON} --init_from {source} --data {data} --output_dir {tmp_path / 'new'}"
    assert "step-00000003" in kit.run(shlex.split(words), code=4)
    assert not (tmp_path / "new").exists()
    assert (source / "step-00000003").is_dir()


@pytest.mark.slow
def test_no_proposal_drops_init_from_or_its_size(tmp_path):
    """A plan needs config.json and no weights."""
    config = qwen3._settings(ModelConfig.preset("1.7B"), [torch.float32], context=0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = settings(f"--init_from {tmp_path} --context_length 8 --batch_size 2")
    assert cfg.model_size == "1.7B"

    request = plan.plan(cfg, cfg.model(), World(), torch.device("cuda"), 30.0)
    proposed = list(fit._proposals(request))
    assert len(proposed) > 10
    for one in proposed:
        assert one.asked.init_from == str(tmp_path)
        assert one.asked.model_size == "1.7B"
    nearest = next(filter(fit._runs_here, proposed))
    assert f"--init_from {tmp_path}" in fit.proposal(nearest, request)


def test_a_named_checkpoint_brings_its_model_context_seed_and_data(finished, data, tmp_path):
    """A longer run, with another learning rate and nothing else that is given."""
    named = finished / "step-00000002"
    out = tmp_path / "branch"
    for last in (4, 5):  # the second time, it goes on from its own
        flags = f"--resume {named} --max_steps {last} --lr 1e-4 --output_dir {out}"
        train.main(shlex.split(flags))
        assert newest(out).name == f"step-0000000{last}"
    assert described(newest(out)).config["data"] == str(data)


# ---- export


def test_the_exported_folder_knows_its_context_and_the_end_of_a_document(finished, data, tmp_path):
    """The run's tokenizer says where a document ends."""
    convert_qwen3.main(shlex.split(f"--checkpoint {finished} --output {tmp_path / 'hf'}"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["eos_token_id"] == generation["eos_token_id"] == 0


def test_an_import_and_an_export_keep_context_and_initializer_range(hf, tmp_path):
    convert_qwen3.main(shlex.split(f"--input {hf} --output {tmp_path / 'run'}"))
    words = f"--checkpoint {tmp_path / 'run'} --output {tmp_path / 'hf'} --tokenizer none"
    convert_qwen3.main(shlex.split(words))
    before = json.loads((hf / "config.json").read_text())
    after = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert after == before
    assert not (tmp_path / "hf" / "generation_config.json").exists()


def test_a_longer_run_from_a_folder_exports_its_own_context_and_a_shorter_one_the_folders(
    hf, data, tmp_path
):
    for length in (64, 1024):
        out = tmp_path / f"run{length}"
        flags = f"--init_from {hf} --max_steps 1 --eval_every 0 --context_length {length}"
        trained(flags, data, out)
        assert start.trained_context(described(newest(out))) == max(length, 512)
        assert start.read(str(out)).config.init_std == 0.05

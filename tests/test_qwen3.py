"""longhaul/qwen3.py and scripts/convert_qwen3.py against transformers' own Qwen3ForCausalLM, on
random small models.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longhaul import kernels, qwen3
from longhaul.checkpoint.format import CheckpointError
from longhaul.checkpoint.load import load_model, verified
from model import Decoder, ModelConfig, NSAConfig
from scripts import convert_qwen3
from tests.ranks import run_ranks
from tests.test_start import load_sharded

transformers = pytest.importorskip(
    "transformers", reason="transformers' Qwen3ForCausalLM is the reference"
)
BASE = dict(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=256,
)
SHAPES = {
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "one key head, odd sizes": dict(
        num_attention_heads=5,
        num_key_value_heads=1,
        hidden_size=35,
        head_dim=6,
        vocab_size=101,
        intermediate_size=33,
    ),
    "as many key heads, one layer": dict(
        num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, rms_norm_eps=1e-5
    ),
    "eight groups": dict(
        num_attention_heads=16, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    ),
    "theta": dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=4.0)),
    "yarn": dict(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64
        )
    ),
}
COMPARED = [
    *BASE,
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "hidden_act",
    "layer_types",
    "use_sliding_window",
]


def random_model(seed: int = 0, dtype=torch.float32, **changes):
    """Their model with weights large enough that every one matters."""
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + (
            parameter.ndim == 1
        )
    reference.tie_weights()
    return reference.to(dtype)


def saved(folder: Path, **kwargs):
    reference = random_model(**kwargs)
    reference.save_pretrained(folder)
    return reference


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_tensors(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def edit_config(folder: Path, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@torch.no_grad()
def assert_same_logits(ours: Decoder, theirs, tolerance: float = 1e-5):
    tokens = torch.randint(
        theirs.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(1)
    )
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(
        ours(tokens), expected, rtol=0, atol=tolerance * expected.abs().max().item()
    )


# ---------------------------------------------------------------------------- parity and round trip


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_and_a_round_trip_keeps_every_bit(tmp_path, shape):
    reference = saved(tmp_path / "hf", **SHAPES[shape])
    decoder = qwen3.from_hf(tmp_path / "hf")
    assert decoder.num_params() == reference.num_parameters()
    assert_same_logits(decoder, reference)
    qwen3.to_hf(decoder, tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "back")
    for key in COMPARED:
        assert getattr(theirs.config, key) == getattr(reference.config, key), key
    assert qwen3.from_hf(tmp_path / "back").config == decoder.config


@pytest.mark.parametrize("shape", ["untied", "linear", "yarn"])
def test_the_spelling_of_transformers_4_reads_the_same_as_that_of_5(tmp_path, shape):
    saved(tmp_path, **SHAPES[shape])
    new = qwen3.from_hf(tmp_path).config
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    old = None
    if len(rope) > 1:
        old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    edit_config(
        tmp_path,
        rope_parameters=...,
        dtype=...,
        rope_theta=theta,
        rope_scaling=old,
        torch_dtype="float32",
    )
    assert qwen3.from_hf(tmp_path).config == new


def test_what_is_written_has_the_keys_that_transformers_4_reads(tmp_path):
    qwen3.to_hf(
        kernels.decoder(small(rope_scaling="yarn", rope_factor=4.0, rope_original_context=64)),
        tmp_path / "hf",
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (
        config["rope_theta"] == 1e6
        and config["torch_dtype"] == "float32"
        and config["architectures"] == ["Qwen3ForCausalLM"]
    )
    assert config["rope_scaling"] == dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64
    )
    assert (
        config["max_position_embeddings"] == 256
    )  # = original * factor: transformers 4.51 takes yarn's factor from this ratio


def small(**changes) -> ModelConfig:
    return ModelConfig(
        **dict(
            vocab_size=97,
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            ffn_size=40,
        )
        | changes
    )


@pytest.mark.parametrize("rope", ["none", "linear", "yarn", "llama3"])
def test_logits_at_positions_spread_over_a_long_context_equal_those_of_transformers(tmp_path, rope):
    """A frequency that differs in its last bit turns far positions by up to 0.007 radians."""
    scaling = dict(rope_scaling=rope, rope_factor=4.0, rope_original_context=32_768)
    decoder = kernels.decoder(
        small(
            init_std=0.2,
            head_dim=128,
            rope_theta=1e6,
            tie_embeddings=rope != "linear",
            **({} if rope == "none" else scaling),
        )
    )
    qwen3.to_hf(decoder, tmp_path)
    assert qwen3.from_hf(tmp_path).config == decoder.config
    reference = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).eval()

    positions_BT = torch.linspace(0, 131_071, 48).long()[None]
    tokens_BT = torch.randint(0, 97, (1, 48))
    with torch.no_grad():
        theirs = reference(tokens_BT, position_ids=positions_BT).logits
        ours = decoder(tokens_BT, positions=positions_BT)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept_both_ways_and_sets_the_compute_dtype(tmp_path, dtype):
    saved(tmp_path / "hf", dtype=dtype)
    decoder = qwen3.from_hf(tmp_path / "hf")
    assert {p.dtype for p in decoder.parameters()} == {dtype} == {decoder.config.dtype}
    qwen3.to_hf(decoder, tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


def test_weights_are_stored_in_the_dtype_that_is_asked_for(tmp_path):
    saved(tmp_path)
    decoder = qwen3.from_hf(tmp_path, dtype=torch.bfloat16)
    assert decoder.config.compute_dtype == "float32"
    whole = qwen3.from_hf(tmp_path).bfloat16()
    assert_same_tensors(dict(decoder.named_parameters()), dict(whole.named_parameters()))


def test_a_folder_of_mixed_dtypes_keeps_each(tmp_path):
    saved(tmp_path / "hf", dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path / "hf")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    decoder = qwen3.from_hf(tmp_path / "hf")
    assert (
        decoder.norm.weight.dtype == torch.float32 and decoder.embed.weight.dtype == torch.bfloat16
    )
    qwen3.to_hf(decoder, tmp_path / "back")
    assert_same_tensors(tensors, tensors_of(tmp_path / "back"))


@pytest.mark.parametrize("tied", [True, False])
def test_shards_of_either_writer_are_read_by_the_other(tmp_path, tied):
    reference = random_model(tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    decoder = qwen3.from_hf(tmp_path / "hf")
    assert_same_logits(decoder, reference)
    qwen3.to_hf(decoder, tmp_path / "back", shard_bytes=40_000)
    shards = list((tmp_path / "back").glob("model-0*-of-0*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 42_000 for path in shards)
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    assert_same_logits(
        decoder, transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "back").eval()
    )


def test_a_tied_folder_may_store_its_head_again(tmp_path):
    reference = saved(tmp_path, tie_word_embeddings=True)
    tensors = tensors_of(tmp_path)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / "model.safetensors",
    )
    decoder = qwen3.from_hf(tmp_path)
    assert decoder.lm_head.weight is decoder.embed.weight
    assert_same_logits(decoder, reference)


def test_overrides_extend_the_context_of_an_imported_model(tmp_path):
    reference = saved(
        tmp_path / "plain",
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        max_position_embeddings=64,
    )
    decoder = qwen3.from_hf(
        tmp_path / "plain", rope_scaling="yarn", rope_factor=4.0, compute_dtype="float32"
    )
    longer = random_model(
        rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64
        )
    )
    longer.load_state_dict(reference.state_dict())
    assert_same_logits(decoder, longer)


def test_weights_load_into_a_built_decoder_in_its_own_dtype(tmp_path):
    saved(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True)
    decoder = kernels.decoder(
        dataclasses.replace(qwen3.from_hf(tmp_path).config, compute_dtype="float32")
    )
    qwen3.load_into(decoder, tmp_path)
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert_same_logits(
        decoder, transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    )


def test_loading_into_a_decoder_of_another_size_names_the_field(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match="hidden_size=48"):
        qwen3.load_into(kernels.decoder(small()), tmp_path)


@pytest.mark.slow
def test_weights_load_into_a_sharded_decoder(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    whole = dict(qwen3.from_hf(tmp_path).named_parameters())
    for gathered in run_ranks(load_sharded, 2, str(tmp_path)):
        assert_same_tensors(gathered, whole)


# ---------------------------------------------------------------------------------------- bad input


QUERY = "model.layers.0.self_attn.q_proj"
NORM = "model.norm.weight"


def bad_config(**changes):
    return lambda folder: edit_config(folder, **changes)


def scaled(**rope):
    return bad_config(rope_scaling=rope)


def with_tensor(name: str, tensor: torch.Tensor):
    return lambda folder: save_file(
        tensors_of(folder) | {name: tensor}, folder / "model.safetensors"
    )


def drop_tensor(folder: Path):
    tensors = tensors_of(folder)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo opened'\ntR.")


def no_weights(folder: Path):
    (folder / "model.safetensors").unlink()


def truncated(folder: Path):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def huge_header(folder: Path):
    (folder / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def index_of(weight_map):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


NO_CONFIG = "config.json is not readable"
BAD = [
    (lambda folder: (folder / "config.json").unlink(), NO_CONFIG),
    (lambda folder: (folder / "config.json").write_text("{"), NO_CONFIG),
    (lambda folder: (folder / "config.json").write_text("[]"), "model_type is None"),
    (bad_config(model_type="mistral"), "'mistral'"),
    (bad_config(hidden_size="48"), "hidden_size='48'"),
    (bad_config(num_key_value_heads=3), "num_kv_heads=3"),
    (bad_config(attention_bias=True), "attention_bias=True"),
    (bad_config(use_sliding_window=True), "use_sliding_window=True"),
    (bad_config(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (bad_config(hidden_act="gelu"), "hidden_act='gelu'"),
    (bad_config(quantization_config=dict(quant_method="fp8")), "quantization_config="),
    (bad_config(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "'dynamic'"),
    (scaled(type="longrope", factor=2.0), "'longrope'"),
    (bad_config(rope_scaling="yarn"), "'yarn'"),
    (scaled(rope_type="yarn"), "factor=None"),
    (scaled(rope_type="yarn", factor=4.0, beta_fast=16), "beta_fast=16"),
    (scaled(rope_type="yarn", factor=4.0, attention_factor=1.0), "attention_factor=1.0"),
    (bad_config(rope_parameters=dict(full_attention=dict(a=1))), "full_attention="),
    (scaled(rope_type="linear", factor=0.5), "factor above 1"),
    (scaled(rope_type="yarn", factor=-2), "factor above 1"),
    (bad_config(num_hidden_layers=3), "lacks model.layers.2.* and 10 more"),
    (bad_config(num_hidden_layers=1), "also holds model.layers.1.* and 10 more"),
    (bad_config(tie_word_embeddings=True), "lm_head.weight .*tie_word_embeddings"),
    (bad_config(vocab_size=98), r"\(97, 48\) .* \(98, 48\)"),
    (drop_tensor, "lacks model.layers.1.mlp.up_proj.weight and 1 more"),
    (with_tensor(f"{QUERY}.bias", torch.zeros(64)), f"also holds {QUERY}.bias,"),
    (with_tensor(NORM, torch.zeros(47)), rf"{NORM} .* \(47,\)"),
    (with_tensor(NORM, torch.zeros(48, dtype=torch.int8)), f"{NORM} .* I8"),
    (pickled, "pytorch_model.bin is a pickle"),
    (no_weights, "model.safetensors .*No such file"),
    (truncated, "model.safetensors"),
    (huge_header, "model.safetensors"),
    (index_of({"a": "../model.safetensors"}), "outside its folder"),
    (index_of({"a": "missing.safetensors"}), "missing.safetensors"),
    (index_of({"a": 3}), "index.json"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    saved(folder)
    qwen3.from_hf(folder)
    return folder


@pytest.mark.parametrize("spoil, words", BAD, ids=[words for _, words in BAD])
def test_a_bad_folder_is_one_line_that_names_the_fault(tmp_path, good, spoil, words):
    for path in good.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        qwen3.from_hf(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_export_never_overwrites_and_leaves_no_traces_of_a_refusal(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("keep me")
    (tmp_path / "file").write_text("keep me")
    for name in ("used", "file"):
        with pytest.raises(ValueError, match=name):
            qwen3.to_hf(kernels.decoder(small()), tmp_path / name)
    decoder = kernels.decoder(small())
    decoder.config = dataclasses.replace(decoder.config, attention=NSAConfig())
    with pytest.raises(ValueError, match="attention_type='nsa'"):
        qwen3.to_hf(decoder, tmp_path / "hf")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert found == {"file", "used", "used/notes.txt"}

    (tmp_path / "empty").mkdir()
    qwen3.to_hf(kernels.decoder(small()), tmp_path / "empty")
    names = {path.name for path in (tmp_path / "empty").iterdir()}
    assert names == {"config.json", "model.safetensors"}


# ------------------------------------------------------------------------------------- command line


def test_the_command_imports_to_a_checkpoint_and_exports_the_same_bits_or_casts(tmp_path, capsys):
    reference = saved(tmp_path / "hf", **SHAPES["yarn"], tie_word_embeddings=True)
    capsys.readouterr()  # bars of transformers
    run = tmp_path / "run"
    convert_qwen3.main(["--from-hf", str(tmp_path / "hf"), "--output", str(run)])
    step = run / "step-00000000"
    assert capsys.readouterr().out == f"wrote {step}\n"
    assert_same_logits(load_model(verified(step)), reference)

    whole = tensors_of(tmp_path / "hf")
    flags = ["--tokenizer", "none", "--output"]
    convert_qwen3.main(["--checkpoint", str(run), *flags, str(tmp_path / "back")])
    assert_same_tensors(whole, tensors_of(tmp_path / "back"))
    flags = ["--dtype", "bfloat16", *flags]
    convert_qwen3.main(["--checkpoint", str(step), *flags, str(tmp_path / "half")])
    halves = {name: tensor.bfloat16() for name, tensor in whole.items()}
    assert_same_tensors(halves, tensors_of(tmp_path / "half"))


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    saved(tmp_path / "hf")
    convert_qwen3.import_hf(tmp_path / "hf", tmp_path / "run", "keep")
    shard = next((tmp_path / "run" / "step-00000000").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="step-00000000"):
        convert_qwen3.export_hf(tmp_path / "run", tmp_path / "back", "keep", "none")
    assert not (tmp_path / "back").exists()

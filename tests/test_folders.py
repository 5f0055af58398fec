"""Hugging Face folders as people have them: those whose tensors are not those of their config.json,
and those that come out of a checkpoint as they went in.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from data import origin, prepare
from lab.posttrain.rollout import Sampling
from longhaul import qwen3
from longhaul.checkpoint import start
from longhaul.config import TrainConfig
from longhaul.generate import generate as sampled
from model import Decoder, ModelConfig
from scripts import convert_qwen3
from scripts.source import Source, tokenizer_of
from tests import qwen_tokenizer

transformers = pytest.importorskip("transformers", reason="its models are the reference")

SIZES = dict(
    vocab_size=640,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    bos_token_id=500,
    eos_token_id=[501, 502, 503],
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=512,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4 / 3, original_max_position_embeddings=24_576)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0)
SAMPLING = dict(
    bos_token_id=500,
    eos_token_id=[501, 502, 503],
    pad_token_id=503,
    do_sample=True,
    temperature=0.6,
    top_k=20,
    repetition_penalty=1.05,
)
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0.self_attn."


def made(folder: Path, kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes):
    """Their model with random weights, saved in the folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: dict):
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def changed(folder: Path, change, tied: bool):
    """Their model, of which `change(weights, config)` gives what is in the folder."""
    model = made(folder, tie_word_embeddings=tied)
    weights = load_file(folder / "model.safetensors")
    weights, config = change(weights, read(folder / "config.json"))
    plain = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", config)
    return model


def without(content: dict, *names: str) -> dict:
    return {name: value for name, value in content.items() if name not in names}


def renamed(old: str, new: str):
    return lambda w, c: ({name.replace(old, new, 1): t for name, t in w.items()}, c)


def with_tensors(*names: str, dropped: str = ""):
    extra = {name: torch.ones(8) for name in names}
    return lambda w, c: (without(w, dropped) | extra, c)


def wrapped(prefix: str):
    return lambda w, c: ({f"{prefix}{name}": tensor for name, tensor in w.items()}, c)


# ---- reading


READ = {
    "frequencies": (with_tensors(f"{LAYER}rotary_emb.inv_freq"), False),
    "frequencies of the model": (with_tensors("model.rotary_emb.inv_freq"), False),
    "tables of positions": (with_tensors(f"{LAYER}rotary_emb.cos_cached"), False),
    "masks": (with_tensors(f"{LAYER}bias", f"{LAYER}masked_bias"), False),
    "body by itself, tied": (renamed("model.", ""), True),
    "body by itself, with a head": (renamed("model.", ""), False),
    "tied, only the head": (lambda w, c: (without(w, EMBEDDING) | {HEAD: w[EMBEDDING]}, c), True),
}


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_what_transformers_reads_without_a_loss_is_read(name, tmp_path):
    change, tied = READ[name]
    made_by_them = changed(tmp_path, change, tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(640, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert torch.equal(expected, made_by_them(tokens).logits)
    limit = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(qwen3.from_hf(tmp_path)(tokens), expected, rtol=0, atol=limit)


def test_a_stored_buffer_does_not_decide_the_precision(tmp_path):
    made(tmp_path, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.float64)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert qwen3.from_hf(tmp_path).config.compute_dtype == "bfloat16"


NO_HEAD = lambda w, c: (without(w, HEAD), c)  # noqa: E731
# what is in the folder, tied or not, and what the refusal names
REFUSED = {
    "compiled": (wrapped("_orig_mod."), "_orig_mod. out of the names"),
    "compiled layers": (renamed("layers.0.", "layers.0._orig_mod."), "_orig_mod. out"),
    "replicated": (wrapped("module."), "DistributedDataParallel"),
    "peft": (wrapped("base_model.model."), "PEFT"),
    "images": (renamed("model.", "model.language_model."), "language_model. out of the names"),
    "unknown wrapper": (wrapped("actor."), "actor. out of the names"),
    "body": (
        lambda w, c: renamed("model.", "")(*NO_HEAD(w, c)),
        "lacks lm_head.weight.*body was saved by itself",
    ),
    "reward model": (with_tensors("score.weight", dropped=HEAD), "classifies.*score.weight"),
    "value head": (with_tensors("v_head.summary.weight"), "classifies.*v_head"),
    "resized": (lambda w, c: (w, c | {"vocab_size": 630}), "set vocab_size to 640"),
    "head resized": (
        lambda w, c: (w | {HEAD: w[HEAD][:630]}, c),
        "as many rows",
    ),
    "tied by default": (
        lambda w, c: (without(w, HEAD), without(c, "tie_word_embeddings")),
        "tie_word_embeddings is not true",
    ),
    "tokens ahead": (with_tensors("mtp.layers.0.norm.weight"), "MTP"),
    "fewer layers": (
        lambda w, c: (w, c | {"num_hidden_layers": 1}),
        "num_hidden_layers=1: set it to 2",
    ),
    "more layers": (
        lambda w, c: (w, c | {"num_hidden_layers": 3}),
        "num_hidden_layers=3: set it to 2",
    ),
    "many more layers": (
        lambda w, c: (w, c | {"num_hidden_layers": 99}),
        "num_hidden_layers=99: set it to 2",
    ),
    "lora": (
        lambda w, c: (w | {f"{LAYER}q_proj.lora_A.weight": torch.ones(4, 32)}, c),
        "merge_and_unload",
    ),
    "fp8": (with_tensors(f"{LAYER}q_proj.weight_scale_inv"), "is quantised"),
    "gptq": (with_tensors(f"{LAYER}q_proj.qweight", dropped=f"{LAYER}q_proj.weight"), "quantised"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_download_mends_is_named_with_what_does(name, tmp_path):
    change, words = REFUSED[name]
    changed(tmp_path, change, tied=False)
    with pytest.raises(ValueError, match=words) as caught:
        qwen3.from_hf(tmp_path)
    said = str(caught.value)
    assert "\n" not in said and "download" not in said.replace(str(tmp_path), "")


def test_the_remedy_for_a_wrapper_and_for_a_missing_setting_works(tmp_path):
    changed(tmp_path / "compiled", wrapped("_orig_mod."), tied=False)
    path = tmp_path / "compiled" / "model.safetensors"
    weights = {name.replace("_orig_mod.", ""): t for name, t in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    qwen3.from_hf(tmp_path / "compiled")

    changed(tmp_path / "tied", REFUSED["tied by default"][0], tied=True)
    config = read(tmp_path / "tied" / "config.json")
    write(tmp_path / "tied" / "config.json", config | {"tie_word_embeddings": True})
    qwen3.from_hf(tmp_path / "tied")


@pytest.mark.parametrize("with_base", [False, True])
def test_an_adapter_is_refused_by_every_reader(with_base, tmp_path):
    """transformers would add it to the base model that lies next to it."""
    if with_base:
        made(tmp_path)
    write(tmp_path / "adapter_config.json", dict(peft_type="LORA"))
    for reader in (qwen3.from_hf, start.read, Source.open):
        with pytest.raises(ValueError, match="adapter"):
            reader(str(tmp_path))


def test_parts_without_their_list_are_named(tmp_path):
    made(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="model.safetensors.index.json"):
        qwen3.from_hf(tmp_path)


# ---- a round trip


def old_spelling(config: dict) -> dict:
    """config.json as transformers 4 writes it."""
    rope = dict(config["rope_parameters"])
    spelled = without(config, "rope_parameters", "dtype")
    spelled |= dict(rope_theta=rope.pop("rope_theta"), torch_dtype=config["dtype"])
    return spelled | dict(rope_scaling=rope if len(rope) > 1 else None)


def a_chat(folder: Path):
    """The other files of a folder, and settings that longhaul does not know."""
    qwen_tokenizer.make(folder, ["def abc(x):\n" * 9], 260, 500, 640)
    settings = read(folder / "tokenizer_config.json")
    settings |= dict(
        model_max_length=131_072,
        eos_token={"content": "<|im_end|>", "__type": "AddedToken"},
        chat_template="{{ messages }}",
    )
    write(folder / "tokenizer_config.json", settings)
    write(folder / "special_tokens_map.json", dict(eos_token="<|im_end|>"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "LICENSE").write_text("Be kind.")


FOLDERS = {
    "llama3": dict(rope_parameters=LLAMA3, max_position_embeddings=131_072),
    "llama3, old": dict(rope_parameters=LLAMA3, max_position_embeddings=1_000, old=True),
    "yarn, old, bf16": dict(
        kind="Qwen2",
        rope_parameters=YARN,
        max_position_embeddings=32_768,
        old=True,
        dtype=torch.bfloat16,
    ),
    "linear": dict(rope_parameters=LINEAR, max_position_embeddings=257),
    "one end": dict(kind="Qwen3", eos_token_id=501, tie_word_embeddings=True),
    "unspoken sampling": dict(kind="Qwen3", sampling=None),
}


def folder_of(path: Path, name: str) -> Path:
    settings = dict(FOLDERS[name])
    old = settings.pop("old", False)
    sampling = settings.pop("sampling", SAMPLING)
    a_chat(path)
    made(path, **settings)
    config = read(path / "config.json")
    config |= dict(pretraining_tp=1, my_field={"a": [1, None]}, _name_or_path="me/it")
    write(path / "config.json", old_spelling(config) if old else config)
    (path / "generation_config.json").unlink()
    if sampling:
        write(path / "generation_config.json", sampling)
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.suffix != ".safetensors"]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()
    }


def assert_same_weights(one: Path, other: Path):
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])


@pytest.mark.parametrize("name", FOLDERS)
def test_an_untouched_folder_comes_out_as_it_went_in_although_it_is_gone(name, tmp_path):
    folder = folder_of(tmp_path / "hf", name)
    convert_qwen3.main(["--input", str(folder), "--output", str(tmp_path / "run")])
    folder.rename(tmp_path / "gone")
    convert_qwen3.main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "back")])
    assert files_of(tmp_path / "back") == files_of(tmp_path / "gone")
    assert_same_weights(tmp_path / "gone", tmp_path / "back")


def test_an_import_that_casts_says_so_and_nothing_else(tmp_path):
    folder = folder_of(tmp_path / "hf", "llama3")
    words = ["--input", str(folder), "--output", str(tmp_path / "run"), "--dtype", "bf16"]
    convert_qwen3.main(words)
    convert_qwen3.main(["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "back")])
    before = read(folder / "config.json")
    assert read(tmp_path / "back" / "config.json") == before | dict(dtype="bfloat16")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A dataset with the tokenizer of these folders."""
    folder = tmp_path_factory.mktemp("data")
    a_chat(folder / "hf")
    words = f"--input longhaul/parallel --output {folder / 'set'} --workers 1"
    assert prepare.main([*words.split(), "--tokenizer", str(folder / "hf")]) == 0
    return folder / "set"


COMMON = (
    "--dtype fp32 --device cpu --eval_every 0 --warmup_steps 0 --max_steps 1 --context_length 64"
)


@pytest.mark.parametrize(
    "name, flags, expected",
    [
        ("llama3", "", {}),
        ("unspoken sampling", "", {}),
        (
            "yarn, old, bf16",
            "--rope_scaling yarn:8:24576",
            dict(
                rope_scaling=dict(
                    rope_type="yarn", factor=8.0, original_max_position_embeddings=24_576
                ),
                max_position_embeddings=196_608,
                torch_dtype="float32",
            ),
        ),
    ],
)
def test_training_changes_what_it_means_to_change(name, flags, expected, data, tmp_path):
    """Also through a second run from the first, when the folder is gone."""
    folder = folder_of(tmp_path / "hf", name)
    before = read(folder / "config.json")
    words = [*COMMON.split(), *flags.split(), "--data", str(data)]
    train.main([*words, "--init_from", str(folder), "--output_dir", str(tmp_path / "run")])
    folder.rename(tmp_path / "gone")
    plain = [*COMMON.split(), "--data", str(data)]
    later = ["--init_from", str(tmp_path / "run"), "--output_dir", str(tmp_path / "later")]
    train.main([*plain, *later])
    for run in ("run", "later"):
        back = tmp_path / f"back-{run}"
        convert_qwen3.main(["--checkpoint", str(tmp_path / run), "--output", str(back)])
        assert read(back / "config.json") == before | expected
        kept = {key: value for key, value in files_of(back).items() if key != "config.json"}
        theirs = files_of(tmp_path / "gone")
        if not flags:
            assert theirs == kept | {"config.json": theirs["config.json"]}


@pytest.mark.parametrize(
    "name, changes, expected",
    [
        (
            "one end",
            dict(rope_theta=4e7),
            dict(rope_parameters=dict(rope_type="default", rope_theta=4e7)),
        ),
        ("yarn, old, bf16", dict(rope_theta=4e7), dict(rope_theta=4e7)),
        ("llama3", dict(rope_factor=32.0), dict(rope_parameters=LLAMA3 | dict(factor=32.0))),
        (
            "linear",
            dict(rope_scaling="none", rope_factor=1.0),
            dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        ),
    ],
)
def test_changed_positions_have_the_spelling_of_the_folder(name, changes, expected, tmp_path):
    folder = folder_of(tmp_path / "hf", name)
    before = read(folder / "config.json")
    config = ModelConfig(**qwen3.read_config(folder))
    now = dataclasses.replace(config, **changes)
    written = qwen3.changed_config(folder, now, before["max_position_embeddings"], "")
    assert written == before | expected

    write(folder / "config.json", written)
    again = ModelConfig(**qwen3.read_config(folder))
    for field in ("rope_theta", "rope_scaling", "rope_factor"):
        assert getattr(again, field) == getattr(now, field)


def test_the_context_of_scaled_positions_is_the_folders(tmp_path):
    folder = folder_of(tmp_path / "hf", "llama3")
    cfg = TrainConfig(**start.completed({"init_from": str(folder), "context_length": 64}))
    assert Source.open(str(folder)).reach == cfg.model().rope_reach == 131_072


def test_a_run_beyond_the_context_of_its_folder_reaches_as_far_as_its_rows(data, tmp_path):
    folder, run = folder_of(tmp_path / "hf", "llama3, old"), tmp_path / "run"
    words = [*COMMON.replace("64", "1024").split(), "--data", str(data)]
    train.main([*words, "--init_from", str(folder), "--output_dir", str(run)])
    assert start.read(str(folder)).config.rope_reach == 1000
    assert start.read(str(run)).config.rope_reach == 1024


# ---- where a text ends


def test_a_text_ends_at_each_token_that_the_folder_names(tmp_path):
    folder = folder_of(tmp_path / "hf", "llama3")
    convert_qwen3.main(["--input", str(folder), "--output", str(tmp_path / "run")])
    for named in (folder, tmp_path / "run"):
        source = Source.open(str(named))
        assert source.stop_ids(tokenizer_of(source)) == {501, 502, 503}

    decoder = Decoder(ModelConfig.preset("tiny", vocab_size=50, num_layers=1))
    written = list(sampled(decoder, [1], 9, temperature=0))
    for stop in written:
        ended = list(sampled(decoder, [1], 9, temperature=0, stop_ids={stop, 99}))
        assert ended == written[: written.index(stop)]


def test_a_response_ends_at_each_of_the_stop_ids():
    sampling = Sampling(1, 4, eod_id=7, stop_ids=(2, 3))
    assert sampling.ends(torch.tensor([1, 2, 3, 7, 8])).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        (dict(eos_token_id=[5, 6]), dict(eos_token_id=4), (5, 6)),
        (dict(eos_token_id=5), {}, (5,)),
        (dict(temperature=1), dict(eos_token_id=[4, 3]), (4, 3)),
        ({}, dict(eos_token_id=None), ()),
    ],
)
def test_stop_ids_are_those_of_generation_or_else_of_the_model(
    generation, config, expected, tmp_path
):
    write(tmp_path / "generation_config.json", generation)
    write(tmp_path / "config.json", config)
    assert origin.stop_ids(tmp_path) == expected

"""The exported folder, as a user of transformers meets it: its tokenizer gives the ids of the run's
tokenizer, and greedy generation gives the tokens of scripts.generate.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

import train
from base import durable
from data import prepare
from data.dataset import Dataset
from data.load_tokenizer import Ids, hash_of_ids, load_tokenizer
from data.mixture import check_same_ids
from longhaul import qwen3
from longhaul.checkpoint import start
from longhaul.checkpoint.load import check_ids, newest, verified
from longhaul.checkpoint.save import save
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.step import TrainState
from model import Decoder, ModelConfig
from scripts import convert_qwen3, generate
from tests import qwen_tokenizer
from tests.kit import refused
from tests.ranks import run_ranks
from tests.test_convert_sentencepiece import random_texts

transformers = pytest.importorskip("transformers", reason="the exported folder is for transformers")

SIZES = (
    "--model_size tiny --vocab_size 640 --model_overrides hidden_size=64 num_layers=2 num_heads=4 "
    "num_kv_heads=2 head_dim=16 ffn_size=96 init_std=0.2 --dtype fp32 --device cpu --eval_every 0 "
    "--context_length 64 --warmup_steps 0 "
)
YARN = "--rope_scaling yarn:4:64 --rope_theta 10000 "
PROMPTS = 20
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    words = f"--input longhaul/parallel --output {folder} --vocab_size 600 --workers 1"
    assert prepare.main(words.split()) == 0
    return folder


def trained(data: Path, folder: Path, flags: str) -> Path:
    train.main([*(SIZES + flags).split(), "--data", str(data), "--output_dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """A few steps from weights that are large enough for every token to be a clear choice."""
    flags = "--max_steps 6 --lr 1e-3 --optimizer adamw_8bit"
    return trained(data, tmp_path_factory.mktemp("run") / "run", flags)


@pytest.fixture(scope="module")
def yarn(data, tmp_path_factory) -> Path:
    """The same whose positions were 64 and are stretched to 256."""
    return trained(data, tmp_path_factory.mktemp("yarn") / "run", f"--max_steps 3 {YARN}")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    return export(run, tmp_path_factory.mktemp("exported") / "hf")


def export(run: Path, folder: Path, *words: str) -> Path:
    convert_qwen3.main(["--checkpoint", str(run), "--output", str(folder), *words])
    return folder


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- generation


def continued(run: Path, prompt: list[int], capsys) -> list[int]:
    """What scripts.generate adds to the prompt, greedily."""
    flags = f"--checkpoint {run} --temperature 0 --max_new_tokens {NEW_TOKENS} --device cpu --ids"
    capsys.readouterr()
    generate.main([*flags.split(), *map(str, prompt)])
    words = capsys.readouterr().out.split()
    return [int(word) for word in words][len(prompt) :]


def prompts(longest: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [1, longest, *(rng.randrange(2, longest) for _ in range(PROMPTS - 2))]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("which, longest", [("run", 60), ("yarn", 180)])
def test_greedy_tokens_of_20_prompts_equal_those_of_transformers(
    which, longest, tmp_path, request, capsys
):
    """With yarn, prompts and answers go beyond the 64 tokens of the original context."""
    run = request.getfixturevalue(which)
    folder = export(run, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    context = 256 if which == "yarn" else 64  # although the rows of the run were shorter
    assert model.config.max_position_embeddings == context
    assert read(folder / "tokenizer_config.json")["model_max_length"] == context

    written = set()
    for prompt in prompts(longest, 640):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            suppress_tokens=None,
        )
        ours = continued(run, prompt, capsys)
        assert theirs[0, len(prompt) :].tolist() == ours
        written.add(tuple(ours))
    assert len(written) == PROMPTS  # a model that says the same to all would show less


def test_texts_are_continued_by_transformers_as_by_generate(run, exported, capsys):
    """With both tokenizers and the generation settings: ids that mean nothing are never chosen."""
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    flags = f"--checkpoint {run} --temperature 0 --max_new_tokens {NEW_TOKENS} --device cpu"

    likeliest = []
    for prompt in ("def shard(model):\n    ", "The gradient of", "import torch", "1, 2, 3"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        theirs = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        assert theirs.max() < 600
        likeliest.append(model(theirs).logits.argmax(-1).max())

        for folder in (run, exported):  # which may spell bytes that are no UTF-8 in two ways
            capsys.readouterr()
            generate.main([*flags.split(), "--prompt", prompt, "--tokenizer", str(folder)])
            text = load_tokenizer(folder).decode(theirs[0].tolist())
            assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")

    assert max(likeliest) >= 600  # such ids would have been chosen


# ---- the folder


def test_the_folder_is_complete(run, exported):
    """And has nothing of the optimizer, whose states are of 8 bits."""
    assert any(name.startswith("optim.") for name in verified(newest(run)).tensors())
    assert sorted(path.name for path in exported.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = transformers.AutoConfig.from_pretrained(exported)
    assert (config.max_position_embeddings, config.eos_token_id, config.bos_token_id) == (64, 0, 0)
    settings = transformers.GenerationConfig.from_pretrained(exported)
    assert (settings.eos_token_id, settings.bos_token_id, settings.pad_token_id) == (0, 0, 0)
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.8, 50)
    usual = generate.GenerateConfig(checkpoint="x", prompt="y")
    assert (usual.temperature, usual.top_k, usual.top_p) == (0.8, 50, settings.top_p)


def test_autotokenizer_gives_the_ids_and_texts_of_the_run(run, exported):
    ours = load_tokenizer(run / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", ours.eod_id)
    assert theirs.pad_token_id == ours.eod_id and theirs.model_max_length == 64

    pieces = ["self", " = ", "don't", " ,", " ."]
    texts = ["", "a ,b . do n't", "<|endoftext|><unk>", *random_texts(2, 300, pieces)]
    for text, ids in zip(texts, theirs(texts)["input_ids"]):
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text


def test_any_ids_are_spelled_one_at_a_time_as_all_together(exported):
    """Also bytes that are no UTF-8, whose neighbours then show as U+FFFD too."""
    theirs = load_tokenizer(exported)
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(theirs.vocab_size) for _ in range(40)]
        stream = theirs.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == theirs.decode(ids)


def test_a_sentencepiece_model_and_its_export_are_one_tokenizer_in_both_directions(
    data, run, exported, tmp_path
):
    """Whichever of them the model was trained with, and in a mixture."""
    files = (run / "tokenizer.model", exported / "tokenizer.json")
    ours, theirs = map(load_tokenizer, files)
    assert theirs.eod_id == ours.eod_id and theirs.padded_vocab_size() == 640
    hashes = [ours.sha256, theirs.sha256]
    stored = verified(newest(run))
    for trained_with in hashes:
        checkpoint = dataclasses.replace(stored, identity={"tokenizer": trained_with})
        for file, sha256 in zip(files, hashes):
            check_ids(stored.folder, checkpoint, Ids(sha256, file), "it")
        for other in (Ids("0" * 64), Ids()):
            with pytest.raises(ValueError, match="tokenizer"):
                check_ids(stored.folder, checkpoint, other, "it")

    renamed = shutil.copy(files[1], tmp_path / "renamed.json")
    assert hash_of_ids(Path(renamed)) == hash_of_ids(files[0]) == hashes[1]

    first, other = Dataset(data), Dataset(data)
    start.check_tokenizer(start.read(str(exported)), first)
    other.tokenizer_path, other.tokenizer_sha256 = files[1], hashes[1]
    check_same_ids(first, other)
    other.eod_id += 1
    with pytest.raises(ValueError, match="tokenizer"):
        check_same_ids(first, other)


def test_a_hugging_face_tokenizer_keeps_its_settings_and_its_chat_template(chat_model, tmp_path):
    settings = read(chat_model / "tokenizer_config.json")
    settings |= dict(bos_token="<|im_start|>", auto_map={"AutoTokenizer": ["code.py", None]})
    (chat_model / "tokenizer_config.json").write_text(json.dumps(settings))

    imported = tmp_path / "run"
    convert_qwen3.main(["--input", str(chat_model), "--output", str(imported)])
    back = export(imported, tmp_path / "back")
    after = read(back / "tokenizer_config.json")
    assert "auto_map" not in after and after["chat_template"] == settings["chat_template"]
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (back / "tokenizer.json").read_bytes() == (chat_model / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert tokenizer.eos_token_id == load_tokenizer(imported / "tokenizer.json").eod_id

    generation = read(back / "generation_config.json")
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(set(roles)) == 3
    for role, index in zip(("bos", "eos", "pad"), roles):
        assert generation[f"{role}_token_id"] == index
    assert read(back / "config.json")["bos_token_id"] == roles[0]


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A Hugging Face folder of several files, with norms in fp32 and matrices in bf16."""
    decoder = Decoder(small_config()).bfloat16()
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    qwen3.to_hf(decoder, tmp_path / "hf", shard_bytes=5_000)
    return tmp_path / "hf"


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_an_import_has_the_bytes_of_a_checkpoint_of_the_whole_model(mixed, tmp_path, dtype):
    imported = convert_qwen3.import_hf(mixed, tmp_path / "run", dtype)
    verified(imported)

    model = qwen3.from_hf(mixed)
    if dtype == "bfloat16":
        model.bfloat16()
    cfg = TrainConfig(**start.completed({"init_from": str(mixed)}))
    state = TrainState(cfg, model, None, torch.device("cpu"), World())
    whole = save(state, tmp_path / "whole", {"imported_from": str(mixed)})
    for path in whole.iterdir():
        assert path.read_bytes() == (imported / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_a_killed_import_leaves_nothing_that_looks_whole(mixed, tmp_path):
    """After a killed one, the next import clears what is left."""
    output = tmp_path / "run"
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(killed_import, 1, str(mixed), str(output))
    assert {path.name for path in tmp_path.iterdir()} == {"hf", ".tmp-run"}
    verified(convert_qwen3.import_hf(mixed, output, "keep"))
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}
    assert {path.name for path in output.iterdir()} == {"origin", "step-00000000"}


def killed_import(world: World, source: str, output: str):
    """An import that is killed before its last rename."""
    rename = durable.rename

    def call(old: Path, new: Path):
        if new == Path(output):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    durable.rename = call
    convert_qwen3.import_hf(Path(source), Path(output), "keep")


def with_tokenizer(folder: Path) -> Path:
    """A Hugging Face folder of a small model and a tokenizer."""
    source = qwen_tokenizer.make(folder / "hf", ["def abc(x):\n" * 9], 260, 260, 640)
    qwen3.to_hf(Decoder(small_config()), folder / "model")
    return Path(shutil.copytree(folder / "model", source, dirs_exist_ok=True))


@pytest.fixture
def chat_model(tmp_path) -> Path:
    """A Hugging Face folder with a chat template, in both places that transformers knows."""
    source = with_tokenizer(tmp_path)
    settings = read(source / "tokenizer_config.json")
    settings |= dict(chat_template="{{ messages }}", pad_token="<|im_end|>", auto_map={})
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    return source


def test_a_run_that_starts_from_a_folder_exports_its_chat_template(chat_model, tmp_path):
    """Also if the folder is gone by then; the data decide what ends a document."""
    data = tmp_path / "chat-data"
    words = f"--input longhaul/parallel --output {data} --workers 1 --tokenizer {chat_model}"
    assert prepare.main([*words.split(), "--eod", "<|im_start|>"]) == 0
    flags = (
        f"--data {data} --dtype fp32 --device cpu --eval_every 0 --warmup_steps 0 --max_steps 1 "
        f"--context_length 64 --init_from {chat_model} --output_dir {tmp_path / 'run'}"
    )
    train.main(flags.split())
    chat_model.rename(tmp_path / "elsewhere")

    back = export(tmp_path / "run", tmp_path / "back")
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"
    settings = read(back / "tokenizer_config.json")
    assert settings["chat_template"] == "{{ messages }}"
    assert (settings["eos_token"], settings["pad_token"]) == ("<|im_start|>", "<|im_end|>")
    assert load_tokenizer(back).sha256 == Dataset(data).tokenizer_sha256


def test_generate_takes_a_hugging_face_folder(run, exported, capsys):
    """With the text of the run that it was exported from; --dtype as in other commands."""
    sampling = "--temperature 0 --device cpu --dtype fp32 --checkpoint"
    flags = f"--prompt def --max_new_tokens 1 {sampling}"
    # ids further on: the two tokenizers write bytes that are no text in two ways
    for words in (flags, f"--ids 326 --max_new_tokens 9 {sampling}"):
        texts = []
        for folder in (run, exported):
            generate.main([*words.split(), str(folder)])
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and len(texts[0]) > len("def\n")


def small_config(**changes) -> ModelConfig:
    sizes = dict(
        vocab_size=640, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
    )
    return ModelConfig(**sizes, ffn_size=40, **changes)


def test_weights_only_are_exported_with_the_end_of_a_document_that_is_given(
    imported_without_end, tmp_path
):
    words = ("--tokenizer", "none", "--eod", "<|endoftext|>")
    said = export(imported_without_end, tmp_path / "said", *words)
    ids = load_tokenizer(imported_without_end, "<|endoftext|>")
    assert read(said / "config.json")["eos_token_id"] == ids.eod_id


@pytest.fixture
def imported_without_end(tmp_path) -> Path:
    """An imported run whose tokenizer.json is alone."""
    source = with_tokenizer(tmp_path)
    (source / "tokenizer_config.json").unlink()
    convert_qwen3.main(["--input", str(source), "--output", str(tmp_path / "run")])
    return tmp_path / "run"


# ---- bad input


def test_a_run_without_a_tokenizer_says_how_to_export(tmp_path, capsys):
    qwen3.to_hf(Decoder(small_config()), tmp_path / "hf")
    convert_qwen3.main(["--input", str(tmp_path / "hf"), "--output", str(tmp_path / "run")])
    to_new = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "new")
    assert "--tokenizer none" in refused(capsys, convert_qwen3.main, to_new)

    large = qwen_tokenizer.make(tmp_path / "large", ["abc\n" * 9], 260, 700, 800)
    assert "the model 640: give --tokenizer" in refused(
        capsys, convert_qwen3.main, [*to_new, "--tokenizer", large]
    )
    without_ids = ("--tokenizer", "none", "--eod", "<|endoftext|>")
    assert "drop --eod" in refused(capsys, convert_qwen3.main, [*to_new, *without_ids])
    assert not (tmp_path / "new").exists()

    weights_only = export(tmp_path / "run", tmp_path / "new", "--tokenizer", "none")
    assert not list(weights_only.glob("tokenizer*"))


def test_another_tokenizer_than_that_of_an_imported_run_is_refused(exported, tmp_path, capsys):
    """The run knows its tokenizer only by the file next to its checkpoint."""
    convert_qwen3.main(["--input", str(exported), "--output", str(tmp_path / "run")])
    other = qwen_tokenizer.make(tmp_path / "other", ["abc\n" * 9], 260, 260, 640)
    words = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "new", "--tokenizer")
    assert str(other) in refused(capsys, convert_qwen3.main, [*words, other])
    assert not (tmp_path / "new").exists()
    convert_qwen3.main([*map(str, words), str(exported)])

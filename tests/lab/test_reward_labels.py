"""lab.reward: a reward model of labelled texts, from the command line to what GRADE reads."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from data import prepare
from data.load_tokenizer import load_tokenizer
from lab import grade
from lab import reward as program
from lab.posttrain import labels, reward
from lab.posttrain.labels import Fit, Labelled
from lab.posttrain.reward import RewardModel
from longhaul import kernels, qwen3
from model import ModelConfig
from tests import qwen_tokenizer

WORDS = ("the film", "a story", "music", "light", "was", "and", "very")
V = 320
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=48,
    init_std=0.3,
)


def texts(number: int = 300) -> list[dict]:
    """Texts with a share of good words among good and bad ones, and whether most are good."""
    draw = random.Random(0)
    found = []
    for index in range(number):
        likely = draw.choice((0.1, 0.9))
        words = draw.choices(("good", "bad"), (likely, 1 - likely), k=7)
        good, bad = words.count("good"), words.count("bad")
        words += draw.choices(WORDS, k=2)
        draw.shuffle(words)
        record = {"text": " ".join(words), "label": int(good > bad), "share": good / (good + bad)}
        found.append(record | {"asked": f"review {index}", "words": {"all": words}})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A body in `base`, with its tokenizer, and texts in texts.jsonl."""
    folder = tmp_path_factory.mktemp("reward")
    made = texts()
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in made))
    spelled = [text["text"] for text in made]
    qwen_tokenizer.make(folder / "tokenizer", spelled, learned=300, text_ids=300, padded=V)
    qwen3.to_hf(kernels.decoder(ModelConfig(**SHAPE)), folder / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "tokenizer" / name, folder / "base" / name)
    return folder


def run(folder: Path, out: Path, *more: str):
    given = ["--checkpoint", str(folder / "base"), "--data", str(folder / "texts.jsonl")]
    program.main([*given, "--output", str(out), "--device", "cpu", *more])


def loaded(out: Path) -> RewardModel:
    model = RewardModel(kernels.decoder(reward.read_config(out)))
    reward.load_into(model, out)
    return model


def rewarded(model: RewardModel, folder: Path, text: str) -> float:
    ids = load_tokenizer(folder / "base").encode(text)
    tokens_1T = torch.tensor([ids])
    model.requires_grad_(False)
    return float(model.forward_hard(tokens_1T[:, :0], tokens_1T, torch.ones(tokens_1T.shape)))


def test_the_head_learns_labels_and_grade_reads_the_folder(folder, tmp_path, capsys):
    run(folder, tmp_path / "reward", "--steps", "300")
    said = capsys.readouterr().out
    assert "270 texts are learned from, 30 are held out" in said
    assert float(said.split(" of 30 held-out")[0].split()[-1]) >= 0.9

    model = loaded(tmp_path / "reward")
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            model.body.parameters(), qwen3.from_hf(folder / "base").parameters(), strict=True
        )
    )
    good = rewarded(model, folder, "good the film good good very good")
    assert good > 0.6 > 0.4 > rewarded(model, folder, "bad the film bad bad very bad")


def test_labels_between_0_and_1_are_what_rewards_come_near(folder, tmp_path, capsys):
    fields = ["--label_field", "share", "--prompt_field", "asked"]
    run(folder, tmp_path / "reward", "--steps", "300", *fields)
    said = capsys.readouterr().out
    error, of_mean = (float(said.split(mark)[0].split()[-1]) for mark in (" from their", " if the"))
    assert error < 0.5 * of_mean


def test_a_prompt_does_not_count_and_padding_changes_nothing():
    model = RewardModel(kernels.decoder(ModelConfig(**SHAPE))).requires_grad_(False)
    long = Labelled(list(range(9)), 3, 1.0)
    short = Labelled([5, 6, 7], 0, 0.0)
    found = labels.features(model, [long, short], batch_size=2)
    tokens_1T = torch.tensor([long.ids])
    hidden_TD = model.body.hidden(tokens_1T)[0]
    torch.testing.assert_close(found[0], hidden_TD[3:].mean(0))
    alone = labels.features(model, [short], batch_size=1)
    torch.testing.assert_close(found[1:], alone)


def test_the_head_takes_over_the_scale_of_its_features():
    """It finds the logistic regression that made the labels, whatever the features' scale."""
    generator = torch.Generator().manual_seed(0)
    mean_ND = torch.randn(4000, 32, generator=generator) * 100 + 50
    wanted_D = torch.randn(32, generator=generator) / 100
    logit_N = (mean_ND - 50) @ wanted_D
    label_N = (torch.rand(4000, generator=generator) < logit_N.sigmoid()).float()
    model = RewardModel(kernels.decoder(ModelConfig(**SHAPE))).requires_grad_(False)
    labels.fit_head(model, mean_ND, label_N, labels.F.binary_cross_entropy_with_logits, Fit())
    error_N = model.head(mean_ND) - logit_N
    assert error_N.std() < 0.25 * logit_N.std() and abs(error_N.mean()) < 0.2


@pytest.mark.parametrize(
    "line, named",
    [
        ("no json", "texts.jsonl:2"),
        ("[1]", "texts.jsonl:2"),
        ('{"text": "a"}', "texts.jsonl:2"),
        ('{"text": "", "label": 1}', "texts.jsonl:2"),
        ('{"text": "a", "label": 2}', "label '2'"),
        ('{"text": "a", "label": NaN}', "label 'nan'"),
        (r'{"text": "a\ud800", "label": 1}', "texts.jsonl:2"),
        ('{"text": "a", "label": 0}', "1 text(s)"),  # too few
        ('{"text": "a", "label": 1}\n' * 12, "label 1"),  # all of one label
    ],
)
def test_a_line_that_is_wrong_is_named(folder, tmp_path, capsys, line, named):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "label": 1}\n' + line + "\n")
    refused(folder, tmp_path, capsys, named, "--data", str(path))


def test_a_disk_without_room_is_found_before_anything_is_computed(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("base.durable.free_bytes", lambda folder: 100)
    data = str(folder / "texts.jsonl")
    needed = 4 * ModelConfig(**SHAPE).num_params()
    refused(folder, tmp_path, capsys, f"needs about {needed:,} bytes, and 100 are", "--data", data)


@pytest.mark.parametrize(
    "value, said",
    [
        (float("nan"), "norm.weight holds NaN or infinity"),
        (3e38, "of 270 of 270 texts are not finite: give a --checkpoint that has not diverged"),
    ],
)
def test_a_body_that_is_not_finite_makes_no_reward(folder, tmp_path, capsys, value, said):
    decoder = kernels.decoder(ModelConfig(**SHAPE))
    decoder.norm.weight.data.fill_(value)
    body = tmp_path / "body"
    qwen3.to_hf(decoder, body)
    given = ["--checkpoint", str(body), "--tokenizer", str(folder / "base")]
    refused(folder, tmp_path, capsys, said, *given, "--data", str(folder / "texts.jsonl"))


def test_features_that_hardly_vary_get_no_weight():
    generator = torch.Generator().manual_seed(0)
    mean_ND = torch.randn(400, 32, generator=generator)
    label_N = (mean_ND[:, 0] > 0).float()
    mean_ND[:, 5:7] = 3 + 1e-5 * mean_ND[:, :1]  # which would tell the labels, too
    loss = labels.F.binary_cross_entropy_with_logits
    model = RewardModel(kernels.decoder(ModelConfig(**SHAPE))).requires_grad_(False)
    labels.fit_head(model, mean_ND, label_N, loss, Fit(steps=50))
    assert torch.equal(model.weight[0, 5:7], torch.zeros(2))
    assert model.weight.abs().max() < 10 and model.weight[0, 0] > 0
    with pytest.raises(ValueError, match="the same for all texts"):
        labels.fit_head(model, mean_ND[:1].repeat(400, 1), label_N, loss, Fit(steps=50))


def refused(folder: Path, tmp_path: Path, capsys, said: str, *given: str):
    """The program ends with one line, and nothing is written."""
    flags = {"--checkpoint": str(folder / "base"), "--output": str(tmp_path / "out")}
    flags |= dict(zip(given[::2], given[1::2], strict=True))
    with pytest.raises(SystemExit) as stop:
        program.main([word for pair in flags.items() for word in pair] + ["--device", "cpu"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


def test_a_body_without_a_tokenizer_needs_one(folder, tmp_path, capsys):
    body = tmp_path / "body"
    qwen3.to_hf(kernels.decoder(ModelConfig(**SHAPE)), body)
    data = str(folder / "texts.jsonl")
    said = "has no tokenizer: give --tokenizer PATH"
    refused(folder, tmp_path, capsys, said, "--checkpoint", str(body), "--data", data)


@pytest.mark.slow
def test_grade_trains_by_it_and_draws_no_padding(folder, tmp_path, capsys):
    """The vocabulary of 320 ids has 15 or so that the tokenizer does not have."""
    run(folder, tmp_path / "reward", "--steps", "50")
    asked = ["--input", str(folder / "texts.jsonl"), "--text_field", "asked"]
    data = ["--tokenizer", str(folder / "base"), "--output", str(tmp_path / "asked")]
    assert prepare.main([*asked, *data]) == 0
    capsys.readouterr()

    paths = f"--checkpoint {folder}/base --reward_checkpoint {tmp_path}/reward"
    flags = "--context_length 32 --max_new_tokens 4 --gumbel_topk 0 --max_steps 1 --eval_every 0"
    where = f"--data {tmp_path}/asked --output_dir {tmp_path}/run --device cpu --dtype fp32"
    grade.main(f"{paths} {flags} {where}".split())
    tokenizer = load_tokenizer(folder / "base")
    said = f"mixtures: over the tokenizer's {tokenizer.vocab_size} ids; the KL is over the model's"
    assert said in capsys.readouterr().out and tokenizer.vocab_size < V
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < record["reward"] < 1 and 0 < record["topk_mass"] < 1

"""longhaul/evals/harness.py and scripts/lm_eval.py against the harness's own HFLM, offline.

The model is random, and the tasks read files that are made here. Whatever needs lm_eval skips
without it.
"""

import functools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data import tokenizer as sentencepiece
from data.load_tokenizer import load_tokenizer
from longhaul import kernels, qwen3, step
from longhaul.checkpoint import save
from longhaul.config import TrainConfig
from model import Decoder, ModelConfig, NSAConfig
from scripts import convert_qwen3
from scripts import lm_eval as command
from tests import qwen_tokenizer
from tests.kit import refused

ROOT = Path(__file__).parents[1]
WINDOW = 256
EOD = 450
PADDED = 464
BYTES = 258  # a sentencepiece model begins with two control tokens and the bytes
SMALL = dict(
    vocab_size=PADDED,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    rope_original_context=WINDOW,
    init_std=0.15,
)
SIZES = dict(cmp_block=8, cmp_stride=4, sel_block=8, sel_count=4, window=16)
SPARSE = dict(attention=NSAConfig(**SIZES))
SOURCE = """
task: {name}
output_type: {kind}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
num_fewshot: 0
"""
CHOICE = r"""
doc_to_text: "Q: {{question}} \nA:"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXT = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
WRITE = r"""
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\n", "e", ". ", "<|im_end|>"]
  max_gen_toks: 24
metric_list:
  - metric: exact_match
"""
KINDS = {
    "choice": ("multiple_choice", CHOICE),
    "text": ("loglikelihood_rolling", TEXT),
    "write": ("generate_until", WRITE),
}


def documents() -> list[str]:
    """Texts that a tokenizer is trained on."""
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]


def installed(name: str):
    """The package, or a skipped test that says what it lacks."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


# ---- a model and three tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a random model, with a tokenizer."""
    root = tmp_path_factory.mktemp("lm_eval")
    tokenizer = qwen_tokenizer.make(
        root / "tokenizer", documents(), 400, text_ids=EOD, padded=PADDED
    )

    decoder = kernels.decoder(ModelConfig(**SMALL), seed=1)
    padding = list(range(load_tokenizer(tokenizer).vocab_size, PADDED))
    sampling = dict(suppress_tokens=padding)
    qwen3.to_hf(decoder, root / "model", context=WINDOW, eod_id=EOD, sampling=sampling)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, root / "model" / name)
    return root / "model"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder with a task of each kind."""
    root = tmp_path_factory.mktemp("tasks")
    words = (ROOT / "docs" / "DATA.md").read_text(encoding="utf-8").split()
    words = [word for word in words if len(word) <= 8]  # 45 of any text fit into the window
    draw = random.Random(0)

    def phrase(*lengths: int) -> str:
        length = draw.choice(lengths)
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    rows = {
        "choice": [
            dict(
                question=phrase(3, 9, 45),
                choices=[phrase(1, 1, 2, 3) for _ in range(4)],
                answer=draw.randrange(4),
            )
            for _ in range(6)
        ],
        "text": [dict(text=phrase(length)) for length in (1, 40, 150, 300)]
        + [dict(text="  é😀\n\tx ")],
        "write": [dict(prompt=phrase(1, 9, 25), answer=phrase(2)) for _ in range(6)],
    }
    for name, (kind, rest) in KINDS.items():
        file = root / f"{name}.jsonl"
        lines = [json.dumps(document) + "\n" for document in rows[name]]
        file.write_text("".join(lines), encoding="utf-8")
        task = SOURCE.format(name=name, kind=kind, file=file) + rest
        (root / f"{name}.yaml").write_text(task, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def adapter(folder):
    """The model behind the harness's interface."""
    installed("lm_eval")
    from longhaul.evals.harness import LonghaulLM

    return LonghaulLM(qwen3.from_hf(folder), load_tokenizer(folder), WINDOW, batch_size=5)


def ids(count: int, seed: int) -> list[int]:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(0, PADDED, (count,), generator=make).tolist()


def pairs_of(contexts: list[int], continuations: list[int]) -> list[tuple]:
    """Each context of so many ids with each continuation, as the harness gives them."""
    return [
        (None, ids(context, context), ids(continuation, 1000 * number + context))
        for context in contexts
        for number, continuation in enumerate(continuations)
    ]


def dense(model: Decoder, request: tuple) -> tuple[float, bool]:
    """The answer from all logits in float64."""
    _, context, continuation = request
    tokens_1T = torch.tensor([context + continuation])
    with torch.no_grad():
        z_TV = model(tokens_1T)[0, len(context) - 1 : -1].double()
    target_T = torch.tensor(continuation)
    logprob_T = z_TV.log_softmax(-1).gather(1, target_T[:, None])
    return float(logprob_T.sum()), bool((z_TV.argmax(-1) == target_T).all())


def asked(*arguments: tuple) -> list:
    """Requests as the harness makes them."""
    from lm_eval.api.instance import Instance

    return [
        Instance("generate_until", {}, argument, 0, ("mine", number, 1))
        for number, argument in enumerate(arguments)
    ]


# ---- log-likelihoods


def test_packed_requests_have_the_log_likelihoods_of_dense_logits(adapter):
    requests = pairs_of([1, 3, 40, 100], [1, 5, 17])
    found = adapter._loglikelihood_tokens(requests, disable_tqdm=True)
    for answer, request in zip(found, requests):
        expected, greedy = dense(adapter.model, request)
        assert answer[0] == pytest.approx(expected, abs=1e-4)
        assert answer[1] == greedy


def test_a_greedy_continuation_is_called_greedy(adapter):
    from longhaul.generate import generate

    context = ids(9, 1)
    greedy = list(generate(adapter.model, context, 4, temperature=0))
    other = [*greedy[:3], (greedy[3] + 1) % PADDED]
    requests = [(None, context, greedy), (None, context, other)]
    found = adapter._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [answer[1] for answer in found] == [True, False]


def test_sparse_attention_answers_too(folder):
    installed("lm_eval")
    from longhaul.evals.harness import LonghaulLM

    model = kernels.decoder(ModelConfig(**SMALL | SPARSE), seed=2)
    lm = LonghaulLM(model, load_tokenizer(folder), WINDOW)
    requests = pairs_of([150], [1, 5])
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    for answer, request in zip(found, requests):
        assert answer[0] == pytest.approx(dense(model, request)[0], abs=1e-4)


def test_no_tensor_has_the_size_of_the_logits(adapter):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            tensors = [x for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x)]
            self.elements = max([self.elements, *(x.numel() for x in tensors)])
            return out

    requests = pairs_of([200], [1])
    with Largest() as largest:
        adapter._loglikelihood_tokens(requests, disable_tqdm=True)
    assert 0 < largest.elements < 200 * PADDED / 2


# ---- what does not fit


def test_what_the_window_does_not_hold_is_refused_and_not_cut(adapter):
    # the last token of a continuation is not read
    adapter._loglikelihood_tokens(pairs_of([200], [WINDOW - 199]), disable_tqdm=True)
    with pytest.raises(ValueError, match=f"{WINDOW + 1} tokens"):
        adapter._loglikelihood_tokens(pairs_of([200], [WINDOW - 198]), disable_tqdm=True)
    with pytest.raises(ValueError, match="no token"):
        adapter._loglikelihood_tokens([(None, [1, 2], [])], disable_tqdm=True)

    count = len(adapter.tok_encode("x y z"))
    with pytest.raises(ValueError, match=f"{WINDOW + 1} tokens"):
        written(adapter, "x y z", until=[], max_gen_toks=WINDOW - count + 1)


# ---- generation


def written(adapter, prompt: str, **settings) -> str:
    (text,) = adapter.generate_until(asked((prompt, settings)), disable_tqdm=True)
    return text


def test_generation_is_cut_before_the_first_stop_string(adapter):
    whole = written(adapter, "A run", until=[], max_gen_toks=40)
    assert len(whole) > 10
    stop = whole[4:6]
    assert written(adapter, "A run", until=[stop], max_gen_toks=40) == whole.split(stop)[0]
    assert written(adapter, "A run", until=stop, max_gen_toks=40) == whole.split(stop)[0]


def test_generation_ends_at_a_special_token_that_is_a_stop_string(adapter, monkeypatch):
    from longhaul.evals import harness

    tokenizer = adapter.own_tokenizer
    (a,) = tokenizer.encode("a")
    end = EOD + 2
    assert tokenizer.spell([a, end]) == "a<|im_end|>" and tokenizer.decode([a, end]) == "a"

    tokens = [a, end, a]
    monkeypatch.setattr(harness, "generate", lambda *args, **kwargs: iter(tokens))
    assert written(adapter, "x", until=["<|im_end|>"], max_gen_toks=9) == "a"
    assert written(adapter, "x", until=[], max_gen_toks=9) == "aa"


def test_sampling_repeats_and_differs_between_requests(adapter):
    settings = dict(until=[], max_gen_toks=12, do_sample=True, temperature=1.0)
    requests = asked(("The", settings), ("The", settings))
    one, other = adapter.generate_until(requests, disable_tqdm=True)
    assert one != other
    assert adapter.generate_until(requests, disable_tqdm=True) == [one, other]


def test_settings_of_generation_that_do_nothing_are_taken_and_others_refused(adapter):
    assert written(adapter, "A", until=[], max_gen_toks=3, num_beams=1, repetition_penalty=1.0)
    with pytest.raises(ValueError, match="num_beams"):
        written(adapter, "A", until=[], num_beams=4)
    with pytest.raises(ValueError, match="do_sample"):
        written(adapter, "A", until=[], do_sample=True)


def test_an_empty_prompt_follows_the_end_of_a_document(adapter):
    from longhaul.generate import generate

    size = adapter.own_tokenizer.vocab_size
    assert EOD < size < PADDED
    tokens = list(generate(adapter.model, [EOD], 5, temperature=0, vocab_size=size))
    expected = adapter.own_tokenizer.decode(tokens)
    assert expected and written(adapter, "", until=[], max_gen_toks=5) == expected


# ---- the same numbers as HFLM


def evaluated(lm, tasks: Path) -> dict:
    """All results of the three tasks, with a sample for each document."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return evaluate(lm, manager.load(list(KINDS)), bootstrap_iters=10)


@pytest.fixture(scope="module")
def dense_run(folder, tmp_path_factory) -> Path:
    """The folder of a run that was imported, with a tokenizer of Hugging Face."""
    run = tmp_path_factory.mktemp("run") / "run"
    convert_qwen3.main(["--input", str(folder), "--output", str(run)])
    return run


@pytest.fixture(scope="module")
def pieces_run(tmp_path_factory) -> Path:
    """The same with a sentencepiece model."""
    run = tmp_path_factory.mktemp("run") / "run"
    decoder = kernels.decoder(ModelConfig(**SMALL), seed=2)
    with torch.no_grad():  # no single bytes: transformers spells those that are no UTF-8 otherwise
        decoder.embed.weight[:BYTES] = 0
    qwen3.to_hf(decoder, run.with_name("model"), context=WINDOW)
    convert_qwen3.main(["--input", str(run.with_name("model")), "--output", str(run)])
    sentencepiece.train(documents(), 420, run / "tokenizer.model")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense_run", "pieces_run"])
def test_answers_and_metrics_are_those_of_hflm_on_the_exported_folder(
    name, tasks, tmp_path, request
):
    run = request.getfixturevalue(name)
    installed("lm_eval")
    installed("accelerate")
    from lm_eval.models.huggingface import HFLM

    from longhaul.evals.harness import LonghaulLM

    source = command.Source.open(run)
    model = source.load_in(torch.device("cpu"), "float32")
    lm = LonghaulLM(model, command.tokenizer_of(source), WINDOW, batch_size=5)
    convert_qwen3.main(["--checkpoint", str(run), "--output", str(tmp_path / "exported")])
    # HFLM adds log-likelihoods in fp32, in which 7,683 has steps of 0.0005, unless it is told
    theirs = HFLM(
        pretrained=str(tmp_path / "exported"),
        device="cpu",
        dtype="float32",
        softmax_dtype="float64",
        max_length=WINDOW,
        batch_size=3,
    )
    assert theirs.config.max_position_embeddings == source.reach >= WINDOW
    assert theirs.prefix_token_id == lm.prefix_token_id

    ours = evaluated(lm, tasks)
    reference = evaluated(theirs, tasks)
    texts = {sample["resps"][0][0] for sample in ours["samples"]["write"]}
    assert len(texts) > 3
    for task in KINDS:
        compare(ours["samples"][task], reference["samples"][task])
        for name, value in reference["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-6), name


def compare(ours: list[dict], theirs: list[dict]):
    """Every answer to every document is the same, log-likelihoods within 1e-4."""
    assert len(ours) == len(theirs) >= 5
    for one, other in zip(ours, theirs):
        assert one["arguments"] == other["arguments"]
        for [answer], [expected] in zip(one["resps"], other["resps"], strict=True):
            if isinstance(expected, str):
                assert answer == expected
            elif isinstance(expected, tuple):
                assert answer[0] == pytest.approx(expected[0], abs=1e-4)
                assert answer[1] == expected[1]
            else:
                assert answer == pytest.approx(expected, abs=1e-4)


# ---- the command


def test_a_dense_model_is_left_to_the_harness(folder, dense_run, capsys, monkeypatch):
    asking = ["--tasks", "arc_easy"]
    monkeypatch.setattr(command, "require_extra", lambda: None)
    said = refused(capsys, command.main, ["--checkpoint", folder, *asking])
    assert f"lm_eval --model hf --model_args pretrained={folder}," in said
    said = refused(capsys, command.main, ["--checkpoint", dense_run, *asking])
    assert f"scripts.convert_qwen3 --checkpoint {dense_run}" in said

    monkeypatch.undo()
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    said = refused(capsys, command.main, ["--checkpoint", folder, *asking])
    assert "pip install lm_eval" in said


@pytest.fixture(scope="module")
def sparse_run(folder, tmp_path_factory) -> Path:
    """The folder of a run with sparse attention."""
    run = tmp_path_factory.mktemp("sparse")
    shape = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    cfg = TrainConfig(
        model_size="tiny",
        vocab_size=PADDED,
        model_overrides=tuple(f"{name}={size}" for name, size in shape.items()),
        attention_type="nsa",
        blocks=tuple(f"{name}={size}" for name, size in SIZES.items()),
        context_length=WINDOW,
        dtype="fp32",
    )
    save.save(step.build(cfg, cfg.model(), "cpu"), run, {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, run / name)
    return run


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(
    sparse_run, tasks, tmp_path, capsys, monkeypatch
):
    harness = installed("lm_eval.tasks")
    own_only = functools.partial(harness.TaskManager, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", own_only)  # those of the harness take long to list
    file = tmp_path / "results.json"
    words = f"--checkpoint {sparse_run} --tasks choice,write --include_path {tasks} --limit 3"
    command.main([*words.split(), "--device", "cpu", "--output", str(file)])

    said = capsys.readouterr().out
    assert "|choice|" in said and "exact_match" in said and str(file) in said
    results = json.loads(file.read_text())
    assert 0 <= results["results"]["choice"]["acc,none"] <= 1
    assert results["n-samples"]["choice"]["effective"] == 3
    assert results["config"]["model_args"]["window"] == WINDOW


def test_names_and_patterns_of_tasks_are_matched(tasks):
    installed("lm_eval")
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=str(tasks), include_defaults=False)
    found = command.load_tasks(["*e", "choice"], known)
    assert [task.config.task for task in found] == ["choice", "write"]
    with pytest.raises(ValueError, match="choise"):
        command.load_tasks(["choice", "choise"], known)


class Failing:
    """A manager whose tasks cannot be loaded."""

    def __init__(self, error: Exception):
        self.error = error

    def load(self, name):
        raise self.error


@pytest.mark.parametrize("error", [ConnectionError("no\nroute"), KeyError("x"), ImportError("x")])
def test_a_task_that_cannot_be_loaded_is_answered_in_one_line(error):
    with pytest.raises(ValueError, match=f"task mine .*{type(error).__name__}") as said:
        command.load_task("mine", Failing(error))
    assert "\n" not in str(said.value)

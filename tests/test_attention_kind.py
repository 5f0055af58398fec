"""A third kind of attention: docs/ARCHITECTURE.md adds sliding-window attention, and this file runs
the document's own code.
"""

import re
from pathlib import Path

import pytest
import torch

import model
from longhaul import cli, step
from longhaul.config import TrainConfig
from longhaul.flops import keys_read, train_flops
from longhaul.generate import generate
from longhaul.memory.estimate import estimate, saved_per_layer
from longhaul.memory.reconcile import allocator_peak
from longhaul.memory.simulate import simulate
from model import Decoder, KVCache, ModelConfig
from tests import oracle
from tests.ranks import run_ranks
from tests.tiers import few_fast

DOCUMENT = Path(__file__).parent.parent / "docs" / "ARCHITECTURE.md"
SHAPE = {
    "vocab_size": 97,
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
}
TINY = {"model_size": "tiny", "attention_type": "window", "context_length": 2048}


def example() -> str:
    """The first block of Python code of the document."""
    return re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]


def add_window() -> type[model.Attention]:
    """Run the example and return its class."""
    names: dict = {}
    exec(compile(example(), str(DOCUMENT), "exec"), names)
    return names["SlidingWindowAttention"]


@pytest.fixture(autouse=True)
def kind():
    """The example's class, in the table during a test only, in place of one that a reader added."""
    before = dict(model.ATTENTIONS)
    yield add_window()
    model.ATTENTIONS.clear()
    model.ATTENTIONS.update(before)


def build(**changes) -> Decoder:
    return Decoder(ModelConfig.preset("tiny", attention_type="window", **SHAPE | changes), seed=1)


def tokens(rows: int = 2, length: int = 200) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def test_the_example_is_one_class_and_one_entry_of_at_most_forty_lines(kind):
    assert len(example().splitlines()) <= 40
    assert example().count("class ") == example().count("ATTENTIONS[") == 1
    assert issubclass(kind, model.Attention)


def test_it_equals_a_dense_float64_reference_forward_and_backward_with_packed_documents(kind):
    decoder, x = build(), tokens()
    lengths = [[130, 1, 69], [12, 188]]
    ids = [[i for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    logits = decoder(x, doc_ids=torch.tensor(ids))

    weights = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in decoder.named_parameters()
    }

    def attention(q, k, v):
        return oracle.windowed_attention(q, k, v, kind.window)

    truth = [
        oracle.decoder_logits(weights, decoder.config, document, attention)
        for row, sizes in zip(x, lengths, strict=True)
        for document in row.split(sizes)
    ]
    truth = torch.cat(truth).view(logits.shape)
    assert relative(logits, truth) <= 1e-5

    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((logits * weight).sum(), decoder.parameters())
    wanted = torch.autograd.grad((truth * weight.double()).sum(), list(weights.values()))
    for name, grad, want in zip(weights, grads, wanted, strict=True):
        assert relative(grad, want) <= 2e-5, name


def test_the_reference_notices_a_window_that_is_one_token_too_wide(kind):
    decoder, x = build(), tokens(1)
    narrow = decoder(x)
    kind.window += 1
    assert relative(decoder(x), narrow.double()) > 1e-3


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_it_trains(checkpointing):
    overrides = tuple(f"{name}={size}" for name, size in SHAPE.items() if name != "vocab_size")
    cfg = TrainConfig(
        model_size="tiny",
        attention_type="window",
        model_overrides=overrides,
        vocab_size=97,
        context_length=200,
        dtype="fp32",
        lr=1e-2,
        warmup_steps=0,
        max_steps=20,
        gradient_checkpointing=checkpointing,
    )
    state = step.build(cfg, cfg.model(), "cpu")
    x = tokens(2, 201)
    batch = {
        "tokens_BT": x[:, :-1],
        "labels_BT": x[:, 1:],
        "doc_ids": (torch.arange(200) >= 90).expand(2, -1),
    }
    losses = [float(step.train_step(state, [batch]).loss) for _ in range(20)]
    assert losses[-1] < losses[0] - 1


@torch.no_grad()
def test_decoding_over_a_cache_equals_the_full_forward():
    decoder, x = build(), tokens()
    full = decoder(x)
    for parts in ([150] + [1] * 50, [1] * 200, [100, 60, 1, 39]):
        cache = KVCache(decoder.config, 2, 200)
        decoded = [decoder(part, cache=cache) for part in x.split(parts, dim=1)]
        assert (torch.cat(decoded, 1) - full).abs().max() <= 1e-5 * full.abs().max(), parts


@torch.no_grad()
def test_sampling_is_greedy_decoding_of_the_full_forward():
    decoder, prompt = build(), tokens(1, 90)[0].tolist()
    ids = list(prompt)
    for token in generate(decoder, prompt, 8, temperature=0):
        assert decoder(torch.tensor([ids]))[0, -1].argmax() == token
        ids.append(token)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_simulated_peak_is_what_the_allocator_records(checkpointing):
    cfg = TrainConfig(**TINY, dtype="fp32", gradient_checkpointing=checkpointing)
    predicted = simulate(cfg, target="cpu").peak()[0]
    assert predicted == pytest.approx(allocator_peak(cfg), rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    few_fast([{"gradient_checkpointing": "full"}, {}, {"loss": "standard"}], 3),
    ids=str,
)
def test_the_closed_form_is_within_a_thousandth_of_the_simulation(changes):
    cfg = TrainConfig(**TINY, model_overrides=("num_layers=3",), **changes)
    assert estimate(cfg, cfg.model()).peak == pytest.approx(simulate(cfg).peak()[0], rel=1e-3)


def test_flops_and_parameters_follow_the_class(kind):
    config = build().config
    positions = torch.arange(150)
    met = keys_read(config, positions)
    assert met.tolist() == [min(t + 1, kind.window) for t in range(150)]
    assert config.num_params() == sum(p.numel() for p in build().parameters())

    standard = ModelConfig.preset("tiny", **SHAPE)
    assert train_flops(config, 150, 0.0) == train_flops(standard, 150, 0.0)
    assert saved_per_layer(config, 150, 2) > saved_per_layer(standard, 150, 2)


def test_the_command_line_takes_it_and_context_parallelism_says_what_it_cannot_do():
    cfg = cli.parse(TrainConfig, ["--model_size", "tiny", "--attention_type", "window"], "")
    assert cfg.model().attention_type == "window"
    with pytest.raises(ValueError, match="gather_kv cannot serve window attention, which is not"):
        TrainConfig(**TINY, context_parallel_size=2, context_parallel_mode="gather_kv")


def shared_loss(world, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss of rows that the ranks share and a gradient, both summed over the ranks."""
    add_window()
    cfg = TrainConfig(
        model_size="tiny", attention_type="window", context_parallel_size=world.size, dtype="fp32"
    )
    config = ModelConfig.preset("tiny", attention_type="window", **SHAPE)
    state = step.build(cfg, config, "cpu", world)
    loss = state.model(x[:, :-1], x[:, 1:], doc_ids=(torch.arange(200) >= 90).expand(2, -1))
    loss.backward()
    shares = [loss.detach(), state.model.layers[0].attention.k_proj.weight.grad]
    for share in shares:
        torch.distributed.all_reduce(share)
    return shares


def test_two_ranks_that_share_rows_give_the_loss_and_gradient_of_one():
    x = tokens(2, 201)
    decoder = Decoder(ModelConfig.preset("tiny", attention_type="window", **SHAPE), seed=0)
    loss = decoder(x[:, :-1], x[:, 1:], doc_ids=(torch.arange(200) >= 90).expand(2, -1))
    loss.backward()
    want = decoder.layers[0].attention.k_proj.weight.grad
    for shared, grad in run_ranks(shared_loss, 2, x):
        assert shared == pytest.approx(loss.item(), rel=1e-5)
        assert relative(grad, want.double()) <= 2e-5

"""Scores of tokens: against a dense softmax, in parts over the cache, by ranks that share rows."""

import functools

import pytest
import torch

from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.evals.score import Item, ModelScorer, score_all
from model import IGNORE
from tests.ranks import run_ranks
from tests.test_context import SPARSE

T = 64
SMALL = dict(
    model_size="tiny",
    vocab_size=211,
    context_length=T,
    dtype="fp32",
    device="cpu",
    model_overrides=("num_layers=2", "hidden_size=64", "ffn_size=96", "num_kv_heads=4"),
)
NSA = {name: SPARSE[name] for name in ("attention_type", "blocks")}
INDEXED = dict(attention_type="indexed", blocks=("count=2", "block=8", "head_dim=32"))


def item(seed: int = 0, rows: int = 1, packed: bool = False) -> Item:
    make = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 211, (rows, T), generator=make)
    labels = torch.randint(0, 211, (rows, T), generator=make)
    labels[:, ::3] = IGNORE
    doc_ids = (torch.arange(T)[None] >= 37).long().expand(rows, T) if packed else None
    return Item(tokens, labels, doc_ids=doc_ids)


def built(changes: dict, world=step.ONE_PROCESS):
    cfg = TrainConfig(**SMALL | changes)
    mesh = dist.data_mesh(world, torch.device("cpu"), 1)
    return step.build(cfg, cfg.model(), "cpu", world, mesh)


def with_likely_labels(model, asked: Item) -> Item:
    """Every second label is the most likely token, so that there are hits and misses."""
    with torch.no_grad():
        z = model(asked.tokens_BT, doc_ids=asked.doc_ids)
    labels = asked.labels_BT.clone()
    labels[:, 1::2] = z.argmax(-1)[:, 1::2]
    return asked._replace(labels_BT=labels)


# --------------------------------------------------------------------------- one process


@pytest.mark.parametrize("changes", [{}, NSA], ids=["standard", "nsa"])
@pytest.mark.parametrize("packed", [False, True])
def test_scores_are_those_of_a_dense_softmax(changes, packed):
    model = built(changes).model
    asked = with_likely_labels(model, item(rows=2, packed=packed))
    scores = ModelScorer(model, "cpu").score(asked, hits=True)

    with torch.no_grad():
        z = model(asked.tokens_BT, doc_ids=asked.doc_ids).double()
    valid = asked.labels_BT != IGNORE
    labels = asked.labels_BT.clamp(min=0)
    expected = -z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert scores.nll_BT.dtype == torch.float64
    torch.testing.assert_close(scores.nll_BT, expected.masked_fill(~valid, 0), atol=2e-6, rtol=2e-6)
    hit = (z.argmax(-1) == asked.labels_BT) & valid
    assert torch.equal(scores.hit_BT, hit)
    assert 0 < hit.sum() < valid.sum()


def test_losses_without_hits_are_the_same_and_those_of_training():
    state = built({})
    asked = item(packed=True)
    scorer = ModelScorer(state.model, "cpu")
    losses = scorer.score(asked)
    assert losses.hit_BT is None
    torch.testing.assert_close(losses.nll_BT, scorer.score(asked, hits=True).nll_BT)

    mean = state.model(asked.tokens_BT, asked.labels_BT, doc_ids=asked.doc_ids)
    count = int((asked.labels_BT != IGNORE).sum())
    assert mean.item() == pytest.approx(float(losses.nll_BT.sum()) / count, rel=1e-6)


@pytest.mark.parametrize("chunk, packed", [(1, True), (7, False), (7, True), (100, True)])
def test_a_row_in_parts_over_the_cache_has_the_scores_of_the_whole_row(chunk, packed):
    model = built({}).model
    asked = with_likely_labels(model, item(rows=2, packed=packed))
    whole = ModelScorer(model, "cpu").score(asked, hits=True)
    parts = ModelScorer(model, "cpu", chunk).score(asked, hits=True)
    torch.testing.assert_close(parts.nll_BT, whole.nll_BT, atol=1e-5, rtol=1e-5)
    assert torch.equal(parts.hit_BT, whole.hit_BT)


def test_attention_that_reads_rows_at_once_does_not_pass_in_parts():
    with pytest.raises(ValueError, match="nsa .* chunk 0"):
        ModelScorer(built(NSA).model, "cpu", 16)


def test_a_row_without_a_question_has_zeros():
    asked = item()
    nothing = asked._replace(labels_BT=torch.full_like(asked.labels_BT, IGNORE))
    scores = ModelScorer(built({}).model, "cpu").score(nothing, hits=True)
    assert not scores.nll_BT.any() and not scores.hit_BT.any()


@pytest.mark.slow
def test_scoring_compiles_nothing(monkeypatch):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiling = functools.partial(torch.compile, backend=counter)
    monkeypatch.setattr(torch, "compile", compiling)
    model = built(dict(compile=True)).model
    whole = item()
    scorer = ModelScorer(model, "cpu")
    for length in (16, 24, 40, T):
        scorer.score(Item(*(x[:, :length] for x in whole[:2])), hits=True)
    assert counter.frame_count == 0

    model(whole.tokens_BT, whole.labels_BT)
    assert counter.frame_count > 0


# --------------------------------------------------------------------------- several ranks


SETTINGS = [
    {},
    NSA,
    dict(context_parallel_size=2, context_parallel_mode="ulysses"),
    dict(context_parallel_size=2, context_parallel_mode="gather_kv"),
    NSA | dict(context_parallel_size=2),
    INDEXED,
]


def scores_of(world: dist.World, changes: dict) -> list:
    state = built(changes, world)
    items = [item(seed, packed=seed % 2 == 0) for seed in range(3)]
    scorer = ModelScorer(state.model, "cpu")
    ranks_per_row = state.cfg.context_ranks
    found = score_all(scorer, items, hits=True, world=world, ranks_per_row=ranks_per_row)
    return [(scores.nll_BT, scores.hit_BT) for scores in found]


def scores_of_all(world: dist.World, settings: list[dict]) -> list:
    return [scores_of(world, changes) for changes in settings]


@pytest.mark.slow
def test_every_rank_has_the_scores_that_one_process_has():
    expected = []
    for changes in SETTINGS:
        alone = {k: v for k, v in changes.items() if not k.startswith("context_parallel")}
        expected.append(scores_of(step.ONE_PROCESS, alone))

    for of_rank in run_ranks(scores_of_all, 2, SETTINGS):
        for found, wanted in zip(of_rank, expected, strict=True):
            assert len(found) == 3
            for (nll, hit), (wanted_nll, wanted_hit) in zip(found, wanted, strict=True):
                torch.testing.assert_close(nll, wanted_nll, atol=5e-6, rtol=5e-6)
                assert torch.equal(hit, wanted_hit)

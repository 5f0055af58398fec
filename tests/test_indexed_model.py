"""Indexed attention in the decoder: the indexer's equations, packing, decoding, the warm-up, the
loss in training, levers, checkpoints, weights of other models.
"""

import dataclasses

import pytest
import torch

from longhaul import kernels, optim, qwen3, step
from longhaul.checkpoint import load, resume, save
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import GPU_FLOPS, keys_read, train_flops, train_operations
from longhaul.generate import generate
from longhaul.kinds import attention_kind
from longhaul.memory import plan as planner
from longhaul.memory.estimate import estimate
from longhaul.memory.needs import largest
from longhaul.memory.reconcile import allocator_peak
from longhaul.memory.simulate import simulate
from longhaul.sparse.indexed.layer import IndexerConfig, own_losses
from model import Decoder, ModelConfig, Standard
from tests import indexed_oracle, oracle
from tests.tiers import slow

SIZES = dict(budget=24, r=4, heads=3, head_dim=24)  # chooses from 28 tokens on
SHAPE = dict(vocab_size=97, num_layers=2, hidden_size=64, num_heads=4, head_dim=16, ffn_size=96)
BUDGET_OF_A_ROW = ("budget=400", "heads=3", "head_dim=24")


def build(seed=1, **changes) -> Decoder:
    settings = SHAPE | dict(attention=IndexerConfig(**SIZES)) | changes
    return kernels.decoder(ModelConfig.preset("tiny", **settings), seed=seed)


def tokens(rows=2, length=120, seed=0) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(seed))


def settings(**changes) -> TrainConfig:
    overrides = tuple(f"{name}={size}" for name, size in SHAPE.items() if name != "vocab_size")
    base = dict(
        model_size="tiny",
        attention_type="indexed",
        indexer=tuple(f"{name}={size}" for name, size in SIZES.items()),
        model_overrides=overrides,
        vocab_size=97,
        context_length=120,
        dtype="fp32",
        lr=1e-2,
        warmup_steps=0,
        max_steps=40,
    )
    return TrainConfig(**base | changes)


def batch(rows=2, seed=0) -> dict:
    x = tokens(rows, 121, seed)
    ids = (torch.arange(120) >= 50).expand(rows, -1)
    return {"tokens_BT": x[:, :-1], "labels_BT": x[:, 1:], "doc_ids": ids}


def trained(cfg: TrainConfig, steps: int) -> tuple[step.TrainState, list[step.StepResult]]:
    state = step.build(cfg, cfg.model(), "cpu")
    micro_batches = cfg.gradient_accumulation_steps
    rows = [{name: x.split(2 // micro_batches) for name, x in batch().items()}]
    parts = [{name: x[i] for name, x in rows[0].items()} for i in range(micro_batches)]
    return state, [step.train_step(state, parts) for _ in range(steps)]


def is_indexers(name: str) -> bool:
    return ".indexer." in name


def test_a_layer_is_its_equations_in_float64():
    decoder = build()
    layer = decoder.layers[0].attention
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(2))
    rope = decoder.rotary(70, x.device)
    y = layer(x, rope, layer.rows(None, (1, 70), x.device))

    weights = {name: p.detach().double() for name, p in layer.named_parameters()}
    theta, eps = decoder.config.rope_theta, decoder.config.norm_eps
    x_TD = x[0].double()

    def heads(part: str, norm: str, width: int) -> torch.Tensor:
        whole = (x_TD @ weights[f"{part}.weight"].T).unflatten(-1, (-1, width))
        return oracle.rms_norm(whole, weights[f"{norm}.weight"], eps) if norm else whole

    def turned(x_ThE, positions) -> torch.Tensor:
        """The first 16 elements, as the model's heads turn, at these positions."""
        first = oracle.rotate(torch.zeros(70, 1, 16), theta)
        angles = oracle.rotate(torch.cat([torch.ones(70, 1, 8), first[..., 8:]], -1), theta)
        cos, sin = (part[positions].double() for part in angles.split(8, -1))
        a, b, rest = x_ThE.split((8, 8, 8), dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    q = oracle.rotate(heads("q_proj", "q_norm", 16), theta)[None]
    k = oracle.rotate(heads("k_proj", "k_norm", 16), theta)[None]
    v = heads("v_proj", "", 16)[None]
    token = torch.arange(70)
    q_idx = turned(heads("indexer.q_proj", "indexer.q_norm", 24), token)[None]
    k_idx = turned(heads("indexer.k_proj", "indexer.k_norm", 24), token // 4 * 4)[None, :, 0]

    scores = indexed_oracle.scores(q_idx, indexed_oracle.pooled(k_idx, 4))
    chosen = indexed_oracle.choose(scores, 4, 24)
    o = indexed_oracle.attention(q, k, v, chosen, 4)
    want = o.flatten(-2) @ weights["o_proj.weight"].T
    assert ((y.double() - want).norm() / want.norm()) <= 1e-5
    divergence = indexed_oracle.divergence(q, k, scores, chosen, 4).sum()
    assert float(layer.measured[0, 0]) == pytest.approx(float(divergence), rel=1e-5)


def test_packed_documents_equal_separate_ones_forward_and_backward():
    decoder, x = build(), tokens()
    lengths = [[70, 1, 49], [3, 117]]
    ids = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in lengths])
    weight = torch.randn(2, 120, 97, generator=torch.Generator().manual_seed(2))

    def results(make_logits, forwards):
        with own_losses(decoder, warming=False) as own:
            logits = make_logits()
            summed = 1 / (len(decoder.layers) * forwards)  # of the mean over all layers' terms
            loss = own.added_to((logits * weight).sum(), summed)
            return [logits, *torch.autograd.grad(loss, list(decoder.parameters()))]

    def alone():
        rows = zip(x, lengths, strict=True)
        parts = [part for row, sizes in rows for part in row[None].split(sizes, 1)]
        return torch.cat([decoder.lm_head(decoder.hidden(p)[0], _logits) for p in parts]).view(
            2, 120, 97
        )

    def packed():
        return decoder.lm_head(decoder.hidden(x, doc_ids=ids).flatten(0, 1), _logits).view(
            2, 120, 97
        )

    for got, want in zip(results(packed, 1), results(alone, 5), strict=True):
        assert want.abs().max() > 0
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()


def _logits(hidden_ND, weight_VD):
    return hidden_ND @ weight_VD.T


def test_a_document_leaks_nothing_into_the_next_and_a_later_token_nothing_into_earlier_ones():
    decoder, x = build(), tokens(1)
    ids = (torch.arange(120) >= 50)[None]
    first, later = x.clone(), x.clone()
    first[:, :50] = (first[:, :50] + 1) % 97
    later[:, 90:] = (later[:, 90:] + 1) % 97
    with torch.no_grad():
        logits = decoder(x, doc_ids=ids)
        assert torch.equal(decoder(first, doc_ids=ids)[:, 50:], logits[:, 50:])
        assert torch.equal(decoder(later, doc_ids=ids)[:, :90], logits[:, :90])


@torch.no_grad()
def test_a_prompt_in_any_parts_and_then_token_by_token_gives_the_full_forward():
    decoder, x = build(), tokens()
    positions = torch.stack((torch.arange(120) + 1000, torch.arange(120) * 2 + 7))
    for given in (None, positions):
        full = decoder(x, positions=given)
        for parts in ([90] + [1] * 30, [1] * 120, [61, 41, 2, 1, 15]):
            cache = decoder.new_cache(2, 120)
            pieces = []
            for part, at in zip(x.split(parts, 1), torch.arange(120).split(parts), strict=True):
                where = None if given is None else given[:, at]
                pieces.append(decoder(part, positions=where, cache=cache))
            assert cache.length == 120
            assert (torch.cat(pieces, 1) - full).abs().max() <= 1e-5 * full.abs().max(), parts


@torch.no_grad()
def test_a_cache_that_is_too_small_stays_as_it_was():
    decoder, x = build(), tokens()
    cache = decoder.new_cache(2, 100)
    first = decoder(x[:, :90], cache=cache)
    with pytest.raises(ValueError, match="holds 100 positions and 101 are needed"):
        decoder(x[:, 90:101], cache=cache)
    rest = decoder(x[:, 90:100], cache=cache)
    full = decoder(x[:, :100])
    assert (torch.cat((first, rest), 1) - full).abs().max() <= 1e-5 * full.abs().max()


def test_sampling_over_the_cache_is_greedy_decoding_of_the_full_forward():
    decoder, prompt = build(), tokens(1, 70)[0].tolist()
    ids = list(prompt)
    with torch.no_grad():
        for token in generate(decoder, prompt, 8, temperature=0):
            assert decoder(torch.tensor([ids]))[0, -1].argmax() == token
            ids.append(token)


def test_the_cache_of_the_indexer_is_a_key_for_each_block():
    cache = build().new_cache(3, 402).layers[0]
    assert cache.k_BNE.shape == (3, 402 // 4, 24)


# ---- training


def test_in_the_warm_up_only_the_indexer_learns_and_the_loss_is_that_of_dense_attention():
    cfg = settings(indexer_warmup=20)
    state, results = trained(cfg, 20)
    dense = kernels.decoder(dataclasses.replace(cfg.model(), attention=Standard()), seed=cfg.seed)
    fresh = step.build(cfg, cfg.model(), "cpu").model
    for (name, p), before in zip(state.model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, before) != is_indexers(name), name
    with torch.no_grad():
        truth = float(dense(**batch()))
    assert all(float(result.loss) == pytest.approx(truth, abs=1e-6) for result in results)
    assert results[-1].figures["indexer_kl"] < 0.5 * results[0].figures["indexer_kl"]
    assert 0 < results[0].figures["indexer_recall"] < 1


def test_after_the_warm_up_everything_learns_and_the_reported_loss_is_the_models():
    cfg = settings(indexer_warmup=2)
    state, _ = trained(cfg, 2)
    before = [p.detach().clone() for p in state.model.parameters()]
    with torch.no_grad():
        truth = float(state.model(**batch()))
    result = step.train_step(state, [batch()])
    assert float(result.loss) == pytest.approx(truth, abs=1e-6)
    for p, old in zip(state.model.parameters(), before, strict=True):
        assert not torch.equal(p, old)


def test_the_indexers_loss_never_changes_the_models_gradients_also_if_they_are_clipped():
    # the budget is the whole row, so that the choice of blocks is no way to the model either
    gradients = []
    for kind in (dict(indexer=BUDGET_OF_A_ROW), dict(indexer=(), attention_type="standard")):
        cfg = settings(**kind)
        state = step.build(cfg, cfg.model(), "cpu")
        step.gradients(state, [batch()])
        norm = optim.clip_gradients(state.model, 0.05)
        gradients.append({name: p.grad for name, p in state.model.named_parameters()})
        assert norm > 0.05
    found, truth = gradients
    assert max(grad.abs().max() for name, grad in found.items() if is_indexers(name)) > 0
    for name, want in truth.items():
        assert (found[name] - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize(
    "changes",
    [
        dict(gradient_checkpointing="full"),
        dict(gradient_checkpointing="selective"),
        dict(gradient_checkpointing="full", offload_activations=True, mlp_tiles=3),
        dict(gradient_accumulation_steps=2, offload_optimizer=True),
        dict(loss="chunked"),
    ],
    ids=str,
)
def test_levers_change_neither_the_losses_nor_what_the_indexer_learns(changes):
    # two steps of the warm-up and two behind it; an epsilon at which Adam does not turn rounding
    # of small gradients into updates
    cfg = settings(indexer_warmup=2, lr=1e-3, adam_eps=1e-6)
    _, truth = trained(cfg, 4)
    _, found = trained(dataclasses.replace(cfg, **changes), 4)
    for got, want in zip(found, truth, strict=True):
        assert float(got.loss) == pytest.approx(float(want.loss), abs=2e-6)
        assert float(got.grad_norm) == pytest.approx(float(want.grad_norm), rel=1e-5)
        for name, figure in want.figures.items():
            assert float(got.figures[name]) == pytest.approx(float(figure), rel=1e-4)


@pytest.mark.parametrize("stop", [2, 5], ids=["in the warm-up", "behind it"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(stop, tmp_path):
    cfg = settings(indexer_warmup=3)
    whole, _ = trained(cfg, 7)
    before, _ = trained(cfg, stop)
    folder = save.save(before, tmp_path, {})
    state = step.build(cfg, cfg.model(), "cpu")
    load.load_state(state, load.verified(folder))
    for _ in range(7 - stop):
        step.train_step(state, [batch()])
    for (name, p), want in zip(
        state.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        assert torch.equal(p, want), name


@pytest.mark.parametrize("warmup, step_saved", [(5, 4), (2, 3)], ids=["longer", "shorter"])
def test_the_end_of_a_warm_up_that_is_past_cannot_change(warmup, step_saved, tmp_path):
    before, _ = trained(settings(indexer_warmup=3), step_saved)
    checkpoint = load.verified(save.save(before, tmp_path, {}))
    changed = settings(indexer_warmup=warmup, override_settings=True)
    with pytest.raises(ValueError, match="with 3, and a warm-up can .* give --indexer_warmup 3"):
        resume.check_settings(checkpoint, changed)
    resume.check_settings(checkpoint, settings(indexer_warmup=3))


def test_weights_of_standard_attention_start_an_indexed_model(tmp_path):
    dense = kernels.decoder(dataclasses.replace(build().config, attention=Standard()))
    qwen3.to_hf(dense, tmp_path / "qwen3")
    sizes = IndexerConfig(**SIZES)
    found = qwen3.from_hf(tmp_path / "qwen3", attention=sizes)
    theirs = dict(dense.named_parameters())
    added = {name for name, _ in found.named_parameters() if is_indexers(name)}
    for name, parameter in found.named_parameters():
        assert name in added or torch.equal(parameter, theirs[name]), name
    assert len(added) == 2 * 4
    x = tokens(1, 27)  # a row of at most budget + r - 1 tokens
    with torch.no_grad():
        assert (found(x) - dense(x)).abs().max() <= 1e-5 * dense(x).abs().max()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(compile=True), "--compile True cannot serve indexed attention, .*: drop it"),
        (dict(attention_head_groups=2), "heads share one choice: drop it"),
        (dict(indexer_warmup=40), "not shorter than the run of --max_steps 40: give at most 39"),
        (
            dict(context_parallel_size=2, context_parallel_mode="ulysses"),
            r"share one choice: choose .* from \[1\], or --context_parallel_mode auto",
        ),
        (
            dict(indexer_warmup=2, optimizer_in_backward=True, grad_clip=0.0),
            "--indexer_warmup .* drop one",
        ),
        (dict(indexer=("budget=6", "r=4")), "budget=6, r=4; allowed: budget a multiple of r"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        settings(**changes)


def test_settings_without_effect_are_named_and_a_budget_of_the_row_is_warned_of():
    standard = settings(attention_type="standard", indexer=(), indexer_warmup=2)
    assert "indexer_warmup" in standard.ineffective_settings()
    plain = settings(attention_type="standard", indexer=())
    losses = [[float(one.loss) for one in trained(cfg, 2)[1]] for cfg in (standard, plain)]
    assert losses[0] == losses[1]
    assert any("reads a whole row" in line for line in settings(context_length=24).warnings())
    assert not any("reads a whole row" in line for line in settings().warnings())
    narrow = dataclasses.replace(settings().model(), attention=IndexerConfig(head_dim=8))
    with pytest.raises(ValueError, match="given head_dim=8; allowed: at least the model's 16"):
        attention_kind(narrow).check(narrow)


# ---- counts


def test_parameters_and_operations_are_counted():
    decoder = build()
    assert decoder.config.num_params() == decoder.num_params()

    config = dataclasses.replace(
        decoder.config, attention=IndexerConfig(budget=8, r=4, head_dim=32)
    )
    positions = torch.tensor([0, 3, 4, 11, 12, 30])
    keys = torch.tensor([1, 4, 5, 12, 9, 11])  # those that attention reads
    candidates, chosen = torch.tensor([0, 0, 1, 2, 3, 7]), torch.tensor([0, 0, 1, 2, 2, 2])
    scores = 2 * 4 * 32 * (candidates + 2 * chosen) / (12 * 4 * 16)
    assert torch.allclose(keys_read(config, positions), keys + scores)

    standard = dataclasses.replace(config, attention=Standard())
    added = train_flops(config, 100, 0.0) - train_flops(standard, 100, 0.0)
    assert added == pytest.approx(4 * 100 * 2 * 64 * 5 * 32)


LONG = dict(context_length=2048, dtype="bf16")  # most queries gather their blocks


@pytest.mark.parametrize(
    "changes",
    [
        dict(gradient_checkpointing="none"),
        dict(gradient_checkpointing="full"),
        slow(LONG | dict(gradient_checkpointing="full")),
    ],
    ids=str,
)
def test_the_simulated_peak_is_what_the_allocator_records(changes):
    cfg = settings(**dict(context_length=512, indexer=("budget=64",)) | changes)
    predicted = simulate(cfg, target="cpu").peak()[0]
    assert predicted == pytest.approx(allocator_peak(cfg), rel=1e-3)


EIGHT_HEADS = ("num_layers=2", "hidden_size=64", "num_heads=8", "head_dim=8", "ffn_size=96")
DENSE_IS_LARGER = LONG | dict(
    context_length=1024, indexer=("budget=32", "head_dim=16"), model_overrides=EIGHT_HEADS
)


def planned(cfg: TrainConfig, available: float = 64.0) -> planner.Plan:
    return planner.plan(cfg, cfg.model(), World(), torch.device("cpu"), available)


def test_the_plan_is_of_the_dense_warm_up_if_that_takes_more():
    cfg = settings(**DENSE_IS_LARGER, indexer_warmup=1, device="cpu")
    plan = planned(cfg)
    assert plan.peak == plan.warm_up.peak > 1.2 * plan.estimate.peak
    assert plan.peak == pytest.approx(allocator_peak(largest(plan.cfg)), rel=1e-2)

    behind = dataclasses.replace(cfg, indexer_warmup=0)
    room = (plan.needed_gib + planned(behind).needed_gib) / 2
    assert planned(behind, room).fits and not planned(cfg, room).fits
    assert "GiB in the indexer's dense warm-up and" in planned(cfg, room).shortage()


def test_a_plan_is_of_the_steps_behind_the_warm_up_if_those_take_more():
    cfg = settings(context_length=512, indexer=("budget=64",), indexer_warmup=2, device="cpu")
    plan = planned(cfg)
    assert largest(plan.cfg) == dataclasses.replace(plan.cfg, indexer_warmup=0)
    assert 0 < plan.warm_up.peak < plan.peak == plan.estimate.peak


def test_of_a_length_schedule_only_the_stages_of_the_warm_up_are_planned_with_it():
    schedule = dict(length_schedule="60:3,120:2", max_steps=5)
    plan = planned(settings(**schedule, indexer_warmup=3))
    first, last = plan.stages
    assert first.warm_up is not None and last.warm_up is None
    assert plan.warm_up == first.warm_up
    wanted = 3 * first.warm_up_seconds + 2 * last.seconds
    assert plan.total_seconds == pytest.approx(wanted) and first.warm_up_seconds > 0
    assert "dense warm-up             0.00 GiB per rank (to step 3; peak: " in plan.table()


def test_the_time_of_a_run_counts_the_dense_warm_up():
    cfg = settings(indexer_warmup=10, dtype="bf16")
    config = cfg.model()
    plan = planner.plan(cfg, config, World(), torch.device("cuda"), available=80.0)
    pairs, scores = 120 * 121 / 2, sum(t // 4 for t in range(120))
    logits_and_sums = 6 * 4 * 16 * pairs  # the forward's two products, and the logits once more
    products = train_operations(config, 120, 0.0).products
    operations = products + 2 * (logits_and_sums + 6 * 3 * 24 * scores)
    assert plan.warm_up_seconds == pytest.approx(operations / GPU_FLOPS)
    assert plan.total_seconds == pytest.approx(10 * plan.warm_up_seconds + 30 * plan.seconds)
    assert "for 10 steps" in plan.time() and "for 30 steps" in plan.time()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_closed_form_is_within_half_a_percent_of_the_simulation_on_a_gpu(ranks):
    cfg = TrainConfig(
        model_size="tiny",
        attention_type="indexed",
        context_length=4096,
        model_overrides=("num_layers=2",),
        gradient_checkpointing="full",
        context_parallel_size=ranks,
    )
    peak = estimate(cfg, cfg.model(), ranks).peak
    assert peak == pytest.approx(simulate(cfg, ranks).peak()[0], rel=5e-3)

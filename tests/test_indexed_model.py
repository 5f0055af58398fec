"""Indexed attention in training: the warm-up, the indexer's loss and recall, levers, checkpoints,
weights of other models, plans and counts.
"""

import dataclasses

import pytest
import torch

from longhaul import config_checks, kernels, optim, step
from longhaul.checkpoint import load, resume, save
from longhaul.checkpoint.format import model_config, named_shards
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import GPU_FLOPS, keys_read, train_flops, train_operations
from longhaul.planner import plan as planner
from longhaul.planner.needs import WARM_UP, largest
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.simulate import simulate
from longhaul.sparse.indexer import Indexed, LayerLosses
from model import Decoder, ModelConfig, Standard
from tests.tiers import slow

SIZES = dict(count=3, block=8, head_dim=24)  # chooses from 24 tokens on
SHAPE = dict(vocab_size=97, num_layers=2, hidden_size=64, num_heads=4, head_dim=16, ffn_size=96)
BLOCKS = tuple(f"{name}={value}" for name, value in SIZES.items())
BUDGET_OF_A_ROW = ("count=15", "block=8", "head_dim=24")


def build(seed=1, **changes) -> Decoder:
    settings = SHAPE | dict(attention=Indexed(**SIZES)) | changes
    return kernels.decoder(ModelConfig.preset("tiny", **settings), seed=seed)


def tokens(rows=2, length=120, seed=0) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(seed))


def settings(**changes) -> TrainConfig:
    overrides = tuple(f"{name}={size}" for name, size in SHAPE.items() if name != "vocab_size")
    base = dict(
        model_size="tiny",
        attention_type="indexed",
        blocks=BLOCKS,
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
    assert not results[0].figures["indexer_kl"].requires_grad  # it would keep the step's graph
    assert results[-1].figures["indexer_kl"] < 0.5 * results[0].figures["indexer_kl"]
    assert 0 < results[0].figures["indexer_recall"] < 1


@pytest.mark.slow
def test_the_recall_rises_while_the_indexer_learns():
    _, results = trained(settings(indexer_warmup=30, lr=3e-3), 40)
    recalls = [float(result.figures["indexer_recall"]) for result in results]
    limits = [float(result.figures["indexer_recall_limit"]) for result in results]
    assert recalls[0] < recalls[29] < limits[29]
    assert limits[29] - recalls[29] < 0.5 * (limits[0] - recalls[0])
    assert limits[39] - recalls[39] < 0.5 * (limits[0] - recalls[0])


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
    for kind in (dict(blocks=BUDGET_OF_A_ROW), dict(blocks=(), attention_type="standard")):
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
        slow(dict(gradient_checkpointing="selective")),
        dict(gradient_checkpointing="full", offload_activations=True, mlp_tiles=3),
        slow(dict(gradient_accumulation_steps=2, master_weights="host", loss="chunked")),
    ],
    ids=str,
)
def test_levers_change_neither_the_losses_nor_what_the_indexer_learns(changes):
    # two steps of the warm-up and two behind it; an epsilon at which Adam does not turn rounding
    # of small gradients into updates
    cfg = settings(indexer_warmup=2, lr=1e-3, adam=("eps=1e-6",))
    _, truth = trained(cfg, 4)
    _, found = trained(dataclasses.replace(cfg, **changes), 4)
    for got, want in zip(found, truth, strict=True):
        assert float(got.loss) == pytest.approx(float(want.loss), abs=2e-6)
        assert float(got.grad_norm) == pytest.approx(float(want.grad_norm), rel=1e-5)
        for name, figure in want.figures.items():
            assert float(got.figures[name]) == pytest.approx(float(figure), rel=1e-4)


def test_the_gradient_of_the_layers_own_losses_is_that_of_their_mean_in_fp32():
    terms = [torch.tensor(value, requires_grad=True) for value in (0.3, 1.7, 4.1)]
    losses = LayerLosses(collects=True)
    for term in terms:
        losses.add(term)
    loss = losses.added_to(torch.tensor(5.0), divisor=7.0)
    loss.backward()
    assert float(loss) == 5.0
    for term in terms:
        assert float(term.grad) == pytest.approx(1 / (3 * 7), rel=1e-6)


@pytest.mark.parametrize("stop", [1, 2, 3], ids=["in the warm-up", "at its end", "behind it"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(stop, tmp_path):
    cfg = settings(indexer_warmup=2)
    whole, _ = trained(cfg, 4)
    before, _ = trained(cfg, stop)
    folder = save.save(before, tmp_path, {})
    state = step.build(cfg, cfg.model(), "cpu")
    load.load_state(state, load.verified(folder))
    for _ in range(4 - stop):
        step.train_step(state, [batch()])
    found = named_shards(state.model, state.optimizer)
    for name, shard in named_shards(whole.model, whole.optimizer).items():
        assert torch.equal(found[name].local, shard.local), name


@pytest.mark.parametrize("warmup, step_saved", [(5, 4), (2, 3)], ids=["longer", "shorter"])
def test_the_end_of_a_warm_up_that_is_past_cannot_change(warmup, step_saved, tmp_path):
    before, _ = trained(settings(indexer_warmup=3), step_saved)
    about = {"identity": {}, "rows_per_step": 1, "threads": 1, "torch": ""}
    checkpoint = load.verified(save.save(before, tmp_path, about))
    changed = settings(indexer_warmup=warmup, resume="named")
    with pytest.raises(ValueError, match="with 3, and a warm-up can .* give --indexer_warmup 3"):
        resume.check_continued(checkpoint, changed)
    resume.check_continued(checkpoint, settings(indexer_warmup=3))


def test_a_checkpoint_that_does_not_say_how_far_heads_turn_is_refused(tmp_path):
    cfg = settings()
    checkpoint = load.verified(save.save(step.build(cfg, cfg.model(), "cpu"), tmp_path, {}))
    del checkpoint.model_config["blocks"]["partial_rotary_factor"]
    with pytest.raises(ValueError, match="lacks partial_rotary_factor"):
        model_config(checkpoint)

    current = resume.identity(cfg, cfg.model())
    recorded = {name: value for name, value in current.items() if "rotary_factor" not in name}
    with pytest.raises(ValueError, match="partial_rotary_factor: recorded None, now 0.5"):
        resume.check_same_run(recorded, current, "it", ("", ""))


def test_settings_without_effect_are_named_and_a_budget_of_the_row_is_warned_of():
    standard = settings(attention_type="standard", blocks=(), indexer_warmup=2)
    assert "indexer_warmup" in config_checks.ineffective_settings(standard)
    plain = settings(attention_type="standard", blocks=())
    losses = [[float(one.loss) for one in trained(cfg, 2)[1]] for cfg in (standard, plain)]
    assert losses[0] == losses[1]
    assert any(
        "full attention" in line for line in config_checks.warnings(settings(context_length=24))
    )
    assert not any("full attention" in line for line in config_checks.warnings(settings()))


# ---- counts


def test_parameters_and_operations_are_counted():
    decoder = build()
    assert decoder.config.num_params() == decoder.num_params()

    config = dataclasses.replace(decoder.config, attention=Indexed(count=3, block=8, head_dim=32))
    positions = torch.tensor([0, 7, 23, 24, 40, 55])
    keys = torch.tensor([1, 8, 24, 17, 17, 24])  # those that attention reads
    scores = keys + torch.tensor([0, 0, 0, 25, 41, 56]) + 2 * keys / 8
    wanted = keys * 7 / 6 + scores * (2 * 32) / (4 * 16) / 6
    assert torch.allclose(keys_read(config, positions), wanted.float())

    standard = dataclasses.replace(config, attention=Standard())
    added = train_flops(config, 100, 0.0) - train_flops(standard, 100, 0.0)
    assert added == pytest.approx(4 * 100 * 2 * 64 * 3 * 32)


LONG = dict(context_length=2048, dtype="bf16")  # full tiles, as the planner counts them


@pytest.mark.parametrize(
    "changes",
    [
        slow(dict(gradient_checkpointing="selective")),
        dict(gradient_checkpointing="full", indexer_warmup=3),
    ],
    ids=str,
)
def test_the_simulated_peak_is_what_the_allocator_records(changes):
    sizes = ("count=4", "block=64", "head_dim=32")
    cfg = settings(**LONG | dict(blocks=sizes) | changes)
    predicted = simulate(cfg, target="cpu").peak()[0]
    assert predicted == pytest.approx(allocator_peak(cfg), rel=1e-3)


EIGHT_HEADS = ("num_layers=2", "hidden_size=64", "num_heads=8", "head_dim=8", "ffn_size=96")
DENSE_IS_LARGER = LONG | dict(
    context_length=1024, blocks=("count=2", "block=16", "head_dim=16"), model_overrides=EIGHT_HEADS
)


def planned(cfg: TrainConfig, available: float = 64.0) -> planner.Plan:
    return planner.plan(cfg, cfg.model(), World(), torch.device("cpu"), available)


@pytest.mark.slow
def test_the_plan_is_of_the_dense_warm_up_if_that_takes_more():
    cfg = settings(**DENSE_IS_LARGER, indexer_warmup=1, device="cpu")
    plan = planned(cfg)
    behind = dataclasses.replace(cfg, indexer_warmup=0)
    without = planned(behind)
    assert plan.needs.peak_stage == WARM_UP and plan.peak > 1.2 * without.peak
    assert plan.peak == pytest.approx(allocator_peak(largest(plan.cfg)), rel=1e-2)

    room = (plan.needed_gib + without.needed_gib) / 2
    too_large = planned(cfg, room)
    assert planned(behind, room).fits and not too_large.fits
    assert "GiB in the indexer's dense warm-up and" in too_large.shortage()


@pytest.mark.slow
def test_a_plan_is_of_the_steps_behind_the_warm_up_if_those_take_more():
    cfg = settings(
        context_length=512, blocks=("count=4", "block=16"), indexer_warmup=2, device="cpu"
    )
    plan = planned(cfg)
    assert largest(plan.cfg) == dataclasses.replace(plan.cfg, indexer_warmup=0)
    behind = planned(largest(plan.cfg))
    assert 0 < plan.needs.stages[WARM_UP] < plan.peak == behind.peak


@pytest.mark.slow
def test_of_a_length_schedule_only_the_stages_of_the_warm_up_are_planned_with_it():
    schedule = dict(length_schedule="60:3,120:2", max_steps=5)
    plan = planned(settings(**schedule, indexer_warmup=3))
    first, last = plan.stages
    assert WARM_UP in first.needs.stages and WARM_UP not in last.needs.stages
    wanted = 3 * first.warm_up_seconds + 2 * last.seconds
    assert plan.total_seconds == pytest.approx(wanted) and first.warm_up_seconds > 0
    assert "dense warm-up             0.00 GiB per rank" in first.table()


def test_the_time_of_a_run_counts_the_dense_warm_up():
    cfg = settings(indexer_warmup=10, dtype="bf16")
    config = cfg.model()
    plan = planner.plan(cfg, config, World(), torch.device("cuda"), available=80.0)
    pairs = 120 * 121 / 2
    logits_and_sums = 6 * 4 * 16 * pairs  # the forward's two products, and the teacher's logits
    scores = 2 * 2 * 24 * pairs * (1 + 2 / 8)
    products = train_operations(config, 120, 0.0).products
    operations = products + 2 * (logits_and_sums + scores)
    assert plan.warm_up_seconds == pytest.approx(operations / GPU_FLOPS)
    assert plan.total_seconds == pytest.approx(10 * plan.warm_up_seconds + 30 * plan.seconds)
    assert "for 10 steps" in plan.time() and "for 30 steps" in plan.time()

"""The simulated step of post-training: rollout, reference and update, against real ones."""

import dataclasses
import functools
import re
import shlex

import numpy as np
import pytest
import torch

from data.prompts import Prompt
from footprint.cards.allocator import replay
from footprint.cards.device import Demand
from footprint.kernels.measure import peak_bytes
from footprint.record.trace import Trace
from footprint.steps.search import AS_ASKED, Search
from lab.posttrain import grade, policy, rollout
from lab.posttrain.config import GradeConfig, IntuitorConfig
from lab.posttrain.policy import Group, Response
from lab.posttrain.rehearsal import shortest_micro_batch, stretched, table_lengths
from longhaul import cli, dist, step
from longhaul.config import TrainConfig
from longhaul.planner import fit, solve
from longhaul.planner import plan as planner
from longhaul.planner.needs import PROCESS_GIB, at_least, demand, needs
from longhaul.planner.needs import largest as largest_method
from longhaul.planner.program import Program, program_of
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.simulate import profile, simulate, trace_real_run
from model import GIB
from tests.test_fit import ladder
from tests.tiers import slow

CPU = torch.device("cpu")
SMALL = IntuitorConfig(
    model_size="tiny",
    model_overrides=("num_layers=1",),
    vocab_size=1000,
    context_length=300,
    max_response_length=30,
    group_size=4,
    gradient_checkpointing="full",
    dtype="fp32",
    device="cpu",
)


def changed(**settings) -> IntuitorConfig:
    return dataclasses.replace(SMALL, **settings)


# ---- shapes


def test_micro_batches_have_the_shapes_of_the_longest_groups():
    cfg = changed(batch_size=2)
    response = Response(torch.zeros(30, dtype=torch.long), 0.0, torch.zeros(30))
    group = Group(torch.zeros(cfg.longest_prompt, dtype=torch.long), [response] * 4)
    real = policy.micro_batch([group, group], CPU)
    assert real["tokens_BT"].shape[1] == 2 * cfg.row_tokens

    made = stretched(shortest_micro_batch(cfg), cfg)
    assert made.keys() == real.keys()
    assert list(made["rows"].lengths) == list(real["rows"].lengths)
    for name in made.keys() - {"rows"}:
        assert (made[name].shape, made[name].dtype) == (real[name].shape, real[name].dtype), name


# ---- predicted and real


@pytest.mark.parametrize(
    "changes",
    [
        {},
        slow(
            dict(
                kl_coef=0.0,
                keep_reference=False,
                v_max_response_length=90,
                normalizer="constant",
            )
        ),
        slow(dict(kl="k3", batch_size=2, mlp_tiles=3, model_overrides=("num_layers=2",))),
        slow(dict(gradient_checkpointing="none", gradient_accumulation_steps=4)),
    ],
    ids=str,
)
def test_every_stage_is_predicted_to_the_byte(changes):
    cfg = changed(**changes)
    predicted = simulate(cfg, target="cpu").peak_by_stage()
    real = trace_real_run(cfg).peak_by_stage()
    # the prompts are numpy's, which the allocator does not count
    prompts = min(cfg.rows_per_step(1), cfg.sampling(eod_id=0, vocab_size=1000).prompts)
    real["rollout"] -= 8 * cfg.longest_prompt * prompts
    assert predicted == real
    assert ("reference.layers.* forward" in predicted) == cfg.needs_reference


def test_what_is_reserved_is_that_of_the_update_too():
    """The end of the rollout, which frees its cache, is not the end of the step."""
    trace = simulate(SMALL)
    peak, time = trace.peak()
    assert trace.stage_at(time) != "rollout"
    assert replay(trace).peak_live == pytest.approx(peak, rel=1e-3)


@pytest.mark.slow
def test_a_plan_of_many_micro_batches_takes_no_longer():
    many = 10**8
    small = changed(global_batch_size=2)
    few = needs(small)
    found = needs(dataclasses.replace(small, global_batch_size=many))
    of_one = (found.stages["optimizer"] - few.stages["optimizer"]) / (many - 2)
    assert of_one == sum(
        tensor.nbytes
        for tensor in stretched(shortest_micro_batch(SMALL), SMALL).values()
        if isinstance(tensor, torch.Tensor)
    )
    assert found.stages["rollout"] == few.stages["rollout"]


GRADE = GradeConfig(
    model_size="tiny",
    vocab_size=500,
    context_length=12,
    max_new_tokens=3,
    gumbel_topk=64,
    batch_size=2,
    dtype="fp32",
    device="cpu",
    model_overrides=("num_layers=1",),
)


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        slow(dict(freeze_embeddings=True, gradient_checkpointing="none", method="ste")),
    ],
    ids=str,
)
def test_every_stage_of_soft_tokens_is_predicted_to_the_byte(changes):
    cfg = dataclasses.replace(GRADE, **changes)
    predicted = simulate(cfg, target="cpu").peak_by_stage()
    assert predicted == trace_real_run(cfg).peak_by_stage()
    assert {"validation", "reference.layers.* forward", "reward.body forward"} <= predicted.keys()


@pytest.mark.parametrize(
    "changes",
    [
        dict(gumbel_topk=0, gradient_checkpointing="none"),
        pytest.param(dict(method="ste_legacy"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_vocabulary_with_padding_is_predicted_to_the_byte(changes, monkeypatch):
    """A run leaves out the ids that its tokenizer lacks: here 11."""
    cfg = dataclasses.replace(GRADE, **changes)
    predicted = simulate(cfg, target="cpu").peak_by_stage()

    def padded(cfg: GradeConfig, *args, **options) -> Program:
        made = program_of(cfg, *args, **options)
        made.settings = cfg.settings(eod_id=0, vocab_size=cfg.vocab_size - 11)
        return made

    monkeypatch.setattr("longhaul.planner.simulate.program_of", padded)
    real = trace_real_run(cfg).peak_by_stage()
    del predicted["validation"], real["validation"]  # whose draws are of fewer ids
    assert predicted == real


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg, ranks",
    [
        (
            changed(
                dtype="bf16",
                master_weights="host",
                device="auto",
            ),
            1,
        ),
        (dataclasses.replace(GRADE, freeze_embeddings=True), 2),
    ],
)
def test_the_weights_that_every_stage_holds_are_known_without_a_simulation(cfg, ranks):
    found = needs(cfg, ranks)
    weights = found.sizes[found.peak_stage]["parameter"]
    assert at_least(cfg, ranks) == pytest.approx(weights, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("context, tokens, name", [(12, 4, "ste_legacy"), (200, 2, "ste")])
def test_all_methods_need_what_the_largest_needs(context, tokens, name):
    lengths = dict(context_length=context, max_new_tokens=tokens)
    cfg = dataclasses.replace(GRADE, **lengths)
    cfg = dataclasses.replace(cfg, method="all", device="cuda")
    peaks = {}
    for method in grade.METHODS:
        one = dataclasses.replace(cfg, method=method)
        peaks[method] = needs(one).peak
    assert needs(cfg).peak == max(peaks.values()) == peaks[name]
    chosen = largest_method(cfg)
    assert chosen == dataclasses.replace(cfg, method=name)
    assert demand(cfg).trace.peak() == demand(chosen).trace.peak()


@pytest.mark.slow
def test_a_plan_of_soft_tokens_is_the_simulated_step():
    cfg = dataclasses.replace(GRADE, device="cuda")
    trace = simulate(cfg)
    found = needs(cfg)
    assert found.stages == trace.peak_by_stage()
    assert found.classic == Demand.of(trace).classic.peak_reserved


@pytest.mark.parametrize(
    "task, cfg",
    [
        ("grade", dataclasses.replace(GRADE, max_new_tokens=7, device="auto")),
        ("grade", dataclasses.replace(GRADE, method="all", freeze_embeddings=True, kl_coef=0.0)),
        ("intuitor", changed(reward="mixed", kl="k3", normalizer="constant", clip_ratio=0.3)),
    ],
)
def test_advice_is_a_command_with_the_flags_of_its_program(task, cfg):
    found = planner.on_ranks(cfg).command()
    before, words = found.split(f" -m lab.{task} ")
    assert before == "python"
    assert cli.parse(type(cfg), shlex.split(words)) == cfg


@pytest.mark.parametrize("kl_coef, last", [(0.0, "no reference"), (0.1, "head groups")])
def test_every_rung_of_a_policy_is_a_command_with_its_settings(kl_coef, last):
    rungs = ladder(changed(kl_coef=kl_coef, batch_size=4, device="auto"))
    assert rungs[-1][0] == last
    for _, request in rungs:
        _, words = planner.command(request, dist.World()).split(" -m lab.intuitor ")
        assert cli.parse(IntuitorConfig, shlex.split(words)) == request


@pytest.mark.slow
def test_the_longest_context_of_a_policy_fills_the_device():
    lengths = dict(context_length=10_240, max_response_length=2000)
    cfg = changed(device="cuda", **lengths)
    search = Search(functools.partial(solve.judged, GIB), GIB)
    found = solve.longest(search, AS_ASKED, planner.on_ranks(cfg)).request.cfg
    assert demand(found).least_bytes <= GIB
    longer = dataclasses.replace(found, context_length=found.context_length + 1024)
    assert demand(longer).least_bytes > GIB


def test_rotary_tables_are_as_long_as_the_first_step_makes_them(monkeypatch):
    for method in ("gumbel", "gumbel_legacy"):
        cfg = dataclasses.replace(GRADE, method=method)
        made = program_of(cfg, every=True, real=True)
        monkeypatch.setattr("lab.posttrain.rehearsal.table_lengths", lambda cfg: [[], [], []])
        state = made.build()
        micro = grade.micro_batches(
            [torch.zeros(9, dtype=torch.long)] * 2, [0, 1], 0, 0, 2, made.settings, CPU
        )
        step.train_step(state, micro)
        models = [state.model, *made.frozen.values()]
        lengths = [model.rotary.cos.shape[1] for model in models]
        assert lengths == [own[-1] for own in table_lengths(cfg)], method


@pytest.mark.parametrize("cfg", [slow(SMALL), GRADE])
def test_the_predicted_peak_is_what_the_allocator_records(cfg):
    predicted, _ = simulate(cfg, target="cpu").peak()
    assert predicted == pytest.approx(allocator_peak(cfg), rel=1e-4)


@pytest.mark.slow
def test_a_rollout_takes_what_its_first_and_last_forwards_take():
    cfg = changed(gradient_checkpointing="none")
    model = step.build(cfg, cfg.model(), "cpu").model
    tokens = np.zeros(270, dtype=np.int64)
    prompts = [Prompt(index, tokens, tokens[:0]) for index in range(2)]
    sampling = SMALL.sampling(eod_id=999, vocab_size=999)  # which so has no end

    rollout.sample(model, prompts, sampling)  # makes the tables of the positions
    sampled = peak_bytes(lambda: rollout.sample(model, prompts, sampling), CPU)
    made = []
    rehearsed = peak_bytes(lambda: rollout.rehearse(model, prompts, sampling, made.append), CPU)
    assert rehearsed == pytest.approx(sampled, rel=0.01)
    assert len(made) == 1


@pytest.mark.slow
def test_parts_of_a_prompt_that_are_left_out_take_no_more_memory(monkeypatch):
    monkeypatch.setattr("longhaul.generate.PREFILL_CHUNK", 32)
    cfg = changed(context_length=222)
    assert rollout.largest_parts(6) == [0, 1, 2, 4, 5]  # of 191 tokens

    def peaks(parts) -> dict[str, int]:
        monkeypatch.setattr(rollout, "largest_parts", parts)
        return simulate(cfg).peak_by_stage()

    found = peaks(rollout.largest_parts)
    assert found == peaks(rollout.all_parts)
    assert found != peaks(lambda number: [number - 1])


def largest(trace: Trace) -> int:
    return max(storage.size for storage in trace.storages.values())


@pytest.mark.slow
def test_131072_packed_tokens_take_what_pretraining_takes():
    """No storage has a number for each token and each id, or for each pair of prompt tokens."""
    tokens = 131_072
    settings = dict(model_size="tiny", model_overrides=("num_layers=1",), dtype="fp32")
    settings |= dict(device="cpu", gradient_checkpointing="full")
    cfg = IntuitorConfig(context_length=73_728, max_response_length=8192, group_size=8, **settings)
    assert cfg.row_tokens == tokens
    of_policy = simulate(cfg, target="cpu")
    of_pretraining = simulate(TrainConfig(context_length=tokens, **settings), target="cpu")
    assert of_policy.peak()[0] <= 1.15 * of_pretraining.peak()[0]

    ids = 4 * tokens * cfg.model().vocab_size
    pairs = 4 * cfg.longest_prompt**2
    assert largest(of_policy) < min(ids, pairs) / 8


@pytest.mark.slow
def test_deep_policies_follow_from_shallow_ones():
    cfg = changed(model_overrides=("num_layers=5",))
    whole = simulate(cfg, ranks=2).peak_by_stage()
    found = profile(cfg, ranks=2)
    assert {stage: sum(sizes.values()) for stage, sizes in found.stages.items()} == whole
    assert found.trace.peak_by_stage() == whole


# ---- plans


def test_a_plan_names_the_stages_of_the_simulated_step():
    cfg = changed(plan=True)
    found = planner.plan(cfg, cfg.model(), dist.World(), CPU, available=4.0)
    assert found.fits
    table = found.table()
    assert "rollout" in table and "reference.layers.* forward" in table and "optimizer" in table
    assert found.needs.peak == simulate(cfg, target="cpu").peak()[0]
    assert re.search("time .* for 100 steps, without the time of sampling", table)


@pytest.mark.slow
def test_a_rollout_that_does_not_fit_names_its_lever():
    many = dict(rollout_prompts=64, global_batch_size=64, max_response_length=200)
    cfg = changed(**many)
    asked = planner.plan(cfg, cfg.model(), dist.World(), CPU, available=PROCESS_GIB + 0.07)
    assert asked.needs.peak_stage == "rollout" and not asked.fits
    assert fit.closest(asked).asked.rollout_prompts == 1

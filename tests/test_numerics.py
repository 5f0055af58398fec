"""What watches the numbers: skipped steps, spikes, drifting replicas, rows that are left out."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from data import order
from data.loader import Loader
from data.writer import write_dataset
from longhaul import dist, optimizers, step
from longhaul.checkpoint import load, resume, save
from longhaul.checkpoint.format import Checkpoint
from longhaul.config import TrainConfig
from longhaul.exits import NumericalHalt
from longhaul.run import health
from tests.ranks import run_ranks

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=4,
)
SMALL = (
    "hidden_size=32",
    "num_layers=2",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=8",
    "ffn_size=48",
)


# ---- rows that are left out


@settings(max_examples=300, deadline=None)
@given(ranges=RANGES, index=st.integers(0, 60))
def test_leaving_ranges_out_is_counting_the_positions_that_remain(ranges, index):
    left_out = {position for begin, end in ranges for position in range(begin, end)}
    remaining = [position for position in range(200) if position not in left_out]
    assert order.remaining_position(index, order.merged(ranges)) == remaining[index]


@settings(max_examples=200, deadline=None)
@given(ranges=RANGES, limit=st.integers(0, 90))
def test_ranges_keep_their_positions_through_every_form(ranges, limit):
    positions = sorted({position for begin, end in ranges for position in range(begin, end)})
    made = order.ranges_of(positions)
    assert made == order.merged(ranges) == order.parse_ranges(order.format_ranges(made))
    assert all(one[1] < other[0] for one, other in zip(made, made[1:]))
    assert [p for begin, end in order.ranges_below(made, limit) for p in range(begin, end)] == [
        p for p in positions if p < limit
    ]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    documents = [np.random.default_rng(n).integers(1, 64, 20) for n in range(60)]
    return write_dataset(
        documents, tmp_path_factory.mktemp("data") / "d", vocab_size=64, eod_id=0, val_fraction=0
    )


@pytest.mark.parametrize("skip", [(), ((0, 4),), ((5, 6), (9, 14)), ((3, 60),)])
def test_a_loader_without_rows_has_the_others_in_their_order_on_any_number_of_ranks(dataset, skip):
    loader, plain = Loader(dataset, 32, 4).without(skip), Loader(dataset, 32, 4)
    expected = [p for p in range(200) if not any(begin <= p < end for begin, end in skip)][:32]
    for ranks in (1, 2, 4):
        found = [
            p for s in range(8) for rank in range(ranks) for p in loader.positions(s, rank, ranks)
        ]
        assert found == expected
    assert (loader.batch(3).tokens == plain.rows(expected[12:16]).tokens).all()
    for s in range(30):
        state = loader.state(s)
        first = state["epoch"] * loader.rows_per_epoch + state["position"]
        assert first == loader.positions(s)[0]
    assert loader.state(0).get("skip", []) == [list(span) for span in skip]


def checkpoint(step: int, skip=()) -> Checkpoint:
    data = {"seed": 0, "epoch": 0, "position": 0}
    if skip:
        data["skip"] = [list(span) for span in skip]
    return Checkpoint(
        folder=Path("step"),
        step=step,
        tokens=0,
        data=data,
        config={},
        model_config={},
        files={},
        rows_per_step=4,
    )


@pytest.mark.parametrize(
    "at, recorded, given, expected",
    [
        (0, (), ["0:4"], ("0:4",)),
        (2, (), [], ()),
        (2, ((4, 8),), [], ("4:8",)),
        (2, ((4, 8),), ["12:20"], ("4:8", "12:20")),
        (2, ((4, 8),), ["4:8"], ("4:8",)),
        (2, ((8, 12),), ["8:12", "12:16"], ("8:16",)),
    ],
)
def test_a_resume_keeps_what_was_left_out_and_adds_what_comes_later(
    dataset, at, recorded, given, expected
):
    cfg = TrainConfig(skip_rows=tuple(given))
    rows = Loader(dataset, 32, 4)
    assert resume.with_skips(checkpoint(at, recorded), cfg, rows).skip_rows == expected


@pytest.mark.parametrize(
    "at, recorded, given",
    [(2, (), ["0:4"]), (2, (), ["7:20"]), (2, ((4, 8),), ["10:11"]), (3, ((4, 8),), ["4:9"])],
)
def test_rows_that_were_trained_on_cannot_be_left_out_any_more(dataset, at, recorded, given):
    rows = Loader(dataset, 32, 4)
    with pytest.raises(
        ValueError, match="was trained on the rows before .*: resume an earlier one"
    ):
        resume.with_skips(checkpoint(at, recorded), TrainConfig(skip_rows=tuple(given)), rows)


# ---- spikes


def curve(steps: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [2 + 6 * 0.98**n + draw.gauss(0, 0.05) for n in range(steps)]


@pytest.mark.parametrize("seed", range(3))
def test_a_falling_noisy_curve_has_no_spike_and_one_that_jumps_has_it_in_that_step(seed):
    spikes = health.Spikes()
    assert max(spikes.score(loss) for loss in curve(400, seed)) < 6
    assert spikes.score(4.0) > 10 and spikes.score(2.0) < 6


def test_a_spike_among_spikes_is_still_one():
    """The standard deviation of a window with three of them would hide it."""
    spikes = health.Spikes(curve(200))
    assert all(spikes.score(loss) > 10 for loss in (8.0, 9.0, 7.0, 8.0))


def test_a_score_counts_standard_deviations_of_a_normal_curve():
    """1.4826 times the median absolute deviation estimates the standard deviation."""
    rng = random.Random(0)
    scores = []
    for _ in range(200):
        spikes = health.Spikes(rng.gauss(5.0, 0.2) for _ in range(64))
        scores.append(spikes.score(5.0 + 3 * 0.2))
    assert np.median(scores) == pytest.approx(3.0, rel=0.05)


def test_nothing_is_a_spike_before_there_is_enough_to_compare_with():
    spikes = health.Spikes()
    assert [spikes.score(loss) for loss in (5.0, 500.0, float("nan"), 5.0)] == [0.0] * 4
    assert len(spikes.window) == 3


def test_a_flat_curve_is_compared_with_one_percent_of_itself():
    spikes = health.Spikes([3.0] * 64)
    assert spikes.score(3.0001) < 1 and spikes.score(3.9) > 10


def test_a_resumed_run_compares_with_the_losses_of_its_log(tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [json.dumps(dict(step=n, loss=None if n == 5 else float(n))) for n in range(1, 200)]
    lines.insert(120, json.dumps(dict(step=120, validation_loss=3.0)))
    log.write_text("\n".join(lines) + '\n{"step": 200, "lo')
    assert (
        health.Spikes(health.recent_losses(log, 150)).window
        == health.Spikes(map(float, range(1, 151))).window
    )
    assert health.recent_losses(tmp_path / "none", 3) == []


# ---- replicas


def replicas_after_two_steps(world, changes: dict) -> str:
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=SMALL,
        vocab_size=64,
        context_length=32,
        dp_replicate=2,
        lr=1e-2,
        **changes,
    )
    state = step.build(
        cfg, cfg.model(), "cpu", world, dist.data_mesh(world, torch.device("cpu"), 2)
    )
    for index in range(2):
        ids = torch.randint(
            64, (1, 33), generator=torch.Generator().manual_seed(2 * index + world.rank)
        )
        step.train_step(state, [dict(tokens_BT=ids[:, :-1], labels_BT=ids[:, 1:])])
    return hash_of_state(state)


def named_tensors(state) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of every weight and optimizer state."""
    found = []
    for name, parameter in state.model.named_parameters():
        found.append((name, dist.local_shard(parameter.detach())))
        for key, value in sorted(state.optimizer.state[parameter].items()):
            found.append((f"{key} of {name}", dist.local_shard(value)))
    return found


def hash_of_state(state) -> str:
    found = hashlib.sha256()
    for _, tensor in named_tensors(state):
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def replicas_of_each(world, settings: list[dict]) -> list[str]:
    """As if the second rank's products rounded otherwise, which some CPUs' do."""
    orthogonal = optimizers.orthogonal
    if world.rank == 1:
        optimizers.orthogonal = lambda x: orthogonal(x) * (1 + 2**-8)
    return [replicas_after_two_steps(world, changes) for changes in settings]


def test_replicas_round_alike():
    settings = [
        dict(optimizer="adamw_bf16"),
        dict(optimizer="adamw_8bit", master_weights="none"),
        dict(optimizer="muon", master_weights="none"),
    ]
    first, second = run_ranks(replicas_of_each, 2, settings)
    assert first == second and len(set(first)) == 3


# ---- steps without a finite gradient


def one_process(tmp_path, dataset, **settings):
    cfg = TrainConfig(
        model_size="tiny",
        model_overrides=SMALL,
        vocab_size=64,
        context_length=32,
        dtype="fp32",
        output_dir=str(tmp_path),
        **settings,
    )
    state = step.build(cfg, cfg.model(), "cpu")
    loader = Loader(dataset, 32, 4)
    return (
        state,
        loader,
        health.Health(
            state,
            loader,
            tmp_path,
            lambda skip_rows, resume, output_dir, lr=cfg.lr: (
                f"train.py --skip_rows {' '.join(skip_rows)} --resume {resume} --lr {lr:g}"
            ),
        ),
    )


def poisoned_step(state, loader):
    micro = step.micro_batches(loader.batch(state.step), 4, state.device)
    hook = state.model.layers[0].register_forward_hook(lambda module, args, out: out * float("inf"))
    result = step.train_step(state, micro)
    hook.remove()
    return result


def test_a_skipped_step_changes_nothing_but_the_count(tmp_path, dataset):
    state, loader, watch = one_process(tmp_path, dataset)
    step.train_step(state, step.micro_batches(loader.batch(0), 4, state.device))
    before = [tensor.clone() for _, tensor in named_tensors(state)]
    result, said = poisoned_step(state, loader), []
    assert result.skipped and state.step == 2
    assert watch.after(result, said.append) == dict(spike=0.0) and watch.skipped == [2]
    assert all(torch.equal(one, other) for one, (_, other) in zip(before, named_tensors(state)))
    assert "(1 of 10 such steps allowed); rows 4:8 are in" in said[0] and len(said) == 1
    kept = load_file(tmp_path / "skipped" / "step-00000002.safetensors")
    rows = loader.rows(range(4, 8))
    assert all((kept[name].numpy() == getattr(rows, name)).all() for name in kept)
    assert {"tokens", "labels", "doc_ids"} <= kept.keys()


def test_after_a_skipped_step_a_resumed_run_has_the_bits_of_the_uninterrupted_one(
    tmp_path, dataset
):
    state, loader, watch = one_process(tmp_path, dataset)
    watch.after(poisoned_step(state, loader), print)
    step.train_step(state, step.micro_batches(loader.batch(1), 4, state.device))
    path = save.save(state, tmp_path, dict(skipped=list(watch.skipped)))
    again = one_process(tmp_path, dataset)[0]
    load.load_state(again, load.verified(path))
    for one in (state, again):
        step.train_step(one, step.micro_batches(loader.batch(2), 4, state.device))
    for (name, expected), (_, found) in zip(
        named_tensors(state), named_tensors(again), strict=True
    ):
        assert torch.equal(expected, found), name


def test_one_step_more_than_allowed_halts_and_names_the_way_back(tmp_path, dataset):
    state, loader, watch = one_process(tmp_path, dataset, max_skipped_steps=1)
    for at in (1, 2):
        (tmp_path / f"step-{at:08d}").mkdir()
    state.step = 2
    watch.after(poisoned_step(state, loader), print)
    with pytest.raises(
        NumericalHalt,
        match=r"steps 3, 4 had .*; rows 8:16, .*: "
        r"train.py --skip_rows 8:16 --resume .*step-00000001 --lr 3e-05",
    ):
        watch.after(poisoned_step(state, loader), print)


def test_rows_are_blamed_and_not_the_learning_rate_where_the_run_went_on_after_them(
    tmp_path, dataset
):
    state, loader, watch = one_process(tmp_path, dataset, max_skipped_steps=1)
    watch.after(poisoned_step(state, loader), print)
    step.train_step(state, step.micro_batches(loader.batch(1), 4, state.device))
    with pytest.raises(NumericalHalt, match="steps 1, 3 had .* --resume auto --lr 0.0003"):
        watch.after(poisoned_step(state, loader), print)


def test_the_last_step_of_a_run_may_not_be_a_skipped_one(tmp_path, dataset):
    state, loader, watch = one_process(tmp_path, dataset, max_steps=2, warmup_steps=1)
    watch.after(poisoned_step(state, loader), print)
    with pytest.raises(NumericalHalt, match="steps 1, 2 had "):
        watch.after(poisoned_step(state, loader), print)


def test_the_way_back_of_a_resumed_run_may_begin_before_it(tmp_path, dataset):
    """A run that went on from a checkpoint of another folder, in which a newer one is of no use."""
    for at in (1, 2, 3, 4):
        (tmp_path / "old" / f"step-{at:08d}").mkdir(parents=True)
    named = tmp_path / "old" / "step-00000003"
    state, loader, watch = one_process(tmp_path / "new", dataset, resume=str(named))
    state.step = 3
    watch.after(poisoned_step(state, loader), print)
    assert f"--resume {named.with_name('step-00000002')}" in watch.way_back(("12:16",))
    state.step = 5  # the first of these was taken
    watch.skipped = [5]
    assert f"--resume {named} " in watch.way_back(("16:20",))


def test_updates_in_the_backward_cannot_be_skipped(tmp_path, dataset):
    state, loader, watch = one_process(tmp_path, dataset, optimizer_in_backward=True, grad_clip=0.0)
    with pytest.raises(
        NumericalHalt,
        match="after --optimizer_in_backward had changed other weights.*: train.py --skip_rows 0:4",
    ):
        watch.after(poisoned_step(state, loader), print)


def test_a_disk_that_fails_does_not_stop_the_run(tmp_path, dataset, monkeypatch):
    def failing(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(health, "write_tensors", failing)
    state, loader, watch = one_process(tmp_path, dataset)
    said = []
    watch.after(poisoned_step(state, loader), said.append)
    assert "No space left on device" in said[0]


def test_the_way_back_starts_at_the_newest_checkpoint_before_the_rows(tmp_path, dataset):
    state, _, watch = one_process(tmp_path, dataset)
    state.step = 8
    for at in (2, 4, 6):
        (tmp_path / f"step-{at:08d}").mkdir()
    for rows, skipped, resumed in [
        (["17:20"], "17:20", tmp_path / "step-00000004"),
        (["3:4", "24:26"], "24:26", tmp_path / "step-00000006"),
        (["20:28"], "24:28", tmp_path / "step-00000006"),  # two steps, one before it
        (["20:24"], "20:24", tmp_path / "step-00000004"),
        (["3:4"], "3:4", "auto"),
    ]:
        found = watch.way_back(tuple(rows))
        assert found.startswith(f"train.py --skip_rows {skipped} --resume {resumed}")

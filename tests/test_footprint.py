"""footprint/: its predictions of hand-written steps against the CPU allocator's own record, what it
tells apart, what it refuses, and that it needs torch only.
"""

import copy
import dataclasses
import functools
import json
import math
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks import footprint as benchmark
from footprint import Refused, Report, measure, predict
from footprint.kernels import probe
from footprint.pretend import unknown
from tests.footprint_models import (
    STEPS,
    WIDTH,
    images,
    loss_of,
    mlp,
    observe,
    on_tokens,
    one_layer,
    tokens,
    train,
    trained,
    with_optimizer,
)
from tests.tiers import few_fast

ROOT = Path(__file__).parent.parent
TOLERANCE = 12  # bytes
TRANSFORMER = STEPS["transformer"]
build_small = with_optimizer(one_layer)


@functools.cache
def predicted(name: str, target: str) -> Report:
    return predict(*STEPS[name], target)


# ---- the peak


def check_peak(build, step):
    """The predicted peak is what the allocator records."""
    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), abs=TOLERANCE)


@pytest.mark.parametrize("name", few_fast(STEPS, 6))
def test_the_predicted_peak_is_what_the_allocator_records(name):
    recorded = measure(*STEPS[name])
    assert predicted(name, "cpu").peak == pytest.approx(recorded, abs=TOLERANCE)


@pytest.mark.parametrize("again", [torch.square, lambda w: w.view(4, 4, WIDTH, WIDTH).exp()])
def test_two_gradients_are_summed_in_place_only_where_the_older_is_no_view(again):
    def loss(model):
        repeated = model.weight.repeat(16, 1, 1).softmax(-1)
        product = torch.bmm(repeated, repeated.detach()[:, :, :8])
        return product.square().mean() + again(repeated).sum()

    check_peak(*trained(lambda: nn.Linear(WIDTH, WIDTH, bias=False), loss, torch.optim.SGD))


@pytest.mark.parametrize("name", few_fast(["checkpointing, reentrant", "AdamW foreach"], 2))
def test_fake_tensors_show_every_stage_as_the_real_step_does(name):
    assert predicted(name, "cpu").by_stage == observe(*STEPS[name]).by_stage


class Loop:
    """What training loops do with the numbers that they read."""

    def __init__(self):
        self.total = 0.0
        self.best = math.inf
        self.log = []

    def __call__(self, state):
        model, optimizer, schedule = state
        loss = model(tokens()[0]).mean()
        count = (loss > 0).sum()
        if not torch.isfinite(loss) or math.isnan(loss.item()) or numpy.isnan(loss.item()):
            raise ValueError("the loss is not finite")
        loss.backward()
        parameters = model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step(loss)
        optimizer.zero_grad()
        self.total += loss.item()
        self.best = min(self.best, float(loss))
        entry = {"loss": round(loss.item(), 3), "perplexity": math.exp(loss.item())}
        self.log += [json.dumps(entry), f"{norm:.3f} {count.item():d}", f"{loss:>8}"]
        self.log += ["%.2f %d" % (loss, count), isinstance(loss.item(), float)]  # noqa: UP031


@pytest.mark.slow
def test_logs_guards_and_schedules_of_training_loops_take_the_memory_of_the_real_step():
    def build():
        model, optimizer = build_small()
        return model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    loop = Loop()
    report = predict(build, loop, "cpu")
    entry = '{"loss": 1.0, "perplexity": 2.718281828459045}'
    assert loop.log[:5] == [entry, "1.000 1", f"{1.0:>8}", "1.00 1", True]
    assert report.peak == pytest.approx(measure(build, Loop()), abs=TOLERANCE)

    assert "numbers that the step tests are finite" in report.assumed
    line = Loop.__call__.__code__.co_firstlineno + 14
    assert f"the number that test_footprint.py:{line} reads is taken as 1" in report.assumed
    assert "assumed: " in str(report)


def test_numbers_that_are_tested_are_finite_however_many_and_known_ones_are_what_they_are():
    found = []

    def step(model):
        many = model(torch.randn(600, 600))
        found.append([bool(torch.isfinite(many).all()), bool(many.isnan().any())])
        found.append(torch.isinf(torch.tensor([1.0, math.inf])).tolist())
        assert torch.isfinite(many).nonzero().shape == (many.numel(), many.dim())

    predict(lambda: nn.Linear(600, 600), step, "cpu")
    assert found[:2] == [[True, False], [False, True]]


def test_a_file_that_is_saved_to_stays_as_it_is_and_json_is_written(tmp_path):
    from torch import save  # as a program that has imported it

    weights, log = tmp_path / "weights.pt", tmp_path / "log.json"
    weights.write_bytes(b"weights")

    def step(state):
        TRANSFORMER[1](state)
        model, optimizer = state
        loss = model(tokens()[0]).mean().item()
        save(model.state_dict(), weights)
        torch.save({"optimizer": optimizer.state_dict(), "loss": loss}, str(weights))
        torch.save(loss, weights, _use_new_zipfile_serialization=False)
        with log.open("w") as file:
            json.dump({"loss": loss, "parts": [loss]}, file)
        assert json.dumps({"loss": loss}, indent=1) == '{\n "loss": 1.0\n}'
        assert isinstance(divmod(loss, 2)[1], float)

    report = predict(build_small, step, "cpu")
    assert weights.read_bytes() == b"weights"
    assert json.loads(log.read_text()) == {"loss": 1.0, "parts": [1.0]}
    assert report.assumed == []

    save(torch.ones(2), weights)
    assert torch.load(weights).tolist() == [1.0, 1.0]


def test_an_error_of_the_users_own_is_told_as_python_tells_it():
    def step(state):
        return "loss: " + forward(state).mean().item()

    with pytest.raises(TypeError, match=r'can only concatenate str \(not "float"\) to str'):
        predict(build_small, step, "cpu")


@pytest.mark.parametrize("foreach", [False, True])
def test_a_number_scales_a_tensor_and_bounds_what_an_optimizer_of_pytorch_does(foreach):
    def build():
        model = nn.Linear(64, 64)
        return model, torch.optim.Adafactor(model.parameters(), foreach=foreach)

    def step(state):
        model, optimizer = state
        out = model(torch.randn(4, 64))
        (out * out.detach().norm().item()).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weight = model.weight
            weight.addcdiv_(weight, weight.exp(), value=-weight.norm().item())

    check_peak(build, step)


def test_numbers_of_an_optimizer_of_ones_own_are_factors():
    def build():
        return nn.Linear(64, 64)

    def step(model):
        model(torch.randn(4, 64)).mean().backward()
        weight, grad = model.weight.detach(), model.weight.grad
        trust = grad.norm().item()
        weight.lerp_(grad, trust).addcdiv_(grad, weight.abs() + 1, value=-trust)
        weight.masked_fill_(grad.abs() > trust, trust)
        torch._foreach_mul_([weight, grad], [trust, 1.0])
        model.zero_grad()

    check_peak(build, step)


PUBLIC = [
    ("Llama", "plain"),
    ("BART", "checkpointing"),
    ("ViT", "autocast"),
    ("T5", "plain"),
    ("Mixtral", "checkpointing"),
]


@pytest.mark.parametrize("name, variant", few_fast(PUBLIC, 5))
def test_public_architectures_are_predicted_within_the_bound_of_the_benchmark(name, variant):
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = benchmark.compare(name, variant)
    assert found.recorded > 2**20
    assert not benchmark.failure(name, variant, found)


# ---- what it is


def test_parameters_gradients_states_inputs_and_activations_are_told_apart():
    model, _ = TRANSFORMER[0]()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    report = predicted("transformer", "cpu")

    at_update = report.stages["optimizer"]
    count = len(list(model.parameters()))
    assert at_update["parameter"] == at_update["gradient"] == parameters
    assert at_update["optimizer"] == 2 * parameters + 4 * count
    inputs, _ = tokens()
    row = inputs.untyped_storage().nbytes()
    assert report.stages["head forward"]["input"] == row
    assert report.stages["layers.* forward"]["activation"] > parameters
    assert "activation" not in report.stages["start"]


def test_what_a_model_keeps_is_no_input_of_the_loss_module_behind_it():
    def build():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        return model, torch.nn.MSELoss()

    def step(state):
        model, criterion = state
        rows, targets = torch.randn(500, 64), torch.randn(500, 128)
        criterion(model(rows), targets).backward()

    at_loss = predict(build, step, "cpu").stages["forward"]
    assert at_loss["input"] == 4 * 500 * (64 + 128)
    assert at_loss["activation"] >= 4 * 500 * 128


def test_values_that_follow_from_constants_are_those_of_a_real_step():
    def step(state):
        counted = torch.arange(6).view(2, 3) * 2
        found.extend([counted.tolist(), counted[1, 2].item(), int(counted.sum())])
        found.extend([bool((counted > 10).any()), bool((counted > 9).any()), bool(counted[0, 0])])
        found.append((counted % 4 == 2).nonzero().tolist())
        found.append(torch.arange(2).repeat_interleave(torch.tensor([1, 3])).tolist())

    found: list = []
    predict(build_small, step, "cpu")
    del found[8:]  # of the second step
    assert found[:6] == [[[0, 2, 4], [6, 8, 10]], 10, 30, False, True, False]
    assert found[6:] == [[[0, 1], [1, 0], [1, 2]], [0, 1, 1, 1]]


def test_copies_of_a_model_with_known_values_are_those_of_the_real_step():
    """A teacher that follows a model with batch norms, which count their batches."""

    def build():
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU())
        teacher = copy.deepcopy(model).requires_grad_(False)
        average = torch.optim.swa_utils.AveragedModel(model)
        return model, teacher, average, torch.optim.SGD(model.parameters())

    def step(state):
        model, teacher, average, optimizer = state
        rows = torch.randn(100, 32)
        (model(rows) - teacher(rows)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        assert copy.deepcopy(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]

    check_peak(build, step)


def test_a_users_optimizer_is_recognised_by_its_methods():
    sizes = predicted("a user's optimizer", "cpu").stages["start"]
    assert sizes["optimizer"] == sizes["parameter"]


def test_the_steady_peak_is_that_of_the_second_step():
    report = predicted("transformer", "cpu")
    assert report.peak == report.first_peak + report.stages["start"]["optimizer"]


def test_the_depth_of_stages_is_chosen():
    shallow = predict(*TRANSFORMER, "cpu", depth=1)
    assert "layers.* backward" in shallow.by_stage
    assert not any(".mlp" in stage for stage in shallow.by_stage)
    assert shallow.peak == predicted("transformer", "cpu").peak


def test_a_tensor_given_for_a_number_makes_the_shapes_of_the_real_step():
    def step(model):
        with torch.no_grad():
            out = model(torch.ones(2, 8))
            return [
                torch.arange(torch.tensor([2000] * 4).max()),
                torch.zeros(torch.tensor(2000)),
                torch.zeros(3, 1).expand(-1, torch.tensor(2000)).clone(),
                torch.zeros(3000)[: torch.tensor(2000)].clone(),
                torch.zeros(20).repeat(torch.tensor(100)),
                torch.zeros(3000).topk(torch.tensor(2000)),
                torch.zeros(4000).split(torch.tensor(2000))[0].clone(),
                F.one_hot(torch.arange(99)),
                F.one_hot(out.argmax(1), 2000),
                torch.full((2000,), out.mean()),
                torch.zeros(2000).add_(torch.ones(2000), alpha=out.mean()),
                torch.zeros(3, 2000)[out.argmax() % 3].clone(),
                torch.zeros(9000),  # more than what the others hold inside
            ]

    def build():
        return nn.Linear(8, 8)

    check_peak(build, step)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: torch.zeros(out.argmax()),
        lambda out: torch.zeros(9)[: out.argmax()],
        lambda out: torch.zeros(9).split(split_size=out.argmax()),
        lambda out: F.one_hot(out.argmax(1)),
        lambda out: bool(torch.tensor([out.mean().item()]) > 0.5),
        lambda out: bool((torch.arange(3) * out.mean().item()).sum() > 0.5),
        lambda out: bool(torch.zeros(2).add_(1, alpha=out.mean().item()).sum() > 0.5),
        lambda out: bool((torch.arange(3) > out.mean().item()).any()),
        lambda out: bool(torch.full((2,), out.mean().detach()).sum() > 0.5),
    ],
)
def test_a_shape_or_a_decision_by_a_tensor_made_of_an_unknown_number_is_refused(make):
    with pytest.raises(Refused, match=r"test_footprint.py:.*decides by it"):
        predict(lambda: nn.Linear(8, 8), lambda model: make(model(torch.ones(2, 8))), "cpu")


# ---- data


class Rows(torch.utils.data.Dataset):
    """Rows that are cropped and turned by values, as augmentations do."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randn(800)
        first = torch.randint(32, ()).item()
        row = row[first : first + 768]
        return {"row": row.flip(0) if torch.rand(()) < 0.5 else row, "label": index % 10}


def loaded(workers):
    def build():
        loader = torch.utils.data.DataLoader(Rows(), 8, shuffle=True, num_workers=workers)
        return *with_optimizer(mlp)(), loader, []

    return build


def on_loaded_rows(state):
    model, optimizer, loader, epoch = state
    if not epoch:
        epoch.append(iter(loader))
    batch = next(epoch[0])
    loss = F.cross_entropy(model(batch["row"]), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_shuffling_loader_whose_data_decide_gives_the_batches_of_the_real_step():
    report = predict(loaded(0), on_loaded_rows, "cpu")
    assert report.stages["start"]["input"] == 8 * 768 * 4 + 8 * 8
    assert report.peak == pytest.approx(measure(loaded(0), on_loaded_rows), abs=TOLERANCE)
    assert report.peak == predict(loaded(2), on_loaded_rows, "cpu").peak


class Item:
    def __init__(self, row):
        self.row = row


@dataclasses.dataclass(slots=True, frozen=True)
class Slots:
    row: torch.Tensor


@pytest.mark.parametrize("item", [Item, Slots])
def test_objects_of_a_dataset_are_imagined_and_stay_as_they_are(item):
    held = [item(torch.ones(8, 768)) for _ in range(8)]
    found = []

    def build():
        loader = torch.utils.data.DataLoader(held, batch_size=None)
        return nn.Linear(768, 10), iter(loader)

    def step(state):
        model, items = state
        row = next(items).row
        found.append(type(row))
        model(row).mean().backward()

    report = predict(build, step, "cpu")
    assert report.stages["start"]["input"] == 8 * 768 * 4
    assert not any(isinstance(one.row, FakeTensor) for one in held)
    assert found == [FakeTensor] * 2


@pytest.mark.parametrize("weights", [lambda: [0.0] * 60 + [1.0] * 4, lambda: torch.rand(64)])
def test_a_sampler_that_build_makes_draws_by_the_weights_that_are_known(weights):
    drawn = []

    class Drawn(Rows):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    def build():
        sampler = torch.utils.data.WeightedRandomSampler(weights(), 64)
        loader = torch.utils.data.DataLoader(Drawn(), 8, sampler=sampler)
        return *loaded(0)()[:2], loader, []

    peak = predict(build, on_loaded_rows, "cpu").peak
    assert (min(drawn) >= 60) == isinstance(weights(), list)
    indices = 64 * 8  # which the real sampler holds
    assert peak == pytest.approx(measure(build, on_loaded_rows) - indices, abs=TOLERANCE)


@pytest.mark.parametrize("size", [8, None])  # batches, or views of the data
def test_data_that_build_makes_for_a_loader_are_in_host_memory_on_cuda(size):
    def step(state):
        model, batches = state
        (rows,) = next(batches)
        return model(rows.view(-1, 768)).mean().backward()

    def build(data):
        dataset = torch.utils.data.TensorDataset(data())
        return mlp(), iter(torch.utils.data.DataLoader(dataset, size))

    made = predict(lambda: build(lambda: torch.zeros(100_000, 768)), step, "cuda")
    outside = torch.zeros(100, 768)
    given = predict(lambda: build(lambda: outside), step, "cuda")
    assert made.peak == given.peak > 0
    assert made.first_peak == given.first_peak


CORPUS = numpy.arange(20_000) % 65


def random_rows():
    """As nanoGPT takes a batch from a file."""
    starts = torch.randint(len(CORPUS) - 64, (12,))
    rows = [torch.from_numpy(CORPUS[i : i + 64].astype(numpy.int64)) for i in starts]
    return torch.stack(rows)


def test_random_integers_have_values_of_which_one_draw_is_predicted():
    def step(model):
        rows = random_rows()
        found.append(rows.shape)
        drawn = set()
        while len(drawn) < 3:  # it would not end if all draws were equal
            drawn.add(torch.randint(2, 5, ()).item())
        found.append(drawn)
        return model(rows.float()).mean()

    def build():
        return nn.Linear(64, 64)

    found: list = []
    report = predict(build, step, "cpu")
    assert found[:2] == [(12, 64), {2, 3, 4}]
    line = random_rows.__code__.co_firstlineno + 3
    words = f"the random integers that test_footprint.py:{line} reads are those of one draw"
    assert words in report.assumed
    assert report.peak == pytest.approx(measure(build, step), abs=TOLERANCE)


def test_a_shape_that_depends_on_random_integers_is_refused():
    with pytest.raises(Refused, match="shape depends on values"):
        predict(mlp, lambda _: torch.randint(2, (9,)).nonzero(), "cpu")
    with pytest.raises(Refused, match="give it output_size"):
        predict(mlp, lambda _: torch.arange(9).repeat_interleave(torch.randint(2, (9,))), "cpu")


def test_a_list_answers_one_reading_of_a_line_after_another():
    def step(model):
        count = model(torch.ones(2, 8)).argmax()
        found.append(torch.arange(20)[count : count + 8].tolist())
        return torch.ones(2)

    found: list = []
    answers = {f"test_footprint.py:{step.__code__.co_firstlineno + 2}": [3, 11]}
    predict(lambda: nn.Linear(8, 8), step, "cpu", answers=answers)
    assert found == [list(range(3, 11))] * 2


# ---- a script


# ---- CUDA


def made_by(report) -> list[str]:
    """The operator of each storage."""
    return [storage.op for storage in report.trace.storages.values()]


def test_a_checkpoint_saves_random_states_in_a_cpus_memory_and_not_on_a_gpu():
    on_cpu, on_cuda = (
        [
            storage.size
            for storage in predicted("checkpointing, non-reentrant", target).trace.storages.values()
        ]
        for target in ("cpu", "cuda")
    )
    state = torch.get_rng_state().nbytes
    layers = 3
    assert on_cpu.count(state) == 2 * layers  # the saved one, and the one around a recomputation
    assert on_cuda.count(state) == 0


def test_on_cuda_attention_keeps_no_scores_dropout_keeps_booleans_and_lists_are_updated_at_once():
    on_cpu, on_cuda = (predicted("transformer with dropout", target) for target in ("cpu", "cuda"))
    assert on_cpu.reserved is None
    assert on_cuda.reserved >= on_cuda.peak
    assert on_cuda.peak - on_cuda.stages["optimizer"]["workspace"] < on_cpu.peak
    assert on_cuda.stages["optimizer"]["temporary"] > on_cpu.stages["optimizer"]["temporary"]
    operators = made_by(on_cuda)
    assert "aten.native_dropout.default" in operators
    assert "aten._scaled_dot_product_efficient_attention.default" in operators


@pytest.mark.parametrize("name", ["checkpointing, reentrant", "checkpointing, non-reentrant"])
def test_what_is_recomputed_in_the_backward_takes_the_operators_of_cuda_too(name):
    storages = predicted(name, "cuda").trace.storages.values()
    recomputed = [storage.op for storage in storages if "recompute" in storage.stage]
    assert "aten._scaled_dot_product_efficient_attention.default" in recomputed


def attend(q, k, v):
    attended = F.scaled_dot_product_attention(q, k, v)
    return F.dropout(attended, 0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_outside_of_modules_is_recomputed_by_the_operators_of_cuda(
    reentrant,
):
    def loss(model):
        heads = model(torch.randn(2, 4, 32, 64)).chunk(3, -1)
        return checkpoint(attend, *heads, use_reentrant=reentrant).sum()

    operators = made_by(predict(*trained(lambda: nn.Linear(64, 192), loss)))
    efficient = "aten._scaled_dot_product_efficient_attention.default"
    assert operators.count(efficient) == 2 * 4  # four results, twice
    assert operators.count("aten.native_dropout.default") == 2 * 2
    assert not any("for_cpu" in operator for operator in operators)


def test_attention_takes_the_kernel_of_its_precision_under_autocast_too():
    build, step = on_tokens(one_layer, autocast=True)
    operators = made_by(predict(build, step))
    assert "aten._scaled_dot_product_flash_attention.default" in operators


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_takes_the_kernels_of_cuda(weights):
    def make():
        return nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

    def loss(model):
        x = torch.randn(2, 32, 64)
        return model(x, x, x, need_weights=weights)[0].sum()

    attention = F.scaled_dot_product_attention
    report = predict(*trained(make, loss))
    operators = made_by(report)
    assert ("aten.native_dropout.default" in operators) == weights
    efficient = "aten._scaled_dot_product_efficient_attention.default"
    assert (efficient in operators) == (not weights)
    left_out = any("memory-efficient attention" in words for words in report.not_modelled)
    assert left_out == (not weights)
    assert F.scaled_dot_product_attention is attention


def test_what_save_on_cpu_keeps_for_the_backward_is_in_host_memory_on_cuda():
    build, _ = TRANSFORMER

    def step(state):
        with save_on_cpu(pin_memory=True):
            loss = state[0](tokens()[0]).mean()
        loss.backward()

    kept = predicted("transformer", "cuda").stages["layers.* forward"]["activation"]
    report = predict(build, step)
    assert report.stages["layers.* forward"].get("activation", 0) < kept / 10
    assert report.trace.host_peak > kept
    assert not predict(build, step, "cpu").trace.host_peak


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_grad_scaler_lets_the_optimizer_step(device):
    def build():
        model = nn.Linear(64, 64)
        return model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(device)

    def step(state):
        model, optimizer, scaler = state
        scaler.scale(model(torch.randn(4, 64)).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    with warnings.catch_warnings():  # without a GPU, a scaler for CUDA is disabled
        warnings.simplefilter("ignore")
        recorded = measure(build, step)
    assert predict(build, step, "cpu").peak == pytest.approx(recorded, abs=TOLERANCE)

    on_cuda = predict(build, step)
    assert any("GradScaler lets the optimizer step" in words for words in on_cuda.assumed)
    assert on_cuda.stages["optimizer"]["optimizer"] > on_cuda.stages["optimizer"]["parameter"]
    operators = made_by(on_cuda)
    assert "aten.reciprocal.default" in operators


def test_what_is_not_modelled_is_said():
    report = predicted("convolutions", "cuda")
    assert any("cuDNN's convolutions" in words for words in report.not_modelled)
    assert "not in the prediction: " in str(report)


@pytest.mark.slow
def test_a_convolution_that_is_too_large_to_be_run_is_said(monkeypatch):
    assert not predicted("convolutions", "cpu").not_modelled
    monkeypatch.setattr(probe, "LARGEST", 0)
    left_out = predict(*STEPS["convolutions"], "cpu").not_modelled
    assert any("scratch memory of aten.convolution.default" in words for words in left_out)


# ---- what is written


def test_a_report_is_text_json_and_a_page(tmp_path):
    report = predicted("transformer", "cuda")
    assert "<- peak" in str(report) and "= device" in str(report)
    found = json.loads(json.dumps(report.json()))
    assert found["peak_live_bytes"] == report.peak == max(found["stages"].values())
    assert found["peak_reserved_bytes"] == report.reserved
    assert found["torch"] == torch.__version__ and torch.__version__ in str(report).splitlines()[0]

    report.html(str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "layers.*.mlp" in page and "<svg" in page
    with pytest.raises(ValueError, match="cannot be written"):
        report.html("/nowhere/page.html")


# ---- refusals


def forward(state):
    model, _ = state
    return model(tokens()[0])


def decides(state):
    if forward(state).mean() < 3:
        return


def decides_by_a_number(state):
    return torch.ones(9) if forward(state).mean().item() > 3 else 2


def decides_by_a_float(state):
    return torch.ones(9) if float(forward(state).mean()) > 3 else 2


def loops_by_a_number(state):
    logits = forward(state)
    while logits.mean().item() < 3:
        pass


def makes_a_range(state):
    return torch.arange(forward(state).mean().item())


def counts(state):
    return torch.zeros(forward(state).argmax().item())


def selects(state):
    logits = forward(state)
    return logits[logits > 0]


def wants_cuda(state):
    return forward(state).cuda()


def begins_on_cuda(state):
    return torch.ones(4, device="cuda")


def casts_on_cuda(state):
    with torch.autocast("cuda", torch.bfloat16):
        return forward(state)


def mixes_devices(state):
    model, _ = state
    return model(tokens()[0].to("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the CUDA device")
@pytest.mark.parametrize("step", [wants_cuda, begins_on_cuda, casts_on_cuda, mixes_devices])
def test_a_step_that_asks_for_cuda_without_one_is_refused(step):
    refused(step, "build and run it on the CPU")


@torch.library.custom_op("footprint_test::on_a_gpu", mutates_args=(), device_types="cuda")
def on_a_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def runs_a_kernel(state):
    return on_a_gpu(forward(state))


def takes_an_address(state):
    return forward(state).data_ptr()


def leaves_torch(state):
    return forward(state).detach().numpy()


def downloads(state):
    return urllib.request.urlopen("http://models.invalid/weights")


def gathers_sparsely(state):
    table = nn.Embedding(100, 4, sparse=True)
    table(torch.arange(8)).sum().backward()


def nests(state):
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def traces(state):
    torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))


class Packed(nn.Parameter):
    """What bitsandbytes makes of weights in 4 bits has such a class."""


def quantizes(state):
    torch.Tensor._make_subclass(Packed, torch.zeros(4))


def packs(state):
    torch.nn.utils.rnn.pack_padded_sequence(torch.randn(8, 2, 4), [8, 5])


def linearizes(state):
    torch.func.linearize(nn.Linear(4, 4), torch.ones(2, 4))


def searches_along_a_line(state):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: loss_of(model, images))


def aligns(state):
    log_probs = torch.randn(50, 2, 20)
    F.ctc_loss(log_probs, torch.ones(2, 9).long(), (50, 50), (9, 9))


@pytest.mark.parametrize(
    "step, words",
    [
        (gathers_sparsely, "sparse=False"),
        (nests, "predict the padded batch"),
        (traces, "predict the module itself"),
        (packs, "predict the padded batch"),
        (quantizes, "load the weights in bf16"),
        (linearizes, "take torch.func.jvp"),
        (searches_along_a_line, "LBFGS"),
        (aligns, "S the longest target"),
        (runs_a_kernel, "say what it returns (register_fake)"),
        (takes_an_address, "say what it returns (register_fake)"),
        (leaves_torch, "takes values out of a tensor"),
        (downloads, "connects to models.invalid, but nothing is downloaded"),
        (decides, "answers={'test_footprint.py:"),
        (loops_by_a_number, "answers={'test_footprint.py:"),
        (makes_a_range, "answers={'test_footprint.py:"),
        (counts, "decides by it"),
        (selects, "shape depends on values"),
    ],
)
def test_what_has_no_value_is_refused_with_the_line_of_the_users_file(step, words, monkeypatch):
    monkeypatch.setattr(unknown, "MOST_READS", 1000)
    refused(step, words)


def refused(step, words: str):
    with pytest.raises(Refused) as error:
        predict(build_small, step, "cpu")
    text = str(error.value)
    first = step.__code__.co_firstlineno
    lines = range(first, first + 4)
    assert any(text.startswith(f"test_footprint.py:{line}") for line in lines), text
    assert words in text
    assert "\n" not in text


def test_a_build_that_downloads_is_refused_and_later_connections_are_not():
    def build():
        return downloads(None)

    with pytest.raises(Refused, match="make the model from its configuration"):
        predict(build, lambda state: None)
    sys.audit("socket.getaddrinfo", "models.invalid", 80, 0, 0, 0)  # what a connection begins with


@pytest.mark.parametrize("step", [decides_by_a_float, decides_by_a_number])
def test_a_number_that_decides_is_taken_as_1_which_is_said_or_is_answered(step):
    line = f"test_footprint.py:{step.__code__.co_firstlineno + 1}"
    low = predict(build_small, step, "cpu")
    assert low.assumed == [f"the number that {line} reads is taken as 1"]
    high = predict(build_small, step, "cpu", answers={line: 4.0})
    assert high.assumed == []
    assert len(high.trace.storages) == len(low.trace.storages) + 1


def test_an_answer_of_another_kind_is_refused():
    line = f"test_footprint.py:{decides.__code__.co_firstlineno + 1}"
    with pytest.raises(Refused, match="bool"):
        predict(build_small, decides, "cpu", answers={line: "no"})


def compiled_model():
    model, optimizer = with_optimizer(mlp)()
    return torch.compile(model), optimizer


def compiled_in_place():
    model, optimizer = with_optimizer(mlp)()
    model.compile(dynamic=True)
    return model, optimizer


def compiled_optimizer():
    model, optimizer = with_optimizer(mlp)()
    optimizer.step = torch.compile(optimizer.step)
    return model, optimizer


@pytest.mark.parametrize("build", [compiled_model, compiled_in_place, compiled_optimizer])
def test_what_is_compiled_is_refused_with_the_line_that_runs_it(build):
    step = functools.partial(train, batch=images)
    with pytest.raises(Refused, match=r"footprint_models.py:\d+: .* without torch.compile"):
        predict(build, step, "cpu")

    # what compiles later in this process has the shapes that it would have had
    assert torch._dynamo.config.assume_static_by_default
    assert torch._dynamo.config.automatic_dynamic_shapes


def test_a_step_that_makes_nothing_is_refused():
    with pytest.raises(Refused, match="build makes the model and the optimizer"):
        predict(lambda: None, lambda state: None, "cpu")


def test_unknown_targets_are_refused():
    with pytest.raises(Refused, match="choose one of cpu, cuda"):
        predict(*TRANSFORMER, "tpu")


# ---- alone

OF_TORCH = ("torchgen", "functorch", "sympy", "mpmath", "filelock", "fsspec", "jinja2", "networkx")
ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from footprint import predict
from footprint import measure
from footprint_models import STEPS

build, step = STEPS["checkpointing, reentrant"]
assert abs(predict(build, step, "cpu").peak - measure(build, step)) <= 12
report = predict(build, step)
report.html(sys.argv[1] + "/page.html")
report.svg(sys.argv[1] + "/picture.svg")
assert not {"longhaul", "model", "numpy", "transformers"} & set(sys.modules)
"""


@pytest.mark.slow
def test_the_package_alone_in_an_empty_folder_needs_torch_only(tmp_path):
    """`python -S` has no installed packages but those that the folder names."""
    packages = Path(torch.__file__).parent.parent
    for name in ("torch", "typing_extensions.py", "markupsafe", *OF_TORCH):
        (tmp_path / name).symlink_to(packages / name)
    (tmp_path / "footprint").symlink_to(ROOT / "footprint")
    (tmp_path / "footprint_models.py").symlink_to(ROOT / "tests" / "footprint_models.py")
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "picture.svg").read_text().startswith("<svg xmlns=")

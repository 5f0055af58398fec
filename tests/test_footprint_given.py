"""footprint/: tensors that are there before the prediction, and weights that `build` loads, count
as those that `build` makes.
"""

import contextlib
import copy
import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from footprint import estimate_memory, measure, predict
from tests.footprint_models import WIDTH, one_layer

TOLERANCE = 12  # bytes
VOCABULARY = 1000
BYTES = 4 * VOCABULARY * WIDTH  # of an embedding in fp32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


class Normed(nn.Module):
    """Buffers that a step changes, and one that two layers share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        mask = torch.ones(WIDTH, WIDTH)
        for layer in self.layers:
            layer.register_buffer("mask", mask)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        for layer in self.layers:
            x = layer(x) @ layer.mask
        return x


class Viewed(nn.Module):
    """Two weights in one storage."""

    def __init__(self):
        super().__init__()
        both = torch.randn(2 * VOCABULARY, WIDTH)
        self.embedding = nn.Parameter(both[:VOCABULARY])
        self.head = nn.Parameter(both[VOCABULARY:])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding) @ self.head.t()


MODELS = {"tied": Tied, "normed": Normed, "viewed": Viewed}
# what `build` does with a model that is already there, or that it makes itself
USES = {
    "left": lambda model: model,
    "frozen": lambda model: model.requires_grad_(False),
    "copied": copy.deepcopy,
    "moved": lambda model: model.cuda(),
    "half": lambda model: model.to("cuda", torch.bfloat16),
    "double": lambda model: model.double(),
    "named": lambda model: model.to(device="cuda"),
    "there": lambda model: model.float(),
}


def run(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    device = next(model.parameters()).device
    tokens = torch.randint(VOCABULARY, (4, 16), device=device)
    loss = model(tokens).square().mean()
    if optimizer:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def training(make, use=lambda model: model):
    """build and step of a model that `make` returns."""

    def build():
        model = use(make())
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, torch.optim.AdamW(trained) if trained else None

    return build, lambda state: run(*state)


def check_same(found, expected, more: int = 0):
    """The same memory in every stage, and `more` bytes that are alive all the time."""
    assert found.peak == expected.peak + more
    totals = {stage: total + more for stage, total in expected.by_stage.items()}
    assert found.by_stage == totals


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_before_the_prediction_counts_as_one_that_build_makes(name, use):
    expected = predict(*training(MODELS[name], USES[use]), "cuda")
    model = MODELS[name]()
    found = predict(*training(lambda: model, USES[use]), "cuda")
    more = stored(model) if use == "copied" else 0
    check_same(found, expected, more)
    if use != "copied":
        assert found.stages == expected.stages
        assert found.host_peak == expected.host_peak


def stored(model: nn.Module) -> int:
    """Bytes of the storages of a model."""
    held = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.parametrize("use", ["left", "double"])
def test_on_a_cpu_it_takes_what_the_allocator_records(use):
    recorded = measure(*training(Normed, USES[use]))
    model = Normed()
    report = predict(*training(lambda: model, USES[use]), "cpu")
    assert report.peak == pytest.approx(recorded, abs=TOLERANCE)


@pytest.mark.parametrize("use", USES)
def test_the_model_is_as_it_was_when_the_prediction_ends(use):
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(state):
        run(state, optimizer if state.embedding.weight.requires_grad else None)

    reports = [predict(lambda: USES[use](model), step, "cuda") for _ in range(2)]
    assert reports[0].stages == reports[1].stages

    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name])
    held = (*model.parameters(), *model.buffers())
    assert not any(isinstance(one, FakeTensor) or one.grad is not None for one in held)
    assert not optimizer.state

    model.requires_grad_()
    run(model, optimizer)
    assert not torch.equal(before["embedding.weight"], model.embedding.weight)


def test_an_optimizer_made_before_the_prediction_has_its_states_in_it():
    def build():
        model = Tied()
        return model, torch.optim.AdamW(model.parameters())

    def moved(state):
        state[0].cuda()
        return state

    def step(state):
        run(*state)

    made = build()
    check_same(predict(lambda: made, step), predict(build, step))
    check_same(predict(lambda: moved(made), step), predict(lambda: moved(build()), step))


def test_a_weight_that_two_models_share_moves_once():
    def both():
        first, second = Tied(), Tied()
        second.embedding.weight = second.head.weight = first.embedding.weight
        return first, second

    def build(models):
        models[0].cuda()
        count = predict_alive()
        models[1].cuda()
        assert predict_alive() - count == 4 * (WIDTH * WIDTH + WIDTH)  # its middle alone
        return models

    def predict_alive() -> int:
        return torch.cuda.memory_allocated()

    def step(models):
        tokens = torch.randint(VOCABULARY, (4, 16), device="cuda")
        sum(model(tokens).square().mean() for model in models).backward()
        for model in models:
            model.zero_grad()

    there = both()
    expected = predict(lambda: build(both()), step)
    check_same(predict(lambda: build(there), step), expected)


def test_an_average_of_the_weights_and_a_table_count_if_they_are_there_before():
    model = Tied()
    average = copy.deepcopy(model).requires_grad_(False)
    table = torch.randn(VOCABULARY, WIDTH)
    assert average.head.weight is average.embedding.weight

    def build(kept, rows):
        def made():
            model = Tied()
            average = copy.deepcopy(model).requires_grad_(False) if kept is None else kept
            return model, average, table.clone() if rows is None else rows

        return made

    def step(state):
        model, average, rows = state
        x = rows[torch.randint(VOCABULARY, (4, 16))]
        model.middle(x).square().mean().backward()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        model.zero_grad()

    def fresh():
        return torch.randn(VOCABULARY, WIDTH)

    expected = predict(lambda: (Tied(), copy.deepcopy(Tied()), fresh()), step)
    check_same(predict(lambda: (Tied(), average, table), step), expected)
    check_same(predict(lambda: (model, average, table), step), expected)
    assert not any(isinstance(one, FakeTensor) for one in average.parameters())


def test_what_is_there_before_is_in_host_memory_if_the_step_says_cuda():
    table = torch.randn(VOCABULARY, WIDTH)

    def step(layer):
        rows = table[torch.randint(VOCABULARY, (4,))]
        layer(rows.cuda()).sum().backward()

    report = predict(lambda: nn.Linear(WIDTH, WIDTH).cuda(), step)
    assert report.peak < BYTES + report.stages[report.peak_stage]["workspace"]
    assert BYTES <= report.host_peak < 1.1 * BYTES


def test_values_made_before_are_known_and_are_not_changed():
    count, mean = torch.tensor(3), torch.zeros(())
    flags = torch.arange(2**19) % 4 == 0
    changed = flags.clone()

    def step(_):
        count.add_(1)
        assert count.item() == 3 + step.calls
        assert flags.nonzero().shape == (2**17, 1)
        changed[0].logical_not_()
        mean.add_(torch.randn(()))
        assert f"{mean.item():.1f}" == "1.0"  # as a number without a value
        step.calls += 1

    step.calls = 1
    predict(lambda: None, step)
    assert count == 3 and mean == 0
    assert torch.equal(flags, changed)


def test_a_model_and_a_batch_are_counted_once_by_estimate_memory():
    model, tokens = Normed(), torch.randint(VOCABULARY, (4, 16))
    sizes = estimate_memory(model, tokens, torch.optim.SGD, target="cpu").stages["start"]
    assert sizes["parameter"] + sizes["buffer"] == stored(model)
    assert sizes.get("input", 0) <= tokens.nbytes


# ---- meta


MATERIALISED = {
    "under": lambda: on_meta(Tied),
    "moved": lambda: Tied().to("meta"),
    "named": lambda: nn.Embedding(VOCABULARY, WIDTH, device="meta"),
}


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("where", ["before", "build"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MATERIALISED)
def test_what_is_on_meta_has_no_memory(name, device, where):
    there = MATERIALISED[name]()

    def build():
        shell = there if where == "before" else MATERIALISED[name]()
        return shell, nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device=device)

    def step(state):
        shell, layer = state
        for parameter in shell.parameters():
            torch.zeros_like(parameter).add_(parameter)
        layer(torch.randn(4, WIDTH, device=device)).sum().backward()
        layer.zero_grad()

    report = predict(build, step)
    sizes = report.stages["start"]
    assert sizes["parameter"] == 4 * (WIDTH * WIDTH + WIDTH)
    assert report.peak - sizes["workspace"] < BYTES
    assert report.host_peak < BYTES


def test_an_operator_on_meta_is_not_run_to_find_what_it_holds():
    def step(layer):
        assert layer(torch.empty(2**16, 3, 2**12, 2**12, device="meta")).is_meta

    layer = nn.Conv2d(3, 8, 3, device="meta")
    report = predict(lambda: (torch.ones(4), layer), lambda state: step(state[1]), "cpu")
    assert report.peak == 16


# ---- defaults


def test_a_default_device_is_that_of_tensors_made_without_one():
    """Set in build, in the step, before the prediction, or for a block of either."""

    def build(how):
        if how == "build":
            torch.set_default_device("cuda")
        with torch.device("cuda") if how == "block" else contextlib.nullcontext():
            model = one_layer()
        model = model.cuda() if how == "step" else model
        return model, torch.optim.AdamW(model.parameters())

    def step(state, how):
        model, optimizer = state
        if how == "step":
            torch.set_default_device("cuda")
        with torch.device("cuda") if how == "block" else contextlib.nullcontext():
            assert torch.get_default_device().type == "cuda"
            tokens = torch.randint(64, (2, 16))
        assert tokens.is_cuda
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def report(how):
        return predict(functools.partial(build, how), functools.partial(step, how=how))

    found = [report(how) for how in ("block", "build", "step")]
    torch.set_default_device("cuda")
    try:
        found.append(report("before"))
    finally:
        torch.set_default_device(None)
    in_block, *others = (one.peak for one in found)
    counts = 0
    if torch.__version__ < (2, 13):  # AdamW's numbers of steps are on the default device
        counts = 4 * len(list(one_layer().parameters()))  # bytes
    assert others == [in_block + counts] * 3
    assert found[0].stages["start"]["parameter"] == stored(one_layer())


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_what_a_step_sets_for_the_process_ends_with_the_prediction(target):
    def step(_):
        torch.set_default_device(target)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(5)
        os.environ["FOOTPRINT_TEST"] = "1"
        torch.set_grad_enabled(False)
        assert torch.randn(8).dtype == torch.float64

    torch.manual_seed(3)
    state = torch.get_rng_state()
    predict(lambda: None, step, target)
    assert torch.ones(1).device.type == "cpu" and torch.get_default_dtype() == torch.float32
    assert torch._GLOBAL_DEVICE_CONTEXT.device_context is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() and "FOOTPRINT_TEST" not in os.environ


# ---- weights that `build` loads


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def pretrained(folder, **options) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def adapted(folder) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    names = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
    return peft.get_peft_model(pretrained(folder, dtype=torch.bfloat16), config)


def tuning(make, device: str):
    """build and step of a language model that `make` returns."""

    def build():
        model = make()
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, torch.optim.AdamW(trained)

    def step(state):
        model, optimizer = state
        tokens = torch.randint(VOCABULARY, (4, 64), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return build, step


@pytest.mark.parametrize("make", [adapted, functools.partial(pretrained, dtype=torch.float32)])
def test_a_step_that_loads_its_weights_takes_what_the_allocator_records(make, llama, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the record is that of one thread
    functions = tuning(functools.partial(make, llama), "cpu")
    recorded = measure(*functions)
    assert predict(*functions, "cpu").peak == pytest.approx(recorded, rel=0.001)


def test_an_adapted_model_is_frozen_but_for_its_adapters_on_a_gpu(llama):
    frozen = stored(pretrained(llama, dtype=torch.bfloat16))
    report = predict(*tuning(lambda: adapted(llama).cuda(), "cuda"))
    sizes = report.stages["optimizer"]
    adapters = sizes["optimizer"] // 2
    assert frozen <= sizes["parameter"] + sizes["buffer"] <= frozen + adapters
    assert 0 < adapters < 0.2 * frozen


class Holding(nn.Module):
    """A wrapper like DistributedDataParallel."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)


def prompted(folder) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    return peft.get_peft_model(pretrained(folder), config)


def with_wrapped_layers(folder) -> nn.Module:
    model = pretrained(folder)
    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
    return model


WRAPPING = {
    "LoRA": adapted,
    "a learned prompt": prompted,
    "a module": lambda folder: Holding(pretrained(folder)),
    "a module around LoRA": lambda folder: Holding(adapted(folder)),
    "its layers": with_wrapped_layers,
}


@pytest.mark.parametrize("wrapped", WRAPPING.values(), ids=WRAPPING)
def test_stages_are_named_as_those_of_the_model_inside(wrapped, llama):
    report = predict(*tuning(lambda: wrapped(llama), "cpu"), depth=3)
    expected = {"model.layers.*.mlp backward", "model.layers.*.self_attn forward", "forward"}
    assert expected | {"lm_head forward"} <= set(report.by_stage)
    names = [group["module"] for group in report.largest]
    assert "model.embed_tokens.weight" in names
    for name in [*report.by_stage, *names]:
        assert "base_model" not in name and "module" not in name


DEVICE_MAPS = ["cuda", "auto", {"": 0}]


@pytest.mark.parametrize("place", DEVICE_MAPS, ids=str)
def test_weights_that_are_loaded_to_the_gpu_are_there(place, llama):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    options = dict(dtype=torch.bfloat16)
    expected = predict(*tuning(lambda: pretrained(llama, **options).cuda(), "cuda"))
    found = predict(*tuning(lambda: pretrained(llama, **options, device_map=place), "cuda"))
    check_same(found, expected)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16)
    )


def from_torch(model: nn.Module, folder, **options) -> nn.Module:
    model.load_state_dict(torch.load(folder / "weights.pt"), **options)
    return model


def mapped(model: nn.Module, folder, **options) -> nn.Module:
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), **options)
    return model


def from_safetensors(model: nn.Module, folder, **options) -> nn.Module:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "weights.safetensors"), **options)
    return model


def one_by_one(model: nn.Module, folder, **options) -> nn.Module:
    from safetensors import safe_open

    with safe_open(folder / "weights.safetensors", "pt") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model.load_state_dict(values, **options)
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    folder = tmp_path_factory.mktemp("weights")
    values = plain().state_dict()
    torch.save(values, folder / "weights.pt")
    safetensors.save_file(values, folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("load", [from_torch, mapped, from_safetensors, one_by_one])
def test_weights_of_a_file_take_what_the_allocator_records(load, assign, weights):
    def make():
        if not assign:
            return load(plain(), weights)
        return load(on_meta(plain), weights, assign=True)

    functions = training(make)
    recorded = measure(*functions)
    assert predict(*functions, "cpu").peak == pytest.approx(recorded, rel=0.001)

"""A decoding step on a CUDA device: its launches, counted, and that nothing in it waits."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longhaul import generate, kernels
from longhaul.clock import ClockedCache
from longhaul.generate import CapturedSteps
from longhaul.kinds import KINDS
from longhaul.sampling import draw
from longhaul.sparse.decode import logits
from model import ModelConfig
from tests.cuda_build.fakes import HOPPER, card

FLASH = "aten::_flash_attention_forward"
# Operators that start no kernel: they return views, or only allocate.
VIEWS = ("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split")
MORE_VIEWS = ("squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view")
ALLOCATIONS = ("lift_fresh", "empty", "empty_like", "empty_strided", "new_empty")
NO_LAUNCH = {f"aten::{name}" for name in VIEWS + MORE_VIEWS + ALLOCATIONS}


@pytest.fixture(autouse=True)
def by_name(monkeypatch):
    """The Triton kernels of sparse attention are recorded as operators, and do not run."""
    decode = pytest.importorskip("longhaul.sparse.triton.decode", reason="triton is not installed")

    def launch(kernel, grid, num_warps=4, **arguments):
        assert set(arguments) == set(kernel.arg_names)
        for name in kernel.arg_names:
            tensor = name.endswith("_ptr") and arguments[name] is not None
            assert not tensor or arguments[name].is_cuda, (kernel.__name__, name)
        current.run.operators.names.append(f"longhaul::{kernel.__name__}")

    monkeypatch.setattr(decode, "launch", launch)


current = SimpleNamespace(run=None)


def launches(names: list[str]) -> list[str]:
    return [name for name in names if name not in NO_LAUNCH]


def run_once(step, device):
    """In place of a capture."""
    step()
    return step


@functools.cache
def steps_of(layers: int, attention_type: str, captured: bool) -> list[list[str]]:
    """The operators of four steps; with sparse attention the last one completes a block."""
    config = ModelConfig.preset(
        "4B",
        num_layers=layers,
        vocab_size=1024,
        attention=KINDS[attention_type].config(),
        compute_dtype="bfloat16",
    )
    with torch.device("meta"):
        decoder = kernels.decoder(config).to(config.dtype)
    found = []
    with card(HOPPER) as run, torch.no_grad():
        current.run = run
        decoder.to_empty(device="cuda").tie_weights()
        cache = decoder.new_cache(1, 4096)
        for layer in cache.layers:
            layer.length = 3004  # 3007 is the last token of a compressed block

        token_11 = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
        if captured:
            step = CapturedSteps(decoder, ClockedCache(cache, 1, 4096, "cuda"), run_once)
        for _ in range(4):
            run.operators.names.clear()
            run.choices.chosen.clear()
            if captured:
                step(token_11)
            else:
                decoder(token_11, cache=cache)
            found.append(run.operators.names + run.choices.chosen)
    return found


def of_a_layer(attention_type: str, captured: bool, step: int = 2) -> list[str]:
    """What a third layer adds to a step."""
    two = launches(steps_of(2, attention_type, captured)[step])
    added = launches(steps_of(3, attention_type, captured)[step])
    for name in two:
        added.remove(name)
    return added


@pytest.mark.parametrize(
    "attention_type, captured, count",
    [("standard", False, 18), ("standard", True, 18), ("nsa", False, 26), ("nsa", True, 25)],
)
def test_the_launches_of_a_layer_are_counted(attention_type, captured, count):
    names = of_a_layer(attention_type, captured)
    assert len(names) == count, sorted(names)


def test_a_step_of_fixed_shapes_reads_the_cache_by_flash_attention_and_a_tensor_of_lengths():
    names = of_a_layer("standard", captured=True)
    assert [name for name in names if "attention" in name] == [FLASH]


def test_a_step_of_fixed_shapes_has_the_same_operators_for_every_token():
    """Only those that complete a block differ: that is why there are two graphs."""
    first, second, third, fourth = steps_of(1, "nsa", captured=True)
    assert second == third
    assert len(fourth) > len(third)
    assert not any("math" in name or "cudnn" in name for name in first + fourth)


@pytest.mark.parametrize("temperature, top_k, top_p", [(0, 0, 1.0), (0.8, 50, 1.0), (1.0, 0, 0.9)])
def test_a_token_is_chosen_without_waiting_for_the_device(temperature, top_k, top_p):
    with card(HOPPER):
        logits_1V = torch.empty(1, 1000, device="cuda", dtype=torch.bfloat16)
        uniform_1 = torch.empty(1, device="cuda", dtype=torch.float64)
        token_1 = draw(logits_1V, uniform_1, temperature, top_k, top_p)
    assert token_1.device.type == "cuda"
    assert token_1.shape == (1,)


class Reads(TorchDispatchMode):
    """Answers 1 to whoever waits for a number of the device, and counts how often."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
            return 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("attention_type", ["standard", "nsa"])
def test_the_host_waits_once_per_token(attention_type, captured, monkeypatch):
    """Prompts of sparse attention are computed by kernels with tests of their own."""
    config = ModelConfig.preset(
        "tiny",
        num_layers=1,
        vocab_size=64,
        attention=KINDS[attention_type].config(),
        compute_dtype="bfloat16",
    )
    with torch.device("meta"):
        decoder = kernels.decoder(config)
    generator = SimpleNamespace(manual_seed=lambda seed: None)
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    monkeypatch.setattr(generate, "cuda_graph", run_once)
    prompt = [5] if attention_type == "nsa" else [5, 6, 7]

    with card(HOPPER) as current.run, Reads() as reads:
        decoder.to_empty(device="cuda").tie_weights()
        if attention_type == "nsa" and not captured:
            attention = decoder.layers[0].attention
            attention.ops = dataclasses.replace(attention.ops, sparse=first_token_of)
        tokens = list(generate.generate(decoder, prompt, 6, temperature=0, captured=captured))
    assert tokens == [1] * 6
    assert reads.count == 6


def first_token_of(q, *_):
    """In place of sparse attention to a prompt."""
    return torch.empty_like(q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_chosen_keys_are_one_product(dtype):
    with card(HOPPER) as run:
        q_XRK, k_XSK = (torch.empty(8, n, 64, dtype=dtype, device="cuda") for n in (4, 512))
        run.operators.names.clear()
        assert logits(q_XRK, k_XSK).dtype == torch.float32
    assert launches(run.operators.names) == ["aten::bmm"]

"""Compiles the Triton kernels of a training step for a GPU that is not here: `python -m
benchmarks.gpu --precompile FOLDER --capability 90`.

One layer of the 4B runs forward and backward on tensors without values; each launch compiles what
a real one would run, with the same arguments and so under the same key. Take the folder to the
machine with the GPU, which needs the same version of triton, and set TRITON_CACHE_DIR to it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from base.machine import Platform, running_on
from benchmarks.gpu import kernels
from footprint.cuda import FusedRMSNorm
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.memory.batches import fake_batch
from longhaul.vocab import loss as vocab_loss
from model import Decoder

# Bytes of shared memory that a block of threads can have, by compute capability: CUDA's manual
KIB = 1024
SHARED_MEMORY = {
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    120: 99 * KIB,
}
TOKENS = (8192, 32_768, 131_072)
ATTENTIONS = ("standard", "nsa")  # those with kernels of their own
VOCABULARY = 151_936
FEW_WORDS = 4096  # the model's own loss then has a way without looking at its labels


def into(folder: Path, capability: int) -> int:
    """Fill the folder and say with what; the exit code. ValueError without triton, or for a GPU
    that the kernels do not run on.
    """
    if capability not in SHARED_MEMORY:
        known = ", ".join(map(str, SHARED_MEMORY))
        raise ValueError(f"--capability {capability}: choose one of {known}")
    if not kernels.found():
        raise ValueError("--precompile needs triton: pip install triton")

    os.environ["TRITON_CACHE_DIR"] = str(folder.absolute())
    began = time.monotonic()
    names = set()
    for tokens in TOKENS:
        for attention in ATTENTIONS:
            names |= compile_step(attention, tokens, capability)
    built = list(folder.glob("**/*.cubin"))
    seconds = time.monotonic() - began
    print(f"{len(names)} kernels: {', '.join(sorted(names))}")
    print(f"{len(built)} variants for sm_{capability} in {folder}, {seconds:,.0f} s")
    print(f"on the machine with the GPU: TRITON_CACHE_DIR={folder.name} python -m benchmarks.gpu")
    return 0


def compile_step(attention: str, tokens: int, capability: int) -> set[str]:
    """The names of the kernels that forward, backward and decoding of one layer launched, now
    compiled.
    """
    cfg = TrainConfig(
        model_size="4B",
        attention_type=attention,
        context_length=tokens,
        kernels="triton",
        model_overrides=("num_layers=1",),
        loss="standard",
        vocab_size=FEW_WORDS,
        device="cpu",
    )
    skeleton = step.skeleton(cfg, cfg.model())
    launched: set[str] = set()

    def launch(run, kernel, args, grid, kwargs):
        launched.add(kernel.fn.__name__)
        named = {name: described(value) for name, value in kwargs.items()}
        run(kernel, *map(described, args), grid=grid, warmup=True, **named)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with as_if_on(capability), kernels.replaced(launch), fake:
        state = step.fill(skeleton, cfg, "cpu", step.ONE_PROCESS, None)
        state.checked = True  # labels without values cannot be looked at
        with Bodies():
            step.gradients(state, fake_batch(cfg, 1))
            loss_tiles(tokens)
            if attention == "nsa":
                decode_token(state.model, tokens)
    return launched


@torch.no_grad()
def decode_token(model: Decoder, tokens: int) -> None:
    """The kernels of a token that is decoded over a cache of so many."""
    cache = model.new_cache(1, tokens)
    cache.layers[0].length = tokens - 1
    model(torch.zeros((1, 1), dtype=torch.int64, device="cpu"), cache=cache)


def loss_tiles(tokens: int) -> None:
    """The two kernels of the loss on a tile of its forward and backward.

    The whole loss cannot run without values on a CPU, where it looks at its labels.
    """
    from longhaul.vocab import triton_bodies as linear_ce

    rows, columns = vocab_loss.default_tiles(tokens, VOCABULARY, torch.device("cuda"), "triton")
    z_NV = torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu")
    target_N = torch.empty(rows, dtype=torch.int32, device="cpu")
    sums_N = torch.empty(3, rows, dtype=torch.float32, device="cpu").unbind()
    linear_ce.fold_logsumexp(z_NV, target_N, *sums_N, None)
    linear_ce.logits_to_gradient(z_NV, target_N, *sums_N, None)


class Bodies(TorchDispatchMode):
    """Runs longhaul's own operators through their code, where fake tensors would only take the
    shapes of their results.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "longhaul":
            return func(*args, **(kwargs or {}))
        from torch._library.custom_ops import OPDEFS

        return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))


class Described:
    """A tensor as far as the compiler asks: its dtype, and whether its address divides by 16."""

    def __init__(self, x: torch.Tensor):
        self.dtype = x.dtype
        self.shape = x.shape
        self.offset = x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


def described(value):
    """What stands for a tensor; other values as they are."""
    return Described(value) if isinstance(value, torch.Tensor) else value


class Driver:
    """The GPU that is compiled for, as Triton asks for it."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Card(Platform):
    """The GPU that is compiled for, as the model asks for it; its own operators give shapes only,
    since tensors without values are on a CPU.
    """

    def __init__(self, capability: int):
        self.major_minor = divmod(capability, 10)

    def device(self, x: torch.Tensor) -> torch.device:
        return torch.device("cuda")

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.major_minor

    def parts(self, parts: list, size: Callable) -> list:
        """The first and the last: those between take the same variants of kernels as the first."""
        return parts[:1] + parts[1:][-1:]

    def tiles(self, tiles: Sequence) -> Sequence:
        return [*tiles[:1], *tiles[1:][-1:]]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return FusedRMSNorm.apply(x, weight)

    def attention(self, q_BHTK, k_BGSK, v_BGSK, is_causal: bool = False, **_) -> torch.Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q_BHTK, k_BGSK, v_BGSK, 0.0, is_causal)[0]


@contextlib.contextmanager
def as_if_on(capability: int) -> Iterator[None]:
    """Inside the `with` block, the model, our kernels and Triton believe in that GPU."""
    from triton.runtime.driver import driver

    from longhaul.sparse.triton import blocks, nsa, tiles
    from longhaul.vocab import triton_bodies as linear_ce

    driver.set_active(Driver(capability))
    with (
        running_on(Card(capability)),
        mock.patch.object(linear_ce, "supported", lambda *_: True),
        mock.patch.object(tiles, "supported", lambda *_: True),
        mock.patch.object(tiles, "shared_memory", lambda *_: SHARED_MEMORY[capability]),
        mock.patch.object(blocks, "shared_memory", lambda *_: SHARED_MEMORY[capability]),
        mock.patch.object(nsa, "shared_memory", lambda *_: SHARED_MEMORY[capability]),
    ):
        yield

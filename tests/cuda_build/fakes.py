"""Fake CUDA tensors on a card of our choice, and a record of the attention operators that run."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from base import machine
from footprint.python.patches import patched

HOPPER = (9, 0)
AMPERE = (8, 0)
TURING = (7, 5)

# What PyTorch would call on a card: without one, it cannot choose.
OPERATORS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}


def on_card(capability: tuple[int, int]):
    """Entered to run as if on a CUDA device of this compute capability."""
    return patched({(machine, "capability"): lambda device: capability})


class Choices(TorchFunctionMode):
    """Answers F.scaled_dot_product_attention as PyTorch's rules say, and records the answer.

    The rules (aten/native/transformers/cuda/sdp_utils.cpp): cuDNN is first on Hopper, then flash,
    then memory-efficient, then math; cuDNN and flash take 16 bits, and memory-efficient takes no
    grouped heads.
    """

    def __init__(self, capability: tuple[int, int]):
        super().__init__()
        self.major = capability[0]
        self.chosen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.chosen.append(self._choose(*args, **kwargs))
        return torch.empty_like(args[0]) + args[0] * 0

    def _choose(self, q, k, v, attn_mask=None, enable_gqa=False, **_) -> str:
        allowed = _cur_sdpa_kernel_backends()
        half = q.dtype in (torch.bfloat16, torch.float16)
        can = {
            SDPBackend.CUDNN_ATTENTION: half and self.major >= 9,
            SDPBackend.FLASH_ATTENTION: half and self.major >= 8 and attn_mask is None,
            SDPBackend.EFFICIENT_ATTENTION: q.dtype != torch.float64 and not enable_gqa,
            SDPBackend.MATH: True,
        }
        for backend, name in OPERATORS.items():
            if backend in allowed and can[backend]:
                return name
        raise AssertionError(f"no kernel of {allowed} takes {q.dtype}, enable_gqa={enable_gqa}")


class Operators(TorchDispatchMode):
    """The names of the operators that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace = func.namespace
        if namespace != "prim":
            self.names.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))

    def attention(self) -> list[str]:
        return [name for name in self.names if "attention" in name or "varlen" in name]


class Run:
    """What happened on the card."""

    def __init__(self, choices: Choices, operators: Operators):
        self.choices = choices
        self.operators = operators

    @property
    def kernels(self) -> list[str]:
        """Attention kernels by name: those that were called, and those that PyTorch would take."""
        return self.operators.attention() + self.choices.chosen


@contextlib.contextmanager
def card(capability: tuple[int, int]) -> Iterator[Run]:
    """Fake tensors, on a card; a host synchronisation or a mix of devices raises."""
    choices = Choices(capability)
    operators = Operators()
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors, on_card(capability), operators, choices:
        yield Run(choices, operators)


def heads(tokens: int, count: int, size: int = 64, dtype=torch.bfloat16, rows: int = 1):
    """Fake queries or keys [rows, tokens, count, size] that require a gradient."""
    shape = (rows, tokens, count, size)
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)

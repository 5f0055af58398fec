"""What operators hold inside, beyond what they return: memory that a tracker of tensors cannot see.
Sizes are bytes.

Our own operators (the loss, the sparse branches) say it themselves: their Python bodies run on meta
tensors, over the first two and the last of their tiles, since all between are alike. Kernels of
torch are declared here, from their sources. Imports longhaul.memory.tracker, model.py and nsa of
ours.
"""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

import model
from longhaul.memory.platforms import Bodies, running_on
from longhaul.memory.tracker import Tracker
from nsa import engine

BODIES = {
    f"longhaul::{op._name}": op._init_fn
    for op in (model.vocab_nll, model.vocab_nll_backward, engine.nsa_forward, engine.nsa_backward)
}

SPARSE = (engine.nsa_forward._init_fn, engine.nsa_backward._init_fn)


class Workspaces:
    """workspace(func, args, outputs) for a tracker: bytes held inside an operator on the target
    device, "cpu" or "cuda".
    """

    def __init__(self, target: str, threads: int = 0):
        self.target, self.threads, self.known = target, threads or torch.get_num_threads(), {}

    def __call__(self, func, args, outputs) -> int:
        name = func._schema.name
        if name in BODIES:
            key = name, str(tree_map(_signature, args))
            if key not in self.known:
                self.known[key] = self._inside(BODIES[name], args) * self._at_once(name, args)
            return self.known[key]
        declared = DECLARED[self.target].get(name)
        return declared(self.threads, *args) if declared else 0

    def _inside(self, body, args) -> int:
        bodies = running_on(Bodies(self.target))
        with unset_fake_temporarily(), torch.no_grad(), bodies, Tracker() as inner:
            inputs = tree_map(
                functools.partial(_on_meta, body in SPARSE), args
            )  # of the sparse branches, document boundaries stay on the host with their values
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, torch.Tensor):
                    inner.register(tensor, "input")
            inner.begin({})
            base = sum(inner.held.values())
            outputs = body(*inputs)
            returned = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in tree_leaves(outputs)
            }
        return inner.trace.peak()[0] - base - sum(returned.values())

    def _at_once(self, name: str, args) -> int:
        """Streams of sparse attention that run at the same time: on a CPU one per thread."""
        if "nsa" not in name or self.target == "cuda":
            return 1
        k_BTGK = args[1] if name.endswith("forward") else args[2]
        return min(self.threads, k_BTGK.shape[0] * k_BTGK.shape[2])


def _signature(value):
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _on_meta(keep_host: bool, value):
    if (
        not isinstance(value, torch.Tensor)
        or keep_host
        and value.dtype == torch.int64
        and not isinstance(value, FakeTensor)
    ):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# ---- kernels of torch


def _tiles_cpu(q_BHTK, k_BGSK) -> tuple[int, int]:
    """Queries and keys of a tile of the CPU's attention (aten/native/cpu/FlashAttentionKernel.cpp)."""
    queries = q_BHTK.shape[2]
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32), min(
        512, k_BGSK.shape[2]
    )


def flash_forward_cpu(threads: int, q_BHTK, k_BGSK, *_) -> int:
    """Per thread: a tile of scores, running maxima and sums, results, all fp32; and the scores in
    the inputs' dtype if that is shorter.
    """
    q, k = _tiles_cpu(q_BHTK, k_BGSK)
    short = q_BHTK.element_size() * q * (k + k % 2) if q_BHTK.element_size() < 4 else 0
    return threads * (4 * (q * k + 2 * q + q * q_BHTK.shape[3]) + short)


def flash_backward_cpu(threads: int, do_BHTK, q_BHTK, k_BGSK, *_) -> int:
    """Per thread: a tile of scores and one of their gradients, fp32, and both in the inputs' dtype
    if that is shorter.
    """
    q, k = _tiles_cpu(q_BHTK, k_BGSK)
    short = q_BHTK.element_size() if q_BHTK.element_size() < 4 else 0
    return threads * 2 * q * k * (4 + short)


def flash_backward_cuda(threads: int, do_BHTK, q_BHTK, k_BGSK, *_) -> int:
    """FlashAttention-2: dq summed in fp32, do . o per row in fp32, rows in blocks of 128, and with
    grouped heads dk and dv per query head.
    """
    (B, H, T, K), G = q_BHTK.shape, k_BGSK.shape[1]
    rows, width = -(-T // 128) * 128, -(-K // 32) * 32
    grouped = 2 * k_BGSK.element_size() * B * k_BGSK.shape[2] * H * K if G != H else 0
    return 4 * B * H * rows * (width + 1) + grouped


FLASH = "aten::_scaled_dot_product_flash_attention"
DECLARED = {
    "cpu": {FLASH + "_for_cpu": flash_forward_cpu, FLASH + "_for_cpu_backward": flash_backward_cpu},
    "cuda": {FLASH + "_backward": flash_backward_cuda},
}

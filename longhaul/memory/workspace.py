"""What operators hold inside, beyond what they return: memory that a tracker of tensors cannot see.
Sizes are bytes.

The Python bodies of our own operators (the loss, the sparse branches) run on meta tensors under a
tracker of their own. PyTorch's kernels are declared here, from their sources.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

import model
from longhaul.memory.platforms import Bodies
from longhaul.memory.tracker import Tracker
from nsa import engine

LOSS = (model.vocab_nll, model.vocab_nll_backward, model.vocab_loss_one_pass)
SPARSE = (engine.nsa_forward, engine.nsa_backward)
BODIES = {f"longhaul::{op._name}": op._init_fn for op in LOSS + SPARSE}
# their document boundaries stay on the host with their values: loops run over them
SPARSE_NAMES = {f"longhaul::{op._name}" for op in SPARSE}


class Workspaces:
    """workspace(func, args, outputs) for a tracker: bytes held inside an operator on the target
    device, "cpu" or "cuda".
    """

    def __init__(self, target: str, threads: int = 0):
        self.target = target
        self.threads = threads or torch.get_num_threads()
        self.known: dict[tuple[str, str], int] = {}  # (operator, shapes) -> bytes

    def __call__(self, func, args, outputs) -> int:
        name = func._schema.name
        if name in BODIES:
            key = name, str(tree_map(_signature, args))
            if key not in self.known:
                self.known[key] = self._inside(name, args) * self._streams_at_once(name, args)
            return self.known[key]

        declared = DECLARED[self.target].get(name)
        return declared(self.threads, *args) if declared else 0

    def _inside(self, name: str, args) -> int:
        """Bytes at the peak of the operator's body, without its inputs and its results."""
        inputs_on_meta = _sparse_on_meta if name in SPARSE_NAMES else _on_meta
        platform = model.running_on(Bodies(self.target))
        with unset_fake_temporarily(), torch.no_grad(), platform, Tracker() as tracker:
            inputs = tree_map(inputs_on_meta, args)
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor):
                    tracker.register(tensor, "input")

            tracker.begin({})
            before = sum(tracker.held.values())
            outputs = BODIES[name](*inputs)
            peak, _ = tracker.trace.peak()
            storages = [tensor.untyped_storage() for tensor in tree_leaves(outputs)]
            returned = {storage._cdata: storage.nbytes() for storage in storages}
        return peak - before - sum(returned.values())

    def _streams_at_once(self, name: str, args) -> int:
        """Streams of sparse attention that run at the same time: on a CPU one per thread."""
        if name not in SPARSE_NAMES or self.target == "cuda":
            return 1
        k_BTGK = args[1] if name.endswith("forward") else args[2]
        B, _, G, _ = k_BTGK.shape
        return min(self.threads, B * G)


def _signature(value):
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _on_meta(value):
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _sparse_on_meta(value):
    has_values = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    if has_values and value.dtype == torch.int64:
        return value
    return _on_meta(value)


# ---- kernels of PyTorch


def _tiles_cpu(q_BHTK: Tensor, k_BGSK: Tensor) -> tuple[int, int]:
    """Queries and keys of a tile of the CPU's attention, as in its source
    (aten/native/cpu/FlashAttentionKernel.cpp).
    """
    T, S = q_BHTK.shape[2], k_BGSK.shape[2]
    queries = 32
    if T >= 192:
        queries = 64
    if T >= 768:
        queries = 256
    return min(T, queries), min(S, 512)


def flash_forward_cpu(threads: int, q_BHTK: Tensor, k_BGSK: Tensor, *_) -> int:
    """Per thread: a tile of scores, running maxima and sums, results, all fp32; and the scores in
    the inputs' dtype if that is shorter.
    """
    queries, keys = _tiles_cpu(q_BHTK, k_BGSK)
    wide = 4 * queries * (keys + 2 + q_BHTK.shape[3])

    short = 0
    if q_BHTK.element_size() < 4:
        short = q_BHTK.element_size() * queries * (keys + keys % 2)
    return threads * (wide + short)


def flash_backward_cpu(threads: int, do_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, *_) -> int:
    """Per thread: a tile of scores and one of their gradients, fp32, and both in the inputs' dtype
    if that is shorter.
    """
    queries, keys = _tiles_cpu(q_BHTK, k_BGSK)
    short = q_BHTK.element_size() if q_BHTK.element_size() < 4 else 0
    return threads * 2 * queries * keys * (4 + short)


def flash_backward_cuda(threads: int, do_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, *_) -> int:
    """FlashAttention-2: dq summed in fp32, do . o per query in fp32, queries in tiles of 128, and
    with grouped heads dk and dv for each query head.
    """
    B, H, T, K = q_BHTK.shape
    _, G, S, _ = k_BGSK.shape
    queries = math.ceil(T / 128) * 128
    width = math.ceil(K / 32) * 32
    dq_and_products = 4 * B * H * queries * (width + 1)

    dk_and_dv = 0
    if G != H:
        dk_and_dv = 2 * k_BGSK.element_size() * B * S * H * K
    return dq_and_products + dk_and_dv


Declared = Callable[..., int]  # (threads, *args of the operator) -> bytes
FLASH = "aten::_scaled_dot_product_flash_attention"
DECLARED: dict[str, dict[str, Declared]] = {
    "cpu": {
        FLASH + "_for_cpu": flash_forward_cpu,
        FLASH + "_for_cpu_backward": flash_backward_cpu,
    },
    "cuda": {FLASH + "_backward": flash_backward_cuda},
}

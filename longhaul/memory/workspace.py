"""What operators hold inside, beyond what they return: memory that a tracker of tensors cannot see.
Sizes are bytes.

The Python bodies of our own operators (the loss, the sparse branches, their Triton twin without
its launches) run on meta tensors under a tracker of their own. The kernels of PyTorch are declared
here, from their sources.
"""

import functools
import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

import model
from longhaul import vocab
from longhaul.memory.platforms import Bodies
from longhaul.memory.tracker import Tracker
from nsa import engine

LOSS = (model.vocab_nll, model.vocab_nll_backward, model.vocab_loss_one_pass)
SPARSE = (engine.nsa_forward, engine.nsa_backward)
STATISTICS = (vocab.stats_op, vocab.stats_backward_op)
OURS = {op._qualname: op for op in LOSS + SPARSE + STATISTICS}
TWIN = "longhaul::nsa_triton_"  # how the names of the Triton twin of sparse attention begin


def is_ours(name: str) -> bool:
    """Whether an operator has a Python body, which can be run."""
    return name in OURS or name.startswith(TWIN)


def is_sparse(name: str) -> bool:
    """Whether it is sparse attention: its document boundaries stay on the host with their values,
    because loops run over them.
    """
    return name.startswith(TWIN) or (name in OURS and OURS[name] in SPARSE)


@functools.cache
def body(name: str) -> Callable:
    """What an operator of ours runs."""
    if name in OURS:
        return OURS[name]._init_fn
    # imported when it is met: Triton may be absent, and takes time to import
    twin = importlib.import_module("nsa.triton.attention")
    operators = (twin.nsa_triton_forward, twin.nsa_triton_backward)
    return {op._qualname: op._init_fn for op in operators}[name]


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
        if is_ours(name):
            key = name, str(tree_map(_signature, args))
            if key not in self.known:
                self.known[key] = self._inside(name, args) * self._streams_at_once(name, args)
            return self.known[key]

        declared = DECLARED[self.target].get(name)
        return declared(self.threads, *args) if declared else 0

    def _inside(self, name: str, args) -> int:
        """Bytes at the peak of the operator's body, without its inputs and its results."""
        inputs_on_meta = _sparse_on_meta if is_sparse(name) else _on_meta
        platform = model.running_on(Bodies(self.target))
        with unset_fake_temporarily(), torch.no_grad(), platform, Tracker(self) as tracker:
            inputs = tree_map(inputs_on_meta, args)
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor):
                    tracker.register(tensor, "input")

            tracker.begin({})
            before = sum(tracker.held.values())
            outputs = body(name)(*inputs)
            peak, _ = tracker.trace.peak()
            storages = [tensor.untyped_storage() for tensor in tree_leaves(outputs)]
            returned = {storage._cdata: storage.nbytes() for storage in storages}
        return peak - before - sum(returned.values())

    def _streams_at_once(self, name: str, args) -> int:
        """Streams of sparse attention that run at the same time: on a CPU one per thread."""
        if not is_sparse(name) or self.target == "cuda":
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
    keys = B * S if G != H else 0
    return _flash_backward(B * queries, B * H, H, K, keys, k_BGSK.element_size())


def flash_backward_of_documents(
    threads: int,
    do_ZHK: Tensor,
    q_ZHK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    o_ZHK: Tensor,
    lse_HZ: Tensor,
    end_D: Tensor,
    *_,
) -> int:
    """The same for documents one after another: each adds up to a tile of queries."""
    Z, H, K = q_ZHK.shape
    S, G, _ = k_SGK.shape
    documents = len(end_D) - 1
    keys = S if G != H else 0
    return _flash_backward(Z + 128 * documents, documents * H, H, K, keys, k_SGK.element_size())


def _flash_backward(
    queries: int, blocks: int, H: int, K: int, keys_of_grouped_heads: int, element: int
) -> int:
    """With deterministic sums each of several groups of processors has a dq of its own, so that
    `blocks` (heads of all rows) times their number occupy the device.
    """
    copies = 1
    if torch.are_deterministic_algorithms_enabled():
        copies = math.ceil(processors() / blocks)
    width = math.ceil(K / 32) * 32
    dq_and_products = 4 * H * queries * (copies * width + 1)
    dk_and_dv = 2 * element * keys_of_grouped_heads * H * K
    return dq_and_products + dk_and_dv


def processors() -> int:
    """Streaming multiprocessors of the GPU; without one, those of an H100 or H200."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties().multi_processor_count
    return 132


Declared = Callable[..., int]  # (threads, *args of the operator) -> bytes
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
DECLARED: dict[str, dict[str, Declared]] = {
    "cpu": {
        FLASH + "_for_cpu": flash_forward_cpu,
        FLASH + "_for_cpu_backward": flash_backward_cpu,
    },
    "cuda": {
        FLASH + "_backward": flash_backward_cuda,
        # cuDNN's frontend declares the same four: dq and sums per query in fp32, and with grouped
        # heads dk and dv of each query head
        CUDNN + "_backward": flash_backward_cuda,
        "aten::_flash_attention_backward": flash_backward_of_documents,
    },
}

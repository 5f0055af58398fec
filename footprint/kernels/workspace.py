"""What the kernels of PyTorch hold inside, beyond what they return: memory that a tracker of
tensors cannot see. Sizes are bytes.

Declared from their sources, for the CPU and for CUDA.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from footprint.kernels.copies import copied_bytes
from footprint.kernels.probe import inside_bytes, is_probed, is_small
from footprint.kernels.recurrent import OF_STEPS, layer_bytes


class KernelWorkspaces:
    """workspace(func, args, outputs) for a tracker: bytes held inside a kernel of PyTorch on the
    target device, "cpu" or "cuda", as declared.
    """

    def __init__(self, target: str):
        self.target = target
        self.threads = torch.get_num_threads()

    def __call__(self, func, args, outputs) -> int:
        declared = DECLARED[self.target].get(func._schema.name)
        inside = declared(self.threads, *args) if declared else 0
        return inside + copied_bytes(self.target, func, args, outputs)

    def not_modelled(self) -> list[str]:
        """What is left out, in words."""
        return []


class ProbedWorkspaces(KernelWorkspaces):
    """As declared for a CPU; and what has to be measured, by running the operator once."""

    def __init__(self, target: str):
        super().__init__(target)
        # (operator, shapes, whether autograd is on) -> bytes
        self.probed: dict[tuple[str, str, bool], int] = {}
        self.not_probed: set[str] = set()  # operators whose inputs were too large to run them

    def __call__(self, func, args, outputs) -> int:
        if func in OF_STEPS:
            return self._probe(layer_bytes, func, args)
        if not is_probed(func, args):
            return super().__call__(func, args, outputs)
        if not is_small(func, args):
            self.not_probed.add(str(func))
            return 0
        return self._probe(inside_bytes, func, args)

    def _probe(self, probe: Callable[..., int], func, args) -> int:
        """The bytes that a probe finds, of operators and shapes once."""
        shapes = str(tree_map(signature, tuple(args)))
        key = str(func), shapes, torch.is_grad_enabled()
        if key not in self.probed:
            self.probed[key] = probe(func, args)
        return self.probed[key]

    def not_modelled(self) -> list[str]:
        return [f"scratch memory of {name} with large inputs" for name in sorted(self.not_probed)]


def signature(value):
    """What decides the memory of an operator about one of its arguments."""
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype


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
    """Per thread: a tile of scores, running maxima and sums, results, all fp32 (fp64 for those
    inputs); and the scores in the inputs' dtype if that is shorter.
    """
    queries, keys = _tiles_cpu(q_BHTK, k_BGSK)
    number = max(4, q_BHTK.element_size())
    wide = number * queries * (keys + 2 + q_BHTK.shape[3])

    short = 0
    if q_BHTK.element_size() < 4:
        short = q_BHTK.element_size() * queries * (keys + keys % 2)
    return threads * (wide + short)


def flash_backward_cpu(threads: int, do_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, *_) -> int:
    """Per thread: a tile of scores and one of their gradients, fp32, and both in the inputs' dtype
    if that is shorter; a sum per query, fp32. The gradient of the result is copied unless it lies
    in memory as BTHK.
    """
    queries, keys = _tiles_cpu(q_BHTK, k_BGSK)
    short = q_BHTK.element_size() if q_BHTK.element_size() < 4 else 0
    copied = 0 if do_BHTK.transpose(1, 2).is_contiguous() else do_BHTK.nbytes
    number = max(4, q_BHTK.element_size())
    return copied + threads * queries * (number + 2 * keys * (number + short))


def flash_backward_cuda(threads: int, do_BHTK: Tensor, q_BHTK: Tensor, k_BGSK: Tensor, *_) -> int:
    """FlashAttention-2: dq summed in fp32, do . o per query in fp32, queries in tiles of 128, and
    with grouped heads dk and dv for each query head.
    """
    B, H, T, K = q_BHTK.shape
    _, G, S, _ = k_BGSK.shape
    queries = math.ceil(T / 128) * 128
    keys = B * S if G != H else 0
    return _flash_backward(B * queries, B * H, H, K, keys, k_BGSK.element_size())


def efficient_backward_cuda(threads: int, do_BHTK: Tensor, q_BHTK: Tensor, *kv: Tensor) -> int:
    """With grouped heads, from PyTorch 2.14 on, dk and dv for each query head
    (cuda/mem_eff_attention/kernel_backward.h).
    """
    groups = [x_BGSK for x_BGSK in kv[:2] if x_BGSK.shape[1] != q_BHTK.shape[1]]
    return sum(x_BGSK.nbytes * q_BHTK.shape[1] // x_BGSK.shape[1] for x_BGSK in groups)


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


def embedding_bag_cpu(
    threads: int,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *_,
) -> int:
    """Weights in a low precision are copied to fp32."""
    if per_sample_weights is None or per_sample_weights.itemsize >= 4:
        return 0
    return 4 * per_sample_weights.numel()


def embedding_bag_backward_cpu(
    threads: int, grad: Tensor, indices: Tensor, offsets: Tensor, bag_of_index: Tensor, *_
) -> int:
    """The indices are sorted: values, their order, and a copy to work on. Sums have not kept the
    bag of each index, which is made again (aten/native/EmbeddingBag.cpp). The gradient is copied
    unless it is contiguous.
    """
    copied = 0 if grad.is_contiguous() else grad.nbytes
    made_again = 0 if bag_of_index.numel() else indices.nbytes + indices.element_size()
    return copied + 3 * indices.nbytes + made_again


def group_norm_backward_cpu(threads: int, grad: Tensor, *args) -> int:
    """For each row two sums of a channel, at least fp32 (cpu/group_norm_kernel.cpp): twice the rows
    themselves where they are no images.
    """
    N, C = args[4:6]
    return 2 * max(4, grad.element_size()) * N * C


def group_norm_backward_cuda(threads: int, *args) -> int:
    """For each row three sums of a channel and two of a group, fp32 (group_norm_kernel.cu)."""
    N, C, _, groups = args[5:9]
    return 4 * N * (3 * C + 2 * groups)


def embedding_backward_cuda(threads: int, grad: Tensor, tokens: Tensor, vocabulary: int, *_) -> int:
    """More than 3,072 tokens are sorted: their values and their order; where those of each word
    begin; and fp32 sums of up to ten gradients of one word (EmbeddingBackwardKernel.cu).
    """
    count = tokens.numel()
    if count <= 3072:
        return 0
    words = min(count, vocabulary)
    sums = count // 10 + words
    wide = max(4, grad.element_size())
    return 2 * tokens.nbytes + 8 * (3 * words + sums) + wide * sums * grad.shape[-1]


def masked_softmax_cuda(threads: int, scores: Tensor, mask: Tensor, dim: int = -1, *_) -> int:
    """Long rows are filled by the mask, next to a result that is not used (cuda/SoftMax.cu)."""
    row = scores.shape[dim]
    is_short = row <= 1024 and row * scores.element_size() <= 4096
    return 0 if is_short and mask.is_contiguous() else 2 * scores.nbytes


def sort_cuda(threads: int, x: Tensor, *args) -> int:
    """Rows of more than 4,096: the indices, and cub's copies of values and indices; up to 127 rows
    are sorted as one, with their numbers (SortStable.cu).
    """
    if x.dim() == 0 or x.numel() == 0:
        return 0
    places = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
    length = x.shape[places[0] if places else -1]
    if length <= 4096:
        return 0
    rows = x.numel() // length
    pairs = x.element_size() + 8
    if rows == 1 or length >= 1_000_000:
        return length * (8 + pairs)
    held = 16 + x.element_size() if rows < 128 else 8
    return x.numel() * (held + pairs)


def sort_cpu(threads: int, x: Tensor, *args) -> int:
    """The indices of one row, which are copied into all of them."""
    return 8 * (x.shape[-1] if x.ndim else 1)


def euclidean_distances(threads: int, a: Tensor, b: Tensor, *_) -> int:
    """torch.cdist by one product: both with two more columns, after squares and a multiple of the
    first (aten/native/Distance.cpp). The distances are returned.
    """
    width = a.shape[-1]
    rows, others = a.numel() // width, b.numel() // width
    padded = (rows + others) * (width + 2)
    multiplied = rows * (2 * width + 4) + 2 * others
    distances = rows * b.shape[-2]
    return a.element_size() * max(padded, multiplied - distances)


def logsumexp(threads: int, x: Tensor, dims, *_) -> int:
    """Largest elements, and the exponentials of all (aten/native/ReduceOps.cpp)."""
    summed = math.prod(x.shape[dim] for dim in dims) if x.dim() else 1
    return x.nbytes + x.nbytes // max(1, summed)


def safe_softmax(threads: int, x: Tensor, dim: int, *_) -> int:
    """Whether each number is -inf, -inf itself, and whether a whole row is -inf
    (aten/native/transformers/attention.cpp).
    """
    return x.numel() + x.element_size() + x.numel() // x.shape[dim]


def masked_scatter_backward_cpu(threads: int, grad: Tensor, mask: Tensor, sizes) -> int:
    """As if every element of the source were taken: the mask as integers, to count them, and unless
    one thread reads both in order their sums, too; then the gradient with what it is filled up by.
    """
    in_order = grad.is_contiguous() and mask.expand_as(grad).is_contiguous()
    if threads > 1 or not in_order:
        return 16 * grad.numel()
    result = grad.element_size() * math.prod(sizes)
    return max(8 * grad.numel() - result, result)


def affine_grid(threads: int, theta: Tensor, size, *_) -> int:
    """The coordinates of every pixel, and a one (aten/native/AffineGridGenerator.cpp)."""
    pixels = math.prod(size[2:])
    return theta.element_size() * size[0] * pixels * (len(size) - 1)


def roll(threads: int, x: Tensor, shifts, dims=()) -> int:
    """The turned tensor after each dimension but the last (aten/native/TensorTransformations.h)."""
    return x.nbytes * max(0, len(dims) - 1)


Declared = Callable[..., int]  # (threads, *args of the operator) -> bytes
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
DECLARED: dict[str, dict[str, Declared]] = {
    "cpu": {
        FLASH + "_for_cpu": flash_forward_cpu,
        FLASH + "_for_cpu_backward": flash_backward_cpu,
        "aten::native_group_norm_backward": group_norm_backward_cpu,
        "aten::sort": sort_cpu,
        "aten::masked_scatter_backward": masked_scatter_backward_cpu,
        "aten::_euclidean_dist": euclidean_distances,
        "aten::logsumexp": logsumexp,
        "aten::roll": roll,
        "aten::affine_grid_generator": affine_grid,
        "aten::affine_grid_generator_backward": affine_grid,
        "aten::embedding_bag": embedding_bag_cpu,
        "aten::_embedding_bag": embedding_bag_cpu,
        "aten::_embedding_bag_forward_only": embedding_bag_cpu,
        "aten::_embedding_bag_backward": embedding_bag_backward_cpu,
    },
    "cuda": {
        FLASH + "_backward": flash_backward_cuda,
        EFFICIENT + "_backward": efficient_backward_cuda,
        # cuDNN's frontend declares the same four: dq and sums per query in fp32, and with grouped
        # heads dk and dv of each query head
        CUDNN + "_backward": flash_backward_cuda,
        "aten::native_group_norm_backward": group_norm_backward_cuda,
        "aten::embedding_dense_backward": embedding_backward_cuda,
        "aten::sort": sort_cuda,
        "aten::_safe_softmax": safe_softmax,
        "aten::_masked_softmax": masked_softmax_cuda,
        "aten::_euclidean_dist": euclidean_distances,
        "aten::logsumexp": logsumexp,
        "aten::roll": roll,
        "aten::affine_grid_generator": affine_grid,
        "aten::affine_grid_generator_backward": affine_grid,
        "aten::_flash_attention_backward": flash_backward_of_documents,
    },
}

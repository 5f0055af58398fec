"""What operators hold inside, beyond what they return: memory that a tracker of tensors cannot see.
Sizes are bytes.

The Python bodies of our own operators (the loss, the sparse branches, their Triton twin without
its launches, indexed attention) run on fake tensors under a tracker of their own. The kernels of
PyTorch are declared in footprint/kernels/workspace.py.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from base import machine
from footprint.kernels.operators import FakeTensors, is_fake
from footprint.kernels.workspace import KernelWorkspaces, signature
from footprint.pretend.places import StepTracker
from footprint.pretend.values import KnownValues, Reading, converted
from footprint.python.patches import Patches, missing, patched
from footprint.record.tracker import Tracker
from longhaul.sparse import engine as blocks
from longhaul.sparse.choose import choose_operator
from longhaul.sparse.index_loss import index_loss_operator
from longhaul.sparse.nsa import engine
from longhaul.vocab import loss as vocab_loss
from longhaul.vocab import statistics

LOSS = (vocab_loss.vocab_nll, vocab_loss.vocab_nll_backward, vocab_loss.vocab_loss_one_pass)
SPARSE = (
    engine.nsa_forward,
    engine.nsa_backward,
    blocks.block_sparse_forward,
    blocks.block_sparse_backward,
)
CHOICE = (choose_operator, index_loss_operator)
STATISTICS = (statistics.stats_op, statistics.stats_backward_op)
OURS = {op._qualname: op for op in LOSS + SPARSE + CHOICE + STATISTICS}
BAGS = ("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")


class Usual(Reading):
    """What our own code asks tensors without values: no label is out of range, every token counts,
    every norm is finite. any() is False, other booleans are True, numbers are 1.
    """

    def _run(self, func, args, kwargs):
        result = super()._run(func, args, kwargs)
        if func in (torch.any, Tensor.any) and is_fake(result):
            self.known.suppose_all(result, False)
        return result

    def value(self, func, tensor: Tensor):
        told = self._told(func, tensor)
        if told is not None:
            return told
        return converted(func, True if tensor.dtype == torch.bool else 1)


class Workspaces(KernelWorkspaces):
    """As for the kernels of PyTorch, and what operators of ours hold inside."""

    def __init__(self, target: str):
        super().__init__(target)
        self.tracker: StepTracker | None = None  # of the prediction that runs
        self.known: dict[tuple[str, str], int] = {}  # (operator, shapes) -> bytes

    def __call__(self, func, args, outputs) -> int:
        name = func._schema.name
        if name in OURS:
            key = name, str(tree_map(signature, args))
            if key not in self.known:
                self.known[key] = self._inside(name, args) * self._streams_at_once(name, args)
            return self.known[key]

        return super().__call__(func, args, outputs)

    def _inside(self, name: str, args) -> int:
        """Bytes at the peak of the operator's body, without its inputs and its results."""
        with self.inside_one(), torch.no_grad(), _Inside(self) as tracker:
            inputs = tree_map(_without_values, args)
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor):
                    tracker.register(tensor, "input")

            tracker.begin()
            before = sum(tracker.held.values())
            outputs = OURS[name]._init_fn(*inputs)
            peak, _ = tracker.trace.peak()
            storages = [tensor.untyped_storage() for tensor in tree_leaves(outputs)]
            returned = {storage._cdata: storage.nbytes() for storage in storages}
        return peak - before - sum(returned.values())

    @contextlib.contextmanager
    def inside_one(self) -> Iterator[None]:
        """As inside of an operator: a few rounds of each loop, on fake tensors of the target, and
        streams in one thread.
        """
        modes: list[TorchFunctionMode] = [Usual(KnownValues(), {}, {}, imagined=lambda x: x)]
        there = as_there(self.target)
        if self.tracker:  # a prediction has these already
            modes, there = self.tracker.modes, {}
        fake_tensors = active_fake_mode() or FakeTensors()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with (
                fake_tensors,
                torch._C._EnableTorchFunction(),  # a tracker that records is without modes
                missing(modes),
                patched(there),
                machine.few_rounds(),
            ):
                yield
        finally:
            torch.set_num_threads(threads)

    def _streams_at_once(self, name: str, args) -> int:
        """Streams of sparse attention that run at the same time: on a CPU one per thread."""
        if OURS[name] not in SPARSE or self.target == "cuda":
            return 1
        k_BTGK = args[2] if name.endswith("backward") else args[1]
        B, _, G, _ = k_BTGK.shape
        return min(self.threads, B * G)


class _Inside(Tracker):
    """Sees the operators in the body of one of ours."""

    def run(self, func, args, kwargs):
        """Without the bag of each index, which on a CPU only means of bags need."""
        outputs = super().run(func, args, kwargs)
        if func._schema.name not in BAGS or self.workspace.target != "cpu":
            return outputs
        sums, bag_of_index, *others = outputs
        return sums, bag_of_index.new_empty(0), *others


def _without_values(value):
    """A fake tensor like this one. The bounds of documents stay, because loops run over them."""
    if not isinstance(value, Tensor) or (value.dtype == torch.int64 and not is_fake(value)):
        return value
    like = dict(dtype=value.dtype, device=value.device)
    return torch.empty_strided(value.shape, value.stride(), **like)


# ---- a machine that is not here


def as_there(target: str) -> Patches:
    """What a machine with the target has, and this one may lack: on CUDA Triton, whose kernels and
    compiled bodies of tiles write into their arguments and allocate nothing. Without values there
    are as many tiles as there may be.
    """
    patches: Patches = {(vocab_loss, "fastest_body"): fused_body}
    patches[blocks, "tile_count"] = lambda end_J, most: most
    if target == "cuda":
        patches[machine, "has_triton"] = lambda: True
        patches[machine, "prefers_cudnn"] = lambda q: False
        if machine.has_triton():
            from longhaul.sparse.triton import tiles

            patches[tiles, "launch"] = _nothing
    return patches


def fused_body(function: Callable, kernels: str) -> Callable:
    """In place of longhaul.vocab.loss.fastest_body, which compiles."""
    return function if kernels == "torch" else FUSED[function.__name__]


def _nothing(*_, **__) -> None:
    """A kernel, or a body that is compiled: it writes into its arguments."""


def _fused_fold(*args: object) -> Tensor:
    """The sums of a tile, which replace those before it."""
    state_SN = args[4]
    return torch.empty_like(state_SN)


FUSED = {
    "fold_logsumexp": _nothing,
    "logits_to_gradient": _nothing,
    "fold_stats": _fused_fold,
    "stats_gradient": _nothing,
}

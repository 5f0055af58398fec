"""What operators hold inside, beyond what they return: memory that a tracker of tensors cannot see.
Sizes are bytes.

The Python bodies of our own operators (the loss, the sparse branches, their Triton twin without
its launches, indexed attention) run on meta tensors under a tracker of their own. The kernels of
PyTorch are declared in footprint/workspace.py.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from base import machine
from footprint.operators import is_fake
from footprint.tracker import Tracker
from footprint.workspace import KernelWorkspaces, signature
from longhaul.memory.platforms import Bodies
from longhaul.sparse import engine as blocks
from longhaul.sparse.choose import choose_operator
from longhaul.sparse.index_loss import index_loss_operator
from longhaul.sparse.nsa import engine
from longhaul.vocab import loss as vocab_loss
from longhaul.vocab import statistics

LOSS = (vocab_loss.vocab_nll, vocab_loss.vocab_nll_backward, vocab_loss.vocab_loss_one_pass)
# their document boundaries stay on the host with their values, because loops run over them
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


class Workspaces(KernelWorkspaces):
    """As for the kernels of PyTorch, and what operators of ours hold inside."""

    def __init__(self, target: str):
        super().__init__(target)
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
        inputs_on_meta = _sparse_on_meta if OURS[name] in SPARSE else _on_meta
        platform = machine.running_on(Bodies(self.target))
        with unset_fake_temporarily(), torch.no_grad(), platform, _Inside(self) as tracker:
            inputs = tree_map(inputs_on_meta, args)
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


def _on_meta(value):
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _sparse_on_meta(value):
    has_values = isinstance(value, Tensor) and not is_fake(value)
    if has_values and value.dtype == torch.int64:
        return value
    return _on_meta(value)

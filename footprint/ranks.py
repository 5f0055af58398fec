"""One of several ranks, predicted in one process: what a fake process group leaves out.

FSDP2 and HSDP run as they are. DistributedDataParallel needs three things that fake tensors and
fake collectives do not have, and gets them here.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

from footprint.refusal import Refused
from footprint.workspace import ProbedWorkspaces

REDUCE_SCATTER = "c10d::_reduce_scatter_base_"


class GlooWorkspaces(ProbedWorkspaces):
    """What kernels of a CPU hold, and gloo: it reduces a copy of the whole input before it scatters
    it (ProcessGroupGloo.cpp), which lives as long as the operator.
    """

    def __call__(self, func, args, outputs) -> int:
        if func._schema.name == REDUCE_SCATTER:
            _, whole = args[:2]
            return whole.nbytes
        return super().__call__(func, args, outputs)


@contextlib.contextmanager
def data_parallel() -> Iterator[None]:
    """DistributedDataParallel inside the `with` block runs on fake tensors.

    Shapes are not compared with other ranks. The buckets of gradients keep their first order: in
    the second step, real ones are freed and made again in the order of the backward, which is the
    same number of bytes. A bucket that is sent is its own result.
    """
    from torch.nn.parallel import DistributedDataParallel, distributed

    start = DistributedDataParallel._ddp_init_helper

    def started(self, *args, **kwargs) -> None:
        start(self, *args, **kwargs)
        torch.distributed._register_comm_hook(self.reducer, None, _sent)

    patches = {
        (distributed, "_verify_param_shape_across_processes"): lambda *_: None,
        (DistributedDataParallel, "_ddp_init_helper"): started,
        (DistributedDataParallel, "register_comm_hook"): _refuse_hooks,
        (torch.distributed.Reducer, "_rebuild_buckets"): lambda _: False,
    }
    originals = {(owner, name): getattr(owner, name) for owner, name in patches}
    try:
        for (owner, name), replacement in patches.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def _sent(_, bucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _refuse_hooks(*_, **__) -> None:
    raise Refused(
        "register_comm_hook: the buffers of communication hooks are not predicted: leave the hook "
        "out, and add what it holds"
    )

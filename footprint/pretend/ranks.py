"""One of several ranks, predicted in one process: what a fake process group leaves out.

FSDP2 and HSDP run as they are. DistributedDataParallel needs three things that fake tensors and
fake collectives do not have, and gets them here.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.futures import Future

from footprint.kernels.workspace import ProbedWorkspaces
from footprint.python.patches import patched
from footprint.python.refusal import Refused

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
def as_rank(ranks: int, start_group: Callable[[int], None]) -> Iterator[None]:
    """Inside the `with` block init_process_group finds the group that there is, or one of a single
    rank, and DistributedDataParallel runs on fake tensors: wrappers that are given GPUs take the
    CPU, on which fake tensors lie.

    Shapes are not compared with other ranks. The buckets of gradients keep their first order: in
    the second step, real ones are freed and made again in the order of the backward, which is the
    same number of bytes. A bucket that is sent is its own result.
    """
    from torch.distributed import device_mesh, distributed_c10d
    from torch.nn.parallel import DistributedDataParallel, distributed

    start, replicate = DistributedDataParallel._ddp_init_helper, DistributedDataParallel.__init__
    arrange = device_mesh.DeviceMesh.__init__

    def started(self, *args, **kwargs) -> None:
        start(self, *args, **kwargs)
        torch.distributed._register_comm_hook(self.reducer, None, _sent)

    def join(*_, **__) -> None:
        if not torch.distributed.is_initialized():
            start_group(ranks)

    def replicated(self, module, device_ids=None, output_device=None, *args, **kwargs) -> None:
        replicate(self, module, None, None, *args, **kwargs)

    def arranged(self, device_type: str, *args, **kwargs) -> None:
        arrange(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    modules = (torch.distributed, distributed_c10d, device_mesh)
    patches = {(module, "init_process_group"): join for module in modules}
    patches |= {
        (distributed, "_verify_param_shape_across_processes"): lambda *_: None,
        (DistributedDataParallel, "__init__"): replicated,
        (DistributedDataParallel, "_ddp_init_helper"): started,
        (DistributedDataParallel, "register_comm_hook"): _refuse_hooks,
        (torch.distributed.Reducer, "_rebuild_buckets"): lambda _: False,
        (device_mesh.DeviceMesh, "__init__"): arranged,
    }
    with group_ends(), patched(patches):
        yield


@contextlib.contextmanager
def group_ends() -> Iterator[None]:
    """A process group that starts inside the `with` block ends with it."""
    was_there = torch.distributed.is_initialized()
    excepthook = sys.excepthook  # a group prefixes the errors of its process
    try:
        yield
    finally:
        if torch.distributed.is_initialized() and not was_there:
            torch.distributed.destroy_process_group()
        sys.excepthook = excepthook


def _sent(_, bucket) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def _refuse_hooks(*_, **__) -> None:
    raise Refused(
        "register_comm_hook: the buffers of communication hooks are not predicted: leave the hook "
        "out, and add what it holds"
    )

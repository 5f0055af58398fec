"""The mode whose tensors have shapes but no memory."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache

set_ = torch.ops.aten.set_
GIVEN_STORAGES = (set_.source_Storage, set_.source_Storage_storage_offset)


class FakeTensors(FakeTensorMode):
    """PyTorch's mode, with two corrections that let a storage be one, and end when it does.

    A copy of a fake tensor belongs to the same mode. copy.deepcopy copies the attributes of a
    tensor, too, and so the mode. For every operator the new one would then make a second storage of
    the copied tensor: the weights of layers that are copies, as nn.TransformerEncoder makes them,
    counted twice.

    No result is remembered by the storage that an operator was given. PyTorch keeps what operators
    return, by their arguments, and would keep what torch.load has read for as long as it runs.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func, types, args=(), kwargs=None):
        if func not in GIVEN_STORAGES:
            return super().dispatch(func, types, args, kwargs)
        with disable_fake_tensor_cache(self):
            return super().dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict) -> "FakeTensors":
        return self

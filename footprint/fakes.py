"""The mode whose tensors have shapes but no memory."""

from torch._subclasses.fake_tensor import FakeTensorMode


class FakeTensors(FakeTensorMode):
    """A copy of a fake tensor belongs to the same mode.

    copy.deepcopy copies the attributes of a tensor, too, and so the mode. For every operator the
    new one would then make a second storage of the copied tensor: the weights of layers that are
    copies, as nn.TransformerEncoder makes them, counted twice.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: dict) -> "FakeTensors":
        return self

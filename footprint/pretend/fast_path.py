"""nn.TransformerEncoder and nn.MultiheadAttention without gradients: PyTorch runs each layer as one
operator, its fast path, whose kernel is written in other operators, which a tracker can see.

Rows that a padding mask makes shorter lie one after another there, as a nested tensor, which no
fake tensor can be: `Ragged` stands for it. B rows of up to T tokens, N tokens of all rows, D width,
H heads, K head dim.

Sources: aten/native/transformers/{transformer,attention}.cpp and cuda/attention.cu,
aten/native/nested/{NestedTensorMath,NestedTensorTransformerFunctions}.cpp.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import _disable_current_modes

from footprint.pretend.values import KnownValues
from footprint.python.refusal import NO_NESTED, Refused, place
from footprint.record.trace import rounded_up

aten = torch.ops.aten
LAYER = aten._transformer_encoder_layer_fwd.default
ATTENTION = aten._native_multi_head_attention.default
LEFT_ALIGNED = aten._nested_tensor_from_mask_left_aligned.default
FROM_MASK = aten._nested_tensor_from_mask.default
TO_PADDED = aten.to_padded_tensor.default
IN_PARALLEL = 2**15  # elements that several threads select from


class Ragged(Tensor):
    """Rows of a batch without their padding; only the fast path takes them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_nested = True

    @staticmethod
    def __new__(cls, tokens_ND: Tensor, lengths: list[int]):
        longest = max(lengths)
        shape = len(lengths), longest, tokens_ND.shape[1]
        return Tensor._make_wrapper_subclass(cls, shape, dtype=tokens_ND.dtype)

    def __init__(self, tokens_ND: Tensor, lengths: list[int]):
        self.tokens_ND = tokens_ND
        self.lengths = lengths

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise Refused(
            f"{place()}: nn.TransformerEncoder takes the padding of src_key_padding_mask away, and "
            f"{func} of the nested tensor that is left is not predicted: give the encoder "
            "enable_nested_tensor=False"
        )


class FastPath:
    """The operators of the fast path on a CPU."""

    rounds_to = 1  # the longest row is padded to a multiple of it

    def __init__(self, known: KnownValues):
        self.known = known
        self.lengths: list[int] = []  # of the ragged rows that a layer runs on

    def rules(self) -> dict[Callable, Callable]:
        """Function -> what runs it by others, which autocast changes: it knows nothing of the layer
        itself.
        """
        return {torch._transformer_encoder_layer_fwd: self.layer}

    def kernels(self) -> dict[object, Callable]:
        """Operator -> what runs it by others."""
        return {
            LAYER: self.layer,
            ATTENTION: self.attention,
            LEFT_ALIGNED: self.is_left_aligned,
            FROM_MASK: self.without_padding,
            TO_PADDED: self.with_padding,
        }

    def layer(self, src: Tensor, *args) -> Tensor:
        if not isinstance(src, Ragged):
            return LAYER._op_dk(DispatchKey.CPU, src, *args)

        self.lengths = src.lengths
        try:
            made = LAYER._op_dk(DispatchKey.CPU, src.tokens_ND[None], *args)
        finally:
            self.lengths = []
        return Ragged(made[0], src.lengths)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        qkv: Tensor,
        bias: Tensor,
        out: Tensor,
        out_bias: Tensor,
        *args,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the weights if they are wanted."""
        if self.lengths:
            attended = self._attended(query[0], heads, qkv)
            return torch.addmm(out_bias, attended, out.t())[None], None

        given = query, key, value
        weights = qkv, bias, out, out_bias
        return ATTENTION._op_dk(DispatchKey.CPU, *given, width, heads, *weights, *args)

    # ---- ragged rows

    def is_left_aligned(self, x: Tensor, mask_BT: Tensor) -> bool:
        """Whether the mask, True for tokens, leaves out the ends of rows only."""
        tokens = self._values(mask_BT)
        with _disable_current_modes():
            lengths = tokens.sum(1, keepdim=True)
            places = torch.arange(tokens.shape[1], device="cpu")
            return torch.equal(tokens, places < lengths)

    def without_padding(
        self,
        x_BTD: Tensor,
        mask_BT: Tensor,
        mask_check: bool = True,
    ) -> Ragged:
        tokens = self._values(mask_BT)
        with _disable_current_modes():
            lengths = tokens.sum(1).tolist()
        selected = self._selected(x_BTD, lengths)
        return Ragged(selected, lengths)

    def with_padding(
        self,
        ragged: Tensor,
        value: float,
        size: list[int] | None = None,
    ) -> Tensor:
        if not isinstance(ragged, Ragged):
            raise Refused(f"{place()}: {NO_NESTED}")
        return self._restored(ragged, size or ragged.shape)

    def _values(self, mask_BT: Tensor) -> Tensor:
        """The mask with its values; if they are not known, no token is left out."""
        known = self.known.of(mask_BT)
        if known is None:
            self.known.suppose(f"{place()} masks no token")
            with _disable_current_modes():
                return torch.ones(mask_BT.shape, dtype=torch.bool, device="cpu")

        if self.known.is_drawn(mask_BT):
            self.known.suppose(f"the tokens that {place()} masks are those of one draw")
        with _disable_current_modes():
            return known.expand(mask_BT.shape)

    def _attended(
        self,
        x_ND: Tensor,
        heads: int,
        qkv: Tensor,
    ) -> Tensor:
        """What the tokens read of those of their rows, before the projection of the result."""
        q_BHTK, k_BHTK, v_BHTK = self._projected(x_ND, qkv, heads)
        B, H, T, _ = q_BHTK.shape
        q = q_BHTK.flatten(0, 1)
        k = k_BHTK.flatten(0, 1)
        v = v_BHTK.flatten(0, 1)

        scores = torch.bmm(q, k.transpose(1, 2))
        scores = self._softmax(scores.view(B, H, T, T))
        torch.bmm(scores.flatten(0, 1), v, out=q)  # queries are not needed any more
        del scores
        return self._joined(q_BHTK)

    def _projected(
        self,
        x_ND: Tensor,
        qkv: Tensor,
        heads: int,
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values, padded, in one storage."""
        projected = torch.mm(x_ND, qkv.t())
        padded = self._padded(projected, self.lengths)  # held while the result is made

        B = len(self.lengths)
        T = rounded_up(max(self.lengths), self.rounds_to)
        K = x_ND.shape[1] // heads
        made = x_ND.new_empty((3, B, heads, T, K))
        del padded
        return made.unbind()

    def _softmax(self, scores: Tensor) -> Tensor:
        """Row by row, without the padding."""
        result = torch.empty_like(scores)
        for row, length in enumerate(self.lengths):
            tokens = row, slice(None), slice(length), slice(length)
            result[tokens] = scores[tokens].softmax(-1)
        return result

    def _joined(self, x_BHTK: Tensor) -> Tensor:
        """All tokens, with their heads next to each other."""
        x_BTHK = x_BHTK.transpose(1, 2).contiguous()
        return self._selected(x_BTHK.flatten(2), self.lengths)

    def _restored(self, ragged: Ragged, size: Sequence[int]) -> Tensor:
        padded = self._padded(ragged.tokens_ND, ragged.lengths)
        return _padded_to(padded, size)

    def _padded(
        self,
        tokens_ND: Tensor,
        lengths: list[int],
    ) -> Tensor:
        longest = max(lengths), tokens_ND.shape[1]
        rows = tokens_ND.split(lengths)
        return torch.stack([_padded_to(row, longest) for row in rows])

    def _selected(
        self,
        x_BTD: Tensor,
        lengths: list[int],
    ) -> Tensor:
        """The tokens of all rows, selected by a mask of numbers."""
        masks = [_mask_of_row(x_BTD[0], length) for length in lengths]
        held = [torch.stack(masks)]
        held[0].sum()

        made = x_BTD.new_empty((sum(lengths), x_BTD.shape[2]))
        is_large = x_BTD.numel() >= IN_PARALLEL
        if torch.get_num_threads() > 1 and is_large:
            for _ in range(2):
                places = x_BTD.new_empty(x_BTD.shape, dtype=torch.int64)
                held.append(places)
        return made


def _mask_of_row(row_TD: Tensor, length: int) -> Tensor:
    width = row_TD.shape[1]
    tokens = row_TD.new_ones((length, width), dtype=torch.bool)
    return _padded_to(tokens, row_TD.shape)


def _padded_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """A copy, zeros behind it."""
    padding: list[int] = []
    sizes = zip(x.shape, size, strict=True)
    for given, wanted in reversed(list(sizes)):
        missing = wanted - given
        padding += [0, missing]
    return aten.constant_pad_nd(x, padding)

"""Activations of a decoder, read or replaced while it runs.

A site is a place of a block: the residual stream after it, or what its attention or its MLP adds
to that stream. `stream` hands each activation on as it is made and keeps none, so a long row needs
the memory of a forward. Letters: B rows, T tokens of a row, t of a part of it, D model width.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from longhaul.evals.score import Item, ModelScorer
from longhaul.exits import DONE
from model import IGNORE, Decoder

SITES = ("residual", "attention", "mlp")

Consume = Callable[[int, str, Tensor], None]  # layer, site, x_BtD
Rows = tuple[Tensor, Tensor | None]  # tokens [B, T] and, of packed rows, doc_ids [B, T]


class NotMeasurable(ValueError):
    """The model has nothing that this part could measure: a finding, and not an error."""

    exit_code = DONE


def module_at(model: Decoder, layer: int, site: str) -> nn.Module:
    """The module whose output is the activation."""
    block = model.layers[layer]
    return {"residual": block, "attention": block.attention, "mlp": block.mlp}[site]


def up_to(model: Decoder, layer: int) -> Decoder:
    """The model without the layers behind this one. It shares the others, and their hooks."""
    config = dataclasses.replace(model.config, num_layers=layer + 1)
    first = copy.copy(model)
    first._modules = dict(model._modules)
    first.layers = model.layers[: layer + 1]
    first.config = config
    return first


def behind(model: Decoder, layer: int) -> Decoder:
    """The model without the layers before this one: embeddings that it is given are what enters
    this layer. It shares the others, and their hooks.
    """
    config = dataclasses.replace(model.config, num_layers=model.config.num_layers - layer)
    rest = copy.copy(model)
    rest._modules = dict(model._modules)
    rest.layers = model.layers[layer:]
    rest.config = config
    return rest


# ---- hooks


@contextlib.contextmanager
def hooked(module: nn.Module, hook: Callable[[tuple, Tensor], Tensor | None]) -> Iterator[None]:
    """Inside, hook(inputs, output) is called after each forward of the module; what it returns, if
    anything, takes the place of the output.
    """

    def own(called: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
        # A module that runs in tiles or head groups calls a copy of itself, which has its hooks.
        return hook(inputs, output) if called is module else None

    handle = module.register_forward_hook(own)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def replaced(
    model: Decoder, layer: int, site: str, function: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Inside, function(x_BtD) takes the place of the activation x_BtD in every forward.

    `function` must return another tensor of the same shape and dtype, not change the given one.
    """
    with hooked(module_at(model, layer, site), lambda _, x_BtD: function(x_BtD)):
        yield


# ---- one forward


def stream(
    model: Decoder,
    tokens_BT: Tensor,
    layers: Sequence[int],
    sites: Sequence[str],
    consume: Consume,
    *,
    doc_ids: Tensor | None = None,
    chunk: int = 0,
) -> None:
    """Call consume(layer, site, x_BtD) with the activations of one forward, in the order in which
    they are made. `consume` may read them, and must not change them. The forward ends after the
    last of these layers.

    chunk: rows, and the documents of packed rows, pass one after another in parts of so many tokens
    over the KV cache. Then x is [1, t, D], and only the cache grows with the row. Otherwise the
    rows pass at once, and x is [B, T, D].
    doc_ids: documents of packed rows, as Decoder.forward takes them.

    ValueError for parts of an attention that reads rows at once.
    """
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            for site in sites:
                hooks.enter_context(_read(model, layer, site, consume))
        run(model, tokens_BT, max(layers), doc_ids=doc_ids, chunk=chunk)


def _read(
    model: Decoder, layer: int, site: str, consume: Consume
) -> contextlib.AbstractContextManager:
    def hand_on(_, x_BtD: Tensor) -> None:
        consume(layer, site, x_BtD)

    return hooked(module_at(model, layer, site), hand_on)


def run(
    model: Decoder, tokens_BT: Tensor, last: int, *, doc_ids: Tensor | None = None, chunk: int = 0
) -> None:
    """One forward up to layer `last`, for what hooks make of it: without gradients, and without
    the vocabulary. Tokens may also be embeddings [B, T, D].
    """
    scorer = ModelScorer(up_to(model, last), model.embed.weight.device, chunk)
    asks_nothing = torch.full(tokens_BT.shape[:2], IGNORE)
    scorer.figures(Item(tokens_BT, asks_nothing, doc_ids=doc_ids), _no_figures)


def _no_figures(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """What ModelScorer.figures expects, [0, N]."""
    return hidden_ND.new_empty(0, len(hidden_ND))


# ---- overflow


def overflow(
    model: Decoder, rows: Rows, chunk: int = 0, last: int | None = None
) -> tuple[int, str] | None:
    """The first layer and site of a forward at which an activation is not finite, if any is; the
    forward ends after layer `last`.
    """
    places: list[tuple[int, str]] = []
    finite: list[Tensor] = []

    def look(layer: int, site: str, x_BtD: Tensor) -> None:
        places.append((layer, site))
        finite.append(x_BtD.isfinite().all())

    layers = range(model.config.num_layers if last is None else last + 1)
    tokens_BT, doc_ids = rows
    stream(model, tokens_BT, layers, SITES, look, doc_ids=doc_ids, chunk=chunk)
    is_finite = torch.stack(finite).tolist()
    found = [place for place, good in zip(places, is_finite, strict=True) if not good]
    return min(found, key=lambda place: place[0]) if found else None


def require_finite(model: Decoder, rows: Rows, chunk: int = 0, last: int | None = None) -> None:
    """ValueError that names the first layer, up to layer `last`, at which an activation is not
    finite.
    """
    place = overflow(model, rows, chunk, last)
    if place is None:
        return
    layer, site = place
    dtype = model.config.compute_dtype
    where = {"residual": "the residual stream after layer", "mlp": "the MLP of layer"}.get(
        site, "the attention of layer"
    )
    if dtype == "float16":
        raise ValueError(
            f"{dtype} overflows in {where} {layer}, whose activations pass 65,504: use bfloat16 in "
            "--dtype or --compare"
        )
    raise ValueError(
        f"{where} {layer} is not finite in {dtype}: check the weights of this checkpoint"
    )

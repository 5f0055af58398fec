"""Whether a kind of attention does what the trainer relies on: `verify_kind` tries a tiny decoder.

Letters: B rows, T tokens.
"""

import dataclasses

import torch
from torch import Tensor

from longhaul import kernels, step
from longhaul.config import TrainConfig
from longhaul.kinds import attention_kind
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.simulate import simulate
from longhaul.sparse.indexer import own_losses
from model import Decoder, Device, ModelConfig

Check = tuple[str, bool, float]  # what holds, whether it does, and how far it is from holding

V = 97
B, T = 2, 200
DOCUMENTS = (70, 1, 129)  # tokens of the documents of a packed row
PARTS = (130, *[1] * 70)  # tokens of the forwards that fill a cache
IN_PARTS = (60, 40, 1, 99)  # the same, for a cache that takes a prompt in several forwards
SHAPE = (
    "num_layers=2",
    "hidden_size=64",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=32",
    "ffn_size=96",
    "init_std=0.1",
)
ROUNDING = 1e-4  # of the largest value, in fp32
PLANNED = 512  # tokens of the row whose memory is planned
PLAN = 0.01  # of the recorded peak


def verify_kind(kind, device: Device = "cpu") -> list[Check]:
    """(name, passed, figure) of each check of a decoder with 2 layers in fp32 on the device.

    kind: a settings object whose name is in KINDS of longhaul/kinds.py. Choose sizes of which a row
    of 200 tokens feels every one, such as blocks of 16 tokens.

    The figures are the largest differences relative to the largest value, and for the plan the
    difference from the peak that the allocator records on a CPU, whatever the device.
    """
    decoder = kernels.decoder(_run(kind).model(), seed=1).to(device)
    tokens_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0)).to(device)
    return [
        _decoding(decoder, tokens_BT),
        _causality(decoder, tokens_BT),
        _packing(decoder, tokens_BT),
        _checkpointing(kind, tokens_BT),
        _plan(kind),
    ]


def _run(kind, **changes) -> TrainConfig:
    """The settings of a run with this kind, whose sizes may have no flag."""

    class Run(TrainConfig):
        def model(self) -> ModelConfig:
            return dataclasses.replace(super().model(), attention=kind)

    settings = dict(model_size="tiny", vocab_size=V, model_overrides=SHAPE, dtype="fp32")
    return Run(attention_type=kind.name, **settings | dict(context_length=T) | changes)


def _compared(
    name: str,
    found: Tensor,
    expected: Tensor,
) -> Check:
    """Two tensors that are equal but for rounding; NaN equals nothing."""
    figure = float((found - expected).abs().max() / expected.abs().max())
    return name, figure <= ROUNDING, figure


@torch.no_grad()
def _decoding(decoder: Decoder, tokens_BT: Tensor) -> Check:
    orders = [PARTS]
    if attention_kind(decoder.config).prompt_in_parts:
        orders.append(IN_PARTS)
    decoded = []
    for order in orders:
        cache = decoder.new_cache(B, T)
        parts = tokens_BT.split(order, dim=1)
        decoded.append(torch.cat([decoder(part, cache=cache) for part in parts], dim=1))
    expected = decoder(tokens_BT).expand(len(orders), -1, -1, -1)
    return _compared(
        "decoding over a cache equals the full forward", torch.stack(decoded), expected
    )


@torch.no_grad()
def _causality(decoder: Decoder, tokens_BT: Tensor) -> Check:
    """From each of some positions on, all tokens change."""
    logits_BTV = decoder(tokens_BT)
    found, expected = [], []
    for end in (T // 4, T // 2, T - 2):
        changed_BT = tokens_BT.clone()
        changed_BT[:, end:] = (changed_BT[:, end:] + 1) % V
        found.append(decoder(changed_BT)[:, :end])
        expected.append(logits_BTV[:, :end])
    return _compared("nothing reads the future", torch.cat(found, 1), torch.cat(expected, 1))


@torch.no_grad()
def _packing(decoder: Decoder, tokens_BT: Tensor) -> Check:
    lengths = torch.tensor(DOCUMENTS)
    ids_T = torch.arange(len(DOCUMENTS)).repeat_interleave(lengths)
    found = decoder(tokens_BT, doc_ids=ids_T.expand(B, -1))
    separate = [decoder(document) for document in tokens_BT.split(DOCUMENTS, dim=1)]
    return _compared("packed documents equal separate ones", found, torch.cat(separate, dim=1))


def _checkpointing(kind, tokens_BT: Tensor) -> Check:
    wanted, *others = (
        _gradients(_run(kind, gradient_checkpointing=mode), tokens_BT)
        for mode in ("none", "selective", "full")
    )
    found = torch.stack(others)
    return _compared("checkpointing changes no gradient", found, wanted.expand_as(found))


def _gradients(cfg: TrainConfig, tokens_BT: Tensor) -> Tensor:
    """The gradients of all parameters, one behind the other."""
    model = step.build(cfg, cfg.model(), str(tokens_BT.device)).model
    x_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    with own_losses(model, warming=False) as own:
        loss = own.added_to(model(x_BT, labels_BT), torch.tensor(float(labels_BT.numel())))
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _plan(kind) -> Check:
    cfg = _run(kind, context_length=PLANNED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # kernels take buffers for each thread that happens to be busy
    try:
        planned = simulate(cfg, target="cpu").peak()[0]
        recorded = allocator_peak(cfg)
    finally:
        torch.set_num_threads(threads)
    figure = abs(planned / recorded - 1)
    return "the planned peak is what the allocator records", figure <= PLAN, figure

"""The memory of a forward pass without gradients, simulated as the training step is: the real
Decoder on fake tensors.

Sizes are bytes.
"""

import dataclasses
import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longhaul.memory.platforms import predicting
from longhaul.memory.trace import Trace
from longhaul.memory.tracker import Tracker
from longhaul.memory.workspace import Workspaces
from model import Decoder, ModelConfig


def forward_trace(
    config: ModelConfig, batch: int, context: int, logits: bool = True, target: str = "cuda"
) -> Trace:
    """The trace of one forward over [batch, context] tokens, weights in config.compute_dtype; with
    or without logits [B, T, V].
    """
    settings = {
        "batch_size": batch,
        "context_length": context,
        "dtype": config.compute_dtype,
        "target": target,
    }
    with torch.device("meta"):
        skeleton = Decoder(config).to(config.dtype)

    tracker = Tracker(Workspaces(target), fake=True)
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_tensors, predicting(target, tracker), torch.no_grad(), tracker:
        decoder = skeleton.to_empty(device="cpu")
        decoder.tie_weights()
        weights = {tracker.register(p, "parameter"): name for name, p in decoder.named_parameters()}
        tokens_BT = torch.empty(batch, context, dtype=torch.long, device="cpu")
        inputs = {tracker.register(tokens_BT, "input")}

        tracker.begin(settings)
        if logits:
            decoder(tokens_BT)
        else:
            decoder.hidden(tokens_BT)

    for identity, storage in tracker.trace.storages.items():
        storage.category = "temporary"
        storage.module = ""
        if identity in weights:
            storage.category = "parameter"
            storage.module = weights[identity]
        elif identity in inputs:
            storage.category = "input"
    return tracker.trace


@functools.cache
def forward_peak(config: ModelConfig, batch: int, context: int, logits: bool = True) -> int:
    """Live bytes at the peak of the forward. Without gradients no layer keeps anything, so two
    layers stand for all.
    """
    shallow = dataclasses.replace(config, num_layers=min(config.num_layers, 2))
    peak, _ = forward_trace(shallow, batch, context, logits).peak()
    missing_weights = config.num_params() - shallow.num_params()
    return peak + missing_weights * config.dtype.itemsize

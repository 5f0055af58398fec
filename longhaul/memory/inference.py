"""The memory of a forward pass without gradients, simulated as the training step is: the real
Decoder on fake tensors.

Sizes are bytes. Imports longhaul.memory (simulate, trace, tracker, workspace) and model.py of ours.
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
    with torch.device("meta"):
        skeleton = Decoder(config).to(config.dtype)
    tracker = Tracker(Workspaces(target), fake=True)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        predicting(target, tracker),
        torch.no_grad(),
        tracker,
    ):
        decoder = skeleton.to_empty(device="cpu")
        decoder.tie_weights()
        weights = {tracker.register(p, "parameter"): name for name, p in decoder.named_parameters()}
        tokens = torch.empty(batch, context, dtype=torch.long, device="cpu")
        inputs = {tracker.register(tokens, "input")}
        tracker.begin(
            dict(
                batch_size=batch, context_length=context, dtype=config.compute_dtype, target=target
            )
        )
        decoder(tokens) if logits else decoder.hidden(tokens)
    for identity, storage in tracker.trace.storages.items():
        storage.module = weights.get(identity, "")
        storage.category = (
            "parameter" if identity in weights else "input" if identity in inputs else "temporary"
        )
    return tracker.trace


@functools.cache
def forward_peak(config: ModelConfig, batch: int, context: int, logits: bool = True) -> int:
    """Live bytes at the peak of the forward. Without gradients no layer keeps anything: two layers
    stand for all.
    """
    weights = config.num_params() * config.dtype.itemsize
    shallow = dataclasses.replace(config, num_layers=min(config.num_layers, 2))
    return (
        weights
        + forward_trace(shallow, batch, context, logits).peak()[0]
        - shallow.num_params() * config.dtype.itemsize
    )

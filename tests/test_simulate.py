"""The simulated step against the allocator's own record of the real one, and against itself: layers, ranks, stages."""

import dataclasses

import numpy as np
import pytest
import torch

from data.loader import Batch
from longhaul import dist, step
from longhaul.config import TrainConfig
from longhaul.memory.measure import peak_bytes
from longhaul.memory.simulate import simulate
from longhaul.memory.stages import local
from tests.ranks import run_ranks

TINY = dict(model_size="tiny", context_length=2048)
SETTINGS = [dict(), dict(gradient_checkpointing="full"), dict(loss="standard"), dict(loss="standard", gradient_checkpointing="full"),
            dict(context_length=700, batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing="full"),
            dict(context_length=1000, gradient_accumulation_steps=3, loss="chunked"),
            dict(attention_type="nsa"), dict(attention_type="nsa", gradient_checkpointing="full", context_length=3000),
            dict(attention_type="nsa", nsa=("kv=separate", "cmp_kind=mean"), loss="standard"),
            dict(vocab_size=1000, context_length=4096, gradient_checkpointing="full", model_overrides=("tie_embeddings=False", "ffn_size=256"))]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3}  # of the peak; a bf16 product on a CPU keeps scratch memory of its own


def real_batch(cfg: TrainConfig, ranks: int = 1) -> list[dict]:
    shape = (cfg.accumulation(ranks) * cfg.batch_size, cfg.context_length)
    rows = Batch(*(np.zeros(shape, dtype=np.int64) for _ in range(3)), np.zeros(shape, dtype=np.int32), num_valid=shape[0] * shape[1])
    batch = step.micro_batches(rows, cfg.batch_size, torch.device("cpu"))
    return [micro | dict(doc_ids=None) for micro in batch]


def measured(cfg: TrainConfig, world: dist.World = dist.World()) -> int:
    """Bytes at the peak of the second step: what was there before it, and what the allocator recorded on top."""
    torch.set_num_threads(1)
    state = step.build(cfg, cfg.model(), "cpu", world, dist.data_mesh(world, torch.device("cpu"), cfg.dp_replicate))
    batch = real_batch(cfg, world.size)
    step.train_step(state, batch)
    kept = [local(p) for p in state.model.parameters()] + [local(v) for values in state.optimizer.state.values() for v in values.values()]
    kept += [value for micro in batch for value in micro.values() if value is not None]
    resident = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(resident.values()) + peak_bytes(lambda: step.train_step(state, batch), torch.device("cpu"))


@pytest.fixture(autouse=True)
def single_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_predicted_peak_is_what_the_allocator_records(changes, dtype):
    cfg = TrainConfig(**TINY | dict(dtype=dtype) | changes)
    assert simulate(cfg, target="cpu").peak()[0] == pytest.approx(measured(cfg), rel=TOLERANCE[dtype])


SHARDED = [dict(dtype="fp32"), dict(dtype="bf16", gradient_checkpointing="full"), dict(dtype="fp32", attention_type="nsa", batch_size=2, context_length=1100)]


def measured_each(world: dist.World, settings: list[dict]) -> list[int]:
    return [measured(TrainConfig(**TINY | changes), world) for changes in settings]


@pytest.mark.slow
def test_the_predicted_peak_of_a_rank_is_what_two_real_ranks_record():
    predicted = [simulate(TrainConfig(**TINY | changes), ranks=2, target="cpu").peak()[0] for changes in SHARDED]
    for changes, size, real in zip(SHARDED, predicted, run_ranks(measured_each, 2, SHARDED)[0]):
        assert size == pytest.approx(real, rel=TOLERANCE[changes["dtype"]]), changes

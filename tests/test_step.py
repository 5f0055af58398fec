"""train_step against a loop of training in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from longhaul import optim, step
from longhaul.config import TrainConfig
from model import IGNORE, logits

VOCAB = 61
T = 297  # with the other micro-batch's 4, an odd number of targets, which bf16 cannot hold
CFG = TrainConfig(
    model_size="tiny",
    vocab_size=VOCAB,
    context_length=T,
    dtype="fp32",
    lr=1e-2,
    warmup_steps=3,
    max_steps=6,
    weight_decay=0.1,
    grad_clip=0.1,
    model_overrides=("num_layers=1", "hidden_size=32", "num_heads=2", "num_kv_heads=1"),
)
STEPS = 4


def batch(number: int) -> list[dict]:
    """Two micro-batches, of which one has more targets than the other."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCAB, (2, 1, T + 1), generator=generator)
    labels = ids[:, :, 1:].clone()
    labels[0, :, 4:] = IGNORE
    return [dict(tokens_BT=ids[i, :, :-1], labels_BT=labels[i]) for i in range(2)]


def trained_plainly() -> tuple[torch.nn.Module, list[float]]:
    """The model after STEPS steps of the obvious loop, and the losses."""
    model = step.build(CFG, CFG.model(), "cpu").model
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices), dict(params=vectors, weight_decay=0.0)]
    adam = CFG.adam_numbers()
    betas = (adam.beta1, adam.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=adam.eps, weight_decay=CFG.weight_decay)

    losses = []
    for number in range(STEPS):
        micro_batches = batch(number)
        hidden = torch.cat([model.hidden(one["tokens_BT"]).flatten(0, 1) for one in micro_batches])
        labels = torch.cat([one["labels_BT"].flatten() for one in micro_batches])
        loss = F.cross_entropy(logits(hidden, model.lm_head.weight), labels, ignore_index=IGNORE)
        losses.append(loss.item())

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate(number, CFG)
        optimizer.step()
    return model, losses


def test_steps_equal_the_obvious_loop():
    expected, losses = trained_plainly()
    state = step.build(CFG, CFG.model(), "cpu")
    for number, loss in enumerate(losses):
        result = step.train_step(state, batch(number))
        assert result.grad_norm > CFG.grad_clip, "clipping is part of what is compared"
        assert abs(result.loss - loss) < 1e-5
        assert result.lr == optim.learning_rate(number, CFG)

    weights = zip(state.model.parameters(), expected.parameters(), strict=True)
    for ours, theirs in weights:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_step_leaves_no_gradient_behind():
    state = step.build(CFG, CFG.model(), "cpu")
    step.train_step(state, batch(0))
    assert all(p.grad is None for p in state.model.parameters())


def test_only_the_first_step_checks_its_labels():
    """A GPU would wait for the answer in each of the others."""
    state = step.build(CFG, CFG.model(), "cpu")
    checked = []
    for number in range(2):
        step.train_step(state, batch(number))
        checked.append(state.model.validate)
    assert checked == [True, False]


class Measuring(step.NextToken):
    measures = ("share",)

    def after_backward(self, model: torch.nn.Module) -> torch.Tensor:
        return torch.tensor([[257.0], [1001.0]])  # which bf16 cannot hold


def test_what_an_objective_measures_is_summed_over_micro_batches_in_fp32():
    state = step.build(CFG, CFG.model(), "cpu")
    state.objective = Measuring()
    result = step.train_step(state, batch(0))
    assert state.figures.flatten().tolist() == [514.0, 2002.0]
    assert float(result.figures["share"]) == pytest.approx(257 / 1001, rel=1e-6)

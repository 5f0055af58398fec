"""What a layer keeps: checkpointing whole and selective, offload, tiled MLP, attention by groups of
heads, alone and together.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from footprint.kernels.measure import saved_bytes
from footprint.python.patches import patched
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.parallel import checkpointing, tiling
from model import MLP, ModelConfig, Ops
from tests.tiers import slow

T, V = 96, 101
SPARSE = ("cmp_block=8", "cmp_stride=4", "sel_block=8", "sel_count=4", "window=16")
BASE = dict(
    model_size="tiny",
    vocab_size=V,
    context_length=T,
    dtype="fp32",
    warmup_steps=0,
    lr=1e-3,
    adam=("eps=1e-6",),
    model_overrides=(
        "num_layers=2",
        "hidden_size=64",
        "num_heads=8",
        "num_kv_heads=4",
        "head_dim=16",
        "ffn_size=96",
    ),
)
LEVERS = {
    "full": dict(gradient_checkpointing="full"),
    "selective": dict(gradient_checkpointing="selective"),
    "offload": dict(gradient_checkpointing="full", offload_activations=True),
    "tiles": dict(mlp_tiles=3),
    "many tiles": dict(mlp_tiles=1000),
    "groups": dict(attention_head_groups=2),
    "one head": dict(attention_head_groups=4),
    "full, tiles, groups, offload": dict(
        gradient_checkpointing="full",
        mlp_tiles=4,
        attention_head_groups=2,
        offload_activations=True,
    ),
    "selective, tiles, offload": dict(
        gradient_checkpointing="selective", mlp_tiles=4, offload_activations=True
    ),
}
ATTENTION = {
    "standard": {},
    "nsa": dict(attention_type="nsa", blocks=SPARSE),
    "nsa, separate": dict(attention_type="nsa", blocks=(*SPARSE, "kv=separate")),
}


def batch(rows=2, packed=True):
    make = torch.Generator().manual_seed(3)
    ids = torch.randint(V, (rows, T + 1), generator=make)
    doc_ids = (torch.rand(rows, T, generator=make) < 0.04).cumsum(1).int() if packed else None
    return [dict(tokens_BT=ids[:, :-1], labels_BT=ids[:, 1:], doc_ids=doc_ids)]


def build(**changes):
    cfg = TrainConfig(**BASE | changes)
    return step.build(cfg, cfg.model(), "cpu")


def gradients(packed=True, **changes):
    """Loss and every gradient of a first step."""
    state = build(**changes)
    loss = state.model(**batch(packed=packed)[0])
    loss.backward()
    return [("loss", loss.detach())] + [
        (name, p.grad) for name, p in state.model.named_parameters()
    ]


@pytest.mark.parametrize(
    "packed, attention",
    [(True, "standard"), (True, "nsa, separate"), slow(False, "nsa")],
)
def test_no_lever_changes_a_gradient(attention, packed):
    truth = gradients(packed, **ATTENTION[attention])
    for lever, changes in LEVERS.items():
        for (name, want), (_, got) in zip(
            truth, gradients(packed, **ATTENTION[attention], **changes)
        ):
            assert (got - want).abs().max() <= 2e-6 * max(1.0, want.abs().max()) and (
                got - want
            ).norm() <= 1e-5 * want.norm(), (lever, name)


def test_bf16_levers_stay_within_rounding():
    truth = dict(gradients(dtype="bf16"))
    for lever in ("tiles", "one head", "full, tiles, groups, offload"):
        for name, got in gradients(dtype="bf16", **LEVERS[lever]):
            assert (got - truth[name]).norm() <= 2e-2 * truth[name].norm(), (lever, name)


def test_many_tiles_make_the_gradients_of_bf16_weights_no_noisier():
    """Sums over the tiles are fp32: in bf16 the later tiles would be rounded away."""

    def error(tiles: int) -> list[float]:
        mlp = MLP(ModelConfig.preset("tiny", hidden_size=32, ffn_size=64), Ops())
        generator = torch.Generator().manual_seed(0)
        for p in mlp.parameters():
            p.data = torch.randn(p.shape, generator=generator).bfloat16()
        x = torch.randn(1, 512, 32, generator=generator).bfloat16()
        dy = torch.randn(1, 512, 32, generator=generator).bfloat16()

        exact = copy.deepcopy(mlp).double()
        exact(x.double()).backward(dy.double())
        tiling.TiledMLP(mlp, tiles)(x).backward(dy)
        pairs = zip(mlp.parameters(), exact.parameters(), strict=True)
        return [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs]

    for many, one in zip(error(512), error(1), strict=True):
        assert many < 1.2 * one


class Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().split(".")[0]] = self.calls.get(func.name().split(".")[0], 0) + 1
        return func(*args, **kwargs or {})

    def attention(self) -> int:
        return sum(self.calls.get(op, 0) for op in checkpointing.ATTENTION_OPS)


def operators(**changes) -> Count:
    state = build(**changes)
    with Count() as count:
        state.model(**batch(packed=False)[0]).backward()
    return count


@pytest.mark.parametrize("attention", ["standard", "nsa"])
def test_selective_checkpointing_runs_attention_once_and_full_twice(attention):
    layers, kind = 2, ATTENTION[attention]
    for lever, forwards in (
        ({}, layers),
        (LEVERS["selective"], layers),
        (LEVERS["full"], 2 * layers),
    ):
        assert operators(**kind, **lever).attention() == forwards, lever


def test_tiles_inside_a_checkpoint_run_no_mlp_a_third_time():
    """silu runs forward, again, and once more inside SwiGLU's backward; in each of 4 tiles as
    often.
    """
    plain, tiled = (
        operators(gradient_checkpointing="full", mlp_tiles=tiles).calls["aten::silu"]
        for tiles in (1, 4)
    )
    assert tiled == 4 * plain == 4 * 2 * 3


def kept_bytes(**changes) -> int:
    state = build(**changes)
    return saved_bytes(lambda: state.model(**batch()[0]))


def test_each_lever_keeps_less():
    plain, full = kept_bytes(), kept_bytes(**LEVERS["full"])
    assert full < 0.45 * plain
    assert (
        kept_bytes(mlp_tiles=3) < 0.85 * plain and kept_bytes(attention_head_groups=2) < 0.6 * plain
    )


def test_offload_moves_every_layer_input_and_gives_it_back(monkeypatch):
    moved = []
    copy = checkpointing.to_host
    monkeypatch.setattr(checkpointing, "to_host", lambda x: moved.append(tuple(x.shape)) or copy(x))
    state = build(**LEVERS["offload"])
    step.train_step(state, batch())
    assert moved == [(2, T, 64)] * 2
    host = state.model.layers[0].forward.args[0]
    assert [ref() for ref in host.waiting if ref() is not None] == [], (
        "no input outlives its backward"
    )


class Order:
    """Stands in for the copying stream and notes in which order work is queued."""

    def __init__(self):
        self.queued = []
        self.copies = 0
        self.copying = False

    @contextlib.contextmanager
    def after_computation(self):
        self.queued.append("computation done")
        self.copying = True
        yield
        self.copying = False

    def mark(self):
        self.copies += 1
        self.queued.append(f"copy {self.copies}")
        return self.copies

    def hold_computation(self, mark):
        self.queued.append(f"wait for {mark}")


def three_squares(order, x):
    """Three offloaded layers; what is queued in the forward and in the backward."""
    copies = checkpointing.HostCopies(lambda device: order)

    def layer(x):
        order.queued.append("layer")
        return x.square()

    with patched({(checkpointing, "is_hosts"): lambda x: False}):  # as if on a device
        for _ in range(3):
            x = checkpointing._offloaded(copies, layer, x)
            x.register_hook(lambda grad: order.queued.append("backward"))
        forward = order.queued.copy()
        order.queued.clear()
        x.sum().backward()
    return forward, order.queued


def test_an_input_leaves_while_its_layer_runs_and_nothing_takes_its_memory_before():
    forward, _ = three_squares(Order(), torch.ones(1, 2, 2, requires_grad=True))
    for number, queued in enumerate(zip(*[iter(forward)] * 4), 1):
        assert sorted(queued[:3]) == ["computation done", f"copy {number}", "layer"]
        assert queued[3] == f"wait for {number}"


def test_an_input_comes_back_one_layer_early_and_not_before_the_layer_above_is_done():
    x = torch.full((1, 2, 2), 1.5, requires_grad=True)
    _, backward = three_squares(Order(), x)
    assert backward == [
        *("backward", "computation done", "copy 4", "wait for 4", "computation done", "copy 5"),
        *("backward", "wait for 5", "computation done", "copy 6"),
        *("backward", "wait for 6"),
    ]
    assert torch.equal(x.grad, 8 * x.detach() ** 7)


def test_device_memory_of_what_comes_back_belongs_to_the_computation():
    order = Order()

    class Allocations(TorchDispatchMode):
        inside = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if order.copying:
                self.inside.append(func.name())
            return func(*args, **kwargs or {})

    with Allocations() as seen:
        three_squares(order, torch.ones(1, 2, 2, requires_grad=True))
    on_the_host = ["aten::empty.memory_format", "aten::copy_"]
    assert seen.inside == on_the_host * 3 + ["aten::copy_"] * 3


@torch.no_grad()
def test_levers_leave_validation_and_decoding_as_they_are():
    plain, changed = build(), build(**LEVERS["full, tiles, groups, offload"])
    x = batch(1, packed=False)[0]["tokens_BT"]
    assert (plain.model(x) - changed.model(x)).abs().max() <= 1e-5
    caches = [state.model.new_cache(1, T) for state in (plain, changed)]
    for part in x.split([40, 1, 55], 1):
        a, b = (state.model(part, cache=cache) for state, cache in zip((plain, changed), caches))
        assert (a - b).abs().max() <= 1e-5


def test_every_pair_of_levers_is_exact_or_refused():
    singles = (
        dict(gradient_checkpointing="full"),
        dict(gradient_checkpointing="selective"),
        dict(mlp_tiles=3),
        dict(attention_head_groups=2),
        dict(offload_activations=True),
        dict(loss="chunked"),
    )
    truth, exact = dict(gradients()), 0
    for one, other in itertools.combinations(singles, 2):
        try:
            TrainConfig(**BASE | one | other)
        except ValueError:
            continue
        exact += 1
        for name, got in gradients(**one | other):
            assert (got - truth[name]).norm() <= 1e-5 * truth[name].norm(), (one, other, name)
    assert exact >= 10

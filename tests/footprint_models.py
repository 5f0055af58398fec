"""Small hand-written training steps, whose memory footprint/ predicts and this machine measures.

Each entry of STEPS makes (build, step) as a user would write them.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from footprint import Report
from footprint.kernels.workspace import ProbedWorkspaces
from footprint.pretend.outside import random_states
from footprint.pretend.places import DEPTH, StepTracker
from footprint.pretend.values import KnownValues
from footprint.python.patches import patched
from footprint.steps.prediction import trace_two_steps

WIDTH = 128
HEADS = 4
VOCABULARY = 1000
BATCH = 4
TOKENS = 160


# ---- models


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, activation: nn.Module, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """A decoder; `reentrant` says how its blocks are checkpointed, None: not at all."""

    def __init__(
        self,
        layers: int = 3,
        activation: type[nn.Module] = nn.GELU,
        dropout: float = 0.0,
        reentrant: bool | None = None,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(activation(), dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def in_bfloat16() -> nn.Module:
    return one_layer().to(torch.bfloat16)


def one_layer() -> nn.Module:
    return Transformer(layers=1)


class Squared(torch.autograd.Function):
    """relu(x)^2, which keeps only its input."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x.relu()


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 1024), nn.GELU(), nn.Linear(1024, 512), nn.LayerNorm(512),
        nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def convolutions() -> nn.Module:
    def block(width: int) -> nn.Module:
        return Residual(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        )

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), block(32), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


# ---- optimizers


class Lion:
    """A user's optimizer: the sign of a momentum."""

    def __init__(self, parameters, lr: float = 1e-4):
        self.parameters = list(parameters)
        self.lr = lr
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            update = momentum.lerp(parameter.grad, 0.1).sign_()
            parameter.add_(update, alpha=-self.lr)
            momentum.lerp_(parameter.grad, 0.01)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# ---- steps


def tokens() -> tuple[Tensor, Tensor]:
    row = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    return row[:, :-1], row[:, 1:]


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 16, 16), torch.randint(10, (16,))


def loss_of(model: nn.Module, batch) -> Tensor:
    inputs, labels = batch()
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train(state, batch, micro_batches: int = 1, clip: float = 0.0, autocast: bool = False):
    """One step as a training script has it, the loss read for a log."""
    model, optimizer = state
    total = 0.0
    for _ in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, batch) / micro_batches
        loss.backward()
        total += loss.item()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return f"loss {total:.4f}"


def with_optimizer(model, optimizer=torch.optim.AdamW, **options):
    """(build, step) parts: a build of a model and its optimizer."""

    def build():
        made = model()
        return made, optimizer(made.parameters(), **options)

    return build


def trained(model, loss, optimizer=torch.optim.AdamW):
    """(build, step) that trains `loss(model)`."""

    def step(state):
        model, optimizer = state
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return with_optimizer(model, optimizer), step


def on_tokens(model=Transformer, optimizer=None, **options):
    return optimizer or with_optimizer(model), functools.partial(train, batch=tokens, **options)


def on_images(model, **options):
    return with_optimizer(model), functools.partial(train, batch=images, **options)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = torch.optim.AdamW
STEPS = {
    "mlp": on_images(mlp),
    "convolutions": on_images(convolutions),
    "transformer": on_tokens(),
    "transformer with dropout": on_tokens(functools.partial(Transformer, dropout=0.1)),
    "custom autograd function": on_tokens(functools.partial(Transformer, activation=SquaredReLU)),
    "checkpointing, reentrant": on_tokens(functools.partial(Transformer, reentrant=True)),
    "checkpointing, non-reentrant": on_tokens(functools.partial(Transformer, reentrant=False)),
    "autocast bf16": on_tokens(one_layer, autocast=True),
    "convolutions, autocast bf16": on_images(convolutions, autocast=True),
    "converted to bf16": on_tokens(in_bfloat16),
    "accumulation of 4 with clipping": on_tokens(micro_batches=4, clip=1.0),
    "AdamW foreach": on_tokens(optimizer=with_optimizer(Transformer, ADAMW, foreach=True)),
    "AdamW fused": on_tokens(optimizer=with_optimizer(Transformer, ADAMW, fused=True)),
    "SGD with momentum": on_tokens(optimizer=with_optimizer(Transformer, SGD)),
    "a user's optimizer": on_tokens(optimizer=with_optimizer(Transformer, Lion)),
}


# ---- steps of several ranks


def sharded(make: Callable[[], nn.Module]) -> nn.Module:
    """FSDP2, each layer in a group of its own."""
    model = make()
    for layer in getattr(model, "layers", []):
        fully_shard(layer)
    return fully_shard(model)


def sharded_and_replicated(make: Callable[[], nn.Module]) -> nn.Module:
    """HSDP: replicas of shards, on a mesh of its own."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = make()
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(make: Callable[[], nn.Module]) -> nn.Module:
    return DistributedDataParallel(make())


def over_ranks(spread, make, batch=tokens):
    step = functools.partial(train, batch=batch, clip=1.0)
    return with_optimizer(functools.partial(spread, make)), step


OVER_RANKS = {
    "FSDP2, transformer": over_ranks(sharded, Transformer),
    "FSDP2, mlp": over_ranks(sharded, mlp, images),
    "HSDP, transformer": over_ranks(sharded_and_replicated, Transformer),
    "DDP, transformer": over_ranks(replicated, Transformer),
}


def observe(build, step) -> Report:
    """The report of two real steps on this machine's CPU."""
    tracker = StepTracker(ProbedWorkspaces("cpu"), False, KnownValues(), DEPTH)
    with patched(random_states(tracker)), tracker:
        trace_two_steps(tracker, build, step)
    return Report.of(tracker, None, 1)

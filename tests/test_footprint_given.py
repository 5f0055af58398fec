"""footprint/: tensors that are there before the prediction, and weights that `build` loads, count
as those that `build` makes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from footprint import Recording, estimate_memory, measure, predict
from tests.footprint_models import WIDTH, one_layer

VOCABULARY = 1000
BYTES = 4 * VOCABULARY * WIDTH  # of an embedding in fp32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


class Normed(nn.Module):
    """Buffers that a step changes, and one that two layers share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        mask = torch.ones(WIDTH, WIDTH)
        for layer in self.layers:
            layer.register_buffer("mask", mask)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        for layer in self.layers:
            x = layer(x) @ layer.mask
        return x


class Viewed(nn.Module):
    """Two weights in one storage."""

    def __init__(self):
        super().__init__()
        both = torch.randn(2 * VOCABULARY, WIDTH)
        self.embedding = nn.Parameter(both[:VOCABULARY])
        self.head = nn.Parameter(both[VOCABULARY:])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding) @ self.head.t()


MODELS = {"tied": Tied, "normed": Normed, "viewed": Viewed}
# what `build` does with a model that is already there, or that it makes itself
USES = {
    "left": lambda model: model,
    "frozen": lambda model: model.requires_grad_(False),
    "copied": copy.deepcopy,
    "moved": lambda model: model.cuda(),
    "half": lambda model: model.to("cuda", torch.bfloat16),
    "double": lambda model: model.double(),
    "named": lambda model: model.to(device="cuda"),
    "there": lambda model: model.float(),
}


def run(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    device = next(model.parameters()).device
    tokens = torch.randint(VOCABULARY, (4, 16), device=device)
    loss = model(tokens).square().mean()
    if optimizer:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def training(make, use=lambda model: model):
    """build and step of a model that `make` returns."""

    def build():
        model = use(make())
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, torch.optim.AdamW(trained) if trained else None

    return build, lambda state: run(*state)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_before_the_prediction_counts_as_one_that_build_makes(name, use):
    expected = predict(*training(MODELS[name], USES[use]), "cuda")
    model = MODELS[name]()
    found = predict(*training(lambda: model, USES[use]), "cuda")
    if use != "copied":
        assert found.peak == expected.peak
        assert found.stages == expected.stages
        return
    before = sum(storage_sizes(model).values())
    assert found.peak == expected.peak + before


def storage_sizes(model: nn.Module) -> dict[int, int]:
    held = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return {storage.data_ptr(): storage.nbytes() for storage in held}

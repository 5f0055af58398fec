"""Soft tokens and the KV cache that gradients pass through, against whole rows and dense sums."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lab.posttrain.prompts import GradientCache, SoftTokens, embedded, mix
from longhaul import kernels
from longhaul.parallel.checkpointing import checkpoint_layers
from model import Decoder, ModelConfig, NSAConfig

SHAPE = dict(
    vocab_size=61,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=24,
    compute_dtype="float64",
    norm_eps=1e-6,
)


def decoder(**options) -> Decoder:
    return kernels.decoder(ModelConfig(**{**SHAPE, **options})).double()


def soft_tokens(B: int, T: int, K: int, V: int = 61) -> SoftTokens:
    generator = torch.Generator().manual_seed(3)
    logits_BTV = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    top = logits_BTV.topk(K)
    return SoftTokens(top.values.softmax(-1).requires_grad_(), top.indices)


def one_by_one(model: Decoder, x_BTD: torch.Tensor, prompt: int) -> torch.Tensor:
    """Hidden states of a row whose prompt passes at once and whose other tokens pass singly."""
    cache = GradientCache(model.config)
    parts = x_BTD.split([prompt] + [1] * (x_BTD.shape[1] - prompt), dim=1)
    hidden = []
    for part in parts:
        hidden.append(model.hidden(part, cache=cache))
        cache = cache.extended()
    assert cache.length == x_BTD.shape[1]
    return torch.cat(hidden, 1)


def gradients(model: Decoder, x_BTD: torch.Tensor, run) -> list[torch.Tensor]:
    """Hidden states, and the gradients of inputs and parameters for fixed output gradients."""
    x_BTD = x_BTD.detach().requires_grad_()
    hidden_BTD = run(model, x_BTD)
    weight = torch.linspace(-1, 1, hidden_BTD.numel(), dtype=torch.float64).view_as(hidden_BTD)
    inputs = [x_BTD, *model.layers.parameters()]
    found = torch.autograd.grad((hidden_BTD * weight).sum(), inputs)
    return [hidden_BTD.detach(), *found]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_row_token_by_token_has_the_gradients_of_the_whole_row(checkpointed):
    model = decoder()
    x_BTD = embedded(model, soft_tokens(2, 7, 5)).detach()
    wanted = gradients(model, x_BTD, lambda m, x: m.hidden(x))
    if checkpointed:
        checkpoint_layers(model)
    found = gradients(model, x_BTD, lambda m, x: one_by_one(m, x, prompt=3))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_step_can_be_checkpointed_from_outside():
    model = decoder()
    x_BTD = embedded(model, soft_tokens(1, 5, 4)).detach()

    def outside(model, x_BTD):
        cache = GradientCache(model.config)
        hidden = []
        for part in x_BTD.split(1, dim=1):
            hidden.append(checkpoint(model.hidden, part, cache=cache, use_reentrant=False))
            cache = cache.extended()
        return torch.cat(hidden, 1)

    wanted = gradients(model, x_BTD, lambda m, x: m.hidden(x))
    for a, b in zip(gradients(model, x_BTD, outside), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_prompt_stays_one_tensor_whatever_follows_it():
    model = decoder()
    cache = GradientCache(model.config)
    model.hidden(torch.zeros(1, 4, 16, dtype=torch.float64), cache=cache)
    cache = cache.extended()
    prompt = cache.layers[0].keys[0]
    for _ in range(3):
        model.hidden(torch.zeros(1, 1, 16, dtype=torch.float64), cache=cache)
        cache = cache.extended()
    assert cache.layers[0].keys[0] is prompt
    assert [len(k[0]) for k in cache.layers[0].keys] == [4, 1, 1, 1]


@pytest.mark.parametrize("K", [1, 61])
def test_a_mixture_is_the_dense_sum(K):
    soft = soft_tokens(2, 3, K)
    table_VD = torch.randn(61, 16, dtype=torch.float64, requires_grad=True)
    dense_BTV = torch.zeros(2, 3, 61, dtype=torch.float64)
    dense_BTV = dense_BTV.scatter(2, soft.index_BTK, soft.weight_BTK)

    grad_BTD = torch.randn(2, 3, 16, dtype=torch.float64)
    inputs = (soft.weight_BTK, table_VD)
    wanted = torch.autograd.grad(dense_BTV @ table_VD, inputs, grad_BTD, retain_graph=True)
    by_bags = mix(soft, table_VD)
    whole = mix(SoftTokens(dense_BTV), table_VD)
    for mixed_BTD in (by_bags, whole):
        torch.testing.assert_close(mixed_BTD, dense_BTV @ table_VD)
        found = torch.autograd.grad(mixed_BTD, inputs, grad_BTD, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_one_token_with_all_the_weight_is_that_token():
    model = decoder(compute_dtype="float32").float()
    tokens_BT = torch.tensor([[4, 60, 0]])
    soft = SoftTokens(torch.ones(1, 3, 1), tokens_BT[..., None])
    assert torch.equal(embedded(model, soft), embedded(model, tokens_BT))
    assert torch.equal(model.hidden(embedded(model, soft)), model.hidden(tokens_BT))


def test_sparse_attention_has_no_such_cache():
    config = ModelConfig(**{**SHAPE, "attention": NSAConfig(), "compute_dtype": "float32"})
    with pytest.raises(ValueError, match="nsa"):
        GradientCache(config)


def test_embeddings_without_tokens_are_refused():
    with pytest.raises(ValueError, match=r"tokens have shape \(1, 0\)"):
        decoder().hidden(torch.zeros(1, 0, 16, dtype=torch.float64))

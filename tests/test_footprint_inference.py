"""footprint/ without gradients: PyTorch's fast path of transformers, and inference mode, against
the allocator's own record.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from footprint import Refused, measure, predict

BATCH = 4
TOKENS = 128
WIDTH = 32
HEADS = 4
TOLERANCE = 2e-4  # of the peak: a nested tensor describes each of its rows in 40 bytes
NO_GRADIENTS = (torch.no_grad, torch.inference_mode)


def encoder(layers: int = 2, nested: bool = True, **options):
    """A function that makes an encoder, to be evaluated."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, **options)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested).eval()

    return build


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()


def whole() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True).eval()


def rows() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def padding() -> Tensor:
    """True for the padding of rows of which none is as long as the batch."""
    lengths = torch.tensor([120, 120, 60, 2])
    return torch.arange(TOKENS) >= lengths[:, None]


def causal() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(TOKENS)


def to_itself(model: nn.Module, **options):
    x = rows()
    return model(x, x, x, **options)


def slow(model: nn.Module) -> Tensor:
    torch.backends.mha.set_fastpath_enabled(False)
    result = model(rows())
    torch.backends.mha.set_fastpath_enabled(True)
    return result


def in_half(model: nn.Module) -> Tensor:
    return model.bfloat16()(rows().bfloat16(), src_key_padding_mask=padding())


def under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows())


FAST = {
    "layers": (encoder(), lambda model: model(rows())),
    "norms first": (encoder(norm_first=True, activation="gelu"), lambda model: model(rows())),
    "padded rows": (encoder(), lambda model: model(rows(), src_key_padding_mask=padding())),
    "padded rows that stay": (
        encoder(nested=False),
        lambda model: model(rows(), src_key_padding_mask=padding()),
    ),
    "rows padded in front": (
        encoder(),
        lambda model: model(rows(), src_key_padding_mask=padding().flip(1)),
    ),
    "padded rows in bfloat16": (encoder(), in_half),
    "causal": (encoder(), lambda model: model(rows(), mask=causal(), is_causal=True)),
    "autocast": (encoder(), under_autocast),
    "switched off": (encoder(), slow),
    "attention": (attention, lambda model: to_itself(model, need_weights=False)),
    "attention with its weights": (attention, to_itself),
    "attention of each head": (
        attention,
        lambda model: to_itself(model, average_attn_weights=False),
    ),
    "attention with two masks": (
        attention,
        lambda model: to_itself(model, attn_mask=causal() < 0, key_padding_mask=padding()),
    ),
    "encoder and decoder": (whole, lambda model: model(rows(), rows(), tgt_mask=causal())),
}


@pytest.mark.parametrize("no_gradients", NO_GRADIENTS)
@pytest.mark.parametrize("name", FAST)
def test_transformers_without_gradients_take_what_the_fast_path_takes(name, no_gradients):
    build, compute = FAST[name]
    step = no_gradients()(compute)
    report = predict(build, step, "cpu")
    assert report.peak == pytest.approx(measure(build, step), rel=TOLERANCE)
    assert not report.assumed


def test_a_frozen_encoder_takes_the_fast_path_with_gradients_on():
    def build():
        return encoder()().requires_grad_(False)

    def step(model):
        return model(rows(), src_key_padding_mask=padding())

    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), rel=TOLERANCE)


def test_rows_that_are_made_before_the_prediction_take_the_fast_path():
    x, mask = rows(), padding()

    def step(model):
        with torch.no_grad():
            return model(x, src_key_padding_mask=mask)

    report = predict(encoder(), step, "cpu")
    before = x.nbytes + mask.nbytes  # which the record leaves out
    assert report.peak == pytest.approx(measure(encoder(), step) + before, rel=TOLERANCE)


def test_a_padding_mask_without_values_masks_no_token_and_the_report_says_so():
    def step(model, mask):
        with torch.no_grad():
            return model(rows(), src_key_padding_mask=mask())

    report = predict(encoder(), lambda model: step(model, lambda: torch.rand(BATCH, TOKENS) > 2))
    zeros = predict(encoder(), lambda model: step(model, lambda: torch.zeros(BATCH, TOKENS) > 2))
    (words,) = report.assumed
    assert "masks no token" in words and "test_footprint_inference.py:" in words
    assert report.peak == zeros.peak


def test_rows_without_padding_that_reach_another_operator_are_refused():
    def build():
        model = encoder()()
        model.layers[0].register_forward_hook(lambda *_: None)
        return model

    def step(model):
        with torch.no_grad():
            return model(rows(), src_key_padding_mask=padding())

    with pytest.raises(Refused, match="enable_nested_tensor=False"):
        predict(build, step)


def gpu_peak(compute, build=attention) -> int:
    return predict(build, torch.no_grad()(compute)).peak


@pytest.mark.parametrize("tokens, masked_scores", [(512, 2.25), (1280, 4.25)])
def test_on_cuda_the_fast_path_keeps_scores_only_where_it_needs_them(tokens, masked_scores):
    """Two with a mask, which is a quarter of one; of long rows two more."""
    x = torch.randn(BATCH, tokens, WIDTH)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def peak(**options) -> int:
        return gpu_peak(lambda model: model(x, x, x, **options))

    fused = peak(need_weights=False)
    weights = peak(average_attn_weights=False)
    masked = peak(need_weights=False, attn_mask=mask) - mask.nbytes
    scores = 4 * BATCH * HEADS * tokens * tokens
    held = [(found - fused) / scores for found in (weights, masked)]
    assert held == pytest.approx([1, masked_scores], abs=0.05)


def test_on_cuda_padded_rows_take_what_is_left_of_them():
    whole_rows = gpu_peak(lambda model: model(rows()), encoder())
    padded = gpu_peak(lambda model: model(rows(), src_key_padding_mask=padding()), encoder())
    assert padded < whole_rows


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 200)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        logits = F.dropout(self.head(F.layer_norm(y, (16,))), 0.1)
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(len(y) * 256, dtype=torch.long))


def recurrent() -> nn.Module:
    return nn.GRU(WIDTH, 64)


def of_products(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("bij,bkj->bik", model(rows()), rows())


def grown(model: nn.Module) -> Tensor:
    """Attention over a cache that grows, as in a loop that generates."""
    cache = torch.randn(2, 4, 1, 8)
    for _ in range(4):
        new = model(torch.randn(2, 4, 16, 8))
        cache = torch.cat([cache, new], 2)
        F.scaled_dot_product_attention(new, cache, cache, attn_mask=torch.ones(16, cache.shape[2]))
    return cache


WHOLE = {
    "norms, dropout and a loss": (Normalized, lambda model: model(torch.randn(4, 3, 16, 16))),
    "a recurrent layer": (recurrent, lambda model: model(rows())),
    "products under autocast": (lambda: nn.Linear(WIDTH, WIDTH), of_products),
    "a cache that grows": (lambda: nn.Linear(8, 8), grown),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_operators_make_inside_of_inference_mode_is_seen(name):
    build, compute = WHOLE[name]
    step = torch.inference_mode()(compute)
    assert predict(build, step, "cpu").peak == measure(build, step)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_training_and_validating_takes_the_same_in_inference_mode(target):
    def build():
        model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 500))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, count):
        tokens = torch.randint(500, (count, 64))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def peak(no_gradients) -> int:
        def step(state):
            model, optimizer = state
            loss(model, 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            with no_gradients():
                loss(model, 16).item()

        return predict(build, step, target).peak

    assert peak(torch.inference_mode) == peak(torch.no_grad) > 4 * 16 * 64 * 500 * 2


def test_tensors_of_inference_mode_stay_what_they_are():
    def step(model):
        with torch.inference_mode():
            made = model(torch.randn(4, 8))
            with torch.inference_mode(False):
                usual = torch.ones(4, 8)
        assert made.is_inference() and not usual.is_inference()
        assert not torch.is_inference_mode_enabled()
        return F.mse_loss(model(usual), made)

    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        predict(lambda: nn.Linear(8, 8), step)

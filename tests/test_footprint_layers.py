"""footprint/ on a CPU, for layers whose kernels hold memory inside, and for models whose tensors
are copies: the predicted peak against the allocator's own record.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from footprint import measure, predict
from footprint.kernels.operators import FakeTensors, corrected, is_fake
from footprint.kernels.probe import inside_bytes
from footprint.kernels.workspace import KernelWorkspaces, ProbedWorkspaces
from tests.footprint_models import trained

TOLERANCE = 12  # bytes


def trained_on(model, inputs):
    """build and step of a model of one input; both are made by functions."""
    return trained(model, lambda made: made(inputs()).square().mean())


class Recurrent(nn.Module):
    """A recurrent layer; what is trained is its results, or its last states."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, last: bool = False, **options):
        super().__init__()
        self.layer = kind(48, 64, **options)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        results, states = self.layer(x)
        if not self.last:
            return results
        return states[0] if isinstance(states, tuple) else states


class Masked(nn.Module):
    """Attention of one projection to itself, whose gradient does not lie in memory as a layer's."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 32)).transpose(1, 2)
        mask = torch.ones(64, 64, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Padded(nn.Module):
    """Copies of a layer, as PyTorch makes them, with a padding mask."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))


class Transposed(nn.Module):
    """A wide layer of rows that are not contiguous: its bias is added in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 32)
        self.outer = nn.Linear(32, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).transpose(0, 1)).mean((0, 1))


class Projected(nn.Module):
    """A projection of the rows, which the model goes on with."""

    width = 64

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(64, self.width)


class Nearest(Projected):
    """Vectors of a codebook that are nearest, found by one product."""

    width = 40

    def __init__(self):
        super().__init__()
        self.codebook = nn.Embedding(300, 40)

    def forward(self, x: Tensor) -> Tensor:
        z = self.projection(x).flatten(0, 1)
        return z - self.codebook(torch.cdist(z, self.codebook.weight).argmin(-1))


class Standardized(Projected):
    """A variance and a mean by one operator, whose gradients its backward adds; and a pool of
    images whose gradient is not dense.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        variance, mean = torch.var_mean(y.flatten(), 0)
        pooled = F.avg_pool2d(y.unflatten(1, (8, 8)), 2).permute(0, 2, 3, 1)
        return pooled.sin().sum(-1) * variance + mean


class WithImages(Projected):
    """Embeddings of words, some of which are those of an image."""

    width = 512

    def forward(self, x: Tensor) -> Tensor:
        is_image = (torch.arange(64) < 16)[:, None].expand(4, 64, 512)
        words = torch.zeros(4, 64, 512, requires_grad=True)
        return words.masked_scatter(is_image, self.projection(x[:, :16]))


class Sampled(Projected):
    """Distributions that check what they were given: the policy and the normal one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x)
        policy = torch.distributions.Categorical(logits=y)
        normal = torch.distributions.MultivariateNormal(y, torch.eye(64))
        return policy.log_prob(policy.sample()) + normal.log_prob(normal.rsample())


class Audible(Projected):
    """A spectrum as a signal, by an operator that looks whether its windows cover everything."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.polar(x[:, :33].exp(), self.projection(x)[:, :33])
        return torch.istft(spectrum, 64, window=torch.hann_window(64))


class Focal(Projected):
    """A loss of each of many classes, weighted by how wrong it is; of half of them with weights."""

    width = 512

    def forward(self, x: Tensor) -> Tensor:
        logits, others = self.projection(x).chunk(2, dim=-1)
        loss = F.binary_cross_entropy_with_logits
        focal = loss(logits, torch.ones_like(logits), reduction="none")
        weighted = loss(others, torch.zeros_like(others), pos_weight=torch.full((256,), 3.0))
        return focal * (1 - (-focal).exp()) ** 2 + weighted


class Pooled(Projected):
    """The largest and the mean of those rows that belong together."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x).flatten(0, 1)
        groups = (torch.arange(256) // 2)[:, None].expand_as(y)
        kinds = ("amax", "mean")
        pooled = [torch.zeros(128, 64).scatter_reduce(0, groups, y, kind) for kind in kinds]
        return torch.cat(pooled)


class TwoDtypes(Projected):
    """A loss of predictions in bfloat16 with targets in fp32."""

    width = 512

    def __init__(self):
        super().__init__()
        self.projection.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x.bfloat16())
        return F.mse_loss(y, torch.ones(y.shape))


class Patched(Projected):
    """Images made of patches that overlap."""

    width = 256

    def forward(self, x: Tensor) -> Tensor:
        patches = self.projection(x).transpose(1, 2)
        given = patches, patches.exp(), patches.cos()
        return torch.cat([F.fold(value, 18, 4, stride=2).sin() for value in given])


class Normalized(Projected):
    """Channels that are turned for a batch norm, and back."""

    width = 128

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(128)
        self.outer = nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.projection(x).transpose(1, 2)).transpose(1, 2)
        return self.outer(y.relu())


def rows() -> Tensor:
    return torch.randn(4, 64, 64)


def indices() -> Tensor:
    return torch.randint(500, (64, 16))


def steps() -> Tensor:
    return torch.randn(20, 8, 48)


class Ties(nn.Module):
    """Gradients that mask what they have made, among others that mask what they were given."""

    def __init__(self, larger):
        super().__init__()
        self.linear = nn.Linear(48, 300)
        self.other = nn.Linear(48, 300)
        self.larger = larger

    def forward(self, x: Tensor) -> Tensor:
        larger = self.larger(self.linear(x), self.other(x))
        chosen = torch.where(larger > 0, larger, larger * 2)
        return chosen.masked_fill(chosen > 1, 0.0)


class GroupsOfSums(nn.Module):
    """The gradient of a group norm that is the same number for all."""

    def __init__(self, layout):
        super().__init__()
        self.project = nn.Conv2d(3, 16, 1)
        self.norm = nn.GroupNorm(4, 16)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.project(x).contiguous(memory_format=self.layout)
        return self.norm(pixels).sum() / 1000


def images() -> Tensor:
    return torch.randn(4, 3, 24, 24)


CASES = {
    "attention with a mask of booleans": (Masked, rows),
    "copied layers with a padding mask": (Padded, rows),
    "a wide layer of transposed rows": (Transposed, rows),
    "the nearest of many vectors": (Nearest, rows),
    "statistics and pools": (Standardized, rows),
    "images among words": (WithImages, rows),
    "a focal loss": (Focal, rows),
    "a spectrum as a signal": (Audible, rows),
    "distributions with their checks": (Sampled, rows),
    "rows that are pooled by groups": (Pooled, rows),
    "channels that are turned": (Normalized, rows),
    "attention in fp64": (lambda: Masked().double(), lambda: rows().double()),
    "the larger of two": (lambda: Ties(torch.maximum), steps),
    "the smaller of two, numbers first": (lambda: Ties(torch.fmin), steps),
    "at least as large as others": (lambda: Ties(lambda x, y: torch.clamp(x, min=y)), steps),
    "groups of which a sum is taken": (lambda: GroupsOfSums(torch.contiguous_format), images),
    "the same, channels last": (lambda: GroupsOfSums(torch.channels_last), images),
    "a loss of two dtypes": (TwoDtypes, rows),
    "patches that overlap": (Patched, rows),
    "EmbeddingBag, sums": (lambda: nn.EmbeddingBag(500, 32, mode="sum"), indices),
    "EmbeddingBag, means": (lambda: nn.EmbeddingBag(500, 32), indices),
}


BOTH_WAYS = dict(num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
RECURRENT = {
    "LSTM": {},
    "LSTM of two layers, both ways": BOTH_WAYS,
    "LSTM without biases": dict(bias=False),
    "LSTM, its last states": dict(last=True),
    "LSTM, projected": dict(proj_size=32),
    "GRU of two layers, both ways": dict(kind=nn.GRU) | BOTH_WAYS,
    "RNN without biases": dict(kind=nn.RNN, bias=False),
}
CASES |= {
    name: (functools.partial(Recurrent, **options), steps) for name, options in RECURRENT.items()
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_what_the_allocator_records(name):
    build, step = trained_on(*CASES[name])
    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), abs=TOLERANCE)


def constant(*shape: int) -> Tensor:
    """As the gradient of a sum is."""
    return torch.ones(()).expand(shape)


class LinearByName(nn.Module):
    """A product whose input is given by its name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(input=x, weight=self.layer.weight, bias=self.layer.bias)


def test_a_product_may_name_its_input():
    functions = trained_on(LinearByName, lambda: torch.randn(4, 48))
    assert predict(*functions, "cpu").peak == pytest.approx(measure(*functions), abs=TOLERANCE)


def words() -> Tensor:
    """Their features first, as convolutions have them, in the memory of a linear layer."""
    return torch.randn(2, 6, 8).transpose(1, 2)


def channels_last(channels: int) -> Tensor:
    return torch.randn(2, 5, 5, channels).permute(0, 3, 1, 2)


def some_channels() -> Tensor:
    return torch.randn(2, 16, 8, 8)[:, :8]


aten = torch.ops.aten
NO_STATISTICS = (None, None, None, None, True, 0.1, 1e-5)
distances = aten._euclidean_dist.default
turned = torch.randn(70, 80).t()
classes = torch.zeros(80, dtype=torch.int64)
smooth, of_smooth = aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default
halves, wholes = torch.randn(50, 60, dtype=torch.bfloat16), torch.randn(50, 60)
moments = torch.randn(50, 6)
INSIDE = {
    "distances of many": (distances, torch.randn(1024, 512), torch.randn(64, 512)),
    "distances to many": (distances, torch.randn(64, 512), torch.randn(1024, 512)),
    "distances of wide ones": (distances, torch.randn(30, 700), torch.randn(31, 700)),
    "a sum of exponentials": (aten.logsumexp.default, torch.randn(60, 70), [-1]),
    "a roll of three axes": (aten.roll.default, torch.randn(10, 20, 30), (1, 2, 3), (0, 1, 2)),
    "a batch of products": (aten.bmm.default, constant(10, 50, 60), torch.randn(10, 60, 40)),
    "a norm of transposed rows": (aten.native_layer_norm.default, turned, [70], None, None, 1e-5),
    "a loss of transposed rows": (aten.nll_loss_forward.default, turned, classes, None, 1, -100),
    "a loss of two dtypes": (smooth, halves, wholes, 0, 1.0),
    "the gradient of one": (of_smooth, wholes, halves, wholes, 0, 1.0),
    "the gradient of groups": (
        aten.native_group_norm_backward.default,
        *(wholes, wholes, moments, moments, torch.ones(60)),
        *(50, 60, 1, 6, [True, True, True]),
    ),
    "the gradient of bags next to others": (
        aten._embedding_bag_backward.default,
        *(torch.randn(50, 60)[:, :30], *(torch.arange(50),) * 3, *(torch.ones(50).long(),) * 2),
        *(50, False, 0, False, None),
    ),
    "means of rows in half precision": (aten.mean.dim, halves, [-1]),
    "a copy of a turned matrix": (aten.copy_.default, torch.randn(90, 70), torch.randn(70, 90).t()),
    "patches of images": (
        aten.im2col.default,
        torch.randn(2, 4, 20, 20),
        *([n, n] for n in (3, 1, 0, 1)),
    ),
    "shuffled pixels of some channels": (aten.pixel_shuffle.default, some_channels(), 2),
    "pixels shuffled back": (aten.pixel_unshuffle.default, some_channels(), 2),
    "shuffled channels": (aten.channel_shuffle.default, some_channels(), 2),
    "means of pixels": (aten.avg_pool2d.default, some_channels(), [2, 2]),
    "means of voxels": (aten.avg_pool3d.default, some_channels()[None], [2, 2, 2]),
    "means of a given number": (aten._adaptive_avg_pool2d.default, some_channels(), [2, 3]),
    "a given number of largest": (aten.adaptive_max_pool2d.default, some_channels(), [2, 3]),
    "largest pixels": (aten.max_pool2d_with_indices.default, some_channels(), [2, 2]),
    "largest voxels": (aten.max_pool3d_with_indices.default, some_channels()[None], [2, 2, 2]),
    "a sum around channels": (aten.sum.dim_IntList, some_channels().bfloat16(), [0, 2, 3]),
    "a sum of some channels": (aten.sum.default, torch.randn(2, 8, 8).bfloat16()[:, :4]),
    "a grid of pixels": (
        aten.affine_grid_generator.default,
        torch.randn(2, 2, 3),
        [2, 3, 8, 9],
        True,
    ),
    "a grid of voxels": (
        *(aten.affine_grid_generator.default, torch.randn(2, 3, 4), [2, 3, 4, 5, 6], False),
    ),
    "distances by another norm": (aten._cdist_forward.default, words(), words(), 1.0, None),
    "a product with a vector": (aten.mv.default, constant(50, 60), torch.randn(60)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_operator_holds_inside_what_the_allocator_records(name):
    func, *args = INSIDE[name]
    declared = KernelWorkspaces("cpu")(func, args, func(*args))
    assert declared == inside_bytes(func, args)
    assert declared > 0


TURNED = torch.randn(8, 16, 12).transpose(1, 2)
DENSE = torch.randn(8, 12, 16)
LAID = {
    "a group norm's gradients of bf16": (
        aten.native_group_norm_backward.default,
        torch.randn(2, 8, 4, 4).bfloat16(),
        torch.randn(2, 8, 4, 4).bfloat16(),
        *torch.randn(2, 2, 2),
        torch.randn(8),
        *(2, 8, 16, 2, [True, True, False]),
    ),
    "a layer norm of bf16 with weights in fp32": (
        *(aten.native_layer_norm.default, halves, [60], torch.ones(60), torch.ones(60), 1e-5),
    ),
    "a batch norm of words": (aten.native_batch_norm.default, words(), *NO_STATISTICS),
    "a batch norm with channels last": (
        *(aten.native_batch_norm.default, channels_last(8), *NO_STATISTICS),
    ),
    "a batch norm's gradient": (
        aten.native_batch_norm_backward.default,
        words(),
        torch.randn(2, 8, 6),
        *(None, None, None),
        *torch.randn(2, 8),
        *(True, 1e-5, [True, False, False]),
    ),
    "a loss of two dtypes": (aten.mse_loss_backward.default, DENSE, TURNED.bfloat16(), DENSE, 0),
    "a smooth loss": (aten.smooth_l1_loss_backward.default, DENSE, TURNED, TURNED, 0, 1.0),
    "a huber loss": (aten.huber_loss_backward.default, DENSE, TURNED, DENSE, 0, 1.0),
    "log_softmax": (aten._log_softmax_backward_data.default, TURNED, DENSE, -1, torch.float32),
    "elu": (aten.elu_backward.default, DENSE, 1.0, 1.0, 1.0, False, TURNED),
    "hardsigmoid": (aten.hardsigmoid_backward.default, DENSE, TURNED),
    "hardswish": (aten.hardswish_backward.default, DENSE, TURNED),
    "relu6": (aten.hardtanh_backward.default, DENSE, TURNED, 0.0, 6.0),
    "softplus": (aten.softplus_backward.default, DENSE, TURNED, 1.0, 20.0),
    "logit": (aten.logit_backward.default, DENSE, TURNED),
    "a gate's gradient": (aten.glu_backward.default, channels_last(4), channels_last(8), 1),
}


@pytest.mark.parametrize("name", LAID)
def test_an_operator_returns_fake_tensors_that_lie_as_real_ones(name):
    func, *args = LAID[name]
    real = func(*args)
    mode = FakeTensors()
    fakes = tree_map_only(Tensor, mode.from_tensor, args)
    with mode:
        fake = corrected(func, "cpu")(*fakes)
    assert tree_map_only(Tensor, lies, fake) == tree_map_only(Tensor, lies, real)


@pytest.mark.parametrize("target, rows_are_kept", [("cpu", False), ("cuda", True)])
def test_the_first_right_vectors_keep_all_of_them_on_cuda_alone(target, rows_are_kept):
    """peft's PSOFT keeps such a slice in each layer."""
    svd = aten._linalg_svd.default
    with FakeTensors():
        fake = corrected(svd, target)(torch.empty(8, 32))[2]
    assert fake[:2].is_contiguous() == rows_are_kept
    if target == "cpu":
        assert lies(fake) == lies(svd(torch.randn(8, 32))[2])


zeros = torch.zeros(64, 8, dtype=torch.int64)
PROBED = {
    "means of a group": (
        *(aten.scatter_reduce.two, torch.ones(4, 8), 0, zeros, torch.ones(64, 8), "mean"),
    ),
    "values of experts in bf16": (
        *(aten.scatter_.value, torch.zeros(64, 8).bfloat16(), 1, zeros[:, :2], 1.0),
    ),
    "medians of columns": (aten.median.dim, torch.randn(9, 8), 0),
    "angles of complex numbers": (aten.angle.default, torch.randn(9, 9, dtype=torch.complex64)),
    "a transform of columns": (aten._fft_r2c.default, torch.randn(2, 8, 8), [1], 0, True),
    "planes as they were": (
        *(aten._fft_c2r.default, torch.randn(2, 8, 5, dtype=torch.complex64), [1, 2], 2, 8),
    ),
}


@pytest.mark.parametrize("name", PROBED)
def test_what_an_operator_holds_inside_is_measured(name):
    func, *args = PROBED[name]
    measured = ProbedWorkspaces("cpu")(func, args, func(*args))
    assert measured == inside_bytes(func, args)
    assert measured > 0


def test_a_transform_on_a_gpu_is_named():
    def step(x: Tensor) -> None:
        torch.fft.rfft(x)

    (words,) = predict(rows, step, "cuda").not_modelled
    assert "cuFFT" in words


def lies(value: Tensor) -> tuple:
    return value.shape, value.stride(), value.dtype


def test_what_is_loaded_inside_build_ends_with_it(tmp_path):
    torch.save(Masked().state_dict(), tmp_path / "weights.pt")
    new, step = trained_on(Masked, rows)

    def build():
        state = new()
        state[0].load_state_dict(torch.load(tmp_path / "weights.pt"))
        return state

    assert predict(build, step, "cpu").peak == predict(new, step, "cpu").peak


def test_fake_tensors_are_what_pytorch_takes_for_them(monkeypatch):
    made = object()  # as if in C++, which is no FakeTensor
    name = "torch._subclasses.fake_tensor.is_fake_tensor"
    monkeypatch.setattr(name, lambda value: value is made, raising=False)
    assert is_fake(made)
    monkeypatch.undo()
    assert not is_fake(torch.ones(2))
    with FakeTensors():
        assert is_fake(torch.ones(2))


def test_long_rows_of_an_lstm_are_extended_from_shorter_ones(monkeypatch):
    def rows() -> Tensor:
        return torch.randn(203, 8, 48)

    build, step = trained_on(functools.partial(Recurrent, bidirectional=True), rows)
    monkeypatch.setattr("footprint.kernels.recurrent.MOST_PRODUCTS", 0)
    assert predict(build, step, "cpu").peak == pytest.approx(measure(build, step), abs=TOLERANCE)


def test_recurrent_layers_on_a_gpu_are_named_in_the_first_line():
    report = predict(*trained_on(Recurrent, steps), "cuda")
    (words,) = report.not_modelled
    assert "cuDNN" in words
    first = str(report).partition("\n")[0]
    assert "cuDNN" in first

    others = predict(*trained_on(Masked, rows), "cuda")
    assert "cuDNN" not in str(others).partition("\n")[0]

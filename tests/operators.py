"""A table of 435 operators of PyTorch, generated from lists of names: each takes a matrix of N x N.
Operators of two matrices also have rows with a second one of another dtype.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

N = 512
Operator = Callable[[Tensor], object]


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    abs acos acosh angle asin asinh atan atanh ceil clone cos cosh deg2rad digamma erf erfc erfinv
    exp exp2 expm1 floor frac i0 isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit
    nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt
    square tan tanh trunc bernoulli flatten ravel t detach fliplr flipud rot90 tril triu diag
    diagonal corrcoef cov std var mean sum prod amax amin aminmax argmax argmin all any
    count_nonzero logcumsumexp_0 median nanmedian nansum nanmean max min norm numel std_mean
    var_mean logsumexp_0 trace
    """
)
ACTIVATIONS = words(
    """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 rrelu
    selu silu softplus softshrink softsign tanhshrink threshold_0 glu
    """
)
BINARY = words(
    """
    add sub mul div true_divide floor_divide fmod remainder atan2 pow maximum minimum fmax fmin
    hypot logaddexp logaddexp2 xlogy copysign eq ne lt le gt ge logical_and logical_or logical_xor
    isclose dist lerp_half where_positive ldexp nextafter heaviside
    """
)
PRODUCTS = words("mm matmul addmm baddbmm bmm mv dot outer kron inner vdot einsum tensordot")
BY_ROW = words(
    """
    sum mean prod amax amin argmax argmin max min median mode cumsum cumprod cummax cummin
    logcumsumexp logsumexp std var std_mean var_mean softmax log_softmax sort argsort topk kthvalue
    nansum nanmedian all any count_nonzero norm unbind chunk split tensor_split aminmax diff softmin
    normalize nanmean quantile
    """
)
LOSSES = words(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div poisson_nll_loss hinge_embedding_loss cross_entropy
    nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    cosine_embedding_loss margin_ranking_loss triplet_margin_loss gaussian_nll_loss
    """
)
LINEAR_ALGEBRA = words(
    """
    cholesky eigh eigvalsh svd svdvals qr inv det slogdet solve lstsq pinv lu_factor matrix_exp
    matrix_norm matrix_power cond householder_product solve_triangular
    """
)


def positive(x: Tensor) -> Tensor:
    """A symmetric matrix of positive eigenvalues."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    return x @ x.t() + x.shape[-1] * eye


def numbers(*shape: int) -> Tensor:
    """Indices that are in bounds, and known to be zero."""
    return torch.zeros(*shape, dtype=torch.int64)


def images(x: Tensor) -> Tensor:
    """A batch of 4 with 16 channels."""
    return x.reshape(4, 16, 64, 64)


# operators whose arguments no list can say
OTHERS: dict[str, Operator] = {
    "gather": lambda x: x.gather(1, numbers(N, N)),
    "index": lambda x: x[numbers(N)],
    "index of columns": lambda x: x[:, numbers(N)],
    "index_select": lambda x: x.index_select(0, numbers(N)),
    "index_add": lambda x: x.index_add(0, numbers(N), x),
    "index_copy": lambda x: x.index_copy(0, torch.arange(N), x),
    "index_fill": lambda x: x.index_fill(0, numbers(N), 1.0),
    "index_put": lambda x: x.index_put((numbers(N),), x),
    "index_reduce of the mean": lambda x: x.index_reduce(0, numbers(N), x, "mean"),
    "put": lambda x: x.put(numbers(N), x[0]),
    "put that adds": lambda x: x.put(numbers(N), x[0], accumulate=True),
    "scatter": lambda x: x.scatter(1, numbers(N, N), x),
    "scatter_add": lambda x: x.scatter_add(1, numbers(N, N), x),
    "scatter_reduce": lambda x: x.scatter_reduce(1, numbers(N, N), x, "sum"),
    "scatter_reduce of the largest": lambda x: x.scatter_reduce(1, numbers(N, N), x, "amax"),
    "index_reduce of the largest": lambda x: x.index_reduce(0, numbers(N), x, "amax"),
    "take": lambda x: x.take(numbers(N, N)),
    "take_along_dim": lambda x: x.take_along_dim(numbers(N, N), 1),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "clamp": lambda x: x.clamp(0.2, 0.8),
    "clamp by tensors": lambda x: torch.clamp(x, x * 0.1, x * 2),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "addcdiv": lambda x: torch.addcdiv(x, x, x),
    "lerp by a tensor": lambda x: torch.lerp(x, x * 2, x),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "expand": lambda x: x.unsqueeze(0).expand(2, N, N) * 1.0,
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad by reflection": lambda x: F.pad(images(x), (1, 1, 1, 1), mode="reflect"),
    "pad by replication": lambda x: F.pad(images(x), (1, 1, 1, 1), mode="replicate"),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "im2col": lambda x: F.unfold(images(x), 3),
    "permute": lambda x: images(x).permute(0, 2, 3, 1).contiguous(),
    "to float64": lambda x: x.double(),
    "to bfloat16 and back": lambda x: x.bfloat16().float(),
    "view as complex": lambda x: torch.view_as_complex(x.reshape(N, N // 2, 2)).abs(),
    "complex product": lambda x: (torch.complex(x, x) @ torch.complex(x, x)).real,
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "embedding": lambda x: F.embedding(numbers(N), x),
    "embedding_bag of sums": lambda x: F.embedding_bag(numbers(N, 4), x, mode="sum"),
    "embedding_bag of largest": lambda x: F.embedding_bag(numbers(N, 4), x, mode="max"),
    "one_hot": lambda x: F.one_hot(numbers(N), N) * x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "bilinear": lambda x: F.bilinear(x[:, :64], x[:, :64], x[None, :64, :64]),
    "layer_norm": lambda x: F.layer_norm(x, (N,)),
    "layer_norm with weights": lambda x: F.layer_norm(x, (N,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (N,), x[0]),
    "group_norm": lambda x: F.group_norm(images(x), 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(N), torch.ones(N)),
    "instance_norm": lambda x: F.instance_norm(images(x)),
    "local_response_norm": lambda x: F.local_response_norm(images(x), 3),
    "conv1d": lambda x: F.conv1d(x.reshape(4, 16, -1), torch.ones(16, 16, 3)),
    "conv2d": lambda x: F.conv2d(images(x), torch.ones(16, 16, 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(images(x), torch.ones(16, 16, 3, 3)),
    "max_pool2d": lambda x: F.max_pool2d(images(x), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(images(x), 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(images(x), 7),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(images(x), 7),
    "interpolate": lambda x: F.interpolate(images(x), scale_factor=2.0),
    "interpolate, bilinear": lambda x: F.interpolate(images(x), scale_factor=2.0, mode="bilinear"),
    "interpolate, bicubic": lambda x: F.interpolate(images(x), scale_factor=2.0, mode="bicubic"),
    "grid_sample": lambda x: F.grid_sample(images(x), torch.zeros(4, 32, 32, 2)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(images(x), 2),
    "attention": lambda x: heads_attend(x),
    "attention, causal": lambda x: heads_attend(x, is_causal=True),
    "attention with a learned mask": lambda x: heads_attend(x, attn_mask=x[:, :N]),
    "attention in float64": lambda x: heads_attend(x.double()),
    "cdist": lambda x: torch.cdist(x, x),
    "pdist": lambda x: F.pdist(x[:64]),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x * 2),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x * 2),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0] * 1.0,
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
    "bucketize": lambda x: x * torch.bucketize(x, torch.arange(4.0)),
    "searchsorted": lambda x: x * torch.searchsorted(x.sort(dim=-1)[0].detach(), x.detach()),
    "polygamma": lambda x: torch.polygamma(1, x),
    "unique of labels": lambda x: x * torch.bincount(numbers(N), minlength=N),
    "histc": lambda x: x * torch.histc(x.detach(), bins=N),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "cartesian": lambda x: torch.cartesian_prod(x[0], x[1]),
    "tensor in place": lambda x: (x * 1.0).add_(1.0).mul_(2.0),
}


def heads_attend(x: Tensor, **how: object) -> Tensor:
    q_BHTK = x.reshape(1, 8, -1, 64)
    return F.scaled_dot_product_attention(q_BHTK, q_BHTK, q_BHTK, **how)


def loss(name: str) -> Operator:
    """A loss of the rows, with targets of its kind."""
    classes = {"cross_entropy", "nll_loss", "multi_margin_loss"}
    function = getattr(F, name)
    if name in classes:
        return lambda x: function(x, numbers(N))
    if name == "multilabel_margin_loss":
        return lambda x: function(x, numbers(N, N))
    if name in ("cosine_embedding_loss", "margin_ranking_loss"):
        many = N if name == "cosine_embedding_loss" else (N, N)
        return lambda x: function(x, x * 2, torch.ones(many))
    if name == "binary_cross_entropy":
        return lambda x: function(x.sigmoid(), torch.full_like(x, 0.5))
    if name in ("triplet_margin_loss", "gaussian_nll_loss"):
        return lambda x: function(x, x * 2, x * 3)
    return lambda x: function(x, torch.full_like(x, 0.5))


def product(name: str) -> Operator:
    found: dict[str, Operator] = {
        "addmm": lambda x: torch.addmm(x, x, x),
        "bmm": lambda x: torch.bmm(x.reshape(8, 64, N), x.reshape(8, 64, N).transpose(1, 2)),
        "mv": lambda x: torch.mv(x, x[0]),
        "dot": lambda x: torch.dot(x[0], x[1]),
        "vdot": lambda x: torch.vdot(x[0], x[1]),
        "outer": lambda x: torch.outer(x[0], x[1]),
        "kron": lambda x: torch.kron(x[:16, :16], x[:16, :16]),
        "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
        "tensordot": lambda x: torch.tensordot(x, x, 1),
        "baddbmm": lambda x: torch.baddbmm(x.reshape(1, N, N), x[None], x[None]),
    }
    return found.get(name, lambda x: getattr(torch, name)(x, x))


def by_row(name: str) -> Operator:
    where = F if name in ("softmin", "normalize") else torch
    function = getattr(where, name)
    if name in ("topk", "kthvalue", "chunk", "split", "tensor_split"):
        return lambda x: function(x, 4, dim=-1)
    if name == "quantile":
        return lambda x: function(x, 0.5, dim=-1)
    return lambda x: function(x, dim=-1)


def linear_algebra(name: str) -> Operator:
    """Of a quarter of the matrix, as the time of most grows with the cube of its rows."""
    found = linear_algebra_of_all(name)
    half = N // 2
    return lambda x: found(x[:half, :half])


def linear_algebra_of_all(name: str) -> Operator:
    function = getattr(torch.linalg, name)
    if name in ("solve", "lstsq"):
        return lambda x: function(positive(x), x)
    if name == "solve_triangular":
        return lambda x: function(positive(x), x, upper=True)
    if name == "matrix_exp":
        return torch.matrix_exp
    if name == "matrix_power":
        return lambda x: function(x, 3)
    if name == "householder_product":
        few = 16  # its backward takes one reflection after another
        return lambda x: function(x[:, :few], x[0, :few])
    return lambda x: function(positive(x))


def two_matrices(name: str) -> Callable[[Tensor, Tensor], object]:
    found: dict[str, Callable[[Tensor, Tensor], object]] = {
        "lerp_half": lambda x, y: torch.lerp(x, y, 0.5),
        "where_positive": lambda x, y: torch.where(x > 0.5, x, y),
    }
    return found.get(name) or getattr(torch, name)


def unary(name: str) -> Operator:
    if name.endswith("_0"):
        function = getattr(torch, name[:-2])
        return lambda x: function(x, 0)
    return getattr(torch, name)


def activation(name: str) -> Operator:
    if name == "threshold_0":
        return lambda x: F.threshold(x, 0.5, 0.0)
    return getattr(F, name)


@functools.cache
def operators() -> dict[str, Operator]:
    """Name -> the operator on one matrix."""
    found = {name: unary(name) for name in UNARY}
    found |= {name: activation(name) for name in ACTIVATIONS}
    found |= {f"{name} by row": by_row(name) for name in BY_ROW}
    found |= {name: product(name) for name in PRODUCTS}
    found |= {name: loss(name) for name in LOSSES}
    found |= {f"linalg {name}": linear_algebra(name) for name in LINEAR_ALGEBRA}
    for name in BINARY:
        found[name] = functools.partial(_with_itself, two_matrices(name))
        for dtype in (torch.bfloat16, torch.float64, torch.int32):
            mixed = functools.partial(_with_another, two_matrices(name), dtype)
            found[f"{name} and {dtype}"] = mixed
    return found | OTHERS


def _with_itself(function: Callable[[Tensor, Tensor], object], x: Tensor) -> object:
    return function(x, x * 2)


def _with_another(function, dtype: torch.dtype, x: Tensor) -> object:
    return function(x, torch.ones(N, N, dtype=dtype))


SUMMED = "of which a sum is taken"  # whose gradient has one element in memory
FORMS: dict[str, Operator] = {
    "": lambda x: x * 0.9,
    "turned": lambda x: (x * 0.9).t(),
    "bf16": lambda x: x.bfloat16(),
    "without gradients": lambda x: x.detach() * 0.9,
    SUMMED: lambda x: x * 0.9,
}

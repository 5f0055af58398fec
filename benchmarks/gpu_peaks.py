"""Predicted peaks of steps against peaks that other people measured on their GPUs.

    python -m benchmarks.gpu_peaks [--only STEP ...] [--json FILE] [--svg FILE]

benchmarks/gpu_peaks.json has the measured peaks, their cards and sources. Each step is written
here from the description of what was alive, and predicted for the card on fake tensors: nothing is
run. A step runs in the mode "forward", "backward" (its graph is there) or "full"; gradients of
the step before are alive, and earlier steps of the process have left cuBLAS its workspaces. Prints
predicted and published MiB, the difference, and the known cause of what is more than 0.1%.

B rows of T tokens, N = B * T, D width, F inner width, H heads, K width of a head, V vocabulary,
E experts.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from base.flags import Parser
from footprint import predict
from footprint.html import PALETTE, element, title
from footprint.picture import COLOURS, WORDS

MEASURED = Path(__file__).with_suffix(".json")
MIB = 2**20
EXACT, CLOSE = 1e-3, 1e-2  # differences that need no cause, and that count as predicted
CUDA = "cuda"


class Step:
    """A forward, what its result's gradient is, and what else is alive."""

    def __init__(self, forward: Callable[[], Tensor], gradient: object = None, *alive: object):
        self.forward = forward
        # "drawn" in each step, a tensor that is there, or None for a scalar
        self.gradient = gradient
        self.alive = alive
        self.graph: Tensor | None = None

    def drawn(self, result: Tensor) -> Tensor | None:
        if self.gradient == "drawn":
            return torch.randn_like(result)
        return torch.ones_like(result) if self.gradient == "ones" else self.gradient

    def full(self) -> None:
        result = self.forward()
        result.backward(self.drawn(result), retain_graph=True)

    def prepare_backward(self) -> None:
        self.graph = self.forward()
        self.gradient = torch.randn_like(self.graph)

    def backward(self) -> None:
        self.graph.backward(self.gradient, retain_graph=True)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=CUDA, requires_grad=True)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=CUDA)


def labels(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary, shape, device=CUDA)


# ---- norms


def norm_step(norm: Callable[[], nn.Module], rows: int, width: int, dtype: torch.dtype) -> Step:
    """A norm and a second one for comparison, which only holds its weights."""
    module, other = norm().to(CUDA), norm().to(CUDA)
    x_ND = leaf(rows, width, dtype=dtype)
    return Step(lambda: module(x_ND), torch.randn_like(x_ND), other)


def layer_norm(rows: int, width: int, dtype: torch.dtype) -> Step:
    return norm_step(lambda: nn.LayerNorm(width), rows, width, dtype)


class NormInFloat(nn.Module):
    """RMSNorm as models without a kernel for it compute: in fp32, and then back."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + 1e-6)
        return self.weight * x.to(dtype)


def rms_norm(rows: int, width: int, dtype: torch.dtype) -> Step:
    return norm_step(lambda: NormInFloat(width), rows, width, dtype)


def add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> Step:
    """A residual is added first, and the sum is a result, too."""
    norms = [NormInFloat(width).to(CUDA) for _ in range(4)]
    x_ND, residual_ND = leaf(rows, width, dtype=dtype), leaf(rows, width, dtype=dtype)
    gradients = torch.randn_like(x_ND), torch.randn_like(x_ND)

    class Both(Step):
        def full(self) -> None:
            total_ND = x_ND.to(torch.float32) + residual_ND.to(torch.float32)
            torch.autograd.backward((norms[0](total_ND), total_ND.to(dtype)), gradients)

    return Both(norms[0].forward, None, norms)


def fused_rms_norm(tokens: int, batch: int, width: int) -> Step:
    norm = nn.RMSNorm(width, eps=1e-6).to(CUDA).to(torch.bfloat16)
    x_TBD = leaf(tokens, batch, width, dtype=torch.bfloat16)

    class Summed(Step):
        def full(self) -> None:
            result = self.forward()
            result.sum().backward()

    return Summed(lambda: norm(x_TBD))


def group_norm(
    batch: int, width: int, channels: int, channels_per_group: int, dtype: torch.dtype
) -> Step:
    """Of a batch with B * C * D elements."""
    groups = channels // channels_per_group
    norms = [nn.GroupNorm(groups, channels).to(CUDA) for _ in range(2)]
    x_BCD = leaf(batch, channels, width, dtype=dtype)
    return Step(lambda: norms[0](x_BCD), torch.randn_like(x_BCD), norms)


# ---- losses


def cross_entropy(batch: int, tokens: int, vocabulary: int) -> Step:
    logits_NV = leaf(batch * tokens, vocabulary)
    labels_N = labels(vocabulary, batch * tokens)
    return Step(lambda: F.cross_entropy(logits_NV, labels_N))


def linear_cross_entropy(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Step:
    heads = [nn.Linear(width, vocabulary, bias=False, dtype=dtype, device=CUDA) for _ in range(2)]
    hidden_ND = leaf(tokens, width, dtype=dtype)
    labels_N = labels(vocabulary, tokens)
    return Step(lambda: F.cross_entropy(heads[0](hidden_ND), labels_N), None, heads)


class ShardedCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary that ranks share, of which this is the only one: fp32 logits
    become the probabilities in place, and these the gradient.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits.float()
        largest = torch.max(logits, dim=-1)[0]
        logits -= largest.unsqueeze(-1)
        is_other = (labels < 0) | (labels >= logits.shape[-1])
        mine = labels.clone()
        mine[is_other] = 0
        rows = torch.arange(mine.numel(), device=logits.device)
        predicted = logits.view(-1, logits.shape[-1])[rows, mine.view(-1)]
        predicted = predicted.clone().contiguous().view_as(labels)
        predicted[is_other] = 0.0
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        loss = torch.log(total) - predicted
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, is_other, mine.view(-1))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        probabilities, is_other, mine = ctx.saved_tensors
        rows = torch.arange(mine.numel(), device=grad.device)
        probabilities.view(-1, probabilities.shape[-1])[rows, mine] -= (
            1.0 - is_other.view(-1).float()
        )
        return probabilities.mul_(grad.unsqueeze(-1)), None


def vocabulary_parallel_cross_entropy(tokens: int, batch: int, vocabulary: int) -> Step:
    logits_TBV = leaf(tokens, batch, vocabulary, dtype=torch.bfloat16)
    labels_TB = labels(vocabulary, tokens, batch)

    class Cleared(Step):
        def full(self) -> None:
            logits_TBV.grad = None
            super().full()

    return Cleared(lambda: ShardedCrossEntropy.apply(logits_TBV, labels_TB).sum())


def kl_div(batch: int, tokens: int, vocabulary: int) -> Step:
    input_NV = leaf(batch * tokens, vocabulary).log_softmax(dim=-1)
    target_NV = given(batch * tokens, vocabulary).softmax(dim=-1)
    return Step(lambda: F.kl_div(input_NV, target_NV, reduction="batchmean"))


def jensen_shannon(log_q: Tensor, log_p: Tensor, reduction: str, weight: float = 0.5) -> Tensor:
    """The divergence of two distributions over the vocabulary from their mean."""

    def divergence(target: Tensor) -> Tensor:
        found = F.kl_div(torch.log(mean), target, reduction=reduction, log_target=True)
        return found.sum(dim=-1) if reduction == "none" else found

    log_p, log_q = log_p.float(), log_q.float()
    ends = (log_q, log_p) if reduction == "none" else (log_p, log_q)
    mean = torch.lerp(torch.exp(ends[0]), torch.exp(ends[1]), weight)
    loss = weight * divergence(log_p) + (1 - weight) * divergence(log_q)
    return (loss / log_q.shape[0]).sum() if reduction == "none" else loss


def jsd(batch: int, tokens: int, vocabulary: int) -> Step:
    log_q_NV = leaf(batch * tokens, vocabulary).log_softmax(dim=-1)
    log_p_NV = given(batch * tokens, vocabulary).log_softmax(dim=-1)
    return Step(lambda: jensen_shannon(log_q_NV, log_p_NV, "batchmean"))


def jsd_summed(tokens: int, vocabulary: int) -> Step:
    log_q_NV = leaf(tokens, vocabulary).log_softmax(dim=-1)
    log_p_NV = given(tokens, vocabulary).log_softmax(dim=-1)
    return Step(lambda: jensen_shannon(log_q_NV, log_p_NV, "none"), "drawn")


def linear_jsd(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Step:
    """A student learns from a teacher; each has a head of its own."""
    student, teacher = (
        nn.Linear(width, vocabulary, bias=False, dtype=dtype, device=CUDA) for _ in range(2)
    )
    x_ND, y_ND = leaf(tokens, width, dtype=dtype), given(tokens, width, dtype=dtype)
    temperature = 1.0

    def forward() -> Tensor:
        logits_NV, wanted_NV = student(x_ND), teacher(y_ND)
        log_q_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        log_p_NV = torch.log_softmax(wanted_NV / temperature, dim=-1)
        return jensen_shannon(log_q_NV, log_p_NV, "batchmean").to(dtype)

    return Step(forward)


def linear_grpo(batch: int, tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Step:
    """A clipped policy loss with a penalty towards a reference model, each with a head."""
    heads = [nn.Linear(width, vocabulary, bias=False, dtype=dtype, device=CUDA) for _ in range(4)]
    x_BTD = leaf(batch, tokens, width, dtype=dtype)
    reference_BTD = given(batch, tokens, width, dtype=dtype)
    chosen_BT = labels(vocabulary, batch, tokens)
    mask_BT = torch.ones(batch, tokens, device=CUDA)
    advantages_B = given(batch, dtype=dtype)

    def forward() -> Tensor:
        logits_BTV = x_BTD @ heads[0].weight.t()
        log_p_BTV = F.log_softmax(logits_BTV.float(), dim=-1)
        log_p_BT = log_p_BTV.gather(dim=-1, index=chosen_BT.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            wanted_BTV = reference_BTD @ heads[1].weight.t()
            wanted_log_p_BTV = F.log_softmax(wanted_BTV.float(), dim=-1)
            wanted_BT = wanted_log_p_BTV.gather(dim=-1, index=chosen_BT.unsqueeze(-1)).squeeze(-1)
        ratio_BT = torch.exp(log_p_BT - log_p_BT.detach())
        clipped_BT = torch.clamp(ratio_BT, 0.8, 1.2)
        gain_B1 = advantages_B.unsqueeze(1)
        loss_BT = -torch.min(ratio_BT * gain_B1, clipped_BT * gain_B1)
        apart_BT = torch.exp(wanted_BT - log_p_BT) - (wanted_BT - log_p_BT) - 1.0
        loss_BT = loss_BT + 0.1 * apart_BT
        return (loss_BT * mask_BT).sum() / torch.clamp(mask_BT.sum(), min=1.0)

    return Step(forward, None, heads)


# ---- layers


class GatedMLP(nn.Module):
    """The MLP of Llama without its biases."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def mlp_step(
    batch: int,
    tokens: int,
    width: int,
    inner: int,
    dtype: torch.dtype,
    activation: Callable[[Tensor], Tensor],
) -> tuple[Tensor, GatedMLP]:
    x_BTD = leaf(batch, tokens, width, dtype=dtype)
    return x_BTD, GatedMLP(width, inner, activation).to(CUDA).to(dtype)


def swiglu(batch: int, tokens: int, width: int, inner: int, dtype: torch.dtype) -> Step:
    x_BTD, mlp = mlp_step(batch, tokens, width, inner, dtype, F.silu)
    return Step(lambda: mlp(x_BTD), "drawn")


def geglu(batch: int, tokens: int, width: int, inner: int, dtype: torch.dtype) -> Step:
    def activation(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    x_BTD, mlp = mlp_step(batch, tokens, width, inner, dtype, activation)
    return Step(lambda: mlp(x_BTD), "drawn")


class Tiled(torch.autograd.Function):
    """A module over tiles of its rows, run again tile by tile in the backward, which adds the
    gradients of tiles into one tensor.
    """

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module, tiles: int) -> Tensor:
        ctx.module, ctx.tiles = module, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            parts = [module(part) for part in torch.chunk(x, tiles, dim=-2)]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        rows_ND = x.detach().requires_grad_().view(-1, x.shape[-1])
        grad_ND = grad.view(-1, grad.shape[-1])
        dx_ND = torch.zeros_like(rows_ND)
        first = 0
        for part in torch.chunk(rows_ND, ctx.tiles, dim=0):
            part = part.detach().requires_grad_()
            last = first + len(part)
            part.grad = dx_ND[first:last]
            with torch.enable_grad():
                result = ctx.module(part)
            torch.autograd.backward(result, grad_ND[first:last])
            first = last
        return dx_ND.view(x.shape), None, None


def tiled_swiglu(
    batch: int, tokens: int, width: int, inner: int, tiles: int, dtype: torch.dtype
) -> Step:
    x_BTD, mlp = mlp_step(batch, tokens, width, inner, dtype, F.silu)
    return Step(lambda: Tiled.apply(x_BTD, mlp, tiles), "drawn")


def experts_in_a_loop(
    experts: int, tokens: int, width: int, inner: int, chosen: int, dtype: torch.dtype
) -> Step:
    """Experts one after another over the tokens that chose them, as transformers runs them. Which
    tokens did is random; here each expert gets equally many.
    """
    x_TD = leaf(tokens, width, dtype=dtype)
    up_EFD = leaf(experts, 2 * inner, width, dtype=dtype) * 0.02
    down_EDF = leaf(experts, width, inner, dtype=dtype) * 0.02
    logits_TE = given(tokens, experts)
    chosen_TK = torch.topk(logits_TE, chosen, dim=-1).indices.to(torch.int32)
    weights_TK = torch.softmax(given(tokens, chosen), dim=-1).to(dtype).requires_grad_()
    share = max(1, tokens * chosen // experts)

    def forward() -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(chosen_TK.long(), num_classes=experts).permute(2, 1, 0)
        hit_E = torch.greater(mask_EKT.sum(dim=(-1, -2)), 0)
        for expert in range(experts):
            pair_2N = torch.zeros(2, share, dtype=torch.int64, device=CUDA)
            place_N, token_N = pair_2N
            part_ND = x_TD[token_N]
            gate_NF, up_NF = F.linear(part_ND, up_EFD[expert]).chunk(2, dim=-1)
            part_NF = F.silu(gate_NF) * up_NF
            part_ND = F.linear(part_NF, down_EDF[expert])
            part_ND = part_ND * weights_TK[token_N, place_N, None]
            out_TD.index_add_(0, token_N, part_ND.to(out_TD.dtype))
        del mask_EKT, hit_E
        return out_TD

    return Step(forward, "drawn", logits_TE)


# ---- attention


class NeighborhoodAttention(nn.Module):
    """Attention to near positions only, with all scores in memory."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape

        def by_head(x: Tensor) -> Tensor:
            return x.view(B, T, self.heads, D // self.heads).transpose(1, 2)

        q_BHTK = by_head(self.q(x_BTD))
        k_BHTK = by_head(self.k(x_BTD))
        v_BHTK = by_head(self.v(x_BTD))
        scale = 1 / math.sqrt(D // self.heads)
        scores_BHTT = torch.matmul(q_BHTK, k_BHTK.transpose(-2, -1)) * scale
        mask_TT = torch.zeros(T, T, device=x_BTD.device, dtype=torch.bool)
        scores_BHTT = scores_BHTT.masked_fill(~mask_TT, float("-inf"))
        weights_BHTT = torch.softmax(scores_BHTT, dim=-1)
        out_BHTK = torch.matmul(weights_BHTT, v_BHTK)
        out_BTD = out_BHTK.transpose(1, 2).contiguous().view(B, T, D)
        return self.out(out_BTD)


def neighborhood_attention(
    batch: int, tokens: int, width: int, heads: int, dtype: torch.dtype
) -> Step:
    layers = [NeighborhoodAttention(width, heads).to(CUDA).to(dtype) for _ in range(2)]
    x_BTD = leaf(batch, tokens, width, dtype=dtype)
    return Step(lambda: layers[0](x_BTD), torch.randn_like(x_BTD), layers)


def causal_mask(tokens: int) -> Tensor:
    ones_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=CUDA)
    return torch.tril(ones_TT).view(1, 1, tokens, tokens)


def convolved(
    batch: int,
    tokens: int,
    channels: int,
    kernel: int,
    dtype: torch.dtype,
    weights_of_scores: Callable[[Tensor], Tensor],
    wide: torch.dtype,
) -> Step:
    """Attention weights of several heads mixed by a convolution."""
    convolutions = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2) for _ in range(2)]
    first, other = (convolution.to(CUDA).to(dtype) for convolution in convolutions)
    scores_BCTT = leaf(batch, channels, tokens, tokens, dtype=dtype)

    def forward() -> Tensor:
        mask_TT = causal_mask(tokens)
        low = torch.tensor(-1e9, device=CUDA, dtype=wide)
        zero = torch.tensor(0.0, device=CUDA, dtype=wide)
        masked_BCTT = scores_BCTT.to(wide).masked_fill(~mask_TT, low)
        weights_BCTT = weights_of_scores(masked_BCTT)
        kernels, bias = first.weight.to(wide), first.bias.to(wide)
        mixed_BCTT = F.conv2d(weights_BCTT, kernels, bias, padding=kernel // 2)
        return mixed_BCTT.masked_fill(~mask_TT, zero).to(dtype)

    return Step(forward, torch.randn_like(scores_BCTT), other)


def multi_token_attention(
    batch: int, tokens: int, channels: int, kernel: int, dtype: torch.dtype
) -> Step:
    def weights(scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=-1)

    return convolved(batch, tokens, channels, kernel, dtype, weights, dtype)


def sparsemax(scores: Tensor) -> Tensor:
    """The nearest point of the simplex, found by sorting."""
    tokens = scores.shape[-1]
    ordered, _ = torch.sort(scores, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    counts = torch.arange(1, tokens + 1, device=CUDA, dtype=scores.dtype).view(1, 1, 1, tokens)
    is_positive = ordered > -1e8
    is_inside = (1 + counts * ordered > sums) & is_positive
    support = torch.sum(is_inside, dim=-1, keepdim=True)
    at_least_one = torch.max(support, torch.ones_like(support))
    total = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
    threshold = (total - 1) / at_least_one.to(scores.dtype)
    nothing = torch.full_like(threshold, float("inf"))
    threshold = torch.where(support == 0, nothing, threshold)
    return torch.clamp(scores - threshold, min=0)


def sparse_multi_token_attention(
    batch: int, tokens: int, channels: int, kernel: int, dtype: torch.dtype
) -> Step:
    return convolved(batch, tokens, channels, kernel, dtype, sparsemax, torch.float32)


def rotated_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rope(tokens: int, width: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Step:
    """Rotated queries and keys, whose gradients are returned and not kept."""
    size = width // heads
    q_BHTK = leaf(1, tokens, heads, size, dtype=dtype).transpose(1, 2)
    k_BGTK = leaf(1, tokens, kv_heads, size, dtype=dtype).transpose(1, 2)
    gradients = torch.randn_like(q_BHTK), torch.randn_like(k_BGTK)
    # the angles are a product, so that cuBLAS has a workspace
    frequencies_1K1 = given(1, size // 2, 1)
    angles_1KT = frequencies_1K1 @ torch.arange(tokens, device=CUDA).float()[None, None, :]
    angles_BTK = torch.cat((angles_1KT, angles_1KT), dim=1).transpose(1, 2)
    cos_BTK, sin_BTK = angles_BTK.cos().to(dtype), angles_BTK.sin().to(dtype)
    del angles_1KT, angles_BTK

    def forward() -> list[Tensor]:
        cos, sin = cos_BTK.unsqueeze(1), sin_BTK.unsqueeze(1)
        return [x * cos + rotated_half(x) * sin for x in (q_BHTK, k_BGTK)]

    class Returned(Step):
        def full(self) -> None:
            results = forward()
            torch.autograd.grad(results, (q_BHTK, k_BGTK), gradients, retain_graph=True)

    return Returned(forward, None, gradients)


def softmax(width: int, dtype: torch.dtype) -> Step:
    x_D = leaf(width, dtype=dtype)
    return Step(lambda: torch.softmax(x_D, dim=-1), "ones")


STEPS: dict[str, Callable[..., Step]] = {
    function.__name__: function
    for function in (
        layer_norm,
        rms_norm,
        add_rms_norm,
        fused_rms_norm,
        group_norm,
        cross_entropy,
        linear_cross_entropy,
        vocabulary_parallel_cross_entropy,
        kl_div,
        jsd,
        jsd_summed,
        linear_jsd,
        linear_grpo,
        swiglu,
        geglu,
        tiled_swiglu,
        experts_in_a_loop,
        neighborhood_attention,
        multi_token_attention,
        sparse_multi_token_attention,
        rope,
        softmax,
    )
}
# step -> what the prediction cannot know of it
CAUSES = {
    "experts_in_a_loop": "how many tokens choose each expert is random",
    "neighborhood_attention": "blocks of 1 to 20 MiB keep a rest of up to 1 MiB",
    "multi_token_attention": "workspaces of cuDNN's convolutions in bf16",
    "sparse_multi_token_attention": "workspaces of cuDNN's convolutions",
}
# a script that took the full step whatever the mode of its row says
ALWAYS_FULL = ("group_norm",)


# ---- the table


@dataclass(frozen=True)
class Row:
    """One published peak."""

    step: str
    card: str
    mode: str
    sizes: dict
    published_mib: float

    @property
    def words(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items())
        return f"{self.step} {self.mode} {sizes}"


def rows() -> Iterator[Row]:
    """All published peaks, in the order of the file."""
    for group in json.loads(MEASURED.read_text())["measured"]:
        for *varying, mode, published in group["peaks_mib"]:
            sizes = group["sizes"] | dict(zip(group["varying"], varying, strict=True))
            yield Row(group["step"], group["card"], mode, sizes, published)


def predicted_mib(row: Row) -> float:
    """What torch.cuda.max_memory_allocated would say of the step on that card. Earlier steps of the
    process have made the workspaces of cuBLAS.
    """
    mode = "full" if row.step in ALWAYS_FULL else row.mode
    sizes = dict(row.sizes)
    if "dtype" in sizes:
        sizes["dtype"] = getattr(torch, sizes["dtype"])

    def build() -> Step:
        step = STEPS[row.step](**sizes)
        if mode == "full":
            return step
        STEPS[row.step](**sizes).full()
        if mode == "backward":
            step.prepare_backward()
        return step

    def one_step(step: Step) -> None:
        getattr(step, mode)()

    return predict(build, one_step, target=row.card).allocated / MIB


@dataclass(frozen=True)
class Comparison:
    """A row and its prediction."""

    row: Row
    predicted_mib: float

    @property
    def error(self) -> float:
        return self.predicted_mib / self.row.published_mib - 1

    @property
    def cause(self) -> str:
        return "" if abs(self.error) <= EXACT else CAUSES.get(self.row.step, "unknown")

    @property
    def text(self) -> str:
        numbers = f"{self.predicted_mib:>11.2f}{self.row.published_mib:>11.2f}{self.error:>+9.2%}"
        return f"{self.row.card:<10}{numbers}  {self.row.words}  {self.cause}".rstrip()


# ---- the picture: a point for each row, both axes logarithmic

LEFT = 70  # edges of the square, in points; the key is right of it
TOP = 16
FLOOR = 380
WIDTH = 590
HEIGHT = 426
DECADES = (-3, 5)  # MiB as powers of ten


def place(mib: float) -> float:
    """Points from the start of an axis."""
    first, last = DECADES
    return (math.log10(mib) - first) / (last - first) * (FLOOR - TOP)


def label(words: str, x: float, y: float, anchor: str = "start") -> str:
    return element("text", words, x=f"{x:g}", y=f"{y:g}", text_anchor=anchor)


def grid() -> str:
    """Lines at every power of ten, and the diagonal of equal values."""
    right = LEFT + FLOOR - TOP
    parts = []
    for power in range(DECADES[0], DECADES[1] + 1):
        at = place(10.0**power)
        across = f"M{LEFT},{FLOOR - at:g}H{right}M{LEFT + at:g},{FLOOR}V{TOP}"
        parts.append(element("path", d=across, stroke="var(--line)"))
        if power % 2:
            words = f"{10.0**power:,g}"
            parts.append(label(words, LEFT - 8, FLOOR - at + 4, "end"))
            parts.append(label(words, LEFT + at, FLOOR + 18, "middle"))
    parts.append(element("path", d=f"M{LEFT},{FLOOR}L{right},{TOP}", stroke="var(--faint)"))
    parts.append(label("published peak, MiB", (LEFT + right) / 2, FLOOR + 38, "middle"))
    return "".join(parts) + label("predicted, MiB", LEFT + 6, TOP + 14)


def picture(found: Sequence[Comparison]) -> str:
    """Predicted against published peaks, coloured by card, as SVG."""
    colours = dict(zip(sorted({each.row.card for each in found}), COLOURS.values(), strict=False))
    points = []
    for each in found:
        x = LEFT + place(each.row.published_mib)
        y = FLOOR - place(each.predicted_mib)
        words = title(each.text)
        colour = colours[each.row.card]
        points.append(
            element("circle", words, cx=f"{x:.1f}", cy=f"{y:.1f}", r=4, fill=colour, opacity=0.7)
        )
    keys = []
    for index, (card, colour) in enumerate(colours.items()):
        y = TOP + 20 + 22 * index
        keys.append(element("circle", cx=FLOOR + LEFT + 20, cy=y - 4, r=5, fill=colour))
        keys.append(label(card, FLOOR + LEFT + 32, y))
    paper = element("rect", width=WIDTH, height=HEIGHT, fill="var(--paper)")
    return element(
        "svg",
        element("style", PALETTE + WORDS) + paper + grid() + "".join(points + keys),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"Predicted against published peaks of {len(found)} steps on GPUs",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, help="these steps")
    parser.add_argument("--json", help="write the comparisons to this file")
    parser.add_argument("--svg", help="draw the comparisons into this file")
    chosen = parser.parse_args(arguments)

    print(f"{'card':<10}{'predicted':>11}{'published':>11}{'error':>9}  step (MiB)")
    found = []
    for row in rows():
        if not chosen.only or row.step in chosen.only:
            found.append(Comparison(row, predicted_mib(row)))
            print(found[-1].text, flush=True)

    exact = sum(abs(each.error) <= EXACT for each in found)
    close = sum(abs(each.error) <= CLOSE for each in found)
    print(f"{len(found)} rows: {exact} within 0.1%, {close} within 1%")
    if chosen.json:
        listed = [vars(each.row) | {"predicted_mib": each.predicted_mib} for each in found]
        Path(chosen.json).write_text(json.dumps(listed, indent=1) + "\n")
    if chosen.svg:
        Path(chosen.svg).write_text(picture(found) + "\n")
    return 0 if close >= 0.9 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

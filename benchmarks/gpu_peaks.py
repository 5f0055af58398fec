"""Predicted peaks of steps against peaks that other people measured on their GPUs.

    python -m benchmarks.gpu_peaks [--only STEP ...] [--svg FILE]

benchmarks/gpu_peaks.json has the measured peaks, their cards and sources. Each step is written
here from the description of what was alive, and predicted for the card on fake tensors: nothing is
run. A step runs in the mode "forward", "backward" (its graph is there) or "full"; gradients of
the step before are alive, and earlier steps of the process have left cuBLAS its workspaces. Prints
predicted and published MiB, the difference, and the known cause of what is more than 0.1%.

Inside a step every tensor is on the card and in the dtype of its row, unless it says otherwise.
B rows of T tokens, N = B * T, D width, F inner width, H heads, K width of a head, V vocabulary,
E experts.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from base.flags import Parser
from footprint import predict
from footprint.answers import svg
from footprint.answers.svg import Scale

MEASURED = Path(__file__).with_suffix(".json")
MIB = 2**20
EXACT, CLOSE = 1e-3, 1e-2  # differences that need no cause, and that count as predicted


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


def leaf(*shape: int, **how: object) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **how)


# ---- norms


def norm_step(norm: Callable[[], nn.Module], *shape: int) -> Step:
    """A norm in fp32, and a second one for comparison, which only holds its weights."""
    module, other = norm().float(), norm().float()
    x = leaf(*shape)
    return Step(lambda: module(x), torch.randn_like(x), other)


def layer_norm(rows: int, width: int) -> Step:
    return norm_step(lambda: nn.LayerNorm(width), rows, width)


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


def rms_norm(rows: int, width: int) -> Step:
    return norm_step(lambda: NormInFloat(width), rows, width)


def add_rms_norm(rows: int, width: int) -> Step:
    """A residual is added first, and the sum is a result, too."""
    norms = [NormInFloat(width) for _ in range(4)]
    x_ND, residual_ND = leaf(rows, width), leaf(rows, width)
    gradients = torch.randn_like(x_ND), torch.randn_like(x_ND)

    class Both(Step):
        def full(self) -> None:
            total_ND = x_ND.float() + residual_ND.float()
            torch.autograd.backward((norms[0](total_ND), total_ND.to(x_ND.dtype)), gradients)

    return Both(norms[0].forward, None, norms)


def fused_rms_norm(tokens: int, batch: int, width: int) -> Step:
    norm = nn.RMSNorm(width, eps=1e-6, dtype=torch.bfloat16)
    x_TBD = leaf(tokens, batch, width, dtype=torch.bfloat16)

    class Summed(Step):
        def full(self) -> None:
            result = self.forward()
            result.sum().backward()

    return Summed(lambda: norm(x_TBD))


def group_norm(batch: int, width: int, channels: int, channels_per_group: int) -> Step:
    """Of a batch with B * C * D elements."""
    groups = channels // channels_per_group
    return norm_step(lambda: nn.GroupNorm(groups, channels), batch, channels, width)


# ---- losses


def heads(count: int, width: int, vocabulary: int) -> list[nn.Linear]:
    return [nn.Linear(width, vocabulary, bias=False) for _ in range(count)]


def cross_entropy(batch: int, tokens: int, vocabulary: int) -> Step:
    logits_NV = leaf(batch * tokens, vocabulary)
    labels_N = torch.randint(vocabulary, (batch * tokens,))
    return Step(lambda: F.cross_entropy(logits_NV, labels_N))


def linear_cross_entropy(tokens: int, width: int, vocabulary: int) -> Step:
    head, other = heads(2, width, vocabulary)
    hidden_ND = leaf(tokens, width)
    labels_N = torch.randint(vocabulary, (tokens,))
    return Step(lambda: F.cross_entropy(head(hidden_ND), labels_N), None, other)


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
        rows = torch.arange(mine.numel())
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
        rows = torch.arange(mine.numel())
        probabilities.view(-1, probabilities.shape[-1])[rows, mine] -= (
            1.0 - is_other.view(-1).float()
        )
        return probabilities.mul_(grad.unsqueeze(-1)), None


def vocabulary_parallel_cross_entropy(tokens: int, batch: int, vocabulary: int) -> Step:
    logits_TBV = leaf(tokens, batch, vocabulary, dtype=torch.bfloat16)
    labels_TB = torch.randint(vocabulary, (tokens, batch))

    class Cleared(Step):
        def full(self) -> None:
            logits_TBV.grad = None
            super().full()

    return Cleared(lambda: ShardedCrossEntropy.apply(logits_TBV, labels_TB).sum())


def kl_div(batch: int, tokens: int, vocabulary: int) -> Step:
    input_NV = leaf(batch * tokens, vocabulary).log_softmax(dim=-1)
    target_NV = torch.randn(batch * tokens, vocabulary).softmax(dim=-1)
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


def jsd(
    tokens: int,
    vocabulary: int,
    batch: int = 1,
    reduction: str = "batchmean",
    gradient: str | None = None,
) -> Step:
    log_q_NV = leaf(batch * tokens, vocabulary).log_softmax(dim=-1)
    log_p_NV = torch.randn(batch * tokens, vocabulary).log_softmax(dim=-1)
    return Step(lambda: jensen_shannon(log_q_NV, log_p_NV, reduction), gradient)


def linear_jsd(tokens: int, width: int, vocabulary: int) -> Step:
    """A student learns from a teacher; each has a head of its own."""
    student, teacher = heads(2, width, vocabulary)
    x_ND, y_ND = leaf(tokens, width), torch.randn(tokens, width)
    temperature = 1.0

    def forward() -> Tensor:
        logits_NV, wanted_NV = student(x_ND), teacher(y_ND)
        log_q_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        log_p_NV = torch.log_softmax(wanted_NV / temperature, dim=-1)
        return jensen_shannon(log_q_NV, log_p_NV, "batchmean").to(x_ND.dtype)

    return Step(forward)


def linear_grpo(batch: int, tokens: int, width: int, vocabulary: int) -> Step:
    """A clipped policy loss with a penalty towards a reference model, each with a head."""
    policy, reference, *others = heads(4, width, vocabulary)
    x_BTD, y_BTD = leaf(batch, tokens, width), torch.randn(batch, tokens, width)
    chosen_BT1 = torch.randint(vocabulary, (batch, tokens, 1))
    mask_BT = torch.ones(batch, tokens, dtype=torch.float32)
    advantages_B1 = torch.randn(batch, 1)

    def log_p(x_BTD: Tensor, head: nn.Linear) -> tuple[Tensor, ...]:
        """Of the chosen tokens, and of all, with the logits: both stay alive."""
        logits_BTV = x_BTD @ head.weight.t()
        log_p_BTV = F.log_softmax(logits_BTV.float(), dim=-1)
        return log_p_BTV.gather(dim=-1, index=chosen_BT1).squeeze(-1), log_p_BTV, logits_BTV

    def forward() -> Tensor:
        log_p_BT, *of_all_BTV = log_p(x_BTD, policy)
        with torch.no_grad():
            wanted_BT, *wanted_of_all_BTV = log_p(y_BTD, reference)
        ratio_BT = torch.exp(log_p_BT - log_p_BT.detach())
        clipped_BT = torch.clamp(ratio_BT, 0.8, 1.2)
        loss_BT = -torch.min(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        apart_BT = torch.exp(wanted_BT - log_p_BT) - (wanted_BT - log_p_BT) - 1.0
        loss_BT = loss_BT + 0.1 * apart_BT
        return (loss_BT * mask_BT).sum() / torch.clamp(mask_BT.sum(), min=1.0)

    return Step(forward, None, others)


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


def gated_mlp(
    batch: int,
    tokens: int,
    width: int,
    inner: int,
    activation: Callable[[Tensor], Tensor],
    tiles: int = 0,
) -> Step:
    x_BTD = leaf(batch, tokens, width)
    mlp = GatedMLP(width, inner, activation)
    if tiles:
        return Step(lambda: Tiled.apply(x_BTD, mlp, tiles), "drawn")
    return Step(lambda: mlp(x_BTD), "drawn")


def experts_in_a_loop(experts: int, tokens: int, width: int, inner: int, chosen: int) -> Step:
    """Experts one after another over the tokens that chose them, as transformers runs them. Which
    tokens did is random; here each expert gets equally many.
    """
    x_TD = leaf(tokens, width)
    up_EFD = leaf(experts, 2 * inner, width) * 0.02
    down_EDF = leaf(experts, width, inner) * 0.02
    logits_TE = torch.randn(tokens, experts, dtype=torch.float32)
    chosen_TK = torch.topk(logits_TE, chosen, dim=-1).indices.to(torch.int32)
    weights_TK = torch.softmax(torch.randn(tokens, chosen), dim=-1).requires_grad_()
    share = max(1, tokens * chosen // experts)

    def forward() -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(chosen_TK.long(), num_classes=experts).permute(2, 1, 0)
        hit_E = torch.greater(mask_EKT.sum(dim=(-1, -2)), 0)
        for expert in range(experts):
            pair_2N = torch.zeros(2, share, dtype=torch.int64)
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

        def by_head(layer: nn.Linear) -> Tensor:
            return layer(x_BTD).view(B, T, self.heads, D // self.heads).transpose(1, 2)

        q_BHTK = by_head(self.q)
        k_BHTK = by_head(self.k)
        v_BHTK = by_head(self.v)
        scale = 1 / math.sqrt(D // self.heads)
        scores_BHTT = torch.matmul(q_BHTK, k_BHTK.transpose(-2, -1)) * scale
        mask_TT = torch.zeros(T, T, dtype=torch.bool)
        scores_BHTT = scores_BHTT.masked_fill(~mask_TT, float("-inf"))
        weights_BHTT = torch.softmax(scores_BHTT, dim=-1)
        out_BHTK = torch.matmul(weights_BHTT, v_BHTK)
        out_BTD = out_BHTK.transpose(1, 2).contiguous().view(B, T, D)
        return self.out(out_BTD)


def neighborhood_attention(batch: int, tokens: int, width: int, heads: int) -> Step:
    layer, other = (NeighborhoodAttention(width, heads) for _ in range(2))
    x_BTD = leaf(batch, tokens, width)
    return Step(lambda: layer(x_BTD), torch.randn_like(x_BTD), other)


def convolved(
    batch: int,
    tokens: int,
    channels: int,
    kernel: int,
    weights_of_scores: Callable[[Tensor], Tensor],
    wide: torch.dtype | None = None,
) -> Step:
    """Attention weights of several heads mixed by a convolution, in the dtype `wide`."""
    first, other = (nn.Conv2d(channels, channels, kernel, padding=kernel // 2) for _ in range(2))
    scores_BCTT = leaf(batch, channels, tokens, tokens)
    dtype = wide or scores_BCTT.dtype

    def forward() -> Tensor:
        mask_TT = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool))[None, None]
        low, zero = torch.tensor(-1e9, dtype=dtype), torch.tensor(0.0, dtype=dtype)
        masked_BCTT = scores_BCTT.to(dtype).masked_fill(~mask_TT, low)
        weights_BCTT = weights_of_scores(masked_BCTT)
        kernels, bias = first.weight.to(dtype), first.bias.to(dtype)
        mixed_BCTT = F.conv2d(weights_BCTT, kernels, bias, padding=kernel // 2)
        return mixed_BCTT.masked_fill(~mask_TT, zero).to(scores_BCTT.dtype)

    return Step(forward, torch.randn_like(scores_BCTT), other)


def sparsemax(scores: Tensor) -> Tensor:
    """The nearest point of the simplex, found by sorting."""
    tokens = scores.shape[-1]
    ordered, _ = torch.sort(scores, dim=-1, descending=True)
    sums = torch.cumsum(ordered, dim=-1)
    counts = torch.arange(1, tokens + 1, dtype=scores.dtype).view(1, 1, 1, tokens)
    is_positive = ordered > -1e8
    is_inside = (1 + counts * ordered > sums) & is_positive
    support = torch.sum(is_inside, dim=-1, keepdim=True)
    at_least_one = torch.max(support, torch.ones_like(support))
    total = torch.gather(sums, dim=-1, index=at_least_one.long() - 1)
    threshold = (total - 1) / at_least_one.to(scores.dtype)
    nothing = torch.full_like(threshold, float("inf"))
    threshold = torch.where(support == 0, nothing, threshold)
    return torch.clamp(scores - threshold, min=0)


def rotated_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rope(tokens: int, width: int, heads: int, kv_heads: int) -> Step:
    """Rotated queries and keys, whose gradients are returned and not kept."""
    size = width // heads
    q_BHTK = leaf(1, tokens, heads, size).transpose(1, 2)
    k_BGTK = leaf(1, tokens, kv_heads, size).transpose(1, 2)
    gradients = torch.randn_like(q_BHTK), torch.randn_like(k_BGTK)
    # the angles are a product, so that cuBLAS has a workspace
    frequencies_1K1 = torch.randn(1, size // 2, 1, dtype=torch.float32)
    angles_1KT = frequencies_1K1 @ torch.arange(tokens).float()[None, None, :]
    angles_BTK = torch.cat((angles_1KT, angles_1KT), dim=1).transpose(1, 2)
    cos_BTK, sin_BTK = (angle.to(q_BHTK.dtype) for angle in (angles_BTK.cos(), angles_BTK.sin()))
    del angles_1KT, angles_BTK

    def forward() -> list[Tensor]:
        cos, sin = cos_BTK.unsqueeze(1), sin_BTK.unsqueeze(1)
        return [x * cos + rotated_half(x) * sin for x in (q_BHTK, k_BGTK)]

    class Returned(Step):
        def full(self) -> None:
            results = forward()
            torch.autograd.grad(results, (q_BHTK, k_BGTK), gradients, retain_graph=True)

    return Returned(forward, None, gradients)


def softmax(width: int) -> Step:
    x_D = leaf(width)
    return Step(lambda: torch.softmax(x_D, dim=-1), "ones")


swiglu = partial(gated_mlp, activation=F.silu)
STEPS: dict[str, Callable[..., Step]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "fused_rms_norm": fused_rms_norm,
    "group_norm": group_norm,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "vocabulary_parallel_cross_entropy": vocabulary_parallel_cross_entropy,
    "kl_div": kl_div,
    "jsd": jsd,
    "jsd_summed": partial(jsd, reduction="none", gradient="drawn"),
    "linear_jsd": linear_jsd,
    "linear_grpo": linear_grpo,
    "swiglu": swiglu,
    "tiled_swiglu": swiglu,
    "geglu": partial(gated_mlp, activation=partial(F.gelu, approximate="tanh")),
    "experts_in_a_loop": experts_in_a_loop,
    "neighborhood_attention": neighborhood_attention,
    "multi_token_attention": partial(convolved, weights_of_scores=partial(F.softmax, dim=-1)),
    "sparse_multi_token_attention": partial(
        convolved, weights_of_scores=sparsemax, wide=torch.float32
    ),
    "rope": rope,
    "softmax": softmax,
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
    dtype = getattr(torch, sizes.pop("dtype", "float32"))
    make = partial(STEPS[row.step], **sizes)

    def build() -> Step:
        torch.set_default_device("cuda")
        step = make()
        if mode == "full":
            return step
        make().full()
        if mode == "backward":
            step.prepare_backward()
        return step

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return predict(build, methodcaller(mode), target=row.card).allocated / MIB
    finally:
        torch.set_default_dtype(usual)


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

LEFT, RIGHT = 70, 434
TOP, FLOOR = 16, 380
WIDTH, HEIGHT = 590, 426


def picture(found: Sequence[Comparison]) -> str:
    """Predicted against published peaks, coloured by card, as SVG."""
    peaks = [peak for each in found for peak in (each.row.published_mib, each.predicted_mib)]
    x = Scale.around(peaks, LEFT, RIGHT, base=10)
    y = Scale.around(peaks, FLOOR, TOP, base=10)
    colours = dict(zip(sorted({each.row.card for each in found}), svg.COLOURS, strict=False))
    parts = [
        svg.rows(y, LEFT, RIGHT),
        svg.columns(x, FLOOR, TOP),
        svg.line([(LEFT, FLOOR), (RIGHT, TOP)], "equal", stroke="var(--faint)"),
        svg.text("published peak, MiB", (LEFT + RIGHT) / 2, FLOOR + 38, "middle"),
        svg.text("predicted, MiB", LEFT + 6, TOP + 14, ""),
        svg.key(colours, RIGHT + 16, TOP + 20, 0, 22),
    ]
    for each in found:
        across = x(each.row.published_mib)
        height = y(each.predicted_mib)
        fill = colours[each.row.card]
        parts.append(svg.dot(across, height, each.text, r=4, fill=fill, opacity=0.7))
    label = f"Predicted against published peaks of {len(found)} steps on GPUs"
    return svg.picture(WIDTH, HEIGHT, label, parts)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=STEPS, help="these steps")
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
    if chosen.svg:
        Path(chosen.svg).write_text(picture(found) + "\n")
    return 0 if close >= 0.9 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())

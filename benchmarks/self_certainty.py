"""Self-certainty KL(U || p) over a frozen head, forward and backward: `vocab_stats` against full
logits, memory and CPU time.

    python -m benchmarks.self_certainty [--tokens 512] [--hidden_size 2048] [--vocab_size 151936]
    [--repeats 5]

One CPU thread, bf16, interleaved; refuses to time what is off by more than 1e-3 nats from full
logits in float64.
"""

import functools
import math
import statistics

import torch

from benchmarks.clock import seconds
from footprint.measure import peak_bytes
from longhaul.cli import Parser
from longhaul.vocab import vocab_stats


def full_logits(hidden_ND, weight_VD):
    """logsumexp(z) - mean(z) - log V through all logits in fp32 (fp64 for fp64 inputs)."""
    z_NV = hidden_ND @ weight_VD.T
    z_NV = z_NV.to(torch.promote_types(z_NV.dtype, torch.float32))
    return z_NV.logsumexp(1) - z_NV.mean(1) - math.log(len(weight_VD))


def tiled(hidden_ND, weight_VD, kernels):
    return vocab_stats(hidden_ND, weight_VD, kernels=kernels).self_certainty


def gradient(statistic, hidden_ND, weight_VD):
    """d sum(statistic) / d hidden."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    return torch.autograd.grad(statistic(hidden_ND, weight_VD).sum(), hidden_ND)[0]


def main(args: list[str] | None = None):
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.self_certainty")
    parser.add_argument("--tokens", type=int, default=512, help="tokens")
    parser.add_argument("--hidden_size", type=int, default=2048, help="width")
    parser.add_argument("--vocab_size", type=int, default=151_936, help="vocabulary")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, one CPU thread, bf16, {given.tokens} tokens, width "
        f"{given.hidden_size}, V={given.vocab_size:,}, frozen head",
        flush=True,
    )
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(given.tokens, given.hidden_size, generator=generator).bfloat16()
    weight_VD = (
        torch.randn(given.vocab_size, given.hidden_size, generator=generator)
        / given.hidden_size**0.5
    ).bfloat16()
    few = hidden_ND[:32]
    exact = full_logits(few.double(), weight_VD.double())
    table = {"full logits": full_logits} | {
        f"vocab_stats, {kind} bodies": functools.partial(tiled, kernels=kind)
        for kind in ("compiled", "torch")
    }
    for name, statistic in table.items():
        error = float((statistic(few, weight_VD) - exact).abs().max())
        if error > 1e-3:
            raise SystemExit(f"{name} is off by {error:.1e} nats: not timed")
        gradient(statistic, hidden_ND, weight_VD)
    peaks = {
        name: peak_bytes(functools.partial(gradient, f, hidden_ND, weight_VD), hidden_ND.device)
        for name, f in table.items()
    }
    rounds = [
        [seconds(functools.partial(gradient, f, hidden_ND, weight_VD)) for f in table.values()]
        for _ in range(given.repeats)
    ]
    print(
        "| self-certainty, forward and backward | peak, MB | less memory | time "
        "|\n|---|---|---|---|"
    )
    for index, name in enumerate(table):
        ratio = statistics.median(times[index] / times[0] for times in rounds)
        print(
            f"| {name} | {peaks[name] / 1e6:,.1f} | "
            f"{peaks['full logits'] / peaks[name]:.0f}x | {ratio:.2f}x |"
        )


if __name__ == "__main__":
    main()

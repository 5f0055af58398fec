"""Times the loss's elementwise tile bodies on CUDA: Triton twins against torch.compile and eager.
Imports longhaul/vocab/.

    python -m benchmarks.linear_ce          # N = V = 8192 in bf16: one tile at the default size

Letters: N tokens, V vocabulary columns of the tile. A variant that fails its check against float64
is not timed.
"""

import functools
from collections.abc import Sequence

import torch

from base.flags import Parser
from longhaul.vocab import loss as vocab_loss

BOUND = 2.0**-7  # twice the rounding step of bf16: eager's own distance from float64 is one step


def variants() -> dict:
    from longhaul.vocab import triton_bodies as linear_ce

    names = "fold_logsumexp", "logits_to_gradient"
    eager = [getattr(vocab_loss, name) for name in names]
    return {
        "eager": eager,
        "compiled": [
            torch.compile(body, dynamic=True) for body in eager
        ],  # dynamic, as vocab_loss.tile_body has it
        "triton": [getattr(linear_ce, name) for name in names],
    }


def arguments(N: int, V: int, dtype: torch.dtype) -> tuple:
    """(z, target, the fold's state, the gradient's vectors) of a tile in which every third target
    lies inside.
    """
    z_NV = torch.randn(N, V, device="cuda", dtype=dtype).mul_(2)
    target_N = torch.randint(-V, 2 * V, (N,), device="cuda", dtype=torch.int32)
    zero_N = torch.zeros(N, device="cuda", dtype=torch.float32)
    state = zero_N.clone(), zero_N.clone(), zero_N.clone()  # the fold overwrites them
    return z_NV, target_N, state, (z_NV.float().logsumexp(1), zero_N + 1, zero_N)


def check(name: str, fold, fill) -> bool:
    """Whether both bodies agree with float64 on a small ragged tile."""
    z_NV, target_N, state, vectors = arguments(257, 1000, torch.bfloat16)
    double_NV = z_NV.double()
    want = [x_N.double() for x_N in state]
    vocab_loss.fold_logsumexp(double_NV, target_N, *want, None)
    vocab_loss.logits_to_gradient(double_NV, target_N, *(x_N.double() for x_N in vectors), None)
    fold(z_NV, target_N, *state, None)
    fill(z_NV, target_N, *vectors, None)
    pairs = [*zip(state, want, strict=True), (z_NV, double_NV)]
    error = max(((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)
    if not error <= BOUND:  # also NaN
        print(f"{name}: error {error:.2e} > {BOUND:.2e} against float64: not timed")
    return error <= BOUND


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser(prog="python -m benchmarks.linear_ce", description=__doc__.splitlines()[0])
    parser.parse_args(args)
    if not torch.cuda.is_available():
        parser.error("it measures a GPU, and torch sees none: run it on a machine that has one")
    bench()


def bench(N: int = 8192, V: int = 8192) -> None:
    """Median milliseconds, GB/s of the traffic that cannot be avoided, and time relative to the
    twins; one row per body and variant.
    """
    from triton.testing import do_bench  # it clears the L2 cache between runs

    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tile {N} x {V} bf16, "
        "median of many runs"
    )
    passing = {name: bodies for name, bodies in variants().items() if check(name, *bodies)}
    z_NV, target_N, state, vectors = arguments(N, V, torch.bfloat16)
    # the tile is overwritten by its own gradient again and again: values change, traffic does not
    for index, (label, rest, passes) in enumerate(
        [("fold_logsumexp", state, 1), ("logits_to_gradient", vectors, 2)]
    ):
        times = {
            name: do_bench(
                functools.partial(bodies[index], z_NV, target_N, *rest, None),
                warmup=200,
                rep=500,
                return_mode="median",
            )
            for name, bodies in passing.items()
        }
        for name, milliseconds in times.items():
            ratio = (
                f"{milliseconds / times['triton']:.2f}x triton's time"
                if "triton" in times
                else "triton failed"
            )
            print(
                f"{label:20} {name:9} {milliseconds:8.3f} ms "
                f"{passes * z_NV.nbytes / milliseconds / 1e6:7.0f} GB/s   {ratio}"
            )


if __name__ == "__main__":
    main()

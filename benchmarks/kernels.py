"""One Triton kernel of longhaul alone: does it run at all?

    python -m benchmarks.kernels pair_forward_kernel [--device cuda]

A layer of the 4B with Native Sparse Attention runs forward and backward and decodes a token, and
every launch but this kernel's is left out, so that an error is its own. What other kernels would
have written is zero. With TRITON_INTERPRET=1 and --device cpu it is a layer of the smallest model.
Whether results are right is asked by the tests. Exit code 1: nothing launched it.
"""

import contextlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from base.flags import Parser
from footprint.python.patches import patched
from longhaul import step
from longhaul.config import TrainConfig
from longhaul.dist import named_device
from longhaul.elementwise import operators

PACKAGES = ("longhaul.elementwise", "longhaul.vocab", "longhaul.sparse.triton")
WORDS = 4096
FEW_TOKENS = 1500  # several tiles, and the last one is not full
MANY_TOKENS = 65_536  # sums have several parts only in long rows
TOY_TOKENS = 96
TOY_HEADS = ("num_heads=2", "num_kv_heads=1")
# what makes memory without values
ALLOCATES = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


def modules() -> Iterator[ModuleType]:
    """All modules of the packages."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        yield package
        for module in pkgutil.iter_modules(package.__path__, prefix=f"{name}."):
            yield importlib.import_module(module.name)


def found() -> dict[str, object]:
    """Name -> kernel: what can be launched, and whose name ends in _kernel. ValueError without
    triton.
    """
    if not importlib.util.find_spec("triton"):
        raise ValueError("the kernels need triton, which is not installed: run pip install triton")
    from triton.runtime.jit import KernelInterface

    kernels = {}
    for module in modules():
        for name, value in vars(module).items():
            if name.endswith("_kernel") and isinstance(value, KernelInterface):
                kernels[name] = value
    return dict(sorted(kernels.items()))


@contextlib.contextmanager
def others_left_out(chosen: str, kernels: dict[str, object]) -> Iterator[list[str]]:
    """Inside, no other kernel is launched; the list gets the name at each launch.

    Memory that is only allocated is zero, so that every index in it is one that exists.
    """
    launches: list[str] = []
    run = kernels[chosen].run

    def count(*args, **options):
        launches.append(chosen)
        return run(*args, **options)

    found = {(owner, name): zeroed(getattr(owner, name)) for owner, name in ALLOCATES}
    for kernel in kernels.values():
        found[kernel, "run"] = lambda *args, **options: None
    found[kernels[chosen], "run"] = count
    with patched(found):
        yield launches


def zeroed(make: Callable) -> Callable:
    """The same with zeros."""
    return lambda *args, **options: make(*args, **options).zero_()


def use_elementwise(device: torch.device) -> None:
    """Norm, rotation and SwiGLU of a few heads, which a model takes on a GPU only."""
    x_BTHK = torch.randn(1, 33, 2, 64, device=device, requires_grad=True)
    weight_K = torch.ones(64, device=device, requires_grad=True)
    cos, sin = torch.rand(2, 1, 33, 1, 32, device=device)
    normed = operators.norm_rotate(x_BTHK, weight_K, cos, sin, 1e-6)
    rotated = operators.rotate(x_BTHK, cos, sin)
    (normed + operators.swiglu(rotated, x_BTHK)).sum().backward()


def use_layer(device: torch.device, tokens: int) -> None:
    """Forward, backward and a decoded token of a layer."""
    on_gpu = device.type == "cuda"
    cfg = TrainConfig(
        model_size="4B" if on_gpu else "tiny",
        model_overrides=("num_layers=1", *(() if on_gpu else TOY_HEADS)),
        attention_type="nsa",
        kernels="triton",
        loss="chunked",
        dtype="bf16" if on_gpu else "fp32",  # the interpreter's products in bf16 are wrong
        vocab_size=WORDS if on_gpu else 512,
        context_length=tokens,
        warmup_steps=0,
        device=device.type,
    )
    state = step.build(cfg, cfg.model(), device)
    tokens_BT = torch.randint(512, (1, tokens), device=device)
    step.gradients(state, [dict(tokens_BT=tokens_BT, labels_BT=tokens_BT)])

    with torch.no_grad():
        cache = state.model.new_cache(1, tokens)
        cache.layers[0].length = tokens - 1
        state.model(tokens_BT[:, :1], cache=cache)


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(description=__doc__.splitlines()[0], prog="python -m benchmarks.kernels")
    parser.add_argument("name", help="the kernel")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    given = parser.parse_args(args)
    try:
        device = named_device(given.device)
        kernels = found()
        if given.name not in kernels:
            raise ValueError(f"{given.name} is no kernel: choose from {', '.join(kernels)}")
    except ValueError as error:
        parser.refuse(error)

    with others_left_out(given.name, kernels) as launches:
        use_elementwise(device)
        if device.type == "cuda":
            use_layer(device, FEW_TOKENS)
            if not launches:
                use_layer(device, MANY_TOKENS)
            torch.cuda.synchronize(device)
        else:
            use_layer(device, TOY_TOKENS)
    print(f"{given.name}: {len(launches)} launches")
    return 0 if launches else 1


if __name__ == "__main__":
    sys.exit(main())

"""What is here and what is missing: said before anything long begins.

The run goes on without a peer or a compiler, as far as it gets; the notes name each with its
remedy. It does not begin if the machine has a GPU that torch cannot use.
"""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, version, where

ROOT = Path(__file__).parent.parent.parent
SECONDS = 12
PEERS = {  # module -> package
    "liger_kernel": "liger-kernel",
    "cut_cross_entropy": "cut-cross-entropy",
    "fla": "flash-linear-attention",
    "flash_attn": "flash-attn",
    "transformers": "transformers",
}
CAPABILITY = (8, 0)  # of the Triton kernels: bf16 tensor cores


def jobs(place: Place) -> list[Job]:
    """Before everything else; if it does not end well, nothing else runs."""
    work = Job("machine", 0, SECONDS, lambda run: describe(run, place), gate=True)
    return [work]


def describe(run: Run, place: Place) -> None:
    """Hardware, driver and versions, a first product on the device, and notes of what is missing.

    RuntimeError if the device cannot multiply.
    """
    run.data["where"] = where(place.device)
    run.write()
    for line in absent(place):
        run.note(line)

    x = torch.ones(256, 256, device=place.device, dtype=torch.bfloat16)
    if float((x @ x)[0, 0]) != 256:
        raise RuntimeError(f"a product of ones on {place.device} is wrong: check the driver")
    if place.cuda:
        run.data["where"] |= of_cuda(run, place)
        run.write()


def of_cuda(run: Run, place: Place) -> dict[str, str]:
    """Compute capability, shared memory and free memory; notes for what will not run."""
    properties = torch.cuda.get_device_properties(place.device)
    capability = (properties.major, properties.minor)
    if capability < CAPABILITY:
        run.note(
            f"compute capability {capability[0]}.{capability[1]}: the Triton kernels need 8.0: "
            "their jobs will fail"
        )
    free, total = torch.cuda.mem_get_info(place.device)
    if free < 0.9 * total:
        run.note(
            f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are taken by other programs: "
            "end them for figures that mean something"
        )
    return {
        "compute capability": f"{capability[0]}.{capability[1]}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory free at the start": f"{free / 2**30:.1f} GiB",
        "CPU cores": str(os.cpu_count()),
    }


# ---- what is missing


def hidden_gpu() -> str:
    """The GPU that the driver's own tool lists; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""


def refusal(device: torch.device, toy_asked: bool) -> str:
    """Why a run must not begin, with the remedy; empty if it may."""
    if device.type == "cuda" or toy_asked:
        return ""
    name = hidden_gpu()
    if not name:
        return (
            "torch sees no GPU, and a CPU's figures claim nothing: run it on a machine with a GPU, "
            "or give --toy to see that everything runs"
        )
    return (
        f"the driver lists {name}, but torch {torch.__version__} (CUDA {torch.version.cuda}) "
        "cannot use it: install a CUDA build of torch that the driver supports, or give --toy"
    )


def absent(place: Place) -> list[str]:
    """Lines that name what is not installed, each with its remedy."""
    lines = []
    required = [name for name in requirements() if version(name) == "not installed"]
    if required:
        lines.append(f"not installed: {', '.join(required)}: pip install -r requirements.txt")
    if not importlib.util.find_spec("triton"):
        lines.append("triton is not installed: no Triton kernel runs: pip install triton")
    if place.cuda:
        lines += without_compiler()
    peers = [package for module, package in PEERS.items() if not importlib.util.find_spec(module)]
    if peers:
        lines.append(f"peers that are not installed: pip install {' '.join(peers)}")
    return lines


def requirements() -> list[str]:
    """The names of the packages in requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split(">")[0].split("<")[0].split("=")[0].strip() for line in lines]
    return [name for name in names if name]


def without_compiler() -> list[str]:
    """What Triton needs on the machine itself to launch kernels: a C compiler, Python's headers."""
    lines = []
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    if not any(name and shutil.which(name) for name in compilers):
        lines.append("no C compiler: no Triton or compiled kernel runs: install gcc, or set CC")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        lines.append(f"{header} is missing: no Triton kernel runs: install python3-dev")
    return lines

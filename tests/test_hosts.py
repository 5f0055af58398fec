"""More than one machine: two network namespaces stand for two hosts; and the recipes that start
torchrun on real ones.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from longhaul import cli, dist
from longhaul.config import TrainConfig
from tests.kit import dataset
from tests.ranks import free_port, run_program

ROOT = Path(__file__).parent.parent
FLAGS = shlex.split(
    "--device cpu --model_size tiny --vocab_size 64 --context_length 256 --max_steps 30 "
    "--save_every 10 --warmup_steps 4 --eval_every 0 --dtype fp32"
)
ADDRESSES = ["10.213.7.1", "10.213.7.2"]
# train.py, but for a rank that is silent it waits a quarter of the minute that users wait
PROGRAM = """
import train
from longhaul.run import heartbeat
heartbeat.LOST = 15.0
train.main()
"""


def ip(*words: str):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts():
    """Two network namespaces joined by a cable; skipped, with the reason, if this machine does not
    allow them.
    """
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command `ip` (iproute2), which is not installed")
    names = [f"longhaul{os.getpid()}{end}" for end in "ab"]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ends = f"cable netns {names[0]} type veth peer name cable netns {names[1]}"
        ip("link", "add", *ends.split())
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """FLAGS, and a small dataset."""
    return [*FLAGS, "--data", str(dataset(tmp_path / "data", rows=400))]


@pytest.fixture
def program(tmp_path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def start(host: str, rank: int, command: list[str]) -> subprocess.Popen:
    """torchrun on one of the two hosts, as a user with two machines would call it, on one core, so
    that sums have the same order.
    """
    place = f"ip netns exec {host} taskset --cpu-list {rank % os.cpu_count()}"
    torchrun = (
        f"-m torch.distributed.run --nnodes=2 --node_rank={rank} --nproc_per_node=1 "
        f"--master_addr={ADDRESSES[0]} --master_port=29511"
    )
    return subprocess.Popen(
        [*place.split(), sys.executable, *torchrun.split(), *command],
        cwd=ROOT,
        text=True,
        env=os.environ | dict(GLOO_SOCKET_IFNAME="cable", PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def losses(folder: Path) -> dict[int, float]:
    """The last loss that was logged for each step."""
    return {
        row["step"]: row["loss"]
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "loss" in row
    }


@pytest.mark.slow
def test_a_host_is_cut_off_and_both_go_on_from_the_checkpoint(hosts, program, flags, tmp_path):
    folder = tmp_path / "run"
    command = [program, *flags, "--output_dir", str(folder)]
    jobs = [start(host, rank, command) for rank, host in enumerate(hosts)]
    wait_for(lambda: (folder / "step-00000010").exists(), jobs)
    ip("-n", hosts[1], "link", "set", "cable", "down")
    words = [job.communicate(timeout=600)[0] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert any("was killed or does not answer" in text for text in words)
    assert json.loads((folder / "exit.json").read_text())["code"] == 7

    ip("-n", hosts[1], "link", "set", "cable", "up")
    jobs = [start(host, rank, command) for rank, host in enumerate(hosts)]
    words = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0] and "resumed" in words[0]
    assert json.loads((folder / "exit.json").read_text())["code"] == 0

    alone = tmp_path / "one machine"
    run_program(train.main, 2, [*flags, "--output_dir", str(alone)])
    assert losses(folder) == losses(alone) and len(losses(alone)) == 30


def wait_for(condition, jobs, seconds: float = 180):
    """Wait until `condition()` holds; fails if a job fails before that."""
    end = time.monotonic() + seconds
    while not condition():
        failed = [job for job in jobs if job.poll()]
        assert not failed, [job.communicate()[0] for job in failed]
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- recipes

SCONTROL = """#!/bin/sh
case "$1" in show) echo 127.0.0.1 ;; *) echo "$@" >> "$0.calls" ;; esac
"""


def write_command(path: Path, text: str):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """A PATH on which Slurm's commands do what they do on one node: srun runs its arguments,
    scontrol answers, or writes down how it was called.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    write_command(commands / "srun", '#!/bin/sh\nexec "$@"\n')
    write_command(commands / "scontrol", SCONTROL)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | dict(
        PATH=path,
        SLURM_JOB_NODELIST="here",
        SLURM_JOB_NUM_NODES="1",
        SLURM_JOB_ID="7",
        SLURM_GPUS_ON_NODE="1",
        PORT=str(free_port()),
    )


@pytest.mark.slow
def test_under_slurm_a_job_that_was_stopped_goes_back_into_the_queue_and_one_that_failed_does_not(
    slurm, flags, tmp_path
):
    folder, calls = tmp_path / "run", tmp_path / "bin" / "scontrol.calls"
    command = ["bash", "scripts/slurm.sh", *flags, f"--output-dir={folder}"]
    job = subprocess.Popen(
        command, cwd=ROOT, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(lambda: (folder / "metrics.jsonl").exists(), [job])
    (folder / "STOP").touch()
    text = job.communicate(timeout=120)[0]
    assert job.returncode == 0 and calls.read_text() == "requeue 7\n", text

    # runs that end at once: well, or badly without a record of their own, or with one
    record = f"""echo '{{"code": 2}}' > {folder}/exit.json"""
    for line, code in (("exit 0", 0), ("exit 1", 1), (f"{record}; exit 1", 1)):
        write_command(tmp_path / "bin" / "torchrun", f"#!/bin/sh\n{line}\n")
        assert subprocess.run(command, cwd=ROOT, env=slurm).returncode == code
    assert calls.read_text() == "requeue 7\n"


def test_the_kubernetes_recipe_names_one_service_and_flags_that_exist():
    yaml = pytest.importorskip(
        "yaml", reason="pyyaml, which comes with transformers, is not installed"
    )
    service, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
    pods = job["spec"]["template"]["spec"]
    words = shlex.split(pods["containers"][0]["command"][-1])
    flags = [word.removeprefix("--") for word in words if word.startswith("--") and "=" in word]
    given = dict(flag.split("=") for flag in flags)

    name = service["metadata"]["name"]
    assert pods["subdomain"] == name
    assert given["master_addr"] == f"{job['metadata']['name']}-0.{name}"
    assert int(given["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    gpus = pods["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(given["nproc_per_node"]) == gpus
    environment = {one["name"]: one["value"] for one in pods["containers"][0]["env"]}
    assert int(environment[dist.TIMEOUT]) < pods["terminationGracePeriodSeconds"]
    assert cli.parse(TrainConfig, words[words.index("train.py") + 1 :]).context_length == 1048576

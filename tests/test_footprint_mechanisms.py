"""What scripts do that no fake tensor bears by itself: each mechanism by a script of its own."""

import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from footprint import measure
from footprint.__main__ import main

HEAD = """
import torch
from torch import nn
"""
TRAINED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MODEL = HEAD + "model = nn.Linear(64, 32)\nx = torch.randn(8, 64)\n"
ON_GPU = HEAD + "model = nn.Linear(64, 32).cuda()\nx = torch.randn(8, 64).cuda()\n"
CPU = ("--gpu", "cpu")


@pytest.fixture
def results(tmp_path, capsys):
    """What is found of a script of this text."""

    def found(text: str, *flags: str) -> dict:
        script = tmp_path / "train.py"
        script.write_text(text)
        results = tmp_path / "found.json"
        code = main(["--json", str(results), *flags, str(script)])
        assert code == 0, capsys.readouterr().err
        return json.loads(results.read_text())

    return found


def assumed(found: dict) -> str:
    return "; ".join(found["assumed"])


# ---- the machine


def test_torchrun_is_there_with_nproc_and_not_without(results):
    launched = """
import os
import torch.distributed as dist
assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0"
assert os.environ["WORLD_SIZE"] == "16" and os.environ["LOCAL_WORLD_SIZE"] == "8"
assert not dist.is_initialized()
dist.init_process_group("nccl")
assert dist.get_world_size() == 16
assert torch.cuda.device_count() == 8
"""
    sharded = """
from torch.distributed.fsdp import fully_shard
model = fully_shard(nn.Linear(1024, 1024, device="cuda"))
x = torch.randn(8, 1024, device="cuda")
"""
    found = results(HEAD + launched + sharded + TRAINED, "--nproc", "16")
    assert found["ranks"] == 16
    assert found["categories"]["parameter"] == 4 * (1024 * 1024 + 1024) // 16
    results("import os\nassert 'RANK' not in os.environ\n" + MODEL + TRAINED)


def test_objects_of_other_ranks_are_those_of_this_one(results):
    exchanged = """
import torch.distributed as dist
dist.init_process_group("nccl")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, {"rank": dist.get_rank()})
assert found == [{"rank": 0}] * 4
kept = ["mine"]
dist.broadcast_object_list(kept)
assert kept == ["mine"]
dist.barrier()
"""
    results(ON_GPU + exchanged + TRAINED, "--nproc", "4")


def test_states_of_random_numbers_are_sent_between_ranks(results):
    sent = """
torch.distributed.init_process_group("nccl")
generator = torch.Generator()
state = generator.get_state().to("cuda")
torch.distributed.broadcast(state, 0)
generator.set_state(state.cpu())
torch.set_rng_state(state.cpu())
"""
    results(ON_GPU + sent + TRAINED, "--nproc", "2")


def test_fsdp_of_the_first_kind_shards_and_is_named(results):
    sharded = """
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("nccl")
model = FullyShardedDataParallel(nn.Linear(1024, 1024), device_id=torch.cuda.current_device())
x = torch.randn(8, 1024, device="cuda")
"""
    found = results(HEAD + sharded + TRAINED, "--nproc", "4")
    assert found["categories"]["parameter"] == 4 * (1024 * 1024 + 1024) // 4
    assert "FullyShardedDataParallel" in assumed(found)


def test_spawned_processes_are_represented_by_the_first(results):
    text = (
        HEAD
        + """
import torch.multiprocessing as mp
def work(rank, ranks):
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 32).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(8, 64, device=rank)).mean().backward()
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""
    )
    assert "train.py:14" in assumed(results(text, "--nproc", "2"))


def test_a_build_for_cuda_is_there_and_numbers_are_gpus(results):
    asked = """
assert torch.device(0) == torch.device("cuda", 0)
assert torch.version.cuda and torch.cuda.nccl.version() >= (2,)
assert model.weight.to(torch.device(0)).is_cuda
torch.cuda.memory._record_memory_history()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
    profiler.step()
"""
    results(ON_GPU + asked + TRAINED)


def test_a_pool_of_threads_sees_fake_tensors(results):
    pool = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    (large,) = pool.map(lambda size: torch.zeros(size), [2**40])
del large
"""
    found = results(MODEL + pool + TRAINED, *CPU)
    assert found["phases"]["building and loading"] > 2**42


def test_what_is_compiled_runs_and_the_report_says_so(results):
    compiled = """
model = torch.compile(model)
@torch.compile(dynamic=True)
def scaled(x):
    return 2 * x
x = scaled(x)
"""
    plain, found = results(MODEL + TRAINED, *CPU), results(MODEL + compiled + TRAINED, *CPU)
    assert found["peak_live_bytes"] >= plain["peak_live_bytes"]
    assert "train.py:11" in assumed(found) and "train.py:15" in assumed(found)


def test_the_launch_of_a_triton_kernel_allocates_nothing(results):
    pytest.importorskip("triton", reason="triton is not installed")
    kernel = """
import triton
import triton.language as tl
@triton.autotune(configs=[triton.Config({"B": 64})], key=["n"])
@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
count = torch.ones(1, device="cuda")
double[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, x.numel())
"""
    plain, found = results(ON_GPU + TRAINED), results(ON_GPU + kernel + TRAINED)
    assert 0 <= found["peak_live_bytes"] - plain["peak_live_bytes"] <= 512


def test_flex_attention_keeps_no_scores(results):
    text = (
        HEAD
        + """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
flex_attention = torch.compile(flex_attention)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
    def forward(self, x):
        q, k, v = self.qkv(x).view(1, 4096, 3, 2, 32).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v)
model = Attention().cuda()
x = torch.randn(1, 4096, 64, device="cuda")
"""
    )
    found = results(text + TRAINED)
    assert "FlexAttention" in assumed(found)
    assert found["categories"]["activation"] < 2 * 4096 * 4096


# ---- weights


@pytest.fixture
def weights(tmp_path):
    model = nn.Linear(64, 32)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    raw = struct.pack("2048f", *model.weight.detach().flatten().tolist())
    (tmp_path / "weights.bin").write_bytes(raw)
    return tmp_path


@pytest.mark.parametrize(
    "load",
    [
        "model.load_state_dict(torch.load(folder + '/weights.pt'))",
        "model.load_state_dict(torch.load(folder + '/weights.pt', mmap=True), assign=True)",
        "storage = torch.UntypedStorage.from_file(folder + '/weights.bin', False, 8192)\n"
        "tensor = torch.tensor([]).set_(storage, 0, (32, 64), (64, 1))\n"
        "model.weight = nn.Parameter(tensor)\ndel storage, tensor",
        "kind = type(model.weight)\nkept = model.weight.detach().clone()\n"
        "model.weight = kind(kept, requires_grad=True)\ndel kept",
    ],
)
def test_loaded_weights_take_what_the_model_does(results, weights, load):
    text = MODEL + f"folder = {str(weights)!r}\n{load}\n"
    plain, found = results(MODEL + TRAINED, *CPU), results(text + TRAINED, *CPU)
    assert found["peak_live_bytes"] == plain["peak_live_bytes"]


def saved_from_a_gpu(path: Path, folder: Path) -> Path:
    """A copy of what torch.save has written, as if its tensors had been on a GPU."""
    copy = folder / "gpu.pt"
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(copy, "w") as made:
        for name in given.namelist():
            content = given.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
            made.writestr(name, content)
    return copy


@pytest.mark.parametrize("where", ["", ", map_location='cuda:0'", ", map_location='cpu'"])
def test_a_run_goes_on_from_a_checkpoint_of_a_gpu(results, tmp_path, where):
    model = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "cpu.pt")
    path = saved_from_a_gpu(tmp_path / "cpu.pt", tmp_path)
    resumed = f"""
state = torch.load({str(path)!r}{where})
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
del state
"""
    adam = TRAINED.replace("SGD(model.parameters(), lr=0.1)\n", "AdamW(model.parameters())\n")
    resumes = adam.replace("for step", f"{resumed}for step")
    plain, found = results(ON_GPU + adam), results(ON_GPU + resumes)
    steps = 0 if "'cpu'" in where else 8  # counters of the optimizer stay where they are loaded
    assert found["peak_live_bytes"] == plain["peak_live_bytes"] + steps


def test_what_is_on_meta_has_no_memory_and_known_values(results):
    reference = """
with torch.device("meta"):
    reference = nn.Linear(2**20, 2**20)
    length = torch.tensor([3, 4]).sum().item()
    positions = torch.arange(8, device="cpu")
assert positions[-1].item() == 7
"""
    found = results(MODEL + reference + TRAINED, *CPU)
    plain = results(MODEL + TRAINED, *CPU)
    assert 0 <= found["peak_live_bytes"] - plain["peak_live_bytes"] <= 64


# ---- data


DATA = """
class Data(torch.utils.data.Dataset):
    def __init__(self):
        bytes = bytearray(range(256)) * 64
        self.rows = torch.frombuffer(bytes, dtype=torch.uint8).view(64, 256).t()
        self.labels = self.rows[:, 0].long()
        if (self.labels == 3).any():
            self.copies = self.rows.clone()
    def __len__(self):
        return 256
    def __getitem__(self, index):
        return self.rows[index].float(), self.labels[index]
"""


def test_a_data_set_is_made_for_real_and_counts_what_pytorch_allocates(results):
    text = (
        MODEL
        + DATA
        + """
loader = torch.utils.data.DataLoader(Data(), batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y % 32)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    names: dict = {}
    exec(MODEL + DATA, names)  # the same for real

    def build():
        model, data = nn.Linear(64, 32), names["Data"]()
        loader = iter(torch.utils.data.DataLoader(data, batch_size=8))
        return {"model": model, "sgd": torch.optim.SGD(model.parameters()), "loader": loader}

    def step(state):
        state["x"], state["y"] = next(state["loader"])
        loss = nn.functional.cross_entropy(state["model"](state["x"]), state["y"] % 32)
        state["loss"] = loss
        loss.backward()
        state["sgd"].step()
        state["sgd"].zero_grad()

    unused_x = 8 * 64 * 4  # of MODEL, which the loop of the script replaces
    found = results(text, *CPU)["peak_live_bytes"]
    assert found == pytest.approx(measure(build, step), abs=unused_x)
    assert found > 256 * 64 + 256 * 8


def test_whole_numbers_and_masks_of_a_batch_are_known(results):
    text = (
        MODEL
        + DATA
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in torch.utils.data.DataLoader(Data(), batch_size=8):
    few = y % 4 == 0
    chosen = model(x)[few]
    assert chosen.shape == (2, 32)
    assert int(few.sum()) == 2
    chosen.mean().div(few.sum().item()).backward()
    optimizer.step()
"""
    )
    assert "batch" in assumed(results(text, *CPU))


def test_numpy_reads_ones(results):
    text = MODEL + TRAINED + "    assert loss.detach().cpu().numpy() == 1\n"
    assert "train.py:13" in assumed(results(text, *CPU))


# ---- values


def test_decisions_by_unknown_numbers_are_those_of_ones_and_named(results):
    decides = """
    if loss < 3 and not loss > 1:
        best = loss.item()
    if (model.weight > 5).any() or not (model.weight < 5).all():
        raise ValueError
    assert model.bias.tolist() == [1.0] * 32
"""
    found = assumed(results(MODEL + TRAINED + decides, *CPU))
    assert all(f"train.py:{line}" in found for line in (14, 16, 18))


def test_numbers_may_be_written_into_tensors(results):
    writes = """
    losses[step] = loss.item()
    counts += int(2) * counted.sum().item()
"""
    made = "losses = torch.zeros(100)\ncounts = torch.zeros(3, dtype=torch.long)\n"
    made += "counted = torch.multinomial(torch.rand(64), 8)\n"
    results(MODEL + made + TRAINED + writes, *CPU)


def test_distributions_take_their_own_samples(results):
    samples = """
    chances = torch.distributions.Categorical(torch.softmax(model(x)[:1, :2], 1))
    action = chances.sample()
    loss = -chances.log_prob(action).sum() * [3.0, 2.0][action.item() > 5]
"""
    results(MODEL + TRAINED.replace("\n    loss = model(x).mean()\n", samples), *CPU)


def test_a_seed_is_drawn(results):
    seeds = """
seed = int(torch.empty((), dtype=torch.int64).random_().item())
generator = torch.Generator().manual_seed(seed)
assert torch.empty(3, dtype=torch.long).random_(4, 5).tolist() == [4, 4, 4]
"""
    assert "train.py:7" in assumed(results(MODEL + seeds + TRAINED, *CPU))


def test_a_script_that_goes_on_without_what_is_refused_is_told_so(results):
    caught = """
try:
    torch.randn(x.argmax(1)[0])
except Exception:
    pass
"""
    assert "train.py:8" in assumed(results(MODEL + caught + TRAINED, *CPU))


def test_a_size_is_not_guessed(results, tmp_path, capsys):
    text = MODEL + "y = torch.randn(x.argmax(1)[0])\n" + TRAINED
    (tmp_path / "train.py").write_text(text)
    assert main([*CPU, str(tmp_path / "train.py")]) == 4
    assert "train.py:6" in capsys.readouterr().err
    results(text, *CPU, "--answer", "train.py:6=16")

"""Attention over chosen blocks: one suite for all selectors, those with weights (NSA, the indexer)
included, by the engine, the plain version and the Triton kernels. Selectors without weights are
compared with their equations in float64 here, the others in test_nsa.py and test_indexed.py.
"""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

import train
from footprint.kernels.measure import peak_bytes
from longhaul import kernels, qwen3, step
from longhaul.config import TrainConfig
from longhaul.dist import World
from longhaul.flops import keys_read
from longhaul.generate import generate
from longhaul.kinds import KINDS, recorded
from longhaul.planner import plan as planner
from longhaul.planner.reconcile import allocator_peak
from longhaul.planner.simulate import simulate
from longhaul.planner.workspace import Workspaces
from longhaul.sparse import choose
from longhaul.sparse.choose import choose_blocks, choose_operator
from longhaul.sparse.indexer import Indexed, own_losses
from longhaul.sparse.selectors import Bounds, Exact, Mean, Pooled
from model import Decoder, ModelConfig, NSAConfig, Standard
from scripts import convert_qwen3
from tests import indexed_oracle, kit
from tests.ranks import run_ranks
from tests.test_block_sparse import oracle as block_oracle
from tests.tiers import slow

ROOT = Path(__file__).parent.parent
SMALL_KERNELS = dict(dense_below=0, kernel=8, stride=4)
SELECTORS = {
    "exact": Exact(count=5, block=16),
    "bounds": Bounds(count=5, block=16, page=4),
    "pooled": Pooled(count=5, block=16, local=2, **SMALL_KERNELS),
    "logsumexp": Pooled(count=5, block=16, local=2, reduce="logsumexp", **SMALL_KERNELS),
    "mean": Mean(count=5, block=16),
    "dense at first": Exact(count=5, block=16, dense_below=120),
}
SHAPE = dict(
    vocab_size=97,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
)
SHARED_HEADS = dict(num_heads=8, num_kv_heads=4)  # by up to four ranks
LENGTHS = [130, 1, 69, 12, 188]  # of the documents of two rows of 200
every_selector = pytest.mark.parametrize("sizes", SELECTORS.values(), ids=SELECTORS)
INDEXED = Indexed(count=5, block=16, head_dim=24)
TAUGHT = SELECTORS | {"indexed": INDEXED}
every_choice = pytest.mark.parametrize("sizes", TAUGHT.values(), ids=TAUGHT)
SPARSE = dict(cmp_block=8, cmp_stride=4, sel_block=16, sel_count=5, window=24)
NSA = NSAConfig(**SPARSE)
SEPARATE = NSAConfig(**SPARSE, kv="separate", cmp_kind="mean")
CASES = {name: (sizes, kernels.decoder) for name, sizes in TAUGHT.items()} | {
    "nsa": (NSA, kernels.decoder),
    "nsa, separate, mean": (SEPARATE, kernels.decoder),
    "plain nsa": (NSA, Decoder),
    "plain nsa, separate, mean": (SEPARATE, Decoder),
}
every_kind = pytest.mark.parametrize("sizes, make", CASES.values(), ids=CASES)
DECODED = {name: sizes for name, (sizes, make) in CASES.items() if make is kernels.decoder}
AT_ONCE = ("mean", "nsa", "nsa, separate, mean")  # the others are slow
WITH_WEIGHTS = {name: case for name, case in CASES.items() if name not in SELECTORS}


def build(attention, seed: int = 1, make=kernels.decoder, **settings) -> Decoder:
    """A small decoder, in which the gates and the compression of NSA have left their initial
    values.
    """
    config = ModelConfig.preset("tiny", attention=attention, **SHAPE | settings)
    decoder, generator = make(config, seed=seed), torch.Generator().manual_seed(1)
    for name, parameter in decoder.named_parameters():
        if ".sparse." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return decoder


def tokens(rows: int = 2, length: int = 200) -> torch.Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(0))


def drawn(T: int, S: int, heads=(4, 2), K: int = 16, whole: bool = False, seed: int = 0) -> list:
    """q, k and v of the last T of S positions of two rows; of small whole numbers, which often tie,
    if `whole`.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, T, heads[0], K), *[(2, S, heads[1], K)] * 2]
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.round() for x in found] if whole else found


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


# ---- the equations, densely and in float64


def true_scores(sizes, q_TMK: torch.Tensor, k_SK: torch.Tensor, t: int) -> torch.Tensor:
    """Scores [N] of the blocks before that of the query at position t, under one KV head."""
    q_MK = q_TMK[t - len(k_SK)].double()
    k_SK = k_SK.double()
    N = t // sizes.block
    blocks_NlK = k_SK[: N * sizes.block].unflatten(0, (N, sizes.block))
    if isinstance(sizes, Exact):
        return torch.einsum("mk,nlk->nml", q_MK, blocks_NlK).amax((1, 2))
    if isinstance(sizes, Bounds):
        pages_NPpK = blocks_NlK.unflatten(1, (-1, sizes.page))
        bounds = [
            q_MK * end_NPK[:, :, None] for end_NPK in (pages_NPpK.amin(2), pages_NPpK.amax(2))
        ]
        return torch.maximum(*bounds).sum(-1).amax((1, 2))
    if isinstance(sizes, Mean):
        return torch.einsum("mk,nk->n", q_MK, blocks_NlK.mean(1))

    starts = range(0, t + 2 - sizes.kernel, sizes.stride)
    means_JK = torch.stack([k_SK[j : j + sizes.kernel].mean(0) for j in starts])
    p_J = (q_MK @ means_JK.T / q_MK.shape[-1] ** 0.5).softmax(-1).sum(0)
    found = []
    for b in range(N):
        first, end = b * sizes.block, (b + 1) * sizes.block
        p_touching = [
            p for p, j in zip(p_J, starts, strict=True) if j < end and j + sizes.kernel > first
        ]
        p_touching = torch.stack(p_touching)
        found.append(p_touching.amax() if sizes.reduce == "max" else p_touching.sum())
    return torch.stack(found)


def assert_chosen(sizes, q: torch.Tensor, k: torch.Tensor, chosen: torch.Tensor, ties: float):
    """The forced blocks and the best others. `ties`: how near in score two blocks may be that
    change places; 0: never, and of equal ones the lower index is read.
    """
    T, S = q.shape[1], k.shape[1]
    scores = torch.full((*chosen.shape[:3], -(-S // sizes.block)), -torch.inf).double()
    for b, t, g in torch.cartesian_prod(*map(torch.arange, chosen.shape[:3])).tolist():
        if S - T + t < sizes.count * sizes.block:  # it reads every block
            continue
        q_TMK = q[b].unflatten(1, (k.shape[2], -1))[:, g]
        found = true_scores(sizes, q_TMK, k[b, :, g], S - T + t)
        scores[b, t, g, : len(found)] = found
    best = indexed_oracle.choose(scores, sizes, S - T)
    no_others = dataclasses.replace(sizes, count=sizes.init + sizes.local)
    forced = indexed_oracle.choose(scores, no_others, S - T)
    read = torch.zeros_like(best).int()
    read.scatter_add_(-1, chosen.long().clamp(min=0), (chosen >= 0).int())
    assert read.max() == 1 and torch.equal(read.sum(-1), best.sum(-1).int())

    wrong = best ^ (read == 1)
    assert not (wrong & forced).any() and (ties or not wrong.any())
    largest = scores.masked_fill(~wrong, -torch.inf).amax(-1)
    least = scores.masked_fill(~wrong, torch.inf).amin(-1)
    assert (largest - least <= ties * scores[scores.isfinite()].abs().max()).all()


@every_selector
def test_the_choice_is_that_of_the_equations(sizes):
    for T, S in ((200, 200), (7, 165)):
        q, k, _ = drawn(T, S)
        assert_chosen(sizes, q, k, choose_blocks(sizes, q, k), ties=1e-5)


@pytest.mark.parametrize("name", ["exact", "bounds", "mean"])
def test_of_equal_scores_the_lower_index_is_read_whatever_the_chunks(name, monkeypatch):
    """Whole numbers are summed without rounding, so scores that should be equal are."""
    sizes = SELECTORS[name]
    q, k, _ = drawn(150, 150, whole=True)
    chosen = choose_blocks(sizes, q, k)
    assert_chosen(sizes, q, k, chosen, ties=0)
    assert torch.equal(choose_blocks(sizes, q.bfloat16(), k.bfloat16()), chosen)
    for room in (1, 2**12, 2**15):
        monkeypatch.setattr(choose, "CPU_PRODUCTS", room)
        assert torch.equal(choose_blocks(sizes, q, k).sort().values, chosen.sort().values)


@pytest.mark.parametrize("name", ["exact", "bounds", "mean"])
def test_blocks_that_are_not_numbers_are_read_first_and_the_own_one_always(name):
    sizes = SELECTORS[name]
    q, k, _ = drawn(1, 200)
    k[:, 50] = torch.nan
    read = choose_blocks(sizes, q, k)
    assert (read == 12).any(-1).all() and (read == 3).any(-1).all()


# ---- the layer


def masked_attention(sizes, q, k, v) -> torch.Tensor:
    """Over the chosen blocks, or all of them before `dense_tokens`, in the dtype of q."""
    T = k.shape[1]
    chosen_BTGn = choose_blocks(sizes, q.float(), k.float())
    blocks = torch.arange(T // sizes.block + 1)
    own_T1 = torch.arange(T)[:, None] // sizes.block
    every_TN = torch.where(blocks <= own_T1, blocks, -1)
    padding = (0, len(blocks) - sizes.count)
    chosen_BTGN = torch.nn.functional.pad(chosen_BTGn, padding, value=-1)
    is_dense_T = torch.arange(T) < sizes.dense_tokens
    read_BTGN = torch.where(is_dense_T[:, None, None], every_TN[:, None], chosen_BTGN)
    return block_oracle(q, k, v, read_BTGN, sizes.block)[0]


@every_selector
def test_the_layer_is_dense_attention_under_the_mask_of_the_choice_with_its_gradients(sizes):
    layer = build(sizes).layers[0].attention
    inputs = [x.requires_grad_() for x in drawn(200, 200)]
    truth_inputs = [x.detach().double().requires_grad_() for x in inputs]
    o, truth = layer.attend_document(*inputs), masked_attention(sizes, *truth_inputs)
    assert relative(o, truth) <= 1e-5

    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((o * weight).sum(), inputs)
    wanted = torch.autograd.grad((truth * weight.double()).sum(), truth_inputs)
    for grad, want in zip(grads, wanted, strict=True):
        assert relative(grad, want) <= 1e-5


@every_choice
def test_a_budget_of_the_row_is_standard_attention_and_a_smaller_one_is_not(sizes):
    x = tokens()
    standard = build(Standard())(x)
    whole = build(dataclasses.replace(sizes, count=13))(x)
    assert (whole - standard).abs().max() <= 1e-5 * standard.abs().max()
    late = build(dataclasses.replace(sizes, dense_below=200))(x)
    assert (late - standard).abs().max() <= 1e-5 * standard.abs().max()
    assert relative(build(sizes)(x), standard.double()) > 1e-3


@pytest.mark.parametrize("sizes, make", WITH_WEIGHTS.values(), ids=WITH_WEIGHTS)
def test_packed_documents_have_the_logits_and_gradients_of_separate_ones(sizes, make):
    decoder, x = build(sizes, make=make), tokens()
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)).view(2, 200)
    documents = x.view(1, 400).split(LENGTHS, dim=1)

    def results(parts: list[dict]) -> list[torch.Tensor]:
        with own_losses(decoder, warming=False) as own:
            logits = torch.cat([decoder(**part).flatten(0, 1) for part in parts])
            weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
            mean = 1 / (len(decoder.layers) * len(parts))  # of the layers' terms
            total = own.added_to((logits * weight).sum(), mean)
            return [logits, *torch.autograd.grad(total, list(decoder.parameters()))]

    packed = results([dict(tokens_BT=x, doc_ids=ids)])
    separate = results([dict(tokens_BT=part) for part in documents])
    assert (packed[0] - separate[0]).abs().max() <= 1e-5 * separate[0].abs().max()
    for got, want in zip(packed, separate, strict=True):
        assert want.abs().max() > 0
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@torch.no_grad()
def assert_decoding_is_the_forward(decoder: Decoder, orders: list[list[int]]):
    """Over a cache that takes the row in these parts."""
    x = tokens()
    full = decoder(x)
    for parts in orders:
        cache = decoder.new_cache(2, 210)
        decoded = [decoder(part, cache=cache) for part in x.split(parts, dim=1)]
        assert cache.length == 200
        assert (torch.cat(decoded, 1) - full).abs().max() <= 1e-5 * full.abs().max(), parts


@every_kind
def test_decoding_equals_the_forward_however_the_prompt_is_cut(sizes, make):
    orders = [[*[1] * 140, 60], [100, 50, *[1] * 20, 30], [7, 1, 192]]
    assert_decoding_is_the_forward(build(sizes, make=make), orders)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("name", [*AT_ONCE, *map(slow, sorted(DECODED.keys() - set(AT_ONCE)))])
@torch.no_grad()
def test_the_triton_kernels_decode_as_the_operators_of_torch(name):
    pytest.importorskip("triton", reason="triton is not installed")
    decoder = build(DECODED[name], num_layers=1)
    fused = build(DECODED[name], num_layers=1, kernels="triton")
    plain_cache, fused_cache = decoder.new_cache(2, 200), fused.new_cache(2, 200)
    for part in tokens()[:, :173].split([171, 1, 1], dim=1):
        want = decoder(part, cache=plain_cache)
        assert (decoder(part, cache=fused_cache) - want).abs().max() <= 1e-5 * want.abs().max()


def shared_losses(world, x: torch.Tensor) -> list[list[torch.Tensor]]:
    return [shared_loss(world, sizes, x) for sizes in SELECTORS.values()]


def shared_loss(world, sizes, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss of rows that the ranks share and a gradient, both summed over the ranks."""
    config = ModelConfig.preset("tiny", attention=sizes, **SHAPE | SHARED_HEADS)
    run = dict(model_size="tiny", attention_type=sizes.name, dtype="fp32")
    heads = tuple(f"{name}={count}" for name, count in SHARED_HEADS.items())
    cfg = TrainConfig(**run, context_parallel_size=world.size, model_overrides=heads)
    state = step.build(cfg, config, "cpu", world)
    shares = loss_and_gradient(state.model, x)
    for share in shares:
        torch.distributed.all_reduce(share)
    return shares


def loss_and_gradient(model: Decoder, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x[:, :-1], x[:, 1:], doc_ids=(torch.arange(200) >= 90).expand(2, -1))
    loss.backward()
    return [loss.detach(), model.layers[0].attention.k_proj.weight.grad]


def assert_shares_are_those_of_one_process(sizes, x: torch.Tensor, shares: list):
    loss, want = loss_and_gradient(build(sizes, seed=0, **SHARED_HEADS), x)
    for shared, grad in shares:
        assert shared == pytest.approx(loss.item(), rel=2e-6), sizes
        assert relative(grad, want.double()) <= 2e-5, sizes


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ranks_that_share_rows_give_the_loss_and_gradient_of_one(ranks):
    x = tokens(2, 201)
    of_ranks = run_ranks(shared_losses, ranks, x)
    for sizes, *shares in zip(SELECTORS.values(), *of_ranks, strict=True):
        assert_shares_are_those_of_one_process(sizes, x, shares)


# ---- what the trainer asks


def planned_run(kind: str, **changes) -> TrainConfig:
    small = ("count=8", "dense_below=0", "local=2")  # choose from 512 tokens on
    sizes = dict(model_size="tiny", vocab_size=97, context_length=1024, dtype="fp32")
    return TrainConfig(**sizes | changes, attention_type=kind, blocks=small)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, checkpointing, dtype",
    [
        ("exact", "full", "bf16"),
        ("pooled", "selective", "fp32"),
    ],
)
def test_the_simulated_and_the_planned_peak_are_what_the_allocator_records(
    kind, checkpointing, dtype
):
    cfg = planned_run(kind, gradient_checkpointing=checkpointing, dtype=dtype)
    recorded_peak = allocator_peak(cfg)
    assert simulate(cfg, target="cpu").peak()[0] == pytest.approx(recorded_peak, rel=1e-3)
    plan = planner.plan(cfg, cfg.model(), World(), torch.device("cpu"), 64.0)
    assert plan.peak == pytest.approx(recorded_peak, rel=1e-2)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("exact", torch.float32),
        ("exact", torch.bfloat16),
        slow("bounds", torch.float32),
        slow("pooled", torch.bfloat16),
        slow("logsumexp", torch.float32),
    ],
)
def test_inside_it_takes_what_the_planner_says(name, dtype):
    """The operator alone, of which the planner visits the last chunks; mean holds too little."""
    sizes = dataclasses.replace(SELECTORS[name], block=64)
    q, k, _ = (x[:1].to(dtype) for x in drawn(2000, 2000, K=64))
    args = q, k, None, sizes.name, sizes.text, dtype
    planned = Workspaces("cpu")._inside(choose_operator._qualname, args)
    planned += choose_operator(*args).nbytes
    call = functools.partial(choose_operator, *args)
    assert planned == pytest.approx(peak_bytes(call, torch.device("cpu")), rel=0.01)


def test_flops_count_the_keys_read_and_the_scores():
    def found(sizes) -> list[float]:
        return keys_read(ModelConfig.preset("tiny", attention=sizes), torch.arange(200)).tolist()

    read = [t + 1 if t < 80 else 4 * 16 + t % 16 + 1 for t in range(200)]
    scored = {
        "exact": lambda t: (t + 1) / 6,
        "bounds": lambda t: 2 * ((t + 1) // 4) / 6,
        "pooled": lambda t: (t + 1) // 4 / 6,
        "mean": lambda t: (t + 1) // 16 / 6,
    }
    for name, cost in scored.items():
        wanted = [keys + (cost(t) if t >= 80 else 0) for t, keys in enumerate(read)]
        assert found(SELECTORS[name]) == pytest.approx(wanted)


def test_the_settings_are_recorded_under_the_name_of_their_flag():
    for sizes in SELECTORS.values():
        found = recorded(ModelConfig.preset("tiny", attention=sizes))
        assert found["attention_type"] == sizes.name
        assert found["blocks"] == dataclasses.asdict(sizes)


def last_key() -> type:
    """The settings of the example of docs/ARCHITECTURE.md, which adds its row to the table."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    code = text.split("## Adding a selector")[1].split("```python\n")[1].split("```")[0]
    names: dict = {"__name__": "last_key"}
    exec(compile(code, "docs/ARCHITECTURE.md", "exec"), names)
    return names["LastKey"]


def test_the_example_of_the_document_chooses_decodes_and_is_a_value_of_the_flag():
    before = dict(KINDS)
    try:
        sizes = last_key()(count=5, block=16)
        given = dict(model_size="tiny", attention_type="last_key", blocks=("count=5", "block=16"))
        assert TrainConfig(**given).model().attention == sizes
        q, k, _ = drawn(1, 200)
        logits_BGMN = torch.einsum("bgmk,bngk->bgmn", q[:, 0].unflatten(1, (2, 2)), k[:, 31:176:16])
        wanted = logits_BGMN.amax(2).topk(2).indices + 1
        found = choose_blocks(sizes, q, k)[:, 0].sort().values[..., 1:3]
        assert torch.equal(found, wanted.sort().values.int())
        assert_decoding_is_the_forward(build(sizes), [[150] + [1] * 50])
    finally:
        KINDS.clear()
        KINDS.update(before)


# ---- a Qwen3 folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "pooled"])
def test_a_qwen3_folder_generates_evaluates_trains_and_is_exported(name, tmp_path, capsys):
    sizes = SELECTORS[name]
    data = kit.dataset(tmp_path / "data")
    folder = tmp_path / "qwen3"
    config = ModelConfig.preset("tiny", **SHAPE | dict(vocab_size=512))
    qwen3.to_hf(kernels.decoder(config, seed=1), folder)

    changed = dataclasses.asdict(sizes).items() - dataclasses.asdict(type(sizes)()).items()
    blocks = [f"{key}={value}" for key, value in changed]
    flags = ["--init_from", str(folder), "--attention_type", sizes.name, "--blocks", *blocks]
    more = (
        "--max_steps 1 --lr 0 --context_length 256 --eval_every 1 --dtype fp32 --device cpu "
        "--warmup_steps 0 --eval_rows 1 --batch_size 1"
    )
    flags += more.split()
    train.main([*flags, "--data", str(data), "--output_dir", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert f"attention: {sizes.name} attention reads 5 blocks of 16" in said and "eval" in said

    loaded = KINDS[sizes.name].config(**dataclasses.asdict(sizes))
    model = kernels.decoder(dataclasses.replace(config, attention=loaded), seed=1)
    assert len(list(generate(model, tokens(1, 120)[0].tolist(), 3, temperature=0))) == 3

    convert_qwen3.main(
        ["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "back")]
        + ["--tokenizer", "none"]
    )
    assert "full attention" in capsys.readouterr().out
    assert qwen3.from_hf(tmp_path / "back").config.attention == Standard()


@pytest.mark.parametrize("sizes", [NSA, INDEXED], ids=["nsa", "indexed"])
def test_weights_of_standard_attention_start_a_model_whose_own_ones_start_fresh(sizes, tmp_path):
    dense = build(Standard())
    qwen3.to_hf(dense, tmp_path / "qwen3")
    found = qwen3.from_hf(tmp_path / "qwen3", attention=sizes)
    theirs, added = dict(dense.named_parameters()), 0
    for name, parameter in found.named_parameters():
        if name in theirs:
            assert torch.equal(parameter, theirs[name]), name
        else:
            added += parameter.numel()
            assert parameter.isfinite().all()
    assert added == found.config.num_params() - dense.config.num_params() > 0
    if sizes is INDEXED:
        x = tokens(1, 80)  # a row of `count` blocks
        assert (found(x) - dense(x)).abs().max() <= 1e-5 * dense(x).abs().max()

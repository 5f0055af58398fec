"""Responses that share a prompt: the row [prompt | r1 | ... | rG] computes what the rows
[prompt | r1] ... [prompt | rG] compute, forward and backward, under every lever, and decoding reads
the prompt's keys where they are.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from footprint.kernels.measure import peak_bytes, saved_bytes
from lab.posttrain.prompts import (
    CacheBehindPrompts,
    SharedPrompts,
    shared_prompt_attention,
)
from longhaul import dist, kernels, step
from longhaul.clock import takes_clock
from longhaul.config import TrainConfig
from longhaul.generate import prefill
from longhaul.parallel.context import Shard
from longhaul.parallel.share_rows import RowSharing
from longhaul.planner.program import Program
from longhaul.planner.simulate import trace
from model import IGNORE, Decoder, KVCache, ModelConfig, NSAConfig
from tests import oracle
from tests.ranks import run_ranks

V = 61
CPU = torch.device("cpu")
ONE = dist.World()
# a prompt's tokens and those of its responses
GROUPS = [
    [(1, 1)],
    [(13, 1)],
    [(7, 5, 11)],
    [(1, 3, 1, 4)],
    [(33, 9, 2, 17, 5)],
    [(300, 1, 40, 7, 33, 2, 19, 64, 5)],
    [(5, 3, 2), (17, 1), (2, 9, 9, 9)],
]


def small(**overrides) -> ModelConfig:
    sizes = dict(vocab_size=V, num_layers=2, hidden_size=48, ffn_size=40, head_dim=6, init_std=0.3)
    return ModelConfig.preset("tiny", **sizes | overrides)


def draw_tokens(prompts: SharedPrompts, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (1, prompts.tokens), generator=torch.Generator().manual_seed(seed))


def behind(prompts: SharedPrompts, tokens_BT: torch.Tensor) -> dict:
    """The arguments of a forward over prompts and their responses."""
    return {"positions": prompts.positions(tokens_BT.shape), "rows": prompts}


def separate_rows(prompts: SharedPrompts, tokens_1N: torch.Tensor) -> list[tuple]:
    """(tokens of prompt and response, tokens of the prompt) of every response."""
    rows = []
    for prompt, *responses in prompts.spans():
        for response in responses:
            parts = [tokens_1N[0, prompt], tokens_1N[0, response]]
            rows.append((torch.cat(parts), len(parts[0])))
    return rows


def assert_near(found: torch.Tensor, expected: torch.Tensor):
    """fp32: to 1e-5 of the largest value; fp64: to 1e-12 of it."""
    bound = 1e-12 if expected.dtype == torch.float64 else 1e-5
    assert (found - expected).abs().max() <= bound * expected.abs().max()


# ---- attention itself


def visible(prompts: SharedPrompts) -> torch.Tensor:
    """Which keys [N, N] each query sees, written from the definition."""
    mask = torch.zeros(prompts.tokens, prompts.tokens, dtype=torch.bool)
    for prompt, *responses in prompts.spans():
        for span in (prompt, *responses):
            n = span.stop - span.start
            mask[span, span] = torch.ones(n, n, dtype=torch.bool).tril()
        for span in responses:
            mask[span, prompt] = True
    return mask


def dense(q, k, v, visible_NN):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible_NN, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", weights, v)


def with_gradients(attend, *tensors) -> list[torch.Tensor]:
    *inputs, grad = tensors
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, grad)]


def inputs(N: int, H: int, G: int, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k, v and a gradient of o."""
    generator = torch.Generator().manual_seed(N)
    heads = (H, G, G, H)
    return [torch.randn(1, N, n, 8, generator=generator).to(dtype) for n in heads]


HEADS = [(4, 4), (6, 2), (3, 1)]


@pytest.mark.parametrize("lengths, heads", list(zip(GROUPS, itertools.cycle(HEADS))), ids=str)
def test_attention_and_its_gradients_equal_those_under_a_mask(lengths, heads):
    prompts = SharedPrompts(lengths)
    tensors = inputs(prompts.tokens, *heads)
    found = with_gradients(lambda *x: shared_prompt_attention(*x, prompts), *tensors)
    mask = visible(prompts)
    truth = with_gradients(lambda *x: dense(*x, mask), *tensors)
    for ours, value in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-11, atol=1e-12)


def test_rows_of_bf16_are_as_exact_as_packed_ones():
    """The error of a part is a rounding to bf16; the sum of two parts has one more."""
    prompts = SharedPrompts([(100, 60, 60, 60)])
    tensors = inputs(prompts.tokens, 4, 2, torch.bfloat16)
    mask = visible(prompts)
    truth = with_gradients(lambda *x: dense(*x, mask), *(x.double() for x in tensors))
    found = with_gradients(lambda *x: shared_prompt_attention(*x, prompts), *tensors)
    masked = with_gradients(lambda *x: by_kernel(*x, mask), *tensors)
    for ours, kernel, value in zip(found, masked, truth, strict=True):
        assert (ours.double() - value).norm() < 1.5 * (kernel.double() - value).norm()


def by_kernel(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


# ---- the model


def head_of(prompts: SharedPrompts):
    """The mean loss of all tokens of responses, as a head of Decoder.forward."""
    scoring, own = prompts.scored()

    def head(hidden_ND, weight_VD, labels_N):
        logits = hidden_ND[scoring] @ weight_VD.T
        return F.cross_entropy(logits, labels_N[own])

    return head


def shared_loss(model, prompts: SharedPrompts, tokens_1N: torch.Tensor) -> torch.Tensor:
    """`labels` are the tokens themselves: the head looks up which position scores which."""
    return model(tokens_1N, tokens_1N, **behind(prompts, tokens_1N), head=head_of(prompts))


def oracle_loss(weights: dict, config: ModelConfig, prompts, tokens_1N) -> torch.Tensor:
    total = 0
    count = 0
    for tokens, start in separate_rows(prompts, tokens_1N):
        logits = oracle.decoder_logits(weights, config, tokens)[start - 1 : -1]
        total = total + F.cross_entropy(logits, tokens[start:], reduction="sum")
        count += len(tokens) - start
    return total / count


def doubles(model: Decoder) -> dict:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


OVERRIDES = [dict(num_kv_heads=8), dict(tie_embeddings=False), {}]


@pytest.mark.parametrize(
    "lengths, overrides", list(zip(GROUPS, itertools.cycle(OVERRIDES))), ids=str
)
def test_loss_and_every_gradient_equal_the_oracle_of_separate_rows(lengths, overrides):
    prompts = SharedPrompts(lengths)
    model = kernels.decoder(small(**overrides))
    tokens_1N = draw_tokens(prompts)
    loss = shared_loss(model, prompts, tokens_1N)
    loss.backward()

    weights = doubles(model)
    truth = oracle_loss(weights, model.config, prompts, tokens_1N)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
    gradients = {name: weight.grad.norm() for name, weight in weights.items()}
    for name, parameter in model.named_parameters():
        error = (parameter.grad - weights[name].grad).norm()
        assert error <= gradient_bound(name, gradients), name


def gradient_bound(name: str, norms: dict) -> float:
    """How far the gradient of a parameter may be from the oracle's: 1e-5 of its own norm.

    A query that sees one key gives it the weight 1 whatever both are, so the gradients of queries
    and keys are exactly 0. The kernel finds them as the difference of two equal sums, dO V and
    dO O, which some CPUs add in different orders. What is left is a rounding of those sums, which
    are as large as the gradient of the values: one unit of fp32 of it, a hundredth of what others
    may have.
    """
    if norms[name] > 0:
        return 1e-5 * norms[name]
    values = f"{name.partition('.attention.')[0]}.attention.v_proj.weight"
    return torch.finfo(torch.float32).eps * norms[values]


def test_groups_may_lie_in_several_rows_and_end_in_padding():
    """The padding of a row lengthens its last response, and changes nothing before it."""
    model = kernels.decoder(small())
    short = SharedPrompts([(5, 3, 4), (6, 2, 2)])
    tokens_1N = draw_tokens(short)
    first, second = tokens_1N.split([12, 10], dim=1)
    padded = torch.cat([first, F.pad(second, (0, 2))])
    with torch.no_grad():
        longer = SharedPrompts([(5, 3, 4), (6, 2, 4)])
        found = model.hidden(padded, **behind(longer, padded))
        expected = model.hidden(tokens_1N, **behind(short, tokens_1N))
    assert_near(found.flatten(0, 1)[:22], expected[0])


def test_which_position_scores_which_token():
    scoring, own = SharedPrompts([(3, 2, 1), (1, 2)]).scored()
    assert scoring.tolist() == [2, 3, 2, 6, 7]
    assert own.tolist() == [3, 4, 5, 7, 8]
    positions = SharedPrompts([(3, 2, 1), (1, 2)]).positions((1, 9))
    assert positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]


# ---- levers


class Responses(step.Objective):
    """The mean loss of the responses' tokens, as an objective of a training step."""

    def weight(self, micro) -> torch.Tensor:
        own = micro["rows"].scored()[1]
        return torch.tensor(len(own))

    def loss(self, model, micro, divisor) -> torch.Tensor:
        loss = shared_loss(model, micro["rows"], micro["tokens_BT"])
        return loss * self.weight(micro) / divisor

    def tokens(self, micro, ranks: int) -> int:
        return ranks * micro["tokens_BT"].numel()


def config(layers: int = 2, **changes) -> TrainConfig:
    sizes = f"num_layers={layers}", "hidden_size=48", "ffn_size=40", "head_dim=8"
    settings = dict(model_size="tiny", vocab_size=V, context_length=256, dtype="fp32", lr=1e-2)
    return TrainConfig(model_overrides=sizes, max_steps=3, **settings | changes)


MICRO_BATCHES = [[(19, 4, 9)], [(3, 7, 1, 2)], [(40, 6, 6)], [(2, 2), (11, 3, 3)]]


def micro_batches(rank: int = 0, ranks: int = 1) -> list[dict]:
    batch = []
    for seed, lengths in enumerate(MICRO_BATCHES):
        prompts = SharedPrompts(lengths)
        tokens_1N = draw_tokens(prompts, seed)
        batch.append(dict(tokens_BT=tokens_1N, **behind(prompts, tokens_1N)))
    return batch[rank::ranks]


def train(world: dist.World, changes: dict, first: int = 0) -> dict:
    """Losses of two steps, over the micro-batches from the first on, and the weights after them."""
    cfg = config(**changes)
    mesh = dist.data_mesh(world, CPU, cfg.dp_replicate)
    state = step.build(cfg, cfg.model(), "cpu", world, mesh)
    state.objective = Responses()
    batch = micro_batches(world.rank, world.size)[first:]
    losses = [float(step.train_step(state, batch).loss) for _ in range(2)]
    weights = {}
    for name, parameter in state.model.named_parameters():
        whole = parameter.full_tensor() if world.size > 1 else parameter
        weights[name] = whole.detach()
    return dict(losses=losses, weights=weights)


@pytest.fixture(scope="module")
def plain() -> dict:
    return train(ONE, {})


def assert_same(found: dict, truth: dict):
    assert found["losses"] == pytest.approx(truth["losses"], rel=2e-6)
    assert truth["losses"][1] < truth["losses"][0]
    for name, weight in truth["weights"].items():
        assert (found["weights"][name] - weight).norm() <= 2e-5 * weight.norm(), name


LEVERS = [
    dict(gradient_checkpointing="full"),
    dict(gradient_checkpointing="selective"),
    dict(gradient_checkpointing="full", offload_activations=True),
    dict(attention_head_groups=2, mlp_tiles=3, gradient_checkpointing="full"),
]


@pytest.mark.parametrize("changes", LEVERS, ids=str)
def test_levers_change_nothing(plain, changes):
    assert_same(train(ONE, changes), plain)


@pytest.mark.slow
def test_compiled_layers_leave_shared_prompts_eager(monkeypatch):
    # without code for the CPU, which takes a minute and is tested by test_parallel.py
    compiling = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiling)
    one = dict(layers=1)
    compiled = one | dict(compile=True, gradient_checkpointing="full")
    assert_same(train(ONE, compiled, first=2), train(ONE, one, first=2))


def train_each(world: dist.World) -> list[dict]:
    return [train(world, changes) for changes in ({}, LEVERS[0], LEVERS[1])]


def test_two_ranks_train_as_one_process(plain):
    for results in run_ranks(train_each, 2):
        for found in results:
            assert_same(found, plain)


# ---- memory


BEHIND = SharedPrompts([(512, *[64] * 8)])  # P:R = 8:1, G = 8


def forward_and_backward(model: Decoder, batch: torch.Tensor, labels: torch.Tensor, **options):
    model(batch, labels, **options).backward()
    model.zero_grad(set_to_none=True)


def test_a_shared_prompt_needs_a_third_of_the_activations_or_less():
    model = kernels.decoder(small(num_layers=4, hidden_size=64, ffn_size=128, head_dim=8))
    tokens_1N = draw_tokens(BEHIND)
    rows = torch.stack([tokens for tokens, _ in separate_rows(BEHIND, tokens_1N)])
    labels = rows.roll(-1, 1)
    labels[:, :511] = labels[:, -1] = IGNORE

    def shared():
        return shared_loss(model, BEHIND, tokens_1N)

    def separate():
        return model(rows, labels)

    assert saved_bytes(separate) > 3 * saved_bytes(shared)
    forward_and_backward(model, rows[:1], labels[:1])  # rotary tables are made once
    shared_peak = peak_bytes(lambda: shared().backward(), CPU)
    model.zero_grad(set_to_none=True)
    separate_peak = peak_bytes(lambda: separate().backward(), CPU)
    assert separate_peak > 3 * shared_peak


class OfResponses(Program):
    """A step whose rows are a prompt and its responses."""

    def begin(self, state, config, mesh):
        state.objective = Responses()

    def batch(self, state):
        return micro_batches()[-1:]


@pytest.mark.parametrize("dtype, kernel", [("bf16", "flash"), ("fp32", "efficient")])
def test_a_gpu_is_planned_with_its_own_kernel(dtype, kernel):
    found = trace(OfResponses(config(dtype=dtype), device="cuda"))
    operators = {storage.op for storage in found.storages.values()}
    for name in ("attention", "attention_backward"):
        assert f"aten._scaled_dot_product_{kernel}_{name}.default" in operators


# ---- decoding


def branched(model: Decoder, prompt_CP: torch.Tensor, rows: int, length: int) -> KVCache:
    """A cache of `rows` rows behind the prompts."""
    prompt = model.new_cache(*prompt_CP.shape)
    prefill(model, prompt_CP, prompt)
    return CacheBehindPrompts(prompt, rows, length)


@pytest.mark.parametrize(
    "prompts, rows, prompt, length, overrides, dtype",
    [
        (1, 1, 1, 3, {}, "float64"),
        (1, 3, 19, 5, dict(num_kv_heads=8), "float32"),
        (3, 6, 7, 4, {}, "float32"),
        (3, 6, 7, 4, dict(num_kv_heads=8), "float64"),
        (1, 8, 130, 9, {}, "float64"),
    ],
)
def test_rows_behind_a_prompt_have_the_logits_of_separate_rows(
    prompts, rows, prompt, length, overrides, dtype
):
    config = small(compute_dtype=dtype, **overrides)
    model = kernels.decoder(config).to(config.dtype)
    generator = torch.Generator().manual_seed(0)
    prompt_CP = torch.randint(V, (prompts, prompt), generator=generator)
    own_BT = torch.randint(V, (rows, length), generator=generator)
    with torch.no_grad():
        cache = branched(model, prompt_CP, rows, length)
        steps = [model(token_B1, cache=cache) for token_B1 in own_BT.split(1, dim=1)]
        prompt_BP = prompt_CP.repeat_interleave(rows // prompts, dim=0)
        expected = model(torch.cat([prompt_BP, own_BT], dim=1))[:, prompt:]
        assert_near(torch.cat(steps, dim=1), expected)
        assert cache.length == prompt + length


def test_decoding_takes_the_memory_of_the_own_tokens_only():
    """4,096 tokens of a prompt, of which eight copies would take 8 MiB for each layer."""
    model = kernels.decoder(small(head_dim=32, num_kv_heads=4))
    tokens_1P = torch.zeros(1, 4096, dtype=torch.int64)
    with torch.no_grad():
        prompt = model.new_cache(1, 4096)
        prefill(model, tokens_1P, prompt)
        of_prompt = prompt.layers[0].k_BSGK.nbytes

        def decode():
            cache = CacheBehindPrompts(prompt, 8, 2)
            for _ in range(2):
                model(torch.zeros(8, 1, dtype=torch.int64), cache=cache)
            return cache

        decode()
        assert peak_bytes(decode, CPU) < of_prompt / 4


# ---- what is refused


@pytest.mark.parametrize(
    "lengths, named",
    [([], "lengths"), ([(3, 2), (5,)], "prompt 1"), ([(0, 2)], "prompt 0"), ([(3, 2, 0)], "2, 0")],
    ids=str,
)
def test_empty_parts_are_refused(lengths, named):
    with pytest.raises(ValueError, match=named):
        SharedPrompts(lengths)


SPARSE = dict(attention=NSAConfig(8, 4, 8, 4, 1, 2, 11))


def test_inputs_that_do_not_fit_are_refused():
    model = kernels.decoder(small())
    prompts = SharedPrompts([(3, 2, 1)])
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="add up to 5"):
        model.hidden(tokens[:, :5], positions=tokens[:, :5], rows=prompts)
    given = behind(prompts, tokens)
    with pytest.raises(ValueError, match="cache and doc_ids"):
        model.hidden(tokens, doc_ids=tokens, **given)
    with pytest.raises(ValueError, match="cache and doc_ids"):
        model.hidden(tokens, cache=model.new_cache(1, 6), **given)
    with pytest.raises(ValueError, match="attention_type standard"):
        kernels.decoder(small(**SPARSE)).hidden(tokens, **given)


def test_caches_that_cannot_be_continued_are_refused():
    model = kernels.decoder(small())
    empty = model.new_cache(2, 6)
    with pytest.raises(ValueError, match="one token"):
        CacheBehindPrompts(empty, 4, 3)
    with pytest.raises(ValueError, match="multiple of 2"):
        CacheBehindPrompts(empty, 5, 3)
    sparse = kernels.decoder(small(**SPARSE))
    with pytest.raises(ValueError, match="attention_type standard"):
        CacheBehindPrompts(sparse.new_cache(1, 6), 4, 3)

    cache = branched(model, torch.zeros(1, 5, dtype=torch.int64), 2, 4)
    assert not takes_clock(cache, model.config)
    with pytest.raises(ValueError, match="one token"):
        model(torch.zeros(2, 3, dtype=torch.int64), cache=cache)


def test_ranks_that_share_rows_refuse_shared_prompts():
    model = kernels.decoder(small())
    RowSharing(Shard("ulysses", 0, 2)).wrap(model, compiled=False)
    prompts = SharedPrompts([(3, 2, 1)])
    with pytest.raises(ValueError, match="--context_parallel_size"):
        shared_loss(model, prompts, draw_tokens(prompts))

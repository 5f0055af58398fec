"""model.py against the oracle, and every promise it makes: documents, cache, rotary positions,
memory, initialisation, errors.
"""

import copy
import dataclasses
import math

import pytest
import torch

import model
from longhaul import kernels
from longhaul.flops import train_flops
from longhaul.vocab import loss as vocab_loss
from model import (
    GIB,
    IGNORE,
    Decoder,
    ModelConfig,
    NSAConfig,
    OnHost,
    RotaryCache,
    Standard,
    linear_cross_entropy,
)
from tests import oracle

SMALL = dict(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_size=40,
    rope_theta=1e4,
    loss_chunk_size=8,
    init_std=0.25,
)


def build(seed: int = 0, dtype: str = "float32", make=kernels.decoder, **changes) -> Decoder:
    """A small decoder whose every weight matters: large matrices and norms between 0.5 and 1.5."""
    config = ModelConfig(**{**SMALL, **changes, "compute_dtype": dtype})
    decoder = make(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    return decoder.double() if dtype == "float64" else decoder


# the decoder of model.py alone, and that of the trainer
MAKES = pytest.mark.parametrize("make", [Decoder, kernels.decoder], ids=["plain", "trainer's"])


def some_tokens(*shape: int, seed: int = 0, vocab_size: int = SMALL["vocab_size"]) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def some_labels(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random targets, about a fifth of them missing, the very first present."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(SMALL["vocab_size"], shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = IGNORE
    labels[0, 0] = 7
    return labels


def weights_of(decoder: Decoder, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Leaf copies of the weights for the oracle."""
    return {
        name: p.detach().to(dtype, copy=True).requires_grad_()
        for name, p in decoder.named_parameters()
    }


def oracle_run(weights: dict, config: ModelConfig, tokens_BT, labels_BT, documents=None):
    """Logits [B, T, V], loss and gradients by name; `documents` lists (row, start, end)."""
    documents = documents or [(row, 0, tokens_BT.shape[1]) for row in range(len(tokens_BT))]
    parts = [
        oracle.decoder_logits(weights, config, tokens_BT[row, start:end])
        for row, start, end in documents
    ]
    logits = torch.cat(parts).view(*tokens_BT.shape, -1)
    loss = oracle.cross_entropy(logits.flatten(0, 1), labels_BT.flatten())
    return (
        logits.detach(),
        loss.detach(),
        dict(zip(weights, torch.autograd.grad(loss, list(weights.values())))),
    )


def decoder_run(decoder: Decoder, tokens_BT, labels_BT, **kwargs):
    decoder.zero_grad()
    with torch.no_grad():
        logits = decoder(tokens_BT, **kwargs)
    loss = decoder(tokens_BT, labels_BT, **kwargs)
    loss.backward()
    return logits, loss.detach(), {name: p.grad.clone() for name, p in decoder.named_parameters()}


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm().clamp(min=1e-12)).item()


def assert_equal_runs(got, truth, tolerance: float):
    assert error(got[0], truth[0]) < tolerance, "logits"
    assert error(got[1], truth[1]) < tolerance, "loss"
    largest = max(gradient.norm() for gradient in truth[2].values())
    for name, gradient in truth[2].items():
        # a gradient that is zero in truth (queries of a single token) is held against the largest
        # one
        assert (got[2][name].double() - gradient).norm() <= tolerance * max(
            gradient.norm(), 1e-3 * largest
        ), name


# ------------------------------------------------------------------------------- against the oracle


SEGMENTS = [[5, 1, 11], [9, 8], [17]]  # lengths of the documents of three rows of 17


def packed(continued: bool = False):
    """doc_ids [3, 17] and the (row, start, end) of each document; `continued`: an id runs over the
    end of a row.
    """
    ids = []
    documents = []
    current = 0
    for row, lengths in enumerate(SEGMENTS):
        if not (continued and row):
            current += 1
        start, line = 0, []
        for length in lengths:
            line += [current] * length
            documents.append((row, start, start + length))
            start, current = start + length, current + 1
        current -= 1
        ids.append(line)
    return torch.tensor(ids), documents


def whole(rows: int, length: int):
    """No doc_ids, and a document for each row."""
    return None, [(row, 0, length) for row in range(rows)]


def heads(kv_heads: int, tied: bool, loss: str) -> dict:
    return dict(num_heads=8, num_kv_heads=kv_heads, tie_embeddings=tied, loss=loss)


@MAKES
@pytest.mark.parametrize(
    "documents, changes",
    [
        (whole(2, 17), heads(8, True, "standard")),
        (whole(2, 17), heads(4, False, "standard")),
        (whole(2, 17), heads(2, True, "chunked")),
        (whole(2, 17), heads(1, False, "chunked")),
        (whole(2, 17), heads(4, True, "one_pass")),
        (whole(2, 17), heads(2, False, "one_pass")),
        *[(whole(1, length), {}) for length in (1, 2, 3, 257)],
        (packed(), dict(loss="standard")),
        (packed(), dict(loss="chunked")),
        (packed(continued=True), dict(loss="one_pass")),
    ],
)
def test_logits_loss_and_every_gradient_equal_the_oracle(documents, changes, make):
    decoder = build(dtype="float64", make=make, **changes)
    doc_ids, spans = documents
    shape = spans[-1][0] + 1, spans[-1][2]
    tokens, labels = some_tokens(*shape), some_labels(*shape)
    truth = oracle_run(weights_of(decoder), decoder.config, tokens, labels, spans)
    assert_equal_runs(decoder_run(decoder, tokens, labels, doc_ids=doc_ids), truth, 1e-10)


def test_fp32_is_within_rounding_of_the_truth():
    decoder = build()
    tokens, labels = some_tokens(2, 65), some_labels(2, 65)
    assert_equal_runs(
        decoder_run(decoder, tokens, labels),
        oracle_run(weights_of(decoder), decoder.config, tokens, labels),
        2e-5,
    )


@pytest.mark.parametrize("seed, loss", [(0, "standard"), (1, "chunked"), (2, "one_pass")])
@MAKES
def test_bf16_errs_no_more_than_a_plain_bf16_path(loss, seed, make):
    decoder = build(seed, "bfloat16", make, loss=loss, hidden_size=64, head_dim=16, ffn_size=96)
    tokens, labels = some_tokens(2, 65, seed=seed), some_labels(2, 65, seed=seed)
    truth = oracle_run(weights_of(decoder), decoder.config, tokens, labels)
    plain = oracle_run(weights_of(decoder, torch.bfloat16), decoder.config, tokens, labels)
    got = decoder_run(decoder, tokens, labels)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    assert error(got[0], truth[0]) <= 1.1 * error(plain[0], truth[0])
    ratios = [
        error(got[2][name], truth[2][name]) / error(plain[2][name], truth[2][name])
        for name in truth[2]
    ]
    assert max(ratios) <= 1.5 and sum(ratios) / len(ratios) <= 1.0, ratios


def test_fp32_master_weights_get_fp32_gradients_from_bf16_compute():
    decoder = build(dtype="bfloat16")
    decoder_run(decoder, some_tokens(1, 9), some_labels(1, 9))
    assert (
        {p.dtype for p in decoder.parameters()}
        == {p.grad.dtype for p in decoder.parameters()}
        == {torch.float32}
    )


# ------------------------------------------------------------------------------------ own functions


def test_rmsnorm_of_zeros_is_zero_with_finite_gradients():
    x, weight = torch.zeros(2, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    model._RMSNorm.apply(x, weight, 1e-6).sum().backward()
    assert x.grad.isfinite().all() and (weight.grad == 0).all()


def test_rmsnorm_squares_large_fp16_values_without_overflow():
    x = torch.full((1, 2, 64), 60_000.0, dtype=torch.float16)
    assert (model._RMSNorm.apply(x, torch.ones(64), 1e-6) == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_own_functions_keep_the_low_precision_of_their_input_and_the_dtype_of_their_weight(dtype):
    x = torch.randn(2, 3, 4, 8, dtype=dtype, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    rope = RotaryCache(ModelConfig(**SMALL | dict(head_dim=8)))(3, torch.device("cpu"))
    out = model._SwiGLU.apply(model._Rotate.apply(model._RMSNorm.apply(x, weight, 1e-6), *rope), x)
    out.sum().backward()
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)


# ---------------------------------------------------------------------------------------- documents


def test_document_ids_on_the_host_stay_there_when_fsdp_moves_the_inputs():
    """Back from the GPU they would cost a synchronisation per micro-batch."""
    from torch.distributed.utils import _to_kwargs  # what FSDP2 calls before the root's forward

    decoder, tokens = build(), some_tokens(3, 17)
    doc_ids, _ = packed()
    assert torch.equal(decoder(tokens, doc_ids=OnHost(doc_ids)), decoder(tokens, doc_ids=doc_ids))

    device = torch.device("meta")
    given = dict(plain=doc_ids, on_host=OnHost(doc_ids))
    _, (moved,) = _to_kwargs((), given, device, False)
    assert moved["plain"].device == device
    assert moved["on_host"].tensor is doc_ids


@pytest.mark.slow
def test_other_documents_do_not_compile_a_layer_anew():
    from torch._dynamo.testing import CompileCounter

    decoder, tokens = build(), some_tokens(1, 17)
    counter = CompileCounter()
    for layer in decoder.layers:
        layer.attention.packed = torch.compiler.disable(layer.attention.packed)
        layer.forward = torch.compile(layer.forward, backend=counter)

    compiled = []
    for starts in ([5], [8], [3, 9], [1, 2, 4, 8]):
        doc_ids = torch.zeros(1, 17, dtype=torch.int32)
        for start in starts:
            doc_ids[:, start:] += 1
        decoder(tokens, doc_ids=doc_ids)
        compiled.append(counter.frame_count)
    assert compiled == compiled[:1] * 4


def test_document_ids_may_come_back_in_any_order_and_integer_type():
    decoder, tokens = build(), some_tokens(1, 6)
    first = decoder(tokens, doc_ids=torch.tensor([[0, 0, 1, 1, 0, 0]]))
    assert torch.equal(
        first, decoder(tokens, doc_ids=torch.tensor([[9, 9, 2, 2, 5, 5]], dtype=torch.int32))
    )


def test_given_positions_win_over_the_documents_own():
    decoder, tokens = build(), some_tokens(1, 8)
    doc_ids = torch.tensor([[0] * 3 + [1] * 5])
    restarted = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert torch.equal(
        decoder(tokens, doc_ids=doc_ids), decoder(tokens, doc_ids=doc_ids, positions=restarted)
    )
    shifted = decoder(tokens, positions=torch.arange(8)[None] * 2)
    assert (decoder(tokens) - shifted).abs().max() > 1e-2
    far = decoder(tokens, positions=torch.arange(8)[None] + 1000)  # rotary attention is relative
    torch.testing.assert_close(decoder(tokens), far, atol=1e-3, rtol=1e-3)


# ----------------------------------------------------------------------------------------- KV cache


@pytest.mark.parametrize(
    "kv_heads, parts",
    [(4, [1] * 23), (2, [16] + [1] * 7), (1, [7, 7, 7, 2]), (2, [23]), (4, [1, 22])],
    ids=["token by token", "prefill and steps", "chunked prefill", "whole", "one and rest"],
)
@MAKES
def test_decoding_with_the_cache_equals_the_full_forward_at_every_position(kv_heads, parts, make):
    decoder, tokens = build(make=make, num_kv_heads=kv_heads), some_tokens(2, 23)
    cache = decoder.new_cache(batch_size=2, max_length=30)
    with torch.no_grad():
        pieces = [decoder(part, cache=cache) for part in tokens.split(parts, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), decoder(tokens), atol=1e-5, rtol=1e-5)
    assert cache.length == 23


@MAKES
def test_a_prefill_longer_than_a_chunk_of_queries_equals_the_full_forward(make):
    decoder, tokens = build(make=make), some_tokens(1, 700)
    cache = decoder.new_cache(1, 700)
    with torch.no_grad():
        pieces = [decoder(part, cache=cache) for part in tokens.split([101, 599], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), decoder(tokens), atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------- rotary positions


def test_the_cache_equals_direct_positions_bit_for_bit_whatever_its_history():
    for head_dim in (2, 6, 10, 64, 128):
        config = ModelConfig(**SMALL | dict(head_dim=head_dim))
        grown, cpu = RotaryCache(config), torch.device("cpu")
        for length in (1, 3, 17, 100):
            grown(length, cpu)
        for offset, length in ((0, 257), (31, 1), (5, 99)):
            direct = grown.at(torch.arange(offset, offset + length)[None])
            fresh = RotaryCache(config)(length, cpu, offset)
            for a, b, c in zip(grown(length, cpu, offset), direct, fresh):
                assert torch.equal(a, b) and torch.equal(a, c) and a.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_rotary_tables_are_fp32_whatever_the_compute_dtype(dtype):
    decoder = build(dtype=dtype)
    decoder(some_tokens(1, 5))
    assert decoder.rotary.cos.dtype == decoder.rotary.sin.dtype == torch.float32
    decoder.to(torch.bfloat16)
    assert decoder.rotary.cos.dtype == torch.float32


def test_angles_are_right_to_fp32_rounding_at_131k_positions():
    cos, sin = RotaryCache(ModelConfig())(131_072, torch.device("cpu"))
    frequency_k = 1e6 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angle = torch.arange(131_072, dtype=torch.float64)[:, None] * frequency_k
    bound = 131_072 * 2**-22  # the product and the frequency round once each
    assert (cos[0, :, 0].double() - angle.cos()).abs().max() < bound and (
        sin[0, :, 0].double() - angle.sin()
    ).abs().max() < bound
    assert (cos[0, :1024, 0].double() - angle[:1024].cos()).abs().max() < 1024 * 2**-22


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_in_half_precision_rounds_once_in_both_directions(dtype):
    generator = torch.Generator().manual_seed(0)
    cos, sin = RotaryCache(ModelConfig(**SMALL | dict(head_dim=16)))(5000, torch.device("cpu"))
    x = torch.randn(1, 5000, 3, 16, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(1, 5000, 3, 16, generator=generator).to(dtype)

    rotated = model._Rotate.apply(x, cos, sin)
    rotated.backward(grad)

    for result, given, sign in ((rotated.detach(), x.detach(), 1), (x.grad, grad, -1)):
        first, second = given.double().chunk(2, dim=-1)
        turned = (first * cos - sign * second * sin, second * cos + sign * first * sin)
        exact = torch.cat(turned, dim=-1)
        one_rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((result - exact).abs() <= one_rounding + 1e-6).all()


def test_a_decoder_built_on_meta_moves_and_lengthens_its_positions():
    with torch.device("meta"):
        decoder = kernels.decoder(ModelConfig(**SMALL))
        assert decoder(some_tokens(1, 4).to("meta")).shape == (1, 4, SMALL["vocab_size"])
    assert decoder.rotary.cos.is_meta
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    decoder.init_weights(0)
    reference = kernels.decoder(ModelConfig(**SMALL))
    for length in (3, 40, 7):
        tokens = some_tokens(1, length)
        assert torch.equal(decoder(tokens), reference(tokens))
    assert not decoder.rotary.cos.is_meta
    assert decoder.to("meta")(some_tokens(1, 50).to("meta")).is_meta


def test_training_goes_on_after_sampling_in_inference_mode():
    decoder, tokens = build(), some_tokens(1, 8)
    with torch.inference_mode():
        decoder(tokens)
    decoder(tokens, some_labels(1, 8)).backward()


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
@pytest.mark.parametrize(
    "head_dim,theta,factor,original",
    [
        *[(128, theta, 4.0, 32768) for theta in (1e4, 5e5, 1e6, 1e7)],
        (32, 1e6, 32.0, 4096),
        (80, 3e5, 3.0, 1000),
        (6, 1e4, 2.0, 64),
        (64, 1e3, 4.0, 32768),  # the ramp of yarn ends beyond half of the dimensions
        (64, 16.0, 4.0, 2000),  # and here at the last dimension
    ],
)
def test_frequencies_have_the_bits_of_transformers(scaling, head_dim, theta, factor, original):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is the reference for rotary scalings"
    )
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = dict(rope_type="default" if scaling == "none" else scaling, rope_theta=theta)
    if scaling != "none":
        rope |= dict(factor=factor) | (
            dict(original_max_position_embeddings=original) if scaling == "yarn" else {}
        )
    longest = int(original * factor)
    theirs = Qwen3RotaryEmbedding(
        transformers.Qwen3Config(
            head_dim=head_dim, max_position_embeddings=longest, rope_parameters=rope
        )
    )
    config = ModelConfig(
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_original_context=original,
        rope_factor=1.0 if scaling == "none" else factor,
    )
    ours_k, scale = model.rope_frequencies(config, torch.device("cpu"))
    assert torch.equal(ours_k, theirs.inv_freq)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


# ------------------------------------------------------------------------------------------- memory


def largest_allocation(function) -> int:
    """Bytes of the largest block that torch's CPU allocator hands out while `function` runs,
    kernels' scratch included.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return max(
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )


WIDE = dict(
    vocab_size=16_384,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    loss="chunked",
    loss_chunk_size=512,
)


def training_pass(length: int, dtype: str, documents: bool, make):
    tile = 256 if make is Decoder else 512  # plain chunks are fp32 whatever the dtype
    decoder = make(ModelConfig(**WIDE | dict(compute_dtype=dtype, loss_chunk_size=tile)))
    tokens = some_tokens(1, length)
    doc_ids = (torch.arange(length) // 1500)[None] if documents else None
    return lambda: decoder(tokens, tokens, doc_ids=doc_ids).backward()


@pytest.mark.parametrize(
    "dtype, documents, make",
    [
        ("float32", True, Decoder),
        ("float32", True, kernels.decoder),
        ("float32", False, Decoder),
        ("bfloat16", False, kernels.decoder),
    ],
)
def test_a_training_pass_at_4096_tokens_allocates_neither_scores_nor_logits(dtype, documents, make):
    length, size = 4096, 2 if dtype == "bfloat16" else 4
    largest = largest_allocation(training_pass(length, dtype, documents, make))
    assert largest < length * length * size, "as large as the attention scores of one head"
    assert largest < length * WIDE["vocab_size"] * size / 4, "within 4x of the logits"


def test_prefilling_in_chunks_allocates_linearly_in_the_cached_length():
    decoder = kernels.decoder(ModelConfig(**WIDE))

    def peak(length):
        cache = decoder.new_cache(1, length)
        with torch.no_grad():
            decoder.hidden(some_tokens(1, length - 512), cache=cache)
            return largest_allocation(lambda: decoder.hidden(some_tokens(1, 512), cache=cache))

    assert peak(4096) <= 2.1 * peak(2048)


# ---------------------------------------------------------------------------------- initial weights


def test_initial_weights_depend_on_seed_and_name_alone():
    direct = kernels.decoder(ModelConfig(**SMALL), seed=3)
    with torch.device("meta"):
        late = kernels.decoder(ModelConfig(**SMALL))
    late.to_empty(device="cpu")
    late.tie_weights()
    torch.manual_seed(99)
    late.init_weights(3)
    deeper = kernels.decoder(ModelConfig(**SMALL | dict(tie_embeddings=False)), seed=3)
    for name, weight in direct.state_dict().items():
        assert torch.equal(weight, late.state_dict()[name])
        assert name == "lm_head.weight" or torch.equal(weight, deeper.state_dict()[name])
    assert not torch.equal(
        direct.embed.weight, kernels.decoder(ModelConfig(**SMALL), seed=4).embed.weight
    )


@pytest.mark.parametrize(
    "attention",
    [Standard(), NSAConfig(), NSAConfig(kv="separate", cmp_kind="mean")],
    ids=["standard", "nsa", "nsa, separate, mean"],
)
def test_construction_leaves_the_global_random_state_alone(attention):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    kernels.decoder(ModelConfig(**SMALL, attention=attention))
    assert torch.equal(torch.rand(3), expected)


def test_equal_shapes_of_different_names_get_different_weights():
    decoder = kernels.decoder(ModelConfig(**SMALL | dict(num_kv_heads=4, tie_embeddings=False)))
    a, b = decoder.layers[0], decoder.layers[1]
    same_shape = [
        a.attention.q_proj,
        a.attention.k_proj,
        a.attention.v_proj,
        b.attention.q_proj,
        b.attention.v_proj,
    ]
    assert len({p.weight.sum().item() for p in same_shape}) == len(same_shape)
    assert not torch.equal(decoder.embed.weight, decoder.lm_head.weight)


def test_initial_weights_have_the_documented_scale():
    decoder = kernels.decoder(ModelConfig.preset("tiny"))
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
            continue
        std = 0.02 / (
            math.sqrt(2 * 4) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        )
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name


def test_initialising_on_meta_is_refused_with_the_remedy():
    with torch.device("meta"):
        decoder = kernels.decoder(ModelConfig(**SMALL))
    with pytest.raises(ValueError, match="to_empty"):
        decoder.init_weights()


# ------------------------------------------------------------------------- counts and the loss rule


@pytest.mark.parametrize(
    "name,count",
    [
        ("tiny", 5_114_368),
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
    ],
)
def test_presets_have_exactly_the_published_numbers_of_parameters(name, count):
    config = ModelConfig.preset(name)
    with torch.device("meta"):
        assert kernels.decoder(config).num_params() == config.num_params() == count


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_layers=5, num_kv_heads=1),
        dict(tie_embeddings=False, head_dim=10, ffn_size=7),
    ],
)
def test_the_closed_form_of_the_parameters_equals_the_real_count(changes):
    decoder = build(**changes)
    assert (
        decoder.config.num_params()
        == decoder.num_params()
        == sum(p.numel() for p in decoder.parameters())
    )
    assert decoder.config.layer_params() == sum(p.numel() for p in decoder.layers[0].parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_training_flops_count_products_as_torch_counts_them(tied):
    from torch.utils.flop_counter import FlopCounterMode

    decoder = build(tie_embeddings=tied, loss="standard")
    with FlopCounterMode(display=False) as counter:
        decoder(some_tokens(2, 64), some_labels(2, 64)).backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        n
        for operation, n in counts.items()
        if operation in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
    )
    assert train_flops(decoder.config, 2 * 64, 0) == products
    pairs = 2 * 64 * 65 / 2
    scores = train_flops(decoder.config, 2 * 64, pairs) - products
    assert scores == 12 * 2 * 4 * 6 * pairs


@pytest.mark.parametrize(
    "seq,gib,chunked",
    [
        (4096, 1.16, False),
        (40_000, 11.32, True),
        (131_072, 37.09, True),
        (35_335, 10.0, False),
        (35_336, 10.0, True),
    ],
)
def test_the_ten_gib_rule_has_the_documented_figures(seq, gib, chunked):
    with torch.device("meta"):
        decoder = kernels.decoder(ModelConfig.preset("4B", num_layers=1))
    assert round(decoder.config.logits_gib(1, seq), 2) == gib
    assert decoder.config.should_chunk(1, seq) is chunked
    assert decoder.config.logits_gib(2, seq) == 2 * decoder.config.logits_gib(1, seq)
    # at this vocabulary tiles win at any length
    assert kernels.loss_path(decoder.config, seq) != "standard"
    small = kernels.decoder(
        ModelConfig.preset("tiny", vocab_size=128, num_layers=1, logits_threshold_gib=0.01)
    )
    for tokens in (8, 50_000):
        assert (
            kernels.loss_path(small.config, tokens) == "standard"
        ) is not small.config.should_chunk(1, tokens)
    assert not small.config.should_chunk(1, 8) and small.config.should_chunk(1, 50_000)


def test_the_threshold_and_an_explicit_loss_win_over_the_rule():
    tight = build(logits_threshold_gib=64 * 61 * 2 / GIB)
    assert not tight.config.should_chunk(1, 64) and tight.config.should_chunk(1, 65)
    assert build(loss="chunked").config.should_chunk(1, 1) and not build(
        loss="standard"
    ).config.should_chunk(1, 10**9)


def test_auto_takes_one_pass_unless_it_adds_gradients_in_low_precision():
    config = ModelConfig.preset("4B", compute_dtype="bfloat16")
    block = vocab_loss.block_tokens(10**9, config.vocab_size, config.hidden_size, 2)
    assert kernels.loss_path(config, 131_072) == "one_pass"
    assert kernels.loss_path(config, block, low_precision=True) == "one_pass"
    assert kernels.loss_path(config, 2 * block, low_precision=True) == "chunked"

    asked = dataclasses.replace(config, loss="one_pass")
    assert kernels.loss_path(asked, 2 * block) == "one_pass"
    with pytest.raises(ValueError, match="in low precision.*: give fewer tokens.*--loss chunked"):
        kernels.loss_path(asked, 2 * block, low_precision=True)


def test_the_path_of_the_loss_decides_what_the_decoder_computes(monkeypatch):
    called = []
    monkeypatch.setattr(
        kernels, "linear_cross_entropy", lambda *_, one_pass, **__: called.append(one_pass)
    )
    for loss in ("chunked", "one_pass", "auto"):
        decoder = build(loss=loss, vocab_size=8192)
        decoder(some_tokens(1, 9), some_labels(1, 9))
    assert called == [False, True, True]


# ----------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("attention", [Standard(), NSAConfig()], ids=["standard", "nsa"])
@pytest.mark.parametrize(
    "loss, make", [("standard", Decoder), ("chunked", Decoder), ("one_pass", kernels.decoder)]
)
def test_labels_that_are_all_ignored_give_an_attached_zero_loss_and_zero_gradients(
    loss, make, attention
):
    decoder = build(make=make, loss=loss, attention=attention)
    value = decoder(some_tokens(2, 9), torch.full((2, 9), IGNORE))
    assert value.item() == 0 and value.requires_grad
    value.backward()
    assert all((p.grad == 0).all() for p in decoder.parameters())


@pytest.mark.parametrize(
    "loss, as_tensor",
    [("standard", True), ("chunked", False), ("chunked", True), ("one_pass", True)],
)
@MAKES
def test_num_valid_divides_the_sum_so_that_shares_of_a_batch_add_to_its_mean(loss, as_tensor, make):
    decoder = build(dtype="float64", make=make, loss=loss)
    tokens, labels = some_tokens(4, 9), some_labels(4, 9)
    labels[1] = IGNORE
    valid = int((labels != IGNORE).sum())
    whole = decoder_run(decoder, tokens, labels)
    decoder.zero_grad()
    divisor = torch.tensor(float(valid)) if as_tensor else valid
    shares = [decoder(t[None], y[None], num_valid=divisor) for t, y in zip(tokens, labels)]
    sum(shares).backward()
    assert error(sum(shares).detach(), whole[1]) < 1e-12
    for name, parameter in decoder.named_parameters():
        assert error(parameter.grad, whole[2][name]) < 1e-12, name


def test_the_mean_is_over_every_label_that_is_not_ignored():
    """More of them than half precision counts."""
    decoder = build()
    tokens, labels = some_tokens(1, 600), some_tokens(1, 600)
    labels[0, ::7] = IGNORE
    assert torch.equal(decoder(tokens, labels), decoder(tokens, labels, num_valid=514))


# ----------------------------------------------------------- the loss in chunks, without a decoder


def loss_inputs(N: int = 37, D: int = 24, V: int = 301, dtype=torch.float32):
    """hidden, weight and labels, of which every fifth is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    labels_N = torch.randint(V, (N,), generator=generator)
    labels_N[::5] = IGNORE
    return hidden_ND, weight_VD, labels_N


def test_the_loss_in_chunks_saves_two_gradients_and_holds_the_logits_of_one_chunk():
    hidden, weight, labels = loss_inputs(N=512, D=16, V=4096)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_cross_entropy(hidden, weight, labels, token_tile=64).backward()
    assert [x.shape for x in saved] == [hidden.shape, weight.shape]

    def whole_pass():
        linear_cross_entropy(hidden, weight, labels, token_tile=64).backward()

    assert largest_allocation(whole_pass) == 64 * 4096 * 4, "fp32 logits of one chunk"


def test_a_loss_without_gradients_makes_none():
    hidden, weight, labels = loss_inputs(N=32, D=64, V=32)
    with torch.no_grad():
        largest = largest_allocation(lambda: linear_cross_entropy(hidden, weight, labels))
    assert largest < hidden.nbytes == weight.nbytes, "as large as a gradient"


@pytest.mark.parametrize(
    "wrong, kind",
    [
        (lambda h, w, y: (h[None], w, y), ValueError),
        (lambda h, w, y: (h, w[:, 1:], y), ValueError),
        (lambda h, w, y: (h, w, y[1:]), ValueError),
        (lambda h, w, y: (h, w, y.where(y != IGNORE, 301)), IndexError),
    ],
)
def test_what_makes_no_loss_is_refused_in_one_line(wrong, kind):
    with pytest.raises(kind) as caught:
        linear_cross_entropy(*wrong(*loss_inputs()))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(*loss_inputs(), reduction="none")


def test_the_head_sends_any_function_to_its_weight():
    decoder = build()
    hidden = decoder.hidden(some_tokens(1, 5)).flatten(0, 1)
    out = decoder.lm_head(
        hidden,
        lambda h_ND, w_VD, scale: {"sum": (h_ND @ w_VD.T * scale).sum(), "shape": w_VD.sum(1)},
        2.0,
    )
    torch.testing.assert_close(out["sum"], 2 * (hidden @ decoder.embed.weight.T).sum())


# ---------------------------------------------------------------------------------------- bad input


WRONG = [
    dict(vocab_size=0),
    dict(hidden_size=-4),
    dict(num_kv_heads=0),
    dict(head_dim=0),
    dict(loss_chunk_size=-1),
    dict(rope_theta=-1.0),
    dict(rope_theta=1.0),
    dict(rope_theta=math.inf),
    dict(logits_threshold_gib=math.nan),
    dict(logits_threshold_gib=-1.0),
    dict(rope_factor=math.nan, rope_scaling="yarn"),
    dict(rope_original_context=0),
    dict(norm_eps=0.0),
    dict(norm_eps=math.nan),
    dict(rope_scaling="ntk"),
    dict(loss="tiled"),
    dict(compute_dtype="fp8"),
    dict(num_heads=6, num_kv_heads=4),
    dict(head_dim=7),
    dict(rope_factor=2.0),
    dict(rope_scaling="yarn"),
    dict(rope_factor=0.5, rope_scaling="linear"),
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_a_wrong_configuration_is_one_line_that_names_the_field(changes):
    with pytest.raises(ValueError, match=next(iter(changes))) as caught:
        ModelConfig(**SMALL | changes)
    assert "\n" not in str(caught.value)


def test_groups_that_do_not_divide_the_heads_are_told_which_do():
    with pytest.raises(ValueError, match=r"choose num_kv_heads from \[1, 2, 3, 6\]"):
        ModelConfig(**SMALL | dict(num_heads=6, num_kv_heads=4))


def test_an_unknown_preset_or_field_names_the_known_ones():
    with pytest.raises(ValueError, match="tiny, 0.6B, 1.7B, 4B, 8B"):
        ModelConfig.preset("4b")
    with pytest.raises(ValueError, match="hidden_size"):
        ModelConfig.preset("tiny", width=3)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("tokens", dict(tokens_BT=torch.zeros(5, dtype=torch.long))),
        ("token", dict(tokens_BT=torch.zeros(1, 0, dtype=torch.long))),
        ("target", dict(tokens_BT=some_tokens(1, 5), labels_BT=some_labels(1, 4))),
        ("cache", dict(tokens_BT=some_tokens(1, 5), doc_ids=torch.zeros(1, 5))),
        ("doc_ids", dict(tokens_BT=some_tokens(2, 6), doc_ids=torch.zeros(1, 12))),
        ("positions", dict(tokens_BT=some_tokens(2, 6), positions=torch.zeros(1, 1))),
    ],
)
def test_a_wrong_call_is_one_line_that_says_what_is_wrong(name, arguments):
    decoder = build()
    cache = decoder.new_cache(1, 5) if name == "cache" else None
    with pytest.raises(ValueError, match=name) as caught:
        decoder(**arguments, cache=cache)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [(0, 4), (1, 0)])
def test_an_empty_cache_is_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        build().new_cache(*sizes)


# -------------------------------------------------------------------------------- copies, and alone


def test_a_deep_copy_is_equal_independent_and_tied():
    decoder, tokens = build(), some_tokens(1, 6)
    before = decoder(tokens)
    twin = copy.deepcopy(decoder)
    assert (
        torch.equal(before, twin(tokens))
        and twin.lm_head.weight is twin.embed.weight is not decoder.embed.weight
    )
    twin.embed.weight.data.zero_()
    assert torch.equal(before, decoder(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_a_state_dict_holds_parameters_alone_and_restores_every_logit(tied):
    decoder = build(1, tie_embeddings=tied)
    other = build(2, tie_embeddings=tied)
    tokens = some_tokens(1, 6)
    decoder(tokens)
    state = decoder.state_dict()
    assert state.keys() == {name for name, _ in decoder.named_parameters(remove_duplicate=False)}
    other.load_state_dict(state)
    assert torch.equal(decoder(tokens), other(tokens))


@MAKES
def test_both_losses_take_int32_labels(make):
    tokens = torch.arange(12).view(2, 6)
    losses = [
        make(ModelConfig.preset("tiny", vocab_size=32, loss=kind))(tokens, tokens.int())
        for kind in ("standard", "chunked")
    ]
    torch.testing.assert_close(*losses)


# ---- products on a CPU that is slower in bf16


@pytest.mark.parametrize("dtype, biased", [(torch.bfloat16, True), (torch.float16, False)])
def test_a_cpu_that_is_faster_in_fp32_multiplies_so_and_rounds(monkeypatch, dtype, biased):
    monkeypatch.setattr("base.machine.fp32_is_faster", lambda dtype: True)
    x, dy = (torch.randn(2, 5, n).to(dtype) for n in (7, 3))
    weight, bias = torch.randn(3, 7).to(dtype), torch.randn(3).to(dtype)
    inputs = [a.requires_grad_() for a in (x, weight, *([bias] if biased else []))]
    y = kernels.linear(*inputs)
    grads = torch.autograd.grad(y, inputs, dy)

    exact = [a.detach().double().requires_grad_() for a in inputs]
    expected = torch.nn.functional.linear(*exact)
    expected_grads = torch.autograd.grad(expected, exact, dy.double())
    rounding = torch.finfo(dtype).eps  # half of it for the product, half for the bias
    for ours, true in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert ours.dtype == dtype
        assert ((ours - true).abs() <= rounding * true.abs().amax()).all()


def test_such_products_save_no_copies_in_fp32(monkeypatch):
    monkeypatch.setattr("base.machine.fp32_is_faster", lambda dtype: True)
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    weight = torch.randn(16, 32).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda a: saved.append(a.nbytes) or a, lambda a: a
    ):
        kernels.linear(x, weight)
    assert sum(saved) == x.nbytes + weight.nbytes

"""Folders of Llama 3 and Qwen2.5: longhaul/qwen3.py against transformers' own models, small and
random. The kinds differ from Qwen3 in norms of q and k, in biases and in rotary scaling.
"""

import json
from pathlib import Path

import pytest
import torch

from longhaul import qwen3, step
from longhaul.checkpoint import start
from longhaul.config import TrainConfig
from model import Decoder, ModelConfig, rope_frequencies
from scripts import generate

transformers = pytest.importorskip("transformers", reason="their models are the reference")

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "Llama 3": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "Llama 3.1": ("Llama", dict(rope_parameters=LLAMA3, max_position_embeddings=1024)),
    "Llama 3.2": (
        "Llama",
        dict(rope_parameters=LLAMA3 | dict(factor=32.0), tie_word_embeddings=True, head_dim=16),
    ),
    "Qwen2.5": ("Qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "Qwen2.5, yarn, tied": ("Qwen2", dict(rope_parameters=YARN, tie_word_embeddings=True)),
}
SIZES = dict(
    vocab_size=640,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)


def made(name: str, folder: Path):
    """Their model, with weights large enough for each of them to matter, saved in the folder."""
    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.15
        parameter.data = drawn + ("norm" in key)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(640, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name, tmp_path):
    theirs = made(name, tmp_path)
    ours = qwen3.from_hf(tmp_path)
    assert ours.num_params() == theirs.num_parameters()
    expected = theirs(tokens_of(200)).logits
    assert expected.std() > 0.1
    limit = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(ours(tokens_of(200)), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen2.5, yarn, tied"])
def test_greedy_tokens_equal_those_of_transformers(name, tmp_path, capsys):
    theirs = made(name, tmp_path)
    flags = f"--checkpoint {tmp_path} --temperature 0 --max_new_tokens 48 --device cpu --ids"
    written = set()
    for prompt in ([7], [3, 1, 4, 1, 5], tokens_of(90)[0].tolist()):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=48,
            min_new_tokens=48,
            eos_token_id=None,
        )
        generate.main([*flags.split(), *map(str, prompt)])
        assert [int(word) for word in capsys.readouterr().out.split()] == expected[0].tolist()
        written.add(tuple(expected[0, len(prompt) :].tolist()))
    assert len(written) == 3


@pytest.mark.parametrize(
    "name, levers",
    [
        ("Llama 3.1", {}),
        ("Qwen2.5", {}),
        ("Qwen2.5", dict(attention_head_groups=2, mlp_tiles=2)),
    ],
)
def test_gradients_equal_those_of_transformers(name, levers, tmp_path):
    theirs = made(name, tmp_path)
    given = dict(init_from=str(tmp_path), context_length=128, eval_every=0, device="cpu")
    cfg = TrainConfig(**start.completed(given), dtype="fp32", **levers)
    state = step.build(cfg, cfg.model(), "cpu")
    qwen3.load_into(state.model, tmp_path)

    tokens = tokens_of(129)
    labels = tokens[:, 1:].clone()
    state.model(tokens[:, :-1], labels).backward()
    logits = theirs(tokens[:, :-1]).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, labels.flatten()).backward()

    for ours, parameter in state.model.named_parameters():
        expected = theirs.get_parameter(qwen3.hf_name(ours)).grad
        limit = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=limit, msg=ours)


def test_frequencies_have_the_bits_of_transformers(tmp_path):
    """One unit in the last place is 0.007 radians at position 131,072."""
    rope = LLAMA3 | dict(original_max_position_embeddings=8192)
    theirs = transformers.LlamaConfig(hidden_size=4096, rope_parameters=rope)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    expected, factor = compute(theirs, torch.device("cpu"))
    ours = ModelConfig(
        rope_theta=5e5, rope_scaling="llama3", rope_factor=8.0, rope_original_context=8192
    )
    assert ours.rope_reach == 131_072
    found, ours_factor = rope_frequencies(ours, torch.device("cpu"))
    assert torch.equal(found, expected) and ours_factor == factor


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(rope_parameters=LLAMA3 | dict(high_freq_factor=8.0)), "high_freq_factor=8.0"),
    ],
)
def test_what_this_decoder_does_not_compute_is_one_line(changes, words, tmp_path):
    made("Llama 3.1", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=words) as caught:
        qwen3.from_hf(tmp_path)
    assert "\n" not in str(caught.value)


def test_norms_and_biases_together_have_no_counterpart(tmp_path):
    config = ModelConfig.preset("tiny", qkv_bias=True, num_layers=1)
    with pytest.raises(ValueError, match="qk_norm=True with qkv_bias=True"):
        qwen3.to_hf(Decoder(config), tmp_path / "hf")

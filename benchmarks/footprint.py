"""Predicted peak memory of public architectures against the CPU allocator's own record.

    python -m benchmarks.footprint [--only Llama T5 ...] [--variants plain foreach ...]

Models of `transformers` at small sizes, from their configurations only: nothing is downloaded. Each
is predicted on fake tensors, then two real steps with AdamW run under the profiler, which records
what the allocator gives out. "foreach" and "fused" are loops as trainers have them: four
micro-batches, clipping, AdamW of that kind and a schedule of its learning rate. Prints a table in
Markdown; what was refused or is further off than its bound (0.1%, with autocast 0.5%) is listed by
name, and then the exit code is 1.
"""

import functools
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from base.flags import Parser
from footprint import Refused, measure, predict

BOUNDS = {"plain": 1e-3, "checkpointing": 1e-3, "autocast": 5e-3, "foreach": 1e-3, "fused": 1e-3}
VARIANTS = tuple(BOUNDS)
LOOPS = ("foreach", "fused")
MICRO_BATCHES = 4
VOCABULARY = 1024
BATCH = 4
TOKENS = 128
FEW = 32  # tokens of models that are run token by token

# ---- batches

Batch = Callable[[], dict[str, Tensor]]


def language(tokens: int = TOKENS) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, tokens))
    return {"input_ids": ids, "labels": ids}


def text_class() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": torch.randint(2, (BATCH,))}


def pair() -> dict[str, Tensor]:
    source = torch.randint(VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": source, "labels": torch.randint(VOCABULARY, (BATCH, TOKENS))}


def image() -> dict[str, Tensor]:
    pixels = torch.randn(BATCH, 3, 32, 32)
    return {"pixel_values": pixels, "labels": torch.randint(2, (BATCH,))}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 4000), "labels": torch.randint(2, (BATCH,))}


def spectrogram() -> dict[str, Tensor]:
    labels = torch.randint(VOCABULARY, (BATCH, 32))
    return {"input_features": torch.randn(BATCH, 80, 200), "labels": labels}


# ---- architectures


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers`, what its configuration changes, and what it is trained on."""

    kind: str
    model: str
    config: str
    changes: dict
    batch: Batch

    def build(self, variant: str):
        import transformers

        config = getattr(transformers, self.config)(**self.changes)
        model = getattr(transformers, self.model)(config).train()
        if variant == "checkpointing":
            model.gradient_checkpointing_enable()
        kind = {variant: True} if variant in LOOPS else {}
        optimizer = torch.optim.AdamW(model.parameters(), **kind)
        return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def step(batch: Batch, variant: str, state) -> float:
    """One step as a training script has it."""
    model, optimizer, schedule = state
    micro_batches = MICRO_BATCHES if variant in LOOPS else 1
    total = 0.0
    for _ in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast"):
            loss = model(**batch()).loss / micro_batches
        loss.backward()
        total += loss.item()
    if variant in LOOPS:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return total


SIZES = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = SIZES | IDS | dict(vocab_size=VOCABULARY, max_position_embeddings=256)
GROUPED = TEXT | dict(num_key_value_heads=2, head_dim=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
PATCHES = SIZES | dict(image_size=32, patch_size=8)
WAVES = SIZES | dict(
    conv_dim=[32] * 7,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    classifier_proj_size=32,
    mask_time_prob=0.0,
    layerdrop=0.0,
)
PAIRED = IDS | dict(
    vocab_size=VOCABULARY,
    d_model=128,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    decoder_start_token_id=1,
)
RECURRENT = dict(vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2)
FEW_TOKENS = functools.partial(language, FEW)


def decoder(name: str, changes: dict, kind: str = "decoder", batch: Batch = language):
    return Architecture(kind, f"{name}ForCausalLM", f"{name}Config", changes, batch)


def classifier(name: str, changes: dict, kind: str, batch: Batch, of: str):
    return Architecture(kind, f"{name}For{of}Classification", f"{name}Config", changes, batch)


def vision(name: str, changes: dict):
    return classifier(name, changes, "vision", image, "Image")


def speech(name: str):
    return classifier(name, WAVES, "speech", sound, "Sequence")


def conditional(name: str, changes: dict, kind: str = "encoder-decoder", batch: Batch = pair):
    return Architecture(kind, f"{name}ForConditionalGeneration", f"{name}Config", changes, batch)


def masked(name: str, changes: dict):
    return Architecture("encoder", f"{name}ForMaskedLM", f"{name}Config", changes, language)


ARCHITECTURES = {
    "Llama": decoder("Llama", GROUPED),
    "Qwen3": decoder("Qwen3", GROUPED),
    "Mistral": decoder("Mistral", GROUPED),
    "Gemma2": decoder("Gemma2", GROUPED),
    "Phi": decoder("Phi", TEXT),
    "GPT-2": Architecture(
        "decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        IDS | dict(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=256),
        language,
    ),
    "GPT-NeoX": decoder("GPTNeoX", TEXT),
    "OPT": decoder("OPT", TEXT | dict(word_embed_proj_dim=128, ffn_dim=512)),
    "Mixtral": decoder("Mixtral", GROUPED | dict(num_local_experts=4), "mixture of experts"),
    "Qwen2-MoE": decoder(
        "Qwen2Moe",
        GROUPED | EXPERTS | dict(shared_expert_intermediate_size=256),
        "mixture of experts",
    ),
    "Mamba": decoder("Mamba", RECURRENT | dict(state_size=8), "state space", FEW_TOKENS),
    "Mamba2": decoder(
        "Mamba2",
        RECURRENT | dict(state_size=8, num_heads=8, head_dim=32, n_groups=2, chunk_size=32),
        "state space",
    ),
    "RWKV": decoder("Rwkv", RECURRENT | dict(context_length=256), "recurrent", FEW_TOKENS),
    "BERT": classifier("Bert", TEXT, "encoder", text_class, "Sequence"),
    "RoBERTa": masked("Roberta", TEXT),
    "DistilBERT": masked(
        "DistilBert",
        IDS | dict(vocab_size=VOCABULARY, dim=128, n_layers=2, n_heads=4, hidden_dim=512),
    ),
    "ELECTRA": classifier(
        "Electra", TEXT | dict(embedding_size=128), "encoder", text_class, "Sequence"
    ),
    "ModernBERT": masked("ModernBert", TEXT | dict(cls_token_id=1, sep_token_id=2)),
    "DeBERTa-v2": classifier("DebertaV2", TEXT, "encoder", text_class, "Sequence"),
    "T5": conditional(
        "T5",
        IDS
        | dict(vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4)
        | dict(decoder_start_token_id=0),
    ),
    "BART": conditional("Bart", PAIRED | dict(max_position_embeddings=256)),
    "ViT": vision("ViT", PATCHES),
    "DeiT": vision("DeiT", PATCHES),
    "Swin": vision(
        "Swin",
        dict(image_size=32, patch_size=2, embed_dim=64, depths=[1, 1], num_heads=[2, 4])
        | dict(window_size=4),
    ),
    "ConvNeXt": vision(
        "ConvNext", dict(hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], image_size=32)
    ),
    "ResNet": vision("ResNet", dict(embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1])),
    "Wav2Vec2": speech("Wav2Vec2"),
    "HuBERT": speech("Hubert"),
    "Whisper": conditional(
        "Whisper",
        PAIRED | dict(max_source_positions=100, max_target_positions=64),
        "speech",
        spectrogram,
    ),
}


# ---- results


@dataclass(frozen=True)
class Result:
    """Bytes of one architecture in one variant; or why there are none."""

    predicted: int = 0
    recorded: int = 0
    reason: str = ""

    @property
    def off(self) -> float:
        """How much the prediction is too high, as a part of what was recorded."""
        return self.predicted / self.recorded - 1

    def words(self) -> str:
        return self.reason.split(":")[0] if self.reason else f"{100 * self.off:+.3f}%"


def compare(name: str, variant: str) -> Result:
    """What is predicted and what is recorded."""
    architecture = ARCHITECTURES[name]
    build = functools.partial(architecture.build, variant)
    one_step = functools.partial(step, architecture.batch, variant)
    try:
        predicted = predict(build, one_step, "cpu").peak
    except Refused as error:
        return Result(reason=f"refused: {error}")
    except ValueError as error:
        if variant != "checkpointing" or "activation checkpointing" not in str(error):
            raise
        return Result(reason=f"has none: {error}")
    return Result(predicted, measure(build, one_step))


def failure(name: str, variant: str, result: Result) -> str:
    """One line about a result that is not as good as it should be; "" if it is."""
    if result.reason.startswith("has none"):
        return ""
    if result.reason:
        return f"{name}, {variant}: {result.reason}"
    if abs(result.off) > BOUNDS[variant]:
        bytes_ = f"predicted {result.predicted:,}, recorded {result.recorded:,} bytes"
        return f"{name}, {variant}: {100 * result.off:+.3f}%, {bytes_}"
    return ""


def main(args: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.footprint", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    asked = parser.parse_args(args)
    if importlib.util.find_spec("transformers") is None:
        print("benchmarks.footprint: error: pip install transformers", file=sys.stderr)
        return 2

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"| architecture | kind | recorded MiB | {' | '.join(asked.variants)} | s |")
    print("|---|---|---|" + "---|" * (len(asked.variants) + 1))
    failures = []
    for name in asked.only:
        start = time.perf_counter()
        results = [compare(name, variant) for variant in asked.variants]
        seconds = time.perf_counter() - start
        size = f"{results[0].recorded / 2**20:.1f}" if results[0].recorded else "-"
        words = " | ".join(result.words() for result in results)
        kind = ARCHITECTURES[name].kind
        print(f"| {name} | {kind} | {size} | {words} | {seconds:.0f} |", flush=True)
        pairs = zip(asked.variants, results, strict=True)
        failures += [failure(name, variant, result) for variant, result in pairs]

    failures = [line for line in failures if line]
    print("\n".join(["", f"{len(failures)} further off or refused:", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

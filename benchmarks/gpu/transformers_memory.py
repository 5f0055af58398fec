"""Models of `transformers`, which know nothing of longhaul: the peak of a training step, predicted
by footprint/ and measured.

Predicted is for CUDA on a GPU and for a CPU elsewhere; measured is the allocator's own peak of the
second of two steps. The models are made from configurations: nothing is downloaded.
"""

import functools
import importlib.util
import tempfile
from dataclasses import dataclass, field

import torch

from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run, Table, free
from footprint import Report, measure, predict
from longhaul.memory import hugging_face
from longhaul.memory.door import StepConfig
from model import GIB

BF16 = dict(dtype="bf16")
AUTOCAST = dict(autocast="bf16")
CHECKPOINTED = AUTOCAST | dict(checkpointing=True)
FUSED = dict(optimizer="adamw_fused")


@dataclass(frozen=True)
class Case:
    """A class of `transformers` with its configuration's changes, and how it is trained."""

    model: str
    config: str
    changes: dict = field(default_factory=dict)
    tokens: int = 512
    rows: int = 8
    training: dict = field(default_factory=dict)

    @property
    def words(self) -> str:
        """How it is trained."""
        sizes = f"{self.rows} x {self.tokens:,}, "
        return sizes + (", ".join(f"{k}={v}" for k, v in self.training.items()) or "fp32")


def decoder(layers: int, width: int, inner: int, heads: int, groups: int) -> dict:
    return dict(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width // heads,
        vocab_size=32_768,
    )


def wide(layers: int = 24, width: int = 1024, heads: int = 16) -> dict:
    """Encoders of about 0.3B parameters."""
    return dict(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
    )


LLAMA = decoder(16, 2048, 8192, 32, 8)
T5 = dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)
ROBERTA = wide() | dict(max_position_embeddings=514)
CASES = (
    Case("LlamaForCausalLM", "LlamaConfig", LLAMA, 4096, 2, CHECKPOINTED),
    Case("Qwen3ForCausalLM", "Qwen3Config", decoder(28, 1024, 3072, 16, 8), 4096, 2, BF16 | FUSED),
    Case("BertForSequenceClassification", "BertConfig", wide(), 512, 16, AUTOCAST),
    Case("T5ForConditionalGeneration", "T5Config", T5, 512, 8),
    Case("ViTForImageClassification", "ViTConfig", wide(), 1, 64, AUTOCAST | FUSED),
    Case("GPT2LMHeadModel", "GPT2Config", dict(n_layer=24, n_embd=1024, n_head=16), 1024, 4),
    Case("MistralForCausalLM", "MistralConfig", decoder(12, 2048, 7168, 16, 4), 8192, 1, BF16),
    Case("RobertaForMaskedLM", "RobertaConfig", ROBERTA, 512, 8, CHECKPOINTED),
    Case("BartForConditionalGeneration", "BartConfig", {}, 512, 8, AUTOCAST),
    Case(
        "MixtralForCausalLM",
        "MixtralConfig",
        decoder(8, 1024, 2816, 16, 4) | dict(num_local_experts=4),
        2048,
        2,
        BF16 | dict(optimizer="adamw_8bit"),
    ),
)
TOY_CASES = (
    Case("LlamaForCausalLM", "LlamaConfig", decoder(2, 64, 128, 4, 2), 64, 2, AUTOCAST),
    Case("BertForSequenceClassification", "BertConfig", wide(2, 64, 4), 64, 2),
)
SECONDS = 8  # of a case on a GPU: predicted on its host, made there, and run
TABLE = Table(
    "transformers memory",
    "Peak of a training step of transformers, predicted and measured",
    {
        "model": "text",
        "training": "text",
        "live predicted, GiB": "gib",
        "allocated predicted, GiB": "gib",
        "measured, GiB": "gib",
        "difference": "percent",
        "reserved predicted, GiB": "gib",
        "reserved, GiB": "gib",
        "reserved difference": "percent",
        "not predicted": "text",
    },
)


def jobs(place: Place) -> list[Job]:
    """The ten models in two jobs; at toy sizes two models in one."""
    if place.toy:
        return [_job("toy", 20, TOY_CASES, place)]
    half = len(CASES) // 2
    return [
        _job("the first half", 11, CASES[:half], place),
        _job("the second half", 17.2, CASES[half:], place),
    ]


def _job(name: str, importance: float, cases: tuple[Case, ...], place: Place) -> Job:
    work = functools.partial(all_of, cases, place=place)
    seconds = SECONDS * (len(cases) + 1)  # transformers is imported first
    return Job(f"memory of transformers, {name}", importance, seconds, work)


def all_of(cases: tuple[Case, ...], run: Run, place: Place) -> None:
    """A row for each case."""
    if importlib.util.find_spec("transformers") is None:
        run.note("memory of transformers: not installed (pip install transformers)")
        return
    for case in cases:
        one_case(case, run, place)
        free()


def one_case(case: Case, run: Run, place: Place) -> None:
    """A row: what was predicted before the model was made, and what the allocator recorded."""
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(case, folder)
        training = StepConfig(hf=folder, seq=case.tokens, batch=case.rows, **case.training)
        report = predict(*hugging_face.functions(training), place.device.type)
        figures = on_gpu(report, training) if place.cuda else on_cpu(report, training)
    run.row(
        TABLE,
        **{
            "model": case.model,
            "training": case.words,
            "live predicted, GiB": report.peak / GIB,
            "not predicted": "; ".join(report.not_modelled),
        },
        **figures,
    )


def write_configuration(case: Case, folder: str) -> None:
    """The configuration as a folder has it."""
    import transformers

    config = getattr(transformers, case.config)(**case.changes, architectures=[case.model])
    config.save_pretrained(folder)


def on_cpu(report: Report, training: StepConfig) -> dict:
    """What the CPU's allocator records."""
    measured = measure(*hugging_face.functions(training))
    return {"measured, GiB": measured / GIB, "difference": percent(report.peak, measured)}


def on_gpu(report: Report, training: StepConfig) -> dict:
    """What the caching allocator records, which also gives cuBLAS its workspaces."""
    found = peaks(*hugging_face.functions(training, "cuda"))
    allocated, reserved = report.allocated, report.reserved
    return {
        "allocated predicted, GiB": allocated / GIB,
        "measured, GiB": found[0] / GIB,
        "difference": percent(allocated, found[0]),
        "reserved predicted, GiB": reserved / GIB,
        "reserved, GiB": found[1] / GIB,
        "reserved difference": percent(reserved, found[1]),
    }


def peaks(build, step) -> tuple[int, int]:
    """Bytes (allocated, reserved) at most in the second of two steps on the GPU."""
    state = build()
    step(state)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(state)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def percent(predicted: int, measured: int) -> float:
    """How far the prediction is off."""
    return 100 * (predicted / measured - 1)

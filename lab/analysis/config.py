"""The settings of an analysis, which are the flags of lab.run_full_analysis.

`Measures` is what a plan needs, too (profile_memory.py --task analysis); `AnalysisConfig` adds the
model, the data and the folder of a run.
"""

from dataclasses import dataclass
from typing import ClassVar

from base.flags import PRECISIONS, spellings
from lab.analysis.distance import CHUNK
from lab.analysis.precision import REFERENCE
from longhaul.cli import check_ranges, flag, known_words, words_of
from longhaul.kinds import attention_kind
from model import ModelConfig

# How a precision may be spelled, and its name in torch, which settings and files use.
IN_TORCH = {
    spelling: PRECISIONS[name] for spelling, name in spellings("fp32", "bf16", "fp16").items()
}


@dataclass(frozen=True)
class Measures:
    """What is measured of a model, and over how much."""

    layers: str = flag(
        "",
        "layers to look at, such as 0,6,11; empty: all",
        group="analysis",
    )
    num_samples: int = flag(
        32,
        "rows of --context_length tokens that are read",
        group="analysis",
    )
    chunk: int = flag(
        0,
        "rows pass in parts of so many tokens, a multiple of 64, over the KV cache, with the same "
        "figures; 0: whole",
        at_least=0,
        group="analysis",
    )
    compare: str = flag(
        "",
        "precisions to compare over the same tokens, such as float32,bfloat16,float16; float32 is "
        "the reference",
        group="analysis",
    )
    skip_sae: bool = flag(False, "train no sparse autoencoders", group="analysis")
    sae_width: int = flag(
        2,
        "latents of an autoencoder, as a multiple of the model's width",
        at_least=1,
        group="analysis",
    )
    sae_k: int = flag(
        8, "latents of an autoencoder that a token activates", at_least=1, group="analysis"
    )
    sae_tokens: int = flag(
        500_000,
        "tokens that an autoencoder is trained on, the samples again and again",
        at_least=1,
        group="analysis",
    )
    skip_patching: bool = flag(False, "patch no activations", group="analysis")
    prompts: int = flag(
        16, "pairs of prompts whose activations are patched", at_least=1, group="analysis"
    )
    prompt_length: int = flag(128, "tokens of such a prompt", at_least=3, group="analysis")
    spans: int = flag(
        16,
        "spans of positions that are patched one by one; each costs two forwards of the prompts in "
        "each layer",
        at_least=2,
        group="analysis",
    )
    queries: int = flag(
        32_768,
        "tokens from which attention is followed back, of each layer, about; 0: all",
        at_least=0,
        group="analysis",
    )

    def __post_init__(self):
        # of a plan, the settings of training follow and check theirs
        more = getattr(super(), "__post_init__", None)
        if more is not None:
            more()
        if self.num_samples < 1:
            raise ValueError(f"--num_samples {self.num_samples} is out of range: give at least 1")
        if self.chunk % CHUNK:
            raise ValueError(
                f"--chunk {self.chunk} would change which queries are measured: give a multiple of "
                f"{CHUNK}"
            )
        self.precisions()

    def chosen(self, config: ModelConfig) -> tuple[int, ...]:
        """The layers of --layers, rising; ValueError for one that the model does not have, and for
        one that is named twice.
        """
        if not self.layers:
            return tuple(range(config.num_layers))

        words = words_of(self.layers)
        valid = ", ".join(str(layer) for layer in range(config.num_layers))
        if not words:
            raise ValueError(f"--layers {self.layers[:40]} names no layer: choose from {valid}")
        found: list[int] = []
        for word in words:
            if not word.isascii() or not word.isdigit() or int(word) >= config.num_layers:
                raise ValueError(
                    f"--layers {word[:40]} is no layer of the model: choose from {valid}"
                )
            if int(word) in found:
                raise ValueError(f"--layers names {int(word)} twice: name each layer once")
            found.append(int(word))
        return tuple(sorted(found))

    def precisions(self) -> tuple[str, ...]:
        """The precisions of --compare by their names in torch; ValueError unless float32 is among
        them, and others, each known and named once.
        """
        if not self.compare:
            return ()
        words = known_words("--compare", self.compare, tuple(IN_TORCH))
        found = tuple(IN_TORCH[word] for word in words)
        for name in found:
            if found.count(name) > 1:
                raise ValueError(f"--compare has {name} twice: give each precision once")
        if REFERENCE not in found or len(found) < 2:
            raise ValueError(
                f"--compare {self.compare}: give {REFERENCE}, which others are compared with, and "
                "at least one other"
            )
        return found

    def compared(self) -> tuple[str, ...]:
        """Those that are compared with float32."""
        return tuple(name for name in self.precisions() if name != REFERENCE)

    def check_model(self, config: ModelConfig) -> None:
        """ValueError for layers, parts and sizes that the model does not allow."""
        self.chosen(config)
        if self.chunk and not attention_kind(config).prompt_in_parts:
            raise ValueError(
                f"--chunk {self.chunk}: {config.attention.name} attention reads a row at once: "
                "give --chunk 0"
            )
        latents = self.sae_width * config.hidden_size
        if not self.skip_sae and self.sae_k > latents:
            raise ValueError(
                f"--sae_k {self.sae_k} is more than the {latents} latents of --sae_width "
                f"{self.sae_width}: give at most {latents}"
            )


@dataclass(frozen=True)
class AnalysisConfig(Measures):
    """All settings of lab.run_full_analysis, validated once and never changed."""

    GROUPS: ClassVar[dict[str, str]] = {
        "model and data": "What is analysed, and on which text.",
        "analysis": "What is measured.",
        "run": "How it is computed, and where the results go.",
    }

    checkpoint: str = flag(
        "",
        "a step-* folder, a run's folder, whose newest checkpoint is taken, or a Hugging Face "
        "folder",
        group="model and data",
    )
    data: str = flag(
        "",
        "folder made by data.prepare; empty: the run's own data",
        group="model and data",
    )
    split: str = flag(
        "val", "documents that are read", choices=("val", "train"), group="model and data"
    )
    context_length: int = flag(
        0,
        "tokens of a row; 0: as in training",
        group="model and data",
    )
    seed: int = flag(
        0, "of the order of documents, and of what is trained", at_least=0, group="model and data"
    )
    dtype: str = flag(
        "float32",
        "precision of the weights and of what is computed",
        choices=tuple(IN_TORCH),
        group="run",
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", group="run")
    batch_size: int = flag(8, "rows that pass at once", at_least=1, group="run")
    out: str = flag(
        "",
        "folder of the results, a new or an empty one",
        group="run",
    )

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dtype", IN_TORCH[self.dtype])
        if self.compare and self.dtype != REFERENCE:
            raise ValueError(
                f"--compare with --dtype {self.dtype}: what is compared begins with the model in "
                f"{REFERENCE}: drop --dtype"
            )
        for name in ("checkpoint", "out"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: name a folder")
        if self.context_length and self.context_length < 2:
            raise ValueError(
                f"--context_length {self.context_length} is out of range: give at least 2, or 0 "
                "for the context of training"
            )
        check_ranges(self)

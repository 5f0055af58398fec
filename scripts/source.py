"""The model that a script is given: a checkpoint of longhaul, or a Hugging Face folder.

`SourceConfig` has the flags that name it and say how it is read, which scripts add theirs to.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from base.flags import PRECISIONS, precision, spellings
from base.untrusted import refuse_pickle
from data import origin
from data.load_tokenizer import AnyTokenizer, Ids, find_tokenizer, load_tokenizer
from data.losses import Outspoken
from longhaul import cli, qwen3
from longhaul.checkpoint import load, start
from longhaul.checkpoint.format import Checkpoint, model_config
from longhaul.checkpoint.load import load_model, newest, verified
from longhaul.cli import flag
from longhaul.kinds import WEIGHTLESS, read_with
from model import Decoder, ModelConfig


@dataclass(frozen=True)
class SourceConfig:
    """The flags of a model that is read."""

    checkpoint: str = flag(
        "",
        "a step-* folder, a run's folder, whose newest checkpoint is taken, or a Hugging Face "
        "folder",
    )
    attention_type: str = flag(
        "",
        "read a model of standard attention sparsely: by blocks of keys that are chosen so",
        choices=WEIGHTLESS,
    )
    blocks: tuple[str, ...] = flag(
        (), "sizes of that attention, such as count=32 local=4", many=True
    )
    device: str = flag("auto", "where to compute: auto, cpu, cuda or cuda:N")
    dtype: str = flag("fp32", "compute precision", choices=tuple(spellings("fp32", "bf16")))

    def __post_init__(self):
        cli.require(self, "checkpoint")
        cli.check_ranges(self)


@dataclass(frozen=True)
class Source:
    """A model that was checked; its weights are not read yet."""

    folder: Path  # a step-* folder, or one of Hugging Face
    config: ModelConfig
    checkpoint: Checkpoint | None  # None for a Hugging Face folder
    reach: int  # tokens that the positions of its weights were trained for

    @classmethod
    def open(cls, named: str) -> "Source":
        """ValueError or CheckpointError for a folder without a sound model."""
        folder = Path(named)
        refuse_pickle(folder)
        if qwen3.is_folder(folder):
            config = ModelConfig(**qwen3.read_config(folder))
            return Source(folder, config, None, config.rope_reach)
        checkpoint = verified(newest(folder))
        reach = start.trained_context(checkpoint)
        return Source(checkpoint.folder, model_config(checkpoint), checkpoint, reach)

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer is, if it is anywhere."""
        return self.folder if self.checkpoint is None else self.folder.parent

    def stop_ids(self, tokenizer: AnyTokenizer) -> set[int]:
        """The ids at which the model stops: of its folder, and what ends a document."""
        folder = self.folder if self.checkpoint is None else origin.kept(self.folder.parent)
        return {tokenizer.eod_id, *origin.stop_ids(folder)}

    def read_with(self, attention: str, blocks: Sequence[str]) -> Self:
        """The same model with another attention, if one is named."""
        config = read_with(self.config, attention or None, blocks)
        return dataclasses.replace(self, config=config)

    def load_in(
        self,
        device: torch.device,
        dtype: str,
        stored: torch.dtype | None = None,
    ) -> Decoder:
        """The model on `device`, computing in a precision such as "bf16", its parameters `stored`
        in another one; by default a checkpoint's in fp32 and a folder's in what it computes.
        """
        name = PRECISIONS[precision(dtype)]
        attention = self.config.attention
        if self.checkpoint is None:
            stored = stored or getattr(torch, name)
            return qwen3.from_hf(
                self.folder, device, stored, compute_dtype=name, attention=attention
            )
        return load_model(
            self.checkpoint,
            device,
            name,
            self.config.kernels,
            stored,
            attention,
        )


def tokenizer_of(source: Source | start.Start, path: str = "", otherwise: str = "") -> AnyTokenizer:
    """The tokenizer that the model was trained with, from `path` or from its folder; ValueError if
    it is another one, or if there is none, which says `otherwise`, too. It warns of lost text.
    """
    folder = source.tokenizer_folder
    found = path or find_tokenizer(folder)
    if found is None:
        raise ValueError(f"{folder} has no tokenizer: give --tokenizer PATH{otherwise}")
    tokenizer = load_tokenizer(found)
    check_ids(source, tokenizer.vocab_size, tokenizer, f"tokenizer {found}")
    return Outspoken(tokenizer)


def check_ids(source: Source | start.Start, vocab_size: int, ids: Ids | AnyTokenizer, given: str):
    """ValueError unless a tokenizer has the ids that the model was trained on; `given` names it."""
    load.check_ids(source.folder, source.checkpoint, ids, given)
    known = source.config.vocab_size
    if vocab_size > known:
        raise ValueError(
            f"{given} has {vocab_size:,} ids, and {source.folder} knows {known:,}: prepare or "
            f"generate text with --tokenizer {source.tokenizer_folder}"
        )

"""Make a reward model of labelled texts: `python -m lab.reward --checkpoint runs/mine ...`.

Each line of a JSONL file has a text and its label, a number from 0 to 1. The body of the reward
model is the checkpoint as it is; a linear layer on the mean hidden state of a text learns the
labels, and what it makes of held-out texts is printed. lab.grade takes the folder as
--reward_checkpoint (docs/LAB.md).
"""

import base.with_torch  # noqa: F401  (first: a missing package is answered in one line)

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from base import durable
from base.flags import precision, spellings
from data.fields import TextField
from data.load_tokenizer import AnyTokenizer
from data.writer import require_new
from lab.posttrain import labels, reward
from lab.posttrain.labels import Fit, Labelled
from lab.posttrain.reward import RewardModel
from longhaul import cli, qwen3, step
from longhaul.checkpoint import start
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.dist import named_device
from scripts.source import tokenizer_of

FEWEST = 10  # texts that a head is trained and judged on
FP32 = 4  # bytes of a weight that is saved


@dataclass(frozen=True)
class RewardConfig:
    """The flags."""

    checkpoint: str = flag(
        "",
        "the body, usually the policy's first weights: a run or step-* folder of longhaul, or a "
        "Hugging Face model",
    )
    data: str = flag("", "JSONL file of texts with labels")
    output: str = flag("", "folder to write; must be new or empty")
    text_field: str = flag("text", "field of the text that is judged")
    label_field: str = flag("label", "field of the label, from 0 to 1")
    prompt_field: str = flag("", "field of what the text answers, if there is one")
    tokenizer: str = flag("", "file or folder; empty: the checkpoint's own")
    held_out: float = flag(
        0.1, "share of the texts that is not learned from", at_least=0.001, at_most=0.999
    )
    steps: int = flag(Fit().steps, "steps of the linear layer", at_least=1)
    lr: float = flag(Fit().lr, "learning rate of AdamW", at_least=0, at_most=100)
    weight_decay: float = flag(Fit().weight_decay, "weight decay of AdamW", at_least=0, at_most=100)
    batch_size: int = flag(8, "texts that are read at once", at_least=1)
    seed: int = flag(0, "decides what is held out")
    dtype: str = flag("fp32", "of the body", choices=tuple(spellings("fp32", "bf16")))
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self):
        cli.require(self, "checkpoint", "data", "output")
        cli.check_ranges(self)


def main(args: list[str] | None = None):
    """Train, say how good it is, write the folder; bad input ends with one line and exit code 2."""
    cli.run(RewardConfig, run, args, "lab.reward", __doc__.splitlines()[0])


def run(given: RewardConfig):
    """Read, train and save."""
    require_new(Path(given.output))
    device = named_device(given.device)
    try:
        origin = start.read(given.checkpoint)
        dtype = precision(given.dtype)
        settings = start.completed({"init_from": given.checkpoint, "dtype": dtype})
        cfg = TrainConfig(**settings)
    except ValueError as error:  # in which the checkpoint has its name in other commands
        raise ValueError(str(error).replace("--init_from", "--checkpoint")) from None
    config = cfg.model()
    qwen3.require_counterpart(config)

    durable.require_free(Path(given.output), FP32 * config.num_params())

    tokenizer = tokenizer_of(origin, given.tokenizer)
    texts = [encoded(text, tokenizer, cfg.context_length) for text in read(given)]
    random.Random(given.seed).shuffle(texts)
    number = max(1, round(given.held_out * len(texts)))
    held_out, learned = texts[:number], texts[number:]
    require_variety(learned, given)

    start.check(origin, config)
    body = step.frozen(cfg, config, device)
    start.load_into(body, origin)
    model = RewardModel(body).requires_grad_(False)
    print(f"{len(learned):,} texts are learned from, {number:,} are held out", flush=True)
    fit = Fit(given.steps, lr=given.lr, weight_decay=given.weight_decay, seed=given.seed)
    print(labels.train(model, learned, held_out, given.batch_size, fit), flush=True)
    reward.save(model, given.output)
    print(f"wrote {given.output}; train with --reward_checkpoint {given.output}")


def require_variety(learned: list[Labelled], given: RewardConfig):
    """ValueError if the labels teach nothing."""
    if len(learned) < FEWEST:
        raise ValueError(
            f"{given.data} has {len(learned)} text(s) to learn from: give {FEWEST} or more"
        )
    if len({text.label for text in learned}) == 1:
        raise ValueError(
            f"all texts of {given.data} that are learned from have the label "
            f"{learned[0].label:g}: give texts with other labels, too"
        )


# ---- texts


class Text(NamedTuple):
    """A line of the file."""

    place: str  # file:line
    prompt: str
    text: str
    label: float


def read(given: RewardConfig) -> Iterator[Text]:
    """The texts of a file; ValueError names the first line that is wrong."""
    if not Path(given.data).is_file():
        raise ValueError(f"--data {given.data} is no file: name a JSONL file of labelled texts")
    fields = [TextField(given.text_field)]
    if given.prompt_field:
        fields.append(TextField(given.prompt_field, "--prompt_field"))
    with open(given.data, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{given.data}:{number}"
            try:
                record = json.loads(line)
                text, prompt = [*(field.text_of(record) for field in fields), ""][:2]
                (prompt + text).encode()  # an error for a lone surrogate
                yield Text(place, prompt, text, label_of(record, given.label_field))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: {error}: mend this line, or leave it out") from None


def label_of(record: dict, field: str) -> float:
    """The label of a record, in which true is 1; ValueError if it is no number from 0 to 1."""
    if field not in record:
        found = ", ".join(list(record)[:8])
        raise ValueError(f"there is no field {field!r} (found: {found}); set --label_field")
    label = record[field]
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise ValueError(f"the label {str(label)[:40]!r} is no number from 0 to 1, as rewards are")
    return float(label)


def encoded(text: Text, tokenizer: AnyTokenizer, context: int) -> Labelled:
    """The ids of a prompt and its text, which end as a document does; ValueError if these are too
    many.
    """
    if not text.text:
        raise ValueError(f"{text.place}: the text is empty: leave this line out")
    prompt = tokenizer.encode(text.prompt) if text.prompt else []
    ids = [*prompt, *tokenizer.encode(text.text), tokenizer.eod_id]
    if len(ids) > context:
        raise ValueError(
            f"{text.place}: {len(ids):,} tokens are more than the {context:,} of the checkpoint's "
            "context: shorten this text, or leave it out"
        )
    return Labelled(ids, len(prompt), text.label)


if __name__ == "__main__":
    main()

"""Predicted memory of LoRA and its kin against 38 runs that others published.

    python -m benchmarks.peft_peaks [--only WORD ...] [--tokens N] [--whole]

benchmarks/peft_peaks.json has the runs: Llama-3.2-3B in bf16 with adapters in fp32 and AdamW, four
rows a step, on an L40S. Published are the most reserved bytes of a run, and the mean of what was
allocated behind a step: weights, adapters, gradients, states, the last logits, and the keys and
values that the model returns. The step is written from the run.py beside the results. Nothing is
run: the step is predicted on fake tensors.

The run sorts each 80 rows by length, the longest first, and empties the cache every ten steps, so
the longest batch of each 80 rows follows torch.cuda.empty_cache(). How long the longest is was not
published: at most 768 tokens. TOKENS was taken from one run, REFERENCE, whose maximum is thus no
evidence, and is the same for all.

Five layers are simulated and unrolled to 28; --whole simulates all.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from base.flags import Parser
from footprint import Report, predict
from footprint.cards.allocator import held_before, of_step, replay
from footprint.cards.device import multiplying_threads, with_cublas
from footprint.python.refusal import Refused
from footprint.record.trace import Trace
from footprint.record.unroll import LAYERS, unroll

PUBLISHED = Path(__file__).with_suffix(".json")
CARD = "L40S"
MIB = 2**20
CLOSE = 0.02  # a difference that needs no cause
DEPTH, VOCABULARY = 28, 128_256
ROWS, LIMIT = 4, 768  # of a batch; the most tokens of a row
REFERENCE, TOKENS = "lora/llama-3.2-3B-rank32", 692
UNEQUAL = ("ADALORA", "LILY")  # methods whose layers are not alike: they share tensors between some


@dataclass(frozen=True)
class Row:
    """One published run."""

    experiment: str
    peft: dict
    optimizer: str
    options: dict
    parameters: list[int]
    idle: float
    reserved: int


def published() -> dict:
    return json.loads(PUBLISHED.read_text())


def rows() -> Iterator[Row]:
    """All published runs, in the order of the file."""
    return (Row(**run) for run in published()["runs"])


# ---- the step


def base_model(layers: int) -> nn.Module:
    """Llama-3.2-3B with so many layers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def adapted(model: nn.Module, chosen: dict) -> nn.Module:
    """The model with the adapters of a run, if it has any."""
    if not chosen:
        return model
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    options = dict(chosen)
    if "progressbar" in options:
        options["progressbar"] = False
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[options.pop("peft_type")]
    layers = model.config.num_hidden_layers
    for name in ("num_layers", "adapter_layers"):
        if name in options:
            options[name] = layers
    # the words and values are those that the model has, not the tokenizer's
    if options.get("prompt_tuning_init") == "SAMPLE_VOCAB":
        options["prompt_tuning_init"] = "RANDOM"
    return get_peft_model(model, kind(**options), autocast_adapter_dtype=True)


def optimizer_for(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    if row.optimizer == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer

        return create_lorafa_optimizer(model, **row.options)
    return getattr(torch.optim, row.optimizer)(model.parameters(), **row.options)


@dataclass
class Training:
    """What is alive between steps: also the last batch, and what the model returned for it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lengths: list[int]  # of the batches to come
    alive: dict = field(default_factory=dict)

    def step(self) -> None:
        tokens = self.lengths.pop(0)
        ids_BT = torch.randint(VOCABULARY, (ROWS, tokens))
        mask_BT = torch.ones(ROWS, tokens, dtype=torch.int64)
        mask_BT[1:, -1] = 0  # rows differ in length, so that attention has a mask
        batch = dict(input_ids=ids_BT, attention_mask=mask_BT, labels=ids_BT.clone())
        self.alive["batch"] = batch

        self.optimizer.zero_grad()
        outputs = self.model(**batch, num_items_in_batch=ROWS * tokens - ROWS + 1)
        self.alive["outputs"] = outputs
        outputs.loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if hasattr(getattr(self.model, "base_model", None), "update_and_allocate"):
            self.alive["allocations"] = self.alive.get("allocations", 0) + 1
            self.model.base_model.update_and_allocate(self.alive["allocations"])


def report_of(row: Row, layers: int, tokens: int) -> Report:
    """A step with the mean length, and then the one with the longest rows."""
    lengths = [published()["mean_tokens"], tokens]

    def build() -> Training:
        torch.set_default_device("cuda")
        model = adapted(base_model(layers), row.peft)
        model.train()
        optimizer = optimizer_for(row, model)
        # before the first step, the run looks at the base model's loss: this ends by setting
        # requires_grad of all adapters, also of those that LoRA-FA has frozen
        if row.peft:
            with model.disable_adapter():
                pass
        return Training(model, optimizer, lengths)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return predict(build, Training.step, target=CARD)


# ---- the table


@dataclass(frozen=True)
class Prediction:
    """Bytes when idle, and at most in the step."""

    idle: int
    live: int
    reserved: int


def predicted(row: Row, tokens: int = TOKENS, whole: bool = False) -> Prediction:
    """The run's memory. Refused if footprint does not know the method."""
    if whole or row.peft.get("peft_type") in UNEQUAL:
        return prediction(report_of(row, DEPTH, tokens).trace)
    return prediction(unroll(report_of(row, LAYERS, tokens).trace, DEPTH))


def prediction(trace: Trace) -> Prediction:
    trace = with_cublas(trace, multiplying_threads(trace))
    found = replay(trace, steps=1, emptied=True)
    idle = sum(held_before(of_step(trace)).values())
    return Prediction(idle, found.peak_live, found.peak_reserved)


# method -> what the prediction cannot know of its runs
CAUSES = {
    "full-finetuning": "probably scattered gradients and states, which are packed here",
    "boft": "2,016 MiB of `boft_P`, probably in the run's host memory, are on the GPU here",
    "adalora": "peft 0.21 trains `ranknum`, whose backward keeps a product; the run's did not",
}


def line(row: Row, found: Prediction) -> str:
    idle, error = found.idle / row.idle - 1, found.reserved / row.reserved - 1
    cause = "" if abs(error) <= CLOSE else CAUSES.get(row.experiment.split("/")[0], "unknown")
    numbers = f"{found.idle / MIB:>9.0f}{row.idle / MIB:>9.0f}{idle:>+8.2%}"
    numbers += f"{found.reserved / MIB:>9.0f}{row.reserved / MIB:>9.0f}{error:>+8.2%}"
    return f"{numbers}  {row.experiment}  {cause}".rstrip()


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="runs with one of these words in their name")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the longest batch")
    parser.add_argument("--whole", action="store_true", help="simulate all 28 layers")
    chosen = parser.parse_args(arguments)

    print(f"{'idle':>9}{'publ.':>9}{'error':>8}{'maximum':>9}{'publ.':>9}{'error':>8}  run (MiB)")
    close, count = 0, 0
    for row in rows():
        if chosen.only and not any(word in row.experiment for word in chosen.only):
            continue
        count += 1
        try:
            found = predicted(row, chosen.tokens, chosen.whole)
        except Refused as refusal:
            print(f"{'refused':>52}  {row.experiment}  {str(refusal).splitlines()[0]}", flush=True)
            continue
        close += abs(found.reserved / row.reserved - 1) <= CLOSE
        print(line(row, found), flush=True)
    print(f"{count} runs: the maximum of {close} is within {CLOSE:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

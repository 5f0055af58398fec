"""What two forms of post-training save: time and memory of forward and backward next to the plain
forms, which take turns with them.

    python -m benchmarks.posttrain [--only grade shared_prompt] [--rounds 3] [--out FOLDER]

grade: a response of GRADE that is decoded over a cache with mixtures of --gumbel_topk tokens, and
the published form: a forward of the whole prefix for each token, with mixtures of the vocabulary.
shared_prompt: the row [prompt | r1 | ... | rG], and G rows [prompt | r].

Time is process CPU time of one thread, the median over rounds, and its ratio the median of the
rounds' ratios. Peaks are those of the allocator, above what was there before. Nothing is timed
before it gives the loss and the gradients of the plain form; GRADE does with mixtures of the whole
vocabulary and the same noise. fp32.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import clock, record
from footprint.measure import peak_bytes, saved_bytes
from longhaul import cli, dist, kernels, step
from longhaul.cli import flag
from longhaul.config import TrainConfig
from longhaul.posttrain import grade
from longhaul.posttrain.grade import GradeObjective, GradeSettings
from longhaul.posttrain.prompts import SharedPrompts
from longhaul.posttrain.reward import RewardModel
from longhaul.vocab.loss import linear_cross_entropy
from model import Decoder, ModelConfig

CLOSE_LOSS = 1e-5
CLOSE_GRADIENT = 1e-4  # relative, of all gradients together
PARTS = ("grade", "shared_prompt")

Run = Callable[[], Tensor]  # forward and backward, which returns the loss

GRADE = record.Table(
    "grade",
    "A response of GRADE, forward and backward",
    {
        "response": "text",
        "peak above weights, MB": "mb",
        "less memory": "ratio",
        "CPU seconds": "seconds",
        "time": "ratio",
    },
)
SHARED = record.Table(
    "shared_prompt",
    "A prompt and its responses, forward and backward",
    {
        "rows": "text",
        "saved for backward, MB": "mb",
        "less saved": "ratio",
        "peak above weights, MB": "mb",
        "less memory": "ratio",
        "CPU seconds": "seconds",
        "less time": "ratio",
    },
)


@dataclass(frozen=True)
class PosttrainConfig:
    """Sizes of the benchmark. The width, heads and feed-forward of all models are those of
    --model_size tiny."""

    only: tuple = flag((), "parts, by name", many=True, choices=PARTS, group="benchmark")
    rounds: int = flag(3, "rounds; figures are their medians", at_least=1, group="benchmark")
    num_layers: int = flag(4, "layers of every model", at_least=1, group="benchmark")
    vocab_size: int = flag(32_000, "grade: vocabulary", at_least=2, group="benchmark")
    prompt_vocab_size: int = flag(
        8192,
        "shared_prompt: vocabulary; a larger one makes the loss, which both forms compute of the "
        "same tokens, a larger part of the time",
        at_least=2,
        group="benchmark",
    )
    gumbel_topk: int = flag(256, "grade: tokens of a mixture", at_least=1, group="benchmark")
    soft_prompt: int = flag(32, "grade: tokens of the prompt", at_least=1, group="benchmark")
    soft_response: int = flag(
        64, "grade: tokens of the response", ("max_new_tokens",), at_least=1, group="benchmark"
    )
    prompt: int = flag(1024, "shared_prompt: tokens of the prompt", at_least=1, group="benchmark")
    response: int = flag(128, "shared_prompt: tokens of a response", at_least=1, group="benchmark")
    group_size: int = flag(
        8, "shared_prompt: responses to the prompt", at_least=2, group="benchmark"
    )
    out: str = flag(
        "benchmarks/results/posttrain",
        "folder for results.json and results.md",
        group="benchmark",
    )

    def __post_init__(self):
        cli.check_ranges(self)
        if self.gumbel_topk > self.vocab_size:
            raise ValueError(
                f"--gumbel_topk {self.gumbel_topk} exceeds --vocab_size {self.vocab_size}: give at "
                f"most {self.vocab_size}"
            )

    def model(self, vocab_size: int) -> ModelConfig:
        """The shape of all models of a part."""
        return ModelConfig.preset("tiny", vocab_size=vocab_size, num_layers=self.num_layers)

    def command(self) -> str:
        """The command line of these sizes."""
        names = ("rounds", "num_layers", "vocab_size", "prompt_vocab_size", "gumbel_topk")
        names += ("soft_prompt", "soft_response", "prompt", "response", "group_size")
        changed = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        sizes = [f" --{name} {getattr(self, name)}" for name in changed]
        parts = f" --only {' '.join(self.only)}" if self.only else ""
        return "python -m benchmarks.posttrain" + parts + "".join(sizes)


def main(args: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        cfg = cli.parse(PosttrainConfig, args, __doc__)
    except ValueError as error:
        print(f"benchmarks.posttrain: error: {error}", file=sys.stderr)
        return 2

    print(cfg.command(), flush=True)
    torch.set_num_threads(1)
    dist.keep_freed_memory()
    run = record.Run(
        cfg.out,
        "Post-training next to its plain forms",
        cfg.command(),
        record.where(clock.CPU),
        toy=cfg.num_layers < PosttrainConfig.num_layers,
        echo=lambda line: None,
    )
    for part in cfg.only or PARTS:
        {"grade": measure_grade, "shared_prompt": measure_shared_prompt}[part](cfg, run)
    print((run.folder / "results.md").read_text(encoding="utf-8"))
    return int(bool(run.data["failures"]))


# ---- GRADE


def measure_grade(cfg: PosttrainConfig, run: record.Run):
    """Rows of the table of GRADE, with all weights trained and with frozen embeddings."""
    wrong = differs(grade_step(cfg, "gumbel", topk=0), grade_step(cfg, "gumbel_legacy"))
    if wrong:
        run.fail(f"GRADE with the whole vocabulary is not the published form: {wrong}")
        return

    whole, mixtures = "published form", f"{cfg.gumbel_topk} tokens over a cache"
    for suffix, frozen in (("", False), (", embeddings frozen", True)):
        calls = {
            whole + suffix: grade_step(cfg, "gumbel_legacy", frozen=frozen).run,
            mixtures + suffix: grade_step(cfg, "gumbel", frozen=frozen).run,
        }
        plain = whole + suffix
        peaks = {name: peak_bytes(call, clock.CPU) for name, call in calls.items()}
        times = clock.interleaved(calls, tuple, rounds=cfg.rounds, cold=False)
        for name in calls:
            run.row(
                GRADE,
                **{
                    "response": name,
                    "peak above weights, MB": peaks[name] / 1e6,
                    "less memory": peaks[plain] / peaks[name],
                    "CPU seconds": clock.milliseconds(times[name]) / 1e3,
                    "time": clock.ratio(times, name, plain),
                },
            )


@dataclass(frozen=True)
class Step:
    """Forward and backward of a model; the gradients are gone when it has run."""

    model: Decoder
    loss: Callable[[], Tensor]

    def run(self) -> Tensor:
        """The loss, after its backward."""
        loss = self.loss()
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def gradients(self) -> tuple[float, Tensor]:
        """The loss, and the gradients of all weights, one behind the other."""
        loss = self.loss()
        loss.backward()
        gradients = [p.grad.flatten() for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), torch.cat(gradients)


def grade_step(
    cfg: PosttrainConfig, method: str, topk: int | None = None, frozen: bool = False
) -> Step:
    """A response to one prompt by a method, always with the same weights and noise."""
    settings = GradeSettings(
        eod_id=0,
        method=method,
        max_new_tokens=cfg.soft_response,
        gumbel_topk=cfg.gumbel_topk if topk is None else topk,
    )
    training = TrainConfig(
        model_size="tiny",
        vocab_size=cfg.vocab_size,
        context_length=cfg.soft_prompt + cfg.soft_response,
        dtype="fp32",
        gradient_checkpointing="none" if settings.legacy else "full",
    )
    config = cfg.model(cfg.vocab_size)
    policy = step.build(training, config, clock.CPU).model
    if frozen:
        grade.freeze_embeddings(policy)
    other = dataclasses.replace(training, seed=1)  # with the levers of the policy, as in a run
    reference = step.frozen(other, config, clock.CPU)
    reward = RewardModel(step.frozen(other, config, clock.CPU)).requires_grad_(False)
    torch.nn.init.normal_(reward.weight, generator=torch.Generator().manual_seed(0))

    objective = GradeObjective(settings, reference, reward)
    prompts_BP = torch.arange(cfg.soft_prompt)[None] % cfg.vocab_size
    (micro,) = grade.micro_batches(prompts_BP, [0], 0, 0, 1, settings, clock.CPU)
    return Step(policy, functools.partial(objective.loss, policy, micro, torch.tensor(1.0)))


# ---- a shared prompt


def measure_shared_prompt(cfg: PosttrainConfig, run: record.Run):
    """Rows of the table of a prompt that is computed once."""
    packed, separate = prompt_steps(cfg)
    wrong = differs(packed, separate)
    if wrong:
        run.fail(f"responses that share a prompt are not those of separate rows: {wrong}")
        return

    plain, once = f"{cfg.group_size} rows", "one row, the prompt once"
    steps = {plain: separate, once: packed}
    calls = {name: one.run for name, one in steps.items()}
    saved = {name: saved_bytes(one.loss) for name, one in steps.items()}
    peaks = {name: peak_bytes(call, clock.CPU) for name, call in calls.items()}
    times = clock.interleaved(calls, tuple, rounds=cfg.rounds, cold=False)
    for name in calls:
        run.row(
            SHARED,
            **{
                "rows": name,
                "saved for backward, MB": saved[name] / 1e6,
                "less saved": saved[plain] / saved[name],
                "peak above weights, MB": peaks[name] / 1e6,
                "less memory": peaks[plain] / peaks[name],
                "CPU seconds": clock.milliseconds(times[name]) / 1e3,
                "less time": clock.ratio(times, plain, name),
            },
        )


def prompt_steps(cfg: PosttrainConfig) -> tuple[Step, Step]:
    """The loss of the responses' tokens in one packed row, and in a row for each."""
    P = cfg.prompt
    R = cfg.response
    G = cfg.group_size
    V = cfg.prompt_vocab_size
    model = kernels.decoder(cfg.model(V))
    generator = torch.Generator().manual_seed(0)
    prompt_P = torch.randint(V, (P,), generator=generator)
    responses_GR = torch.randint(V, (G, R), generator=generator)

    shared = SharedPrompts([(P, *[R] * G)])
    packed_1N = torch.cat([prompt_P, responses_GR.flatten()])[None]
    packed = functools.partial(
        model,
        packed_1N,
        packed_1N,
        positions=shared.positions(packed_1N.shape),
        rows=shared,
        head=head_of(*shared.scored()),
    )

    rows_GN = torch.cat([prompt_P.expand(G, P), responses_GR], 1)
    place_GN = torch.arange(rows_GN.numel()).view(G, P + R)
    of_responses = head_of(place_GN[:, P - 1 : -1].flatten(), place_GN[:, P:].flatten())
    separate = functools.partial(model, rows_GN, rows_GN, head=of_responses)
    return Step(model, packed), Step(model, separate)


def head_of(scoring: Tensor, own: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A head with the mean loss of the tokens at `own`, which the states at `scoring` predict."""

    def head(hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor) -> Tensor:
        return linear_cross_entropy(hidden_ND[scoring], weight_VD, tokens_N[own])

    return head


# ---- what is compared


def differs(found: Step, plain: Step) -> str:
    """How two steps disagree in loss or gradients; "" if they agree."""
    loss, gradients = found.gradients()
    expected_loss, expected = plain.gradients()
    off = clock.relative(gradients, expected)
    if (
        abs(loss - expected_loss) <= CLOSE_LOSS * max(1, abs(expected_loss))
        and off <= CLOSE_GRADIENT
    ):
        return ""
    return f"loss {loss:.7f} and {expected_loss:.7f}, gradients off by {off:.1e}"


if __name__ == "__main__":
    sys.exit(main())

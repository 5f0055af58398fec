"""The vocabulary loss at the 4B's head, N tokens at a time, against every peer."""

from benchmarks import vocab_loss
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run

SIZES = ((1, 32_768, 60), (4, 8192, 40), (9, 131_072, 90))  # importance, tokens, seconds
WIDTH = 2560
VOCABULARY = 151_936
ROUNDS = 5
TOY = ((1, 256, 1), (4, 512, 1))
TOY_WIDTH = 64
TOY_VOCABULARY = 2048
TOY_ROUNDS = 3


def jobs(place: Place) -> list[Job]:
    """A job per number of tokens."""
    known: dict = {}
    return [
        Job(
            f"loss, {tokens:,} tokens",
            importance,
            seconds,
            lambda run, N=tokens, limit=seconds / 2: one_size(run, place, N, known, limit),
        )
        for importance, tokens, seconds in (TOY if place.toy else SIZES)
    ]


def one_size(run: Run, place: Place, N: int, known: dict, limit: float):
    """Rows of one size; `known` keeps the losses, so that each compiles once, and the sizes at
    which memory ran out.
    """
    width, vocabulary, rounds = (
        (TOY_WIDTH, TOY_VOCABULARY, TOY_ROUNDS) if place.toy else (WIDTH, VOCABULARY, ROUNDS)
    )
    if "table" not in known:
        known["table"], known["ended"] = losses(place, run.note), {}
    ended = {name: tokens for name, tokens in known["ended"].items() if tokens <= N}
    for name, tokens in ended.items():
        run.note(f"loss, {N:,} tokens: {name} is left out, as its memory ran out at {tokens:,}")
    table = {name: loss for name, loss in known["table"].items() if name not in ended}
    why = vocab_loss.case(run, width, N, vocabulary, table, place.device, rounds, limit=limit)
    known["ended"] |= {name: N for name, reason in why.items() if reason == "out of memory"}
    for name, reason in why.items():
        if name.startswith(vocab_loss.OURS):
            run.fail(f"loss, {N:,} tokens: {name}: {reason}")


def losses(place: Place, say) -> dict:
    """What is compared here; on a CPU without what compiles, which takes longer than all else at
    toy sizes.
    """
    table = vocab_loss.variants(place.device, say)
    left_out = [name for name in table if "compile" in name] if not place.cuda else []
    if left_out:
        say(
            f"{'; '.join(left_out)}: left out at toy sizes, where compiling takes longer "
            "than everything else"
        )
    return {name: loss for name, loss in table.items() if name not in left_out}

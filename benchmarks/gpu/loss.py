"""The vocabulary loss at the 4B's head, N tokens at a time, against every peer."""

from benchmarks import vocab_loss
from benchmarks.gpu.jobs import Job, Place
from benchmarks.record import Run

SIZES = (
    (5, 32_768, 30, False),
    (13.5, 8192, 30, False),
    (15.5, 131_072, 60, False),
    (20.5, 32_768, 90, True),
)  # importance, tokens, seconds, whether the losses that torch.compile builds whole take part
# chunks of 512 tokens are a loop on the host
AT_LENGTH = ("torch.compile", "loop")
WIDTH = 2560
VOCABULARY = 151_936
ROUNDS = 5
TOY = ((5, 256, 60, True),)
TOY_WIDTH = 64
TOY_VOCABULARY = 2048
TOY_ROUNDS = 3


def jobs(place: Place) -> list[Job]:
    """A job per number of tokens."""
    found = []
    for importance, tokens, seconds, at_length in TOY if place.toy else SIZES:
        name = f"loss, {tokens:,} tokens" + (", every peer" if at_length and not place.toy else "")

        def work(run, N=tokens, limit=seconds / 2, at_length=at_length):
            one_size(run, place, N, limit, at_length)

        found.append(Job(name, importance, seconds, work))
    return found


def one_size(run: Run, place: Place, N: int, limit: float, at_length: bool = True):
    """Rows of one size, without the losses whose memory ran out at fewer tokens."""
    width, vocabulary, rounds = (
        (TOY_WIDTH, TOY_VOCABULARY, TOY_ROUNDS) if place.toy else (WIDTH, VOCABULARY, ROUNDS)
    )
    table = losses(place, run.note)
    for name, tokens in ended(run).items():
        if name in table and tokens <= N:
            del table[name]
            run.note(f"loss, {N:,} tokens: {name} is left out, as its memory ran out at {tokens:,}")
    if not at_length:
        table = {
            name: loss
            for name, loss in table.items()
            if not any(word in name for word in AT_LENGTH)
        }
    why = vocab_loss.case(run, width, N, vocabulary, table, place.device, rounds, limit=limit)
    for name, reason in why.items():
        if name.startswith(vocab_loss.OURS):
            run.fail(f"loss, {N:,} tokens: {name}: {reason}")


def ended(run: Run) -> dict[str, int]:
    """Name of a loss -> the fewest tokens at which an earlier job ran out of memory."""
    found: dict[str, int] = {}
    for row in run.earlier.get(vocab_loss.TABLE.name, {"rows": []})["rows"]:
        if row["time, ms"] == "out of memory":
            found[row["loss"]] = min(row["tokens"], found.get(row["loss"], row["tokens"]))
    return found


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

"""The faults of `selfcheck.mutations`: one wrong line each, and the tests that should notice it.

`old` must occur exactly once in its file. When you change that line, change it here too; when the
fault no longer makes sense, replace it with another of the same part.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A wrong line: the text `old` of `file` replaced by `new`, and arguments of pytest that select
    the tests which should notice it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""  # why no test notices it, if that is known


CHECKPOINT = (
    Fault(
        "checkpoint: first block is not compared",
        "longhaul/checkpoint/load.py",
        "if digest != written]",
        "if digest != written and index]",
        ("tests/test_checkpoint.py", "-k", "checksum or flipped_bit"),
    ),
    Fault(
        "checkpoint: manifest's checksum is not compared",
        "longhaul/checkpoint/format.py",
        'if manifest.get("checksum") != checksum(manifest):',
        'if manifest.get("checksum") is None:',
        ("tests/test_checkpoint.py", "-k", "checksum or flipped_bit"),
    ),
    Fault(
        "checkpoint: one too few is kept",
        "longhaul/checkpoint/save.py",
        "for old in steps[:-keep]:",
        "for old in steps[: 1 - keep]:",
        ("tests/test_checkpoint.py", "-k", "pruning"),
    ),
    Fault(
        "checkpoint: old ones go before the new one verifies",
        "longhaul/checkpoint/save.py",
        "verified(steps[-1])",
        "steps[-1].stat()",
        ("tests/test_checkpoint.py", "-k", "pruning"),
    ),
    Fault(
        "checkpoint: skipped steps count as updates",
        "longhaul/checkpoint/load.py",
        "float(checkpoint.step - len(checkpoint.skipped))",
        "float(checkpoint.step)",
        ("tests/test_numerics.py", "-k", "after_a_skipped_step_a_resumed_run"),
    ),
    Fault(
        "checkpoint: data position is not restored",
        "longhaul/checkpoint/load.py",
        "state.data = checkpoint.data",
        "state.data = {}",
        (
            "tests/test_checkpoint.py",
            "tests/test_numerics.py",
            "-k",
            "data_position or resumed_run_has",
        ),
    ),
    Fault(
        "checkpoint: a stored range is read from its start",
        "longhaul/checkpoint/load.py",
        "source[first - start : last - start]",
        "source[: last - first]",
        ("tests/test_parallel.py", "-k", "checkpoint_is_the_same_bits"),
    ),
    Fault(
        "checkpoint: moments of vectors are not stored",
        "longhaul/checkpoint/format.py",
        "if value.ndim:  # step",
        "if value.ndim > 1:  # step",
        ("tests/test_checkpoint.py", "tests/test_states.py", "-k", "loaded or bit_for_bit"),
    ),
    Fault(
        "checkpoint: an optimizer setting may change unasked",
        "longhaul/checkpoint/resume.py",
        "if words and not cfg.override_settings",
        "if words and cfg.override_settings",
        ("tests/test_train.py", "-k", "changed_settings"),
    ),
    Fault(
        "checkpoint: rows of the past may be left out",
        "longhaul/checkpoint/resume.py",
        "if order.ranges_below(both, trained) != order.ranges_below(recorded, trained):",
        "if order.ranges_below(both, 0) != order.ranges_below(recorded, 0):",
        ("tests/test_numerics.py", "-k", "cannot_be_left_out"),
    ),
    Fault(
        "checkpoint: a read that fails is not tried again",
        "files/durable.py",
        "for attempt in range(RETRIES + 1):",
        "for attempt in range(1):",
        ("tests/test_supervise.py", "-k", "tried_again"),
    ),
)

DATA = (
    Fault(
        "data: a cut document loses its label at the cut",
        "data/loader.py",
        "ids = self.split.read(document, start, length + 1)",
        "ids = self.split.read(document, start, length)",
        ("tests/test_data_loader.py", "-k", "keeps_its_label_across"),
    ),
    Fault(
        "data: positions do not restart with a piece",
        "data/loader.py",
        "row.positions[:] = np.arange(self.context_length) - np.repeat(starts, lengths)",
        "row.positions[:] = np.arange(self.context_length)",
        ("tests/test_data_loader.py", "-k", "obvious_loop"),
    ),
    Fault(
        "data: padding has a label",
        "data/loader.py",
        "row.labels[end:] = IGNORE",
        "row.labels[end:] = self.dataset.eod_id",
        ("tests/test_data_loader.py", "-k", "padding_is_at_the_end"),
    ),
    Fault(
        "data: ranks read the same rows",
        "data/loader.py",
        "begin = step * rows + rank * share",
        "begin = step * rows",
        ("tests/test_data_loader.py", "-k", "ranks_together"),
    ),
    Fault(
        "data: a round of the shuffle mixes key and half in another order",
        "data/order.py",
        "mixed = mix(right ^ key) & mask",
        "mixed = (mix(right) ^ key) & mask",
        ("tests/test_data_order.py", "-k", "known_values"),
    ),
    Fault(
        "data: every epoch has the same order",
        "data/order.py",
        "+ GOLDEN + epoch) & MASK",
        "+ GOLDEN) & MASK",
        ("tests/test_data_order.py", "-k", "seed_and_epoch or known_values"),
    ),
    Fault(
        "data: a row outside is permuted once more only",
        "data/order.py",
        "    while row >= n:",
        "    if row >= n:",
        ("tests/test_data_order.py", "-k", "exactly_once or distinct"),
    ),
    Fault(
        "data: the first row after a skipped range is skipped too",
        "data/order.py",
        "if position < begin:",
        "if position < begin - 1:",
        ("tests/test_numerics.py", "-k", "counting_the_positions"),
    ),
    Fault(
        "data: pieces go to the emptiest row",
        "data/packing.py",
        "index = bisect_left(rooms, length)",
        "index = max(bisect_left(rooms, length), len(rooms) - 1)",
        ("tests/test_data_packing.py", "-k", "best_fit or fullest_row"),
    ),
    Fault(
        "data: ids of 17 bits are stored in 16",
        "data/manifest.py",
        "if vocab_size <= 1 << 16 else",
        "if vocab_size <= 1 << 17 else",
        ("tests/test_data_shards.py", "-k", "width_of_an_id"),
    ),
    Fault(
        "data: validation documents are trained on",
        "data/dataset.py",
        '"train": np.delete(everything, chosen)',
        '"train": everything',
        ("tests/test_data_shards.py", "-k", "splits_share_no_document"),
    ),
    Fault(
        "data: a document's end is not marked",
        "data/writer.py",
        "if tokens[-1] != self.eod_id:",
        "if tokens[-1] == self.eod_id:",
        ("tests/test_data_shards.py", "-k", "closing_end_of_document"),
    ),
    Fault(
        "data: bits per byte are nats per byte",
        "data/dataset.py",
        "/ (self.source_bytes * math.log(2))",
        "/ self.source_bytes",
        ("tests/test_data_shards.py", "-k", "bits_per_byte"),
    ),
)

FAULTS: tuple[Fault, ...] = (*CHECKPOINT, *DATA)

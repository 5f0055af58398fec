"""What watches the numbers of a run: steps without a finite gradient, loss spikes, replicas that
drift apart.

A step whose gradient is NaN or infinite on any rank changes no weight on any (step.train_step);
here its rows are written down and counted. Imports data.order, longhaul.dist, longhaul.exits and
longhaul.optimizers of ours.
"""

import dataclasses
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.order import format_ranges, merged, parse_ranges, ranges_of, remaining_position
from longhaul import dist
from longhaul.exits import NumericalHalt
from longhaul.optimizers import local

WINDOW, ENOUGH = (
    64,
    16,
)  # losses that a spike is measured against; with fewer than ENOUGH none is called one
FLOOR = 0.01  # of the median: a flat curve's deviation is taken as at least this
SLAB = 2**22  # elements digested at a time: 32 MiB
PRIME = 6364136223846793005  # odd, so that multiplying by it modulo 2^64 loses nothing


class Spikes:
    """How far each loss lies above the recent ones: (loss - median) / (1.4826 MAD) over the last
    WINDOW steps.

    The median absolute deviation, unlike the standard one, is not widened by the spike that is
    looked for.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self.window = deque((loss for loss in losses if math.isfinite(loss)), WINDOW)

    def score(self, loss: float) -> float:
        """Robust deviations above the median, 0.0 while there is too little to compare with; the
        loss then joins the window.
        """
        if not math.isfinite(loss):
            return 0.0
        score = 0.0
        if len(self.window) >= ENOUGH:
            median = self.median()
            deviation = 1.4826 * statistics.median(abs(other - median) for other in self.window)
            score = (loss - median) / max(deviation, FLOOR * abs(median), 1e-12)
        self.window.append(loss)
        return score

    def median(self) -> float:
        return statistics.median(self.window)


class Numerics:
    """The watch over one run. `command(cfg)` gives the shell command of a configuration."""

    def __init__(
        self,
        state,
        loader,
        folder: Path,
        command: Callable[[object], str],
        skipped: Iterable[int] = (),
    ):
        self.state, self.loader, self.folder, self.command = state, loader, folder, command
        self.skipped = list(
            skipped
        )  # steps, counted from 1 as the log does; in the checkpoint's manifest
        self.ranks = state.world.size // state.cfg.context_ranks  # with rows of their own
        self.spikes = Spikes(recent_losses(folder / "metrics.jsonl", state.step))

    def after(self, result, say: Callable[[str], None]) -> dict:
        """Look at the step that was just done; figures for the log. NumericalHalt where the run
        must not go on.
        """
        cfg, step = self.state.cfg, self.state.step
        if result.skipped:
            self._skip(result, say)
        score = self.spikes.score(float(result.loss))
        if cfg.loss_spike and score > cfg.loss_spike:
            rows = self.rows(step)
            say(
                f"LOSS SPIKE at step {step}: {float(result.loss):.4f}, {score:.1f} robust deviations above the median {self.spikes.median():.4f}, "
                f"rows {' '.join(rows)}; should it stay: {self.way_back(rows)}"
            )
        if cfg.check_replicas_every and step % cfg.check_replicas_every == 0:
            require_equal_replicas(self.state)
        return dict(spike=score)

    def way_back(self, rows: Sequence[str]) -> str:
        """The command that goes back to the newest checkpoint before the last of these rows, and
        leaves out those that come after it.

        It writes to a folder beside this one, so it stays right when newer checkpoints are there.
        """
        cfg, ranges, start, resume = self.state.cfg, parse_ranges(rows), 0, "auto"
        for path in sorted(self.folder.glob("step-????????")):
            first = remaining_position(
                int(path.name[5:]) * self.loader.global_batch_rows, self.loader.skip
            )
            if first < ranges[-1][1]:
                start, resume = first, str(path)
        left_out = [(max(begin, start), end) for begin, end in ranges if end > start]
        beside = f"{self.folder}-around-{left_out[0][0]}"
        return self.command(
            dataclasses.replace(
                cfg,
                resume=resume,
                output_dir=beside,
                skip_rows=format_ranges(merged([*self.loader.skip, *left_out])),
            )
        )

    def rows(self, step: int, ranks: Iterable[int] | None = None) -> tuple[str, ...]:
        """The rows of a step, as ranges of the order; of some of the ranks that have rows of their
        own.
        """
        return format_ranges(
            ranges_of(self._positions(step, range(self.ranks) if ranks is None else ranks))
        )

    def _positions(self, step: int, ranks: Iterable[int]) -> list[int]:
        return [
            position
            for rank in ranks
            for position in self.loader.positions(step - 1, rank, self.ranks)
        ]

    def _skip(self, result, say):
        cfg, step = self.state.cfg, self.state.step
        self.skipped.append(step)
        guilty = self._without_finite_loss(result.local_loss)
        written = self._dump(step, guilty) if self.state.world.rank == 0 else ""
        rows = " ".join(self.rows(step, guilty))
        say(
            f"step {step}: the gradient is NaN or infinite, so no rank changed a weight ({len(self.skipped)} of {cfg.max_skipped_steps} such steps "
            f"allowed); rows {rows} {written}"
        )
        if cfg.optimizer_in_backward:
            raise NumericalHalt(
                f"step {step} met a NaN or infinite gradient (rows {rows}) after --optimizer_in_backward had changed other weights: "
                f"{self.way_back(self.rows(step, guilty))}"
            )
        if len(self.skipped) > cfg.max_skipped_steps:
            bad = format_ranges(
                ranges_of(
                    position
                    for one in self.skipped
                    for position in self._positions(one, range(self.ranks))
                )
            )
            raise NumericalHalt(
                f"steps {', '.join(map(str, self.skipped))} had a NaN or infinite gradient, more than --max_skipped_steps "
                f"{cfg.max_skipped_steps}; rows {' '.join(bad)}, written down in {self.folder / 'skipped'}: {self.way_back(bad)}"
            )

    def _without_finite_loss(self, loss: Tensor) -> list[int]:
        """The ranks (of those with rows of their own) whose own loss is not finite; all where each
        one's is: the backward overflowed.
        """
        bad = torch.zeros(self.state.world.size, device=loss.device)
        bad[self.state.world.rank] = float(not loss.isfinite())
        ranks = sorted(
            {int(rank) // self.state.cfg.context_ranks for rank in dist.all_sum(bad).nonzero()}
        )
        return ranks or list(range(self.ranks))

    def _dump(self, step: int, ranks: list[int]) -> str:
        """Write the rows of these ranks to skipped/step-NNNNNNNN.safetensors; says where, or why
        not: the run does not hang on it.
        """
        path = self.folder / "skipped" / f"step-{step:08d}.safetensors"
        positions = self._positions(step, ranks)
        parts = [self.loader.rows([position]) for position in positions]
        tensors = {
            name: torch.cat([torch.from_numpy(getattr(part, name)) for part in parts]).int()
            for name in ("tokens", "labels", "doc_ids")
        }
        about = dict(
            step=step,
            rows=positions,
            plan_rows=[self.loader.row_index(position) for position in positions],
            ranks=ranks,
            dataset=self.loader.dataset.fingerprint,
        )
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(
                tensors, path, metadata={name: json.dumps(value) for name, value in about.items()}
            )
        except (OSError, SafetensorError) as error:
            return f"could not be written down ({error})"
        return f"are in {path}"


def recent_losses(log: Path, step: int) -> list[float]:
    """The losses of metrics.jsonl up to `step`, for a resumed run's window."""
    if not log.exists():
        return []
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 1024 * WINDOW))
        lines = file.read().splitlines()
    records = [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    return [
        record["loss"]
        for record in records
        if record["loss"] is not None and record["step"] <= step
    ]


# ----------------------------------------------------------------------------------------- replicas


def require_equal_replicas(state):
    """NumericalHalt, on all ranks, naming the tensors of which two replicas hold different bits.
    Nothing without replicas.

    Each rank digests its shards to 8 bytes a tensor, which the ranks that hold the same shards
    exchange.
    """
    if state.mesh is None or state.mesh.ndim == 1:
        return
    names, digests = zip(
        *((name, digest(tensor).to(state.device)) for name, tensor in named_tensors(state))
    )
    mine = torch.stack(digests)
    group = state.mesh.get_group("replicate")
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(theirs, mine, group=group)
    differ = (torch.stack(theirs) != theirs[0]).any(0).int()
    torch.distributed.all_reduce(differ)  # over all ranks, which hold other shards
    wrong = [name for name, count in zip(names, differ.tolist()) if count]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise NumericalHalt(
            f"step {state.step}: the replicas hold different bits of {', '.join(wrong[:3])}{more}, so hardware or a kernel is at "
            "fault: find and drop the machine, then give the same command, which resumes from the newest checkpoint"
        )


def named_tensors(state) -> list[tuple[str, Tensor]]:
    """What this rank holds of every parameter and optimizer state, in an order that all ranks
    share.
    """
    found = []
    for name, parameter in state.model.named_parameters():
        found.append((name, local(parameter)))
        found += [
            (f"{key} of {name}", local(value))
            for key, value in sorted(state.optimizer.state[parameter].items())
        ]
    return found


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """64 bits that change with any bit of the tensor: sum_i (2i + 1) word_i over a slab, slabs
    chained by a multiplication.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().reshape(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for slab in flat.split(SLAB) if len(flat) else ():
        odd = torch.arange(1, 2 * len(slab), 2, dtype=torch.int64, device=flat.device)
        total = total * PRIME + (slab.long() * odd).sum()
    return total

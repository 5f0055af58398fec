"""A sampler for torch's DataLoader whose rows and their order do not depend on the number of ranks.

    sampler = ElasticSampler(len(dataset), rank, world_size, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for batch in loader:
        train(batch)
    saved = sampler.state_dict()       # the same on all ranks: any number of them may load it

It needs data/order.py alone, not torch. An epoch is a permutation of the rows by the seed and the
epoch's number, without an array of them. The ranks take its positions in turn, so after t rows on
each of w ranks, t * w rows have been trained: those of the first positions, whatever w was before.
"""

from collections.abc import Iterator

from data.order import permute


class ElasticSampler:
    """The rows of one rank: in every epoch all ranks together take each row exactly once.

    Row number i of this rank in an epoch is permute(seed, epoch, length, start + rank + i *
    world_size), where `start` rows had been trained when the sampler was made or loaded. At the end
    of an epoch some ranks may have a row less than others, and so a batch less: stop all ranks
    after as many batches with `set_epoch`, or use torch.distributed.algorithms.join.

    length      rows of the dataset
    rank        of this process; 0 for one process
    world_size  ranks that train together
    seed        of the order; equal on all ranks
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        if length < 1 or world_size < 1:
            raise ValueError(f"length={length}, world_size={world_size}: both must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: give one of 0 to {world_size - 1}")
        self.length = length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.start = 0  # rows of this epoch that had been trained before
        self.given = 0  # rows of this epoch that this rank has given out since
        self.ended = False  # whether the newest iteration has given out all rows of its epoch

    def __len__(self) -> int:
        """Rows that this rank takes in the epoch of the next iteration."""
        return self._rows_from(0 if self.ended else self.start)

    def _rows_from(self, start: int) -> int:
        return max(0, -(-(self.length - start - self.rank) // self.world_size))

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch; the next iteration is the next epoch. An iteration that is left
        early begins again, unless `set_epoch` is called.
        """
        if self.ended:
            self.set_epoch(self.epoch + 1)
        self.given = 0
        for position in range(self.start + self.rank, self.length, self.world_size):
            self.given += 1
            yield permute(self.seed, self.epoch, self.length, position)
        self.ended = True

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: `set_epoch(epoch + 1)` on all ranks ends one that some of them have left
        early, because another had no batch any more. Otherwise each iteration begins the next one.
        """
        self.epoch = epoch
        self.start = 0
        self.given = 0
        self.ended = False

    # ---- to save and to resume

    def state_dict(self, trained: int | None = None) -> dict[str, int]:
        """Where a run goes on, on any number of ranks.

        trained: rows that this rank has trained in this epoch since it began or was loaded; by
        default all that it has given out. Give it with DataLoader(num_workers=...), which asks for
        rows before they are trained, and then save the state of rank 0, which never has fewer rows.
        """
        rows = self.given if trained is None else trained
        most = self._rows_from(self.start)
        if not 0 <= rows <= most:
            raise ValueError(f"trained={rows}: this rank has {most} rows in this epoch")

        epoch = self.epoch
        position = self.start + rows * self.world_size
        # a rank that has a row more trains it in the same step
        if position >= self.length or (self.ended and rows == most):
            epoch += 1
            position = 0
        return dict(length=self.length, seed=self.seed, epoch=epoch, position=position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was called. ValueError for another dataset or seed."""
        for name in ("length", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state has {name}={state[name]}, this sampler {name}="
                    f"{getattr(self, name)}: the order would be another one"
                )
        self.set_epoch(state["epoch"])
        self.start = state["position"]

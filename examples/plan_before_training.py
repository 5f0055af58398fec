"""A callback for the Trainer of transformers: the memory of a step, before the first one.

    trainer = Trainer(..., callbacks=[PlanBeforeTraining(gpu="RTX 4090")])

It plans the first rows, without accumulation, and compares the second step on a GPU with the plan.
"""

import torch
from transformers import TrainerCallback

from footprint import estimate_memory
from footprint.cards.device import installed_card

GIB = 2**30


class PlanBeforeTraining(TrainerCallback):
    def __init__(self, gpu: str = "cuda"):
        """gpu: the card that is planned where none is installed; "cuda" is an H100."""
        self.gpu = gpu
        self.steps = 0

    def on_train_begin(self, args, state, control, model, optimizer, train_dataloader, **_):
        with torch.random.fork_rng(devices=[]):  # a collator may draw: training draws the same
            rows = [train_dataloader.dataset[row] for row in range(args.train_batch_size)]
            batch = train_dataloader.collate_fn(rows)
        plain = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        target = installed_card(torch.device("cuda")) or self.gpu
        self.plan = estimate_memory(model.train(), dict(batch), plain, target=target)
        print(self.plan)

    def on_step_end(self, args, state, control, **_):
        self.steps += 1
        if self.steps == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self.steps == 2 and torch.cuda.is_available():
            taken = torch.cuda.max_memory_allocated() / GIB
            print(f"step 2: planned {self.plan.allocated / GIB:.3f} GiB, taken {taken:.3f} GiB")

"""accelerate, with rows that do not depend on the number of processes: again with 4, it goes on.
PYTHONPATH=. accelerate launch --cpu --num_processes 2 examples/elastic_rows.py runs/elastic
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from data.sampler import ElasticSampler

ROWS = 1000
ROWS_OF_A_STEP = 8  # of all processes together: they must divide it


def train(folder: str, steps: int = 5) -> list[int]:
    """Go on from the folder, save to it again; the rows that this process has trained."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    sampler = ElasticSampler(ROWS, accelerator.process_index, accelerator.num_processes)
    accelerator.register_for_checkpointing(sampler)  # prepare(loader) would share out again
    if Path(folder).exists():
        accelerator.load_state(folder)
    loader = DataLoader(range(ROWS), ROWS_OF_A_STEP // accelerator.num_processes, sampler=sampler)
    trained = []
    for rows in islice(loader, steps):
        accelerator.backward(model(rows[:, None].to(accelerator.device) / ROWS).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        trained += rows.tolist()
    accelerator.save_state(folder)
    return trained


if __name__ == "__main__":
    print(train(sys.argv[1]))

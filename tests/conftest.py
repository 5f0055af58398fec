"""One thread: small tensors run faster so, and bits do not depend on the machine's cores."""

import torch

torch.set_num_threads(1)

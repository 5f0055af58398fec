"""What is made of hidden states and the output weight without logits [N, V]: the cross-entropy and
statistics of each token, in tiles of the vocabulary. It needs base/machine.py, torch, and for
kernels="triton" Triton.

    from longhaul.vocab import linear_cross_entropy
    linear_cross_entropy(hidden_ND, weight_VD, labels_N).backward()
"""

from longhaul.vocab.loss import linear_cross_entropy as linear_cross_entropy
from longhaul.vocab.statistics import vocab_stats as vocab_stats

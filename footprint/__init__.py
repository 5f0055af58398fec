"""The peak memory of any PyTorch training step, before it runs. Imports torch only.

    from footprint import predict
    report = predict(build, step, target="cuda")

`python -m footprint train.py --its flags` does it for a script, unchanged. See docs/FOOTPRINT.md.
"""

from footprint.estimate import estimate_memory
from footprint.prediction import measure, predict
from footprint.refusal import Refused
from footprint.report import Report

__all__ = [
    "Refused",
    "Report",
    "estimate_memory",
    "measure",
    "predict",
]

"""The peak memory of any PyTorch training step, before it runs. Imports torch only.

    from footprint import predict
    report = predict(build, step, target="cuda")

`python -m footprint train.py --its flags` does it for a script, unchanged. See docs/FOOTPRINT.md.
"""

from footprint.answers.report import Report
from footprint.python.refusal import Refused
from footprint.steps.estimate import estimate_memory
from footprint.steps.prediction import measure, predict

__all__ = [
    "Refused",
    "Report",
    "estimate_memory",
    "measure",
    "predict",
]

"""The difference of two recorded steps, attributed to what the programs and the machines did differently."""

from graph_predictor.diff.jobs import diff_jobs
from graph_predictor.diff.result import Difference, DifferenceKind, Part

__all__ = ["Difference", "DifferenceKind", "Part", "diff_jobs"]

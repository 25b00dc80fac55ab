"""Simulation of recorded and edited training steps: replay, critical path, reports and the command line."""

from graph_predictor.breakdown import Breakdown, breakdown
from graph_predictor.build import Built, build_program
from graph_predictor.critical_path import Bound, Path, critical_path
from graph_predictor.engine import Simulated, simulate
from graph_predictor.predict import Baseline, predict
from graph_predictor.prediction.result import Prediction
from graph_predictor.program import Program
from graph_predictor.replay import Replay, ReplayedStep, replay
from graph_predictor.timeline import write_timeline

# The functions come after their modules of the same name, and so are what the package's names mean.
__all__ = [
    "Baseline", "Bound", "Breakdown", "Built", "Path", "Prediction", "Program", "Replay", "ReplayedStep", "Simulated",
    "breakdown", "build_program", "critical_path", "predict", "replay", "simulate", "write_timeline",
]

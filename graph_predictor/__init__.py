"""Simulation of recorded and edited training steps: replay, critical path, reports and the command line."""

from graph_predictor.breakdown import Breakdown, breakdown
from graph_predictor.build import Built, build_program
from graph_predictor.comm_pricing import PricedJob, price_collectives
from graph_predictor.comm_report import CommReport, communication_report
from graph_predictor.comm_tuning import TunedWorkload, tune_workload
from graph_predictor.critical_path import Bound, Path, critical_path
from graph_predictor.engine import Simulated, simulate
from graph_predictor.opportunities import Opportunities, Opportunity, opportunities
from graph_predictor.predict import Baseline, predict
from graph_predictor.prediction.result import Prediction
from graph_predictor.program import Program
from graph_predictor.replay import Replay, ReplayedStep, replay
from graph_predictor.timeline import write_timeline

# The functions come after their modules of the same name, and so are what the package's names mean.
__all__ = [
    "Baseline", "Bound", "Breakdown", "Built", "CommReport", "Opportunities", "Opportunity", "Path", "Prediction",
    "PricedJob", "Program", "Replay", "ReplayedStep", "Simulated", "TunedWorkload", "breakdown", "build_program",
    "communication_report", "critical_path", "opportunities", "predict", "price_collectives", "replay", "simulate",
    "tune_workload", "write_timeline",
]

"""Simulation of recorded and edited training steps: replay, critical path, reports and the command line."""

from graph_predictor.comm.pricing import PricedJob, price_collectives
from graph_predictor.comm.report import CommReport, communication_report
from graph_predictor.comm.tuning import TunedWorkload, tune_workload
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
from graph_predictor.prediction.result import Prediction
from graph_predictor.reports.breakdown import Breakdown, breakdown
from graph_predictor.reports.opportunities import Opportunities, Opportunity, opportunities
from graph_predictor.reports.timeline import write_timeline
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.critical_path import Bound, Path, critical_path
from graph_predictor.simulation.engine import Simulated, simulate
from graph_predictor.simulation.program import Program
from graph_predictor.synthesis.baseline import baseline_of, predict, retraced

# The functions come after their modules of the same name, and so are what the package's names mean.
__all__ = [
    "Baseline", "Bound", "Breakdown", "Built", "CommReport", "Opportunities", "Opportunity", "Path", "Prediction",
    "PricedJob", "Program", "Replay", "ReplayedStep", "Simulated", "TunedWorkload", "baseline_of", "breakdown",
    "build_program", "communication_report", "critical_path", "opportunities", "predict", "price_collectives", "replay",
    "retraced", "simulate", "tune_workload", "write_timeline",
]

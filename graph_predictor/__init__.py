"""Simulation of recorded and edited training steps: replay, critical path, reports and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from graph_predictor.comm.report import CommReport, communication_report
    from graph_predictor.prediction.predictor import Baseline
    from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
    from graph_predictor.prediction.result import Prediction
    from graph_predictor.prediction.tuned_workload import TunedWorkload, tune_workload
    from graph_predictor.reports.breakdown import Breakdown, breakdown
    from graph_predictor.reports.opportunities import Opportunities, Opportunity, opportunities
    from graph_predictor.reports.timeline import write_timeline
    from graph_predictor.simulation.build import Built, build_program
    from graph_predictor.simulation.engine import Path, critical_path, simulate
    from graph_predictor.simulation.program import Bound, Program, Simulated
    from graph_predictor.synthesis.baseline import baseline_of, predict, retraced

_HOMES = {
    "Baseline": "graph_predictor.prediction.predictor",
    "Bound": "graph_predictor.simulation.program",
    "Breakdown": "graph_predictor.reports.breakdown",
    "Built": "graph_predictor.simulation.build",
    "CommReport": "graph_predictor.comm.report",
    "Opportunities": "graph_predictor.reports.opportunities",
    "Opportunity": "graph_predictor.reports.opportunities",
    "Path": "graph_predictor.simulation.engine",
    "Prediction": "graph_predictor.prediction.result",
    "Program": "graph_predictor.simulation.program",
    "Replay": "graph_predictor.prediction.replay",
    "ReplayedStep": "graph_predictor.prediction.replay",
    "Simulated": "graph_predictor.simulation.program",
    "TunedWorkload": "graph_predictor.prediction.tuned_workload",
    "baseline_of": "graph_predictor.synthesis.baseline",
    "breakdown": "graph_predictor.reports.breakdown",
    "build_program": "graph_predictor.simulation.build",
    "communication_report": "graph_predictor.comm.report",
    "critical_path": "graph_predictor.simulation.engine",
    "opportunities": "graph_predictor.reports.opportunities",
    "predict": "graph_predictor.synthesis.baseline",
    "replay": "graph_predictor.prediction.replay",
    "retraced": "graph_predictor.synthesis.baseline",
    "simulate": "graph_predictor.simulation.engine",
    "tune_workload": "graph_predictor.prediction.tuned_workload",
    "write_timeline": "graph_predictor.reports.timeline",
}

__all__ = [
    "Baseline", "Bound", "Breakdown", "Built", "CommReport", "Opportunities", "Opportunity", "Path", "Prediction",
    "Program", "Replay", "ReplayedStep", "Simulated", "TunedWorkload", "baseline_of", "breakdown",
    "build_program", "communication_report", "critical_path", "opportunities", "predict", "replay",
    "retraced", "simulate", "tune_workload", "write_timeline",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)

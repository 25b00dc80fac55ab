"""Simulation of recorded and edited training steps: replay, critical path, prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from graph_predictor.comm.report import CommReport, communication_report
    from graph_predictor.prediction.predictor import Baseline
    from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
    from graph_predictor.prediction.result import Prediction
    from graph_predictor.prediction.tuned_workload import TunedWorkload, tune_workload
    from graph_predictor.request.predict import predict
    from graph_predictor.simulation.build import Built, build_program
    from graph_predictor.simulation.engine import Path, critical_path, simulate
    from graph_predictor.simulation.program import Bound, Program, Simulated
    from graph_predictor.synthesis.baseline import baseline_of, retraced

_HOMES = {
    "Baseline": "graph_predictor.prediction.predictor",
    "Bound": "graph_predictor.simulation.program",
    "Built": "graph_predictor.simulation.build",
    "CommReport": "graph_predictor.comm.report",
    "Path": "graph_predictor.simulation.engine",
    "Prediction": "graph_predictor.prediction.result",
    "Program": "graph_predictor.simulation.program",
    "Replay": "graph_predictor.prediction.replay",
    "ReplayedStep": "graph_predictor.prediction.replay",
    "Simulated": "graph_predictor.simulation.program",
    "TunedWorkload": "graph_predictor.prediction.tuned_workload",
    "baseline_of": "graph_predictor.synthesis.baseline",
    "build_program": "graph_predictor.simulation.build",
    "communication_report": "graph_predictor.comm.report",
    "critical_path": "graph_predictor.simulation.engine",
    "predict": "graph_predictor.request.predict",
    "replay": "graph_predictor.prediction.replay",
    "retraced": "graph_predictor.synthesis.baseline",
    "simulate": "graph_predictor.simulation.engine",
    "tune_workload": "graph_predictor.prediction.tuned_workload",
}

__all__ = [
    "Baseline", "Bound", "Built", "CommReport", "Path", "Prediction",
    "Program", "Replay", "ReplayedStep", "Simulated", "TunedWorkload", "baseline_of",
    "build_program", "communication_report", "critical_path", "predict", "replay",
    "retraced", "simulate", "tune_workload",
]

__getattr__, __dir__ = lazily(__name__, _HOMES)

"""Simulation of recorded and edited training steps: replay, critical path, reports and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_predictor.breakdown import Breakdown, breakdown
    from graph_predictor.build import Built, build_program
    from graph_predictor.critical_path import Bound, Path, critical_path
    from graph_predictor.engine import Simulated, simulate
    from graph_predictor.program import Program
    from graph_predictor.replay import Replay, ReplayedStep, replay
    from graph_predictor.timeline import write_timeline

_HOMES = {
    "Bound": "critical_path", "Breakdown": "breakdown", "Built": "build", "Path": "critical_path",
    "Program": "program", "Replay": "replay", "ReplayedStep": "replay", "Simulated": "engine",
    "breakdown": "breakdown", "build_program": "build", "critical_path": "critical_path", "replay": "replay",
    "simulate": "engine", "write_timeline": "timeline",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import public names on first use: the simulator compiles with numba, which ``--help`` must not wait for."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"graph_predictor.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'graph_predictor' has no attribute {name!r}")

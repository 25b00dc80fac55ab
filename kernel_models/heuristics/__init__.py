"""Formulas for every family: roofline, tiles and waves, cache residency, with default or fitted efficiencies.

A family's file registers its work at published rates (``work.work_of``); ``RooflineModel`` divides it by efficiencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from kernel_models.heuristics.efficiency import (
        Efficiencies,
        Efficiency,
        Measured,
        default_efficiencies,
        fit_efficiencies,
        fit_over_devices,
    )
    from kernel_models.heuristics.roofline import RooflineModel, heuristic_models

__all__ = ["Efficiencies", "Efficiency", "Measured", "RooflineModel", "default_efficiencies", "fit_efficiencies",
           "fit_over_devices", "heuristic_models"]

__getattr__, __dir__ = lazily(__name__, {
    **dict.fromkeys(("RooflineModel", "heuristic_models"), "kernel_models.heuristics.roofline"),
    **dict.fromkeys(("Efficiencies", "Efficiency", "Measured", "default_efficiencies", "fit_efficiencies",
                     "fit_over_devices"), "kernel_models.heuristics.efficiency")})

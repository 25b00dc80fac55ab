"""Formulas for every family: roofline, tiles and waves, cache residency, with default or fitted efficiencies.

A family's file registers its work at published rates (``work.work_of``); ``RooflineModel`` divides it by efficiencies.
"""

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

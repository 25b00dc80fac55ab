"""Calibration: a device becomes known by measuring micro-benchmarks of its kernels for a few minutes.

    spaces ──candidates──▶ planner ──next item──▶ tracer.campaign worker (the only one with torch) ──times──┐
       ▲                      ▲─────────────────────────────────────────────────────────────────────────────┤
    device, limits         surrogate of log(time / formula)                      fitting ──▶ DeviceProfile ◀─┘
"""

from __future__ import annotations

from kernel_models.calibration.errors import CalibrationError
from kernel_models.calibration.run import Calibration, Request, calibrate
from kernel_models.calibration.space import families_of

__all__ = ["Calibration", "CalibrationError", "Request", "calibrate", "families_of"]

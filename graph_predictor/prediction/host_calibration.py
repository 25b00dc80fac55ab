"""A host's model from small programs recorded on it in turn (``tracer.campaign.host_rounds``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import recorded_host_steps, usual_step
from kernel_models.host.events import HostStep
from kernel_models.host.fitting import ToldHost, fit_host, left_out
from kernel_models.host.model import HostModel
from kernel_models.spreads import SMALL_PROGRAMS
from tracer.job import read_job


@dataclass(frozen=True, slots=True)
class HostCalibration:
    """A host's costs by its small programs.

    Attributes:
        model: of all of them; its interval is for programs unlike them.
        programs: each as the others tell it.
    """

    model: HostModel
    programs: list[ToldHost]


def read_rounds(folder: Path) -> dict[str, HostStep]:
    """Return the usual step of each program of a folder of ``PROGRAM/roundN``. Raises ``ForetraceError`` for captures
    that cannot be read."""
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        rounds = [recorded_host_steps(read_job(one).graphs)[0] for one in sorted(path.glob("round*"))]
        if rounds:
            found[path.name] = usual_step(rounds)
    return found


def calibrated(steps: Mapping[str, HostStep], name: str) -> HostCalibration:
    """Return a host's model, and how well its programs tell each other.

    Args:
        steps: of the small programs, by name.
        name: how to call the host.

    Raises:
        ForetraceError: there is no host time in them.
    """
    model = fit_host(list(steps.values()), name)
    counted = None if model.counted is None else _for_others(model.counted)
    return HostCalibration(replace(_for_others(model), counted=counted), left_out(steps))


def _for_others(model: HostModel) -> HostModel:
    """Small programs are more alike than those that a model will be asked for."""
    return replace(model, spread=float(np.hypot(model.spread, SMALL_PROGRAMS)))

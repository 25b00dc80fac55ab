"""Tables of plans that were run, for ``calibrate``.

Columns:

    plan       as ``foretrace plan --parallel`` takes it: "dp=8,tp=4,pp=2,microbatch=1,microbatches=16,sharding=1"
    step_ms    what a step took without a profiler, milliseconds
    gpus       where the plan leaves one size out (default: as many as the plan has)
    model      a workload, a config.json or a published model (default: the model that is planned for)
    preset     of a workload (default: the model's that is planned for)
    set        settings of the model, separated by spaces, such as "seq=4096 layers=12" (default: those asked for)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kernel_models.collectives import CollectiveModel
from planner.parallel.calibrate import MeasuredPlan, MeasuredPlanError
from planner.parallel.loads import loads_of
from planner.parallel.pieces import LayerPieces
from tracer.errors import ForetraceError
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape
from tracer.table_input import read_frame

PLAN, STEP_MS = "plan", "step_ms"
OPTIONAL = ("gpus", "model", "preset", "set")

Model = Callable[[str, str, "list[str] | None"], TransformerShape]
"""The decoder of a row's model, preset and settings, each empty where the row says nothing."""


def read_measured_plans(path: str, model: Model, pieces: LayerPieces,
                        cluster: Callable[[int], CollectiveModel]) -> list[MeasuredPlan]:
    """Read the steps of a table (CSV or Parquet), and price what they are made of.

    Args:
        model: makes the decoder of a row.
        pieces: of the device that they ran on.
        cluster: the nodes of so many GPUs.

    Raises:
        MeasuredPlanError: the table lacks a column, or a row's plan or time cannot be.
        ForetraceError: the table cannot be read.
    """
    frame = read_frame(path)
    lacking = [name for name in (PLAN, STEP_MS) if name not in frame]
    if lacking:
        raise MeasuredPlanError(f"{path} is no table of measured plans: it lacks the column {lacking[0]} (it has "
                               f"{', '.join(map(str, frame.columns[:6]))}); see docs/parallel.md.")
    if unknown := [str(name) for name in frame.columns if name in ("device", "seq", "batch", "layers", "dtype")]:
        raise MeasuredPlanError(f"{path} has a column {unknown[0]}, which is not read; the runs of a table are of one "
                               "device, and what else a model was set to stands in the column set, as seq=4096.")
    return [_step(f"Row {number} of {Path(path).name}", row, model, pieces, cluster)
            for number, row in enumerate(frame.to_dict("records"), 1)]


def _step(where: str, row: dict[Any, Any], model: Model, pieces: LayerPieces,
          cluster: Callable[[int], CollectiveModel]) -> MeasuredPlan:
    text, gpus, name, preset, settings = (_text(row.get(column)) for column in (PLAN, *OPTIONAL))
    try:
        us = float(row[STEP_MS]) * 1e3
    except (TypeError, ValueError):
        us = np.nan
    if not (np.isfinite(us) and us > 0):
        raise MeasuredPlanError(f"{where} holds {str(row[STEP_MS])[:40]!r} as {STEP_MS}, which is no positive number "
                                "of milliseconds; correct or remove it.")
    if not text:
        raise MeasuredPlanError(f"{where} names no plan; correct or remove it.")
    if gpus and not (gpus.removesuffix(".0").isdecimal() and int(float(gpus))):
        raise MeasuredPlanError(f"{where} holds {gpus[:40]!r} as gpus, which is no number of GPUs; correct it.")
    try:
        plan = ParallelPlan.parse(text, int(float(gpus)) if gpus else None)
        shape = model(name, preset, settings.split() or None)
        return MeasuredPlan(text, loads_of(plan, shape, pieces, cluster(plan.world_size)), us)
    except ForetraceError as error:
        raise MeasuredPlanError(f"{where} cannot be estimated: {error}") from error


def _text(value: object) -> str:
    """A cell's text, nothing for an empty one."""
    return "" if value is None or value != value else str(value).strip()

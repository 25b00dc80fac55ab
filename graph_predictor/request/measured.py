"""Read measured kernels and steps to fit models to them.

A table of measured steps has one row a step with its trace and its time:

    trace:      a trace, a capture or a step traced by shapes; its path is relative to the table
    step_ms:    time of a step without the profiler, milliseconds
    device:     a name, or a TOML file of one's own (default: the requested device, else that of the trace)
    software:   library and version (default: none)

Models are fitted to device time. Host-bound steps are left out. If a recorded device idles a little, the sum of its
kernels' times is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import recorded_host_work
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.datasets import Samples, read_samples
from kernel_models.datasets.samples import DataError
from kernel_models.device import DeviceSpec, find_device
from kernel_models.op_call import OpCall
from kernel_models.pricing import price
from kernel_models.step_fit import MeasuredStep
from kernel_models.step_profile import NamedStep
from tracer.job import read_job
from tracer.table_input import TableRow, read_rows

TRACE, STEP_MS, SOFTWARE = "trace", "step_ms", "software"
BUSY = 0.8
"""Least share of a step in which the device works, for the step to be used in a fit of the device."""
UNSIZED = 0.1
"""Largest share of a step's device time in kernels without known sizes."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The device work of one step of a trace.

    Attributes:
        calls: the number of times that each call runs.
        recorded_on: the device that it was recorded on; ``None`` for a step traced by shapes.
        device_us: measured or predicted time of its kernels, µs.
        busy: share of the step in which the device works.
    """

    calls: Counter[OpCall]
    recorded_on: str | None
    device_us: float
    busy: float


def read_steps(path: str, spec: DeviceSpec | None = None, software: str = "", notes: list[str] | None = None,
               progress: Callable[[str], None] = lambda text: None) -> tuple[DeviceSpec, list[NamedStep]]:
    """Read the steps of a table that ran on one device.

    Args:
        path: CSV or Parquet.
        spec: the device; rows of other devices are left out. Without it all rows must be of one device.
        software: text that the software of a row must contain; other rows are left out.
        notes: a list to which sentences on left-out rows are appended.
        progress: called with a phrase on what is being read.

    Raises:
        DataError: no row can be used.
        ForetraceError: the table or a trace cannot be read, or a device is unknown.
    """
    rows = _rows(path, software)
    told = [] if notes is None else notes
    known: dict[tuple[str, str], StepWork] = {}
    found: dict[str, tuple[DeviceSpec, list[NamedStep]]] = {}
    refused: list[str] = []
    for number, row in enumerate(rows, 1):
        trace, device_name, step_us = row.text(TRACE), row.text("device"), row.positive_ms(STEP_MS) * 1e3
        target = find_device(_own_file(path, device_name)) if device_name else spec
        if target is not None and spec is not None and target.name != spec.name:
            refused.append(f"row {number} is of {target.name}")
            continue
        key = (trace, target.name if target else "")
        if key not in known:
            progress(f"reading {trace}")
            known[key] = device_work(trace if "://" in trace else str(Path(path).parent / trace), target)
        work = known[key]
        if target is None:
            if work.recorded_on is None:
                raise DataError(f"{row.where}: it names no device and its trace was not recorded on a known one; add "
                                "a column device, or name it with --device.")
            target = find_device(work.recorded_on)
        step = _step(work, target, step_us)
        if isinstance(step, str):
            refused.append(f"row {number} ({trace}): {step}")
            continue
        found.setdefault(target.name, (target, []))[1].append(NamedStep(trace, step, row.text(SOFTWARE)))
    if refused:
        told.append(f"{Path(path).name}: {len(refused)} of {len(rows)} rows were left out; {refused[0]}.")
    if not found:
        raise DataError(f"No row of {path} can be used: {refused[0]}.")
    if len(found) > 1:
        raise DataError(f"The steps of {path} are of several devices ({', '.join(sorted(found))}); name one with "
                        "--device.")
    return next(iter(found.values()))


def device_work(trace: str, spec: DeviceSpec | None) -> StepWork:
    """Return the device work of a trace's step; ``spec`` is the device for a step traced by shapes.

    Raises:
        DataError: the trace has several ranks, or no device work with known sizes.
        ForetraceError: the trace cannot be read.
    """
    baseline = baseline_of(read_job(trace))
    if not baseline.ran and spec is not None:
        baseline = baseline_of(read_job(trace), device=spec)
    scenario = baseline.scenario
    work, cycle = scenario.work, scenario.cycle
    if len(scenario.built.graphs) > 1:
        raise DataError(f"{trace} is a job of {len(scenario.built.graphs)} ranks; a table of steps takes those of one "
                        "device, as others' waiting is no device's time.")
    groups = np.unique(work.kernel_group[cycle.kernel & (work.kernel_group >= 0)])
    if not len(groups):
        where = f"on {spec.name} " if spec is not None else ""
        raise DataError(f"{trace} has no device work {where}to learn from: of CPUs whole steps teach nothing yet.")
    ns = work.measured_ns[groups].astype(np.float64)
    unsized = float(ns[~work.sized[groups]].sum() / max(ns.sum(), 1.0))
    if unsized > UNSIZED:
        raise DataError(f"{trace}: {unsized:.0%} of its device time is of kernels whose sizes were not recorded; "
                        "record it with shapes (foretrace capture does).")
    calls: Counter[OpCall] = Counter()
    for group, times in zip(*np.unique(work.call_row[groups], return_counts=True), strict=True):
        for call in work.calls[int(group)]:
            calls[call] += float(times) / cycle.steps  # type: ignore[assignment]
    steady = baseline.predict()
    source = scenario.devices.source
    return StepWork(calls, source.name if baseline.ran and source is not None else None, steady.gpu_active_us,
                      steady.gpu_active_us / steady.step_time_us)


def _step(work: StepWork, spec: DeviceSpec, measured_us: float) -> MeasuredStep | str:
    """Return a row's step, or the reason why it cannot be used for the device."""
    if work.recorded_on == spec.name:
        busy = min(work.device_us / measured_us, 1.0)
        if busy < BUSY:
            return (f"its kernels take {work.device_us / 1e3:.3g} of {measured_us / 1e3:.3g} ms; the host decides it, "
                    "and the fit is of the device's time")
        return MeasuredStep(work.calls, spec, measured_us * busy)
    priced_us = float(np.array(list(work.calls.values())) @ price(work.calls, spec).times_us)
    if work.busy < BUSY and measured_us > priced_us / BUSY:
        return (f"its trace has the device work {work.busy:.0%} of the step, and {measured_us / 1e3:.3g} ms is more "
                f"than the {priced_us / 1e3:.3g} ms of its work; the host decides it, and the fit is of the device's "
                "time")
    return MeasuredStep(work.calls, spec, measured_us)


def _rows(path: str, software: str) -> list[TableRow]:
    """Return the rows of a table whose software contains a text; each must have a trace and a time."""
    rows = read_rows(path, (TRACE, STEP_MS), "steps", "docs/kernel_models.md")
    for row in rows:
        row.positive_ms(STEP_MS)
        row.text(TRACE, needed=True)
    found = [row for row in rows if software in row.text(SOFTWARE)]
    if not found:
        raise DataError(f"No row of {path} is of software whose name contains {software!r}.")
    return found


def _own_file(path: str, device_name: str) -> str:
    """Return the path of a device's TOML file in the table's folder, if there is one, else the device's name."""
    beside = Path(path).parent / device_name
    return str(beside) if device_name.lower().endswith(".toml") and beside.exists() else device_name


def read_kernels(
    paths: Sequence[str], progress: Callable[[str], None] = lambda text: None, *, spec: DeviceSpec | None = None,
    notes: list[str] | None = None,
) -> list[Samples]:
    """Return samples of measured kernels as ``kernel_models.datasets.read_samples`` does, also from traces of CPUs.

    On a CPU the operations are the kernels: their time is their own, without waits and the profiler's cost.
    """
    return read_samples(paths, progress, spec=spec, notes=notes, host_work=recorded_host_work)

"""Limits of a training step that never ran: the step is traced by shapes, predicted for a device, and compared.

The message for a broken limit names the largest contributors. Counts are compared with stored counts (``StepStore``).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from graph_predictor.prediction.explain import OUTSIDE
from graph_predictor.prediction.host_steps import host_by_name
from graph_predictor.prediction.predictor import CPU
from graph_predictor.prediction.result import Prediction
from graph_predictor.simulation.ranks import view_rank
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import find_device, shape_device
from kernel_models.op_call import itemsize, short_dtype
from kernel_models.profile import load_profile
from step_views.check.baseline import check_kind
from step_views.check.measure import CheckError, count_steps
from step_views.check.verdict import in_unit
from tracer import shape_only
from tracer.device_memory import MemoryAccount
from tracer.graph import HOST_READ, LAUNCHING, NONE, ExecutionGraph, LaunchKind, OpKind
from tracer.input_file import DecodeError, convert, from_json, read_input
from tracer.job import assemble_job, read_job
from tracer.output_file import whole_file
from tracer.versions import installed_version

if TYPE_CHECKING:
    from kernel_models.host.model import HostModel

FORMAT = "foretrace-limits"
VERSION = 1  # of the format; to be raised if an older reader would misread it


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    steps: dict[str, StepFigures]


@dataclass(frozen=True, slots=True)
class StepStore:
    """The file with the stored figures of tests' steps."""

    path: Path

    def read(self) -> dict[str, StepFigures]:
        """Return all figures by name of the test; empty without a file. Raises ``CheckError`` if the file is damaged,
        of another program, or of a newer version."""
        try:
            head: Any = from_json(read_input(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, DecodeError) as error:
            raise CheckError(f"{self.path} cannot be read ({error}); take it from version control again, or remove it "
                             "and store the counts anew with pytest --foretrace-update.") from error
        check_kind(head, str(self.path), FORMAT, VERSION)
        try:
            return convert(head, _File).steps
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, or remove it and "
                             "store the counts anew with pytest --foretrace-update.") from error

    def put(self, test: str, figures: StepFigures) -> None:
        """Store a test's figures with those of other tests; the file is written whole or not at all. Raises the errors
        of ``read``, and ``ForetraceError`` if the file cannot be written."""
        steps = self.read()
        if steps.get(test) == figures:
            return
        steps[test] = figures
        text = msgspec.json.format(msgspec.json.encode(_File(FORMAT, VERSION, dict(sorted(steps.items())))), indent=1)
        with whole_file(self.path) as stream:
            stream.write(text + b"\n")


TOP = 5  # chosen: a longer list in a test's report would not be read
COUNTED = {"launches": "launches", "syncs": "blocking_syncs", "collectives": "collectives",
           "communicated_bytes": "communicated_bytes"}
"""Counts that ``no_added`` may name apart from memory, with their keys in ``COUNTS``; "syncs" are calls that wait."""
MEMORY = "memory"
TYPES = "wider_types"
_WIDTHS = {1: "fp8", 2: "fp16", 4: "fp32", 8: "fp64"}
"""Classes of floating types by bytes, narrowest first; bf16 counts as fp16."""
_NAME = re.compile(r"[A-Za-z][\w:]*")
FILES = {"host_from": "capture", "profile": "file of fitted models"}
SYNCHRONIZE = "synchronize"
"""Key in ``meta.substitutions``: number of explicit waits in the traced code."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The limits that a step must keep.

    Attributes:
        device: device for which the step is predicted.
        max_step_ms: limit of the expected step time.
        max_gpu_ms: limit of the expected GPU active time, which does not depend on the host.
        max_memory_gb: limit of the step's peak memory, 10⁹ bytes.
        no_added: figures that may not exceed the stored ones: "launches", "syncs", "collectives", "communicated_bytes",
            "memory", "wider_types" (operations that compute in a wider floating type than before).
        world_size: ranks of the job; the step then runs as rank 0 of a fake world.
        host_from: a capture whose host is assumed.
        profile: a file of models fitted for the device.
    """

    device: str = "h200-sxm"
    max_step_ms: float | None = None
    max_gpu_ms: float | None = None
    max_memory_gb: float | None = None
    no_added: Sequence[str] = ()
    world_size: int | None = None
    host_from: str | None = None
    profile: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepBounds:
        """Return limits from values by name. Raises ``CheckError`` for an unknown name or an impossible value."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise CheckError(f"There is no limit {name!r}; there are {', '.join(known)}.")
        found = cls(**values)
        if isinstance(found.no_added, str) or not isinstance(found.no_added, Sequence | Set):
            example = found.no_added if isinstance(found.no_added, str) else "launches"
            raise CheckError(f"no_added={found.no_added!r} must be a list, such as [{example!r}].")
        unknown = [name for name in found.no_added if name not in (*COUNTED, MEMORY, TYPES)]
        if unknown:
            raise CheckError(f"no_added cannot have {unknown[0]!r}; it may have "
                             f"{', '.join([*COUNTED, MEMORY, TYPES])}.")
        for name in ("max_step_ms", "max_gpu_ms", "max_memory_gb"):
            value = getattr(found, name)
            if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool)
                                          and 0 < value < inf):
                raise CheckError(f"{name}={value!r} is no limit: give a number above 0.")
        for name in ("host_from", "profile"):
            value = getattr(found, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise CheckError(f"{name}={value!r} is no path: give that of a {FILES[name]}.")
        return found


class StepFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored figures of a step: device, counts, peak memory and its parts (bytes), launches and waits by operation.
    ``operations_by_type`` counts operations by the widest floating type of their inputs (empty in older files)."""

    device: str
    torch: str
    counts: dict[str, int]
    memory: int
    memory_parts: dict[str, int]
    launches_by_operation: dict[str, int]
    syncs_by_operation: dict[str, int]
    operations_by_type: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A traced step and its prediction."""

    prediction: Prediction
    figures: StepFigures
    gpu_by_operation_ns: dict[str, float]


def predict_step(build: Callable[[], Callable[[], Any]], limits: StepBounds) -> PredictedStep:
    """Trace a step by shapes and predict it. ``build`` makes model, optimizer and data, and returns the step
    (``tracer.shape_only.trace_step``). Raises ``ForetraceError`` if the step cannot be traced, if it does nothing on
    the device (it would keep every limit), or if device, host or profile are unknown."""
    graph = shape_only.trace_step(build, shape_device(find_device(limits.device)), world_size=limits.world_size)
    baseline = baseline_of(assemble_job([graph]), device=find_device(limits.device), models=_models(limits.profile),
                           host=_host(limits.host_from))
    made = baseline.built.graphs
    if limits.device != CPU and not any(len(each.kernels) for each in made):
        raise CheckError(f"The step does nothing on {limits.device}: it launches no work there, so that no limit could "
                         "be broken; let build() put the model and the data on the device (.cuda()).")
    counts = count_steps(made)
    memory = MemoryAccount.of_trace(graph.meta.memory)
    syncs = _waits(graph, made)
    figures = StepFigures(
        device=graph.meta.device, torch=installed_version("torch"), memory=int(memory.total),
        memory_parts={name: int(size) for name, size in memory.parts.items()}, counts={
            **{name: counts[count].typical for name, count in COUNTED.items()}, "syncs": sum(syncs.values())},
        launches_by_operation=_by_operation(made, LAUNCHING),
        syncs_by_operation=syncs, operations_by_type=_by_type(graph))
    return PredictedStep(baseline.predict(), figures, _gpu_time(made))


def broken_limits(step: PredictedStep, limits: StepBounds, stored: StepFigures | None) -> list[str]:
    """Return a text for each broken limit, with its largest contributors in indented lines; empty if all are kept.
    ``stored`` are the figures for ``no_added``; without them nothing is compared."""
    found = []
    prediction = step.prediction
    if limits.max_step_ms is not None and prediction.step_time_us > limits.max_step_ms * 1e3:
        low, high = prediction.interval_us
        found.append(_told(
            f"step time: {prediction.step_time_us / 1e3:,.3f} ms predicted (80% between {low / 1e3:,.3f} and "
            f"{high / 1e3:,.3f}), limit {limits.max_step_ms:,g} ms; decided by: {prediction.bound}",
            [f"{each.operation} ({each.bound}): {each.time_us / 1e3:,.3f} ms, {each.share:.0%}"
             for each in prediction.critical_path[:TOP]]))
    if limits.max_gpu_ms is not None and prediction.gpu_active_us > limits.max_gpu_ms * 1e3:
        total = sum(step.gpu_by_operation_ns.values()) or 1.0
        largest = sorted(step.gpu_by_operation_ns.items(), key=lambda each: (-each[1], each[0]))[:TOP]
        found.append(_told(
            f"GPU active time: {prediction.gpu_active_us / 1e3:,.3f} ms predicted, limit {limits.max_gpu_ms:,g} ms",
            [f"{name}: {ns / 1e6:,.3f} ms, {ns / total:.0%}" for name, ns in largest]))
    if limits.max_memory_gb is not None and step.figures.memory > limits.max_memory_gb * 1e9:
        found.append(_told(f"peak memory: {in_unit(step.figures.memory, 'bytes')}, limit {limits.max_memory_gb:,g} GB",
                           _largest_parts(step.figures.memory_parts)))
    if stored is not None:
        found += _added(step, limits, stored)
    return found


def _added(step: PredictedStep, limits: StepBounds, stored: StepFigures) -> list[str]:
    now = step.figures
    if now.device != stored.device:
        return [f"the stored counts are of {stored.device}, this step was traced for {now.device}: counts of two "
                "devices are not compared"]
    found = []
    other = f" (PyTorch {stored.torch} then, {now.torch} now)" if stored.torch != now.torch else ""
    for name in limits.no_added:
        if name == TYPES:
            found += _widened(stored.operations_by_type, now.operations_by_type)
            continue
        unit = "bytes" if name in (MEMORY, "communicated_bytes") else ""
        before, after = (each.memory if name == MEMORY else each.counts.get(name, 0) for each in (stored, now))
        if after <= before:
            continue
        offenders = {
            "launches": lambda: more_calls(stored.launches_by_operation, now.launches_by_operation),
            "syncs": lambda: more_calls(stored.syncs_by_operation, now.syncs_by_operation),
            MEMORY: lambda: _grown_parts(stored.memory_parts, now.memory_parts)}.get(name, list)()
        found.append(_told(f"{name.replace('_', ' ')}: {in_unit(after, unit)}, stored {in_unit(before, unit)}: "
                           f"{in_unit(after - before, unit)} more{other}", offenders))
    return found


def _widened(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Report operations that changed to a wider floating type: the number lost by narrower and won by wider types."""
    most, at = 0, ""
    widths = list(_WIDTHS.values())
    for place, width in enumerate(widths[1:], 1):
        won = sum(now.get(each, 0) - before.get(each, 0) for each in widths[place:])
        lost = sum(before.get(each, 0) - now.get(each, 0) for each in widths[:place])
        if min(won, lost) >= max(most, 1):
            most, at = min(won, lost), width
    if not before or not most:
        return []
    return [_told(f"wider types: {most:,} operations compute in {at} or wider that did not",
                  [f"{width}: {before.get(width, 0):,} → {now.get(width, 0):,} operations a step"
                   for width in widths if before.get(width, 0) != now.get(width, 0)])]


def _by_type(graph: ExecutionGraph) -> dict[str, int]:
    """Return the operations a step by the widest floating type among their inputs."""
    rows = np.flatnonzero((graph.ops.kind == OpKind.OPERATION) & (graph.ops.step >= 0) & (graph.ops.dtypes >= 0))
    codes, numbers = np.unique(graph.ops.dtypes[rows], return_counts=True)
    found: Counter[str] = Counter()
    for code, number in zip(codes.tolist(), numbers.tolist(), strict=True):
        dtypes = map(short_dtype, _NAME.findall(graph.string(code)))
        widest = max((itemsize(dtype) for dtype in dtypes if dtype.startswith(("fp", "bf"))), default=None)
        if widest is not None:
            found[_WIDTHS[widest]] += -(-number // max(len(graph.steps), 1))
    return dict(sorted(found.items()))


def more_calls(before: Mapping[str, int], now: Mapping[str, int], most: int = TOP) -> list[str]:
    """Return operations called more often than before ("aten::item: 0 → 32 a step"), largest increase first."""
    added = sorted(((number - before.get(name, 0), name) for name, number in now.items()
                    if number > before.get(name, 0)), key=lambda each: (-each[0], each[1]))
    lines = [f"{name}: {before.get(name, 0):,} → {now[name]:,} a step" for _, name in added[:most]]
    if len(added) > most:
        lines.append(f"and {len(added) - most} more operations")
    return lines


def _told(sentence: str, offenders: Sequence[str]) -> str:
    return "\n".join([sentence, *(f"    {each}" for each in offenders)])


def _largest_parts(parts: Mapping[str, int]) -> list[str]:
    largest = sorted(parts.items(), key=lambda each: (-each[1], each[0]))[:TOP]
    return [f"{name.replace('_', ' ')}: {in_unit(size, 'bytes')}" for name, size in largest]


def _grown_parts(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    grown = sorted(((size - before.get(name, 0), name) for name, size in now.items()), reverse=True)
    return [f"{name.replace('_', ' ')}: {in_unit(before.get(name, 0), 'bytes')} → {in_unit(now[name], 'bytes')}"
            for more, name in grown[:TOP] if more > 0]


def _by_operation(graphs: Sequence[ExecutionGraph], kinds: Sequence[int]) -> dict[str, int]:
    """Return the calls a step of these kinds, by the operation that makes them, over all ranks."""
    found: Counter[str] = Counter()
    for graph in graphs:
        launches = graph.launches
        rows = np.flatnonzero(np.isin(launches.kind, kinds) & (launches.step >= 0))
        codes, numbers = np.unique(_names(graph, launches.op[rows]), return_counts=True)
        for code, number in zip(codes.tolist(), numbers.tolist(), strict=True):
            found[graph.string(code) or OUTSIDE] += -(-number // max(len(graph.steps), 1))
    return dict(sorted(found.items()))


def _waits(traced: ExecutionGraph, made: Sequence[ExecutionGraph]) -> dict[str, int]:
    """Return how often a step's host waits for the device, by the operation that waits.

    ``traced`` has the explicit waits of the user's code. ``made`` has the blocking calls, and copies to pageable
    memory, for which their call waits.
    """
    found = Counter(_by_operation(made, [LaunchKind.BLOCKING_SYNC]))
    for graph in made:
        rows = np.flatnonzero(view_rank(graph).k_in_call & (graph.kernels.step >= 0))
        names = [graph.string(code) for code in _names(graph, graph.kernels.op[rows]).tolist()]
        found.update(name or OUTSIDE for name in names if name != HOST_READ)  # a blocking call counts these reads
    if asked := traced.meta.substitutions.get(SYNCHRONIZE, 0):
        found["torch.cuda.synchronize"] += -(-asked // max(len(traced.steps), 1))
    return dict(sorted(found.items()))


def _gpu_time(graphs: Sequence[ExecutionGraph]) -> dict[str, float]:
    """Return the device time a step, ns, by the operation that launched it, over all ranks."""
    found: dict[str, float] = {}
    for graph in graphs:
        codes, place = np.unique(_names(graph, graph.kernels.op), return_inverse=True)
        sums = np.bincount(place, weights=graph.kernels.duration_ns, minlength=len(codes))
        for code, ns in zip(codes.tolist(), sums.tolist(), strict=True):
            name = graph.string(code) or OUTSIDE
            found[name] = found.get(name, 0.0) + ns / max(len(graph.steps), 1)
    return found


def _names(graph: ExecutionGraph, op: np.ndarray) -> np.ndarray:
    """Return the string codes of operations' names; ``NONE`` for no operation."""
    return np.append(graph.ops.name, NONE)[op]


def _models(path: str | None) -> Any:
    if path is None:
        return None
    return load_profile(path)


def _host(text: str | None) -> HostModel | None:
    if text is None:
        return None
    return host_by_name(text, lambda path: read_job([path]))


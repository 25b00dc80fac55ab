"""``baseline.json``: measurements of a directory's captures, and the errors of their predictions when it was written.

One JSON object of a fixed form::

    {"format": "foretrace-baseline", "version": 1, "reasons": [{"date", "reason", "foretrace"}, …],
     "captures": {NAME: {"program", "digest", "environment", "counts", "run", "accuracy"}, …}}
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from graph_predictor.simulation.host_slices import exclusive_time
from step_views.check.measure import (
    BASELINE,
    COUNTS,
    CheckError,
    Count,
    Environment,
    Run,
    StoredCapture,
)
from step_views.check.validate import Accuracy
from step_views.diff.changes import tensor_types, type_words
from tracer.errors import listed
from tracer.graph import ExecutionGraph, KernelKind, OpKind
from tracer.input_file import DecodeError, convert, from_json, read_input
from tracer.job import Job
from tracer.output_file import whole_file
from tracer.versions import installed_version

LEAST_SHARE = 0.004
"""Least share of the time that a control needs: shorter controls measure the clock."""
FEWEST = 5
"""Fewest distinct controls from which the machine's slowdown is computed."""
BUSY = 0.8
"""If the device works at least this share of the step, kernels are the controls; else host operations are."""

CALM = 1.4
"""On a quiet machine the mean time of operations is up to this multiple of the lower quartile (caches, the allocator).
Of 108 recordings on two shared cores, undisturbed ones had 1.13 to 1.4, disturbed ones 1.5 to 12."""

Times = dict[tuple[str, ...], np.ndarray]


def machine_slowdown(old: Iterable[ExecutionGraph], new: Iterable[ExecutionGraph], *, device_decides: bool) -> float:
    """Return the log of how much longer unchanged work takes in ``new``; 0 if too little is unchanged to compute this.
    Compared are kernels with ``device_decides``, else the host's operations."""
    before, after = (_joined(_kernels(graph) if device_decides else _operations(graph) for graph in graphs)
                     for graphs in (old, new))
    total = sum(float(times.sum()) for times in before.values()) or 1.0
    logs = [float(np.log(np.quantile(after[key], 0.25) / np.quantile(times, 0.25)))
            for key, times in before.items()
            if key in after and times.sum() >= LEAST_SHARE * total]
    return float(np.quantile(logs, 0.25)) if len(logs) >= FEWEST else 0.0


def disturbance(graphs: Iterable[ExecutionGraph], *, device_decides: bool) -> float:
    """Return the log ratio of unchanged work's mean time to its lower quartile, minus that of ``CALM``; at least 0."""
    times = _joined(_kernels(graph) if device_decides else _operations(graph) for graph in graphs)
    least = sum(float(np.quantile(each, 0.25)) * len(each) for each in times.values())
    total = sum(float(each.sum()) for each in times.values())
    return max(float(np.log(total / least / CALM)), 0.0) if least > 0 else 0.0


def _joined(ranks: Iterable[Times]) -> Times:
    found: dict[tuple[str, ...], list[np.ndarray]] = {}
    for rank in ranks:
        for key, times in rank.items():
            found.setdefault(key, []).append(times)
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _grouped(graph: ExecutionGraph, columns: list[np.ndarray], ns: np.ndarray, text: list[bool]) -> Times:
    """Return the times by the values of the columns; ``text`` marks columns of string codes."""
    if not len(ns):
        return {}
    keys, group = np.unique(np.stack([np.asarray(column, np.int64) for column in columns]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    parts = np.split(ns[order].astype(np.float64), np.cumsum(np.bincount(group))[:-1])
    named = [tuple(graph.string(value) if is_text else str(value) for value, is_text in zip(key, text, strict=True))
             for key in keys.T.tolist()]
    return dict(zip(named, parts, strict=True))


def _operations(graph: ExecutionGraph) -> Times:
    """Return the self times of each operation's calls in steps, ns, by name, shapes and types."""
    own = exclusive_time(graph)
    ops = graph.ops
    ns = np.bincount(own.op, weights=own.end_ns - own.start_ns, minlength=len(ops)) if len(own.op) else np.zeros(
        len(ops))
    rows = np.flatnonzero((ns > 0) & (ops.step >= 0))
    return _grouped(graph, [ops.name[rows], ops.shapes[rows], ops.dtypes[rows]], ns[rows], [True, True, True])


def _kernels(graph: ExecutionGraph) -> Times:
    """Return the durations of each kernel's runs in steps, ns, by name and grid."""
    kernels = graph.kernels
    rows = np.flatnonzero((kernels.kind == KernelKind.COMPUTE) & (kernels.step >= 0) & (kernels.duration_ns > 0))
    return _grouped(graph, [kernels.name[rows], kernels.grid_x[rows], kernels.grid_y[rows], kernels.grid_z[rows]],
                    kernels.duration_ns[rows], [True, False, False, False])


Operations = dict[tuple[str, str], Counter[str]]
"""Counts of a step's operations, by (name, shapes) and by list of element types."""


def retyped(old: Job, new: Job) -> tuple[int, str] | None:
    """Compare operations of the same names and shapes.

    Returns:
        The number of operations a step with inputs of other types, and the most frequent change ("float → double"; ""
        if there is none). ``None`` if a job has no element types.
    """
    before, after = _typed(old), _typed(new)
    if not before or not after:
        return None
    changed = 0
    changes: Counter[str] = Counter()
    for key, types in after.items():
        was = before.get(key)
        if was is None:
            continue
        gone, come = was - types, types - was
        number = min(gone.total(), come.total())
        changed += number
        if number:
            changes[type_words(gone.most_common(1)[0][0], come.most_common(1)[0][0])] += number
    return changed, changes.most_common(1)[0][0] if changes else ""


def _typed(job: Job) -> Operations:
    found: Operations = {}
    for graph in job.graphs:
        ops, steps = graph.ops, max(len(graph.steps), 1)
        rows = np.flatnonzero((ops.kind == OpKind.OPERATION) & (ops.step >= 0) & (ops.dtypes >= 0))
        keys, number = np.unique(np.stack([ops.name[rows], ops.shapes[rows], ops.dtypes[rows]]), axis=1,
                                 return_counts=True)
        for (name, shapes, dtypes), count in zip(keys.T.tolist(), number.tolist(), strict=True):
            if text := tensor_types(graph.string(dtypes), graph.string(shapes)):
                found.setdefault((graph.string(name), graph.string(shapes)), Counter())[text] += max(
                    1, round(count / steps))
    return found


FORMAT = "foretrace-baseline"
VERSION = 1  # of the format; to be raised if an older reader would misread it


class BaselineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One capture: its program, the SHA-256 of its files, its measurements, and the errors of its prediction.

    ``step_region`` is the name of the regions that were its steps, if one was given.
    """

    program: str
    digest: str
    environment: Environment
    counts: dict[str, Count]
    run: Run
    accuracy: Accuracy
    step_region: str = ""


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One update of a baseline: its date, its reason, and the version of foretrace."""

    date: str
    reason: str
    foretrace: str


class GateBaseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the baseline file: each capture's stored figures, and the reason of each update."""

    format: str
    version: int
    reasons: list[Reason]
    captures: dict[str, BaselineEntry]


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """The baseline of a directory of captures."""

    directory: str

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(self.directory) / BASELINE

    def read(self) -> GateBaseline:
        """Read the file. Raises ``CheckError`` if it is missing, damaged, another program's, or of a newer version."""
        try:
            text = read_input(self.path)
        except FileNotFoundError:
            raise CheckError(f"{self.path} does not exist, so that there is nothing to compare with; make it with "
                             f"foretrace check {self.directory} --update-baseline --reason TEXT.") from None
        except OSError as error:
            raise CheckError(f"{self.path} cannot be read ({error.strerror or error}); check its permissions."
                             ) from error
        try:
            head: Any = from_json(text)
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, "
                             "or remove it and make a new one with --update-baseline.") from error
        check_kind(head, str(self.path), FORMAT, VERSION)
        try:
            found = convert(head, GateBaseline)
            for name, entry in found.captures.items():
                if lacking := [each for each in COUNTS if each not in entry.counts]:
                    raise DecodeError(f"{name} lacks the count of {lacking[0]}")
            return found
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, or remove it and "
                             "make a new one with --update-baseline.") from error

    def read_for(self, captures: list[StoredCapture]) -> GateBaseline:
        """Read the file for these captures. Raises ``CheckError`` also if it was made from other captures."""
        found = self.read()
        here = {capture.name: capture for capture in captures}
        told = []
        if missing := sorted(found.captures.keys() - here.keys()):
            told.append(f"{listed(missing, 4)} {_are(missing)} missing here")
        if new := sorted(here.keys() - found.captures.keys()):
            told.append(f"{listed(new, 4)} {_are(new)} not in it")
        if changed := sorted(name for name in found.captures.keys() & here.keys()
                             if found.captures[name].digest != here[name].digest):
            told.append(f"{listed(changed, 4)} {'have' if len(changed) > 1 else 'has'} other files")
        if other := sorted(name for name in found.captures.keys() & here.keys()
                           if found.captures[name].step_region != (here[name].step_region or "")):
            region = found.captures[other[0]].step_region
            told.append(f"the steps of {listed(other, 4)} were {f'the regions {region!r}' if region else 'not named'} "
                        "then (--step-region)")
        if told:
            raise CheckError(f"{self.path} was made from other captures than those of {self.directory}: "
                             f"{'; '.join(told)}; if that is meant, make it again with --update-baseline --reason "
                             "TEXT.")
        return found

    def write(self, captures: dict[str, BaselineEntry], reason: str) -> None:
        """Replace the baseline file, whole or not at all; earlier reasons are kept.

        Raises:
            CheckError: the existing file is another program's or of a newer version; it stays as it is.
            ForetraceError: the file cannot be written.
        """
        earlier = self.read().reasons if self.path.exists() else []
        now = Reason(datetime.date.today().isoformat(), " ".join(reason.split()), installed_version("foretrace"))
        value = GateBaseline(FORMAT, VERSION, [*earlier, now], dict(sorted(captures.items())))
        text = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
        with whole_file(self.path) as stream:
            stream.write(text)


def check_kind(head: Any, path: str, form: str, version: int) -> None:
    """Raise ``CheckError`` unless a JSON value has this format and a known version."""
    if not isinstance(head, dict) or head.get("format") != form:
        raise CheckError(f"{path} was not written by foretrace: it does not say \"format\": \"{form}\"; move it out of "
                         "the way.")
    found = head.get("version")
    if not isinstance(found, int) or found < 1:
        raise CheckError(f"{path} is damaged: its version is {found!r}; take it from version control again.")
    if found > version:
        raise CheckError(f"{path} is of version {found}, and this foretrace reads up to {version}; update foretrace.")


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"

"""A worker process's work on an item: capturing a workload, or measuring a micro-benchmark."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tracer import workloads
from tracer.campaign.items import Item
from tracer.campaign.micro import measure
from tracer.capture import Capture, CaptureOptions, CaptureWarning
from tracer.capture.script import run_workload
from tracer.capture_layout import read_context
from tracer.errors import DiskFullError, GraphFileError, cut_text
from tracer.job import read_job
from tracer.lazy import pandas
from tracer.output_file import full_disk_error

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab
    from tracer.graph import ExecutionGraph

UNSUPPORTED = ("no available kernel", "not implemented for", "not supported", "not compiled", "is only supported",
               "requires compute capability", "could not find an engine", "no viable backend",
               "operator doesn't exist for this backend", "status_not_supported")
"""Parts of torch's messages (in lower case) about work that this device or build cannot do."""
_DEVICE_ERRORS = re.compile(r"\b(CUDA|HIP) (error|out of memory)|Triton Error \[(CUDA|HIP)\]", re.IGNORECASE)
_PATHS = re.compile(r"(?:/[\w.+-]+){2,}/([\w.+-]+)")


class Task(msgspec.Struct):
    """A request to a worker. ``graph_bytes``: largest size of a full graph; larger ones are kept as a summary."""

    item: Item
    folder: str
    graph_bytes: int = 0


class Answer(msgspec.Struct):
    """A worker's answer: ``phase`` "ready" (with its context), "measured" (files follow), "done" or "failed".

    ``values`` are fields of an ``ItemResult``; ``rows`` those of a micro-benchmark; ``file`` lies in the task's folder;
    ``disk_full`` is a folder on a full disk that made the item fail, which is no fault of the item.
    """

    phase: str
    values: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    file: str = ""
    reason: str = ""
    disk_full: str = ""


def sentence(error: BaseException) -> str:
    """Return an exception as one sentence without paths of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = cut_text(_PATHS.sub(r"\1", " ".join(lines[:2])), 300) or "no message"
    return f"{type(error).__name__}: {text}{'' if text.endswith('.') else '.'}"


def is_unsupported(error: BaseException) -> bool:
    """Return whether torch reports that it does not support the work here, rather than a failure."""
    text = str(error).lower()
    return isinstance(error, (NotImplementedError, RuntimeError)) and any(part in text for part in UNSUPPORTED)


def is_device_error(reason: str) -> bool:
    """Return whether a message of NVIDIA or AMD reports a device error, after which a process may be unusable."""
    return _DEVICE_ERRORS.search(reason) is not None


def full_folder(error: BaseException, task: Task) -> str:
    """Return a folder on a full disk that made an item fail; empty if it failed for another reason."""
    full = full_disk_error(error)
    if full is None:
        return ""
    if isinstance(error, DiskFullError):
        return task.folder
    # Compilers and the like: they name the folder, or use the one for temporary files.
    return os.path.dirname(os.fsdecode(full.filename or "")) or tempfile.gettempdir()


def capture_workload(task: Task) -> tuple[dict[str, Any], Path]:
    """Capture a workload into the task's folder; return fields of its result, and the capture's part to convert.

    The model is freed when this returns. The files are not converted yet, so that the next worker can start meanwhile.
    """
    item = task.item
    out = Path(task.folder) / item.id
    settings = workloads.configure(item.name, **item.settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        capture = run_workload(settings, Capture(out, CaptureOptions(**item.counts)))
    part = capture.part
    assert part is not None
    context = read_context(part)
    values: dict[str, Any] = {
        "unprofiled_step_ns": capture.unprofiled_step_ns, "profiled_step_ns": capture.profiled_step_ns,
        "median_ns": context.get("unprofiled_median_ns"), "spread": context.get("unprofiled_spread"),
        "profiler_slowdown": capture.slowdown, "peak_memory": context.get("peak_memory", {}),
        "parameters": capture.facts["workload"]["parameters"],
        "clocks": context.get("hardware", {}).get("clocks") or {},
    }
    if capture.ended:
        values["notes"] = [f"The capture is not complete: {capture.ended}"]
    return values, part


def convert(task: Task, part: Path) -> dict[str, Any]:
    """Store the capture as one file in the task's folder, and return ``{"file": …, "content": …, "notes": […]}``."""
    job = read_job(part, cycle=1)
    graph = job.graphs[0]
    # The plan chose to keep one of several windows: no note on that.
    notes = [note for note in job.notes if not note.startswith("The capture has")]
    graph.meta.source = task.item.file_stem
    path = Path(task.folder) / f"{task.item.file_stem}.foretrace"
    try:
        graph.save(path)
        if path.stat().st_size <= task.graph_bytes:
            return {"file": path.name, "content": "graph", "notes": notes}
        path.unlink()
        table = Path(task.folder) / f"{task.item.file_stem}.parquet"
        summarise(graph).to_parquet(table, compression="zstd", index=False)
    except (OSError, GraphFileError) as error:
        if full_disk_error(error) is not None:
            raise DiskFullError(f"The disk is full: {task.item.file_stem} cannot be written.") from error
        raise
    return {"file": table.name, "content": "summary", "notes": notes}


def measure_kernel(task: Task, lab: Lab) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure a micro-benchmark; return fields of its result, and its rows."""
    try:
        rows = measure(task.item.name, task.item.settings, lab, task.item.visit)
    finally:
        lab.tidy()
        if task.item.name == "fused":
            lab.torch._dynamo.reset()
    first = rows[0]
    values = {"content": "kernels", "median_ns": round(first["p50_us"] * 1e3),
              "spread": round((first["p75_us"] - first["p25_us"]) / first["p50_us"], 4) if first["p50_us"] else None}
    return values, rows


_OP_KEYS = ["name", "phase", "shapes", "dtypes"]
_KERNEL_KEYS = ["name", "op_name", "phase", "shapes", "dtypes", "kind", "stream"]


def summarise(graph: ExecutionGraph) -> pandas.DataFrame:
    """Return a recorded graph as one small table: groups of equal rows of all profiled steps.

    Columns: ``table`` ("op" or "kernel"), ``name``; for a kernel also ``op_name``, ``kind``, ``stream``; ``phase``,
    ``shapes`` and ``dtypes`` of the operation (JSON texts); ``count``; ``median_ns``, ``total_ns`` of the durations (an
    operation's duration includes the operations inside it).
    """
    ops = graph.to_pandas("ops")
    for name in ("name", "phase", "shapes", "dtypes"):
        ops[name] = ops[name].astype(object).where(ops[name].notna(), "")
    kernels = graph.to_pandas("kernels")
    for name in ("name", "kind"):
        kernels[name] = kernels[name].astype(object)
    of_op = ops.reindex(kernels["op"]).reset_index(drop=True)
    kernels = kernels.reset_index(drop=True).assign(
        op_name=of_op["name"].fillna(""), phase=of_op["phase"].fillna(""), shapes=of_op["shapes"].fillna(""),
        dtypes=of_op["dtypes"].fillna(""))
    return pandas.concat([_grouped(ops[ops["kind"] == "operation"], _OP_KEYS, "op"),
                          _grouped(kernels, _KERNEL_KEYS, "kernel")], ignore_index=True)


def _grouped(frame: pandas.DataFrame, keys: list[str], table: str) -> pandas.DataFrame:
    groups = frame.groupby(keys, sort=False, dropna=False)["duration_ns"]
    found = groups.agg(count="count", median_ns="median", total_ns="sum").reset_index()
    found.insert(0, "table", table)
    return found.astype({"median_ns": "float64", "total_ns": "int64", "count": "int64"})

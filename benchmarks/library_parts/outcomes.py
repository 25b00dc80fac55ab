"""How it went: one model's step traced and priced, or why not, each a small file in a cache."""

from __future__ import annotations

import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from zoo_parts.tracing import limited

from kernel_models.device import device
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_at
from kernel_models.pricing import price
from library_parts.cases import LibraryCase, large_left_zero
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph, OpKind

DEVICE = "a100-sxm-80g"
LONGEST_S = 240
SELECTED = 0.5
"""Share that masks made of data select, in steps whose shapes depend on them."""
EAGER_S = 60
MOST_ATTEMPTS = 2
"""A case whose process died is tried once more, in a fresh one."""
EAGER_BYTES = 12 << 30
TOKENS = 3
"""New tokens of the generations that are traced: 1, 2, … up to these."""


class Outcome(msgspec.Struct):
    """One model in one kind of step.

    Attributes:
        status: "traced"; "failed"; "unchecked", failed where it was too large to be run for comparison; "not by
            itself", as PyTorch on a CPU does not run it with the same inputs either.
        reason: of the failure, with its line.
        operations: how many the step runs.
        seconds: for how long it was traced.
        time_us: device time by the data sheet.
        unknown_us: the part of it in operations that no family knows, by name.
        notes: what the trace assumed.
    """

    library: str
    name: str
    kind: str
    status: str
    reason: str = ""
    operations: int = 0
    seconds: float = 0.0
    time_us: float = 0.0
    unknown_us: dict[str, float] = {}
    notes: list[str] = []


def count_all(cases: list[LibraryCase], cache: Path, again: bool) -> None:
    """Trace the cases that have no file yet (again those that failed), and say how each went."""
    cache.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases):
        target, begun = cache / f"{case.stem}.json", cache / f"{case.stem}.begun"
        if target.exists() and not (again and any(one.status != "traced" for one in _read(target))):
            continue
        attempts = len(begun.read_text()) if begun.exists() else 0
        if attempts >= MOST_ATTEMPTS:
            found = [_outcome(case, "failed", kind, "The process died.") for kind in _kinds(case)]
        else:
            begun.write_text("." * (attempts + 1))
            found = _attempt(case)
        part = target.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(found))
        part.replace(target)
        begun.unlink(missing_ok=True)
        for one in found:
            print(f"{number}/{len(cases)} {one.kind} {one.name}: {one.status} {one.reason[:400]} "
                  f"({one.operations} operations, {one.seconds:.1f} s)", flush=True)


def outcomes_in(cache: Path) -> list[Outcome]:
    """Everything that was counted."""
    return [one for path in sorted(cache.glob("*.json")) for one in _read(path)]


def _read(path: Path) -> list[Outcome]:
    return msgspec.json.decode(path.read_bytes(), type=list[Outcome])


def _attempt(case: LibraryCase) -> list[Outcome]:
    from tracer.shape_only import trace_step

    begin = time.perf_counter()
    kinds = _kinds(case)
    try:
        with limited(LONGEST_S):
            steps = TOKENS if case.kind == "generate" else 1
            graph = trace_step(lambda: case.build("cuda"), DEVICE, steps=steps, warmup=int(case.kind == "train"),
                               selected=SELECTED)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a model of a library may raise anything
        seconds = time.perf_counter() - begin
        status, said = _by_itself(case, error.__cause__ or error)
        return [_outcome(case, status, kind, f"{_said(error)}{said}", seconds=seconds) for kind in kinds]
    seconds = time.perf_counter() - begin
    found = _operations(graph)
    parts = [found[0], found[-1] - found[-2]] if case.kind == "generate" else [found[0]]
    return [_priced(case, kind, part, seconds, list(graph.meta.loss.notes))
            for kind, part in zip(kinds, parts, strict=True)]


def _kinds(case: LibraryCase) -> list[str]:
    return ["prefill", "decode"] if case.kind == "generate" else [case.kind]


def _priced(case: LibraryCase, kind: str, operations: Counter[Any], seconds: float, notes: list[str]) -> Outcome:
    calls: Counter[OpCall] = Counter()
    unknown: Counter[str] = Counter()
    for (operation, place), count in operations.items():
        for call in calls_at(operation, place):
            calls[call] += count
    try:
        prices = price(list(calls), device(DEVICE))
    except Exception as error:
        return _outcome(case, "traced", kind, f"not priced: {type(error).__name__}: {error}",
                        operations=operations.total(), seconds=seconds, notes=notes)
    times = np.asarray(prices.time_us) * np.array(list(calls.values()))
    for call, time_us in zip(calls, times.tolist(), strict=True):
        if call.family is Family.OTHER or "unsized" in call.flags:
            unknown[f"{call.family.value} {call.kind}"] += time_us
    return _outcome(case, "traced", kind, operations=operations.total(), seconds=seconds, time_us=float(times.sum()),
                    unknown_us=dict(unknown), notes=notes)


def _operations(graph: ExecutionGraph) -> list[Counter[tuple[Operation, int]]]:
    """The distinct operations of each step, with their places."""
    found: list[Counter[tuple[Operation, int]]] = [Counter() for _ in range(len(graph.steps))]
    for op in range(len(graph.ops)):
        if graph.ops.kind[op] == OpKind.OPERATION:
            found[int(graph.ops.step[op])][Operation.from_graph(graph, op), int(graph.ops.place[op])] += 1
    return found


def _by_itself(case: LibraryCase, error: BaseException) -> tuple[str, str]:
    """Whether PyTorch runs a step on the CPU that could not be traced: the status, and what to add to the reason.

    One that fails in the same way on tensors without memory need not be run.
    """
    import torch

    try:
        with limited(EAGER_S), torch.device("meta"):
            case.build("meta")
    except KeyboardInterrupt:
        raise
    except BaseException as other:
        if _said(other) == _said(error):
            return "not by itself", " | the same on meta tensors"
    try:
        with limited(EAGER_S), _memory(EAGER_BYTES), large_left_zero():
            case.build("cpu")()
    except (TimeoutError, MemoryError) as error:
        return "unchecked", f" | by itself: {type(error).__name__}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if "allocate memory" in str(error):
            return "unchecked", " | by itself: too large"
        return "not by itself", f" | by itself: {_said(error)}"
    return "failed", ""


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:700]
    return text if isinstance(error, ForetraceError) else f"{type(error).__name__}: {text}"


def _outcome(case: LibraryCase, status: str, kind: str = "", reason: str = "", **rest: Any) -> Outcome:
    return Outcome(case.library, case.name, kind or case.kind, status, reason, **rest)


def reason_class(reason: str) -> str:
    """The reason without what is particular to a model."""
    if "|" in reason:
        reason = reason.partition(" | ")[0]
    for text, name in (("reads a tensor's values", "reads values of data"),
                       ("which has no fake kernel", "no fake kernel"),
                       ("gives a tensor whose shape depends on values", "a shape that depends on data"),
                       ("not traced after", "takes too long"), ("The process died", "the process died")):
        if text in reason:
            return name
    found = re.search(r"\b([A-Z]\w*(?:Error|Exception|Exit))\b", reason)
    return found[1] if found else reason[:60]


@contextmanager
def _memory(most: int) -> Iterator[None]:
    """No more memory than this beside what the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

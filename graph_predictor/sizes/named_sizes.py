"""Sizes as a user writes them, and those of captures: named by the user, or noted by a workload of the suite."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from graph_predictor.prediction.scenario import EditError
from tracer.graph import ExecutionGraph

_SET = re.compile(r"(\w+)=(?:(\d+):)?(\d+)")
_ALSO = re.compile(r"(?P<path>.+?)(?::(?P<sizes>\w+=\d+(?:,\w+=\d+)*))?")
SEED = "seed"
LEADING = frozenset({"batch", "b", "bs", "batch_size"})
"""Names of the dimension that comes first in activations: a rank's samples. Any other name may stand anywhere."""
MOST = 2**31 - 1
"""The largest size that is understood: PyTorch's kernels index dimensions by 32 bits."""
_SHOWN = 24
"""Digits of a refused size that are shown."""


def parse_sets(texts: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Old sizes, where they were named, and new ones, from "batch=32:128" or "batch=128".

    Raises:
        EditError: a text names no size, or one that PyTorch does not index.
    """
    old: dict[str, int] = {}
    new: dict[str, int] = {}
    for text in texts:
        match = _SET.fullmatch(text.strip())
        if match is None and text.strip().startswith("skew="):
            raise EditError(f"{text!r} is no size: by which law rows of tables are looked up is said by --indices, as "
                            "zipf:1.05.")
        if match is None:
            raise EditError(f"{text!r} names no size: write it like batch=128, or batch=32:128 with the recorded one.")
        if match[1] in new:
            raise EditError(f"{match[1]} is set twice; give one new size.")
        new[match[1]] = _size(match[1], match[3])
        if match[2] is not None:
            old[match[1]] = _size(match[1], match[2])
    return old, new


def _size(name: str, digits: str) -> int:
    """A size. Raises ``EditError`` for one above ``MOST``: functions may take 0, so that users of sizes refuse that."""
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(MOST)) or int(digits) > MOST:
        raise no_size(name, digits if len(digits) <= _SHOWN else digits[:_SHOWN] + "…")
    return int(digits)


def no_size(name: str, value: int | str) -> EditError:
    """The refusal of a value that is no size."""
    return EditError(f"{name}={value} is no size: give a whole number from 1 to {MOST:,}.")


def parse_also(text: str) -> tuple[str, dict[str, int]]:
    """Path of a capture and its sizes, from "runs/b:batch=64,seq=128" or the path alone."""
    match = _ALSO.fullmatch(text)
    if match is None:
        raise EditError("--also needs the path of a capture, such as runs/b:batch=64.")
    pairs = (part.split("=") for part in (match["sizes"] or "").split(",") if part)
    return match["path"], {name: _size(name, size) for name, size in pairs}


def samples_of(settings: Mapping[str, Any]) -> int | None:
    """Samples of a workload's step by its settings; ``None`` where they do not say."""
    batch, accumulation = settings.get("batch"), settings.get("accumulation") or 1
    return batch * accumulation if type(batch) is int and type(accumulation) is int else None


def captured_sizes(graphs: Sequence[ExecutionGraph], told: Sequence[Mapping[str, int]], new: Mapping[str, int]) -> list[
        dict[str, int]]:
    """The sizes of each capture: those given, and of a workload of the suite those it noted.

    Args:
        graphs: one of each capture.
        told: sizes that the user named, of each.
        new: sizes that are asked for.

    Raises:
        EditError: two workloads, or two of one that differ in more than sizes; or one does not say a size.
    """
    settings: list[Mapping[str, Any]] = [graph.meta.workload.get("settings", {}) for graph in graphs]
    names = list(dict.fromkeys([*new, *(name for one in told for name in one)]))
    if all(settings):
        workloads = sorted({str(graph.meta.workload.get("name")) for graph in graphs})
        if len(workloads) > 1:
            raise EditError(f"The captures are of {' and '.join(workloads)}; give captures of one program.")
        for name in dict.fromkeys(name for one in settings for name in one):
            values = [one.get(name) for one in settings]
            if len({repr(value) for value in values}) == 1 or name in names or name == SEED:
                continue
            if not all(type(value) is int for value in values):
                raise EditError(f"The captures differ in {name} ({' and '.join(map(str, values))}), which is no size; "
                                "give captures that differ in sizes alone.")
            names.append(name)
    found = []
    for one, noted in zip(told, settings, strict=True):
        noted_sizes = {name: int(noted[name]) for name in names if type(noted.get(name)) is int}
        found.append({**noted_sizes, **one})
        if lacking := next((name for name in names if name not in found[-1]), None):
            raise EditError(f"One of the captures does not say its {lacking}: name it, as in --also PATH:{lacking}=64, "
                            f"or --set {lacking}=32:128 for the one that is predicted from.")
    return found


def nearest(captured: Sequence[Mapping[str, int]], wanted: Mapping[str, int]) -> int:
    """Return which capture's sizes are nearest to those that are wanted, by their ratios; the first of equals.

    Raises:
        EditError: a size is none.
    """
    for sizes in (wanted, *captured):
        for name, size in sizes.items():
            if not 1 <= size <= MOST:
                raise no_size(name, size)
    return min(range(len(captured)), key=lambda number: sum(
        abs(math.log(wanted[name] / size)) for name, size in captured[number].items()))

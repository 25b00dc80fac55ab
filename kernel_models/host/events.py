"""The host's time of one step: ``HostStep``, operation by operation, and ``HostMoment``, by a label that events of
other programs share.

A step is described at the level at which it is traced::

    recorded   |--- aten::linear ---|                       Operations nest.
                 |t| |- aten::addmm -|
    here         t      addmm                               Below autograd.
    host     [b ]t[ b ][    addmm    ][    before next       Time in each operation, and before it.

The outermost operations that are not made of others on every device (``composite_operations``) have a row each. The
time before them includes all wrappers (modules, autograd's nodes, operations made of others, Python).

An event is an operation's own time, or the time before it. Four of a step are special events, for any operation that
comes next, and their cost depends on these counts:

::

    |begin| forward … |backward| its operations … |optimizer| its operations … |end|
     parameters        autograd's nodes            parameters                   parameters

Operations have the names that a trace by shapes gives them. Memory that PyTorch asks for within ``torch.tensor`` is a
part of it. Gradients that autograd adds in place count as additions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from kernel_models.operation import is_free
from tracer.arrays import Float64, Int8, Int64

Names = npt.NDArray[np.object_]

LISTS = ("_foreach", "_fused")
"""Parts of the names of operations on lists of tensors."""
Label = tuple[str, ...]
"""Label of an event or a pool: "own" or "before", then its phase and names; fewer words mean a wider pool."""
COLDER, EVICTS_NS = 2.7, 4_300.0
"""Growth of an event's cost with the host's own computation since an operation of that name last ran: the first figure
for each e-fold over ``EVICTS_NS``. Computing fills the caches with other data (``kernel_models.host.model``)."""
WARM_EVENTS, COLDER_EVENTS = 8.0, 0.2
"""Where a GPU computes, only other code fills the caches. The first: number of events within which a repeated event
still finds its caches warm. The second: natural logarithm of its cost's growth for each doubling of that number."""
LOOP_CALLS = 3
"""Least calls of Python before a step's first operation that include the model's own; fewer are the training loop's."""
LOADER_CALLS, PLAIN_END_CALLS = 7, 5
"""Fewest Python calls before a step that show a loader; most after it that are only an optimizer's end."""
SHARDED = "s"
"""Suffix of phases of programs whose parameters FSDP shards: its hooks and the dispatch of sharded tensors surround the
operations. Figures of such programs take precedence over others."""
BEGIN, BACKWARD, OPTIMIZER, FINISH = "begin", "backward", "optimizer", "end"
_SPECIAL = (BEGIN, BACKWARD, OPTIMIZER, FINISH)
_IN_BACKWARD, _IN_OPTIMIZER = "2", "3"
_PYTHON, _NO_PYTHON, _LOADER = "python", "no python", "loader"
_AT_ONCE, _LATER = "at once", "later"
"""Whether an optimizer directly follows backward, or follows other work on the gradients such as clipping."""
_MOMENTS, _PLAIN = ("addcmul", "addcdiv", "_fused_adam"), "plain"
_MADE_OF_EMPTY = ("aten::lift_fresh", "aten::arange")
_ALIASES = {"aten::_reshape_alias": "aten::view", "aten::_index_put_impl": "aten::index_put"}


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step of one program.

    Attributes:
        name, phase: Name and ``Phase`` of each operation, in the order they run; [n].
        tensors: Number of tensors in the list that an operation works on; 0 without a list; [n].
        before_ns: Time before each operation, and after the last one, ns; [n + 1]; zeros where not measured.
        inside_ns: Time in each operation, ns, with its calls, without a CPU's own computation; [n].
        compute_ns: Computing time of each operation on the host, ns; zeros where a GPU computes; [n].
        launch_ns: Time of one launch, ns; 0 where none was recorded.
        calls: Calls of Python functions before each operation, and after the last one; [n + 1]; ``None`` where not
            counted.
    """

    name: Names
    phase: Int8
    tensors: Int64
    before_ns: Float64
    inside_ns: Float64
    compute_ns: Float64
    launch_ns: float = 0.0
    calls: Float64 | None = None

    def __len__(self) -> int:
        return len(self.name)

    def scaled(self, factor: float) -> HostStep:
        """Return the step on a host whose times are multiplied by ``factor``."""
        return replace(self, before_ns=self.before_ns * factor, inside_ns=self.inside_ns * factor,
                       launch_ns=self.launch_ns * factor)

    @property
    def sharded(self) -> bool:
        """Return whether FSDP shards the program's parameters."""
        return any(name.startswith("fsdp::") for name in self.name.tolist())

    @property
    def host_ns(self) -> float:
        """Host time of the step, ns."""
        return float(self.before_ns.sum() + self.inside_ns.sum())


@lru_cache(maxsize=1)
def composite_operations() -> frozenset[str]:
    """Return the names of operations made of others on every device, so that traces below autograd lack them."""
    text = resources.files("kernel_models.host").joinpath("composite_operations.json").read_text(encoding="utf-8")
    return frozenset(f"aten::{name}" for name in json.loads(text)["names"])


def is_flat(name: str) -> bool:
    """Return whether operations of that name have a row: the dispatcher runs them below autograd."""
    if "::" not in name or name.startswith(("autograd::", "torch::", "enumerate(")):
        return False
    return name not in composite_operations()


def host_class(name: str) -> str:
    """Return the class of an operation by the host's work: "list", "view", "backward", "in place" or "other"."""
    if any(mark in name for mark in LISTS):
        return "list"
    if is_free(name) or name in ("aten::empty", "aten::empty_like", "aten::detach"):
        return "view"
    if name.endswith("_backward"):
        return "backward"
    return "in place" if name.endswith("_") else "other"


@dataclass(frozen=True, slots=True)
class HostMoment:
    """One event of a step: the host's time before or in an operation, or after the last one.

    Attributes:
        label: Label that it shares with equal events.
        tensors: Tensors in its list; for a special event the program's parameters or nodes.
        cold: Its cost over that of an equal event with warm caches.
        ns: Its time, ns.
        calls: Calls of Python functions in it; 0 where they are ignored.
        first, place: Its first and last place in the list (before, in, before, …, after the last).
    """

    label: Label
    tensors: int
    cold: float
    ns: float
    calls: float
    first: int
    place: int


def host_events(step: HostStep, counted: bool) -> list[HostMoment]:
    """Return the events of a step in order: before the first operation, in it, before the second one, …, after all.

    Args:
        step: step of any program.
        counted: whether to use calls of Python; the step must have them.
    """
    names, rows = _as_traced(step)
    if not names:
        return []
    lists = step.tensors[rows].tolist()
    mark = SHARDED if step.sharded else ""
    phases = [f"{phase}{mark}" for phase in step.phase[rows].tolist()]
    first, times, calls = _merged(step, rows, counted)
    special = _special(names, phases, lists, None if not counted else calls, mark)
    labels: list[Label] = []
    for row, (phase, name) in enumerate(zip(phases, names, strict=True)):
        label = special[row][0] if row in special else ("before", phase, name, names[row - 1])
        if counted and row not in special:
            label = *label, _PYTHON if calls[row] else _NO_PYTHON
        labels += [label, ("own", phase, name)]
    labels.append(special[len(names)][0])
    cold = _cold(step, rows, labels)
    found = []
    for place, label in enumerate(labels):
        row, own = divmod(place, 2)
        tensors, called = lists[row] if row < len(lists) else 0, 0.0
        if not own and row in special:
            tensors = special[row][1]
        elif not own:
            tensors, called = max(tensors, lists[row - 1]), float(calls[row])
        at = 2 * int(rows[row]) if row < len(rows) else 2 * len(step)
        begins = at + 1 if own else 2 * int(first[row])
        found.append(HostMoment(label, tensors, float(cold[place]), float(times[place]), called, begins, at + own))
    return found


def _cold(step: HostStep, rows: np.ndarray, labels: Sequence[Label]) -> Float64:
    """Return each event's cost over that of a warm event."""
    if step.compute_ns.any():
        reached = np.append(0.0, np.cumsum(step.compute_ns))
        computed = np.append(reached[rows], reached[-1])[np.arange(len(labels)) // 2]
        since = _since(computed, float(reached[-1]), [*map(_code, labels)])
        return np.asarray(1.0 + COLDER * np.log1p(since / EVICTS_NS))
    events = _since(np.arange(len(labels), dtype=np.float64), float(len(labels)), labels)
    found: Float64 = np.exp(COLDER_EVENTS * np.log2(np.maximum(events / WARM_EVENTS, 1.0)))
    found[[_is_special(label) for label in labels]] = 1.0
    return found


def _since(at: Float64, total: float, codes: Sequence[Label]) -> Float64:
    """Return the distance of each event from the previous event with its code, wrapping around the step's end."""
    before = {code: now - total for code, now in zip(codes, at.tolist(), strict=True)}  # positions in the previous step
    found = np.empty(len(at))
    for place, (code, now) in enumerate(zip(codes, at.tolist(), strict=True)):
        found[place], before[code] = now - before[code], now
    return found


def _is_special(label: Label) -> bool:
    """Return whether an event is one of the four special events of a step."""
    return label[0] == "before" and label[1].removesuffix(SHARDED) in _SPECIAL


def _code(label: Label) -> Label:
    """Return an identifier of the code that an event runs: its operation in any phase, or its special event."""
    return label[:2] if _is_special(label) else (label[0], label[2])


def is_sharded(label: Label) -> bool:
    """Return whether a label belongs to a program with sharded parameters."""
    return len(label) > 1 and label[1].endswith(SHARDED)


def is_same_without_calls(label: Label) -> bool:
    """Return whether an event has an equal label where calls of Python are not counted."""
    return label[0] == "own" or label[1].removesuffix(SHARDED) in (BACKWARD, OPTIMIZER, FINISH)


def unsharded(label: Label) -> Label:
    """Return the event's label in programs without sharding."""
    return (label[0], label[1].removesuffix(SHARDED), *label[2:])


@lru_cache(maxsize=1 << 14)
def pools_of(label: Label) -> list[Label]:
    """Return a label and the pools above it, from narrow to wide."""
    python: Label = ()
    if label[0] == "own":
        _, phase, name = label
        mine = f"class {host_class(name)}"
        found = [label, ("own", name), ("own", phase, mine), ("own", mine), ("own",)]
    elif _is_special(label):
        found = [label, *(label[:size] for size in range(len(label) - 1, 1, -1)), ("before", "special")]
    else:
        _, phase, name, previous, *rest = label
        python = tuple(rest)
        mine, other = f"class {host_class(name)}", f"class {host_class(previous)}"
        found = [label, *((*pool, *python) for pool in (
            ("before", phase, name, other), ("before", phase, name), ("before", phase, mine, other),
            ("before", phase, mine), ("before", mine), ("before",)))]
    if is_sharded(label):  # for classes of operations, the pools of all programs are better
        return [pool if pool == label else (SHARDED, *pool) for pool in found
                if not any(word.startswith("class ") for word in pool) and len(pool) > 1 + len(python)
                and pool[1] != "special"]
    return found


def _special(names: Sequence[str], phases: Sequence[str], lists: Sequence[int], calls: Float64 | None,
             mark: str) -> dict[int, tuple[Label, int]]:
    """Return the special events of a step: by the row after each, its label and its number of tensors or nodes."""
    parameters = max(lists) or _parameters(names, phases)
    kind = _optimizer_kind([name for name, phase in zip(names, phases, strict=True) if phase[0] == _IN_OPTIMIZER])
    found: dict[int, tuple[Label, int]] = {}
    backward = sum(phase.startswith(_IN_BACKWARD) for phase in phases)
    for row in range(1, len(names)):
        now, before = phases[row][0], phases[row - 1][0]
        if now == before:
            continue
        if now == _IN_OPTIMIZER:
            found[row] = ("before", OPTIMIZER + mark, kind, _AT_ONCE if before == _IN_BACKWARD else _LATER), parameters
        elif now == _IN_BACKWARD:
            found[row] = ("before", BACKWARD + mark), backward
    found[0] = ("before", BEGIN + mark, names[0] if calls is None else _begin_kind(calls[0])), parameters
    after = _end_kind(calls, parameters if kind.endswith(_PLAIN) else 0)
    found[len(names)] = ("before", FINISH + mark, kind, *after), parameters
    return found


def _optimizer_kind(names: Sequence[str]) -> str:
    """Return the kind of an optimizer's loop: over a list in one operation or several, or over single tensors. The
    second part is "moments" with an average of squares for each tensor, as in Adam. "none": no optimizer ran."""
    if not names:
        return "none"
    moments = any(mark in name for name in names for mark in _MOMENTS)
    how = next((mark for mark in LISTS if any(mark in name for name in names)), "one by one")
    return f"{how}, {'moments' if moments else _PLAIN}"


def _begin_kind(calls: float) -> str:
    """Return what runs before a step's first operation: no Python, the model's own Python, or a loader too."""
    return _NO_PYTHON if calls < LOOP_CALLS else _PYTHON if calls < LOADER_CALLS else _LOADER


def _end_kind(calls: Float64 | None, usual: int) -> tuple[str, ...]:
    """Return whether more Python runs after a step's last operation than the optimizer's end: ``PLAIN_END_CALLS``
    calls, plus ``usual`` calls for parameters in some optimizers; () where calls were not counted."""
    if calls is None:
        return ()
    return (_PYTHON if calls[-1] > usual + PLAIN_END_CALLS else _NO_PYTHON,)


def _parameters(names: Sequence[str], phases: Sequence[str]) -> int:
    """Return how many parameters an optimizer over single tensors has: it runs each operation once for each."""
    count = Counter(name for name, phase in zip(names, phases, strict=True) if phase.startswith(_IN_OPTIMIZER))
    most = max(count.values(), default=0)
    return min((number for number in count.values() if 2 * number >= most), default=0)


def _as_traced(step: HostStep) -> tuple[list[str], np.ndarray]:
    """Return the names that a trace by shapes gives the operations, and their rows in the step."""
    recorded = step.name.tolist()
    names, rows = [], []
    for row, (name, phase) in enumerate(zip(recorded, step.phase.tolist(), strict=True)):
        if name == "aten::empty" and row + 1 < len(recorded) and recorded[row + 1] in _MADE_OF_EMPTY:
            continue
        if name == "aten::detach_" and row and recorded[row - 1] == "aten::lift_fresh":
            continue
        if str(phase) == _IN_BACKWARD and name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        names.append(_ALIASES.get(name, name))
        rows.append(row)
    return names, np.array(rows, np.int64)


def _merged(step: HostStep, rows: np.ndarray, counted: bool) -> tuple[np.ndarray, Float64, Float64]:
    """Return for each kept row the first row merged into it, the events' times, and the calls before the rows."""
    kept = np.zeros(len(step), np.bool_)
    kept[rows] = True
    goes = np.searchsorted(rows, np.arange(len(step) + 1))  # a dropped row counts as time before the next kept row
    size = len(rows) + 1
    before = np.bincount(goes, weights=step.before_ns, minlength=size)
    before += np.bincount(goes[:-1][~kept], weights=step.inside_ns[~kept], minlength=size)
    times = np.empty(2 * size - 1)
    times[0::2], times[1::2] = before, step.inside_ns[rows]
    calls = np.zeros(size)
    if counted and step.calls is not None:
        calls += np.bincount(goes, weights=step.calls, minlength=size)
    return np.searchsorted(goes, np.arange(size)), times, calls

"""The items of a calibration: anchors first, then sizes of the families that need measurements most.

    anchors ──▶ for each turn:  The family of most error for its time so far (``planner``).
                                  └─▶ A held-out shape if fewer than a quarter are, else one to fit to.
                on a CPU:        First the measurements that are due for another visit (``Visits``).
                now and then:    The canary again (does the device still run as fast?), and the device's health.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernel_models.calibration import checks
from kernel_models.calibration.checks import CalibrationError, Finding
from kernel_models.calibration.figures import measured_device, spec_of, with_measured
from kernel_models.calibration.planner import LEAST_TO_LEARN, FamilyProgress, Visits
from kernel_models.calibration.space import Candidate, Limits, Space, draw, limits_for, spaces
from kernel_models.datasets.campaign import calls_of_benchmark, is_intended, time_us
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall
from tracer.campaign.families import FAMILIES
from tracer.campaign.items import Item, expand, kernel_item
from tracer.campaign.plan import KernelEntry, Plan, WorkloadEntry
from tracer.campaign.results import INDEX, ItemResult, Results
from tracer.campaign.source import Rows, Setup
from tracer.campaign.tables import WARM, quickest_visits, read_kernels, warm_variant

DRAWS = 12
"""Number of settings of a family to draw; one is taken, with odds inversely proportional to its seconds. Chosen: with
more draws the long ones would come last."""
HELD_OUT_SHARE = 0.25
"""Part of a family's measurements that is held out, provided that its draws have held-out shapes (a third of all)."""
CHECK_S, SAY_S = 20.0, 2.0
"""Seconds between checks of the device's health and the canary, and between lines of progress: chosen."""
SLOWER = 1.12
"""If the canary (a repeated benchmark) is slower than at first by this factor, the device has changed."""
COVERAGE = 16
"""Number of measurements that every family gets before others are preferred: chosen, twice ``LEAST_TO_LEARN``."""
LONGER = 2.0
"""A measurement expected to exceed the longest allowed run by this factor is skipped."""
MOST_REFUSALS = 3
"""Settings of the same modes that may fail or be refused before these modes are left out, unless any worked."""
GIVEN_UP = 8
"""A family ends when this many of its latest measurements in a row failed. Chosen: with a worker's restart after each
failure, the device's other families then lose less than a tenth of nine minutes."""
GAVE_UP = "was given up with"
DOUBTFUL = 5
"""After this many failures in a row, a measurement that has worked before is repeated. The result distinguishes a
broken device from families that cannot be measured, before the run ends (``tracer.campaign.runner.MOST_FAILURES``)."""
_HOST_CASES = ("launch_idle", "launch_busy", "synchronise", "item")
_TRIES = 40
"""Most candidates tried to find one that fits the remaining time: chosen."""
_CAPTURE_FROM_S = 100.0
"""Least seconds of a calibration that also makes a capture for the host's overheads."""
_GEMM = {"batch": 1, "op": "mm", "layout": "nt"}
_ANCHORS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "cpu": (("gemm", {"m": 512, "n": 512, "k": 512, "dtype": "fp32", **_GEMM}),
            ("gemm", {"m": 512, "n": 512, "k": 512, "dtype": "bf16", **_GEMM}),
            ("gemm", {"m": 512, "n": 512, "k": 512, "dtype": "fp16", **_GEMM}),
            ("copy", {"bytes": 64 << 20, "direction": "d2d"}), ("copy", {"bytes": 128 << 20, "direction": "d2d"}),
            ("elementwise", {"rows": 8, "width": 32, "op": "add", "dtype": "fp32"})),
    "cuda": (("gemm", {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", **_GEMM}),
             ("gemm", {"m": 4096, "n": 4096, "k": 4096, "dtype": "fp32", **_GEMM}),
             ("gemm", {"m": 4096, "n": 4096, "k": 4096, "dtype": "tf32", **_GEMM}),
             ("gemm", {"m": 4096, "n": 4096, "k": 4096, "dtype": "fp16", **_GEMM}),
             ("copy", {"bytes": 1 << 30, "direction": "d2d"}), ("copy", {"bytes": 1 << 28, "direction": "h2d"}),
             ("elementwise", {"rows": 8, "width": 32, "op": "add", "dtype": "fp32"})),
}
"""Always measured: peaks and floor of a device without a data sheet; the first that works is the canary."""


@dataclass
class _FamilyState:
    """The state of one family's measurements; ``most_bytes`` is the limit of its tensors after running out of
    memory."""

    family: Family
    spaces: Sequence[Space]
    rng: np.random.Generator
    progress: FamilyProgress
    pool: dict[str, Candidate] = field(default_factory=dict)
    held: dict[str, Candidate] = field(default_factory=dict)
    fitted: int = 0
    held_out: int = 0
    failed: int = 0
    exhausted: bool = False
    failed_in_a_row: int = 0
    reason: str = ""
    most_bytes: float = math.inf

    @property
    def done(self) -> int:
        """Number of measurements so far."""
        return self.fitted + self.held_out


class Measurements:
    """The items of a calibration (an ``ItemSource``), each chosen by the measurements so far.

    Args:
        setup: Device and options of the run.
        families: Families to calibrate.
        work: The directory of the measurements.
        box_s: Time limit in seconds.
        seed: Seed of the draws.
        probe: Function that returns the device's health.
        free_bytes: Memory that may be used.
        say: Called with a line of progress.
        clock: Clock of the run, seconds.
        left_s: Seconds of the limit that earlier runs of the same directory left.
    """

    def __init__(self, setup: Setup, families: Sequence[Family], work: Path, box_s: float, seed: int,
                 probe: checks.Probe, free_bytes: float, say: Callable[[str], None],
                 clock: Callable[[], float] = time.monotonic, *, left_s: float = 0.0) -> None:
        self.setup = setup
        self.findings: list[Finding] = []
        self.canary_us: list[float] = []
        self.failures: Counter[tuple[str, str]] = Counter()
        self.useless: Counter[tuple[str, str]] = Counter()
        self.scatter: list[float] = []
        self.measured = 0
        self._work, self._box_s, self._say, self._clock, self._probe = work, box_s, say, clock, probe
        self._families, self._seed, self._free = list(families), seed, free_bytes
        self._states: dict[Family, _FamilyState] = {}
        self._anchors = _anchor_items(setup.device, box_s)
        self._anchor_ids = {item.id for item in self._anchors}
        self._canary: Item | None = None
        self._first = list(self._anchors)
        self._done: set[str] = set()
        self._earlier: list[tuple[Item, ItemResult]] = []
        self._place: dict[str, tuple[_FamilyState, Candidate]] = {}
        self._refused: Counter[tuple[Any, ...]] = Counter()
        self._failed_in_a_row = 0
        self._worked: set[tuple[Any, ...]] = set()
        self._spec: DeviceSpec | None = None
        self._limits: Limits | None = None
        self._seen: list[tuple[OpCall, float, bool]] = []
        self._visits = Visits(clock(), left_s or box_s)
        self._told: dict[str, int] = {}
        self._checked = self._said = clock()
        self._begun = clock()
        self._ended = False

    # --- called by the run -------------------------------------------------------------------------------------------

    def begin(self, lines: Mapping[str, ItemResult]) -> int:
        """Take over the measurements of an earlier run, by item id; return the number of items that are done."""
        for line in lines.values():
            if line.kind == "kernel" and line.name in FAMILIES:
                self._earlier.append((kernel_item(line.name, line.settings, seconds=max(line.seconds, 1e-3)), line))
            if line.status != "failed":
                self._done.add(line.id)
        self._first = [item for item in self._first if item.id not in self._done]
        return len(self._done)

    def known(self) -> Sequence[Item]:
        """Return no items: the plan grows during the run, and each item has its own estimate of time."""
        return ()

    def started(self, context: Mapping[str, Any]) -> None:
        """Prepare to plan for the reported device. Raises ``CalibrationError`` if earlier runs measured another."""
        hardware = context.get("hardware", {})
        here, earlier = measured_device(hardware), self._measured_before()
        if earlier - {here}:
            raise CalibrationError(f"{self._work} was measured on {', '.join(sorted(earlier))} and this is {here}: "
                                   "times of different devices do not mix, so give another directory (--work).")
        self._spec = spec_of(hardware, self.setup.threads)
        self._free = hardware.get("free_memory") or self._free
        self._checked = self._said = self._begun = self._clock()
        for item, line in self._earlier:
            self._take_up(item, line)

    def next(self, fits: Callable[[Item], bool]) -> Item | None:
        """Return the next item: fixed first ones (anchors), then a repeated one (canary) if due, then the best."""
        self._look()
        while self._first:
            item = self._first.pop(0)
            if fits(item):
                return item
        if self._limits is None:
            self._prepare()
        due = self._clock() - self._checked > CHECK_S or self._failed_in_a_row >= DOUBTFUL
        if due and self._canary is not None and fits(self._canary):
            self._checked = self._clock()
            return self._canary
        again = self._visits.due(self._clock())
        if again is not None and fits(again):
            return again
        for _ in range(_TRIES):
            chosen = self._choose()
            if chosen is None:
                break
            if fits(chosen.item):
                return chosen.item
        self._ended = True
        return None

    def record(self, item: Item, result: ItemResult, rows: Rows) -> None:
        """Take in an item's result, from which the next items are chosen."""
        if item.visit > 1:
            self._visited(item, result, rows)
            return
        state, candidate = self._place.pop(item.id, (None, None))
        modes = _modes(item)
        self._done.add(item.id)
        if state is not None:
            state.progress.seconds += result.seconds
        if item.kind != "kernel" or item.name == "overheads":
            return
        if result.status != "ok":
            self._failed(item, result, state, candidate)
            return
        self.measured += 1
        self._failed_in_a_row = 0
        warm = next((row for row in rows if row.get("variant") == WARM), None)
        useless = "have no time" if warm is None else self._learn(item, dict(warm))
        if useless:
            self._says_nothing(item, useless, state)
            return
        self._worked.add(modes)
        if state is not None:
            state.failed_in_a_row = 0
            state.fitted, state.held_out = (
                (state.fitted, state.held_out + 1) if item.split == "held-out" else (state.fitted + 1, state.held_out))
        if warm is not None and self._on_host and item is not self._canary:
            self._visits.add(item, time_us(dict(warm), host=True), self._clock())

    def planned(self) -> int:
        """Return 0: the number of items is open, limited by time only."""
        return 0

    def left(self) -> int:
        """Return 1 while there may be something to measure, else 0."""
        return 0 if self._ended else 1

    def stopped(self) -> str:
        """Return "" (no reason): a calibration ends only when its time is over."""
        return ""

    # --- called by the calibration afterwards ------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Return the sentences that a reader of the profile should know."""
        found = [f"{count} measurements of {name} {why} and were left out."
                 for (name, why), count in self.useless.items()]
        found += [f"{count} measurements of {name} did not work: {reason}"
                  for (name, reason), count in self.failures.most_common(12)]
        if len(self.canary_us) > 2:
            worst = max(self.canary_us) / self.canary_us[0]
            if worst > SLOWER:
                found.append(f"The same product took up to {worst:.2f} times as long as at first: the device did not "
                             "run at one speed.")
        if self.scatter and statistics.median(self.scatter) > 0.15:
            found.append(f"Runs of one measurement scatter by {statistics.median(self.scatter):.0%} (interquartile "
                         "range over median): the device was not alone, or not at one clock.")
        apart = self._visits.spread()
        if apart and statistics.median(apart) > 0.15:
            found.append(f"Visits of one benchmark differ by {statistics.median(apart):.0%} (median; slowest over "
                         "quickest): others use this machine's caches and memory, so the quickest visits count.")
        return found

    # --- private parts -----------------------------------------------------------------------------------------------

    def _failed(self, item: Item, result: ItemResult, state: _FamilyState | None, candidate: Candidate | None) -> None:
        """Learn from a measurement that failed or was refused: similar measurements are not tried again."""
        failed = result.status == "failed"
        self.failures[item.name, result.reason if failed else f"not supported here: {result.reason}"] += 1
        self._failed_in_a_row += failed
        if failed and "out of memory" in result.reason.lower():
            if state is not None and candidate is not None:
                state.most_bytes = 0.5 * candidate.bytes
        else:
            self._refused[_modes(item)] += 1
        if state is None:
            return
        state.failed += 1
        state.failed_in_a_row += 1
        state.reason = result.reason
        if state.failed_in_a_row >= GIVEN_UP:
            self._end(state)

    def _says_nothing(self, item: Item, why: str, state: _FamilyState | None) -> None:
        """Count a measurement that worked but cannot be used, so that its modes and family are not tried for ever."""
        self.useless[item.name, why] += 1
        self._refused[_modes(item)] += 1
        if state is None:
            return
        state.failed += 1
        state.reason = f"such measurements {why}."
        if not state.done and state.failed >= COVERAGE:
            self._end(state)

    def _end(self, state: _FamilyState) -> None:
        """Stop measuring a family: nothing is left to measure, or nothing works."""
        state.exhausted = True
        if state.failed and state.done < COVERAGE:
            self._find(Finding(f"family {state.family.value}", f"{state.family.value} {GAVE_UP} {state.done} "
                               f"measurements, since {state.failed} did not work; the last one: {state.reason}"))

    def _look(self) -> None:
        """Check the device's health and report a line of progress, each after its interval."""
        now = self._clock()
        if now - self._checked > CHECK_S:
            for finding in checks.during(self._probe(self.setup.device)):
                self._find(finding)
        if now - self._said > SAY_S:
            self._said = now
            least = max(((state.progress.error(), state.family.value) for state in self._states.values()
                         if state.progress.measured >= LEAST_TO_LEARN), default=None)
            told = f"; least known: {least[1]} (±{math.expm1(least[0]):.0%})" if least is not None else ""
            self._say(f"{now - self._begun:.0f} of {self._box_s:.0f} s: {self.measured} measurements{told}")

    def _find(self, finding: Finding) -> None:
        if finding.what not in {one.what for one in self.findings}:
            self.findings.append(finding)
            self._say(finding.text)

    def _measured_before(self) -> set[str]:
        """Return the names of the devices of earlier runs, where known."""
        if not (self._work / INDEX).is_file():
            return set()
        sessions = Results.read(self._work).index.sessions
        return {measured_device(session.get("hardware", {})) for session in sessions} - {""}

    def _take_up(self, item: Item, line: ItemResult) -> None:
        """Learn from one result of an earlier run."""
        if line.status == "unsupported":
            self._refused[_modes(item)] += 1
        if line.status != "ok" or item.name == "overheads":
            return
        if not hasattr(self, "_tables"):
            self._tables: dict[str, dict[str, dict[str, Any]]] = {}
        if item.name not in self._tables:
            frame = read_kernels(self._work, item.name)
            self._tables[item.name] = {str(row["id"]): row for row in
                                       quickest_visits(frame).to_dict("records")}
        row = self._tables[item.name].get(line.id)
        if row is not None:
            if useless := self._learn(item, row):
                self._says_nothing(item, useless, None)
            else:
                self._worked.add(_modes(item))

    @property
    def _on_host(self) -> bool:
        return self._spec is not None and self._spec.vendor == "host"

    def _visited(self, item: Item, result: ItemResult, rows: Rows) -> None:
        """Note a repeated visit, which may have been quicker than those before."""
        row = next((row for row in rows if row.get("variant") == warm_variant(item.visit)), None)
        if row is None:
            return
        measured_us = time_us(dict(row), host=True)
        quicker = self._visits.took(item, measured_us, self._clock())
        calls = calls_of_benchmark(item.name, dict(item.settings))
        state = self._states.get(calls[0].family) if calls else None
        if state is None:
            return
        state.progress.seconds += result.seconds
        if quicker and item.id in self._told and measured_us > 0:
            state.progress.correct(self._told[item.id], calls[0], measured_us)

    def _learn(self, item: Item, row: dict[str, Any]) -> str:
        """Learn from a measurement; return "", or the reason why it cannot be used, as words that follow its name."""
        assert self._spec is not None
        row = {**row, **item.settings}  # a setting may have the name of a measured column
        calls = calls_of_benchmark(item.name, row)
        measured_us = time_us(row, host=self._spec.vendor == "host")
        if self._canary is None and item.id in self._anchor_ids:
            self._canary = item
        if self._canary is not None and item.id == self._canary.id:
            self.canary_us.append(measured_us)
            if len(self.canary_us) > 1 and measured_us > SLOWER * self.canary_us[0]:
                self._find(Finding("canary", "The device has become slower: a product that took "
                                             f"{self.canary_us[0]:.0f} µs at first takes {measured_us:.0f} µs."))
        if not math.isfinite(measured_us) or measured_us <= 0:
            return "have no time"
        if not calls:
            return "show the profiler no kernel that could be named"
        if not is_intended(calls[0], row):
            return "ran other kernels than meant"
        if row.get("p50_us"):
            self.scatter.append((row["p75_us"] - row["p25_us"]) / row["p50_us"])
        held = item.split == "held-out"
        self._seen.append((calls[0], measured_us, held))
        state = self._states.get(calls[0].family)
        if state is not None and not held:
            self._told[item.id] = state.progress.measured
            state.progress.tell(calls[0], measured_us)
        return ""

    def _prepare(self) -> None:
        """Start the state of every family, and learn from the measurements so far."""
        assert self._spec is not None
        self._spec = with_measured(self._spec, [(call, time) for call, time, _ in self._seen])
        self._limits = limits_for(self._spec, self._free)
        for family in self._families:
            text = f"{self._seed} {family.value} {len(self._done)}"
            rng = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
            mine = [one for one in self._seen if one[0].family is family]
            held_out = sum(held for *_, held in mine)
            self._states[family] = state = _FamilyState(
                family, [one for one in spaces(self.setup.device) if one.family is family], rng,
                FamilyProgress(family, self._spec, self._seed), fitted=len(mine) - held_out, held_out=held_out)
            for call, measured_us, held in mine:
                if not held:
                    state.progress.tell(call, measured_us)

    def _drawn(self, state: _FamilyState) -> Candidate | None:
        """Return a new candidate of a family; ``None`` where the draws gave nothing new."""
        assert self._spec is not None and self._limits is not None
        held_out = state.held_out < HELD_OUT_SHARE * (state.done + 1)
        limits = replace(self._limits, bytes=min(self._limits.bytes, state.most_bytes))
        for number in range(3 * DRAWS):
            if len(state.held if held_out else state.pool) >= (1 if held_out else DRAWS):
                break
            one = draw(state.spaces[(state.done + number) % len(state.spaces)], self._spec, limits, state.rng)
            if one is not None:
                (state.held if one.split == "held-out" else state.pool)[one.item.id] = one
        for pool in (state.held, state.pool) if held_out else (state.pool,):
            for name in pool.keys() - self._measurable(state, pool):
                del pool[name]
            if pool:
                odds = 1.0 / np.array([one.item.seconds for one in pool.values()])
                return pool.pop([*pool][int(state.rng.choice(len(pool), p=odds / odds.sum()))])
        return None

    def _measurable(self, state: _FamilyState, pool: Mapping[str, Candidate]) -> list[str]:
        """Return the candidates that are new, may work, and fit the time as predicted from measurements: the formulas
        that drew them may be far too low."""
        assert self._limits is not None
        found = [name for name, one in pool.items() if one.item.id not in self._done
                 and one.bytes <= state.most_bytes and self._may_work(one.item)]
        if not found or state.fitted < LEAST_TO_LEARN:
            return found
        times = state.progress.predict([pool[name].call for name in found])
        return [name for name, time in zip(found, times.tolist(), strict=True) if time <= LONGER * self._limits.run_us]

    def _may_work(self, item: Item) -> bool:
        """Return whether to try an item: not if its modes failed or were refused several times, and never worked."""
        modes = _modes(item)
        return modes in self._worked or self._refused[modes] < MOST_REFUSALS

    def _choose(self) -> Candidate | None:
        """Return the next candidate: of a family with few measurements, else of the family with the most need."""
        while open_states := [state for state in self._states.values() if not state.exhausted]:
            few = [one for one in open_states if one.done + one.failed < COVERAGE]
            state = (min(few, key=lambda one: one.progress.seconds) if few else
                     max(open_states, key=lambda one: one.progress.need()))
            chosen = self._drawn(state)
            if chosen is not None:
                self._place[chosen.item.id] = (state, chosen)
                return chosen
            self._end(state)
        return None


def _modes(item: Item) -> tuple[Any, ...]:
    """Return the modes of an item: the settings that decide whether a device can run it at all."""
    if item.kind != "kernel":
        return (item.name,)
    family = FAMILIES[item.name]
    return (item.name, *(item.settings.get(name) for name in family.choices), family.traits(item.settings))


def _anchor_items(device: str, box_s: float) -> list[Item]:
    seconds = 0.4
    found = [kernel_item(name, FAMILIES[name].checked(settings), seconds=seconds)
             for name, settings in _ANCHORS[device]]
    kernels = [KernelEntry(family="overheads", product={"case": [*_HOST_CASES]}, seconds=3.0)] if (
        device == "cuda" and box_s >= _CAPTURE_FROM_S) else []
    captures = [WorkloadEntry(workload="llama", preset="tiny", timed=20, seconds=8.0)] if (
        box_s >= _CAPTURE_FROM_S) else []
    if captures:
        plan = Plan(name="host", description="", device="cuda" if device == "cuda" else "cpu", workload=captures,
                    kernel=kernels)
        found += expand(plan)
    return found

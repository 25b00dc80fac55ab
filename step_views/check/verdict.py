"""Results of a check: a verdict on each quantity of each program, and all verdicts together."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from graph_predictor.figures import signed_percent
from tracer.lazy import pandas as pd
from tracer.shown import MOST_BARS, Chart, ChartSeries, Shown


class Status(Enum):
    """The status of one verdict."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """The measurements neither prove a growth nor exclude a large one."""
    SKIPPED = "skipped"
    """Not compared; ``Verdict.text`` has the reason."""
    STORED = "stored"
    """Stored in a new baseline, and not judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one quantity of one program.

    Attributes:
        program: name of the program.
        quantity: the compared quantity, in words.
        status: the outcome.
        before, now: the two values; ``None`` for a missing value.
        unit: unit of both: "ns", "bytes", "" (a count) or "error" (a share of the measured value).
        text: one sentence for the reader.
        confidence: for a statistical test, 1 − p of "it grew by no more than what is too small to matter".
        detectable: for a statistical test, the smallest growth that it could have shown, as a share.
    """

    program: str
    quantity: str
    status: Status
    before: float | None
    now: float | None
    unit: str
    text: str
    confidence: float | None = None
    detectable: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the quantity got worse."""
        return self.status is Status.FAILED

    def value(self, number: float | None) -> str:
        """Return ``before`` or ``now`` as text with its unit."""
        return in_unit(number, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"program": self.program, "quantity": self.quantity, "status": self.status.value, "before": self.before,
                "now": self.now, "unit": self.unit or "count", "text": self.text, "confidence": self.confidence,
                "detectable": self.detectable}


@dataclass(slots=True, repr=False)
class GateOutcome(Shown):
    """All verdicts of a check, with causes of failures.

    Attributes:
        what: what was checked, in words.
        verdicts: the verdicts in order of programs.
        causes: by program that failed, the causes of the difference, largest first.
        notes: remarks, one sentence each.
        stored: whether the figures were stored as a new baseline, so that nothing was judged.
    """

    what: str
    verdicts: list[Verdict]
    causes: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stored: bool = False

    def headline(self) -> str:
        """Return the outcome in one sentence."""
        return self.summary

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``verdicts``: each figure's status, old value and new value."""
        return {"verdicts": lambda: pd.DataFrame([verdict.to_json() for verdict in self.verdicts])}

    def chart(self) -> Chart:
        """Return a bar chart of each figure's change, in percent."""
        known = [one for one in self.verdicts if one.before and one.now is not None]
        return Chart("bars", self.summary, [f"{one.program}: {one.quantity}" for one in known[:MOST_BARS]], [
            ChartSeries("change", [100.0 * (float(one.now or 0) / float(one.before or 1) - 1.0)
                                   for one in known[:MOST_BARS]])], "% more than before")

    @property
    def failures(self) -> Sequence[Verdict]:
        """Verdicts on quantities that got worse."""
        return [verdict for verdict in self.verdicts if verdict.failed]

    @property
    def inconclusive(self) -> Sequence[Verdict]:
        """Verdicts that the measurements do not decide."""
        return [verdict for verdict in self.verdicts if verdict.status is Status.INCONCLUSIVE]

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        programs = len({verdict.program for verdict in self.verdicts})
        of = f"{programs} program{'' if programs == 1 else 's'}"
        if self.stored:
            return f"The new baseline is written: {len(self.verdicts)} figures of {of}; none was judged."
        number, undecided = len(self.verdicts), len(self.inconclusive)
        worse = list(dict.fromkeys(verdict.program for verdict in self.failures))
        if not worse:
            if undecided:
                return f"Inconclusive: {undecided} of {number} figures of {of} could not be decided; none got worse " \
                       "for sure."
            return f"Nothing got worse: {number} figures of {of}."
        return (f"{len(self.failures)} of {number} figures got worse, in {len(worse)} of {of}: {', '.join(worse)}"
                f"{f'; {undecided} more could not be decided' if undecided else ''}.")

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"checked": self.what, "passed": not (self.failures or self.inconclusive),
                "outcome": "failed" if self.failures else "inconclusive" if self.inconclusive else "passed",
                "summary": self.summary,
                "verdicts": [verdict.to_json() for verdict in self.verdicts], "causes": self.causes,
                "notes": list(dict.fromkeys(self.notes))}


def in_unit(number: float | None, unit: str) -> str:
    """Return a value as text: "12.345 ms", "1.20 GB", "412", "+3.1%"; a dash for ``None``."""
    if number is None:
        return "–"
    if unit == "ns":
        return f"{number / 1e6:,.3f} ms"
    if unit == "bytes":
        return f"{number / 1e9:,.3f} GB" if abs(number) >= 1e9 else f"{number / 1e6:,.3f} MB"
    if unit == "error":
        return signed_percent(number, 2)
    return f"{number:,.0f}"


_MARKS = {Status.PASSED: "✅", Status.FAILED: "❌", Status.INCONCLUSIVE: "❔", Status.SKIPPED: "➖",
          Status.STORED: "💾"}
_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold."""


def junit_xml(outcome: GateOutcome) -> bytes:
    """Return the outcome as JUnit XML for CI servers: a test suite for each program, a test case for each quantity."""
    suites = ElementTree.Element("testsuites", _numbers(outcome.verdicts, "foretrace check"))
    for program, verdicts in _by_program(outcome.verdicts).items():
        suite = ElementTree.SubElement(suites, "testsuite", _numbers(verdicts, program))
        for verdict in verdicts:
            case = ElementTree.SubElement(suite, "testcase", {
                "classname": _clean(program), "name": _clean(verdict.quantity), "time": "0"})
            if verdict.failed:
                failure = ElementTree.SubElement(
                    case, "failure", {"message": _clean(verdict.text), "type": "regression"})
                failure.text = _clean("\n".join([verdict.text, *outcome.causes.get(program, [])]))
            elif verdict.status in (Status.SKIPPED, Status.INCONCLUSIVE):
                ElementTree.SubElement(case, "skipped", {"message": _clean(verdict.text)})
            else:
                ElementTree.SubElement(case, "system-out").text = _clean(verdict.text)
    ElementTree.indent(suites)
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="utf-8") + b"\n"


def _numbers(verdicts: Iterable[Verdict], name: str) -> dict[str, str]:
    every = list(verdicts)
    return {"name": _clean(name), "tests": str(len(every)), "failures": str(sum(v.failed for v in every)),
            "errors": "0", "time": "0",
            "skipped": str(sum(v.status in (Status.SKIPPED, Status.INCONCLUSIVE) for v in every))}


def _clean(text: str) -> str:
    return _CONTROL.sub("?", text)


def _by_program(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.program, []).append(verdict)
    return found


def markdown(outcome: GateOutcome) -> str:
    """Return a summary in Markdown for a pull request: failures and their causes first, then all figures, folded."""
    failed = [*outcome.failures, *outcome.inconclusive]
    mark = "❌" if outcome.failures else "❔" if failed else "✅"
    lines = [f"### {mark} foretrace check: {_cell(outcome.what)}", "", _cell(outcome.summary), ""]
    if failed:
        lines += [*_table(failed), ""]
        for program, causes in outcome.causes.items():
            lines += [f"**{_cell(program)}: what made the step longer** (A: baseline, B: new)", "",
                      *(f"- {_cell(cause)}" for cause in causes), ""]
    lines += [f"<details><summary>All {len(outcome.verdicts)} figures</summary>", "", *_table(outcome.verdicts), "",
              "</details>", ""]
    lines += [f"> {_cell(note)}" for note in dict.fromkeys(outcome.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _table(verdicts: Iterable[Verdict]) -> list[str]:
    rows = [f"| {_MARKS[v.status]} | {_cell(v.program)} | {_cell(v.quantity)} | {v.value(v.before)} | "
            f"{v.value(v.now)} | {_cell(v.text)} |" for v in verdicts]
    return ["| | program | figure | before | now | |", "|---|---|---|---:|---:|---|", *rows]


def _cell(text: str) -> str:
    """Return a text that cannot end a table's cell or become markup, because names come from other people's files."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(_clean(text).split()))

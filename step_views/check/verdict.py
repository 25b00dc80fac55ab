"""Results of a check: a verdict on each quantity of each program, and all of them together."""

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
    """The measurements neither show that it got worse nor exclude that it got much worse."""
    SKIPPED = "skipped"
    """It could not be compared; ``Verdict.text`` says why."""
    STORED = "stored"
    """It is one of a new baseline, and was not judged."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quantity of one program.

    Attributes:
        program: its name.
        quantity: what was compared, in words.
        status: the outcome.
        before, now: the two values; None where there is none.
        unit: of both: "ns", "bytes", "" (a count) or "error" (a share of what was measured).
        text: one sentence for people.
        confidence: of a statistical test, 1 − p of "it got worse by no more than what is too small to matter".
        detectable: of such a test, the smallest increase that it could have shown, as a share.
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
        """Return whether it got worse."""
        return self.status is Status.FAILED

    def value(self, number: float | None) -> str:
        """Return ``before`` or ``now`` with its unit."""
        return in_unit(number, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"program": self.program, "quantity": self.quantity, "status": self.status.value, "before": self.before,
                "now": self.now, "unit": self.unit or "count", "text": self.text, "confidence": self.confidence,
                "detectable": self.detectable}


@dataclass(slots=True, repr=False)
class GateOutcome(Shown):
    """All verdicts of a check, those that failed first explained.

    Attributes:
        what: what was checked, in words.
        verdicts: in order of programs.
        causes: of programs that failed, what made the difference, the largest first.
        notes: one sentence for each thing worth knowing.
        stored: whether the figures are those of a new baseline, so that nothing was judged.
    """

    what: str
    verdicts: list[Verdict]
    causes: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stored: bool = False

    def headline(self) -> str:
        """Say the outcome in one sentence."""
        return self.summary

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``verdicts``: each figure's status, what it was and what it is."""
        return {"verdicts": lambda: pd.DataFrame([verdict.to_json() for verdict in self.verdicts])}

    def chart(self) -> Chart:
        """Return by how much each figure changed, in percent."""
        known = [one for one in self.verdicts if one.before and one.now is not None]
        return Chart("bars", self.summary, [f"{one.program}: {one.quantity}" for one in known[:MOST_BARS]], [
            ChartSeries("change", [100.0 * (float(one.now or 0) / float(one.before or 1) - 1.0)
                                   for one in known[:MOST_BARS]])], "% more than before")

    @property
    def failures(self) -> Sequence[Verdict]:
        """Return what got worse."""
        return [verdict for verdict in self.verdicts if verdict.failed]

    @property
    def inconclusive(self) -> Sequence[Verdict]:
        """Return what the measurements do not decide."""
        return [verdict for verdict in self.verdicts if verdict.status is Status.INCONCLUSIVE]

    @property
    def summary(self) -> str:
        """One sentence."""
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
        """Plain values."""
        return {"checked": self.what, "passed": not (self.failures or self.inconclusive),
                "outcome": "failed" if self.failures else "inconclusive" if self.inconclusive else "passed",
                "summary": self.summary,
                "verdicts": [verdict.to_json() for verdict in self.verdicts], "causes": self.causes,
                "notes": list(dict.fromkeys(self.notes))}


def in_unit(number: float | None, unit: str) -> str:
    """Return a value in words: "12.345 ms", "1.20 GB", "412", "+3.1%"; a dash for none."""
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
    """One test suite a program, one test case a quantity, as CI servers read it."""
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
    """Return a summary for a pull request: what failed and why first, then every figure, folded away."""
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
    """Return the text that can neither end a table's cell nor become markup: names come from files others wrote."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(_clean(text).split()))

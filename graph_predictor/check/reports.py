"""A check's outcome for machines and for pull requests: JUnit XML and Markdown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

from graph_predictor.check.verdict import GateOutcome, Status, Verdict

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
    """A summary for a pull request: what failed and why first, then every figure, folded away."""
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
    """Text that can neither end a table's cell nor become markup: names come from files others wrote."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(_clean(text).split()))

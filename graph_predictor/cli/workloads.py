"""``foretrace workloads``: the workload suite with its settings and presets. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from graph_predictor.cli.console import Column, Report, print_json
from graph_predictor.cli.options import Json, in_one_sentence
from tracer import workloads as tracer_workloads


@in_one_sentence
def workloads(json: Json = False) -> None:
    """List the workloads for 'foretrace capture --workload', their settings and presets."""
    found = tracer_workloads.describe()
    if json:
        print_json([asdict(info) for info in found])
        return
    report = Report()
    shared = set.intersection(*({_described(setting) for setting in info.settings} for info in found))
    for info in found:
        report.line()
        report.line(f"{info.name}: {info.summary}", indent=2, style="bold")
        own = [f"{s.name}={_text(s.default)}" for s in info.settings if _described(s) not in shared]
        report.line(f"  {' '.join(own)}", indent=2)
        for preset, values in info.presets.items():
            if values:
                shown = " ".join(f"{name}={_text(value)}" for name, value in values.items())
                report.line(f"  preset {preset}: {shown}", indent=4)
    everywhere = [s for s in found[0].settings if _described(s) in shared]
    report.table("Settings of every workload", [Column("setting"), Column("default"), Column("meaning", name=True)],
                 ([s.name, _text(s.default), s.doc + (f": {', '.join(s.choices)}" if s.choices else "")]
                  for s in everywhere))
    report.line()
    report.line("Record one with: foretrace capture --workload llama --set batch=8 --out DIR (all settings with "
                "their types and meanings: --json)")


def _described(setting: tracer_workloads.Setting) -> tuple[str, str, str]:
    return setting.name, _text(setting.default), setting.doc


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Output of ``foretrace comm``: tables and JSON of fits, choices and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from graph_predictor.cli.console import Column, Report, count, milliseconds, percent, print_json
from graph_predictor.comm import contention, volumes
from graph_predictor.comm import report as comm_report
from graph_predictor.comm.units import bytes_text
from graph_predictor.prediction import tuned_workload
from kernel_models import collectives
from kernel_models.collectives import CollectiveKind, call, tuner


def report_fit(profile: collectives.CommProfile, rows: collectives.CollectiveMeasurements, out: str, notes: list[str],
               json: bool) -> None:
    """Show what was fitted."""
    found: list[dict[str, Any]] = []
    for name in profile.backend_names():
        for (kind, dtype, ranks, nodes, *_), (size,
                                              time_us) in sorted(rows.of_backend(name).aggregated().curves().items()):
            found.append({"backend": name, "collective": CollectiveKind(kind).label, "dtype": call.DTYPES[dtype],
                          "ranks": ranks,
                          "nodes": nodes, "sizes": len(size), "smallest_bytes": float(size[0]),
                          "largest_bytes": float(size[-1]), "latency_us": float(time_us[0]),
                          "algbw_gbps": float(size[-1] / time_us[-1] * 1e-3)})
    held_out = {name: np.abs(np.expm1(m.measured.residual)) for name, m in profile.backends.items()}
    errors = {name: [float(np.median(e)), float(np.quantile(e, 0.9))] if len(e) else None for name,
              e in held_out.items()}
    if json:
        print_json({"profile": out, "topology": profile.topology.name, "measurements": len(rows), "settings": found,
                    "held_out_error": errors, "notes": notes})
        return
    report = Report()
    report.table(f"Fitted on {profile.topology.name}",
                 [Column("backend", name=True), Column("collective", name=True), Column("dtype", name=True),
                  Column("ranks"),
                  Column("nodes"), Column("sizes"), Column("from"), Column("to"), Column("latency\nµs"),
                  Column("algbw\nGB/s")],
                 [[row["backend"], row["collective"], row["dtype"], count(row["ranks"]), count(row["nodes"]),
                   count(row["sizes"]), bytes_text(row["smallest_bytes"]), bytes_text(row["largest_bytes"]),
                   f"{row['latency_us']:,.1f}", f"{row['algbw_gbps']:,.2f}"] for row in found])
    report.line()
    for name, error in errors.items():
        if error:
            report.line(f"{name}: sizes left out of the fit are predicted within {percent(error[0])} (median) and "
                        f"{percent(error[1])} (90% of them).")
    report.line(f"Profile in {out}")
    report.notes(notes)


def tuned_json(tuned: tuned_workload.TunedWorkload | None) -> dict[str, Any] | None:
    """A workload's steps as plain values."""
    if tuned is None:
        return None
    return {"step_us": {name: value / 1e3 for name, value in tuned.step_ns.items()},
            "best_step_us": tuned.best_ns / 1e3,
            "default": tuned.default, "gain": tuned.gain,
            "winners": {name: tuned.winner.count(name) for name in dict.fromkeys(tuned.winner) if name},
            "missing": tuned.missing, "unmeasured": tuned.unmeasured}


def report_tuning(backends: list[str], choices: list[tuner.TunedChoice], changes: list[tuner.Crossover],
                  tuned: tuned_workload.TunedWorkload | None, notes: list[str]) -> None:
    """Show winners, crossovers and the steps of a workload."""
    report = Report()
    report.table("Times in µs, and who wins (ties within 5% stay with the default)",
                 [Column("collective", name=True), Column("ranks"), Column("size"),
                  *(Column(name) for name in backends),
                  Column("winner", name=True)],
                 [[c.kind.label, count(c.placement.ranks), bytes_text(c.payload_bytes),
                   *(f"{c.time_us[name]:,.1f}" if c.time_us[name] == c.time_us[name] else "–" for name in backends),
                   c.winner] for c in choices])
    report.table("Crossovers", [Column("collective", name=True), Column("ranks"), Column("from"),
                                Column("before", name=True), Column("after", name=True)],
                 [[c.kind.label, count(c.placement.ranks), bytes_text(c.payload_bytes), c.before, c.after]
                  for c in changes])
    if tuned is not None:
        report.line()
        for name, value in tuned.step_ns.items():
            lacks = f" ({tuned.default} for what it was not measured for)" if name in tuned.missing else ""
            report.line(f"Step with {name}: {milliseconds(value)} ms{lacks}")
        faster = f" ({percent(tuned.gain, 2)} faster than {tuned.default})" if tuned.gain == tuned.gain else ""
        report.line(f"Step with the best for each collective: {milliseconds(tuned.best_ns)} ms{faster}")
        notes = [*notes, *tuned.notes, *(f"{name} was not measured for {', '.join(kinds)}."
                                         for name, kinds in tuned.missing.items())]
        if tuned.unmeasured:
            notes.append(f"No backend was measured for {', '.join(tuned.unmeasured)}: the recorded times are kept.")
    report.notes(notes)


def report_found(found: comm_report.CommReport, beside: dict[str, contention.SlowDown],
                 checks: list[volumes.VolumeCheck], notes: list[str]) -> None:
    """Show what a job communicated."""
    report = Report()
    if not found.traffic:
        report.line("There are no collectives in what was recorded.")
    rows = [row.to_json() for row in found.traffic]
    timed = any(found.kernel_ns.values())
    report.table(
        "Collectives by group and kind (all recorded ranks and steps; times are means over ranks)",
        [Column("group", name=True), Column("kind", name=True), Column("ranks"), Column("count"), Column("payload"),
         *([Column("transfer\nms"), Column("algbw\nGB/s"), Column("busbw\nGB/s"), Column("exposed\nms"),
            Column("overlapped\nms"), Column("skew µs\nmedian"), Column("last\nrank")] if timed else [])],
        [[f"{row['group']} {row['members']}".strip(), row["kind"], count(row["ranks"]), count(row["count"]),
          bytes_text(row["payload_bytes"]), *(_times(row) if timed else [])] for row in rows])
    report.table("Message sizes (collectives of all ranks)",
                 [Column("kind", name=True), Column("from"), Column("below"), Column("count")],
                 [[kind, "unknown" if at < 0 else bytes_text(2.0**at), "" if at < 0 else bytes_text(2.0**(at + 1)),
                   count(n)]
                  for kind, sizes in found.histogram.items() for at, n in sorted(sizes.items())])
    if found.traffic and not timed:
        notes = [*notes, "No collective left device work or ranges of a backend's threads: how long any took, and who "
                         "waited for whom, is not known."]
    report.table("What takes longer beside what (the same kernel beside and alone)",
                 [Column("what", name=True), Column("factor\nmedian"), Column("80% of\nkernels"), Column("kernels"),
                  Column("instances\nbeside")],
                 [[name, f"{one.factor:.2f}", "{:.2f} – {:.2f}".format(*one.interval), count(one.kernels),
                   count(one.instances)] for name, one in beside.items() if one.known])
    report.table("Collective time of each rank (waiting included)",
                 [Column("rank"), Column("collectives ms"), Column("exposed ms"), Column("exposed share\nof window")],
                 [[str(rank), milliseconds(found.kernel_ns[rank]), milliseconds(found.exposed_ns[rank]),
                   percent(found.exposed_ns[rank] / found.window_ns[rank] if found.window_ns[rank] else None)]
                  for rank in sorted(found.window_ns) if timed])
    report.table("Volumes against what the job should communicate (payload per rank and step)",
                 [Column("kind", name=True), Column("because of", name=True), Column("expected"), Column("recorded"),
                  Column("agrees")],
                 [[c.kind.label, ", ".join(c.causes) or "nothing in the job's description",
                   bytes_text(c.expected_bytes), bytes_text(c.recorded_bytes), "yes" if c.agrees else "no"]
                  for c in checks])
    if found.unknown_sizes:
        notes = [*notes, f"{count(found.unknown_sizes)} collectives have no recorded size; record with shapes."]
    report.notes(notes)


def _times(row: dict[str, Any]) -> list[str]:
    return [_maybe(row["transfer_us"], 1e-3, 3), _maybe(row["algbw_gbps"], 1, 1), _maybe(row["busbw_gbps"], 1, 1),
            f"{row['exposed_us'] / 1e3:,.3f}", f"{row['overlapped_us'] / 1e3:,.3f}",
            _maybe(row["median_skew_us"], 1, 1),
            "–" if row["straggler"] is None else f"{row['straggler']} ({row['straggler_share']:.0%})"]


def _maybe(value: float | None, scale: float, decimals: int) -> str:
    return "–" if value is None else f"{value * scale:,.{decimals}f}"

"""Output of ``foretrace comm``: tables and JSON of fits, choices and reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from graph_predictor.cli.console import Column, Report, print_json, read, working
from graph_predictor.cli.options import Json, in_one_sentence, shared
from graph_predictor.comm import contention, traffic
from graph_predictor.comm import report as comm_report
from graph_predictor.comm.traffic import bytes_text
from graph_predictor.figures import count, milliseconds, percent
from graph_predictor.prediction import tuned_workload
from graph_predictor.simulation import build
from kernel_models import collectives
from kernel_models.collectives import CollectiveKind, call, logs, measurements, recorded, tuner
from kernel_models.collectives import topology as collectives_topology
from tracer.output_kind import COMM_PROFILE, check_output


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
                 checks: list[traffic.VolumeCheck], notes: list[str]) -> None:
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


TRACE_ENDINGS = (".json", ".json.gz", ".foretrace")


@in_one_sentence
def backends(
    files: Annotated[list[str], typer.Argument(
        metavar="[NAME=]FILE...", help="Profiles of 'comm fit', or logs and tables as it takes them; NAME is the "
                                       "backend of a FILE that names none.")],
    out: Annotated[str, shared("--out", "a profile (JSON)", short="-o")],
    topology: Annotated[str | None, shared("--topology", "where it was measured; by default a profile's")] = None,
    ranks: Annotated[int | None, shared("--ranks", "where a log does not say", least=1)] = None,
    collective: Annotated[str | None, shared("--collective", "where a log does not say")] = None,
    dtype: Annotated[str, shared("--dtype", "where a log does not say")] = "float32",
    json: Json = False,
) -> None:
    """Join measured backends of one cluster: each is an option that --comm-choices has for every collective.

    foretrace comm backends nccl=all_reduce.log custom.parquet mpi=osu.txt -o choices.json --topology dgx-h200 --ranks 8
    """
    from dataclasses import replace


    named = [_named(text) for text in files]
    check_output(out, [path for _, path in named], COMM_PROFILE)
    known = {path: collectives.CommProfile.load(path) for _, path in named if _is_profile(path)}
    where = next((each.topology for each in known.values()), None)
    if topology:
        where = collectives_topology.find_topology(topology)
    if where is None:
        raise collectives.CommError("Nothing says where the collectives were measured; give --topology.")
    hints = measurements.Hints(ranks, None, collectives.collective_kind(collective) if collective else None,
                               call.dtype_name(dtype))
    joined = collectives.CommProfile(where)
    with working("Fitting"):
        for name, path in named:
            one = known.get(path) or _fitted(path, replace(hints, backend=name or hints.backend), where)
            _add(joined, one, name if path in known else "", path)
    joined.save(out)
    found = {name: sorted(set(_measured(joined, name))) for name in joined.backends}
    rows = [(name, sorted({kind for kind, _ in of}), sorted({size for _, size in of}))
            for name, of in found.items()]
    if json:
        print_json({"profile": out, "topology": where.name, "sources": joined.sources, "backends": [
            {"backend": name, "collectives": kinds, "ranks": sizes} for name, kinds, sizes in rows]})
        return
    report = Report()
    report.table(f"Backends on {where.name}", [
        Column("backend", name=True, whole=True), Column("collectives", name=True), Column("ranks")],
        [[name, ", ".join(kinds), ", ".join(map(count, sizes))] for name, kinds, sizes in rows])
    report.line()
    report.line(f"Profile in {out}; give it to --comm-choices.")


def read_measurements(path: str, hints: measurements.Hints,
                      where: collectives.Topology) -> collectives.CollectiveMeasurements:
    """Read a log, table or trace."""
    if logs.inspector_folder(Path(path)):
        return logs.read_log(path, hints)
    if os.path.isdir(path) or path.lower().endswith(TRACE_ENDINGS):
        built = build.build_program(read([path]).graphs)
        return recorded.read_matched(built.graphs, built.rendezvous.groups,
                                     built.rendezvous.intrinsic_ns, where, hints.backend)
    return logs.read_log(path, hints)


def _named(text: str) -> tuple[str, str]:
    """Return name and path of "NAME=FILE"; no name of a file that is there, or has none."""
    name, equals, path = text.partition("=")
    return (name.strip(), path) if equals and name.strip() and not os.path.exists(text) else ("", text)


def _is_profile(path: str) -> bool:
    """Return whether a file is a profile of collectives, which is no trace though both are JSON."""
    try:
        return os.path.isfile(path) and COMM_PROFILE.ours(_beginning(path))
    except OSError:
        return False


def _beginning(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(64)


def _fitted(path: str, hints: measurements.Hints, where: collectives.Topology) -> collectives.CommProfile:
    rows, notes = measurements.of_cluster(read_measurements(path, hints, where), where)
    return collectives.CommProfile.fit(rows, where, [f"{Path(path).name}: {len(rows)} measurements", *notes])


def _add(joined: collectives.CommProfile, one: collectives.CommProfile, name: str, path: str) -> None:
    """Put a profile's backends beside the others; one that has a single backend may be given a name."""
    if one.topology.node.name != joined.topology.node.name:
        raise collectives.CommError(f"{path} was measured on {one.topology.node.name} nodes, and the others on "
                                    f"{joined.topology.node.name}; join backends of one cluster.")
    if name and len(one.backends) != 1:
        raise collectives.CommError(f"{path} has the backends {', '.join(one.backend_names()) or '(none)'}, and "
                                    f"{name!r} names "
                                    "one; leave the name out.")
    for own, models in one.backends.items():
        if (name or own) in joined.backends:
            raise collectives.CommError(f"Two files measure the backend {name or own!r}; name one otherwise, such as "
                                        f"other={path}.")
        joined.backends[name or own] = models
    joined.sources += one.sources


def _measured(profile: collectives.CommProfile, name: str) -> list[tuple[str, int]]:
    """Return the collectives and numbers of ranks that a backend was measured for."""
    return [(collectives.CollectiveKind(key[0]).label, key[2]) for key in profile.backends[name].fitted.pieces]

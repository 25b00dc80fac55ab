"""``foretrace comm``: predict, study, fit, measure, tune and report collectives.

Output of ``foretrace comm``: tables and JSON of fits, choices and reports.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from graph_predictor.comm import clusters, contention, recorded_calls, traffic
from graph_predictor.comm import report as comm_report
from graph_predictor.comm.traffic import bytes_text
from graph_predictor.figures import count, milliseconds, percent
from graph_predictor.prediction import tuned_workload
from graph_predictor.simulation import build
from kernel_models import collectives
from kernel_models import device as known_devices
from kernel_models.collectives import CollectiveKind, datasheet, logs, measurements, price, recorded, tuner
from kernel_models.collectives import call as collectives_call
from kernel_models.collectives import logs as collectives_logs
from kernel_models.collectives import topology as collectives_topology
from planner.cli.comm_study import study
from step_views.cli.console import Column, Report, print_json, read, working
from step_views.cli.options import (
    Cycle,
    Json,
    Paths,
    StepRegion,
    Window,
    Workers,
    in_one_sentence,
    shared,
)
from tracer import comm_bench, kept_files, output_file
from tracer.lazy import msgspec
from tracer.output_kind import CHOICES, COMM_PROFILE, MEASUREMENTS, TUNER, check_output

comm = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                   help="Collectives and networks: predict, study, fit, measure, tune, report.")

TopologyName = Annotated[str | None, shared("--topology")]
ProfileOut = Annotated[str, shared("--out", "a profile (JSON)", short="-o")]
UnsaidRanks = Annotated[int | None, shared("--ranks", "where a log does not say", least=1)]
UnsaidCollective = Annotated[str | None, shared("--collective", "where a log does not say")]
UnsaidDtype = Annotated[str, shared("--dtype", "where a log does not say")]
comm.command("study")(study)
SWEEP = ("1KiB", "64MiB")


@comm.command("backends")
@in_one_sentence
def backends(
    files: Annotated[list[str], typer.Argument(
        metavar="[NAME=]FILE...", help="Profiles of 'comm fit', or logs and tables as it takes them; NAME is the "
                                       "backend of a FILE that names none.")],
    out: ProfileOut,
    topology: Annotated[str | None, shared("--topology", "where it was measured; by default a profile's")] = None,
    ranks: UnsaidRanks = None,
    collective: UnsaidCollective = None,
    dtype: UnsaidDtype = "float32",
    json: Json = False,
) -> None:
    """Join measured backends of one cluster: each is an option that --comm-choices has for every collective.

    foretrace comm backends nccl=all_reduce.log custom.parquet mpi=osu.txt -o choices.json --topology dgx-h200 --ranks 8
    """
    named = [_named(text) for text in files]
    check_output(out, [path for _, path in named], COMM_PROFILE)
    known = {path: collectives.CommProfile.load(path) for _, path in named if _is_profile(path)}
    where = next((each.topology for each in known.values()), None)
    if topology:
        where = collectives_topology.find_topology(topology)
    if where is None:
        raise collectives.CommError("Nothing says where the collectives were measured; give --topology.")
    hints = _hints(ranks, collective, dtype)
    joined = collectives.CommProfile(where)
    with working("Fitting"):
        for name, path in named:
            one = known.get(path) or _fitted(path, replace(hints, backend=name or hints.backend), where)
            _add(joined, one, name if path in known else "", path)
    joined.save(out)
    rows = [(name, sorted({CollectiveKind(key[0]).label for key in of.fitted.pieces}),
             sorted({key[2] for key in of.fitted.pieces})) for name, of in joined.backends.items()]
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


@comm.command("predict")
@in_one_sentence
def predict(
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="Such as all_reduce or all_to_all.")],
    size: Annotated[str | None, typer.Option("--bytes", metavar="SIZE",
                                             help="Whole buffer of a rank: 64MiB, 1.5GB, 4096.")] = None,
    sizes: Annotated[str | None, typer.Option(
        metavar="A,B,C", help="Of an uneven all-to-all what every rank sends to rank 0, 1, …; or a row for each "
                              "sending rank (a,b;c,d).")] = None,
    topology: TopologyName = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    ranks: Annotated[int | None, shared("--ranks", "the first of the topology; all by default")] = None,
    group: Annotated[str | None, typer.Option(metavar="RANKS", help="Which ranks, such as 0-7,16 or 0-63:8.")] = None,
    dtype: Annotated[str | None, shared("--dtype", "bfloat16, or the only one the profile has")] = None,
    backend: Annotated[str | None, shared("--backend")] = None,
    algorithm: Annotated[str | None, typer.Option(
        help="Only this algorithm, by its formula: ring, tree, nvls, nvls-tree, hierarchical, direct.")] = None,
    oversubscription: Annotated[float | None, typer.Option(help="Of the network; 1 is full bisection.")] = None,
    sharing: Annotated[int, typer.Option(min=1, help="Number of such collectives that share links at once.")] = 1,
    json: Json = False,
) -> None:
    """Predict the time of one collective, with its breakdown."""
    kind = collectives.collective_kind(collective)
    model, where = clusters.profile_on(comm_profile, topology, oversubscription)
    payload, members = _payload(kind, size, sizes)
    if group is not None and ranks is not None:
        raise collectives.CommError("Ranks are given twice; give --group or --ranks.")
    count_of = ranks if ranks is not None else members if members is not None else where.gpus
    placement = where.place(traffic.parse_ranks(group)) if group else where.first(count_of)
    if members is not None and placement.ranks != members:
        raise collectives.CommError(f"--sizes has {members} ranks and the group has {placement.ranks}; give a size "
                                    "for each.")
    if dtype is None:
        measured = model.measured_dtypes(kind, backend)
        dtype = measured[0] if len(measured) == 1 else "bfloat16"
    call = collectives.CollectiveCall(kind, payload, placement, collectives_call.dtype_name(dtype))
    on = collectives.CollectiveModel(where, model, backend)
    if algorithm is not None:
        names = {a.label: a for a in datasheet.Algorithm}
        if algorithm.lower() not in names:
            raise collectives.CommError(f"{algorithm!r} is no algorithm; it is one of {', '.join(names)}.")
        formulas_alone = datasheet.DatasheetModel(where, names[algorithm.lower()])
        times = formulas_alone.predict(collectives.CollectiveBatch.from_calls([call]))
        if times.level[0] == int(collectives_call.Level.UNKNOWN):
            raise collectives.CommError(f"A {kind.label} of this group cannot be done by {algorithm}; leave "
                                        f"--algorithm out.")
    else:
        times = collectives.price_calls([call], on)
    if sharing > 1:
        tiny = replace(call, payload_bytes=min(payload, 1.0))
        times = price.shared_times(times, collectives.price_calls([tiny], on), sharing)
    time_us = float(times.time_us[0])
    level = collectives_call.Level(int(times.level[0]))
    nothing = level is collectives_call.Level.NOTHING_TO_DO
    checked = (sharing == 1 and algorithm is None
               and model.interval_checked(kind, placement, level, backend, on=where))
    algbw = payload / time_us * 1e-3 if time_us else 0.0
    busbw = algbw * collectives.bus_factor(kind, placement.ranks)
    ways = [] if nothing else datasheet.lines(where, kind, datasheet.RankGroup(
        placement.ranks, placement.nodes, placement.widest, placement.narrowest))
    values: dict[str, Any] = {
        "time_us": time_us, "interval_us": [float(times.low_us[0]), float(times.high_us[0])],
        "interval": "checked" if checked else "assumed", "source": level.source.label, "level": level.label,
        "algorithm": datasheet.algorithm_label(int(times.algorithm[0])) or None,
        "busbw_gbps": busbw, "algbw_gbps": algbw, "collective": kind.label,
        "payload_bytes": payload, "dtype": dtype, "ranks": placement.ranks, "per_node": list(placement.per_node),
        "topology": where.name, "sharing": sharing, "overlap": _overlap(where, busbw),
        "breakdown": [{"algorithm": way.algorithm.label, "protocol": way.protocol.label,
                       "latency_us": way.latency_us, "transfer_us": way.us_per_byte * payload,
                       "time_us": way.latency_us + way.us_per_byte * payload} for way in ways]}
    if json:
        print_json(values)
        return
    report = Report()
    low, high = values["interval_us"]
    what = f"{kind.label} of {traffic.bytes_text(payload)} over {placement.ranks} ranks on {where.name}"
    if nothing:
        report.line(f"{what}: 0 µs; nothing is launched.")
        return
    certainty = "80% certainty" if checked else "an assumed certainty of 80%"
    report.line(f"{what}: {time_us:,.1f} µs ({low:,.1f}–{high:,.1f} with {certainty}), from {level.label}.")
    report.line(f"Algorithmic bandwidth {algbw:,.1f} GB/s, bus bandwidth {busbw:,.1f} GB/s.")
    if values["overlap"]:
        report.line(f"Overlapping it, computation takes up to {values['overlap']['compute_bound']:.2f} times as long, "
                    f"and memory-bound work {values['overlap']['memory_bound']:.2f} times.")
    report.table("By formula from published constants (µs)", [
        Column("algorithm", name=True), Column("protocol", name=True), Column("latency"), Column("transfer"),
        Column("together")], [
        [row["algorithm"], row["protocol"], *(f"{row[name]:,.1f}" for name in (
            "latency_us", "transfer_us", "time_us"))]
        for row in sorted(values["breakdown"], key=lambda row: row["time_us"])])


@comm.command("fit")
@in_one_sentence
def fit(
    logs: Annotated[list[str], typer.Argument(
        metavar="LOG...", help="Output of nccl-tests, rccl-tests, PARAM, OSU's MPI benchmarks or ucc_perftest, tables, "
                            "traces.")],
    out: ProfileOut,
    topology: Annotated[str, shared("--topology", "where it was measured")],
    ranks: UnsaidRanks = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of a node, where a log does not say.")] = None,
    collective: UnsaidCollective = None,
    dtype: UnsaidDtype = "float32",
    backend: Annotated[str, shared("--backend", "what was measured")] = "nccl",
    gpu: Annotated[str | None, typer.Option(
        "--gpu-name", metavar="NAME", help="Only rows of this GPU, as the table names it.")] = None,
    system: Annotated[str | None, typer.Option(metavar="NAME", help="Only rows of this system or cluster, as the table "
                                                                    "names it.")] = None,
    json: Json = False,
) -> None:
    """Fit a profile of collectives to measurements."""
    check_output(out, logs, COMM_PROFILE)
    where = collectives_topology.find_topology(topology)
    hints = replace(_hints(ranks, collective, dtype), per_node=per_node, backend=backend)
    with working("Reading"):
        parts = [read_measurements(path, hints, where) for path in logs]
    rows, notes = measurements.of_cluster(measurements.join(parts), where, gpu, system)
    with working("Fitting"):
        read_of = (f"{Path(path).name}: {len(part)} measurements" for path, part in zip(logs, parts, strict=True))
        profile = collectives.CommProfile.fit(rows, where, [*read_of, *notes])
    profile.save(out)
    report_fit(profile, rows, out, [*rows.notes, *notes], json)


@comm.command("bench")
@in_one_sentence
def bench(
    out: ProfileOut,
    processes: Annotated[int, typer.Option(min=2, help="Ranks on this host.")] = 2,
    backend: Annotated[str, shared("--backend", "gloo (CPUs) or nccl (GPUs)")] = "gloo",
    collective: Annotated[list[str] | None, shared("--collective", "several times; by default all")] = None,
    smallest: Annotated[str, typer.Option(metavar="SIZE", help="Smallest buffer.")] = SWEEP[0],
    largest: Annotated[str, typer.Option(metavar="SIZE", help="Largest buffer.")] = SWEEP[1],
    per_octave: Annotated[int, typer.Option(min=1, max=16, help="Sizes in each doubling.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often each size is measured.")] = 7,
    dtype: Annotated[str, shared("--dtype")] = "float32",
    topology: Annotated[str, shared("--topology", "what this host is")] = "cpu",
    table: Annotated[str | None, typer.Option(metavar="FILE.jsonl", help="Keep the measurements as well.")] = None,
    json: Json = False,
) -> None:
    """Measure collectives on this host under torchrun, and fit a profile to them. Needs PyTorch."""
    check_output(out, [], COMM_PROFILE)
    if table is not None:
        check_output(table, [], MEASUREMENTS)
    where = collectives_topology.find_topology(topology)
    kinds = tuple(collectives.collective_kind(name).label
                  for name in collective) if collective else comm_bench.BENCH_KINDS
    ends = int(traffic.parse_bytes(smallest)), int(traffic.parse_bytes(largest))
    plan = comm_bench.BenchPlan(kinds, comm_bench.sweep_sizes(*ends, per_octave), backend, dtype, rounds)
    with kept_files.scratch_folder() as folder, working("Measuring"):
        rows = collectives_logs.read_log(str(comm_bench.run_bench(
            plan, processes, table or os.path.join(folder, "table.jsonl"))))
    profile = collectives.CommProfile.fit(rows, where, [f"swept here with {processes} processes, {rounds} rounds"])
    profile.save(out)
    report_fit(profile, rows, out, rows.notes, json)


@comm.command("tune")
@in_one_sentence
def tune(
    profiles: Annotated[list[str], typer.Argument(metavar="PROFILE...", help="Files of 'comm fit', several backends.")],
    trace: Annotated[list[str] | None, typer.Option(
        "--trace", metavar="TRACE", help="A recorded job, whose step time gained is shown.")] = None,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    default: Annotated[str | None, typer.Option(metavar="BACKEND", help="Who wins ties; NCCL by default.")] = None,
    out: Annotated[str | None, shared("--out", "the choices as JSON", short="-o")] = None,
    csv: Annotated[str | None, typer.Option(
        metavar="FILE.csv", help="Write NCCL's best algorithms for its tuner plugin (by formula).")] = None,
    json: Json = False,
) -> None:
    """Compare backends for each operation, size and group; show winners, crossovers and the step time gained."""
    for path, form in ((out, CHOICES), (csv, TUNER)):
        if path is not None:
            check_output(path, profiles, form)
    loaded = [collectives.CommProfile.load(path) for path in profiles]
    measured = tuner.backends_of(loaded)
    groups = tuner.measured_groups(loaded)
    machines = {each.topology.node.device: f"{Path(path).name} of {each.topology.node.name} "
                                           f"({each.topology.node.device})"
                for path, each in zip(profiles, loaded, strict=True)}
    notes = [f"The profiles are of different machines: {', '.join(machines.values())}."] * (len(machines) > 1)
    choices: list[tuner.TunedChoice] = []
    changes: list[tuner.Crossover] = []
    for kind, placement, low, high in groups:
        sizes = [2.0**i for i in range(max(int(low - 1).bit_length(), 0), int(high).bit_length())]
        choices += tuner.choose(measured, kind, placement, sizes or [low], default=default)
        if high > low:
            changes += tuner.crossovers(measured, kind, placement, low, high, default=default)
    tuned = None
    if trace:
        with working("Simulating"):
            recorded = read(trace, step_region=step_region, cycle=cycle)
            tuned = tuned_workload.tune_workload(
                build.build_program(recorded.graphs), measured, loaded[0].topology, default)
    values: dict[str, Any] = {"backends": list(measured), "choices": [c.to_json() for c in choices],
                              "crossovers": [c.to_json() for c in changes], "workload": tuned_json(tuned),
                              "notes": [*notes, *(tuned.notes if tuned else ())]}
    if out is not None:
        with output_file.whole_file(out) as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(_finite(values)), indent=2) + b"\n")
    if csv is not None:
        with output_file.whole_file(csv) as stream:
            stream.write(tuner.nccl_tuner_csv(loaded[0].topology, [(k, p) for k, p, _, _ in groups]).encode())
    if json:
        print_json(values)
    else:
        report_tuning(list(measured), choices, changes, tuned, notes)


@comm.command("report")
@in_one_sentence
def report_communication(
    paths: Paths,
    job: Annotated[str | None, typer.Option(
        metavar="FILE.toml", help="What the job is (data_scheme, dp, tp, parameters, …): volumes are checked.")] = None,
    window: Window = 0,
    step_region: StepRegion = None,
    cycle: Cycle = None,
    workers: Workers = "local",
    json: Json = False,
) -> None:
    """Show what a recorded job communicated, by process group and kind."""
    shape = traffic.read_job_shape(job) if job else None
    recorded = read(paths, window, workers, step_region=step_region, cycle=cycle)
    with working("Looking at collectives"):
        found = comm_report.communication_report([recorded_calls.with_host_collectives(graph)
                                                  for graph in recorded.graphs])
        beside = contention.contention_of(recorded.graphs)
    checks = traffic.check_volumes(shape, found.recorded_payload()) if shape else []
    notes = [*recorded.notes, *found.notes]
    if json:
        print_json({"traffic": [row.to_json() for row in found.traffic],
                    "histogram": {kind: [{"from_bytes": None if at < 0 else 2**at, "count": n}
                                         for at, n in sorted(rows.items())]
                                  for kind, rows in found.histogram.items()},
                    "ranks": [{"rank": rank, "collective_us": found.kernel_ns[rank] / 1e3,
                               "exposed_us": found.exposed_ns[rank] / 1e3, "window_us": found.window_ns[rank] / 1e3}
                              for rank in sorted(found.window_ns)],
                    "contention": {name: one.to_json() for name, one in beside.items()},
                    "steps": found.steps, "unknown_sizes": found.unknown_sizes, "notes": list(dict.fromkeys(notes)),
                    "volumes": [{"collective": c.kind.label, "causes": list(c.causes),
                                 "expected_bytes": c.expected_bytes, "recorded_bytes": c.recorded_bytes,
                                 "agrees": c.agrees} for c in checks]})
    else:
        report_found(found, beside, checks, notes)


def _payload(kind: collectives.CollectiveKind, size: str | None, sizes: str | None) -> tuple[float, int | None]:
    """Return the bytes of a rank's buffer, and the number of ranks if ``--sizes`` gives it."""
    if (size is None) == (sizes is None):
        raise collectives.CommError("The size is given twice; give --bytes or --sizes." if size is not None else
                                    "Nothing says how large the collective is; give --bytes.")
    if sizes is None:
        return traffic.parse_bytes(size or ""), None
    if kind is not collectives.CollectiveKind.ALL_TO_ALL:
        raise collectives.CommError(f"Only an all-to-all has a size for each pair of ranks; give --bytes for "
                                    f"{kind.label}.")
    table = traffic.parse_table(sizes)
    return collectives.uneven_all_to_all(table), len(table)


def _overlap(where: collectives.Topology, busbw_gbps: float) -> dict[str, float] | None:
    """Return by how much a collective and overlapping work slow each other down; ``None`` on a host."""
    if where.node.link == "loopback" or busbw_gbps <= 0:
        return None
    return asdict(price.overlap_slowdown(known_devices.find_device(where.node.device), busbw_gbps))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value


def report_fit(profile: collectives.CommProfile, rows: collectives.CollectiveMeasurements, out: str, notes: list[str],
               json: bool) -> None:
    """Print a fitted profile."""
    found: list[dict[str, Any]] = [{
              "backend": name, "collective": CollectiveKind(kind).label, "dtype": collectives_call.DTYPES[dtype],
              "ranks": ranks, "nodes": nodes, "sizes": len(size), "smallest_bytes": float(size[0]),
              "largest_bytes": float(size[-1]), "latency_us": float(time_us[0]),
              "algbw_gbps": float(size[-1] / time_us[-1] * 1e-3)}
             for name in profile.backend_names() for (kind, dtype, ranks, nodes, *_), (size, time_us) in sorted(
                 rows.of_backend(name).aggregated().curves().items())]
    held_out = {name: np.abs(np.expm1(each.measured.residual)) for name, each in profile.backends.items()}
    errors = {name: [float(np.median(each)), float(np.quantile(each, 0.9))] if len(each) else None
              for name, each in held_out.items()}
    if json:
        print_json({"profile": out, "topology": profile.topology.name, "measurements": len(rows), "settings": found,
                    "held_out_error": errors, "notes": notes})
        return
    report = Report()
    report.table(f"Fitted on {profile.topology.name}", [
        Column("backend", name=True), Column("collective", name=True), Column("dtype", name=True), Column("ranks"),
        Column("nodes"), Column("sizes"), Column("from"), Column("to"), Column("latency\nµs"), Column("algbw\nGB/s")], [
        [row["backend"], row["collective"], row["dtype"], count(row["ranks"]), count(row["nodes"]),
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
    """Return a workload's steps as plain values."""
    return None if tuned is None else {
            "step_us": {name: value / 1e3 for name, value in tuned.step_ns.items()},
            "best_step_us": tuned.best_ns / 1e3, "default": tuned.default, "gain": tuned.gain,
            "winners": {name: tuned.winner.count(name) for name in dict.fromkeys(tuned.winner) if name},
            "missing": tuned.missing, "unmeasured": tuned.unmeasured}


def report_tuning(backends: list[str], choices: list[tuner.TunedChoice], changes: list[tuner.Crossover],
                  tuned: tuned_workload.TunedWorkload | None, notes: list[str]) -> None:
    """Print the fastest backends, the sizes at which these change, and a workload's steps."""
    report = Report()
    report.table("Times in µs, and who wins (ties within 5% stay with the default)",
                 [Column("collective", name=True), Column("ranks"), Column("size"),
                  *(Column(name) for name in backends), Column("winner", name=True)],
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
    """Print the communication of a job."""
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
    report.table("Slow-down by overlapping work (the same kernel overlapping and alone)",
                 [Column("what", name=True), Column("factor\nmedian"), Column("80% of\nkernels"), Column("kernels"),
                  Column("instances\noverlapping")],
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


def read_measurements(path: str, hints: measurements.Hints,
                      where: collectives.Topology) -> collectives.CollectiveMeasurements:
    """Read collectives from a log, table or trace."""
    if logs.inspector_folder(Path(path)):
        return logs.read_log(path, hints)
    if os.path.isdir(path) or path.lower().endswith(TRACE_ENDINGS):
        built = build.build_program(read([path]).graphs)
        return recorded.read_matched(built.graphs, built.rendezvous.groups,
                                     built.rendezvous.intrinsic_ns, where, hints.backend)
    return logs.read_log(path, hints)


def _named(text: str) -> tuple[str, str]:
    """Split "NAME=FILE" into name and path; the name is "" for an existing file or a text without a name."""
    name, equals, path = text.partition("=")
    return (name.strip(), path) if equals and name.strip() and not os.path.exists(text) else ("", text)


def _is_profile(path: str) -> bool:
    """Return whether a file is a profile of collectives, not a trace in JSON."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return COMM_PROFILE.ours(file.read(64))
    except OSError:
        return False


def _hints(ranks: int | None, collective: str | None, dtype: str) -> measurements.Hints:
    return measurements.Hints(ranks, None, collectives.collective_kind(collective) if collective else None,
                              collectives_call.dtype_name(dtype))


def _fitted(path: str, hints: measurements.Hints, where: collectives.Topology) -> collectives.CommProfile:
    rows, notes = measurements.of_cluster(read_measurements(path, hints, where), where)
    return collectives.CommProfile.fit(rows, where, [f"{Path(path).name}: {len(rows)} measurements", *notes])


def _add(joined: collectives.CommProfile, one: collectives.CommProfile, name: str, path: str) -> None:
    """Add a profile's backends to others; ``name`` may rename a single backend."""
    if one.topology.node.name != joined.topology.node.name:
        raise collectives.CommError(f"{path} was measured on {one.topology.node.name} nodes, and the others on "
                                    f"{joined.topology.node.name}; join backends of one cluster.")
    if name and len(one.backends) != 1:
        raise collectives.CommError(f"{path} has the backends {', '.join(one.backend_names()) or '(none)'}, and "
                                    f"{name!r} names one; leave the name out.")
    for own, models in one.backends.items():
        if (name or own) in joined.backends:
            raise collectives.CommError(f"Two files measure the backend {name or own!r}; name one otherwise, such as "
                                        f"other={path}.")
        joined.backends[name or own] = models
    joined.sources += one.sources

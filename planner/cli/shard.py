"""``foretrace shard``: the fastest shardings of a recommendation model's tables over a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from graph_predictor.comm import traffic
from graph_predictor.figures import percent
from kernel_models import device as known_devices
from kernel_models import op_call
from planner.cli.options import Profiles
from planner.sharding import estimate, planning, sources
from planner.sharding import problem as sharding_problem
from step_views.cli.console import Column, Report, print_json, working
from step_views.cli.options import Json, StepRegion, Top, Workers, in_one_sentence, profile_of, shared
from tracer import cluster, output_kind
from tracer.lookup_data import plan_file
from tracer.lookup_data import tables as lookup_data_tables

BEST = 5  # chosen: each plan is a block of rows
PROVEN = "Every sharding was weighed: by the search's sums over the tables of a rank no other is faster."


@in_one_sentence
def shard(
    source: Annotated[str, typer.Argument(
        metavar="SOURCE|TABLES", help="A file of tables (.csv, .parquet, .json, .toml), a workload with tables (dlrm), "
                                      "or a capture or shape-only trace of a step with tables.")],
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs of the job.")],
    device: Annotated[str | None, shared(
        "--device", "by default the one that a recorded step ran on, else h200-sxm")] = None,
    topology: Annotated[str | None, shared("--topology", "by default the device's usual nodes")] = None,
    batch: Annotated[int | None, shared(
        "--batch", "samples on each GPU; by default what the source has", least=1)] = None,
    memory: Annotated[str | None, typer.Option(
        metavar="SIZE", help="Memory of a device that a plan may use, as other commands' --memory-limit: such as 80GiB "
                             "(a bare number is in GB); by default all it has.")] = None,
    host_memory: Annotated[str | None, typer.Option(
        metavar="SIZE", help="Memory of a node's host that tables may lie in where the devices' does not suffice, such "
                             "as 1.5TB (a bare number is in GB); by default none.")] = None,
    kinds: Annotated[str | None, typer.Option(
        metavar="KIND,…", help="Kinds that tables may have: table_wise, column_wise, row_wise, table_row_wise, "
                               "data_parallel (tw, cw, rw, twrw, dp); all by default.")] = None,
    pin: Annotated[list[str] | None, typer.Option(
        metavar="TABLE=RANK", help="A table that lies whole on a rank (repeatable).")] = None,
    skews: Annotated[str | None, typer.Option(
        metavar="S,…", help="Other exponents of the Zipf law by which rows are looked up: plans are priced for each.")
    ] = None,
    out: Annotated[str | None, shared("--out", "the fastest plan as JSON, as TorchRec has it", short="-o")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str | None, shared("--preset")] = None,
    profile: Profiles = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    pipeline: Annotated[bool, typer.Option(
        "--pipeline/--no-pipeline", help="Exchange the next batch's indices during the dense part.")] = True,
    fused: Annotated[bool | None, typer.Option(
        "--fused/--unfused", help="Look up a rank's tables with one kernel whose gradient includes the optimizer, as "
                                  "FBGEMM does, or one by one with sparse gradients. By default as recorded, else "
                                  "fused.")] = None,
    seed: Annotated[int, shared("--seed", "the search's shakes and the random baseline", least=0)] = 0,
    step_region: StepRegion = None,
    workers: Workers = "local",
    top: Top = None,
    json: Json = False,
) -> None:
    """Find the fastest sharding of embedding tables: by tables, columns, rows, rows within a node, or copies.

    foretrace shard tables.csv --gpus 16 --device h200-sxm --batch 4096 --out plan.json
    """
    if out is not None:
        output_kind.check_output(out, [source], output_kind.SHARDING_PLAN)
    limit = None if memory is None else traffic.parse_memory(memory, "--memory", "80GiB")
    host_limit = 0.0 if host_memory is None else traffic.parse_memory(host_memory, "--host-memory", "1.5TB")
    pinned = _pins(pin or [])
    exponents = _exponents(skews)
    allowed = [] if kinds is None else kinds.split(",")
    with cluster.open_workers(workers) as shared_by, working("Searching"):
        spec = sources.device_of(source) if device is None else known_devices.find_device(device)
        known = profile_of(profile, spec)
        found = planning.shard(
            source, gpus, device=spec, topology=topology, memory=limit, host_memory=host_limit, batch=batch,
            top=top or BEST, pinned=pinned, kinds=allowed, skews=exponents, preset=preset,
            settings=assignments or (), profile=known, comm_profile=comm_profile, comm_choices=comm_choices,
            pipelined=pipeline, fused=fused, seed=seed, step_region=step_region, workers=shared_by)
    if out is not None:
        found.plans[0].plan.save(out)
    if json:
        print_json(_plain(found))
    else:
        _report(found, out)


def _pins(texts: Sequence[str]) -> dict[str, int]:
    """Return the tables and ranks of ``--pin``. Raises ``ForetraceError``."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, rank = text.rpartition("=")
        if not equals or not name or not rank.isdecimal() or not rank.isascii() or len(rank) > 9:
            raise plan_file.ShardingError(f"--pin {text!r} is no TABLE=RANK; write one such as --pin tables.3=0.")
        if name in found:
            raise plan_file.ShardingError(f"--pin names table {name!r} twice; a table lies on one rank.")
        found[name] = int(rank)
    return found


def _exponents(text: str | None) -> list[float]:
    """Return the exponents of ``--skews``. Raises ``ForetraceError``."""
    found = []
    for each in (text or "").split(","):
        if not each.strip():
            continue
        try:
            value = float(each)
        except ValueError:
            value = -1.0
        if not 0 <= value <= lookup_data_tables.STEEPEST_SKEW:
            raise plan_file.ShardingError(f"--skews {each.strip()!r} is no exponent; give numbers from 0 (even) to "
                                          f"{lookup_data_tables.STEEPEST_SKEW:g}, such as 0,0.8,1.2.")
        found.append(value)
    return found


def _plain(found: planning.Shardings) -> dict[str, Any]:
    problem = found.problem
    return {
        "model": found.name, "tables": len(problem.tables), "samples_per_gpu": problem.samples, "gpus": problem.ranks,
        "device": problem.device.name, "topology": problem.collectives.topology.name, "proven": found.proven,
        "looked_at": found.looked_at,
        "plans": [{**_step(each), "plan": each.plan.to_document()} for each in found.plans],
        "baselines": {name: None if each is None else _step(each) for name, each in found.baselines.items()},
        "drift": [{"data": each.drift.name, "plans_ms": [us / 1e3 for us in each.plans_us],
                   "best_ms": each.best_us / 1e3, "regret": each.regret} for each in found.drifted],
        "notes": list(found.notes)}


def _step(each: estimate.ShardedStep) -> dict[str, Any]:
    whole = sum(each.sources.values()) or 1.0
    return {
        "kinds": planning.kinds_text(each), "step_ms": each.time_us / 1e3,
        "interval_ms": [each.low_us / 1e3, each.high_us / 1e3],
        "phases_ms": {name: us / 1e3 for name, us in each.phases.items()}, "bound": each.bound,
        "communication_ms": each.communication_us / 1e3, "imbalance": each.imbalance,
        "ranks": [{"forward_ms": forward / 1e3, "backward_ms": backward / 1e3, "sent_mb": sent / 1e6,
                   "indices_mb": index / 1e6, "memory_gb": memory.total / 1e9, "host_memory_gb": host / 1e9,
                   "memory_parts_gb": {name: size / 1e9 for name, size in memory.parts.items()}}
                  for forward, backward, sent, index, memory, host in zip(
                      each.forward_us.tolist(), each.backward_us.tolist(), each.sent_bytes.tolist(),
                      each.index_bytes.tolist(), each.memory, each.host_bytes.tolist(), strict=True)],
        "sources": {op_call.Source(source).label: us / whole for source, us in each.sources.items()}}


def _report(found: planning.Shardings, out: str | None) -> None:
    report, problem = Report(), found.problem
    size = sum(table.weight_bytes for table in problem.tables)
    tables = f"{len(problem.tables):,} table{'s' * (len(problem.tables) != 1)}"
    kind = "CPU" if problem.device.vendor == "host" else "GPU"
    where = f"each of {problem.ranks} {kind}s" if problem.ranks > 1 else f"a {kind}"
    report.line(f"{found.name}: {tables} of {size / 1e9:,.4g} GB, {problem.samples:,} samples on {where} of "
                f"{problem.collectives.topology.name}.")
    report.line(PROVEN if found.proven else
                f"{found.looked_at:,} shardings compared.")
    columns = [Column("", name=True, whole=True), Column("tables", name=True, whole=True), Column("step\nms"),
               Column("80% between\nms"), Column("slowest\nlook-ups"), Column("ex-\nchanges"),
               Column("imbal-\nance"), Column("memory\nGB"),
               *([Column("on hosts\nGB")] if problem.host_bytes else []), Column("binds", name=True, whole=True)]
    report.table("Fastest shardings", columns, [
        _cells(problem, str(i + 1), each) for i, each in enumerate(found.plans)])
    report.table("Baselines under the same model", columns, [
        _cells(problem, name, each) for name, each in found.baselines.items() if each is not None])
    report.table("When the data drift", [
        Column("data", name=True), Column("plan 1\nms"), Column("best of all\nms"), Column("plan 1\nlonger by")], [
        [each.drift.name, f"{each.plans_us[0] / 1e3:,.3f}", f"{each.best_us / 1e3:,.3f}", percent(each.regret)]
        for each in found.drifted])
    parts = ", ".join(f"{name} {us / 1e3:,.3f}" for name, us in found.plans[0].phases.items() if us > 0)
    report.line()
    report.line(f"Of plan 1, ms: {parts}.")
    if out is not None:
        report.line(f"Plan 1 was written to {out}.")
    report.notes(found.notes)


def _cells(problem: sharding_problem.ShardingProblem, name: str, each: estimate.ShardedStep) -> list[str]:
    return [name, planning.kinds_text(each), f"{each.time_us / 1e3:,.3f}",
            f"{each.low_us / 1e3:,.3f} – {each.high_us / 1e3:,.3f}", f"{each.compute_us.max() / 1e3:,.3f}",
            f"{each.communication_us / 1e3:,.3f}", f"{each.imbalance:.2f}", f"{each.fullest.total / 1e9:.1f}",
            *([_size_text(each.host_bytes.sum() / 1e9)] if problem.host_bytes else []), each.bound]


def _size_text(gb: float) -> str:
    """Return a size as text: a whole number from 10 on, two digits below."""
    return f"{gb:,.0f}" if gb >= 10 else f"{gb:.2g}"

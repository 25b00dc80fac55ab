"""``foretrace comm backends``: one profile of several backends' measured collectives, for ``--comm-choices``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from graph_predictor.cli.console import Column, Report, count, print_json, read, working
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.options import Debug, Json, shared
from graph_predictor.simulation import build
from kernel_models import collectives
from kernel_models.collectives import call, cluster, readers
from kernel_models.collectives import topology as collectives_topology
from kernel_models.collectives.readers import hints as readers_hints
from kernel_models.collectives.readers import inspector, traces
from tracer.output_kind import COMM_PROFILE, check_output

TRACE_ENDINGS = (".json", ".json.gz", ".foretrace")


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
    debug: Debug = False,
) -> None:
    """Join measured backends of one cluster: each is an option that --comm-choices has for every collective.

    foretrace comm backends nccl=all_reduce.log custom.parquet mpi=osu.txt -o choices.json --topology dgx-h200 --ranks 8
    """
    with one_sentence(debug):
        from dataclasses import replace


        named = [_named(text) for text in files]
        check_output(out, [path for _, path in named], COMM_PROFILE)
        known = {path: collectives.CommProfile.load(path) for _, path in named if _is_profile(path)}
        where = next((each.topology for each in known.values()), None)
        if topology:
            where = collectives_topology.find_topology(topology)
        if where is None:
            raise collectives.CommError("Nothing says where the collectives were measured; give --topology.")
        hints = readers_hints.Hints(ranks, None, collectives.collective_kind(collective) if collective else None,
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


def read_measurements(path: str, hints: readers_hints.Hints,
                      where: collectives.Topology) -> collectives.CollectiveMeasurements:
    """Read a log, table or trace."""
    if inspector.inspector_folder(Path(path)):
        return readers.read_log(path, hints)
    if os.path.isdir(path) or path.lower().endswith(TRACE_ENDINGS):
        built = build.build_program(read([path]).graphs)
        return traces.read_matched(built.graphs, built.rendezvous.groups, built.rendezvous.intrinsic_ns, where,
                                   hints.backend)
    return readers.read_log(path, hints)


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


def _fitted(path: str, hints: readers_hints.Hints, where: collectives.Topology) -> collectives.CommProfile:
    rows, notes = cluster.of_cluster(read_measurements(path, hints, where), where)
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

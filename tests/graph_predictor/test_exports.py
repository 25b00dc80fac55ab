"""Exports: read back by other eyes, they hold what was simulated, dependencies and all."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_support import CPU_SMALL, real_trace, worked_step
from slowly import mostly_slow
from typer.testing import CliRunner

import foretrace
from foretrace import edits
from foretrace.commands import app
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.prediction.simulated_job import simulated_job
from step_views.exports import chakra, tables
from step_views.exports.chakra import messages, write_chakra
from step_views.exports.work_graph import After, WorkGraph, WorkKind, work_graph
from step_views.reports import timeline
from step_views.reports.timeline import QUEUED, RUNNING
from tracer.errors import ForetraceError
from tracer.job import Job, read_job

BERT = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"
REAL = ("gpu-only-MI210", "vllm-cuda-graph", "vllm-eager-B200", "rank0-1-of-128", "resnet18-ddp-MI300X",
        "triton-example/triton_example.json.gz", "cuda-sync-A100/alexnet",
        "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz", "dlrm-8xV100-2023", "resnet50-V100",
        "rank3-of-8xA100-6steps", "linear-2080Ti")
"""The last ones are used again."""


@lru_cache(maxsize=4)
def recorded(name: str) -> Job:
    return read_job(real_trace(name))


@lru_cache(maxsize=4)
def replayed(name: str) -> Replay:
    return replay(recorded(name).graphs)


def simulated_ends(work: WorkGraph) -> np.ndarray:
    return work.start_ns + work.duration_ns


# -- work and dependencies ---------------------------------------------------------------------------------------------


@pytest.mark.real_traces
@pytest.mark.parametrize("name", mostly_slow(REAL, {*REAL} - {"dlrm-8xV100-2023", "linear-2080Ti"}))
def test_dependencies_alone_give_every_simulated_time_back(name: str) -> None:
    work = work_graph(simulated_job(replayed(name)))
    assert np.array_equal(work.ends(work.duration_ns)[0], simulated_ends(work))
    # In whole microseconds too, however many nodes there are on the way.
    assert np.array_equal(work.ends(work.duration_us)[0], simulated_ends(work) // 1000)


@pytest.mark.real_traces
@pytest.mark.parametrize(("name", "edit"), [("dlrm-8xV100-2023", edits.ScaleHost(0.5)),
                                            ("resnet50-V100", edits.Device("h100-sxm"))])
def test_so_do_those_of_a_predicted_job(name: str, edit: edits.Edit) -> None:
    base = foretrace.baseline_of(recorded(name))
    job = simulated_job(base.simulated([edit]))
    work = work_graph(job)
    assert np.array_equal(work.ends(work.duration_us)[0], simulated_ends(work) // 1000)
    last, before = ([step for step in job.steps() if step.rank == 0][at].end_item for at in (-1, -2))
    calls = np.flatnonzero(work.kind == WorkKind.CALL)
    ends = work.ends(work.duration_ns)[0]
    length = ends[calls[work.row[calls] == last][0]] - ends[calls[work.row[calls] == before][0]]
    assert length == job.simulated.item_end[last] - job.simulated.item_end[before] > 0


@pytest.mark.real_traces
@pytest.mark.parametrize(("name", "factor"), [("resnet50-V100", 0.5), ("resnet50-V100", 2.0),
                                              ("dlrm-8xV100-2023", 2.0), ("linear-2080Ti", 0.5)])
def test_other_durations_give_what_the_simulator_gives(name: str, factor: float) -> None:
    before = replayed(name)
    after = replay(before.graphs, built=before.built, scale_kernels=factor)
    work = work_graph(simulated_job(before))
    kernels = np.flatnonzero(work.kind == WorkKind.KERNEL)
    durations = work.duration_ns.copy()
    rows = work.row[kernels]
    tails = before.program.kernel_duration[rows] - work.duration_ns[kernels]
    durations[kernels] = after.program.kernel_duration[rows] - tails
    ends = work.ends(durations)[0][kernels]
    moved = after.simulated.kernel_end - before.simulated.kernel_end
    assert np.array_equal(ends - simulated_ends(work)[kernels], moved[rows]) and moved.any()


@pytest.mark.real_traces
@pytest.mark.parametrize(("name", "why"), [
    ("resnet50-V100", After.LAUNCH), ("resnet50-V100", After.STREAM_ORDER), ("resnet50-V100", After.LAUNCH_QUEUE),
    ("resnet50-V100", After.SYNC), ("resnet50-V100", After.HAND_OVER), ("rank3-of-8xA100-6steps", After.EVENT_WAIT),
    ("dlrm-8xV100-2023", After.OUTSIDE), ("resnet50-V100", After.PROGRAM_ORDER)])
def test_no_kind_of_dependency_can_be_spared(name: str, why: After) -> None:
    work = work_graph(simulated_job(replayed(name)))
    kept = work.why != why
    owner = np.repeat(np.arange(len(work)), np.diff(work.before_ptr))[kept]
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(work)))]).astype(np.int64)
    without = replace(work, before_ptr=pointer, before=work.before[kept], why=work.why[kept])
    ends = without.ends(work.duration_ns)[0]
    assert (ends <= simulated_ends(work)).all() and (ends < simulated_ends(work)).any()


def test_a_worked_step(tmp_path: Path) -> None:
    """The kernel of 100 µs waits for its launch, which ends 5 µs before; the synchronisation waits for the kernel."""
    work = work_graph(simulated_job(replay(worked_step().read(tmp_path))))
    assert np.array_equal(work.ends(work.duration_ns)[0], simulated_ends(work))
    kernel = int(np.flatnonzero((work.kind == WorkKind.KERNEL) & (work.duration_ns == 100_000))[-1])
    before = work.before[work.before_ptr[kernel]:work.before_ptr[kernel + 1]]
    assert (WorkKind.DELAY, 5_000) in {(int(work.kind[node]), int(work.duration_ns[node])) for node in before}
    assert After.SYNC in work.why[work.before == kernel]


# -- Chakra ------------------------------------------------------------------------------------------------------------


@dataclass
class ReadNode:
    """A node as the file has it."""

    id: int
    name: str
    type: int
    deps: list[int]
    start: int
    duration: int
    attributes: dict[str, Any]


def read_chakra(path: Path) -> tuple[dict[str, Any], list[ReadNode]]:
    """What Chakra's own reader does: a length as varint, then so many bytes of a message, until the file's end."""
    data, at, parts = path.read_bytes(), 0, []
    while at < len(data):
        size = shift = 0
        more = True
        while more:
            size |= (data[at] & 0x7F) << shift
            more = data[at] > 0x7F
            at, shift = at + 1, shift + 7
        parts.append(data[at:at + size])
        at += size

    def attributes(message: Any) -> dict[str, Any]:
        return {each.name: getattr(each, each.WhichOneof("value")) for each in message.attr}

    kinds = messages()
    head, nodes = kinds["GlobalMetadata"].FromString(parts[0]), map(kinds["Node"].FromString, parts[1:])
    assert head.version == "0.0.4"
    return attributes(head), [ReadNode(
        node.id, node.name, node.type, list(node.data_deps), node.start_time_micros, node.duration_micros,
        attributes(node)) for node in nodes]


def feed(ranks: list[list[ReadNode]]) -> list[dict[int, int]]:
    """End of every node, µs, when each is issued once its dependencies are done, and collectives of one rendezvous
    begin together: what a feeder and a simulator that knows durations make of the files."""
    ends: list[dict[int, int]] = [{} for _ in ranks]
    sizes = Counter(node.attributes["rendezvous"] for nodes in ranks for node in nodes
                    if "rendezvous" in node.attributes)
    arrived: dict[int, list[tuple[int, ReadNode, int]]] = defaultdict(list)
    at = [0] * len(ranks)
    while any(at[rank] < len(nodes) for rank, nodes in enumerate(ranks)):
        before = list(at)
        for rank, nodes in enumerate(ranks):
            for node in nodes[at[rank]:]:
                if not all(dep in ends[rank] for dep in node.deps):
                    break
                ready = max((ends[rank][dep] for dep in node.deps), default=0)
                at[rank] += 1
                meets = node.attributes.get("rendezvous")
                if meets is None:
                    ends[rank][node.id] = ready + node.duration
                    continue
                arrived[meets].append((rank, node, ready))
                if len(arrived[meets]) == sizes[meets]:
                    start = max(ready for _, _, ready in arrived[meets])
                    for other, member, _ in arrived[meets]:
                        ends[other][member.id] = start + member.duration
        assert at != before, "some node waits for what never ends"
    return ends


@pytest.mark.real_traces
@pytest.mark.parametrize("name", ["dlrm-8xV100-2023", "vllm-cuda-graph"])
def test_chakra_files_replay_to_the_simulated_times(name: str, tmp_path: Path) -> None:
    result = replayed(name)
    written = write_chakra(simulated_job(result), tmp_path / "job.et")
    assert written.off_by_us == 0 and len(written.paths) == len(result.graphs)
    files = [read_chakra(Path(path)) for path in written.paths]
    assert sum(len(nodes) for _, nodes in files) == written.nodes
    for head, nodes in files:
        assert head["written_by"] == "foretrace" and head["world_size"] >= len(files)
        seen: set[int] = set()
        for node in nodes:
            assert node.id not in seen and seen.issuperset(node.deps)
            seen.add(node.id)
        # What Chakra's converter misses: something after every kernel, unless the window ends with it.
        depended = {dep for node in nodes for dep in node.deps}
        kernels = [node for node in nodes if not node.attributes["is_cpu_op"]]
        last = max(node.start for node in nodes)
        assert kernels and all(node.id in depended or node.start + node.duration >= last - 1_000 for node in kernels)
    ends = feed([nodes for _, nodes in files])
    for (_, nodes), end in zip(files, ends, strict=True):
        assert {node.id: node.start + node.duration for node in nodes} == end
    head = files[0][0]
    assert head.get("step_time_ns", 0) == max((step.replayed_ns for step in result.steps), default=0)


@pytest.mark.real_traces
def test_chakra_communication_says_what_readers_ask_for(tmp_path: Path) -> None:
    job = read_job(sorted(real_trace("nanogpt-8xH100").iterdir())[0])
    written = write_chakra(simulated_job(replay(job.graphs)), tmp_path / "one")
    (path,) = written.paths
    head, nodes = read_chakra(Path(path))
    collectives = [node for node in nodes if node.type == 7]
    assert collectives and json.loads(head["process_groups"])
    assert {node.attributes["collective"]: node.attributes["comm_type"] for node in collectives} == {
        "all_gather": 2, "reduce_scatter": 7}
    assert {node.attributes.get("pg_name", "0") for node in collectives} == {"0"}
    table = job.graphs[0].collectives
    width = [2 if job.graphs[0].string(int(code)) == "bfloat16" else 4 for code in table.dtype]
    sent = [int(count) * size for count, size in zip(table.elements_in, width, strict=True) if count >= 0]
    # Those without a size are no communication that takes no time.
    unknown = [node for node in nodes if "collective" in node.attributes and node.type == 4]
    assert len(unknown) == len(table) - len(sent) and all("comm_size" not in node.attributes for node in unknown)
    assert any(f"{len(unknown)} collectives of unknown kind or size" in note for note in written.notes)
    assert sorted(node.attributes["comm_size"] for node in collectives) == sorted(sent)


def test_chakra_of_a_host_has_its_operations_and_replaces_its_own_files_only(tmp_path: Path) -> None:
    job = simulated_job(read_job(BERT))
    assert simulated_job(job) is job and job.step_ns
    for _ in range(2):
        (path,) = write_chakra(job, tmp_path / "a").paths
    _, nodes = read_chakra(Path(path))
    assert {node.type for node in nodes} == {4} and all(node.attributes["is_cpu_op"] for node in nodes)
    names = Counter(node.name for node in nodes)
    assert names["aten::addmm"] > 10 and sum(name.startswith("begin of ProfilerStep") for name in names) == 3
    (tmp_path / "b.0.et").write_bytes(b"something else")
    with pytest.raises(ForetraceError, match="is no Chakra trace"):
        write_chakra(job, tmp_path / "b")


# -- Perfetto ----------------------------------------------------------------------------------------------------------


def perfetto_events(path: Path) -> tuple[Any, dict[int, str]]:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    trace = perfetto_trace_pb2.Trace.FromString(path.read_bytes())
    tracks = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            tracks[descriptor.uuid] = descriptor.process.process_name or descriptor.name
    return trace, tracks


def check_perfetto(path: Path, slices: int) -> tuple[Counter[str], dict[str, list[int]]]:
    """Every slice is closed in its track's order, names are known, arrows have two ends; counts of tracks' slices, and
    the values of counters."""
    trace, tracks = perfetto_events(path)
    names: dict[int, dict[int, str]] = defaultdict(dict)
    open_slices: dict[int, list[tuple[int, str]]] = defaultdict(list)
    done: Counter[str] = Counter()
    counts: dict[str, list[int]] = defaultdict(list)
    arrows: Counter[int] = Counter()
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        for name in packet.interned_data.event_names:
            names[sequence][name.iid] = name.name
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        arrows.update(event.flow_ids)
        assert event.track_uuid in tracks
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((packet.timestamp, names[sequence][event.name_iid]))
        elif event.type == event.TYPE_SLICE_END:
            began, name = open_slices[event.track_uuid].pop()
            assert began <= packet.timestamp
            done[tracks[event.track_uuid]] += 1
        else:
            counts[tracks[event.track_uuid]].append(event.counter_value)
    assert not any(open_slices.values()) and sum(done.values()) == slices
    assert set(arrows.values()) <= {2}
    return done, counts


@pytest.mark.real_traces
def test_perfetto_holds_slices_counts_and_arrows(tmp_path: Path) -> None:
    result = replayed("dlrm-8xV100-2023")
    foretrace.export(result, tmp_path / "a.pftrace")
    foretrace.export(result, tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    done, counts = check_perfetto(tmp_path / "a.pftrace", sum(event["ph"] == "X" for event in events))
    kernels = sum(len(graph.kernels) for graph in result.graphs)
    assert sum(count for name, count in done.items() if "stream" in name) == 2 * kernels
    assert min(counts[RUNNING]) == 0 and max(counts[RUNNING]) >= 1 and max(counts[QUEUED]) > 1
    # JSON has the same counts.
    in_json = [event["args"]["count"] for event in events if event["ph"] == "C" and event["name"] == RUNNING]
    assert sorted(in_json) == sorted(counts[RUNNING])


@pytest.mark.parametrize("edit", [[], [edits.ScaleHost(0.5)]])
def test_perfetto_of_a_predicted_step(edit: list[edits.Edit], tmp_path: Path) -> None:
    base = foretrace.baseline_of(read_job(BERT))
    step = base.simulated(edit)
    foretrace.export(step, tmp_path / "a.pftrace")
    trace, tracks = perfetto_events(tmp_path / "a.pftrace")
    assert "rank 0 predicted" in tracks.values() and not any("measured" in name for name in tracks.values())
    steps = next(uuid for uuid, name in tracks.items() if name == "steps")
    times = [packet.timestamp for packet in trace.packet if packet.track_event.track_uuid == steps]
    ends = times[1::2]
    each = len(ends) // step.steady.repeated.copies
    assert (ends[-1] - ends[-1 - each]) / each == pytest.approx(base.predict(edit).step_time_us * 1e3, abs=1)
    assert simulated_job(step).step_ns == pytest.approx(base.predict(edit).step_time_us * 1e3, abs=1)


def test_nested_slices_of_one_time_stay_nested(tmp_path: Path) -> None:
    trace = worked_step().op("aten::long", 1300, 1340).op("aten::first", 1300, 1320).op("aten::none", 1320, 1320)
    result = replay(trace.op("aten::last", 1320, 1340).read(tmp_path))
    for ending in ("pftrace", "json"):
        foretrace.export(result, tmp_path / f"a.{ending}")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    check_perfetto(tmp_path / "a.pftrace", sum(event["ph"] == "X" for event in events))


# -- tables and figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_are_those_of_the_result(ending: str, tmp_path: Path) -> None:
    def read(path: str) -> pd.DataFrame:
        return pd.read_csv(path) if ending == "csv" else pd.read_parquet(path)

    result = foretrace.baseline_of(read_job(BERT)).predict([edits.ScaleHost(0.5)])
    found = foretrace.export(result, tmp_path / "all", format=ending)
    assert [Path(path).stem for path in found.paths] == list(result.tables())
    for path in found.paths:
        pd.testing.assert_frame_equal(read(path), result.to_pandas(Path(path).stem), check_dtype=False)
    one = tmp_path / f"one.{ending}"
    assert not foretrace.export(result, one, table="families").notes
    with pytest.raises(ForetraceError, match="a table with other columns"):
        foretrace.export(result, one, table="bounds")
    with pytest.raises(ForetraceError, match="no table 'kernels'; tables are: critical_path"):
        foretrace.export(result, tmp_path / f"two.{ending}", table="kernels")
    job = read_job(CPU_SMALL / "kineto.json.gz")
    found = foretrace.export(job, tmp_path / "job", format=ending)
    assert [len(read(path)) for path in found.paths] == [len(job.to_pandas(name)) for name in job.tables()]


def test_files_do_not_depend_on_how_much_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = replay(read_job(worked_step().write(tmp_path / "trace.json")).graphs)

    def written() -> list[bytes]:
        return [Path(path).read_bytes() for name in ("a.json", "a.et", "a.csv")
                for path in foretrace.export(result, tmp_path / name).paths]

    whole = written()
    for module, name in ((timeline, "EVENTS_AT_ONCE"), (chakra, "NODES_AT_ONCE"), (tables, "ROWS_AT_ONCE")):
        assert getattr(module, name) > 2
        monkeypatch.setattr(module, name, 2)
    assert written() == whole


def test_tables_without_rows_have_their_columns(tmp_path: Path) -> None:
    job = read_job(CPU_SMALL / "kineto.json.gz")
    for result, table in ((foretrace.breakdown(replay(job)), "kernels"), (foretrace.diff(job, job), "parts"),
                          (foretrace.opportunities(job, top=100), "left_out")):
        path = tmp_path / f"{table}.csv"
        for _ in range(2):  # over its own table, too
            foretrace.export(result, path, table=table)
        assert len(pd.read_csv(path).columns) >= 2
    nothing = replace(foretrace.breakdown(replay(job)), steps=[])
    assert list(nothing.to_pandas("steps").columns)[:2] == ["rank", "step"]


def test_figures_are_read_back_by_tensorboards_messages(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    result = foretrace.baseline_of(read_job(BERT)).predict()
    foretrace.export(result, tmp_path / "runs", format="tensorboard", at=7)
    (path,) = (tmp_path / "runs").iterdir()
    data, at, figures = path.read_bytes(), 0, {}
    while at < len(data):
        size = int.from_bytes(data[at:at + 8], "little")
        event = Event.FromString(data[at + 12:at + 12 + size])
        at += 16 + size
        figures.update({value.tag: value.simple_value for value in event.summary.value})
        assert event.step in (0, 7)
    assert figures["step_ms/expected"] == pytest.approx(result.step_time_us / 1e3, rel=1e-6)
    assert figures["step_ms/low"] < figures["step_ms/expected"] < figures["step_ms/high"]


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return done.exit_code, done.stdout + done.stderr


def test_the_command_writes_what_was_recorded_and_what_is_predicted(tmp_path: Path) -> None:
    code, said = run(str(BERT), "-o", str(tmp_path / "a.et"), "--json")
    found = json.loads(said)
    assert code == 0 and found["format"] == "chakra" and found["files"] == [str(tmp_path / "a.0.et")]
    assert any("every node ends as simulated" in note for note in found["notes"])
    code, said = run(str(BERT), "-o", str(tmp_path / "p.pftrace"), "--host", "0.5")
    assert code == 0
    assert "rank 0 predicted" in perfetto_events(tmp_path / "p.pftrace")[1].values()
    code, said = run(str(BERT), "-o", str(tmp_path / "t.csv"), "--only-table", "breakdown_kernels")
    assert code == 0 and (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("-o", "a.foo"), "says no format"), (("-o", "a.csv", "--format", "xml"), "--format xml is not known"),
    (("-o", "a.csv", "--only-table", "none"), "There is no table"), (("-o", "no/where/a.json"), "does not exist"),
    (("-o", "a.csv", "--format", "parquet"), "named as another format")])
def test_what_cannot_be_exported_is_told(arguments: tuple[str, ...], sentence: str, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run(str(BERT), *arguments)
    assert code == 2 and sentence in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_an_object_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="int has no tables"):
        foretrace.export(3, tmp_path / "a.csv")
    with pytest.raises(ForetraceError, match="A job is expected"):
        foretrace.export(3, tmp_path / "a.et")
    with pytest.raises(ForetraceError, match="no figures"):
        foretrace.export(read_job(BERT), tmp_path / "runs", format="tensorboard")


def test_figures_go_where_a_run_logs() -> None:
    prediction = foretrace.predict(foretrace.read(str(BERT)), [])
    rows: list[tuple[str, int | None]] = []
    run, seen = SimpleNamespace(log=lambda figures, step=None: setattr(run, "logged", (figures, step))), {}
    figures = foretrace.log(prediction, run, step=7)
    assert run.logged == (figures, 7) and figures["foretrace/step_ms/expected"] == prediction.step_time_us / 1e3
    writer = SimpleNamespace(add_scalar=lambda name, value, step: rows.append((name, step)))
    foretrace.log(prediction, writer, step=7)
    assert set(rows) == {(name, 7) for name in figures}
    foretrace.log(prediction, seen.update, prefix="")
    assert {f"foretrace/{name}" for name in seen} == set(figures)
    with pytest.raises(ForetraceError, match="int logs nothing that is known"):
        foretrace.log(prediction, 3)
    with pytest.raises(ForetraceError, match="str has no figures"):
        foretrace.log("prediction", run)

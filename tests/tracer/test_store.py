"""Graph files: exact round trips, small and quick to load, and every kind of damage refused with one sentence."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from et_support import assert_same, empty_graph, graph_of, real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracer.errors import GraphFileError
from tracer.graph import NONE, ExecutionGraph, LossReport, Meta, Thread
from tracer.job import Job, load_job, save_job
from tracer.kineto import read_kineto
from tracer.store import container, graphs, is_graph_file, load_graph, save_graph
from tracer.store.container import INLINE_ROWS

# Small to large, with and without syncs, collectives, steps and shapes.
TRACES = [
    "triton-example/triton_example.json.gz",
    "cuda-sync-A100/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "dlrm-8xV100-2023/rank3.kineto.json.gz",
    "gpu-only-MI210/rank0.json.gz",
    "vllm-cuda-graph/graph-execution.json.gz",
]


@pytest.mark.parametrize("trace", TRACES)
def test_real_graphs_round_trip_and_are_smaller_than_their_traces(tmp_path, trace: str) -> None:
    source = real(trace)
    graph = read_kineto(source)
    save_graph(graph, tmp_path / "a.foretrace")
    assert_same(graph, load_graph(tmp_path / "a.foretrace"))
    assert (tmp_path / "a.foretrace").stat().st_size <= source.stat().st_size
    save_graph(graph, tmp_path / "b.foretrace")
    assert (tmp_path / "a.foretrace").read_bytes() == (tmp_path / "b.foretrace").read_bytes()


def test_columns_with_gaps_are_the_same_however_many_are_read_and_can_be_edited(tmp_path, monkeypatch) -> None:
    graph = _big_graph()
    graph.ops.start_ns = np.repeat(graph.ops.start_ns, 2)[::2]
    for path in (tmp_path / "a.foretrace", "memory://folder/g.foretrace"):
        save_graph(graph, path)
        for values in (1, 3 * len(graph.ops), 1 << 40):
            monkeypatch.setattr(container, "_READ_VALUES", values)
            loaded = load_graph(path)
            assert_same(graph, loaded)
    assert len(load_job(tmp_path / "a.foretrace").graphs) == 1
    loaded.ops.duration_ns *= 2
    loaded.strings.append("more")


SAVED = """
import sys
from tracer.kineto import read_kineto
from tracer.store import load_graph, save_graph
graph = read_kineto("traces/cpu-small/kineto.json.gz")
save_graph(graph, sys.argv[1])
print(len(load_graph(sys.argv[1]).ops) == len(graph.ops), "pyarrow" in sys.modules, "pandas" in sys.modules)
"""


def test_neither_saving_nor_loading_imports_pandas(tmp_path) -> None:
    ran = subprocess.run([sys.executable, "-c", SAVED, str(tmp_path / "a.foretrace")], cwd=Path(__file__).parents[2],
                         capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True", "False"]


def test_tables_are_parquet_that_anyone_can_read(tmp_path) -> None:
    graph = _big_graph()
    save_graph(graph, tmp_path / "a.foretrace")
    assert is_graph_file((tmp_path / "a.foretrace").read_bytes()[:64])
    assert not is_graph_file(b"PK\x03\x04" + b"\0" * 60) and not is_graph_file(b"")
    with zipfile.ZipFile(tmp_path / "a.foretrace") as archive:
        assert archive.namelist()[0] == "manifest.json"
        assert msgspec.json.decode(archive.read("manifest.json"))["format"] == "foretrace"
        table = pyarrow.parquet.read_table(io.BytesIO(archive.read("ops.parquet")))
    assert table.column("start_ns").to_pylist() == graph.ops.start_ns.tolist()
    assert "strides" not in table.column_names  # nothing but NONE


def test_job_round_trip(tmp_path) -> None:
    job = Job([_big_graph(), graph_of([(0, "aten::mm")])], world_size=4, notes=["a note"], missing_ranks=[2, 3])
    job.graphs[1].meta.rank = 1
    save_job(job, tmp_path / "j.foretrace")
    loaded = load_job(tmp_path / "j.foretrace")
    assert (loaded.world_size, loaded.notes, loaded.missing_ranks) == (4, ["a note"], [2, 3])
    for ours, theirs in zip(job.graphs, loaded.graphs, strict=True):
        assert_same(ours, theirs)
    with pytest.raises(GraphFileError, match="2 ranks"):
        load_graph(tmp_path / "j.foretrace")


@st.composite
def random_graphs(draw) -> ExecutionGraph:
    """Graphs of random columns whose references are valid, from empty to larger than inline tables."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    graph = empty_graph()
    graph.strings = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=30))
    if draw(st.booleans()):
        graph.strings += [f"string {i}" for i in range(INLINE_ROWS)]
    graph.threads = [Thread(str(i), f"t{i}", draw(st.text(max_size=5))) for i in range(draw(st.integers(0, 3)))]
    sizes = {name: draw(st.sampled_from([0, 1, 2, 7, INLINE_ROWS, INLINE_ROWS + 1, 700]))
             for name in ExecutionGraph.TABLES}
    known = sizes | {"threads": len(graph.threads)}
    for name, kind in ExecutionGraph.TABLES.items():
        table = kind.empty(sizes[name])
        for column in kind.layout():
            target, members = graphs._REFERENCES[name].get(column), kind.ENUMS.get(column)
            limit = len(graph.strings) if column in kind.STRING_COLUMNS else known[target] if target else None
            limit = limit if members is None else len(members)
            info = np.iinfo(kind.layout()[column])
            mode = draw(st.sampled_from(["none", "constant", "random"]))
            if mode != "none":
                low, high = (info.min, info.max) if limit is None else (NONE, limit - 1)
                if column.endswith("_ns"):
                    low, high = 0 if column == "duration_ns" else -graphs.MOST_NS, graphs.MOST_NS
                values = random.integers(low, high, sizes[name], dtype=info.dtype, endpoint=True)
                if column == "parent":  # nothing lies in itself
                    values = np.minimum(values, np.arange(NONE, sizes[name] + NONE, dtype=info.dtype))
                getattr(table, column)[:] = values if mode == "random" or not sizes[name] else values[0]
        setattr(graph, name, table)
    graph.meta = draw(st.builds(
        Meta, source=st.text(max_size=10), rank=st.integers(-1, 10_000), base_time_ns=st.integers(-2**63, 2**63 - 1),
        profiler_flags=st.dictionaries(st.text(max_size=5), st.booleans(), max_size=3),
        unprofiled_step_ns=st.lists(st.integers(1_000, graphs.MOST_NS), max_size=3),
        process_groups=st.just([{"pg_name": "0", "ranks": [0, 1], "nested": {"a": None}}]),
        loss=st.builds(LossReport, orphan_kernels=st.integers(0, 2**40), notes=st.lists(st.text(max_size=9))),
    ))
    return graph


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_graphs())
def test_any_graph_round_trips(tmp_path, graph: ExecutionGraph) -> None:
    save_graph(graph, tmp_path / "g.foretrace")
    assert_same(graph, load_graph(tmp_path / "g.foretrace"))


@pytest.mark.parametrize("rows", [3, 400])
def test_every_flipped_byte_and_every_truncation_is_found(tmp_path, rows: int) -> None:
    path = tmp_path / "g.foretrace"
    save_graph(_big_graph(rows), path)
    data = path.read_bytes()
    for at in range(0, len(data), max(len(data) // 350, 1)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        _refused(path, bytes(damaged))
    for length in [*range(0, len(data), max(len(data) // 150, 1)), len(data) - 1]:
        _refused(path, data[:length])


def _zip(name: str, content: bytes, comment: bytes = b"") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        archive.writestr("ops.parquet", content)
        archive.comment = comment
    return stream.getvalue()


@pytest.mark.parametrize(("content", "says"), [
    (b"", "is empty"),
    (b"{}", "no saved graph"),
    (b"PK\x03\x04 something else entirely", "zip archive"),
    (_zip("readme.txt", b"hello"), "zip archive but no saved graph"),
    (container.seal(_zip("manifest.json", bytes(1 << 20), b"foretrace 1 crc32 00000000")),
     "not as foretrace writes it"),
])
def test_other_files(tmp_path, content: bytes, says: str) -> None:
    assert says in _refused(tmp_path / "x.foretrace", content)


def test_newer_version_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "g.foretrace"
    monkeypatch.setattr(container, "VERSION", 2)
    save_graph(_big_graph(), path)
    monkeypatch.undo()
    assert "newer than this foretrace reads" in _refused(path, path.read_bytes())


@pytest.mark.parametrize(("path", "says"), [
    ("none.foretrace", "does not exist"), ("", "is a directory"), ("memory://folder/none", "does not exist")])
def test_missing_file_and_folder(tmp_path, path: str, says: str) -> None:
    with pytest.raises(GraphFileError, match=says):
        load_graph(path if "://" in path else tmp_path / path)
    with pytest.raises(GraphFileError, match="cannot be written"):
        save_graph(empty_graph(), tmp_path / "no" / "folder.foretrace")


def _odd_time(name: str, column: str, value: int) -> ExecutionGraph:
    table = ExecutionGraph.TABLES[name].empty(3)
    getattr(table, column)[1] = value
    return replace(empty_graph(), **{name: table})


@pytest.mark.parametrize(("graph", "says"), [
    *((replace(empty_graph(), meta=Meta(**meta)), says) for meta, says in (
        ({"workload": {"name": "llama"}}, "workload has no name"),
        ({"workload": {"name": 3, "settings": {}}}, "workload has no name"),
        ({"memory_moments": [[1, 2, 3]]}, "memory cannot be"), ({"memory": {"peak": 1 << 63}}, "memory cannot be"),
        ({"rank": 1 << 40}, "rank cannot be"), ({"rank": -7}, "rank cannot be"),
        ({"world_size": 30_000_000}, "world size cannot be"))),
    (_odd_time("kernels", "duration_ns", 1 << 62), "column kernels.duration_ns holds a time that cannot be"),
    (_odd_time("ops", "start_ns", -(1 << 60)), "column ops.start_ns holds a time that cannot be"),
    (_odd_time("launches", "duration_ns", -2), "column launches.duration_ns holds a time that cannot be")])
def test_what_cannot_be_is_refused(tmp_path, graph: ExecutionGraph, says: str) -> None:
    save_graph(graph, tmp_path / "g.foretrace")
    with pytest.raises(GraphFileError, match=says):
        load_graph(tmp_path / "g.foretrace")


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch) -> None:
    path = tmp_path / "g.foretrace"
    save_graph(_big_graph(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(container.os, "replace", fail)
    with pytest.raises(GraphFileError, match="disk full"):
        save_graph(empty_graph(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.foretrace"]


@pytest.mark.parametrize(("change", "says"), [
    (lambda m: m["graphs"][0]["tables"]["ops"].update(rows=10**9), "unpack to"),
    (lambda m: m["graphs"][0]["tables"]["ops"].update(rows=10**12), "impossible number"),
    (lambda m: m["graphs"][0]["tables"]["ops"].update(rows=-1), "impossible number"),
    (lambda m: m["graphs"][0]["tables"]["ops"].update(rows=401), "400 rows, not 401"),
    (lambda m: m["graphs"][0]["tables"]["steps"].update(rows=2), "missing"),
    (lambda m: m["graphs"][0]["tables"]["ops"]["constants"].pop("kind"), "kind is missing"),
    (lambda m: m["graphs"][0]["tables"]["ops"]["constants"].update(kind=300), "does not fit"),
    (lambda m: m["graphs"][0]["tables"]["ops"]["constants"].update(parent=400), "points to row 400"),
    (lambda m: m["graphs"][0]["tables"]["ops"]["constants"].update(parent=-2), "points to row -2"),
    (lambda m: m["graphs"][0]["tables"].pop("ops"), "tables are not those"),
    (lambda m: m["graphs"][0]["meta"].update(rank="zero"), "manifest"),
    (lambda m: m["graphs"][0]["meta"]["loss"].update(notes=[1]), "manifest"),
    (lambda m: m["graphs"][0]["strings"].update(rows=5), "5 strings"),
    (lambda m: m["graphs"][0].pop("threads"), "manifest"),
    (lambda m: m.update(format="other"), "manifest"),
    (lambda m: m.update(kind="other"), "manifest"),
])
def test_lies_in_the_manifest(tmp_path, change, says: str) -> None:
    members = _members(_big_graph())
    manifest = msgspec.json.decode(members["manifest.json"])
    change(manifest)
    members["manifest.json"] = msgspec.json.encode(manifest)
    message = _refused(tmp_path / "g.foretrace", container.pack(members))
    assert says in message or "strings, not" in message


def test_missing_members_and_parquet_that_unpacks_to_gigabytes_are_refused(tmp_path) -> None:
    members = _members(_big_graph())
    del members["ops.parquet"]
    assert "missing" in _refused(tmp_path / "g.foretrace", container.pack(members))
    rows = 2_000_000
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"start_ns": np.zeros(rows, np.int64)}), stream, compression="zstd")
    manifest = msgspec.json.decode(members["manifest.json"])
    manifest["graphs"][0]["tables"]["ops"]["rows"] = rows
    members |= {"ops.parquet": stream.getvalue(), "manifest.json": msgspec.json.encode(manifest)}
    assert "more than it says" in _refused(tmp_path / "g.foretrace", container.pack(members))


@pytest.mark.parametrize(("column", "spoil", "says"), [
    ("duration_ns", lambda values: values[:-1], "differ in length"),
    ("name", lambda values: np.where(np.arange(400) == 0, 99, values), r"ops\.name points to row 99"),
    ("parent", lambda values: np.array([1, 0, *values[2:]], np.int32), "rows of ops lie in themselves")])
def test_an_inconsistent_graph_is_not_saved(tmp_path, column: str, spoil, says: str) -> None:
    graph = _big_graph()
    setattr(graph.ops, column, spoil(getattr(graph.ops, column)))
    with pytest.raises(GraphFileError, match=says):
        save_graph(graph, tmp_path / "g.foretrace")
    assert list(tmp_path.iterdir()) == []


def _big_graph(rows: int = 400) -> ExecutionGraph:
    return graph_of([(0, f"aten::op{i % 9}") for i in range(rows)])


def _members(graph: ExecutionGraph) -> dict[str, bytes]:
    return container.unpack(graphs.pack_graphs("graph", [graph], {}, "here"), "here")


def _refused(path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(GraphFileError) as error:
        load_graph(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)

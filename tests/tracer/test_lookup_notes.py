"""What is known of look-ups: counted by a capture, or stated by a law or a file, and kept with the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from et_support import graph_of

from tracer import workloads
from tracer.capture.merge import merge_lookups
from tracer.errors import TraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.lookup_data.indices import Indices, TableIndices, read_indices
from tracer.lookup_data.noted import find_lookups, note_indices, note_text, noted_tables, tables_of
from tracer.lookup_data.tables import EmbeddingTable, TableError
from tracer.store import load_graph


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def traced(**settings: Any) -> ExecutionGraph:
    from tracer.shape_only import trace_workload

    return trace_workload(workloads.configure("dlrm", preset="tiny", **settings))


def captured(path: Path, settings: Any, **options: Any) -> ExecutionGraph:
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_workload

    run_workload(settings, Capture(path, CaptureOptions(steps=2, warmup=0, timed=1, execution_trace="none", **options)))
    return read_job(path).graphs[0]


@pytest.mark.parametrize("form", ["json", "foretrace"])
def test_a_capture_counts_each_table_for_each_step_both_ways_and_stores_no_index(tmp_path: Path, form: str) -> None:
    settings = workloads.configure("dlrm", preset="tiny", skew=1.5, accumulation=2)
    graph = captured(tmp_path, settings, lookups=True, form=form)
    tables = tables_of(graph)
    assert [(t.name, t.rows, t.columns, t.bag) for t in tables] == [
        (f"tables.{i}", 500 >> i, 16, 4.0) for i in range(4)]
    batch, _ = next(iter(workloads.create(settings).batches()))
    drawn = {len(np.unique(row)) for row in batch.inputs[1].numpy()}
    assert {table.reuse_lookups for table in tables} == {128}
    assert all(0 < table.unique < 128 and len(table.bag_quantiles) == 4 and table.longest_bag > 4 for table in tables)
    assert abs(max(drawn) - max(table.unique for table in tables)) < 20  # another batch of the same law
    graph.save(tmp_path / "saved.foretrace")
    assert tables_of(load_graph(tmp_path / "saved.foretrace")) == tables
    kept = tmp_path / "rank0" / "lookups.json"
    assert kept.exists() == (form == "json")
    if form == "json":
        assert not any(isinstance(value, list) and len(value) > 17 for row in json.loads(kept.read_text())["rows"]
                       for value in row.values())
    lookups = find_lookups(graph)
    assert len(lookups) == 2 * 2 * 4
    for own in lookups:
        names = {graph.string(int(graph.ops.name[row])).removeprefix("aten::") for row, _ in own.rows}
        assert {"_embedding_bag", "_embedding_bag_dense_backward"} <= names
        ((table,),) = {noted_tables(graph.arguments(row)[position].value) for row, position in own.rows}
        assert (table.rows, table.columns) == own.shape


def test_without_the_option_nothing_watches_and_the_workload_states_its_law(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracer.capture.notes as watching

    monkeypatch.setattr(watching, "LookupNotes", None)
    graph = captured(tmp_path, workloads.configure("dlrm", preset="tiny"))
    assert not (tmp_path / "rank0" / "lookups.json").exists()
    assert [(table.skew, table.reuse) for table in tables_of(graph)] == [(1.05, ())] * 4


def test_modules_and_functions_of_a_script_are_named(tmp_path: Path, torch: Any) -> None:
    """nn.Embedding, nn.EmbeddingBag, weights used by functions, and one table looked up twice."""
    from tracer.capture import capture

    functional, model = torch.nn.functional, torch.nn.Module()
    model.items = torch.nn.Embedding(50, 8)
    model.words = torch.nn.EmbeddingBag(60, 8, mode="mean", include_last_offset=True)
    model.extra = torch.nn.Parameter(torch.randn(70, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, ends = torch.arange(12).reshape(4, 3) % 5, torch.tensor([0, 3, 6, 6, 12])

    def forward() -> Any:
        bags = model.words(rows.flatten(), ends)
        more = functional.embedding_bag(rows, model.extra, mode="sum", per_sample_weights=torch.ones(4, 3))
        return (model.items(rows).sum(1) + functional.embedding(rows[:, 0], model.items.weight) + bags + more).sum()

    model.forward = forward
    with capture(tmp_path, steps=1, warmup=1, timed=0, execution_trace="none", lookups=True) as running:
        while not running.finished:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            running.step()
    graph = read_job(tmp_path).graphs[0]
    tables = {table.name: table for table in tables_of(graph)}
    assert set(tables) == {"items", "words", "extra"}
    assert (tables["words"].pooling, tables["words"].longest_bag, tables["words"].bag) == ("mean", 6, 3.0)
    assert (tables["extra"].weighted, tables["extra"].bag, tables["extra"].unique) == (True, 3.0, 5)
    assert tables["items"].pooling == "none"
    assert sum(len(own.rows) > 1 for own in find_lookups(graph)) == 4  # each with its gradient


def test_damaged_counts_are_one_sentence_and_texts_of_others_are_no_notes(tmp_path: Path) -> None:
    graph = graph_of([(0, "aten::mm")])
    for content in (b"{", b'{"rows": 1}', b'{"rows": [{"name": "a", "rows": -1, "columns": 1}]}'):
        (tmp_path / "lookups.json").write_bytes(content)
        with pytest.raises(TraceError, match="counts of look-ups"):
            merge_lookups(graph, tmp_path / "lookups.json")
    assert merge_lookups(graph, tmp_path / "none.json") == []
    table = EmbeddingTable("a", 10, 4, bag=2.5, reuse=(0.5, 0.5, *[0.0] * 15), reuse_lookups=7)
    assert noted_tables(note_text([table])) == (table,)
    for text in ("", "True", "lookups:", "lookups:[1]", 'lookups:[{"name":"a","rows":0,"columns":1}]'):
        assert noted_tables(text) == ()


def test_a_traced_step_states_the_law_of_each_table_also_in_one_weight() -> None:
    unequal = {"columns_halved": 2, "bags_halved": 2}
    plain, batched = traced(**unequal), traced(**unequal, batched=True)
    assert tables_of(plain) == tables_of(batched)
    assert [(t.rows, t.columns, t.bag) for t in tables_of(plain)] == [
        (500, 16, 4.0), (250, 16, 4.0), (125, 8, 4.0), (62, 8, 2.0)]
    assert [len(noted_tables(batched.arguments(own.rows[0][0])[1].value)) for own in find_lookups(batched)] == [2, 2]


def test_a_law_or_a_file_takes_the_place_of_what_was_noted() -> None:
    graph = traced()
    note_indices(graph, read_indices("zipf:3"))
    assert {table.law_skew() for table in tables_of(graph)} == {3.0}
    same = TableIndices("", np.zeros(64, np.int64), np.full(32, 2, np.int64))
    note_indices(graph, Indices("file", tables=(same,)))
    assert {(table.unique, table.longest_bag) for table in tables_of(graph)} == {(1, 2)}
    with pytest.raises(TableError, match="has indices of 3 tables, and the model looks up 4"):
        note_indices(graph, Indices("file", tables=(same, same, same)))
    with pytest.raises(TableError, match="looks up no embedding table"):
        note_indices(graph_of([(0, "aten::mm")]), read_indices("zipf:1"))

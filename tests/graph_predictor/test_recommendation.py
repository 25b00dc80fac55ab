"""Recommendation workloads from end to end at tiny sizes: traced, captured, replayed, and predicted at another size."""

from __future__ import annotations

from typing import Any

import pytest
from slowly import mostly_slow

from graph_predictor.prediction.replay import replay
from graph_predictor.request.study import Configuration, Study
from tracer import workloads
from tracer.graph import NONE
from tracer.job import Job, read_job
from tracer.lookup_data.noted import find_lookups, noted_tables, tables_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepfm": ("deepfm", {}), "dcn_v2": ("dcn_v2", {"rank": 4}), "ncf": ("ncf", {}),
    "batched dlrm": ("dlrm", {"batched": True, "columns_halved": 2, "bags_halved": 2})}


@pytest.fixture(scope="module", params=mostly_slow(list(CASES), {"batched dlrm", "ncf"}))
def settings(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("torch")
    name, values = CASES[request.param]
    return workloads.configure(name, preset="tiny", **values)


@pytest.fixture(scope="module")
def job(settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_workload

    path = tmp_path_factory.mktemp("recommendation") / "run"
    run_workload(settings, Capture(path, CaptureOptions(steps=3, warmup=2, timed=3, execution_trace="none",
                                                       lookups=True)))
    return read_job(path)


def test_a_trace_by_shapes_looks_up_the_same_tables_as_a_capture(settings: Any, job: Job) -> None:
    from tracer.shape_only import trace_workload

    traced, captured = trace_workload(settings, "cpu"), job.graphs[0]
    steps = sorted({own.step for own in find_lookups(captured)} - {NONE})
    of_step = [own for own in find_lookups(captured) if own.step == steps[0]]
    looked_up = find_lookups(traced)
    assert [(own.shape, own.lookups, own.bags) for own in looked_up] == [
        (own.shape, own.lookups, own.bags) for own in of_step]
    assert traced.meta.loss.notes == []
    for own in looked_up:
        assert noted_tables(traced.arguments(own.rows[0][0])[own.rows[0][1]].value)
        assert len(own.rows) >= 2  # its gradient too
    assert {table.name for table in tables_of(traced)} == {table.name for table in settings.embedding_tables()}
    assert all(table.reuse and table.reuse_lookups for table in tables_of(captured))


def test_another_batch_costs_more_and_keeps_what_was_counted(settings: Any, job: Job) -> None:
    found = replay(job.graphs)
    assert len(found.steps) == 3 and max(abs(step.error) for step in found.steps) < 0.01
    study = Study(job)
    plain = study.predict(Configuration())
    larger = study.prepared(Configuration(sizes=(f"batch={256 * settings.batch}",)))
    assert larger.predict().step_time_us > 1.05 * plain.step_time_us
    assert {table.name for table in tables_of(larger.start.built.graphs[0])} == {
        table.name for table in tables_of(job.graphs[0])}

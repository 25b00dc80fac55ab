"""Results in a notebook: one line, a table as HTML, tables as DataFrames, and errors that name what exists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import foretrace
from step_views.check.validate import ValidatedCase, Validation
from step_views.check.verdict import GateOutcome, Status, Verdict
from step_views.sweep.run import SweepSource, sweep
from step_views.sweep.space import Axis, SweepSpace
from tracer.device_memory import KINDS, MemoryTimeline
from tracer.errors import ForetraceError
from tracer.shown import Shown

TRACE = str(Path(__file__).resolve().parents[1] / "traces" / "bert-cpu")


@pytest.fixture(scope="module")
def results() -> dict[str, Shown]:
    job = foretrace.read(TRACE)
    replayed, base = foretrace.replay(job.graphs), foretrace.baseline_of(job)
    verdicts = [Verdict("bert", "step", Status.PASSED, before=10.0, now=11.0, unit="ms", text="as before")]
    cases = [ValidatedCase({"batch": 8}, 12.0, 10.0, 15.0, 11.0, 10)]
    held = np.zeros((len(KINDS), 3), np.int64)
    held[0], held[4] = 5, [1, 7, 2]
    return {"job": job, "graph": job.graphs[0], "replay": replayed, "breakdown": foretrace.breakdown(replayed),
            "prediction": base.predict([foretrace.edits.ScaleHost(0.5)]), "difference": foretrace.diff(job, job),
            "opportunities": foretrace.opportunities(base, top=3), "check": GateOutcome("bert", verdicts),
            "sweep": sweep(SweepSource((TRACE,)), SweepSpace((Axis("host", (0.5, 1.0, 2.0)),)), jobs=1),
            "validation": Validation([{"batch": 4}], cases),
            "memory": MemoryTimeline("GPU 0", np.arange(3), held, {"layer": 12})}


def test_a_result_is_one_line_a_table_and_dataframes(results: dict[str, Shown]) -> None:
    for result in results.values():
        text, page, tables = repr(result), result._repr_html_(), result.tables()
        assert text == f"<{type(result).__name__}: {result.headline()}>" and "\n" not in text and len(text) < 300
        assert page.startswith("<p><b>") and "<table" in page and "<script" not in page
        assert all(list(result.to_pandas(table).columns) or not len(result.to_pandas(table)) for table in tables)
        assert result.to_pandas().equals(result.to_pandas(next(iter(tables))))
        with pytest.raises(KeyError, match=f"'operators' is no table; tables are: {next(iter(tables))}"):
            result.to_pandas("operators")
    said = results["prediction"].headline()
    assert "host time × 0.5" in said and "80% between" in said and " ms, decided by host" in said


def test_a_result_is_drawn_with_its_intervals(results: dict[str, Shown]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    for result in results.values():
        _, given = plt.subplots()
        assert result.plot(given) is given and (given.patches or given.lines or given.collections)
        given.figure.canvas.draw()
        own = result.plot()
        assert own is not given and own.get_xlabel() + own.get_ylabel()
        plt.close("all")
    prediction, low_high = results["prediction"], pytest.approx(results["prediction"].interval_us)
    (series, *_), (errors,) = prediction.chart().series, prediction.plot().containers[1:]
    assert (series.low[0] * 1e3, series.high[0] * 1e3) == low_high
    assert tuple(errors.lines[2][0].get_segments()[0][:, 0] * 1e3) == low_high
    assert results["sweep"].plot().collections
    plt.close("all")


def test_without_matplotlib_the_way_to_it_is_told(results: dict[str, Shown], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("prediction", "sweep"):
        with pytest.raises(ForetraceError, match=r"pip install 'foretrace\[plot\]'"):
            results[name].plot()


class Odd(Shown):
    """A result of one table, with names that HTML would take for its own."""

    def __init__(self, *values: str) -> None:
        self.values = values

    def headline(self) -> str:
        return "<b>"

    def tables(self) -> Any:
        return {"one": lambda: pd.DataFrame({"a<": list(self.values)})}


def test_a_name_is_escaped_and_of_an_empty_result_there_is_nothing_to_plot() -> None:
    page = Odd("<script>")._repr_html_()
    assert "&lt;b&gt;" in page and "&lt;script&gt;" in page and "<script>" not in page
    with pytest.raises(ForetraceError, match="nothing to plot"):
        Odd().plot()

"""Results in a notebook: one line, a table as HTML, tables as DataFrames, and errors that name what exists."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
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
    replayed = foretrace.replay(job.graphs)
    base = foretrace.baseline_of(job)
    return {"job": job, "graph": job.graphs[0], "replay": replayed, "breakdown": foretrace.breakdown(replayed),
            "prediction": base.predict([foretrace.edits.ScaleHost(0.5)]), "difference": foretrace.diff(job, job),
            "opportunities": foretrace.opportunities(base, top=3), **others()}


def others() -> dict[str, Shown]:
    """Results that are made of other things than a recorded step."""
    space = SweepSpace((Axis("host", (0.5, 1.0, 2.0)),))
    verdicts = [Verdict("bert", "step", Status.PASSED, before=10.0, now=11.0, unit="ms", text="as before")]
    cases = [ValidatedCase({"batch": 8}, 12.0, 10.0, 15.0, 11.0, 10)]
    held = np.zeros((len(KINDS), 3), np.int64)
    held[0], held[4] = 5, [1, 7, 2]
    return {"sweep": sweep(SweepSource((TRACE,)), space, jobs=1), "check": GateOutcome("bert", verdicts),
            "validation": Validation([{"batch": 4}], cases),
            "memory": MemoryTimeline("GPU 0", np.arange(3), held, {"layer": 12})}


NAMES = ("job", "graph", "replay", "breakdown", "prediction", "difference", "opportunities", "sweep", "check",
         "validation", "memory")


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_one_line_a_table_and_dataframes(results: dict[str, Shown], name: str) -> None:
    result = results[name]
    text = repr(result)
    assert text == f"<{type(result).__name__}: {result.headline()}>" and "\n" not in text and len(text) < 300
    page = result._repr_html_()
    assert page.startswith("<p><b>") and "<table" in page and "<script" not in page
    tables = result.tables()
    assert all(list(result.to_pandas(table).columns) or not len(result.to_pandas(table)) for table in tables)
    assert result.to_pandas().equals(result.to_pandas(next(iter(tables))))
    with pytest.raises(KeyError, match=f"'operators' is no table; tables are: {next(iter(tables))}"):
        result.to_pandas("operators")


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_drawn_or_says_why_not(results: dict[str, Shown], name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    _, given = plt.subplots()
    assert results[name].plot(given) is given and (given.patches or given.lines or given.collections)
    given.figure.canvas.draw()
    own = results[name].plot()
    assert own is not given and own.get_xlabel() + own.get_ylabel()
    plt.close("all")


def test_intervals_are_drawn_where_they_are(results: dict[str, Shown]) -> None:
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    prediction = results["prediction"]
    chart = prediction.chart()
    assert (chart.series[0].low[0] * 1e3, chart.series[0].high[0] * 1e3) == pytest.approx(prediction.interval_us)
    (errors,) = prediction.plot().containers[1:]
    ends = errors.lines[2][0].get_segments()[0][:, 0]
    assert tuple(ends * 1e3) == pytest.approx(prediction.interval_us)
    assert results["sweep"].plot().collections
    plt.close("all")


def test_without_matplotlib_the_way_to_it_is_told(results: dict[str, Shown], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("prediction", "sweep"):
        with pytest.raises(ForetraceError, match=r"pip install 'foretrace\[plot\]'"):
            results[name].plot()


def test_an_empty_result_says_that_there_is_nothing_to_plot() -> None:
    class Empty(Shown):
        def headline(self) -> str:
            return "empty"

        def tables(self):
            import pandas as pd

            return {"one": lambda: pd.DataFrame({"a": []})}

    with pytest.raises(ForetraceError, match="nothing to plot"):
        Empty().plot()


def test_a_prediction_says_its_time_interval_and_edits(results: dict[str, Shown]) -> None:
    said = results["prediction"].headline()
    assert "host time × 0.5" in said and "80% between" in said and " ms, decided by host" in said


def test_a_name_is_escaped() -> None:
    class Odd(Shown):
        def headline(self) -> str:
            return "<b>"

        def tables(self):
            import pandas as pd

            return {"one": lambda: pd.DataFrame({"a<": ["<script>"]})}

    page = Odd()._repr_html_()
    assert "&lt;b&gt;" in page and "&lt;script&gt;" in page and "<script>" not in page

"""Results in a notebook: one line, a table as HTML, tables as DataFrames, and errors that name what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretrace
from tracer.shown import Shown

TRACE = str(Path(__file__).resolve().parents[1] / "traces" / "bert-cpu")


@pytest.fixture(scope="module")
def results() -> dict[str, Shown]:
    job = foretrace.read(TRACE)
    replayed = foretrace.replay(job.graphs)
    base = foretrace.baseline_of(job)
    return {"job": job, "graph": job.graphs[0], "replay": replayed, "breakdown": foretrace.breakdown(replayed),
            "prediction": base.predict([foretrace.edits.ScaleHost(0.5)]), "difference": foretrace.diff(job, job),
            "opportunities": foretrace.opportunities(base, top=3)}


@pytest.mark.parametrize("name", ["job", "graph", "replay", "breakdown", "prediction", "difference", "opportunities"])
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

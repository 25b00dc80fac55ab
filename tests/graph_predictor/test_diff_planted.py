"""Five planted regressions, recorded for real on the CPU: each is what the difference names first."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import KINDS, record

from graph_predictor.diff import Kind, diff_jobs
from tracer.job import read_job

STEPS = 12
ATTEMPTS = 3
"""A machine that is busy with something else may disturb one of two captures by more than what was planted."""
NAMED = {
    "layer_norm": (Kind.ADDED, "aten::layer_norm"),
    "item": (Kind.SYNC, "aten::item ×32"),
    "fusion": (Kind.REPLACED, "aten::scaled_dot_product_attention → aten::matmul ×2"),
    "bucket": (Kind.COLLECTIVE, "c10d::allreduce_ (only in B)"),
    "sleep": (Kind.LOADER, "fetching a batch"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_regression_is_named_first(kind: str, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        record(kind, [(folder / "before", False), (folder / "after", True)], steps=STEPS, timed=0)
        before, after = read_job(folder / "before"), read_job(folder / "after")
        found = diff_jobs(before, after)
        first = found.top()[0]
        if (first.kind, NAMED[kind][1] in first.what, first.time_ns > 0) == (NAMED[kind][0], True, True):
            break
    else:
        pytest.fail(f"{found.top(5)}")
    assert sum(part.time_ns for part in found.parts) == found.total_ns
    assert found.attributed >= 0.99
    # The other way round it is what makes A slower.
    assert diff_jobs(after, before).top()[0].time_ns == -first.time_ns

"""Calibration on measured rows: planted rates are found again, and what tables must not hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pandas
import pytest

from kernel_models.device import find_device
from planner.serving.batching import simulate_serving
from planner.serving.calibrate import MeasuredRow, calibrate_serving, features, read_measured_rows
from planner.serving.serve import cluster_for, serve
from planner.serving.setup import Lengths, Requests, ServingError, ServingSetup, cache_account
from planner.serving.source import served_decoder
from planner.serving.steps import ServingModel, rates_of
from tracer.table_input import TableInputError

H100 = find_device("h100-sxm")
SHAPE = served_decoder("llama-3.1-8b").shape
SETUP = ServingSetup()
PLANTED = dataclasses.replace(rates_of(SETUP), products=1.25, others=0.9, step_us=3000.0)
LOADS = [(clients, prompt, output) for clients in (2, 16, 64) for prompt, output in (
    (256, 128), (1024, 64), (2048, 256), (512, 512))]


def measured() -> list[MeasuredRow]:
    model = ServingModel(SHAPE, SETUP, H100, cluster_for(H100, 1, None, None, None))
    rows = []
    for clients, prompt, output in LOADS:
        load = Requests(Lengths(prompt, prompt), Lengths(output, output), clients, count=3 * clients, warm_up=clients)
        cache = cache_account(SHAPE, SETUP, H100, prompt + output)
        got = simulate_serving(load, SETUP, model.with_rates(PLANTED).surface, cache)
        rows.append(MeasuredRow(str(load), model, cache, load, got.mean_ttft_us() / 1e3, got.mean_tpot_us() / 1e3))
    return rows


def test_ten_rows_of_planted_rates_predict_the_others() -> None:
    rows = measured()
    found = calibrate_serving(rows[:10], rates_of(SETUP))
    assert found.before > 0.15
    assert found.after < 0.05
    assert found.rates.step_us == pytest.approx(PLANTED.step_us, rel=0.25)
    for row in rows[10:]:
        got = simulate_serving(row.load, SETUP, row.model.with_rates(found.rates).surface, row.cache)
        predicted = got.mean_tpot_us() / 1e3 * math.exp(found.between.at(features(SETUP, row.load)))
        assert predicted == pytest.approx(row.tpot_ms, rel=0.06)
    assert "Calibrated on 10 measured rows" in str(found)
    assert found.to_dict()["rates"]["step_us"] == found.rates.step_us


def test_fewer_than_two_rows_and_rows_far_off_are_refused() -> None:
    rows = measured()[:3]
    with pytest.raises(ServingError, match="there is one"):
        calibrate_serving(rows[:1], rates_of(SETUP))
    far = dataclasses.replace(rows[0], tpot_ms=rows[0].tpot_ms * 1000)
    with pytest.raises(ServingError, match="times off"):
        calibrate_serving([far, *rows[1:]], rates_of(SETUP))


def test_a_table_calibrates_serve(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    pandas.DataFrame([{"concurrency": row.load.concurrency, "prompt": row.load.prompt.most,
                       "output": row.load.output.most, "tpot_ms": row.tpot_ms} for row in measured()[:4]]).to_csv(
        path, index=False)
    plain, known = (serve("llama-3.1-8b", device="h100-sxm", batch=16, context=1024, measured=each)
                    for each in (None, str(path)))
    assert known.decode.us > 1.1 * plain.decode.us
    assert known.calibration is not None and any("Calibrated on 4" in note for note in known.notes)


@pytest.mark.parametrize(("rows", "said"), [
    ([{"prompt": 8, "output": 8, "tpot_ms": 1.0}], "lacks the column concurrency"),
    ([{"concurrency": 1, "prompt": 8, "output": 8}], "neither ttft_ms nor tpot_ms"),
    ([{"concurrency": 0, "prompt": 8, "output": 8, "tpot_ms": 1.0}], "no whole number from 1"),
    ([{"concurrency": 1, "prompt": "x", "output": 8, "tpot_ms": 1.0}], "no number of tokens"),
    ([{"concurrency": 1, "prompt": 8, "output": 8, "tpot_ms": -1.0}], "no positive number"),
    ([{"concurrency": 1, "prompt": 8, "output": 8, "tpot_ms": 1.0, "tp": 3}], "cannot be split evenly"),
    ([{"concurrency": 1, "prompt": 131_072, "output": 8, "tpot_ms": 1.0}], "more than the 131,072"),
    ([{"concurrency": 1, "prompt": 600_000, "output": 8, "tpot_ms": 1.0}], "more than the 131,072")])
def test_tables_that_are_none(tmp_path: Path, rows: list[dict[str, object]], said: str) -> None:
    path = tmp_path / "rows.csv"
    pandas.DataFrame(rows).to_csv(path, index=False)
    with pytest.raises((ServingError, TableInputError), match=said):
        read_measured_rows(str(path), SHAPE, SETUP, H100, None, lambda gpus: cluster_for(H100, 1, None, None, None),
                           131_072)


def test_rows_that_contradict_each_other_are_doubted_and_first_tokens_alone_have_no_error() -> None:
    rows = measured()[:4]
    odd = [dataclasses.replace(row, tpot_ms=row.tpot_ms * by) for row, by in zip(rows, (0.3, 4, 0.3, 4), strict=True)]
    assert "contradict each other" in str(calibrate_serving(odd, rates_of(SETUP)))
    assert "contradict" not in str(calibrate_serving(rows, rates_of(SETUP)))
    alone = calibrate_serving([dataclasses.replace(row, tpot_ms=float("nan")) for row in rows], rates_of(SETUP))
    assert "nan" not in str(alone) and "first tokens alone" in str(alone)

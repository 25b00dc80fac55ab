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
COLUMNS = "concurrency,prompt,output,tpot_ms"
LOADS = [(clients, prompt, output) for clients in (2, 16, 64) for prompt, output in (
    (256, 128), (1024, 64), (2048, 256), (512, 512))]


@pytest.fixture(scope="module")
def rows() -> list[MeasuredRow]:
    model = ServingModel(SHAPE, SETUP, H100, cluster_for(H100, 1, None, None, None))
    found = []
    for clients, prompt, output in LOADS:
        load = Requests(Lengths(prompt, prompt), Lengths(output, output), clients, count=3 * clients, warm_up=clients)
        cache = cache_account(SHAPE, SETUP, H100, prompt + output)
        got = simulate_serving(load, SETUP, model.with_rates(PLANTED).surface, cache)
        found.append(MeasuredRow(str(load), model, cache, load, got.mean_ttft_us() / 1e3, got.mean_tpot_us() / 1e3))
    return found


def test_ten_rows_of_planted_rates_predict_the_others(rows: list[MeasuredRow]) -> None:
    found = calibrate_serving(rows[:10], rates_of(SETUP))
    assert found.before > 0.15 and found.after < 0.05
    assert found.rates.step_us == pytest.approx(PLANTED.step_us, rel=0.25)
    for row in rows[10:]:
        got = simulate_serving(row.load, SETUP, row.model.with_rates(found.rates).surface, row.cache)
        predicted = got.mean_tpot_us() / 1e3 * math.exp(found.between.at(features(SETUP, row.load)))
        assert predicted == pytest.approx(row.tpot_ms, rel=0.06)
    assert "Calibrated on 10 measured rows" in str(found)
    assert found.to_dict()["rates"]["step_us"] == found.rates.step_us


def test_fewer_than_two_rows_and_rows_far_off_are_refused(rows: list[MeasuredRow]) -> None:
    far = dataclasses.replace(rows[0], tpot_ms=rows[0].tpot_ms * 1000)
    for given, said in ((rows[:1], "there is one"), ([far, *rows[1:3]], "times off")):
        with pytest.raises(ServingError, match=said):
            calibrate_serving(given, rates_of(SETUP))


def test_a_table_calibrates_serve(tmp_path: Path, rows: list[MeasuredRow]) -> None:
    path = tmp_path / "mine.csv"
    pandas.DataFrame([{"concurrency": row.load.concurrency, "prompt": row.load.prompt.most,
                       "output": row.load.output.most, "tpot_ms": row.tpot_ms} for row in rows[:4]]).to_csv(
        path, index=False)
    plain, known = (serve("llama-3.1-8b", device="h100-sxm", batch=16, context=1024, measured=each)
                    for each in (None, str(path)))
    assert known.decode.us > 1.1 * plain.decode.us
    assert known.calibration is not None and any("Calibrated on 4" in note for note in known.notes)


@pytest.mark.parametrize(("text", "said"), [
    ("prompt,output,tpot_ms\n8,8,1.0\n", "lacks the column concurrency"),
    ("concurrency,prompt,output\n1,8,8\n", "neither ttft_ms nor tpot_ms"),
    (f"{COLUMNS}\n0,8,8,1.0\n", "no whole number from 1"), (f"{COLUMNS}\n1,x,8,1.0\n", "no number of tokens"),
    (f"{COLUMNS}\n1,8,8,-1.0\n", "no positive number"), (f"{COLUMNS},tp\n1,8,8,1.0,3\n", "cannot be split evenly"),
    (f"{COLUMNS}\n1,131072,8,1.0\n", "more than the 131,072")])
def test_tables_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises((ServingError, TableInputError), match=said):
        read_measured_rows(str(path), SHAPE, SETUP, H100, None, lambda gpus: cluster_for(H100, 1, None, None, None),
                           131_072)


def test_rows_that_contradict_each_other_are_doubted_and_first_tokens_alone_have_no_error(
        rows: list[MeasuredRow]) -> None:
    def said(*factors: float) -> str:
        return str(calibrate_serving([dataclasses.replace(row, tpot_ms=by * row.tpot_ms)
                                      for row, by in zip(rows, factors, strict=False)], rates_of(SETUP)))

    assert "contradict each other" in said(0.3, 4, 0.3, 4) and "contradict" not in said(1, 1, 1, 1)
    alone = said(*[math.nan] * 4)
    assert "nan" not in alone and "first tokens alone" in alone

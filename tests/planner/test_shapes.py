"""``foretrace shapes``: neighbours of a model's sizes, what they gain and why."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import foretrace
from foretrace.commands import app
from kernel_models.device import device
from planner.parallel import shape_search
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.shape_search import designs
from planner.parallel.shapes import ShapeReport, advise, neighbours
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape

PLAN = ParallelPlan(microbatch=2, microbatches=1)
GPT = TransformerShape(layers=2, hidden=2560, heads=32, kv_heads=32, ffn=10_240, vocab=50_257, seq=1024, dtype="fp16")


@pytest.fixture(scope="module")
def report() -> ShapeReport:
    return advise(GPT, PLAN, LayerCosts(device("a100-sxm-40g")), ("heads", "vocab"))


def test_heads_that_kernels_are_built_for_and_whole_rows_of_the_vocabulary_are_quicker(report: ShapeReport) -> None:
    by = {(each.change.setting, each.change.value): each for each in report.advice}
    for better in (("heads", "40 of 64"), ("heads", "20 of 128"), ("vocab", "50,304")):
        assert by[better].gain > 0 and by[better].sure and by[better].low < by[better].gain < by[better].high
    assert by["heads", "64 of 40"].gain < 0
    assert "padded heads" in by["heads", "40 of 64"].why() and "whole 16 bytes" in by["vocab", "50,304"].why()
    assert by["heads", "40 of 64"].parameters == 1
    assert [each.gain for each in report.advice] == sorted((each.gain for each in report.advice), reverse=True)


def test_reasons_add_up_to_the_gain_and_losses_are_shares_of_the_time(report: ShapeReport) -> None:
    for each in report.advice:
        assert sum(each.reasons.values()) == pytest.approx(-each.gain)
    lost = report.cost.lost()
    assert lost["rows"] > 0.1 and lost["padded heads"] > 0 and all(0 <= share < 1 for share in lost.values())


def test_neighbours_keep_what_they_must() -> None:
    grouped = TransformerShape(layers=2, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, seq=1024,
                               gated=True)
    plan = ParallelPlan(tp=4, microbatch=2, microbatches=1)
    found = list(neighbours(grouped, plan))
    heads = [each.shape for each in found if each.setting == "heads"]
    assert heads and all(each.parameters == grouped.parameters and each.heads % 4 == 0 and each.kv_heads % 4 == 0
                         for each in heads)
    assert all(each.shape.ffn % (4 * 8) == 0 for each in found if each.setting == "ffn")
    assert all(each.shape.vocab > grouped.vocab for each in found if each.setting == "vocab")
    assert {each.plan.tp for each in found if each.setting == "tp"} == {2, 8, 16}
    assert (grouped, plan) not in {(each.shape, each.plan) for each in found}


def test_runs_of_blocks_change_with_the_model() -> None:
    run = TransformerShape(layers=1, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, seq=128)
    stacked = replace(run, layers=2, stack=(replace(run, ffn=512), run))
    wider = next(each.shape for each in neighbours(stacked, PLAN) if each.setting == "heads")
    assert all(each.heads == wider.heads for each in wider.stack)
    for each in neighbours(stacked, PLAN):
        if each.setting == "ffn":
            assert each.shape.stack[0].ffn == 512 and each.shape.stack[1].ffn == each.shape.ffn


NARROW = ["dtype=bf16", "heads=1", "width=32"]


def test_the_command_prints_tables_and_json() -> None:
    base = ["shapes", "gpt2", "--preset", "default", *(word for size in NARROW for word in ("--set", size)), "--device",
            "a100-sxm-40g", "--parallel", "microbatch=2"]
    shown = CliRunner().invoke(app, base)
    assert shown.exit_code == 0 and "Changes, the greatest gain first" in shown.stdout, shown.output
    values = json.loads(CliRunner().invoke(app, [*base, "--json", "--top", "2"]).stdout)
    assert len(values["changes"]) == 2 and values["us_per_token"] > 0
    refused = CliRunner().invoke(app, [*base[:-1], "tp=7"])
    assert refused.exit_code == 2 and "cannot be split evenly" in refused.output


def test_facade() -> None:
    found = foretrace.shapes("gpt2", preset="default", device="a100-sxm-40g", settings=NARROW, parallel="microbatch=2")
    assert "µs of a GPU a token" in repr(found)
    changes = found.to_pandas()
    assert list(changes["gain"]) == [each.gain for each in found.advice]
    kernels = found.to_pandas("kernels")
    assert kernels["us_per_token"].sum() == pytest.approx(found.cost.total_us)
    assert set(found.to_pandas("refused").columns) == {"setting", "value", "reason"}


def test_designs_have_as_many_parameters_and_whole_sizes_on_each_rank() -> None:
    grouped = replace(GPT, layers=24, heads=32, kv_heads=8, vocab=50_304, gated=True)
    for plan in (PLAN, ParallelPlan(tp=4, microbatch=2, microbatches=1)):
        found = list(designs(grouped, plan))
        assert len({each.layers for each in found}) > 5 and grouped not in found
        for each in found:
            assert each.parameters == pytest.approx(grouped.parameters, rel=0.01)
            assert each.heads % plan.tp == 0 and each.heads == 4 * each.kv_heads
            assert {each.hidden % (64 * plan.tp), each.ffn % (64 * plan.tp), each.vocab % (64 * plan.tp)} == {0}


def test_a_search_says_by_product_what_each_design_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_search, "WIDTHS", (1.0,))
    monkeypatch.setattr(shape_search, "INNER", (1.0,))
    monkeypatch.setattr(shape_search, "HEAD_SIZES", (128,))
    monkeypatch.setattr(shape_search, "REPLANNED", 1)
    found = shape_search.find_designs(replace(GPT, layers=4), PLAN, LayerCosts(device("a100-sxm-40g")))
    assert found.designs[0].advice.gain > 0.05
    assert {each.advice.change.plan.samples for each in found.designs} == {1, 2, 4}
    for each in found.designs:
        assert sum(each.products.values()) == pytest.approx(each.advice.us / found.us - 1)
        beaten = any(other.advice.us < each.advice.us and other.memory_bytes <= each.memory_bytes
                     for other in found.designs)
        assert each.best != (beaten or (each.advice.us >= found.us and each.memory_bytes >= found.memory_bytes))
    assert len(found.to_pandas()) == len(found.designs)
    with pytest.raises(PlanError, match="decoder of equal blocks"):
        shape_search.find_designs(replace(GPT, stack=(replace(GPT, layers=1), replace(GPT, layers=1, ffn=5120))), PLAN,
                                  LayerCosts(device("a100-sxm-40g")))

"""The packages' public names: all there, all listed, and nothing slow imported for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foretrace
from tracer import lazy
from tracer.parallel_plan import PlanError

TRACE = str(Path(__file__).resolve().parents[1] / "traces" / "bert-cpu")

PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner", "step_views")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    assert name != "foretrace" or {each for each in dir(package) if not each.startswith("__")} == set(package.__all__)
    assert all(getattr(package, public) is not None for public in package.__all__)
    with pytest.raises(AttributeError, match=rf"'{name}' has no attribute 'nonsense'; it has .*{package.__all__[-1]}"):
        _ = package.nonsense


def test_a_slow_package_is_imported_when_something_of_it_is_used(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seldom.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seldom: Any = lazy.late("seldom")
    assert "seldom" not in sys.modules and seldom.value == 1
    monkeypatch.setattr(sys.modules.pop("seldom"), "value", 2)
    assert seldom.value == 2
    with pytest.raises(AttributeError, match="nonsense"):
        _ = seldom.nonsense


def test_a_slow_package_is_where_it_is_looked_for() -> None:
    named = [each for each in map(vars(lazy).get, lazy.__all__) if isinstance(each, ModuleType)]
    assert len(named) == len(lazy.__all__) - 2 and all(importlib.util.find_spec(each.__name__) for each in named)


def test_a_plan_is_asked_for_by_names() -> None:
    pytest.importorskip("torch")
    plans = foretrace.plan("gpt2", 2, preset="tiny", device="a100-sxm-80g", launch_us=5.0)
    table = plans.to_pandas()
    assert repr(plans).startswith("<Plans: gpt2 tiny on 2 GPUs of") and len(table) == len(plans.plans) > 3
    assert table.step_ms.is_monotonic_increasing and (table.low_ms < table.step_ms).all() and not plans.notes
    one = foretrace.plan("gpt2", 2, preset="tiny", device="a100-sxm-80g", only="ddp=2", host=2.0)
    assert len(one.plans) == 1 and "70 µs" in one.notes[0]
    with pytest.raises(PlanError, match="no factor of a time"):
        foretrace.plan("gpt2", 2, host=0.0)
    with pytest.raises(KeyError, match="tables are: plans, refused"):
        plans.to_pandas("steps")


def test_a_prediction_is_asked_for_as_the_command_is(tmp_path: Path) -> None:
    assert foretrace.__version__ and foretrace.device("h200-sxm").name in foretrace.device_names()
    job = foretrace.read(TRACE)
    slower = foretrace.predict(job, [foretrace.edits.ScaleHost(2.0)])
    for found in (foretrace.predict(TRACE, host=2.0), foretrace.predict(job, host=2.0)):
        assert found.step_time_us == slower.step_time_us and found.edits == slower.edits
    swept = foretrace.sweep(TRACE, host=[1.0, 2.0], jobs=1)
    assert swept.table.step_time_us.tolist() == [foretrace.predict(job).step_time_us, slower.step_time_us]
    foretrace.report(TRACE, tmp_path / "page.html")
    assert "bert" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_wrong_arguments_are_told_in_a_sentence(tmp_path: Path) -> None:
    page, job = tmp_path / "page.html", foretrace.read(TRACE)
    for call, says in (
            (lambda: foretrace.replay("runs/a"), r"A job is expected, and str was given: .*foretrace.read"),
            (lambda: foretrace.predict("runs/a"), "runs/a does not exist"),
            (lambda: foretrace.predict(job, foretrace.edits.ScaleHost(0.5)), "Edits are given as a list of them"),
            (lambda: foretrace.predict(job, ["cuda-graphs"]), "Edits are given as a list of them"),
            (lambda: foretrace.predict(job, no_such=1.0), "There is no edit 'no-such'"),
            (lambda: foretrace.predict(job, device="h2000"), "No known device"),
            (lambda: foretrace.ranks(None), "A job is expected"), (lambda: foretrace.ranks(3), "A job is expected"),
            (lambda: foretrace.report(None, page), "A job is expected"),
            (lambda: foretrace.report(3, page), "A job is expected"),
            (lambda: foretrace.ranks(TRACE), "one rank only"), (lambda: foretrace.ranks(Path(TRACE)), "one rank only"),
            (lambda: foretrace.sweep(TRACE), "Nothing varies"),
            (lambda: foretrace.sweep([], clock=[1.0]), "list of paths is empty")):
        with pytest.raises(foretrace.ForetraceError, match=says):
            call()
    mine = tmp_path / "train.py"
    mine.write_text("import torch\n")
    replayed = foretrace.replay(job)
    with pytest.raises(foretrace.ForetraceError, match=r"train\.py"):
        foretrace.write_timeline(replayed, mine)
    assert mine.read_text() == "import torch\n"
    for _ in range(2):
        foretrace.write_timeline(replayed, tmp_path / "timeline.json")

"""The packages' public names: all there, all listed, and nothing slow imported for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tracer import lazy

TRACE = str(Path(__file__).resolve().parents[1] / "traces" / "bert-cpu")

PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner", "step_views")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, public) is not None for public in package.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_is_none_is_told_what_there_is(name: str) -> None:
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match=rf"'{name}' has no attribute 'nonsense'; it has .*{package.__all__[-1]}"):
        _ = package.nonsense


def test_importing_the_packages_imports_nothing_slow() -> None:
    code = (f"import sys, {', '.join(PACKAGES)}\n"
            "print(sorted({'numpy', 'pandas', 'torch', 'numba', 'typer'} & sys.modules.keys()))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


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


def test_the_command_line_starts_without_numpy() -> None:
    code = ("import sys, step_views.cli\n"
            "print(sorted({'numpy', 'pandas', 'torch', 'numba', 'kernel_models.device'} & sys.modules.keys()))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_plan_is_asked_for_by_names() -> None:
    pytest.importorskip("torch")
    import foretrace
    from tracer.parallel_plan import PlanError

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
    import foretrace

    assert foretrace.__version__ and foretrace.device("h200-sxm").name in foretrace.device_names()
    job = foretrace.read(TRACE)
    slower = foretrace.predict(job, [foretrace.edits.ScaleHost(2.0)])
    for found in (foretrace.predict(TRACE, host=2.0), foretrace.predict(job, host=2.0)):
        assert found.step_time_us == slower.step_time_us and found.edits == slower.edits
    swept = foretrace.sweep(TRACE, host=[1.0, 2.0], jobs=1)
    assert swept.table.step_time_us.tolist() == [foretrace.predict(job).step_time_us, slower.step_time_us]
    foretrace.report(TRACE, tmp_path / "page.html")
    assert "bert" in (tmp_path / "page.html").read_text(encoding="utf-8")
    for match, wrong in (("There is no edit 'no-such'", {"no_such": 1.0}), ("No known device", {"device": "h2000"})):
        with pytest.raises(foretrace.ForetraceError, match=match):
            foretrace.predict(job, **wrong)
    with pytest.raises(foretrace.ForetraceError, match="Nothing varies"):
        foretrace.sweep(TRACE)
    with pytest.raises(foretrace.ForetraceError, match="one rank only"):
        foretrace.ranks(TRACE)


def test_wrong_arguments_are_told_in_a_sentence(tmp_path: Path) -> None:
    import foretrace

    with pytest.raises(foretrace.ForetraceError, match=r"A job is expected, and str was given: .*foretrace.read"):
        foretrace.replay("runs/a")  # type: ignore[arg-type]
    with pytest.raises(foretrace.ForetraceError, match="runs/a does not exist"):
        foretrace.predict("runs/a")
    job = foretrace.read(TRACE)
    for wrong in (foretrace.edits.ScaleHost(0.5), ["cuda-graphs"]):
        with pytest.raises(foretrace.ForetraceError, match="Edits are given as a list of them"):
            foretrace.predict(job, wrong)  # type: ignore[arg-type]
    for no_job in (None, 3):
        with pytest.raises(foretrace.ForetraceError, match="A job is expected"):
            foretrace.ranks(no_job)  # type: ignore[arg-type]
        with pytest.raises(foretrace.ForetraceError, match="A job is expected"):
            foretrace.report(no_job, tmp_path / "page.html")  # type: ignore[arg-type]
    with pytest.raises(foretrace.ForetraceError, match="one rank only"):
        foretrace.ranks(Path(TRACE))
    with pytest.raises(foretrace.ForetraceError, match="list of paths is empty"):
        foretrace.sweep([], clock=[1.0])
    mine = tmp_path / "train.py"
    mine.write_text("import torch\n")
    replayed = foretrace.replay(job)
    with pytest.raises(foretrace.ForetraceError, match=r"train\.py"):
        foretrace.write_timeline(replayed, mine)
    assert mine.read_text() == "import torch\n"
    foretrace.write_timeline(replayed, tmp_path / "timeline.json")
    foretrace.write_timeline(replayed, tmp_path / "timeline.json")


def test_only_what_is_public_is_listed() -> None:
    import foretrace

    assert {name for name in dir(foretrace) if not name.startswith("__")} == set(foretrace.__all__)

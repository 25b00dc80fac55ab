"""The pytest plugin: limits of a training step, traced without a GPU, in a user's own test."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_support import ROOT
from said import plain

from foretrace import pytest_plugin
from step_views.check import step_limits as step_store
from step_views.check.step_limits import StepBounds, predict_step

pytest_plugins = ["pytester"]
Run = Callable[..., pytest.RunResult]

STEP = """
import pytest
import torch
from torch import nn

def build(norms=0, wait=None):
    def make():
        layers = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)]
        model = nn.Sequential(*layers, *[nn.LayerNorm(256) for _ in range(norms)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 256, device="cuda")
        def step():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if wait == "item":
                print(loss.item())
            elif wait == "decide" and loss.item() > 1:
                optimizer.step()
            elif wait == "cpu":
                loss.detach().cpu()
            elif wait == "synchronize":
                torch.cuda.synchronize()
        return step
    return make
"""
KEPT = """
import os
@pytest.mark.foretrace(device="h100-sxm", no_added=["launches", "syncs", "memory"])
def test_step(foretrace):
    foretrace(build(int(os.environ.get("NORMS", 0)), os.environ.get("WAIT")))
"""


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    """What a traced step imports: a run within this process forgets what it imported itself, which torch cannot.

    Collecting garbage, which a trace does, is quick where what there is by now is left out.
    """
    names: dict[str, Any] = {}
    exec(STEP, names)
    assert predict_step(names["build"](), StepBounds(device="h100-sxm")).figures.counts["launches"] > 0
    assert step_store.VERSION == 1
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def run(imported: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a folder with STEP and more; keyword arguments are environment variables."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def call(test: str, *options: str, **environment: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=STEP + test)
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            return pytester.runpytest_inprocess("-p", "foretrace.pytest_plugin", "-p", "no:hypothesispytest",
                                                "--strict-markers", *options)

    return call


def stored(pytester: pytest.Pytester) -> dict[str, Any]:
    return json.loads((pytester.path / "foretrace-limits.json").read_text(encoding="utf-8"))


# --- limits --------------------------------------------------------------------------------------------------------


def test_limits_of_marker_and_call_pass_or_are_named(run: Run) -> None:
    """The call adds to the marker, a method's marker to its class's; a step without device work keeps to no limit."""
    result = run("""
@pytest.mark.foretrace(device="h100-sxm", max_step_ms=12, max_gpu_ms=5, max_memory_gb=1)
def test_step(foretrace):
    assert foretrace(build()).device == "h100-sxm"

@pytest.mark.foretrace(device="h100-sxm", max_memory_gb=1)
def test_call(foretrace):
    foretrace(build(), max_memory_gb=0.0001)

@pytest.mark.foretrace(device="h100-sxm", max_memory_gb=0.0001)
class TestStep:
    @pytest.mark.foretrace(max_memory_gb=1)
    def test_step(self, foretrace):
        foretrace(build())

@pytest.mark.foretrace(device="h100-sxm", max_gpu_ms=5)
def test_cpu(foretrace):
    def on_the_cpu():
        model = nn.Linear(4, 4)
        return lambda: model(torch.randn(2, 4)).sum().backward()
    foretrace(on_the_cpu)
""")
    result.assert_outcomes(failed=2, passed=2)
    assert "does nothing on h100-sxm" in result.stdout.str()


def test_each_broken_limit_names_its_top_offenders(run: Run) -> None:
    result = run("""
@pytest.mark.foretrace(device="h100-sxm", max_step_ms=0.001, max_gpu_ms=0.001, max_memory_gb=0.0001)
def test_step(foretrace):
    foretrace(build())
""")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "3 limits broken on h100-sxm" in text
    result.stdout.fnmatch_lines([
        "*step time: * ms predicted (80% between * and *), limit 0.001 ms; decided by: host",
        "*aten::* (host): * ms, *%", "*GPU active time: * ms predicted, limit 0.001 ms", "*aten::mm: * ms, *%",
        "*peak memory: * MB, limit 0.0001 GB", "*parameters: * MB"])
    assert "Traceback" not in text and "test_it.py:" not in text.partition("short test summary")[0]


def test_limits_that_do_not_exist_are_one_sentence(run: Run) -> None:
    wrong = {
        "max_step=12": "There is no limit 'max_step'", "max_step_ms=0": "max_step_ms=0 is no limit",
        "no_added='syncs'": "must be a list", "no_added=['sync']": "cannot have 'sync'",
        "no_added=[['syncs']]": "cannot have ['syncs']", "max_gpu_ms=True": "max_gpu_ms=True is no limit",
        "max_memory_gb=float('inf')": "max_memory_gb=inf is no limit", "profile=3": "profile=3 is no path",
        "device='h9'": "h9", "12": "takes its limits by name"}
    result = run("".join(f"""
@pytest.mark.foretrace({arguments})
def test_{number}(foretrace):
    foretrace(build())
""" for number, arguments in enumerate(wrong)))
    result.assert_outcomes(failed=len(wrong) - 1, errors=1)
    text = result.stdout.str()
    assert all(words in text for words in wrong.values()) and "Traceback" not in text


# --- counts --------------------------------------------------------------------------------------------------------


def test_counts_are_stored_only_on_request_and_within_other_limits(run: Run, pytester: pytest.Pytester) -> None:
    result = run(KEPT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no counts are stored of test_it.py::test_step: run pytest --foretrace-update*"])
    assert not (pytester.path / "foretrace-limits.json").exists()
    run(KEPT, "--foretrace-update").assert_outcomes(passed=1)
    first = stored(pytester)
    run(KEPT).assert_outcomes(passed=1)
    run(KEPT, NORMS="1").assert_outcomes(failed=1)
    limited = KEPT.replace("no_added", "max_gpu_ms=0.0001, no_added")
    run(limited, "--foretrace-update", NORMS="3").assert_outcomes(failed=1)
    assert stored(pytester) == first
    run(KEPT, "--foretrace-update", NORMS="1").assert_outcomes(passed=1)
    run(KEPT, NORMS="1").assert_outcomes(passed=1)
    run(KEPT).assert_outcomes(passed=1)


def test_added_launches_and_waits_name_what_adds_them(run: Run) -> None:
    run(KEPT, "--foretrace-update")
    result = run(KEPT, NORMS="2")
    result.stdout.fnmatch_lines(["*launches: *, stored *: 4 more", "*aten::native_layer_norm: 0 * 2 a step",
                                 "*aten::native_layer_norm_backward: 0 * 2 a step", "*memory: *, stored *",
                                 "*parameters: * MB * MB"])
    for wait, name in (("cpu", "aten::_to_copy"), ("synchronize", "torch.cuda.synchronize"),
                       ("item", "aten::_local_scalar_dense")):
        result = run(KEPT, WAIT=wait)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*syncs: 1, stored 0: 1 more", f"*{name}: 0 * 1 a step"])


def test_operations_in_wider_types_are_found(run: Run) -> None:
    step = KEPT.replace('"memory"', '"wider_types"') + """
def build(norms, wait):
    def make():
        model = nn.Linear(64, 64).cuda().to(getattr(torch, os.environ.get("TYPE", "bfloat16")))
        x = torch.randn(8, 64, device="cuda", dtype=model.weight.dtype)
        return lambda: model(x).square().mean().backward()
    return make
"""
    run(step, "--foretrace-update").assert_outcomes(passed=1)
    run(step, TYPE="float16").assert_outcomes(passed=1)
    for wider, name in (("float32", "fp32"), ("float64", "fp64")):
        result = run(step, TYPE=wider)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"*wider types: * operations compute in {name} or wider that did not",
                                     "*fp16: * 0 operations a step", f"*{name}: 0 * operations a step"])


def test_a_step_that_decides_by_a_value_fails_with_the_line(run: Run) -> None:
    result = run(KEPT, "--foretrace-update", WAIT="decide")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*loss.item() > 1*decides by a number*"])


def test_two_steps_of_a_test_and_another_device(run: Run, pytester: pytest.Pytester) -> None:
    two = """
@pytest.mark.foretrace(no_added=["launches"])
@pytest.mark.parametrize("norms", [0, 1])
def test_step(foretrace, norms):
    foretrace(build(norms), device=DEVICE)
    foretrace(build(norms + 1), device=DEVICE)
"""
    run("DEVICE = 'h100-sxm'" + two, "--foretrace-update").assert_outcomes(passed=2)
    names = [f"test_it.py::test_step[{norms}]{number}" for norms in (0, 1) for number in ("", "#2")]
    assert sorted(stored(pytester)["steps"]) == sorted(names)
    result = run("DEVICE = 'b200'" + two)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*stored counts are of h100-sxm, this step was traced for b200*"])


@pytest.mark.parametrize(("text", "words"), [
    ("{", "cannot be read"), ('{"a": 1}', "not written by foretrace"),
    ('{"format": "foretrace-limits", "version": 7, "steps": {}}', "of version 7"),
    ('{"format": "foretrace-limits", "version": 1, "steps": {"x": 1}}', "is damaged")])
def test_a_store_that_is_none_is_told_and_left(run: Run, pytester: pytest.Pytester, text: str, words: str) -> None:
    path = pytester.path / "foretrace-limits.json"
    path.write_text(text, encoding="utf-8")
    for options in ((), ("--foretrace-update",)):
        result = run(KEPT, *options)
        result.assert_outcomes(failed=1)
        assert words in result.stdout.str()
    assert path.read_text(encoding="utf-8") == text


# --- as a plugin ---------------------------------------------------------------------------------------------------


def test_it_is_an_entry_point_of_pytest() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\n"foretrace.pytest_plugin" = "foretrace.pytest_plugin"\n' in text


def test_nothing_of_foretrace_is_imported_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(request):\n    request.getfixturevalue\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_unconfigure(config):\n"
        "    own = {'tracer.graph', 'kernel_models', 'graph_predictor', 'numpy', 'torch', 'msgspec'}\n"
        "    print('IMPORTED', sorted(own & sys.modules.keys()), 'foretrace.pytest_plugin' in sys.modules)\n",
        encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "foretrace.pytest_plugin", "-p", "no:hypothesispytest", "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""})
    assert "IMPORTED [] True" in plain(said.stdout)


def test_several_processes_do_not_update_one_file() -> None:
    worker = SimpleNamespace(workerinput={"workerid": "gw0"}, addinivalue_line=lambda *_: None,
                             getoption=lambda name: name == pytest_plugin.UPDATE)
    with pytest.raises(pytest.UsageError, match="without -n"):
        pytest_plugin.pytest_configure(worker)  # type: ignore[arg-type]

"""Real traces and golden results, for every test.

Real traces are recorded by others and lie beside the checkout or where FORETRACE_DATA says; tests that need them skip
where they are absent. Golden results change only on request, with a reason:

    pytest tests/graph_predictor/test_replay_real.py --update-golden --reason "why the numbers moved"
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from said import Ran, Run

from tracer import job as jobs

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("FORETRACE_DATA") or HERE.parents[1] / "shared" / "data")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden results; needs --reason")
    parser.addoption("--reason", default="", help="why the golden results change; kept in the file")


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings

    # The same examples each time, and none is wrong because the machine was busy with something else. Others are drawn
    # with --hypothesis-profile default.
    settings.register_profile("alike", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("alike")
    # Typer makes its tree of commands anew for every call, which takes longer than most commands that are tested.
    once = functools.lru_cache(typer.main.get_command)
    typer.main.get_command = typer.testing._get_command = once
    # Thousands of tests and PyTorch's modules live to the end; looking through them was a tenth of the time.
    gc.set_threshold(7_000, 10, 10)
    if config.getoption("--update-golden") and not config.getoption("--reason").strip():
        raise pytest.UsageError("--update-golden needs --reason \"...\": say why the results changed.")


def pytest_collection_finish() -> None:
    # What has been imported and collected lives to the end too: no search for garbage goes through it.
    gc.freeze()


@functools.lru_cache(maxsize=6)
def _job(paths: tuple[str, ...], _files: tuple[tuple[str, int, int], ...], window: int, region: str | None,
         cycle: int | None, read_job: Callable[..., Any]) -> Any:
    return read_job(list(paths), window=window, step_region=region, cycle=cycle)


def _read_once(paths: list[str], window: int, workers: Any, step_region: str | None, cycle: int | None) -> Any:
    """Read a job as commands do, but files that have not changed since the last time are not read again."""
    files = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
    if not files or not all(file.exists() for file in files) or type(workers).__name__ != "ThisProcess":
        return jobs.read_job(paths, window=window, workers=workers, step_region=step_region, cycle=cycle)
    found = sorted((str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files)
    return _job(tuple(paths), tuple(found), window, step_region, cycle, jobs.read_job)


@pytest.fixture(autouse=True)
def recordings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process read a recording once, unless they draw a bar of it on a terminal."""
    console = sys.modules.get("step_views.cli.console")
    if console is not None:
        plain = console._read
        monkeypatch.setattr(console, "_read", lambda *given: (plain if sys.stderr.isatty() else _read_once)(*given))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs ``foretrace`` with arguments in this process."""
    def call(*arguments: object) -> Ran:
        from foretrace.commands import main

        monkeypatch.setattr(sys, "argv", ["foretrace", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            sys.exit(main())
        captured = capsys.readouterr()
        return Ran(left.value.code if isinstance(left.value.code, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture
def quick_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the script that draws their plots, which takes seconds to be put together."""
    pytest.importorskip("vl_convert", reason="pages need the extra `report`")
    monkeypatch.setattr("step_views.pages.page.plot_script", lambda: b"// Vega")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of the shared data (it holds `traces/`); skips where it is absent."""
    if not (DATA / "traces").is_dir():
        pytest.skip(f"{DATA / 'traces'} is absent: set FORETRACE_DATA to the folder that holds traces/")
    return DATA


@pytest.fixture(scope="session")
def real_trace(data_folder: Path) -> Callable[[str], Path]:
    """A function from a name below `traces/` to its path; skips where that file is absent."""
    def find(name: str) -> Path:
        path = data_folder / "traces" / name
        if not path.exists():
            pytest.skip(f"{path} is absent")
        return path
    return find


class Golden:
    """A JSON file of expected results: ``{"reasons": [...], "results": {key: value}}``."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        self.stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {
            "reasons": [], "results": {}}
        self.changed = False

    @property
    def updating(self) -> bool:
        """Whether new results are taken over instead of compared."""
        return bool(self.reason)

    def expected(self, key: str, result: Any) -> Any:
        """The stored result of a key; when updating, ``result`` becomes it. Fails for a key never stored."""
        results = self.stored["results"]
        if self.updating:
            self.changed |= results.get(key) != result
            results[key] = result
        elif key not in results:
            pytest.fail(f"{self.path.name} has no {key!r}: run pytest --update-golden --reason \"...\"")
        return results[key]

    def save(self) -> None:
        """Write the file if anything changed."""
        if self.changed:
            self.stored["reasons"].append(self.reason)
            self.stored["results"] = dict(sorted(self.stored["results"].items()))
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.stored, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def replay_golden(request: pytest.FixtureRequest) -> Any:
    """Expected replayed step times of the real traces, `golden/replay.json`."""
    reason = request.config.getoption("--reason").strip() if request.config.getoption("--update-golden") else ""
    golden = Golden(HERE / "golden" / "replay.json", reason)
    yield golden
    golden.save()

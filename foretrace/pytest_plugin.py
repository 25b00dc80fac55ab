"""Limits for a training step in a test: foretrace's plugin for pytest.

    @pytest.mark.foretrace(device="h100-sxm", max_step_ms=12, max_memory_gb=40, no_added=["launches", "syncs"])
    def test_training_step(foretrace):
        foretrace(build)                   # ``build()`` makes model, optimizer and data and returns the step

The step is traced by shapes, without a GPU and without running its kernels. Only the function that ``build()``
returns is traced. To check the rest of a training loop, or sleeps, run ``foretrace check SCRIPT.py --base COMMIT``.
If foretrace is installed, every pytest run loads this module. Therefore it imports nothing from foretrace until
a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

UPDATE = "--foretrace-update"
STORE = "foretrace_store"
DEFAULT_STORE = "foretrace-limits.json"
_MARKER = ("foretrace(device, max_step_ms, max_gpu_ms, max_memory_gb, no_added, world_size, host_from, profile): "
           "limits of the training step that the test gives to the fixture foretrace, which is traced without a GPU; "
           "what runs beside that function, and sleeps, are not seen")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the ini value."""
    group = parser.getgroup("foretrace", "limits of training steps")
    group.addoption(UPDATE, action="store_true", default=False,
                    help="store the counts of the tests' training steps, which no_added compares with")
    parser.addini(STORE, "file of the stored counts, from the root directory", default=DEFAULT_STORE)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and refuse updates from several processes at once."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption(UPDATE) and hasattr(config, "workerinput"):
        raise pytest.UsageError(f"{UPDATE} writes one file: run it without -n.")


class StepLimits:
    """The fixture's value. It is called with a function that builds a step, and fails the test if a limit is broken."""

    def __init__(self, test: str, store: Path, update: bool, marked: dict[str, Any]) -> None:
        self._test, self._store, self._update, self._marked = test, store, update, marked
        self._calls = 0

    def __call__(self, build: Callable[[], Callable[[], Any]], **limits: Any) -> Any:
        """Trace and predict a step, and compare the prediction with the limits.

        Args:
            build: function that makes model, optimizer and data and returns the step, a function without arguments.
            limits: limits in addition to those of the marker, or instead of them.

        Returns:
            The prediction (``graph_predictor.Prediction``).
        """
        from tracer.errors import ForetraceError  # imported here because pytest loads this module in every run

        try:
            prediction, told = self._check(build, limits)
        except ForetraceError as error:
            told = str(error)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            told = "tracing a step needs PyTorch; install it with: pip install 'foretrace[capture]'."
        if told:  # outside the except clauses, because pytest would also print their exceptions
            from step_views.cli.running import printable  # as above

            pytest.fail(printable(f"foretrace: {told}"), pytrace=False)
        return prediction

    def _check(self, build: Callable[[], Callable[[], Any]], limits: dict[str, Any]) -> tuple[Any, str]:
        """Return the prediction, and which limits are broken."""
        # Imported here because pytest loads this module in every run.
        from step_views.check.step_limits import StepBounds, StepStore, broken_limits, predict_step

        self._calls += 1
        name = self._test if self._calls == 1 else f"{self._test}#{self._calls}"
        store = StepStore(self._store)
        chosen = StepBounds.of({**self._marked, **limits})
        stored = store.read().get(name) if chosen.no_added else None
        step = predict_step(build, chosen)
        broken = broken_limits(step, chosen, None if self._update else stored)
        if chosen.no_added and self._update and not broken:
            store.put(name, step.figures)
        elif chosen.no_added and stored is None and not self._update:
            broken.append(f"no counts are stored of {name}: run pytest {UPDATE} once and commit {self._store.name}")
        if not broken:
            return step.prediction, ""
        what = "1 limit" if len(broken) == 1 else f"{len(broken)} limits"
        return step.prediction, "\n".join([f"{what} broken on {chosen.device}:",
                                           *(f"  {line}" for each in broken for line in each.splitlines()),
                                           *(f"  Note: {note}" for note in step.prediction.notes)])


@pytest.fixture
def foretrace(request: pytest.FixtureRequest) -> StepLimits:
    """Limits of a training step, see ``foretrace.pytest_plugin``."""
    marked: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("foretrace"))):  # the closest one last
        if mark.args:
            pytest.fail("foretrace: the marker takes its limits by name, such as max_step_ms=12.", pytrace=False)
        marked.update(mark.kwargs)
    config = request.config
    return StepLimits(request.node.nodeid, config.rootpath / config.getini(STORE), bool(config.getoption(UPDATE)),
                      marked)

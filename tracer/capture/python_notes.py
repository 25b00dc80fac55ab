"""Counts the Python that one step runs between its operations (``tracer.python_calls``).

As with the notes of collectives, a ``TorchDispatchMode`` watches one step of the profiler's warm-up, which is thrown
away: it says at which operation each count stands. Operations are those the dispatcher runs below autograd.
"""

from __future__ import annotations

from typing import Any

from tracer.python_calls import PythonCalls


class PythonNotes:
    """Counts in program order while ``start`` to ``stop``; ``rows`` is what ``python-calls.json`` stores.

    Attributes:
        rows: name of each operation, and the calls since the one before it; last, with an empty name, those after all.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self.started = False
        self._calls = PythonCalls()
        self._mode: Any = None

    def start(self) -> None:
        """Watch from now on, in this thread."""
        from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

        self.started = True
        rows, calls = self.rows, self._calls

        class WatchPython(TorchDispatchMode):
            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # torch would wrap each call in a function of its own

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(map(is_traceable_wrapper_subclass_type, types)):
                    return NotImplemented  # a DTensor and the like, whose Python is the program's: seen again by parts
                calls.hide()
                try:
                    rows.append((func._schema.name, calls.taken()))
                    return func(*args, **(kwargs or {}))
                finally:
                    calls.show()

        self._mode = WatchPython()
        self._mode.__enter__()
        calls.start()

    def stop(self) -> None:
        """Stop watching; harmless if not started."""
        mode, self._mode = self._mode, None
        if mode is not None:
            self._calls.stop()
            mode.__exit__(None, None, None)
            self.rows.append(("", self._calls.taken()))

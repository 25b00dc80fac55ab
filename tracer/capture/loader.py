"""``capture.wrap``: data loading shows in the trace, whatever the loader is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tracer.capture.session import Capture

Batch = TypeVar("Batch")


class AnnotatedLoader(Iterable[Batch]):
    """Iterates over a loader; while the profiler records, each fetch is a range named as torch's DataLoader names its.

    Everything else (``len``, ``dataset``, ``sampler``, …) is the loader's own.
    """

    def __init__(self, capture: Capture, loader: Iterable[Batch]) -> None:
        self._capture = capture
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        name = f"enumerate(DataLoader)#{type(self._loader).__name__}.__next__"
        batches = iter(self._loader)
        while True:
            try:
                if self._capture.recording:
                    from torch.profiler import record_function

                    with record_function(name):
                        batch = next(batches)
                else:
                    batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

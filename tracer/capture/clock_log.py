"""Clocks and power of the device while a capture measures, one sample a step, outside what is timed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tracer.gpu_state import find_gpus, place_in_use

COLUMNS = ("phase", "sm_mhz", "memory_mhz", "power_w", "temperature_c", "slowed_by")


class ClockLog:
    """Samples the device's state where its management library is installed (``foretrace[gpu]``); else nothing."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._devices = find_gpus(by_library=True)
        self._place = place_in_use(self._devices) if self._devices is not None else None

    def note(self, phase: str) -> None:
        """Take a sample: at the end of a step, with the device synchronised and the next step not begun.

        A driver that does not answer is not asked again: the training goes on without samples.
        """
        if self._devices is None or self._place is None:
            return
        try:
            told = {"phase": phase, **asdict(self._devices.state(self._place))}
        except Exception:  # each library raises its own, and a sample is a courtesy
            self._devices = None
            return
        self.rows.append([told[name] for name in COLUMNS])

    def to_json(self) -> dict[str, Any]:
        """Return the samples as ``context.json`` holds them; empty where there are none."""
        return {"gpu_samples": {"columns": list(COLUMNS), "rows": self.rows}} if self.rows else {}

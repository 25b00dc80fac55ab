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
        """Take a sample: at the end of a step, with the device synchronised and the next step not begun."""
        if self._devices is not None and self._place is not None:
            told = {"phase": phase, **asdict(self._devices.state(self._place))}
            self.rows.append([told[name] for name in COLUMNS])

    def to_json(self) -> dict[str, Any]:
        """Return the samples as ``context.json`` holds them; empty where there are none."""
        return {"gpu_samples": {"columns": list(COLUMNS), "rows": self.rows}} if self.rows else {}

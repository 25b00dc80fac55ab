"""A trace with changes of memory, as the profiler writes them with profile_memory=True."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def recorded_memory(folder: Path, changes: list[tuple[float, int, int]], device: int = 0) -> Path:
    """A step of 1,000 µs with forward, backward and optimizer; changes of memory are (µs, address, bytes)."""
    def event(name: str, start: float, length: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}

    events = [event("ProfilerStep#1", 0, 1000, "user_annotation"), event("aten::mm", 10, 90, **{"Sequence number": 5}),
              event("autograd::engine::evaluate_function: MmBackward0", 300, 300, **{"Sequence number": 5,
                    "Fwd thread id": 1}),
              event("MmBackward0", 310, 280, **{"Sequence number": 5, "Fwd thread id": 1}),
              event("aten::mm", 320, 200), event("Optimizer.step#Adam.step", 700, 100, "user_annotation"),
              event("aten::add_", 710, 50)]
    total = 1_000_000
    for at, address, size in changes:
        total += size
        events.append({"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1,
                       "ts": at, "args": {"Total Allocated": total, "Total Reserved": 2 * total, "Bytes": size,
                                          "Addr": address, "Device Id": device, "Device Type": int(device >= 0)}})
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "schemaVersion": 1}))
    return path

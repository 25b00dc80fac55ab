"""The memory that a process may still use."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def machine_memory() -> dict[str, float]:
    """Return the kernel's account of the machine's memory, bytes: ``MemTotal``, ``MemAvailable``; empty if there is
    none."""
    with suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return {name: float(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {}


def _cached(used: Path) -> float:
    """Return the bytes of cached files that a control group counts as used and releases when memory is short."""
    with suppress(OSError, ValueError):
        found = re.search(r"^(?:total_)?inactive_file (\d+)$", used.with_name("memory.stat").read_text(), re.MULTILINE)
        return float(found.group(1)) if found else 0.0
    return 0.0


def free_memory() -> float | None:
    """Return the bytes that this process may still allocate: the least that the machine, its control group (a
    container, a batch job) and its address-space limit (``ulimit -v``) leave; ``None`` if nothing is known."""
    found = [available] if (available := machine_memory().get("MemAvailable")) is not None else []
    group = Path("/sys/fs/cgroup")
    for most, used in (("memory.max", "memory.current"),
                       ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(float((group / most).read_text()) - float((group / used).read_text()) + _cached(group / used))
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError, IndexError):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            found.append(float(limit - pages * resource.getpagesize()))
    return max(min(found), 0.0) if found else None

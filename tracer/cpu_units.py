"""The instruction sets of a processor that multiply narrow numbers, as its system lists them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

KNOWN = ("amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "avx512f", "avx2",
         "bf16", "asimdhp", "i8mm", "asimddp", "asimd")
"""Names in Linux (arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c). Every processor of the last ten
years has the last one of its kind, which shows that the list was read."""
_LISTS = ("flags", "Features")


def cpu_units(information: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the ``KNOWN`` instruction sets that the processor has; empty if the system does not list them."""
    with suppress(OSError):
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, listed = line.partition(":")
            if name.strip() in _LISTS:
                there = set(listed.split())
                return [unit for unit in KNOWN if unit in there]
    return []

"""Disks that are soon full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A new directory in ``folder`` on a disk of ``size`` ("100k"); skips the test where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=False,
                          capture_output=True) if shutil.which("mount") else None
    if done is None or done.returncode:
        pytest.skip("mounting a small file system needs Linux and root")
    try:
        yield disk
    finally:
        # Lazily: torch leaves the trace that it could not write open.
        subprocess.run(["umount", "-l", str(disk)], check=True)

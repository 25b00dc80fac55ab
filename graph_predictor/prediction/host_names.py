"""The host that a user names: a shipped one, a file of one that was calibrated, or captures on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graph_predictor.prediction.host_steps import host_model
from kernel_models.host.hosts import host_names, is_host_file, read_host, shipped_host
from kernel_models.host.model import HostModel
from tracer.job import Job


def host_by_name(text: str, read: Callable[[str], Job]) -> HostModel:
    """Return what is known of a host.

    Args:
        text: a shipped host's name, a file of ``foretrace calibrate --host``, or captures on one host, separated by
            commas.
        read: of a capture's path its job.

    Raises:
        ForetraceError: a file or capture cannot be read, or has no steps that ran.
    """
    name = text.strip()
    if name in host_names():
        return shipped_host(name)
    if is_host_file(name):
        return read_host(Path(name))
    paths = [path.strip() for path in text.split(",") if path.strip()]
    return host_model([read(path) for path in paths or [text]], text)

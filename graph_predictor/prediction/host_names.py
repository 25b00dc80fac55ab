"""The host that a user names: a shipped one, a file of one that was calibrated, or captures on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from graph_predictor.prediction.host_steps import host_model, recorded_host_steps
from graph_predictor.recorded.damage import damage_notes
from kernel_models.host.events import HostStep
from kernel_models.host.model import HostModel, host_names, is_host_file, read_host, shipped_host
from tracer.errors import ForetraceError
from tracer.job import Job


def host_by_name(text: str, read: Callable[[str], Job]) -> HostModel:
    """Return what is known of a host.

    Args:
        text: a shipped host's name, a file of ``foretrace calibrate --host``, or captures on one host, separated by
            commas.
        read: of a capture's path its job.

    Raises:
        ForetraceError: a file or capture cannot be read, is damaged, or has no steps that ran; or a list is not of
            captures of one kind, each named once.
    """
    name = text.strip()
    if name in host_names():
        return shipped_host(name)
    if is_host_file(name):
        return read_host(Path(name))
    paths = [path.strip() for path in text.split(",") if path.strip()] or [text]
    if len(set(paths)) < len(paths):
        raise ForetraceError(f"--host-from {text}: a capture is named twice; each counts as a program of its own.")
    if len(paths) > 1 and (other := next((one for one in paths if one in host_names() or is_host_file(one)), None)):
        raise ForetraceError(f"--host-from {text}: {other} is a host, and a list is of captures; give it alone, or "
                             "captures alone.")
    steps = [_step_of(path, read) for path in paths]
    launching = [path for path, step in zip(paths, steps, strict=True) if not step.compute_ns.any()]
    if 0 < len(launching) < len(paths):
        raise ForetraceError(f"--host-from {text}: operations of {launching[0]} run on a GPU and those of others on "
                             "their host, which cost it differently; give captures of one kind.")
    return host_model(steps, text)


def _step_of(path: str, read: Callable[[str], Job]) -> HostStep:
    """The step of a capture's first rank, which teaches; errors say of which capture."""
    try:
        graphs = read(path).graphs[:1]
        step = recorded_host_steps(graphs)[0]
        if graphs[0].meta.loss.truncated_bytes:
            raise ForetraceError(f"{damage_notes(graphs)[0]} It would teach what a part of a step costs: record it "
                                 "again, or leave it out.")
        return step
    except ForetraceError as error:
        known = "" if Path(path).exists() or "/" in path or "." in path else (
            f" Hosts that are known by name: {', '.join(host_names())}.")
        said = str(error)
        raise type(error)(f"{said if path in said else f'{path}: {said}'}{known}") from None

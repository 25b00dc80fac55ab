"""The facts of a step as text: the same lines, of the same numbers, in every command and page."""

from __future__ import annotations

from collections.abc import Mapping

from graph_predictor.figures import milliseconds, percent
from graph_predictor.recorded.facts import RecordedFacts


def recorded_line(recorded: RecordedFacts) -> str:
    """Say what was recorded."""
    return f"Recorded step: {recorded.sentence()}"


def step_line(times: str, step_us: float, interval_us: tuple[float, float] | None = None, what: str = "") -> str:
    """Say how long the step takes.

    Args:
        times: which times these are, such as "without the profiler".
        step_us: the steady state's.
        interval_us: its 80% interval, where it was asked for.
        what: what step it is.
    """
    between = "" if interval_us is None else (
        f", 80% between {milliseconds(interval_us[0] * 1e3)} and {milliseconds(interval_us[1] * 1e3)} ms")
    return f"Step {times}: {milliseconds(step_us * 1e3)} ms{between}{f' ({what})' if what else ''}"


def decided_line(gpu_active_us: float | None, bound: str, interval_us: tuple[float, float] | None = None) -> str:
    """Say how long the GPU is active, and what decides the step."""
    decided = f"decided by: {bound}"
    if not gpu_active_us:
        return decided[0].upper() + decided[1:]
    between = "" if interval_us is None or not interval_us[1] else (
        f", 80% between {milliseconds(interval_us[0] * 1e3)} and {milliseconds(interval_us[1] * 1e3)} ms")
    return f"GPU active {milliseconds(gpu_active_us * 1e3)} ms{between}; {decided}"


def savings_line(savings_us: Mapping[str, float], step_us: float) -> str:
    """Say what the step would save if a resource took no time; empty where that is not known."""
    if not savings_us or step_us <= 0:
        return ""
    return "Taking no time would save: " + ", ".join(
        f"{name} {percent(us / step_us)}" for name, us in savings_us.items())

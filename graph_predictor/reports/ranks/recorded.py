"""The times of a recorded job's ranks, with the collectives that ran on the hosts' threads."""

from __future__ import annotations

from graph_predictor.comm.host_collectives import on_host, with_host_collectives
from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.reports.ranks.times import JobTimes, recorded_times
from tracer.job import Job

HOST_CLOCK = ("The collectives ran on the hosts' threads (gloo): when ranks met was recorded under the profiler, and "
              "is shown on that clock.")


def replayed_ranks(job: Job, step: str | None = None, *, profiled: bool = False,
                   known: Replay | None = None) -> tuple[JobTimes, list[str]]:
    """Replay a recorded job so that its ranks can be compared.

    Args:
        job: of one rank or more.
        step: only this step, as ``breakdown`` takes it.
        profiled: times under the profiler.
        known: a replay of its graphs as they are, which serves where no collective ran on a host.

    Returns:
        The times, and what is to be said of them.

    Raises:
        ForetraceError: there is nothing to replay, or no such step.
    """
    graphs = [with_host_collectives(graph) for graph in job.graphs]
    # A host's collectives end when its scheduler lets them: no rule says when, only the recording does.
    host = any(map(on_host, graphs))
    if known is not None and not host:
        return recorded_times(known, step), []
    found = recorded_times(replay(graphs, residuals=host, profiled=profiled or host), step)
    return found, [HOST_CLOCK] if host and not profiled else []

"""The choice of where calls are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tracer.cluster.workers import ClusterError, TaskWorkers, ThisProcess

LOCAL, DASK, RAY = "local", "dask", "ray"
ENGINES = (LOCAL, DASK, RAY)


@contextmanager
def open_workers(engine: str = LOCAL, address: str | None = None) -> Iterator[TaskWorkers]:
    """Give the workers of an engine, and close what was started for them.

    Args:
        engine: "local" for this process; "dask" or "ray" for processes of this machine, one a core.
        address: of a cluster that runs, whose workers must have foretrace and see files under the same paths.

    Raises:
        ClusterError: the cluster cannot be used.
    """
    if engine not in ENGINES:
        raise ClusterError(f"There are no workers {engine!r}; choose one of {', '.join(ENGINES)}.")
    if address is not None and engine == LOCAL:
        raise ClusterError("A scheduler is of a cluster; give --workers dask or ray with it.")
    if engine == LOCAL:
        yield ThisProcess()
    elif engine == DASK:
        from tracer.cluster.dask_engine import dask_workers

        with dask_workers(address) as found:
            yield found
    else:
        from tracer.cluster.ray_engine import ray_workers

        with ray_workers(address) as found:
            yield found

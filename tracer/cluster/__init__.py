"""Where calls for many items are made: in this process, or on the processes of a Dask or Ray cluster.

::

    with open_workers("dask") as workers:                  # or "ray"; an address as well: a cluster that runs
        for found in workers.map(read_kineto, paths):      # in the items' order; a ``Failed`` where there is no result
            ...

A worker has one item at a time, and is sent the next one when its result is here.
"""

from tracer.cluster.workers import (
    ENGINES,
    LOCAL,
    ClusterError,
    Failed,
    LostWorkerError,
    TaskWorkers,
    ThisProcess,
    open_workers,
)

__all__ = [
    "ENGINES", "LOCAL", "ClusterError", "Failed", "LostWorkerError", "TaskWorkers", "ThisProcess", "open_workers",
]

"""Calls for many items, made in this process or on the processes of a Dask or Ray cluster.

::

    with open_workers("dask") as workers:                  # or "ray", or the address of a running cluster
        for found in workers.map(read_kineto, paths):      # in order; ``Failed`` where there is no result
            ...

A worker has one item at a time, and is sent the next one when its result is here.
"""

from tracer.cluster.engines import ENGINES, LOCAL, open_workers
from tracer.cluster.workers import ClusterError, Failed, LostWorkerError, TaskWorkers, ThisProcess

__all__ = [
    "ENGINES", "LOCAL", "ClusterError", "Failed", "LostWorkerError", "TaskWorkers", "ThisProcess", "open_workers",
]

"""The choice of where calls run: in this process, or on the processes of a Dask or Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tracer.cluster.workers import ClusterError, ClusterWorkers, Item, TaskWorkers, ThisProcess
from tracer.errors import reason_of

if TYPE_CHECKING:
    from distributed import Client, Future


ANSWERS_WITHIN = 10.0
"""Longest time, s, in which a scheduler must answer, and then have a worker."""


class DaskWorkers(ClusterWorkers["Future"]):
    """The workers of a Dask client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.size = len(client.nthreads())

    def submit(self, function: Callable[[Item], bytes], item: Item) -> Future:
        """Send the call ``function(item)``, which runs even if an equal call was sent before; return its handle."""
        return self.client.submit(function, item, pure=False)

    def next_done(self, under_way: Collection[Future]) -> tuple[Future, bytes | None]:
        """Wait until one of the calls ends; return it with its result, ``None`` if its worker died."""
        from distributed import KilledWorker, wait

        done = next(iter(wait(list(under_way), return_when="FIRST_COMPLETED").done))
        try:
            return done, done.result()
        except KilledWorker:
            return done, None
        except (CancelledError, OSError) as error:
            raise ClusterError(f"The Dask scheduler went away ({reason_of(error)}); check that it runs, and run the "
                               "command again.") from error


@contextmanager
def dask_client(address: str | None) -> Iterator[Client]:
    """Yield a client of the scheduler at ``address``, or of a new cluster on this machine with one process per core.

    Raises:
        ClusterError: Dask is not installed, or no scheduler or worker answers.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ClusterError("Dask is not installed here; install it with: pip install 'foretrace[cluster]'.") from None
    with ExitStack() as stack:
        if address is None:
            # ``ClusterWorkers`` repeats the call of a dead worker, alone; the scheduler would repeat it next to others.
            where: Any = stack.enter_context(LocalCluster(
                threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL,
                scheduler_kwargs={"allowed_failures": 0}))
        else:
            where = address
        try:
            client = stack.enter_context(Client(where, timeout=ANSWERS_WITHIN))
            client.wait_for_workers(1, timeout=ANSWERS_WITHIN)
        except Exception as error:  # errors of the address, the network or the scheduler's version
            raise ClusterError(f"No Dask cluster answers at {where} ({reason_of(error)}); check the address, and that "
                               "its scheduler and a worker run.") from error
        yield client


class RayWorkers(ClusterWorkers[Any]):
    """The workers of the Ray cluster to which this process is connected, one for each core."""

    def __init__(self) -> None:
        import ray

        self.size = max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def submit(self, function: Callable[[Item], bytes], item: Item) -> Any:
        """Send the call ``function(item)``; return its handle."""
        import ray

        return ray.remote(max_retries=0)(_call).remote(function, item)

    def next_done(self, under_way: Collection[Any]) -> tuple[Any, bytes | None]:
        """Wait until one of the calls ends; return it with its result, ``None`` if its worker died."""
        import ray
        from ray import exceptions

        done = ray.wait(list(under_way), num_returns=1)[0][0]
        try:
            return done, ray.get(done)
        except exceptions.RayTaskError as error:
            raise error.cause from error
        except (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError, exceptions.NodeDiedError):
            return done, None
        except exceptions.RayError as error:
            raise ClusterError(f"The Ray cluster went away ({reason_of(error)}); check that it runs, and run the "
                               "command again.") from error


def _call(function: Callable[[Item], bytes], item: Item) -> bytes:
    return function(item)


@contextmanager
def ray_connection(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at ``address``, or to a new one on this machine with one process per core.

    Raises:
        ClusterError: Ray is not installed, or no cluster answers.
    """
    # Ray reports usage to its makers by default; foretrace reports nothing to anyone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError("Ray is not installed here; install it with: pip install 'foretrace[cluster]'.") from None
    try:
        host, _, port = (address or "").rpartition("//")[2].rpartition(":")
        if host and port.isdigit():  # Ray itself tries for minutes if no machine or port answers
            socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN).close()
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.CRITICAL,
                 **({} if address else {"include_dashboard": False}))
    except Exception as error:  # errors of the address, the network or the cluster's version
        raise ClusterError(f"No Ray cluster answers at {address or 'this machine'} ({reason_of(error)}); check the "
                           "address and that it runs.") from error
    try:
        yield
    finally:
        ray.shutdown()


LOCAL, DASK, RAY = "local", "dask", "ray"
ENGINES = (LOCAL, DASK, RAY)


@contextmanager
def open_workers(workers: str = LOCAL) -> Iterator[TaskWorkers]:
    """Yield the workers that a user names, and close at the end what was started for them.

    Args:
        workers: "local" for this process, "dask" or "ray" for processes of this machine, one for each core. Of a
            running cluster "dask:ADDRESS" or "ray:ADDRESS"; its workers must have foretrace and see the same paths.

    Raises:
        ClusterError: The cluster cannot be used.
    """
    engine, colon, given = workers.partition(":")
    if engine not in ENGINES or (colon and (engine == LOCAL or not given)):
        raise ClusterError(f"There are no workers {workers!r}; choose one of {', '.join(ENGINES)}, dask:ADDRESS and "
                           "ray:ADDRESS.")
    address = given or None
    if engine == LOCAL:
        yield ThisProcess()
    elif engine == DASK:
        with dask_client(address) as client:
            yield DaskWorkers(client)
    else:
        with ray_connection(address):
            yield RayWorkers()

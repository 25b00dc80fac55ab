"""Workers of a Ray cluster: processes of this machine, or a cluster that runs elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tracer.cluster.workers import ClusterError, ClusterWorkers, Item
from tracer.errors import reason_of


class RayWorkers(ClusterWorkers[Any]):
    """The workers of the Ray cluster that this process is connected to: one a core."""

    def __init__(self) -> None:
        import ray

        self._workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)

    @property
    def size(self) -> int:
        """Number of worker processes."""
        return self._workers

    def submit(self, function: Callable[[Item], bytes], item: Item) -> Any:
        """Send a call."""
        import ray

        return ray.remote(max_retries=0)(_call).remote(function, item)

    def next_done(self, under_way: Collection[Any]) -> tuple[Any, bytes | None]:
        """Wait until one of the calls is done; its result, or ``None`` if its worker died."""
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
def ray_workers(address: str | None) -> Iterator[RayWorkers]:
    """Give the workers of the cluster at ``address``, or of one of this machine, a process a core.

    Raises:
        ClusterError: Ray is not installed, or no cluster answers.
    """
    with ray_connection(address):
        yield RayWorkers()


@contextmanager
def ray_connection(address: str | None) -> Iterator[None]:
    """Connect this process to the cluster at ``address``, or to one of this machine. Raises as ``ray_workers``."""
    # Ray reports its use to its makers unless told otherwise; foretrace reports nothing to anybody.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError("Ray is not installed here; install it with: pip install 'foretrace[cluster]'.") from None
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.CRITICAL,
                 **({} if address else {"include_dashboard": False}))
    except Exception as error:  # of the address's form, of the network, of the cluster's version
        raise ClusterError(f"No Ray cluster answers at {address or 'this machine'} ({reason_of(error)}); check the "
                           "address and that it runs.") from error
    try:
        yield
    finally:
        ray.shutdown()

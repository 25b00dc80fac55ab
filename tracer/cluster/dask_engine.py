"""Workers of a Dask cluster: processes of this machine, or a scheduler that runs elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tracer.cluster.workers import ClusterError, ClusterWorkers, Item
from tracer.errors import reason_of

if TYPE_CHECKING:
    from distributed import Client, Future

ANSWERS_WITHIN = "10s"
"""How long a scheduler may take to answer, and to have a worker."""


class DaskWorkers(ClusterWorkers["Future"]):
    """The workers of a Dask client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._workers = len(client.nthreads())

    @property
    def size(self) -> int:
        """Number of worker processes."""
        return self._workers

    def submit(self, function: Callable[[Item], bytes], item: Item) -> Future:
        """Send a call; it is made anew even if the same one was made before."""
        return self.client.submit(function, item, pure=False)

    def next_done(self, under_way: Collection[Future]) -> tuple[Future, bytes | None]:
        """Wait until one of the calls is done; its result, or ``None`` if its worker died."""
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
def dask_workers(address: str | None) -> Iterator[DaskWorkers]:
    """Give the workers of the scheduler at ``address``, or of a cluster of this machine, a process a core.

    Raises:
        ClusterError: Dask is not installed, or no scheduler or worker answers.
    """
    with dask_client(address) as client:
        yield DaskWorkers(client)


@contextmanager
def dask_client(address: str | None, **settings: Any) -> Iterator[Client]:
    """Give a client of the scheduler at ``address``, or of a cluster of this machine. Raises as ``dask_workers``."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ClusterError("Dask is not installed here; install it with: pip install 'foretrace[cluster]'.") from None
    with ExitStack() as stack:
        if address is None:
            # A call whose worker died is not made again by the scheduler, beside others, but by ``ClusterWorkers``.
            where: Any = stack.enter_context(LocalCluster(
                threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL,
                scheduler_kwargs={"allowed_failures": 0}))
        else:
            where = address
        try:
            client = stack.enter_context(Client(where, timeout=ANSWERS_WITHIN, **settings))
            client.wait_for_workers(1, timeout=ANSWERS_WITHIN)
        except Exception as error:  # of the address's form, of the network, of the scheduler's version
            raise ClusterError(f"No Dask cluster answers at {where} ({reason_of(error)}); check the address, and that "
                               "its scheduler and a worker run.") from error
        yield client

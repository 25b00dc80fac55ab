"""The time of collectives: topologies as data, three levels of models, calibration, and choosing a backend."""

from kernel_models.collectives.call import (
    CollectiveBatch,
    CollectiveCall,
    CollectiveKind,
    CommError,
    Placement,
    bus_factor,
    collective_kind,
    uneven_all_to_all,
)
from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
from kernel_models.collectives.price import CollectiveModel, price_calls, topology_of
from kernel_models.collectives.profile import CommProfile
from kernel_models.collectives.times import CommTimes, Level
from kernel_models.collectives.topology import Topology, topology

__all__ = [
    "CollectiveBatch",
    "CollectiveCall",
    "CollectiveKind",
    "CollectiveMeasurements",
    "CollectiveModel",
    "CommError",
    "CommProfile",
    "CommTimes",
    "Level",
    "Placement",
    "Topology",
    "bus_factor",
    "collective_kind",
    "make_measurements",
    "price_calls",
    "topology",
    "topology_of",
    "uneven_all_to_all",
]

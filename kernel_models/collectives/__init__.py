"""The time of collectives: topologies as data, three levels of models, calibration, and choosing a backend.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from kernel_models.collectives.call import (
        CollectiveBatch,
        CollectiveCall,
        CollectiveKind,
        CommError,
        CommTimes,
        Level,
        Placement,
        bus_factor,
        collective_kind,
        uneven_all_to_all,
    )
    from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
    from kernel_models.collectives.price import CollectiveModel, planned_topology, price_calls, price_once, topology_of
    from kernel_models.collectives.profile import CommProfile
    from kernel_models.collectives.topology import Topology, find_topology

_MODULES = {
    "call": ("CollectiveBatch", "CollectiveCall", "CollectiveKind", "CommError", "Placement", "bus_factor",
             "collective_kind", "uneven_all_to_all", "CommTimes", "Level"),
    "measurements": ("CollectiveMeasurements", "make_measurements"),
    "price": ("CollectiveModel", "planned_topology", "price_calls", "price_once", "topology_of"),
    "profile": ("CommProfile",),
    "topology": ("Topology", "find_topology"),
}
__getattr__, __dir__ = lazily(__name__, {
    name: f"kernel_models.collectives.{module}" for module, names in _MODULES.items() for name in names})

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
    "find_topology",
    "make_measurements",
    "planned_topology",
    "price_calls",
    "price_once",
    "topology_of",
    "uneven_all_to_all",
]

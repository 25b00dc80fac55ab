"""The machine behind measurements: rows of different GPUs or clusters are never pooled.

A row names its GPU as the driver or the table writes it, and its system (a table's ``topology`` or ``cluster`` column).
Rows that name neither are taken as of the topology that the user names.
"""

from __future__ import annotations

import re

import numpy as np

from kernel_models.collectives.call import CommError
from kernel_models.collectives.measurements import CollectiveMeasurements
from kernel_models.collectives.topology import Topology
from kernel_models.device import DeviceError, DeviceSpec, device, resolve_device
from kernel_models.device_choice import find_device
from tracer.shape_only.devices import device_names

MOST_NAMED = 6
"""Names that a sentence lists."""


def same_gpu(name: str, on: Topology) -> bool:
    """Return whether a reported GPU may be the topology's: the same, one with another memory, or a short name of
    both."""
    wanted = find_device(on.node.device)
    found = _resolved(name)
    if found is not None and (found.name == wanted.name or set(found.short_names) == set(wanted.short_names)):
        return True
    return name.strip().lower() in {short.lower() for short in wanted.short_names}


def gpu_of_system(name: str) -> str:
    """The GPU in a system's name, such as "h100" of "h100_dgx"; empty where it names none."""
    for part in re.split(r"[\s_/]+", name.strip()):
        if part and part.lower() != "cpu" and _resolved(part) is not None:
            return part
    return ""


def of_cluster(rows: CollectiveMeasurements, on: Topology, device_name: str | None = None,
               system: str | None = None) -> tuple[CollectiveMeasurements, list[str]]:
    """The rows that were measured on the topology's GPU, and a note where others were left out.

    Args:
        rows: Measurements, possibly of several machines.
        on: The cluster that is to be fitted.
        device_name: Only rows of this GPU, as the table writes it or as ``resolve_device`` knows it.
        system: Only rows of this system, as the table writes it.

    Raises:
        CommError: No row is left, or the rows left are of several GPUs or systems.
    """
    total = len(rows)
    if not total:
        return rows, []
    kept = rows
    if system is not None:
        kept = _keep(kept, [_plain(name) == _plain(system) for name in kept.system],
                     f"No row is of system {system!r}; there are {_listed(kept.system)}.")
    if device_name is not None:
        kept = _keep(kept, [_alike(name, device_name) for name in kept.device],
                     f"No row is of device {device_name!r}; there are {_listed(kept.device)}.")
    gpus = [name or gpu_of_system(where) for name, where in zip(kept.device, kept.system, strict=True)]
    # A name that no device file has is taken at the user's word, and only then.
    fits = {name: not name or same_gpu(name, on) or (device_name is not None and _resolved(name) is None)
            for name in set(gpus)}
    keep = [fits[name] for name in gpus]
    kept = _keep(kept, keep, f"The measurements are of {_listed(gpus)}, and {on.node.name} has {on.node.device}; name "
                             "the topology they were measured on.")
    for option, names in (("device", _devices(kept)), ("system", sorted(set(filter(None, kept.system))))):
        if len(names) > 1:
            raise CommError(f"The measurements are of several {option}s ({_listed(names)}); name one with --{option}.")
    if len(kept) == total:
        return kept, []
    left = _listed([name for name in {*rows.device, *rows.system} if name not in {*kept.device, *kept.system}])
    return kept, [f"{len(kept):,} of {total:,} measurements are of {on.node.name}; the others were left out ({left})."]


def _keep(rows: CollectiveMeasurements, keep: list[bool], refusal: str) -> CollectiveMeasurements:
    if not any(keep):
        raise CommError(refusal)
    return rows if all(keep) else rows.take(np.array(keep, np.bool_))


def _devices(rows: CollectiveMeasurements) -> list[str]:
    """One name for each different GPU of the rows."""
    found: dict[str, str] = {}
    for name in sorted(set(filter(None, rows.device))):
        spec = _resolved(name)
        found.setdefault(spec.name if spec else _plain(name), name)
    return list(found.values())


def _alike(name: str, wanted: str) -> bool:
    if not name or _plain(name) == _plain(wanted):
        return bool(name)
    a, b = _resolved(name), _resolved(wanted)
    return a is not None and b is not None and a.name == b.name


def _resolved(name: str) -> DeviceSpec | None:
    if not name.strip():
        return None
    try:
        return device(name) if name.strip().lower() in device_names() else resolve_device(name)
    except DeviceError:
        return None


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def _listed(names: list[str]) -> str:
    found = sorted(set(filter(None, names)))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (", ".join(found[:MOST_NAMED]) + more) or "rows that name none"

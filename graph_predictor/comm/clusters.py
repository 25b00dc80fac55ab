"""The cluster that a user names, and measurements of its collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from kernel_models.collectives import CollectiveModel, CommError, CommProfile, Topology, find_topology
from kernel_models.collectives.bandwidths import BusBandwidths
from tracer.table_input import FORMATS

AUTO = "auto"
"""``--comm-choices auto``: choose among the backends of --comm-profile; without it, of NCCL's algorithms by formula."""


def measured_file(profile: str | None, choices: str | None) -> str | None:
    """Return the option of the two that names measurements, if any. Raises ``CommError`` if both do."""
    if choices not in (None, AUTO) and profile is not None:
        raise CommError(f"--comm-choices {choices} and --comm-profile {profile} both name measured collectives; give "
                        f"one of them, or --comm-choices {AUTO} for the backends of the profile.")
    return profile if choices in (None, AUTO) else choices


def bandwidths_of(profile: str | None, choices: str | None) -> BusBandwidths | None:
    """Return measured bus bandwidths, if ``profile`` is a text or table of them rather than a profile; else ``None``.

    Raises:
        CommError: a bandwidth is out of range, or several backends are asked for.
        TableInputError: the table cannot be read, or has no bandwidths.
    """
    if profile is None:
        return None
    table = PurePath(profile).suffix.lower() in FORMATS
    found = BusBandwidths.read(profile) if table else BusBandwidths.parse(profile)
    if found is not None and choices is not None:
        raise CommError("Bandwidths say nothing of several backends; leave one of --comm-profile and --comm-choices "
                        "out.")
    return found


def cluster_of(name: str | None, profile: str | None, backend: str | None, choices: str | None,
               usual: Callable[[], Topology] | None = None) -> CollectiveModel:
    """Return the cluster of a command's options. ``backend`` is the backend of the collectives; with ``choices``, the
    backend of all collectives that no other does faster. ``choices`` is ``AUTO`` or the path of a profile with several
    backends: the fastest does each collective. ``usual`` makes the topology if nothing names one. Raises ``CommError``
    if a file or name is unknown, or two options name measurements."""
    measured = measured_file(profile, choices)
    if (bandwidths := bandwidths_of(profile, choices)) is not None:
        if name is not None:
            return CollectiveModel(find_topology(name), None, backend, bandwidths=bandwidths)
        if usual is None:
            raise CommError("Bandwidths say nothing of nodes and links; give --topology too.")
        return CollectiveModel(usual(), None, backend, bandwidths=bandwidths)
    if name is None and measured is None and usual is not None:
        return CollectiveModel(usual(), None, backend, choices is not None)
    known, where = profile_on(measured, name, None)
    if choices is not None and measured is not None and len(known.backends) < 2:
        has = ", ".join(known.backend_names()) or "no backend"
        raise CommError(f"{measured} has {has} alone, and nothing to choose from; join measurements of several with "
                        "'foretrace comm backends'.")
    return CollectiveModel(where, known, backend, choices is not None)


def profile_on(path: str | None, name: str | None, oversubscription: float | None) -> tuple[CommProfile, Topology]:
    """Return a profile of measured collectives and the requested cluster. Without a file the profile rests on data
    sheets alone; without a name the cluster is the profile's own. Raises ``CommError`` if neither is given, or the
    profile is of other nodes."""
    if path is None:
        if name is None:
            raise CommError("Nothing says where the collective runs; give --topology, --comm-profile or both.")
        where = find_topology(name, oversubscription)
        return CommProfile(where), where
    profile = CommProfile.load(path)
    where = profile.topology
    if name or oversubscription:
        where = find_topology(name or where.name, oversubscription)
    if where.node.name != profile.topology.node.name:
        raise CommError(f"{path} was measured on {profile.topology.node.name} nodes and says nothing about "
                        f"{where.node.name}; leave one of --comm-profile and --topology out.")
    return profile, where

"""The cluster that a user names, and what was measured on it."""

from __future__ import annotations

from kernel_models.collectives import CommError, CommProfile, Topology, topology


def profile_on(path: str | None, name: str | None, oversubscription: float | None) -> tuple[CommProfile, Topology]:
    """The measured collectives (of data sheets alone without a file), and the cluster that was asked for.

    Args:
        path: of a communication profile.
        name: of a topology; by default the profile's own.
        oversubscription: of its network, where it is not the usual one.

    Raises:
        CommError: neither is given, or the profile is of other nodes.
    """
    if path is None:
        if name is None:
            raise CommError("Nothing says where the collective runs; give --topology, --comm-profile or both.")
        where = topology(name, oversubscription)
        return CommProfile(where), where
    profile = CommProfile.load(path)
    where = topology(name or profile.topology.name, oversubscription) if name or oversubscription else profile.topology
    if where.node.name != profile.topology.node.name:
        raise CommError(f"{path} was measured on {profile.topology.node.name} nodes and says nothing about "
                        f"{where.node.name}; leave one of --comm-profile and --topology out.")
    return profile, where

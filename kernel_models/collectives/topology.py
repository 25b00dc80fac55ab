"""Nodes and networks as data: one TOML file per node type in ``kernel_models/topologies``, every figure with its
source.

``topology("dgx-h100")`` is one node, ``topology("dgx-h100x16")`` sixteen of them on the node's usual network, and
``topology("dgx-a100x4@roce-100")`` names another network. To add a node type, add a file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from kernel_models.collectives.call import CommError, Placement
from kernel_models.device_figures import ARCHITECTURES, check_architecture
from kernel_models.sourced_figures import Figure, figure_in, found_instead, sources_in, table_in, text_in
from tracer.input_file import DecodeError, convert, from_toml, read_input, why_unopened

FOLDER = Path(__file__).resolve().parents[1] / "topologies"
NETWORKS = "networks"
MOST_NODES = 100_000  # chosen: more than any cluster has
_OWN = re.compile(r"(?P<file>.+\.toml)(?:x(?P<count>\d{1,9}))?(?:@(?P<network>[A-Za-z0-9-]+))?", re.IGNORECASE)
"""Pattern of the user's own file as the node: "mine.toml", "mine.tomlx4", "mine.tomlx4@roce-100"."""
MOST_OVERSUBSCRIPTION = 1e6  # chosen, against typing errors
_MOST_OF_A_NODE = 10_000  # chosen: more than any node has
_NODE_TEXTS = ("name", "device", "architecture", "link", "network")
_NODE: Mapping[str, Figure] = MappingProxyType({
    "gpus": Figure(1, _MOST_OF_A_NODE, "GPUs", whole=True),
    "peer_gbps": Figure(0.1, 20_000, "10⁹ bytes/s, one way"),
    "nics": Figure(1, _MOST_OF_A_NODE, "cards", whole=True),
    "in_switch_reduction": Figure(0, 1, "1 where the switch adds up", whole=True),
})
"""Figures of a node, with the range and unit of each."""
_NETWORK: Mapping[str, Figure] = MappingProxyType({
    "card_gbps": Figure(0.01, 10_000, "10⁹ bytes/s, one way"),
    "payload_share": Figure(0.1, 1, "share of the bytes on the wire"),
    "extra_latency_us": Figure(0, 1_000_000, "µs"),
    "oversubscription": Figure(1, MOST_OVERSUBSCRIPTION, "times, 1 for full bisection"),
})
"""Figures of a network, with the range and unit of each."""
LINKS = ("nvswitch", "nvlink-mesh", "pcie", "loopback")
"""Connections between a node's GPUs: through a switch, by links between pairs, through host bridges, or within a
host."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """One kind of server.

    Attributes:
        name: name that commands accept.
        device: its GPU, a name of ``kernel_models.device``.
        architecture: architecture of the GPU; NCCL's constants are kept by architecture.
        link: one of ``LINKS``.
        network: name of its usual network.
        gpus: GPUs of a node.
        peer_gbps: bandwidth from one GPU to all others of its node together, one way, 10⁹ bytes/s.
        nics: network cards that carry collectives; GPUs share them evenly.
        in_switch_reduction: whether the switch reduces (NVLink SHARP, NCCL's NVLS).
        sources: the source of each figure.
    """

    name: str
    device: str
    architecture: str
    link: str
    network: str
    gpus: int
    peer_gbps: float
    nics: int
    in_switch_reduction: bool
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Network:
    """A network that joins nodes. ``card_gbps`` is one card's line rate one way, 10⁹ bytes/s; ``payload_share`` the
    part of it that remains after headers.

    ``rail``: cards of equal number share a switch, so that a GPU's own card carries its traffic. With
    ``oversubscription`` f, the nodes together reach 1/f of the sum of their cards.
    """

    name: str
    title: str
    rail: bool
    card_gbps: float
    payload_share: float
    extra_latency_us: float
    oversubscription: float
    sources: Mapping[str, str] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Topology:
    """``nodes`` servers of one type on one network."""

    node: NodeType
    nodes: int
    network: Network

    @property
    def name(self) -> str:
        """Return the cluster's name, in the form that ``find_topology`` reads."""
        count = f"x{self.nodes}" if self.nodes > 1 else ""
        return f"{self.node.name}{count}" + ("" if self.network.name == self.node.network else f"@{self.network.name}")

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole cluster."""
        return self.node.gpus * self.nodes

    def with_links(self, factor: float) -> Topology:
        """Return the cluster with the bandwidth of links within nodes and of cards multiplied by ``factor``."""
        if factor == 1.0:
            return self
        return replace(self, node=replace(self.node, peer_gbps=self.node.peer_gbps * factor),
                       network=replace(self.network, card_gbps=self.network.card_gbps * factor))

    def node_gbps(self, ranks: int) -> float:
        """Return the bandwidth of ``ranks`` ranks of one node to other nodes together, one way, 10⁹ bytes/s.

        Each GPU has its share of the cards; a group with few ranks on a node uses only theirs, at least one card.
        """
        cards = min(float(self.node.nics), max(1.0, ranks * self.node.nics / self.node.gpus))
        network = self.network
        return cards * network.card_gbps * network.payload_share / network.oversubscription

    def place(self, ranks: Iterable[int]) -> Placement:
        """Return the placement of the ranks of a group; ranks fill the nodes in order.

        Raises:
            CommError: A rank is named twice, or there is no GPU for it.
        """
        if isinstance(ranks, range) and ranks.step > 0 and ranks and ranks[0] >= 0 and ranks[-1] < self.gpus:
            return _placed(ranks, self.node.gpus)
        counts: dict[int, int] = {}
        seen: set[int] = set()
        for rank in ranks:
            if rank in seen or not 0 <= rank < self.gpus:
                raise CommError(f"Rank {rank} {'is named twice' if rank in seen else f'has no GPU in {self.name}'}; "
                                f"name different ranks from 0 to {self.gpus - 1}.")
            seen.add(rank)
            counts[rank // self.node.gpus] = counts.get(rank // self.node.gpus, 0) + 1
        return Placement(tuple(counts[node] for node in sorted(counts)))

    def first(self, ranks: int) -> Placement:
        """Return the placement of the first ``ranks`` GPUs. Raises ``CommError`` if there are fewer."""
        if ranks < 1:
            raise CommError(f"A group has at least one rank, and {ranks} were asked for; give 1 to {self.gpus}.")
        if ranks > self.gpus:
            raise CommError(f"{ranks} ranks do not fit on {self.name}, which has {self.gpus} GPUs; name a larger "
                            "topology.")
        return Placement.even(ranks, self.node.gpus)


@lru_cache(maxsize=4096)
def _placed(ranks: range, gpus: int) -> Placement:
    """Return the placement of equally spaced ranks on nodes of ``gpus`` GPUs each."""
    _, counts = np.unique(np.arange(ranks.start, ranks.stop, ranks.step) // gpus, return_counts=True)
    return Placement(tuple(counts.tolist()))


def node_names() -> list[str]:
    """Return the names of all node types, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != NETWORKS)


@lru_cache(maxsize=1)
def networks() -> Mapping[str, Network]:
    """Return all networks by name."""
    return MappingProxyType(_networks(FOLDER / f"{NETWORKS}.toml", "network"))


def _networks(file: Path, table_name: str) -> dict[str, Network]:
    """Read the networks in a file's table. Raise ``CommError`` for a figure that is missing, no number or unsourced."""
    data = _toml(file)
    found = {}
    for name in data[table_name] if isinstance(data.get(table_name), dict) else ():
        try:
            table = table_in(data[table_name], name)
            figures, sources = _figures(table, name, _NETWORK, sources_in(data), ("title", "rail"))
            if not isinstance(table.get("rail"), bool):
                raise ValueError(found_instead(f"{name}.rail", table.get("rail"), "true or false"))
            title = text_in(table, "title", f"{name}.title")
            found[name] = Network(name, title, table["rail"], figures["card_gbps"],
                                  figures["payload_share"], figures["extra_latency_us"], figures["oversubscription"],
                                  sources)
            _checked_network(found[name])
        except ValueError as error:
            raise CommError(f"{file} describes no network {name!r}: {error}; compare it with a shipped one "
                            "(kernel_models/topologies/networks.toml).") from None
    return found


@cache
def node_type(name: str) -> NodeType:
    """Return the node type with this name. Raises ``CommError`` if there is none; the error lists similar names."""
    path = FOLDER / f"{name}.toml"
    if not re.fullmatch(r"[a-z0-9-]+", name) or name == NETWORKS or not path.is_file():
        near = difflib.get_close_matches(name, node_names(), n=3)
        help_text = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(node_names())}."
        raise CommError(f"There is no node type {name!r}; {help_text}")
    return read_node(path)


def read_node(path: Path) -> NodeType:
    """Read one node type's file. Raises ``CommError`` where a figure is missing, no number, or without a source."""
    try:
        return node_of(_toml(path), path.parent)
    except ValueError as error:
        raise CommError(f"{path} is no node type: {error}; compare it with a shipped one (foretrace topologies "
                        "dgx-h200 --toml).") from None


def node_of(data: Mapping[str, Any], folder: Path) -> NodeType:
    """Return the node type of a file's values; its device may be a file below ``folder``. Raises ``ValueError`` where a
    figure is missing, no number, or without a source."""
    figures, sources = _figures(table_in(data, "figures"), "figures", _NODE, sources_in(data))
    name, device, architecture, link, network = (text_in(data, key, key) for key in _NODE_TEXTS)
    check_architecture(architecture, (*ARCHITECTURES["nvidia"], *ARCHITECTURES["amd"], "host"))
    device = str(folder / device) if device.endswith(".toml") else device
    return _checked_node(NodeType(
        name, device, architecture, link, network, int(figures["gpus"]), figures["peer_gbps"],
        int(figures["nics"]), bool(figures["in_switch_reduction"]), sources))


def _checked_node(node: NodeType) -> NodeType:
    """Return the node type if its texts are texts and no divisor among its figures is zero. Raises ``ValueError``."""
    texts = (node.name, node.device, node.architecture, node.link, node.network)
    if not all(isinstance(text, str) for text in texts) or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", node.name):
        raise ValueError("a name is no text, or its own has other characters than a-z, 0-9 and -")
    if node.link not in LINKS:
        raise ValueError(f"its link is {node.link!r}, which is none of {', '.join(LINKS)}")
    if not (1 <= node.gpus <= _MOST_OF_A_NODE and 0 < node.peer_gbps < math.inf
            and 1 <= node.nics <= _MOST_OF_A_NODE):
        raise ValueError("it has no GPU, no card, or no bandwidth between its GPUs")
    return node


class _Stored(msgspec.Struct):
    """The values that ``topology_state`` returns for a user's own topology."""

    nodes: int
    node: NodeType
    network: Network


def find_topology(name: str, oversubscription: float | None = None) -> Topology:
    """Return the cluster of a name: NODE[xCOUNT][@NETWORK], such as "dgx-h100", "dgx-h100x16" or "dgx-a100x4@roce-100".

    NODE may also be a user's TOML file in the format of the shipped files; it may also define ``[networks.NAME]``.

    Raises:
        CommError: An unknown node type or network, a count that is no number, or a file that is not complete.
    """
    if (own := _OWN.fullmatch(name.strip())) is not None:
        return _own_topology(Path(own["file"]), own["count"], own["network"], oversubscription)
    return _known_topology(name, oversubscription)


def topology_state(where: Topology) -> str | dict[str, Any]:
    """Return what a file stores of a topology: the name of a shipped one, all figures of a user's own."""
    shipped = where.node.name in node_names() and where.node == node_type(where.node.name)
    if shipped and where.network.name in networks():
        return where.name
    return {"nodes": where.nodes, "node": figures_of(where.node), "network": figures_of(where.network)}


def topology_of_state(state: Any, oversubscription: float) -> Topology:
    """Return the topology that ``topology_state`` stored. Raises ``CommError`` or ``ValueError`` for other values."""
    if isinstance(state, str):
        return _known_topology(state, oversubscription)
    try:
        found = convert(state, _Stored)
    except DecodeError as error:
        raise CommError(f"The topology is not complete: {error}") from None
    return Topology(_checked_node(found.node), _count(found.nodes, found.node.name),
                    _oversubscribed(_checked_network(found.network), oversubscription))


def _checked_network(network: Network) -> Network:
    """Return the network if no divisor among its figures is zero. Raises ``ValueError``."""
    if not (0 < network.card_gbps < math.inf and 0 < network.payload_share <= 1
            and 1 <= network.oversubscription <= MOST_OVERSUBSCRIPTION and 0 <= network.extra_latency_us < 1e12):
        raise ValueError("a bandwidth is not above 0, a share not up to 1, or an oversubscription below 1")
    return network


@lru_cache(maxsize=256)
def _known_topology(name: str, oversubscription: float | None) -> Topology:
    text, _, network_name = name.strip().lower().partition("@")
    node_name, count = text, 1
    if text not in node_names() and (match := re.fullmatch(r"(.+)x([-+]?\d{1,9})", text)):
        node_name, count = match.group(1), int(match.group(2))
    elif text not in node_names() and text.rpartition("x")[0] in node_names():
        raise CommError(f"{text.rpartition('x')[2]!r} of {name!r} is no count of nodes; write one such as "
                        f"{text.rpartition('x')[0]}x4.")
    _count(count, name)
    return _joined(node_type(node_name), count, network_name, networks(), oversubscription)


def _own_topology(file: Path, count: str | None, network_name: str | None,
                  oversubscription: float | None) -> Topology:
    node = read_node(file)
    if node.name in node_names() and node != node_type(node.name):
        raise CommError(f"{file} calls its node {node.name}, which is the name of a known one with other figures; give "
                        "it a name of its own.")
    known = {**networks(), **_networks(file, "networks")}
    return _joined(node, _count(int(count or 1), str(file)), network_name, known, oversubscription)


def _count(count: int, name: str) -> int:
    if not 1 <= count <= MOST_NODES:
        raise CommError(f"{name!r} has {count} nodes; a topology has 1 to {MOST_NODES:,}.")
    return count


def _joined(node: NodeType, count: int, network_name: str | None, known: Mapping[str, Network],
            oversubscription: float | None) -> Topology:
    network_name = network_name or node.network
    if network_name not in known:
        raise CommError(f"There is no network {network_name!r}; known: {', '.join(sorted(known))}.")
    return Topology(node, count, _oversubscribed(known[network_name], oversubscription))


def _oversubscribed(network: Network, oversubscription: float | None) -> Network:
    if oversubscription is None:
        return network
    if not 1 <= oversubscription <= MOST_OVERSUBSCRIPTION:
        raise CommError(f"An oversubscription of {oversubscription:g} is none; give a number from 1 to "
                        f"{MOST_OVERSUBSCRIPTION:g}.")
    return replace(network, oversubscription=oversubscription)


def figures_of(value: NodeType | Network) -> dict[str, Any]:
    """Return all figures of a node or network as plain values, with the source of each."""
    found = {one.name: getattr(value, one.name) for one in fields(value)}
    return {**found, "sources": dict(value.sources)}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return from_toml(read_input(path))
    except OSError as error:
        raise CommError(why_unopened(path, error)) from None
    except DecodeError as error:
        raise CommError(f"{path} cannot be read as a topology: {error}.") from None


def _figures(table: Mapping[str, Any], where: str, known: Mapping[str, Figure], sources: Mapping[str, str],
             texts: tuple[str, ...] = ()) -> tuple[dict[str, float], Mapping[str, str]]:
    """Return the values and sources of a table's figures. Raises ``ValueError`` as ``figure_in`` does."""
    values, named = {}, {}
    for key, entry in table.items():
        if key in texts:
            continue
        if key not in known:
            raise ValueError(f"{where}.{key} is no figure of it; expected are {', '.join((*texts, *known))}")
        values[key], named[key] = figure_in(f"{where}.{key}", entry, known[key], sources)
    if lacking := [key for key in known if key not in values]:
        raise ValueError(f"it lacks {where}.{lacking[0]}; expected is {known[lacking[0]].expected()} with its source")
    return values, MappingProxyType(named)

"""Nodes and networks as data: one TOML file a node type under ``kernel_models/topologies``, every figure with its
source.

``topology("dgx-h100")`` is one node, ``topology("dgx-h100x16")`` sixteen of them on the node's usual network, and
``topology("dgx-a100x4@roce-100")`` names another network. A node type is added by adding a file.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernel_models.collectives.call import CommError, Placement
from tracer.input_file import read_input

FOLDER = Path(__file__).resolve().parents[1] / "topologies"
NETWORKS = "networks"
MOST_NODES = 100_000
LINKS = ("nvswitch", "nvlink-mesh", "pcie", "loopback")
"""How the GPUs of a node reach each other: through a switch, by links between pairs, through host bridges, or a
host."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """One kind of server.

    Attributes:
        name: by which commands know it.
        device: its GPU, a name of ``kernel_models.device``.
        architecture: of the GPU; NCCL's constants are kept by it.
        link: one of ``LINKS``.
        network: the network it usually has.
        gpus: GPUs of a node.
        peer_gbps: from one GPU to all others of its node together, one way, 10⁹ bytes/s.
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
    """What joins nodes. ``card_gbps`` is one card's line rate one way, 10⁹ bytes/s; ``payload_share`` what headers
    leave.

    ``rail``: cards of equal number share a switch, so that a GPU's own card carries its traffic. With
    ``oversubscription`` f, the nodes together reach 1/f of what their cards could.
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
        """As ``topology`` reads it."""
        count = f"x{self.nodes}" if self.nodes > 1 else ""
        return f"{self.node.name}{count}" + ("" if self.network.name == self.node.network else f"@{self.network.name}")

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.node.gpus * self.nodes

    def node_gbps(self, ranks: int) -> float:
        """What ``ranks`` ranks of one node send to other nodes together, one way, 10⁹ bytes/s.

        Each GPU has its share of the cards; a group with few ranks on a node reaches only theirs, but one whole card.
        """
        cards = min(float(self.node.nics), max(1.0, ranks * self.node.nics / self.node.gpus))
        network = self.network
        return cards * network.card_gbps * network.payload_share / network.oversubscription

    def place(self, ranks: Iterable[int]) -> Placement:
        """Where the ranks of a group lie when ranks fill the nodes in order.

        Raises:
            CommError: A rank is named twice, or there is no GPU for it.
        """
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
        """The first ``ranks`` GPUs. Raises ``CommError`` if there are fewer."""
        if ranks < 1:
            raise CommError(f"A group has at least one rank, and {ranks} were asked for; give 1 to {self.gpus}.")
        if ranks > self.gpus:
            raise CommError(f"{ranks} ranks do not fit on {self.name}, which has {self.gpus} GPUs; name a larger "
                            "topology.")
        return Placement.even(ranks, self.node.gpus)


def node_names() -> list[str]:
    """Names of all node types, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != NETWORKS)


@lru_cache(maxsize=1)
def networks() -> Mapping[str, Network]:
    """All networks by name."""
    data = _toml(FOLDER / f"{NETWORKS}.toml")
    found = {}
    for name, table in data["network"].items():
        figures, sources = _figures(table, data["sources"])
        found[name] = Network(name, table["title"], bool(table["rail"]), figures["card_gbps"], figures["payload_share"],
                              figures["extra_latency_us"], figures["oversubscription"], sources)
    return MappingProxyType(found)


@cache
def node_type(name: str) -> NodeType:
    """The node type of a name. Raises ``CommError`` if there is none; the error lists near ones."""
    path = FOLDER / f"{name}.toml"
    if not re.fullmatch(r"[a-z0-9-]+", name) or name == NETWORKS or not path.is_file():
        near = difflib.get_close_matches(name, node_names(), n=3)
        help_text = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(node_names())}."
        raise CommError(f"There is no node type {name!r}; {help_text}")
    return read_node(path)


def read_node(path: Path) -> NodeType:
    """Read one node type's file. Raises ``CommError`` where a figure is missing, no number, or without a source."""
    data = _toml(path)
    try:
        figures, sources = _figures(data["figures"], data["sources"])
        if data["link"] not in LINKS:
            raise ValueError(f"link is {data['link']!r}")
        return NodeType(data["name"], data["device"], data["architecture"], data["link"], data["network"],
                        int(figures["gpus"]), figures["peer_gbps"], int(figures["nics"]),
                        bool(figures["in_switch_reduction"]), sources)
    except (KeyError, TypeError, ValueError) as error:
        raise CommError(f"{path.name} is no complete node type: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=256)
def topology(name: str, oversubscription: float | None = None) -> Topology:
    """The cluster of a name: NODE[xCOUNT][@NETWORK], such as "dgx-h100", "dgx-h100x16" or "dgx-a100x4@roce-100".

    Raises:
        CommError: An unknown node type or network, or a count that is none.
    """
    text, _, network_name = name.strip().lower().partition("@")
    node_name, count = text, 1
    if text not in node_names() and (match := re.fullmatch(r"(.+)x([-+]?\d+)", text)):
        node_name, count = match.group(1), int(match.group(2))
    elif text not in node_names() and text.rpartition("x")[0] in node_names():
        raise CommError(f"{text.rpartition('x')[2]!r} of {name!r} is no count of nodes; write one such as "
                        f"{text.rpartition('x')[0]}x4.")
    if not 1 <= count <= MOST_NODES:
        raise CommError(f"{name!r} has {count} nodes; a topology has 1 to {MOST_NODES:,}.")
    node = node_type(node_name)
    network_name = network_name or node.network
    if network_name not in networks():
        raise CommError(f"There is no network {network_name!r}; known: {', '.join(sorted(networks()))}.")
    network = networks()[network_name]
    if oversubscription is not None:
        if not (math.isfinite(oversubscription) and oversubscription >= 1):
            raise CommError(f"An oversubscription of {oversubscription:g} is none; give a number of at least 1.")
        network = replace(network, oversubscription=oversubscription)
    return Topology(node, count, network)


def _toml(path: Path) -> dict[str, Any]:
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return dict(toml.loads(read_input(path).decode("utf-8")))
    except (OSError, ValueError) as error:
        raise CommError(f"{path.name} cannot be read as a topology: {error}") from None


def _figures(table: dict[str, Any], sources: dict[str, str]) -> tuple[dict[str, float], Mapping[str, str]]:
    values, named = {}, {}
    for key, entry in table.items():
        if isinstance(entry, dict):
            value = float(entry["value"])
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{key} is {value}")
            values[key], named[key] = value, sources[entry["source"]]
    return values, MappingProxyType(named)

"""A node's file from its driver's output: ``nvidia-smi topo -m``, or the XML that NCCL writes where
``NCCL_TOPO_DUMP_FILE`` names a file.

The table gives the number of NVLinks between two GPUs, or where their PCI paths meet; the XML also gives the rate of
each slot and network card. What neither gives (a card's rate in the table, whether a card is InfiniBand) is assumed,
and the figure's source in the file states that.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kernel_models.collectives.call import CommError
from kernel_models.collectives.topology import networks, node_of
from kernel_models.device import DeviceSpec
from tracer.guard import MOST_XML_BYTES, DecodeError, parse_xml
from tracer.input_file import from_toml, open_input, why_unopened

LINK_GBPS = {"volta": 25.0, "ampere": 25.0, "hopper": 25.0, "blackwell": 50.0}
"""One NVLink one way, 10⁹ bytes/s: NVIDIA's data sheets (V100 300 over 6 links both ways, A100 600 over 12, H100 900
over 18, B200 1,800 over 18)."""
LINKS_OF_A_GPU = {"volta": 6, "ampere": 12, "hopper": 18, "blackwell": 18}
"""NVLinks of one GPU, by the same data sheets."""
REDUCING = ("hopper", "blackwell")
"""Architectures whose switches reduce (NVLink SHARP)."""
SWITCH_CLASS = "0x068000"
MOST_COLUMNS = 1024
"""Most columns of a table: more than any node has (the largest join 72 GPUs)."""
_CELL = re.compile(r"NV(\d{1,3})$|X$|PIX$|PXB$|PHB$|NODE$|SYS$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LANES = re.compile(r"(\d{1,4}(?:\.\d{1,4})?) GT/s", re.ASCII)
_USUAL = {12.5: "ib-edr", 25.0: "ib-hdr", 50.0: "ib-ndr", 100.0: "ib-xdr"}
"""Names of networks by the rate of a card, 10⁹ bytes/s."""


@dataclass(frozen=True, slots=True)
class NodeMap:
    """Facts that a file gives about a node.

    Attributes:
        of: source of the figures, such as "NCCL's dump (FILE)".
        nvlinks: NVLinks from each GPU to all others, or to the switch.
        switched: whether the NVLinks lead to a switch.
        pcie_gbps: rate of a GPU's slot, one way, 10⁹ bytes/s; 0.0 where not given.
        card_gbps: rate of each network card that carries collectives, 10⁹ bytes/s; 0.0 where not given.
    """

    of: str
    nvlinks: tuple[int, ...]
    switched: bool
    pcie_gbps: float
    card_gbps: tuple[float, ...]


def read_node_map(path: str, device: DeviceSpec) -> NodeMap:
    """Read ``nvidia-smi topo -m`` or NCCL's XML.

    Raises:
        CommError: the file cannot be read, is neither of both, or names no GPUs.
    """
    try:
        with open_input(path) as stream:
            data = stream.read(MOST_XML_BYTES + 1)
    except OSError as error:
        raise CommError(why_unopened(Path(path), error)) from None
    name, text = Path(path).name, data.decode("utf-8", "replace")
    if len(data) > MOST_XML_BYTES:
        raise CommError(f"{name} is larger than {MOST_XML_BYTES >> 20} MiB: no map of a node is; write it again.")
    found = _read_xml(text, name) if text.lstrip().startswith("<") else _read_table(text, name, device)
    if not found.nvlinks:
        raise CommError(f"{name} names no GPU: give the output of nvidia-smi topo -m, or what NCCL wrote to "
                        "NCCL_TOPO_DUMP_FILE, of a node with GPUs.")
    return found


def node_file(found: NodeMap, device: DeviceSpec, name: str) -> str:
    """Return the node as the TOML text that ``--topology FILE.toml`` takes, each figure with its source.

    Raises:
        CommError: links of a device whose NVLinks are not known, or a name or figures that no node can have.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise CommError(f"{name!r} is no name of a node: use a-z, 0-9 and -.")
    links, kind, peer, source = min(found.nvlinks), "pcie", found.pcie_gbps or device.host_gbps, "map"
    sources = {"map": found.of}
    if links:
        if device.architecture not in LINK_GBPS:
            raise CommError(f"The file has NVLinks, and {device.name} has none that are known: name the node's device "
                            "with --device.")
        kind, peer = "nvswitch" if found.switched else "nvlink-mesh", links * LINK_GBPS[device.architecture]
        sources["link"] = (f"{found.of}: {links} NVLinks of a GPU, {LINK_GBPS[device.architecture]:g} GB/s each by the "
                           "data sheet")
        source = "link"
    elif not found.pcie_gbps:
        sources["slot"] = f"data sheet of {device.name}: its PCIe slot; {found.of} does not say how fast it is"
        source = "slot"
    fastest = max(found.card_gbps, default=0.0)
    cards = sum(rate == fastest for rate in found.card_gbps) or 1
    usual = min(networks(), key=lambda each: (abs(networks()[each].card_gbps - fastest), each))
    network = _USUAL.get(fastest, usual) if fastest else "ib-ndr" if device.architecture in REDUCING else "ib-hdr"
    sources["cards"] = (f"{found.of}; the network is assumed" if found.card_gbps else
                        f"assumed: {found.of} names no network card")
    reduces = kind == "nvswitch" and device.architecture in REDUCING
    sources["switch"] = "NVIDIA H100 architecture whitepaper, 2023: NVLink SHARP in switches since Hopper"
    quoted = "\n".join(f"{key} = {_quoted(text)}" for key, text in sources.items())
    text = (f"# {len(found.nvlinks)} GPUs as {found.of} says.\n"
            "# Bandwidths are one way, 10^9 bytes/s, of one GPU or one network card. Each figure names its source, a "
            "key of [sources].\n\n"
            f'name = "{name}"\ndevice = "{device.name}"\narchitecture = "{device.architecture}"\nlink = "{kind}"\n'
            f'network = "{network}"\n\n[sources]\n{quoted}\n\n[figures]\n'
            f'gpus = {{ value = {len(found.nvlinks)}, source = "map" }}\n'
            f'peer_gbps = {{ value = {peer:g}, source = "{source}" }}\n'
            f'nics = {{ value = {cards}, source = "cards" }}\n'
            f'in_switch_reduction = {{ value = {int(reduces)}, source = "switch" }}\n')
    try:
        node_of(from_toml(text.encode()), Path())
    except (DecodeError, ValueError) as error:
        raise CommError(f"{found.of} has figures that no node has ({error}); write it again on the node.") from None
    return text


def _read_table(text: str, name: str, device: DeviceSpec) -> NodeMap:
    """Read the matrix that ``nvidia-smi topo -m`` prints: rows and columns of GPUs, then of network cards."""
    rows = [[cell.strip() for cell in re.split(r"\t+|\s{2,}", _COLOURS.sub("", line).strip())]
            for line in text.splitlines() if line.strip()]
    header = next((row for row in rows if "GPU0" in row), None)
    if header is None or len(header) > MOST_COLUMNS:
        raise CommError(f"{name} is no map of a node: it has no row of GPU0, GPU1, … as nvidia-smi topo -m prints, and "
                        "is no XML of NCCL's.")
    columns = [each for each in header if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\w+|hfi1_\d+", each)]
    gpus = [place for place, each in enumerate(columns) if each.startswith("GPU")]
    table = {row[0]: row[1:1 + len(columns)] for row in rows if row[0] in columns and row is not header}
    links = []
    for place in gpus:
        cells = table.get(columns[place], [])
        if len(cells) <= max(gpus) or not all(_CELL.match(cell) for cell in cells):
            raise CommError(f"{name} has no whole row of {columns[place]}: give nvidia-smi topo -m as it was printed.")
        links.append([int(found.group(1) or 0) if (found := _CELL.match(cells[other])) else 0 for other in gpus])
    most = LINKS_OF_A_GPU.get(device.architecture, 0)
    # Links between pairs add up to a GPU's links; behind a switch each pair shows all links of a GPU.
    switched = bool(links) and max(map(sum, links), default=0) > max(most, max(map(max, links)))
    near = Counter(columns[other] for row in table for other, cell in enumerate(table[row])
                   if row.startswith("GPU") and not columns[other].startswith("GPU") and cell in ("PIX", "PXB"))
    cards = near or Counter(each for each in columns if not each.startswith("GPU"))
    return NodeMap(f"nvidia-smi topo -m ({name})", tuple(max(row) if switched else sum(row) for row in links),
                   switched, 0.0, (0.0,) * len(cards))


def _read_xml(text: str, name: str) -> NodeMap:
    """Read NCCL's dump: a tree of PCI bridges with GPUs (their NVLinks within) and network cards."""
    try:
        root = parse_xml(text)
    except DecodeError as error:
        raise CommError(f"{name} is not read: {error}; copy what NCCL wrote to NCCL_TOPO_DUMP_FILE again.") from None
    links, switched, slots = [], False, []
    for pci in root.iter("pci"):
        for gpu in pci.findall("gpu"):
            counts = [(_whole(link.get("count")), link.get("tclass", "")) for link in gpu.findall("nvlink")]
            links.append(sum(count for count, _ in counts))
            switched = switched or any(kind == SWITCH_CLASS for _, kind in counts)
            slots.append(_slot_gbps(pci.get("link_speed", ""), pci.get("link_width")))
    cards = [_whole(net.get("speed")) / 8e3 for net in root.iter("net") if _whole(net.get("speed")) > 0]
    return NodeMap(f"NCCL's dump ({name})", tuple(links), switched, min(filter(None, slots), default=0.0),
                   tuple(cards))


def _slot_gbps(rate_of_lane: str, lanes: str | None) -> float:
    """Return a slot's rate one way: GT/s × lanes, coded 128b/130b from 8 GT/s on, 8b/10b below; 0.0 where not given."""
    speed, width = _LANES.match(rate_of_lane), _whole(lanes)
    if speed is None or not width:
        return 0.0
    rate = float(speed.group(1))
    return rate * width / 8 * (128 / 130 if rate >= 8 else 0.8)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text) + '"'

"""``foretrace devices`` and ``foretrace topologies``: known hardware, with the source of each figure."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_models import collectives
from kernel_models import device as known_devices
from kernel_models.collectives import node_maps, topology
from step_views.cli.console import Column, Report, print_json
from step_views.cli.options import Json, complete_cluster, complete_device, in_one_sentence, shared
from step_views.cli.running import standard_output
from tracer.errors import ForetraceError
from tracer.shape_only import devices as shape_only_devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Toml = Annotated[bool, typer.Option("--toml", help="Print its file, to change and give as FILE.toml.")]


@in_one_sentence
def devices(
    name: Annotated[str | None, typer.Argument(
        metavar="DEVICE", autocompletion=complete_device,
        help="One of them, by our name, a reported one or a FILE.toml of one's own.")] = None,
    toml: Toml = False,
    json: Json = False,
) -> None:
    """List the devices that are known, or show one with the source of each figure.

    A device of one's own: foretrace devices h200-sxm --toml > mine.toml, change it, and give --device mine.toml.
    """
    _only_with_name(name, toml)
    if name is not None:
        spec = known_devices.find_device(name)
        _print_one(name, shape_only_devices.FOLDER / f"{spec.name}.toml", spec.to_json(), lambda: _show_device(spec),
                   toml=toml, json=json)
        return
    found = [known_devices.device(each) for each in shape_only_devices.device_names()]
    if json:
        print_json([spec.to_json() for spec in found])
        return
    Report().table(
        "Devices (dense peak rates of data sheets)",
        [Column("name", name=True, whole=True), Column("vendor", name=True),
         Column("architecture", name=True, whole=True),
         Column("memory\nGB"), Column("memory\nGB/s"), Column("fp32\nTFLOP/s"), Column("bf16\nTFLOP/s"),
         Column("units"), Column("MHz"), Column("also called", name=True)],
        ([spec.name + (" *" if spec.placeholder else ""), spec.vendor, spec.architecture, f"{spec.memory_gb:g}",
          f"{spec.memory_bandwidth_gbps:,.0f}", f"{spec.peak_tflops('fp32'):,.1f}",
          f"{spec.peak_tflops('bf16', matrix=True):,.1f}", str(spec.sm_count), f"{spec.boost_clock_mhz:,.0f}",
          ", ".join(spec.short_names)] for spec in found))
    Report().line()
    Report().line("* figures that only stand in for a calibration (foretrace calibrate); sources of a device's "
                  "figures: foretrace devices NAME")


@in_one_sentence
def topologies(
    name: Annotated[str | None, typer.Argument(
        metavar="CLUSTER", autocompletion=complete_cluster,
        help="One of them: NODE[xN][@NET], NODE also a FILE.toml of one's own.")] = None,
    read: Annotated[str | None, typer.Option(
        "--from", metavar="FILE", help="Print the file of the node that nvidia-smi topo -m describes, or the XML that "
                                       "NCCL wrote to NCCL_TOPO_DUMP_FILE; needs --device.")] = None,
    device: Annotated[str | None, shared("--device", "with --from, the node's GPU")] = None,
    toml: Toml = False,
    json: Json = False,
) -> None:
    """List the nodes and networks that are known, or show a cluster with the source of each figure.

    A node of one's own: foretrace topologies dgx-h200 --toml > mine.toml, change it, and give --topology mine.tomlx4.
    Or let its driver describe it: foretrace topologies mine --from topo.txt --device h200-sxm > mine.toml
    """
    if read is not None:
        _print_node(read, device, name or "mine")
        return
    _only_with_name(name, toml)
    if name is not None:
        where = topology.find_topology(name)
        _print_one(name, topology.FOLDER / f"{where.node.name}.toml",
                   {"name": where.name, "nodes": where.nodes, "node": topology.figures_of(where.node),
                    "network": topology.figures_of(where.network)}, lambda: _show_topology(where), toml=toml, json=json)
        return
    nodes, nets = [topology.node_type(each)
                   for each in topology.node_names()], list(topology.networks().values())
    if json:
        print_json({"nodes": [topology.figures_of(node) for node in nodes],
                    "networks": [topology.figures_of(net) for net in nets]})
        return
    report = Report()
    report.table("Nodes (bandwidth one way of one GPU to the others of its node)",
                 [Column("name", name=True), Column("device", name=True), Column("GPUs"), Column("link", name=True),
                  Column("GB/s"), Column("cards"), Column("usual network", name=True)],
                 ([node.name, node.device, str(node.gpus), node.link, f"{node.peer_gbps:g}", str(node.nics),
                   node.network] for node in nodes))
    report.table("Networks (bandwidth one way of one card)",
                 [Column("name", name=True), Column("GB/s"), Column("payload"), Column("extra\nlatency µs"),
                  Column("", name=True)],
                 ([net.name, f"{net.card_gbps:g}", f"{net.payload_share:.1%}", f"{net.extra_latency_us:g}",
                   net.title] for net in nets))
    report.line()
    report.line("Written as NODE[xN][@NET], such as dgx-a100x4@roce-100; sources: foretrace topologies NODE")


def _print_node(read: str, device: str | None, name: str) -> None:
    if device is None:
        raise ForetraceError("--from says how GPUs are joined, not which they are: name them with --device.")
    spec = known_devices.find_device(device)
    text = node_maps.node_file(node_maps.read_node_map(read, spec), spec, name)
    with standard_output():
        sys.stdout.write(text)


def _only_with_name(name: str | None, toml: bool) -> None:
    if toml and name is None:
        raise ForetraceError("--toml prints one file; name which.")


def _print_one(name: str, path: Path, values: dict[str, Any], show: Callable[[], None], *, toml: bool, json: bool
               ) -> None:
    """Print the file, or the values as JSON, or call ``show``."""
    if toml:
        if not path.is_file():
            raise ForetraceError(f"{name} is no shipped one; its file is one's own.")
        with standard_output():
            sys.stdout.write(path.read_text(encoding="utf-8"))
    elif json:
        print_json(values)
    else:
        show()


def _show_device(spec: known_devices.DeviceSpec) -> None:
    report = Report()
    report.line(f"{spec.name}: {spec.vendor}, {spec.architecture}, compute capability "
                f"{spec.compute_capability or 'none'}, {spec.memory_kind}"
                + (" (figures only stand in for a calibration)" if spec.placeholder else ""), style="bold")
    report.line(f"Reported as {', '.join(spec.reported_names) or 'nothing'}; also called "
                f"{', '.join(spec.short_names) or 'nothing'}.", indent=2)
    if spec.note:
        report.line(spec.note, indent=2)
    report.table("Figures", [Column("table", name=True), Column("figure", name=True), Column("value"),
                             Column("source", name=True)],
                 ([*key.split(".", 1), _figure(spec, key), text] for key, text in spec.sources.items()))


def _show_topology(where: collectives.Topology) -> None:
    report = Report()
    node, network = where.node, where.network
    report.line(f"{where.name}: {where.nodes} × {node.gpus} GPUs ({node.device}), {node.link} in a node, "
                f"{network.name} between them ({network.title})", style="bold")
    report.table("Figures", [Column("of", name=True), Column("figure", name=True), Column("value"),
                             Column("source", name=True)],
                 ([part, key, f"{getattr(of, key):g}", text] for part, of in (("node", node), ("network", network))
                  for key, text in of.sources.items()))


def _figure(spec: known_devices.DeviceSpec, key: str) -> str:
    """Return a figure by "table.key" in the device's file."""
    table, _, name = key.partition(".")
    if table in ("matrix_tflops", "vector_tflops"):
        return f"{getattr(spec, table)[name]:g}"
    return f"{getattr(spec, known_devices.ATTRIBUTES.get(key, name)):g}"

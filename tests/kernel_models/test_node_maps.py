"""Nodes as their drivers describe them: what becomes of ``nvidia-smi topo -m`` and of NCCL's XML."""

from __future__ import annotations

from pathlib import Path

import pytest
from said import Run

from kernel_models.collectives.call import CommError
from kernel_models.collectives.node_maps import node_file, read_node_map
from kernel_models.collectives.topology import NodeType, node_type, read_node
from kernel_models.device import device


def matrix(gpus: int, links: str | list[list[str]], cards: list[str]) -> str:
    """A table as ``nvidia-smi topo -m`` prints it, colours and legend included."""
    names = [*(f"GPU{i}" for i in range(gpus)), *(f"NIC{i}" for i in range(len(cards)))]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for i in range(gpus):
        row = [" X " if i == j else links if isinstance(links, str) else links[i][j] for j in range(gpus)]
        lines.append("\t".join([f"GPU{i}", *row, *cards, "0-55,112-167", "0", "N/A"]))
    for i, card in enumerate(cards):
        lines.append("\t".join([f"NIC{i}", *[card] * gpus, *[" X " if i == j else "SYS" for j in range(len(cards))]]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # "
                      "NVLinks", "", "NIC Legend:", "", "  NIC0: mlx5_0"]) + "\n"


def nccl_xml(gpus: int, link: str, speed: int = 400000) -> str:
    parts = "".join(
        f'<pci busid="0000:0{i}:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<pci busid="0000:1{i}:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{i}" sm="90" rank="{i}" gdr="1">{link}</gpu></pci>'
        f'<pci busid="0000:2{i}:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"><nic>'
        f'<net name="mlx5_{i}" dev="{i}" speed="{speed}" port="1" gdr="1"/></nic></pci></pci>' for i in range(gpus))
    slow = '<nic><net name="eth0" dev="9" speed="25000"/></nic>'
    return f'<system version="1"><cpu numaid="0" arch="x86_64">{parts}{slow}</cpu></system>'


def node_of(text: str, gpu: str, tmp_path: Path) -> NodeType:
    (tmp_path / "map").write_text(text, encoding="utf-8")
    spec = device(gpu)
    (tmp_path / "node.toml").write_text(node_file(read_node_map(str(tmp_path / "map"), spec), spec, "mine"))
    return read_node(tmp_path / "node.toml")


def test_a_switched_node_is_the_one_we_ship(tmp_path: Path) -> None:
    shipped = node_type("dgx-h100")
    for text in (matrix(8, "NV18", ["PIX"] * 8),
                 nccl_xml(8, '<nvlink target="0000:c0:00.0" count="18" tclass="0x068000"/>')):
        found = node_of(text, "h100-sxm", tmp_path)
        assert (found.gpus, found.link, found.peer_gbps, found.nics, found.in_switch_reduction, found.network) == (
            shipped.gpus, shipped.link, shipped.peer_gbps, shipped.nics, shipped.in_switch_reduction, "ib-ndr")
    assert "NVLinks of a GPU" in found.sources["peer_gbps"]
    assert node_of(matrix(8, "NV12", []), "a100-sxm-80g", tmp_path).peer_gbps == node_type("dgx-a100").peer_gbps
    assert not node_of(matrix(8, "NV12", []), "a100-sxm-80g", tmp_path).in_switch_reduction


def test_links_between_pairs_are_a_mesh_and_without_them_the_slot_decides(tmp_path: Path) -> None:
    found = node_of(matrix(4, "NV4", ["SYS", "PXB", "PXB"]), "a100-sxm-80g", tmp_path)
    assert (found.link, found.peer_gbps, found.nics) == ("nvlink-mesh", 300.0, 2)  # cards behind the GPUs' switches
    # Eight V100: links of one or two to four others, the rest by the host; the worst-joined GPU decides.
    cells = [["X" if i == j else "NV2" if (i ^ j) == 4 else "NV1" if i // 4 == j // 4 else "SYS" for j in range(8)]
             for i in range(8)]
    found = node_of(matrix(8, cells, ["SYS"] * 4), "v100-sxm2-16g", tmp_path)
    assert (found.link, found.peer_gbps, found.nics) == ("nvlink-mesh", 125.0, 4)
    found = node_of(nccl_xml(4, "", 200000), "l40s", tmp_path)
    assert found.link == "pcie" and found.peer_gbps == pytest.approx(32 * 16 / 8 * 128 / 130, rel=1e-3)
    assert (found.nics, found.network) == (4, "ib-hdr")  # the slow card carries no collectives
    found = node_of(matrix(2, "PHB", []), "l40s", tmp_path)
    assert found.peer_gbps == device("l40s").host_gbps and "does not say" in found.sources["peer_gbps"]
    assert "assumed" in found.sources["nics"]


@pytest.mark.parametrize(("text", "says"), [
    ("", "is no map of a node"), ("GPU0\tGPU1\n", "no whole row of GPU0"),
    ("GPU0\tNIC0\tGPU1\nGPU0\t X \tPIX\n", "no whole row of GPU0"), ("<system", "is no whole XML"),
    ("<system/>", "names no GPU"), ("<a>" * 100 + "</a>" * 100, "more than 64 levels"),
    ("<a/>" * 50_000, "more than 20,000 elements"), ("GPU0\t" * 2000 + "\n", "is no map of a node"),
    (nccl_xml(1, '<nvlink count="999999999" tclass="x"/>' * 20), "figures that no node has"),
    ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "declares entities"),
    (matrix(2, "NV18", []).replace("NV18", "??"), "no whole row of GPU0"),
    (nccl_xml(1, '<nvlink count="-4" tclass="x"/>').replace("400000", "9" * 40).replace("32.0", "fast"), ""),
    (nccl_xml(1, '<nvlink count="³" tclass="x"/>').replace("32.0 GT/s", "1.1.1 GT/s"), ""),
])
def test_what_is_no_map_is_refused_in_a_sentence(text: str, says: str, tmp_path: Path) -> None:
    if not says:  # odd figures are none
        assert node_of(text, "h100-sxm", tmp_path).link == "pcie"
        return
    with pytest.raises(CommError, match=says):
        node_of(text, "h100-sxm", tmp_path)


def test_the_command_prints_a_file_that_commands_take(tmp_path: Path, run: Run) -> None:
    (tmp_path / "topo.txt").write_text(matrix(8, "NV18", ["PIX"] * 8))
    printed = run("topologies", "ours", "--from", str(tmp_path / "topo.txt"), "--device", "h200-sxm")
    (tmp_path / "ours.toml").write_text(printed.out)
    priced = run("comm", "predict", "all_reduce", "--bytes", "64MiB", "--topology", f"{tmp_path / 'ours.toml'}x2")
    assert priced.code == 0 and "16 ranks on oursx2" in priced.out
    source = ("--from", str(tmp_path / "topo.txt"))
    for wrong in (source, ("--from", "none", "--device", "h200-sxm"), ("A b", *source, "--device", "h200-sxm")):
        assert run("topologies", *wrong).code == 2
    assert "none that are known" in run("topologies", *source, "--device", "mi300x").err

"""Devices: every figure has a source and is of the right size, and the names that traces report resolve."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kernel_models.collectives.price import topology_of
from kernel_models.device import (
    REPORTED,
    DeviceError,
    DeviceSpec,
    device,
    read_device,
    resolve_device,
    shape_device,
    unknown_device,
)
from kernel_models.device_figures import ARCHITECTURES
from kernel_models.spreads import PLACEHOLDER_DEVICE
from tracer.shape_only.devices import FOLDER, device_names, traced_device

FP32_OPERATIONS = {"6.1": 256, "8.6": 256, "8.9": 256, "9.0": 256, "10.0": 256, "10.3": 256, "12.0": 256}
"""Of the vector units, a clock and multiprocessor, by compute capability; 128 of others (CUDA C++ Programming Guide,
throughput of native arithmetic instructions)."""
FP16_OPERATIONS = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192,
                   "10.3": 8192, "12.0": 1024}
"""Of the matrix units with fp32 accumulation, dense (architecture whitepapers)."""
BY_TYPE = {"tf32": 0.5, "fp16": 1.0, "bf16": 1.0, "fp8": 2.0, "int8": 2.0, "fp4": 4.0}
CLOCKS = 1.1
"""Published rates over those at the boost clock of the file: H100's whitepaper counts some at 1.08 times it."""


@pytest.mark.parametrize("name", device_names())
def test_figures_are_sourced_and_hang_together(name: str) -> None:
    spec = device(name)
    assert spec.name == name
    for table in ("compute", "memory", "vector_tflops", "links", "launch"):
        assert any(key.startswith(f"{table}.") for key in spec.sources)
    assert all(len(source) > 10 for source in spec.sources.values())
    assert spec.placeholder == (name == "cpu") and traced_device(name) == shape_device(spec)
    assert spec.features().keys() == device("t4").features().keys() and min(spec.features().values()) >= 0
    if spec.vendor == "host":
        return
    # fp32 units do 64 or 128 multiply-adds a clock and unit (AMD's packed and matrix forms up to four times that).
    per_clock = spec.vector_tflops["fp32"] * 1e12 / (spec.sm_count * spec.boost_clock_mhz * 1e6)
    assert 2 * 64 * 0.97 <= per_clock <= 2 * 128 * 1.1
    for dtype, rate in spec.matrix_tflops.items():
        assert rate >= spec.vector_tflops.get(dtype, 0.0), dtype
    if "fp8" in spec.matrix_tflops:
        assert spec.matrix_tflops["fp8"] == pytest.approx(2 * spec.matrix_tflops["bf16"], rel=0.02)
    if spec.matrix_tflops:
        assert spec.matrix_tflops["fp16"] >= spec.matrix_tflops.get("tf32", 0) * 1.9


@pytest.mark.parametrize("name", [name for name in device_names() if device(name).vendor == "nvidia"])
def test_rates_are_units_times_clock_times_operations(name: str) -> None:
    """Or half of it (GeForce boards), or as published at other clocks, or less (for export, units left out)."""
    spec = device(name)
    capability = spec.compute_capability
    clocks = spec.sm_count * spec.boost_clock_mhz / 1e6
    assert 0.7 <= spec.vector_tflops["fp32"] / clocks / FP32_OPERATIONS.get(capability, 128) <= CLOCKS
    for dtype in BY_TYPE.keys() & spec.matrix_tflops.keys() if capability in FP16_OPERATIONS else ():
        more = 1.5 if (dtype, capability) == ("fp4", "10.3") else 1.0
        share = spec.matrix_tflops[dtype] / clocks / FP16_OPERATIONS[capability] / BY_TYPE[dtype] / more
        published = not spec.sources[f"matrix_tflops.{dtype}"].startswith("calculated")
        assert any(share == pytest.approx(whole, rel=0.03) for whole in (1.0, 0.5)) or (
            published and share <= CLOCKS), dtype


@pytest.mark.parametrize(("name", "fp32_gflops", "channels", "mega_transfers"), [
    ("i9-10940x", 14 * 2 * 16 * 2 * 3.3, 4, 2933),
    ("i7-12700h", (6 * 2 * 8 * 3.3 + 8 * 2 * 4 * 2.4) * 2, 2, 4800),
    ("xeon-8575c", 48 * 2 * 16 * 2 * 2.3, 8, 5600),
])
def test_processors_rates_are_cores_times_clock_times_vectors(
    name: str, fp32_gflops: float, channels: int, mega_transfers: int,
) -> None:
    spec = device(name)
    assert spec.vector_tflops["fp32"] == pytest.approx(fp32_gflops / 1e3, rel=0.01)
    assert spec.vector_tflops["fp64"] == pytest.approx(fp32_gflops / 2e3, rel=0.01)
    assert spec.memory_bandwidth_gbps == pytest.approx(channels * 8 * mega_transfers / 1e3, rel=0.01)


@pytest.mark.parametrize(("dtype", "name", "tflops"), [
    ("bf16", "rtx-5090", 209.5), ("fp4", "rtx-pro-6000", 2015.2), ("bf16", "rtx-pro-6000-max-q", 438.9),
    ("tf32", "mi355x", 157.3), ("int8", "b300", 150),
    ("bf16", "h100-sxm", 989.4), ("bf16", "b200", 2250), ("fp16", "v100-sxm2-16g", 125), ("bf16", "mi300x", 1307.4),
    ("bf16", "v100-sxm2-16g", 15.7), ("fp8", "a100-sxm-80g", 312),
    ("fp32", "a100-sxm-80g", 19.5), ("int64", "t4", 8.1),
])
def test_dense_peak_rates(dtype: str, name: str, tflops: float) -> None:
    assert device(name).peak_tflops(dtype, matrix=True) == tflops


def test_a_name_that_one_device_reports_is_its_own() -> None:
    owners: dict[str, set[str]] = {}
    for spec in map(device, device_names()):
        for name in (*spec.reported_names, *spec.short_names):
            owners.setdefault(name, set()).add(spec.name)
    alone = {name: of for name, of in owners.items() if len(of) == 1}
    assert len(alone) > 60
    assert {name: {resolve_device(name).name} for name in alone} == alone
    # Every known architecture is of a shipped device.
    shipped = {(spec.vendor, spec.architecture) for spec in map(device, device_names())}
    assert shipped == {(vendor, name) for vendor, names in ARCHITECTURES.items() for name in names}


@pytest.mark.parametrize(("reported", "memory", "units", "name"), [
    ("NVIDIA H100 80GB HBM3", None, None, "h100-sxm"),
    ("AMD Instinct MI300X VF", None, None, "mi300x"),
    ("Tesla V100-SXM2-32GB", 34079899648, 80, "v100-sxm2-32g"),
    ("NVIDIA A100-PG509-200", 42505273344, 108, "a100-sxm-40g"),
    ("a100", None, None, "a100-sxm-80g"),
    ("h100", -1, -1, "h100-sxm"),
    ("", 206141652992, 304, "mi300x"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 102641958912, 188, "rtx-pro-6000-max-q"),
    ("NVIDIA H100 NVL", 100485038080, 132, "h100-nvl"),
    ("H100", 100485038080, None, "h100-nvl"),
    ("H100 PCIe", 85520809984, 114, "h100-pcie"),
    ("", 85520809984, 132, "h100-sxm"),
    ("", 100485038080, 132, "h100-nvl"),
    ("NVIDIA H200 NVL", 150754820096, 132, "h200-nvl"),
    ("NVIDIA GH200 480GB", 102005473280, 132, "gh200-96g"),
    ("NVIDIA GH200 144G HBM3e", 153000000000, 132, "gh200-144g"),
    ("NVIDIA A800 80GB PCIe", 85097971712, 108, "a800-pcie-80g"),
    ("AMD Instinct MI250X / MI250", 68702699520, 110, "mi250x"),
    ("AMD Instinct MI250X / MI250", 68702699520, 104, "mi250"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None, None, "h100-sxm-mig-3g-40gb"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None, "a100-sxm-40g-mig-1g-5gb"),
    ("h100-sxm-mig-1g-10gb", None, None, "h100-sxm-mig-1g-10gb"),
    ("AMD Instinct MI300X", 205822885888, 300, "mi300x"),  # no whole dies: a virtual device
    ("AMD Instinct MI210", 68702699520, 52, "mi210"),  # has one die, and no partitions
])
def test_reported_names_resolve(reported: str, memory: int | None, units: int | None, name: str) -> None:
    assert resolve_device(reported, memory, units).name == name


def test_a_share_of_a_device_is_told() -> None:
    found = resolve_device("NVIDIA H100 80GB HBM3", None, 16)
    assert found.sm_count == 132 and "reports 16 of the 132 units of h100-sxm" in found.note


@pytest.mark.parametrize(("name", "slices"), [
    ("NVIDIA H20", ["1g.12gb"] * 7), ("NVIDIA H100 80GB HBM3", ["3g.40gb", "4g.40gb"]),
    ("NVIDIA A100-SXM4-80GB", ["2g.20gb", "2g.20gb", "3g.40gb"])])
def test_slices_of_a_device_together_have_no_more_units_than_it(name: str, slices: list[str]) -> None:
    parts = [resolve_device(f"{name} MIG {one}").sm_count for one in slices]
    assert sum(parts) <= resolve_device(name).sm_count


@pytest.mark.parametrize(("name", "node"), [
    ("gb300", "dgx-gb300"), ("h20-3e", "hgx-h20"), ("a800-sxm-80g", "hgx-a800"), ("mi355x", "hgx-mi355x"),
    ("a100-sxm-40g", "dgx-a100"), ("v100-sxm2-16g", "dgx-v100")])
def test_a_device_is_in_its_makers_node(name: str, node: str) -> None:
    found = topology_of(device(name), 8).node
    assert found.name == node and found.peer_gbps == device(name).peer_gbps


@pytest.mark.parametrize(("reported", "memory", "units"), [
    ("NVIDIA GB10", 128_000_000_000, 48),
    ("NVIDIA GeForce RTX 3080", 12_600_000_000, 70),  # another board of that name
    ("NVIDIA GeForce RTX 3060", 12_600_000_000, 28),
    ("NVIDIA H800 PCIe", 85_500_000_000, 114),
    ("AMD Radeon RX 7900 XTX", 25_750_000_000, 48),
])
def test_other_names_are_unknown_gpus_by_their_properties(reported: str, memory: int, units: int) -> None:
    with pytest.raises(DeviceError):
        resolve_device(reported, memory, units)
    spec = unknown_device(reported, memory, units)
    assert spec.placeholder and spec.sm_count == units and spec.memory_gb == pytest.approx(memory / 1e9, rel=1e-3)
    assert f"{reported} is an unknown GPU ({units} SMs, {memory / 1e9:.0f} GB)" in spec.note
    assert spec.sources["compute.sm_count"] == REPORTED
    assert spec.vendor == ("amd" if reported.startswith("AMD") else "nvidia")
    assert DeviceSpec.from_json(spec.to_json()) == spec


def test_an_unknown_gpus_rates_are_those_of_its_kin_by_units_and_clock() -> None:
    spec = unknown_device("NVIDIA X1", 50_000_000_000, 100, "8.9", clock_mhz=2000.0, l2_mb=60.0)
    assert (spec.architecture, spec.boost_clock_mhz, spec.l2_mb) == ("ada", 2000.0, 60.0)
    assert spec.vector_tflops["fp32"] == pytest.approx(100 * 2000e6 * 256 / 1e12, rel=0.01)
    assert "fp64" not in spec.matrix_tflops and "of compute capability 8.9" in spec.note
    assert "of compute capability 12," in unknown_device("NVIDIA GB10", None, 48, "12.1").note
    assert "known devices of NVIDIA," in unknown_device("NVIDIA X2", None, 48, "42.0").note
    assert unknown_device("NVIDIA X1", -1, 100, "9.0", bandwidth_gbps=1234.0).memory_bandwidth_gbps == 1234.0
    for name, units, said in (("Intel(R) Data Center GPU Max 1550", 128, "no known maker"),
                              ("NVIDIA X1", None, "how many units"), ("NVIDIA X1", -1, "how many units")):
        with pytest.raises(DeviceError, match=said):
            unknown_device(name, 10**10, units)


@pytest.mark.parametrize("name", [name for name in device_names() if device(name).architecture != "pascal"
                                  and device(name).vendor != "host"])
def test_a_gpu_guessed_without_its_file_is_within_the_width(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true, others = device(name), [other for other in device_names() if other != name]
    monkeypatch.setattr("kernel_models.device.device_names", lambda: others)
    guessed = unknown_device(f"{true.vendor} X", round(true.memory_gb * 1e9), true.sm_count, true.compute_capability)
    ratios = [guessed.memory_bandwidth_gbps / true.memory_bandwidth_gbps, *(
        guessed.peak_tflops(dtype, matrix=True) / true.peak_tflops(dtype, matrix=True) for dtype in ("fp16", "fp32"))]
    assert abs(np.log(ratios)).max() < PLACEHOLDER_DEVICE


@pytest.mark.parametrize(("reported", "units", "memory_gb", "share"), [
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 42.8, 4 / 8), ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 16, 21.4, 2 / 8),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb+me", 14, 5.4, 1 / 8), ("NVIDIA A30 MIG 1g.6gb", 14, 6.4, 2 / 8),
    ("A100 MIG 2c.3g.20gb", 28, 21.5, 4 / 8), ("NVIDIA H100 80GB HBM3 MIG 3c.7g.80gb", 48, 85.5, 1.0),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb-me", 47, 25.7, 2 / 8),
    ("GH200 MIG 1g.18gb", 16, 18.0, 1 / 8),
])
def test_a_mig_name_is_a_slice_of_its_parent(reported: str, units: int, memory_gb: float, share: float) -> None:
    spec = resolve_device(reported)
    whole = device(spec.name.partition("-mig-")[0])
    assert spec.sm_count == units and spec.memory_gb == pytest.approx(memory_gb, rel=0.01)
    assert spec.memory_bandwidth_gbps == pytest.approx(whole.memory_bandwidth_gbps * share)
    assert spec.peak_tflops("fp16", matrix=True) == pytest.approx(
        whole.peak_tflops("fp16", matrix=True) * units / whole.sm_count)
    assert f"MIG slice of {whole.name}: {units} of its {whole.sm_count} SMs" in spec.note
    assert spec.peer_gbps == 0 and resolve_device(spec.name) == spec
    measured = resolve_device(reported, 5_000_000_000, 10)
    assert (measured.sm_count, measured.memory_gb) == (10, 5.0)


@pytest.mark.parametrize(("name", "said"), [
    ("T4 MIG 1g.5gb", "t4 has no MIG 1g.5gb; MIG does not divide it: name it whole."),
    ("MI300X MIG 1g.5gb", "mi300x has no MIG"),
    ("H100 MIG 3g.40gb MIG 1g.10gb", "h100-sxm-mig-3g-40gb has no MIG 1g.10gb; MIG does not divide it: name it whole."),
    ("A100 MIG 7g.5gb", "its MIG profiles are 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb."),
    ("A30 MIG 2c.2g.12gb", "profiles are 1c.2g.12gb, 1c.4g.24gb, 2c.4g.24gb."),
    ("A100 MIG 1g.10gb+bananas", "No known device is reported as"), ("MI300X TPX", "No known device"),
    ("MI300A QPX", "No known device"), ("H100 CPX", "No known device"), ("MI210 CPX", "No known device")])
def test_a_mig_name_that_cannot_be_is_refused_with_those_that_can(name: str, said: str) -> None:
    with pytest.raises(DeviceError, match=re.escape(said)):
        resolve_device(name)


@pytest.mark.parametrize(("reported", "units", "mode", "parts"), [
    ("AMD Instinct MI300X VF", 76, "QPX", 4), ("AMD Instinct MI325X", 152, "DPX", 2),
    ("AMD Instinct MI355X", 32, "CPX", 8), ("AMD Instinct MI300A", 76, "TPX", 3),
])
def test_whole_dies_are_a_partition_of_their_device(reported: str, units: int, mode: str, parts: int) -> None:
    whole = resolve_device(reported)
    memory = round(whole.memory_gb * 1e9 / parts)
    spec = resolve_device(reported, memory, units)
    assert (spec.name, spec.sm_count, spec.memory_gb) == (f"{whole.name}-{mode.lower()}", units, memory / 1e9)
    for figure in ("memory_bandwidth_gbps", "l2_mb", "l3_mb", "peer_gbps", "power_w"):
        assert getattr(spec, figure) == pytest.approx(getattr(whole, figure) / parts)
    assert spec.peak_tflops("bf16", matrix=True) == pytest.approx(whole.peak_tflops("bf16", matrix=True) / parts)
    assert f"{spec.name} is a compute partition of {whole.name}: {units} of its {whole.sm_count} SMs" in spec.note
    named = resolve_device(f"{reported} {mode}")
    assert resolve_device(spec.name) == named and named.memory_gb == pytest.approx(spec.memory_gb)


def test_names_of_tables_resolve(data_folder: Path) -> None:
    for path in sorted((data_folder / "kernels" / "neusight_device_configs").glob("*.json")):
        name = json.loads(path.read_text())["Device"]
        if name != "AMD Instinct MI100":  # not among ours
            assert resolve_device(name).memory_bandwidth_gbps > 100


def test_unknown_and_ambiguous_names_list_the_near_ones() -> None:
    with pytest.raises(DeviceError, match="h200-sxm"):
        device("h300-sxm")
    with pytest.raises(DeviceError, match=r"a100-pcie-40g.*a100-sxm-40g"):
        resolve_device("a100", 42_000_000_000)
    with pytest.raises(DeviceError, match=r"several.*a100-pcie-80g.*a100-sxm-80g"):
        resolve_device("", 85_000_000_000, 108)  # the same chip with as much memory
    assert resolve_device("", 51_033_931_776, 84).name == "rtx-a6000"  # the same chip as an A40's, with 3 GB more
    with pytest.raises(DeviceError, match="no name"):
        resolve_device("", 12_345_678, 3)
    for ask, name in ((device, "../device"), (resolve_device, "\udcff")):
        with pytest.raises(DeviceError):
            ask(name)
    for ask in (device, resolve_device):
        with pytest.raises(DeviceError) as refused:
            ask(300 * "x")
        assert "xxx …'" in str(refused.value) and 80 * "x" not in str(refused.value)


def entry(key: str, value: str) -> tuple[str, str]:
    """A line of a figure, and the same line with another value."""
    text = (FOLDER / "t4.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{key} = "))
    return line, f'{key} = {{ value = {value}, source = "sheet" }}'


COUNT = "expected is a whole number from 1 to 4,096"


@pytest.mark.parametrize(("old", "new", "said"), [
    (*entry("sm_count", "true"), f"compute.sm_count is true; {COUNT}"),
    (*entry("sm_count", '"fast"'), f'compute.sm_count is "fast"; {COUNT}'),
    (*entry("sm_count", "1"), "of another device or in another unit"),
    (*entry("boost_clock_mhz", "1.59"), "compute.boost_clock_mhz is 1.59; expected is a number from 100"),
    (*entry("bandwidth_gbps", "-320"), "memory.bandwidth_gbps is -320; expected is a number from 10"),
    (*entry("bandwidth_gbps", "inf"), "memory.bandwidth_gbps is inf; expected"),
    (*entry("pcie_generation", "3.5"), "links.pcie_generation is 3.5; expected is a whole number"),
    (*entry("fp32", "8100"), "vector_tflops.fp32 is 8100 with compute.sm_count 40"),
    (entry("sm_count", "1")[0], "sm_count = 40", "compute.sm_count=40 has no source"),
    (entry("sm_count", "1")[0], 'sm_count = { value = 40, source = "nope" }', 'has the source "nope", which [sources]'),
    (entry("sm_count", "1")[0], "sm_count = { value = 40 }", "compute.sm_count has no source"),
    ("[compute]", "placeholder = true\n[compute]", "sources.placeholder is true; expected is a text"),
    ("sm_count", "sm_counts", "compute.sm_counts is no figure of a device; expected of [compute] are sm_count"),
    ("fp16 =", "fp61 =", "fp61 is of no known element type"),
    ('architecture = "turing"', 'architecture = "turning"', "known of this vendor; expected is one of pascal"),
    ('"7.5"', "7.5", "compute_capability is 7.5; expected is a text"),
    ('kind = "GDDR6"', 'kind = "gddr6"', 'memory.kind is "gddr6"; expected is one such as'),
    ('["T4"]', '"T4"', 'short_names is "T4"; expected is a list of names'),
    ("[links]", "[linkz]", '"linkz" is nothing that a device has; expected are'),
])
def test_a_figure_that_no_device_has_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = (FOLDER / "t4.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(DeviceError) as error:
        read_device(path)
    assert said in str(error.value) and str(error.value).startswith(str(path)), error.value

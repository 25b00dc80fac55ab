"""Devices: every figure has a source and is of the right size, and the names that traces report resolve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_models.device import FOLDER, DeviceError, device, device_names, read_device, resolve_device

NAMES = [
    "p4", "p100-pcie-16g", "v100-pcie-32g", "v100-sxm2-16g", "v100-sxm2-32g", "t4", "a10", "a40", "a100-pcie-40g",
    "a100-sxm-40g", "a100-pcie-80g", "a100-sxm-80g", "l4", "l40s", "h100-pcie", "h100-sxm", "h200-sxm", "b200",
    "gb200", "mi210", "mi250", "mi300x", "rtx-2080ti", "rtx-3090", "rtx-4090", "cpu",
]


def test_every_promised_device_is_there() -> None:
    assert set(NAMES) <= set(device_names())


@pytest.mark.parametrize("name", device_names())
def test_figures_are_sourced_and_hang_together(name: str) -> None:
    spec = device(name)
    assert spec.name == name
    for table in ("compute", "memory", "vector_tflops", "links", "launch"):
        assert any(key.startswith(f"{table}.") for key in spec.sources)
    assert all(len(source) > 10 for source in spec.sources.values())
    if spec.vendor == "host":
        assert spec.placeholder
        return
    # fp32 units do 64 or 128 multiply-adds a clock and unit (AMD's packed and matrix forms up to four times that).
    per_clock = spec.vector_tflops["fp32"] * 1e12 / (spec.sm_count * spec.boost_clock_mhz * 1e6)
    assert 2 * 64 * 0.97 <= per_clock <= 2 * 128 * 1.1
    assert 100 <= spec.memory_bandwidth_gbps <= 10_000 and spec.memory_gb <= 300 and 2 <= spec.l2_mb <= 130
    for dtype, rate in spec.matrix_tflops.items():
        assert rate >= spec.vector_tflops.get(dtype, 0.0), dtype
    if "fp8" in spec.matrix_tflops:
        assert spec.matrix_tflops["fp8"] == pytest.approx(2 * spec.matrix_tflops["bf16"], rel=0.02)
    if spec.matrix_tflops:
        assert spec.matrix_tflops["fp16"] >= spec.matrix_tflops.get("tf32", 0) * 1.9


@pytest.mark.parametrize(("dtype", "name", "tflops"), [
    ("bf16", "h100-sxm", 989.4), ("bf16", "a100-sxm-80g", 312), ("bf16", "b200", 2250), ("fp16", "v100-sxm2-16g", 125),
    ("bf16", "l40s", 362.05), ("bf16", "mi300x", 1307.4), ("bf16", "v100-sxm2-16g", 15.7), ("fp8", "a100-sxm-80g", 312),
    ("fp32", "a100-sxm-80g", 19.5), ("int64", "t4", 8.1),
])
def test_dense_peak_rates(dtype: str, name: str, tflops: float) -> None:
    assert device(name).peak_tflops(dtype, matrix=True) == tflops


@pytest.mark.parametrize(("reported", "memory", "units", "name"), [
    ("NVIDIA H100 80GB HBM3", None, None, "h100-sxm"),
    ("NVIDIA A100-SXM4-80GB", None, None, "a100-sxm-80g"),
    ("Tesla V100-SXM2-16GB", None, None, "v100-sxm2-16g"),
    ("Tesla V100-SXM2-32GB", 34079899648, 80, "v100-sxm2-32g"),
    ("Tesla V100-DGXS-32GB", None, None, "v100-sxm2-32g"),
    ("NVIDIA A100-PG509-200", 42505273344, 108, "a100-sxm-40g"),
    ("NVIDIA A100 80GB PCIe", None, None, "a100-pcie-80g"),
    ("AMD Instinct MI300X", None, None, "mi300x"),
    ("AMD Instinct MI300X VF", None, None, "mi300x"),
    ("AMD Instinct MI210", 68702699520, 104, "mi210"),
    ("NVIDIA GeForce RTX 2080 Ti", 11554586624, 68, "rtx-2080ti"),
    ("NVIDIA B200", 191503138816, 148, "b200"),
    ("H200-SXM-141GB", None, None, "h200-sxm"),
    ("H100-SXM5-80GB", None, None, "h100-sxm"),
    ("L40S", None, None, "l40s"),
    ("a100", None, None, "a100-sxm-80g"),
    ("a40", None, None, "a40"),
    ("h100", -1, -1, "h100-sxm"),
    ("", 206141652992, 304, "mi300x"),
])
def test_reported_names_resolve(reported: str, memory: int | None, units: int | None, name: str) -> None:
    assert resolve_device(reported, memory, units).name == name


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
    with pytest.raises(DeviceError, match="no name"):
        resolve_device("", 12_345_678, 3)
    with pytest.raises(DeviceError):
        device("../device")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    text = (FOLDER / "t4.toml").read_text()
    for broken in (text.replace('source = "sheet"', 'source = "nowhere"'), text.replace("sm_count", "sm_counts"),
                   text.replace("value = 320", "value = nan"), "name = "):
        path = tmp_path / "t4.toml"
        path.write_text(broken)
        with pytest.raises(DeviceError, match=r"t4\.toml"):
            read_device(path)


def test_features_are_finite_numbers_of_every_device() -> None:
    for name in device_names():
        features = device(name).features()
        assert features.keys() == device("t4").features().keys()
        assert all(value >= 0 for value in features.values())

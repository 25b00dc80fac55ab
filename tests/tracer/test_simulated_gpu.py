"""The simulated libraries take what the real ones take: by the installed packages, else by what is stated of them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu.amdsmi import SimulatedAmdSmi
from simulated_gpu.cuda import SimulatedProperties, simulate_cuda
from simulated_gpu.driver import SimulatedCuda, SimulatedGpu
from simulated_gpu.nvml import SimulatedNvml
from simulated_gpu.signatures import DRIVER, TORCH_2_6

AMDSMI = Path(sys.prefix) / "amdsmi"
"""Where ``ci/newest.py`` puts AMD's package: to be read only, as it cannot be imported without its library."""


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names that a function takes, without ``self`` and those of any name."""
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.name != "self" and one.kind is not one.VAR_KEYWORD]


def simulated_torch_cuda() -> dict[str, list[str]]:
    """Parameters of all functions and methods of the simulated ``torch.cuda``."""
    cuda = SimulatedCuda(SimulatedGpu())
    found = {name: getattr(cuda, name) for name in dir(cuda) if not name.startswith("__") and name != "gpu"}
    for kind in ("Event", "Stream", "CUDAGraph"):
        made = found[kind]()
        found |= {f"{kind}.{name}": value for name in dir(made) if not name.startswith("_") and callable(
            value := getattr(made, name))}
    return {name: parameters(function) for name, function in found.items()}


def more_than(real: Mapping[str, list[str]], mine: Mapping[str, list[str]]) -> Iterator[str]:
    """What simulated functions take and the real ones do not; they may take less."""
    for name, taken in mine.items():
        if real[name][:len(taken)] != taken:
            yield f"{name}({', '.join(taken)}) for ({', '.join(real[name])})"


def test_nvidias_management_library() -> None:
    real, simulated = pytest.importorskip("pynvml"), SimulatedNvml([])
    names = [name for name in dir(SimulatedNvml) if name.startswith("nvml")]
    assert len(names) > 15 and [name for name in names if parameters(getattr(simulated, name)) != parameters(
        getattr(real, name))] == []
    numbers = [name for name in dir(SimulatedNvml) if name.startswith("NVML_")]
    assert [getattr(simulated, name) for name in numbers] == [getattr(real, name) for name in numbers]


def test_amds_management_library() -> None:
    found = PathFinder.find_spec("amdsmi", [*sys.path, str(AMDSMI)])
    if found is None or found.origin is None:
        pytest.skip("amdsmi is not installed (pip install 'foretrace[amd]')")
    tree = ast.parse(Path(found.origin).with_name("amdsmi_interface.py").read_text(encoding="utf-8"))
    real = {one.name: [each.arg for each in one.args.args] for one in tree.body if isinstance(one, ast.FunctionDef)}
    names = [name for name in dir(SimulatedAmdSmi) if name.startswith("amdsmi_")]
    assert len(names) > 10 and [name for name in names if parameters(getattr(SimulatedAmdSmi(), name)) != real[name]
                                ] == []
    kinds = {one.name: {target.id for each in one.body if isinstance(each, ast.Assign) for target in each.targets
                        if isinstance(target, ast.Name)} for one in tree.body if isinstance(one, ast.ClassDef)}
    for kind in ("AmdSmiClkType", "AmdSmiMemoryType", "AmdSmiTemperatureType", "AmdSmiTemperatureMetric"):
        assert set(getattr(SimulatedAmdSmi, kind).__members__) <= kinds[kind]


def test_torch_of_the_oldest_release_and_of_the_installed_one() -> None:
    torch, mine = pytest.importorskip("torch"), simulated_torch_cuda()
    assert list(more_than({name: list(taken) for name, taken in TORCH_2_6.items()}, mine)) == []
    installed = {name: parameters(eval(f"cuda.{name}", {"cuda": torch.cuda})) for name in mine}
    assert list(more_than(installed, mine)) == []


def test_torch_under_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    before = dict(vars(torch.cuda))
    simulate_cuda(monkeypatch, [SimulatedProperties()])
    changed = [name for name, function in before.items() if vars(torch.cuda)[name] is not function]
    mine = {name: parameters(getattr(torch.cuda, name)) for name in changed}
    assert len(changed) > 6 and list(more_than({name: parameters(before[name]) for name in changed}, mine)) == []
    stubs = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text(encoding="utf-8")
    fields = set(re.findall(r"^    (\w+):", re.split(r"class _CudaDeviceProperties\b", stubs)[1].split("\nclass ")[0],
                            re.MULTILINE))
    own = {name for name in (*vars(SimulatedProperties), *vars(SimulatedProperties(bus=1))) if name[0] != "_"}
    assert own - fields - {"uuid", "pci_domain_id", "pci_bus_id", "pci_device_id"} == set()


def test_nvidias_driver() -> None:
    headers = [*Path("/usr/local").glob("cuda*/include/cuda.h"), *Path(sys.prefix).rglob("nvidia/*/include/cuda.h")]
    if not headers:
        pytest.skip("no cuda.h is here (a CUDA toolkit, or pip install nvidia-cuda-runtime)")
    text = headers[0].read_text(encoding="utf-8", errors="replace")
    for name in (name for name in DRIVER if name.startswith("cu")):
        assert f"CUresult CUDAAPI {name}({DRIVER[name]});" in text

"""The packages' public names: all there, all listed, and nothing slow imported for them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, public) is not None for public in package.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_is_none_is_told_what_there_is(name: str) -> None:
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match=rf"'{name}' has no attribute 'nonsense'; it has .*{package.__all__[-1]}"):
        _ = package.nonsense


def test_importing_the_packages_imports_nothing_slow() -> None:
    code = (f"import sys, {', '.join(PACKAGES)}\n"
            "print(sorted({'numpy', 'pandas', 'torch', 'numba', 'typer'} & sys.modules.keys()))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_command_line_starts_without_numpy() -> None:
    code = ("import sys, graph_predictor.cli\n"
            "print(sorted({'numpy', 'pandas', 'torch', 'numba', 'kernel_models.device'} & sys.modules.keys()))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"

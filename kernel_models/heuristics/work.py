"""``KernelWork``: what a family's calls cost at a device's published rates; a family adds one function that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.sustained import peak_tflops
from kernel_models.op_call import Family
from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Times of n calls at published rates, µs [n]: of the arithmetic and of the memory traffic, which overlap.

    ``kernels`` [n] counts the kernels a call is known to be made of, each of which costs a device's kernel floor.
    """

    compute_us: Float64
    memory_us: Float64
    kernels: Float64


WorkFunction = Callable[[CallTable, DeviceSpec], KernelWork]
WORK: dict[Family, WorkFunction] = {}
HOST_WORK: dict[Family, WorkFunction] = {}
_MODULES = ("gemm", "convolution", "attention", "streaming", "embedding", "transfer", "on_host")


def work_of(*families: Family, on_host: bool = False) -> Callable[[WorkFunction], WorkFunction]:
    """Register the work function of families; ``on_host``: of what a CPU does otherwise than a GPU."""
    def register(function: WorkFunction) -> WorkFunction:
        for family in families:
            (HOST_WORK if on_host else WORK)[family] = function
        return function
    return register


def work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """The work of calls; a family that registered nothing counts by its bytes and operations."""
    _register()
    known = WORK | HOST_WORK if device.vendor == "host" else WORK
    return known.get(table.family, WORK[Family.OTHER])(table, device)


@cache
def _register() -> None:
    """Import the files that register work functions."""
    for name in _MODULES:
        import_module(f"kernel_models.heuristics.{name}")


def vector_us(table: CallTable, device: DeviceSpec) -> Float64:
    """Operations over the peak rate of the units that are no matrix units, µs [n].

    Arithmetic in 16 bits and less is done in fp32 by element-wise kernels, whose rate is taken.
    Source: peak rates of the device's data sheet; ATen's ``opmath_type``.
    """
    return table.flops / table.by_dtype(
        lambda d: peak_tflops(device, d if d in ("fp64", "complex128") else "fp32", matrix=False)) / 1e6


def one(table: CallTable) -> Float64:
    """One kernel a call."""
    return np.ones(len(table))

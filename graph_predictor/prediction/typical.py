"""Work whose sizes nobody recorded: scaled between devices as typical work of its family that takes as long.

A trace without shapes still says how long each kernel took and, by the operation's name, of which family it is. A
ladder of typical calls of that family, from small to large, is priced on both devices; a kernel's ratio is read off
where the first device's price equals its measured time. Short kernels so stay at the floor of a launch, long ones go by
rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import calls_of, operation
from tracer.arrays import Float64

RUNGS = 24


@lru_cache
def ladders(family: Family) -> tuple[tuple[OpCall, ...], ...]:
    """Typical work of a family, as ladders of growing calls; the ratios of several ladders are averaged (log)."""
    sizes = np.unique(np.rint(np.geomspace(1, 4096, RUNGS)).astype(int)).tolist()
    if family is Family.CONV:
        # Layers of ResNet-50 (He et al. 2016, table 1): the 3×3 and the 1×1 of a middle stage.
        options = [[1, 1], [1, 1], [1, 1]]
        of = [((128, 28, 28), (128, 128, 3, 3)), ((512, 28, 28), (128, 512, 1, 1))]
        return tuple(tuple(_one("aten::convolution", [(n, *image), weight, None, *([None] * 6)],
                                [None, None, None, options[0], [kernel // 2] * 2, options[2], False, [0, 0], 1])
                           for n in sizes) for image, weight in of for kernel in [weight[-1]])
    if family is Family.GEMM:
        return (tuple(_one("aten::mm", [(16 * n, 1024), (1024, 1024)], None) for n in sizes),)
    if family is Family.ATTENTION:
        return (tuple(_one("aten::bmm", [(n, 512, 64), (n, 64, 512)], None) for n in sizes),)
    return (tuple(_one("aten::add", [(n * 16384,), (n * 16384,)], None) for n in sizes),)


def _one(name: str, shapes: Sequence[object], values: Sequence[object] | None) -> OpCall:
    return calls_of(operation(name, shapes, "fp32", None, values))[0]


def typical_calls(family: Family, source: DeviceSpec) -> list[list[OpCall]]:
    """The ladders of a family, as calls that a device would run."""
    calls = [list(rung) for rung in ladders(family)]
    if family is Family.CONV and "tf32" in source.matrix_tflops:
        # cuDNN's default: fp32 data, TF32 products.
        return [[replace(call, dtype="tf32") for call in rung] for rung in calls]
    return calls


@dataclass(frozen=True)
class Ladders:
    """The ladders of some families, as calls to be priced together.

    Attributes:
        families: of the kernels.
        source: where they were measured.
    """

    families: tuple[Family, ...]
    source: DeviceSpec

    @cached_property
    def _rungs(self) -> dict[Family, list[list[OpCall]]]:
        return {family: typical_calls(family, self.source) for family in dict.fromkeys(map(_ladder, self.families))}

    @property
    def calls(self) -> list[OpCall]:
        """The calls of all, one behind the other."""
        return [call for calls in self._rungs.values() for each in calls for call in each]

    def times(self, times_us: Float64) -> dict[Family, list[Float64]]:
        """Return times of the calls by family and ladder, µs."""
        lengths = [len(each) for calls in self._rungs.values() for each in calls]
        ladders = iter(np.split(times_us, np.cumsum(lengths)[:-1]))
        found = {family: [next(ladders) for _ in calls] for family, calls in self._rungs.items()}
        return {family: found[_ladder(family)] for family in self.families}


def _ladder(family: Family) -> Family:
    """The family whose ladders stand for one's."""
    return family if family in (Family.CONV, Family.GEMM, Family.ATTENTION) else Family.OTHER


def typical_ratios(log_us: Float64, before_us: Sequence[Float64], after_us: Sequence[Float64]) -> Float64:
    """Time on the target over the time on the source, for kernels of a family and the time they took, [n].

    Args:
        log_us: logs of their times on the source, µs.
        before_us, after_us: times of the family's ladders there and on the target.
    """
    logs = np.zeros(len(log_us))
    for before, after in zip(before_us, after_us, strict=True):
        order = np.argsort(before)
        logs += np.interp(log_us, np.log(before[order]), np.log(after / before)[order])
    return np.exp(logs / len(before_us))

"""``Configuration``: all that can be different from a source, as plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from graph_predictor.prediction.scenario import EditError

if TYPE_CHECKING:
    from graph_predictor.edits import Edit

SWITCHES = ("cuda-graphs", "no-data-loading", "fused-optimizer", "fuse-elementwise", "flash-attention", "recompute",
            "no-recompute", "overlap-loading", "compile", "free-launches", "no-waits", "hide-collectives")
"""Edits without a value. In this order they are applied where the order is ours to choose."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is different; see the options of ``foretrace predict`` for how texts are written.

    Attributes:
        device, dtype, parallel, straggler, topology, from_topology: None for that of the source.
        host_from: path of the capture whose host is taken.
        comm_profile: path of measured collectives; comm_backend: whose they are, such as "gloo".
        host, clock, bandwidth, kernels: factors.
        sizes: as ``--set`` takes them.
        also: further captures, for laws of sizes.
        code: the program, as SCRIPT.py:FUNCTION.
        switches: of ``SWITCHES``.
    """

    device: str | None = None
    dtype: str | None = None
    parallel: str | None = None
    straggler: str | None = None
    topology: str | None = None
    from_topology: str | None = None
    comm_profile: str | None = None
    comm_backend: str | None = None
    host_from: str | None = None
    host: float = 1.0
    clock: float = 1.0
    bandwidth: float = 1.0
    kernels: float = 1.0
    sizes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    code: str | None = None
    switches: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.switches - set(SWITCHES))
        if unknown:
            raise EditError(f"{unknown[0]!r} is no edit that can be switched on; there are {', '.join(SWITCHES)}.")
        if {"recompute", "no-recompute"} <= self.switches:
            raise EditError("Recomputation cannot be switched on and off at once; choose one.")

    def with_values(self, **values: object) -> Configuration:
        """The same with other values of some attributes."""
        return replace(self, **values)  # type: ignore[arg-type]

    def differences(self) -> dict[str, object]:
        """The attributes that are not as the source has them, as plain values."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = Configuration()
        return {name: sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple)
                else value for name, value in found.items() if value != getattr(plain, name)}


def switched_edits(switches: frozenset[str]) -> list[Edit]:
    """The edits of some of ``SWITCHES``, in a fixed order."""
    from graph_predictor import edits

    by_name: dict[str, Edit] = {
        "fused-optimizer": edits.FusedOptimizer(),
        "no-data-loading": edits.NoDataLoading(), "cuda-graphs": edits.CudaGraphs(),
        "recompute": edits.Recompute(True), "no-recompute": edits.Recompute(False),
        "fuse-elementwise": edits.FuseElementwise(), "flash-attention": edits.FlashAttention(),
        "overlap-loading": edits.OverlapLoading(), "compile": edits.Compile(),
        "free-launches": edits.FreeLaunches(), "no-waits": edits.NoWaits(),
        "hide-collectives": edits.HideCollectives()}
    return [edit for name, edit in by_name.items() if name in switches]


__all__ = ["SWITCHES", "Configuration", "switched_edits"]

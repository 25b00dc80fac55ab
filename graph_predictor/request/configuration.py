"""``Configuration``: all that can be different from a source, as plain values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from graph_predictor.edits.registry import SWITCHES
from graph_predictor.prediction.scenario import EditError


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
        switches: of ``edits.registry.SWITCHES``.
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


__all__ = ["Configuration"]

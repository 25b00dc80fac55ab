"""``Configuration``: all that can be different from a source, as plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from graph_predictor.edits.registry import Value, chosen


@dataclass(frozen=True, slots=True)
class Configuration:
    """Changes of a source; see the options of ``foretrace predict`` for how texts are written.

    Attributes:
        device, parallel, topology, from_topology: None for that of the source.
        host_from: path of the capture whose host is taken.
        comm_profile: path of measured collectives; comm_backend: whose they are, such as "gloo".
        comm_choices: path of several backends' measured collectives, or "auto": each is done by the best of them.
        sizes: as ``--set`` takes them.
        also: further captures at other sizes; the nearest one is scaled.
        code: the program, as SCRIPT.py:FUNCTION.
        edits: their values by the name of their option, such as ``{"clock": 1.5, "cuda-graphs": True}``.
    """

    device: str | None = None
    parallel: str | None = None
    topology: str | None = None
    from_topology: str | None = None
    comm_profile: str | None = None
    comm_backend: str | None = None
    comm_choices: str | None = None
    host_from: str | None = None
    sizes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    code: str | None = None
    edits: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", chosen(self.edits))

    def with_values(self, **values: object) -> Configuration:
        """Return the same with other values of some attributes."""
        return replace(self, **values)  # type: ignore[arg-type]

    def differences(self) -> dict[str, object]:
        """Return the attributes that are not as the source has them, as plain values."""
        plain = Configuration()
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()
                if value != getattr(plain, name)}

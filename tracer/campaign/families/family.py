"""A family of micro-benchmarks: its parameters and the preparation of one of its benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tracer.campaign.errors import CampaignError

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

DTYPES = ("fp32", "bf16", "fp16")
BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of one element."""
FORWARD_BACKWARD = ("forward", "backward")


class SizeRange(NamedTuple):
    """A parameter that changes the shape; ``tiny`` is the most it is in a rehearsal."""

    tiny: int
    default: int | None = None
    least: int = 1


class FamilyChoice(NamedTuple):
    """A parameter that takes one of a few values; the first is the default."""

    values: tuple[str | bool, ...]


@dataclass
class Bench:
    """One benchmark, ready to run.

    Attributes:
        run: does the work once, on tensors that are there already; called again and again.
        flops: floating-point operations of one run (a multiplication and an addition are two).
        bytes: fewest bytes it moves in device memory: every input read once, every output written once.
        asynchronous: whether ``run`` only launches, so that it may be queued behind other work.
        samples: instead of ``run``: measures itself and gives microseconds by the name of what was measured.
    """

    run: Callable[[], Any] = lambda: None
    flops: float = 0.0
    bytes: float = 0.0
    asynchronous: bool = True
    samples: Callable[[], Mapping[str, list[float]]] | None = None


@dataclass(frozen=True)
class CampaignFamily:
    """A family of micro-benchmarks.

    Attributes:
        name: the family's name, and that of its table.
        summary: what it measures.
        sizes: parameters that make the shape; they alone decide the split.
        choices: parameters that say how the same shape is worked on.
        prepare: (settings, lab) → the benchmark. Raises whatever torch raises for what it cannot do.
        check: (settings) → why they do not go together; empty if they do.
    """

    name: str
    summary: str
    sizes: Mapping[str, SizeRange]
    choices: Mapping[str, FamilyChoice]
    prepare: Callable[[dict[str, Any], Lab], Bench]
    check: Callable[[dict[str, Any]], str] = field(default=lambda settings: "")

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All settings, defaults filled in, sizes first.

        Raises:
            CampaignError: a setting is unknown, missing or out of range.
        """
        known = [*self.sizes, *self.choices]
        for name in values:
            if name not in known:
                raise CampaignError(f"{self.name} has no setting {name!r}; it has {', '.join(known)}.")
        settings: dict[str, Any] = {}
        for name, size in self.sizes.items():
            value = values.get(name, size.default)
            if value is None:
                raise CampaignError(f"{self.name} needs {name}, a whole number.")
            if not isinstance(value, int) or isinstance(value, bool) or value < size.least:
                raise CampaignError(f"{self.name}: {name}={value} cannot be used; it must be a whole number, "
                                    f"{size.least} or more.")
            settings[name] = value
        for name, choice in self.choices.items():
            value = values.get(name, choice.values[0])
            if value not in choice.values or isinstance(value, bool) != isinstance(choice.values[0], bool):
                raise CampaignError(f"{self.name}: {name}={value} cannot be used; choose one of "
                                    f"{', '.join(str(v).lower() for v in choice.values)}.")
            settings[name] = value
        why = self.check(settings)
        if why:
            raise CampaignError(f"{self.name}: {why}")
        return settings

    def tiny(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with each size at most its rehearsal's."""
        return {name: min(value, self.sizes[name].tiny) if name in self.sizes else value
                for name, value in settings.items()}

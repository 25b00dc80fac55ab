"""Every edit that a switch or a number names: written here once, it is an option of ``predict``, an axis of ``sweep``
and, with a candidate, one of the changes that ``opportunities`` tries.

To add one: a file here with its class (see ``prediction.edit.Edit``), a line below, and tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graph_predictor.prediction.edit import Edit

Value = str | float | bool


class Takes(Enum):
    """What an edit's option takes."""

    NOTHING = "nothing"
    ON_OFF = "on|off"
    FACTOR = "FACTOR"
    TYPE = "TYPE"


@dataclass(frozen=True, slots=True)
class CandidateValue:
    """An edit as ``opportunities`` tries it: what it is called, its value, and whether it is a bound on what any real
    change could save rather than a change that somebody can make."""

    name: str
    value: Value = True
    bound: bool = False


@dataclass(frozen=True, slots=True)
class EditOption:
    """How an edit is named.

    Attributes:
        name: of the option, without its dashes.
        edit: its class, as module of this package and name; made with the option's value where it takes one.
        help: what the option does.
        takes: a kind of value.
        candidates: what of it is worth trying on any step.
    """

    name: str
    edit: str
    help: str
    takes: Takes = Takes.NOTHING
    candidates: tuple[CandidateValue, ...] = ()

    @property
    def attribute(self) -> str:
        """Its name where names have no dashes."""
        return self.name.replace("-", "_")

    @property
    def switches(self) -> tuple[str, ...]:
        """The words that switch it on in ``Configuration.switches``; none where it takes a number or a type."""
        if self.takes is Takes.ON_OFF:
            return self.name, f"no-{self.name}"
        return (self.name,) if self.takes is Takes.NOTHING else ()

    def make(self, value: Value) -> Edit:
        """Make the edit. Raises ``EditError`` where the value is none of its kind."""
        module, _, name = self.edit.partition(":")
        made = getattr(import_module(f"graph_predictor.edits.{module}"), name)
        return made() if self.takes is Takes.NOTHING else made(value)  # type: ignore[no-any-return]

    def written(self, value: Value) -> str:
        """The option with a value, as on a command line."""
        if self.takes is Takes.NOTHING:
            return f"--{self.name}"
        if self.takes is Takes.ON_OFF:
            return f"--{self.name} {'on' if value else 'off'}"
        return f"--{self.name} {value:g}" if isinstance(value, float) else f"--{self.name} {value}"


OPTIONS = (
    EditOption("dtype", "precision:Precision", "Products in bf16 or fp16 (autocast), tf32 or fp32.", Takes.TYPE,
               (CandidateValue("bf16 autocast", "bf16"), CandidateValue("TF32 products", "tf32"))),
    EditOption("clock", "scale:ScaleClock", "GPU clock × FACTOR.", Takes.FACTOR,
               (CandidateValue("2× compute clock", 2.0, bound=True),)),
    EditOption("bandwidth", "scale:ScaleBandwidth", "GPU memory bandwidth × FACTOR.", Takes.FACTOR,
               (CandidateValue("2× memory bandwidth", 2.0, bound=True),)),
    EditOption("kernels", "scale:ScaleKernels", "Kernel durations × FACTOR.", Takes.FACTOR),
    EditOption("host", "scale:ScaleHost", "Host time × FACTOR.", Takes.FACTOR,
               (CandidateValue("host twice as fast", 0.5),)),
    EditOption("cuda-graphs", "launches:CudaGraphs", "Replay the step as a CUDA graph.",
               candidates=(CandidateValue("CUDA graphs"),)),
    EditOption("no-data-loading", "launches:NoDataLoading", "Batches are always ready.",
               candidates=(CandidateValue("no data loading", bound=True),)),
    EditOption("fused-optimizer", "optimizer:FusedOptimizer", "The optimizer's step as one fused kernel.",
               candidates=(CandidateValue("fused optimizer"),)),
    EditOption("fuse-elementwise", "fusion:FuseElementwise", "Chains of elementwise kernels as one kernel each.",
               candidates=(CandidateValue("fused elementwise chains"),)),
    EditOption("flash-attention", "attention:FlashAttention", "Attention that is written out as a fused operator.",
               candidates=(CandidateValue("flash attention"),)),
    EditOption("recompute", "recompute:Recompute", "Activation checkpointing of every block.", Takes.ON_OFF,
               (CandidateValue("no recomputation", False),)),
    EditOption("overlap-loading", "overlap:OverlapLoading", "Batches loaded in the background.",
               candidates=(CandidateValue("data loading overlapped"),)),
    EditOption("compile", "compile:Compile", "torch.compile, approximately.",
               candidates=(CandidateValue("torch.compile (approximate)"),)),
    EditOption("free-launches", "launches:FreeLaunches", "Launches cost nothing.",
               candidates=(CandidateValue("free launches", bound=True),)),
    EditOption("no-waits", "overlap:NoWaits", "The host never waits for the device.",
               candidates=(CandidateValue("no waits for the device", bound=True),)),
    EditOption("hide-collectives", "overlap:HideCollectives", "Collectives overlap with everything else.",
               candidates=(CandidateValue("communication overlapped", bound=True),)),
)
"""In this order they are applied where the order is ours to choose."""

SWITCHES = tuple(word for option in OPTIONS for word in option.switches)
"""Edits without a number, as they are switched on."""
FACTORS = tuple(option.attribute for option in OPTIONS if option.takes is Takes.FACTOR)


def switched_edits(switches: frozenset[str]) -> list[Edit]:
    """The edits of some of ``SWITCHES``, in their order."""
    return [option.make(not word.startswith("no-") or option.takes is Takes.NOTHING)
            for option in OPTIONS for word in option.switches if word in switches]


def valued_edits(values: dict[str, Value | None]) -> list[Edit]:
    """The edits of types and factors by attribute, in their order; a factor of 1 and ``None`` are no edits."""
    return [option.make(value) for option in OPTIONS if not option.switches
            and (value := values.get(option.attribute)) is not None and value != 1.0]

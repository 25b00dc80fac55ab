"""The edits that an option names: one row of ``OPTIONS`` each.

A row makes an option of ``predict``, ``export`` and ``serve``, an axis of ``sweep`` and, if it has values to try, a
change that ``opportunities`` tries. To add an edit, add a file here with a class that follows
``prediction.scenario.Edit``, and a row below. A file is imported only when its edit is made, so that ``--help`` answers
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracer.errors import ForetraceError

if TYPE_CHECKING:
    from graph_predictor.prediction.scenario import Edit

Value = str | float | bool

NOTHING, ON_OFF, FACTOR = "nothing", "on|off", "FACTOR"


@dataclass(frozen=True, slots=True)
class EditOption:
    """An edit, and the command-line option that makes it.

    Attributes:
        module: name of the edit's file in this folder, without ``.py``.
        edit: name of its class in the file.
        name: name of the option, without its dashes.
        help: what the option does.
        takes: "nothing", "on|off" or "FACTOR"; any other word is the name of a text, which the class or its ``parse``
            takes.
        example: such a text; tests try the edit with it.
        tries: values that are worth trying on any step, by their labels.
        bounds: values that no real change reaches, to bound what a change could save; by their labels.
    """

    module: str
    edit: str
    name: str
    help: str
    takes: str = NOTHING
    example: str = ""
    tries: Mapping[str, Value] = field(default_factory=dict)
    bounds: Mapping[str, Value] = field(default_factory=dict)

    @property
    def attribute(self) -> str:
        """Return the option's name as an identifier, without dashes."""
        return self.name.replace("-", "_")

    @property
    def switches(self) -> dict[str, bool]:
        """Return the words that name this edit in lists of edits, with their values; empty for factors and texts."""
        if self.takes == ON_OFF:
            return {self.name: True, f"no-{self.name}": False}
        return {self.name: True} if self.takes == NOTHING else {}

    def changes(self, value: Value | None) -> bool:
        """Return whether a value changes anything: a factor of 1 does not."""
        return value is not None and not (self.takes == FACTOR and value == 1.0)

    def make(self, value: Value) -> Edit:
        """Return the edit with a value. Raises ``EditError`` if the value is not valid."""
        edit: Any = getattr(import_module(f"graph_predictor.edits.{self.module}"), self.edit)
        made: Edit = edit() if self.takes == NOTHING else getattr(edit, "parse", edit)(value)
        return made

    def written(self, value: Value) -> str:
        """Return the option with a value, as on a command line."""
        if self.takes == NOTHING:
            return f"--{self.name}"
        if self.takes == ON_OFF:
            return f"--{self.name} {'on' if value else 'off'}"
        return f"--{self.name} {value:g}" if isinstance(value, float) else f"--{self.name} {value}"


OPTIONS = (
    EditOption("precision", "Precision", "dtype",
               "Element type, such as bf16: products in bf16 or fp16 (autocast), tf32 or fp32.", takes="TYPE",
               example="bf16", tries={"bf16 autocast": "bf16", "TF32 products": "tf32"}),
    EditOption("remove", "Remove", "remove",
               "Leave out operations with all inside them, by name or pattern: aten::gelu or aten::*dropout*.",
               takes="OPERATION", example="aten::mm|aten::mul*"),
    EditOption("scale", "ScaleClock", "clock", "GPU clock × FACTOR.", takes=FACTOR, bounds={"2× compute clock": 2.0}),
    EditOption("scale", "ScaleBandwidth", "bandwidth", "GPU memory bandwidth × FACTOR.", takes=FACTOR,
               bounds={"2× memory bandwidth": 2.0}),
    EditOption("scale", "ScaleKernels", "kernels", "Kernel durations × FACTOR.", takes=FACTOR),
    EditOption("scale", "ScaleHost", "host", "Host time × FACTOR.", takes=FACTOR, tries={"host twice as fast": 0.5}),
    EditOption("launches", "CudaGraphs", "cuda-graphs", "Replay the step as a CUDA graph.",
               tries={"CUDA graphs": True}),
    EditOption("launches", "FreeLaunches", "free-launches", "Launches cost nothing.", bounds={"free launches": True}),
    EditOption("launches", "NoDataLoading", "no-data-loading", "Batches are always ready.",
               bounds={"no data loading": True}),
    EditOption("optimizer", "FusedOptimizer", "fused-optimizer", "The optimizer's step as one fused kernel.",
               tries={"fused optimizer": True}),
    EditOption("fusion", "FuseElementwise", "fuse-elementwise", "Chains of elementwise kernels as one kernel each.",
               tries={"fused elementwise chains": True}),
    EditOption("attention", "FlashAttention", "flash-attention", "Attention that is written out as a fused operator.",
               tries={"flash attention": True}),
    EditOption("recompute", "Recompute", "recompute", "Activation checkpointing of every block.", takes=ON_OFF,
               tries={"no recomputation": False}),
    EditOption("overlap", "OverlapLoading", "overlap-loading", "Batches loaded in the background.",
               tries={"data loading overlapped": True}),
    EditOption("overlap", "HideCollectives", "hide-collectives", "Collectives overlap with everything else.",
               bounds={"communication overlapped": True}),
    EditOption("overlap", "NoWaits", "no-waits", "The host never waits for the device.",
               bounds={"no waits for the device": True}),
    EditOption("compile", "Compile", "compile", "torch.compile, approximately.",
               tries={"torch.compile (approximate)": True}),
    EditOption("straggler", "Straggler", "straggler", "One rank slower, such as 3:10%.", takes="RANK:PERCENT%",
               example="0:50%"),
    EditOption("lookups", "OtherIndices", "indices",
               "Indices that embedding tables are looked up by: Parquet, CSV, dlrm_datasets, or a Zipf law.",
               takes="FILE|zipf:S", example="zipf:1.05"),
    EditOption("link", "ScaleLink", "link", "Links within and between nodes × FACTOR.", takes=FACTOR),
    EditOption("peers", "RanksAlike", "ranks-alike",
               "Ranks that were not recorded arrive as the recorded ones do: collectives only transfer.",
               bounds={"no waiting for unrecorded ranks": True}),
    EditOption("without_profiler", "TakeOutProfiler", "without-profiler",
               "Take out what the profiler's events cost the host, where no step was timed without."),
    EditOption("scale_out", "ScaleOut", "scale-out", "The recorded job on so many ranks, each with the same work.",
               takes="RANKS[@NET]", example="16"),
)
"""Edits in the order in which they are applied, as far as that order is free."""


def switched(words: Iterable[str]) -> dict[str, Value]:
    """Return the edits that words such as ``cuda-graphs`` or ``no-recompute`` switch, by name.

    Raises:
        ForetraceError: a word switches no edit, or two words switch one on and off.
    """
    known = {word: (option.name, value) for option in OPTIONS for word, value in option.switches.items()}
    found: dict[str, Value] = {}
    for word in words:
        if word not in known:
            raise ForetraceError(f"{word!r} is no edit that can be switched on; there are {', '.join(known)}.")
        name, value = known[word]
        if found.get(name, value) != value:
            raise ForetraceError(f"--{name} cannot be switched on and off at once; choose one.")
        found[name] = value
    return found


def chosen(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return the values that change anything, by name, in the registry's order.

    Raises:
        ForetraceError: there is no edit with a name.
    """
    unknown = sorted(set(values) - {option.name for option in OPTIONS})
    if unknown:
        raise ForetraceError(f"There is no edit {unknown[0]!r}; there are "
                             f"{', '.join(option.name for option in OPTIONS)}.")
    return {option.name: value for option in OPTIONS
            if (value := values.get(option.name)) is not None and option.changes(value)}


def made(values: Mapping[str, Value]) -> list[Edit]:
    """Return edits for values by name, in the registry's order. Raises ``EditError`` as ``EditOption.make``."""
    return [option.make(values[option.name]) for option in OPTIONS if option.name in values]

"""Settings of workloads: ``--set key=value`` becomes a checked, typed ``Settings``.

Nothing here imports torch. A workload's settings are a frozen dataclass. Its fields are either *sizes* (they change the
work: batch, width, rows) or *modes* (they change how the same work is done: dtype, optimizer, compile). The split rule
of ``tracer.workloads.registry`` uses only the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, TypeVar, get_type_hints

from tracer.errors import ForetraceError
from tracer.lookup_data.tables import EmbeddingTable

PRESETS = ("default", "tiny", "real")
"""Sizes to start from: ``default`` (a step under 1 s on one CPU thread), ``tiny`` (tests), ``real`` (one H200)."""


MOST = dict.fromkeys(("depth", "crosses", "accumulation", "tables", "experts"), 4_096)
"""Largest counts of parts built or run one by one: a claimed billion layers would keep a command busy forever. The
deepest published decoders have some 130 layers, published recommendation models 900 tables."""


class WorkloadError(ForetraceError):
    """A workload, preset or setting does not exist, or its value cannot be used."""


class DtypeMode(str, Enum):
    """The arithmetic of a step. TF32 is on in ``tf32`` and off in all others, cuDNN included."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16_AUTOCAST = "bf16-autocast"
    """Parameters in fp32, forward and loss under ``torch.autocast``."""
    BF16 = "bf16"
    """Parameters, inputs, gradients and optimizer state in bf16; the loss in fp32."""


class OptimizerKind(str, Enum):
    """The optimizer and its implementation, always explicit: torch's own choice differs between CPU and GPU."""

    SGD = "sgd"
    """Momentum 0.9, ``foreach=True`` (what torch chooses on a GPU)."""
    ADAMW = "adamw"
    """A Python loop over the parameters (``foreach=False``), which is what torch chooses on a CPU."""
    ADAMW_FOREACH = "adamw-foreach"
    """``foreach=True``, which is what torch chooses on a GPU."""
    ADAMW_FUSED = "adamw-fused"


class SizeRole(str, Enum):
    """Whether a setting changes the work (and so may be held out of fits) or only how it is done."""

    SIZE = "size"
    MODE = "mode"


class Norm(str, Enum):
    """The normalisation of a convolutional network."""

    BATCH = "batch"
    GROUP = "group"


def size(default: Any, doc: str, minimum: float | None = 1, *, later: bool = False) -> Any:
    """Return a dataclass field that changes the work; ``minimum`` is the least value it may take.

    A size that was added to a workload ``later`` counts among its sizes only where it differs from its default. So
    existing configurations stay on their side of the split (fitted or held out).
    """
    return field(default=default, metadata={"role": SizeRole.SIZE, "doc": doc, "minimum": minimum, "later": later})


def mode(default: Any, doc: str, minimum: float | None = None) -> Any:
    """Return a dataclass field that changes how the work is done."""
    return field(default=default, metadata={"role": SizeRole.MODE, "doc": doc, "minimum": minimum})


@dataclass(frozen=True)
class Setting:
    """One setting as ``foretrace workloads`` shows it. ``choices`` is empty if any value of the type is valid."""

    name: str
    type: str
    default: object
    minimum: float | None
    choices: tuple[str, ...]
    role: SizeRole
    doc: str


Self = TypeVar("Self", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all workloads share; each workload has its own subclass in ``tracer.workloads.catalogue``.

    Raises:
        WorkloadError: A value is of the wrong type, too small or too large, or contradicts another setting.
    """

    WORKLOAD: ClassVar[str] = ""
    """The workload's name."""
    SUMMARY: ClassVar[str] = ""
    TINY: ClassVar[Mapping[str, Any]] = {}
    REAL: ClassVar[Mapping[str, Any]] = {}
    TOKENS: ClassVar[bool] = False
    """Whether a sample consists of ``seq`` tokens."""

    batch: int = size(4, "samples in a micro-batch")
    accumulation: int = mode(1, "micro-batches in a step (gradient accumulation)", 1)
    dtype: DtypeMode = mode(DtypeMode.FP32, "arithmetic of the step")  # noqa: RUF009
    optimizer: OptimizerKind = mode(OptimizerKind.ADAMW_FOREACH, "optimizer and its implementation")  # noqa: RUF009
    compile: bool = mode(False, "run the model under torch.compile(dynamic=False)")
    checkpointing: bool = mode(False, "recompute each block's activations in backward")
    device: str = mode("cpu", "torch device: cpu, cuda, cuda:1, meta")
    seed: int = mode(0, "seed of parameters, data and dropout", 0)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = _checked(self.WORKLOAD, item.name, self.type_of(item.name), getattr(self, item.name))
            least = item.metadata["minimum"]
            if least is not None and value < least:
                raise WorkloadError(f"{self.WORKLOAD}: {item.name}={value} is too small; the least is {least}.")
            if item.name in MOST and value > (most := MOST[item.name]):
                raise WorkloadError(f"{self.WORKLOAD}: {item.name}={value} is too large; the most is {most:,}.")
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Raise ``WorkloadError`` if settings contradict each other; subclasses add their checks."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.batch * self.accumulation

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in one optimizer step; None for workloads without text."""
        return self.samples_per_step * int(getattr(self, "seq")) if self.TOKENS else None  # noqa: B009

    def sizes(self) -> dict[str, Any]:
        """Return the settings that change the work, by name, sorted."""
        return {item.name: getattr(self, item.name) for item in sorted(fields(self), key=lambda item: item.name)
                if item.metadata["role"] is SizeRole.SIZE
                and not (item.metadata["later"] and getattr(self, item.name) == item.default)}

    def embedding_tables(self) -> list[EmbeddingTable]:
        """Return the tables in which a step looks up rows, named by their modules, with their data's distribution."""
        return []

    @classmethod
    def type_of(cls, name: str) -> type[Any]:
        """Return the type of a setting: int, float, bool, str or an enum."""
        found: type[Any] = _types(cls)[name]
        return found

    @classmethod
    def listed(cls) -> tuple[Setting, ...]:
        """Return every setting, sizes first."""
        found = []
        for item in fields(cls):
            kind = cls.type_of(item.name)
            choices = tuple(str(member.value) for member in kind) if issubclass(kind, Enum) else ()
            assert item.default is not MISSING
            default = item.default.value if isinstance(item.default, Enum) else item.default
            metadata = item.metadata
            found.append(Setting(item.name, "choice" if choices else kind.__name__, default, metadata["minimum"],
                                 choices, metadata["role"], metadata["doc"]))
        return tuple(sorted(found, key=lambda setting: setting.role is SizeRole.MODE))

    @classmethod
    def from_preset(cls: type[Self], preset: str, values: Mapping[str, Any]) -> Self:
        """Return the preset's settings, overridden by ``values`` (typed, or as text).

        Raises:
            WorkloadError: There is no such preset or setting, or a value cannot be used.
        """
        if preset not in PRESETS:
            raise WorkloadError(f"There is no preset {preset!r}; choose one of {', '.join(PRESETS)}.")
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise WorkloadError(f"{cls.WORKLOAD} has no setting {name!r}; it has {', '.join(known)}.")
        start = {"default": {}, "tiny": cls.TINY, "real": cls.REAL}[preset]
        return cls(**{**start, **values})

    def needs_multiple(self, name: str, of: str) -> None:
        """Raise ``WorkloadError`` unless the setting ``name`` is a multiple of the setting ``of``."""
        value, unit = getattr(self, name), getattr(self, of)
        if value % unit:
            works = -(-value // unit) * unit
            raise WorkloadError(f"{self.WORKLOAD}: {name}={value} is not a multiple of {of}={unit}; {name}={works} is.")


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Convert ``["batch=8", "dtype=bf16"]`` to ``{"batch": "8", "dtype": "bf16"}``; the last one of a name wins.

    Raises:
        WorkloadError: An assignment has no ``=`` or no name.
    """
    found = {}
    for text in assignments:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise WorkloadError(f"{text!r} sets nothing; write a setting as key=value, for example batch=8.")
        found[name] = value
    return found


_TYPES: dict[type, dict[str, type[Any]]] = {}


def _types(cls: type[Settings]) -> dict[str, type[Any]]:
    if cls not in _TYPES:
        _TYPES[cls] = get_type_hints(cls)
    return _TYPES[cls]


_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _checked(workload: str, name: str, kind: type[Any], value: Any) -> Any:
    """Return the value in the field's type, given in that type or as text."""
    given = value.value if isinstance(value, Enum) else value
    wanted = f"one of {', '.join(member.value for member in kind)}" if issubclass(kind, Enum) else _WANTED[kind]
    try:
        if issubclass(kind, Enum):
            return kind(given)
        if isinstance(value, str):
            value = _TRUTH[value.lower()] if kind is bool else kind(value)
        finite = kind is not float or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if finite and (type(value) is kind or (kind is float and type(value) is int)):
            return kind(value)
    except (KeyError, ValueError):
        pass
    raise WorkloadError(f"{workload}: {name}={given} cannot be used; it must be {wanted}.") from None

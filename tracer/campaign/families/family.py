"""The declaration of a micro-benchmark: its settings, its operation, and the sizes that a calibration draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tracer.campaign.plan import CampaignError

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab

DTYPES = ("fp32", "bf16", "fp16")
BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "bool": 1}
"""Bytes of one element."""
FORWARD_BACKWARD = ("forward", "backward")
ALL_DTYPES, TWO_DTYPES = ("bf16", "fp16", "fp32"), ("bf16", "fp32")
"""Element types that calibrations choose from."""

Settings = dict[str, Any]
Choice = tuple[str | bool, ...]
"""The values that a parameter takes; the first is the default."""


class SizeRange(NamedTuple):
    """A parameter that changes the shape; ``tiny`` is its largest value in a rehearsal."""

    tiny: int
    default: int | None = None
    least: int = 1


class Span(NamedTuple):
    """Least and most of a size, and the unit that a drawn size is a multiple of; of several units one is drawn."""

    low: int
    high: int
    units: tuple[int, ...] = (1,)


class SearchSpace(NamedTuple):
    """Settings that a calibration draws: sizes from their spans or listed values, choices from their values.

    All other settings have their defaults. ``device`` is "cuda" or "cpu".
    """

    device: str
    sizes: Mapping[str, Span | tuple[int, ...]]
    choices: Mapping[str, Choice] = {}


@dataclass
class Bench:
    """One benchmark, ready to run.

    Attributes:
        run: Does the work once, on existing tensors; called repeatedly.
        flops: Floating-point operations of one run (a multiplication and an addition are two).
        bytes: Least bytes that it moves in device memory: each input read once, each output written once.
        asynchronous: Whether ``run`` only launches, so that it may be queued behind other work.
        samples: Replaces ``run``: measures itself and returns microseconds by the name of each measurement.
    """

    run: Callable[[], Any] = lambda: None
    flops: float = 0.0
    bytes: float = 0.0
    asynchronous: bool = True
    samples: Callable[[], Mapping[str, list[float]]] | None = None


class TensorArgument(NamedTuple):
    """A tensor that is an argument of an operation.

    Attributes:
        shape: Shape that the operation sees.
        dtype: Type of its elements; empty for the benchmark's.
        lies: Memory layout. "t": the last two dimensions are swapped; "middle": the two middle dimensions are swapped;
            "nhwc": an image in channels last.
        of: Values: "random", "positive", "zeros" or "ones"; for int64 the law of ``Lab.indices``.
        high: Whole numbers are below this.
        differentiated: Whether random numbers require a gradient where gradients are measured.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    lies: str = ""
    of: str = "random"
    high: int = 0
    differentiated: bool = True

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Return the stride of each dimension, in elements; ``None`` for a contiguous tensor."""
        if not self.lies:
            return None
        order = _order(self)
        steps, step = [0] * len(order), 1
        for at in reversed(order):
            steps[at], step = step, step * self.shape[at]
        return tuple(steps)


class Constant(NamedTuple):
    """An argument that is torch's own: the short name of an element type, or torch's name of a memory format."""

    name: str


@dataclass(frozen=True)
class Called:
    """The operation that a benchmark calls, with its arguments and its work.

    Attributes:
        name: Name of the operator, "aten::mm". A name without a namespace is a kernel of ``kernel_models.families``,
            which is called with the same arguments; the benchmark then prepares itself.
        arguments: In the order of the operator's schema: tensors, lists of them, and plain values.
        flops: Floating-point operations of one run.
        bytes: Bytes that it moves; ``None`` for those of all its input and output tensors.
        options: Further arguments by name, which do not affect its time.
        gradient: Whether the gradient is measured instead of the operation.
        recorded: Name of the operation under which its calls are recorded, if that differs.
        call: Attributes of its call that a recorded operation's call lacks.
        priced: Whether it is a single call, so that models can be fitted to it.
    """

    name: str
    arguments: Sequence[Any]
    flops: float = 0.0
    bytes: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    gradient: bool = False
    recorded: Called | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    priced: bool = True


def prepared(called: Called, settings: Settings, lab: Lab) -> Bench:
    """Return the benchmark of an operator with newly made tensors."""
    dtype = settings["dtype"]
    lab.tf32(dtype == "tf32")
    arguments = [_made(argument, dtype, called.gradient, lab) for argument in called.arguments]
    forward = partial(lab.function(called.name), *arguments, **{
        name: _made(value, dtype, called.gradient, lab) for name, value in called.options.items()})
    given = _tensors(arguments, lab)
    if not called.gradient:
        moved = called.bytes
        if moved is None:
            moved = float(sum(tensor.nbytes for tensor in [*given, *_tensors([forward()], lab)]))
        return Bench(forward, called.flops, moved)
    output = _tensors([forward()], lab)[0]
    wanted = [tensor for tensor in given if tensor.requires_grad]
    moved = called.bytes
    if moved is None:  # the inputs and the output's gradient are read, the inputs' gradients written
        moved = float(sum(tensor.nbytes for tensor in [*given, output, *wanted]))
    return Bench(lab.gradients(output, wanted, lab.random_like(output)), called.flops, moved)


def _made(argument: Any, dtype: str, gradient: bool, lab: Lab) -> Any:
    """Return an argument in the form that torch takes."""
    if isinstance(argument, Constant):
        return lab.dtype(argument.name)
    if isinstance(argument, list):
        return [_made(one, dtype, gradient, lab) for one in argument]
    if not isinstance(argument, TensorArgument):
        return argument
    kind, order = argument.dtype or dtype, _order(argument)
    stored = tuple(argument.shape[at] for at in order)
    if kind == "int64":
        made = lab.indices(stored[0], high=argument.high, law=argument.of)
        return made[:, None].expand(stored) if len(stored) > 1 else made
    if argument.of in ("zeros", "ones"):
        return getattr(lab.torch, argument.of)(stored, device=lab.device, dtype=lab.dtype(kind))
    made = lab.random(*stored, dtype=kind)
    if argument.of == "positive":
        return made.abs_().add_(1.0)
    return made.permute([order.index(at) for at in range(len(order))]).requires_grad_(
        gradient and argument.differentiated)


def _order(tensor: TensorArgument) -> tuple[int, ...]:
    """Return the dimensions in the order of their memory layout."""
    places = tuple(range(len(tensor.shape)))
    return {"": places, "t": (*places[:-2], *places[:-3:-1]), "nhwc": (0, 2, 3, 1), "middle": (0, 2, 1, 3)}[tensor.lies]


def _tensors(values: Sequence[Any], lab: Lab) -> list[Any]:
    found = []
    for value in values:
        found += _tensors(value, lab) if isinstance(value, (list, tuple)) else [value] * lab.torch.is_tensor(value)
    return found


@dataclass(frozen=True, eq=False)
class CampaignFamily:
    """A family of micro-benchmarks.

    Attributes:
        name: The family's name, and that of its table.
        summary: What it measures.
        sizes: Parameters of the shape; they alone decide whether a case is held out.
        choices: Parameters of how the same shape is processed.
        called: (settings) → the operation, which is run unchanged unless ``prepare`` is given; ``None`` if it is not a
            single operation.
        prepare: (settings, lab) → the benchmark. Passes on any error of torch for unsupported work.
        check: (settings) → the reason why they are incompatible; empty if they are compatible.
        spaces: Search spaces from which calibrations draw settings.
        fit: Corrects drawn values that depend on each other.
        traits: (settings) → features of the sizes that, with the choices, decide whether a device supports the case.
    """

    name: str
    summary: str
    sizes: Mapping[str, SizeRange]
    choices: Mapping[str, Choice]
    called: Callable[[Settings], Called | None] = lambda settings: None
    prepare: Callable[[Settings, Lab], Bench] | None = None
    check: Callable[[Settings], str] = lambda settings: ""
    spaces: Sequence[SearchSpace] = ()
    fit: Callable[[Settings], Settings] = lambda values: values
    traits: Callable[[Settings], str] = lambda settings: ""

    def bench(self, settings: Settings, lab: Lab) -> Bench:
        """Return the benchmark of these settings, ready to run."""
        if self.prepare is not None:
            return self.prepare(settings, lab)
        called = self.called(settings)
        assert called is not None
        return prepared(called, settings, lab)

    def checked(self, values: Mapping[str, Any]) -> Settings:
        """Return all settings with defaults filled in, sizes first.

        Raises:
            CampaignError: a setting is unknown, missing or out of range.
        """
        known = [*self.sizes, *self.choices]
        for name in values:
            if name not in known:
                raise CampaignError(f"{self.name} has no setting {name!r}; it has {', '.join(known)}.")
        settings: Settings = {}
        for name, size in self.sizes.items():
            value = values.get(name, size.default)
            if value is None:
                raise CampaignError(f"{self.name} needs {name}, a whole number.")
            if not isinstance(value, int) or isinstance(value, bool) or value < size.least:
                raise CampaignError(f"{self.name}: {name}={value} cannot be used; it must be a whole number, "
                                    f"{size.least} or more.")
            settings[name] = value
        for name, choice in self.choices.items():
            value = values.get(name, choice[0])
            if value not in choice or isinstance(value, bool) != isinstance(choice[0], bool):
                raise CampaignError(f"{self.name}: {name}={value} cannot be used; choose one of "
                                    f"{', '.join(str(v).lower() for v in choice)}.")
            settings[name] = value
        why = self.check(settings)
        if why:
            raise CampaignError(f"{self.name}: {why}")
        return settings

    def tiny(self, settings: Mapping[str, Any]) -> Settings:
        """Return the settings with each size limited to its rehearsal's value."""
        return {name: min(value, self.sizes[name].tiny) if name in self.sizes else value
                for name, value in settings.items()}

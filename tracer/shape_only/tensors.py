"""Tensors of a step traced by shapes: as arguments, with values kept in addition, and the bytes that are alive.

An operator's arguments are noted as the profiler writes them ("Input Dims", "Input type", …). So
``graph.arguments(op)`` gives the same for a recorded operation and for one traced by shapes alone. It has every
argument of the schema in order, with defaults filled in. Tensors have shape, stride and C++ type name. Lists of tensors
are ``TensorList[c10::Half]``, where the profiler writes ``TensorList`` and no type. Numbers are ``Scalar`` and lists of
numbers ``ScalarList``, with their text; the rest is empty. A sparse tensor has no strides, as the profiler writes it.
In place of a number's text it has the count of its stored entries, which the profiler leaves out: "stored=4096".

The known values of a fake tensor are a real tensor kept with it, or they fill the range between two known bounds. A
tensor given other memory (``.data =``, ``set_``, ``torch.utils.swap_tensors``, ``Module.half()``) has that memory's
values from then on. A tensor that gets another dtype or shape has none.

    corners.clamp(min=0, max=width)      scores.argmax(-1)      torch.rand(2, 16000)

Where a share is given, values that an operator keeps between two bounds are assumed to fill that share of their range.
They lie around its middle, in order along the last dimension. With 0.5, corners clamped to an image are those of a box
around its middle, half as wide as the image.

Memory is followed by storage, with the purpose of each. A storage is seen when an operation first returns it. It leaves
when its last tensor dies (a weak reference reports it) or changes its size (FSDP2 empties and refills the storages of
gathered parameters). What an operation allocates and frees within itself, its workspace, is not seen.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tracer.device_memory import PEAK, Holds


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a value and in the lists, tuples and dictionaries that it consists of, in order.

    Equal to ``torch.utils._pytree.tree_leaves`` in a fifth of the time: it runs several times for each operator.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


_TYPES: dict[Any, str] = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short int", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
# c10/core/ScalarType.h.
_SCALAR_TYPES: dict[Any, int] = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.complex64: 9, torch.complex128: 10, torch.bool: 11, torch.bfloat16: 15,
}
for _name, _type, _code in (("float8_e5m2", "c10::Float8_e5m2", 23), ("float8_e4m3fn", "c10::Float8_e4m3fn", 24),
                            ("uint16", "unsigned short", 27), ("uint32", "unsigned int", 28),
                            ("uint64", "unsigned long", 29)):
    if hasattr(torch, _name):
        _TYPES[getattr(torch, _name)], _SCALAR_TYPES[getattr(torch, _name)] = _type, _code
_WRAPPED = {int: "long int", float: "double", bool: "bool"}
# c10/core/MemoryFormat.h.
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}

Texts = tuple[str, str, str, str]
"""Shapes, dtypes, strides and scalars, each a JSON text."""


class ArgumentWriter:
    """Writes the arguments of calls; the argument names and defaults of each operator are looked up once."""

    def __init__(self) -> None:
        self._schemas: dict[Any, list[tuple[str, Any, str]]] = {}

    def texts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Texts:
        """Return the four texts of a call. ``kwargs`` may hold a device only if the call moves data to or from it."""
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = [
                (a.name, a.default_value, str(a.type))
                for a in func._schema.arguments]
        shapes: list[Any] = []
        dtypes: list[Any] = []
        strides: list[Any] = []
        scalars: list[Any] = []
        given = len(args)
        for i, (name, default, kind) in enumerate(schema):
            value = args[i] if i < given else kwargs.get(name, default)
            # A number in a tensor's place is a tensor without dimensions.
            if kind in ("Tensor", "Optional[Tensor]") and type(value) in _WRAPPED:
                written: tuple[str, Any, Any, str] = (_WRAPPED[type(value)], [], [], "")
            elif kind == "List[Tensor]" and not value:
                written = ("TensorList", [], [], "")
            else:
                written = _argument(value)
            for texts, text in zip((dtypes, shapes, strides, scalars), written, strict=True):
                texts.append(text)
        return json.dumps(shapes), json.dumps(dtypes), json.dumps(strides), json.dumps(scalars)


def type_name(dtype: Any) -> str:
    """Return a torch type as the profiler names it."""
    return _TYPES.get(dtype, str(dtype).removeprefix("torch."))


def _argument(value: Any) -> tuple[str, Any, Any, str]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return type_name(value.dtype), [int(n) for n in value.shape], [int(n) for n in value.stride()], ""
        stored = f"stored={value._nnz()}" if value.layout is torch.sparse_coo else ""
        return type_name(value.dtype), [int(n) for n in value.shape], [], stored
    if value is None or isinstance(value, str):
        return "", [], [], ""
    if isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return "Scalar", [], [], _number(value)
    if isinstance(value, torch.dtype):
        return "Scalar", [], [], str(_SCALAR_TYPES.get(value, -1))
    if isinstance(value, torch.layout):
        return "Scalar", [], [], "0" if value is torch.strided else "1"
    if isinstance(value, torch.memory_format):
        return "Scalar", [], [], str(_FORMATS.get(value, 1))
    if isinstance(value, torch.device):
        return ("Device", [], [], str(value)) if value.type == "cuda" else ("", [], [], "")
    if isinstance(value, list | tuple):
        if any(isinstance(part, torch.Tensor) for part in value):
            tensors = [part for part in value if isinstance(part, torch.Tensor)]
            kinds = {type_name(t.dtype) for t in tensors}
            kind = f"TensorList[{kinds.pop()}]" if len(kinds) == 1 else "TensorList"
            return kind, [[int(n) for n in t.shape] for t in tensors], \
                [[int(n) for n in t.stride()] if t.layout is torch.strided else [] for t in tensors], ""
        if all(isinstance(part, bool | int | float | torch.SymInt) for part in value):
            return "ScalarList", [], [], "[" + ", ".join(map(_number, value)) + "]"
    return "", [], [], ""


def _number(value: Any) -> str:
    """Write a number as C++ prints it: 17 digits, and a point at the end of a whole floating-point number."""
    if isinstance(value, bool | torch.SymBool):
        return str(bool(value))
    if isinstance(value, float):
        text = f"{value:.17g}"
        return text + "." if text.lstrip("-").isdigit() else text
    return str(int(value))


ENDS = ("Values of data decide what the step does, and only the ends between which they lie are known: they are taken "
        "to fill the middle {:g} of that range, in order.")
MOST_CHANCE = 1 << 16
"""Most elements of a random tensor whose values are assumed: a larger one is an image, or weights."""
_CLAMPS = ("clamp", "clamp_")
_PLACES = ("argmax", "argmin")
_OF_ONE = ("rand", "rand_like")


def ends_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float] | None:
    """Return the lower and upper bound of an operator's result, both included; ``None`` where the operator has none."""
    if func.namespace != "aten" or not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    name = func.__name__.split(".")[0]
    if name in _CLAMPS:
        low, high = given.get("min"), given.get("max")
        numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
        return (float(low), float(high)) if numbers else None
    if name in _PLACES or name == "multinomial":
        of, dim = given["self"], -1 if name == "multinomial" else given.get("dim")
        count = of.numel() if dim is None or not of.dim() else of.shape[dim]
        return 0.0, float(max(count - 1, 0))
    if result.numel() > MOST_CHANCE:
        return None
    if name in _OF_ONE:
        return 0.0, 1.0
    return (float(given.get("low", 0)), float(given["high"] - 1)) if name == "randint" else None


def spread(ends: tuple[float, float], share: float, like: Any) -> torch.Tensor:
    """Return a tensor that fills a share of a range around its middle, in order along the last dimension."""
    low, high = ends
    count = like.shape[-1] if like.dim() else 1
    at = torch.linspace(-share / 2, share / 2, count, dtype=torch.float64) if count > 1 else torch.zeros(count)
    values = (low + high) / 2 + at * (high - low)
    if not like.dtype.is_floating_point:
        values = values.round()
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.copy_(values if like.dim() else values[0])


class Kept:
    """The known values of a tensor. A class with slots, because there are thousands."""

    __slots__ = ("assumed", "value")

    def __init__(self, value: torch.Tensor | None, assumed: tuple[str, ...]) -> None:
        self.value = value
        """The real tensor; ``None`` where only assumptions are kept."""
        self.assumed = assumed
        """Sentences on what was assumed about the values."""


class KeptValues:
    """Known values by memory and layout. Memory is referenced weakly: its entries disappear with it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, dict[Any, Kept]]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def get(self, tensor: Any) -> Kept | None:
        """Return the known values of a tensor with its present memory and layout; ``None`` where there are none."""
        if not self._of or tensor.layout is not torch.strided:
            return None
        beside = self._beside(tensor.untyped_storage())
        return beside.get(_layout(tensor)) if beside else None

    def keep(self, tensor: Any, value: torch.Tensor | None, assumed: tuple[str, ...] = ()) -> None:
        """Keep the values of a tensor with its present memory and layout; a sparse one has none and is skipped."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        beside = self._beside(storage)
        if beside is None:
            key, beside = storage._cdata, {}
            self._of[key] = (weakref.ref(storage, self._gone(key)), beside)
        beside[_layout(tensor)] = Kept(value, assumed)

    def sharing(self, tensor: Any) -> Iterable[Kept]:
        """Return the known values of all tensors that share this tensor's memory."""
        if tensor.layout is not torch.strided:
            return ()
        return (self._beside(tensor.untyped_storage()) or {}).values()

    def forget(self, tensor: Any) -> None:
        """Forget the values of all tensors that share this tensor's memory."""
        if tensor.layout is torch.strided:
            self._of.pop(tensor.untyped_storage()._cdata, None)

    def _beside(self, storage: Any) -> dict[Any, Kept] | None:
        reference, beside = self._of.get(storage._cdata, (None, None))
        return beside if reference is not None and reference() is storage else None

    def _gone(self, key: int) -> Callable[[Any], None]:
        def gone(reference: Any) -> None:
            if self._of.get(key, (None,))[0] is reference:
                del self._of[key]

        return gone


def _layout(tensor: Any) -> tuple[Any, ...]:
    """Return what distinguishes a tensor from others in the same memory."""
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())


BLOCK_BYTES = 512
"""CUDA's caching allocator hands out multiples of this."""
_FACTORS = (0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0, 64.0)
"""Factors on activations and temporaries for which ``moments`` keeps the peak."""


class Storage:
    """One storage. A class with slots, because there are thousands."""

    __slots__ = ("in_forward", "number", "on_device", "reference", "size")

    def __init__(self, number: int, size: int, on_device: bool, in_forward: bool, reference: Any) -> None:
        self.number = number
        self.size = size
        self.on_device = on_device
        self.in_forward = in_forward
        self.reference = reference


class MemoryTracker:
    """Follows storages while a trace runs; ``report`` gives the peak between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self.in_backward = False
        """Whether the recorded step has reached its backward pass; set by the recorder."""
        self.in_optimizer = False
        """Whether an optimizer's step runs; set by the recorder."""
        self.row = -1
        """Row of the operation that was noted last; set by the recorder."""
        self._live: dict[int, Storage] = {}
        self._count = 0
        self._recording = False
        self._start: list[tuple[int, int]] = []
        self._events: list[tuple[int, int]] = []
        self._rows: list[int] = []
        self._forward: set[int] = set()
        self._kept: set[int] = set()
        self._host: set[int] = set()
        self._by_optimizer: set[int] = set()
        self._holds: dict[int, Holds] = {}
        self._first = 0

    def see(self, tensor: Any, *, on_device: bool = True, in_forward: bool = False) -> int:
        """Note a tensor's storage and return its number; -1 for a tensor without a storage."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse
            return -1
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known.number
        number = self._count
        self._count += 1
        found = Storage(number, storage.nbytes(), on_device, in_forward, weakref.ref(storage, self._gone(key, number)))
        self._live[key] = found
        if not on_device:
            self._host.add(number)
        if self._recording:
            if in_forward:
                self._forward.add(number)
            if self.in_optimizer:
                self._by_optimizer.add(number)
            self._change(number, found.size)
        return number

    def number(self, tensor: Any) -> int:
        """Return the number of a tensor's storage; -1 if it was never seen."""
        found = self._find(tensor)
        return -1 if found is None else found.number

    def on_device(self, tensor: Any) -> bool | None:
        """Return whether a tensor counts as lying on the device; None if it was never seen."""
        found = self._find(tensor)
        return None if found is None else found.on_device

    def move(self, tensor: Any, on_device: bool) -> None:
        """Move a tensor between host and device without a copy (a model that moves before the step)."""
        number = self.see(tensor, on_device=on_device)
        found = self._find(tensor)
        if found is not None and number >= 0:
            found.on_device = on_device
            (self._host.discard if on_device else self._host.add)(number)

    def device_bytes(self) -> int:
        """Bytes alive on the device now."""
        return sum(storage.size for storage in self._live.values() if storage.on_device)

    def anything_on_device(self) -> bool:
        """Return whether any storage of the recorded step lies on the device."""
        return any(number not in self._host for number, _ in (*self._start, *self._events))

    def resized(self, storage: Any, size: int) -> None:
        """Note that a storage now has ``size`` bytes."""
        found = self._live.get(storage._cdata)
        if found is None or found.size == size:
            return
        if self._recording:
            self._change(found.number, size - found.size)
        found.size = size

    def begin(self) -> None:
        """Note that the recorded step begins."""
        self._start = [(s.number, s.size) for s in self._live.values()]
        self._first = self._count
        self._recording = True

    def backward_begins(self) -> None:
        """Note that backward begins: storages made in forward and still alive were kept for it."""
        self._kept.update(s.number for s in self._live.values() if s.in_forward)

    def end(self) -> None:
        """Note that the recorded step is over."""
        self._recording = False

    def hold(self, tensors: Iterable[Any], what: Holds) -> None:
        """Note the purpose of the tensors' storages; the first note counts. For a DTensor its local part counts."""
        for tensor in tensors:
            number = self.number(getattr(tensor, "_local_tensor", tensor))
            if number >= 0:
                self._holds.setdefault(number, what)

    def report(self) -> dict[str, int]:
        """Return the bytes of the recorded step on the device.

        ``peak``: the most bytes alive at once; ``peak_blocks``: the same with every storage rounded up to
        ``BLOCK_BYTES`` as CUDA's caching allocator does; ``start`` and ``end``: bytes alive before and after; and for
        each ``Holds`` the bytes at the peak.
        """
        rows, begun = self._on_device()
        if not rows:
            return {}
        numbers, change = np.array(rows, np.int64).T
        total = np.cumsum(change)
        first = max(begun - 1, 0)
        at = first + int(np.argmax(total[first:]))
        blocks = _rounded(numbers, change)
        result = {PEAK: int(total[at]), "peak_blocks": int(np.cumsum(blocks)[first:].max()),
                  "start": int(total[first]) if begun else 0, "end": int(total[-1])}
        parts: dict[Holds, int] = {what: 0 for what in Holds if what is not Holds.RESERVED}
        for number, size in zip(numbers[:at + 1].tolist(), change[:at + 1].tolist(), strict=True):
            parts[self._what(number)] += size
        result.update({what.value: size for what, size in parts.items()})
        return result

    def moments(self) -> list[list[int]]:
        """Return the moments of the recorded step that may be its peak when its sizes change.

        Each has four sums of bytes on the device: what stays as it is (parameters, gradients, optimizer states, …),
        activations, temporaries of forward and backward, and the optimizer's temporaries. Changed sizes are factors on
        the last three. For any such factors the peak is about the largest sum over these moments: each has that sum for
        some factors from 1/64 to 64. Empty where nothing lies on the device.
        """
        rows, begun = self._on_device()
        if not rows:
            return []
        change = np.zeros((len(rows), 4), np.int64)
        for i, (number, size) in enumerate(rows):
            what = self._what(number)
            column = 1 if what is Holds.ACTIVATIONS else 0
            if what is Holds.TEMPORARIES:
                column = 3 if number in self._by_optimizer else 2
            change[i, column] = size
        alive = np.unique(np.cumsum(change, axis=0)[max(begun - 1, 0):], axis=0)
        weights = [(1.0, *each) for each in itertools.product(_FACTORS, _FACTORS, (0.0, 1.0))]
        chosen = sorted({int(np.argmax(alive @ np.array(weight))) for weight in weights})
        found: list[list[int]] = alive[chosen].tolist()
        return found

    def _on_device(self) -> tuple[list[tuple[int, int]], int]:
        """Return (storage, change of bytes) for each change, and how many of them precede the step."""
        start = [row for row in self._start if row[0] not in self._host]
        return start + [row for row in self._events if row[0] not in self._host], len(start)

    def _change(self, number: int, size: int) -> None:
        self._events.append((number, size))
        self._rows.append(self.row)

    def changes(self) -> list[tuple[int, int, int, int]]:
        """Return every change on the device, in order: row of the operation (-1: before the step), the storage's
        number, bytes, and the index of its purpose in ``Holds``."""
        place = {what: i for i, what in enumerate(Holds)}
        found = [(-1, number, size, place[self._what(number)]) for number, size in self._start
                 if number not in self._host and size]
        found += [(row, number, size, place[self._what(number)]) for (number, size), row in zip(
            self._events, self._rows, strict=True) if number not in self._host and size]
        return found

    def _what(self, number: int) -> Holds:
        if number in self._holds:
            return self._holds[number]
        if number in self._kept:
            return Holds.ACTIVATIONS
        return Holds.OTHER if number < self._first else Holds.TEMPORARIES

    def _find(self, tensor: Any) -> Storage | None:
        with suppress(RuntimeError, NotImplementedError):
            return self._live.get(tensor.untyped_storage()._cdata)
        return None

    def _gone(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            found = self._live.get(key)
            if found is not None and found.number == number:
                del self._live[key]
                if self._recording:
                    self._change(number, -found.size)

        return gone


def _rounded(numbers: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Return the changes of size with each storage rounded up to whole blocks."""
    size: dict[int, int] = {}
    rounded = np.empty_like(change)
    for i, (number, delta) in enumerate(zip(numbers.tolist(), change.tolist(), strict=True)):
        before = size.get(number, 0)
        size[number] = before + delta
        rounded[i] = -(-(before + delta) // BLOCK_BYTES) * BLOCK_BYTES - (-(-before // BLOCK_BYTES) * BLOCK_BYTES)
    return rounded


def resize_watch(tracker: MemoryTracker) -> Callable[[Any, int], Any]:
    """Return a ``torch.UntypedStorage.resize_`` that also notifies the tracker."""
    original = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        result = original(self, size)
        tracker.resized(self, int(self.nbytes()))
        return result

    return resize_

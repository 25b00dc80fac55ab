"""``TensorSpec``: what a call needs to know of a tensor (sizes, strides, element type), and the short names of types.

Profilers, C++ and PyTorch name element types differently; each has one short name here, and a size. Sizes are bytes of
one stored element (``torch/headeronly/core/ScalarType.h``). Both 8-bit floats are "fp8": they cost the same. A packed
pair of 4-bit floats is one element of one byte, as its tensor's shape counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEMSIZE: dict[str, int] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}
"""Bytes of an element by short name."""

_NAMES: dict[str, str] = {
    # C++ names, as the profiler writes them, and the execution trace's.
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "Half": "fp16", "half": "fp16", "__half": "fp16",
    "c10::BFloat16": "bf16", "BFloat16": "bf16", "__nv_bfloat16": "bf16", "__hip_bfloat16": "bf16",
    "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool", "char": "int8",
    "unsigned long": "uint64", "unsigned int": "uint32", "unsigned short": "uint16",
    "long unsigned int": "uint64", "short unsigned int": "uint16",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128", "c10::complex<c10::Half>": "complex32",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8", "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8", "c10::Float8_e8m0fnu": "fp8", "c10::Float4_e2m1fn_x2": "fp4",
    "c10::qint8": "int8", "c10::quint8": "uint8", "c10::qint32": "int32",
    # PyTorch's names.
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8",
    "float8_e8m0fnu": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
    "float8_e4m3": "fp8", "float4_e2m1fn_x2": "fp4", "cfloat": "complex64", "cdouble": "complex128",
}

MULTIPLY_ADDS: dict[str, int] = {"fp4": 2, "complex32": 4, "complex64": 4, "complex128": 4}
"""Real multiply-adds in one product of two elements where it is not one: packed pairs have 2, complex numbers 4."""

_SCALAR_TYPES: dict[int, str] = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 8: "complex32",
    9: "complex64", 10: "complex128", 11: "bool", 12: "int8", 13: "uint8", 14: "int32", 15: "bf16",
    23: "fp8", 24: "fp8", 25: "fp8", 26: "fp8", 27: "uint16", 28: "uint32", 29: "uint64", 44: "fp8", 45: "fp4",
}

_RANK = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "fp4", "fp8", "bf16",
         "fp16", "fp32", "tf32", "fp64", "complex32", "complex64", "complex128")


def short_dtype(name: str) -> str:
    """Short name of an element type given by any of its names, such as "c10::BFloat16" → "bf16"; "" if it is none.

    Number types such as "Scalar", "Int" or "Double" are no element types: they describe arguments, not tensors.
    """
    name = name.removeprefix("torch.")
    return name if name in ITEMSIZE else _NAMES.get(name, "")


def scalar_type(text: str) -> str:
    """Short name of the element type a recorded ``ScalarType`` argument stands for ("15" → "bf16"), "" if none."""
    return _SCALAR_TYPES.get(int(text), "") if text.isdecimal() and len(text) < 5 else short_dtype(text)


def itemsize(dtype: str) -> int:
    """Bytes of an element; 4 for an unknown type."""
    return ITEMSIZE.get(dtype, 4)


def stored_itemsize(kind: str) -> float:
    """Bytes of a quantised weight's element with its scales: "fp4" is one value here (a scale for each 16 or 32), as
    "int4" is (one for each 128); of other types, ``itemsize``."""
    return {"fp4": 0.5 + 1 / 24, "int4": 0.5 + 2 / 128}.get(kind, float(itemsize(kind)))


def multiply_adds(dtype: str) -> int:
    """Real multiply-adds of one product of two elements."""
    return MULTIPLY_ADDS.get(dtype, 1)


def promoted(dtypes: list[str]) -> str:
    """The type that operands of these types are computed in (PyTorch's promotion; bf16 with fp16 gives fp32)."""
    known = {dtype for dtype in dtypes if dtype in ITEMSIZE}
    if {"bf16", "fp16"} <= known:
        known.add("fp32")
    return max(known, key=_RANK.index, default="fp32")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Sizes and strides in elements; ``stride`` is ``None`` where not recorded, and contiguous is assumed then."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Elements as the shape counts them; 1 for a tensor without dimensions."""
        return prod(self.shape)

    @property
    def stored(self) -> int:
        """Distinct elements: a broadcast (stride 0) dimension counts once."""
        if self.stride is None or len(self.stride) != len(self.shape):
            return self.elements
        return prod(size if step or not size else 1 for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the distinct elements."""
        return self.stored * itemsize(self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Recorded strides, or those of a contiguous tensor."""
        if self.stride is not None and len(self.stride) == len(self.shape):
            return self.stride
        return contiguous_strides(self.shape)

    @property
    def is_dense(self) -> bool:
        """Return whether the elements fill their memory without holes, in any order of dimensions."""
        return self.run == self.elements

    @property
    def run(self) -> int:
        """Elements that lie side by side in one piece (= elements: all of them, in whatever order of dimensions)."""
        expected = 1
        for step, size in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if step != expected:
                break
            expected *= size
        return expected if self.elements else 0

    @property
    def is_channels_last(self) -> bool:
        """Return whether these are batched images whose channels lie side by side ("nhwc")."""
        return len(self.shape) > 3 and self.shape[1] > 1 and self.order[-1:] == (1,)

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of more than one element, from the slowest to the fastest in memory."""
        steps = self.strides
        return tuple(sorted((d for d, n in enumerate(self.shape) if n > 1), key=lambda d: (-steps[d], d)))


def channels_last(tensor: TensorSpec) -> str:
    """Layout of a call on images where only channels last has a name: "nhwc", else ""."""
    return "nhwc" if tensor.is_channels_last else ""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape these broadcast to; where they do not fit, the larger size (recorded shapes may be of another era)."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))

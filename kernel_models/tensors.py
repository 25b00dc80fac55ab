"""``TensorSpec``: what a call needs to know of a tensor: sizes, strides and element type, never its values."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kernel_models.dtypes import itemsize


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

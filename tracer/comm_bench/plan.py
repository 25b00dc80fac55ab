"""The measurements of a sweep, as plain values that its processes are handed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tracer.errors import ForetraceError

BENCH_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
BACKENDS = ("gloo", "nccl")
DTYPES = ("float32", "float16", "bfloat16", "int8")
MOST_SECONDS = 0.02
"""One timed loop repeats an operation for about this long."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A sweep.

    Attributes:
        kinds: of ``BENCH_KINDS``.
        sizes: payload bytes (the whole buffer of a rank, as nccl-tests counts).
        backend: "gloo" or "nccl".
        dtype: of the elements.
        rounds: every size is measured this many times, the sizes in another order each time.
        loop_seconds: how long one timed loop is.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    backend: str = "gloo"
    dtype: str = "float32"
    rounds: int = 7
    loop_seconds: float = MOST_SECONDS

    def __post_init__(self) -> None:
        for value, known, what in ((self.backend, BACKENDS, "backend"), (self.dtype, DTYPES, "dtype"),
                                   *((kind, BENCH_KINDS, "collective") for kind in self.kinds)):
            if value not in known:
                raise ForetraceError(f"{value!r} is no {what} that can be swept; choose from {', '.join(known)}.")
        if not self.kinds or not self.sizes or min(self.sizes) < 1 or self.rounds < 1:
            raise ForetraceError("A sweep needs a collective, a size of at least one byte and a round.")

    def to_text(self) -> str:
        """One argument of a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> BenchPlan:
        """The plan of ``to_text``."""
        data = json.loads(text)
        return BenchPlan(**{**data, "kinds": tuple(data["kinds"]), "sizes": tuple(data["sizes"])})


def sweep_sizes(smallest: int, largest: int, per_octave: int = 1) -> tuple[int, ...]:
    """Sizes from smallest to largest, ``per_octave`` in each doubling, as multiples of 64 bytes above that."""
    if not 1 <= smallest <= largest or per_octave < 1:
        raise ForetraceError(f"There are no sizes from {smallest} to {largest} bytes.")
    found, at = [], float(smallest)
    while at <= largest * 1.0001:
        found.append(round(at / 64) * 64 if at >= 64 else round(at))
        at *= 2 ** (1 / per_octave)
    return tuple(dict.fromkeys(found))

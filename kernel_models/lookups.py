"""Look-ups of tables as op calls, batched or table by table, and their cost in additive terms, for searches over
placements of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.families.index import index
from kernel_models.heuristics.efficiency import default_efficiencies_of, predicted_us
from kernel_models.heuristics.embedding import (
    INDEX_BYTES,
    UNPACKING,
    WEIGHT_BYTES,
    LookupTerms,
    columns_of,
    forward_terms,
    gradient_kernels,
    gradient_terms,
    sorting,
)
from kernel_models.heuristics.work import KernelWork
from kernel_models.op_call import Family, OpCall, TablePart, with_host_rows
from kernel_models.pricing import Models, price
from tracer.arrays import Float64

STATES = {"adagrad": 1, "rowwise_adagrad": 1, "adam": 2, "partial_rowwise_adam": 2}
"""Number of state tables that an optimizer writes in addition to the weights, if not fused into backward."""


def forward_call(parts: Sequence[TablePart]) -> OpCall:
    """Return one kernel that looks up all these parts and sums their bags.

    Raises:
        ValueError: no row of any part is looked up.
    """
    return _call("bag", parts)


def backward_call(parts: Sequence[TablePart], fused: bool = True) -> OpCall:
    """Return one kernel for the gradients of parts: with the optimizer (``fused``), or as large as the tables."""
    return _call("bag_backward_fused" if fused else "bag_backward", parts)


def unfused_calls(part: TablePart) -> tuple[OpCall, ...]:
    """Return the calls of a part's gradient and optimizer where they are not fused, as with
    ``nn.EmbeddingBag(sparse=True)``.

    The gradient has a row for each look-up, and the optimizer adds these rows to the table and to each of its states.
    """
    elements, rows = part.lookups * part.columns, part.rows * part.columns
    added = [replace(call, accesses=(part,)) for call in index("index_add", elements, part.columns, rows, "fp32")]
    return _call("bag_backward_sparse", [part]), *(added * (1 + STATES.get(part.optimizer, 0)))


def _call(kind: str, parts: Sequence[TablePart]) -> OpCall:
    used = tuple(part for part in parts if part.lookups)
    if not used:
        raise ValueError("nothing is looked up in these tables")
    lookups, bags = sum(part.lookups for part in used), sum(part.bags for part in used)
    rows = sum(part.rows for part in used) // len(used)
    weights = WEIGHT_BYTES * sum(part.lookups for part in used if part.weighted)
    columns = max(round(sum(part.bags * part.columns for part in used) / max(bags, 1)), 1)
    read_rows = sum(part.lookups * part.row_bytes for part in used)
    out = sum(part.output_bytes * part.bags * part.columns for part in used)
    index = INDEX_BYTES * (lookups + bags) + weights
    added = float(sum(part.lookups * part.columns for part in used))
    if kind == "bag":
        unpacked = sum(UNPACKING.get(part.dtype, 0.0) * part.lookups * part.columns for part in used)
        read, written, flops = read_rows + index, out, added + unpacked
    elif kind.endswith("_fused"):
        read, written, flops = out + read_rows + index, read_rows, 5.0 * added
    elif kind.endswith("_sparse"):
        read, written, flops = out + index, read_rows, added
    else:
        read, written, flops = out + index, sum(part.rows * part.row_bytes for part in used), added
    flags = with_host_rows(("weighted",) if any(part.weighted for part in used) else (), used)
    return OpCall(Family.EMBEDDING, kind, (lookups, bags, rows, columns, len(used)), _dtype(used), flags=flags,
                  flops=flops, bytes_read=read, bytes_written=written, accesses=used)


def _dtype(parts: Sequence[TablePart]) -> str:
    """Return the element type of most of the bytes read; the order of the parts does not matter."""
    read: dict[str, float] = {}
    for part in parts:
        read[part.dtype] = read.get(part.dtype, 0.0) + part.lookups * part.row_bytes
    return max(sorted(read), key=lambda dtype: read[dtype])


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Costs that parts of tables add to a device's look-ups, and to their gradients with the optimizer, [parts]."""

    forward: LookupTerms
    backward: LookupTerms
    lookups: Float64
    rows: Float64

    @classmethod
    def of(cls, parts: Sequence[TablePart], device: DeviceSpec, share_of_cache: float = 1.0) -> PartCosts:
        """Return the costs of each part by itself, with a share of the device's cache (1 / number of tables that a
        device will hold).

        All tables of a device share its cache: additive terms can only assume a division. For the cost of parts
        together price one call of all of them.
        """
        spec = replace(device, l2_mb=device.l2_mb * share_of_cache, l3_mb=device.l3_mb * share_of_cache)
        columns = columns_of(parts, np.arange(len(parts)))
        # In a batch worth splitting over devices, no single block sorts the look-ups, and all rows together are many.
        alone, passes = sorting(np.full(len(parts), np.inf), np.full(len(parts), columns.rows.sum()))
        return cls(forward_terms(columns, spec),
                   gradient_terms(columns, spec, np.ones(len(parts), np.bool_), alone, passes),
                   columns.lookups, columns.rows)

    @classmethod
    def apart(cls, parts: Sequence[TablePart], device: DeviceSpec, models: Models | None = None,
              fused: bool = False) -> PartCosts:
        """Return the costs of parts that run one after another, so that their times add up: a kernel for each look-up,
        its optimizer ``fused`` into the gradient or not.

        ``nn.EmbeddingBag`` runs so, and a CPU's thread with any kernel.
        """
        used = [i for i, part in enumerate(parts) if part.lookups]
        calls = [(forward_call([parts[i]]), *([backward_call([parts[i]])] if fused else unfused_calls(parts[i])))
                 for i in used]
        times = price([call for each in calls for call in each], device, models).times_us
        ahead, back = np.zeros(len(parts)), np.zeros(len(parts))
        start = 0
        for i, each in zip(used, calls, strict=True):
            ahead[i], back[i] = times[start], times[start + 1:start + len(each)].sum()
            start += len(each)
        none = np.zeros(len(parts))
        lookups, rows = (np.array([getattr(part, name) for part in parts], np.float64) for name in ("lookups", "rows"))
        return cls(LookupTerms(ahead, none, none), LookupTerms(back, none, none), lookups, rows)


def batched_forward_us(stream_us: Float64, flight_us: Float64, wait_us: Float64, device: DeviceSpec,
                       ) -> Float64:
    """Return the time of one batched look-up of many parts from sums and maximum of their terms, µs [n]; 0 for none."""
    done = KernelWork(np.maximum(wait_us, flight_us), stream_us, np.ones(len(stream_us)))
    return _time_us(done, device, "bag")


def batched_backward_us(stream_us: Float64, flight_us: Float64, wait_us: Float64, lookups: Float64, rows: Float64,
                        device: DeviceSpec) -> Float64:
    """Return the time of a fused gradient of many parts from their terms, µs [n]; ``lookups``, ``rows``: sums [n]."""
    kernels = gradient_kernels(np.ones(len(lookups), np.bool_), *sorting(lookups, rows))
    done = KernelWork(np.maximum(wait_us, flight_us), stream_us, kernels)
    return _time_us(done, device, "bag_backward_fused")


def _time_us(done: KernelWork, device: DeviceSpec, kind: str) -> Float64:
    reached = default_efficiencies_of(device).of(Family.EMBEDDING, "fp32", kind)
    compute, memory, fixed = np.array([[reached.compute], [reached.memory], [reached.fixed]])
    return np.where(done.memory_us > 0, predicted_us(done, device, compute, memory, fixed), 0.0)

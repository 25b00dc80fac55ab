"""Other number formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.operation_costs import computing_operations, every_operation, operation_costs
from graph_predictor.prediction.pricing import change_ratios, prices_of, resized_on_cpu
from graph_predictor.prediction.scenario import CallEdit, EditError, Scenario
from kernel_models.cpu_units import Retyped, retyped, said_of
from kernel_models.op_call import PRODUCTS, Family, OpCall, itemsize
from kernel_models.operation import Operation, calls_of
from tracer.arrays import Float64

TYPES = frozenset({"fp32", "tf32", "bf16", "fp16"})
FOLLOWING = frozenset({Family.ELEMENTWISE, Family.POOLING, Family.NORM, Family.CONCAT, Family.COPY, Family.INTERPOLATE,
                       Family.INDEX, Family.REDUCTION})
"""Families that read and write activations of products. Softmax, losses and the optimizer stay in fp32."""


@dataclass(frozen=True)
class Precision:
    """Run matrix products in another format.

    ``bf16`` and ``fp16`` mean autocast: products run in 16 bits, and the operations that follow read and write their
    activations in 16 bits. Softmax, losses and optimizer stay in fp32. ``tf32`` and ``fp32`` set the type of products
    of fp32 data, and switch autocast off where the recording computed in 16 bits. Assumes that parameters are fp32, and
    that casts of weights cost no time of their own (autocast caches them once a step).
    """

    dtype: str

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"products in {self.dtype}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        if self.dtype not in ("bf16", "fp16", "tf32", "fp32"):
            raise EditError(f"Products cannot be switched to {self.dtype!r}: choose bf16, fp16, tf32 or fp32.")
        scenario = scenario.claim("the precision", f"--dtype {self.dtype}")
        scenario.known_source()
        spec = scenario.devices.target or scenario.devices.source
        change = _Products(self.dtype)
        if scenario.built.computes_on_host and self.dtype != "tf32":
            return _on_cpu(scenario, change)
        if spec is not None and self.dtype not in spec.matrix_tflops and self.dtype in ("tf32", "bf16"):
            raise EditError(f"{spec.name} has no matrix units for {self.dtype}: the work would run no faster; choose "
                            "another device or type.")
        if not any(change(call) != (call,) for calls in scenario.work.calls for call in calls):
            raise EditError(f"No operation of the step changes with products in {self.dtype}: none is known to "
                            "compute in another type.")
        edits: dict[str, CallEdit] = {**scenario.kernels.call_edits, "1 precision": change}
        return replace(scenario, kernels=replace(scenario.kernels, call_edits=edits))


@dataclass(frozen=True)
class _Products:
    dtype: str

    def __call__(self, call: OpCall) -> tuple[OpCall, ...]:
        if "unsized" in call.flags or call.family not in PRODUCTS | FOLLOWING or call.dtype not in TYPES:
            return (call,)
        # Between fp32 and TF32 only products differ: what they read and write is fp32 in both.
        dtype = "fp32" if self.dtype == "tf32" and call.family in FOLLOWING else self.dtype
        if call.family in FOLLOWING and itemsize(dtype) == itemsize(call.dtype):
            return (replace(call, dtype=dtype),)
        change = itemsize(dtype) / itemsize(call.dtype)
        # Flash kernels take 16 bits; in fp32 the memory-efficient ones run.
        wide = call.family is Family.ATTENTION and change > 1
        return (replace(call, kind=call.kind.replace("flash", "efficient") if wide else call.kind, dtype=dtype,
                        bytes_read=call.bytes_read * change, bytes_written=call.bytes_written * change),)


def _on_cpu(scenario: Scenario, change: _Products) -> Scenario:
    """Return the scenario on a CPU, where operations are the kernels: own times change with the element type."""
    slices, working = scenario.slices, scenario.cycle.working[scenario.slices.item]
    units, measured = tuple(scenario.built.graphs[0].meta.host_units), scenario.devices.source_models is not None
    was = scenario.host_times()
    factor: Float64 = np.ones(len(slices))
    doubt: Float64 = np.zeros(len(slices))
    for number in range(len(scenario.built.graphs)):
        growth, unsure = _of_rank(scenario, number, change, units, measured=measured)
        factor, doubt = factor * growth, doubt + unsure
    changed = doubt > 0
    if not changed.any():
        raise EditError(f"No operation of the step changes with products in {change.dtype}: none is known to compute "
                        "in another type.")
    ns = was * factor
    total = max(float(ns[working].sum()), 1.0)
    mine = changed & working
    host = scenario.host.widened(resized_on_cpu(ns[mine], factor[mine], total))
    host = host.widened(float((ns * doubt)[mine].sum()) / total)
    guessed = max(host.guessed, float(ns[mine].sum()) / total)
    narrow = change.dtype if change.dtype != "fp32" else ""
    note = said_of(narrow, units, measured=measured) if narrow else (
        "Operations that were recorded in a narrow type are priced in fp32.")
    return replace(scenario, host=replace(host, ns=ns, guessed=guessed)).with_note(note)


def _of_rank(scenario: Scenario, number: int, change: _Products, units: tuple[str, ...], *, measured: bool) -> tuple[
        Float64, Float64]:
    """Return the factor on each slice of a rank's host time, and the log half width of its uncertainty."""
    graph, slices = scenario.built.graphs[number], scenario.slices
    costs = operation_costs(scenario.cycle, slices, number, every_operation(graph))
    ops, numbers = graph.ops, dict[tuple[int, ...], int]()
    columns = np.stack([ops.name, ops.shapes, ops.dtypes, ops.strides, ops.scalars])[:, costs.op].T.tolist()
    kind = np.array([numbers.setdefault(tuple(key), len(numbers)) for key in columns], np.int64)
    examples = costs.op[np.unique(kind, return_index=True)[1]].tolist()
    old = [calls_of(Operation.from_graph(graph, op)) for op in examples]
    new: list[Retyped] = [retyped(was, tuple(made for call in was for made in change(call)), units, measured=measured)
                          for was in old]
    spec, models = scenario.known_source(), scenario.devices.source_models
    ratio = change_ratios(prices_of(old, spec, models), prices_of([one.calls for one in new], spec, models)).ratio
    growth, spread = ratio * [one.factor for one in new], np.array([one.spread for one in new])
    computes = computing_operations(graph)[costs.op] & (spread[kind] > 0)
    none = np.zeros(len(kind) + 1)
    return (costs.by_slice(slices, np.where(computes, growth[kind], 1.0), none + 1.0, 1.0, 1.0),
            costs.by_slice(slices, np.where(computes, spread[kind], 0.0), none, 0.0, 0.0))

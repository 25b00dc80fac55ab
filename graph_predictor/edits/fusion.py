"""Elementwise operations that follow one another become one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.rewriting import units_of
from graph_predictor.prediction.scenario import EditError, Replacement, Rewriting, Scenario, WorkUnits, sized
from kernel_models.op_call import Family, OpCall
from tracer.graph import Phase

ELEMENTWISE = frozenset({Family.ELEMENTWISE})


@dataclass(frozen=True)
class FuseElementwise:
    """Fuse each chain of elementwise kernels into one kernel.

    The kernels of a chain follow each other directly on a stream, in one phase of one step, on the same number of
    elements. No other work waits for them. Assumes that each reads the result of the kernel before it: traces do
    not name tensors. A kernel that reads no tensor of that size ends the chain. Only the chain's last result is kept;
    backward computes what it needs again, as compiled code does. The new kernel moves the chain's outer inputs and its
    result, and takes the chain's time × model(new) / model(chain). The other launches and their operations' host time
    vanish. Optimizers stay as they are.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "elementwise chains fused"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        found = fuse_elementwise(scenario, units_of(scenario)).replacements
        if not found:
            raise EditError("No two elementwise operations of the step follow one another on the same elements: there "
                            "is nothing to fuse.")
        scenario.known_source()
        members = sum(len(one.units) for one in found) / scenario.cycle.steps
        return replace(scenario, rewrites={**scenario.rewrites, "2 elementwise": fuse_elementwise}).with_note(
            f"{members:,.0f} elementwise operations a step become {len(found) / scenario.cycle.steps:,.0f}; that each "
            "reads what the one before it wrote was taken from their sizes.")


def fuse_elementwise(scenario: Scenario, units: WorkUnits) -> Rewriting:
    """Return the replacement of every chain."""
    return Rewriting([Replacement(np.array(chain, np.int64), (fused_call([units.calls[u][0] for u in chain]),))
                      for chain in chains(units, ELEMENTWISE)])


def chains(units: WorkUnits, families: frozenset[Family]) -> Iterator[list[int]]:
    """Yield runs of two or more units of these families that one kernel can replace."""
    chain: list[int] = []
    for u in np.flatnonzero(units.alive).tolist():
        call = units.calls[u][0] if len(units.calls[u]) == 1 else None
        fits = (call is not None and call.family in families and units.kernels[u] == 1 and sized((call,))
                and units.phase[u] != Phase.OPTIMIZER)
        if chain and fits and call is not None and _joins(units, chain[-1], u, call):
            chain.append(u)
            continue
        if len(chain) > 1:
            yield chain
        chain = [u] if fits else []
    if len(chain) > 1:
        yield chain


def elements(call: OpCall) -> int:
    """Return the number of elements of a call's result, where it is the call's first dimension (elementwise,
    copies)."""
    return call.dims[0]


def _joins(units: WorkUnits, last: int, u: int, call: OpCall) -> bool:
    """Return whether a unit continues the chain that ends with unit ``last``."""
    same = all(column[last] == column[u] for column in (units.rank, units.lane, units.phase, units.step))
    between = units.follows[last + 1:u + 1]
    return bool(same and between.all() and not units.watched[last]
                and elements(units.calls[last][0]) == elements(call) and _reads(call))


def _reads(call: OpCall) -> bool:
    """Return whether a call reads at least as many elements as it writes; a fill reads none."""
    return call.family is not Family.ELEMENTWISE or call.dims[2] >= call.dims[0]


def fused_call(chain: list[OpCall]) -> OpCall:
    """Return one call for a chain: it reads the chain's outer inputs and writes its last result."""
    last = chain[-1]
    inner = sum(call.bytes_written for call in chain[:-1])
    # Random numbers and copies have one input with as many elements as they write.
    shapes = [call.dims if call.family is Family.ELEMENTWISE else (call.dims[0], 1, call.dims[0]) for call in chain]
    joints = len(chain) - 1
    size = elements(last)
    return OpCall(
        Family.ELEMENTWISE, "fused",
        (size, max(sum(s[1] for s in shapes) - joints, 1), max(sum(s[2] for s in shapes) - joints * size, 0)),
        last.dtype, layout="broadcast" if any(call.layout == "broadcast" for call in chain) else last.layout,
        flops=sum(call.flops for call in chain),
        bytes_read=max(sum(call.bytes_read for call in chain) - inner, 0.0), bytes_written=last.bytes_written)

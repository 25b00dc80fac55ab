"""torch.compile, approximately."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.edits.generated_kernels import generated_kernels
from graph_predictor.prediction.operation_costs import computing_operations
from graph_predictor.prediction.rewriting import host_weight, units_of
from graph_predictor.prediction.scenario import EditError, Rewriting, Scenario, WorkUnits
from kernel_models.spreads import COMPILED_HOST, COMPILED_KERNELS
from tracer.arrays import Float64
from tracer.graph import Phase

HOST_LEFT = 0.25
"""Assumed share of forward's and backward's host time, without launch calls, that compiled code still takes. Guards, a
call for each generated kernel, and one autograd node for the whole graph remain of Python, dispatch and a node for each
operation."""


@dataclass(frozen=True)
class Compile:
    """Apply torch.compile to the model, approximately.

    Assumes one graph without breaks and the device work of ``generated_kernels``. Operations between two products
    become one kernel, which also adds biases of convolutions. Convolutions are channels-last where the compiler chooses
    it. Of the host's time in forward and backward, a quarter remains, plus the launch calls of the kernels that stay.
    The optimizer stays as it is. CUDA graphs (mode "reduce-overhead") are an edit of their own.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "torch.compile (approximate)"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("compilation", "--compile")
        if any("Torch-Compiled Region" in text or text.startswith("triton_") for graph in scenario.built.graphs
               for text in graph.strings):
            raise EditError("The step is compiled already.")
        scenario.known_source()
        units = units_of(scenario)
        weight, share = _host(scenario)
        if not len(units):
            raise EditError("No work of the step is known (neither kernels, nor operations that compute on the CPU): "
                            "there is nothing to compile; record it with shapes, or trace it by shapes.")
        if not share:
            raise EditError("No operation of the step is in its forward or backward: there is nothing to compile.")
        kernels = np.where(scenario.cycle.kernel & (scenario.work.kernel_group >= 0), COMPILED_KERNELS, 0.0)
        return replace(
            scenario, rewrites={**scenario.rewrites, "3 compile": compiled},
            host=scenario.host.scaled(weight).widened(COMPILED_HOST * share),
            kernels=scenario.kernels.widened(kernels),
        ).with_note("torch.compile is approximate: work between products is fused as its sizes allow, and a quarter of "
                    "the host's time in forward and backward is left.")


def compiled(_: Scenario | None, units: WorkUnits) -> Rewriting:
    """Return the replacements of the step's work by the compiler's kernels."""
    return Rewriting(generated_kernels(units))


def _host(scenario: Scenario) -> tuple[Float64, float]:
    """Return a factor on each slice of host time, and the share of the remaining host time in shortened slices."""
    slices = scenario.slices
    on_cpu = scenario.built.computes_on_host
    before = [np.isin(graph.ops.phase, (Phase.FORWARD, Phase.BACKWARD)) for graph in scenario.built.graphs]
    # Computation of a CPU's operations is not overhead.
    inside = [found & ~computing_operations(graph) if on_cpu else found for found, graph in zip(
        before, scenario.built.graphs, strict=True)]
    weight = np.where(slices.is_cost, 1.0, host_weight(scenario, inside, HOST_LEFT, before))
    ns = np.where(scenario.cycle.working[slices.item], slices.ns, 0)
    left = float((ns * weight)[weight < 1.0].sum())
    total = float((ns * weight).sum())
    return weight, left / total if total else 0.0

"""The cost of a launch of a plan's step to a host, from what is known of that host's operations."""

from __future__ import annotations

from graph_predictor.prediction.host_steps import traced_host_step
from graph_predictor.synthesis.step import calls_by_operation
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import shape_device
from kernel_models.host.model import HostModel
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape


def launch_us(host: HostModel, shape: TransformerShape, device: DeviceSpec) -> float:
    """Return the mean host time of a block's launches, µs: of its operations and the time between them.

    A plan's frameworks have Python of their own around a block, which the programs that a host was learned from have
    not.

    Args:
        host: what its operations cost.
        shape: whose block is traced, of one sequence on one GPU.
        device: which it is traced for.

    Raises:
        PlanError: the host launches nothing: its programs computed on it.
    """
    if not host.launch_ns:
        raise PlanError(f"{host.host} is of programs that compute on their host and launch nothing, and a plan is of "
                        "GPUs; give captures on a GPU's host, or gpu-steps.")
    from tracer.shape_only.transformer_parts import trace_part  # imports torch

    graph = trace_part(shape.one_layer(), TransformerPart(Piece.BLOCK, 1), shape_device(device))
    before, inside = host.estimate(traced_host_step(graph))
    launches = sum(len(calls) for calls in calls_by_operation(graph, range(len(graph.ops))).values())
    # What comes before a step's first operation and after its last one is no block's.
    return float(before[1:-1].sum() + inside.sum()) / 1e3 / max(launches, 1)

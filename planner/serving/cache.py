"""``CacheAccount``: memory of a served copy's GPUs: weights, work space, and the room that is left for caches."""

from __future__ import annotations

from dataclasses import dataclass

from graph_predictor.request.memory_fit import CONTEXT
from kernel_models.collectives.datasheet import COMMUNICATOR_BYTES
from kernel_models.device import DeviceSpec
from planner.serving.errors import ServingError
from planner.serving.setup import ServingSetup, weight_type
from tracer.shape_only.transformer import TransformerShape

GRAPHS = 1.0e9
"""Bytes that captured CUDA graphs of many batches hold: an assumption (vLLM and SGLang log 0.5 to 3 GB)."""
STATE_BYTES = 4
"""Bytes of a value of a recurrence's state."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """Memory of the fullest GPU, bytes.

    Attributes:
        device: that there is.
        weights: of its share of the model.
        workspace: activations of a step, logits, CUDA graphs, context and communicators.
        room: what is left for caches within the engine's share of memory; below 0: not even the weights fit.
        sequence: that each sequence takes whatever its length: a recurrence's state and full windows.
        token: that each token of a sequence's context takes.
        groups: of GPUs that have sequences of their own.
    """

    device: float
    weights: float
    workspace: float
    room: float
    sequence: float
    token: float
    groups: int

    def of(self, context: float) -> float:
        """Return what a sequence of so many tokens takes on a GPU of its group."""
        return self.sequence + self.token * context

    def largest_batch(self, context: int) -> int:
        """Return how many sequences of so many tokens fit a copy."""
        each = self.of(context)
        return self.groups * int(max(self.room, 0.0) // each) if each else 1 << 20

    def check(self, batch: int, context: int, what: str) -> None:
        """Raise ``ServingError``, in one sentence, unless so many sequences of so many tokens fit."""
        if self.room <= 0:
            raise ServingError(f"{what} does not fit: a GPU's share of the weights is {self.weights / 1e9:,.1f} GB, "
                               f"work space {self.workspace / 1e9:,.1f}, and the engine uses "
                               f"{(self.weights + self.workspace + self.room) / 1e9:,.1f} of its "
                               f"{self.device / 1e9:,.1f} GB; give more GPUs (--tp) or a narrower type (--precision).")
        if batch > (most := self.largest_batch(context)):
            raise ServingError(f"{batch:,} sequences of {context:,} tokens do not fit: their cache takes "
                               f"{self.of(context) * -(-batch // self.groups) / 1e9:,.1f} GB of a GPU and there is "
                               f"room for {self.room / 1e9:,.1f}; the largest batch is {most:,}.")


def cache_account(shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, longest: int) -> CacheAccount:
    """Return the memory of a copy whose sequences have so many tokens at most."""
    linear, experts = weight_type(setup.precision, device), weight_type(setup.of_experts, device)
    weights, token, sequence = 0.0, 0.0, 0.0
    width = setup.kv_bytes(shape)
    for run in shape.runs:
        layers = run.layers / setup.pp
        routed = run.expert_parameters(setup.ep, setup.expert_tp)
        router = run.hidden * run.experts
        dense = run.dense_parameters(setup.tp) - router
        weights += layers * (dense * linear.bytes + router * 2 + routed * experts.bytes)
        if run.attends:
            each = layers * width * (run.latent.key_rank + run.latent.rotated if run.latent is not None else
                                     setup.kv_heads(run) * (run.width_of_head + run.width_of_values))
            if run.window and run.window < longest:
                sequence += each * run.window
            else:
                token += each
        if run.state is not None:
            own = run.state.share(setup.tp)
            sequence += layers * (own.inner * own.state * STATE_BYTES + own.mixed * own.window * 2)
    weights += shape.root_parameters(setup.tp) * shape.element_bytes
    if setup.speculation is not None:
        block = shape.runs[-1]
        weights += block.dense_parameters(setup.tp) * linear.bytes + experts.bytes * block.expert_parameters(
            setup.ep, setup.expert_tp)
    tokens = min(setup.step_tokens, max(longest, 1) * 4)
    inner = max(max(2 * kind.ffn // setup.dense_tp if not kind.experts else 2 * kind.top_k * kind.ffn // setup.expert_tp
                    for kind in shape.kinds), 4 * shape.hidden)
    logits = min(setup.engine.sequences, 256) * shape.vocab * 4
    groups = sum(size > 1 for size in (setup.layer_gpus, setup.pp))
    workspace = (tokens * (4 * shape.hidden + inner) * shape.element_bytes + logits + CONTEXT
                 + groups * COMMUNICATOR_BYTES + (GRAPHS if setup.graphs else 0.0))
    total, share = device.memory_gb * 1e9, setup.engine.memory
    left = total - weights - workspace
    room = share * left if setup.engine.of_rest and left > 0 else total * share - weights - workspace
    return CacheAccount(total, weights, workspace, room, sequence, token, setup.attention_dp)

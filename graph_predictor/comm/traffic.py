"""Communication of each dimension of a plan: kind, bytes and how often, one table for estimates and for checks.

Sources: Shoeybi et al. 2019 (1909.08053) and Korthikanti et al. 2022 (2205.05198) for tensor and sequence parallelism,
Rajbhandari et al. 2020 (1910.02054) for ZeRO, Anthony et al. 2024 (2408.10197) for the rest; tests hold it to what
PyTorch's own wrappers call.

=================  ====================================================================================================
tensor             an all-reduce after attention and one after the feed-forward part, in backward one before each; with
                   sequence parallelism a reduce-scatter and an all-gather in place of each, and in backward one more
                   all-gather each of what the weights' gradients need
context            keys and values to all parts of the sequence, their gradients back; of a state-space mixer an
                   all-to-all from tokens to heads and one back, in either direction
experts            an all-to-all to the experts and one back, in either direction; where tensor-parallel ranks share an
                   expert and have tokens of their own, these are gathered among them before it and reduced after it
pipeline           the residual stream between stages, and its gradient back
data               gradients all-reduced; sharded: reduce-scattered, parameters gathered; fully: block by block; with
                   copies of what is sharded (HSDP) the shares of gradients are all-reduced among these too
=================  ====================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kernel_models.collectives import CollectiveKind
from tracer.parallel_plan import Sharding


class Pass(str, Enum):
    """The part of a step that communicates."""

    FORWARD = "forward"
    """Once a micro-batch; what is recomputed communicates again."""
    BACKWARD = "backward"
    """Once a micro-batch."""
    STEP = "step"
    """Once, however many micro-batches there are."""


@dataclass(frozen=True, slots=True)
class Communication:
    """Equal collectives of one cause.

    Attributes:
        cause: a phrase.
        dimension: whose ranks take part, as ``ParallelPlan.group`` names it.
        kind: of collective.
        payload_bytes: of each, nccl-tests' size.
        during: in which pass.
        count: how many in such a pass.
    """

    cause: str
    dimension: str
    kind: CollectiveKind
    payload_bytes: float
    during: Pass
    count: int = 1


def of_block(stream: float, *, sequence_parallel: bool, keys: float = 0.0, routed: float = 0.0, shared: float = 0.0,
             split: int = 2, mixed: tuple[float, float] = (0.0, 0.0)) -> list[Communication]:
    """Return what one block of a decoder communicates.

    Args:
        stream: bytes of the residual stream of a micro-batch on one rank.
        sequence_parallel: as in ``ParallelPlan``.
        keys: bytes of all keys and values, which parts of a sequence gather.
        routed: bytes that a rank sends to the experts: of its tokens, once for each expert of a token.
        shared: bytes that the tensor-parallel ranks which share an expert gather for it.
        split: parts of the block whose work tensor-parallel ranks share: attention and the feed-forward part, or the
            first alone where its experts are their ranks' own.
        mixed: bytes of what goes into a state-space mixer's recurrence and of what comes out, of a rank's tokens.
    """
    found = []
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    for during in (Pass.FORWARD, Pass.BACKWARD):
        again = during is Pass.BACKWARD
        if sequence_parallel:
            cause = "sequence-parallel activations"
            found += [Communication(cause, "tp", scatter, stream, during, split),
                      Communication(cause, "tp", gather, stream, during, 2 * split if again else split)]
        else:
            reduce = CollectiveKind.ALL_REDUCE
            found.append(Communication("tensor-parallel activations", "tp", reduce, stream, during, split))
        found.append(Communication("keys and values", "cp", gather, keys, during))
        if again:
            found.append(Communication("gradients of keys and values", "cp", scatter, keys, during))
        found += [Communication("tokens for heads of a mixer", "cp", CollectiveKind.ALL_TO_ALL, payload, during)
                  for payload in mixed if payload]
        found.append(Communication("expert dispatch and combine", "ep", CollectiveKind.ALL_TO_ALL, routed, during, 2))
        if shared:
            found += [Communication("tokens of shared experts", "etp", kind, shared, during)
                      for kind in (gather, scatter)]
    return found


def of_replicas(sharding: Sharding, gradients: float, parameters: float) -> list[Communication]:
    """Return what data-parallel ranks communicate of so many bytes of gradients and of parameters."""
    kinds = CollectiveKind
    if sharding is Sharding.NONE:
        return [Communication("DDP gradients", "dpcp", kinds.ALL_REDUCE, gradients, Pass.STEP)]
    stage = f"ZeRO-{int(sharding)}"
    # Sharded gradients cannot be accumulated before they are reduced.
    reduced = Pass.STEP if sharding is Sharding.OPTIMIZER else Pass.BACKWARD
    gathered = (Pass.FORWARD, Pass.BACKWARD) if sharding is Sharding.PARAMETERS else (Pass.STEP,)
    return [Communication(f"{stage} gradients", "dpcp", kinds.REDUCE_SCATTER, gradients, reduced),
            *(Communication(f"{stage} parameters", "dpcp", kinds.ALL_GATHER, parameters, each) for each in gathered)]


def of_boundary(stream: float, tp: int, *, sequence_parallel: bool) -> list[Communication]:
    """Return what two neighbouring stages communicate: activations there and their gradients back."""
    sent = stream / tp if sequence_parallel else stream
    return [Communication("pipeline activations and gradients", "pp", CollectiveKind.SEND_RECV, sent, during)
            for during in (Pass.FORWARD, Pass.BACKWARD)]

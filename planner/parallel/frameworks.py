"""``FrameworkProfile``: how a training framework's step differs from the pieces of ``layer_costs``.

The pieces are traced and priced as Megatron-Core with Transformer Engine runs a decoder: fused kernels, a fused loss,
little host time between launches. A program in plain PyTorch passes over its memory more often, keeps the host busier
and waits in other places. ``FILE`` lists the differences of each framework, every figure with its source. A profile is
data: it changes the decoder, the plan, the factors and the passes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_models.collectives import CollectiveModel
from kernel_models.op_call import Family, OpCall
from planner.parallel.corrections import CorrectionFactors
from tracer.input_file import from_toml, read_input
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerPart, TransformerShape

FILE = Path(__file__).with_name("frameworks.toml")


@dataclass(frozen=True, slots=True)
class BlockPass:
    """Kernels of a block that read a tensor and write it elsewhere, in addition to the traced kernels.

    Attributes:
        of: the tensor: "queries", "keys" (with values), or "inner" values of the feed-forward part, each a rank's part
            of the layer; or the block's "parameters".
        forward, backward: number of such kernels.
        kept: number of such tensors that backward additionally keeps.
        width: bytes read plus written per element; 0: twice the decoder's element size.
        source: source of the figures.
    """

    of: str
    forward: int = 0
    backward: int = 0
    kept: int = 0
    width: int = 0
    source: str = ""

    def size(self, shape: TransformerShape, part: TransformerPart) -> int:
        """Return the tensor's elements on one rank."""
        tokens = part.microbatch * shape.seq // part.cp
        return {"queries": tokens * shape.heads * shape.width_of_head // part.tp,
                "keys": tokens * shape.kv_width // part.tp, "inner": tokens * shape.ffn // part.tp,
                "parameters": shape.block_parameters(part.tp, part.ep, part.etp)}[self.of]

    def calls(self, shape: TransformerShape, part: TransformerPart, *, back: bool) -> list[OpCall]:
        """Return the kernels in forward or in backward of a block on one rank."""
        count, size = self.backward if back else self.forward, self.size(shape, part)
        if self.width:  # convert to the number of elements of the decoder's type with these bytes
            size = round(size * self.width / (2 * shape.element_bytes))
        moved = float(size * shape.element_bytes)
        call = OpCall(Family.ELEMENTWISE, "copy", (size, 1, size), shape.dtype, flops=float(size), bytes_read=moved,
                      bytes_written=moved)
        return [call] * count if size else []


@dataclass(frozen=True)
class FrameworkProfile:
    """How a framework runs a step.

    Attributes:
        name: name of the profile.
        framework: name of the framework; empty for ``PLAIN``.
        shape: fields of the decoder that the profile sets.
        plan, piped, shared: fields of a plan that it sets: always; with a pipeline; and where replicas share state.
        ddp: fields of a plan where replicas all-reduce gradients, unless the plan sets them.
        rates: factors of the estimate, fitted to the framework's published steps.
        spreads: relative errors of the framework's steps.
        meeting: cost of a tensor-parallel collective for each rank of its group, where a cluster's hop is measured:
            "share" × (``MeasuredBus.hop_us`` − "usual_us"), at least 0 µs.
        widths: by how much the factors may differ on a user's machine, for ``calibrate``.
        memory: "gradient_copies": gradients in the parameters' type in addition to the accumulated ones; "fragmented":
            share of temporary memory that the allocator holds and cannot use.
        passes: kernels of a block in addition to the traced ones.
        sources: sources of the figures, by field.
    """

    name: str
    framework: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    piped: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    meeting: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    passes: tuple[BlockPass, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def shaped(self, shape: TransformerShape) -> TransformerShape:
        """Return a decoder as the framework runs it."""
        if not self.shape:
            return shape
        return replace(shape, stack=tuple(replace(run, **self.shape) for run in shape.stack), **self.shape)

    def planned(self, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan as the framework runs it; a plan that places its own layers or chunks keeps their places."""
        if self is PLAIN:
            return plan
        said = plan.first_layers or plan.last_layers or plan.embedding_layer or plan.loss_layer or plan.chunks > 1
        open_fields = {name: value for name, value in self.ddp.items() if plan.ddp and getattr(plan, name) is None}
        return replace(plan, **self.plan, **({} if plan.pp == 1 or said else self.piped),
                       **(self.shared if plan.sharding else open_fields))

    def rated(self, rates: CorrectionFactors, cluster: CollectiveModel) -> CorrectionFactors:
        """Return ``rates`` with this framework's own factors and spreads in place of theirs, for steps on a cluster."""
        found: dict[str, Any] = dict(self.rates)
        if self.meeting and cluster.bandwidths is not None:
            hop = cluster.bandwidths.on(cluster.topology).hop_us
            found["meeting_us"] = self.meeting["share"] * max(hop - self.meeting["usual_us"], 0.0)
        return replace(rates, spreads=replace(rates.spreads, **self.spreads), **found)


PLAIN = FrameworkProfile("any")
"""Profile of a framework without an entry in ``FILE``."""


@lru_cache(maxsize=1)
def framework_profiles() -> Mapping[str, FrameworkProfile]:
    """Return the shipped profiles by name."""
    data = from_toml(read_input(FILE))
    sources = data.pop("sources")
    found: dict[str, FrameworkProfile] = {}
    for name, table in data.items():
        found[name] = _profile(found.get(table.get("like", "")) or FrameworkProfile(name), name, table, sources)
    return found


def profile_of(framework: str | None) -> FrameworkProfile:
    """Return the profile of a framework by its name; ``PLAIN`` if it has none."""
    return framework_profiles().get((framework or "").strip().lower(), PLAIN)


def _profile(start: FrameworkProfile, name: str, table: Mapping[str, Any], sources: Mapping[str, str]
             ) -> FrameworkProfile:
    """Return the profile of a table, starting from another profile; each figure of the table names its source."""
    values: dict[str, Mapping[str, Any]] = {}
    said = dict(start.sources)
    for part in ("shape", "plan", "piped", "shared", "ddp", "rates", "spreads", "meeting", "widths", "memory"):
        own = table.get(part, {})
        values[part] = {**getattr(start, part), **{key: entry["value"] for key, entry in own.items()}}
        said.update((f"{part}.{key}", sources[entry["source"]]) for key, entry in own.items())
    passes = tuple(BlockPass(**{**entry, "source": sources[entry["source"]]}) for entry in table.get("passes", ()))
    return FrameworkProfile(name, start.framework or name, **values, passes=passes or start.passes, sources=said)

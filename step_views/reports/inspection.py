"""Contents of a job's traces, before any simulation: the recorded step, counts, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from graph_predictor.prediction.step_spread import step_kinds
from graph_predictor.recorded.counted_steps import CountedSteps, RecordedRankSteps
from graph_predictor.recorded.facts import (
    RankDeviceWork,
    RankRecord,
    RecordedFacts,
    active_ns,
    by_rank,
    facts_of,
    unknown_of,
)
from tracer.device_memory import MemoryAccount, binary_size
from tracer.graph import (
    LAUNCHING,
    SHAPE_ONLY,
    ExecutionGraph,
    GapKind,
    KernelKind,
    LossReport,
    Meta,
    OpKind,
    StepSource,
)
from tracer.job import Job
from tracer.ranks import RankClass


@dataclass(slots=True)
class RankInspection:
    """The contents of one rank's trace. Shares are fractions; ``None`` if the trace does not determine them."""

    rank: int
    source: str
    era: str
    device: str
    torch_version: str
    window_ns: int
    steps: int
    step_source: str
    step_region: str
    ops: int
    calls: int
    launches: int
    kernels: int
    kernels_by_kind: dict[str, int]
    collectives: int
    gpu_active_ns: float | None
    """Time per step in which device work other than collectives runs; without steps, the time in the whole window."""
    host_outside_ops_share: float | None
    """Share of the steps' time in which the step's thread ran no operation and no call."""
    gaps_ns: dict[str, int]
    """This time by kind, ns."""
    profiler_flags: dict[str, bool]
    et_schema: str
    et_joined: int
    et_candidates: int
    loss: LossReport
    step_ns: float | None = None
    """Recorded step, under the profiler: mean of the steps that are not excluded."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of a step traced by shapes; see ``Meta.memory``."""
    substitutions: dict[str, int] = field(default_factory=dict)

    @property
    def has_times(self) -> bool:
        """Return whether the step ran; a step traced by shapes did not."""
        return self.era != SHAPE_ONLY

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, times in microseconds."""
        return {
            "rank": self.rank if self.rank >= 0 else None, "source": self.source, "format": self.era,
            "device": self.device or None, "torch": self.torch_version or None,
            "window_us": self.window_ns / 1e3 if self.has_times else None, "memory_bytes": self.memory or None,
            "substitutions": self.substitutions or None,
            "step_us": None if self.step_ns is None else self.step_ns / 1e3,
            "steps": self.steps, "step_source": self.step_source or None,
            "step_region": self.step_region or None, "ops": self.ops, "calls": self.calls,
            "launches": self.launches, "kernels": self.kernels, "kernels_by_kind": self.kernels_by_kind,
            "collectives": self.collectives,
            "gpu_active_us": None if self.gpu_active_ns is None else self.gpu_active_ns / 1e3,
            "host_outside_ops_share": self.host_outside_ops_share,
            "host_outside_ops_us": {kind: ns / 1e3 for kind, ns in self.gaps_ns.items()},
            "profiler_flags": self.profiler_flags, "execution_trace": _join_json(
                self.et_schema, self.et_joined, self.et_candidates), "loss": asdict(self.loss),
        }


@dataclass(slots=True)
class Inspection:
    """The contents of a job's traces: its ranks, and sums over them."""

    ranks: list[RankInspection]
    world_size: int
    missing_ranks: list[int]
    notes: list[str] = field(default_factory=list)
    classes: list[RankClass] = field(default_factory=list)
    """The ranks that each of ``ranks`` represents in a folded job, and classes that were not traced."""
    recorded: RecordedFacts | None = None
    """Facts about the recorded step; ``None`` without steps."""

    @property
    def devices(self) -> list[str]:
        """Return the distinct names of the devices, as far as the ranks name one."""
        return sorted({rank.device for rank in self.ranks if rank.device})

    @property
    def steps(self) -> int:
        """Return the job's number of steps: the largest of any rank."""
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def gpu_active_ns(self) -> float | None:
        """Return the GPU active time of the most active rank; ``None`` if no rank has GPU work."""
        return max((rank.gpu_active_ns for rank in self.ranks if rank.gpu_active_ns is not None), default=None)

    @property
    def host_outside_ops_share(self) -> float | None:
        """Return the share of host time outside operations: the mean of ranks with steps; ``None`` without steps."""
        return _mean([rank.host_outside_ops_share for rank in self.ranks])

    def total(self, name: str) -> int:
        """Return the sum of a count over the ranks."""
        return sum(getattr(rank, name) for rank in self.ranks)

    def loss(self) -> LossReport:
        """Return the ranks' lost and mended events, added up; a note that concerns several ranks names them."""
        added = LossReport()
        for rank in self.ranks:
            for part in fields(LossReport):
                if part.name != "notes":
                    setattr(added, part.name, getattr(added, part.name) + getattr(rank.loss, part.name))
        added.notes = by_rank([(rank.rank, note) for rank in self.ranks for note in rank.loss.notes], len(self.ranks))
        return added

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, times in microseconds. Counts are sums over ranks; ``steps`` is per rank."""
        return {
            "ranks": len(self.ranks), "world_size": self.world_size if self.world_size > 0 else None,
            "missing_ranks": self.missing_ranks, "classes": [
                {"ranks": [list(span) for span in each.ranks], "number": len(each),
                 "traced": self.ranks[each.graph].rank if each.graph >= 0 else None} for each in self.classes],
            "device": ", ".join(self.devices) or None, "steps": self.steps,
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "ops": self.total("ops"), "calls": self.total("calls"), "launches": self.total("launches"),
            "kernels": self.total("kernels"), "collectives": self.total("collectives"),
            "gpu_active_us": None if self.gpu_active_ns is None else self.gpu_active_ns / 1e3,
            "host_outside_ops_share": self.host_outside_ops_share,
            "execution_trace": _join_json(
                ", ".join(sorted({r.et_schema for r in self.ranks if r.et_schema})), self.total("et_joined"),
                self.total("et_candidates")),
            "loss": asdict(self.loss()), "notes": self.notes, "per_rank": [rank.to_json() for rank in self.ranks],
        }


@dataclass(frozen=True, slots=True)
class InspectedRank:
    """One rank's part of an ``Inspection``, kept when the rank's graph is not.

    Attributes:
        meta: of its graph.
        contents: counts of the trace; times are of the whole window.
        record, steps, work: parts of the facts about the recorded step.
        kinds: a sentence on how its steps differ in their work; empty if they do not.
    """

    meta: Meta
    contents: RankInspection
    record: RankRecord
    steps: RecordedRankSteps
    work: RankDeviceWork
    kinds: str

    @classmethod
    def of(cls, graph: ExecutionGraph) -> InspectedRank:
        """Return the part of a rank."""
        kinds = step_kinds([graph])
        return cls(graph.meta, _inspect(graph), RankRecord.of(graph), RecordedRankSteps.of(graph),
                   RankDeviceWork.of(graph), "" if kinds is None else kinds.text)


def inspect_job(job: Job) -> Inspection:
    """Count the contents of a job's graphs."""
    return inspection_of([InspectedRank.of(graph) for graph in job.graphs], job.world_size, job.missing_ranks,
                         job.notes, job.classes)


def inspection_of(ranks: Sequence[InspectedRank], world_size: int, missing_ranks: Sequence[int],
                  notes: Sequence[str], classes: Sequence[RankClass] = ()) -> Inspection:
    """Return what ``inspect_job`` does, from parts of the ranks; the other arguments are those of a ``Job``."""
    ran = [rank for rank in ranks if rank.contents.has_times]
    facts = facts_of([rank.record for rank in ran], CountedSteps.together([rank.steps for rank in ran]))
    for rank, own in zip(ran, () if facts is None else facts.ranks, strict=facts is not None):
        rank.contents.gpu_active_ns, rank.contents.step_ns = own.gpu_active_ns, own.step_ns
    found = Inspection([rank.contents for rank in ranks], world_size, list(missing_ranks), list(notes), list(classes),
                       facts)
    found.notes += [] if facts is None else facts.notes()
    if why := unknown_of([rank.work for rank in ran]):
        found.notes.append(f"Nothing is predicted from this recording. {why}")
    if kinds := next((rank.kinds for rank in ran if rank.kinds), ""):
        found.notes.append(f"Warning: {kinds}")
    without = [rank.rank for rank in found.ranks if not rank.kernels and rank.has_times]
    if without:
        which = "the trace" if len(found.ranks) == 1 else (
            "any rank" if len(without) == len(found.ranks) else f"rank {', '.join(map(str, without))}")
        found.notes.append(f"There is no GPU work in {which}: how long the GPU was active is unknown, not zero.")
    return found


def _inspect(graph: ExecutionGraph) -> RankInspection:
    meta, kernels, calls = graph.meta, graph.kernels, graph.launches
    steps_ns = int(graph.steps.duration_ns.sum())
    gaps = graph.gaps
    in_steps = gaps.step >= 0
    in_steps[in_steps] &= gaps.thread[in_steps] == graph.steps.thread[gaps.step[in_steps]]
    by_kind = {kind.name.lower(): int(gaps.duration_ns[in_steps & (gaps.kind == kind)].sum()) for kind in GapKind}
    return RankInspection(
        rank=meta.rank, source=meta.source, era=meta.era, device=meta.device, torch_version=meta.torch_version,
        window_ns=meta.window_ns, steps=len(graph.steps),
        step_source=StepSource(meta.step_source).name.lower() if meta.step_source >= 0 else "",
        step_region=meta.step_region,
        ops=int((graph.ops.kind == OpKind.OPERATION).sum()), calls=len(calls),
        launches=int(np.isin(calls.kind, LAUNCHING).sum()), kernels=len(kernels),
        kernels_by_kind={kind.name.lower(): int((kernels.kind == kind).sum()) for kind in KernelKind},
        collectives=len(graph.collectives),
        gpu_active_ns=_window_active_ns(graph),
        host_outside_ops_share=sum(by_kind.values()) / steps_ns if steps_ns and meta.era != SHAPE_ONLY else None,
        gaps_ns={kind: ns for kind, ns in by_kind.items() if ns}, profiler_flags=dict(meta.profiler_flags),
        et_schema=meta.et_schema, et_joined=meta.et_joined, et_candidates=meta.et_candidates, loss=meta.loss,
        memory=dict(meta.memory), substitutions=dict(meta.substitutions),
    )


def memory_lines(memory: dict[str, int]) -> list[str]:
    """Return two sentences about a traced step's peak memory; an empty list if memory was not traced."""
    if not memory:
        return []
    return [f"Peak memory of the step: {MemoryAccount.of_trace(memory)}",
            f"{binary_size(memory['peak_blocks'])} in blocks of CUDA's allocator; {binary_size(memory['start'])} when "
            "it begins"]


def _window_active_ns(graph: ExecutionGraph) -> float | None:
    """Return the GPU active time of a whole window; ``None`` without GPU work."""
    kernels = graph.kernels
    if not len(kernels):
        return None
    own = kernels.kind != KernelKind.COLLECTIVE
    start = kernels.start_ns[own]
    return float(active_ns(start, start + kernels.duration_ns[own], kernels.device[own]))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _join_json(schema: str, joined: int, candidates: int) -> dict[str, Any] | None:
    return {"schema": schema, "joined": joined, "candidates": candidates} if schema else None

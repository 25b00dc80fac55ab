"""``comm_study``: the communication of a decoder's plans over sequences, models and numbers of GPUs.

    foretrace.comm_study("llama", [64, 512], presets=["8b", "70b"], seqs=[4096, 32768], device="h100-sxm").to_pandas()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graph_predictor.comm.clusters import cluster_of, measured_file
from kernel_models.collectives import Topology, topology_of
from kernel_models.device_choice import find_device
from kernel_models.profile import DeviceProfile
from planner.parallel.communication import PlanCommunication, study_communication
from planner.parallel.estimate import Rates
from planner.parallel.pieces import LayerPieces
from planner.parallel.plan_batch import with_batch
from planner.parallel.planning import other_nodes, read_decoder
from tracer.job import Job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape
from tracer.shown import Shown

if TYPE_CHECKING:
    import pandas

MOST_CASES = 512
_SEVERAL = 2
"""Stages of a pipeline, and parts of a sequence, of the plans that are studied if none is named."""
_MOST_TENSOR = 8


@dataclass(frozen=True, repr=False)
class CommStudy(Shown):
    """The communication of several plans.

    Attributes:
        device, topology: of the cluster, or of the largest of them.
        cases: each plan at each size, in the order in which they were asked for.
        refused: plans that cannot be, each with the reason.
        notes: what was assumed.
    """

    device: str
    topology: str
    cases: tuple[PlanCommunication, ...]
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Say how much of the steps is exposed."""
        shares = [each.all_exposed.us / each.estimate.time_us for each in self.cases]
        found = f"; {min(shares):.1%} to {max(shares):.1%} of the step is exposed communication" if shares else ""
        return f"{len(self.cases)} plans on {self.device}{found}"

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Make one row a plan, a cause of it, its equal messages, and its messages of about one size."""
        return {"plans": partial(_frame, self.cases, _plan_rows), "causes": partial(_frame, self.cases, _cause_rows),
                "messages": partial(_frame, self.cases, _message_rows),
                "sizes": partial(_frame, self.cases, _size_rows)}


def comm_study(source: str | Job, gpus: Sequence[int], *, device: str = "h200-sxm", topology: str | None = None,
               settings: Sequence[str] = (), presets: Sequence[str] = (), seqs: Sequence[int] = (),
               plans: Sequence[str] = (), global_batch: int | None = None, comm_profile: str | None = None,
               comm_choices: str | None = None, profile: DeviceProfile | None = None) -> CommStudy:
    """Find what plans of a decoder communicate, and what of it their steps wait for.

    Args:
        source: as ``plan`` takes it.
        gpus: sizes of the job.
        device, topology: of the cluster; nodes are the device's usual ones by default.
        settings: of the model, as "layers=4".
        presets: of the workload; by default its first.
        seqs: tokens of a sequence; by default what the source says.
        plans: such as "fsdp2,tp=8": one size may be left out. By default ``usual_plans``.
        global_batch: sequences of a step; a plan that does not say its micro-batches has so many as give it.
        comm_profile: a file of measured collectives.
        comm_choices: a file of several backends' measured collectives, or "auto": each is done by the best of them.
        profile: fitted models of the device.

    Raises:
        PlanError: the source is no decoder, a plan is none, or there are too many cases.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    count = len(gpus) * max(len(presets), 1) * max(len(seqs), 1) * max(len(plans), 1)
    if count > MOST_CASES:
        raise PlanError(f"These are {count:,} cases, and at most {MOST_CASES} are studied at once; ask for fewer sizes "
                        "or plans.")
    spec = find_device(device)
    known = cluster_of(topology, comm_profile, None, comm_choices, lambda: topology_of(spec, max(gpus)))
    named = topology is not None or measured_file(comm_profile, comm_choices) is not None
    pieces, rates = LayerPieces(spec, profile), Rates()
    cases: list[PlanCommunication] = []
    refused: dict[str, str] = {}
    notes: list[str] = []
    on = known.topology
    for preset in presets or (None,):
        for seq in seqs or (None,):
            name, shape, _, own = read_decoder(source, settings, preset)
            if seq is not None:
                _, shape, _, own = read_decoder(source, (*settings, f"seq={seq}"), preset)
            notes += own
            for size in gpus:
                cluster = known if named else replace(known, topology=topology_of(spec, size))
                for text in plans or usual_plans(shape, size, cluster.topology):
                    try:
                        plan = with_batch(ParallelPlan.parse(text, size), text, global_batch)
                        cluster.check_fits(size)
                        cases.append(study_communication(name, shape, plan, pieces, cluster, rates,
                                                         spec.memory_gb * 1e9))
                    except PlanError as error:
                        refused.setdefault(str(error), f"{text} on {size:,} GPUs")
    if not cases and refused:
        raise PlanError(next(iter(refused)))
    notes += other_nodes(on, spec)
    notes.append(f"A launch is taken to cost the host {rates.host_us:g} µs.")
    return CommStudy(spec.name, on.name, tuple(cases), tuple((text, why) for why, text in refused.items()),
                     tuple(dict.fromkeys(notes)))


def usual_plans(shape: TransformerShape, gpus: int, on: Topology) -> list[str]:
    """Return plans that show every kind of communication that the model and so many GPUs can have: replicas with ZeRO 0
    to 3, then tensor parallelism without and with sequence parallelism, a pipeline, parts of sequences, experts."""
    tensor = max(size for size in (1, 2, 4, _MOST_TENSOR) if size <= min(on.node.gpus, gpus) and not any(
        value % size for kind in shape.kinds
        for value in (gpus, kind.ffn, *(heads for _, heads, _, _ in kind.shared_heads(size, 1)))))
    found = ["ddp", "dp,sharding=1", "dp,sharding=2", "fsdp2"] if gpus > 1 else ["dp"]
    if tensor > 1:
        found += [f"dp,tp={tensor},sharding=1", f"dp,tp={tensor},sequence_parallel,sharding=1",
                  f"fsdp2,tp={tensor},sequence_parallel"]
    split = f"tp={tensor},sequence_parallel," if tensor > 1 and gpus >= tensor * _SEVERAL else ""
    if gpus % (_SEVERAL * (tensor if split else 1)) == 0:
        found += [f"dp,pp={_SEVERAL},{split}sharding=1", f"dp,cp={_SEVERAL},{split}sharding=1"]
    experts = max((kind.experts for kind in shape.kinds), default=0)
    shared = max((size for size in range(2, min(gpus, experts) + 1) if not gpus % size and not experts % size),
                 default=1)
    return [*found, f"dp,ep={shared},sharding=1"] if shared > 1 else found


def case_row(each: PlanCommunication) -> dict[str, Any]:
    """Say which case it is."""
    return {"model": each.model, "seq": each.shape.seq, "gpus": each.estimate.plan.world_size,
            "plan": str(each.estimate.plan)}


def _frame(cases: Sequence[PlanCommunication],
           rows: Callable[[PlanCommunication], list[dict[str, Any]]]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame([case_row(case) | row for case in cases for row in rows(case)])


def _plan_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    e, all_of_it = each.estimate, each.all_exposed
    return [{"step_ms": e.time_us / 1e3, "step_low_ms": e.low_us / 1e3, "step_high_ms": e.high_us / 1e3,
             "exposed_ms": all_of_it.us / 1e3, "exposed_low_ms": all_of_it.low / 1e3,
             "exposed_high_ms": all_of_it.high / 1e3, "exposed_share": all_of_it.us / e.time_us,
             "alone_ms": each.alone_us / 1e3, "sent_gb": each.wire_bytes / 1e9,
             "messages": sum(row.count for row in each.messages), "stage": each.stage, "fits": each.fit.value}]


def _cause_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    def of(cause: object, what: Callable[[Any], float]) -> float:
        return sum(what(row) for row in each.messages if row.cause is cause)

    return [{"cause": cause.value, "exposed_ms": time.us / 1e3, "exposed_low_ms": time.low / 1e3,
             "exposed_high_ms": time.high / 1e3, "alone_ms": of(cause, lambda row: row.count * row.us) / 1e3,
             "payload_gb": of(cause, lambda row: row.volume_bytes) / 1e9,
             "sent_gb": of(cause, lambda row: row.wire_bytes) / 1e9, "messages": of(cause, lambda row: row.count)}
            for cause, time in each.exposed.items()]


def _message_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    return [{"cause": row.cause.value, "collective": row.kind.label, "ranks": row.ranks, "nodes": row.nodes,
             "payload_bytes": row.payload_bytes, "count": row.count, "us": row.us,
             "sent_gb": row.wire_bytes / 1e9} for row in each.messages]


def _size_rows(each: PlanCommunication) -> list[dict[str, Any]]:
    return [{"collective": kind.label, "from_bytes": 2 ** power, "count": count, "payload_gb": volume / 1e9}
            for (kind, power), (count, volume) in each.histogram().items()]

"""The communication study: volumes, counts and sizes held to fake worlds and to closed formulas; what is exposed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from slowly import mostly_slow
from typer.testing import CliRunner

import foretrace
from foretrace.commands import app
from graph_predictor.comm.traffic import SHARDING, JobShape, expected_volumes
from kernel_models.collectives import CollectiveKind, CollectiveModel, find_topology
from kernel_models.device import find_device
from planner.parallel.comm_study import CommCause, CommStudy, StepMessages, comm_study, messages_of, usual_plans
from planner.parallel.decoder import decoder_of, read_decoder
from tracer import workloads
from tracer.graph import ExecutionGraph
from tracer.parallel_plan import ParallelPlan, PlanError

KINDS = CollectiveKind
NODE = CollectiveModel(find_topology("dgx-h100"))
BATCH, SEQ = 8, 16
SMALL = ["width=256", "depth=4", "heads=8", "kv_heads=8", "hidden=512", "vocabulary=512", "seq=512"]


def by_kind(rows: Iterable[StepMessages]) -> dict[KINDS, tuple[float, float]]:
    found: dict[KINDS, tuple[float, float]] = {}
    for row in rows:
        count, volume = found.get(row.kind, (0.0, 0.0))
        found[row.kind] = count + row.count, volume + row.volume_bytes
    return found


@cache
def traced(plan: ParallelPlan) -> dict[KINDS, tuple[float, float]]:
    """Count and payload by kind of what rank 0 of the suite's Llama calls in a fake world."""
    pytest.importorskip("torch")
    from tracer.shape_only import trace_workload

    own = plan.passes if plan.pp == 1 else 1
    settings = workloads.configure("llama", preset="tiny", depth=max(2, plan.pp), batch=BATCH, seq=SEQ,
                                   accumulation=own)
    world = replace(plan, microbatches=plan.microbatches if plan.pp > 1 else None)
    return of_kinds(trace_workload(settings, "cpu", world_size=plan.world_size, parallel=world, warmup=0))


def of_kinds(graph: ExecutionGraph) -> dict[KINDS, tuple[float, float]]:
    """Number and bytes of the traced collectives, by kind."""
    from graph_predictor.comm.recorded_calls import table_calls

    found: dict[KINDS, tuple[float, float]] = {}
    for call in table_calls(graph, None):
        assert call is not None
        count, volume = found.get(call.kind, (0.0, 0.0))
        found[call.kind] = count + 1, volume + call.payload_bytes
    return found


def studied(plan: ParallelPlan) -> dict[KINDS, tuple[float, float]]:
    settings = workloads.as_plain(workloads.configure("llama", preset="tiny", depth=max(2, plan.pp), batch=BATCH,
                                                      seq=SEQ))
    shape = replace(decoder_of("llama", settings), fused=False)
    whole = replace(plan, microbatch=BATCH // plan.passes if plan.pp > 1 else BATCH)
    return by_kind(row for row in messages_of(whole, shape, NODE, 0) if row.cause is not CommCause.VOCABULARY)


@pytest.mark.parametrize("text", mostly_slow(
    ["ddp=2", "fsdp2=2", "pp=2", "pp=4,microbatches=8", "ddp=2,pp=2,microbatches=4", "fsdp2=2,tp=2", "ddp=2,tp=2",
     "tp=2"], {"ddp=2,pp=2,microbatches=4", "fsdp2=2,tp=2"}))
def test_a_plan_communicates_what_its_fake_world_does(text: str) -> None:
    plan = ParallelPlan.parse(text)
    ran, expected = dict(traced(plan)), studied(plan)
    if plan.ddp:
        del ran[KINDS.BROADCAST]  # DDP's buffers
    if plan.tp > 1:
        # DTensor gathers the logits and reduces embedding and head's input; Megatron's loss reduces three small rows.
        sizes = workloads.configure("llama", preset="tiny")
        for kind, calls, width in ((KINDS.ALL_REDUCE, 2, 2 * sizes.width), (KINDS.ALL_GATHER, 1, sizes.vocabulary)):
            count, volume = ran[kind]
            ran[kind] = count - calls, volume - BATCH * SEQ * 4 * width
    rounded = {kind: (round(count), round(volume)) for kind, (count, volume) in expected.items()}
    assert {kind: row for kind, row in ran.items() if row[0]} == rounded


def test_a_gather_less_than_megatron_where_its_input_is_kept() -> None:
    """Sequence parallelism: DTensor keeps what it gathered for the weights' gradients, Megatron gathers it again."""
    import parallel_programs as known

    settings = workloads.as_plain(workloads.configure("llama", preset="tiny", depth=known.BLOCKS, batch=known.BATCH,
                                                      seq=known.SEQ, width=known.WIDTH, heads=4, kv_heads=4))
    plan = ParallelPlan.parse(f"tp=4,sequence_parallel,microbatch={known.BATCH}")
    own = by_kind(row for row in messages_of(plan, decoder_of("llama", settings), NODE, 0)
                  if row.cause is CommCause.TENSOR)
    ran, parts = program("sequence_parallel"), 2 * known.BLOCKS
    assert ran[KINDS.REDUCE_SCATTER] == own[KINDS.REDUCE_SCATTER] == (2 * parts, 2 * parts * known.STREAM)
    count, volume = own[KINDS.ALL_GATHER]
    assert ran[KINDS.ALL_GATHER] == (count - parts, volume - parts * known.STREAM)


@pytest.mark.slow
def test_zero_stages_and_copies() -> None:
    from parallel_programs import BLOCKS, PARAMETERS

    state = BLOCKS * PARAMETERS
    kept = volumes("dp=4,sharding=2")
    assert program("kept_parameters") == {KINDS.ALL_GATHER: (BLOCKS, kept[KINDS.ALL_GATHER]),
                                          KINDS.REDUCE_SCATTER: (BLOCKS, kept[KINDS.REDUCE_SCATTER])}
    copies = program("copies")
    assert copies == {kind: (count, pytest.approx(volumes("fsdp2=4,replicate=2")[kind]))
                      for kind, count in ((KINDS.ALL_GATHER, 2 * BLOCKS), (KINDS.REDUCE_SCATTER, BLOCKS),
                                          (KINDS.ALL_REDUCE, BLOCKS))}
    # PyTorch's ZeRO-1 all-reduces whole gradients, and each rank broadcasts its share of the parameters.
    shared = program("shared_optimizer")
    assert shared[KINDS.BROADCAST][1] == volumes("dp=4,sharding=1")[KINDS.ALL_GATHER] == state


@cache
def program(name: str) -> dict[KINDS, tuple[float, float]]:
    """Count and payload of what a program of ``parallel_programs`` calls on 4 ranks, but for norms' gradients."""
    pytest.importorskip("torch")
    from tracer.shape_only.trace import trace_script

    return of_kinds(trace_script(f"{Path(__file__).parent / 'parallel_programs.py'}:{name}", "h100-sxm", world_size=4))


def volumes(text: str) -> dict[KINDS, float]:
    """Payload that ``traffic`` says of the program's parameters, by kind."""
    from parallel_programs import BLOCKS, PARAMETERS

    from graph_predictor.comm.traffic import of_replicas

    plan, found = ParallelPlan.parse(text), dict.fromkeys(KINDS, 0.0)
    for row in of_replicas(plan.sharding, BLOCKS * PARAMETERS, BLOCKS * PARAMETERS):
        found[row.kind] += row.payload_bytes
    if plan.replicate > 1:
        found[KINDS.ALL_REDUCE] = found[KINDS.REDUCE_SCATTER] / plan.shards
    return found


@pytest.mark.parametrize("text", [
    "dp=4,microbatches=3", "dp=4,sharding=1", "dp=4,sharding=2,microbatches=2", "fsdp2=4,microbatches=2", "tp=4",
    "tp=4,sequence_parallel,recompute=full", "dp=2,tp=2,pp=2,microbatches=4,sharding=1"])
def test_volumes_follow_the_closed_formulas(text: str) -> None:
    plan = ParallelPlan.parse(text)
    name, shape, _, _ = read_decoder("llama", SMALL, "8b")
    found: dict[KINDS, float] = {}
    for row in messages_of(plan, shape, NODE, 0):
        if row.cause not in (CommCause.VOCABULARY, CommCause.TIED):
            found[row.kind] = found.get(row.kind, 0.0) + row.volume_bytes
    count = shape.layers // plan.pp * shape.block_parameters(plan.tp)
    count += shape.embedding_parameters(plan.tp) if plan.pp > 1 else shape.root_parameters(plan.tp)
    scheme = next(key for key, sharding in SHARDING.items() if sharding is plan.sharding)
    half = scheme == "zero3"
    job = JobShape(scheme if plan.dp > 1 else "none", plan.dp, plan.tp, plan.pp, parameters=count,
                   gradient_bytes=2 if half else 4, layers=shape.layers // plan.pp, sequence=shape.seq, batch=1,
                   hidden=shape.hidden, micro_batches=plan.passes, sequence_parallel=plan.sequence_parallel,
                   full_recompute=plan.recompute.blocks, boundaries=1)
    expected: dict[KINDS, float] = {}
    for volume in expected_volumes(job):
        expected[volume.kind] = expected.get(volume.kind, 0.0) + volume.payload_bytes
    if half:  # embedding and head are kept from forward to backward
        expected[KINDS.ALL_GATHER] -= plan.passes * shape.root_parameters(plan.tp) * 2
    assert found == pytest.approx(expected), name


def test_what_is_exposed() -> None:
    found = comm_study("llama", [8], settings=SMALL, presets=["8b"], device="h100-sxm", seqs=[512, 2048],
                       plans=["dp=8,sharding=1", "dp=4,tp=2,sharding=1,sequence_parallel"])
    assert len(found.cases) == 4
    for case in found.cases:
        whole = case.all_exposed
        assert 0 < whole.low < whole.us < whole.high < case.estimate.time_us
        # Each cause alone saves no more than all of them do.
        assert max(each.us for each in case.exposed.values()) <= whole.us * (1 + 1e-9)
        assert sum(count for count, _ in case.histogram().values()) == pytest.approx(
            sum(row.count for row in case.messages))
    # Four times the sequence is four times the activations, and the same gradients.
    short, long = (next(case for case in found.cases if case.shape.seq == seq and case.estimate.plan.tp == 2)
                   for seq in (512, 2048))
    sent = [{cause: sum(row.wire_bytes for row in case.messages if row.cause is cause) for cause in CommCause}
            for case in (short, long)]
    assert sent[1][CommCause.TENSOR] == pytest.approx(4 * sent[0][CommCause.TENSOR])
    assert sent[1][CommCause.GRADIENTS] == sent[0][CommCause.GRADIENTS] > 0


def test_partly_recomputed_blocks_leave_the_last_collective_out() -> None:
    shape, layers = read_decoder("llama", SMALL, "8b")[1], 4
    for how, gathers, scatters in (("none", 6, 4), ("needed", 8, 5), ("full", 8, 6)):
        rows = messages_of(ParallelPlan.parse(f"tp=4,sequence_parallel,recompute={how}"), shape, NODE, 0)
        counts = {kind: count for kind, (count, _) in by_kind(
            row for row in rows if row.cause is CommCause.TENSOR).items()}
        assert counts == {KINDS.ALL_GATHER: gathers * layers, KINDS.REDUCE_SCATTER: scatters * layers}


def test_every_usual_plan_can_be() -> None:
    for source, preset, gpus in (("llama", "70b", 64), ("moe", "8x7b", 128), ("llama", "8b", 2)):
        shape = read_decoder(source, (), preset)[1]
        on = find_topology("dgx-h100x16")
        for text in usual_plans(shape, gpus, on):
            plan = ParallelPlan.parse(text, gpus)
            rows = [messages_of(plan, shape, CollectiveModel(on), stage) for stage in range(plan.pp)]
            assert all(row.us > 0 and row.count > 0 for stage in rows for row in stage)
            assert any(rows)


def small(*words: str) -> tuple[int, str, str]:
    sizes = [word for size in SMALL for word in ("--set", size)]
    command = ["comm", "study", "llama", "--preset", "8b", *sizes, "--device", "h100-sxm"]
    found = CliRunner().invoke(app, [*command, *words])
    return found.exit_code, found.stdout, found.stderr


def test_command() -> None:
    code, out, _ = small("--gpus", "8,16", "--seq", "512,1024", "--parallel", "fsdp2", "--json")
    found = json.loads(out)
    assert code == 0 and all(found[name] for name in ("plans", "causes", "messages", "sizes"))
    assert {(row["seq"], row["gpus"]) for row in found["plans"]} == {(512, 8), (512, 16), (1024, 8), (1024, 16)}
    assert all(0 < row["exposed_ms"] <= row["alone_ms"] for row in found["plans"])
    for words, says in ((("--parallel", "dp,tp=2,sharding=1", "--global-batch", "16"), "microbatches=4"),
                        (("--parallel", "fsdp2", "--parallel", "tp=3,dp"), "Not possible: tp=3,dp on 8 GPUs."),
                        (("--parallel", "fsdp2", "--topology", "dgx-a100"),
                         "The nodes of the topology have a100-sxm-80g, not h100-sxm")):
        code, out, _ = small("--gpus", "8", *words)
        assert code == 0 and "Collectives" in out and says in " ".join(out.split())


@pytest.mark.parametrize(("words", "said"), [
    (("--gpus", "0"), "--gpus 0 is not possible"), (("--gpus", "8", "--seq", "-4"), "--seq -4 is not possible"),
    (("--gpus", "8", "--parallel", "tp=3"), "does not fill the world"),
    (("--gpus", "8", "--parallel", "dp", "--global-batch", "9"), "cannot be split evenly"),
    (("--gpus", "8", "--set", "heads=x"), "heads"), (("--gpus", "8", "--topology", "nowhere"), "nowhere"),
    (("--gpus", ",".join(map(str, range(1, 60)))), "up to 16")])
def test_bad_input_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    code, out, err = small(*words)
    assert (code, out) == (2, "") and said in " ".join(err.split()) and "Traceback" not in err


def test_facade_and_one_gpu_that_communicates_nothing() -> None:
    found = foretrace.comm_study("llama", [1, 2], settings=SMALL, presets=["8b"], device="h100-sxm")
    assert isinstance(found, CommStudy)
    assert list(found.to_pandas("causes")["cause"]) and "exposed" in repr(found)
    assert [(case.messages, case.all_exposed.us) for case in found.cases if case.estimate.plan.world_size == 1] == [
        ((), 0.0)]
    with pytest.raises(PlanError, match="cases"):
        comm_study("llama", list(range(1, 600)), device=find_device("h100-sxm").name)

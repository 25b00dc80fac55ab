"""The difference of two steps: on paper for hand-made traces, exact on recorded ones, one sentence for bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micro import Micro
from report_support import ROOT, real_trace
from said import Run, plain

from graph_predictor.prediction.replay import replay
from step_views.diff.jobs import LEAST_ALIGNED, diff_jobs
from step_views.diff.result import Difference, DifferenceKind
from step_views.diff.step_tree import StepTree, _digests, _sizes, align_trees
from tracer.alignment_loop import most_alike_pairs
from tracer.errors import ForetraceError
from tracer.graph import SHAPE_ONLY, ExecutionGraph
from tracer.job import Job, read_job

TRACES = ROOT / "traces"


def job(trace: Micro, folder: Path, name: str) -> Job:
    (folder / name).mkdir()
    graph = trace.read(folder / name)
    return Job([graph], 1)


def us(difference: Difference) -> dict[tuple[DifferenceKind, str], float]:
    """Time of every part that moves the step, in µs."""
    assert sum(part.time_ns for part in difference.parts) == difference.total_ns
    return {(part.kind, part.what): part.time_ns / 1e3 for part in difference.parts if part.time_ns}


def wait_for(trace: Micro, now: float, copied: float, stream: int = 7) -> None:
    """An ``aten::item`` from ``now``, whose copy of 2 us begins at ``copied``; the call returns 7 us after its end."""
    trace.op("aten::item", now, copied + 14)
    trace.op("aten::_local_scalar_dense", now + 1, copied + 13)
    trace.copy(now + 2, 5, (stream, copied, 2), "DtoH (Device -> Pageable)", 4)
    trace.call("cudaStreamSynchronize", now + 8, copied + 9 - now - 8)


def two_kernels(second: float = 100, *, name: str = "gemm", shapes: object = None, types: object = None,
                other_host: float = 0, sync: bool = False) -> Micro:
    """Step 1: two operations launch a kernel each, an ``aten::item`` waits for the second, then 100 us of host.

        host      |first|   |second|    |item ------------|
        stream       ----100----  -----second-----

    ``other_host`` lengthens the first operation; ``sync`` puts an ``aten::item`` of its own after it.
    """
    trace = Micro().calibrate()
    at = 1000.0
    trace.op("aten::first", at + 10, at + 30 + other_host)
    trace.launch(at + 15, 5, kernel=(7, at + 25, 100))
    now, free = at + 30 + other_host, at + 126
    if sync:
        wait_for(trace, now + 5, at + 126)
        now, free = at + 140, 0.0
    arguments = {key: value for key, value in (("Input Dims", shapes), ("Input type", types)) if value is not None}
    trace.op("aten::second", now + 10, now + 30, **arguments)
    start = max(now + 25, free)
    end = start + second
    trace.launch(now + 15, 5, kernel=(7, start, second), name=name)
    wait_for(trace, now + 40, end + 1)
    return trace.step(at, end + 130)


def between(folder: Path, a: Micro, b: Micro, **options: Any) -> Difference:
    """The difference of two traces."""
    place = folder / str(len(list(folder.iterdir())))
    place.mkdir()
    return diff_jobs(job(a, place, "a"), job(b, place, "b"), **options)


@pytest.mark.parametrize(("before", "after", "kind"), [
    ({}, {}, DifferenceKind.KERNEL_TIME), ({}, {"name": "other_gemm"}, DifferenceKind.KERNELS),
    ({"shapes": [[8, 8]]}, {"shapes": [[8, 16]]}, DifferenceKind.SHAPES),
    ({"types": ["float"]}, {"types": ["c10::BFloat16"]}, DifferenceKind.TYPES)])
def test_a_longer_kernel(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], kind: DifferenceKind) -> None:
    """The second kernel takes 140 us for 100, and so does the step; what else changed says of what kind it is."""
    found = between(tmp_path, two_kernels(**before), two_kernels(140, **after), step="1")
    what = "aten::second" if kind is not DifferenceKind.KERNELS else "aten::second: gemm → other_gemm"
    assert us(found) == {(kind, what): 40} and found.total_us == 40
    assert found.top()[0].kind is kind
    assert found.attributed == found.aligned == 1.0


def test_hidden_host_time_is_told_apart(tmp_path: Path) -> None:
    """50 us more host in the first operation, while the GPU works: nothing moves, and it is named as hidden."""
    found = between(tmp_path, two_kernels(), two_kernels(other_host=50), step="1")
    assert found.total_ns == 0 and us(found) == {}
    (part,) = found.hidden()
    assert (part.kind, part.what, part.hidden_ns, part.time_ns) == (DifferenceKind.HOST, "aten::first", 50_000, 0)


def test_an_added_wait_for_the_device_comes_first(tmp_path: Path) -> None:
    """With the wait the host's work after it is no longer hidden: that part is said to have moved onto the path."""
    found = between(tmp_path, two_kernels(), two_kernels(sync=True), step="1")
    wait = found.top()[0]
    assert (wait.kind, wait.what, wait.before_ns) == (DifferenceKind.SYNC, "aten::item (only in B)", None)
    assert wait.time_ns == wait.after_ns > 0 and found.total_us > 0
    assert LEAST_ALIGNED < found.aligned < 1
    assert us(found)[DifferenceKind.SHIFT, "host work"] > 0
    back = between(tmp_path, two_kernels(sync=True), two_kernels(), step="1")
    assert back.top()[0].what == "aten::item (only in A)"


def host_step(names: list[tuple[str, float]], pause: float = 5) -> Micro:
    """A step of operations on the host alone, ``pause`` us apart."""
    trace = Micro()
    now = 0.0
    for name, length in names:
        now += pause
        trace.op(name, now, now + length)
        now += length
    return trace.step(0, now + pause)


BLOCK = [(f"aten::{name}", 20.0) for name in ("linear", "relu", "mul", "add", "sum", "mean")]


MORE = [*BLOCK[:2], ("aten::layer_norm", 30.0), *BLOCK[2:]]
PARTS = [*BLOCK[:2], ("aten::matmul", 30.0), ("aten::softmax", 10.0), ("aten::matmul", 30.0), *BLOCK[2:]]
FUSED = [*BLOCK[:2], ("aten::scaled_dot_product_attention", 40.0), *BLOCK[2:]]


@pytest.mark.parametrize(("before", "after", "kind", "what", "times"), [
    # 30 us of its own, and 5 us of Python: there are two pauses where there was one.
    (BLOCK, MORE, DifferenceKind.ADDED, "aten::layer_norm", (None, 35_000, 35)),
    (MORE, BLOCK, DifferenceKind.REMOVED, "aten::layer_norm", (35_000, None, -35)),
    (FUSED, PARTS, DifferenceKind.REPLACED,
     "aten::scaled_dot_product_attention → aten::matmul ×2, aten::softmax", (50_000, 90_000, 40))])
def test_an_added_a_removed_and_a_replaced_operation(
        tmp_path: Path, before: list[tuple[str, float]], after: list[tuple[str, float]], kind: DifferenceKind,
        what: str, times: tuple[int | None, int | None, int]) -> None:
    found = between(tmp_path, host_step(before), host_step(after))
    assert us(found) == {(kind, what): times[2]}
    assert (found.parts[0].before_ns, found.parts[0].after_ns, found.parts[0].places) == (*times[:2], 1)


@pytest.mark.parametrize("one_machine", [True, False])
def test_a_slower_machine_is_told_from_a_slower_operation(tmp_path: Path, one_machine: bool) -> None:
    """Everything takes half as long again, and ``aten::sum`` 100 us more."""
    slower = [(name, 1.5 * length + (100 if name == "aten::sum" else 0)) for name, length in BLOCK]
    found = between(tmp_path, host_step(BLOCK), host_step(slower, 7.5), one_machine=one_machine)
    assert found.host_ratio == pytest.approx(1.5)
    # Six operations of 20 us and seven pauses of 5.
    assert us(found)[DifferenceKind.WHOLE_HOST, "unchanged work"] == pytest.approx(6 * 10 + 7 * 2.5, abs=0.01)
    assert us(found)[DifferenceKind.HOST, "aten::sum"] == pytest.approx(100, abs=0.01)
    own, machine = found.top(2)
    assert (own.kind, machine.kind) == (DifferenceKind.HOST, DifferenceKind.WHOLE_HOST)
    assert machine.after_ns / machine.before_ns == pytest.approx(1.5, rel=1e-3)
    # Its row is without what the machine explains.
    assert (own.before_ns, own.after_ns) == (pytest.approx(20_000, abs=2), pytest.approx(120_000, abs=2))
    # On one kind of machine its state is no cause in the program; on another it is one.
    assert own.certain_ns > 0 and (machine.certain_ns > 0) == (not one_machine)


@pytest.mark.parametrize(("ratio", "gap_before"), [(0.87, 0.0), (1.0, 218e3), (4.77, 218e3)])
def test_a_longer_gap_is_told_from_another_host(tmp_path: Path, ratio: float, gap_before: float) -> None:
    """Every operation takes ``ratio`` times as long, and somebody's Python before ``aten::sum`` 31 ms more.

    The gap, which is long beside the operations, says nothing of the host, and the host invents no change of the gap.
    """
    def trace(factor: float, gap: float) -> Micro:
        trace, now = Micro(), 0.0
        for number, (name, length) in enumerate(BLOCK * 20):
            now += gap if number == 4 else 0.0
            trace.op(name, now, now + factor * length)
            now += factor * length
        return trace.step(0, now)

    found = between(tmp_path, trace(1, gap_before), trace(ratio, gap_before + 31e3), one_machine=False)
    parts = us(found)
    assert found.host_ratio == pytest.approx(ratio, rel=1e-3)
    assert parts.pop((DifferenceKind.GAP, "before aten::sum")) == pytest.approx(31e3, abs=0.01)
    assert parts.pop((DifferenceKind.WHOLE_HOST, "unchanged work"), 0) == pytest.approx(
        (ratio - 1) * 20 * 6 * 20, abs=0.1)
    assert sum(map(abs, parts.values())) < 0.1
    assert found.top()[0].kind is DifferenceKind.GAP


def test_a_lock_in_one_operation_says_nothing_of_the_host(tmp_path: Path) -> None:
    """One of 120 operations waits 100 ms in A and 130 ms in B; the others take 0.87 times as long."""
    def step(factor: float, wait: float) -> Micro:
        return host_step([(name, wait if number == 60 else factor * length)
                          for number, (name, length) in enumerate(BLOCK * 20)], pause=0)

    found = between(tmp_path, step(1, 100e3), step(0.87, 130e3))
    assert found.host_ratio == pytest.approx(0.87, rel=1e-3)


def test_what_holds_a_stream_back_hides_no_host_time(tmp_path: Path) -> None:
    """The first kernel starts 200 us after its launch, for no reason that was recorded; before it the host worked.

        host      |first -----------||launch|
        stream                           ..200..---50---
    """
    def trace(first: float) -> Micro:
        trace = Micro().calibrate()
        launch = 1020 + first
        trace.op("aten::first", 1010, 1010 + first).op("aten::second", launch, launch + 20)
        trace.launch(launch + 5, 5, kernel=(9, launch + 210, 50))
        wait_for(trace, launch + 30, launch + 261, 9)
        return trace.step(1000, launch + 300)

    assert us(between(tmp_path, trace(100), trace(700), step="1")) == {(DifferenceKind.HOST, "aten::first"): 600}


@pytest.mark.parametrize(("name", "profiled"), [("dlrm-cpu", True), ("bert-cpu", False)])
def test_steps_of_one_trace(name: str, profiled: bool) -> None:
    """The parts add up exactly, the other way round they have the other sign, and a step is like itself."""
    both = read_job(TRACES / name)
    found = diff_jobs(both, both, step="0", step_b="-1", profiled=profiled)
    result = replay(both.graphs, residuals=True, profiled=profiled)
    steps = [step.measured_ns if profiled else step.replayed_ns for step in result.steps]
    assert found.total_ns == steps[-1] - steps[0]
    assert found.aligned > 0.99
    back = us(diff_jobs(both, both, step="-1", step_b="0", profiled=profiled))
    assert {key: -value for key, value in back.items()} == us(found)
    assert not diff_jobs(both, both, profiled=profiled).parts


@pytest.mark.real_traces
@pytest.mark.parametrize(("before", "after", "host"), [
    ("resnet50-V100/rank0.kineto.json.gz", "resnet50-ddp-2xA100/rank0.kineto.json.gz", 7.3),
    ("h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", "h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz", 0.76),
    ("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz",
     "h100-vs-mi300/mi300-gaunernst_bert-small-uncased.json.gz", 0.92)])
def test_other_devices(before: str, after: str, host: float) -> None:
    """Each pair is decided by its hosts: free kernels leave it nearly as long, and the hosts differ by these ratios."""
    found = diff_jobs(read_job(real_trace(before)), read_job(real_trace(after)))
    assert us(found)
    assert found.attributed >= 0.99
    assert found.top()[0].kind is DifferenceKind.WHOLE_HOST
    assert found.host_ratio == pytest.approx(host, rel=0.05)


def tree(names: list[int], parent: list[int]) -> StepTree:
    name, above = np.array(names, np.int64), np.array(parent, np.int64)
    zero = np.zeros(len(name), np.int64)
    size = _sizes(above)
    return StepTree(name, above, size, np.arange(len(name)), zero - 1, zero, zero, zero, zero, _digests(name, size),
                    zero, zero.astype(bool))


@st.composite
def trees(draw: st.DrawFn) -> StepTree:
    """Nodes in pre-order: each one's parent is the node before it, or one of that one's ancestors."""
    names = draw(st.lists(st.integers(1, 4), min_size=1, max_size=30))
    parent: list[int] = []
    for node in range(len(names)):
        line = [node - 1] if node else []
        while line and line[-1] >= 0:
            line.append(parent[line[-1]])
        parent.append(draw(st.sampled_from(line or [-1])))
    return tree(names, parent)


@settings(max_examples=60, deadline=None)
@given(trees(), trees())
def test_an_alignment_keeps_names_order_and_parents(one: StepTree, other: StepTree) -> None:
    pair = align_trees(one, other)
    met = np.flatnonzero(pair >= 0)
    assert (one.name[met] == other.name[pair[met]]).all()
    assert (np.diff(pair[met]) > 0).all()
    above = one.parent[met]
    wanted = np.where(above >= 0, pair[above], -1)
    assert (other.parent[pair[met]] == wanted).all()
    assert (align_trees(one, one) == np.arange(len(one))).all()


elements = st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(elements, elements)
def test_no_alignment_is_worth_more(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> None:
    """Against every way there is to pair two short lists."""
    def worth(i: int, j: int) -> int:
        same = [x == y for x, y in zip(one[i], other[j], strict=True)]
        return 4 + 3 * same[1] + 2 * same[2] + same[3] if same[0] else -99

    ways = (sum(worth(i, j) for i, j in zip(left, right, strict=True))
            for number in range(1 + min(len(one), len(other)))
            for left in combinations(range(len(one)), number) for right in combinations(range(len(other)), number))
    met = most_alike_pairs(np.array(one).T, np.array(other).T)
    rows = np.flatnonzero(met >= 0)
    assert (np.diff(met[rows]) > 0).all()
    assert sum(worth(i, int(met[i])) for i in rows) == max(ways)


def without(graph: ExecutionGraph, *tables: str) -> Job:
    """A graph with nothing in some tables."""
    none = np.zeros(0, np.int64)
    return Job([replace(graph, **{name: getattr(graph, name).take(none) for name in tables})], 1)


def test_bad_input_is_one_sentence(tmp_path: Path, run: Run) -> None:
    small, bert = read_job(TRACES / "cpu-small"), read_job(TRACES / "resnet50-cpu")
    graph = small.graphs[0]
    shapes = Job([replace(graph, meta=replace(graph.meta, era=SHAPE_ONLY))], 1)
    rank = {number: job(Micro(rank=number, world_size=4).op("aten::a", 5, end).step(0, end + 1), tmp_path, str(number))
            for number, end in ((0, 9), (2, 9), (3, 19))}
    for a, b, options, said in (
        (small, bert, {}, r"different programs: only \d+% of their operations could be aligned.* 50% are needed"),
        (small, without(graph, "ops", "launches", "kernels", "steps", "collectives"), {}, "B is empty"),
        (shapes, small, {}, "A was traced by shapes alone"),
        (small, without(graph, "steps"), {}, "B has no steps and A has"),
        (small, small, {"step": "99"}, "A: There is no step '99'"),
        (small, small, {"step": "0", "step_b": "99"}, "B: There is no step '99'"),
        (rank[0], Job([rank[2].graphs[0], rank[3].graphs[0]], 4), {}, "no rank in common .A has 0, B has 2, 3."),
    ):
        with pytest.raises(ForetraceError, match=said):
            diff_jobs(a, b, **options)
    # One rank alone is compared with any other.
    assert diff_jobs(rank[0], rank[3]).total_us == 10
    code, out, error = run("diff", TRACES / "bert-cpu", TRACES / "bert-cpu", "--step", "99")
    assert (code, out, error.count("\n")) == (2, "", 1) and "There is no step '99'" in error


def test_the_command_prints_a_table_and_json(run: Run) -> None:
    trace = TRACES / "bert-cpu"
    value = run("diff", trace, trace, "--step", 0, "--step-b", 1, "--json", "--top", 3).json
    found = diff_jobs(read_job(trace), read_job(trace), step="0", step_b="1")
    assert value["total_us"] == found.total_us
    assert round(1e3 * (value["after_us"] - value["before_us"])) == found.total_ns
    assert sum(round(1e3 * kind["time_us"]) for kind in value["kinds"]) == found.total_ns
    assert [part["what"] for part in value["parts"]] == [part.what for part in found.top(3)]
    assert value["parts_total"] == len(found.parts)
    code, out, _ = run("diff", trace, trace, "--step", 0, "--step-b", 1)
    assert code == 0 and f"A {found.before_ns / 1e6:,.3f} ms, B {found.after_ns / 1e6:,.3f} ms" in plain(out)
    assert all(kind.value in out for kind, _, _ in found.by_kind())

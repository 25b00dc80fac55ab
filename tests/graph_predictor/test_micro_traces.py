"""Hand-made traces whose answers are worked out on paper: each docstring has the drawing and the arithmetic.

Times are microseconds. ``calibrate`` precedes most traces and pins two constants: a kernel starts 5 after its call
returns on an idle stream, and 1 after its predecessor on a busy one. A drawing's ``#`` is device work.

Every test asserts three things: the replay closes, a what-if changes by the amount derived on paper, and, where a
mutation is easy to state, that a simulator without the rule gives another answer.
"""

from __future__ import annotations

from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delayed_rank import delay_rank
from micro import Micro, closes, read_ranks, step_us

from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
from graph_predictor.simulation import device_waits as launch_queue
from graph_predictor.simulation.build import build_program
from graph_predictor.simulation.engine import critical_path, simulate
from graph_predictor.simulation.program import Bound, ItemKind, Program
from tracer.graph import ExecutionGraph, LaunchKind

Expected = dict[tuple[float, float], float]
"""A step's time (us) for a kernel's start and another duration, or a call's start and what it costs more."""
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def edited(result: Replay, program: Program) -> Replay:
    """The replay of an edited program of the same job."""
    simulated = simulate(program)
    steps = [with_fields(s, replayed_ns=int(simulated.item_end[s.end_item] - simulated.item_end[s.begin_item]))
             for s in result.steps]
    return Replay(steps=steps, built=result.built, program=program, simulated=simulated)


def with_kernels(result: Replay, durations: dict[int, float]) -> Replay:
    """The what-if of other durations (us) of some kernels, named by their rows (order of recorded start)."""
    changed = result.program.kernel_duration.copy()
    for row, duration in durations.items():
        changed[row] = round(duration * 1000)
    return edited(result, result.program.with_durations(changed))


def kernel_row(graph: ExecutionGraph, start: float, base: float = 0.0) -> int:
    """Row of the kernel that starts at ``start`` of the drawing (the window opens at its first event)."""
    rows = np.nonzero(graph.kernels.start_ns + graph.meta.base_time_ns == round((start + base) * 1000))[0]
    assert len(rows) == 1, (start, graph.kernels.start_ns.tolist())
    return int(rows[0])


def item_at(result: Replay, start: float, rank: int = 0) -> int:
    """The call that begins at ``start`` of the drawing."""
    p = result.program
    first = min(g.meta.base_time_ns for g in result.graphs)
    rows = np.nonzero((p.recorded_item_start + first == round(start * 1000)) & (p.item_kind == ItemKind.CALL)
                      & (p.thread_rank[p.item_thread()] == rank))[0]
    assert len(rows) == 1
    return int(rows[0])


def slower_call(result: Replay, start: float, by: float) -> Replay:
    """The what-if of one call costing more (us)."""
    cost = result.program.item_cost.copy()
    cost[item_at(result, start)] += round(by * 1000)
    return edited(result, with_fields(result.program, item_cost=cost))


def takes(result: Replay, kernels: Expected, calls: Expected | None = None) -> None:
    """Assert what step 1 takes if a kernel had another duration, or a call cost more."""
    for (start, duration), expected in kernels.items():
        changed = with_kernels(result, {kernel_row(result.graphs[0], start): duration})
        assert step_us(changed, "1") == expected, (start, duration)
        assert (changed.simulated.item_end >= changed.simulated.item_start).all()
    for (start, more), expected in (calls or {}).items():
        assert step_us(slower_call(result, start, more), "1") == expected, (start, more)


def without_edges(result: Replay) -> Replay:
    """A mutant: no waits across streams."""
    p = result.program
    none = np.zeros(0, np.int64)
    return edited(result, with_fields(p, edge_ptr=np.zeros_like(p.edge_ptr), edge_kernel=none, edge_lag=none,
                                      edge_fraction=none.astype(np.float64)))


def without_waits(result: Replay) -> Replay:
    """A mutant: no call waits for device work."""
    p = result.program
    none = np.zeros(0, np.int64)
    return edited(result, with_fields(p, wait_ptr=np.zeros_like(p.wait_ptr), wait_kernel=none, wait_lag=none))


def without_hand_over(result: Replay) -> Replay:
    """A mutant: threads do not wait for each other."""
    p = result.program
    none = np.zeros(0, np.int64)
    return edited(result, with_fields(p, after_ptr=np.zeros_like(p.after_ptr), after_item=none, after_lag=none))


def step_of(result: Replay, number: int, rank: int = 0) -> ReplayedStep:
    found = [s for s in result.steps if s.name == f"ProfilerStep#{number}"]
    return found[rank]


# The launch queue


def full_queue() -> Micro:
    trace = Micro().calibrate()
    t0, end = 1000, 1000
    for n in range(4000):
        start = end + 55
        end = max(start + 5, t0 + 165 + 101 * (n - 1022) + 6)
        trace.launch(start, end - start, (7, t0 + 65 + 101 * n, 100))
    trace.step(1000, 121000, 1).step(121000, end + 5, 2)
    return trace


def test_full_queue(tmp_path: Path) -> None:
    """Calls every 60 (55 Python + 5), kernels of 100 every 101: the queue fills, and call n waits for entry n - 1022.

        calls     |5|  55  |5|  55  |5|  ...      |5| 55 |=== blocked 46 ===| 55 |...
        stream 7       #####100#####.#####100#####.   .   .   .   .   .   .   .

    Kernel i ends at 165 + 101 i; unblocked, call n begins at 60 n + 55. It is blocked once the end of kernel n - 1022
    lies later, 165 + 101 (n - 1022) > 60 n + 55, so from n = 2515 on, and returns 6 after that end. Hence

    * step 1, calls 0 to 1999: 2000 * 60 = 120,000, unblocked;
    * step 2 ends 5 after call 3999 returns, at 171 + 101 * 2977 = 300,848: it takes 180,853;
    * kernels x 0.5: 51 an entry against calls every 60: never full, step 2 takes 2000 * 60 + 5 = 120,005;
    * kernels x 2: 201 an entry: call 1999 returns at 265 + 201 * 977 + 6 = 196,648, call 3999 at
      265 + 201 * 2977 + 6 = 598,648: steps of 196,648 and 402,005.
    """
    graph = full_queue().read(tmp_path)
    result = closes(graph)
    report = result.built.reports[0]
    assert (report.queue_depth, report.queue_source) == (1022, "measured")
    assert report.blocked_launches == 4000 - 2515
    assert result.program.item_cost[result.program.item_queue >= 0].max() == 5000, "blocking stayed in a call's cost"
    assert (step_us(result, "1"), step_us(result, "2")) == (120_000, 180_853)
    half, double = replay(graph, scale_kernels=0.5), replay(graph, scale_kernels=2)
    assert (step_us(half, "1"), step_us(half, "2")) == (120_000, 120_005)
    assert (step_us(double, "1"), step_us(double, "2")) == (196_648, 402_005)
    # A queue two entries too deep lets the last call return two kernels earlier.
    deeper = edited(result, with_fields(result.program, queue_depth=result.program.queue_depth + 2))
    assert step_us(deeper, "2") == 180_853 - 2 * 101


def test_full_queue_with_graphs_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a graph of 9 entries, whose kernel takes 908, and 91 launches: 100 entries of 101 each on the device.

        calls     |G|  |L|  |L| ... 91 of them |G|  |L| ...        |=== blocked: entry b - 1022 ===|
        stream 7       ####### 908 #######.#100#.#100#. ...

    Entry e of a launch ends at 165 + 101 e, all entries of a graph with its last one. The last of 40 blocks ends with a
    launch before which b = 3999 entries were submitted; it waits for entry 2977, a launch (place 77 of its block), and
    returns 6 after its end: 165 + 101 * 2977 + 6 = 300,848. The step ends 5 later.
    Were the graphs' kernels done in 1, the first launch, which returns at 120, would begin at 125 rather than behind
    the graph at 67. A block would take 91 * 101 + 2 = 9193 and entry 2977 would end after 29 blocks, the graph's 2 and
    69 launches: 65 + 58 + 29 * 9193 + 2 + 69 * 101 - 1 = 273,690. The step would take 273,701.
    """
    trace = Micro().calibrate()
    t0, end, before = 1000, 1000, 0
    ends: list[int] = []
    for call in range(40 * 92):
        graph = call % 92 == 0
        start = end + 55
        end = max(start + 5, ends[before - 1022] + 6 if before >= 1022 else 0)
        begins, length, taken = t0 + 65 + 101 * before, 908 if graph else 100, 9 if graph else 1
        trace.launch(start, end - start, (7, begins, length), call="cudaGraphLaunch" if graph else "cudaLaunchKernel",
                     name="graph_node" if graph else "gemm")
        ends += [begins + length] * taken
        before += taken
    trace.step(t0, end + 5, 1)
    graph_ = trace.read(tmp_path)
    result = closes(graph_)
    assert result.built.reports[0].queue_depth == 1022
    nodes = {int(k): 1.0 for k in np.nonzero(graph_.kernels.name == graph_.strings.index("graph_node"))[0]}
    assert step_us(with_kernels(result, nodes), "1") == 273_701
    # With one entry a graph there would be as many graphs and launches in flight, and a depth that no device has.
    monkeypatch.setattr(launch_queue, "ENTRIES_PER_GRAPH", 1)
    assert build_program([graph_]).reports[0].queue_depth in (1022 - 8 * 10, 1022 - 8 * 11)


def two_queues() -> Micro:
    trace = Micro().calibrate()
    t0, end, busy = 1000, 1000.0, 0.0
    for n in range(4000):
        if n % 40 == 0:
            trace.launch(end + 55, 5, (20, max(end + 65, busy + 1), 3000))
            busy = max(end + 65, busy + 1) + 3000
            end += 60
        start = end + 55
        end = max(start + 5, t0 + 225 + 101 * (n - 1022) + 6)
        trace.launch(start, end - start, (7, t0 + 125 + 101 * n, 100))
    trace.step(1000, end + 5, 1)
    return trace


def test_each_stream_has_a_queue(tmp_path: Path) -> None:
    """Every 40th call another stream gets a kernel of 3000; a launch waits for entries of its own stream only.

        calls     |5| 55 |5| 55 ...  |=== blocked: entry n - 1022 of stream 7 ===|
        stream 7       #####100#####.#####100#####. ...
        stream 20      ################# 3000 #################. ...   (7 to 25 more outstanding)

    The last call, 3999, returns at 225 + 101 * 2977 + 6 = 300,908; the step ends 5 later. With kernels of stream 7
    half as long, 51 an entry, the queue is never full: 4100 calls of 60, and 5.
    """
    graph = two_queues().read(tmp_path)
    result = closes(graph)
    report = result.built.reports[0]
    assert (report.queue_depth, report.queue_source, report.queue_shared) == (1022, "measured", False)
    halved = {int(k): 50.0 for k in np.nonzero(graph.kernels.stream == 7)[0]}
    assert step_us(with_kernels(result, halved), "1") == 4100 * 60 + 5


# Waits across streams


def wait_across_streams(how: str, first: float = 500, second_start: float = 1523, era: str = "kineto") -> Micro:
    end = second_start + 100
    trace = Micro(era=era).calibrate().step(1000, end + 17)
    trace.launch(1010, 5, (7, 1020, first))
    if how != "timeline":
        record = trace.call("cudaEventRecord", 1020, 2)
        wait = trace.call("cudaStreamWaitEvent", 1030, 2)
        if how == "recorded":
            trace.cuda_sync("Stream Wait Event", 1030, 1, wait, stream=20, wait_on=7, record=record)
    trace.launch(1040, 5, (20, second_start, 100))
    trace.call("cudaDeviceSynchronize", 1060, end + 10 - 1060)
    return trace


@pytest.mark.parametrize(("how", "era"), [
    ("recorded", "kineto"), ("structural", "kineto"), ("timeline", "kineto"), ("structural", "kineto-2021"),
    ("timeline", "list-2020")])
def test_event_wait(how: str, era: str, tmp_path: Path) -> None:
    """B on stream 20 waits for A on stream 7 and starts 3 after its end.

        calls      |A| rec wait |B|  |=============== sync ===============|  step end
        stream 7     ######## A 500 ########
        stream 20                           ..## B 100 ##
                   1020                 1520 1523       1623            1633    1640

    A of 50 ends at 1070, B runs 1073-1173. A of 10 ends at 1030; now B's launch binds,
    1050-1150.
    """
    graph = wait_across_streams(how, era=era).read(tmp_path)
    assert graph.meta.era == era
    result = closes(graph)
    counts = result.built.reports[0].edges
    assert {name: counts[name] for name in ("recorded", "structural", "timeline")} == {
        name: int(name == how) for name in ("recorded", "structural", "timeline")}
    takes(result, {(1020, 1000): 1140, (1020, 50): 190, (1020, 10): 167})
    # Without the edge B runs at once, and the step waits for A alone: 1520 + 10 + 7.
    assert step_us(without_edges(result), "1") == 537


@pytest.mark.parametrize("how", ["recorded", "structural"])
def test_event_wait_that_did_not_bind(how: str, tmp_path: Path) -> None:
    """The same, but A takes 10 and had ended when B was launched. A wait that was placed binds when A grows.

        stream 7     ## A 1020-1030
        stream 20           ####### B 1050-1150 #######

    With A of 510, ending at 1530, B starts 2 later (no edge bound in the recording: the default lag): the step takes
    532 + 100 + 10 + 7 = 649. Without the edge it would take 530 + 10 + 7 = 547.
    """
    graph = wait_across_streams(how, first=10, second_start=1050).read(tmp_path)
    result = closes(graph)
    longer = with_kernels(result, {kernel_row(graph, 1020): 510})
    assert step_us(longer, "1") == 649
    assert step_us(without_edges(longer), "1") == 547


def test_contention(tmp_path: Path) -> None:
    """B is ready at 1040 but finds no room until A's last blocks leave, at nine tenths of A: not a wait for its end.

        stream 7     ############# A 1020-2020 #############
        stream 20                                   #### B 1920-2120 ####
        calls      |A| |B| |====================== sync =======================| 2130, step end 2135

    A x 2 ends at 3020, B starts at 1020 + 0.9 * 2000 = 2820 and ends at 3020 too: 2,035. B x 2 ends at 2320: 1,335.
    """
    trace = Micro().calibrate().step(1000, 2135)
    trace.launch(1010, 5, (7, 1020, 1000))
    trace.launch(1030, 5, (20, 1920, 200))
    trace.call("cudaDeviceSynchronize", 1050, 1080)
    graph = trace.read(tmp_path)
    result = closes(graph)
    assert result.built.reports[0].edges["contention"] == 1
    assert step_us(with_kernels(result, {kernel_row(graph, 1020): 2000}), "1") == pytest.approx(2035, abs=0.01)
    assert step_us(with_kernels(result, {kernel_row(graph, 1920): 400}), "1") == pytest.approx(1335, abs=0.01)
    assert step_us(without_edges(result), "1") == 1035, "B hidden behind A"


def test_graph_launch(tmp_path: Path) -> None:
    """One correlation, four kernels, two streams; inside the graph stream 20 waits for the first kernel (3 after).

        call       |graph launch 20|  |============ sync ============| 1347, step end 1350
        stream 7                  ## K1 100 ##.## K2 100 ##.## K3 100 ##
        stream 20                              ..# L 50 #
                               1035        1135 1136,1138   1237     1337

    x 2: K1 1035-1235, K2 -1436, K3 1437-1637, L 1238-1338: the step takes 650.
    """
    trace = Micro().calibrate().step(1000, 1350)
    trace.launch(1010, 20, kernels=[(7, 1035, 100), (7, 1136, 100), (7, 1237, 100), (20, 1138, 50)],
                 call="cudaGraphLaunch")
    trace.call("cudaDeviceSynchronize", 1040, 307)
    graph = trace.read(tmp_path)
    assert (graph.launches.kind == LaunchKind.GRAPH).sum() == 1
    assert graph.meta.loss.orphan_kernels == 0
    closes(graph)
    double = replay(graph, scale_kernels=2)
    # Step 0 is twice as long too: its queued kernels end after it, at 320 + 4 * 100 + 3 * 1, long before step 1.
    assert step_us(double, "1") == 650
    first = int(double.simulated.kernel_start[kernel_row(graph, 1035)])
    ends = [(int(double.simulated.kernel_end[kernel_row(graph, at)]) - first) / 1000 for at in (1035, 1136, 1237, 1138)]
    assert ends == [200, 401, 602, 303]


# Blocking calls

PAGEABLE = "HtoD (Pageable -> Device)"
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
OPTIMIZER = [("op", "Optimizer.step#SGD.step", 1600, 1700), ("op", "aten::_foreach_add_", 1600, 1700)]
WAITING = [
    # A memset of no bytes is a call that leaves no device work: host time, no loss, no queue entry.
    #     calls         |memset 10|  |launch|              |=== sync ===|
    #     stream 7                          ####100####
    ("memset of no bytes", 1160, [
        ("launch", 1010, 10, {"call": "cudaMemsetAsync"}),
        ("launch", 1025, 5, (7, 1035, 100)),
        ("call", "cudaDeviceSynchronize", 1040, 105)], {}, {(1010, 30): 190}, 58),
    # A device sync waits for every stream. B + 1000 ends at 2240.
    #     calls      |A| |B| |============== device sync ==============| 2030, step end 2035
    #     stream 7     ################ A 1020-2020 ################
    #     stream 20        ## B 1040-1240 ##
    ("device sync", 2035, [
        ("launch", 1010, 5, (7, 1020, 1000)),
        ("launch", 1030, 5, (20, 1040, 200)),
        ("call", "cudaDeviceSynchronize", 1050, 980)], {(1020, 1300): 1335, (1040, 500): 1035, (1040, 1200): 1255}, {},
     58),
    # Freeing device memory waits for the device.
    #     calls      |A|  |======= cudaFree =======| 1530, step end 1535
    #     stream 7     ####### A 1020-1520 #######
    ("free", 1535, [("launch", 1010, 5, (7, 1020, 500)), ("call", "cudaFree", 1030, 500)],
     {(1020, 1000): 1035}, {}, None),
    # An allocation usually takes 50; this one took 499 and returned 9 after the device had no work left. With A of 1
    # the call costs what is left of it, 9: 1030 + 9 + 5.
    #     calls      |A|  |====== cudaMalloc ======| 1529, step end 1534
    #     stream 7     ####### A 1020-1520 #######
    ("allocation", 1534, [
        ("call", "cudaMalloc", 530, 50),
        ("launch", 1010, 5, (7, 1020, 500)),
        ("call", "cudaMalloc", 1030, 499)],
     {(1020, 1000): 1034, (1020, 1): 44}, {}, 44),
    # Freeing waits for the device and then works, each time for another while: 700, 2000, and 900 on an idle device.
    # A of 1 ends at 1021, before the first call at 1030, which returns at 1730 instead of 2220.
    #     calls      |A|  |== free: waits ==|= 700 =| |B| |= free: waits =|=== 2000 ===| |= 900 =| 5450, step end 5455
    #     stream 7     ##### A 1020-1520 ####           ## B 2240-2540 ###
    ("work after waiting", 5455, [
        ("launch", 1010, 5, (7, 1020, 500)),
        ("call", "hipFree", 1030, 1190),
        ("launch", 2230, 5, (7, 2240, 300)),
        ("call", "hipFree", 2250, 2290),
        ("call", "hipFree", 4550, 900)],
     {(1020, 1000): 4955, (1020, 1): 3965, (2240, 1300): 5455}, {}, None),
    # Host and device clocks disagree by 8 (seen on an MI300X): no duration may come out negative. A of 1 ends before
    # the sync begins at 1030: it costs nothing, 1030 + 4.
    #     calls      |A|  |====== hipDeviceSynchronize ======| 1512, step end 1516
    #     stream 7     ########## A 1020-1520 ##########
    ("early return", 1516, [("launch", 1010, 5, (7, 1020, 500)), ("call", "hipDeviceSynchronize", 1030, 482)],
     {(1020, 800): 816, (1020, 1): 34}, {}, None),
    # From or to pinned memory the call of a copy returns at once, whatever its stream is doing.
    ("pinned copy", 1050, [
        ("launch", 1010, 5, (7, 1020, 500)),
        ("copy", 1030, 6, (7, 1521, 10), "DtoH (Device -> Pinned)", 4096)],
     {(1020, 5000): 50}, {}, 50),
    # A large copy from pageable memory ends 100 after its call, which feeds it piece by piece. One of half the length
    # still ends at 1630. One of 700 cannot have begun before its call did, at 1030: it ends at 1730.
    #     calls      |===== copy call 500 =====| 1530   |B|  |=== sync ===| 1741, step end 1746
    #     stream 7              ######### copy 1280-1630 #########.### B 1631-1731 ###
    ("staged copy", 1746, [
        ("copy", 1030, 500, (7, 1280, 350), PAGEABLE, 1 << 20),
        ("launch", 1540, 5, (7, 1631, 100)),
        ("call", "cudaDeviceSynchronize", 1550, 191)], {(1280, 175): 746, (1280, 700): 846}, {(1030, 40): 786}, None),
    # The call cannot feed the copy before its stream is free: that part of the call is waiting. It returns 250 after
    # A's end, the copy ends 100 after the call. A of 1 ends before the call: it feeds until 1280.
    #     calls      |A| |=========== copy call 1030-2270 ===========|       |= sync =| 2380, step end 2385
    #     stream 7     ####### A 1020-2020 #######.######### copy 2021-2370 #########
    ("staged copy behind a kernel", 2385, [
        ("launch", 1010, 5, (7, 1020, 1000)),
        ("copy", 1030, 1240, (7, 2021, 349), PAGEABLE, 1 << 20),
        ("call", "cudaDeviceSynchronize", 2280, 100)], {(1020, 1500): 1885, (1020, 1): 395}, {}, None),
    # A call that returned before its copy began did not feed it: the copy follows its stream, 50,000 later. The call's
    # own cost is 20 whatever A takes: with A of 1 B, launched at 1695, starts at 1700, and the sync returns at 1810.
    #     calls      |== staged copy call 500 ==| 1530   |A| |queued copy 20| 1680  |B|  |==== sync ====| 51766
    #     stream 7            ### 1280-1630 ###            ###### A 1650-51650 ######.#copy 4#.## B 51656-51756 ##
    ("queued copy", 51770, [
        ("copy", 1030, 500, (7, 1280, 350), PAGEABLE, 1 << 20),
        ("launch", 1640, 5, (7, 1650, 50_000)),
        ("copy", 1660, 20, (7, 51651, 4), PAGEABLE, 82944),
        ("launch", 1690, 5, (7, 51656, 100)),
        ("call", "cudaDeviceSynchronize", 1700, 50_066)], {(1650, 70_000): 70_770, (1650, 1): 814}, {}, None),
    # A stream sync waits for its own stream only: the one recorded, else that of the launch of the same operation. B of
    # 1 ends at 1041, before the sync begins at 1050; the sync then costs its unblocked 3.
    #     calls      |A|  [ op: |B| |=== sync stream 20 ===| ]  step end
    #     stream 7     ######################## A 1020-2020 ########################
    #     stream 20            ###### B 1040-1240 ######       1250 1255
    ("stream sync", 1255, [
        ("launch", 1010, 5, (7, 1020, 1000)),
        ("op", "aten::_local_scalar_dense", 1025, 1252),
        ("launch", 1030, 5, (20, 1040, 200)),
        ("call", "cudaStreamSynchronize", 1050, 200),
        ("cuda_sync", "Stream Sync", 1050, 199, 10, {"stream": 20})],
     {(1040, 500): 555, (1020, 1300): 255, (1040, 1): 58}, {}, 58),
    # An event sync waits for what its stream held when the event was recorded: A, not the later C. Unblocked it ends at
    # 1043, 5 before the step.
    #     calls      |A| rec |C| |=== event sync ===| 1230, step end 1235
    #     stream 7     #### A 1020-1220 ####.####### C 1221-2221 #######
    ("event sync", 1235, [
        ("launch", 1010, 5, (7, 1020, 200)),
        ("call", "cudaEventRecord", 1020, 2),
        ("launch", 1030, 5, (7, 1221, 1000)),
        ("call", "cudaEventSynchronize", 1040, 190),
        ("cuda_sync", "Event Sync", 1040, 190, 11, {"wait_on": 7, "record": 9})],
     {(1020, 500): 535, (1221, 1300): 235}, {}, 48),
    # B waits for what was on stream 7 when the event was recorded (A), not for C launched after it.
    #     calls      |A| rec |C| wait |B|
    #     stream 7     #### A 500 ####.####### C 400 #######
    #     stream 20                    ..## B 100 ##
    #                1020          1520 1521,1523            1921
    ("event wait", 1935, [
        ("launch", 1010, 5, (7, 1020, 500)),
        ("call", "cudaEventRecord", 1017, 2),
        ("launch", 1022, 5, (7, 1521, 400)),
        ("call", "cudaStreamWaitEvent", 1030, 2),
        ("cuda_sync", "Stream Wait Event", 1030, 1, 11, {"stream": 20, "wait_on": 7, "record": 9}),
        ("launch", 1040, 5, (20, 1523, 100)),
        ("call", "cudaDeviceSynchronize", 1060, 871)],
     {(1521, 800): 935 + 400, (1020, 600): 935 + 100}, {}, None),
    # Main waits for the later of two autograd threads; the earlier one's slack is waiting, not a hand-over's cost. B's
    # launch + 100: autograd 2 ends at 1500, no change. + 250: it ends at 1650, + 20: main goes on at 1670.
    #     main        [ forward -1100 ]                                   [ optimizer 1600-1700 ] 1710
    #     autograd 2                    [ 1150 |B| -- 1400 ]    (slack 180)
    #     autograd 3                    [ 1150 |C| ------------ 1580 ]
    ("two backward threads", 1710, [
        ("op", "aten::linear", 1010, 1100),
        ("launch", 1020, 5, (7, 1030, 20)),
        ("op", BACKWARD, 1150, 1400, 2),
        ("launch", 1200, 5, (7, 1210, 20), {"thread": 2}),
        ("op", BACKWARD, 1150, 1580, 3),
        ("launch", 1250, 5, (20, 1260, 20), {"thread": 3}), *OPTIMIZER],
     {}, {(1200, 100): 710, (1200, 250): 780, (1250, 100): 810}, None),
    # The autograd thread starts while the caller is inside a long call: it must not wait for that call's return.
    #     main      [ forward 1010 |========= cudaStreamCreate 1100-1500 =========| 1500 ]        [ optimizer ] 1710
    #     autograd                        [ backward 1250 |B|               1580 ]
    ("hand-over inside a call", 1710, [
        ("op", "aten::linear", 1010, 1500),
        ("launch", 1020, 5, (7, 1030, 20)),
        ("call", "cudaStreamCreateWithPriority", 1100, 400),
        ("op", BACKWARD, 1250, 1580, 2),
        ("launch", 1300, 5, (7, 1310, 20), {"thread": 2}), *OPTIMIZER], {}, {(1300, 50): 760}, None),
]
"""What one call waits for: the step's end, its events, step times by kernels and by calls as ``takes`` has them, and
the step in which no call waits."""
VARIANTS = [(row, recorded, era) for row in WAITING for recorded, era in (
    (True, "kineto"), (False, "kineto"), (False, "list-2020"))
    if recorded or row[0] in ("stream sync", "event sync")]
"""Each as it is, and two as traces without ``cuda_sync`` events have them."""


@pytest.mark.parametrize(("row", "recorded", "era"), VARIANTS, ids=[f"{row[0]}-{more}" for row, *more in VARIANTS])
def test_a_call_waits_for_what_it_did(row: tuple[Any, ...], recorded: bool, era: str, tmp_path: Path) -> None:
    _, end, events, kernels, calls, unwaited = row
    trace = Micro(era=era).calibrate().step(1000, end)
    for what, *arguments in events:
        if recorded or what != "cuda_sync":
            named = arguments.pop() if isinstance(arguments[-1], dict) else {}
            getattr(trace, what)(*arguments, **named)
    graph = trace.read(tmp_path)
    assert graph.meta.loss.launches_without_kernels == 0
    result = closes(graph)
    assert len(result.program.queue_kernel) == len(graph.kernels)
    waits = sum(event[:2] == ("cuda_sync", "Stream Wait Event") for event in events)
    assert result.built.reports[0].edges["recorded"] == waits
    takes(result, kernels, calls)
    if unwaited is not None:
        assert step_us(without_waits(result), "1") == unwaited


@pytest.mark.parametrize(("usual", "start", "duration"), [
    (50, 1030, 440), (50, 1030, 532), (130, 1030, 499), (None, 1030, 499), (8, 1514, 34)])
def test_an_allocation_that_only_ran_beside_a_kernel(usual: float | None, start: float, duration: float,
                                                     tmp_path: Path) -> None:
    """Nothing says that it waited: it returned before the kernel's end at 1520, or 42 after it, or usually takes as
    long, or nobody knows how long it usually takes, or the kernel was there for 6 of its 34 only. It is work, whatever
    the kernel takes."""
    trace = Micro().calibrate()
    for number in range(3 if usual else 0):
        trace.call("cudaMalloc", 530 + number * (usual or 0), usual or 0)
    trace.step(1000, start + duration + 5)
    trace.launch(1010, 5, (7, 1020, 500))
    trace.call("cudaMalloc", start, duration)
    graph = trace.read(tmp_path)
    result = closes(graph)
    for length in (1, 1000):
        assert step_us(with_kernels(result, {kernel_row(graph, 1020): length}), "1") == start - 1000 + duration + 5


def two_allocations(duration: float) -> Micro:
    """Thread 2 allocates from 1010 to 1310, the step's thread from 1110."""
    trace = Micro().calibrate()
    for begin in (530, 610, 700):
        trace.call("cudaMalloc", begin, 100)
    trace.step(1000, 1110 + duration + 5)
    trace.launch(1002, 3, (7, 1010, 20), thread=2)
    trace.call("cudaMalloc", 1010, 300, thread=2)
    trace.call("cudaMalloc", 1110, duration)
    return trace


def test_two_threads_allocate_at_once(tmp_path: Path) -> None:
    """The driver serves one of them at a time: the second waits for 200 of its 290 and then works for 90, as usual.

        thread 2     1005 |===== cudaMalloc 1010-1310 =====|
        main                      |1110 ===== waits =======|== 90 ==| 1400, step end 1405

    The other's of 0 would end at 1010: main begins at once, 1110 + 90 + 5.
    """
    result = closes(two_allocations(290).read(tmp_path))
    takes(result, {}, {(1010, 50): 455, (1010, -300): 205, (1310, 50): 455})
    assert step_us(without_hand_over(result), "1") == 205


@pytest.mark.parametrize("duration", [190, 202])
def test_allocations_beside_each_other(duration: float, tmp_path: Path) -> None:
    """The second returns before the first, or so soon after it that it can have done no work then: it never waited."""
    result = closes(two_allocations(duration).read(tmp_path))
    for by in (-300, 50):
        assert step_us(slower_call(result, 1010, by), "1") == 115 + duration


@pytest.mark.parametrize(("call", "direction"), [
    ("cudaMemcpyAsync", "DtoH (Device -> Pageable)"), ("hipMemcpyWithStream", "HtoD (Host -> Device)"),
    ("cudaMemcpy", "DtoH (Device -> Pinned)")])
def test_copy_its_call_waits_for(call: str, direction: str, tmp_path: Path) -> None:
    """A copy to pageable memory (or any of these calls) returns when the copy is done, here 10 later.

        calls      |A|  |====== copy call ======|  1541, step end 1546
        stream 7     ##### A 1020-1520 #####.# copy 10 #
                                          1521      1531

    Three such copies on an idle stream before the step show that a copy starts 8 after its call begins.
    A of 1 ends at 1021: the copy starts at 1030 + 8, the call returns at 1058.
    """
    trace = Micro().calibrate().step(1000, 1546)
    for at in (610, 710, 810):
        trace.copy(at, 28, (7, at + 8, 10), direction, 4096, call=call)
    trace.launch(1010, 5, (7, 1020, 500))
    trace.copy(1030, 511, (7, 1521, 10), direction, 4096, call=call)
    result = closes(trace.read(tmp_path))
    takes(result, {(1020, 700): 746, (1020, 1): 63})
    assert step_us(without_waits(result), "1") < 60, "the copy does not block: its call's wait must not be its cost"


# The window's start, data, step borders


def test_leading_orphans_are_per_stream(tmp_path: Path) -> None:
    """Work launched before the window holds each stream back on its own.

        stream 7   ## O1 5-205 ##.## O2 206-406 ##.# A 407-507 #
        stream 20   ### P 8-308 ###.# B 309-409 #
        calls     |A| |B| |============== sync =============| 517, step end 520

    O1 and P start when they were seen to start; O2 follows O1. x 0.5: O1 -105, O2 106-206, A 207-257: 270.
    x 2: O1 -405, O2 406-806, A 807-1007: 1,020.
    """
    trace = Micro().step(0, 520).calibrate(at=5000)
    trace.orphan(7, 5, 200).orphan(7, 206, 200).orphan(20, 8, 300)
    trace.launch(10, 5, (7, 407, 100))
    trace.launch(30, 5, (20, 309, 100))
    trace.call("cudaDeviceSynchronize", 50, 467)
    graph = trace.read(tmp_path)
    assert graph.meta.loss.leading_orphans == 3
    result = closes(graph)
    assert result.built.reports[0].edges["external"] == 2, "O1 and P; O2 follows from its duration"
    assert step_us(replay(graph, scale_kernels=0.5), "1") == 270
    assert step_us(replay(graph, scale_kernels=2), "1") == 1020
    orphan = graph.kernels.launch < 0
    previous = result.program.kernel_previous.copy()
    previous[np.isin(previous, np.nonzero(orphan)[0])] = -1
    assert step_us(edited(result, with_fields(result.program, kernel_previous=previous)), "1") != 520


def test_stream_busy_at_the_window_start(tmp_path: Path) -> None:
    """A starts 280 late on a stream of which nothing was recorded before: an external event, told as one.

        calls     |A| |==================== sync ====================| 410, step end 415
        stream 7   (work that left no record)    ##### A 300-400 #####
    """
    trace = Micro().step(0, 415).calibrate(at=5000, stream=20)
    trace.launch(10, 5, (7, 300, 100))
    trace.call("cudaDeviceSynchronize", 30, 380)
    result = closes(trace.read(tmp_path))
    assert result.built.reports[0].edges["external"] == 1
    takes(result, {(300, 200): 515})


def loader_trace(iterator: str) -> Micro:
    trace = Micro().calibrate().step(1000, 5175)
    trace.launch(1010, 5, (7, 1020, 1000))
    trace.call("cudaDeviceSynchronize", 1030, 1000)
    trace.op(f"enumerate(DataLoader)#{iterator}.__next__", 2040, 5040)
    trace.launch(5050, 5, (7, 5060, 100))
    trace.call("cudaDeviceSynchronize", 5070, 100)
    return trace


def test_loaders(tmp_path: Path) -> None:
    """The batch of worker processes arrives at 5040 whatever this process does.

        calls      |A| |== sync ==|  [===== __next__ waits 3000 =====] |B| |= sync =|  step end 5175
        stream 7     ### A 1000 ###                                      # B 100 #
                   1020       2020 2030 2040                     5040    5060   5160 5170

    A of 1 or of 2000 changes nothing: the wait only gets longer or shorter. A of 5000 ends at 6020, the sync returns at
    6030, `__next__` is asked at 6040 and has the batch at once: everything after is 1000 later. A batch that this
    thread makes is host work and moves with what is before; with A of 1 the unblocked sync returns at 1033.
    """
    result = closes(loader_trace("_MultiProcessingDataLoaderIter").read(tmp_path))
    takes(result, {(1020, 1): 4175, (1020, 2000): 4175, (1020, 5000): 5175})
    path = critical_path(result.program, result.simulated, result.graphs, step_of(result, 1).begin_item,
                         step_of(result, 1).end_item)
    assert path.by_bound()[Bound.DATA_LOADING.label] >= 3_000_000
    single = closes(loader_trace("_SingleProcessDataLoaderIter").read(tmp_path))
    takes(single, {(1020, 2000): 5175, (1020, 1): 4175 - (2030 - 1033)})


@pytest.mark.parametrize("era", ["kineto", "kineto-2021", "list-2020"])
def test_step_border_is_no_sync(era: str, tmp_path: Path) -> None:
    """Work launched in step 1 runs on into step 2, which waits for it.

        steps      |  1: 100  |            2: 935                     |
        calls        |A|        |=========== sync ===========| 2030
        stream 7       ############## A 1020-2020 ##############

    x 0.5: step 1 still 100, step 2 ends at 1520 + 10 + 5: 435. x 2: 1,935.
    """
    trace = Micro(era=era).calibrate().step(1000, 1100, 1).step(1100, 2035, 2)
    trace.launch(1010, 5, (7, 1020, 1000))
    trace.call("cudaDeviceSynchronize", 1110, 920)
    trace.launch(2031, 2, (7, 2038, 100))  # a last step that launches next to nothing is left out
    graph = trace.read(tmp_path)
    assert (step_us(closes(graph), "1"), step_us(closes(graph), "2")) == (100, 935)
    for factor, expected in ((0.5, 435), (2, 1935)):
        result = replay(graph, scale_kernels=factor)
        assert (step_us(result, "1"), step_us(result, "2")) == (100, expected)


def test_overlap_within_a_stream(tmp_path: Path) -> None:
    """Programmatic dependent launch: each kernel starts 0.9 before its predecessor ends.

        calls      |0|1|2|3|4|5| |===================== sync =====================| step end
        stream 7     ## K0 100 ##
                              ## K1 100 ##  ...   K_i starts at 1020 + 99.1 i

    K5 ends at 1020 + 5 * 99.1 + 100 = 1615.5, the sync returns 10 later, the step ends 4.5 later: 630.
    x 2: 1020 + 5 * 199.1 + 200 = 2215.5: 1,230. At x 0 each kernel starts with its launch, in launch order.
    """
    trace = Micro().step(0, 600, 0).step(1000, 1630, 1)
    for at in (10, 110, 210):
        trace.launch(at, 5, (7, at + 10, 20))
    for i in range(6):
        trace.launch(1010 + 10 * i, 5, (7, 1020 + 99.1 * i, 100))
    trace.call("cudaDeviceSynchronize", 1070, 555.5)
    graph = trace.read(tmp_path)
    result = closes(graph)
    burst = slice(3, 9)
    starts, ends = result.simulated.kernel_start[burst], result.simulated.kernel_end[burst]
    assert (starts[1:] - ends[:-1]).tolist() == [-900] * 5
    assert step_us(replay(graph, scale_kernels=2), "1") == 1230
    free = replay(graph, scale_kernels=0).simulated.kernel_start[burst]
    assert (np.diff(free) == 10_000).all()


# Threads


def two_threads(forward_end: float = 1100) -> Micro:
    trace = Micro().calibrate().step(1000, 1710)
    trace.op("aten::linear", 1010, forward_end).launch(1020, 5, (7, 1030, 100))
    trace.op(BACKWARD, 1150, 1580, thread=2)
    trace.launch(1200, 5, (7, 1210, 200), thread=2)
    trace.call("cudaStreamSynchronize", 1220, 200, thread=2)
    trace.op("Optimizer.step#SGD.step", 1600, 1700).op("aten::_foreach_add_", 1600, 1700)
    return trace


def test_forward_backward(tmp_path: Path) -> None:
    """The autograd thread starts 50 after the forward, the caller goes on 20 after the autograd thread.

        main      [ forward 1010-1100 ]                                          [ optimizer 1600-1700 ] 1710
        autograd                       [ backward 1150 |B| |== sync ==|     1580 ]
        stream 7        # A 100 #                        ### B 200 ###
                      1030   1130                        1210    1410 1420

    B + 100 delays the autograd thread's sync, hence main. With B of 1 the sync costs 3 instead of 200.
    """
    graph = two_threads().read(tmp_path)
    result = closes(graph)
    b = kernel_row(graph, 1210)
    assert result.built.reports[0].hand_overs == 2
    takes(result, {(1210, 300): 810, (1210, 1): 710 - 197}, {(1020, 30): 740, (1200, 70): 780})
    # Without the hand-over nothing holds the optimizer back.
    assert step_us(without_hand_over(with_kernels(result, {b: 300})), "1") < 710


def test_caller_still_busy_after_the_hand_over(tmp_path: Path) -> None:
    """The caller works on until 1400, 250 longer than the autograd thread needs to start; that work is not waiting.

        main      [ forward with one launch  1010 ------------- 1400 ]      [ optimizer 1600-1700 ] 1710
        autograd                       [ backward 1150 |B| |== sync ==|     1580 ]

    B of 1 shortens the backward by 197: it ends at 1383, the optimizer starts 20 later, at 1403: 513. With 60 less
    work besides, the backward ends at 1323, but main is busy until 1400: it goes on then, not at 1343: 510.
    """
    graph = two_threads(forward_end=1400).read(tmp_path)
    result = closes(graph)
    shorter = with_kernels(result, {kernel_row(graph, 1210): 1})
    assert step_us(shorter, "1") == 513
    work = shorter.program.item_work.copy()
    last = int(np.nonzero(shorter.program.item_kind == ItemKind.HAND_OVER)[0][-1])
    work[last] -= 60_000
    assert step_us(edited(shorter, with_fields(shorter.program, item_work=work)), "1") == 510


# Several ranks


def late_rank() -> list[Micro]:
    early = Micro(rank=0, world_size=2).calibrate().step(1000, 1545)
    early.launch(1010, 5, (20, 1020, 510), name=NCCL)
    early.call("cudaDeviceSynchronize", 1025, 515)
    late = Micro(rank=1, world_size=2).calibrate().step(1000, 1545)
    late.launch(1500, 5, (20, 1510, 20), name=NCCL)
    late.call("cudaDeviceSynchronize", 1515, 25)
    return [early, late]


def test_late_rank(tmp_path: Path) -> None:
    """Rank 1 arrives 490 later; the transfer takes the 20 that the last to arrive measured.

        rank 0   |L|   ############ all-reduce 1020-1530 ############| sync 1540, step end 1545
        rank 1                                         |L|  ## 1510-1530 ##| sync 1540, step end 1545

    Rank 1 later by 100: rank 0 takes 645; rank 1's step, which began 100 later, still 545. Earlier by 600: now rank 0
    arrives last, at 1020: both end at 1040, and rank 0 takes 1040 + 10 + 5 = 55. Rank 0 later by 300: no change of
    any end, its step is 300 shorter; by 500 it arrives at 1520, the ends move by 10.
    """
    graphs = read_ranks(late_rank(), tmp_path)
    result = closes(graphs)
    kernels = [int(k) for k in np.nonzero(result.program.kernel_group >= 0)[0]]
    assert len(kernels) == 2
    assert result.program.kernel_duration[kernels].tolist() == [20_000, 20_000]

    def steps(rank: int, by: float) -> tuple[float, float]:
        moved = edited(result, delay_rank(result.program, rank, round(by * 1000)))
        return step_us(moved, "1", 0), step_us(moved, "1", 1)

    assert steps(1, 0) == (545, 545)
    assert steps(1, 100) == (645, 545)
    assert steps(1, -600) == (55, 545 + 600 - 490)
    assert steps(0, 300) == (245, 545)
    assert steps(0, 500) == (55, 555)
    path = critical_path(result.program, result.simulated, result.graphs, step_of(result, 1).begin_item,
                         step_of(result, 1).end_item)
    assert path.total_ns == 545_000
    assert path.by_bound()[Bound.WAITING_FOR_RANK.label] == 490_000
    assert path.by_bound()[Bound.EXPOSED_COMMUNICATION.label] == 20_000
    # Kernels do not scale collectives: the what-if of a faster GPU leaves them.
    assert step_us(replay(graphs, scale_kernels=0.1), "1", 0) == 545
    # A mutant that keeps recorded durations instead of a rendezvous does not notice a late rank 0.
    alone = with_fields(result.program, kernel_group=np.full_like(result.program.kernel_group, -1),
                        group_size=np.zeros(0, np.int64), kernel_duration=(
                            result.program.recorded_kernel_end - result.program.recorded_kernel_start))
    assert step_us(edited(result, delay_rank(alone, 1, 100_000)), "1", 0) == 545


def two_collectives() -> list[Micro]:
    def group(name: str) -> dict[str, object]:
        return {"Collective name": "allreduce", "Process Group Name": name, "Process Group Ranks": "[0, 1]",
                "Group size": 2, "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float"}

    first = Micro(rank=0, world_size=2).calibrate().step(1000, 1335)
    first.launch(1010, 5, (20, 1020, 300), name=NCCL, **group("tp"))
    first.launch(1030, 5, (24, 1040, 200), name=NCCL, **group("dp"))
    first.call("cudaDeviceSynchronize", 1050, 280)
    second = Micro(rank=1, world_size=2).calibrate().step(1000, 1335)
    second.launch(1210, 5, (24, 1220, 20), name=NCCL, **group("dp"))
    second.launch(1270, 5, (20, 1280, 40), name=NCCL, **group("tp"))
    second.call("cudaDeviceSynchronize", 1290, 40)
    return [first, second]


def test_two_overlapping_collectives(tmp_path: Path) -> None:
    """Two groups on two streams, entered in opposite order on the two ranks, overlapping on both.

        rank 0   tp  ########### 1020-1320 ###########        intrinsic 40
                 dp    ####### 1040-1240 #######              intrinsic 20
        rank 1   dp                 # 1220-1240 #
                 tp                          ## 1280-1320 ##   sync returns 1330, step end 1335

    Rank 1 later by 50: every end + 50. Earlier by 1000: rank 0 arrives last in both; dp ends at 1060, tp at 1060:
    rank 0 takes 1060 + 10 + 5 = 75.
    """
    graphs = read_ranks(two_collectives(), tmp_path)
    result = closes(graphs)
    assert len(result.program.group_size) == 2
    grouped = result.program.kernel_group >= 0
    assert sorted(result.program.kernel_duration[grouped].tolist()) == [20_000, 20_000, 40_000, 40_000]
    later = edited(result, delay_rank(result.program, 1, 50_000))
    moved = later.simulated.kernel_end[grouped] - result.simulated.kernel_end[grouped]
    assert moved.tolist() == [50_000] * 4
    assert step_us(edited(result, delay_rank(result.program, 1, -1_000_000)), "1", 0) == 75

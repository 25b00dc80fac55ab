"""Where operations of a step traced by shapes alone work: the device's kernels, the host's own work, transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_models.op_call import Family, OpCall
from kernel_models.operation import HOST_BYTES_PER_NS, HOST_TENSOR_NS, host_work_ns, placed_calls
from tracer.errors import GraphFileError
from tracer.graph import ExecutionGraph, OpTable, Place

torch = pytest.importorskip("torch")

ROWS, WIDTH = 64, 256


def _traced(optimizer, non_blocking=False) -> ExecutionGraph:  # type: ignore[no-untyped-def]
    from tracer.shape_only import trace_step

    def build():  # type: ignore[no-untyped-def]
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        update = optimizer(model.parameters())
        data = torch.utils.data.TensorDataset(torch.zeros(4 * ROWS, WIDTH))
        batches = iter(torch.utils.data.DataLoader(data, batch_size=ROWS))

        def step() -> None:
            (batch,) = next(batches)
            loss = model(batch.to("cuda", non_blocking=non_blocking)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            loss.cpu()

        return step

    return trace_step(build, "h200-sxm")


@pytest.fixture(scope="module")
def adam() -> ExecutionGraph:
    return _traced(lambda parameters: torch.optim.AdamW(parameters, foreach=True), non_blocking=True)


def _rows(graph: ExecutionGraph, name: str, place: Place | None = None) -> list[int]:
    return [op for op in range(len(graph.ops)) if graph.string(int(graph.ops.name[op])) == name
            and (place is None or graph.ops.place[op] == place)]


def _calls(graph: ExecutionGraph, rows: list[int]) -> list[OpCall]:
    return [call for op in rows for call in placed_calls(graph, op)]


def test_step_counters_cost_the_host_and_launch_nothing(adam: ExecutionGraph) -> None:
    (counters,) = _rows(adam, "aten::_foreach_add_", Place.HOST)
    assert not placed_calls(adam, counters)
    # Two parameters, two counters of four bytes, each read and written.
    assert host_work_ns(adam, counters) == pytest.approx(2 * HOST_TENSOR_NS, rel=0.01)
    parameters = [op for op in _rows(adam, "aten::_foreach_mul_") if placed_calls(adam, op)]
    assert parameters and all(adam.ops.place[op] == Place.DEVICE for op in parameters)
    assert all(host_work_ns(adam, op) == 0 for op in parameters)
    # A batch is put together on the host.
    (stack,) = _rows(adam, "aten::stack") or _rows(adam, "aten::cat")
    assert adam.ops.place[stack] == Place.HOST
    assert not placed_calls(adam, stack)
    moved = 2 * ROWS * WIDTH * 4
    assert host_work_ns(adam, stack) == pytest.approx(ROWS * HOST_TENSOR_NS + moved / HOST_BYTES_PER_NS)


def test_traced_for_a_cpu_no_place_is_told() -> None:
    settings = pytest.importorskip("tracer.workloads").configure("lstm", preset="tiny")
    from tracer.shape_only import trace_workload

    assert set(trace_workload(settings, "cpu").ops.place.tolist()) == {-1}


def test_steps_that_never_ran_spend_host_work_on_the_host(adam: ExecutionGraph) -> None:
    from graph_predictor.prediction.host_steps import traced_host_step
    from graph_predictor.synthesis.step import modelled_step
    from kernel_models.host.model import GPU_HOST, shipped_host

    graph = modelled_step([adam]).made.built.graphs[0]
    (counters,) = _rows(adam, "aten::_foreach_add_", Place.HOST)
    assert not (graph.kernels.op == counters).any()
    usual = shipped_host(GPU_HOST).estimate(traced_host_step(adam))[1][counters]
    assert graph.ops.duration_ns[counters] == pytest.approx(host_work_ns(adam, counters) + usual, abs=2)


def test_a_loop_over_parameters_adds_to_its_counters_on_the_host() -> None:
    graph = _traced(lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    counters = _rows(graph, "aten::add_", Place.HOST)
    assert len(counters) == 2
    assert not _calls(graph, counters)
    assert all(host_work_ns(graph, op) >= HOST_TENSOR_NS for op in counters)
    (there,) = _calls(graph, _rows(graph, "aten::_to_copy", Place.TO_DEVICE))
    assert there.flags == ("pageable",)  # blocking


def test_a_batch_crosses_the_link_and_a_loss_comes_back(adam: ExecutionGraph) -> None:
    (there,) = _calls(adam, _rows(adam, "aten::_to_copy", Place.TO_DEVICE))
    assert (there.family, there.kind, there.dims, there.flags) == (
        Family.TRANSFER, "h2d", (ROWS * WIDTH * 4,), ("pinned",))
    (back,) = _calls(adam, _rows(adam, "aten::_to_copy", Place.TO_HOST))
    assert (back.kind, back.dims, back.flags) == ("d2h", (4,), ("pageable",))


def test_files_without_places_say_nothing_of_them(adam: ExecutionGraph) -> None:
    """As earlier versions wrote them."""
    from tracer.store.container import decode_table, encode_table

    table = OpTable.empty(2)
    record, _ = encode_table(table)
    for values in (record.constants, record.inline):
        values.pop("place", None)
    loaded = decode_table(OpTable, record, None, "an old file")
    assert loaded.place.tolist() == [-1, -1] and len(loaded.columns()) == len(table.columns())
    # Then every operation counts as one of the device.
    (counters,) = _rows(adam, "aten::_foreach_add_", Place.HOST)
    old = replace(adam, ops=replace(adam.ops, place=adam.ops.place * 0 - 1))
    assert placed_calls(old, counters) and host_work_ns(old, counters) == 0


def test_places_survive_a_file_and_one_that_is_none_is_refused(  # type: ignore[no-untyped-def]
        adam: ExecutionGraph, tmp_path) -> None:
    adam.save(tmp_path / "step.foretrace")
    again = ExecutionGraph.load(tmp_path / "step.foretrace")
    assert again.ops.place.tolist() == adam.ops.place.tolist()
    replace(adam, ops=replace(adam.ops, place=adam.ops.place + 7)).save(tmp_path / "odd.foretrace")
    with pytest.raises(GraphFileError):
        ExecutionGraph.load(tmp_path / "odd.foretrace")

"""Sizes that coincide are told apart or refused (``sizes/twins.py``); ``benchmarks/equal_sizes.py`` has more."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import Micro

from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes import twins
from graph_predictor.sizes.layout_rules import Call, Tensor, rule_of
from graph_predictor.sizes.layouts import NamedSizes
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from tracer.graph import ExecutionGraph
from tracer.views import Argument

Op = tuple[str, list[list[int]], list[object]]


def step(tmp_path: Path, *ops: Op) -> ExecutionGraph:
    """One after another; an operation's numbers stand after its tensors."""
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    for number, (name, tensors, numbers) in enumerate(ops):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number, **{
            "Input Dims": [*tensors, *([] for _ in numbers)],
            "Input type": [*(["float"] * len(tensors)), *(["ScalarList"] * len(numbers))],
            "Concrete Inputs": [*("" for _ in tensors), *map(str, numbers)]})
    return trace.read(tmp_path)


def check(graph: ExecutionGraph, *changes: tuple[str, int, int]) -> None:
    ScaledShapes(graph, changes).check()


def several(tmp_path: Path, *steps: list[Op]) -> ExecutionGraph:
    """Steps in a row, each with its operations."""
    trace = Micro().calibrate()
    for place, ops in enumerate(steps):
        begin = 1000 * (place + 1)
        trace.step(begin, begin + 900, place + 1)
        for number, (name, tensors, _) in enumerate(ops):
            trace.op(name, begin + 10 + 10 * number, begin + 15 + 10 * number, **{
                "Input Dims": tensors, "Input type": ["float"] * len(tensors)})
    return trace.read(tmp_path)


def words(batch: int, seq: int, width: int = 48) -> list[Op]:
    return [("aten::embedding", [[100, width], [batch, seq]], []),
            ("aten::linear", [[batch, seq, width], [width, width], [width]], [])]


def test_as_many_samples_as_words_are_refused_by_any_name_but_the_batch(tmp_path: Path) -> None:
    graph = step(tmp_path, *words(16, 16))
    check(graph, ("batch", 16, 64))
    for name in ("seq", "nonsense"):
        with pytest.raises(EditError, match=r"an input of the step is 16×16.*batch=16"):
            check(graph, (name, 16, 64))


def test_heads_are_as_many_as_words(tmp_path: Path) -> None:
    split: Op = ("aten::view", [[4, 8, 48]], [[4, 8, 8, 6]])
    both = [("aten::transpose", [[4, 8, 8, 6]], [1, 2])]
    graph = step(tmp_path, *words(4, 8), split, *both)
    with pytest.raises(EditError, match="a size of the model"):
        check(graph, ("num_heads", 8, 16))
    with pytest.raises(EditError, match="takes a width of 48 apart into 8×6"):
        check(graph, ("speed", 8, 16))


def test_a_head_as_wide_as_the_sequence_is_long_is_told_apart(tmp_path: Path) -> None:
    graph = step(tmp_path, *words(4, 12), ("aten::view", [[4, 12, 48]], [[4, 12, 4, 12]]),
                 ("aten::transpose", [[4, 12, 4, 12]], [1, 2]))
    scaled = ScaledShapes(graph, (("seq", 12, 36),))
    scaled.check()
    row = [graph.string(int(code)) for code in graph.ops.name].index("aten::transpose")
    assert scaled.operation_of(row).arguments[0].shape == (4, 36, 4, 12)


def test_a_size_says_which_dimensions_it_is(tmp_path: Path) -> None:
    scaled = ScaledShapes(step(tmp_path, *words(4, 12)), (("batch", 4, 8), ("seq", 12, 36)))
    assert scaled.said() == ("batch 4 → 8 is the 1st dimension of embedding's 4×12 indices and linear's 4×12×48 input; "
                             "seq 12 → 36 is the 2nd dimension of embedding's 4×12 indices and linear's 4×12×48 input")


def test_a_source_and_a_target_of_one_length_are_two_sizes(tmp_path: Path) -> None:
    graph = step(tmp_path, *words(4, 24), *words(4, 24))
    with pytest.raises(EditError, match=r"2 inputs of the step.*name them one by one"):
        check(graph, ("source", 24, 72))
    check(graph, ("source", 24, 72), ("target", 24, 72))
    assert len(twins.separate_inputs(graph, 24)) == 2


def test_inputs_that_are_added_are_one_size(tmp_path: Path) -> None:
    add: Op = ("aten::add", [[4, 24, 48], [4, 24, 48]], [])
    graph = step(tmp_path, words(4, 24)[0], words(4, 24)[0], ("aten::embedding", [[512, 48], [1, 24]], []), add,
                 ("aten::add", [[4, 24, 48], [1, 24, 48]], []), words(4, 24)[1])
    check(graph, ("seq", 24, 72))


def test_names_are_read_without_what_counts() -> None:
    assert [twins.bare(name) for name in ("num_heads", "N_Layers", "seq", "number_of_nodes")] == [
        "heads", "layers", "seq", "nodes"]


def test_the_inputs_of_two_recorded_steps_are_those_of_one(tmp_path: Path) -> None:
    trace = Micro().calibrate()
    for number in range(2):
        begin = 1000 + 1000 * number
        trace.step(begin, begin + 900, number + 1)
        for at, (name, tensors, _) in enumerate(words(4, 24)):
            trace.op(name, begin + 10 + 10 * at, begin + 15 + 10 * at,
                     **{"Input Dims": tensors, "Input type": ["float"] * len(tensors)})
    check(trace.read(tmp_path), ("seq", 24, 72))


def test_an_input_is_the_same_in_other_steps_and_small_batches(tmp_path: Path) -> None:
    """Gradients are summed over two of them: each has a forward and a backward."""
    backward: Op = ("autograd::engine::evaluate_function: AddmmBackward0", [[4, 24, 48]], [])
    assert twins.separate_inputs(several(tmp_path, words(4, 24), words(4, 24), words(4, 24)), 24) == []
    batches = [*words(4, 24), backward, *words(4, 24), backward]
    assert twins.separate_inputs(several(tmp_path, batches, batches), 24) == []
    both = [*words(4, 24), *words(4, 24), backward]
    assert len(twins.separate_inputs(several(tmp_path, both, both), 24)) == 2


def test_nodes_of_a_graph_are_its_samples(tmp_path: Path) -> None:
    """A gradient's product with them turned around is no other dimension."""
    graph = step(tmp_path, ("aten::linear", [[80, 12], [24, 12], [24]], []),
                 ("aten::cross_entropy_loss", [[80, 24], [80]], []), ("aten::nll_loss_forward", [[80, 24], [80]], []),
                 ("aten::mm", [[24, 80], [80, 12]], []))
    check(graph, ("nodes", 80, 160))
    with pytest.raises(EditError, match="80 samples too"):
        check(graph, ("speed", 80, 160))


@pytest.mark.parametrize("picks", [("aten::index_add_", [[80, 24], [], [80], [80, 24], []], []),
                                   ("aten::index", [[80, 24], [[80]]], [])])
def test_as_many_edges_as_nodes_are_refused(tmp_path: Path, picks: Op) -> None:
    graph = step(tmp_path, ("aten::cross_entropy_loss", [[80, 24], [80]], []), picks,
                 ("aten::nll_loss_forward", [[80, 24], [80]], []), ("aten::mm", [[24, 80], [80, 12]], []))
    with pytest.raises(EditError, match="80 samples too"):
        check(graph, ("nodes", 80, 160))


def test_logits_that_are_viewed_are_no_transposed_weight(tmp_path: Path) -> None:
    """There are 4×24 tokens and the layer is 96 wide: strides tell its transposed weight from the tokens' logits."""
    def op(name: str, *strided: tuple[list[int], list[int]], numbers: list[int] | None = None) -> dict[str, object]:
        return {"name": name, "Input Dims": [*(shape for shape, _ in strided), *([[]] if numbers else [])],
                "Input Strides": [*(stride for _, stride in strided), *([[]] if numbers else [])],
                "Input type": [*["float"] * len(strided), *(["ScalarList"] if numbers else [])],
                "Concrete Inputs": [*[""] * len(strided), *([str(numbers)] if numbers else [])]}

    rows, weight, logits = ([96, 96], [96, 1]), ([96, 300], [1, 96]), ([96, 300], [300, 1])
    ops = (op("aten::embedding", ([300, 96], [96, 1]), ([4, 24], [24, 1])),
           op("aten::view", ([4, 24, 96], [2304, 96, 1]), numbers=[96, 96]),
           op("aten::t", ([300, 96], [96, 1])),
           op("aten::addmm", ([300], [1]), rows, weight),
           op("aten::view", logits, numbers=[4, 24, 300]),
           op("aten::view", ([4, 24, 300], [7200, 300, 1]), numbers=[96, 300]),
           op("aten::t", weight),
           op("aten::mm", logits, ([300, 96], [96, 1])),
           op("aten::relu", logits))
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    for number, one in enumerate(ops):
        trace.op(str(one.pop("name")), 1010 + 10 * number, 1015 + 10 * number, **one)
    graph = trace.read(tmp_path)
    scaled = ScaledShapes(graph, (("batch", 4, 16),))
    shapes = [[argument.shape for argument in scaled.operation_of(row).arguments if argument.shape]
              for row in range(len(graph.ops))]
    assert shapes[-5:] == [[(384, 300)], [(16, 24, 300)], [(96, 300)], [(384, 300), (300, 96)], [(384, 300)]]


def test_a_recurrent_layers_state_says_where_the_samples_stand(tmp_path: Path) -> None:
    layer: Op = ("aten::mkldnn_rnn_layer", [[20, 32, 24], [160, 24], [160, 40], [160], [160], [32, 40], [32, 40]], [])
    graph = step(
        tmp_path, ("aten::embedding", [[80, 24], [32, 20]], []), ("aten::transpose", [[32, 20, 24]], [0, 1]),
        ("aten::select", [[1, 32, 40]], [0, 0]), layer,
        ("aten::transpose", [[20, 32, 40]], [0, 1]), ("aten::linear", [[32, 20, 40], [80, 40], [80]], []))
    scaled = ScaledShapes(graph, (("batch", 32, 8),))
    shapes = [[argument.shape for argument in scaled.operation_of(row).arguments if argument.shape]
              for row in range(len(graph.ops))]
    assert shapes[-4:] == [
        [(1, 8, 40)], [(20, 8, 24), (160, 24), (160, 40), (160,), (160,), (8, 40), (8, 40)], [(20, 8, 40)],
        [(8, 20, 40), (80, 40), (80,)]]


def test_rows_that_are_picked_are_as_many_as_their_indices() -> None:
    sizes = NamedSizes((32,), (8,), (True,))
    table, indices = Tensor((80, 24), sizes.constants((80, 24))), Tensor((640,), (sizes.following(0),))
    arguments = tuple(Argument("float", None, None, value) for value in ("", "0", ""))
    rows = rule_of("aten::index_select")(Call(sizes, (table, indices), arguments, sizes.constants))
    assert [sizes.shape(one.shape, one.layout) for one in rows.results] == [(160, 24)]

"""Another size from one capture: which dimensions change, which collectives carry more, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from slowly import mostly_slow
from test_predict import waiting_steps

from foretrace.edits import Sizes
from graph_predictor.prediction.result import OPTIMIZER, peak_memory, with_sizes
from graph_predictor.prediction.scenario import EditError, Rewriting
from graph_predictor.sizes.retrace import MOST, parse_also, parse_sets
from graph_predictor.sizes.scaled_shapes import ScaledShapes, strided_maps
from graph_predictor.sizes.scaling import payload_factors, unrolled_size
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.operation import Operation, operation
from tracer.graph import ExecutionGraph, Phase
from tracer.job import read_job

Find = Callable[[str], Path]


def taken_apart(folder: Path, name: str, values: list[list[str]]) -> ScaledShapes:
    """Data of 4 samples and 12 moments of which slices are taken, at 30 moments."""
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    trace.op("aten::linear", 1005, 1008, **{"Input Dims": [[4, 12, 32], [64, 32], [64]], "Input type": ["float"] * 3})
    for number, value in enumerate(values):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number,
                 **{"Input Dims": [[4, 12, 32], *[[] for _ in value]],
                    "Input type": ["float"] + ["Scalar"] * len(value), "Concrete Inputs": ["", *value]})
    return ScaledShapes(trace.read(folder), (("seq", 12, 30),))


TAKEN_APART: list[tuple[str, list[list[str]], int | None]] = [
    ("aten::unbind", [["1"]], 12), ("aten::unbind", [["-2"]], 12), ("aten::unbind", [["0"]], None),
    ("aten::unbind", [["?"]], None),
    ("aten::select", [["1", str(index)] for index in range(12)], 12),
    ("aten::select", [["1", str(index)] for index in range(11)], 12),  # the last is a target alone
    ("aten::select", [["1", str(index)] for index in range(8)], None), ("aten::select", [["1", "-1"]], None),
    ("aten::slice", [["1", str(start), str(start + 1), "1"] for start in range(12)], 12),
    ("aten::slice", [["1", str(start), str(start + 5), "1"] for start in (0, 5, 10)], 12),
    ("aten::slice", [["1", str(start), str(start + 3), "1"] for start in range(10)], 12),  # a window that moves
    ("aten::slice", [["1", "0", "-1", "1"], ["1", "1", "9223372036854775807", "1"]], None),  # inputs and targets
    ("aten::slice", [["1", "0", "12", "2"], ["1", "1", "12", "2"]], None),
    ("aten::slice", [["2", "0", "16", "1"], ["2", "16", "32", "1"]], None),
    ("aten::narrow", [["1", str(start), "4"] for start in (0, 4, 8)], 12),
    ("aten::narrow", [["1", "0", "1"], ["1", "1", "11"]], None),  # the gradient of a class token put before
    ("aten::split", [["4", "1"]], 12), ("aten::split", [["5", "-2"]], 12), ("aten::split", [["12", "1"]], None),
    ("aten::split_with_sizes", [["[4, 4, 4]", "1"]], 12), ("aten::split_with_sizes", [["[2, 10]", "1"]], None),
    ("aten::chunk", [["3", "1"]], 12), ("aten::chunk", [["2", "2"]], None),
]


@pytest.mark.parametrize(("name", "values", "found"), TAKEN_APART)
def test_a_length_that_is_gone_along_piece_by_piece_is_found(
        tmp_path: Path, name: str, values: list[list[str]], found: int | None) -> None:
    assert unrolled_size(taken_apart(tmp_path, name, values)) == found


def test_parts_as_long_as_the_named_size_are_as_many_at_any(tmp_path: Path) -> None:
    """Two views of a batch of 4 put together and taken apart, which then is halved."""
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    trace.op("aten::cat", 1005, 1008, **{"Input Dims": [[[4, 32], [4, 32]], []], "Input type": ["TensorList", "Scalar"],
                                         "Concrete Inputs": ["", "0"]})
    trace.op("aten::chunk", 1010, 1015, **{"Input Dims": [[8, 32], [], []], "Input type": ["float", "Scalar", "Scalar"],
                                           "Concrete Inputs": ["", "2", "0"]})
    assert unrolled_size(ScaledShapes(trace.read(tmp_path), (("batch", 4, 16),))) is None
    trace.op("aten::split", 1020, 1025, **{"Input Dims": [[4, 32], [], []], "Input type": ["float", "Scalar", "Scalar"],
                                           "Concrete Inputs": ["", "2", "0"]})
    assert unrolled_size(ScaledShapes(trace.read(tmp_path), (("batch", 4, 16),))) == 4


def test_another_number_of_pieces_is_refused(tmp_path: Path) -> None:
    scaled = taken_apart(tmp_path, "aten::unbind", [["1"]])
    with pytest.raises(EditError, match="dimension of 12 piece by piece"):
        baseline_of(scaled.graph, device=device("cpu")).predict([Sizes.parse(["seq=12:30"])])


def graph_of(folder: Path, *operations: tuple[str, list[list[int]]]) -> ExecutionGraph:
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    for number, (name, shapes) in enumerate(operations):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number,
                 **{"Input Dims": shapes, "Input type": ["float"] * len(shapes)})
    return trace.read(folder)


def shapes(found: Operation) -> list[object]:
    return [argument.shape for argument in found.arguments]


def test_a_parameter_in_a_product_tells_the_samples(tmp_path: Path) -> None:
    """16 samples and 16 features: the weight's shape says which is which."""
    graph = graph_of(tmp_path, ("aten::linear", [[16, 128], [16, 128], [16]]), ("aten::relu", [[16, 16]]))
    scaled = ScaledShapes(graph, (("batch", 16, 32),))
    scaled.check()
    cases = [([(16, 16), (16, 128)], [(32, 16), (16, 128)]),     # gradient × weight
             ([(10, 16), (16, 40)], [(10, 32), (32, 40)]),       # nothing known: the matrices that hold 16
             ([(16, 128), (128, 16)], [(32, 128), (128, 16)])]   # input × transposed weight
    for before, after in cases:
        assert shapes(scaled.operation(operation("aten::mm", before))) == after
    bias = scaled.operation(operation("aten::addmm", [(16,), (16, 128), (128, 16)]))
    assert shapes(bias) == [(16,), (32, 128), (128, 16)]


def test_sizes_that_shapes_refuse_are_refused_before_the_step_is_followed(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graph_predictor.sizes.scaled_shapes.SizeFlow", lambda *_: pytest.fail("followed"))
    with pytest.raises(EditError, match="No tensor of the step has 9"):
        ScaledShapes(graph_of(tmp_path, ("aten::relu", [[16, 16]])), (("batch", 9, 18),)).check()


def test_a_weights_gradient_sums_over_the_samples(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, ("aten::linear", [[512, 128], [256, 128], [256]]))
    scaled = ScaledShapes(graph, (("batch", 512, 2048),))
    product = scaled.operation(operation("aten::mm", [(256, 512), (512, 128)], strides=[(1, 256), (128, 1)]))
    assert shapes(product) == [(256, 2048), (2048, 128)]
    assert product.arguments[0].stride == (1, 256)


def test_samples_times_samples_follow_the_batch_twice(tmp_path: Path) -> None:
    """What a layer makes of 96 samples, times its transpose: all pairs of samples, and their gradients."""
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    for number, (name, tensors, *numbers) in enumerate([
            ("aten::linear", [[96, 128], [64, 128], [64]]), ("aten::t", [[96, 64]]), ("aten::mm", [[96, 64], [64, 96]]),
            ("aten::div", [[96, 96]]), ("aten::_log_softmax", [[96, 96]], "1", "False"),
            ("aten::nll_loss_forward", [[96, 96], [96]]), ("aten::t", [[96, 96]]),
            ("aten::mm", [[96, 96], [96, 64]])]):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number, **{
            "Input Dims": [*tensors, *([] for _ in numbers)], "Input type": ["float"] * len(tensors) + ["Scalar"] * len(
                numbers), "Concrete Inputs": [*("" for _ in tensors), *numbers]})
    graph = trace.read(tmp_path)
    scaled = ScaledShapes(graph, (("batch", 96, 384),))
    found = [shapes(scaled.operation_of(row)) for row in range(len(graph.ops)) if len(scaled.flow.values(row))]
    assert found[2:] == [[(384, 64), (64, 384)], [(384, 384)], [(384, 384), (), ()], [(384, 384), (384,)], [(384, 384)],
                         [(384, 384), (384, 64)]]


def test_lists_of_indices_are_as_long_as_their_offsets_say(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, ("aten::embedding_bag", [[500, 16], [240], [24]]), ("aten::relu", [[24, 16]]))
    scaled = ScaledShapes(graph, (("batch", 24, 48),))
    found = scaled.operation(operation("aten::embedding_bag", [(500, 16), (240,), (24,)]))
    assert shapes(found) == [(500, 16), (480,), (48,)]
    assert shapes(scaled.operation(operation("aten::select", [(8, 240)]))) == [(8, 480)]


def test_two_sizes_at_once_multiply(tmp_path: Path) -> None:
    """6 samples of 10 tokens: 60 rows become 12 × 30."""
    graph = graph_of(tmp_path, ("aten::linear", [[6, 10, 32], [64, 32], [64]]), ("aten::mm", [[60, 32], [32, 64]]))
    scaled = ScaledShapes(graph, (("batch", 6, 12), ("seq", 10, 30)))
    assert shapes(scaled.operation(operation("aten::mm", [(60, 32), (32, 64)]))) == [(360, 32), (32, 64)]


REFUSED = [
    (["batch=4096:99999999999999"], "is no size"),
    (["batch=0:8"], "is no size"),
    (["batch=4096:2147483647"], "1,000 times away"),
    (["batch=4096:0"], "is no size"),
    (["batch=1:2"], "No tensor|everywhere"),
    (["batch=8192"], "names no old size"),
    (["batch=lots"], "names no size"),
    (["batch=4096:8192", "batch=4096:1"], "set twice"),
]


@pytest.mark.parametrize(("texts", "why"), REFUSED)
def test_what_is_no_size_is_refused(tmp_path: Path, texts: list[str], why: str) -> None:
    baseline = baseline_of(waiting_steps().read(tmp_path))
    with pytest.raises(EditError, match=why):
        baseline.predict([Sizes.parse(texts)])


def test_activations_follow_the_batch(tmp_path: Path) -> None:
    """2 GB of the peak's 10 are activations; where none are alive at the peak, nobody knows what more would need."""
    graph = waiting_steps().read(tmp_path)
    graph.meta.memory.update(peak=10 * 10**9, activations=2 * 10**9)
    doubled = Sizes.parse(["batch=4096:8192"])
    assert baseline_of(graph).predict([doubled]).peak_memory_bytes == 12 * 10**9
    graph.meta.memory["activations"] = 0
    result = baseline_of(graph).predict([doubled])
    assert result.peak_memory_bytes == 10 * 10**9
    assert any("moment without activations" in note for note in result.notes)
    smaller = baseline_of(graph).predict([Sizes.parse(["batch=4096:2048"])])
    assert not any("moment without" in note for note in smaller.notes)


def test_the_peak_moves_between_backward_and_the_optimizer(tmp_path: Path) -> None:
    """At the recorded size the peak (100) is the optimizer's step, whose 30 do not follow the batch."""
    graph = waiting_steps().read(tmp_path)
    graph.meta.memory.update(peak=100)
    graph.meta.memory_moments = [[70, 0, 0, 30], [50, 20, 10, 0]]
    baseline = baseline_of(graph)

    def peak(new: int) -> int | None:
        return baseline.predict([Sizes.parse([f"batch=4096:{new}"])]).peak_memory_bytes

    assert [baseline.predict().peak_memory_bytes, peak(2048), peak(8192), peak(16384)] == [100, 100, 110, 170]
    fused = replace(baseline.scenario, rewrites={OPTIMIZER: lambda scenario, units: Rewriting([])})
    assert peak_memory(fused) == 80
    assert peak_memory(with_sizes(fused, 0.5)) == 70
    recomputed = replace(baseline.scenario, activation_factors={"recompute": 0.25, "sizes": 8.0})
    assert peak_memory(recomputed) == 50 + 8 * (20 / 4 + 10)


def test_activations_follow_the_batch_on_a_cpu(tmp_path: Path) -> None:
    trace = Micro()
    trace.step(1000, 2000, 1)
    trace.op("aten::linear", 1010, 1900, **{"Input Dims": [[6, 10, 32], [64, 32], [64]], "Input type": ["float"] * 3})
    graph = trace.read(tmp_path)
    graph.meta.memory.update(peak=100, activations=60)
    assert baseline_of(graph, device=device("cpu")).predict([Sizes.parse(["batch=6:12"])]).peak_memory_bytes == 160


@pytest.mark.parametrize(("changes", "why"), [
    (("batch", 48, 96), "not the step's number of samples: 4 lead"), (("batch", 160, 320), "4 lead all"),
    (("heads", 4, 8), "a size of the model"), (("num_heads", 4, 8), "a size of the model"),
    (("speakers", 4, 8), "has 4 samples too"), (("batch", 4, 16), None), (("seq", 48, 120), None)])
def test_a_size_that_is_not_what_its_name_says_is_refused(
        tmp_path: Path, changes: tuple[str, int, int], why: str | None) -> None:
    """4 texts of 48 words, 4 heads, 160 wide."""
    trace = Micro().calibrate()
    trace.step(1000, 2000, 1)
    for number, (name, tensors) in enumerate([
            ("aten::embedding", [[3000, 160], [4, 48]]), ("aten::embedding", [[512, 160], [1, 48]]),
            ("aten::relu", [[48, 160]]), ("aten::linear", [[4, 48, 160], [160, 160], [160]]),
            ("aten::relu", [[4, 4, 48, 40]]), ("aten::relu", [[160, 4]]), ("aten::nll_loss_forward", [[4, 3], [4]])]):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number,
                 **{"Input Dims": tensors, "Input type": ["float"] * len(tensors)})
    scaled = ScaledShapes(trace.read(tmp_path), (changes,))
    if why is None:
        scaled.check()
        return
    with pytest.raises(EditError, match=why):
        scaled.check()


def test_tokens_of_all_samples_are_no_number_of_samples(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, ("aten::linear", [[8, 30, 200], [51, 200], [51]]),
                     ("aten::nll_loss_forward", [[240, 51], [240]]),
                     ("aten::nll_loss_backward", [[], [240, 51], [240]]))
    ScaledShapes(graph, (("batch", 8, 32),)).check()


def test_a_size_of_one_is_everywhere(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, ("aten::relu", [[1, 64]]))
    with pytest.raises(EditError, match="everywhere"):
        ScaledShapes(graph, (("batch", 1, 2),)).check()


def test_matrices_that_may_be_either_are_refused(tmp_path: Path) -> None:
    """As many samples as a layer has outputs, and most of the time goes to matrices of just that shape."""
    trace = waiting_steps()
    graph = trace.read(tmp_path)
    graph.strings = [text.replace("aten::linear", "aten::relu").replace("[[4096,1024],[1024,1024],[1024]]",
                                                                        "[[1024,1024]]") for text in graph.strings]
    for code, text in enumerate(graph.strings):
        if text.replace(" ", "").startswith("[[4096,1024],[1024,1024]"):
            graph.strings[code] = "[[1024, 1024]]"
    # Some parameter of that shape is updated, which is what makes the others undecidable.
    rows = np.flatnonzero(graph.ops.shapes >= 0)
    graph.ops.phase[rows[0]] = Phase.OPTIMIZER
    graph.strings.append("[[1024, 8]]")
    graph.ops.shapes[np.flatnonzero(graph.ops.shapes < 0)[0]] = len(graph.strings) - 1
    with pytest.raises(EditError, match="may be either"):
        baseline_of(graph).predict([Sizes((("batch", 1024, 2048),))])


@pytest.mark.real_traces
@pytest.mark.parametrize("times", mostly_slow([2, 8, 32], {8}))
def test_payloads_and_look_ups_grow_as_the_batch_on_all_ranks(real_trace: Find, times: int) -> None:
    """16 samples a rank, and layers of 16 outputs too."""
    base = baseline_of(read_job(real_trace("dlrm-8xV100-2023")))
    changes = (("batch", 16, 16 * times),)
    # Those that the prediction takes.
    scaled = base.scenario.shared.once("scaled shapes", (base.scenario.built, changes),
                                       lambda: [ScaledShapes(graph, changes) for graph in base.built.graphs])
    for graph, rank in zip(base.built.graphs, scaled, strict=True):
        table = graph.collectives
        moved = {(graph.string(int(table.kind[row])), max(int(table.elements_in[row]), int(table.elements_out[row]))):
                 rank.payload(row) for row in range(len(table))}
        assert {elements: factor for (kind, elements), factor in moved.items() if kind == "all_reduce"} == {
            394241: 1, 112: 1, 226960: 1}
        # Embeddings, look-ups (as many as there are, on each rank) and their lengths; 24 counts stay.
        exchanged = {elements: factor for (kind, elements), factor in moved.items() if kind == "all_to_all"}
        assert {6144, 24, 384} < set(exchanged)
        assert all(factor == (1 if elements == 24 else times) for elements, factor in exchanged.items())
        names = {name: row for row, name in enumerate(graph.string(code) for code in graph.ops.name.tolist())}
        before = Operation.from_graph(graph, names["fbgemm::bounds_check_indices"])
        (tables, indices, offsets, _), (same, more, ends, _) = (
            [argument.shape[0] for argument in one.arguments if argument.shape]
            for one in (before, rank.operation(before)))
        assert (same, more, ends - 1) == (tables, times * indices, times * (offsets - 1))
    factor = payload_factors(base.scenario, scaled)
    for members in base.built.rendezvous.groups:
        assert len({factor[int(base.built.program.kernel_ptr[rank]) + kernel] for rank, kernel in members}) == 1
    once, larger = base.predict(), base.predict([Sizes(changes)])
    # Each is of the rank that decides its step; tables of the others take 0.7 to 1.3 as long.
    assert 0.7 < larger.families_us["embedding"] / once.families_us["embedding"] / times < 1.3
    assert larger.families_us["collective"] > once.families_us["collective"]
    assert larger.step_time_us >= once.step_time_us
    each = [rank.step_time_us for rank in larger.per_rank]
    assert max(each) == pytest.approx(min(each), rel=1e-3)


def test_maps_that_strides_leave_follow_an_image_without_its_size() -> None:
    """Convolutions of stride two, and patches of eight; attention over a sequence has no such maps."""
    network = [(4, 3, 48, 48), (4, 32, 24, 24), (4, 64, 12, 12), (4, 64, 1, 1)]
    assert strided_maps(network, 48) == [24, 12]
    assert strided_maps([(4, 3, 64, 64), (4, 192, 8, 8)], 64) == [8]
    assert strided_maps([(4, 6, 48, 48), (4, 48, 192), (4, 6, 48, 32)], 48) == []
    assert strided_maps([(4, 32, 24, 24)], 48) == []  # no image of that size: it is another dimension's


def test_a_size_of_thousands_of_digits_is_no_size() -> None:
    most = "9" * 5_000
    with pytest.raises(EditError, match=r"is no size: give a whole number from 1 to 2,147,483,647"):
        Sizes.parse([f"batch=64:{most}"])
    with pytest.raises(EditError, match="is no size"):
        parse_also(f"runs/b:batch={most}")


@pytest.mark.parametrize("text", [f"batch={MOST + 1}", "batch=99999999999999999999", f"batch={MOST + 1}:8"])
def test_a_size_above_the_largest_is_refused_as_it_is_read(text: str) -> None:
    """Whatever is done with it, and none is taken for another one."""
    with pytest.raises(EditError, match=r"batch=\d+ is no size"):
        parse_sets([text])
    assert parse_sets([f"batch=0:{MOST}", "stage=0"]) == ({"batch": 0}, {"batch": MOST, "stage": 0})


@pytest.mark.parametrize("new", [60, 13])
def test_a_size_that_changes_next_to_nothing_is_refused(tmp_path: Path, new: int) -> None:
    """12 of something that takes a hundredth of the step, and 600,000 samples that take the rest."""
    trace = Micro()
    trace.step(1000, 2000, 1)
    trace.op("aten::relu", 1010, 1900, **{"Input Dims": [[600_000, 32]], "Input type": ["float"]})
    trace.op("aten::tanh", 1910, 1911, **{"Input Dims": [[12, 5]], "Input type": ["float"]})
    baseline = baseline_of(trace.read(tmp_path), device=device("cpu"))
    with pytest.raises(EditError, match="hardly any operation has that size"):
        baseline.predict([Sizes.parse([f"seq=12:{new}"])])
    assert baseline.predict([Sizes.parse(["batch=600000:660000"])]).step_time_us > 0

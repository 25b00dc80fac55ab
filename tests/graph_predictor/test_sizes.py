"""Another size from one capture: which dimensions change, which collectives carry more, what is refused, and sizes that
coincide (``sizes/twins.py``; ``benchmarks/equal_sizes.py`` has more)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from micro import Micro
from size_steps import SizedOp, shapes, step_of, steps_of
from slowly import mostly_slow
from test_predict import waiting_steps

from foretrace.edits import Sizes
from graph_predictor.prediction.result import OPTIMIZER, peak_memory, with_sizes
from graph_predictor.prediction.scenario import EditError, Rewriting
from graph_predictor.sizes import twins
from graph_predictor.sizes.retrace import MOST, parse_also, parse_sets
from graph_predictor.sizes.scaled_shapes import ScaledShapes, strided_maps
from graph_predictor.sizes.scaling import payload_factors, unrolled_size
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.operation import Operation, operation
from tracer.graph import ExecutionGraph, Phase
from tracer.job import read_job

Find = Callable[[str], Path]


SEQ = ("aten::linear", [[4, 12, 32], [64, 32], [64]])
"""Data of 4 samples and 12 moments, of which slices are taken."""
TAKEN_APART: list[tuple[str, list[list[object]], int | None]] = [
    ("unbind", [[1]], 12), ("unbind", [[-2]], 12), ("unbind", [[0]], None), ("unbind", [["?"]], None),
    ("select", [[1, index] for index in range(12)], 12),
    ("select", [[1, index] for index in range(11)], 12),  # the last is a target alone
    ("select", [[1, index] for index in range(8)], None), ("select", [[1, -1]], None),
    ("slice", [[1, start, start + 1, 1] for start in range(12)], 12),
    ("slice", [[1, start, start + 5, 1] for start in (0, 5, 10)], 12),
    ("slice", [[1, start, start + 3, 1] for start in range(10)], 12),  # a window that moves
    ("slice", [[1, 0, -1, 1], [1, 1, 9223372036854775807, 1]], None),  # inputs and targets
    ("slice", [[1, 0, 12, 2], [1, 1, 12, 2]], None), ("slice", [[2, 0, 16, 1], [2, 16, 32, 1]], None),
    ("narrow", [[1, start, 4] for start in (0, 4, 8)], 12),
    ("narrow", [[1, 0, 1], [1, 1, 11]], None),  # the gradient of a class token put before
    ("split", [[4, 1]], 12), ("split", [[5, -2]], 12), ("split", [[12, 1]], None),
    ("split_with_sizes", [[[4, 4, 4], 1]], 12), ("split_with_sizes", [[[2, 10], 1]], None),
    ("chunk", [[3, 1]], 12), ("chunk", [[2, 2]], None),
]


@pytest.mark.parametrize(("name", "values", "found"), TAKEN_APART)
def test_a_length_that_is_gone_along_piece_by_piece_is_found(
        tmp_path: Path, name: str, values: list[list[object]], found: int | None) -> None:
    graph = step_of(tmp_path, SEQ, *((f"aten::{name}", [[4, 12, 32]], value) for value in values))
    assert unrolled_size(ScaledShapes(graph, (("seq", 12, 30),))) == found


def test_another_number_of_pieces_is_refused(tmp_path: Path) -> None:
    graph = step_of(tmp_path, SEQ, ("aten::unbind", [[4, 12, 32]], [1]))
    with pytest.raises(EditError, match="dimension of 12 piece by piece"):
        baseline_of(graph, device=device("cpu")).predict([Sizes.parse(["seq=12:30"])])


def test_parts_as_long_as_the_named_size_are_as_many_at_any(tmp_path: Path) -> None:
    """Two views of a batch of 4 put together and taken apart, which then is halved."""
    ops = [("aten::cat", [[[4, 32], [4, 32]]], [0]), ("aten::chunk", [[8, 32]], [2, 0])]
    halved = ("aten::split", [[4, 32]], [2, 0])
    assert unrolled_size(ScaledShapes(step_of(tmp_path, *ops), (("batch", 4, 16),))) is None
    assert unrolled_size(ScaledShapes(step_of(tmp_path, *ops, halved), (("batch", 4, 16),))) == 4


def test_what_is_known_of_the_step_tells_which_dimensions_are_samples(tmp_path: Path) -> None:
    """16 samples and 16 features: the weight's shape says which is which."""
    def scaled(*changes: tuple[str, int, int]) -> ScaledShapes:
        return ScaledShapes(step_of(
            tmp_path, ("aten::linear", [[16, 128], [16, 128], [16]]), ("aten::relu", [[16, 16]]),
            ("aten::linear", [[512, 128], [256, 128], [256]]), ("aten::linear", [[6, 10, 32], [64, 32], [64]]),
            ("aten::mm", [[60, 32], [32, 64]]), ("aten::embedding_bag", [[500, 16], [240], [24]]),
            ("aten::relu", [[24, 16]])), changes)

    batch = scaled(("batch", 16, 32))
    batch.check()
    for sizes, name, before, after in (
            (batch, "mm", [(16, 16), (16, 128)], [(32, 16), (16, 128)]),     # gradient × weight
            (batch, "mm", [(10, 16), (16, 40)], [(10, 32), (32, 40)]),       # nothing known: the matrices that hold 16
            (batch, "mm", [(16, 128), (128, 16)], [(32, 128), (128, 16)]),   # input × transposed weight
            (batch, "addmm", [(16,), (16, 128), (128, 16)], [(16,), (32, 128), (128, 16)]),
            # Lists of indices are as long as their offsets say.
            (scaled(("batch", 24, 48)), "embedding_bag", [(500, 16), (240,), (24,)], [(500, 16), (480,), (48,)]),
            (scaled(("batch", 24, 48)), "select", [(8, 240)], [(8, 480)]),
            # 6 samples of 10 tokens: 60 rows become 12 × 30.
            (scaled(("batch", 6, 12), ("seq", 10, 30)), "mm", [(60, 32), (32, 64)], [(360, 32), (32, 64)])):
        assert shapes(sizes.operation(operation(f"aten::{name}", before))) == after
    # A weight's gradient sums over the samples.
    product = scaled(("batch", 512, 2048)).operation(
        operation("aten::mm", [(256, 512), (512, 128)], strides=[(1, 256), (128, 1)]))
    assert shapes(product) == [(256, 2048), (2048, 128)]
    assert product.arguments[0].stride == (1, 256)


def test_samples_times_samples_follow_the_batch_twice(tmp_path: Path) -> None:
    """What a layer makes of 96 samples, times its transpose: all pairs of samples, and their gradients."""
    graph = step_of(
        tmp_path, ("aten::linear", [[96, 128], [64, 128], [64]]), ("aten::t", [[96, 64]]),
        ("aten::mm", [[96, 64], [64, 96]]), ("aten::div", [[96, 96]]), ("aten::_log_softmax", [[96, 96]], [1, False]),
        ("aten::nll_loss_forward", [[96, 96], [96]]), ("aten::t", [[96, 96]]), ("aten::mm", [[96, 96], [96, 64]]))
    scaled = ScaledShapes(graph, (("batch", 96, 384),))
    found = [shapes(scaled.operation_of(row)) for row in range(len(graph.ops)) if len(scaled.flow.values(row))]
    assert found[2:] == [[(384, 64), (64, 384)], [(384, 384)], [(384, 384)], [(384, 384), (384,)], [(384, 384)],
                         [(384, 384), (384, 64)]]


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
    trace = Micro().step(1000, 2000, 1)
    trace.op("aten::linear", 1010, 1900, **{"Input Dims": [[6, 10, 32], [64, 32], [64]], "Input type": ["float"] * 3})
    graph = trace.read(tmp_path)
    graph.meta.memory.update(peak=100, activations=60)
    assert baseline_of(graph, device=device("cpu")).predict([Sizes.parse(["batch=6:12"])]).peak_memory_bytes == 160


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


TEXTS = [("aten::embedding", [[3000, 160], [4, 48]]), ("aten::embedding", [[512, 160], [1, 48]]),
         ("aten::relu", [[48, 160]]), ("aten::linear", [[4, 48, 160], [160, 160], [160]]),
         ("aten::relu", [[4, 4, 48, 40]]), ("aten::relu", [[160, 4]]), ("aten::nll_loss_forward", [[4, 3], [4]])]
"""4 texts of 48 words, 4 heads, 160 wide."""
TOKENS = [("aten::linear", [[8, 30, 200], [51, 200], [51]]), ("aten::nll_loss_forward", [[240, 51], [240]]),
          ("aten::nll_loss_backward", [[], [240, 51], [240]])]
"""The tokens of all samples are no number of samples."""


@pytest.mark.parametrize(("ops", "changes", "why"), [
    (TEXTS, ("batch", 48, 96), "not the step's number of samples: 4 lead"),
    (TEXTS, ("batch", 160, 320), "4 lead all"), (TEXTS, ("heads", 4, 8), "a size of the model"),
    (TEXTS, ("speakers", 4, 8), "has 4 samples too"), (TEXTS, ("batch", 4, 16), None), (TEXTS, ("seq", 48, 120), None),
    (TOKENS, ("batch", 8, 32), None)])
def test_a_size_that_is_not_what_its_name_says_is_refused(
        tmp_path: Path, ops: list[SizedOp], changes: tuple[str, int, int], why: str | None) -> None:
    with pytest.raises(EditError, match=why) if why else nullcontext():
        ScaledShapes(step_of(tmp_path, *ops), (changes,)).check()


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


@pytest.mark.parametrize("text", [f"batch={MOST + 1}", f"batch={MOST + 1}:8", f"batch=64:{'9' * 5_000}"])
def test_a_size_above_the_largest_is_refused_as_it_is_read(text: str) -> None:
    """Whatever is done with it, and none is taken for another one."""
    with pytest.raises(EditError, match="is no size"):
        parse_sets([text])
    with pytest.raises(EditError, match="is no size"):
        parse_also(f"runs/b:batch={'9' * 5_000}")
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


def check(graph: ExecutionGraph, *changes: tuple[str, int, int]) -> None:
    ScaledShapes(graph, changes).check()


def words(batch: int, seq: int, width: int = 48) -> list[SizedOp]:
    return [("aten::embedding", [[100, width], [batch, seq]]),
            ("aten::linear", [[batch, seq, width], [width, width], [width]])]


def test_sizes_that_coincide_are_refused_by_any_name_but_the_batch(tmp_path: Path) -> None:
    """As many samples as words, and as many heads as words."""
    texts = step_of(tmp_path, *words(16, 16))
    check(texts, ("batch", 16, 64))
    heads = step_of(tmp_path, *words(4, 8), ("aten::view", [[4, 8, 48]], [[4, 8, 8, 6]]),
                    ("aten::transpose", [[4, 8, 8, 6]], [1, 2]))
    for graph, change, why in ((texts, ("seq", 16, 64), r"an input of the step is 16×16.*batch=16"),
                               (texts, ("nonsense", 16, 64), r"an input of the step is 16×16.*batch=16"),
                               (heads, ("num_heads", 8, 16), "a size of the model"),
                               (heads, ("N_Layers", 8, 16), "a size of the model"),
                               (heads, ("speed", 8, 16), "takes a width of 48 apart into 8×6")):
        with pytest.raises(EditError, match=why):
            check(graph, change)


def test_a_head_as_wide_as_the_sequence_is_long_is_told_apart(tmp_path: Path) -> None:
    graph = step_of(tmp_path, *words(4, 12), ("aten::view", [[4, 12, 48]], [[4, 12, 4, 12]]),
                 ("aten::transpose", [[4, 12, 4, 12]], [1, 2]))
    scaled = ScaledShapes(graph, (("seq", 12, 36),))
    scaled.check()
    row = [graph.string(int(code)) for code in graph.ops.name].index("aten::transpose")
    assert scaled.operation_of(row).arguments[0].shape == (4, 36, 4, 12)


def test_a_size_says_which_dimensions_it_is(tmp_path: Path) -> None:
    scaled = ScaledShapes(step_of(tmp_path, *words(4, 12)), (("batch", 4, 8), ("seq", 12, 36)))
    assert scaled.said() == ("batch 4 → 8 is the 1st dimension of embedding's 4×12 indices and linear's 4×12×48 input; "
                             "seq 12 → 36 is the 2nd dimension of embedding's 4×12 indices and linear's 4×12×48 input")


def test_a_source_and_a_target_of_one_length_are_two_sizes(tmp_path: Path) -> None:
    graph = step_of(tmp_path, *words(4, 24), *words(4, 24))
    with pytest.raises(EditError, match=r"2 inputs of the step.*name them one by one"):
        check(graph, ("source", 24, 72))
    check(graph, ("source", 24, 72), ("target", 24, 72))
    assert len(twins.separate_inputs(graph, 24)) == 2


def test_inputs_that_are_added_are_one_size(tmp_path: Path) -> None:
    add: SizedOp = ("aten::add", [[4, 24, 48], [4, 24, 48]])
    graph = step_of(tmp_path, words(4, 24)[0], words(4, 24)[0], ("aten::embedding", [[512, 48], [1, 24]]), add,
                 ("aten::add", [[4, 24, 48], [1, 24, 48]]), words(4, 24)[1])
    check(graph, ("seq", 24, 72))


def test_an_input_is_the_same_in_other_steps_and_small_batches(tmp_path: Path) -> None:
    """Gradients are summed over two of them: each has a forward and a backward."""
    backward: SizedOp = ("autograd::engine::evaluate_function: AddmmBackward0", [[4, 24, 48]])
    assert twins.separate_inputs(steps_of(tmp_path, words(4, 24), words(4, 24), words(4, 24)), 24) == []
    check(steps_of(tmp_path, words(4, 24), words(4, 24)), ("seq", 24, 72))
    batches = [*words(4, 24), backward, *words(4, 24), backward]
    assert twins.separate_inputs(steps_of(tmp_path, batches, batches), 24) == []
    both = [*words(4, 24), *words(4, 24), backward]
    assert len(twins.separate_inputs(steps_of(tmp_path, both, both), 24)) == 2


def test_nodes_of_a_graph_are_its_samples(tmp_path: Path) -> None:
    """A gradient's product with them turned around is no other dimension."""
    graph = step_of(tmp_path, ("aten::linear", [[80, 12], [24, 12], [24]]),
                 ("aten::cross_entropy_loss", [[80, 24], [80]]), ("aten::nll_loss_forward", [[80, 24], [80]]),
                 ("aten::mm", [[24, 80], [80, 12]]))
    check(graph, ("nodes", 80, 160))
    with pytest.raises(EditError, match="80 samples too"):
        check(graph, ("speed", 80, 160))


@pytest.mark.parametrize("picks", [("aten::index_add_", [[80, 24], [], [80], [80, 24], []]),
                                   ("aten::index", [[80, 24], [[80]]])])
def test_as_many_edges_as_nodes_are_refused(tmp_path: Path, picks: SizedOp) -> None:
    graph = step_of(tmp_path, ("aten::cross_entropy_loss", [[80, 24], [80]]), picks,
                 ("aten::nll_loss_forward", [[80, 24], [80]]), ("aten::mm", [[24, 80], [80, 12]]))
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
    found = [shapes(scaled.operation_of(row)) for row in range(len(graph.ops))]
    assert found[-5:] == [[(384, 300)], [(16, 24, 300)], [(96, 300)], [(384, 300), (300, 96)], [(384, 300)]]


def test_a_recurrent_layers_state_says_where_the_samples_stand(tmp_path: Path) -> None:
    layer: SizedOp = ("aten::mkldnn_rnn_layer", [[20, 32, 24], [160, 24], [160, 40], [160], [160], [32, 40], [32, 40]])
    graph = step_of(
        tmp_path, ("aten::embedding", [[80, 24], [32, 20]]), ("aten::transpose", [[32, 20, 24]], [0, 1]),
        ("aten::select", [[1, 32, 40]], [0, 0]), layer,
        ("aten::transpose", [[20, 32, 40]], [0, 1]), ("aten::linear", [[32, 20, 40], [80, 40], [80]]))
    scaled = ScaledShapes(graph, (("batch", 32, 8),))
    found = [shapes(scaled.operation_of(row)) for row in range(len(graph.ops))]
    assert found[-4:] == [
        [(1, 8, 40)], [(20, 8, 24), (160, 24), (160, 40), (160,), (160,), (8, 40), (8, 40)], [(20, 8, 40)],
        [(8, 20, 40), (80, 40), (80,)]]

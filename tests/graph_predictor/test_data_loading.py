"""Batches loaded in the training process go with the samples, however a step comes to have another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from micro import Micro

from foretrace.edits import NoDataLoading, ScaleHost, Sizes
from graph_predictor.prediction.data_loading import FIXED_NS
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.synthesis.baseline import baseline_of, retraced

FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
COMPUTE = 400.0


def capture(batch: int, *, sample: float = 0.0, ready: float = 0.0, collated: bool = False,
            iterator: str = FETCH) -> Micro:
    """Steps on a CPU: a fetch of ``sample`` µs for each of the samples and ``ready`` µs of the batch as one, at whose
    end a list of samples may be collated, then a product of 400 µs at a batch of 8."""
    trace = Micro()
    at = 1000.0
    for number in range(3):
        begin, fetch = at, ready + batch * sample + 20
        trace.op(iterator, at, at + fetch)
        for one in range(batch if sample else 0):
            trace.op("aten::randn", at + (one + 1) * sample - 5, at + (one + 1) * sample)
        if collated:
            trace.op("aten::stack", at + fetch - 10, at + fetch - 5, **{
                "Input Dims": [[[256]] * batch, []], "Input type": ["TensorList", "Scalar"]})
        at += fetch + 10
        trace.op("aten::mm", at, at + COMPUTE * batch / 8, **{
            "Input Dims": [[batch, 256], [256, 512]], "Input type": ["float", "float"],
            "Input Strides": [[256, 1], [512, 1]], "Concrete Inputs": ["", ""]})
        at += COMPUTE * batch / 8 + 10
        trace.step(begin, at, number)
    return trace


def baseline(tmp_path: Path, batch: int = 8, **fetch: object) -> Baseline:
    return baseline_of(capture(batch, **fetch).read(tmp_path))  # type: ignore[arg-type]


LARGER = Sizes((("batch", 8, 32),))


def test_samples_made_in_the_process_take_as_long_each(tmp_path: Path) -> None:
    short = baseline(tmp_path, sample=200)
    predicted = short.predict([LARGER])
    assert predicted.step_time_us == pytest.approx(4 * short.predict().step_time_us, rel=0.15)
    # The samples call an operation each, so that there is no doubt that the fetch grows.
    assert predicted.interval_us[0] > 3 * 1600
    assert any("training process" in note for note in predicted.notes)


def test_a_batch_that_may_lie_ready_is_in_the_interval(tmp_path: Path) -> None:
    short = baseline(tmp_path, ready=1600)
    step, predicted = short.predict().step_time_us, short.predict([LARGER])
    low, high = predicted.interval_us
    assert low < step + 4 * COMPUTE
    assert high > 4 * 1600
    # Samples that are collated were made one by one.
    assert baseline(tmp_path, ready=1600, collated=True).predict([LARGER]).interval_us[0] > 3 * 1600
    # A fetch as short as the loader's own time does not become long.
    slice_ = baseline(tmp_path, ready=FIXED_NS / 1e3 - 20)
    assert slice_.predict([LARGER]).step_time_us < slice_.predict().step_time_us + 3.5 * COMPUTE


def test_time_beside_the_fetch_and_of_workers_stays(tmp_path: Path) -> None:
    scenario = baseline(tmp_path, sample=200).scenario
    recorded = scenario.slices
    mine = scenario.cycle.working[recorded.item]
    assert recorded.ns[mine & recorded.fetched].sum() / scenario.cycle.steps == pytest.approx(1_620_000, rel=0.01)
    assert recorded.ns[mine & ~recorded.data].sum() / scenario.cycle.steps == pytest.approx(420_000, rel=0.01)
    workers = baseline(tmp_path, sample=20, iterator=WORKERS).scenario.slices
    assert workers.data.any() and not workers.fetched.any()


def test_it_goes_with_other_edits(tmp_path: Path) -> None:
    short = baseline(tmp_path, sample=200)
    one, other = (short.predict(edits).step_time_us for edits in ([LARGER, ScaleHost(0.5)], [ScaleHost(0.5), LARGER]))
    assert one == pytest.approx(other)
    assert one == pytest.approx(short.predict([LARGER]).step_time_us / 2, rel=0.01)
    assert short.predict([LARGER, NoDataLoading()]).step_time_us < 5 * COMPUTE


def test_a_step_traced_again_loads_its_batches_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tracer.shape_only.trace import trace_script

    script = tmp_path / "train.py"
    script.write_text("import torch\n\ndef build(batch=8):\n    x, w = torch.randn(batch, 256), torch.randn(256, 512)\n"
                      "    return lambda: torch.mm(x, w)\n")
    from graph_predictor.sizes.retrace import retrace

    recorded = baseline(tmp_path, sample=200)
    same = retraced(recorded, [trace_script(f"{script}:build", "cpu", arguments={"batch": 8})])
    assert same.predict().step_time_us == pytest.approx(recorded.predict().step_time_us, rel=0.02)
    found = retrace(recorded, {"batch": 32}, {"batch": 8}, code=f"{script}:build")
    assert found.predict().step_time_us == pytest.approx(4 * recorded.predict().step_time_us, rel=0.15)
    assert found.predict([NoDataLoading()]).step_time_us < 5 * COMPUTE

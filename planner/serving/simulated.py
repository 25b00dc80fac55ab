"""``simulate_step``: a served step kernel by kernel on the simulator that replays recordings, beside the estimate that
loads and searches use.

The step is repeated until its period no longer changes, with the same edits as a recorded one, by the same
``Baseline``: what the host does while the GPU works, and what each waits for, is simulated and not added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_predictor.prediction.edit import Edit
from graph_predictor.prediction.host_spread import RESOLVED
from graph_predictor.prediction.predictor import Baseline, Spreads
from graph_predictor.prediction.result import Prediction
from planner.serving.step_scenario import ServedHost, ServedKernel, served_scenario
from planner.serving.steps import ServedStep, ServingModel


def simulate_step(model: ServingModel, step: ServedStep, edits: Sequence[Edit] = ()) -> Prediction | None:
    """Return the prediction of a served step; ``None`` with speculative decoding, whose drafts are no kernels of it.

    Args:
        model: of the decoder without edits.
        step: that is repeated.
        edits: of ``graph_predictor.edits``.

    Raises:
        EditError: an edit cannot be done.
    """
    setup, rates = model.setup, model.rates
    if setup.speculation is not None:
        return None
    found = model.in_order(step)
    us, low, high = model.prices_of(found)
    kernels = [ServedKernel(each.name, each.call, *times) for each, *times in zip(
        found, us.tolist(), low.tolist(), high.tolist(), strict=True)]
    host = ServedHost(model.engine_us(step), rates.host_us, rates.host_collective_us,
                      model.graph_us * setup.pp if model.captured(step) else None)
    scenario = served_scenario(kernels, host, model.device, model.models, setup.gpus)
    return Baseline(scenario, Spreads(rates.spreads.host, RESOLVED), ran=False).predict(edits)

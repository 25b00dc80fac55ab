"""``EditedServingModel``: a served decoder's steps with the edits that change recorded steps.

An edit knows only scenarios. All that a model prices together therefore becomes one (``served_scenario``), edits change
it, and ``price_kernels`` says what each kernel takes then, as of a recorded step:

    calls ──price──▶ µs ──served_scenario──▶ edits ──price_kernels──▶ µs

What edits change of the host and of waiting is read from the same scenario. One that rewrites a recorded step's
operations has nothing to rewrite here, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from graph_predictor.prediction.pricing import price_kernels
from graph_predictor.prediction.scenario import OTHER_RANKS, Edit, Scenario
from kernel_models.collectives import CollectiveCall, CommTimes
from kernel_models.op_call import OpCall
from kernel_models.pricing import PricedCalls
from planner.parallel.estimate import Rates
from planner.serving.errors import ServingError
from planner.serving.setup import ServingSetup
from planner.serving.step_scenario import ServedHost, ServedKernel, served_scenario
from planner.serving.steps import GRAPH_LAUNCH_US, ServedStep, ServingModel
from tracer.arrays import Float64

READ = ("devices", "kernels", "host", "launches")
"""Changes of a scenario that a served step can have."""
SAID = ("set_by", "shared", "warnings", "notes")
LEAST_US = 1e-3
"""Kernels of a scenario take at least so long: times are whole nanoseconds."""


class EditedServingModel(ServingModel):
    """A ``ServingModel`` whose steps are edited.

    Args:
        model: of the decoder as it is.
        edits: of ``graph_predictor.edits``.

    Raises:
        EditError: an edit cannot be done.
        ServingError: one has no meaning for a served step.
    """

    def __init__(self, model: ServingModel, edits: Sequence[Edit]) -> None:
        self.__dict__.update({name: value for name, value in model.__dict__.items()
                              if name != "surface" and not name.endswith("_grid")})
        self._edits = tuple(edits)
        self._of_step = [ServedKernel(each.name, each.call, 1.0, 1.0, 1.0) for each in dict.fromkeys(
            model.in_order(ServedStep(1, 1)))]
        edited = self._apply(served_scenario(self._of_step, ServedHost(1.0, 1.0, 1.0), model.device, model.models,
                                             model.setup.gpus))
        self._launches = edited.launches
        self.waits, self.hides = edited.launches.waits, edited.launches.hidden_collectives
        self.rates, self.setup = self._on_host(edited, model.rates)

    def _on_host(self, edited: Scenario, rates: Rates) -> tuple[Rates, ServingSetup]:
        weight = 1.0 if edited.host.weight is None else float(np.mean(edited.host.weight))
        factor = edited.host.factor * weight
        launch = factor if self._launches.cost else 0.0
        self.graph_us = GRAPH_LAUNCH_US * launch
        engine = self.setup.engine
        return (replace(rates, host_us=rates.host_us * launch, host_collective_us=rates.host_collective_us * launch,
                        step_us=rates.step_us * factor),
                replace(self.setup, engine=replace(engine, request_us=engine.request_us * factor,
                                                   reply_us=engine.reply_us * factor)))

    def _prices(self, calls: Sequence[OpCall]) -> PricedCalls:
        priced = super()._prices(calls)
        ratio = self._ratios(priced.calls, priced.time_us)
        return replace(priced, **{name: getattr(priced, name) * ratio for name in ("time_us", "low_us", "high_us")})

    def _exchange_times(self, calls: Sequence[CollectiveCall]) -> CommTimes:
        times = super()._exchange_times(calls)
        ratio = self._ratios(calls, times.time_us)
        return replace(times, **{name: getattr(times, name) * ratio for name in ("time_us", "low_us", "high_us")})

    def _ratios(self, calls: Sequence[OpCall | CollectiveCall], us: Float64) -> Float64:
        """Return what each call takes with the edits over what it takes without."""
        if not len(calls):
            return np.ones(0)
        whole = np.maximum(us, LEAST_US)
        # A whole step is among them: an edit of collectives, say, refuses one without any.
        edited = self._apply(served_scenario(
            [*(ServedKernel("", call, each, each, each) for call, each in zip(calls, whole.tolist(), strict=True)),
             *self._of_step], ServedHost(0.0, 0.0, 0.0), self.device, self.models, self.setup.gpus))
        found: Float64 = price_kernels(edited).ns[:len(calls)] / edited.built.program.kernel_duration[:len(calls)]
        return found

    def _apply(self, scenario: Scenario) -> Scenario:
        for edit in self._edits:
            scenario = _applied(edit, scenario)
        return scenario


def edited_model(model: ServingModel, edits: Sequence[Edit]) -> ServingModel:
    """Return a model with edits; itself without any. Raises as ``EditedServingModel``."""
    return EditedServingModel(model, edits) if edits else model


def _applied(edit: Edit, scenario: Scenario) -> Scenario:
    """Return an edited scenario. Raises ``ServingError`` for an edit that changes what no served step has."""
    edited = edit.apply(scenario)
    changed = [each.name for each in fields(Scenario) if each.name not in (*READ, *SAID)
               and getattr(edited, each.name) is not getattr(scenario, each.name)
               and getattr(edited, each.name) != getattr(scenario, each.name)]
    kernels, claims = edited.kernels, edited.set_by
    if OTHER_RANKS in claims or claims.get("the network") == "--scale-out":
        raise ServingError(f"{edit.describe()[:80]!r} is of a recorded job's ranks; a served copy has as many as --tp, "
                           "--pp and --attention-dp say, which all work alike.")
    if changed or kernels.calls != scenario.kernels.calls or kernels.call_edits != scenario.kernels.call_edits or (
            edited.launches.graphed):
        raise ServingError(f"{edit.describe()[:80]!r} changes the operations of a recorded step, and those of a served "
                           "one are the engine's own; say how it is served (--precision, --cuda-graphs, --tp, …).")
    return edited

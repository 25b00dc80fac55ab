"""``read_anchor``: a server's trace as the anchor of predictions: its kernels' times over those predicted of its steps.

vLLM names its steps by what they work on, so that each can be predicted as it was:

    execute_context_1(888)_generation_0(0)                            one prompt of 888 tokens
    execute_8192_context_9(sq8155sk8430…)_generation_37(sq37sk34489…) 9 prompts with 8,155 new tokens of 8,430, and 37
                                                                      sequences with 34,489 tokens in their caches

Kernels count by their names, whether they were launched one by one or within a CUDA graph: products and attention,
others, collectives. What each kind took over what is predicted of the same steps is a factor on all other steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.parallel.estimate import Rates
from graph_predictor.parallel.pieces import PRODUCTS
from graph_predictor.serving.errors import ServingError
from graph_predictor.serving.steps import PromptPiece, ServedStep, ServingModel
from kernel_models.device import DeviceError, DeviceSpec, resolve_device
from kernel_models.kernel_names import family_hint
from tracer.graph import ExecutionGraph, KernelKind
from tracer.job import read_job

MOST = 4.0
"""A factor is at most so much, and at least its inverse: more is another model, device or step."""
DOUBTFUL = 1.8
"""All kernels together are usually within so much of what is predicted."""
LEAST_US = 50.0
"""Work of a kind below which its factor says nothing."""
_STEP = re.compile(r"execute_(?:\d+_)?context_(\d+)\(([^)]*)\)_generation_(\d+)\(([^)]*)\)")
_SIZES = re.compile(r"^sq(\d+)sk(\d+)")
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|nccl|rccl|multimem",
                         re.IGNORECASE)
KINDS = ("products", "others", "collectives")


@dataclass(frozen=True, slots=True)
class ServingAnchor:
    """What a trace's steps took over what is predicted of them.

    Attributes:
        steps: that were recorded, and whose names say what they worked on.
        measured, predicted: µs of kernels of each kind, of all steps.
        rates: with factors of it.
    """

    steps: tuple[ServedStep, ...]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    rates: Rates

    def __str__(self) -> str:
        """Say what was learned, in one sentence."""
        factors = ", ".join(f"{name} × {getattr(self.rates, name):.2f}" for name in KINDS if self.measured[name])
        total = sum(self.measured.values()) / sum(self.predicted.values())
        doubt = "" if 1 / DOUBTFUL < total < DOUBTFUL else (
            "; so far off, it may be of another model, split or setup: check that it is of this one")
        return (f"Anchored on {len(self.steps)} recorded {'step' if len(self.steps) == 1 else 'steps'} of "
                f"{sum(self.measured.values()) / 1e3:,.1f} ms of kernels, predicted "
                f"{sum(self.predicted.values()) / 1e3:,.1f} ms: {factors}{doubt}.")


def read_anchor(path: str, model: ServingModel) -> ServingAnchor:
    """Return the rates that a server's trace says.

    Args:
        path: of a trace of one rank.
        model: of the decoder as it was served when it was recorded.

    Raises:
        ServingError: no step of it says what it worked on, or its kernels are far from what is predicted.
        ForetraceError: the trace cannot be read.
    """
    graph = read_job([path]).graphs[0]
    steps = {row: step for row in range(len(graph.steps))
             if (step := step_of(graph.string(int(graph.steps.name[row])))) is not None}
    if not steps:
        raise ServingError(f"No step of {path} says what it worked on; give a trace of vLLM, whose steps are named "
                           "execute_context_…_generation_….")
    _check_device(graph, path, model.device)
    measured = _measured(graph, list(steps))
    predicted = dict.fromkeys(KINDS, 0.0)
    for step in steps.values():
        found = model.time(step)
        for name in KINDS:
            predicted[name] += getattr(found, name)
    if (measured["collectives"] < LEAST_US) != (predicted["collectives"] < LEAST_US):
        has, takes = ("no", "has some") if measured["collectives"] < LEAST_US else ("some", "has none")
        raise ServingError(f"{path} has {has} collectives in its steps, and {model.setup} {takes}; give the split that "
                           "it was recorded with (--tp, --ep, --attention-dp).")
    factors = {name: measured[name] / predicted[name] for name in KINDS
               if min(measured[name], predicted[name]) >= LEAST_US}
    if not factors or not 1 / MOST**2 < sum(measured.values()) / sum(predicted.values()) < MOST**2:
        raise ServingError(f"The kernels of {path} take {sum(measured.values()) / 1e3:,.2f} ms and "
                           f"{sum(predicted.values()) / 1e3:,.2f} are predicted of its steps; give the model, device "
                           "and split that it was recorded with.")
    products, others, collectives = (
        float(np.clip(getattr(model.rates, name) * factors.get(name, 1.0), 1 / MOST, MOST)) for name in KINDS)
    rates = replace(model.rates, products=products, others=others, collectives=collectives)
    return ServingAnchor(tuple(steps.values()), measured, predicted, rates)


def step_of(name: str) -> ServedStep | None:
    """Return what a step of vLLM works on by its name; ``None`` where it says nothing."""
    match = _STEP.search(name)
    if match is None:
        return None
    prompts, sequences = int(match.group(1)), int(match.group(3))
    new, kept = _sizes(match.group(2), prompts)
    _, held = _sizes(match.group(4), sequences)
    pieces = (PromptPiece(prompts, max(round(new / prompts), 1), max(round((kept - new) / prompts), 0)),) if (
        prompts and new) else ()
    context = held / sequences if sequences else 0.0
    return ServedStep(sequences, context, pieces, prompts) if pieces or sequences else None


def _check_device(graph: ExecutionGraph, path: str, device: DeviceSpec) -> None:
    """Raise ``ServingError`` for a trace of another device, where it says which, or how much memory that has."""
    reported, held = graph.meta.device, graph.meta.device_memory_bytes
    if reported in device.reported_names:
        return
    if not reported and held > 0 and not 0.8 < held / (device.memory_gb * 1e9) < 1.25:
        raise ServingError(f"{path} was recorded on a device with {held / 1e9:,.0f} GB, and {device.name} has "
                           f"{device.memory_gb:,.0f}; give the --device that it was recorded on.")
    try:
        recorded = resolve_device(reported)
    except DeviceError:
        return
    if recorded.name != device.name:
        raise ServingError(f"{path} was recorded on {reported[:60]}, and served is on {device.name}; give --device "
                           f"{recorded.name}, or a trace of that device.")


def _sizes(text: str, count: int) -> tuple[int, int]:
    """New tokens and all tokens of so many sequences; without the latter as many as there are new ones."""
    match = _SIZES.match(text)
    if match is not None:
        return int(match.group(1)), int(match.group(2))
    digits = re.match(r"\d+", text)
    new = int(digits.group()) if digits is not None and count else 0
    return new, new


def _measured(graph: ExecutionGraph, steps: Sequence[int]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    kernels = graph.kernels
    of = np.isin(kernels.step, steps) & np.isin(kernels.kind, (KernelKind.COMPUTE, KernelKind.COLLECTIVE))
    for row in np.flatnonzero(of).tolist():
        name = graph.string(int(kernels.name[row]))
        if int(kernels.kind[row]) == KernelKind.COLLECTIVE or _COLLECTIVE.search(name):
            kind = "collectives"
        else:
            kind = "products" if family_hint(name) in PRODUCTS else "others"
        found[kind] += float(kernels.duration_ns[row]) / 1e3
    return found

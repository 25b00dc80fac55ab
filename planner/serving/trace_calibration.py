"""``match_kernels``: find the operation of a served step that each recorded kernel belongs to, by name and by order.

A kernel's role (attention, a norm, a product, …) follows from its name or from the operation that launched it. For a
CUDA graph that is the operation of its capture. Only a product's place tells which of the step's products it is::

    recorded    norm  gemm  rope  cache  fmha  gemm  copy  all_reduce  copy  norm  gemm  topk  moe  moe  …
    predicted   norm  qkv   ──rope──     attn  out   ─────all-reduce─────    norm  ─routing─  ─experts─  …

Both are aligned layer by layer, from one attention to the next, with the fewest left out on either side. A kernel that
matches no operation (copies, fills, fused pointwise kernels) counts with the collective before it, else with the next
kernel, whose input it prepares.

``read_anchor``: calibrate predictions by a server's trace: the ratios of recorded to predicted kernel times.

vLLM names its steps by their work, so that each recorded step can be predicted at its own sizes:

    execute_context_1(888)_generation_0(0)                            one prompt of 888 tokens
    execute_8192_context_9(sq8155sk8430…)_generation_37(sq37sk34489…) 9 prompts with 8,155 new tokens of 8,430, and 37
                                                                      sequences with 34,489 tokens in their caches

Each kernel, launched by itself or within a CUDA graph, belongs to one of the step's operations (``match_kernels``). The
ratio of an operation's recorded to predicted time in these steps scales its time in all steps. The recorded step thus
gets its recorded times, and other steps scale as the models do. Operations in no recorded step (attention of decoding,
if only prompts were recorded) get the factor of their kind: products and attention, others, collectives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import pairwise

import numpy as np

from kernel_models.device import DeviceError, DeviceSpec, resolve_device
from kernel_models.kernel_names import family_hint
from kernel_models.op_call import Family
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.layer_costs import PRODUCTS
from planner.serving.setup import ServingError
from planner.serving.step_grids import PrefillChunk
from planner.serving.step_operations import StepExchange, StepOperation
from planner.serving.steps import ServedStep, ServingModel
from tracer.graph import ExecutionGraph, KernelKind, LaunchKind
from tracer.job import read_job


class KernelRole(Enum):
    """The purpose of a kernel or an operation."""

    ATTENTION = "attention"
    NORM = "norm"
    CACHE = "rotary positions and the cache"
    ROUTING = "routing"
    EXPERTS = "experts"
    PRODUCT = "product"
    ACTIVATION = "activation"
    SCAN = "recurrence"
    CAST = "cast"
    COLLECTIVE = "collective"
    SAMPLING = "sampling"
    EMBEDDING = "embedding"
    NONE = "none"
    """Moves or fills values; the purpose is unknown."""


_ROLES: tuple[tuple[KernelRole, str], ...] = (
    (KernelRole.COLLECTIVE, r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device|nccl|rccl|multimem"),
    (KernelRole.NORM, r"rms_?norm|layer_?norm|_rsqrt"),
    (KernelRole.CACHE, r"rotary|rope|reshape_and_cache|concat_and_cache|cache_kernel|kv_cache|set_kv_buffer"
                       r"|store_kvcache"),
    (KernelRole.SAMPLING, r"argmax|sampling|sample_|multinomial"),
    (KernelRole.SCAN, r"selective_scan|mamba|causal_conv1d|chunk_scan|chunk_state|ssd_|gated_delta|fused_recurrent"),
    (KernelRole.ROUTING, r"routing|top_?k|bitmatrix|moe_align|moe_sum|finalize|expert_(?:offset|count|map)|permute"
                         r"|count_and_sort|quantize_with_block_size|moe_forward|grouped_topk"),
    (KernelRole.EXPERTS, r"matmul_ogs|fused_moe|moe.*gemm|grouped_?gemm|group_?gemm|^bmm_Mx|^bmm_Bf|^bmm_E"
                         r"|moe_kernel"),
    (KernelRole.ATTENTION, r"attention|fmha|flash|(?:^|[^a-z])mla|paged_|splitkv|batch_(?:prefill|decode)"),
    (KernelRole.ACTIVATION, r"silu|gelu|act_and_mul|swiglu|_silu"),
    (KernelRole.EMBEDDING, r"embedding"),
    (KernelRole.CAST, r"quant|_to_copy|cast"),
)
"""First match wins, except for products: see ``kernel_role``."""
_OF_NAMES = {
    "norms": KernelRole.NORM, "rotary positions, cache": KernelRole.CACHE, "experts": KernelRole.EXPERTS,
    "attention of decoding": KernelRole.ATTENTION, "attention of prompts": KernelRole.ATTENTION,
    "activation": KernelRole.ACTIVATION, "casts": KernelRole.CAST, "embedding": KernelRole.EMBEDDING,
    "sampling": KernelRole.SAMPLING, "state-space recurrence": KernelRole.SCAN}
_ALIKE = {frozenset((KernelRole.EXPERTS, KernelRole.PRODUCT)), frozenset((KernelRole.CAST, KernelRole.ROUTING)),
          frozenset((KernelRole.SAMPLING, KernelRole.ROUTING))}
"""Pairs of roles, a kernel's and an operation's, that may match."""
SAME, LIKE, AGAIN = 4, 2, 1
"""Scores of an operation's first kernel, with the same or with a similar role; and of each further kernel of it."""


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """A kernel of a recorded step: its name, the operation that launched it ("" if unknown), and its time, µs."""

    name: str
    operator: str
    us: float


@dataclass(frozen=True, slots=True)
class MatchedKernels:
    """The operations that a step's kernels belong to.

    Attributes:
        of: name of each kernel's operation; "" for none.
        ``beside``: whether a kernel was counted with its neighbour, because it matches no operation itself.
        us: µs of each operation's kernels.
        own_us, beside_us, none_us: µs of kernels that match an operation, that count with a neighbour, and of others.
    """

    of: tuple[str, ...]
    beside: tuple[bool, ...]
    us: dict[str, float]
    own_us: float
    beside_us: float
    none_us: float


def match_kernels(kernels: Sequence[RecordedKernel], step: Sequence[StepOperation | StepExchange]) -> MatchedKernels:
    """Return the operations of a step's kernels.

    Args:
        kernels: kernels of one recorded step, in the order in which they ran.
        step: operations of the predicted step, in the order in which they run (``ServingModel.in_order``).
    """
    roles = [kernel_role(each.name, each.operator) for each in kernels]
    wanted = [operation_role(each) for each in step]
    places: list[int] = [-1] * len(kernels)
    for (first, last), (begin, end) in _segments(roles, wanted):
        for row, place in enumerate(_aligned(tuple(roles[first:last]), tuple(wanted[begin:end]))):
            places[first + row] = begin + place if place >= 0 else -1
    of = [step[place].name if place >= 0 else "" for place in places]
    own = list(of)
    _fill(kernels, roles, of)
    us: dict[str, float] = {}
    for name, each in zip(of, kernels, strict=True):
        if name:
            us[name] = us.get(name, 0.0) + each.us
    beside = tuple(bool(name) and not mine for name, mine in zip(of, own, strict=True))
    return MatchedKernels(
        tuple(of), beside, us, sum(each.us for name, each in zip(own, kernels, strict=True) if name),
        sum(each.us for near, each in zip(beside, kernels, strict=True) if near),
        sum(each.us for name, each in zip(of, kernels, strict=True) if not name))


@cache
def kernel_role(name: str, operator: str = "") -> KernelRole:
    """Return a kernel's role from its name, else from its operation's name."""
    family = family_hint(name)
    if family in (Family.TRANSFER, Family.MEMSET):
        return KernelRole.NONE
    for role, expression in _ROLES:
        if re.search(expression, name, re.IGNORECASE):
            # An expert's product may have its activation, or its weights' type, in its name.
            if role in (KernelRole.ACTIVATION, KernelRole.CAST, KernelRole.EMBEDDING) and family is Family.GEMM:
                break
            return role
    if family is Family.GEMM:
        return KernelRole.EXPERTS if re.search(r"moe", operator) else KernelRole.PRODUCT
    if family is Family.SOFTMAX:
        return KernelRole.SAMPLING
    for role, expression in _ROLES:
        if operator and role is not KernelRole.ATTENTION and re.search(expression, operator, re.IGNORECASE):
            return role
    return KernelRole.NONE


def operation_role(each: StepOperation | StepExchange) -> KernelRole:
    """Return the role of an operation of a served step."""
    if isinstance(each, StepExchange):
        return KernelRole.COLLECTIVE
    if each.name == "routing":
        return KernelRole.PRODUCT if each.call.family is Family.GEMM else KernelRole.ROUTING
    usual = KernelRole.PRODUCT if each.call.family is Family.GEMM else KernelRole.ACTIVATION
    return _OF_NAMES.get(each.name, usual)


def _segments(roles: Sequence[KernelRole], wanted: Sequence[KernelRole]
              ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return matching stretches of kernels and of operations, cut where attention begins; one stretch if the numbers
    of cuts differ."""
    cuts, ours = _attentions(roles), _attentions(wanted)
    if len(cuts) != len(ours):
        return [((0, len(roles)), (0, len(wanted)))]
    return list(zip(pairwise([0, *cuts, len(roles)]), pairwise([0, *ours, len(wanted)]), strict=True))


def _attentions(roles: Sequence[KernelRole]) -> list[int]:
    """Return where each layer's attention begins. No product lies between the attention kernels of one layer."""
    found, product = [], True
    for row, role in enumerate(roles):
        if role is KernelRole.ATTENTION and product:
            found.append(row)
        if role in (KernelRole.ATTENTION, KernelRole.PRODUCT, KernelRole.EXPERTS):
            product = role is not KernelRole.ATTENTION
    return found


@cache
def _aligned(roles: tuple[KernelRole, ...], wanted: tuple[KernelRole, ...]) -> tuple[int, ...]:
    """Return the operation of each kernel, -1 for none. The best alignment keeps both orders; an operation may have
    several kernels."""
    rows, columns = len(roles), len(wanted)
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    from_ = [[""] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        own, above, said, role = best[i], best[i - 1], from_[i], roles[i - 1]
        own[0], said[0] = 0, "kernel"
        for j in range(1, columns + 1):
            score = SAME if role is wanted[j - 1] else LIKE if frozenset((role, wanted[j - 1])) in _ALIKE else 0
            value, how = own[j - 1], "operation"
            if above[j] > value:
                value, how = above[j], "kernel"
            if score and role is not KernelRole.NONE:
                if above[j] + AGAIN > value and from_[i - 1][j] in ("match", "again"):
                    value, how = above[j] + AGAIN, "again"
                if above[j - 1] + score >= value:
                    value, how = above[j - 1] + score, "match"
            own[j], said[j] = value, how
    found, i, j = [-1] * rows, rows, columns
    while i > 0:
        how = from_[i][j]
        if how in ("match", "again"):
            found[i - 1] = j - 1
        i, j = i - (how != "operation"), j - (how in ("match", "operation"))
    return tuple(found)


def _fill(kernels: Sequence[RecordedKernel], roles: Sequence[KernelRole], of: list[str]) -> None:
    """Count kernels without an operation with a neighbour, except before the first match and after the last."""
    known = [row for row, name in enumerate(of) if name]
    if not known:
        return
    for row in range(known[-1] - 1, known[0], -1):
        if of[row]:
            continue
        replicas = family_hint(kernels[row].name) is Family.TRANSFER
        if replicas and roles[row - 1] is KernelRole.COLLECTIVE and of[row - 1]:
            of[row] = of[row - 1]
        else:
            of[row] = of[row + 1]


BEGIN, END = "StreamBeginCapture", "StreamEndCapture"
NODES = (LaunchKind.KERNEL, LaunchKind.MEMCPY, LaunchKind.MEMSET)


def captured_operators(graph: ExecutionGraph, capture: ExecutionGraph) -> dict[int, str]:
    """Return the operation of each kernel in a CUDA graph, by the kernel's row, from a capture with as many launches.

    Args:
        graph: a trace in which CUDA graphs are launched.
        capture: a trace in which the same server captured them.

    Raises:
        ServingError: the capture has no CUDA graph.
    """
    by_count = {len(each): each for each in _captures(capture)}
    if not by_count:
        raise ServingError(f"{capture.meta.source or 'The trace of the capture'} captures no CUDA graph: there is no "
                           "call of cudaStreamBeginCapture with launches after it; record the server while it starts.")
    kernels = graph.kernels
    in_graphs = np.flatnonzero(graph.launches.kind == LaunchKind.GRAPH)
    found: dict[int, str] = {}
    for launch in in_graphs.tolist():
        rows = np.flatnonzero(kernels.launch == launch)
        rows = rows[np.argsort(kernels.start_ns[rows], kind="stable")]
        found |= dict(zip(rows.tolist(), by_count.get(len(rows), ()), strict=False))
    return found


def _captures(capture: ExecutionGraph) -> list[list[str]]:
    """Return, for each CUDA graph that was captured, the operation of every launch in it."""
    launches = capture.launches
    found: list[list[str]] = []
    ran = set(capture.kernels.launch.tolist())
    current: dict[int, list[str]] = {}
    for row in np.lexsort((launches.start_ns, launches.thread)).tolist():
        name, thread = capture.string(int(launches.name[row])), int(launches.thread[row])
        if BEGIN in name:
            current[thread] = []
        elif END in name:
            if captured := current.pop(thread, None):
                found.append(captured)
        elif thread in current and int(launches.kind[row]) in NODES and row not in ran:
            op = int(launches.op[row])
            current[thread].append(capture.string(int(capture.ops.name[op])) if op >= 0 else "")
    return found


MOST = 4.0
"""Largest factor, and inverse of the smallest: beyond it the trace is of another model, device or step."""
DOUBTFUL = 1.95
"""All kernels' time over its prediction is usually within this factor (``benchmarks/serving.py --rows anchors``)."""
LEAST_US = 50.0
"""Least work of a kind that decides its factor, µs."""
_STEP = re.compile(r"execute_(?:\d+_)?context_(\d+)\(([^()]*)\)_generation_(\d+)\(([^()]*)\)")
_SIZES = re.compile(r"^sq(\d+)sk(\d+)")
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|nccl|rccl|multimem",
                         re.IGNORECASE)
KINDS = ("products", "others", "collectives")
ATTENTION = ("attention of decoding", "attention of prompts")


@dataclass(frozen=True, slots=True)
class TraceCalibration:
    """The ratios of a trace's recorded to its predicted times.

    Attributes:
        steps: the recorded steps of known work.
        measured, predicted: sum of kernel times over all steps, by kind, µs.
        rates: the model's correction factors × measured / predicted time of each kind.
        factors: further factors, by name of the operation.
        own, ``beside``: shares of the kernels' time: kernels that match an operation by name and order, and kernels
            counted with a neighbour.
        assumed: whether only the caller states the work of the steps.
    """

    steps: tuple[ServedStep, ...]
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    rates: CorrectionFactors
    factors: Mapping[str, float]
    own: float
    beside: float
    assumed: bool = False

    def of(self, model: ServingModel) -> ServingModel:
        """Return a model with the factors of the trace."""
        return model.with_rates(self.rates).with_factors(self.factors)

    def rests(self, model: ServingModel, step: ServedStep) -> float:
        """Return the share of a step's predicted kernel time that is in operations which the trace recorded."""
        found = model.operations(step)
        total = sum(each.us for each in found)
        return sum(each.us for each in found if each.name in self.factors) / total if total else 0.0

    def __str__(self) -> str:
        """Return the calibration's result in one sentence."""
        factors = ", ".join(f"{name} × {getattr(self.rates, name):.2f}" for name in KINDS if self.measured[name])
        total = sum(self.measured.values()) / sum(self.predicted.values())
        doubt = "" if 1 / DOUBTFUL < total < DOUBTFUL else (
            "; so far off, it may be of another model, split or setup: check that it is of this one")
        taken = f", taken to decode {self.steps[0].sequences:g} × {self.steps[0].context:,.0f}" if self.assumed else ""
        return (f"Anchored on {len(self.steps)} recorded {'step' if len(self.steps) == 1 else 'steps'} of "
                f"{sum(self.measured.values()) / 1e3:,.1f} ms of kernels{taken}, predicted "
                f"{sum(self.predicted.values()) / 1e3:,.1f} ms: {factors}{doubt}. {self.own + self.beside:.1%} of that "
                f"time belongs to operations of the step, {self.beside:.1%} by neighbouring kernels.")


def read_anchor(path: str, model: ServingModel, *, capture: str | None = None, assumed: ServedStep | None = None,
                step_region: str | None = None) -> TraceCalibration:
    """Calibrate a model on a server's trace.

    Args:
        path: a trace of one rank.
        model: the decoder as it was served in the trace.
        capture: a trace of the same server capturing its CUDA graphs; names the operations of their kernels.
        assumed: the work of each recorded step, if the steps' names do not give it.
        step_region: name of the regions that are steps (``tracer.read_job``).

    Raises:
        ServingError: no step's work is known, or kernel times are far from the prediction.
        ForetraceError: the trace cannot be read.
    """
    graph = read_job([path], step_region=step_region, cycle=1).graphs[0]
    steps = {row: step for row in range(len(graph.steps))
             if (step := step_of(graph.string(int(graph.steps.name[row])))) is not None}
    named = bool(steps)
    if not named and assumed is not None:
        worked = np.unique(graph.kernels.step)
        steps = {int(row): assumed for row in worked[worked >= 0]}
    if not steps:
        raise ServingError(f"No step of {path} says what it worked on; give a trace of vLLM, whose steps are named "
                           "execute_context_…_generation_…, or one with steps (prof.step(), or --step-region) that all "
                           "decode, and --batch and --context for what they decode.")
    _check_device(graph, path, model.device)
    operators = captured_operators(graph, read_job([capture]).graphs[0]) if capture is not None else {}
    measured, predicted = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    orders = {row: model.in_order(step) for row, step in steps.items()}
    for row, order in orders.items():
        for name, us in _measured(graph, [row]).items():
            measured[name] += us
        for each, us in zip(order, model.prices_of(order)[0].tolist(), strict=True):
            predicted[_kind(each)] += us
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
    factors, own, beside = _of_operations(graph, orders, operators, model.with_rates(rates))
    return TraceCalibration(tuple(steps.values()), measured, predicted, rates, factors, own, beside, not named)


def step_of(name: str) -> ServedStep | None:
    """Return the work of a vLLM step from its name; ``None`` if the name does not give it."""
    match = _STEP.search(name)
    if match is None:
        return None
    prompts, sequences = int(match.group(1)), int(match.group(3))
    new, kept = _sizes(match.group(2), prompts)
    _, held = _sizes(match.group(4), sequences)
    pieces = (PrefillChunk(prompts, max(round(new / prompts), 1), max(round((kept - new) / prompts), 0)),) if (
        prompts and new) else ()
    context = held / sequences if sequences else 0.0
    return ServedStep(sequences, context, pieces, prompts) if pieces or sequences else None


def _check_device(graph: ExecutionGraph, path: str, device: DeviceSpec) -> None:
    """Raise ``ServingError`` for a trace of another device, as far as its name or its memory is recorded."""
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
    """Return the new tokens and all tokens of ``count`` sequences; a text without all tokens has only new ones."""
    match = _SIZES.match(text)
    if match is not None:
        return int(match.group(1)), int(match.group(2))
    digits = re.match(r"\d+", text)
    new = int(digits.group()) if digits is not None and count else 0
    return new, new


def _of_operations(graph: ExecutionGraph, orders: Mapping[int, Sequence[StepOperation | StepExchange]],
                   operators: Mapping[int, str], model: ServingModel) -> tuple[dict[str, float], float, float]:
    """Return each operation's factor on its predicted time. Also return the shares of the kernels' time that match an
    operation, and that count with a neighbour."""
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    own = beside = total = 0.0
    for row, order in orders.items():
        kernels = _kernels(graph, row, operators)
        matched = match_kernels(kernels, order)
        own, beside = own + matched.own_us, beside + matched.beside_us
        total += sum(each.us for each in kernels)
        predicted: dict[str, float] = {}
        for each, us in zip(order, model.prices_of(order)[0].tolist(), strict=True):
            predicted[each.name] = predicted.get(each.name, 0.0) + us
        for name, us in _shared(matched.us, predicted).items():
            ours[name] = ours.get(name, 0.0) + us
        for name, us in predicted.items():
            theirs[name] = theirs.get(name, 0.0) + us
    # An operation without kernels gets 0: another one does its work, such as a product with an activation.
    factors = {name: ours.get(name, 0.0) / us for name, us in theirs.items() if us > 0}
    return factors, own / max(total, 1.0), beside / max(total, 1.0)


def _shared(us: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Divide attention's time as predicted between prompts and decoding, because one kernel may do both."""
    found = dict(us)
    names = [name for name in ATTENTION if name in predicted]
    whole, parts = sum(us.get(name, 0.0) for name in names), sum(predicted[name] for name in names)
    return found | {name: whole * predicted[name] / parts for name in names if parts > 0}


def _kernels(graph: ExecutionGraph, step: int, operators: Mapping[int, str]) -> list[RecordedKernel]:
    """Return a step's kernels in order, with the operations that launched them or that a capture names."""
    kernels = graph.kernels
    rows = np.flatnonzero(kernels.step == step)
    return [RecordedKernel(
        graph.string(int(kernels.name[row])),
        operators.get(row) or (graph.string(int(graph.ops.name[kernels.op[row]])) if kernels.op[row] >= 0 else ""),
        float(kernels.duration_ns[row]) / 1e3)
        for row in rows[np.argsort(kernels.start_ns[rows], kind="stable")].tolist()]


def _kind(each: StepOperation | StepExchange) -> str:
    if isinstance(each, StepExchange):
        return "collectives"
    return "products" if each.call.family in PRODUCTS else "others"


def _measured(graph: ExecutionGraph, steps: Sequence[int]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    kernels = graph.kernels
    of = np.isin(kernels.step, steps)
    for row in np.flatnonzero(of).tolist():
        name = graph.string(int(kernels.name[row]))
        if int(kernels.kind[row]) == KernelKind.COLLECTIVE or _COLLECTIVE.search(name):
            kind = "collectives"
        else:
            kind = "products" if family_hint(name) in PRODUCTS else "others"
        found[kind] += float(kernels.duration_ns[row]) / 1e3
    return found

"""``match_kernels``: the operation of a served step that each of its recorded kernels belongs to, by name and by order.

A kernel's name, or the operation that launched it (of a CUDA graph the one that launched it while it was captured),
says its role: attention, a norm, a product, … Which of the step's products it is only its place says::

    recorded    norm  gemm  rope  cache  fmha  gemm  copy  all_reduce  copy  norm  gemm  topk  moe  moe  …
    predicted   norm  qkv   ──rope──     attn  out   ─────all-reduce─────    norm  ─routing─  ─experts─  …

Both go layer by layer, from one attention to the next, and are aligned with the fewest left out on either side. What no
operation has (replicas, fills, fused pointwise kernels) counts with the collective that it lies beside, else with the
next kernel, whose input it prepares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import pairwise

from kernel_models.kernel_names import family_hint
from kernel_models.op_call import Family
from planner.serving.operations import StepExchange, StepOperation


class KernelRole(Enum):
    """What a kernel or an operation is for."""

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
    """Nothing that says more than that it moves or fills values."""


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
"""First match wins, but for products: see ``kernel_role``."""
_OF_NAMES = {
    "norms": KernelRole.NORM, "rotary positions, cache": KernelRole.CACHE, "experts": KernelRole.EXPERTS,
    "attention of decoding": KernelRole.ATTENTION, "attention of prompts": KernelRole.ATTENTION,
    "activation": KernelRole.ACTIVATION, "casts": KernelRole.CAST, "embedding": KernelRole.EMBEDDING,
    "sampling": KernelRole.SAMPLING, "state-space recurrence": KernelRole.SCAN}
_ALIKE = {frozenset((KernelRole.EXPERTS, KernelRole.PRODUCT)), frozenset((KernelRole.CAST, KernelRole.ROUTING)),
          frozenset((KernelRole.SAMPLING, KernelRole.ROUTING))}
"""Roles of a kernel and of an operation that may be one thing."""
SAME, LIKE, AGAIN = 4, 2, 1
"""Scores of a kernel that is an operation's first: of its role, or of one alike; and of another kernel of the same."""


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """A kernel of a recorded step: its name, the operation that launched it ("" where nothing says), and µs."""

    name: str
    operator: str
    us: float


@dataclass(frozen=True, slots=True)
class MatchedKernels:
    """Which operations a step's kernels belong to.

    Attributes:
        of: name of the operation of each kernel; "" for those of none.
        beside: which of them were counted with their neighbours.
        us: of the kernels of each operation.
        own_us, beside_us, none_us: µs of kernels that an operation has itself, by their neighbours, and of none.
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
        kernels: of one recorded step, as they ran.
        step: what the step is made of, as it runs (``ServingModel.in_order``).
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
    """Return the role that a kernel's name says, else that its operation's does."""
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
    """Return stretches of kernels and of operations that belong together, cut where attention begins; all of it in one
    where there are not as many."""
    cuts, ours = _attentions(roles), _attentions(wanted)
    if len(cuts) != len(ours):
        return [((0, len(roles)), (0, len(wanted)))]
    return list(zip(pairwise([0, *cuts, len(roles)]), pairwise([0, *ours, len(wanted)]), strict=True))


def _attentions(roles: Sequence[KernelRole]) -> list[int]:
    """Return where each layer's attention begins: its kernels have no product between them."""
    found, product = [], True
    for row, role in enumerate(roles):
        if role is KernelRole.ATTENTION and product:
            found.append(row)
        if role in (KernelRole.ATTENTION, KernelRole.PRODUCT, KernelRole.EXPERTS):
            product = role is not KernelRole.ATTENTION
    return found


@cache
def _aligned(roles: tuple[KernelRole, ...], wanted: tuple[KernelRole, ...]) -> tuple[int, ...]:
    """Return the operation of each kernel, -1 for none: the best alignment that keeps both orders, in which an
    operation may have several kernels."""
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
    """Count kernels of no operation with their neighbours; those before the first and after the last have none."""
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

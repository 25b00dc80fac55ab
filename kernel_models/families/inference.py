"""Work of inference servers beyond a forward pass: mixtures of experts, choosing the next token, recurrent states.

::

    tokens, experts, visits a token, imbalance ──visits──▶ experts touched, rows of the fullest
    moe_calls: rows into groups ─▶ grouped product (gate and up) ─▶ activation ─▶ grouped product (down) ─▶ sum

A weight is read once for each expert that any token visits. A share p_i of the tokens visits expert i of e, with p_i ∝
i^(−imbalance) (0: all equal) and p_i at most 1. The number of experts touched is Σ 1 − (1 − p_i)^tokens. Source: the
definition; AIConfigurator (github.com/ai-dynamo/aiconfigurator) measures with power laws of 1.01 and 1.2.

Dimensions and bytes are those of ``reduction`` and ``elementwise``. A sampler reads the vocabulary's probabilities of
each sequence a few times and writes a token. A state-space layer reads and writes its whole state for each sequence.
Source: the definitions; sampling by rejection needs no sort (FlashInfer, github.com/flashinfer-ai/flashinfer).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from kernel_models.families.elementwise import elementwise
from kernel_models.families.gemm import gemm
from kernel_models.families.index import index
from kernel_models.families.reduction import sort
from kernel_models.families.registry import Inputs, Unpriceable, forward
from kernel_models.op_call import Family, OpCall, TensorSpec, itemsize

VISITS = 4
"""Number of experts per token where it is not recorded. Set: that of gpt-oss."""


@lru_cache(maxsize=4096)
def shares(experts: int, visits: int, imbalance: float = 0.0) -> tuple[float, ...]:
    """Return the share of the tokens that visit each expert, the most visited first; the sum is ``visits``."""
    weight = np.arange(1.0, experts + 1.0) ** -imbalance
    found = np.minimum(weight * visits / float(weight.sum()), 1.0).astype(np.float64)
    for _ in range(32):
        # A share above 1 is spread over the experts below 1.
        lacking, open_ones = visits - found.sum(), found < 1.0
        if lacking < 1e-9 or not open_ones.any():
            break
        found[open_ones] = np.minimum(found[open_ones] * (1.0 + lacking / float(found[open_ones].sum())), 1.0)
    return tuple(found.tolist())


def touched(tokens: int, experts: int, visits: int, imbalance: float = 0.0) -> float:
    """Return the expected number of experts that at least one token visits."""
    chosen = np.array(shares(experts, min(visits, experts), imbalance))
    return float(np.sum(1.0 - (1.0 - chosen) ** tokens))


def grouped(
    tokens: int, experts: int, visits: int, n: int, k: int, dtype: str, *, imbalance: float = 0.0,
    weight_dtype: str = "", flags: tuple[str, ...] = (), out_dtype: str = "",
) -> Iterator[OpCall]:
    """Yield the grouped product of the visited experts, each with the mean number of rows."""
    groups = max(round(touched(tokens, experts, visits, imbalance)), 1)
    rows = -(-tokens * min(visits, experts) // groups)
    yield from gemm(groups, rows, n, k, dtype, "nt", kind="grouped", weight_dtype=weight_dtype, flags=flags,
                    out_dtype=out_dtype)


def moe_calls(
    tokens: int, experts: int, visits: int, hidden: int, inner: int, dtype: str, *, compute_dtype: str = "",
    weight_dtype: str = "", imbalance: float = 0.0, gated: bool = True, flags: tuple[str, ...] = (),
) -> Iterator[OpCall]:
    """Yield the device work of a fused mixture of experts after its routing.

    Args:
        tokens, experts, visits: Tokens of the step, experts of this device, experts per token.
        hidden, inner: Width of the tokens and of an expert.
        dtype: Type of the tokens; ``compute_dtype``: type of the products, if another.
        weight_dtype: Stored type of the experts' weights, if it differs from the products' type.
        imbalance: Exponent of the visits' power law.
        gated: Whether gate and up projections are one product of twice the width.
        flags: Flags of the products.
    """
    if not tokens * experts * visits:
        return
    rows, computed = tokens * min(visits, experts), compute_dtype or dtype
    wide = inner * (2 if gated else 1)

    def product(n: int, k: int) -> Iterator[OpCall]:
        # Fused kernels gather each expert's tokens while they compute.
        return grouped(tokens, experts, visits, n, k, computed, imbalance=imbalance, weight_dtype=weight_dtype,
                       flags=("routed", *flags), out_dtype="" if computed == dtype else dtype)

    yield from sort("topk", 1, rows, rows, "int32")
    if computed != dtype:
        yield from elementwise("quantize", [TensorSpec((tokens, hidden), dtype)], (tokens, hidden), computed)
    yield from product(wide, hidden)
    yield from elementwise("silu_and_mul", [TensorSpec((rows, wide), dtype)], (rows, inner), computed)
    yield from product(hidden, inner)
    yield from index("moe_sum", rows * hidden, hidden, rows * hidden, dtype)


@forward(Family.GEMM, "vllm::inplace_fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)",
         "vllm::outplace_fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)",
         "vllm::fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)",
         "vllm::fused_moe(hidden_states, w1, w2, topk_weights, topk_ids)",
         "sglang::fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)",
         "sglang::inplace_fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)",
         "sglang::outplace_fused_experts(hidden_states, w1, w2, topk_weights, topk_ids)")
def _fused_experts(op: Inputs) -> Iterator[OpCall]:
    """Yield fused experts. All sizes are among the arguments; the visits are not, and are assumed to be even.

    Weights of half a byte per value are packed 4-bit values, which the products widen.
    """
    hidden, first, second = op.tensor("hidden_states"), op.tensor("w1"), op.tensor("w2")
    if len(first.shape) != 3 or len(second.shape) != 3:
        raise Unpriceable(f"{op.name}: {first.shape}, {second.shape}")
    chosen = op.optional("topk_ids") or op.tensor("topk_weights")
    experts, wide, _ = first.shape
    packed = first.shape[-1] * 2 == hidden.shape[-1]
    inner = second.shape[-1] * (2 if packed else 1)
    yield from moe_calls(
        hidden.shape[0], experts, chosen.shape[-1], hidden.shape[-1], inner, hidden.dtype,
        compute_dtype=first.dtype if first.dtype in ("fp8", "int8") and not packed else "",
        weight_dtype="fp4" if packed else "", gated=wide != inner, imbalance=op.told("imbalance", 0.0))


@forward(Family.GEMM, "vllm::moe_forward(hidden_states, router_logits)",
         "vllm::moe_forward_shared(hidden_states, router_logits)")
def _mixture_of_experts(op: Inputs) -> Iterator[OpCall]:
    """Yield a mixture of experts whose arguments lack the experts' width, the experts per token and the weights' type.

    Assumed are a width equal to the hidden size, four experts per token, and weights of the tokens' type. Servers split
    experts between devices, so the number of experts here may be assumed too. The flag "assumed" marks the calls.
    """
    hidden, router = op.tensor("hidden_states"), op.tensor("router_logits")
    tokens, width = hidden.shape[-2:]
    everyone = router.shape[-1]
    experts = int(op.assume("experts", everyone))
    visits = int(op.assume("visits", VISITS))
    inner = int(op.assume("expert_width", width))
    weights = op.assume_type("weights", hidden.dtype)
    imbalance = op.told("imbalance", 0.0)
    # A device with a share of the experts gets that share of the visits.
    here = max(round(tokens * min(experts / everyone, 1.0)), 1) if experts < everyone else tokens
    flags = op.assumptions()
    yield from sort("topk", tokens, everyone, min(visits, everyone), router.dtype)
    yield from moe_calls(
        here, experts, min(visits, experts), width, inner, hidden.dtype,
        compute_dtype=weights if weights == "fp8" else "", weight_dtype="" if weights == "fp8" else weights,
        imbalance=imbalance, flags=flags)


PASSES = 3
"""Passes of a sampler by rejection over the probabilities: a threshold is found, tried and used."""


@forward(Family.REDUCTION, "flashinfer::sampling_from_probs(probs)", "flashinfer::top_p_sampling_from_probs(probs)",
         "flashinfer::top_k_sampling_from_probs(probs)", "flashinfer::min_p_sampling_from_probs(probs)",
         "flashinfer::top_k_top_p_sampling_from_probs(probs)", "flashinfer::top_k_renorm_probs(probs)",
         "flashinfer::top_p_renorm_probs(probs)", "flashinfer::top_k_mask_logits(probs)",
         "sgl_kernel::top_p_sampling_from_probs(probs)", "sgl_kernel::top_k_top_p_sampling_from_probs(probs)")
def _sample(op: Inputs) -> Iterator[OpCall]:
    probabilities = op.tensor("probs")
    rows, columns = probabilities.elements // max(probabilities.shape[-1], 1), probabilities.shape[-1]
    if not rows * columns:
        return
    whole = "renorm" in op.name or "mask" in op.name
    size = itemsize(probabilities.dtype)
    yield OpCall(Family.REDUCTION, "renorm" if whole else "sample", (rows, columns, 1), probabilities.dtype,
                 flops=float(rows * columns), bytes_read=float(PASSES * rows * columns * size),
                 bytes_written=float(rows * columns * size if whole else 4 * rows))


@forward(Family.ELEMENTWISE, "mamba_ssm::selective_state_update(state, x)", "vllm::selective_state_update(state, x)",
         "_C::causal_conv1d_update(conv_state, x)", "causal_conv1d::causal_conv1d_update(conv_state, x)")
def _state(op: Inputs) -> Iterator[OpCall]:
    """Yield one read and one write of the whole state of the step's sequences, at the memory's bandwidth."""
    state = op.tensor(op.names[0])
    if len(state.shape) < 2:
        raise Unpriceable(f"{op.name}: {state.shape}")
    of_step = op.optional("x")
    sequences = min(of_step.shape[0], state.shape[0]) if of_step is not None and of_step.shape else state.shape[0]
    mine = TensorSpec((sequences, *state.shape[1:]), state.dtype)
    yield from elementwise("state_update", [mine], mine.shape)

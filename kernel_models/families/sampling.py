"""Choosing the next token, and recurrent states of one step: what decoding adds to a forward pass.

Dimensions and bytes are of ``reduction`` and ``elementwise``: a sampler goes over the vocabulary's probabilities of
each sequence a few times and writes a token; a state-space layer reads and writes its whole state for every sequence.
Source: the definitions; sampling by rejection needs no sort (FlashInfer, github.com/flashinfer-ai/flashinfer).
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.dtypes import itemsize
from kernel_models.families.elementwise import elementwise
from kernel_models.families.registry import Inputs, Unpriceable, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec

PASSES = 3
"""Times that a sampler by rejection reads the probabilities: a threshold found, tried and used."""


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
    """Yield the whole state of the step's sequences, read and written, as fast as memory gives it."""
    state = op.tensor(op.names[0])
    if len(state.shape) < 2:
        raise Unpriceable(f"{op.name}: {state.shape}")
    of_step = op.optional("x")
    sequences = min(of_step.shape[0], state.shape[0]) if of_step is not None and of_step.shape else state.shape[0]
    mine = TensorSpec((sequences, *state.shape[1:]), state.dtype)
    yield from elementwise("state_update", [mine], mine.shape)

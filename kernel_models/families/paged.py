"""Attention of inference servers, whose cache is no argument or an argument in pages.

What a step attends to depends on what the server keeps: how many tokens each sequence has behind it. Where no argument
holds it, it is taken as told (``Operation.told``; ``foretrace price --assume``), else the step's tokens are taken to be
one sequence without a past, and the calls say so.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.families.attention import attention, over_pages, window_of
from kernel_models.families.registry import Inputs, Unpriceable, forward
from kernel_models.op_call import Family, OpCall
from kernel_models.tensors import TensorSpec

HEAD_SIZE = 128
"""Features of a head where tensors have heads and features in one dimension and nothing tells them apart."""


@forward(Family.ATTENTION, "vllm::unified_attention_with_output(query, key, value, output)",
         "vllm::unified_attention(query, key, value)",
         "sglang::unified_attention_with_output(query, key, value, output)")
def _unified(op: Inputs) -> Iterator[OpCall]:
    """vLLM's attention: tokens of the step × heads × features, or both of these in one."""
    q, k, v = (op.tensor(name) for name in ("query", "key", "value"))
    heads, kv_heads, size, v_size = _heads(op, q, k, v)
    tokens = q.shape[0]
    sequences = max(int(op.assume("sequences", 1)), 1)
    each = max(-(-tokens // sequences), 1)
    context = max(int(op.assume("context", 0)), 0)
    window = max(int(op.told("window", 0)), 0)
    kv = op.told_type("kv", q.dtype)
    yield from attention(
        "paged_forward", sequences, heads, kv_heads, each, context + each, size, v_size, op.math_dtype(q), causal=True,
        window=window, flags=(*op.assumptions(), "varlen"), kv_dtype=kv)


@forward(Family.ATTENTION, "vllm::unified_mla_attention_with_output(query, key, rope, output)",
         "vllm::unified_mla_attention(query, key, rope)")
def _latent(op: Inputs) -> Iterator[OpCall]:
    """Attention over a latent cache that all heads share: each token's latent features and its rotated key.

    Queries have the unabsorbed size; decoding multiplies them into the latent space first, a product of its own.
    """
    q, latent, rope = (op.tensor(name) for name in ("query", "key", "rope"))
    if len(q.shape) != 3:
        raise Unpriceable(f"{op.name}: {q.shape}")
    sequences = max(int(op.assume("sequences", 1)), 1)
    each = max(-(-q.shape[0] // sequences), 1)
    context = max(int(op.assume("context", 0)), 0)
    kv = op.told_type("kv", q.dtype)
    width = latent.shape[-1]
    yield from attention(
        "mla_forward", sequences, q.shape[1], 1, each, context + each, width + rope.shape[-1], width, op.math_dtype(q),
        causal=True, flags=(*op.assumptions(), "latent"), kv_dtype=kv)


def _heads(op: Inputs, q: TensorSpec, k: TensorSpec, v: TensorSpec) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, and their sizes."""
    if len(q.shape) == 3:
        return q.shape[1], k.shape[1] if len(k.shape) == 3 else k.shape[-1] // q.shape[2], q.shape[2], v.shape[-1]
    if len(q.shape) != 2 or len(k.shape) != 2:
        raise Unpriceable(f"{op.name}: {q.shape}")
    size = max(int(op.assume("head_size", HEAD_SIZE)), 1)
    if q.shape[1] % size or k.shape[1] % size:
        raise Unpriceable(f"{op.name}: {q.shape[1]} features are no heads of {size}")
    return q.shape[1] // size, k.shape[1] // size, size, size


_CACHE = ("(q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k, "
          "block_table)")


@forward(Family.ATTENTION, f"flash_attn::fwd_kvcache{_CACHE}", f"flash_attn_2_cuda::fwd_kvcache{_CACHE}",
         f"_vllm_fa2_C::fwd_kvcache{_CACHE}", f"vllm_flash_attn::fwd_kvcache{_CACHE}")
def _with_cache(op: Inputs) -> Iterator[OpCall]:
    """FlashAttention over a cache of (sequences, tokens, heads, features), or in pages: how full it is, is not among
    the sizes. Of pages whose table is not there, each sequence is taken to have as many."""
    q, k, v = (op.tensor(name) for name in ("q", "kcache", "vcache"))
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise Unpriceable(f"{op.name}: {q.shape}, {k.shape}")
    table = op.optional("block_table")
    pages = table.shape[-1] if table is not None and table.shape else max(k.shape[0] // max(q.shape[0], 1), 1)
    context = int(op.assume("context", max(pages * k.shape[1] - q.shape[1], 0)))
    yield from attention(
        "flash_forward", q.shape[0], q.shape[2], k.shape[2], q.shape[1], context + q.shape[1], q.shape[3], v.shape[3],
        op.math_dtype(q), causal=True, window=int(op.told("window", 0)), flags=op.assumptions(), kv_dtype=k.dtype)


_VARLEN = ("(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q, "
           "max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right)")


@forward(Family.ATTENTION, f"_vllm_fa2_C::varlen_fwd{_VARLEN}", f"flash_attn_2_cuda::varlen_fwd{_VARLEN}")
def _varlen(op: Inputs) -> Iterator[OpCall]:
    """FlashAttention-2 as vLLM calls it: sequences side by side, over a cache in pages where there is a table."""
    q, k, v = (op.tensor(name) for name in ("q", "k", "v"))
    window = window_of(op, True)
    if op.has("block_table") and len(k.shape) == 4:
        yield from over_pages(op, "flash_forward", q, k, v, op.optional("cu_seqlens_q"), op.tensor("block_table"),
                              op.integer("max_seqlen_k", 0), window)
        return
    if len(q.shape) != 3:
        raise Unpriceable(f"{op.name}: {q.shape}")
    offsets = op.optional("cu_seqlens_q")
    batch = max(offsets.elements - 1, 1) if offsets is not None else 1
    yield from attention(
        "flash_forward", batch, q.shape[1], k.shape[1], -(-q.shape[0] // batch), -(-k.shape[0] // batch), q.shape[2],
        v.shape[2], op.math_dtype(q), causal=op.flag("is_causal", True), window=window, flags=("varlen",))


@forward(Family.ATTENTION, "flashinfer::batch_decode_with_paged_kv_cache(q, paged_kv_cache)",
         "flashinfer::batch_prefill_with_paged_kv_cache(q, paged_kv_cache)",
         "flashinfer::trtllm_batch_decode_with_kv_cache(q, paged_kv_cache)",
         "flashinfer::trtllm_batch_context_with_kv_cache(q, paged_kv_cache)")
def _flashinfer(op: Inputs) -> Iterator[OpCall]:
    """FlashInfer over (pages, keys and values, tokens, heads, features): what belongs to a sequence is not said."""
    q, cache = op.tensor("q"), op.tensor("paged_kv_cache")
    if len(q.shape) != 3 or len(cache.shape) != 5:
        raise Unpriceable(f"{op.name}: {q.shape}, {cache.shape}")
    # Tokens before heads ("NHD") or heads before tokens ("HND"): pages have 16 tokens and more, devices fewer heads.
    heads, per_page = sorted(cache.shape[2:4])
    decode = "decode" in op.name
    sequences = q.shape[0] if decode else max(int(op.assume("sequences", 1)), 1)
    each = 1 if decode else max(-(-q.shape[0] // sequences), 1)
    context = int(op.assume("context", max(cache.shape[0] * per_page // sequences - each, 0)))
    yield from attention(
        "paged_forward", sequences, q.shape[1], heads, each, context + each, q.shape[2], cache.shape[4],
        op.math_dtype(q), causal=True, window=int(op.told("window", 0)), flags=(*op.assumptions(), "varlen"),
        kv_dtype=cache.dtype)


@forward(Family.ATTENTION, "flashinfer::single_decode_with_kv_cache(q, k, v)",
         "flashinfer::single_prefill_with_kv_cache(q, k, v)")
def _single(op: Inputs) -> Iterator[OpCall]:
    """One sequence: keys and values as (tokens, heads, features)."""
    q, k, v = (op.tensor(name) for name in ("q", "k", "v"))
    q = TensorSpec((1, *q.shape), q.dtype) if len(q.shape) == 2 else q
    if len(q.shape) != 3 or len(k.shape) != 3:
        raise Unpriceable(f"{op.name}: {q.shape}, {k.shape}")
    yield from attention("paged_forward", 1, q.shape[1], k.shape[1], q.shape[0], k.shape[0], q.shape[2], v.shape[2],
                         op.math_dtype(q), causal=True, kv_dtype=k.dtype)

"""Scaled dot-product attention, forward and backward, by every kernel that computes it.

Dimensions: batch, query heads, key/value heads (fewer for grouped queries), lengths, head sizes of queries and keys and
of values, and the window in tokens (0: full). A kind is a kernel, then "_forward" or "_backward". Kernels: "flash"
(FlashAttention-2, PyTorch's), "flash1", "flash3", "efficient", "cudnn", "math", "paged" (a server's cache in pages) or
"mla" (a latent cache, which all heads share and values are part of). Decoding has queries of one token.

    pairs  = query-key pairs attended to, in one head of one sequence: ``q·kv``, or, if causal, the triangle of them.
    FLOPs  = ``batch·heads·pairs · 2(d + dᵥ)`` forward, ``2(3d + 2dᵥ)`` backward: QKᵀ and PV; QKᵀ again, dP, dV, dQ, dK.
    Bytes  = q, k, v, out and the log-sum-exp (fp32, a row of a head); backward reads these and dout, writes dq, dk, dv.
             Keys and values count once for all heads that share them, as far as a window reaches, in the cache's own
             type (flag "kv_fp8" and the like). Of a latent cache (flag "latent") values are part of the keys.

With d = dᵥ these are 4·q·kv·d forward and 2.5 times that backward; a causal mask halves both. Source: Dao,
FlashAttention-2 (2023), section 4.1. "Math" is priced as if fused: its products and softmax have calls of their own.

Inference servers keep their cache in pages, or outside the arguments. The attended tokens depend on how many tokens
each sequence already has. If no argument holds that number, the user may state it (``Operation.told``;
``foretrace price --assume``). Else the step's tokens are assumed to be one new sequence, and the calls are flagged.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_models.families.registry import Inputs, Unpriceable, both, forward
from kernel_models.op_call import Family, OpCall, TensorSpec, itemsize

PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}
"""Number of products over the keys' head size and over the values', by direction."""


def attended_pairs(q_len: int, kv_len: int, causal: bool, window: int = 0) -> int:
    """Return the query-key pairs of a head: the last query sees the last key; a window counts the query's own token."""
    first = kv_len - q_len if causal else 0
    if not causal:
        return q_len * (min(window, kv_len) if window else kv_len)
    # Query i of q_len sees keys 0 … first + i, limited to the last `window` of them.
    width = window or kv_len
    ramp_from, ramp_to = max(first + 1, 0), min(first + q_len, width)
    if ramp_to < ramp_from:
        return q_len * min(width, max(kv_len, 0))
    ramp = (ramp_from + ramp_to) * (ramp_to - ramp_from + 1) // 2
    return ramp + max(first + q_len - ramp_to, 0) * width


def attention(
    kind: str, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int, v_head_dim: int,
    dtype: str, *, causal: bool = False, window: int = 0, flags: tuple[str, ...] = (), kv_dtype: str = "",
) -> Iterator[OpCall]:
    """Yield the call of one attention kernel; ``kind`` ends in "_forward" or "_backward".

    ``kv_dtype`` is the type of keys and values if it differs from the type of the products.
    """
    seen = min(kv_len, window + q_len - 1) if window else kv_len
    queries, keys = batch * heads * q_len, batch * kv_heads * seen
    if not queries or not keys:
        return
    of_d, of_v = PRODUCTS[kind.rsplit("_", 1)[1]]
    size, kept = itemsize(dtype), itemsize(kv_dtype or dtype)
    token = head_dim if "latent" in flags else head_dim + v_head_dim
    q, kv, out = queries * head_dim * size, keys * token * kept, queries * v_head_dim * size
    backwards = kind.endswith("_backward")
    marks = {*flags, "causal"} if causal else set(flags)
    if kv_dtype and kv_dtype != dtype:
        marks.add(f"kv_{kv_dtype}")
    yield OpCall(
        Family.ATTENTION, kind, (batch, heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, window), dtype,
        flags=tuple(sorted(marks)),
        flops=2.0 * batch * heads * attended_pairs(q_len, kv_len, causal, window)
        * (of_d * head_dim + of_v * v_head_dim),
        bytes_read=float(q + kv + (2 * out + 4 * queries if backwards else 0)),
        bytes_written=float(q + kv if backwards else out + 4 * queries),
    )


def _of_tensors(
    op: Inputs, kind: str, q: TensorSpec, k: TensorSpec, v: TensorSpec, heads_at: int, length_at: int, causal: bool,
    window: int = 0,
) -> Iterator[OpCall]:
    """Yield the calls for 4-d tensors whose heads and lengths are at the given dimensions."""
    if any(len(tensor.shape) != 4 for tensor in (q, k, v)):
        raise Unpriceable(f"{op.name}: {q.shape}")
    flags = ["bias"] if any(map(op.has, ("attn_bias", "attn_mask", "bias"))) else []
    if op.number("dropout_p"):
        flags.append("dropout")
    yield from attention(
        kind + (op.suffix or "_forward"), q.shape[0], q.shape[heads_at], k.shape[heads_at], q.shape[length_at],
        k.shape[length_at], q.shape[3], v.shape[3], op.math_dtype(q), causal=causal, window=window, flags=tuple(flags))


def _packed(
    op: Inputs, kind: str, q: TensorSpec, k: TensorSpec, v: TensorSpec, offsets: TensorSpec | None, causal: bool,
    window: int,
) -> Iterator[OpCall]:
    """Yield the calls for packed sequences (all tokens in one dimension); all have the mean length."""
    if any(len(tensor.shape) != 3 for tensor in (q, k, v)):
        raise Unpriceable(f"{op.name}: {q.shape}")
    batch = max(offsets.elements - 1, 1) if offsets is not None else 1
    yield from attention(
        kind + (op.suffix or "_forward"), batch, q.shape[1], k.shape[1], -(-q.shape[0] // batch),
        -(-k.shape[0] // batch), q.shape[2], v.shape[2], op.math_dtype(q), causal=causal, window=window,
        flags=("varlen",))


_BY_HEADS = (
    "aten::_scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)",
    "aten::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal)",
    "aten::_scaled_dot_product_efficient_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, "
    "is_causal)",
    "aten::_scaled_dot_product_cudnn_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, "
    "is_causal)",
    "aten::_scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal)",
    "aten::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)")


@both(Family.ATTENTION, *_BY_HEADS)
@forward(Family.ATTENTION,
         "aten::_cudnn_attention_forward(query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, "
         "compute_log_sumexp, dropout_p, is_causal)",
         "aten::_scaled_dot_product_fused_attention_overrideable(query, key, value, attn_bias, dropout_p, is_causal)",
         "aten::_scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, "
         "cum_seq_k, max_q, max_k, dropout_p, is_causal)",
         "aten::_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, query, key, value, out, logsumexp, "
         "dropout_p, is_causal)",
         "aten::_scaled_dot_product_efficient_attention_backward(grad_out_, query, key, value, attn_bias, out, "
         "logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal)",
         "aten::_scaled_dot_product_cudnn_attention_backward(grad_out, query, key, value, out, logsumexp, philox_seed, "
         "philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)",
         "aten::_cudnn_attention_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, "
         "attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)",
         "aten::_scaled_dot_product_fused_attention_overrideable_backward(grad_out, query, key, value, attn_bias, "
         "grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)")
def _heads_second(op: Inputs) -> Iterator[OpCall]:
    """Yield attention with heads before tokens; the composite runs flash for 16-bit types without a mask."""
    q, k, v = map(op.tensor, ("query", "key", "value"))
    if op.short_name == "scaled_dot_product_attention":
        kind = "flash" if itemsize(q.dtype) <= 2 and not op.has("attn_mask") else "efficient"
    else:
        kind = next((one for one in ("flash", "efficient", "cudnn", "math") if one in op.name), "fused")
    yield from _of_tensors(op, kind, q, k, v, 1, 2, op.flag("is_causal"))


_FLASH_3 = ("(q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, "
            "max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, "
            "q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right)")


@forward(Family.ATTENTION,
         "aten::_flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
         "return_debug_mask, scale, window_size_left, window_size_right)",
         "aten::_flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, "
         "max_k, dropout_p, is_causal, rng_state, unused, scale, window_size_left, window_size_right)",
         "aten::_efficient_attention_forward(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
         "max_seqlen_k, dropout_p, custom_mask_type)",
         "aten::_efficient_attention_backward(grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, "
         "max_seqlen_q, max_seqlen_k, logsumexp, dropout_p, philox_seed, philox_offset, custom_mask_type)",
         "flash_attn::_flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal)",
         "flash_attn::_flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, "
         "causal)",
         "flash_attn::fwd(q, k, v)",
         "flash_attn::_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
         "dropout_p, softmax_scale, causal)",
         "flash_attn::_flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, "
         "cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal)",
         f"flash_attn_3::fwd{_FLASH_3}", f"flash_attn_3::_flash_attn_forward{_FLASH_3}",
         "flash_attn_3::bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, "
         "seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left, window_size_right)",
         "flash_attn_3::_flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, "
         "seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, window_size_left, window_size_right)")
def _tokens_first(op: Inputs) -> Iterator[OpCall]:
    """Yield attention with tokens before heads, or packed with offsets of sequences. A window gives the tokens before
    and after a token, -1 for all. Memory-efficient kernels' mask type is 0 for none, 1 and 2 for causal masks."""
    q, k, v = map(op.tensor, ("query", "key", "value") if "query" in op.names else ("q", "k", "v"))
    kind = "flash3" if "flash_attn_3" in op.name else "efficient" if "efficient" in op.name else "flash"
    causal = op.flag("is_causal") or op.flag("causal") or op.integer("custom_mask_type", 0) > 0
    window, offsets = window_of(op, causal), op.optional("cum_seq_q") or op.optional("cu_seqlens_q")
    if op.has("page_table"):
        yield from over_pages(op, "flash3_forward", q, k, v, offsets, op.tensor("page_table"),
                              op.integer("max_seqlen_k", 0), window)
    elif len(q.shape) == 3:
        yield from _packed(op, kind, q, k, v, offsets, causal, window)
    else:
        yield from _of_tensors(op, kind, q, k, v, 2, 1, causal, window)


def window_of(op: Inputs, causal: bool) -> int:
    """Return a window's tokens: those before a token, itself, and (unless causal) those after it; 0 for no window."""
    before, after = op.integer("window_size_left", -1), op.integer("window_size_right", -1)
    return 0 if before < 0 else before + 1 + (0 if causal else max(after, 0))


def over_pages(
    op: Inputs, kind: str, q: TensorSpec, k: TensorSpec, v: TensorSpec, offsets: TensorSpec | None, pages: TensorSpec,
    longest: int, window: int = 0,
) -> Iterator[OpCall]:
    """Yield attention of a step's tokens over a cache in pages: (pages, tokens of a page, heads, features).

    Sequences have the recorded longest length, else the assumed length of their context. Each sequence is assumed to
    have an equal number of the step's tokens.
    """
    heads, size = q.shape[-2:]
    batch = pages.shape[0] if offsets is None else max(offsets.elements - 1, 1)
    tokens = max(q.elements // max(heads * size * batch, 1), 1)
    length = longest or int(op.assume("context", pages.shape[-1] * k.shape[1] - tokens)) + tokens
    yield from attention(
        kind, batch, heads, k.shape[-2], tokens, max(length, tokens), size, v.shape[-1], op.math_dtype(q), causal=True,
        window=window, flags=op.assumptions(), kv_dtype=k.dtype)


HEAD_SIZE = 128
"""Features of a head where tensors have heads and features in one dimension and neither is recorded. Set: the size of
Llama and Mistral models."""


@forward(Family.ATTENTION, "vllm::unified_attention_with_output(query, key, value, output)",
         "vllm::unified_attention(query, key, value)",
         "sglang::unified_attention_with_output(query, key, value, output)")
def _unified(op: Inputs) -> Iterator[OpCall]:
    """Yield vLLM's attention: tensors are tokens of the step × heads × features, or tokens × (heads · features)."""
    q, k, v = map(op.tensor, ("query", "key", "value"))
    heads, kv_heads, size, v_size = _heads(op, q, k, v)
    sequences, each = _sequences(op, q.shape[0])
    context = max(int(op.assume("context", 0)), 0)
    yield from attention(
        "paged_forward", sequences, heads, kv_heads, each, context + each, size, v_size, op.math_dtype(q), causal=True,
        window=max(int(op.told("window", 0)), 0), flags=(*op.assumptions(), "varlen"),
        kv_dtype=op.told_type("kv", q.dtype))


def _sequences(op: Inputs, tokens: int) -> tuple[int, int]:
    """Return the number of sequences of a step, and of tokens in each."""
    sequences = max(int(op.assume("sequences", 1)), 1)
    return sequences, max(-(-tokens // sequences), 1)


@forward(Family.ATTENTION, "vllm::unified_mla_attention_with_output(query, key, rope, output)",
         "vllm::unified_mla_attention(query, key, rope)")
def _latent(op: Inputs) -> Iterator[OpCall]:
    """Yield attention over a latent cache that all heads share: each token's latent features and its rotated key.

    Queries have the size before absorption; decoding first multiplies them into the latent space, a separate product.
    """
    q, latent, rope = map(op.tensor, ("query", "key", "rope"))
    if len(q.shape) != 3:
        raise Unpriceable(f"{op.name}: {q.shape}")
    sequences, each = _sequences(op, q.shape[0])
    context = max(int(op.assume("context", 0)), 0)
    width = latent.shape[-1]
    yield from attention(
        "mla_forward", sequences, q.shape[1], 1, each, context + each, width + rope.shape[-1], width, op.math_dtype(q),
        causal=True, flags=(*op.assumptions(), "latent"), kv_dtype=op.told_type("kv", q.dtype))


def _heads(op: Inputs, q: TensorSpec, k: TensorSpec, v: TensorSpec) -> tuple[int, int, int, int]:
    """Return the numbers of query and key heads, and the head sizes of keys and values."""
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
    """Yield FlashAttention over a cache of (sequences, tokens, heads, features), or in pages. The sizes do not show how
    full the cache is. Without a table of pages, all sequences are assumed to have equally many."""
    q, k, v = map(op.tensor, ("q", "kcache", "vcache"))
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
    """Yield FlashAttention-2 as vLLM calls it: packed sequences, over a cache in pages if there is a page table."""
    q, k, v = map(op.tensor, ("q", "k", "v"))
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
    """Yield FlashInfer over (pages, keys and values, tokens, heads, features); a sequence's pages are not recorded."""
    q, cache = op.tensor("q"), op.tensor("paged_kv_cache")
    if len(q.shape) != 3 or len(cache.shape) != 5:
        raise Unpriceable(f"{op.name}: {q.shape}, {cache.shape}")
    # Tokens before heads ("NHD") or heads before tokens ("HND"): pages have 16 tokens and more, a device fewer heads.
    heads, per_page = sorted(cache.shape[2:4])
    sequences, each = (q.shape[0], 1) if "decode" in op.name else _sequences(op, q.shape[0])
    context = int(op.assume("context", max(cache.shape[0] * per_page // sequences - each, 0)))
    yield from attention(
        "paged_forward", sequences, q.shape[1], heads, each, context + each, q.shape[2], cache.shape[4],
        op.math_dtype(q), causal=True, window=int(op.told("window", 0)), flags=(*op.assumptions(), "varlen"),
        kv_dtype=cache.dtype)


@forward(Family.ATTENTION, "flashinfer::single_decode_with_kv_cache(q, k, v)",
         "flashinfer::single_prefill_with_kv_cache(q, k, v)")
def _single(op: Inputs) -> Iterator[OpCall]:
    """Yield attention of one sequence: keys and values as (tokens, heads, features)."""
    q, k, v = map(op.tensor, ("q", "k", "v"))
    q = TensorSpec((1, *q.shape), q.dtype) if len(q.shape) == 2 else q
    if len(q.shape) != 3 or len(k.shape) != 3:
        raise Unpriceable(f"{op.name}: {q.shape}, {k.shape}")
    yield from attention("paged_forward", 1, q.shape[1], k.shape[1], q.shape[0], k.shape[0], q.shape[2], v.shape[2],
                         op.math_dtype(q), causal=True, kv_dtype=k.dtype)

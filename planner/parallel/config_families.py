"""Decoders of Hugging Face's model types: a function for each family makes a ``TransformerShape`` of a ``config.json``.

What a field means and what it is where it is left out is that of the types' configuration classes in the package
``transformers``. Parameters come out as published (``tests/graph_predictor/test_configs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from planner.parallel.config_fields import MOST_LAYERS, ConfigFields
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import Latent, TransformerShape

IMBALANCE = 1.04
"""Tokens of the most loaded expert over the mean with a bias for each expert in place of an auxiliary loss (Wang et
al., 2024, "Auxiliary-Loss-Free Load Balancing", table 2; with the loss they find 1.5 to 1.7); of a rank's experts
together it is no more."""
SEQUENCE = 4096
"""Tokens of a sequence where nothing is said, or as many as the model takes if that is less: a usual length of
pre-training; a config's ``max_position_embeddings`` is what later stages stretch it to."""


def llama(f: ConfigFields) -> TransformerShape:
    """Llama, Mistral and what has their fields: RMSNorm, rotary positions, grouped queries, a gate."""
    heads = f.size("num_attention_heads")
    hidden = f.size("hidden_size")
    head = f.size("head_dim", default=0, least=0)
    if not head and hidden % heads:
        raise PlanError(f"hidden_size={hidden} in {f.where} does not divide into num_attention_heads={heads}, and "
                        "there is no head_dim; check the file.")
    return TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), hidden, heads, f.size("num_key_value_heads", default=heads),
        f.size("intermediate_size"), f.size("vocab_size"), sequence_of(f), head, gated=True, rms=True,
        bias=f.flag("mlp_bias", default=False), qkv_bias=f.flag("attention_bias", default=False), rotary=True,
        tied=f.flag("tie_word_embeddings", default=False))


def mistral(f: ConfigFields) -> TransformerShape:
    """Llama with a window on all layers, if any."""
    return _windowed(f, llama(f), lambda layer: True)


def phi3(f: ConfigFields) -> TransformerShape:
    """Llama with a window on all layers, if any."""
    return mistral(f)


def mixtral(f: ConfigFields) -> TransformerShape:
    """Llama with experts in every layer."""
    return replace(mistral(f), experts=f.size("num_local_experts"), top_k=top_k_of(f, f.size("num_local_experts")),
                   imbalance=IMBALANCE)


def qwen2(f: ConfigFields) -> TransformerShape:
    """Llama with biases of queries, keys and values."""
    shape = replace(llama(f), qkv_bias=True)
    if not f.flag("use_sliding_window", default=False):
        return shape
    first = f.size("max_window_layers", default=0, least=0)
    return _windowed(f, shape, lambda layer: layer >= first)


def qwen2_moe(f: ConfigFields) -> TransformerShape:
    """Qwen2 with experts in most layers, and one that all tokens go to."""
    return _sparse(f, qwen2(f), f.size("shared_expert_intermediate_size", default=0, least=0))


def qwen3(f: ConfigFields) -> TransformerShape:
    """Llama with heads of 128 and normalised queries and keys."""
    shape = replace(llama(f), head_size=f.size("head_dim", default=128), qk_norm=True)
    return _windowed(f, shape, lambda layer: True) if f.flag("use_sliding_window", default=False) else shape


def qwen3_moe(f: ConfigFields) -> TransformerShape:
    """Qwen3 with experts in most layers."""
    return _sparse(f, qwen3(f), 0)


def gemma(f: ConfigFields) -> TransformerShape:
    """Llama with wide heads and a tied matrix."""
    tied = f.flag("tie_word_embeddings", default=True)
    return replace(llama(f), head_size=f.size("head_dim", default=256), tied=tied)


def gemma2(f: ConfigFields) -> TransformerShape:
    """Gemma with norms on both sides, and a window on every other layer."""
    return _windowed(f, replace(gemma(f), norms=4), lambda layer: layer % 2 == 0, default=4096)


def gemma3(f: ConfigFields) -> TransformerShape:
    """Gemma 2 with normalised queries and keys, and windows on five of six layers; of the vision model its text part.
    """
    if f.has("text_config"):
        f.notes.append("The text part of the model is planned; its vision encoder is left out.")
        f = ConfigFields({"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
                          **f.within("text_config").values}, f"text_config of {f.where}", f.notes)
    every = f.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _windowed(f, replace(gemma(f), norms=4, qk_norm=True), lambda layer: (layer + 1) % every != 0, default=4096)


def gpt2(f: ConfigFields) -> TransformerShape:
    """LayerNorm, biases, learned positions, no gate."""
    hidden, heads = f.size("n_embd", "hidden_size"), f.size("n_head", "num_attention_heads")
    rows = f.size("n_positions", "n_ctx", "max_position_embeddings", default=1024)
    return TransformerShape(
        f.size("n_layer", "num_hidden_layers", most=MOST_LAYERS), hidden, heads, heads,
        f.size("n_inner", "intermediate_size", default=4 * hidden), f.size("vocab_size"), min(SEQUENCE, rows),
        positions=rows, tied=f.flag("tie_word_embeddings", default=True))


def gpt_neox(f: ConfigFields) -> TransformerShape:
    """LayerNorm, biases, rotary positions, no gate."""
    heads = f.size("num_attention_heads")
    hidden = f.size("hidden_size")
    return TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), hidden, heads, heads,
        f.size("intermediate_size", default=4 * hidden), f.size("vocab_size"), sequence_of(f), rotary=True,
        bias=f.flag("attention_bias", default=True), tied=f.flag("tie_word_embeddings", default=False))


def gpt_oss(f: ConfigFields) -> TransformerShape:
    """Llama with experts, biases everywhere, and a window on every other layer."""
    experts = f.size("num_local_experts", "num_experts")
    shape = replace(llama(f), bias=True, qkv_bias=True, experts=experts, top_k=top_k_of(f, experts),
                    imbalance=IMBALANCE)
    return _windowed(f, shape, lambda layer: layer % 2 == 0, default=128)


def deepseek(f: ConfigFields) -> TransformerShape:
    """Latent attention; dense layers, then layers with many experts and some that all tokens go to."""
    if f.has("kv_lora_rank") is None:
        raise PlanError(f"{f.where} lacks kv_lora_rank, without which latent attention's size is not known; give the "
                        "model's whole config.json.")
    latent = Latent(f.size("q_lora_rank", default=0, least=0), f.size("kv_lora_rank"), f.size("qk_nope_head_dim"),
                    f.size("qk_rope_head_dim"), f.size("v_head_dim"))
    heads = f.size("num_attention_heads")
    dense = TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), f.size("hidden_size"), heads, heads, f.size("intermediate_size"),
        f.size("vocab_size"), sequence_of(f), gated=True, rms=True, bias=False, rotary=True, latent=latent,
        tied=f.flag("tie_word_embeddings", default=False))
    experts = f.size("n_routed_experts", default=0, least=0)
    if not experts:
        return dense
    width = f.size("moe_intermediate_size")
    routed = replace(dense, ffn=width, experts=experts, top_k=top_k_of(f, experts), imbalance=IMBALANCE,
                     shared_ffn=width * f.size("n_shared_experts", default=0, least=0, most=experts))
    first = f.size("first_k_dense_replace", default=0, least=0)
    every = f.size("moe_layer_freq", default=1)
    kinds = [routed if layer >= first and layer % every == 0 else dense for layer in range(dense.layers)]
    return replace(stacked(routed, kinds), predictions=f.size("num_nextn_predict_layers", default=0, least=0, most=16))


def minimax_m2(f: ConfigFields) -> TransformerShape:
    """Llama with experts in every layer, and queries and keys normalised."""
    experts = f.size("num_local_experts")
    return replace(llama(f), qk_norm=True, experts=experts, top_k=top_k_of(f, experts), imbalance=IMBALANCE)


def sparse_deepseek(f: ConfigFields) -> TransformerShape:
    """DeepSeek's latent attention over tokens that an indexer chooses (V3.2, GLM-5)."""
    f.notes.append("Attention is taken to be of all tokens; what chooses some of them (the indexer) is left out.")
    return deepseek(f)


def falcon(f: ConfigFields) -> TransformerShape:
    """LayerNorm, one or few heads of keys and values, attention and feed-forward part side by side."""
    hidden, heads = f.size("hidden_size", "n_embed"), f.size("num_attention_heads", "n_head")
    newer = f.flag("new_decoder_architecture", default=False)
    shared = f.flag("multi_query", default=True) and not newer
    kv_heads = 1 if shared else f.size("num_kv_heads", "n_head_kv", default=heads)
    rotary = not f.flag("alibi", default=False)
    beside = f.flag("parallel_attn", default=True)
    return TransformerShape(
        f.size("num_hidden_layers", "n_layer", most=MOST_LAYERS), hidden, heads, kv_heads,
        f.size("ffn_hidden_size", default=4 * hidden), f.size("vocab_size"), sequence_of(f, 2048),
        bias=f.flag("bias", default=False), rotary=rotary, positions=0, norms=1 if beside and not newer else 2,
        tied=f.flag("tie_word_embeddings", default=True))


def mpt(f: ConfigFields) -> TransformerShape:
    """LayerNorm, no gate, ALiBi or learned positions."""
    hidden, heads = f.size("d_model"), f.size("n_heads")
    attention = f.within("attn_config")
    rows = f.size("max_seq_len", default=2048)
    return TransformerShape(
        f.size("n_layers", most=MOST_LAYERS), hidden, heads, attention.size("kv_n_heads", default=heads),
        hidden * f.size("expansion_ratio", default=4), f.size("vocab_size"), min(SEQUENCE, rows),
        bias=not f.flag("no_bias", default=True), positions=0 if attention.flag("alibi", default=True) else rows,
        tied=f.flag("tie_word_embeddings", default=True))


def opt(f: ConfigFields) -> TransformerShape:
    """LayerNorm, biases, learned positions, no gate."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    if f.size("word_embed_proj_dim", default=hidden) != hidden:
        raise PlanError(f"{f.where} has an embedding of another width than its layers, which no plan knows; give a "
                        "model without such a projection.")
    rows = f.size("max_position_embeddings", default=2048)
    return TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), hidden, heads, heads, f.size("ffn_dim"), f.size("vocab_size"),
        min(SEQUENCE, rows), positions=rows + 2, bias=f.flag("enable_bias", default=True),
        tied=f.flag("tie_word_embeddings", default=True))


def bloom(f: ConfigFields) -> TransformerShape:
    """LayerNorm, biases, ALiBi, no gate."""
    hidden, heads = f.size("hidden_size", "n_embed"), f.size("n_head", "num_attention_heads")
    return TransformerShape(
        f.size("n_layer", "num_hidden_layers", most=MOST_LAYERS), hidden, heads, heads, 4 * hidden,
        f.size("vocab_size"), min(SEQUENCE, f.size("seq_length", default=2048)), positions=0,
        tied=f.flag("tie_word_embeddings", default=True))


def dbrx(f: ConfigFields) -> TransformerShape:
    """Grouped queries, LayerNorm, experts in every layer."""
    hidden, heads = f.size("d_model"), f.size("n_heads")
    of = f.within("ffn_config")
    experts = of.size("moe_num_experts", default=4)
    return TransformerShape(
        f.size("n_layers", most=MOST_LAYERS), hidden, heads, f.within("attn_config").size("kv_n_heads", default=heads),
        of.size("ffn_hidden_size"), f.size("vocab_size"), min(SEQUENCE, f.size("max_seq_len", default=2048)),
        gated=True, bias=False, rotary=True, experts=experts, top_k=of.size("moe_top_k", default=1, most=experts),
        imbalance=IMBALANCE, tied=f.flag("tie_word_embeddings", default=False))


def grok(f: ConfigFields) -> TransformerShape:
    """Llama with experts in every layer, norms on both sides and a tied matrix."""
    experts = f.size("num_experts", "num_local_experts")
    return replace(llama(f), norms=4, experts=experts, top_k=top_k_of(f, experts), imbalance=IMBALANCE,
                   tied=f.flag("tie_word_embeddings", default=True))


def by_fields(f: ConfigFields) -> TransformerShape:
    """A type that is not known: what its fields are usually taken to mean."""
    if f.has("kv_lora_rank"):
        return deepseek(f)
    if f.has("n_embd"):
        return gpt2(f)
    if f.has("num_local_experts"):
        return mixtral(f)
    if f.has("num_experts", "n_routed_experts"):
        return _sparse(f, llama(f), f.size("shared_expert_intermediate_size", default=0, least=0))
    return mistral(f)


FAMILIES: dict[str, Callable[[ConfigFields], TransformerShape]] = {
    "llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen2_moe": qwen2_moe, "qwen3": qwen3,
    "qwen3_moe": qwen3_moe, "gemma": gemma, "gemma2": gemma2, "gemma3": gemma3, "gemma3_text": gemma3, "phi3": phi3,
    "gpt2": gpt2, "gpt_neox": gpt_neox, "gpt_oss": gpt_oss, "deepseek_v2": deepseek, "deepseek_v3": deepseek,
    "kimi_k2": deepseek, "deepseek_v32": sparse_deepseek,
    "glm_moe_dsa": sparse_deepseek, "minimax_m2": minimax_m2,
    "falcon": falcon, "mpt": mpt, "opt": opt, "bloom": bloom, "dbrx": dbrx, "grok-1": grok}
"""Model types that are known, by their ``model_type``."""


def stacked(usual: TransformerShape, kinds: Sequence[TransformerShape]) -> TransformerShape:
    """Return the decoder whose blocks are of these kinds, one after the other."""
    runs = [replace(kind, layers=len(list(group))) for kind, group in groupby(kinds)]
    return runs[0] if len(runs) == 1 else replace(usual, layers=len(kinds), stack=tuple(runs))


def sequence_of(f: ConfigFields, default: int = SEQUENCE) -> int:
    """Return the tokens of a usual sequence of pre-training."""
    return min(SEQUENCE, f.size("max_position_embeddings", default=default))


def top_k_of(f: ConfigFields, experts: int) -> int:
    """Return the experts of a token."""
    return f.size("num_experts_per_tok", "experts_per_token", "num_selected_experts", default=2, most=experts)


def _windowed(f: ConfigFields, shape: TransformerShape, near: Callable[[int], bool], default: int = 0
              ) -> TransformerShape:
    """The decoder with a window where ``layer_types`` says so, else on the layers that the type has it on."""
    window = f.size("sliding_window", default=default, least=0)
    kinds = f.words("layer_types")
    if kinds and len(kinds) != shape.layers:
        raise PlanError(f"{f.where} names the kind of {len(kinds)} layers (layer_types) and has {shape.layers} "
                        "(num_hidden_layers); check the file.")
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise PlanError(f"{f.where} has layers of the kind {unknown[0]}, which no plan knows; only full and sliding "
                        "attention are known.")
    if not window:
        return shape
    rows = [kind == "sliding_attention" for kind in kinds] or [near(layer) for layer in range(shape.layers)]
    return stacked(shape, [replace(shape, window=window) if row else shape for row in rows])


def _sparse(f: ConfigFields, dense: TransformerShape, shared: int) -> TransformerShape:
    """The decoder with experts in every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    experts = f.size("num_experts", "n_routed_experts")
    routed = replace(dense, ffn=f.size("moe_intermediate_size", "intermediate_size"), experts=experts,
                     top_k=top_k_of(f, experts), shared_ffn=shared, imbalance=IMBALANCE)
    if dense.stack:
        raise PlanError(f"{f.where} has windows on some layers and experts on some, which no plan knows together; give "
                        "use_sliding_window=false.")
    every, plain = f.size("decoder_sparse_step", default=1), set(f.sizes("mlp_only_layers"))
    return stacked(routed, [routed if layer not in plain and (layer + 1) % every == 0 else dense
                            for layer in range(dense.layers)])

"""Decoders of Hugging Face's model types: a function per family makes a ``TransformerShape`` of a ``config.json``.

Meanings and defaults of fields are those of the types' configuration classes in the package ``transformers``. Parameter
counts come out as published (``tests/planner/test_configs.py``). Some families have state-space mixers: Mamba-2 in all
layers, or in some layers with attention in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from graph_predictor.sizes.retrace import MOST
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import Latent, StateSpace, TransformerShape

MOST_LAYERS = 10_000
"""Ten times the deepest known decoder; a larger number is taken for damage."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of a config by name. A value may be known by several names.

    Attributes:
        values: the fields of the file, or of an object within it.
        where: the file, for messages.
        notes: assumptions that were made while fields were read.
        asked: names of all fields that were looked up.
    """

    values: Mapping[str, Any]
    where: str
    notes: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def has(self, *names: str) -> str | None:
        """Return the first of these names that has a value; ``None`` if none has."""
        self.asked.update(names)
        return next((name for name in names if self.values.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a whole number, by the first of its names that has a value.

        Raises:
            PlanError: the number is missing and has no default, is not whole, or is out of range.
        """
        name = self.has(*names)
        if name is None:
            if default is None:
                raise PlanError(f"{self.where} lacks {names[0]}, without which the decoder's size is not known; give "
                                "the model's whole config.json.")
            return default
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no size of a decoder: it is a whole number "
                            f"from {least} to {most:,}; check the file.")
        return value

    def sizes(self, name: str) -> list[int]:
        """Return a list of whole numbers, for example indices of layers; empty where the field is absent."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(
                not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < MOST_LAYERS for each in value):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no list of layers; check the file.")
        return value

    def words(self, name: str) -> list[str]:
        """Return a list of words; empty where the field is absent."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(not isinstance(each, str) for each in value):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no list of words; check the file.")
        return value

    def word(self, name: str) -> str:
        """Return a word; "" where the field is absent."""
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no word; check the file.")
        return value or ""

    def flag(self, *names: str, default: bool) -> bool:
        """Return a boolean by the first of its names that has a value, else ``default``. Raises ``PlanError``."""
        name = self.has(*names)
        if name is None:
            return default
        value = self.values[name]
        if not isinstance(value, bool):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is neither true nor false; check the file.")
        return value

    def within(self, name: str) -> ConfigFields:
        """Return the fields of an object inside this object; no fields if it is absent."""
        value = self._value(name)
        if value is not None and not isinstance(value, Mapping):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no object of fields; check the file.")
        return ConfigFields(value or {}, f"{name} of {self.where}", self.notes)

    def _value(self, name: str) -> Any:
        self.asked.add(name)
        return self.values.get(name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


IMBALANCE = 1.04
"""Tokens of the most loaded expert over the mean, with a bias for each expert in place of an auxiliary loss. Source:
Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing", table 2; with the loss they find 1.5 to 1.7. Over a rank's
experts together the ratio is no larger."""
SEQUENCE = 4096
"""Default tokens of a sequence, a usual length of pre-training; fewer if the model takes fewer. A config's
``max_position_embeddings`` is not used, because later training stages stretch sequences to it."""


Family = Callable[[ConfigFields], TransformerShape]
"""Makes the decoder of one model type from a config's fields."""


def _like(family: Family, **values: Any) -> Family:
    """Return a family that changes some values of another family: to constants, or to functions of the fields."""
    return lambda f: replace(family(f), **{
        name: value(f) if callable(value) else value for name, value in values.items()})


def _flag(name: str, default: bool) -> Callable[[ConfigFields], bool]:
    return lambda f: f.flag(name, default=default)


def _head(default: int) -> Callable[[ConfigFields], int]:
    return lambda f: f.size("head_dim", default=default)


def _near(family: Family, near: Callable[[int], bool], default: int = 0, switch: str = "") -> Family:
    """Return a family with sliding windows: on layers that ``layer_types`` names, else on layers where ``near`` is
    true. If ``switch`` names a field, only where that field is true."""
    return lambda f: family(f) if switch and not f.flag(switch, default=False) else _windowed(
        f, family(f), near, default)


def _routed(family: Family, *names: str) -> Family:
    """Return a family with experts in every layer; ``names`` are the fields with their number."""
    def made(f: ConfigFields) -> TransformerShape:
        experts = f.size(*names)
        return replace(family(f), experts=experts, top_k=top_k_of(f, experts), imbalance=IMBALANCE)

    return made


def _shared(f: ConfigFields) -> int:
    return f.size("shared_expert_intermediate_size", default=0, least=0)


def llama(f: ConfigFields) -> TransformerShape:
    """Llama, Mistral and types with their fields: RMSNorm, rotary positions, grouped queries, gated feed-forward."""
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


def qwen2(f: ConfigFields) -> TransformerShape:
    """Llama with biases of queries, keys and values."""
    shape = replace(llama(f), qkv_bias=True)
    if not f.flag("use_sliding_window", default=False):
        return shape
    first = f.size("max_window_layers", default=0, least=0)
    return _windowed(f, shape, lambda layer: layer >= first)


def gemma3(f: ConfigFields) -> TransformerShape:
    """Gemma 2 with normalised queries and keys, and windows on five of six layers. A vision model's text part counts.
    """
    if f.has("text_config"):
        f.notes.append("The text part of the model is planned; its vision encoder is left out.")
        f = ConfigFields({"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
                          **f.within("text_config").values}, f"text_config of {f.where}", f.notes)
    every = f.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return _windowed(f, replace(GEMMA(f), norms=4, qk_norm=True), lambda layer: (layer + 1) % every != 0, default=4096)


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


def deepseek(f: ConfigFields) -> TransformerShape:
    """Latent attention; dense layers, then layers with many routed experts and some shared by all tokens."""
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


def sparse_deepseek(f: ConfigFields) -> TransformerShape:
    """DeepSeek's latent attention over tokens that an indexer chooses (V3.2, GLM-5)."""
    f.notes.append("Attention is taken to be of all tokens; what chooses some of them (the indexer) is left out.")
    return deepseek(f)


def falcon(f: ConfigFields) -> TransformerShape:
    """LayerNorm, one or few key and value heads, attention parallel to the feed-forward part."""
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


def by_fields(f: ConfigFields) -> TransformerShape:
    """Decoder of an unknown model type, with the usual meanings of its fields."""
    if f.has("kv_lora_rank"):
        return deepseek(f)
    if f.has("n_embd"):
        return gpt2(f)
    if f.has("num_local_experts"):
        return FAMILIES["mixtral"](f)
    if f.has("num_experts", "n_routed_experts"):
        return _sparse(f, llama(f), _shared(f))
    return MISTRAL(f)


MISTRAL = _near(llama, lambda layer: True)
QWEN3 = _near(_like(llama, head_size=_head(128), qk_norm=True), lambda layer: True, switch="use_sliding_window")
GEMMA = _like(llama, head_size=_head(256), tied=_flag("tie_word_embeddings", default=True))
FAMILIES: dict[str, Family] = {
    "llama": llama,
    "mistral": MISTRAL,
    "phi3": MISTRAL,
    "mixtral": _routed(MISTRAL, "num_local_experts"),
    "qwen2": qwen2,
    "qwen2_moe": lambda f: _sparse(f, qwen2(f), _shared(f)),
    "qwen3": QWEN3,
    "qwen3_moe": lambda f: _sparse(f, QWEN3(f), 0),
    "gemma": GEMMA,
    "gemma2": _near(_like(GEMMA, norms=4), lambda layer: layer % 2 == 0, default=4096),
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": _near(_routed(_like(llama, bias=True, qkv_bias=True), "num_local_experts", "num_experts"),
                     lambda layer: layer % 2 == 0, default=128),
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "kimi_k2": deepseek,
    "deepseek_v32": sparse_deepseek,
    "glm_moe_dsa": sparse_deepseek,
    "minimax_m2": _routed(_like(llama, qk_norm=True), "num_local_experts"),
    "falcon": falcon,
    "mpt": mpt,
    "opt": opt,
    "bloom": bloom,
    "dbrx": dbrx,
    "grok-1": _routed(_like(llama, norms=4, tied=_flag("tie_word_embeddings", default=True)),
                      "num_experts", "num_local_experts"),
}
"""Families without state-space mixers, by ``model_type``."""


def stacked(usual: TransformerShape, kinds: Sequence[TransformerShape]) -> TransformerShape:
    """Return a decoder with blocks of these kinds, in order."""
    runs = [replace(kind, layers=len(list(group))) for kind, group in groupby(kinds)]
    return runs[0] if len(runs) == 1 else replace(usual, layers=len(kinds), stack=tuple(runs))


def sequence_of(f: ConfigFields, default: int = SEQUENCE) -> int:
    """Return the tokens of a usual pre-training sequence."""
    return min(SEQUENCE, f.size("max_position_embeddings", default=default))


def top_k_of(f: ConfigFields, experts: int) -> int:
    """Return the number of experts that process each token."""
    return f.size("num_experts_per_tok", "experts_per_token", "num_selected_experts", default=2, most=experts)


def _windowed(f: ConfigFields, shape: TransformerShape, near: Callable[[int], bool], default: int = 0
              ) -> TransformerShape:
    """Return the decoder with windows on layers that ``layer_types`` names, else where ``near`` is true."""
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
    """Return the decoder with experts in every ``decoder_sparse_step``-th layer, except ``mlp_only_layers``."""
    experts = f.size("num_experts", "n_routed_experts")
    routed = replace(dense, ffn=f.size("moe_intermediate_size", "intermediate_size"), experts=experts,
                     top_k=top_k_of(f, experts), shared_ffn=shared, imbalance=IMBALANCE)
    if dense.stack:
        raise PlanError(f"{f.where} has windows on some layers and experts on some, which no plan knows together; give "
                        "use_sliding_window=false.")
    every, plain = f.size("decoder_sparse_step", default=1), set(f.sizes("mlp_only_layers"))
    return stacked(routed, [routed if layer not in plain and (layer + 1) % every == 0 else dense
                            for layer in range(dense.layers)])


_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SAME = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names of layer kinds in transformers version 5 and later."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of a mixer's fields in the configs of one model type."""

    heads: str = "mamba_n_heads"
    head_size: str = "mamba_d_head"
    state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    window: str = "mamba_d_conv"
    chunk: str = "mamba_chunk_size"
    expand: str = "mamba_expand"
    bias: str = "mamba_proj_bias"
    convolution_bias: str = "mamba_conv_bias"


_USUAL = _Names()
_PLAIN = _Names("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "chunk_size", "expand", "use_bias",
                "use_conv_bias")
_NEMOTRON = replace(_PLAIN, heads="mamba_num_heads", head_size="mamba_head_dim", state="ssm_state_size",
                    bias="mamba_proj_bias")


def mamba2(f: ConfigFields) -> TransformerShape:
    """A Mamba-2 mixer in every block, without attention or feed-forward part."""
    hidden = f.size("hidden_size")
    state = _state(f, hidden, _PLAIN, groups=8)
    return TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), hidden, 1, 1, 0, f.size("vocab_size"), sequence_of(f),
        rms=True, bias=False, norms=1, rotary=True, attends=False, state=state,
        tied=f.flag("tie_word_embeddings", default=False))


def bamba(f: ConfigFields) -> TransformerShape:
    """Llama with mixers in place of attention, except in layers of ``attn_layer_indices``."""
    shape = llama(f)
    mixed = replace(shape, attends=False, state=_state(f, shape.hidden, _USUAL, state=256))
    attended = set(f.sizes("attn_layer_indices"))
    return stacked(mixed, [shape if layer in attended else mixed for layer in range(shape.layers)])


def falcon_h1(f: ConfigFields) -> TransformerShape:
    """Llama with a mixer parallel to attention in every layer."""
    shape = llama(f)
    state = _state(f, shape.hidden, _USUAL, inner=f.size("mamba_d_ssm", default=1024), state=256,
                   norm=f.flag("mamba_rms_norm", default=False))
    return replace(shape, state=state)


def granite_hybrid(f: ConfigFields) -> TransformerShape:
    """Mixers and attention in the order of ``layer_types``. Each has a feed-forward part, or routed experts and an
    expert shared by all tokens."""
    shape = replace(llama(f), tied=f.flag("tie_word_embeddings", default=True))
    shared = f.size("shared_intermediate_size", default=1024)
    experts = f.size("num_local_experts", default=0, least=0)
    shape = replace(shape, ffn=shared) if not experts else replace(
        shape, experts=experts, top_k=top_k_of(f, experts), shared_ffn=shared, imbalance=IMBALANCE)
    mixed = replace(shape, attends=False, state=_state(f, shape.hidden, _USUAL, state=256))
    kinds = {"mamba": mixed, "attention": shape}
    words = [_SAME.get(word, word) for word in f.words("layer_types") or f.words("layers_block_type")]
    return stacked(mixed, _named(f, words or ["mamba"] * shape.layers, "layer_types", shape.layers, kinds))


def nemotron_h(f: ConfigFields) -> TransformerShape:
    """One part in each layer: a mixer, attention, a feed-forward part or experts, in the order of a pattern."""
    pattern = f.word("hybrid_override_pattern")
    words = [_SAME.get(word, word) for word in f.words("layers_block_type")] or [
        _LETTERS.get(letter, letter) for letter in pattern]
    if not words:
        raise PlanError(f"{f.where} lacks hybrid_override_pattern, without which the layers' kinds are not known; give "
                        "the model's whole config.json.")
    layers = f.size("num_hidden_layers", default=len(words), most=MOST_LAYERS)
    attended = TransformerShape(
        layers, f.size("hidden_size"), f.size("num_attention_heads"), f.size("num_key_value_heads", default=8), 0,
        f.size("vocab_size"), sequence_of(f), f.size("head_dim", "attention_head_dim", default=128), rms=True,
        bias=f.flag("mlp_bias", default=False), qkv_bias=f.flag("attention_bias", default=False), norms=1, rotary=False,
        positions=0, tied=f.flag("tie_word_embeddings", default=False))
    plain = replace(attended, attends=False)
    kinds = {"attention": attended, "mamba": replace(
        plain, state=_state(f, plain.hidden, _NEMOTRON, groups=8, chunk=128))}
    if "mlp" in words:
        kinds["mlp"] = replace(plain, ffn=f.size("intermediate_size"))
    if "moe" in words:
        if f.size("moe_latent_size", default=0, least=0):
            raise PlanError(f"{f.where} has experts on a narrower stream (moe_latent_size), which no plan knows; give "
                            "a model without them.")
        experts = f.size("n_routed_experts")
        shared = f.size("moe_shared_expert_intermediate_size", default=0, least=0)
        kinds["moe"] = replace(plain, ffn=f.size("moe_intermediate_size"), experts=experts, top_k=top_k_of(f, experts),
                               shared_ffn=shared * f.size("n_shared_experts", default=1, least=0, most=experts),
                               imbalance=IMBALANCE)
    inner = kinds.get("moe", kinds.get("mlp", plain))
    usual = replace(inner, state=kinds["mamba"].state)
    return stacked(usual, _named(f, words, "hybrid_override_pattern", layers, kinds))


def qwen3_next(f: ConfigFields) -> TransformerShape:
    """Gated delta rules, with attention instead in every few layers; experts in all layers."""
    f.notes.append("Gated delta rules are taken to be Mamba-2 mixers of their sizes, which move and multiply as much.")
    shape = llama(f)
    experts = f.size("num_experts")
    shape = replace(shape, qk_norm=True, ffn=f.size("moe_intermediate_size"), experts=experts,
                    top_k=top_k_of(f, experts), imbalance=IMBALANCE,
                    shared_ffn=f.size("shared_expert_intermediate_size", default=0, least=0))
    heads, groups = f.size("linear_num_value_heads"), f.size("linear_num_key_heads")
    if heads % groups:
        raise PlanError(f"{f.where} has {heads} heads of values and {groups} of keys in its delta rules, which do not "
                        "divide them; check the file.")
    state = StateSpace(heads, f.size("linear_value_head_dim"), f.size("linear_key_head_dim"), groups,
                       f.size("linear_conv_kernel_dim", default=4), 64, convolution_bias=False)
    mixed = replace(shape, attends=False, state=state)
    words = [_SAME.get(word, word) for word in f.words("layer_types")]
    every = f.size("full_attention_interval", default=4)
    words = words or ["attention" if (layer + 1) % every == 0 else "mamba" for layer in range(shape.layers)]
    return stacked(mixed, _named(f, words, "layer_types", shape.layers, {"mamba": mixed, "attention": shape}))


HYBRIDS: dict[str, Family] = {
    "mamba2": mamba2, "bamba": bamba, "falcon_h1": falcon_h1, "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h, "qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_next}
"""Families with state-space mixers, by ``model_type``."""
def _named(f: ConfigFields, words: list[str], field: str, layers: int, kinds: Mapping[str, TransformerShape]
           ) -> list[TransformerShape]:
    """Return the block of each layer from the names of the layers' kinds. Raises ``PlanError``."""
    if len(words) != layers:
        raise PlanError(f"{f.where} names the kind of {len(words)} layers ({field}) and has {layers} "
                        "(num_hidden_layers); check the file.")
    if unknown := sorted(set(words) - set(kinds)):
        raise PlanError(f"{f.where} has layers of the kind {unknown[0][:40]!r}, which no plan knows; known are "
                        f"{', '.join(sorted(kinds))}.")
    return [kinds[word] for word in words]


def _state(f: ConfigFields, hidden: int, names: _Names, *, inner: int = 0, state: int = 128, groups: int = 1,
           chunk: int = 256, norm: bool = True) -> StateSpace:
    """Return the mixer from fields named by ``names``; the other arguments are defaults of missing fields."""
    inner = inner or hidden * f.size(names.expand, default=2, most=64)
    heads = f.size(names.heads, default=128)
    size = inner // heads if f.values.get(names.head_size) == "auto" else f.size(names.head_size, default=64)
    groups = f.size(names.groups, default=groups, most=heads)
    if heads % groups:
        raise PlanError(f"{f.where} has {heads} heads of a state-space mixer in {groups} groups, which do not divide "
                        "them; check the file.")
    return StateSpace(heads, max(size, 1), f.size(names.state, default=state), groups, f.size(names.window, default=4),
                      f.size(names.chunk, default=chunk), f.flag(names.bias, default=False),
                      f.flag(names.convolution_bias, default=True), norm)

"""Decoders of Hugging Face's model types with state-space mixers: all Mamba-2, or some and attention in others.

What fields mean is that of the types' configuration classes in the package ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner.parallel.config_families import IMBALANCE, llama, sequence_of, stacked, top_k_of
from planner.parallel.config_fields import MOST_LAYERS, ConfigFields
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import StateSpace, TransformerShape

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SAME = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names of the kinds of layers in transformers since its version 5."""


@dataclass(frozen=True, slots=True)
class _Names:
    """A type's names of a mixer's fields."""

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
    """A mixer in every block and nothing else."""
    hidden = f.size("hidden_size")
    state = _state(f, hidden, _PLAIN, groups=8)
    return TransformerShape(
        f.size("num_hidden_layers", most=MOST_LAYERS), hidden, 1, 1, 0, f.size("vocab_size"), sequence_of(f),
        rms=True, bias=False, norms=1, rotary=True, attends=False, state=state,
        tied=f.flag("tie_word_embeddings", default=False))


def bamba(f: ConfigFields) -> TransformerShape:
    """Llama with mixers in place of attention but in the layers that it names."""
    shape = llama(f)
    mixed = replace(shape, attends=False, state=_state(f, shape.hidden, _USUAL, state=256))
    attended = set(f.sizes("attn_layer_indices"))
    return stacked(mixed, [shape if layer in attended else mixed for layer in range(shape.layers)])


def falcon_h1(f: ConfigFields) -> TransformerShape:
    """Llama with a mixer beside attention in every layer."""
    shape = llama(f)
    state = _state(f, shape.hidden, _USUAL, inner=f.size("mamba_d_ssm", default=1024), state=256,
                   norm=f.flag("mamba_rms_norm", default=False))
    return replace(shape, state=state)


def granite_hybrid(f: ConfigFields) -> TransformerShape:
    """Mixers and attention, as layer_types says, each with a feed-forward part, or experts and one beside them that
    all tokens go to."""
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
    """One part in a layer: a mixer, attention, a feed-forward part or experts, as the pattern says."""
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
    """Gated delta rules in place of attention but in every few layers, with experts in all."""
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


HYBRIDS: dict[str, Callable[[ConfigFields], TransformerShape]] = {
    "mamba2": mamba2, "bamba": bamba, "falcon_h1": falcon_h1, "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h, "qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_next}
"""Model types that are known, by their ``model_type``."""
def _named(f: ConfigFields, words: list[str], field: str, layers: int, kinds: Mapping[str, TransformerShape]
           ) -> list[TransformerShape]:
    """The block of each layer by the names of their kinds."""
    if len(words) != layers:
        raise PlanError(f"{f.where} names the kind of {len(words)} layers ({field}) and has {layers} "
                        "(num_hidden_layers); check the file.")
    if unknown := sorted(set(words) - set(kinds)):
        raise PlanError(f"{f.where} has layers of the kind {unknown[0][:40]!r}, which no plan knows; known are "
                        f"{', '.join(sorted(kinds))}.")
    return [kinds[word] for word in words]


def _state(f: ConfigFields, hidden: int, names: _Names, *, inner: int = 0, state: int = 128, groups: int = 1,
           chunk: int = 256, norm: bool = True) -> StateSpace:
    """The mixer by a type's names of its fields, and what these are where they are left out."""
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

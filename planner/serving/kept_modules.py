"""``with_kept_modules``: the linear layers that a quantised checkpoint keeps in the model's own dtype.

A ``quantization_config`` names these modules one by one or by patterns: ``modules_to_not_convert`` (Hugging Face's fp8,
awq, gptq, bitsandbytes), ``ignore`` (compressed-tensors: names, or ``re:`` and an expression; modelopt: wildcards) and
``exclude_modules`` (modelopt). Embedding and logits are always in the model's own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import TransformerShape

KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
ATTENTION, FEED_FORWARD, EXPERTS = PARTS = ("attention", "feed-forward part", "experts")
"""Parts of a block that ``TransformerShape.kept`` names."""
_OF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_OF_LATENT = ("self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MOST_PATTERNS = 200
"""Most patterns for any layer, and for one layer, that are compared with names: checkpoints have a few."""
_LONGEST, _MOST_REPEATED = 200, 2
"""Most letters of a pattern, and most repetitions in it. Chosen, so that no pattern takes long to match."""
_LAYER = re.compile(r"layers\\?\.([0-9]{1,6})(?=[.\\]|$)")
_UNSAFE = re.compile(r"\)[*+{]|\\[1-9]|\(\?[^:]")
"""Repeated groups, back references, and look-around groups."""
_REPEATED = re.compile(r"(?<!\\)(?<!\\d)(?:[*+]|\{[0-9]*,[0-9]*\})")
"""Repetitions of anything but digits."""
_BEFORE = ("model.", "model.language_model.", "language_model.model.")
"""Prefixes of ``layers`` in names of modules; a vision encoder has layers with other prefixes."""


def kept_patterns(said: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names and patterns of modules that a ``quantization_config`` leaves unquantised.

    Raises:
        PlanError: a list is invalid, or has items that are not text.
    """
    found: dict[str, None] = {}
    for key in KEYS:
        given = said.get(key) or []
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
            raise PlanError(f"The quantization_config's {key} is no list of modules' names ({str(given)[:40]}); "
                            "correct it, or leave it out.")
        found.update(dict.fromkeys(each for each in given if each and "vis" not in each))
    return tuple(found)


def with_kept_modules(shape: TransformerShape, patterns: Sequence[str]) -> TransformerShape:
    """Return a decoder whose runs name their unquantised parts; a part counts if most of its modules are kept."""
    if not patterns:
        return shape
    keeps = _Keeps(patterns)
    layers: list[TransformerShape] = []
    for run in shape.runs:
        for _ in range(run.layers):
            layers.append(replace(run, layers=1, stack=(), kept=keeps.of(run, len(layers))))
    if not any(layer.kept for layer in layers):
        return shape
    runs = [(kind, len(list(group))) for kind, group in groupby(layers)]
    stack = tuple(replace(kind, layers=count) for kind, count in runs)
    return replace(shape, stack=stack)


def kept_notes(shape: TransformerShape) -> list[str]:
    """Return a sentence on the unquantised parts; nothing if there are none."""
    counts = {part: sum(run.layers for run in shape.runs if part in run.kept) for part in PARTS}
    said = [f"{part} of {count:,}" for part, count in counts.items() if count]
    return [f"Not quantised, as the checkpoint says: {', '.join(said)} of {shape.layers:,} layers."] if said else []


class _Keeps:
    """Names and patterns of kept modules. Names are in a set, because a checkpoint may name thousands.

    Args:
        patterns: names and patterns of modules.

    Raises:
        PlanError: there are too many patterns, or one is invalid or of a kind that may take forever.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        plain = [each for each in patterns if "*" not in each and not each.startswith("re:")]
        self._names = {each[each.find("layers."):] if "layers." in each else each for each in plain}
        self._patterns: dict[int | None, list[re.Pattern[str]]] = {}  # by the layer that the pattern names
        for each in dict.fromkeys(patterns):
            if "*" in each or each.startswith("re:"):
                layer = _LAYER.search(each)
                self._patterns.setdefault(int(layer[1]) if layer else None, []).append(_compiled(each))
        if max(map(len, self._patterns.values()), default=0) > MOST_PATTERNS:
            raise PlanError(f"The quantization_config has more than {MOST_PATTERNS} patterns of modules that stay as "
                            "they are; name the modules, or leave the patterns out and give --precision.")

    def of(self, kind: TransformerShape, layer: int) -> tuple[str, ...]:
        """Return the parts of a layer that stay unquantised."""
        attention = _OF_LATENT if kind.latent is not None else _OF_ATTENTION
        parts: dict[str, tuple[str, ...]] = {ATTENTION: attention if kind.attends else ()}
        if kind.experts:
            parts[EXPERTS] = tuple(f"mlp.experts.0.{each}" for each in _PROJECTIONS)
            if kind.shared_ffn:
                parts[FEED_FORWARD] = tuple(f"mlp.shared_experts.{each}" for each in _PROJECTIONS)
        elif kind.ffn:
            parts[FEED_FORWARD] = tuple(f"mlp.{each}" for each in _PROJECTIONS)
        return tuple(part for part, names in parts.items()
                     if 2 * sum(self._keep(layer, f"layers.{layer}.{name}") for name in names) > len(names))

    def _keep(self, layer: int, name: str) -> bool:
        words = name.split(".")
        spans = (".".join(words[begin:end]) for begin in range(len(words)) for end in range(begin + 1, len(words) + 1))
        return any(span in self._names for span in spans) or any(
            pattern.match(before + name) for at in (None, layer) for pattern in self._patterns.get(at, ())
            for before in _BEFORE)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern. A wildcard names a module with all modules below it."""
    text = pattern.removeprefix("re:")
    if text == pattern:
        text = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern) + r"(?:\.|$)"
    inner = text.removeprefix("^").removeprefix(".*").removesuffix(r"(?:\.|$)").removesuffix("$").removesuffix(".*")
    # Two repetitions in a row may be tried at every combination of places.
    if len(pattern) > _LONGEST or _UNSAFE.search(inner) or len(_REPEATED.findall(inner)) > _MOST_REPEATED:
        raise PlanError(f"The quantization_config's pattern {pattern[:60]!r} may take too long to compare (it is long, "
                        "or repeats much); name the modules that stay as they are.")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise PlanError(f"The quantization_config's pattern {pattern[:60]!r} is no regular expression ({error}); "
                        "correct it, or name the modules that stay as they are.") from None

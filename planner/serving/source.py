"""``served_decoder``: a decoder to serve, and the types of its published weights (``types_of_config``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.parallel.decoder import config_model, read_decoder
from planner.parallel.published_configs import CONFIGS
from planner.serving.kept_modules import kept_notes, kept_patterns, with_kept_modules
from planner.serving.setup import WHOLE, ServingError
from tracer.shape_only.transformer import TransformerShape

_BITS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "nvfp4"}
_MODELOPT = {"fp8": "fp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """Types of weights, with the names of ``ServingSetup``.

    Attributes:
        precision: type of linear layers; "" for the model's own dtype.
        experts: type of experts' weights if it differs.
        kept: names and patterns of modules that stay in the model's own dtype.
    """

    precision: str = ""
    experts: str = ""
    kept: tuple[str, ...] = ()


def types_of_config(said: Mapping[str, Any], notes: list[str]) -> WeightTypes:
    """Return the types in a ``quantization_config``; for an unknown method, the model's dtype, and add a note.

    Known are Hugging Face's methods: fp8 (by blocks if a block size is given), mxfp4 (experts only), awq, gptq,
    compressed-tensors, modelopt and bitsandbytes.
    """
    if not said:
        return WeightTypes()
    method = str(said.get("quant_method", "")).lower()
    if method == "mxfp4":
        return WeightTypes("bf16", "mxfp4")
    found = ""
    if method in ("fp8", "fbgemm_fp8"):
        found = "fp8_block" if said.get("weight_block_size") else "fp8"
    elif method in ("awq", "gptq"):
        found = _bits("int", said.get("bits", 4))
    elif method == "bitsandbytes":
        found = "int4" if said.get("load_in_4bit") or said.get("_load_in_4bit") else "int8"
    elif method == "modelopt":
        found = _MODELOPT.get(str(said.get("quant_algo", "")).lower(), "")
    elif method == "compressed-tensors":
        groups = said.get("config_groups")
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if (
            isinstance(groups, Mapping)) else []
        first = next((each for each in weights if isinstance(each, Mapping)), {})
        found = _bits(first.get("type"), first.get("num_bits"))
    if not found:
        notes.append(f"The weights' quantisation ({method[:40] or 'of no method'}) is not known; they are taken in the "
                     "model's type of numbers; give --precision, and --experts where experts have another.")
    return WeightTypes(found, kept=kept_patterns(said) if found else ())


def _bits(kind: object, bits: object) -> str:
    return _BITS.get((str(kind), bits), "") if isinstance(bits, int) else ""


SAME = {"deepseek-r1": "deepseek-v3", "llama-3.3-70b": "llama-3.1-70b", "kimi-k2.5": "kimi-k2",
        "minimax-m2.5": "minimax-m2"}
"""Names of models with the sizes of another model but other weights."""
OTHER_TYPES = {"kimi-k2.5": WeightTypes("bf16", "int4")}
"""Types of these models' weights, where they differ from the other model's."""
NEUTRAL = re.compile(r"instruct|chat|base|hf|it|thinking|preview|kv|dynamic|v\d(\.\d)?|\d{4}")
"""Words that a published name may add to a model's name without a change of sizes."""
TYPES = {"fp8": "fp8", "bf16": "bf16", "nvfp4": "nvfp4", "fp4": "nvfp4", "int8": "int8", "w8a8": "int8", "int4": "int4",
         "awq": "int4", "gptq": "int4", "w4a16": "int4"}
"""Words of a published name that give the type of its weights."""
BY_BLOCKS = ("qwen3", "deepseek", "kimi", "minimax", "glm")
"""Models whose publishers scale fp8 weights by blocks."""


@dataclass(frozen=True, slots=True)
class ServedDecoder:
    """A decoder to serve.

    Attributes:
        name: name of the model.
        shape: its sizes.
        longest: most tokens of a sequence; 0 if unknown.
        notes: assumptions.
        types: types of its published weights.
    """

    name: str
    shape: TransformerShape
    longest: int
    notes: tuple[str, ...]
    types: WeightTypes = field(default_factory=WeightTypes)

    def weights(self, precision: str, experts: str) -> tuple[str, str]:
        """Return the types of linear layers' and of experts' weights ("" if equal): the requested ones, else the
        published ones."""
        if precision:
            return precision, experts
        return self.types.precision or self.shape.dtype, experts or self.types.experts

    def in_type(self, precision: str) -> ServedDecoder:
        """Return the decoder in another type: a type of a whole model changes its dtype; a narrower type applies to all
        linear layers, unless the model is published in it."""
        if precision not in WHOLE:
            if not precision or precision == self.types.precision:
                return self
            return replace(self, shape=replace(self.shape, kept=(), stack=tuple(
                replace(run, kept=()) for run in self.shape.stack)))
        runs = tuple(replace(run, dtype=precision) for run in self.shape.stack)
        return replace(self, shape=replace(self.shape, dtype=precision, stack=runs))


def published_name(source: str) -> str:
    """Return the published model of a name such as "meta-llama/Llama-3.1-70B-Instruct"; else the name itself."""
    found = _published(source)
    return source if found is None else SAME.get(found[0], found[0])


def _published(source: str) -> tuple[str, WeightTypes | None] | None:
    """Return a published model's name and the types that ``source`` names; ``None`` if the name has words that may mean
    other sizes ("DeepSeek-R1-Distill-Qwen-32B" is not a DeepSeek-R1)."""
    if source.count("/") > 1:
        return None
    plain = source.rpartition("/")[2].lower().removeprefix("meta-")
    name = max((name for name in (*CONFIGS, *SAME) if plain == name or plain.startswith(f"{name}-")), key=len,
               default=None)
    if name is None:
        return None
    words = plain[len(name) + 1:].split("-") if plain != name else []
    if not all(word in TYPES or NEUTRAL.fullmatch(word) for word in words):
        return None
    said = [TYPES[word] for word in words if word in TYPES]
    if not said:
        return name, OTHER_TYPES.get(name)
    by_blocks = said[-1] == "fp8" and name.startswith(BY_BLOCKS)
    return name, WeightTypes("fp8_block" if by_blocks else said[-1])


def served_decoder(source: str, settings: Sequence[str] = (), preset: str | None = None) -> ServedDecoder:
    """Return a decoder to serve.

    Args:
        source: a published model's name, a ``config.json`` or its folder, or a workload.
        settings: as in ``parallel.planning.plan``, except ``batch`` and ``seq``.
        preset: preset of a workload.

    Raises:
        ServingError: a setting applies to training only.
        PlanError: the source is unknown.
    """
    for name, option in (("batch", "--batch"), ("seq", "--context")):
        if any(item.partition("=")[0].strip() == name for item in settings):
            raise ServingError(f"--set {name}=… is of training steps; give {option} for what is served.")
    found = _published(source)
    known = published_name(source)
    if preset is None and (model := config_model(known, settings)) is not None:
        # The length of training sequences does not limit served sequences.
        notes = [note for note in model.notes if not note.startswith("Sequences are taken")]
        types = types_of_config(model.quantised, notes)
        if found is not None and found[1] is not None:
            types = found[1]
        shape = with_kept_modules(model.shape, types.kept)
        notes += kept_notes(shape)
        return ServedDecoder(model.name, shape, model.longest, tuple(notes), types)
    name, shape, _, said = read_decoder(source, settings, preset)
    return ServedDecoder(name, shape, shape.learned_positions, said)

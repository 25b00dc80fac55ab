"""``types_of_config``: the types that a published model's weights are in, from its config's ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BITS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "nvfp4"}
_MODELOPT = {"fp8": "fp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """Types of weights, as ``ServingSetup`` names them.

    Attributes:
        precision: of linear layers; "" for the model's own type of numbers.
        experts: of experts, where it is another.
    """

    precision: str = ""
    experts: str = ""


def types_of_config(said: Mapping[str, Any], notes: list[str]) -> WeightTypes:
    """Return what a ``quantization_config`` says; where it is not known, the model's type of numbers, and a note.

    Methods are those of Hugging Face: fp8 (by blocks where it says their size), mxfp4 (experts alone), awq, gptq,
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
        found = _compressed(said.get("config_groups"))
    if not found:
        notes.append(f"The weights' quantisation ({method[:40] or 'of no method'}) is not known; they are taken in the "
                     "model's type of numbers; give --precision, and --experts where experts have another.")
    return WeightTypes(found)


def _compressed(groups: object) -> str:
    """Return the type of the first group of weights."""
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            return _bits(weights.get("type"), weights.get("num_bits"))
    return ""


def _bits(kind: object, bits: object) -> str:
    return _BITS.get((str(kind), bits), "") if isinstance(bits, int) else ""

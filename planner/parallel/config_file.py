"""A model's ``config.json`` (Hugging Face's) as the source of a plan: which file is one, and the decoder it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graph_predictor.sizes.retrace import MOST
from planner.parallel.config_families import FAMILIES, HYBRIDS, IMBALANCE, MOST_LAYERS, ConfigFields, by_fields
from tracer.input_file import DecodeError, from_json, open_input, why_unopened
from tracer.parallel_plan import PlanError
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape

CONFIG = "config.json"
KNOWN = {**FAMILIES, **HYBRIDS}
"""Model types that are known."""
MOST_BYTES = 1 << 20
"""A config has some kilobytes; some list every token of theirs."""
_NOT_DECODERS = frozenset((
    "albert", "bart", "bert", "clip", "convnext", "deberta", "deberta-v2", "distilbert", "electra", "longt5", "marian",
    "mbart", "mt5", "pegasus", "resnet", "roberta", "siglip", "swin", "t5", "umt5", "vit", "wav2vec2", "whisper",
    "xlm-roberta"))
_STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_ssm")
_GENERATORS = ("CausalLM", "LMHead", "ForConditionalGeneration", "Gemma3")
_DTYPES = {"float16": "fp16", "half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "float32": "fp32",
           "float": "fp32", "fp32": "fp32"}
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_PART = "_config"
_OF_USE = frozenset(("quantization_config", "generation_config", "compression_config", "attn_config", "ffn_config"))
"""Objects within a config that are no parts of a model beside its decoder."""
_INERT = frozenset(("architectures", "rope_theta", "max_position_embeddings", "pretraining_tp", "initializer_range",
                    "sliding_window", "max_window_layers", "rms_norm_eps", "torch_dtype", "model_max_length",
                    "mlp_only_layers", "original_max_position_embeddings", "chunk_size_feed_forward"))
"""Fields of no weight or operation of a step."""
MOST_NAMED = 8
_SETTINGS = "seq, batch, layers, dtype (bf16, fp16 or fp32), imbalance and predictions"


@dataclass(frozen=True, slots=True)
class ConfigModel:
    """A decoder of a config.

    Attributes:
        name: of the model, as its file is called.
        shape: its sizes.
        batch: sequences of a GPU in a step.
        notes: what was assumed.
        longest: tokens of a sequence at most; 0 where the config does not say.
        quantised: its ``quantization_config``, which says what its weights are published in; empty for none.
    """

    name: str
    shape: TransformerShape
    batch: int
    notes: tuple[str, ...]
    longest: int = 0
    quantised: Mapping[str, Any] = field(default_factory=dict)


def config_path(source: str) -> Path | None:
    """Return the config that a path is of: the file itself, or its folder's; ``None`` for anything else."""
    path = Path(source)
    try:
        if path.is_dir():
            # What a capture or a campaign wrote into a folder is no model's.
            return path / CONFIG if (path / CONFIG).is_file() else None
        if path.name == CONFIG and path.exists():
            return path
        if path.suffix.lower() != ".json" or not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        with open_input(path) as stream:
            text = stream.read(MOST_BYTES)
    except (OSError, ValueError):
        return None
    return path if b'"traceEvents"' not in text and any(
        name in text for name in (b'"model_type"', b'"architectures"', b'"hidden_size"')) else None


def read_config(path: Path, settings: Sequence[str] = ()) -> ConfigModel:
    """Return the decoder of a file.

    Args:
        path: of it.
        settings: assignments of what a config does not say: "seq=8192", "batch=2", "layers=4" (the first so many),
            "dtype=fp16", "imbalance=1.5", "predictions=0".

    Raises:
        PlanError: it cannot be read, is no JSON, is of no decoder, or lacks or spoils a field.
    """
    try:
        with open_input(path) as stream:
            text = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise PlanError(why_unopened(path, error)) from None
    if len(text) > MOST_BYTES:
        raise PlanError(f"{path} is longer than any model's config; give the model's config.json.")
    try:
        values = from_json(text)
    except DecodeError as error:
        raise PlanError(f"{path} is no config of a model ({error}); give the model's config.json.") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path} is no config of a model, which is an object of fields; give the model's config.json.")
    name = path.parent.resolve().name if path.name == CONFIG else path.stem
    return decoder_of_config(values, name, str(path), settings)


def decoder_of_config(values: Mapping[str, Any], name: str, where: str, settings: Sequence[str] = ()) -> ConfigModel:
    """Return the decoder of a config's values.

    Args:
        values: by field.
        name: of the model.
        where: the values come from, for messages.
        settings: as ``read_config`` takes them.

    Raises:
        PlanError: they are of no decoder, or lack or spoil a field.
    """
    whole = fields = ConfigFields(values, where)
    kind = fields.word("model_type")
    if kind not in KNOWN and kind not in _NOT_DECODERS and (part := _text_part(fields)) is not None:
        fields, kind = part, part.word("model_type")
    _check_decoder(fields, kind)
    family = KNOWN.get(kind)
    if family is None:
        fields.notes.append(f"The model type {kind or 'of the file'} is not known; its fields are taken to mean what "
                            "Llama's do.")
    try:
        shape = (family or by_fields)(fields)
    except ShapeOnlyError as error:
        raise PlanError(f"{where} describes no decoder: {error}") from None
    _note_parts(whole, fields, known=family is not None)
    if shape.heads % shape.kv_heads:
        raise PlanError(f"{where} has {shape.heads} heads and {shape.kv_heads} of keys and values, which do not divide "
                        "them; check the file.")
    shape = with_settings(_typed(fields, shape), settings, fields.notes)
    longest = fields.size("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=0, least=0)
    return ConfigModel(name, shape, _batch(settings), tuple(fields.notes), longest,
                       (fields if fields.has("quantization_config") else whole).within("quantization_config").values)


def _text_part(fields: ConfigFields) -> ConfigFields | None:
    """Return the fields of the decoder within a model that reads pictures or sound too; ``None`` where there is none.
    """
    if fields.has("num_attention_heads", "n_head", "n_heads", "num_hidden_layers") is not None:
        return None
    name = fields.has(*_TEXT_PARTS)
    return None if name is None else fields.within(name)


def _note_parts(whole: ConfigFields, fields: ConfigFields, *, known: bool) -> None:
    """Note the parts of a config that its decoder leaves out; of a type that is not known every size that nobody read,
    too."""
    parts = [name for name, value in whole.values.items() if name.endswith(_PART) and isinstance(value, Mapping)
             and value and name not in whole.asked | set(_TEXT_PARTS) | _OF_USE]
    if parts and not any("left out" in note and "encoder" in note for note in fields.notes):
        fields.notes.append(f"Left out of the model: {', '.join(parts[:MOST_NAMED])}.")
    if known:
        unasked = "layer_types" not in fields.asked
        if unasked and any(each != "full_attention" for each in fields.words("layer_types")):
            fields.notes.append("The kinds of layers that layer_types names are not of this model type: all attend to "
                                "everything.")
        return
    unread = [name for name, value in fields.values.items() if name not in fields.asked | _INERT and value
              and not name.endswith(("_id", "_ids", "_index", "_version", "_dropout", "_token", _PART))
              and isinstance(value, (int, list)) and not isinstance(value, bool)]
    if unread:
        more = f" and {len(unread) - MOST_NAMED} more" if len(unread) > MOST_NAMED else ""
        fields.notes.append(f"Nothing is known of these fields, which may be parts of it: "
                            f"{', '.join(name[:40] for name in unread[:MOST_NAMED])}{more}.")


def _check_decoder(fields: ConfigFields, kind: str) -> None:
    """Raise ``PlanError`` for a config of something else."""
    made = fields.words("architectures")
    if kind in _NOT_DECODERS or fields.flag("is_encoder_decoder", default=False) or (
            kind not in KNOWN and made and not any(word in each for each in made for word in _GENERATORS)):
        raise PlanError(f"{fields.where} is of {kind or made[0]}, which is no decoder, so that how to split its layers "
                        f"is not known; plans are made for {', '.join(sorted(KNOWN))} and what has their fields.")
    if kind not in KNOWN and fields.has(*_STATE_SPACE):
        raise PlanError(f"{fields.where} has state-space layers of the type {kind or 'unknown'}, which no plan knows; "
                        f"of those with such layers, plans are made for {', '.join(sorted(HYBRIDS))}.")


def _typed(fields: ConfigFields, shape: TransformerShape) -> TransformerShape:
    """The shape in the file's type of numbers; what was saved in fp32 is trained in bf16 today."""
    said = fields.word("dtype") or fields.word("torch_dtype")
    if said and said not in _DTYPES:
        fields.notes.append(f"The file's type of numbers, {said[:40]}, is none that is known; they are taken in bf16.")
    if said == "float32":
        fields.notes.append("Parameters of the file are fp32; training in bf16 is planned; give --set dtype=fp32 for "
                            "fp32.")
    return _changed(shape, dtype="fp16" if _DTYPES.get(said) == "fp16" else "bf16")


def with_settings(shape: TransformerShape, settings: Sequence[str], notes: list[str]) -> TransformerShape:
    """Return the decoder with what a config does not say, as assignments, and note what was taken without one."""
    given = dict(item.partition("=")[::2] for item in settings)
    if unknown := sorted(set(given) - {"seq", "batch", "layers", "dtype", "imbalance", "predictions"}):
        raise PlanError(f"{unknown[0][:40]!r} is no setting of a config's decoder; there are {_SETTINGS}.")
    if "layers" in given:
        shape = shape.cut(_number(given, "layers", min(shape.layers, MOST_LAYERS)))
    if "seq" in given:
        shape = _changed(shape, seq=_number(given, "seq", MOST))
        rows = shape.learned_positions
        if rows and rows < shape.seq:
            raise PlanError(f"seq={shape.seq} is longer than the model's {rows} learned positions; give less.")
    else:
        notes.append(f"Sequences are taken to be {shape.seq:,} tokens long; give --set seq=… for others.")
    if "dtype" in given:
        if given["dtype"] not in _DTYPES:
            raise PlanError(f"dtype={given['dtype'][:40]} is not known; give bf16, fp16 or fp32.")
        shape = _changed(shape, dtype=_DTYPES[given["dtype"]])
    if "predictions" in given:
        shape = replace(shape, predictions=_number(given, "predictions", 16, least=0))
    if any(kind.experts for kind in shape.kinds):
        if "imbalance" in given:
            shape = _imbalanced(shape, given["imbalance"])
        else:
            notes.append(f"The most loaded rank's experts are taken to have {IMBALANCE:g} times the mean's tokens; "
                         "give --set imbalance=… for others.")
    return shape


def _changed(shape: TransformerShape, **values: Any) -> TransformerShape:
    """The decoder and all of its runs with other values."""
    return replace(shape, stack=tuple(replace(run, **values) for run in shape.stack), **values)


def _imbalanced(shape: TransformerShape, text: str) -> TransformerShape:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    most = min(kind.experts for kind in shape.kinds if kind.experts)
    if not 1.0 <= factor <= most:
        raise PlanError(f"imbalance={text[:40]} is not possible: it is the most loaded rank's share of the tokens over "
                        f"the mean, from 1 to {most}.")
    return _changed(shape, imbalance=factor)


def _batch(settings: Sequence[str]) -> int:
    given = dict(item.partition("=")[::2] for item in settings)
    return _number(given, "batch", MOST) if "batch" in given else 1


def _number(given: Mapping[str, str], name: str, most: int, least: int = 1) -> int:
    text = given[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST)) and least <= int(text) <= most):
        raise PlanError(f"{name}={text[:40]} is not possible: give a whole number from {least} to {most:,}.")
    return int(text)

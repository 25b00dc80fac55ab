"""``read_decoder``: the sizes of the decoder to plan for (``TransformerShape``), and whether a plan divides them.

Sources are a workload, a published model, a model's ``config.json`` (Hugging Face's), a capture or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from graph_predictor.sizes.retrace import MOST
from kernel_models.collectives import Topology
from kernel_models.collectives.price import ASSUMED_SERVER
from kernel_models.device import DeviceSpec, find_device
from planner.parallel.config_families import FAMILIES, HYBRIDS, IMBALANCE, MOST_LAYERS, ConfigFields, by_fields
from planner.parallel.published_configs import CONFIGS
from planner.parallel.stages import spread
from tracer import workloads
from tracer.errors import ForetraceError, listed, reason_of
from tracer.input_file import DecodeError, from_json, open_input, why_unopened
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.transformer import TransformerShape
from tracer.workloads.settings import PRESETS

CONFIG = "config.json"
KNOWN = {**FAMILIES, **HYBRIDS}
"""Families of all known model types, by ``model_type``."""
MOST_BYTES = 1 << 20
"""Largest config that is read. Configs have some kilobytes; some list every token."""
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
"""Objects of a config that describe no further part of the model, so that no note lists them as left out."""
_INERT = frozenset(("architectures", "rope_theta", "max_position_embeddings", "pretraining_tp", "initializer_range",
                    "sliding_window", "max_window_layers", "rms_norm_eps", "torch_dtype", "model_max_length",
                    "mlp_only_layers", "original_max_position_embeddings", "chunk_size_feed_forward"))
"""Fields that change no weight and no operation of a step."""
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "hidden_dropout",
             "hidden_dropout_prob", "resid_dropout", "resid_pdrop")
"""Names of dropout rates in Hugging Face's configs."""
MOST_NAMED = 8
"""Most fields that a note names: a choice."""
_SETTINGS = ("seq, batch, layers, dtype (bf16, fp16 or fp32), imbalance and predictions, and of training attention "
             "(fused or unfused) and dropout")


@dataclass(frozen=True, slots=True)
class ConfigModel:
    """A decoder that was read from a config.

    Attributes:
        name: name of the model, from its file's name.
        shape: sizes of the decoder.
        batch: sequences of a GPU in a step.
        notes: assumptions.
        longest: most tokens of a sequence; 0 if the config has no limit.
        quantised: the config's ``quantization_config``, the format of the published weights; empty for none.
        trained: fields of ``TransformerShape`` that concern training and not the model: ``flash``, ``dropout``.
    """

    name: str
    shape: TransformerShape
    batch: int
    notes: tuple[str, ...]
    longest: int = 0
    quantised: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)


def config_path(source: str) -> Path | None:
    """Return the config of a path: the file itself, or the folder's config.json; ``None`` for anything else."""
    path = Path(source)
    try:
        if path.is_dir():
            # A folder of a capture or a campaign has no model's config.
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
    """Return the decoder of a config file.

    Args:
        path: path of the file.
        settings: assignments of what a config leaves open: "seq=8192", "batch=2", "layers=4" (the first four),
            "dtype=fp16", "imbalance=1.5", "predictions=0".

    Raises:
        PlanError: the file cannot be read, is not JSON, describes no decoder, or a field is missing or invalid.
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
        values: the config's values, by field.
        name: name of the model.
        where: origin of the values, for messages.
        settings: as in ``read_config``.

    Raises:
        PlanError: the values describe no decoder, or a field is missing or invalid.
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
                       (fields if fields.has("quantization_config") else whole).within("quantization_config").values,
                       _trained(fields))


def _trained(fields: ConfigFields) -> dict[str, Any]:
    """Read how a config's layers are trained: unfused attention, dropout."""
    rates = [fields.values.get(name) for name in _DROPOUTS]
    dropout = max((float(rate) for rate in rates if isinstance(rate, (int, float)) and 0 < rate < 1), default=0.0)
    eager = "eager" in (fields.values.get("attn_implementation"), fields.values.get("_attn_implementation"))
    return {**({"dropout": dropout} if dropout else {}), **({"flash": False} if eager else {})}


def _text_part(fields: ConfigFields) -> ConfigFields | None:
    """Return the fields of the decoder within a model that also reads pictures or sound; ``None`` for other models."""
    if fields.has("num_attention_heads", "n_head", "n_heads", "num_hidden_layers") is not None:
        return None
    name = fields.has(*_TEXT_PARTS)
    return None if name is None else fields.within(name)


def _note_parts(whole: ConfigFields, fields: ConfigFields, *, known: bool) -> None:
    """Note the parts of a config that its decoder leaves out, and kinds of layers that it ignores. For an unknown model
    type, note every unread size too."""
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
        fields.notes.append("Nothing is known of these fields, which may be parts of it: "
                            f"{listed([name[:40] for name in unread], MOST_NAMED)}.")


def _check_decoder(fields: ConfigFields, kind: str) -> None:
    """Raise ``PlanError`` if a config describes something else than a decoder."""
    made = fields.words("architectures")
    if kind in _NOT_DECODERS or fields.flag("is_encoder_decoder", default=False) or (
            kind not in KNOWN and made and not any(word in each for each in made for word in _GENERATORS)):
        raise PlanError(f"{fields.where} is of {kind or made[0]}, which is no decoder, so that how to split its layers "
                        f"is not known; plans are made for {', '.join(sorted(KNOWN))} and what has their fields.")
    if kind not in KNOWN and fields.has(*_STATE_SPACE):
        raise PlanError(f"{fields.where} has state-space layers of the type {kind or 'unknown'}, which no plan knows; "
                        f"of those with such layers, plans are made for {', '.join(sorted(HYBRIDS))}.")


def _typed(fields: ConfigFields, shape: TransformerShape) -> TransformerShape:
    """Return the shape in the file's dtype; a model saved in fp32 is taken to be trained in bf16."""
    said = fields.word("dtype") or fields.word("torch_dtype")
    if said and said not in _DTYPES:
        fields.notes.append(f"The file's type of numbers, {said[:40]}, is none that is known; they are taken in bf16.")
    if said == "float32":
        fields.notes.append("Parameters of the file are fp32; training in bf16 is planned; give --set dtype=fp32 for "
                            "fp32.")
    return _changed(shape, dtype="fp16" if _DTYPES.get(said) == "fp16" else "bf16")


def with_settings(shape: TransformerShape, settings: Sequence[str], notes: list[str]) -> TransformerShape:
    """Apply assignments of what a config leaves open to its decoder, and note the defaults that are used without."""
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
    """Return the decoder with other values, also in all of its runs."""
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


_MOST_DIGITS = 10
"""A setting's number of samples must have fewer digits than this."""
DECODERS = ("llama", "gpt2", "moe")
"""Workloads whose layers can be split over ranks and stages."""

_LLAMA = {"dtype": "bf16", "batch": "1", "kv_heads": "8", "vocabulary": "128256", "seq": "8192"}
_GPT = {"dtype": "bf16", "batch": "1", "vocabulary": "50257"}
PUBLISHED: dict[str, dict[str, dict[str, str]]] = {
    "llama": {
        "8b": {**_LLAMA, "depth": "32", "width": "4096", "heads": "32", "hidden": "14336"},
        "70b": {**_LLAMA, "depth": "80", "width": "8192", "heads": "64", "hidden": "28672"},
        "405b": {**_LLAMA, "depth": "126", "width": "16384", "heads": "128", "hidden": "53248"},
    },
    "gpt2": {
        "xl": {**_GPT, "depth": "48", "width": "1600", "heads": "25", "seq": "1024", "positions": "1024"},
        "175b": {**_GPT, "depth": "96", "width": "12288", "heads": "96", "seq": "2048", "positions": "2048"},
    },
    "moe": {
        "8x7b": {"dtype": "bf16", "batch": "1", "depth": "32", "width": "4096", "heads": "32", "kv_heads": "8",
                 "hidden": "14336", "vocabulary": "32000", "seq": "32768", "experts": "8", "top_k": "2"},
    },
}
"""Published models as settings of the workloads; a workload's first is its default. Sources: Llama 3 (Grattafiori et
al., 2024, table 3, sequences of pre-training); GPT-2 XL (Radford et al., 2019); GPT-3 (Brown et al., 2020, table 2.1);
Mixtral (Jiang et al., 2024, table 1)."""


def published(name: str, preset: str | None) -> tuple[str, list[str]]:
    """Return the name of a published model and its settings as assignments; no settings for a preset of the suite.

    Args:
        name: the workload.
        preset: a published model's, one of the suite's, or ``None`` for the default.

    Raises:
        PlanError: there is no such preset.
    """
    models = PUBLISHED.get(name, {})
    if preset is not None and preset not in models and preset not in PRESETS:
        raise PlanError(f"{name} has no preset {preset!r}; choose one of {', '.join((*models, *PRESETS))}.")
    chosen = next(iter(models), "default") if preset is None else preset
    return chosen, [f"{key}={value}" for key, value in models.get(chosen, {}).items()]


def decoder_of(name: str, settings: Mapping[str, Any]) -> TransformerShape:
    """Return the decoder of a workload with these settings (plain values).

    Raises:
        PlanError: the workload is no decoder, or a setting is missing.
    """
    if name not in DECODERS:
        raise PlanError(f"The workload {name} is no decoder, so that how to split its layers is not known; plans are "
                        f"made for {', '.join(DECODERS)}.")
    try:
        dtype = next((kind for kind in ("bf16", "fp16") if kind in str(settings["dtype"])), "fp32")
        plain = name == "gpt2"
        shape = TransformerShape(
            layers=int(settings["depth"]), hidden=int(settings["width"]), heads=int(settings["heads"]),
            kv_heads=int(settings["heads" if plain else "kv_heads"]),
            ffn=4 * int(settings["width"]) if plain else int(settings["hidden"]), vocab=int(settings["vocabulary"]),
            seq=int(settings["seq"]), gated=not plain, rms=not plain, bias=plain, rotary=not plain,
            dropout=float(settings.get("dropout", 0.0)), experts=int(settings.get("experts", 0)),
            top_k=int(settings.get("top_k", 0)), dtype=dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"The settings of {name} lack or spoil {reason_of(error)}; trace or capture it "
                        "again.") from None
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, shape.seq)
    if not all(0 < size <= MOST for size in sizes) or not (
            0 <= shape.experts <= MOST and 0 <= shape.top_k <= MOST and 0.0 <= shape.dropout < 1.0) or (
            shape.hidden % shape.heads):
        raise PlanError(f"The settings of {name} have sizes that no model has; trace or capture it again.")
    return shape


def check_decoder_plan(plan: ParallelPlan, shape: TransformerShape, on: Topology) -> None:
    """Raise ``PlanError``, in one sentence, unless the plan divides the model and the cluster is large enough."""
    if plan.world_size > on.gpus:
        raise PlanError(f"The plan's {plan.world_size:,} ranks do not fit on {on.name}, which has {on.gpus:,} GPUs; "
                        "name a larger topology.")
    for kind in shape.kinds:
        for what, value, name, by in (
                *kind.shared_heads(plan.tp, plan.cp),
                ("features of an expert" if kind.experts else "features of the feed-forward part", kind.ffn, "tp",
                 plan.expert_tp if kind.experts else plan.tp),
                ("features of the shared experts", kind.shared_ffn, "tp", plan.tp),
                ("tokens of a sequence", kind.seq, "2 cp", 2 * plan.cp if plan.cp > 1 else 1),
                ("tokens of a rank", kind.seq // plan.cp, "tp", plan.tp if plan.sequence_parallel else 1),
                ("experts", kind.experts, "ep", plan.ep)):
            if value % by:
                raise PlanError(f"{value:,} {what} cannot be split evenly by {name}={by}; choose a divisor.")
    spread(plan, shape)
    experts, latent = any(kind.experts for kind in shape.kinds), any(kind.latent for kind in shape.kinds)
    for word, said, there in (
            (f"ep={plan.ep}", plan.ep > 1, experts),
            (f"dispatcher={plan.dispatcher.value}", plan.dispatcher.once, experts),
            ("fused_experts", plan.fused_experts, experts),
            ("recompute_modules=moe_act", "moe_act" in plan.recompute_modules, experts),
            ("recompute_modules=mla_up_proj", "mla_up_proj" in plan.recompute_modules, latent)):
        if said and not there:
            raise PlanError(f"{word} needs {'latent attention' if 'mla' in word else 'experts'}, and the model has "
                            "none; leave it out.")
    if plan.fp8_parameters and not shape.linears:
        raise PlanError("fp8_parameters is of linear layers in fp8, and these are in 16 bits; give --linears fp8 (or "
                        "fp8_block, mxfp8), or leave it out.")


def read_decoder(source: str | Job, assignments: Sequence[str] = (),
                 preset: str | None = None) -> tuple[str, TransformerShape, int, tuple[str, ...]]:
    """Read the decoder of a workload's or a model's name, a config or a trace. Return its name, its sizes, the
    sequences of its step, and assumptions."""
    changed = f" with {', '.join(assignments)}" if assignments else ""
    assignments, how = _how_trained(assignments)
    if isinstance(source, str) and (model := config_model(source, assignments)) is not None:
        if preset is not None:
            raise PlanError(f"{source} says itself which sizes its model has; leave --preset {preset} out.")
        return (f"{model.name}{changed}", _changed(model.shape, **{**model.trained, **how}), model.batch,
                (*model.notes, *(_TRAINED_NOTES[name].format(value) for name, value in model.trained.items()
                                 if name not in how)))
    if isinstance(source, str) and source in workloads.names():
        chosen, own = published(source, preset)
        settings = workloads.parse(source, [*own, *assignments], preset="real" if own else chosen)
        return (f"{source} {chosen}{changed}", _changed(decoder_of(source, workloads.as_plain(settings)), **how),
                settings.samples_per_step, ())
    job = _read(source) if isinstance(source, str) else source
    meta, said = job.graphs[0].meta, source if isinstance(source, str) else "The job"
    if not meta.workload:
        raise PlanError(f"{said} does not say which model it is of, so that how to split its layers is not known; "
                        "give a workload, or a capture or trace made with --workload.")
    if preset is not None:
        raise PlanError(f"{said} says itself which sizes its model has; leave --preset {preset} out.")
    values = {**meta.workload["settings"], **dict(item.partition("=")[::2] for item in assignments)}
    return (f"{meta.workload['name']} of {said}", _changed(decoder_of(meta.workload["name"], values), **how),
            _whole(values, "batch") * _whole(values, "accumulation"), ())


_TRAINED_NOTES = {"flash": "The config's attention is not fused; give --set attention=fused for one that is.",
                  "dropout": "Dropout of {0:g} is planned, as the config says; give --set dropout=0 for none."}


def _how_trained(assignments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate settings of training that every decoder has (fp16, attention, dropout) from a source's own settings.

    Returns:
        The source's own settings, and fields of ``TransformerShape``.

    Raises:
        PlanError: a value is not possible.
    """
    others: list[str] = []
    how: dict[str, Any] = {}
    for item in assignments:
        name, _, value = item.partition("=")
        if name == "dtype" and _DTYPES.get(value) == "fp16":  # workloads have no fp16
            how["dtype"] = "fp16"
        elif name == "attention":
            if value not in ("fused", "unfused"):
                raise PlanError(f"attention={value[:40]} is not known; give fused or unfused.")
            how["flash"] = value == "fused"
        elif name == "dropout":
            try:
                how["dropout"] = float(value)
            except ValueError:
                how["dropout"] = -1.0
            if not 0.0 <= how["dropout"] < 1.0:
                raise PlanError(f"dropout={value[:40]} is not possible: give a rate from 0 to below 1.")
        else:
            others.append(item)
    return others, how


def _check_there(source: str) -> None:
    """Raise ``PlanError`` for a word that is neither a path nor a model's name."""
    if Path(source).name != source or Path(source).suffix or Path(source).exists():
        return
    names = [*DECODERS, *CONFIGS]
    near = get_close_matches(source.lower(), names, n=3)
    said = f"did you mean {' or '.join(near)}?" if near else f"known models are {', '.join(names)}."
    raise PlanError(f"{source} is neither a path nor a model that is known; {said}")


def _read(source: str) -> Job:
    """Read a capture or trace. Raises ``PlanError`` that also mentions configs, if the source is neither."""
    _check_there(source)
    try:
        return read_job([source])
    except ForetraceError as error:
        raise PlanError(f"{error} Nor is {source} a model's config.json, which has a model_type, or a folder with "
                        "one.") from None


def config_model(source: str, assignments: Sequence[str]) -> ConfigModel | None:
    """Return the model of a config's path or of a published model's name; ``None`` for another source."""
    if source in CONFIGS:
        return decoder_of_config(CONFIGS[source], source, source, assignments)
    path = config_path(source)
    return None if path is None else read_config(path, assignments)


def _whole(values: Mapping[str, Any], name: str) -> int:
    """Return a setting that is a number of samples; 1 if it is missing. Raises ``PlanError``."""
    text = str(values.get(name, 1))
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < _MOST_DIGITS and int(text)):
        raise PlanError(f"The setting {name}={text[:_MOST_DIGITS]} is no number of samples; give --set {name}=8.")
    return int(text)


def other_nodes(on: Topology, spec: DeviceSpec) -> list[str]:
    """Return a note if a topology's nodes have another device than ``spec``, or no node type has it; else nothing."""
    if ASSUMED_SERVER in on.node.sources.values():
        return [f"No node type has {spec.name}: its GPUs are taken to be in one PCIe server of {on.node.gpus}, in "
                f"which each sends at {on.node.peer_gbps:g} GB/s; describe another in a file for --topology."]
    node = spec.name if on.node.device == spec.name else find_device(on.node.device).name
    return [] if node == spec.name else [
        f"The nodes of the topology have {node}, not {spec.name}; their network is taken."]

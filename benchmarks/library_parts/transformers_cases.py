"""Every model class of transformers, from a configuration of few layers: a training step, and generation."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

from library_parts.cases import LibraryCase, Step, seeded, summed, trained
from library_parts.outcomes import TOKENS
from library_parts.transformers_configs import config_of, text_of
from library_parts.transformers_inputs import BATCH, candidates
from tracer.errors import ForetraceError

_LACKING = re.compile(r"(?i)(image|video|audio|speech)[\w ]*?(?:features|tokens).*?do(?:es)? not match"
                      r".*?features:? *(\d+)")
_MOST_TRIED = 16
_NOT_ACCEPTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError,
                 TypeError, ValueError)
_SHAPES_ALONE = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException",
                 "TimeoutError", "GuardOnDataDependentSymNode")


def transformers_cases() -> list[LibraryCase]:
    """Each class that has a forward of its own; those that generate also in generation."""
    import transformers
    from torch import nn
    from transformers import PreTrainedModel

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)

    found = []
    for name in sorted(dir(transformers)):
        if name.startswith("_") or name.endswith(("PreTrainedModel", "PretrainedModel", "Config", "Processor",
                                                  "ProcessorFast", "Tokenizer", "TokenizerFast", "FeatureExtractor")):
            continue
        kind = getattr(transformers, name)
        if not inspect.isclass(kind) or not issubclass(kind, PreTrainedModel) or kind.config_class is None or (
                kind.forward in (nn.Module.forward, PreTrainedModel.forward)):
            continue
        found += [LibraryCase("transformers", name, step, partial(_step, name, step))
                  for step in (("train", "generate") if kind.can_generate() else ("train",))]
    return found


def _step(name: str, kind: str, device: str) -> Step:
    model, given = _prepared(name, device, with_labels=kind == "train")
    if kind == "train":
        return trained(model, lambda: summed(_loss_or_all(model(**given))))
    return _generation(model, given)


def _loss_or_all(outputs: Any) -> Any:
    loss = outputs.get("loss") if hasattr(outputs, "get") else None
    return outputs if loss is None else [loss.mean()]


def _generation(model: Any, given: dict[str, Any]) -> Step:
    """One new token in the first step, two in the second, and so on."""
    from transformers import GenerationMixin

    model.eval()
    settings = model.generation_config
    settings.eos_token_id, settings.do_sample, settings.num_beams = None, False, 1
    settings.pad_token_id = 0
    settings.max_length = None
    if settings.decoder_start_token_id is None and settings.bos_token_id is None:
        settings.bos_token_id = 1
    given = {name: value for name, value in given.items() if name not in ("labels", "decoder_input_ids")}
    loop = model.generate
    if type(model).generate is not GenerationMixin.generate:
        try:  # its own reads what was said, as Whisper's does for times: then the loop that all others have
            loop(**given, max_new_tokens=1, min_new_tokens=1)
        except Exception:
            loop = partial(GenerationMixin.generate, model)
    steps = iter(range(1, TOKENS + 1))

    def generate() -> None:
        count = next(steps, 1)
        loop(**given, max_new_tokens=count, min_new_tokens=count)

    return generate


def _prepared(name: str, device: str, with_labels: bool) -> tuple[Any, dict[str, Any]]:
    """A model and inputs that it takes; with all its layers where some of its settings name one of them."""
    import transformers

    seeded()
    kind = getattr(transformers, name)
    error: Exception | None = None
    for small in (True, False):
        try:
            model = kind(config_of(kind.config_class, small)).to(device)
            model.train(with_labels)
            return model, _accepted(model, device, with_labels)
        except _NOT_ACCEPTED as one:
            if error is not None or not isinstance(one, (LookupError, ValueError)) or isinstance(one, ForetraceError):
                raise error or one from None
            error = one
    raise AssertionError


def _accepted(model: Any, device: str, with_labels: bool) -> dict[str, Any]:
    """The first inputs that a model's forward accepts, with as many tokens for images and sounds as it asks for."""
    import torch

    errors: list[Exception] = []
    placeholders: dict[str, int] = {}
    for number in range(_MOST_TRIED):
        found = list(candidates(model, device, placeholders))
        tried = number - len(placeholders)
        if tried >= len(found):
            break
        given = found[tried] if with_labels else {key: one for key, one in found[tried].items() if key != "labels"}
        try:
            with torch.no_grad():
                model(**given)
            return given
        except _NOT_ACCEPTED as error:
            if type(error).__name__ in _SHAPES_ALONE or isinstance(error, ForetraceError):
                raise
            errors.append(error)
            lacking = _LACKING.search(" ".join(str(error).split()))
            if lacking and lacking[1].lower() not in placeholders:
                placeholders[lacking[1].lower()] = _tokens(int(lacking[2]), model.config)
    if len(errors) == 1:
        raise errors[0]
    # All of them, so that it can be compared with what happens elsewhere.
    said = " / ".join(dict.fromkeys(" ".join(f"{type(one).__name__}: {one}".split())[:160] for one in errors))
    raise (LookupError if any(isinstance(one, LookupError) for one in errors) else RuntimeError)(said) from errors[0]


def _tokens(features: int, config: Any) -> int:
    """How many tokens of each sequence stand for features, of which some messages say how many numbers they are."""
    width = getattr(text_of(config), "hidden_size", None) or features + 1
    return -(-(features // width if features % width == 0 else features) // BATCH)

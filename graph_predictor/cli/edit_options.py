"""The options of edits, made of ``edits.registry``: a new edit is an option without a word here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from graph_predictor.cli.options import SHARED, shared
from graph_predictor.edits.registry import OPTIONS, EditOption, Takes
from tracer.errors import ForetraceError

_DEFAULTS: dict[Takes, Any] = {Takes.NOTHING: False, Takes.ON_OFF: None, Takes.FACTOR: 1.0, Takes.TYPE: None}
_TYPES: dict[Takes, Any] = {Takes.NOTHING: bool, Takes.ON_OFF: str | None, Takes.FACTOR: float, Takes.TYPE: str | None}


def with_edits(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each edit; it takes their values as ``**edits``."""
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [inspect.Parameter(option.attribute, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[option.takes],
                              annotation=Annotated[_TYPES[option.takes], _declared(option)]) for option in OPTIONS]
    first = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    command.__signature__ = signature.replace(parameters=[*first, *more])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (*first, *more)} | {"return": None}
    return command


def chosen_edits(values: dict[str, Any]) -> dict[str, Any]:
    """Return what ``Configuration`` is told of the edits' options: factors and types by attribute, and the switches.

    Raises:
        ForetraceError: a value is none of its option.
    """
    found: dict[str, Any] = {}
    switches: set[str] = set()
    for option in OPTIONS:
        value = values[option.attribute]
        if not option.switches:
            found[option.attribute] = value
        elif option.takes is Takes.ON_OFF and value is not None:
            if value not in ("on", "off"):
                raise ForetraceError(f"--{option.name} {value} is not known: it is on or off.")
            switches.add(option.switches[value == "off"])
        elif value:
            switches.add(option.name)
    return {**found, "switches": frozenset(switches)}


def _declared(option: EditOption) -> Any:
    name = f"--{option.name}"
    if name in SHARED:
        return shared(name, "products in bf16 or fp16 (autocast), tf32 or fp32" if name == "--dtype" else "")
    metavar = {"metavar": option.takes.value} if option.takes is not Takes.NOTHING else {}
    return typer.Option(name, help=option.help, **metavar)


__all__ = ["chosen_edits", "with_edits"]

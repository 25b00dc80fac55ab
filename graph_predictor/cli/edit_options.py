"""The options of edits, made of what ``edits.registry`` reads: a new edit is one without a word here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from graph_predictor.edits.registry import FACTOR, NOTHING, ON_OFF, OPTIONS, EditOption, Value
from tracer.errors import ForetraceError

Command = Callable[..., None]


def with_edits(command: Command) -> Command:
    """Give a command an option for each edit; it takes their values as ``**edits``."""
    return _with(command, [(option, *_one(option)) for option in OPTIONS])


def with_some_edits(*names: str) -> Callable[[Command], Command]:
    """Return what gives a command the options of these edits alone; it takes their values as ``**edits``."""
    return lambda command: _with(command, [(option, *_one(option)) for option in OPTIONS if option.name in names])


def with_edits_but(*names: str) -> Callable[[Command], Command]:
    """Return what gives a command the options of all edits but these; it takes their values as ``**edits``."""
    return lambda command: _with(command, [(option, *_one(option)) for option in OPTIONS if option.name not in names])


def with_axes(command: Command) -> Command:
    """Give a command an option for several values of each edit that takes one; it takes the texts as ``**edits``."""
    return _with(command, [(option, str | None, None, typer.Option(
        f"--{option.name}", metavar=f"{option.takes},…", help=f"{option.help.removesuffix('.')}; several."))
        for option in OPTIONS if not option.switches])


def _one(option: EditOption) -> tuple[Any, Any, Any]:
    """Return the type, default and declaration of an option for one value."""
    kind, default = {NOTHING: (bool, False), FACTOR: (float, 1.0)}.get(option.takes, (str | None, None))
    metavar = None if option.takes == NOTHING else option.takes
    return kind, default, typer.Option(f"--{option.name}", help=option.help, metavar=metavar)


def _with(command: Command, more: list[tuple[EditOption, Any, Any, Any]]) -> Command:
    """Put options in the place of a command's ``**edits``."""
    signature = inspect.signature(command, eval_str=True)
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()
           if one.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(option.attribute, inspect.Parameter.KEYWORD_ONLY, default=default,
                               annotation=Annotated[kind, declared]) for option, kind, default, declared in more]
    command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in (*own, *added)} | {"return": None}
    return command


def chosen_edits(values: dict[str, Any]) -> dict[str, Value]:
    """Return the edits that options choose, by name, for ``Configuration.edits``.

    Raises:
        ForetraceError: a value is none of its option.
    """
    found: dict[str, Value] = {}
    for option in OPTIONS:
        value = values.get(option.attribute)
        if option.takes == ON_OFF and value is not None:
            if value not in ("on", "off"):
                raise ForetraceError(f"--{option.name} {value} is not known: it is on or off.")
            value = value == "on"
        if value is not None and (value or option.takes != NOTHING):
            found[option.name] = value
    return found

"""Values of plain options, without pydantic.

typer lets pydantic make the value of every parameter, of options that nobody gave too, and importing and preparing
pydantic takes a tenth of a second. Most values are there already: a text where a text is wanted, or the default. These
are handed on; any other goes typer's own way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_origin


class PlainValues:
    """Stands where typer keeps how it makes a parameter's value, until a value needs that."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as typer makes it of what was given, or of the default.

        Raises:
            typer.BadParameter: it is none of the parameter's type.
        """
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if _is_there(value, param):
            return list(value) if isinstance(value, tuple) else value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def with_plain_values(command: Any) -> Any:
    """Let a command, and those of a group, pass on values that are there already; returns it."""
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> Any:
        pass_on(command.get_params(ctx))  # --help among them, which is made here
        return parse(ctx, args)

    command.parse_args = parse_args
    for each in getattr(command, "commands", {}).values():
        with_plain_values(each)
    return command


def pass_on(params: Iterable[Any]) -> None:
    """Let parameters pass on values that are there already. A typer that keeps no way of making a value stays as it
    is."""
    for param in params:
        if hasattr(param, "_runtime_param") and hasattr(param, "type_descriptor"):
            param._runtime_param = PlainValues()


def _is_there(value: Any, param: Any) -> bool:
    kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    if info.parser is not None:
        return False
    if kind is str:
        return type(value) is str
    if get_origin(kind) is list:
        return get_args(kind) == (str,) and isinstance(value, list | tuple) and all(type(one) is str for one in value)
    return kind in (int, float) and type(value) is kind and value is param.default

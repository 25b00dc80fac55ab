"""A command line whose commands are imported when they run: ``--help`` needs only their names and first sentences."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from graph_predictor.cli.plain_values import pass_on, with_plain_values

COLLECTED_EVERY = 200_000
"""Objects made between two garbage collections of a command: each looks through some of what was imported, and at
Python's 700 they are a twentieth of a short command's time, at 50,000 a fiftieth."""


class LazyCommand(NamedTuple):
    """Where a command is: ``attribute`` of ``module`` is its function or, of one with commands of its own, its
    ``typer.Typer``. ``sentence`` is the first of its help, ``group`` the heading it stands under in that of
    ``foretrace``, ``command_class`` the name of a class of its own there. One that ``runs_programs`` leaves Python as
    these would find it."""

    module: str
    attribute: str
    group: str
    sentence: str
    command_class: str | None = None
    runs_programs: bool = False

    def built(self, name: str) -> Any:
        """Import the command and return it as typer makes it."""
        if not self.runs_programs:
            gc.set_threshold(COLLECTED_EVERY)
        module = import_module(self.module)
        found = getattr(module, self.attribute)
        own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        own.callback()(_nothing)
        if isinstance(found, typer.Typer):
            own.add_typer(found, name=name)
        else:
            own.command(name, cls=None if self.command_class is None else getattr(module, self.command_class))(found)
        group: Any = typer.main.get_command(own)
        return with_plain_values(group.commands[name])


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name, each built when it is first asked for."""

    def __init__(self, table: Mapping[str, LazyCommand]) -> None:
        self._table, self._built = table, dict[str, Any]()
        self._names = dict.fromkeys(table)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._built:
            self._built[name] = self._table[name].built(name)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._names[name], self._built[name] = None, command

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._built.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def lazy_group(table: Mapping[str, LazyCommand]) -> type[TyperGroup]:
    """Return the class of a group that has these commands, and lists them in its help by their first sentences."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands: MutableMapping[str, Any] = LazyCommands(table)

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            pass_on(self.get_params(ctx))
            return super().parse_args(ctx, args)

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            widest = max(map(len, table))
            for group in dict.fromkeys(command.group for command in table.values()):
                rows = [(name, command.sentence) for name, command in table.items() if command.group == group]
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=widest)

    return LazyGroup


def _nothing() -> None:
    """A group of one command remains a group."""

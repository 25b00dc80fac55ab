"""A command line whose commands are imported when they run: ``--help`` needs only their names and first sentences.

A command's file imports the modules it works with at its top, and those are run when it first uses them
(``imported_late``): of ``predict --help``, none is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

PACKAGES = ("tracer", "kernel_models", "graph_predictor", "planner")
REGISTERING = ("kernel_models.families.", "kernel_models.heuristics.", "tracer.campaign.families.")
"""Modules below these register something when they run, and are never late."""


class LateModule(ModuleType):
    """A module that runs when something of it is first asked for. (The standard library's runs a second time where
    imports go in a circle.)"""

    def __getattr__(self, name: str) -> Any:
        with self.__dict__["__lock__"]:
            loader = self.__dict__.pop("__late__", None)
            if loader is not None:
                self.__loader__ = self.__spec__.loader = loader  # type: ignore[union-attr]
                # Command files alone import late: elsewhere an import may be there for what it registers.
                with nullcontext() if ".cli." in self.__name__ else imported_at_once():
                    loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


class LateLoader(Loader):
    """Loads a module as a ``LateModule``, which another loader runs."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, to be run later."""
        vars(module).update(__late__=self._loader, __lock__=RLock())
        module.__class__ = LateModule


class LateFinder(MetaPathFinder):
    """Finds modules of our packages such that each runs when something of it is first used."""

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how a module is loaded; None of others', which Python finds itself."""
        if path is None or fullname.partition(".")[0] not in PACKAGES or fullname.startswith(REGISTERING):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LateLoader(spec.loader)
        return spec


@contextmanager
def imported_at_once() -> Iterator[None]:
    """Import modules as Python does, within ``imported_late`` too."""
    finders = sys.meta_path[:]
    sys.meta_path[:] = [each for each in finders if not isinstance(each, LateFinder)]
    try:
        yield
    finally:
        sys.meta_path[:] = finders


@contextmanager
def imported_late() -> Iterator[None]:
    """Import our modules late; one of which a name is taken at once (``from module import name``) runs at once."""
    finder = LateFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class LazyCommand(NamedTuple):
    """Where a command is: ``attribute`` of ``module`` is its function or, of one with commands of its own, its
    ``typer.Typer``. ``sentence`` is the first of its help, ``group`` the heading it stands under in that of
    ``foretrace``, ``command_class`` the name of a class of its own there."""

    module: str
    attribute: str
    group: str
    sentence: str
    command_class: str | None = None

    def built(self, name: str) -> Any:
        """Import the command and return it as typer makes it."""
        with imported_late():
            module = import_module(self.module)
            found = getattr(module, self.attribute)  # runs the command's file, whose own imports are late
        own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        own.callback()(_nothing)
        if isinstance(found, typer.Typer):
            own.add_typer(found, name=name)
        else:
            own.command(name, cls=None if self.command_class is None else getattr(module, self.command_class))(found)
        group: Any = typer.main.get_command(own)
        return group.commands[name]


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

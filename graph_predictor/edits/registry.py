"""The edits that an option names: each is declared in its own file, and from there it is an option of ``predict``, an
axis of ``sweep`` and, with something to try, a change that ``opportunities`` tries.

To add one: a file here with a class that says what it is called (see ``prediction.edit.Edit``), and its name below::

    @edit_option("clock", "GPU clock × FACTOR.", takes="FACTOR", bounds={"2× compute clock": 2.0})
    @dataclass(frozen=True)
    class ScaleClock: ...

Declarations are read without running the files, which import all that predictions need: a command line answers
``--help`` at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from tracer.errors import ForetraceError

if TYPE_CHECKING:
    from graph_predictor.prediction.edit import Edit

Value = str | float | bool
T = TypeVar("T")

MODULES = tuple(f"graph_predictor.edits.{name}" for name in (
    "precision", "remove", "scale", "launches", "optimizer", "fusion", "attention", "recompute", "overlap", "compile",
    "straggler", "lookups", "link", "peers", "without_profiler", "scale_out"))
"""Files with declarations. In this order edits are applied where the order is ours to choose."""
NOTHING, ON_OFF, FACTOR = "nothing", "on|off", "FACTOR"
_DECLARATION = re.compile(r"^@edit_option\(.*?^class [^\n]*:$", re.DOTALL | re.MULTILINE)
"""From the option to the head of its class: parsing the files whole takes ten times as long."""


def edit_option(name: str, help: str, *, takes: str = NOTHING, tries: Mapping[str, Value] = {},
                bounds: Mapping[str, Value] = {}) -> Callable[[type[T]], type[T]]:
    """Declare the option of an edit. All arguments are literals, as they are read without being run.

    Args:
        name: of the option, without its dashes.
        help: what the option does.
        takes: "nothing", "on|off" or "FACTOR"; anything else names a text, which the class or its ``parse`` is given.
        tries: values that are worth trying on any step, by what to call them.
        bounds: values that bound what any real change could save, and that nobody can make.
    """
    def unchanged(edit: type[T]) -> type[T]:
        return edit

    return unchanged


@dataclass(frozen=True, slots=True)
class EditOption:
    """An edit as it is declared: arguments as of ``edit_option``, and the class that is declared."""

    module: str
    edit: str
    name: str
    help: str
    takes: str = NOTHING
    tries: Mapping[str, Value] = field(default_factory=dict)
    bounds: Mapping[str, Value] = field(default_factory=dict)

    @property
    def attribute(self) -> str:
        """Return its name where names have no dashes."""
        return self.name.replace("-", "_")

    @property
    def switches(self) -> dict[str, bool]:
        """Return the words that stand for the edit with a value, in lists of edits; none where it takes another."""
        if self.takes == ON_OFF:
            return {self.name: True, f"no-{self.name}": False}
        return {self.name: True} if self.takes == NOTHING else {}

    def changes(self, value: Value | None) -> bool:
        """Return whether a value is an edit at all: a factor of 1 is none."""
        return value is not None and not (self.takes == FACTOR and value == 1.0)

    def make(self, value: Value) -> Edit:
        """Make the edit. Raises ``EditError`` where the value is none of its kind."""
        edit: Any = getattr(import_module(self.module), self.edit)
        made: Edit = edit() if self.takes == NOTHING else getattr(edit, "parse", edit)(value)
        return made

    def written(self, value: Value) -> str:
        """Return the option with a value, as on a command line."""
        if self.takes == NOTHING:
            return f"--{self.name}"
        if self.takes == ON_OFF:
            return f"--{self.name} {'on' if value else 'off'}"
        return f"--{self.name} {value:g}" if isinstance(value, float) else f"--{self.name} {value}"


@cache
def options() -> tuple[EditOption, ...]:
    """Return the edits that are declared, in the order of their files."""
    return tuple(option for module in MODULES for option in _declared(module))


@cache
def _declared(module: str) -> tuple[EditOption, ...]:
    """Return the declarations of a file, in their order."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ForetraceError(f"There is no file of edits {module}; is foretrace installed completely?")
    with open(spec.origin, encoding="utf-8") as file:
        declarations = "".join(f"{found[0]} pass\n" for found in _DECLARATION.finditer(file.read()))
    return tuple(
        EditOption(module, node.name, *map(ast.literal_eval, call.args),
                   **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
        for node in ast.parse(declarations).body if isinstance(node, ast.ClassDef)
        for call in node.decorator_list if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        and call.func.id == edit_option.__name__)


def switched(words: Iterable[str]) -> dict[str, Value]:
    """Return the edits of some words, as ``cuda-graphs`` or ``no-recompute``, by name.

    Raises:
        ForetraceError: a word switches no edit, or two words switch one on and off.
    """
    known = {word: (option.name, value) for option in options() for word, value in option.switches.items()}
    found: dict[str, Value] = {}
    for word in words:
        if word not in known:
            raise ForetraceError(f"{word!r} is no edit that can be switched on; there are {', '.join(known)}.")
        name, value = known[word]
        if found.get(name, value) != value:
            raise ForetraceError(f"--{name} cannot be switched on and off at once; choose one.")
        found[name] = value
    return found


def chosen(values: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return the values by name that are edits, in the registry's order.

    Raises:
        ForetraceError: there is no edit of a name.
    """
    unknown = sorted(set(values) - {option.name for option in options()})
    if unknown:
        raise ForetraceError(f"There is no edit {unknown[0]!r}; there are "
                             f"{', '.join(option.name for option in options())}.")
    return {option.name: value for option in options()
            if (value := values.get(option.name)) is not None and option.changes(value)}


def made(values: Mapping[str, Value]) -> list[Edit]:
    """Make edits of their values by name, in the registry's order. Raises ``EditError`` as ``EditOption.make``."""
    return [option.make(values[option.name]) for option in options() if option.name in values]

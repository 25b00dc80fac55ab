"""Starts and ends commands: late imports, and failures reported as one sentence on stderr and an exit code.

``--help`` needs only the names and first sentences of commands. A command's file imports its modules at the top, but
their code runs only when the command first uses them (``imported_late``): never for ``predict --help``.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import tempfile
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from tracer.errors import ForetraceError, reason_of
from tracer.output_file import FULL

PACKAGES = ("tracer", "kernel_models", "graph_predictor", "step_views", "planner")
REGISTERING = ("kernel_models.families.", "kernel_models.heuristics.", "tracer.campaign.families.")
"""Modules below these register something when they run, so they are never imported late."""
LATE_IMPORTING = ("step_views.cli.", "planner.cli.", "graph_predictor.request.")
"""Modules below these import late: commands, and the studies that decide what a request computes."""


class LateModule(ModuleType):
    """A module whose code runs at the first use of an attribute. (The standard library's lazy module runs twice in
    circular imports.)"""

    def __getattr__(self, name: str) -> Any:
        with self.__dict__["__lock__"]:
            loader = self.__dict__.pop("__late__", None)
            if loader is not None:
                self.__loader__ = self.__spec__.loader = loader  # type: ignore[union-attr]
                # Other modules may import something for what it registers, so only these import late.
                with imported_late() if self.__name__.startswith(LATE_IMPORTING) else imported_at_once():
                    loader.exec_module(self)
                if type(self) is LateModule:  # unless the module has set another class
                    self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call a module that makes itself callable when it runs, as ``tracer.capture`` does."""
        self.__getattr__("__name__")
        return self(*arguments, **named)


class LateLoader(Loader):
    """Turns a module into a ``LateModule``; the given loader runs its code later."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        """Prepare a module to run at its first use."""
        vars(module).update(__late__=self._loader, __lock__=RLock())
        module.__class__ = LateModule


class LateFinder(MetaPathFinder):
    """Finds modules of our packages so that each runs at its first use."""

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to load a module of our packages late; ``None`` for others, which Python finds itself."""
        if path is None or fullname.partition(".")[0] not in PACKAGES or fullname.startswith(REGISTERING):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LateLoader(spec.loader)
        return spec


@contextmanager
def imported_at_once() -> Iterator[None]:
    """Import modules at once, as Python does by default, even within ``imported_late``."""
    finders = sys.meta_path[:]
    sys.meta_path[:] = [each for each in finders if not isinstance(each, LateFinder)]
    try:
        yield
    finally:
        sys.meta_path[:] = finders


@contextmanager
def imported_late() -> Iterator[None]:
    """Import our modules late, at their first use; ``from module import name`` is a use."""
    finder = LateFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class LazyCommand(NamedTuple):
    """Where a command is defined. ``attribute`` of ``module`` is its function, or the ``typer.Typer`` of a command with
    subcommands. ``sentence`` is the first sentence of its help, ``group`` its heading in the help of ``foretrace``, and
    ``command_class`` the name of its own command class in ``module``, if any."""

    module: str
    attribute: str
    group: str
    sentence: str
    command_class: str | None = None

    def built(self, name: str) -> Any:
        """Import the command and return the object that typer makes of it."""
        with imported_late():
            module = import_module(self.module)
            found = getattr(module, self.attribute)  # runs the command's file, whose imports are late
        own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        own.callback()(_nothing)
        if isinstance(found, typer.Typer):
            own.add_typer(found, name=name)
        else:
            own.command(name, cls=None if self.command_class is None else getattr(module, self.command_class))(found)
        group: Any = typer.main.get_command(own)
        return group.commands[name]


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name, each built at its first use."""

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
    """Return the class of a command group with these commands; its help lists their first sentences."""

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
    """Do nothing: with a callback, typer keeps a group of one command as a group."""


MOST_TEXT = 3000
"""Most characters of a sentence; a longer one loses its middle, because its end says what to do."""
MOST_CELL = 500
"""Most characters of a table's cell."""
STDOUT = "the standard output"


def printable(text: str, most: int = MOST_TEXT) -> str:
    """Return a text with control characters, and characters that change the writing direction, escaped (``\\x1b``).

    Newlines stay; a text longer than ``most`` characters loses its middle.
    """
    if len(text) > most:
        end = int(most * 0.25)
        text = f"{text[:most - end]} … ({len(text) - most:,} characters left out) … {text[-end:]}"
    return text if text.isprintable() else "".join(map(_printable, text))


def one_line(text: str, most: int = MOST_CELL) -> str:
    """Return a text on one line, without control characters; of more than ``most`` the middle is cut."""
    return printable(text, most).replace("\n", "\\n")


def tell(text: str) -> None:
    """Write a line to stderr; ignore errors, such as a closed pipe."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


@contextmanager
def standard_output() -> Iterator[None]:
    """Name standard output in errors of writing to it, because the system's error does not."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or STDOUT
        raise
    except ValueError as error:
        if not sys.stdout.closed:
            raise
        # A program that foretrace ran has closed it.
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), STDOUT) from error


class ClosedOutput(io.TextIOWrapper):
    """Replaces a closed standard output. It drops all text, so that work goes on; ``written`` is true if there was
    any."""
    written = False

    def write(self, text: str) -> int:
        """Drop a text, and note that there was one."""
        self.written = self.written or bool(text)
        return len(text)


def finish_output() -> None:
    """Write buffered output at a command's end. Raises ``OSError`` if it cannot be written."""
    with standard_output():
        sys.stdout.flush()
        if isinstance(sys.stdout, ClosedOutput) and sys.stdout.written:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def run_program(app: Callable[[], object]) -> None:
    """Run a command line as this process, and end the process."""
    if sys.stdout is None or sys.stderr is None:
        _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show µ gets a question mark, not a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with one_sentence(debug=False), standard_output():
            try:
                app()
            except SystemExit as ended:
                if not ended.code:
                    finish_output()  # also for --help, which runs no command
                raise
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def _open_closed_streams() -> None:
    """Open the null device for streams that a shell closed (``>&-``), so that no output file gets their numbers."""
    if sys.stdout is None:
        sys.stdout = ClosedOutput(open(os.devnull, "wb"))  # noqa: SIM115 -- until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    if unicodedata.category(character) == "Zs":  # spaces of any width
        return " "
    return character.encode("unicode_escape").decode("ascii")


BAD_INPUT = 2
"""Exit code for errors that the user can correct: a file, an option, a full disk."""
FAILED = 1
"""Exit code for a bug, or too little memory."""
INTERRUPTED = 130  # as shells report SIGINT (128 + 2)
TERMINATED = 143
"""The exit status of a program ended by SIGTERM, as shells report it (128 + 15)."""
BROKEN_PIPE = 141
"""The exit status of a program ended by SIGPIPE, as shells report it (128 + 13)."""


@contextmanager
def one_sentence(debug: bool, context: typer.Context | None = None) -> Iterator[None]:
    """Turn an exception of a command into one sentence and ``typer.Exit``; with ``debug``, print the traceback first.

    For options that the command of ``context`` lacks, the sentence names the command that has them.
    """
    try:
        yield
        finish_output()
    except typer.Exit:
        raise
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); nothing more can be said, and Python must not try at exit.
        _forget_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        code, sentence = _told(error)
        hint = _elsewhere(sentence, context) if code != FAILED else "" if debug else " The option --debug prints where."
        if isinstance(error, OSError) and error.filename == STDOUT:
            _forget_stdout()
        tell(f"foretrace: {' '.join(sentence.split())}{hint}")
        raise typer.Exit(code) from None


_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_NAMED = ("predict", "trace", "capture", "check")
"""Commands to search for options that a sentence names; several commands' errors name these."""


def _elsewhere(sentence: str, context: Any) -> str:
    """Return a sentence on which command has the options that an error names but the running command lacks.

    An option that follows its own command's name (``foretrace trace … --out``) needs no such sentence.
    """
    if context is None:
        return ""
    commands, known = getattr(context.find_root().command, "commands", {}), _options(context.command)
    lacking = [option for option in dict.fromkeys(_OPTION.findall(sentence)) if option not in known]
    said = ""
    for name in _NAMED if lacking else ():
        mine = [option for option in lacking if name in commands and option in _options(commands[name])]
        lacking = [option for option in lacking if option not in mine]
        if mine and f"foretrace {name}" not in sentence:
            verb = "is an option" if len(mine) == 1 else "are options"
            said += f" {' and '.join(mine)} {verb} of foretrace {name}."
    return said


def _options(command: Any) -> set[str]:
    """Return the options of a command, in their written form."""
    return {text for one in command.params for text in (*one.opts, *one.secondary_opts)}


def _told(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the sentence for an exception."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "Interrupted."
    if isinstance(error, ForetraceError):
        return BAD_INPUT, str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch":
        lacking = "PyTorch" if error.name == "torch" else f"a PyTorch that has {error.name} (2.6 or newer)"
        return BAD_INPUT, f"This needs {lacking}; install it with: pip install 'foretrace[capture]'."
    if isinstance(error, MemoryError):
        return FAILED, "There is not enough memory for this trace; give fewer ranks at a time, or use a larger machine."
    if isinstance(error, OSError) and error.filename == STDOUT and error.errno == errno.EBADF:
        return BAD_INPUT, ("The standard output is closed, so that the answer could not be written; send it to a file, "
                           "or to /dev/null if it is not wanted.")
    if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
        return BAD_INPUT, (f"{error.strerror}: neither what was written, nor the temporary directory "
                           f"{tempfile.gettempdir()}, may have had room; free space. Existing outputs are unchanged.")
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return BAD_INPUT, f"{where}{error.strerror or error}; check the path, its permissions and the free space."
    return FAILED, (f"An unexpected error, which is a bug of foretrace: {type(error).__name__}: "
                    f"{reason_of(error, 300)}. Please report it with the trace.")


def _forget_stdout() -> None:
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is not a file (a test's buffer)
        pass

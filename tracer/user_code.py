"""A user's program, found by name and run as Python itself would: a script, a module of a package, or a notebook.

- train.py: ``python train.py``; its folder is first on the module path.
- package.train: ``python -m package.train``; the current directory is first on the module path.
- train.ipynb: Its code cells, in order, in one module (``tracer.notebook``).
"""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tracer import notebook

NOTEBOOK = ".ipynb"
SUFFIXES = (".py", NOTEBOOK)
"""Endings of file names that always mean a program, even if the file is missing."""
_MAIN = "__main__"


@dataclass(frozen=True, slots=True)
class UserCode:
    """A program that exists.

    Attributes:
        name: Its name as given.
        file: File that is run first: its own, or that of the module. Tracebacks show its text.
        module: Its dotted name if it is run as a module of its package, else empty.
        folders: Folders that are put first on the module path.
    """

    name: str
    file: Path
    module: str
    folders: tuple[str, ...]

    @property
    def is_notebook(self) -> bool:
        """Return whether the program is a notebook."""
        return self.file.suffix == NOTEBOOK

    def run(self, arguments: Sequence[str]) -> None:
        """Run the program as ``__main__`` with these arguments, and restore ``sys.argv`` and ``sys.path``.

        Raises:
            BaseException: any exception of the program.
        """
        with self._found([self.name, *arguments]):
            if self.is_notebook:
                notebook.run(self.file, _MAIN)
            elif self.module:
                runpy.run_module(self.module, run_name=_MAIN, alter_sys=True)
            else:
                runpy.run_path(str(self.file), run_name=_MAIN)

    def names_for(self, function: str) -> dict[str, Any]:
        """Run the program as an import would, without arguments, and return its names; a notebook up to the cell that
        defines ``function``.

        Later imports, within functions, need the context of ``importing``.
        """
        if self.is_notebook:
            return notebook.run(self.file, self.file.stem, until=function)
        if self.module:
            sys.modules.pop(self.module, None)  # it runs again; its imports do not
            return vars(importlib.import_module(self.module))
        return runpy.run_path(str(self.file), run_name=self.file.stem)

    def importing(self) -> Any:
        """Return a context in which the program finds its modules, and its own name as the command line."""
        return self._found([str(self.file)])

    def defines(self, value: Any) -> bool:
        """Return whether the program defined a function itself, and did not import it, in ``names_for``."""
        return getattr(value, "__module__", "") == (self.module or self.file.stem)

    def module_wanted_by(self, error: BaseException) -> str:
        """Return the module name under which the program's failed import from its own package would succeed; empty if
        the error has another cause."""
        module = _in_package(self.file)[0]
        if self.module or "." not in module or not isinstance(error, ImportError):
            return ""
        own = (error.name or "").split(".")[0] == module.split(".")[0]
        return module if own or "relative import" in str(error) else ""

    @contextmanager
    def _found(self, command: list[str]) -> Iterator[None]:
        argv, path = sys.argv, list(sys.path)
        sys.argv = command
        sys.path[:0] = self.folders
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path


@dataclass(frozen=True, slots=True)
class UserCommand:
    """A program with its arguments, such as ``train.py --batch 8`` or ``-m package.train``."""

    code: UserCode
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join([*(["-m"] if self.code.module else []), self.code.name, *self.arguments])


def find_command(text: str) -> UserCommand | None:
    """Return the program and the arguments of a text such as "train.py --batch 8" or "-m package.train"; ``None`` if
    the text names a function, or no program that exists."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation that is not closed
        return None
    as_module = words[:1] == ["-m"]
    name, *arguments = words[as_module:] or [""]
    code = find_main(name, as_module=as_module) if as_module or name.endswith(SUFFIXES) else None
    return None if code is None else UserCommand(code, tuple(arguments))


def with_sizes(arguments: Iterable[str], sizes: Mapping[str, int | str]) -> list[str]:
    """Return a program's arguments with sizes in them: each in the place of {NAME}, else as --NAME SIZE at the end."""
    words, placed = [], set()
    for argument in arguments:
        for name, size in sizes.items():
            if f"{{{name}}}" in argument:
                argument = argument.replace(f"{{{name}}}", str(size))
                placed.add(name)
        words.append(argument)
    for name, size in sizes.items():
        if name not in placed:
            words += [f"--{name.replace('_', '-')}", str(size)]
    return words


def find_main(name: str, *, as_module: bool = False) -> UserCode | None:
    """Return the program that ``python name`` or, where there is no such file, ``python -m name`` would run.

    Args:
        name: Name of a file or a module.
        as_module: The name is a module's, even if a file has it.

    Returns:
        The program; ``None`` if there is neither.
    """
    if not as_module and os.path.isfile(name):
        file = Path(os.path.abspath(name))
        return UserCode(name, file, "", (os.path.dirname(os.path.realpath(name)),))
    spec = _module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _module(f"{name}.{_MAIN}")
    return None if spec is None else UserCode(name, Path(str(spec.origin)), name, (os.getcwd(),))


def find_importable(name: str) -> UserCode | None:
    """Return the program with a name, a file or a module by its dotted name; ``None`` if there is neither.

    A file that imports from its own package ("from .models import Net") runs as a module of that package.
    """
    if os.path.isfile(name):
        file = Path(os.path.abspath(name))
        module, root = _in_package(file)
        if "." in module and _levels(file):
            return UserCode(name, file, module, (str(root),))
        return UserCode(name, file, "", tuple(dict.fromkeys((str(file.resolve().parent), str(root)))))
    spec = _module(name)
    return None if spec is None else UserCode(name, Path(str(spec.origin)), name, (os.getcwd(),))


def _in_package(file: Path) -> tuple[str, Path]:
    """Return a file's name as a module, and the folder in which it is found. That is the first without an
    ``__init__.py``, or one further out if its relative imports reach further."""
    names, folder = [file.stem], file.parent
    levels = _levels(file)
    while (folder / "__init__.py").is_file() or (len(names) <= levels and folder.name):
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


def _levels(file: Path) -> int:
    """Return how many packages outward a file's relative imports reach; 0 without any."""
    if file.suffix != ".py":
        return 0
    # Running the file reports such errors; the parser raises the last two for deeply nested text.
    with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return max((node.level for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.ImportFrom)),
                   default=0)
    return 0


def _module(name: str) -> ModuleSpec | None:
    """Return where a module is, by its dotted name, without importing its packages; ``None`` if it is missing or no
    Python source file."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    spec: ModuleSpec | None = None
    path: Any = None
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        for number in range(len(parts)):
            whole = ".".join(parts[:number + 1])
            finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
            found = (finder(whole, path) for finder in finders if finder is not None)
            spec = next((each for each in found if each is not None), None)
            if spec is None:
                return None
            path = spec.submodule_search_locations
            if path is None and number < len(parts) - 1:
                return None
    finally:
        sys.path[:] = before
    is_package = spec is not None and spec.submodule_search_locations is not None
    return spec if is_package or (spec is not None and str(spec.origin).endswith(".py")) else None

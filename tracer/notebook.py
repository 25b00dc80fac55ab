"""Notebooks as programs: the code cells of an ``.ipynb`` file (nbformat 4), run in order in one module.

Text that only IPython understands is left out, with a warning that lists it: shell commands (``!pip install …``), line
magics (``%matplotlib inline``) and cells in other languages (``%%bash``). Of magics that time Python or hide its
output, the Python is run (``%time step()``, ``%%capture``). A line counts as IPython's only if Python cannot parse it.
"""

from __future__ import annotations

import ast
import json
import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tracer.errors import ForetraceError, listed

_WRAPPING = ("time", "timeit", "capture", "prun", "memit", "mprun", "lprun")
"""Magics whose argument, or whose cell, is Python."""
_CELL, _LINE, _SHELL, _HELP = "%%", "%", "!", "?"
_TOO_DEEP = (RecursionError, MemoryError)
"""Errors of Python's parser for deeply nested text; running the text reports them."""


class NotebookError(ForetraceError):
    """A notebook cannot be read, or is not in Python."""


class NotebookWarning(UserWarning):
    """Lines of a notebook were not run."""


def run(file: Path, name: str, until: str | None = None) -> dict[str, Any]:
    """Run a notebook's cells in a module with a given name, and return the module's names.

    Args:
        file: The notebook.
        name: Name of the module in ``sys.modules``. It stays there afterwards, except "__main__", which is restored.
        until: A name; cells after the last one that defines it at top level are not run.

    Raises:
        NotebookError: It cannot be read.
        BaseException: any exception of a cell.
    """
    cells, left_out = _compiled(file, until)
    if left_out:
        warnings.warn(f"{file.name} has lines that only IPython runs, which were left out: {listed(left_out)}.",
                      NotebookWarning, stacklevel=2)
    module = ModuleType(name)
    module.__dict__["display"] = _display
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        for code in cells:
            exec(code, module.__dict__)
    finally:
        if name == "__main__" and before is not None:
            sys.modules[name] = before
    return module.__dict__


def _display(*values: object, **_: object) -> None:
    """Show values as IPython's ``display`` does, as text."""
    sys.stdout.write(" ".join(map(str, values)) + "\n")


def _compiled(file: Path, until: str | None) -> tuple[list[CodeType], list[str]]:
    """Return the compiled cells, and the lines that were left out."""
    texts = _cells(file)
    left_out: list[str] = []
    read: list[tuple[str, str]] = []
    for number, text in texts:
        place = f"{file}, cell {number}"
        python = _python(text, left_out.append)
        # Tracebacks and inspect.getsource read the lines of a cell as those of a file.
        linecache.cache[place] = (len(python), None, python.splitlines(keepends=True), place)
        read.append((place, python))
    if until is not None:
        defining = [at for at, (_, python) in enumerate(read) if _defines(python, until)]
        read = read[:defining[-1] + 1] if defining else read
    return [compile(python, place, "exec", dont_inherit=True) for place, python in read], left_out


def _cells(file: Path) -> list[tuple[int, str]]:
    """Return the code cells, each with its number among all cells, from 1."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        cells = held["cells"]
        language = (held.get("metadata", {}).get("kernelspec") or {}).get("language", "python")
        texts = [(number, "".join(cell["source"])) for number, cell in enumerate(cells, 1)
                 if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotebookError(f"{file} cannot be read as a notebook: save it as .ipynb of format 4, or export it as a "
                            "script.") from None
    if language.lower() != "python":
        raise NotebookError(f"{file} is a notebook of {language}, and only Python's are run.")
    return texts


def _python(text: str, leave_out: Callable[[str], None]) -> str:
    """Return a cell's text as valid Python with the same number of lines, without what only IPython understands."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.startswith(_CELL):
        if _word(first, _CELL) not in _WRAPPING:
            leave_out(first.strip())
            return "\n" * len(lines)
        lines[lines.index(first)] = ""
    for _ in range(len(lines)):
        try:
            ast.parse("\n".join(lines))
        except _TOO_DEEP:
            break
        except SyntaxError as error:
            at = (error.lineno or 0) - 1
            if not 0 <= at < len(lines):
                break
            replaced = _without_magic(lines[at], leave_out)
            if replaced is None:
                break
            lines[at] = replaced
        else:
            break
    return "\n".join(lines) + "\n"


def _without_magic(line: str, leave_out: Callable[[str], None]) -> str | None:
    """Return a line of IPython as Python; ``None`` for any other line."""
    text = line.strip()
    indent = line[:len(line) - len(line.lstrip())]
    if text.startswith(_LINE) and _word(text, _LINE) in _WRAPPING:
        words = text.split(None, 1)
        return indent + (words[1] if len(words) > 1 else "pass")
    if text.startswith((_LINE, _SHELL, _HELP)) or text.endswith(_HELP):
        leave_out(text)
        return f"{indent}pass"
    return None


def _word(text: str, mark: str) -> str:
    """Return the name of a magic."""
    return (text.strip().removeprefix(mark).split() or [""])[0]


def _defines(python: str, name: str) -> bool:
    """Return whether a cell assigns a name at its top level."""
    try:
        body = ast.parse(python).body
    except (SyntaxError, *_TOO_DEEP):  # running it reports the error
        return False
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name
                                                for target in node.targets for each in ast.walk(target)):
            return True
        if isinstance(node, ast.ImportFrom | ast.Import) and any((each.asname or each.name) == name
                                                                 for each in node.names):
            return True
    return False

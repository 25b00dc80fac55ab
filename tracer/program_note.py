"""How a captured program was started, noted so that it can be named again.

::

    capture ──note──> context.json ──> Meta.program ──code_for──> "train.py:build", "train.py --seq 64 --batch {batch}"

The note has the program's name, a digest of its text, its arguments, and its options with whole numbers, given or by
default. Of the arguments it keeps names of options, numbers, and words that the program's own text has. So it has no
keys, no names of users and no paths. Everything is found in the text: nothing is run.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from tracer.graph import ProgramNote
from tracer.user_code import UserCode, find_main

LEFT_OUT = "…"
"""What is written in the place of an argument that is not noted."""
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_NUMBER = re.compile(r"[-+]?\d{1,10}(\.\d{1,10})?(e[-+]?\d{1,3})?")
_PLACED = re.compile(rf"[\w./:=+{{}}{LEFT_OUT}-]+")
"""A word that needs no quotation within the text of ``--code``."""
_LONGEST = 40
"""Most characters of a word that is noted."""


def note(code: UserCode, arguments: Sequence[str]) -> ProgramNote:
    """Return the note of a program that is captured."""
    tree = _tree(code)
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    options, aliases = _declared(tree)
    kept = [_kept(each, words) for each in arguments]
    for name, value in _given(kept):
        options[aliases.get(name, _plain(name))] = int(value) if value.isdecimal() and len(value) <= 10 else None
    name = code.name
    if not code.module and os.path.isabs(name):
        here = os.path.relpath(name)
        name = os.path.basename(name) if here.startswith(os.pardir) else here
    return ProgramNote(name, bool(code.module), _digest(code), kept, options)


def code_for(program: ProgramNote | None, names: Collection[str]) -> str:
    """Return the text of ``--code`` with which a captured program is traced again at other sizes.

    That is its only function that takes the sizes and returns a step; else the program and its arguments, if it has an
    option for each size.

    Args:
        program: the note, if there is one.
        names: the sizes.

    Returns:
        The text; empty if the program is not here, has changed since, or takes no such sizes.
    """
    code = None if program is None else find_main(program.name, as_module=program.module)
    if program is None or code is None or _digest(code) != program.digest:
        return ""
    tree = _tree(code)
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and _takes(each, names)
                 and _builds(each, tree)]
    if len(functions) == 1:
        return shlex.quote(f"{code.name}:{functions[0].name}")
    if code.is_notebook or not set(names) <= set(program.options):
        return ""
    aliases = _declared(tree)[1]
    words = [*(["-m"] if code.module else []), code.name]
    for before, each in zip(["", *program.arguments], program.arguments, strict=False):
        words.append(_placed(each, before, {spelt: name for spelt, name in aliases.items() if name in names}))
    return shlex.quote(" ".join(each if _PLACED.fullmatch(each) else shlex.quote(each) for each in words))


def _digest(code: UserCode) -> str:
    try:
        return hashlib.sha256(code.file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _tree(code: UserCode) -> ast.Module:
    """Return a program's syntax tree; an empty one if it is no Python that can be parsed."""
    # The parser raises the last two for deeply nested text.
    with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(code.file.read_bytes())
    return ast.Module([], [])


def _declared(tree: ast.Module) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the options that calls such as ``add_argument("-b", "--batch", default=8)`` declare: each with its default
    if that is a whole number, and the name of each spelling."""
    options: dict[str, int | None] = {}
    aliases: dict[str, str] = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        spelt = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
                 and _OPTION.fullmatch(each.value)]
        long = next((each for each in spelt if each.startswith("--")), None)
        if long is None:
            continue
        default = next((each.value for each in call.keywords if each.arg == "default"), None)
        value = default.value if isinstance(default, ast.Constant) else None
        options[_plain(long)] = value if type(value) is int else None
        aliases.update(dict.fromkeys(spelt, _plain(long)))
    return options, aliases


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options among arguments, with their values: "--batch 8", "--batch=8"."""
    for each, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = each.partition("=")
        if _OPTION.fullmatch(name):
            yield name, value if equals else following


def _kept(argument: str, words: Collection[str]) -> str:
    """Return an argument as it is noted."""
    name, equals, value = argument.partition("=")
    if equals and _is_noted(name, words):
        return f"{name}={value if _is_noted(value, words) else LEFT_OUT}"
    return argument if not equals and _is_noted(argument, words) else LEFT_OUT


def _is_noted(word: str, words: Collection[str]) -> bool:
    if len(word) > _LONGEST or not word.isprintable():
        return False
    return word in words or _NUMBER.fullmatch(word) is not None or (
        _OPTION.fullmatch(word) is not None and (word.startswith("--") or len(word) == 2))


def _placed(argument: str, before: str, spellings: Mapping[str, str]) -> str:
    """Return an argument with {NAME} in the place of a size; ``spellings`` has the sizes' options."""
    if before in spellings:
        return f"{{{spellings[before]}}}"
    option = argument.partition("=")[0]
    return f"{option}={{{spellings[option]}}}" if "=" in argument and option in spellings else argument


def _takes(function: ast.FunctionDef, names: Collection[str]) -> bool:
    """Return whether a function can be called with arguments of these names alone."""
    taken, wanted = function.args, set(names)
    positional = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    needed = {*positional[:len(positional) - len(taken.defaults)],
              *(each.arg for each, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None)}
    known = {each.arg for each in (*taken.args, *taken.kwonlyargs)}
    return needed <= wanted and (wanted <= known or taken.kwarg is not None)


def _builds(function: ast.FunctionDef, tree: ast.Module, depth: int = 2) -> bool:
    """Return whether a function returns a training step: a function of its own without arguments that calls
    ``backward`` or an optimizer's ``step``; itself, or by another function of the file."""
    own = {each.name: each for each in ast.walk(function) if isinstance(each, ast.FunctionDef) and each is not function}
    of_file = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(function):
        value = each.value if isinstance(each, ast.Return) else None
        step = own.get(value.id) if isinstance(value, ast.Name) else None
        if step is not None and _takes(step, ()) and any(
                isinstance(inner, ast.Attribute) and inner.attr in ("backward", "step") for inner in ast.walk(step)):
            return True
        called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        if depth and called in of_file and _builds(of_file[called], tree, depth - 1):
            return True
    return False

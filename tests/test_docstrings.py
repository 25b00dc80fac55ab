"""A docstring speaks of what is there: every name under "Attributes:" and "Args:" is one of the class or function, and
``module.name`` is where it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner")


def listed(docstring: str, title: str) -> list[str]:
    """Names that a section explains: "a, b: what they are" at its least indentation."""
    section = re.search(rf"^( *){title}:\n((?:\1 +.*\n|\s*\n)*)", docstring + "\n", re.MULTILINE)
    lines = [line for line in section.group(2).splitlines() if line.strip()] if section else []
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    heads = [line.strip().partition(":")[0] for line in lines if len(line) - len(line.lstrip()) == indent]
    return [name.strip(" *") for head in heads if re.fullmatch(r"[\w*, ]+", head) for name in head.split(",")]


def parameters(function: ast.FunctionDef) -> set[str]:
    """Names of a function's parameters."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def attributes(owner: ast.ClassDef, beside: dict[str, ast.ClassDef]) -> set[str]:
    """Names that a class, or one in its file that it inherits from, assigns or defines."""
    found = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(owner):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in beside:
            found |= attributes(beside[base.id], beside)
    return found


def absent(path: Path, tree: ast.Module) -> Iterator[str]:
    """What docstrings of a file explain that is not there."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            yield from (f"{path.name}: {node.name}.{name}" for name in listed(docstring, "Attributes")
                        if name not in attributes(node, classes))
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield from (f"{path.name}: {node.name}({name}=)" for name in listed(docstring, "Args")
                                if name not in parameters(each))
        elif isinstance(node, ast.FunctionDef):
            yield from (f"{path.name}: {node.name}({name}=)" for name in listed(ast.get_docstring(node) or "", "Args")
                        if name not in parameters(node))


OTHERS = {"torch", "meta", "optimizer", "row", "workload", "x"}
"""Names before a dot that are objects, or other people's modules, though a module or a name of ours is called so."""

DOTTED = re.compile(r"``([a-z_]\w*)\.(\w+)[^`\n]*``")
TOP = re.compile(r"^(?:def |class |(?=[A-Z_]+\b[^(]*=))(\w+)", re.MULTILINE)
"""Functions, classes and constants of a module's text."""


def defined(tree: ast.AST) -> set[str]:
    """Names that a file defines or imports, in functions and classes too."""
    return {name for node in ast.walk(tree) for name in (
        [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else
        [node.asname or node.name] if isinstance(node, ast.alias) else
        [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else
        [node.arg] if isinstance(node, ast.arg) else [])}


def misplaced(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Dotted names of docstrings, ``module.name``, whose module has no such name, or that are of no module of ours.

    What a file defines itself is taken for an object before a dot, unless a class or a constant follows.
    """
    defines = {path: defined(tree) for path, tree in trees.items()}
    modules: dict[str, set[str]] = {}
    for path, own in defines.items():
        modules.setdefault(path.parent.name if path.stem == "__init__" else path.stem, set()).update(own)
        modules.setdefault(path.parent.name, set()).add(path.stem)
        modules.setdefault(path.parent.parent.name, set()).add(path.parent.name)
    ours = {name for path in trees for name in TOP.findall(path.read_text(encoding="utf-8"))}
    for path, own in defines.items():
        for first, name in DOTTED.findall("".join(path.read_text(encoding="utf-8").split('"""')[1::2])):
            if first not in OTHERS and name not in ("py", "json") and (name in ours if first not in modules else
                    name not in modules[first] and (first not in own or name[0].isupper())):
                yield f"{path.name}: {first}.{name}"


def test_what_is_listed_is_found_in_a_docstring() -> None:
    docstring = "A thing.\n\nArgs:\n    a, b: two\n        of them: really\n    *c: more\n"
    assert listed(docstring, "Args") == ["a", "b", "c"]


def test_docstrings_name_only_what_is_there() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8"))
             for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
    assert [name for path, tree in trees.items() for name in absent(path, tree)] == []
    assert list(misplaced(trees)) == []

"""The text of all packages, parsed once: docstrings, names of classes, and circles of imports.

A docstring speaks of what is there: every name under "Attributes:" and "Args:" is one of the class or function, and
``module.name`` is where it says. No two public classes have one name. No circle of imports has more than two files,
those of type checkers and of functions counted; a name that a package's ``__init__`` hands on, at once or on first use,
counts as an import of the file that defines it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner", "step_views")


@dataclass(frozen=True)
class SourceFile:
    """A file, its text, and all nodes of its tree, the module first."""

    path: Path
    text: str
    nodes: list[ast.AST]


@cache
def sources() -> tuple[SourceFile, ...]:
    """Every file of the packages."""
    texts = {path: path.read_text(encoding="utf-8")
             for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
    return tuple(SourceFile(path, text, list(ast.walk(ast.parse(text)))) for path, text in texts.items())


def test_each_module_says_what_it_is_for_and_each_public_class_has_a_name_of_its_own() -> None:
    """One word means one thing."""
    assert [str(file.path) for file in sources() if not ast.get_docstring(file.nodes[0])] == []
    homes: dict[str, list[str]] = defaultdict(list)
    for file in sources():
        for node in file.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.path.relative_to(ROOT)))
    assert len(homes) > 400
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


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


def absent(file: SourceFile) -> Iterator[str]:
    """What docstrings of a file explain that is not there."""
    classes = {node.name: node for node in file.nodes if isinstance(node, ast.ClassDef)}
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if names := listed(docstring, "Attributes"):
                there = attributes(node, classes)
                yield from (f"{file.path.name}: {node.name}.{name}" for name in names if name not in there)
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    yield from (f"{file.path.name}: {node.name}({name}=)" for name in listed(docstring, "Args")
                                if name not in parameters(each))
        elif isinstance(node, ast.FunctionDef):
            yield from (f"{file.path.name}: {node.name}({name}=)"
                        for name in listed(ast.get_docstring(node) or "", "Args") if name not in parameters(node))


OTHERS = {"torch", "meta", "optimizer", "row", "workload", "x"}
"""Names before a dot that are objects, or other people's modules, though a module or a name of ours is called so."""

DOTTED = re.compile(r"``([a-z_]\w*)\.(\w+)[^`\n]*``")
TOP = re.compile(r"^(?:def |class |(?=[A-Z_]+\b[^(]*=))(\w+)", re.MULTILINE)
"""Functions, classes and constants of a module's text."""


def defined(file: SourceFile) -> set[str]:
    """Names that a file defines or imports, in functions and classes too."""
    return {name for node in file.nodes for name in (
        [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else
        [node.asname or node.name] if isinstance(node, ast.alias) else
        [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else
        [node.arg] if isinstance(node, ast.arg) else [])}


def misplaced() -> Iterator[str]:
    """Dotted names of docstrings, ``module.name``, whose module has no such name, or that are of no module of ours.

    What a file defines itself is taken for an object before a dot, unless a class or a constant follows.
    """
    defines = {file.path: defined(file) for file in sources()}
    modules: dict[str, set[str]] = {}
    for path, own in defines.items():
        modules.setdefault(path.parent.name if path.stem == "__init__" else path.stem, set()).update(own)
        modules.setdefault(path.parent.name, set()).add(path.stem)
        modules.setdefault(path.parent.parent.name, set()).add(path.parent.name)
    ours = {name for file in sources() for name in TOP.findall(file.text)}
    for file in sources():
        own = defines[file.path]
        for first, name in DOTTED.findall("".join(file.text.split('"""')[1::2])):
            if first not in OTHERS and name not in ("py", "json") and (name in ours if first not in modules else
                    name not in modules[first] and (first not in own or name[0].isupper())):
                yield f"{file.path.name}: {first}.{name}"


def test_docstrings_name_only_what_is_there() -> None:
    docstring = "A thing.\n\nArgs:\n    a, b: two\n        of them: really\n    *c: more\n"
    assert listed(docstring, "Args") == ["a", "b", "c"]
    assert [name for file in sources() for name in absent(file)] == []
    assert list(misplaced()) == []


class Packages:
    """Every file of the packages, and which names the ``__init__`` of each folder hands on from where."""

    def __init__(self) -> None:
        self.files = {".".join(file.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
                      for file in sources()}
        self.handed_on: dict[tuple[str, str], tuple[str, str]] = {}
        for name, file in self.files.items():
            if file.path.name != "__init__.py":
                continue
            for node in file.nodes:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    for alias in node.names:
                        self.handed_on[name, alias.asname or alias.name] = (node.module, alias.name)
                elif isinstance(node, ast.Dict):  # what ``lazily`` is told
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                            module, _, there = str(value.value).partition(":")
                            self.handed_on.setdefault((name, str(key.value)), (module, there or str(key.value)))

    def home(self, module: str, name: str) -> str:
        """The file that ``from module import name`` takes the name from."""
        if f"{module}.{name}" in self.files:
            return f"{module}.{name}"
        further = self.handed_on.get((module, name))
        return module if further is None else self.home(*further)

    def imported(self, file: str) -> Iterator[str]:
        """Files that a file imports anywhere."""
        for node in self.files[file].nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from (self.home(node.module, alias.name) for alias in node.names)


def test_no_circle_has_more_than_two_files() -> None:
    packages = Packages()
    assert len(packages.files) > 300
    assert packages.home("tracer", "read_kineto") == "tracer.kineto.reader"
    graph = nx.DiGraph((file, other) for file in packages.files for other in packages.imported(file)
                       if other in packages.files and other != file)
    groups = [group for group in nx.strongly_connected_components(graph) if len(group) > 1]
    # The largest is tracer/graph.py and the three files that its methods call: pairs, all of one file.
    assert max(map(len, groups)) <= 4, max(groups, key=len)
    assert [circle for group in groups for circle in nx.simple_cycles(graph.subgraph(group)) if len(circle) > 2] == []

"""No circle of imports has more than two files, those of type checkers and of functions counted.

A name that a package's ``__init__`` hands on, at once or on first use, counts as an import of the file that defines it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGES = ("tracer", "kernel_models", "graph_predictor", "planner", "foretrace")


class Packages:
    """Every file of the packages, and which names the ``__init__`` of each folder hands on from where."""

    def __init__(self) -> None:
        paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
                 for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
        self.handed_on: dict[tuple[str, str], tuple[str, str]] = {}
        for name, path in paths.items():
            if path.name != "__init__.py":
                continue
            for node in ast.walk(self.trees[name]):
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
        if f"{module}.{name}" in self.trees:
            return f"{module}.{name}"
        further = self.handed_on.get((module, name))
        return module if further is None else self.home(*further)

    def imported(self, file: str) -> Iterator[str]:
        """Files that a file imports anywhere."""
        for node in ast.walk(self.trees[file]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from (self.home(node.module, alias.name) for alias in node.names)


def test_no_circle_has_more_than_two_files() -> None:
    packages = Packages()
    assert len(packages.trees) > 300
    assert packages.home("tracer", "read_kineto") == "tracer.kineto.reader"
    graph = nx.DiGraph((file, other) for file in packages.trees for other in packages.imported(file)
                       if other in packages.trees and other != file)
    groups = [group for group in nx.strongly_connected_components(graph) if len(group) > 1]
    # The largest is tracer/graph.py and the three files that its methods call: pairs, all of one file.
    assert max(map(len, groups)) <= 4, max(groups, key=len)
    assert [circle for group in groups for circle in nx.simple_cycles(graph.subgraph(group)) if len(circle) > 2] == []

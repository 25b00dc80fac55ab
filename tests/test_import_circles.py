"""No circle of imports has more than two files, those of type checkers and of functions counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGES = ("tracer", "kernel_models", "graph_predictor", "foretrace")


def imported(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Names of the project's modules that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in modules else node.module


def test_no_circle_has_more_than_two_files() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for package in PACKAGES
               for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"}
    assert len(modules) > 300
    graph = nx.DiGraph((name, other) for name, path in modules.items()
                       for other in imported(ast.parse(path.read_text()), modules) if other in modules)
    assert [circle for circle in nx.simple_cycles(graph, length_bound=12) if len(circle) > 2] == []
    # Longer circles would show as larger groups of files that all reach each other.
    assert max(map(len, nx.strongly_connected_components(graph))) <= 3

"""How much there is to read: the modules that five commands cross, and the size of every package and room.

    python benchmarks/walks.py [--root CHECKOUT]             # the table
    python benchmarks/walks.py --check                       # exit code 1 where something is over its ceiling
    python benchmarks/walks.py --page docs/architecture.md   # write the page's list of rooms and its table

Replay, a prediction for another host, one at another size, a plan and a price are run in this process under a profiler
hook that notes which module each Python call is made from and into. Imports and compilation are left out: each command
runs once before. What that run keeps in memory, such as read device files, is not crossed again. So a first run crosses
2 modules more (replay), or 5, 4, 7 and 6 (the others in this order). A capability that comes may raise its own
package's ceiling by its size; those of walks never rise.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("foretrace", "planner", "step_views", "graph_predictor", "kernel_models", "tracer")
WALKS = {
    "replay": ["replay", "{trace}"],
    "another host": ["predict", "{trace}", "--host", "0.5"],
    "another size": ["predict", "{trace}", "--set", "batch=8"],
    "a plan": ["plan", "llama", "--gpus", "8"],
    "a price": ["price", "aten::mm", "--shapes", "512x512,512x512", "--device", "h200-sxm"],
}
MODULES = {"replay": 32, "another host": 55, "another size": 90, "a plan": 47, "a price": 18}
"""Ceilings of the modules that a command crosses."""
LINES = {"foretrace": 424, "planner": 18_070, "step_views": 20_241, "graph_predictor": 22_463, "kernel_models": 20_666,
         "tracer": 35_104}
INNER_IMPORTS = 100
"""Ceiling of imports inside functions, of all packages together."""
LATE = ("torch", "ray", "distributed", "google", "matplotlib", "perfetto", "tensorboardX", "tracer.fake_world",
        "tracer.shape_only", "tracer.campaign.host_programs", "tracer.workloads.workload")
"""What is imported inside functions without saying why: PyTorch, packages that only an extra installs, and the modules
of ``tracer`` that import PyTorch. A plain install reads and predicts without them, and starts quickly."""
BEGIN, END = "<!-- walks.py writes this -->", "<!-- until here -->"


class Walk:
    """Counts calls between modules of the packages."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.changes = self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        here = frame.f_globals.get("__name__", "")
        if frame.f_code.co_filename == "<string>":
            return  # the command line's annotations, which typer evaluates of every command
        if here.partition(".")[0] not in PACKAGES:
            return
        self.modules.add(here)
        self.calls += 1
        before = frame.f_back
        if before is not None and before.f_globals.get("__name__", "") != here:
            self.changes += 1


class Room(NamedTuple):
    """A folder of a package, without those below it."""

    name: str
    files: int
    lines: int
    question: str


def run(arguments: list[str]) -> None:
    """Run a command, whatever it prints. Raises ``RuntimeError``: it failed, so that its walk ended early."""
    from foretrace.commands import app

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            app(arguments)
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"foretrace {' '.join(arguments)}: {said.getvalue().strip()}") from None


def watched(work: Callable[[], None]) -> Walk:
    """Do some work twice, the second time under the hook."""
    work()
    walk = Walk()
    sys.setprofile(walk)
    try:
        work()
    finally:
        sys.setprofile(None)
    return walk


def walked(root: Path) -> dict[str, Walk]:
    """Run the five commands of a checkout."""
    trace = str(root / "traces" / "bert-cpu")
    return {name: watched(lambda words=words: run([word.format(trace=trace) for word in words]))  # type: ignore[misc]
            for name, words in WALKS.items()}


def rooms_of(root: Path, package: str) -> Iterator[Room]:
    """Every folder of a package, with the first sentence of its ``__init__``."""
    for folder in sorted({path.parent for path in (root / package).rglob("*.py")}):
        files = list(folder.glob("*.py"))
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        yield Room(str(folder.relative_to(root)), len(files),
                   sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
                   " ".join(said.split("\n\n")[0].split()))


def inner_imports(root: Path) -> dict[tuple[Path, int], bool]:
    """Imports inside functions of all packages, by file and line: whether each has its reason.

    Modules that are named as text (``import_module``, ``tracer.lazy``) are not counted.

    The reason is ``LATE``, or a comment on its line or on the line above its group of imports.
    """
    found: dict[tuple[Path, int], bool] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            nodes = {each.lineno: each for node in ast.walk(ast.parse(text))
                     if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                     for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom)}
            said, lines = commented(text) if nodes else set(), text.splitlines()
            starts = {node.end_lineno: line for line, node in nodes.items()}
            for line, node in sorted(nodes.items()):
                first = line  # of its group, in which a blank line parts the packages of others from our own
                while above := starts.get(first - 1 if lines[first - 2].strip() else first - 2):
                    first = above
                found[path, line] = is_late(node) or first - 1 in said or not said.isdisjoint(
                    range(line, (node.end_lineno or line) + 1))
    return found


_FOR_TOOLS = r"(noqa(: [A-Z0-9, ]+)?|type: ignore(\[[a-z, -]+\])?|pragma: \w+( \w+)?)"
LEAST_WORDS = 2
"""Of a reason: shorter ones say nothing."""


def is_late(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether all that is imported is of ``LATE``."""
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return all(f"{name}.".startswith(tuple(f"{late}." for late in LATE)) for name in names)


def commented(text: str) -> set[int]:
    """Lines of a file with a comment of two words or more; words for tools (``noqa``) do not count."""
    return {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
            and len(re.sub(_FOR_TOOLS, "", token.string).strip("# ").split()) >= LEAST_WORDS}


def overruns(root: Path, walks: dict[str, Walk]) -> list[str]:
    """Say what is over its ceiling."""
    found = [f"{name} crosses {len(walk.modules)} modules, at most {MODULES[name]} were agreed"
             for name, walk in walks.items() if len(walk.modules) > MODULES[name]]
    for package, most in LINES.items():
        lines = sum(room.lines for room in rooms_of(root, package))
        if lines > most:
            found.append(f"{package} has {lines:,} lines, at most {most:,} were agreed")
    inner = inner_imports(root)
    if len(inner) > INNER_IMPORTS:
        found.append(f"{len(inner)} imports stand inside functions, at most {INNER_IMPORTS} were agreed")
    return [*found, *(f"{path.relative_to(root)}:{line} imports inside a function and does not say why: move it to the "
                      "top, or say why in a comment" for (path, line), has_reason in inner.items() if not has_reason)]


def table(root: Path, walks: dict[str, Walk]) -> Iterator[str]:
    """Lines of the page: rooms, then walks with their ceilings."""
    yield "| room | files | lines | |"
    yield "|---|---|---|---|"
    for package in PACKAGES:
        rooms = list(rooms_of(root, package))
        yield (f"| **`{package}/`** | {sum(room.files for room in rooms)} | {sum(room.lines for room in rooms):,} "
               f"| {rooms[0].question} |")
        for room in rooms[1:]:
            yield f"| `{room.name}/` | {room.files} | {room.lines:,} | {room.question} |"
    yield ""
    yield "| command | modules crossed | ceiling | changes of module |"
    yield "|---|---|---|---|"
    for name, walk in walks.items():
        yield f"| {name} | {len(walk.modules)} | {MODULES[name]} | {walk.changes:,} |"
    yield ""
    yield f"Imports inside functions: {len(inner_imports(root))}, at most {INNER_IMPORTS}."


def main() -> int:
    """Print the table, or check it, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--check", action="store_true", help="exit with 1 where something is over its ceiling")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    asked = parser.parse_args()
    root = asked.root.resolve()
    sys.path.insert(0, str(root))
    os.environ["OMP_NUM_THREADS"] = "1"
    walks = walked(root)
    if asked.check:
        over = overruns(root, walks)
        print("\n".join(over) or "Nothing is over its ceiling.")
        return 1 if over else 0
    lines = list(table(root, walks))
    if asked.page is None:
        print("\n".join(lines))
        return 0
    text = asked.page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    asked.page.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{rest.split(END)[1]}"]),
                          encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

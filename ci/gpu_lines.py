"""List the lines of what runs on GPUs that no test runs: each is one that first runs on a user's GPU.

    pip install coverage && python ci/gpu_lines.py [AREA …]

Runs each area's tests, whose GPUs are simulated, and prints file, lines, function and the first of the lines. Processes
that tests start count too, unless they are killed. ``coverage`` may also lie anywhere on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "capture": ((*(f"tracer/capture/{name}.py" for name in ("context", "readiness", "recorder", "session")),
                 "tracer/gpu_state.py"),
                ("tests/tracer/test_capture.py", "tests/tracer/test_capture_gpu.py",
                 "tests/tracer/test_capture_interruption.py", "tests/tracer/test_gpu_state.py")),
    "campaign": (("tracer/campaign/*.py",), ("tests/tracer/test_campaign.py", "tests/tracer/test_campaign_gpu.py")),
    "calibration": (("kernel_models/calibration/*.py",),
                    tuple(f"tests/kernel_models/test_{name}.py" for name in (
                        "calibration", "calibration_faults", "visits"))),
    "acceptance": (("graph_predictor/acceptance/*.py",), ("tests/graph_predictor/test_acceptance.py",)),
    "comm": (("tracer/comm_bench/*.py",), ("tests/tracer/test_comm_bench.py",)),
}
"""Files that know a GPU, and the tests of them."""


def main() -> None:
    """Run the tests of some areas, and list."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; default: all")
    chosen = asked.parse_args().areas or list(AREAS)
    if unknown := [name for name in chosen if name not in AREAS]:
        asked.error(f"there is no area {unknown[0]!r}; choose of {', '.join(AREAS)}")
    for name in chosen:
        files, tests = AREAS[name]
        for line in unrun(files, tests):
            sys.stdout.write(line + "\n")


def unrun(files: tuple[str, ...], tests: tuple[str, ...]) -> Iterator[str]:
    """Run tests, and yield a line of text for each run of lines of the files that they did not run."""
    with tempfile.TemporaryDirectory() as folder:
        settings, report = Path(folder, "settings"), Path(folder, "report.json")
        settings.write_text(f"[run]\ndata_file = {folder}/data\nparallel = true\npatch = _exit\n"
                            f"include =\n    {'    '.join(f'{ROOT / file}' + chr(10) for file in files)}")
        # Each process of Python that finds it counts; coverage's own way is a file that only site-packages can have.
        Path(folder, "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
        path = os.pathsep.join(filter(None, (folder, str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False, stdout=sys.stderr,
                       env={**environment, "COVERAGE_PROCESS_START": str(settings)})
        for command, *arguments in (("combine", "-q"), ("json", "-q", "-o", str(report))):
            subprocess.run([sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *arguments], cwd=ROOT,
                           env=environment, check=True, stdout=sys.stderr)
        found = json.loads(report.read_text(encoding="utf-8"))["files"]
    for name, facts in sorted(found.items()):
        text = (ROOT / name).read_text(encoding="utf-8")
        lines, functions = text.splitlines(), list(_functions(ast.parse(text)))
        of_line = {line: min((size, function) for first, last, size, function in functions if first <= line <= last)[1]
                   for line in facts["missing_lines"]}
        for function, members in groupby(facts["missing_lines"], of_line.__getitem__):
            rows = list(members)
            yield f"{name}:{rows[0]}{f'-{rows[-1]}' * (len(rows) > 1)}  {function}  {lines[rows[0] - 1].strip()}"


def _functions(tree: ast.Module) -> Iterator[tuple[int, int, int, str]]:
    """First and last line, number of lines and name of each function, and of the module."""
    yield 1, 1 << 31, 1 << 31, "module"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            yield node.lineno, node.end_lineno, node.end_lineno - node.lineno, node.name


if __name__ == "__main__":
    main()

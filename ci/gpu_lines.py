"""List the lines of what runs on GPUs that no test runs: each is one that first runs on a user's GPU.

    pip install coverage && python ci/gpu_lines.py [--check] [AREA …]

Runs each area's tests, whose GPUs are simulated, and prints file, lines, function and the first of the lines. Processes
that tests start count too, unless they are killed. ``coverage`` may also lie anywhere on PYTHONPATH. ``--check`` prints
only lines of functions that are not in ``LEFT``, and exits with 1 if there are any.
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
from typing import NamedTuple

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
    "acceptance": (("step_views/acceptance/*.py",), ("tests/graph_predictor/test_acceptance.py",)),
    "comm": (("tracer/comm_bench/*.py",), ("tests/tracer/test_comm_bench.py",)),
}
"""Files that know a GPU, and the tests of them."""
LEFT: dict[str, str] = {
    # Without PyTorch, in a fake world, in forks, and after failures: what runs is the same on a CPU.
    "tracer/capture/context.py": "collect_context cpu_model",
    "tracer/capture/readiness.py": "_torch _shared_memory _profile",
    "tracer/capture/recorder.py": "__init__ quiet __getattr__",
    "tracer/capture/session.py": "looked_up __enter__ _enter_world _leave_world _end leave_out __call__ step_function "
                                 "_at_exit _begin_profile _stop_recorder checked_directory",
    # Full disks, directories of others, plans that cannot be, measurements without a sample: likewise.
    "tracer/campaign/items.py": "file_stem",
    "tracer/campaign/micro.py": "measure _is_steady which_kernels",
    "tracer/campaign/plan.py": "combinations",
    "tracer/campaign/processes.py": "wait_ready ask _last_line",
    "tracer/campaign/results.py": "__post_init__ open _adopt _check_empty save _load _clear_scratch",
    "tracer/campaign/runner.py": "_run_all _one _keep_visit _finish _disk count_by",
    "tracer/campaign/source.py": "known chosen",
    "tracer/campaign/tables.py": "warm_variant quickest_visits _read",
    # In workers, which a campaign kills at their end, so that they do not count.
    "tracer/campaign/record.py": "capture_workload convert measure_kernel summarise _grouped",
    "tracer/campaign/worker.py": "main _workload _start _say module",
    "tracer/comm_bench/runner.py": "__post_init__ sweep_sizes run_bench",
    "tracer/comm_bench/worker.py": "sweep",
}
"""Functions that have lines which these tests do not run, by file, and why."""


def main() -> None:
    """Run the tests of some areas, and list."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; default: all")
    asked.add_argument("--check", action="store_true", help="fail for lines that are not in the list of those left")
    options = asked.parse_args()
    chosen = options.areas or list(AREAS)
    if unknown := [name for name in chosen if name not in AREAS]:
        asked.error(f"there is no area {unknown[0]!r}; choose of {', '.join(AREAS)}")
    found = [each for name in chosen for each in unrun(*AREAS[name])]
    if options.check:
        found = [each for each in found if each.function not in LEFT.get(each.file, "").split()]
    for each in found:
        rows = each.rows
        sys.stdout.write(f"{each.file}:{rows[0]}{f'-{rows[-1]}' * (len(rows) > 1)}  {each.function}  {each.text}\n")
    sys.exit(options.check and bool(found))


class Unrun(NamedTuple):
    """Lines of a function that no test ran, and the text of the first."""

    file: str
    function: str
    rows: list[int]
    text: str


def unrun(files: tuple[str, ...], tests: tuple[str, ...]) -> Iterator[Unrun]:
    """Run tests, and yield the lines of each function of the files that they did not run."""
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
            yield Unrun(name, function, rows, lines[rows[0] - 1].strip())


def _functions(tree: ast.Module) -> Iterator[tuple[int, int, int, str]]:
    """First and last line, number of lines and name of each function, and of the module."""
    yield 1, 1 << 31, 1 << 31, "module"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            yield node.lineno, node.end_lineno, node.end_lineno - node.lineno, node.name


if __name__ == "__main__":
    main()

"""Prove that foretrace runs with the newest releases of what it needs, as wheels alone and without ``constraints.txt``.

    python ci/newest.py [--torch 2.11.0] [--env DIR]

Makes an environment of the Python that runs this, installs foretrace into it, and runs there what records and measures;
the tests are those of captures. Prints a table, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "numpy", "pandas", "numba", "scipy", "scikit-learn", "pyarrow")
WARNED = "error:with_modules is deprecated"
"""torch 2.14's warning of what a capture asks for: a program may make errors of warnings, and must keep its capture."""
PARTS = "0,1,2,6"
"""Of ``doctor --gpu``: those of which the other commands here prove nothing."""
CAPTURES = ("capture", "capture_interruption", "capture_gpu", "capture_distributed", "python_calls", "simulated_gpu")

COMMANDS: dict[str, tuple[str, ...]] = {
    "capture": ("-W", WARNED, "-m", "foretrace", "capture", "--workload", "gpt2", "--preset", "tiny", "--out",
                "capture"),
    "replay": ("-m", "foretrace", "replay", "capture"),
    "calibrate": ("-m", "foretrace", "calibrate", "--on", "cpu", "--minutes", "1", "--families", "gemm,elementwise",
                  "--out", "cpu.profile"),
    "calibrate --host": ("-m", "foretrace", "calibrate", "--host", "--on", "cpu", "--minutes", "1.5", "--out",
                         "host.json.gz"),
    "campaign": ("-m", "foretrace", "campaign", "run", "smoke", "--minutes", "1", "--out", "campaign"),
    "doctor": ("-m", "foretrace", "doctor", "--gpu", "--parts", PARTS, "--minutes", "15", "--out", "doctor"),
    "tests": ("-m", "pytest", "-q", *(f"tests/tracer/test_{name}.py" for name in CAPTURES)),
}
"""What is run, by its name in the table: arguments of Python, in an empty directory, but for the tests."""


def main() -> None:
    """Install, run everything, and print the table."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--torch", default="", help="this version instead of the newest")
    asked.add_argument("--env", type=Path, help="a directory for the environment, which is made if it is not there")
    asked.add_argument("--only", choices=COMMANDS, nargs="*", help="run only these")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = installed(options.env or Path(folder, "env"), options.torch)
        rows = [ran(name, python, Path(folder)) for name in options.only or COMMANDS]
    for name, good, seconds in rows:
        sys.stdout.write(f"{name:18} {'ok' if good else 'FAILED':7} {seconds:6.0f} s\n")
    sys.exit(not all(good for _, good, _ in rows))


def installed(env: Path, torch: str) -> Path:
    """Return the Python of an environment into which wheels were installed, and print their versions."""
    python = env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(env, with_pip=True)
    wanted = [f"torch=={torch}"] if torch else []
    subprocess.run([python, "-m", "pip", "install", "-qq", "--upgrade", "--upgrade-strategy", "eager", "--only-binary",
                    ":all:", "-e", f"{ROOT}[capture,gpu]", "pytest", "hypothesis", *wanted], check=True)
    # To be read, not imported: without AMD's library an import of it prints and fails.
    subprocess.run([python, "-m", "pip", "install", "-qq", "--upgrade", "--no-deps", "--target", env / "amdsmi",
                    "amdsmi"], check=True)
    subprocess.run([python, "-c", "import sys, importlib.metadata as m; print(sys.version.split()[0], *("
                                  f"f'{{name}}=={{m.version(name)}}' for name in {NEEDED}))"], check=True)
    return python


def ran(name: str, python: Path, folder: Path) -> tuple[str, bool, float]:
    """Run a command and pass its output on; return its name, whether it ended well, and its seconds."""
    sys.stdout.write(f"--- {name}\n")
    sys.stdout.flush()
    begun = time.monotonic()
    done = subprocess.run([python, *COMMANDS[name]], cwd=ROOT if name == "tests" else folder, check=False,
                          env={"OMP_NUM_THREADS": "1", **os.environ})
    return name, not done.returncode, time.monotonic() - begun


if __name__ == "__main__":
    main()

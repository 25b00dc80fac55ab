"""What is built and given away: the wheel installs and has all data, and the gates of CI systems run their commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.main import get_command

from foretrace.commands import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("foretrace", "tracer", "kernel_models", "graph_predictor", "planner", "step_views")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of what is committed, built by the setuptools that is here: nothing is downloaded."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *PACKAGES):
        os.symlink(ROOT / name, source / name)
    code = ("import sys; from setuptools.build_meta import build_wheel; "
            "sys.stdout = sys.stderr; name = build_wheel(sys.argv[1]); sys.__stdout__.write(name)")
    ran = subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True,
                         timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return out / ran.stdout.splitlines()[-1]


def test_the_wheel_has_every_module_and_every_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    ours = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}
    assert len(ours) > 500 and ours - inside == set() and {f"{package}/py.typed" for package in PACKAGES} <= ours
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
    assert not any(name.startswith(("tests/", "benchmarks/", "traces/")) for name in inside)


def test_an_installed_wheel_lists_devices_and_replays(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = ("import contextlib, sys, foretrace, tracer; assert tracer.__file__.startswith(sys.argv[1])\n"
            "from foretrace.commands import main\n"
            "for sys.argv in (['foretrace', 'devices', 'h200-sxm'], ['foretrace', 'replay', sys.argv[2]]):\n"
            "    with contextlib.suppress(SystemExit): main()")
    ran = subprocess.run([sys.executable, "-c", code, str(site), str(ROOT / "traces" / "cpu-small")], cwd=tmp_path,
                         capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(site)})
    assert ran.returncode == 0, ran.stderr
    assert "H200" in ran.stdout and "median |error|" in ran.stdout


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """``foretrace`` as installed here, and a ``gh`` that notes what it is asked and knows one comment of the gate."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(folder / "foretrace", f'exec "{sys.executable}" -m foretrace "$@"\n')
    executable(folder / "gh", f'echo "$@" >> "{tmp_path}/asked"\n'
                              f'case "$*" in *--jq*) cat "{tmp_path}/earlier" 2>/dev/null;; '
                              f'*body=@*) for a in "$@"; do case "$a" in body=@*) '
                              f'cat "${{a#body=@}}" > "{tmp_path}/comment";; esac; done;; esac\n')
    return folder


def gate(tools: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **settings,
                   "GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary"),
                   "GH_REPO": "somebody/something"}
    return subprocess.run(["bash", str(ROOT / "actions" / "gate" / "gate.sh")], env=environment, cwd=folder,
                          capture_output=True, text=True, timeout=300)


def test_the_github_gate_comments_its_verdict_once(tools: Path, tmp_path: Path) -> None:
    kept, baseline = tmp_path / "kept", json.loads((ROOT / "traces" / "baseline.json").read_text())
    shutil.copytree(ROOT / "traces" / "llama-cpu", kept / "llama-cpu")
    baseline["captures"] = {"llama-cpu": baseline["captures"]["llama-cpu"]}
    (kept / "baseline.json").write_text(json.dumps(baseline))
    ran = gate(tools, tmp_path, GATE_WHAT=str(kept), GATE_COMMENT="true", GATE_PULL_REQUEST="7")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "output").read_text() == "verdict=passed\n"
    comment = (tmp_path / "comment").read_text()
    assert comment.startswith("<!-- foretrace gate -->\n") and "Nothing got worse" in comment
    assert comment.endswith((tmp_path / "summary").read_text())
    asked = (tmp_path / "asked").read_text()
    assert "--method POST repos/somebody/something/issues/7/comments" in asked
    (tmp_path / "earlier").write_text("123\n")
    executable(tools / "foretrace", 'while [ "$1" != --markdown ]; do shift; done; echo worse > "$2"; exit 1\n')
    ran = gate(tools, tmp_path, GATE_WHAT="x", GATE_COMMENT="true", GATE_PULL_REQUEST="7")
    assert ran.returncode == 1 and "PATCH repos/somebody/something/issues/comments/123" in \
        (tmp_path / "asked").read_text()
    assert (tmp_path / "comment").read_text().endswith("worse\n")


def test_the_github_gate_says_why_it_could_not_tell_and_runs_nothing_of_its_inputs(tools: Path,
                                                                                   tmp_path: Path) -> None:
    for settings in ({"GATE_WHAT": "$(touch run); touch run", "GATE_ARGUMENTS": "$(touch run) `touch run`"},
                     {"GATE_WHAT": "--help"}, {"GATE_WHAT": "x", "GATE_BASE": "--help"},
                     {"GATE_WHAT": "x", "GATE_ARGUMENTS": "--help"}):
        ran = gate(tools, tmp_path, **settings)
        assert ran.returncode == 2 and (tmp_path / "output").read_text().endswith("verdict=refused\n")
    assert not (tmp_path / "run").exists() and "could not tell" in (tmp_path / "summary").read_text()
    executable(tools / "foretrace", "exit 3\n")
    ran = gate(tools, tmp_path, GATE_WHAT="x")
    assert ran.returncode == 0 and "inconclusive" in (tmp_path / "output").read_text()


def test_other_systems_call_options_that_exist() -> None:
    check = get_command(app).commands["check"]  # type: ignore[attr-defined]
    known = {option for parameter in check.params for option in parameter.opts}
    for file in ("actions/gate/gate.sh", "ci/foretrace.gitlab-ci.yml"):
        used = set(re.findall(r"--(?:markdown|junit|base|against|inconclusive)\b", (ROOT / file).read_text()))
        assert used and used <= known
    assert "entry: foretrace check" in (ROOT / ".pre-commit-hooks.yaml").read_text()


def test_the_version_stands_in_one_place() -> None:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    elsewhere = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
                 if f'"{version}"' in path.read_text(encoding="utf-8")]
    assert elsewhere == [] and f"## {version}" in (ROOT / "CHANGELOG.md").read_text()

"""What a user installs: metadata, pins, the two commands, the recorded trace, and that torch stays out of it."""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "traces" / "cpu-small"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def committed_files() -> list[Path]:
    """Files of the project: git's list where there is a repository, else all that is not built or cached."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                check=True, capture_output=True, text=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = re.compile(r"build|dist|out|__pycache__|\..*|.*\.egg-info")
        files = [path for path in ROOT.rglob("*")
                 if not any(skipped.fullmatch(part) for part in path.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


RUN_COMMANDS = """
import contextlib, io, json, pathlib, sys
site = pathlib.Path(sys.argv.pop())
(site / "torch").mkdir()
(site / "torch" / "__init__.py").write_text(
    f"open({str(site / 'imported')!r}, 'w').close(); raise ImportError('torch was imported')")
sys.path.insert(0, str(site))
import foretrace, tracer, kernel_models, graph_predictor, planner, step_views
slow = lambda *names: print(sorted(set(names) & sys.modules.keys()))
slow("numpy", "pandas", "torch", "numba", "typer")
from foretrace.commands import main
import step_views.cli
slow("numpy", "pandas", "torch", "numba", "kernel_models.device")
for words in json.loads(sys.argv.pop()):
    sys.argv = ["foretrace", *words]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    json.loads(said.getvalue()) if "--json" in words else slow("numba", "pandas", "pyarrow", "networkx")
print((site / "imported").exists())
with contextlib.suppress(ImportError):
    import torch
print((site / "imported").exists())
"""
"""It has a `torch` first on its path that notes each attempt to import it, and then fails."""


def test_packages_and_commands_import_nothing_slow_and_leave_torch_alone(tmp_path: Path) -> None:
    """`foretrace --help` answers in well under half a second only if it imports none of them."""
    words = [["--help"], *([name, str(RECORDED), "--json"] for name in ("inspect", "breakdown", "replay"))]
    result = subprocess.run([sys.executable, "-c", RUN_COMMANDS, json.dumps(words), str(tmp_path)], timeout=300,
                            capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["[]", "[]", "[]", "False", "True"]


# --- metadata and pins -------------------------------------------------------------------------------------------


def test_every_dependency_has_a_lower_bound_that_its_pin_meets_and_torch_is_an_extra() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)  # an option or a bare address is no requirement and fails here
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and pin.url is None, line
            pins[canonicalize_name(pin.name)] = specifier.version
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["capture"], *extras["test"]]:
        requirement = Requirement(text)
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), text
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
    assert "torch" not in {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert [Requirement(text).name for text in extras["capture"]] == ["torch"]
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="foretrace")
    assert command.value == "foretrace.__main__:main" and PROJECT["license"] == "Apache-2.0"
    assert importlib.metadata.version("foretrace") == PROJECT["version"]


def test_the_readme_shows_the_commands_and_sets_up_what_captures_as_one_installation() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for pattern in (r"^setup: \$\(CAPTURING\)", r"^INSTALL = .* -e '\.\$\(1\)'", "^demo:", "^test:",
                    r"^\$\(CAPTURING\):.*\n(?:\t.*\n)*\t.*\$\(call INSTALL,\[capture\]\)"):
        assert re.search(pattern, makefile, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"make {target}" in readme[:2000] for target in ("setup", "demo", "test"))
    # A plain installation of this directory would put a copy over the editable one.
    installs = re.findall(r"pip install (.*?\.(?:\[\w+\])?)['`]", makefile + readme)
    assert installs and all("-e " in text for text in installs)
    script = ROOT / ".ci" / "run"
    assert "make test" in script.read_text(encoding="utf-8") and os.access(script, os.X_OK)


def test_no_file_names_a_place_on_someones_machine() -> None:
    roots = "|".join(("root", "work", r"home/\w+", r"Users/\w+"))
    pattern = re.compile(rf"(?<![\w.>}})/])/(?:{roots})/[\w.]".encode())
    found = []
    for path in committed_files():
        content = path.read_bytes()
        if path.suffix == ".gz":
            with contextlib.suppress(zlib.error):  # inputs of the fuzzer may be cut off, or damaged
                content = zlib.decompressobj(wbits=31).decompress(content)
        found += [f"{path.relative_to(ROOT)}: {match.group().decode()}" for match in pattern.finditer(content)]
    assert found == []


def test_the_recorded_trace_is_small_complete_and_anonymous() -> None:
    assert sum(path.stat().st_size for path in RECORDED.iterdir()) < 1_000_000
    context = json.loads((RECORDED / "context.json").read_text(encoding="utf-8"))
    assert context["hardware"]["cpu"] and context["software"]["torch"] and context["torch_threads"] >= 1
    assert len(context["unprofiled_step_ns"]) >= 10
    assert all(1_000_000 < step < 10_000_000_000 for step in context["unprofiled_step_ns"])

    kineto = json.loads(gzip.decompress((RECORDED / "kineto.json.gz").read_bytes()))
    assert not kineto["host_name"] and kineto["traceName"] == "kineto.json.gz"
    steps = [event["name"] for event in kineto["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == len(context["profiled_step_ns"]) == 5
    assert not any(event.get("cat") == "python_function" for event in kineto["traceEvents"])

    execution_trace = json.loads(gzip.decompress((RECORDED / "et.json.gz").read_bytes()))
    record_ids = {attribute["value"] for node in execution_trace["nodes"] for attribute in node["attrs"]
                  if attribute["name"] == "rf_id"}
    recorded = {event["args"]["Record function id"] for event in kineto["traceEvents"] if event.get("cat") == "cpu_op"}
    assert recorded <= record_ids

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

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tracer", "kernel_models", "graph_predictor", "step_views")
RECORDED = ROOT / "traces" / "cpu-small"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def committed_files() -> list[Path]:
    """Files of the project: git's list where there is a repository, else all that is not built or cached."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {"build", "dist", "out", "__pycache__"}
        files = [
            path for path in ROOT.rglob("*")
            if not any(part in skipped or part.startswith(".") or part.endswith(".egg-info")
                       for part in path.relative_to(ROOT).parts)
        ]
    return [path for path in files if path.is_file()]


class TorchWatch:
    """Runs Python with a `torch` first on the path that notes each attempt to import it, and then fails."""

    def __init__(self, directory: Path) -> None:
        self.note = directory / "imported"
        package = directory / "site" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(
            f"open({str(self.note)!r}, 'w').close()\nraise ImportError('torch was imported')\n", encoding="utf-8"
        )
        paths = [str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def python(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.environment, capture_output=True, text=True, encoding="utf-8", timeout=300,
        )

    @property
    def torch_imported(self) -> bool:
        return self.note.exists()


@pytest.fixture
def watch(tmp_path: Path) -> TorchWatch:
    return TorchWatch(tmp_path)


# --- torch stays out ---------------------------------------------------------------------------------------------


def test_the_watch_sees_even_a_guarded_import(watch: TorchWatch) -> None:
    assert watch.python("try:\n    import torch\nexcept ImportError:\n    pass").returncode == 0
    assert watch.torch_imported


COMMANDS = (["--help"], *([name, str(RECORDED), "--json"] for name in ("inspect", "breakdown", "replay")))
RUN_COMMANDS = """
import contextlib, io, json, sys
import tracer, kernel_models, graph_predictor
from foretrace.commands import main
for words in json.loads(sys.argv.pop()):
    sys.argv = ["foretrace", *words]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    json.loads(said.getvalue()) if "--json" in words else print(said.getvalue())
"""


def test_packages_and_commands_leave_torch_alone(watch: TorchWatch) -> None:
    result = watch.python(RUN_COMMANDS, json.dumps(COMMANDS))
    assert result.returncode == 0, result.stderr
    assert not watch.torch_imported
    assert "inspect" in result.stdout


def test_help_needs_none_of_the_heavy_libraries(watch: TorchWatch) -> None:
    """`foretrace --help` answers in well under half a second only if it imports none of them."""
    heavy = ("numba", "pandas", "pyarrow", "networkx")
    result = watch.python(
        "import sys; sys.argv = ['foretrace', '--help']\n"
        "from foretrace.commands import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"sys.stderr.write(' '.join(name for name in {heavy} if name in sys.modules))"
    )
    assert result.returncode == 0
    assert result.stderr == ""


def test_torch_is_an_extra_and_no_dependency() -> None:
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert "torch" not in names
    assert [Requirement(text).name for text in PROJECT["optional-dependencies"]["capture"]] == ["torch"]


# --- metadata and pins -------------------------------------------------------------------------------------------


def test_installed_command_and_packages() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="foretrace")
    assert command.value == "foretrace.__main__:main"
    assert importlib.metadata.version("foretrace") == PROJECT["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()


def test_every_folder_of_modules_is_a_package_and_so_gets_installed() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_dependency_has_a_lower_bound_that_its_pin_meets() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)  # an option or a bare address is no requirement and fails here
            assert pin.url is None
            (specifier,) = pin.specifier
            assert specifier.operator == "==", line
            pins[canonicalize_name(pin.name)] = specifier.version
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras["capture"], *extras["test"]]:
        requirement = Requirement(text)
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), text
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_licence_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_readme_shows_the_two_commands_and_make_knows_them() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in first_screen
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_readme_sets_up_what_captures_and_stays_one_installation() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^setup: \$\(CAPTURING\)", makefile, re.MULTILINE)
    assert re.search(r"^INSTALL = .* -e '\.\$\(1\)'", makefile, re.MULTILINE)
    assert re.search(r"^\$\(CAPTURING\):.*\n(?:\t.*\n)*\t.*\$\(call INSTALL,\[capture\]\)", makefile, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make setup" in readme[:2000]
    # A plain installation of this directory would put a copy over the editable one.
    installs = re.findall(r"pip install (.*?\.(?:\[\w+\])?)['`]", makefile + readme)
    assert installs
    assert all("-e " in text for text in installs)


# --- what is committed -------------------------------------------------------------------------------------------


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
    assert context["hardware"]["cpu"]
    assert context["software"]["torch"]
    assert context["torch_threads"] >= 1
    assert len(context["unprofiled_step_ns"]) >= 10
    assert all(1_000_000 < step < 10_000_000_000 for step in context["unprofiled_step_ns"])

    kineto = json.loads(gzip.decompress((RECORDED / "kineto.json.gz").read_bytes()))
    assert not kineto["host_name"]
    assert kineto["traceName"] == "kineto.json.gz"
    steps = [event["name"] for event in kineto["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == len(context["profiled_step_ns"]) == 5
    assert not any(event.get("cat") == "python_function" for event in kineto["traceEvents"])

    execution_trace = json.loads(gzip.decompress((RECORDED / "et.json.gz").read_bytes()))
    record_ids = {
        attribute["value"]
        for node in execution_trace["nodes"] for attribute in node["attrs"] if attribute["name"] == "rf_id"
    }
    recorded = {event["args"]["Record function id"] for event in kineto["traceEvents"] if event.get("cat") == "cpu_op"}
    assert recorded <= record_ids

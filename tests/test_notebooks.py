"""The example notebooks run, and show what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import run_program
from slowly import mostly_slow

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def outputs(notebook: dict) -> list[list[tuple[str, ...]]]:
    return [[tuple(sorted(output.get("data", [output["output_type"]]))) for output in cell["outputs"]]
            for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_three() -> None:
    assert NOTEBOOKS == ["first_look.ipynb", "regression_gate.ipynb", "what_if.ipynb"]


@pytest.mark.parametrize("name", mostly_slow(NOTEBOOKS, {"first_look.ipynb", "regression_gate.ipynb"}))
def test_a_notebook_runs_and_shows_the_same_kinds_of_things(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = json.loads((FOLDER / name).read_text())
    assert "/tmp" not in (FOLDER / name).read_text() and sum(map(len, outputs(kept))) >= 3
    # A copy beside it, so that its paths hold and the kept outputs stay.
    code = ("import json, os, sys\n"
            f"sys.path.insert(0, {str(FOLDER)!r})\n"
            f"os.chdir({str(FOLDER)!r})\n"
            "import save\n"
            f"notebook = json.load(open({name!r}))\n"
            "save.run_cells(notebook)\n"
            f"json.dump(notebook, open({str(tmp_path / name)!r}, 'w'))\n")
    done = run_program(code)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / name).read_text())
    assert outputs(again) == outputs(kept)
    figures = [cell for cell in again["cells"] if "plot()" in "".join(cell["source"])]
    assert figures and all(any("image/png" in out.get("data", {}) for out in cell["outputs"]) for cell in figures)

"""``foretrace validate``: what it runs, in which order, and what it says of errors; one real run of a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import run_program
from typer.testing import CliRunner

import step_views.check.validate as module
from foretrace.commands import app
from step_views.check.measure import CheckError
from step_views.check.validate import PredictedCase, ValidatedProgram, validate

BERT = Path(__file__).resolve().parents[2] / "traces" / "bert-cpu"
SCRIPT = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--wide", type=int, default=8)
chosen = parser.parse_args()
torch.set_num_threads(1)
layer = torch.nn.Linear(chosen.wide, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(40):
    layer(torch.ones(chosen.batch, chosen.wide)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_sizes_become_arguments() -> None:
    plain = ValidatedProgram("train.py", ("--epochs", "1"), options=("--timed", "5"))
    assert plain.command({"batch": 8, "seq_len": 64}, Path("out")) == [
        "capture", "--out", "out", "--timed", "5", "train.py", "--", "--epochs", "1", "--batch", "8", "--seq-len", "64"]
    placed = ValidatedProgram("train.py", ("bs={batch}", "--shape", "{batch}x{seq}"))
    assert placed.command({"batch": 8, "seq": 64}, Path("o"))[-3:] == ["bs=8", "--shape", "8x64"]
    suite = ValidatedProgram(workload="gpt2", fixed={"dtype": "bf16"})
    assert suite.command({"batch": 8}, Path("o")) == [
        "capture", "--out", "o", "--workload", "gpt2", "--set=dtype=bf16", "--set=batch=8"]


def test_all_is_predicted_before_any_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def run(program: ValidatedProgram, sizes: dict[str, int], out: Path) -> list[int]:
        order.append(f"run {sizes['batch']}")
        return [sizes["batch"] * 1_000_000] * 3

    def predict(captures: list, wanted: list, **others: object) -> list[PredictedCase]:
        order.append(f"predict {[sizes['batch'] for sizes in wanted]} from {[sizes['batch'] for sizes, _ in captures]}")
        return [PredictedCase(sizes, sizes["batch"] * (1_200.0 if sizes["batch"] == 4 else 900.0),
                              (1_000.0, 9_000.0), "host", ()) for sizes in wanted]

    monkeypatch.setattr(module, "capture_program", run)
    monkeypatch.setattr(module, "predict_cases", predict)
    found = validate(ValidatedProgram("t.py"), [{"batch": 1}, {"batch": 2}, {"batch": 4}, {"batch": 10}], tmp_path,
                     captures=2)
    assert order == ["run 1", "run 2", "predict [4, 10] from [1, 2]", "run 4", "run 10"]
    # Errors of +20% and -10%, with and without their sign.
    assert found.mape == pytest.approx(0.15) and found.bias == pytest.approx(0.05) and found.coverage == 0.5
    assert found.to_json()["cases"][0]["error"] == pytest.approx(0.2)
    assert "1 of 2 measured times in the 80% interval" in found.headline()
    assert found.to_pandas()["measured_us"].tolist() == [4_000.0, 10_000.0]


@pytest.mark.parametrize(("sizes", "captures", "sentence"), [
    ([{"batch": 1}], 1, "none is left to predict"), ([{"batch": 1}, {"batch": 2}], 2, "none is left to predict"),
    ([{"batch": 1}, {"seq": 2}], 1, "the same sizes"), ([{"batch": 1}, {"batch": 1}], 1, "given twice")])
def test_what_cannot_be_validated_is_told(sizes: list[dict[str, int]], captures: int, sentence: str,
                                          tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=sentence):
        validate(ValidatedProgram("t.py"), sizes, tmp_path, captures=captures)


def test_a_failing_script_is_told_with_what_it_said(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "bad.py").write_text("raise RuntimeError('no data')")
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "bad.py"), "-o", str(tmp_path / "out"),
                                    "--set", "batch=1", "--set", "batch=2"])
    assert done.exit_code == 2 and "RuntimeError" in done.stderr and "Traceback" not in done.stderr
    none = CliRunner().invoke(app, ["validate", "-o", "x", "--set", "batch=1", "--set", "batch=2"])
    assert none.exit_code == 2 and "Name what to validate" in none.stderr


def test_a_script_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    # Forks of a process that has PyTorch; the script that fails above is run by a Python of its own.
    code = "import sys; sys.argv[0] = 'foretrace'; from foretrace.commands import main; sys.exit(main())"
    monkeypatch.setattr(module.subprocess, "run",
                        lambda command, **_: run_program(code, *command[len(module.FORETRACE):]))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "train.py"), "-o", str(tmp_path / "out"),
                                    "--set", "batch=64", "--set", "batch=128", "--max-error", "0.0001%", "--json",
                                    "--", "--wide", "16"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and not found["passed"] and found["captured"] == [{"batch": 64}]
    (case,) = found["cases"]
    assert case["sizes"] == {"batch": 128} and case["steps"] == 10 and case["measured_us"] > 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["batch=128", "batch=64"]

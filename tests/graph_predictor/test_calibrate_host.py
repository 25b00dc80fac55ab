"""``foretrace calibrate --host``: a file that ``--host-from`` takes, and what is refused."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction import host_steps
from kernel_models.host.events import HostStep
from kernel_models.host.model import CPU_HOST, is_host_file, read_host, shipped_host, write_host
from kernel_models.spreads import OTHER_PROGRAM, SMALL_PROGRAMS
from tracer.errors import ForetraceError

TRACES = Path(__file__).resolve().parents[2] / "traces"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One round of all programs on this host, and what the command says of it."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("host") / "mine.json.gz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_steps, "OTHER_PROGRAM", math.inf)  # other tests may run at the same time
        done = CliRunner().invoke(app, ["calibrate", "--host", "--on", "cpu", "--minutes", "0.01", "-o", str(path),
                                        "--json"])
    assert done.exit_code == 0, done.stderr
    return path, json.loads(done.stdout)


def test_a_busy_host_is_not_calibrated() -> None:
    """Programs whose operations cost the same, and the same where each took a time of its own."""
    def programs(slower: float) -> dict[str, HostStep]:
        names, zeros = np.array(["aten::add", "aten::mul"] * 4, object), np.zeros(8, np.int64)
        return {f"program{n}": HostStep(names, zeros, zeros, np.full(9, 1e3 * slower**n), np.full(8, 2e3 * slower**n),
                                        np.zeros(8), 0.0) for n in range(6)}

    calm = host_steps.calibrated(programs(1.1), "calm")
    assert calm.model.spread < math.hypot(OTHER_PROGRAM, SMALL_PROGRAMS) and len(calm.programs) == 6
    with pytest.raises(ForetraceError, match=r"too busy to be calibrated.*MAPE of \d+% \(worst \d+%\).*Nothing"):
        host_steps.calibrated(programs(2.0), "busy")


@pytest.mark.slow
def test_the_file_is_a_host(calibrated: tuple[Path, dict[str, Any]]) -> None:
    path, said = calibrated
    model = read_host(path)
    assert (len(said["programs"]), model.programs, said["rounds"], said["device"]) == (16, 16, 1, "cpu")
    assert all(program["told_us"] > 0 and program["measured_us"] > 0 for program in said["programs"])
    assert model.spread > 0.35 and is_host_file(str(path))
    assert model.counted is not None and model.counted.with_calls and model.counted.spread > 0.35


@pytest.mark.slow
def test_a_step_that_never_ran_takes_it(calibrated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    step = tmp_path / "bert.foretrace"
    made = CliRunner().invoke(app, ["trace", "--workload", "bert", "--preset", "tiny", "--device", "cpu", "-o",
                                    str(step)])
    assert made.exit_code == 0, made.stderr
    said = plain(CliRunner().invoke(app, ["predict", str(step), "--host-from", str(calibrated[0])]).stdout)
    assert "what operations cost in 16 programs of this host (cpu)" in said
    planned = CliRunner().invoke(app, ["plan", "gpt2", "--gpus", "2", "--device", "h100-sxm", "--parallel", "ddp",
                                       "--host-from", str(calibrated[0])])
    assert planned.exit_code == 2 and "compute on their host" in plain(planned.stderr)


@pytest.mark.slow
def test_a_recorded_step_takes_a_captures_host(calibrated: tuple[Path, dict[str, Any]]) -> None:
    for host, what in ((str(calibrated[0]), "a file of foretrace calibrate --host with only the usual cost of each"),
                       (CPU_HOST, "a shipped host with only"), ("a,b", "which names several captures")):
        done = CliRunner().invoke(app, ["predict", str(TRACES / "bert-cpu"), "--host-from", host])
        said = plain(done.stderr)
        assert done.exit_code == 2 and "A recorded step cannot take its host from" in said and what in said
        assert "give --host-from one capture of the same model, made on that host." in said


@pytest.mark.parametrize(("arguments", "why"), [
    (["--families", "gemm"], "--families is for a device's kernels"),
    (["--resume"], "--resume is for a device's kernels"), (["--work", "x"], "--work is for a device's kernels"),
    (["--on", "tpu"], "'tpu' cannot be calibrated"), (["--minutes", "0"], "0 minutes are none"),
    (["--minutes", "nan"], "nan minutes are none"), ([], "notes.txt")])
def test_what_means_nothing_is_refused(arguments: list[str], why: str, tmp_path: Path) -> None:
    """And another file is not overwritten."""
    out = tmp_path / ("host.json.gz" if arguments else "notes.txt")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(app, ["calibrate", "--host", "-o", str(out), *arguments])
    assert done.exit_code == 2 and why in plain(done.stderr) and not (tmp_path / "host.json.gz").exists()
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_damaged_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "host.json.gz"
    write_host(shipped_host(CPU_HOST), path)
    assert [is_host_file(str(file)) for file in (path, tmp_path, "no such file")] == [True, False, False]
    whole = path.read_bytes()
    for damaged, said in ((whole[:len(whole) // 2], "cannot be read as a host model"),
                          (gzip.compress(b'{"host": 3}'), "not in the form foretrace writes")):
        path.write_bytes(damaged)
        with pytest.raises(ForetraceError, match=said):
            read_host(path)

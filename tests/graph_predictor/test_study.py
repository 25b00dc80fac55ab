"""A source and its configurations: steps that never ran are made again at other sizes, settings and devices."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from micro import Micro
from slowly import mostly_slow
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.edits.registry import OPTIONS, made, switched
from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.study import Configuration, Study, is_script, read_source
from graph_predictor.sizes.retrace import parse_sets, parse_settings
from kernel_models.device import device
from kernel_models.profile import DeviceProfile, ProfileError, save_profile
from tracer.errors import ForetraceError
from tracer.graph import NONE
from tracer.job import assemble_job, read_job
from tracer.shape_only.apart import trace_apart
from tracer.shape_only.errors import ShapeOnlyError
from tracer.shape_only.trace import trace_script

CAPTURE = str(Path(__file__).parents[2] / "traces" / "llama-cpu")
SCRIPT = '''
import torch

def build(batch=16, device="cuda"):
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch, 256, device=device)

    def step():
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def fixed():
    return build()

def of_cpu():
    return build(512, "cpu")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_script_is_traced_again_at_each_size(script: str) -> None:
    source = [f"{script}:build"]
    assert is_script(source)
    study = Study(read_source(source), code=source[0])
    plain = study.predict(Configuration(device="b200"))
    large = study.predict(Configuration(device="b200", sizes=("batch=65536",)))
    named = study.predict(Configuration(device="b200", sizes=("batch=16:65536",)))
    assert large.gpu_active_us > 2 * plain.gpu_active_us
    assert (named.gpu_active_us, named.peak_memory_bytes) == (large.gpu_active_us, large.peak_memory_bytes)
    assert large.peak_memory_bytes is not None and plain.peak_memory_bytes is not None
    assert large.peak_memory_bytes > plain.peak_memory_bytes
    with pytest.raises(EditError, match="does not fit"):
        study.predict(Configuration(device="b200", sizes=("batch=200000000",)))


def test_a_function_without_the_size_is_scaled_where_the_old_one_is_named(script: str) -> None:
    study = Study(read_source([f"{script}:fixed"]), code=f"{script}:fixed")
    larger, plain = (study.predict(Configuration(sizes=sizes)) for sizes in (("batch=16:4096",), ()))
    assert larger.gpu_active_us > plain.gpu_active_us
    with pytest.raises(ForetraceError, match="it takes none"):
        study.predict(Configuration(sizes=("batch=4096",)))


# The batch itself, kept on the device, is not told from other states.
@pytest.mark.parametrize("batch", mostly_slow([4, 64, 8192], {8192}))
def test_a_scaled_peak_is_that_of_the_trace_there(script: str, batch: int) -> None:
    """Traced at 16, where the optimizer's step is the peak; at 8,192 activations and their gradients are."""
    study = Study(read_source([f"{script}:build"]), code=f"{script}:build")
    there = study.predict(Configuration(sizes=(f"batch={batch}",))).peak_memory_bytes
    fixed = Study(read_source([f"{script}:fixed"]))
    scaled = fixed.predict(Configuration(sizes=(f"batch=16:{batch}",))).peak_memory_bytes
    assert there is not None and scaled is not None
    assert scaled == pytest.approx(there, rel=0.1)
    if batch > 64:
        assert scaled > 2 * (fixed.predict(Configuration()).peak_memory_bytes or 0)


def test_the_command_finds_opportunities_in_a_script(script: str) -> None:
    said = CliRunner().invoke(app, ["opportunities", f"{script}:build", "--device", "b200", "--json"])
    assert said.exit_code == 0, said.output
    alone = Study(read_source([f"{script}:build"], device="b200"), code=f"{script}:build").predict(
        Configuration(device="b200"))
    assert json.loads(said.stdout)["step_time_us"] == pytest.approx(alone.step_time_us)
    said = CliRunner().invoke(app, ["predict", f"{script}:build", "--device", "h100-sxm", "--set", "batch=64",
                                    "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["device"] == "h100-sxm"
    said = CliRunner().invoke(app, ["predict", script])
    assert said.exit_code == 2 and "name its function" in said.output and ":FUNCTION" in said.output


@pytest.mark.slow  # sizes, and plans, alone: the tests above and test_ranks.py
def test_sizes_and_plans_go_together_and_count_samples() -> None:
    study = Study(read_job(CAPTURE))
    two = study.predict(Configuration(sizes=("batch=8",), parallel="ddp=2"))
    shared = study.predict(Configuration(sizes=("batch=8",), parallel="tp=2"))
    assert two.items_per_second == pytest.approx(2 * 8 / two.step_time_us * 1e6)
    assert shared.items_per_second == pytest.approx(8 / shared.step_time_us * 1e6)


@pytest.mark.parametrize(("wanted", "says"), [
    ({"also": ("x",), "parallel": "ddp=2"}, "--also or --parallel"),
    ({"code": "x.py:f"}, "--set"),
    ({"parallel": "ddp=2", "device": "h200-sxm"}, "no GPU work"),
    ({"parallel": "ddp=999", "topology": "dgx-h200x8"}, "do not fit"),
])
def test_what_cannot_be_is_refused(wanted: dict[str, object], says: str) -> None:
    study = Study(read_job(CAPTURE))
    with pytest.raises(Exception, match=says):
        study.predict(Configuration().with_values(**wanted))


@pytest.mark.parametrize("command", [["predict"], ["sweep", "--host", "1,2", "-o", "points.csv"]])
def test_a_profile_of_no_device_that_is_met_is_refused(command: list[str], script: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(DeviceProfile(replace(device("rtx-3090"), name="my-3090"), []), "mine.profile")
    said = CliRunner().invoke(app, [*command, f"{script}:build", "--device", "rtx-3090", "--profile", "mine.profile"])
    assert said.exit_code == 2, said.output
    assert "--profile is of my-3090, but what is priced is rtx-3090" in " ".join(said.output.split())
    assert os.listdir() == ["mine.profile"]


def test_a_profile_of_the_recorded_device_goes_with_another_target() -> None:
    own, other = (DeviceProfile(device(name), []) for name in ("cpu", "rtx-3090"))
    wanted = [Configuration(), Configuration(device="h200-sxm")]
    job = read_job(CAPTURE)
    Study(job, profiles=[own]).check_profiles(wanted[1:])
    Study(job, profiles=[own, other]).check_profiles([*wanted, Configuration(device="rtx-3090")])
    with pytest.raises(ProfileError, match="is of rtx-3090, but what is priced is cpu, h200-sxm"):
        Study(job, profiles=[own, other]).check_profiles(wanted)


@pytest.mark.parametrize(("recorded", "measured", "ratio"), [
    ((1980, 1410, 1380), 1980.0, "0.71 times"), ((1980,), 1410, "1.40 times"), ((1900,), 1980, ""),
    ((NONE,), 1980, ""), ((1410,), None, ""), ((1410,), 0, "")])
def test_a_profile_of_another_clock_is_noted(tmp_path: Path, recorded: tuple[int, ...], measured: object, ratio: str
                                             ) -> None:
    graphs = []
    for rank, clock in enumerate(recorded):
        trace = Micro(rank=rank, world_size=len(recorded)).step(0, 100).step(100, 200, 2)
        for start in (10, 110):
            trace.launch(start, 3, (7, start + 10, 30))
        graph = trace.read(tmp_path)
        graph.meta.device, graph.meta.clock_mhz = "NVIDIA H100 80GB HBM3", clock
        graphs.append(graph)
    profile = DeviceProfile(device("h100-sxm"), provenance={"clock_mhz": measured})
    plain = Study(assemble_job(graphs)).predict(Configuration())
    found = Study(assemble_job(graphs), profiles=[profile]).predict(Configuration())
    notes = [note for note in found.notes if "MHz" in note]
    assert len(notes) == bool(ratio) and all(ratio in note and "of h100-sxm" in note for note in notes)
    assert found.interval_us == plain.interval_us


def test_a_step_traced_for_a_cpu_of_any_name_computes_there(script: str) -> None:
    """Edits of a CPU's operations find them, so that only what the compiler leaves out is saved."""
    study = Study(read_source([f"{script}:of_cpu"], device="i9-10940x"))
    prepared = study.prepared(Configuration(device="i9-10940x"))
    assert prepared.start.scenario.built.computes_on_host
    plain, compiled = prepared.start.predict(), prepared.start.predict(made({"compile": True}))
    assert 0.5 * plain.step_time_us < compiled.step_time_us < plain.step_time_us


def test_every_switch_is_an_edit() -> None:
    for name in (word for option in OPTIONS for word in option.switches):
        assert len(made(switched([name]))) == 1
    with pytest.raises(ForetraceError, match="on and off"):
        switched(["recompute", "no-recompute"])
    with pytest.raises(ForetraceError, match="warp-drive"):
        Configuration(edits={"warp-drive": True})


ONCE = """
import os, pathlib, signal, torch
with open(__file__ + ".runs", "a") as runs:
    runs.write(f"{os.getpid()}\\n")
library = torch.library.Library("once_a_process", "DEF")  # a second one of the name is refused
library.define("same(Tensor x) -> Tensor")

def build(batch):
    if batch == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if batch == 14:
        raise ValueError("unlucky " * 99)
    model = torch.nn.Linear(64, 64).cuda()
    data = torch.randn(batch, 64, device="cuda")
    return lambda: model(data)
"""


@pytest.fixture
def once(tmp_path: Path) -> Path:
    path = tmp_path / "once.py"
    path.write_text(ONCE)
    return path


def runs(script: Path) -> list[int]:
    """The processes that have run a script, one for each run."""
    return [int(line) for line in Path(f"{script}.runs").read_text().split()]


def test_a_script_runs_once_for_a_size_and_never_twice_in_a_process(once: Path) -> None:
    """It needs the size, so that it cannot be traced without one, and registers what a process has once."""
    study = Study(None, code=f"{once}:build", device="b200")
    small, large = (study.predict(Configuration(sizes=(f"batch={size}",))).gpu_active_us for size in (32, 262144))
    assert large > 2 * small
    assert len(runs(once)) == len(set(runs(once))) == 2
    study.predict(Configuration(sizes=("batch=32",)))
    assert len(runs(once)) == 2


def test_errors_of_another_process_are_as_those_of_this_one(once: Path) -> None:
    """Nor are they a reason to scale the step: only a function that takes no such size means the traced dimensions."""
    said = CliRunner().invoke(app, ["predict", f"{once}:build", "--set", "batch=32:14", "--debug"])
    assert said.exit_code == 2 and f"{once}:12" in said.output and "ValueError: unlucky" in said.output
    assert "in build" in said.output and "unlucky … (--debug" in said.output  # cut at a word's end
    said = CliRunner().invoke(app, ["predict", f"{once}:build", "--set", "batch=13"])
    assert said.exit_code == 2 and "ended by signal 9" in said.output and "Traceback" not in said.output


def test_a_step_traced_elsewhere_is_the_one_traced_here(script: str) -> None:
    here, there = (trace(f"{script}:build", arguments={"batch": 24}) for trace in (trace_script, trace_apart))
    assert here.strings == there.strings and here.meta.memory == there.meta.memory
    assert here.ops.shapes.tolist() == there.ops.shapes.tolist()
    predicted = [Study(assemble_job([graph])).predict(Configuration()).to_json() for graph in (here, there)]
    assert predicted[0] == predicted[1]


WORDS = """
import torch

def build(batch=4, opt="adamw", fused=False, lr=0.5):
    assert type(opt) is str and type(fused) is bool and type(lr) is float
    net = torch.nn.Linear(8, 8)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[opt]
    optimizer = kind(net.parameters(), lr=lr, fused=fused)
    x = torch.randn(batch, 8)

    def step():
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    return step
"""


@pytest.fixture
def words(tmp_path: Path) -> Study:
    (tmp_path / "user.py").write_text(WORDS)
    return Study(None, code=f"{tmp_path / 'user.py'}:build", device="cpu")


def names_with(words: Study, *sets: str) -> set[str]:
    graph = words.prepared(Configuration(sizes=sets)).start.built.graphs[0]
    return {graph.string(code) for code in graph.ops.name}


def test_words_reach_the_function_as_what_its_defaults_are(words: Study) -> None:
    assert "aten::addcdiv_" in names_with(words, "batch=2")
    assert "aten::addcdiv_" not in names_with(words, "opt=sgd", "lr=0.25", "batch=2")
    assert "aten::_fused_adamw_" in names_with(words, "fused=true")


@pytest.mark.parametrize(("text", "said"), [
    ("fused=perhaps", "fused=perhaps names no size or setting of .*: it takes true or false"),
    ("batch=many", "batch=many names no size or setting of .*: it takes a number, as 4 is"),
    ("lr=fast", "it takes a number, as 0.5 is"),
    ("depth=deep", r"takes no argument 'depth' \(it takes batch, opt, fused, lr\).*\(depth='deep'\)")])
def test_words_that_a_function_does_not_take(words: Study, text: str, said: str) -> None:
    with pytest.raises(ShapeOnlyError, match=said):
        words.prepared(Configuration(sizes=(text,)))


def test_settings_that_are_words_are_told_from_sizes() -> None:
    assert parse_settings(["opt=fused", "batch=8:16", "lr=1e-3", "x=-.5"]) == (
        {"batch": 8}, {"batch": 16, "opt": "fused", "lr": "1e-3", "x": "-.5"})
    for wrong in (["opt="], ["=fused"], ["opt=a b"], ["opt=sgd", "opt=adam"], ["opt=1", "opt=adam"]):
        with pytest.raises(ForetraceError):
            parse_settings(wrong)
    with pytest.raises(EditError, match=r"names no size.*give --code SCRIPT\.py:FUNCTION, whose FUNCTION takes opt"):
        parse_sets(["opt=sgd"])

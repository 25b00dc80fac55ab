"""The host time of programs nobody recorded, from others of the same host."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from micro import Micro
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from graph_predictor.prediction.host_steps import host_by_name, recorded_host_steps, traced_host_step, usual_step
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.host.events import HostStep, host_class, host_events, is_flat
from kernel_models.host.fitting import fit_host
from kernel_models.host.model import (
    CPU_HOST,
    GPU_HOST,
    PLANS_HOST,
    HostModel,
    host_names,
    read_host,
    shipped_host,
    write_host,
)
from kernel_models.host.segments import USUAL_NS
from kernel_models.spreads import OTHER_PROGRAM
from tracer.errors import ForetraceError
from tracer.graph import Phase
from tracer.job import read_job

TRACES = Path(__file__).resolve().parents[2] / "traces"


def step(names: str, before: float = 1000.0, inside: float = 500.0, compute: float = 0.0) -> HostStep:
    name = np.array([f"aten::{each}" for each in names.split()], dtype=object)
    return HostStep(name, np.full(len(name), Phase.FORWARD, np.int8), np.zeros(len(name), np.int64),
                    np.full(len(name) + 1, before), np.full(len(name), inside), np.full(len(name), compute))


def test_a_program_costs_what_it_cost_and_an_operation_nobody_ran_what_its_kind_does() -> None:
    one = step("mm add mm add relu")
    before, inside = fit_host([one]).estimate(one)
    assert before == pytest.approx(one.before_ns, rel=0.02) and inside == pytest.approx(one.inside_ns, rel=0.02)
    model = fit_host([step("mm add mm"), step("add mm add")])
    before, inside = model.estimate(step("mm tanh"))
    assert inside == pytest.approx([500.0, 500.0]) and before == pytest.approx([1000.0] * 3)
    assert model.knows(step("mm tanh")).tolist() == [1, 1, 0, 0, 1]


def test_code_costs_more_where_more_was_computed_since_it_ran() -> None:
    warm = fit_host([step("mm add mm add relu")] * 4)

    def cold(since_ns: float) -> float:
        return 1 + 2.7 * float(np.log1p(since_ns / 4300))

    # Of each name but the first one's, 1 ms is computed in every operation since.
    one = step("mm mm add", compute=1e6)
    one.inside_ns[:] = [100 * cold(2e6), 100 * cold(1e6), 300 * cold(3e6)]
    one.before_ns[:] = [500 * cold(3e6), 400 * cold(3e6), 600 * cold(3e6), 700 * cold(3e6)]
    fitted = fit_host([one] * 20)
    before, inside = fitted.estimate(one)  # a step's begin and end are drawn together a little
    assert before == pytest.approx(one.before_ns, rel=0.03) and inside == pytest.approx(one.inside_ns, rel=0.03)
    # The same operations where half as much is computed, and where a GPU computes: as warm as they get.
    _, half = fitted.estimate(step("mm mm add", compute=5e5))
    assert half == pytest.approx([100 * cold(1e6), 100 * cold(5e5), 300 * cold(1.5e6)], rel=0.03)
    _, gpu = fitted.estimate(step("mm mm add"))
    assert gpu == pytest.approx([100, 100, 300], rel=0.03)
    _, told = warm.estimate(step("mm mm add", compute=1e6))
    assert told[1] == pytest.approx(500 * cold(1e6), rel=0.03)


def test_lists_cost_by_their_tensors() -> None:
    def with_list(tensors: int) -> HostStep:
        found = step("mm _foreach_add_ mm")
        found.phase[1], found.tensors[1], found.inside_ns[1] = 3, tensors, 2000.0 + 300.0 * tensors
        return found

    _, inside = fit_host([with_list(4), with_list(10)]).estimate(with_list(40))
    assert inside[1] == pytest.approx(2000 + 300 * 40, rel=0.01)


def test_python_between_operations_costs_by_its_calls(tmp_path: Path) -> None:
    def with_calls(names: str, calls: float) -> HostStep:
        plain = step(f"view {names}", before=9000 * ((calls + 3) / 13) ** 0.85, inside=1000)
        plain.before_ns[[0, -1]] = 9000  # a step's begin and end cost by its parameters
        return replace(plain, calls=np.full(len(plain) + 1, calls))

    known = [with_calls("mm add mm", 3), with_calls("mm add relu mm", 6), with_calls("add mm add", 1)]
    asked = with_calls("mm add mm add", 40)
    told = sum(part.sum() for part in fit_host(known).estimate(asked))
    assert told == pytest.approx(asked.host_ns, rel=0.25)
    # Without counts in the step, or in one of the programs, it is told as if they were a usual one's.
    alone = fit_host(known).estimate(replace(asked, calls=None))
    assert sum(part.sum() for part in alone) < 0.8 * asked.host_ns
    uncounted = replace(known[0], calls=None)
    assert fit_host([*known, uncounted]).counted is None
    # Enough others have them: the one without teaches its operations' own time and the step's end, not what lies before
    # its operations.
    mixed = fit_host([*known, with_calls("relu mm mm", 2), uncounted]).counted
    assert mixed is not None and mixed.pools["own", "1", "aten::mm"].programs == 5
    assert mixed.pools["before", "end", "none"].programs == 5
    assert mixed.pools["before", "1", "aten::mm", "aten::view", "python"].programs == 2
    write_host(fit_host(known, "mine"), tmp_path / "host.json.gz")
    again = read_host(tmp_path / "host.json.gz")
    assert sum(part.sum() for part in again.estimate(asked)) == pytest.approx(told, rel=1e-3)
    assert shipped_host(CPU_HOST).counted is not None


def test_a_recorded_step_has_the_events_of_a_traced_one() -> None:
    def made(*rows: tuple[str, int, float, float]) -> HostStep:
        names, phases, before, inside = zip(*rows, strict=True)
        return HostStep(np.array([f"aten::{name}" for name in names], dtype=object), np.array(phases, np.int8),
                        np.zeros(len(rows), np.int64), np.array([*before, 50.0]), np.array(inside, np.float64),
                        np.zeros(len(rows)))

    recorded = made(("mm", 1, 10, 1), ("ones_like", 1, 20, 2), ("mm", 2, 300, 3), ("add_", 2, 4, 4),
                    ("empty", 3, 800, 5), ("lift_fresh", 3, 6, 6), ("detach_", 3, 7, 7), ("mul_", 3, 8, 8))
    traced = made(("mm", 1, 10, 1), ("ones_like", 1, 20, 2), ("mm", 2, 300, 3), ("add", 2, 4, 4),
                  ("lift_fresh", 3, 811, 6), ("mul_", 3, 22, 8))
    one, other = host_events(recorded, False), host_events(traced, False)
    assert [(event.label, event.ns) for event in one] == [(event.label, event.ns) for event in other]
    assert [event.label[1:] for event in one if event.label[0] == "before" and not event.label[1].isdigit()] == [
        ("begin", "aten::mm"), ("backward",), ("optimizer", "one by one, plain", "at once"),
        ("end", "one by one, plain")]
    # Each place belongs to one event, and what a model tells of them adds up over the recording's own rows.
    assert [place for event in one for place in range(event.first, event.place + 1)] == list(range(17))
    model = fit_host([traced])
    assert sum(part.sum() for part in model.estimate(recorded)) == pytest.approx(
        sum(part.sum() for part in model.estimate(traced)))
    assert model.knows(recorded).all()


@pytest.mark.parametrize(("names", "phases", "calls", "said"), [
    ("mm mm_backward _foreach_addcdiv_", "123", (6, 0, 49, 4),
     [("begin", "python"), ("optimizer", "_foreach, moments", "at once"), ("end", "_foreach, moments", "no python")]),
    # Clipping goes over the gradients before, a loader has a batch made, and SGD's end calls once for each parameter.
    ("mm mm_backward _foreach_norm _foreach_add_", "1213", (11, 0, 0, 30, 7),
     [("begin", "loader"), ("optimizer", "_foreach, plain", "later"), ("end", "_foreach, plain", "no python")]),
    ("mm mm_backward _fused_adamw_", "123", (0, 0, 49, 9),
     [("begin", "no python"), ("optimizer", "_fused, moments", "at once"), ("end", "_fused, moments", "python")]),
    ("mm mm_backward addcdiv_", "123", (4, 0, 20, 4),
     [("begin", "python"), ("optimizer", "one by one, moments", "at once"),
      ("end", "one by one, moments", "no python")]),
    ("mm mm mm", "111", (4, 0, 0, 1), [("begin", "python"), ("end", "none", "no python")]),
])
def test_ends_of_a_step_are_told_apart_by_who_is_at_work(
        names: str, phases: str, calls: tuple[int, ...], said: list[tuple[str, ...]]) -> None:
    operations = [f"aten::{name}" for name in names.split()]
    lists = np.array([4 * ("_foreach" in name or "_fused" in name) for name in operations], np.int64)
    made = HostStep(np.array(operations, dtype=object), np.array([int(phase) for phase in phases], np.int8), lists,
                    np.full(len(operations) + 1, 10.0), np.ones(len(operations)), np.zeros(len(operations)),
                    calls=np.array(calls, np.float64))
    found = [event.label[1:] for event in host_events(made, True)
             if event.label[0] == "before" and not event.label[1].isdigit()]
    assert [label for label in found if label != ("backward",)] == said


def test_few_programs_have_a_wide_interval_and_many_their_own() -> None:
    assert fit_host([step("mm add")]).spread == pytest.approx(OTHER_PROGRAM)
    assert fit_host([step("mm add")] * 3).spread == pytest.approx(OTHER_PROGRAM / 3**0.5)
    same = fit_host([step("mm add mm"), step("mm add mm add"), step("add mm"), step("mm add")])
    apart = fit_host([step("mm add mm"), step("mm add mm add", 3000, 1500), step("add mm"), step("mm add", 300, 150)])
    assert same.spread < 0.05 < 0.3 < apart.spread
    with pytest.raises(ForetraceError, match="no host time to learn from"):
        fit_host([step("")])


def test_rows_are_what_a_trace_below_autograd_has(tmp_path: Path) -> None:
    assert is_flat("aten::addmm") and is_flat("aten::t") and is_flat("mine::scan")
    assert not any(map(is_flat, ("aten::linear", "aten::reshape", "autograd::engine::evaluate_function: MmBackward0",
                                 "MmBackward0", "torch::autograd::AccumulateGrad", "ProfilerStep#3")))
    assert [host_class(f"aten::{name}") for name in ("_foreach_add_", "view", "mm_backward", "add_", "mm")] == [
        "list", "view", "backward", "in place", "other"]
    trace = Micro()
    for number in range(3):
        at = 1000 * number
        trace.step(at, at + 500, number)
        trace.op("aten::linear", at + 10, at + 70)
        trace.op("aten::t", at + 15, at + 20)
        trace.op("aten::view", at + 300, at + 310)
    (found,) = recorded_host_steps([trace.read(tmp_path)])
    assert found.name.tolist() == ["aten::t", "aten::view"]
    # Less what the profiler's few events are taken to cost.
    assert found.before_ns / 1e3 == pytest.approx([15, 280, 190], rel=0.02)
    assert found.inside_ns / 1e3 == pytest.approx([5, 10], rel=0.02)
    assert usual_step([found, found]).host_ns == found.host_ns == pytest.approx(500e3 - 3 * USUAL_NS, rel=1e-5)


@cache
def rounds(folder: str) -> dict[str, HostStep]:
    """The host's step of every program of a folder, of the larger one of every other."""
    return {path.parent.name: recorded_host_steps(read_job(path).graphs)[0]
            for path in sorted((TRACES / folder).glob("*/round0"))[::2 if folder == "host" else 1]}


def test_programs_held_out_are_told_by_the_others() -> None:
    """Every case is in the docs; this holds 19 programs to what every other one of the other folder makes of them."""
    model = fit_host([*rounds("host").values()])
    errors = [sum(float(part.sum()) for part in model.estimate(one)) / one.host_ns - 1
              for one in rounds("host-held-out").values()]
    assert len(errors) == 19 and np.median(np.abs(errors)) < 0.12 and np.mean(np.abs(errors)) < 0.15, errors


def test_models_are_kept_in_files(tmp_path: Path) -> None:
    model = fit_host([step("mm add mm"), step("add mm")], "mine")
    write_host(model, tmp_path / "host.json.gz")
    again = read_host(tmp_path / "host.json.gz")
    assert again.host == "mine" and again.programs == 2
    for one, other in zip(model.estimate(step("mm mm tanh")), again.estimate(step("mm mm tanh")), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    (tmp_path / "bad.json.gz").write_bytes(b"x")
    with pytest.raises(ForetraceError, match="cannot be read as a host model"):
        read_host(tmp_path / "bad.json.gz")
    whole = model.to_dict()
    for damaged in ({"pools": 3}, *({**whole, "counted": {**whole, name: value}}
                                    for name, value in (("spread", -5.0), ("launch_ns", -1e9), ("offset", 1e5)))):
        with pytest.raises(ForetraceError, match="not in the form foretrace writes"):
            HostModel.from_dict(damaged)


def test_a_host_is_named_or_learned_from_captures() -> None:
    assert host_names() == [PLANS_HOST, CPU_HOST, GPU_HOST]
    assert shipped_host(GPU_HOST).launch_ns > 1000
    assert host_by_name(CPU_HOST, lambda path: pytest.fail("nothing to read")) is shipped_host(CPU_HOST)
    paths = ",".join(str(TRACES / "host" / name / "round0") for name in ("bert", "gpt2"))
    learned = host_by_name(paths, lambda path: read_job([path]))
    assert learned.programs == 2 and learned.launch_ns == 0


def test_what_is_no_host_is_refused_with_its_name(tmp_path: Path) -> None:
    """A capture cut short would teach half a step, one named twice would count as two programs."""
    bert = str(TRACES / "host" / "bert" / "round0")
    whole = gzip.decompress((TRACES / "cpu-small" / "kineto.json.gz").read_bytes())
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole[:len(whole) * 9 // 10])
    for text, said in ((f"{bert},{bert}", "named twice"), (f"{CPU_HOST},{bert}", f"{CPU_HOST} is a host"),
                       (str(cut), f"(?s){cut}.*record it again"), ("cpu-step", "known by name: cpu-plans"),
                       (f"{bert},{tmp_path / 'absent'}", "absent does not exist")):
        with pytest.raises(ForetraceError, match=said):
            host_by_name(text, lambda path: read_job([path]))


def test_a_traced_step_is_predicted_on_a_host(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, table = tmp_path / "bert.foretrace", tmp_path / "points.csv"

    def run(command: str, *arguments: str) -> str:
        done = CliRunner().invoke(app, [command, *arguments])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    run("trace", "--workload", "bert", "--preset", "tiny", "--set", "optimizer=adamw-foreach", "--device", "cpu", "-o",
        str(path))
    captures = ",".join(str(TRACES / "host" / name / "round0") for name in ("gpt2", "vit"))
    said = plain(run("predict", str(path), "--host-from", captures))
    assert "what operations cost in 2 programs of" in said and "and other hosts (right within" in said
    assert f"109 programs of {CPU_HOST}" in plain(run("predict", str(path), "--host-from", CPU_HOST))
    run("sweep", str(path), "--host-from", captures, "--host", "1,2", "--jobs", "1", "-o", str(table))
    for speed, told in zip(("1", "2"), pd.read_csv(table).step_time_us, strict=True):
        alone = json.loads(run("predict", str(path), "--host-from", captures, "--host", speed, "--json"))
        assert alone["step_time_us"] == pytest.approx(told)
    graph = read_job([str(path)]).graphs[0]
    assert len(traced_host_step(graph)) == len(graph.ops)
    truth = np.median(read_job(TRACES / "host" / "bert" / "round0").graphs[0].meta.unprofiled_step_ns) / 1e3
    model = fit_host([one for name, one in rounds("host").items() if "bert" not in name])
    assert baseline_of([graph], host=model).predict().step_time_us == pytest.approx(truth, rel=0.5)
    with pytest.raises(ForetraceError, match="operations a GPU runs"):
        baseline_of([graph], host=shipped_host(GPU_HOST))

"""Hooks of training frameworks: what they record is what the context manager records of the same steps."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tracer  # noqa: E402
from foretrace.hooks import capture_deepspeed, handler, megatron_capture, ray_capture  # noqa: E402
from tracer.capture import CaptureWarning  # noqa: E402
from tracer.capture_layout import read_context  # noqa: E402
from tracer.errors import CaptureError  # noqa: E402
from tracer.graph import ExecutionGraph  # noqa: E402
from tracer.job import read_job  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "hooks"
SHORT = {"steps": 2, "warmup": 1, "timed": 3}
STEPS = 3 + 1 + 2 + 2 + 1  # timed, warm-up, the profiler's warm-up, profiled, the execution trace's


def step_operations(graph: ExecutionGraph) -> list[Counter[str]]:
    """Names of the operations of each profiled step."""
    names = [graph.string(code) for code in graph.ops.name.tolist()]
    steps = graph.ops.step.tolist()
    return [Counter(name for name, of in zip(names, steps, strict=True) if of == step and name.startswith("aten::"))
            for step in sorted(set(steps) - {-1})]


def graph_of(out: Path) -> ExecutionGraph:
    return read_job(str(out)).graphs[0]


class Loop:
    """A tiny training step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.model(torch.rand(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Clock:
    """In the place of the captures' clock: it goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def pass_ms(self, milliseconds: int) -> None:
        self.now += milliseconds * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tracer.capture.session.time", clock)
    return clock


@pytest.fixture(scope="module")
def by_context_manager(tmp_path_factory: pytest.TempPathFactory) -> list[Counter[str]]:
    out, loop = tmp_path_factory.mktemp("plain") / "a", Loop()
    with tracer.capture(out, **SHORT) as capture:
        while not capture.finished:
            loop.step()
            capture.step()
    return step_operations(graph_of(out))


# --- frameworks that are installed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "name"), [("transformers", "trainer"), ("lightning", "lightning_module"),
                                               ("accelerate", "accelerate_loop")])
@pytest.mark.filterwarnings("ignore")  # of the frameworks
def test_an_example_records_optimizer_steps(package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main("hook")
    context, graph = read_context(tmp_path / "hook" / "rank0"), graph_of(tmp_path / "hook")
    assert context["complete"] and len(context["unprofiled_step_ns"]) == 6
    steps = step_operations(graph)
    assert len(steps) == 3 and steps[0]["aten::mm"] == steps[1]["aten::mm"] == steps[2]["aten::mm"] > 0
    # Two micro-batches a step: accumulated gradients are added in place, and the optimizer makes one step.
    assert all(step["aten::add_"] > 0 for step in steps)
    optimizer = np.array([text.startswith("Optimizer.step#") for text in graph.strings])[graph.ops.name]
    assert np.bincount(graph.ops.step[optimizer & (graph.ops.step >= 0)]).tolist() == [1, 1, 1]
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 2 and "arguments are required: out" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_between_steps_is_in_no_time_and_told_in_a_profiled_step(tmp_path: Path, clock: Clock) -> None:
    transformers = pytest.importorskip("transformers")
    from foretrace.hooks import TrainerCapture

    callback = TrainerCapture(tmp_path / "a", **SHORT)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    loop = Loop()
    with pytest.warns(CaptureWarning, match="A profiled step .* holds an evaluation too"):
        for step in range(STEPS + 2):
            callback.on_step_begin(None, state, control)
            loop.step()
            clock.pass_ms(2)
            callback.on_step_end(None, state, control)
            if step in (2, 6):  # timed, and profiled
                clock.pass_ms(500)
                callback.on_evaluate(None, state, control)
        callback.on_train_end(None, state, control)
    assert read_context(tmp_path / "a" / "rank0")["unprofiled_step_ns"] == [2_000_000] * 3
    assert not control.should_training_stop


@pytest.mark.slow
def test_workers_of_ray_train_are_ranks(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch", exc_type=ImportError)
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    out = str(tmp_path / "a")

    def train_loop(config: dict[str, Any]) -> None:
        import torch as there
        from ray.train.torch import prepare_model

        from tracer.hooks import ray_capture as within

        model = prepare_model(there.nn.Linear(8, 8))
        optimizer = there.optim.SGD(model.parameters(), lr=0.01)
        with within(config["out"], steps=2, warmup=1, timed=3) as capture:
            while not capture.finished:
                model(there.rand(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                capture.step()

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(train_loop, train_loop_config={"out": out}, scaling_config=ScalingConfig(num_workers=2)).fit()
    finally:
        ray.shutdown()
    job = read_job(out)
    assert [graph.meta.rank for graph in job.graphs] == [0, 1] and job.graphs[0].meta.world_size == 2


# --- frameworks by the interface they document -----------------------------------------------------------------------


class DeepSpeedLike:
    """What DeepSpeed's engine documents: ``step`` after each micro-batch, and where an accumulation ends."""

    def __init__(self, loop: Loop, accumulate: int) -> None:
        self.loop, self.accumulate, self.micro = loop, accumulate, 0

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro + 1) % self.accumulate == 0

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.loop.step()
        self.micro += 1


def test_deepspeed_counts_accumulations(tmp_path: Path, by_context_manager: list[Counter[str]]) -> None:
    engine = capture_deepspeed(DeepSpeedLike(Loop(), 3), tmp_path / "a", **SHORT)
    for _ in range(3 * (STEPS + 1)):
        engine.step()
    assert engine.foretrace_capture.complete
    assert step_operations(graph_of(tmp_path / "a")) == by_context_manager
    with pytest.raises(CaptureError, match="Loop is no engine of DeepSpeed"):
        capture_deepspeed(Loop(), tmp_path / "b")


@pytest.fixture
def megatron(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ["megatron", "megatron.training", "megatron.training.training"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module: Any = sys.modules[names[-1]]
    loop = Loop()

    def train_step() -> None:
        loop.step()
        clock.pass_ms(2)

    def train(steps: int, evaluate_at: int = -1) -> None:
        for step in range(steps):
            module.train_step()
            if step == evaluate_at:
                module.evaluate_and_print_results()

    module.train_step, module.train = train_step, train
    module.evaluate_and_print_results = lambda: clock.pass_ms(500)
    return module


def test_megatron_counts_train_steps(tmp_path: Path, megatron: Any, by_context_manager: list[Counter[str]]) -> None:
    step, evaluate = megatron.train_step, megatron.evaluate_and_print_results
    with megatron_capture(tmp_path / "a", **SHORT) as capture:
        megatron.train(STEPS + 3, evaluate_at=2)
    assert capture.complete and (megatron.train_step, megatron.evaluate_and_print_results) == (step, evaluate)
    assert step_operations(graph_of(tmp_path / "a")) == by_context_manager
    assert read_context(tmp_path / "a" / "rank0")["unprofiled_step_ns"] == [2_000_000] * 3
    with pytest.raises(ZeroDivisionError), megatron_capture(tmp_path / "b", **SHORT):
        megatron.train(5)
        1 / 0  # noqa: B018
    assert "ZeroDivisionError" in read_context(tmp_path / "b" / "rank0")["ended"]
    del megatron.train_step
    with pytest.raises(CaptureError, match="has no train_step"), megatron_capture(tmp_path / "c"):
        pass


def titan_interface() -> dict[str, types.ModuleType]:
    """torchtitan 0.3's profiler as its trainer uses it, where torchtitan is not installed."""
    from dataclasses import dataclass

    class Profiler:
        @dataclass(kw_only=True)
        class Config:
            enable_profiling: bool = False

            def build(self, **kwargs: Any) -> Any:
                from tracer.hooks import TitanCapture

                return TitanCapture(self, **kwargs)

        def __init__(self, config: Any, *, global_step: int = 0, base_folder: str = "", leaf_folder: str = "") -> None:
            self._config, self._base_folder = config, base_folder

    modules = {name: types.ModuleType(name) for name in ("torchtitan", "torchtitan.tools", "torchtitan.tools.profiler")}
    modules["torchtitan.tools.profiler"].Profiler = Profiler  # type: ignore[attr-defined]
    return modules


def test_torchtitan_trains_with_it_in_its_profilers_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          by_context_manager: list[Counter[str]]) -> None:
    try:
        import torchtitan.tools.profiler  # noqa: F401
    except ImportError:
        for name, module in titan_interface().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "tracer.hooks.titan_profiler", raising=False)
    from tracer.hooks import TitanCapture

    loop = Loop()
    with TitanCapture.Config(out="a", **SHORT).build(global_step=7, base_folder=str(tmp_path)) as profiler:
        for _ in range(STEPS):
            loop.step()
            profiler.step()
    assert step_operations(graph_of(tmp_path / "a")) == by_context_manager


# --- torch.profiler's own handler ------------------------------------------------------------------------------------


def test_a_profilers_traces_become_windows(tmp_path: Path, by_context_manager: list[Counter[str]]) -> None:
    loop, ready = Loop(), handler(tmp_path / "a")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule, record_shapes=True,
                                on_trace_ready=ready) as profiler:
        for _ in range(8):
            loop.step()
            profiler.step()
    ready.close()
    job = read_job(str(tmp_path / "a"))
    assert step_operations(job.graphs[0]) == by_context_manager
    assert job.graphs[0].meta.profiler_flags["record_shapes"] and not job.graphs[0].meta.unprofiled_step_ns
    assert any("2 windows" in note for note in job.notes)
    with pytest.raises(CaptureError, match="already holds a complete capture"):
        handler(tmp_path / "a")(profiler)
    with pytest.raises(CaptureError, match="is a URL"):
        handler("s3://runs/a")


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match=r"outside a worker of Ray Train|needs Ray Train"), ray_capture(tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "megatron.training.training", None)
    with pytest.raises(CaptureError, match="needs Megatron-LM"), megatron_capture(tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tracer.hooks.trainer_callback", raising=False)
    with pytest.raises(CaptureError, match=r"needs transformers \(.*\); install it with: pip install transformers"):
        importlib.import_module("tracer.hooks.trainer_callback")
    assert "TrainerCapture" in dir(tracer.hooks)

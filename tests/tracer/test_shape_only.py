"""Steps traced by shapes alone: equal to real runs up to the written list; memory, errors, files, worlds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="tracing by shapes needs torch")

import torch
import torch.distributed as dist
from said import plain
from shape_only_support import (
    calls,
    differences,
    dispatched,
    explained,
    known_names,
    profiled_step,
    real_peak_bytes,
    traced_peak_bytes,
    without_float_types,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tracer
from foretrace.commands import app
from graph_predictor import replay
from step_views import breakdown
from step_views.reports.inspection import inspect_job
from tracer import workloads
from tracer.errors import ForetraceError
from tracer.graph import NONE, SHAPE_ONLY, Phase
from tracer.job import read_job
from tracer.shape_only import ShapeOnlyError, trace_step, trace_workload
from tracer.shape_only.trace import trace_script

ROOT = Path(__file__).resolve().parents[2]
NAMES = workloads.names()
AGAINST_REAL = ("dlrm", "lstm", "moe", "resnet50")
"""Workloads that the quick tests also run: look-ups, recurrent layers, experts and convolutions."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def names(graph: Any) -> list[str]:
    return [graph.string(int(code)) for code in graph.ops.name]


def trace(build: Callable[[], Callable[[], Any]], device: str = "h200-sxm", **options: Any) -> Any:
    return trace_step(build, device, **options)


def step_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = None, ways: int = 0) -> Any:
    """A step: forward of ``function`` on leaves that want gradients, and backward. ``ways``: 1 and 2 checkpointed."""
    def build() -> Callable[[], None]:
        inputs = [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]

        def step() -> None:
            out = function(*inputs) if not ways else checkpoint(function, *inputs, use_reentrant=ways == 2)
            out.sum().backward()

        return step

    return build


def training(make: Callable[[], nn.Module], x: Callable[[], Any], optimizer: Any = None) -> Callable[[], Any]:
    """A step: forward of a module, backward, and with an optimizer an update."""
    def build() -> Callable[[], None]:
        model = make()
        update = optimizer and optimizer(model.parameters())

        def step() -> None:
            model(x()).sum().backward()
            if update:
                update.step()
                update.zero_grad()

        return step

    return build


# --- equal to a real run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "modes"), [
    # The others are traced by the quick tests of test_workloads.py.
    *(pytest.param(name, {}, marks=() if name in AGAINST_REAL else pytest.mark.slow) for name in NAMES),
    ("llama", {"checkpointing": True, "dtype": "bf16"}),
    ("gpt2", {"dtype": "bf16-autocast"}), pytest.param("resnet50", {"checkpointing": True}, marks=pytest.mark.slow),
    ("llama", {"optimizer": "adamw-fused", "accumulation": 2}),
], ids=str)
def test_operators_shapes_and_dtypes_are_those_of_a_real_run(name: str, modes: dict[str, Any], tmp_path: Path) -> None:
    """Against the profiler's own account of a real CPU step, operator by operator; what differs is in the list."""
    settings = workloads.configure(name, preset="tiny", **modes)
    real = profiled_step(settings, tmp_path)
    plain = without_float_types if "dtype" in modes and "autocast" in modes["dtype"] else list
    for device in ("cpu", "h200-sxm"):
        traced = trace_workload(settings, device)
        found = differences(plain(dispatched(real, known_names(traced))), plain(calls(traced)))
        assert [d for d in found if not explained(d, device, checkpointing="checkpointing" in modes)] == []
        assert sum(len(d.real) for d in found) < 0.5 * len(real.ops)
        assert len(calls(traced)) > 50


@pytest.mark.parametrize(("name", "checkpointing"), [
    ("llama", True),
    *(pytest.param(name, checkpointing, marks=pytest.mark.slow) for name, checkpointing in (
        ("llama", False), ("bert", False), ("resnet50", False), ("lstm", False), ("bert", True), ("resnet50", True),
        ("lstm", True)))])
def test_peak_memory_is_within_a_percent_of_a_real_run(name: str, checkpointing: bool, tmp_path: Path) -> None:
    sizes = {"resnet50": {"batch": 4, "resolution": 64}, "lstm": {"batch": 16, "seq": 12, "depth": 2}}
    settings = workloads.configure(name, preset="tiny", checkpointing=checkpointing,
                                   **sizes.get(name, {"batch": 8, "seq": 64, "depth": 3}))
    assert traced_peak_bytes(settings) == pytest.approx(real_peak_bytes(settings, tmp_path), rel=0.01)


def test_memory_is_told_by_what_it_holds() -> None:
    settings = workloads.configure("llama", preset="tiny", batch=64, seq=64)
    meta = trace_workload(settings).meta
    memory, parameters = meta.memory, 4 * workloads.build("llama", preset="tiny").parameters
    assert memory["parameters"] == parameters
    # What is alive at the moments that may be the peak elsewhere: at these sizes the largest of them is the peak.
    assert max(map(sum, meta.memory_moments)) == memory["peak"]
    assert max(activations for _, activations, *_ in meta.memory_moments) >= memory["activations"] > parameters
    assert max(moment[3] for moment in meta.memory_moments) == pytest.approx(parameters, rel=0.01)
    assert memory["optimizer_state"] == pytest.approx(2 * parameters, rel=0.01)
    held = sum(memory[kind] for kind in ("parameters", "buffers", "gradients", "optimizer_state", "activations",
                                         "temporaries", "other"))
    assert held == memory["peak"] <= memory["peak_blocks"]


# --- the written list, each entry also under checkpointing ----------------------------------------------------------


@pytest.mark.parametrize(("ways", "dtype", "head", "device", "wanted"), [
    *((ways, torch.bfloat16, 64, "h200-sxm", "flash") for ways in (0, 1, 2)),
    (2, torch.float32, 64, "h200-sxm", "efficient"), (0, torch.float16, 64, "v100-sxm2-32g", "efficient"),
    (1, torch.bfloat16, 512, "a100-sxm-80g", "efficient"), (2, torch.float64, 64, "h200-sxm", "math")])
def test_attention_is_the_kernel_cuda_would_choose(ways: int, dtype: Any, head: int, device: str, wanted: str) -> None:
    shape = (2, 4, 16, head)
    graph = trace(step_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), shape, shape, shape,
                          dtype=dtype, ways=ways), device)
    fused = f"aten::_scaled_dot_product_{wanted}_attention"
    assert names(graph).count(fused) == (0 if wanted == "math" else 2 if ways else 1)
    assert names(graph).count(f"{fused}_backward") == (wanted != "math")
    assert not any("for_cpu" in name for name in names(graph))


def test_attention_with_masks_and_grouped_queries() -> None:
    q, kv = (2, 8, 16, 64), (2, 2, 16, 64)

    def grouped(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def masked(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 16, dtype=torch.bool, device=q.device))

    flash = names(trace(step_of(grouped, q, kv, kv, dtype=torch.bfloat16)))
    assert "aten::_scaled_dot_product_flash_attention" in flash
    assert "aten::bmm" in names(trace(step_of(grouped, q, kv, kv)))
    assert "aten::_scaled_dot_product_efficient_attention" in names(trace(step_of(masked, q, q, q, dtype=torch.half)))


@pytest.mark.parametrize("ways", [0, 1, 2])
def test_norms_dropout_and_recurrent_layers(ways: int) -> None:
    def build() -> Callable[[], None]:
        modules = [nn.RMSNorm(16), nn.LayerNorm(16), nn.Dropout(0.5), nn.LSTM(16, 16, 2, batch_first=True)]
        nn.ModuleList(modules).cuda()
        images = nn.BatchNorm2d(4).cuda()
        x = torch.randn(4, 8, 16, device="cuda", requires_grad=True)

        def forward(x: Any) -> Any:
            for module in modules[:3]:
                x = module(x)
            return modules[3](x)[0].sum() + images(x.unflatten(1, (4, 2))).sum()

        return lambda: (forward(x) if not ways else checkpoint(forward, x, use_reentrant=ways == 2)).backward()

    graph = trace(build)
    for name in ("_fused_rms_norm", "native_dropout", "native_layer_norm", "cudnn_batch_norm", "_cudnn_rnn"):
        assert names(graph).count(f"aten::{name}") == (2 if ways else 1), name
        assert names(graph).count(f"aten::{name}_backward") == 1, name
    assert not {"aten::bernoulli_", "aten::rsqrt", "aten::mkldnn_rnn_layer"} & set(names(graph))
    statistics = graph.arguments(names(graph).index("aten::native_layer_norm_backward"))[3]
    assert (statistics.dtype, statistics.shape) == ("float", (4, 8, 1))
    half = trace(training(lambda: nn.BatchNorm2d(4).cuda(),
                          lambda: torch.randn(2, 4, 8, 8, device="cuda", dtype=torch.bfloat16)))
    assert "aten::native_batch_norm" in names(half) and "aten::cudnn_batch_norm" not in names(half)


@pytest.mark.parametrize("ways", [0, 1, 2])
def test_autocast_has_cudas_lists_and_casts_weights_once(ways: int) -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(8, 8).cuda()
        x = torch.randn(4, 8, device="cuda", requires_grad=True)

        def forward(x: Any) -> Any:
            y = layer(layer(x))
            for function in (F.layer_norm, lambda t, _: t.softmax(-1), lambda t, _: t.exp(), lambda t, _: t.pow(2),
                             lambda t, _: t.cumsum(0)):
                y = y + function(layer(y.to(torch.bfloat16)), (8,))
            return F.cross_entropy(layer(y), torch.zeros(4, dtype=torch.long, device="cuda"))

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(x) if not ways else checkpoint(forward, x, use_reentrant=ways == 2)
            loss.backward()

        return step

    graph = trace(build)
    kinds: dict[str, set[str]] = {}
    weights = 0
    for row, name in enumerate(names(graph)):
        arguments = graph.arguments(row)
        kinds.setdefault(name, set()).add(arguments[0].dtype)
        weights += name == "aten::_to_copy" and arguments[0].shape == (8, 8) and arguments[0].dtype == "float"
    assert kinds["aten::addmm"] == {"c10::BFloat16"}
    for name in ("native_layer_norm", "exp", "pow", "_softmax", "nll_loss_forward"):
        assert kinds[f"aten::{name}"] == {"float"}, name
    assert graph.arguments(names(graph).index("aten::cumsum"))[2].value == "6"  # asked for in fp32, not cast
    assert weights == (2 if ways else 1)  # once for each forward, however often it is used


def test_autocast_made_too_early_is_no_silent_fp32() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU it is on")
    with pytest.warns(UserWarning):
        early = torch.autocast("cuda", dtype=torch.bfloat16)
    with pytest.raises(ShapeOnlyError, match="inside the traced function"):
        trace(training(lambda: nn.Linear(8, 8).cuda(), early(lambda: torch.ones(2, 8, device="cuda"))))


def test_a_layer_made_for_the_host_stays_there() -> None:
    def build() -> Callable[[], object]:
        model = nn.Linear(4, 4)
        merged = nn.Linear(4, 4, device=model.weight.device)
        model.weight.data.copy_(merged.weight + torch.ones(4, 4))
        model.cuda()
        return lambda: (merged.weight.device.type, model(torch.ones(2, 4, device=model.weight.device)))

    assert "aten::addmm" in names(trace(build))


def test_every_way_to_ask_for_a_gpu_ends_on_no_cuda_tensor() -> None:
    seen: list[Any] = []

    def build() -> Callable[[], None]:
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        with torch.device("cuda"):
            one = nn.Linear(4, 4)
        two = nn.Linear(4, 4, device="cuda:0").to(torch.bfloat16)
        host = torch.randn(3, 4).pin_memory()
        parameters = [*one.parameters(), *two.parameters()]
        optimizer = torch.optim.AdamW(parameters)

        def step() -> None:
            x = host.to("cuda", non_blocking=True)
            y = one(x.cuda())
            z = two(y.to(torch.bfloat16)).float() + torch.zeros(4, device=x.device)
            seen[:] = [x.device, x.is_cuda, host.is_cuda, z.device.type, torch.arange(3, device="cuda").device.type]
            z.sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            z.detach().cpu()

        return step

    graph = trace(build)
    assert seen == [torch.device("cuda", 0), True, False, "cuda", "cuda"]
    moved = [row for row, name in enumerate(names(graph)) if name == "aten::_to_copy"
             and any(a.dtype == "Device" for a in graph.arguments(row))]
    assert len(moved) == 1  # the batch; what comes back to the host says "cpu", which the profiler leaves out
    assert {"aten::_foreach_addcdiv_", "aten::_foreach_norm"} <= set(names(graph))  # chosen as for CUDA parameters
    assert graph.meta.memory["start"] < 4 * 1024  # the pinned batch is not on the device


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_cpu_clips_and_updates_as_it_does_when_it_runs(foreach: bool | None) -> None:
    """Clipping goes over lists where nothing is said, optimizers over one parameter after the other."""
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0, foreach=foreach)
            super().step()

    build = training(lambda: nn.Linear(8, 8), lambda: torch.ones(2, 8),
                     partial(Clipped, lr=0.1, momentum=0.9, foreach=foreach))
    step = build()
    step()
    with torch.profiler.profile() as profiler:
        step()
    ran = {event.name for event in profiler.events()}
    lists = {"aten::_foreach_norm", "aten::_foreach_mul_", "aten::_foreach_add_"}
    traced = set(names(trace(build, "cpu")))
    assert lists & traced == lists & ran
    assert ("aten::_foreach_norm" in traced) == (foreach is not False)


@pytest.mark.parametrize("device", ["cpu", "h200-sxm"])
def test_groups_of_every_type_are_multiplied(device: str) -> None:
    def build() -> Callable[[], object]:
        on = "cpu" if device == "cpu" else "cuda"
        rows, weights = torch.ones(8, 16).to(on), torch.ones(2, 16, 32).to(on)
        ends = torch.tensor([3, 8], dtype=torch.int32, device=rows.device)
        return lambda: F.grouped_mm(rows, weights, offs=ends)

    if not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped products")
    assert "aten::_grouped_mm" in names(trace(build, device))


@pytest.mark.parametrize(("shape", "form"), [((3, 9), tuple), ((27,), torch.tensor)],
                         ids=["padded, numbers", "joined, a tensor"])
def test_the_ctc_loss_keeps_what_its_longest_target_needs(form: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    def build() -> Callable[[], object]:
        scores, targets = nn.Linear(4, 30), torch.randint(1, 30, shape)
        frames, letters = form([50, 50, 50]), form([9, 9, 9])
        return lambda: F.ctc_loss(scores(torch.randn(50, 3, 4)).log_softmax(-1), targets, frames, letters).backward()

    graph = trace(build, "cpu")
    row = names(graph).index("aten::_ctc_loss_backward")
    assert "[3,50,19]" in graph.string(graph.ops.shapes[row]).replace(" ", "")


def test_gradient_scaler_and_default_fp16() -> None:
    def build() -> Callable[[], None]:
        layer = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def step() -> None:
            with torch.autocast("cuda"):
                loss = layer(torch.ones(2, 8, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    graph = trace(build)
    assert {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_foreach_add_"} <= set(names(graph))
    assert graph.arguments(names(graph).index("aten::addmm"))[0].dtype == "c10::Half"
    assert any("finite" in note for note in graph.meta.loss.notes)


def test_a_trace_leaves_torch_as_it_was() -> None:
    before = (torch.cuda.is_available, torch.autocast.__init__, torch.UntypedStorage.resize_, nn.Module._apply,
              torch.compile, torch.get_autocast_dtype)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    with torch.profiler.profile() as profiler:
        trace_workload(workloads.configure("llama", preset="tiny"))
        F.scaled_dot_product_attention(x, x, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16 and x.softmax(-1).dtype is torch.float32
    assert before == (torch.cuda.is_available, torch.autocast.__init__, torch.UntypedStorage.resize_, nn.Module._apply,
                      torch.compile, torch.get_autocast_dtype)
    assert any("flash_attention_for_cpu" in event.key for event in profiler.key_averages())


# --- the graph ------------------------------------------------------------------------------------------------------


def test_the_graph_says_what_belongs_where_and_survives_a_file(tmp_path: Path) -> None:
    graph = trace_workload(workloads.configure("gpt2", preset="tiny"))
    assert graph.meta.era == SHAPE_ONLY and graph.meta.device == "h200-sxm" and graph.meta.window_ns == len(graph.ops)
    assert sorted(set(graph.ops.phase.tolist())) == sorted(map(int, (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)))
    assert not graph.ops.duration_ns.any() and all(a < b for a, b in pairwise(graph.ops.start_ns.tolist()))
    row = names(graph).index("aten::native_layer_norm")
    back = names(graph).index("aten::native_layer_norm_backward")
    assert graph.row("ops", row).module == "Gpt2/blocks/0/attention_norm"
    assert graph.row("ops", back).module == "Gpt2/norm"  # the last norm comes first in backward
    assert int(graph.ops.sequence[back]) in graph.ops.sequence[:back].tolist()
    path = tmp_path / "step.foretrace"
    graph.save(path)
    again = tracer.load_graph(path)
    assert again.meta == graph.meta and calls(again) == calls(graph)
    found = inspect_job(read_job(path))
    assert found.ranks[0].memory == graph.meta.memory and not found.ranks[0].has_times and not found.notes
    for refuses in (replay, lambda g: breakdown(replay(g))):
        with pytest.raises(ForetraceError, match="never ran"):
            refuses(again)


def test_files_of_before_load_without_the_new_columns(tmp_path: Path) -> None:
    from tracer.store.container import decode_table, encode_table

    table = tracer.graph.CollectiveTable.empty(2)
    record, _ = encode_table(table)
    for values in (record.constants, record.inline):
        for name in ("wait_op", "wait_source"):
            values.pop(name, None)
    loaded = decode_table(tracer.graph.CollectiveTable, record, None, "an old file")
    assert loaded.wait_op.tolist() == [NONE, NONE] and len(loaded.columns()) == len(table.columns())


# --- worlds -----------------------------------------------------------------------------------------------------------


def test_a_function_of_ones_own_under_ddp() -> None:
    def wrapped() -> nn.Module:
        dist.init_process_group("nccl")
        return nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[0])

    graph = trace(training(wrapped, lambda: torch.ones(2, 64, device="cuda")), world_size=8, rank=3)
    assert [graph.string(int(code)) for code in graph.collectives.kind] == ["all_reduce"]
    assert json.loads(graph.string(int(graph.collectives.ranks[0]))) == list(range(8))


@pytest.mark.parametrize(("call", "kind"), [
    (lambda out, part: dist.all_to_all_single(out, torch.ones_like(out)), "all_to_all"),
    (lambda out, part: dist.recv(out, 0), "recv"),
    (lambda out, part: dist.all_gather(list(out.split(2)), part), "all_gather"),
])
def test_operators_that_return_only_their_work_are_waited_for_too(call: Any, kind: str) -> None:
    def build() -> Callable[[], Any]:
        dist.init_process_group("nccl")

        def step() -> Any:
            out = torch.zeros(4, device="cuda")
            call(out, torch.ones(2, device="cuda"))
            torch.ones(3, device="cuda").exp()
            return out.sin()

        return step

    graph = trace(build, world_size=2, rank=1)
    table = graph.collectives
    assert [graph.string(int(code)) for code in table.kind] == [kind]
    assert graph.string(int(graph.ops.name[table.wait_op[0]])) == "aten::sin"


# --- what cannot be traced, and the command ---------------------------------------------------------------------------


SCRIPT = """
import torch
from torch import nn

def build(batch=2):
    model = nn.Linear(8, 8).cuda()
    return lambda: model(torch.ones(batch, 8, device="cuda")).sum().backward()

def decides():
    def step():
        x = torch.randn(3, device="cuda")
        return x * 2 if x.sum() > 0 else x
    return step

def counts():
    return lambda: torch.randn(3, device="cuda").nonzero()

def large():
    return lambda: int(torch.arange(5_000_000)[-1])

@torch.library.custom_op("test_shape_only::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def custom():
    return lambda: twice(torch.ones(3, device="cuda"))

def number():
    return 3

def breaks():
    raise ValueError("of its own")

def ends():
    raise SystemExit(3)

def host_batch():
    model = nn.Linear(8, 4).cuda()
    return lambda: model(torch.randn(3, 8)).sum().backward()

def fourth():
    nn.Linear(8, 4).to("cuda:3")

def numbers():
    model = nn.Linear(8, 4).cuda()
    return lambda: model(torch.randn(3, 8, device="cuda")).detach().cpu().numpy()

def wants(model=None):
    return lambda batch: batch

def saves():
    return lambda: torch.save(torch.ones(3, device="cuda"), "never.pt")

def mismatch():
    return lambda: nn.Linear(8, 4)(torch.randn(3, 9))

def added_in_place():
    def step():
        total = torch.zeros(3, 4)
        total += torch.randn(3, 4, device="cuda")
    return step

def chosen():
    return lambda: torch.where(torch.rand(3, 4) > 0.5, torch.randn(3, 4, device="cuda"), 0.0)
"""


@pytest.mark.parametrize(("target", "says"), [
    ("decides", r"user\.py:12 \(`return x \* 2 if x\.sum\(\) > 0 else x`\) reads a tensor's values.*torch\.where"),
    ("counts", r"user\.py:16 .*shape depends on values"),
    ("large", r"user\.py:19 .*of constants alone, of at most 1,048,576 elements"),
    ("custom", r"user\.py:26 .*test_shape_only::twice.*register_fake"), ("number", "returned int"),
    ("breaks", r"user\.py:32 .*ValueError: of its own"), ("absent", "no function 'absent'; it has build, decides"),
    ("ends", r"user\.py:35 .*SystemExit: 3"),
    ("host_batch", r"user\.py:39 .*same device.*move the batch"), ("fourth", r"user\.py:42 .*cuda:3.*one GPU"),
    ("numbers", r"user\.py:46 .*numpy.*out of the traced step"), ("wants", r"user\.py:49 .*'batch'.*without arguments"),
    ("saves", r"user\.py:52 .*torch\.save out"), ("mismatch", r"user\.py:55 .*reduction dim"),
    ("added_in_place", r"user\.py:60 .*`total \+= .*same device"), ("chosen", r"user\.py:64 .*where.*same device"),
])
def test_what_cannot_be_traced_names_the_line_and_the_way_out(target: str, says: str, tmp_path: Path, caplog: Any,
                                                              capfd: Any) -> None:
    path = tmp_path / "user.py"
    path.write_text(SCRIPT)
    with pytest.raises(ShapeOnlyError, match=says) as caught:
        trace_script(f"{path}:{target}")
    assert "\n" not in str(caught.value)
    assert not caplog.records and not capfd.readouterr().err


@pytest.mark.parametrize("asked", ["nn.Linear(2, 2).to('cuda')", "torch.ones(2, device='cuda')",
                                   "torch.ones(2).cuda()"])
def test_a_gpu_asked_for_where_the_step_is_traced_for_a_cpu(tmp_path: Path, asked: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(f"import torch; from torch import nn\ndef build():\n    model = {asked}\n")
    with pytest.raises(ShapeOnlyError, match=r"user\.py:3 .*without one: name a GPU with --device, or let the program"):
        trace_script(f"{path}:build", "cpu")


def test_a_script_that_parses_arguments_takes_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "user.py"
    path.write_text("import argparse, sys, torch\nparser = argparse.ArgumentParser()\n"
                    "parser.add_argument('--batch', type=int, default=4)\nargs = parser.parse_args()\n"
                    "assert sys.argv == [__file__]\n"
                    "def build():\n    x = torch.randn(args.batch, 3, device='cuda')\n    return lambda: x.sum()\n")
    monkeypatch.setattr(sys, "argv", ours := ["foretrace", "predict", "--unknown"])
    assert len(trace_script(f"{path}:build").ops)
    assert sys.argv is ours


@pytest.mark.parametrize(("request_of", "says"), [
    (lambda: trace_script("nothing"), "names no function"), (lambda: trace_script("/no.py:f"), "does not exist"),
    (lambda: trace(lambda: lambda: None, "gtx-0"), "choose one of a10,"),
    (lambda: trace(lambda: lambda: None), "called no operator"),
    (lambda: trace_workload(workloads.configure("llama", preset="tiny"), parallel="fsdp2"), "needs a world")])
def test_wrong_requests_are_one_sentence(request_of: Callable[[], Any], says: str) -> None:
    with pytest.raises(ShapeOnlyError, match=says):
        request_of()


def test_the_command_sets_sizes_of_a_function_as_predict_sets_them(tmp_path: Path) -> None:
    path, out = tmp_path / "user.py", tmp_path / "step.foretrace"
    path.write_text(SCRIPT)

    def command(name: str, *arguments: str) -> Any:
        return CliRunner().invoke(app, ["trace", f"{path}:{name}", "-o", str(out), *arguments])

    shapes = []
    for sizes in ((), ("--set", "batch=6"), ("--set", "batch=2:6")):
        done = command("build", *sizes)
        assert done.exit_code == 0, done.output
        graph = tracer.load_graph(out)
        shapes.append([graph.string(int(code)) for code in graph.ops.shapes])
    assert shapes[0] != shapes[1] == shapes[2]
    told = json.loads(command("build", "--json").stdout)
    assert told["device"] == "h200-sxm" and told["memory_bytes"]["parameters"] == 4 * (8 * 8 + 8)
    for name, arguments, says in (("build", ("--set", "depth=3"), "takes no argument 'depth' (it takes batch)"),
                                  ("build", ("--set", "batch=many"), "names no size"), ("decides", (), "torch.where")):
        done = command(name, *arguments)
        assert done.exit_code == 2 and says in plain(done.output)


def test_a_closure_that_the_optimizer_calls_is_not_its_own_work() -> None:
    def build(closed: bool) -> Callable[[], None]:
        model = nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.Adam(model.parameters())

        def forward_and_backward() -> Any:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8, device="cuda")).sum()
            loss.backward()
            return loss

        def step() -> None:
            if not closed:
                forward_and_backward()
            optimizer.step(forward_and_backward if closed else None)

        return step

    plain, closed = (trace(partial(build, way)) for way in (False, True))
    assert names(plain) == names(closed) and plain.ops.phase.tolist() == closed.ops.phase.tolist()
    loss = 4  # it lives on while the optimizer works
    assert closed.meta.memory["peak"] == plain.meta.memory["peak"] + loss


# --- data and devices as users write them -----------------------------------------------------------------------------


def test_a_checkpoint_read_to_the_host_is_no_device_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(256, 256).state_dict(), path)

    def memory(location: Any) -> dict[str, int]:
        def make() -> nn.Module:
            model = nn.Linear(256, 256).cuda()
            if location != "none":
                model.load_state_dict(torch.load(path, map_location=location))
            return model

        return trace(training(make, lambda: torch.randn(8, 256, device="cuda"), torch.optim.Adam)).meta.memory

    plain = memory("none")
    for location in ("cpu", None, "cuda"):
        assert memory(location) == plain, location


@pytest.mark.parametrize(("shuffle", "workers"), [(False, 0), (True, 2)])
def test_a_data_loader_draws_for_real(shuffle: bool, workers: int) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    def build() -> Callable[[], None]:
        data = TensorDataset(torch.randn(100, 8), torch.randint(0, 4, (100,)))
        loader = DataLoader(data, 4, shuffle=shuffle, num_workers=workers)
        model = nn.Linear(8, 4).cuda()

        def step() -> None:
            for x, y in loader:
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                break

        return step

    graph = trace(build)
    memory = graph.meta.memory
    assert graph.arguments(names(graph).index("aten::addmm"))[1].shape == (4, 8)
    assert any("workers" in note for note in graph.meta.loss.notes) == bool(workers)
    assert memory["start"] == 2 * 4 * (8 * 4 + 4)  # parameters and gradients: the data is on the host
    assert memory["gradients"] == memory["parameters"] == 4 * (8 * 4 + 4)


def test_a_model_that_stayed_on_the_host_is_told_and_memory_is_the_devices() -> None:
    seen: list[int] = []

    def make() -> nn.Module:
        seen.append(torch.cuda.get_device_properties(0).total_memory)
        kept = torch.ones(256, device="cuda")
        seen.append(torch.cuda.memory_allocated())
        del kept
        return nn.Linear(8, 4)

    graph = trace(training(make, lambda: torch.randn(3, 8)), "t4")
    assert seen == [16_110_000_000, 1024] and not graph.meta.memory
    assert any("stayed on the CPU" in note for note in graph.meta.loss.notes)


def test_lists_of_tensors_have_types_and_step_counters_do_not_make_the_gpu_wait() -> None:
    graph = trace(training(lambda: nn.Linear(8, 4).cuda().to(torch.bfloat16),
                           lambda: torch.ones(3, 8, device="cuda", dtype=torch.bfloat16), torch.optim.AdamW))
    lists = {a.dtype for row in range(len(graph.ops)) for a in graph.arguments(row) if a.dtype.startswith("TensorList")}
    assert "TensorList[c10::BFloat16]" in lists
    assert "aten::_local_scalar_dense" not in names(graph)

"""The workload suite: listing and settings without torch, and (where torch is) models, steps, modes and determinism."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from forks import run_program
from said import plain
from slowly import mostly_slow

from tracer import workloads
from tracer.errors import ForetraceError
from tracer.workloads.registry import HELD_OUT_ONE_IN

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["dlrm", "resnet50", "bert", "gpt2", "llama", "vit", "moe", "unet", "lstm", "deepfm", "dcn_v2", "ncf"]
FEW = mostly_slow(NAMES, {"dlrm", "resnet50", "bert", "moe", "lstm"})
"""Tables, convolutions, attention, experts and a recurrent network are quick; each workload runs in a quick test."""


@pytest.fixture
def torch() -> Iterator[Any]:
    """torch on one thread (the suite's steps are tiny, and cores are shared)."""
    module = pytest.importorskip("torch", reason="running the workloads needs torch")
    threads = module.get_num_threads()
    module.set_num_threads(1)
    yield module
    module.set_num_threads(threads)


def losses(name: str, steps: int = 3, preset: str = "tiny", **values: Any) -> list[float]:
    workload = workloads.build(name, preset=preset, **values)
    return [workload.step(batch).item() for batch in islice(workload.batches(), steps)]


# --- without torch -----------------------------------------------------------------------------------------------


def test_listing_configuring_and_planning_import_no_torch() -> None:
    code = ("import sys; from tracer import workloads as w; w.describe(); w.split(w.parse('llama', ['batch=8']));"
            "import tracer.parallel_plan, tracer.fake_world.fit;"
            "sys.exit(any(name.partition('.')[0] == 'torch' for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=240).returncode == 0


def test_building_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = "from tracer import workloads as w\ntry: w.build('lstm')\nexcept w.WorkloadError as e: print(e)"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
                            capture_output=True, text=True, check=True, timeout=240)
    assert "needs torch" in plain(result.stdout)
    assert "foretrace[capture]" in result.stdout


def test_the_workloads_are_described_with_every_setting() -> None:
    assert workloads.names() == NAMES
    for info in workloads.describe():
        listed = {setting.name: setting for setting in info.settings}
        assert {"batch", "width", "depth", "dtype", "optimizer", "compile", "checkpointing", "device", "seed",
                "accumulation"} <= set(listed)
        assert info.summary and all(setting.doc for setting in info.settings)
        assert next(iter(listed)) == "batch"
        assert set(info.presets) == {"default", "tiny", "real"}
        assert info.presets["default"] == {} != info.presets["tiny"]
        json.dumps(dataclasses.asdict(info))
        for preset in info.presets:
            settings = workloads.configure(info.name, preset=preset)
            assert workloads.configure(info.name, **workloads.as_plain(settings)) == settings


@pytest.mark.parametrize(("name", "assignments", "said"), [
    ("lama", [], "There is no workload 'lama'; choose one of dlrm, resnet50"),
    ("llama", ["sequence=8"], "llama has no setting 'sequence'; it has batch,"),
    ("llama", ["batch"], "'batch' sets nothing; write a setting as key=value"),
    ("llama", ["=3"], "'=3' sets nothing"),
    ("llama", ["batch=many"], "batch=many cannot be used; it must be a whole number"),
    ("llama", ["batch=1.5"], "batch=1.5 cannot be used; it must be a whole number"),
    ("llama", ["batch=0"], "batch=0 is too small; the least is 1"),
    ("lstm", ["depth=1000000000"], "depth=1000000000 is too large; the most is 4,096"),
    ("llama", ["dtype=fp8"], "it must be one of fp32, tf32, bf16-autocast, bf16"),
    ("llama", ["compile=maybe"], "it must be true or false"),
    ("llama", ["heads=3"], "width=128 is not a multiple of heads=3; width=129 is"),
    ("llama", ["kv_heads=3"], "heads=4 is not a multiple of kv_heads=3"),
    ("llama", ["width=12"], "rotary positions need an even number"),
    ("gpt2", ["seq=2048"], "seq=2048 exceeds positions=1024"),
    ("bert", ["dropout=1"], "drops everything"),
    ("bert", ["dropout=nan"], "it must be a number"),
    ("bert", ["masked=2"], "more than all tokens"),
    ("vit", ["resolution=40"], "resolution=40 is not a multiple of patch=16; resolution=48 is"),
    ("moe", ["top_k=9"], "top_k=9 exceeds experts=8"),
    ("resnet50", ["depth=34"], "depth=34 is no ResNet; choose one of 14, 26, 50, 101, 152"),
    ("resnet50", ["batch=1", "resolution=32"], "one value a channel"),
    ("unet", ["resolution=40"], "resolution=48 does"),
    ("unet", ["width=12"], "width=12 is not a multiple of groups=8"),
    ("dlrm", ["sparse=true"], "sparse=true does not go with optimizer=adamw-foreach"),
    ("dlrm", ["sparse=true", "optimizer=sgd", "compile=true"], "sparse=true does not go with compile=true"),
    *(("gpt2", {name: value}, "cannot be used") for name, value in (
        ("batch", True), ("batch", 2.0), ("compile", 1), ("device", 0), ("width", None))),
    ("gpt2", {"preset": "huge"}, "no preset 'huge'; choose one of default, tiny, real"),
])
def test_wrong_settings_are_refused_in_one_sentence(name: str, assignments: Any, said: str) -> None:
    with pytest.raises(workloads.WorkloadError) as caught:
        if isinstance(assignments, dict):
            workloads.configure(name, **assignments)
        else:
            workloads.parse(name, assignments)
    assert said in str(caught.value)
    assert isinstance(caught.value, ForetraceError)


def test_settings_are_typed_and_later_assignments_win() -> None:
    settings = workloads.parse("dlrm", ["batch=8", "batch = 16", "skew=1", "compile=YES", "dtype=bf16"], preset="tiny")
    assert (settings.batch, settings.compile, settings.dtype) == (16, True, workloads.DtypeMode.BF16)
    assert settings.sizes()["skew"] == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.batch = 3  # type: ignore[misc]


def test_the_split_looks_at_sizes_only_and_holds_out_a_third() -> None:
    modes = [{}, {"dtype": "bf16"}, {"optimizer": "sgd"}, {"compile": True}, {"checkpointing": True}, {"seed": 7},
             {"device": "cuda"}, {"accumulation": 4}]
    for name in NAMES:
        assert len({workloads.split(workloads.configure(name, **mode)) for mode in modes}) == 1
        sides = [workloads.split(workloads.configure(name, batch=batch)) for batch in range(2, 602)]
        assert sides.count("held-out") / len(sides) == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.07)  # 3.6 sigma


def test_the_split_is_the_one_recordings_were_made_under() -> None:
    """Pinned: a change here moves recorded configurations between fit and held-out."""
    assert workloads.size_text(workloads.configure("lstm")) == "lstm batch=4 depth=2 seq=64 vocabulary=2000 width=128"
    sides = [workloads.split(workloads.configure("lstm", batch=batch)) for batch in (1, 2, 4, 8, 16, 32)]
    assert sides == ["fit", "held-out", "held-out", "fit", "held-out", "fit"]


# --- parameter counts --------------------------------------------------------------------------------------------

GPT2_SMALL = {"seq": 1024, "width": 768, "depth": 12, "heads": 12, "vocabulary": 50257}
LLAMA_3_8B = {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256}
MIXTRAL_8X7B = {**LLAMA_3_8B, "vocabulary": 32000, "experts": 8}


LSTM = 2000 * 128 + 2 * 4 * (128 * 128 + 128 * 128 + 2 * 128) + 128 * 2000 + 2000
"""By hand: four gates of two layers, each of two matrices and two biases, and both ends of the vocabulary."""
DLRM = 2 * 37_500 * 32 + (13 * 256 + 256 + 256 * 256 + 256 + 256 * 32 + 32) + (
    (32 + 9 * 8 // 2) * 256 + 256 + 256 * 256 + 256 + 256 + 1)
"""By hand: the tables, the bottom and the top."""


@pytest.mark.parametrize(("name", "values", "published"), [
    ("resnet50", {}, 25_557_032),
    ("resnet50", {"depth": 101}, 44_549_160),
    ("resnet50", {"depth": 152}, 60_192_808),
    ("bert", {"width": 768, "depth": 12, "heads": 12, "vocabulary": 30522}, 109_514_298),
    ("gpt2", GPT2_SMALL, 124_439_808),
    ("vit", {"resolution": 224, "width": 768, "depth": 12, "heads": 12, "classes": 1000}, 86_567_656),
    ("llama", LLAMA_3_8B, 8_030_261_248),
    ("moe", MIXTRAL_8X7B, 46_702_792_704),
    ("unet", {"width": 64, "norm": "batch", "classes": 2}, 31_037_698),
    ("unet", {"width": 64, "norm": "group", "classes": 2}, 31_037_698),
    ("lstm", {}, LSTM), ("dlrm", {}, DLRM),
])
def test_published_parameter_counts(torch: Any, name: str, values: dict[str, Any], published: int) -> None:
    assert workloads.build(name, device="meta", **values).parameters == published


# --- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_training_run_and_another_another(torch: Any, name: str) -> None:
    first = losses(name)
    assert losses(name) == first
    assert losses(name, seed=1) != first


@pytest.mark.parametrize("name", FEW)
def test_the_loss_falls_on_a_batch_seen_again(torch: Any, name: str) -> None:
    workload = workloads.build(name, preset="tiny", **({} if name in ("resnet50", "vit") else {"optimizer": "adamw"}))
    batch = next(workload.batches())
    seen = [workload.step(batch).item() for _ in range(12)]
    assert all(math.isfinite(loss) for loss in seen)
    assert sum(seen[-3:]) / 3 < seen[0] - 0.005


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", ["tf32", "bf16-autocast", "bf16"])
def test_every_dtype_mode_trains_about_alike(torch: Any, name: str, dtype: str) -> None:
    workload = workloads.build(name, preset="tiny", dtype=dtype)
    batch = next(workload.batches())
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert {value.dtype for value in workload.model.parameters()} == {wanted}
    try:
        loss = workload.step(batch)
    except RuntimeError as error:
        if (name, dtype) != ("lstm", "bf16-autocast"):
            raise
        pytest.skip(f"PyTorch has no bf16 LSTM on this CPU (oneDNN's needs AVX-512): {error}")
    assert loss.dtype == torch.float32 and not loss.requires_grad
    assert {value.grad.dtype for value in workload.model.parameters()} == {wanted}
    # bf16 keeps 8 bits and the loss averages; parameters drawn in bf16 are other ones, but of the same distribution
    assert loss.item() == pytest.approx(losses(name, steps=1)[0], rel=0.15 if dtype == "bf16" else 0.02)


@pytest.mark.parametrize("name", FEW)
def test_checkpointing_changes_no_number_but_runs_forward_again(torch: Any, name: str) -> None:
    assert losses(name, checkpointing=True) == pytest.approx(losses(name), rel=1e-5)
    runs = []
    workload = workloads.build(name, preset="tiny", checkpointing=True)
    for block in workload.blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    workload.step(next(workload.batches()))
    assert len(runs) == 2 * len(workload.blocks)


@pytest.mark.parametrize(("kind", "name", "foreach", "fused"), [
    ("sgd", "SGD", True, None), ("adamw", "AdamW", False, None), ("adamw-foreach", "AdamW", True, None),
    ("adamw-fused", "AdamW", None, True)])
def test_the_optimizers_are_what_their_names_say(torch: Any, kind: str, name: str, foreach: Any, fused: Any) -> None:
    optimizer = workloads.build("gpt2", preset="tiny", optimizer=kind).optimizer
    assert (type(optimizer).__name__, optimizer.defaults["foreach"]) == (name, foreach)
    assert bool(optimizer.defaults["fused"]) is bool(fused)
    if name == "AdamW":
        assert losses("gpt2", optimizer=kind) == pytest.approx(losses("gpt2", optimizer="adamw"), rel=1e-5)


def test_accumulated_micro_batches_make_the_gradient_of_one_large_batch(torch: Any) -> None:
    from tracer.workloads.models.parts import Batch

    parts = workloads.build("gpt2", preset="tiny", accumulation=2, optimizer="sgd")
    whole = workloads.build("gpt2", preset="tiny", batch=4, optimizer="sgd")
    step = next(parts.batches())
    assert len(step) == 2
    joined = Batch((torch.cat([part.inputs[0] for part in step]),), torch.cat([part.targets for part in step]))
    assert parts.step(step).item() == pytest.approx(whole.step((joined,)).item(), rel=1e-6)
    for left, right in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    assert parts.samples_per_step == whole.samples_per_step == 4
    assert parts.tokens_per_step == 64 and workloads.configure("vit").tokens_per_step is None


def test_data_is_repeatable_goes_round_and_leaves_the_global_generator_alone(torch: Any) -> None:
    state = torch.get_rng_state()
    workload = workloads.build("bert", preset="tiny", dtype="bf16")
    first, again = list(islice(workload.batches(), 5)), next(workload.batches())
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == torch.float32
    assert first[4] is first[0]
    assert torch.equal(first[0][0].inputs[0], again[0].inputs[0])
    assert not torch.equal(first[0][0].inputs[0], first[1][0].inputs[0])
    targets = first[0][0].targets
    assert ((targets == -100) | (targets >= 0)).all() and (targets >= 0).any()


def test_dlrm_lookups_are_skewed_spread_of_fixed_number_and_may_have_sparse_gradients(torch: Any) -> None:
    from tracer.workloads.models.lookups import bag_starts, zipf_rows

    generator = torch.Generator().manual_seed(0)
    counts = zipf_rows(1000, 200_000, 1.0, generator).bincount(minlength=1000).double()
    assert counts.numel() == 1000
    assert (counts > 0).all()  # every row has its rank: the spreading is a bijection
    popular = counts.sort(descending=True).values / counts.sum()
    harmonic = torch.tensor([1 / rank for rank in range(1, 1001)], dtype=torch.float64)
    for most in (1, 10):
        share = (harmonic[:most].sum() / harmonic.sum()).item()
        assert popular[:most].sum().item() == pytest.approx(share, rel=0.03)
    starts = bag_starts(64, 640, generator)
    lengths = torch.diff(starts, append=torch.tensor([640]))
    assert starts[0] == 0 and (lengths >= 0).all() and len(lengths.unique()) > 3
    workload = workloads.build("dlrm", preset="tiny", sparse=True, optimizer="sgd")
    workload.step(next(workload.batches()))
    assert workload.model.tables[0].weight.grad.is_sparse
    assert [group["momentum"] for group in workload.optimizer.param_groups] == [0.9, 0.0]


def test_moe_routes_each_token_to_its_best_experts(torch: Any) -> None:
    """With room for all, the batched routing equals a loop over tokens; with none to spare, tokens are dropped."""

    from tracer.workloads.models.language import RoutedFeedForward

    torch.manual_seed(0)
    settings = workloads.configure("moe", preset="tiny", capacity=4.0)
    layer = RoutedFeedForward(settings)
    for value in layer.parameters():
        torch.nn.init.normal_(value, std=0.2)
    x = torch.randn(2, 5, settings.width)
    mixed, balance = layer(x)
    for row, got in zip(x.flatten(0, 1), mixed.flatten(0, 1), strict=True):
        weights, chosen = layer.router(row).softmax(-1).topk(settings.top_k)
        weights = weights / weights.sum()
        expected = sum(weight * layer.experts(row.expand(settings.experts, 1, -1))[expert, 0]
                       for weight, expert in zip(weights, chosen, strict=True))
        torch.testing.assert_close(got, expected)
    assert balance.item() > 0.5
    layer.capacity = 0.1  # one place for each expert
    dropped, _ = layer(x)
    assert (dropped.flatten(0, 1).abs().sum(-1) == 0).any()


def test_rotary_positions_depend_on_distance_only(torch: Any) -> None:

    from tracer.workloads.models.language import rotary_angles, rotate

    cosines, sines = rotary_angles(16, 8)
    q, k = torch.randn(8).expand(1, 1, 16, 8), torch.randn(8).expand(1, 1, 16, 8)
    scores = (rotate(q, cosines, sines) @ rotate(k, cosines, sines).transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(13))


# --- what a step leaves behind, devices, wrappers, compilation ---------------------------------------------------


def switches(torch: Any) -> list[Any]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = [matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None),
             getattr(torch.backends.mkldnn, "matmul", None)]
    return [matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision(),
            *(getattr(part, "fp32_precision", None) for part in parts)]


@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "high"), ("tf32", "highest"), ("tf32", "high")])
def test_tf32_is_on_within_a_step_only(torch: Any, dtype: str, precision: str) -> None:
    started = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        before = switches(torch)
        seen = []
        workload = workloads.build("resnet50", preset="tiny", dtype=dtype)
        workload.model.register_forward_hook(lambda *_: seen.append(switches(torch)[:2]))
        batch = next(workload.batches())
        workload.step(batch)
        assert seen == [[dtype == "tf32"] * 2]
        assert switches(torch) == before
        with pytest.raises(TypeError):  # a step that fails puts them back as well
            workload.step((dataclasses.replace(batch[0], inputs=()),))
        assert switches(torch) == before
    finally:
        torch.set_float32_matmul_precision(started)


def test_switches_set_through_the_newer_interface_survive() -> None:
    """In a process of its own: mixing both interfaces cannot be undone."""
    torch = pytest.importorskip("torch", reason="running the workloads needs torch")
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the older interface only")
    code = ("import torch; from tracer.workloads.workload import tf32\n"
            "m, c = torch.backends.cuda.matmul, torch.backends.cudnn\n"
            "m.fp32_precision = 'tf32'; c.conv.fp32_precision = 'ieee'\n"
            "from tracer.capture.context import collect_context\n"
            "from tracer.shape_only.trace import trace_step\n"
            "switches = collect_context()['switches']\n"
            "assert switches['matmul_tf32'] and not switches['cudnn_tf32']\n"
            "assert switches['matmul_fp32_precision'] == 'tf32' and switches['conv_fp32_precision'] == 'ieee'\n"
            "def build():\n"
            "    model = torch.nn.Linear(4, 4)\n"
            "    return lambda: model(torch.ones(2, 4)).sum().backward()\n"
            "flags = trace_step(build, 'cpu').meta.profiler_flags\n"
            "assert flags['tf32_matmul'] and not flags['tf32_cudnn']\n"
            "before = (m.fp32_precision, c.conv.fp32_precision, c.rnn.fp32_precision)\n"
            "with tf32(False): assert not m.allow_tf32\n"
            "with tf32(True): assert m.allow_tf32 and c.allow_tf32\n"
            "assert before == (m.fp32_precision, c.conv.fp32_precision, c.rnn.fp32_precision)\n")
    result = run_program(code)
    assert result.returncode == 0, result.stderr


def test_channels_last_reaches_weights_and_images(torch: Any) -> None:
    for name in ("resnet50", "unet"):
        workload = workloads.build(name, preset="tiny", channels_last=True)
        (batch,) = next(workload.batches())
        assert batch.inputs[0].is_contiguous(memory_format=torch.channels_last)
        weights = [value for value in workload.model.parameters() if value.dim() == 4 and value.shape[1] > 3]
        assert all(value.is_contiguous(memory_format=torch.channels_last) for value in weights)
        assert losses(name, steps=1, channels_last=True) == pytest.approx(losses(name, steps=1), rel=1e-4)


def test_a_device_that_is_not_there_is_named(torch: Any) -> None:
    with pytest.raises(workloads.WorkloadError, match="is no torch device"):
        workloads.build("lstm", device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(workloads.WorkloadError, match=r"device=cuda is not here: torch .* sees 0 GPUs"):
            workloads.build("lstm", device="cuda")


def test_a_wrapper_replaces_the_model_and_the_optimizer_follows(torch: Any) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.scale = inner, torch.nn.Parameter(torch.ones(()))
            self.quiet_micro_batches = 0

        def forward(self, *inputs: Any) -> Any:
            return self.inner(*inputs) * self.scale

        def no_sync(self) -> Any:  # as DistributedDataParallel
            self.quiet_micro_batches += 1
            return nullcontext()

    workload = workloads.build("vit", preset="tiny", accumulation=3)
    assert workload.wrap(Doubled) is workload
    workload.step(next(workload.batches()))
    assert workload.model.scale.item() != 1.0
    assert workload.model.quiet_micro_batches == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "lstm"])
def test_a_compiled_step_gives_the_eager_losses(torch: Any, name: str) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    wanted = {"preset": "tiny", "dropout": 0.0}
    compiled = losses(name, compile=True, **wanted)
    assert compiled == pytest.approx(losses(name, **wanted), rel=1e-4)


def test_presets_of_realistic_size_build_on_the_meta_device(torch: Any) -> None:
    for name in NAMES:
        optimizer = {"optimizer": "sgd" if name in ("dlrm", "deepfm", "dcn_v2") else "adamw-foreach"}
        assert workloads.build(name, preset="real", device="meta", **optimizer).parameters > 20_000_000

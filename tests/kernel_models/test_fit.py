"""Fitting: tables and traces as samples, the written hold-out rule, choices, and the commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from learned_support import QUICK, gemm_samples, gemm_table
from said import Run, plain

from kernel_models import fitting, threads
from kernel_models.datasets import DataError, read_samples
from kernel_models.datasets.campaign import calls_of_benchmark
from kernel_models.datasets.forms import READERS, read_table
from kernel_models.datasets.samples import Samples, fold_of, is_held_out, joined, share_of
from kernel_models.device import device
from kernel_models.fitting import Options, candidates_of, fit_entry, fit_profile, scaled_to
from kernel_models.learned import boosting
from kernel_models.learned.boosted import BoostedModel
from kernel_models.learned.boosting import Boosting
from kernel_models.op_call import Family
from kernel_models.profile import load_profile
from kernel_models.scores import errors_of, evaluate_profile
from tracer.campaign.families import FAMILIES
from tracer.table_input import TableInputError

H200 = device("h200-sxm")
ROOT = Path(__file__).resolve().parents[2]


def only_sentence(error: str) -> str:
    """The last line of what a command says, before which it only says what it is reading."""
    *before, last = error.splitlines()
    assert all(line.startswith("reading ") for line in before), error
    return last


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "BOOSTING", {Family.GEMM: (QUICK,), Family.ATTENTION: (QUICK,)})
    monkeypatch.setattr(fitting, "OTHERS", (QUICK,))
    monkeypatch.setattr(fitting, "SMALL", QUICK)


def table(path: Path, rows: list[dict[str, Any]] | pd.DataFrame) -> Path:
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


def test_products_over_nothing_teach_no_rate_and_several_devices_need_a_name() -> None:
    samples = gemm_samples(3)
    empty = replace(samples.calls[0], dims=(*samples.calls[0].dims[:3], 0))
    assert joined([replace(samples, calls=[empty, *samples.calls[1:]])])[0].calls == samples.calls[1:]
    samples = gemm_samples(100)
    with pytest.raises(DataError, match="several devices"):
        fit_profile([samples, replace(samples, device="l40s")])


def test_the_hold_out_rule_never_moves_and_errors_are_those_on_paper() -> None:
    assert share_of("n=4096 k=4096") == pytest.approx(0.828627, abs=1e-6)
    labels = [f"n={n} k={k}" for n in range(1, 60) for k in range(1, 60)]
    held = [label for label in labels if is_held_out(label)]
    assert 0.18 < len(held) / len(labels) < 0.22
    assert {fold_of(label, 5) for label in held} == set(range(5))  # folds are independent of the rule
    errors = errors_of(np.array([1.1, 0.8, 2.0, 1.0]), np.ones(4), np.full(4, 0.9), np.array([2.0, 2.0, 2.0, 0.95]))
    assert (errors.n, errors.mape, errors.median, errors.bias, errors.max, errors.coverage) == pytest.approx(
        (4, 0.325, 0.15, 0.225, 1.0, 0.75))


def test_linear_layers_by_device_and_stack(tmp_path: Path) -> None:
    rows = pd.concat([gemm_table(30), gemm_table(20).assign(gpu="L40S", dtype="fp8")])
    found = read_table(table(tmp_path / "t.parquet", rows))
    assert [(one.device, one.software, len(one), one.calls[0].dtype) for one in found] == [
        ("h200-sxm", "lib-1.0/linear", 30, "bf16"), ("l40s", "lib-1.0/linear", 20, "fp8")]
    first = rows.iloc[0]
    call = found[0].calls[0]
    assert call.dims == (1, first.m, first.n, first.k) and call.layout == "nt"
    assert found[0].labels()[0] == f"n={first.n} k={first.k}"


def test_attention_without_a_window_is_one_call(tmp_path: Path) -> None:
    row = {"gpu": "L40S", "software": "s", "kernel_source": "fa", "batch_size": 2, "seq_len": 64, "num_heads": 8,
           "num_kv_heads": 2, "head_dim": 128, "latency_us": 10.0}
    found = joined(read_table(table(tmp_path / "t.parquet", [
        {**row, "window_size": np.nan}, {**row, "window_size": 0.0, "latency_us": 12.0},
        {**row, "window_size": 0.0, "latency_us": 30.0}, {**row, "window_size": 32.0}])))
    assert len(found) == 1 and len(found[0]) == 2
    assert sorted(found[0].measured_us) == [10.0, 12.0]
    assert {call.dims[-1] for call in found[0].calls} == {0, 32}
    assert found[0].labels("tokens") == ["batch=2 length=64"] * 2 and len(set(found[0].labels("heads"))) == 2


def test_neusight_products_have_n_as_contraction(tmp_path: Path) -> None:
    row = {"OPName": "bmm", "Device": "Tesla T4", "B": 3, "H": np.nan, "M": 64, "N": 32, "K": 16, "split": "train",
           "latency_us": 50.0}
    found = read_table(table(tmp_path / "t.parquet", [row, {**row, "split": "test", "M": 65}, {
        **row, "OPName": "conv"}]))
    assert [call.dims for call in found[0].calls] == [(3, 64, 16, 32), (3, 65, 16, 32)]
    assert found[0].split().tolist() == [False, True]
    with pytest.raises(TableInputError, match="row 2, column M: 'inf' is no whole number"):
        read_table(table(tmp_path / "t.parquet", [row, {**row, "M": np.inf}]))


def test_block_operations_are_split_among_workers(tmp_path: Path) -> None:
    row = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768,
           "use_gated_mlp": True, "num_tokens": 96, "num_tensor_parallel_workers": 4, "gpu": "h100", "model": "70b",
           "latency_us": 10.0}
    ops = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act", "add", "emb",
           "input_layernorm", "attn_rope")
    found = read_table(table(tmp_path / "t.parquet", [{**row, "op": op} for op in ops]))
    products = {call.dims[1:] for one in found if one.family is Family.GEMM for call in one.calls}
    assert products == {(96, (64 + 16) // 4 * 128, 8192), (96, 8192, 2048), (96, 2 * 7168, 8192), (96, 8192, 7168)}
    assert {one.family for one in found} == {Family.GEMM, Family.NORM, Family.ELEMENTWISE, Family.EMBEDDING}
    assert next(one for one in found if one.family is Family.NORM).calls[0].dims == (96, 8192)


def campaign(folder: Path) -> Path:
    """A campaign's directory with made-up tables."""
    (folder / "kernels").mkdir(parents=True)
    (folder / "campaign.json").write_text(json.dumps({"sessions": [
        {"hardware": {"device": "NVIDIA H200"}, "software": {"torch": "2.9.0"}}]}))
    common = {"session": 0, "p50_us": 12.0, "kernel_us": 11.0, "kernel_count": 1.0, "event_overhead_us": 2.0}
    variants = [{"variant": "warm"}, {"variant": "cold", "p50_us": 99.0}]
    rows: dict[str, list[dict[str, Any]]] = {
        "gemm": [{"m": 64 * i, "n": 128, "k": 256, "batch": 1, "op": "addmm" if i % 2 else "mm", "layout": "nt",
                  "dtype": "bf16", "split": "held-out" if i == 3 else "fit"} for i in range(1, 9)],
        "convolution": [{"batch": 2, "channels": 8, "out_channels": 16, "size": 14, "kernel": 3, "stride": 2,
                         "groups": 1, "op": op, "dtype": "bf16", "channels_last": True} for op in ("forward", "dgrad")],
        "norm": [{"rows": 64, "width": 256, "norm": norm, "op": op, "dtype": "bf16"}
                 for norm in ("layer", "rms") for op in ("forward", "backward")],
        "elementwise": [{"rows": 64, "width": 256, "op": op, "layout": "contiguous", "dtype": "bf16"}
                        for op in ("gelu", "cast_fp32", "copy", "add_scalar", "add_inplace", "gelu_backward")],
        "reduction": [{"rows": 64, "width": 256, "op": op, "over": over, "dtype": "fp32"}
                      for op in ("sum", "norm", "cumsum") for over in ("width", "rows")],
        "embedding": [{"rows": 1000, "width": 64, "lookups": 128, "pooling": pooling, "op": "forward", "law": "uniform",
                       "dtype": "fp32"} for pooling in (0, 4)],
        "index": [{"rows": 100, "width": 64, "count": 32, "op": op, "law": "uniform", "dtype": "fp32"}
                  for op in ("index_select", "gather", "scatter_add", "index_add")],
        "copy": [{"bytes": 4096, "direction": "h2d", "memory": "pinned"}],
        "overheads": [{"case": "item"}],
    }
    for family, items in rows.items():
        table(folder / "kernels" / f"{family}.parquet", [
            {"id": f"{family}-{i}", "split": "fit", **common, **item, **variant}
            for i, item in enumerate(items) for variant in variants])
    return folder


def test_campaign_tables_become_the_calls_of_traces(tmp_path: Path) -> None:
    found = read_samples([str(campaign(tmp_path / "c"))])
    assert {one.device for one in found} == {"h200-sxm"} and {one.software for one in found} == {"torch 2.9.0"}
    assert {one.family for one in found} == {
        Family.GEMM, Family.CONV, Family.NORM, Family.ELEMENTWISE, Family.COPY, Family.REDUCTION, Family.EMBEDDING,
        Family.INDEX, Family.TRANSFER}
    products = next(one for one in found if one.family is Family.GEMM)
    assert len(products) == 8 and products.split().sum() == 1
    assert set(products.measured_us) == {10.0}  # warm, less what an empty pair of events takes
    kinds = {call.kind for one in found for call in one.calls}
    assert {"forward", "dgrad", "layer_norm_backward", "rms_norm", "cast", "embedding", "bag"} <= kinds
    assert not any("unsized" in call.flags for one in found for call in one.calls)


def test_traces_give_single_calls(real_trace: Callable[[str], Path]) -> None:
    found = read_samples([str(real_trace("rank3-of-8xA100-6steps"))])
    assert {one.device for one in found} == {"a100-sxm-40g"}
    sizes = {one.family: len(one) for one in found}
    assert sizes[Family.GEMM] > 100 and sizes[Family.ELEMENTWISE] > 100
    for one in found:
        assert (one.measured_us >= 0.3).all() and len(set(one.calls)) == len(one)
        assert not any("unsized" in call.flags for call in one.calls)


def generic(rows: int = 300) -> pd.DataFrame:
    random = np.random.default_rng(0)
    columns, heights = random.choice([256, 512, 1024, 4096], rows), random.integers(1, 5000, rows)
    moved = 4.0 * columns * heights
    return pd.DataFrame({
        "family": "norm", "device": "NVIDIA H200", "kind": "layer_norm", "dtype": "bf16", "rows": heights,
        "columns": columns, "flops": 8.0 * columns * heights, "bytes_read": moved / 2, "bytes_written": moved / 2,
        "latency_us": 2 + moved / 3e6})


def test_the_documented_schema(tmp_path: Path) -> None:
    plain = pd.DataFrame([{"family": "gemm", "device": "h200", "latency_us": 5.0, "batch": 1, "m": 8, "n": 16, "k": 32},
                          {"family": "attention", "device": "h200", "latency_us": 5.0, "batch": 1, "heads": 8,
                           "kv_heads": 8, "q_len": 64, "kv_len": 64, "head_dim": 64, "v_head_dim": 64, "window": 0,
                           "flags": "causal"}])
    found = read_table(table(tmp_path / "t.csv", plain))
    calls = {one.family: one.calls[0] for one in found}
    assert calls[Family.GEMM].flops == 2 * 8 * 16 * 32 and calls[Family.GEMM].layout == "nt"
    assert calls[Family.ATTENTION].kind == "flash_forward" and calls[Family.ATTENTION].flags == ("causal",)
    assert len(read_table(table(tmp_path / "n.parquet", generic(50)))[0]) == 50


@pytest.mark.parametrize("change, why", [
    (lambda t: t.iloc[:0], "empty table"),
    (lambda t: t.drop(columns="n"), "lacks n"),
    (lambda t: t.assign(gpu="Voodoo 2"), "Voodoo 2"),
    (lambda t: t.assign(latency_us=-1.0), "positive"),
    (lambda t: t.assign(m="many"), "row 1, column m: 'many' is no whole number"),
    (lambda t: t.assign(n=t.n.where(t.index != 3, 0)), "row 4, column n: '0' is"),
    (lambda t: t.assign(k=t.k + 0.5), "row 1, column k: "),
    (lambda t: t.assign(dtype="int3"), "element type 'int3'"),
    (lambda t: t.assign(family="gemm", device="t4", batch=t.m * 1.01)[
        ["family", "device", "batch", "m", "n", "k", "latency_us"]], "row 1, column batch: "),
])
def test_bad_tables_are_told(tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], why: str) -> None:
    from tracer.errors import ForetraceError

    path = table(tmp_path / "t.parquet", change(gemm_table(20)))
    with pytest.raises(ForetraceError, match=why):
        read_table(path)


def poisoned(samples: Samples, rows: np.ndarray) -> Samples:
    return replace(samples, measured_us=np.where(rows, samples.measured_us * 50, samples.measured_us))


def test_choices_never_see_the_held_out_groups() -> None:
    samples = gemm_samples(400)
    held = samples.split()
    assert 0.1 < held.mean() < 0.35
    options = Options(refit=False)
    clean, dirty = (fit_entry(one, H200, options) for one in (samples, poisoned(samples, held)))
    assert clean.facts["candidates"] == dirty.facts["candidates"] and clean.rows == dirty.rows == (~held).sum()
    calls = samples.calls[:50]
    assert (clean.model.predict(calls).time_us == dirty.model.predict(calls).time_us).all()
    assert dirty.facts["held_out"]["mape"] > 0.9 > 0.1 > clean.facts["held_out"]["mape"]


def test_refitting_takes_the_rest_in_but_rows_the_data_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = gemm_samples(400)
    entry = fit_entry(samples, H200)
    assert entry.rows == len(samples) > entry.facts["fit_rows"]
    assert entry.kind == "boosted" and entry.facts["held_out"]["coverage"] > 0.7
    assert entry.facts["candidates"]["roofline"]["mape"] > entry.facts["held_out"]["mape"]
    monkeypatch.setattr(fitting, "REFIT_ROWS", 300)  # large sets are not fitted twice
    monkeypatch.setattr(fitting, "FULL_ROWS", 300)
    once = fit_entry(samples, H200)
    assert once.rows == once.facts["fit_rows"] < len(samples) and once.facts["held_out"]["mape"] < 0.1
    held = np.arange(len(samples)) % 7 == 0
    marked = replace(samples, held_out=held)
    clean, dirty = (fit_entry(one, H200).model.predict(samples.calls[:50])
                    for one in (marked, poisoned(marked, held)))
    assert (clean.time_us == dirty.time_us).all()


def test_a_fit_whose_time_is_over_ends_with_what_it_has() -> None:
    samples = gemm_samples(200)
    late = [fit_entry(samples, H200, Options(process_up_to=most, until=-1.0)) for most in (1000, 0)]
    assert all(entry.facts["ended_early"] for entry in late)
    process, trees = late
    # The process keeps the middle of its priors, and it has errors of its own; of trees none were tried.
    assert "gaussian" in process.facts["candidates"] and process.facts["cross_validation"]["mape"] < 0.5
    assert trees.kind == "roofline" and set(trees.facts["candidates"]) == {"roofline"}
    unhurried = fit_entry(samples, H200, Options(process_up_to=1000))
    assert "ended_early" not in unhurried.facts
    assert unhurried.facts["candidates"]["gaussian"]["mape"] < process.facts["candidates"]["gaussian"]["mape"]


def test_formulas_win_where_they_are_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "OTHERS", (Boosting(1, 0.01, 2, 1.0, 50),))
    monkeypatch.setattr(fitting, "SMALL", Boosting(1, 0.01, 2, 1.0, 50))
    norms = read_table(table(tmp_path / "n.parquet", generic()))[0].aggregated()
    for samples in (norms, gemm_samples(40)):  # too few
        entry = fit_entry(samples, H200)
        assert entry.kind == "roofline" and entry.model.source.label == "heuristic"


def test_as_many_trees_are_stored_as_helped_rows_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boosting, "STOPPED_FROM", 300)
    entry = fit_entry(gemm_samples(700, noise=1.0), H200)
    most = int(entry.facts["chosen"].split()[1].split("×")[0])
    shares = [member["share"] for member in entry.facts["members"]]
    assert isinstance(entry.model, BoostedModel) and all(0.0 < share <= 1.0 for share in shares)
    assert len(entry.model.trees.depth) == sum(round(most * share) for share in shares) < most * len(shares)
    assert sum(member["weight"] for member in entry.facts["members"]) == pytest.approx(1.0)
    # More rows get fewer trees.
    how = Boosting(1000, 0.05, 31, 0.4, 20)
    assert scaled_to(how, 1000) == how
    assert scaled_to(how, 300_000).iterations == 500 and scaled_to(how, 300_000).learning_rate == 0.1
    assert len(candidates_of(Family.GEMM, 100)) >= 1


@pytest.mark.slow  # fits of several entries: fit_evaluate_and_list
def test_fits_beside_each_other_are_those_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = gemm_samples(200)
    slower = replace(samples, software="lib-2.0", measured_us=samples.measured_us * 2)
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(fitting, "BOOSTING", {Family.GEMM: (replace(QUICK, iterations=12),)})
    monkeypatch.setattr(fitting, "SMALL", replace(QUICK, iterations=12))
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    found = [fit_profile([samples, slower], progress=lambda *each: told.append(each))]
    for name in {name for name, _ in told}:
        shares = [share for each, share in told if each == name]
        assert shares[0] == 0.0 and shares[-1] == 1.0 and shares == sorted(shares)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    found.append(fit_profile([samples, slower]))
    beside, after = ([entry.model.predict(samples.calls).time_us for entry in one.entries] for one in found)
    assert len(told) > 4 and all((a == b).all() for a, b in zip(beside, after, strict=True))
    # Evaluation prices by the same software.
    judged = evaluate_profile(found[0], [samples, slower, replace(samples, device="l40s")])
    assert judged.families["gemm"].n == 2 * len(samples) and "l40s" in judged.notes[0]
    assert all(errors.mape < 0.1 for errors in judged.by_software.values())


def test_fit_evaluate_and_list(run: Run, tmp_path: Path) -> None:
    data, norms = table(tmp_path / "t.parquet", gemm_table(400)), table(tmp_path / "n.csv", generic())
    out = tmp_path / "h200.profile"
    code, text, told = run("fit", data, norms, "-o", out)
    # No terminal: a plain line for each family when it begins.
    assert sorted(line.split(",")[0] for line in told.splitlines() if line.startswith("fitting ")) == [
        "fitting gemm", "fitting norm"] and "\x1b" not in told
    assert code == 0 and "2 models of h200-sxm" in plain(text) and "MAPE" in text
    assert set(load_profile(out).families) == {Family.GEMM, Family.NORM}

    code, text, _ = run("models", "evaluate", out, data, norms, "--json")
    found = json.loads(text)
    assert code == 0 and set(found["families"]) == {"gemm", "norm"}
    assert {"n", "mape", "median", "bias", "p90"} <= set(found["families"]["gemm"])
    assert 0 < found["families"]["gemm"]["mape"] < 0.05 and found["families"]["gemm"]["n"] > 200
    assert "Errors by family" in plain(run("models", "evaluate", out, data)[1])
    code, text, _ = run("models", "list", tmp_path, "--json")
    assert code == 0 and [m["family"] for m in json.loads(text)[0]["models"]] == ["gemm", "norm"]
    assert "h200-sxm, fitted" in plain(run("models", "list", out)[1])
    found = json.loads(run("fit", data, "-o", out, "--no-refit", "--json")[1])
    assert found["models"][0]["held_out"]["n"] > 0 and "refitted" not in found["provenance"]["split"]


def operators(path: Path) -> Path:
    """A table of operators as TraceLens writes them: two products, a copy from the host, and nonsense."""
    row = {"name": "aten::mm", "Input Dims": "((64, 128), (128, 256))", "Concrete Inputs": "('', '')",
           "Input type": "('c10::BFloat16', 'c10::BFloat16')", "Input Strides": "((128, 1), (1, 128))",
           "Kernel Time (µs)_median": "12.5", "kernel_details_summary": "[]"}
    return table(path, [row, {**row, "Input Dims": "((32, 128), (128, 256))"},
                        {**row, "name": "aten::copy_", "kernel_details_summary": "Memcpy HtoD (Pinned -> Device)"},
                        {**row, "name": "aten::mm (Synthetic Op)"}])


def test_operator_tables_need_a_device(run: Run, tmp_path: Path) -> None:
    path = operators(tmp_path / "ops.parquet")
    notes: list[str] = []
    found = read_table(path, device("h100-sxm"), notes)
    assert [(one.device, one.family, one.calls[0].dims, one.calls[0].layout) for one in found] == [
        ("h100-sxm", Family.GEMM, (1, 64, 256, 128), "nt")]
    assert found[0].measured_us.tolist() == [12.5, 12.5] and "2 of 4 rows" in notes[0]
    code, _, error = run("fit", path, "-o", tmp_path / "x.profile")
    assert code == 2 and "--device" in only_sentence(error)
    assert run("fit", path, "-o", tmp_path / "x.profile", "--device", "h100-sxm")[0] == 0
    for dims, says in (("((64,", "literals"), ("(1" + ",1" * 60_000 + ")", "more than 100,000 characters")):
        broken = table(tmp_path / "broken.parquet", pd.read_parquet(path).assign(**{"Input Dims": dims}))
        with pytest.raises(TableInputError, match=says):
            read_table(broken, device("h100-sxm"))


def test_a_directory_is_read_as_far_as_it_can_be(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    table(folder / "a.parquet", gemm_table(100))
    operators(folder / "b.parquet")
    (folder / "c.csv").write_text("x,y\n1,2\n")
    out = tmp_path / "x.profile"
    assert "c.csv was skipped" in plain(run("fit", folder, "-o", out)[1])
    found = load_profile(out)
    assert [entry.rows for entry in found.entries] == [len(gemm_samples(100))]
    assert [note.split(" ")[0] for note in found.provenance["notes"]] == ["b.parquet", "c.csv"]
    (folder / "a.parquet").unlink()
    code, _, error = run("fit", folder, "-o", out)
    assert code == 2 and "Nothing in the directory" in only_sentence(error)


def test_traces_of_several_devices_judge_a_profile_of_one(
    run: Run, tmp_path: Path, real_trace: Callable[[str], Path]
) -> None:
    out = tmp_path / "h100.profile"
    folder = real_trace("h100-vs-mi300")
    some = [next(iter(sorted(folder.glob(f"{maker}*.gz")))) for maker in ("h100", "mi300")]
    assert run("fit", *some, "--device", "h100-sxm", "-o", out)[0] == 0
    assert any("another device (mi300x)" in note for note in load_profile(out).provenance["notes"])
    found = json.loads(run("models", "evaluate", out, folder, "--json")[1])
    assert found["families"]["gemm"]["n"] > 5
    told = " ".join(found["notes"])
    assert "70% of 45.65 ms GPU time was used; 30% belongs to no operation" in told and "mi300x" in told


def test_no_model_without_an_error(run: Run, tmp_path: Path) -> None:
    samples = gemm_samples(200)
    few = replace(samples, groups={"model": [f"model {i % 3}" for i in range(len(samples))]})
    while few.split().any():  # no model is in the held-out fifth
        few = replace(few, groups={"model": [f"{label}." for label in few.groups["model"]]})
    entry = fit_entry(few, H200)
    assert "held_out" not in entry.facts and entry.facts["cross_validation"]["n"] == len(few)
    assert fit_entry(samples.taken(np.arange(1)), H200).facts["cross_validation"]["n"] > 0
    data = table(tmp_path / "t.parquet", gemm_table(30))
    text = run("fit", data, "-o", tmp_path / "x.profile")[1]
    assert "*" in text and "cross-validation" in text and "–" not in text


def test_bad_input_is_one_sentence_and_two(run: Run, tmp_path: Path) -> None:
    data = table(tmp_path / "t.parquet", gemm_table(100))
    (tmp_path / "bad.profile").write_bytes(b"PK\x03\x04 nonsense")
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    (tmp_path / "none").mkdir()
    out = tmp_path / "out.profile"
    for arguments in (
        ("fit", data, "-o", tmp_path / "no" / "folder.profile"), ("fit", tmp_path / "bad.parquet", "-o", out),
        ("fit", data, "-o", out, "--device", "voodoo"), ("fit", data, "-o", out, "--device", "a40"),
        ("fit", data, "-o", out, "--family", "gamm"),
        ("fit", data, "-o", out, "--software", "other"), ("fit", data, "-o", data),
        ("models", "evaluate", tmp_path / "bad.profile", data), ("models", "evaluate", tmp_path / "missing", data),
        ("models", "list", tmp_path / "none"), ("models", "list", tmp_path / "bad.profile"),
    ):
        code, text, error = run(*arguments)
        assert (code, text) == (2, ""), arguments
        assert only_sentence(error).startswith("foretrace: "), arguments
        assert not out.exists()


def test_published_products_are_predicted(data_folder: Path) -> None:
    path = data_folder / "kernels" / "gemm_forward.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    frame = pd.read_parquet(path)
    frame = frame[(frame.gpu == "H100-SXM5-80GB") & (frame.software == "vllm-0.14.0") & (frame.dtype == "bfloat16")]
    samples = next(READERS[0].read(frame, path)).aggregated()
    entry = fit_entry(samples, device(samples.device), Options(refit=False))
    held = entry.facts["held_out"]
    assert held["not_covered"] == 0 and 0.01 < held["mape"] < 0.09 and held["coverage"] > 0.7
    assert held["mape"] < entry.facts["candidates"]["roofline"]["mape"] / 2


@pytest.mark.parametrize(("family", "settings", "call"), [
    ("gemm", {"m": 1, "n": 16, "k": 32, "layout": "tn", "dtype": "tf32"}, ("mm", (1, 1, 16, 32), "tf32", "tn", ())),
    ("gemm", {"m": 8, "n": 32, "k": 64, "dtype": "fp8"}, ("mm", (1, 8, 32, 64), "fp8", "nt", ("out_bf16",))),
    ("gemm", {"m": 8, "n": 4, "k": 2, "batch": 3, "op": "bmm", "dtype": "bf16"},
     ("bmm", (3, 8, 4, 2), "bf16", "nt", ())),
    ("attention", {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 64, "head_dim": 32, "op": "backward",
                   "backend": "efficient", "dtype": "bf16"},
     ("efficient_backward", (2, 4, 2, 64, 64, 32, 32, 0), "bf16", "", ("causal",))),
    ("convolution", {"batch": 2, "channels": 8, "out_channels": 4, "size": 9, "stride": 2, "op": "wgrad",
                     "dtype": "bf16"},
     ("wgrad", (2, 8, 4, 1, 1, 9, 9, 1, 5, 5, 1, 3, 3, 1, 2, 2, 1, 1, 1), "bf16", "nhwc", ())),
    ("channel_norm", {"batch": 2, "channels": 8, "size": 4, "channels_last": True, "dtype": "bf16", "op": "backward"},
     ("batch_norm_backward", (8, 32), "bf16", "nhwc", ("bias", "weight", "weight_fp32"))),
    ("elementwise", {"rows": 8, "width": 32, "op": "add", "layout": "column"},
     ("add", (256, 2, 264), "fp32", "broadcast", ())),
    ("elementwise", {"rows": 8, "width": 32, "op": "cast_bf16", "layout": "transposed"},
     ("cast", (256, 1), "bf16", "strided", ("in_fp32",))),
    ("reduction", {"rows": 8, "width": 32, "op": "argmax", "over": "all"}, ("argmax", (8, 32, 1), "fp32", "", ())),
    ("embedding", {"rows": 100, "width": 16, "lookups": 50, "pooling": 4, "op": "backward", "law": "zipf"},
     ("bag_backward", (50, 13, 100, 16, 1), "fp32", "", ())),
    ("pooling", {"batch": 2, "channels": 8, "size": 9, "kernel": 3, "stride": 2, "channels_last": True},
     ("max", (16, 81, 16, 9), "fp32", "", ("nhwc",))),
    ("fused", {"rows": 8, "width": 32, "chain": "norm"}, ("persistent_reduction", (256, 4, 800), "fp32", "", ())),
    ("copy", {"bytes": 4096, "direction": "d2h", "memory": "pageable"}, ("d2h", (4096,), "uint8", "", ("pageable",))),
    ("recurrent", {"seq": 4, "batch": 2, "input": 8, "hidden": 16, "op": "backward"},
     ("lstm_backward", (4, 2, 8, 16, 1, 1), "fp32", "", ())),
])
def test_a_benchmark_becomes_the_call_that_it_declares(
        family: str, settings: dict[str, int | str | bool], call: tuple[object, ...]) -> None:
    found, = calls_of_benchmark(family, FAMILIES[family].checked(settings))
    assert (found.kind, found.dims, found.dtype, found.layout, found.flags) == call
    assert bool(found.accesses) == (family == "embedding")


@pytest.mark.parametrize(("family", "column", "value", "says"), [
    ("copy", "direction", np.inf, "row 1, column direction: 'inf' is no word"),
    ("embedding", "variant", np.inf, "column variant: 'inf' is no word"),
    ("norm", "op", None, "column op: 'None' is no word"), ("gemm", "m", -4, "column m: '-4"),
    ("convolution", "stride", 0, "cannot be read as a table"), ("convolution", "groups", 1e30, "column groups: "),
    ("embedding", "lookups", float("nan"), "column lookups: "), ("gemm", "m", "x", "column m: 'x'")])
def test_a_campaigns_odd_cells_are_named(tmp_path: Path, family: str, column: str, value: object, says: str) -> None:
    path = campaign(tmp_path / "c") / "kernels" / f"{family}.parquet"
    pd.read_parquet(path).assign(**{column: value}).to_parquet(path)
    with pytest.raises(TableInputError, match=says):
        read_samples([str(tmp_path / "c")])

"""``foretrace serve`` and ``price-layer`` on the command line, the prices of a layer against data sheets and measured
kernels, and the predictor that engines' own schedulers ask, by the interface of SGLang's simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas
import pytest
from said import Run, plain

import foretrace
from kernel_models.collectives.price import ENGINE_BYTES, kernel_us
from planner.serving.layer_prices import price_layer
from planner.serving.setup import ServingError
from planner.serving.step_grids import PrefillChunk
from planner.serving.step_predictor import StepPredictor
from planner.serving.steps import ServedStep

CONFIG = ('{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, '
          '"num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 2048}')


def test_a_step_and_a_load_are_reported(run: Run) -> None:
    done = run("serve", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "2", "--batch", "16", "--context", "2048",
               "--concurrency", "8", "--prompt", "512-1024", "--output", "64", "--requests", "32")
    assert done.code == 0
    for expected in ("decode 16 × 2,048", "attention of decoding", "room for", "8 clients: 32 requests",
                     "time between tokens, ms", "tokens/s", "vllm is taken to add"):
        assert expected in plain(done.out)


def test_json_has_all_of_it(run: Run) -> None:
    found = run("serve", "gpt-oss-20b", "--experts", "mxfp4", "--rate", "2", "--requests", "40", "--json").json
    assert found["load"]["rate"] == 2.0 and found["load"]["requests"] == 40
    assert found["memory_gb"]["weights"] == pytest.approx(13, abs=3)
    assert {each["name"] for each in found["decode_operations"]} >= {"experts", "routing", "logits"}
    assert found["decode_ms"]["low"] < found["decode_ms"]["ms"] < found["decode_ms"]["high"]


def test_a_config_of_one_s_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(CONFIG)
    assert run("serve", path, "--batch", "4", "--context", "1024", "--json").json["largest_batch"] > 1000
    done = run("serve", path, "--context", "4096")
    assert done.code == 2 and "longer than the 2,048" in done.err


def test_a_search_and_one_that_finds_nothing(run: Run) -> None:
    found = run("serve", "llama-3.1-8b", "--gpus", "2", "--target", "ttft=500,tpot=30", "--prompt", "256", "--output",
                "64", "--json").json
    assert found["choices"] and found["choices"][0]["tokens_per_second"] > 0
    done = run("serve", "llama-3.1-8b", "--gpus", "2", "--target", "tpot=0.1")
    assert done.code == 1 and "None is within the target" in done.out


@pytest.mark.parametrize("arguments", [
    ("nothing-known",), ("llama-3.1-8b", "--concurrency", "-2"), ("llama-3.1-8b", "--concurrency", "0"),
    ("llama-3.1-8b", "--kv-dtype", "fp5"), ("llama-3.1-8b", "--target", "fast"),
    ("llama-3.1-8b", "--target", "tpot=5", "--tp", "2"), ("llama-3.1-8b", "--rate", "nan"),
    ("llama-3.1-8b", "--chunk", "-5"), ("llama-3.1-8b", "--speculate", "x"),
    ("llama-3.1-8b", "--calibrate", "absent.csv"), ("llama-3.1-8b", "--device", "tpu-v9"),
    ("llama-3.1-8b", "--rate", "0", "--concurrency", "4", "--prompt", "131072"),
    ("llama-3.1-8b", "--tp", "16", "--topology", "dgx-h200"), ("llama-3.1-8b", "--gpus", "4"),
    ("llama-3.1-8b", "--target", "tpot=5", "--step-us", "100"),
    ("llama-3.1-8b", "--target", "tpot=5", "--context", "100")])
def test_bad_input_is_one_sentence(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("serve", *arguments)
    assert done.code == 2 and done.err.startswith("foretrace: ") and done.err.count("\n") == 1


def test_all_reduce_kernels_are_those_measured(data_folder: Path) -> None:
    path = data_folder / "collectives" / "custom_all_reduce_h200.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    frame = pandas.read_parquet(path)
    for name, least in (("vLLM_custom_graph", 4.4), ("SGLang_CustomAllReduce_graph", 2.6), ("TRTLLM", 2.6)):
        rows = frame[(frame.backend_kernel == name) & (frame.payload_bytes <= ENGINE_BYTES)]
        us = kernel_us(rows.payload_bytes.to_numpy(float), rows.ranks.to_numpy(float), 450.0, least)
        assert np.abs(us / rows.latency_us.to_numpy() - 1).mean() < 0.12


SHEETS = {"a100-sxm-80g": (312e12, 2039e9), "h100-sxm": (989.4e12, 3350e9), "b200": (2250e12, 8000e9)}
"""bf16 operations a second and bytes a second, as NVIDIA's data sheets have them."""


@pytest.mark.parametrize("device", SHEETS)
def test_a_products_bound_is_the_data_sheets(device: str) -> None:
    peak, bandwidth = SHEETS[device]
    found = price_layer("llama-3.1-8b", devices=[device], batches=[1, 64, 256, 512], prompt=512)
    seen = set()
    for each in found.operations:
        if not each.product or "heads" in each.sizes:
            continue
        sizes = dict(word.split("=") for word in each.sizes.replace(",", "").split())
        m, n, k = (int(sizes.get(name, 1)) for name in "mnk")
        compute, memory = 2 * m * n * k / peak, 2 * (m * k + k * n + m * n) / bandwidth
        if max(compute, memory) > 1.2 * min(compute, memory):
            assert each.bound == ("compute" if compute > memory else "memory")
            seen.add(each.bound)
        assert each.low < each.us < each.high
    assert seen == {"compute", "memory"}


def test_layers_are_what_serve_adds_up() -> None:
    served = foretrace.serve("llama-3.1-8b", device="h100-sxm", batch=8, context=2048)
    found = price_layer("llama-3.1-8b", devices=["h100-sxm"], phases=["decode"], batches=[8], context=2048)
    layers = 32 * sum(each.us for each in found.operations)
    ends = sum(each.us for each in served.decode_operations if each.name in ("logits", "sampling", "embedding"))
    norm = next(each.us for each in found.operations if each.name == "norms") / 2
    assert layers + ends + norm == pytest.approx(sum(each.us for each in served.decode_operations), rel=1e-3)
    assert sum(each.share for each in found.operations) == pytest.approx(1)


def test_the_kind_that_there_is_most_of_is_priced_and_a_split_layer_communicates() -> None:
    found = price_layer("deepseek-v3", devices=["h200-sxm"], phases=["decode"], tp=8)
    assert (found.alike, found.layers) == (58, 61) and "58 of 61" in found.headline()
    names = [each.name for each in found.operations]
    assert "experts" in names and "all-reduce" in names and len(found.to_pandas()) == len(names)


def test_sizes_are_of_values_not_of_packed_pairs() -> None:
    plain, packed = (price_layer("llama-3.1-8b", devices=["b200"], phases=["decode"], batches=[64],
                                 precision=precision).operations for precision in ("bf16", "nvfp4"))
    assert {each.sizes for each in plain if each.product} == {each.sizes for each in packed if each.product}


def test_the_command_prints_each_phase_and_takes_no_nonsense(run: Run) -> None:
    priced = ("price-layer", "llama-3.1-8b")
    done = run(*priced, "--device", "a100-sxm-80g,h100-sxm", "--batch", "1,8", "--precision", "fp8")
    assert done.code == 0
    assert "Decoding 8 × 1,152" in done.out and "Prompts 1 × 1,024" in done.out and "casts" in done.out
    found = run(*priced, "--phase", "decode", "--json").json
    assert found["operations"][0]["phase"] == "decode"
    for words, said in ((("--phase", "x"), "no phase"), (("--batch", "1,x"), "--batch 1,x is not possible"),
                        (("--batch", "0"), "--batch 0 is not possible"), (("--device", "a100-sxm-80g,,"), "empty name"),
                        (("--tp", "3"), "divisor"), (("--prompt", "400000"), "longer than")):
        done = run(*priced, *words)
        assert done.code == 2 and said in done.err
    with pytest.raises(ServingError, match="context=-1"):
        price_layer("llama-3.1-8b", context=-1)


@dataclass
class Request:
    """What ``sglang_simulator.time_predictor.base.ScheduleRequest`` has."""

    extend_length: int = 0
    past_kv_length: int = 0


@dataclass
class Batch:
    """What of ``ScheduleBatch`` a predictor reads."""

    reqs: list[Request] = field(default_factory=list)


@pytest.fixture(scope="module")
def predictor() -> StepPredictor:
    return foretrace.step_predictor("llama-3.1-8b", device="h100-sxm", engine="sglang")


def test_steps_take_what_serve_says_but_for_the_engine(predictor: StepPredictor) -> None:
    decode = predictor.predict_infer_time(Batch([Request(1, 511)] * 8))
    step = predictor.model.time(ServedStep(8, 512))
    served = foretrace.serve("llama-3.1-8b", device="h100-sxm", engine="sglang", batch=8, context=512).decode
    assert decode == pytest.approx(step.us / 1e6) and step.engine == 0.0
    assert decode == pytest.approx((served.us - served.engine) / 1e6)
    mixed = predictor.predict_infer_time(Batch([Request(1, 511)] * 8 + [Request(300, 200)]))
    assert mixed == pytest.approx(predictor.model.time(ServedStep(8, 512, (PrefillChunk(1, 300, 200),), 1)).us / 1e6)
    # The first of a prompt's tokens is read, whatever its length: nothing is in the cache that it could decode from.
    assert predictor.seconds([1], [0]) > predictor.seconds([1], [10])


def test_what_a_simulator_asks_besides(predictor: StepPredictor) -> None:
    assert predictor.predict_infer_time(Batch()) == 0.0
    assert predictor.get_metrics() == {}
    predictor.reset_metrics()
    for new, computed, said in (([1], [], "both of each"), ([0], [5], "cannot compute 0 tokens"),
                                ([1], [-1], "the cache has -1")):
        with pytest.raises(ServingError, match=said):
            predictor.seconds(new, computed)

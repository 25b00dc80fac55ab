"""``foretrace serve`` on the command line, and the kernels that it prices against measured ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from said import Run, plain

from kernel_models.collectives.price import ENGINE_BYTES, kernel_us

CONFIG = ('{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, '
          '"num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000, "max_position_embeddings": 2048}')


def test_a_step_and_a_load_are_reported(run: Run) -> None:
    done = run("serve", "llama-3.1-8b", "--device", "h100-sxm", "--tp", "2", "--batch", "16", "--context", "2048",
               "--concurrency", "8", "--prompt", "512-1024", "--output", "64", "--requests", "32")
    said = plain(done.out)
    assert done.code == 0
    for expected in ("decode 16 × 2,048", "attention of decoding", "room for", "8 clients: 32 requests",
                     "time between tokens, ms", "tokens/s", "vllm is taken to add"):
        assert expected in said


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
    ("llama-3.1-8b", "--tp", "3"), ("nothing-known",), ("llama-3.1-70b",), ("llama-3.1-8b", "--context", "999999"),
    ("llama-3.1-8b", "--rate", "-1"), ("llama-3.1-8b", "--concurrency", "-2"), ("llama-3.1-8b", "--concurrency", "0"),
    ("llama-3.1-8b", "--kv-dtype", "fp5"),
    ("llama-3.1-8b", "--target", "fast"), ("llama-3.1-8b", "--target", "tpot=5", "--tp", "2"),
    ("llama-3.1-8b", "--rate", "nan"), ("llama-3.1-8b", "--chunk", "-5"), ("llama-3.1-8b", "--speculate", "x"),
    ("llama-3.1-8b", "--calibrate", "absent.csv"), ("llama-3.1-8b", "--device", "tpu-v9"),
    ("llama-3.1-8b", "--rate", "0", "--concurrency", "4", "--prompt", "131072"),
    ("llama-3.1-8b", "--tp", "16", "--topology", "dgx-h200"), ("llama-3.1-8b", "--gpus", "4"),
    ("llama-3.1-8b", "--requests", "4"), ("llama-3.1-8b", "--target", "tpot=5", "--step-us", "100"),
    ("llama-3.1-8b", "--target", "tpot=5", "--context", "100")])
def test_bad_input_is_one_sentence(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("serve", *arguments)
    assert done.code == 2
    assert done.err.startswith("foretrace: ") and done.err.count("\n") == 1
    assert "Traceback" not in done.err


def test_all_reduce_kernels_are_those_measured(data_folder: Path) -> None:
    path = data_folder / "collectives" / "custom_all_reduce_h200.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    frame = pandas.read_parquet(path)
    for name, least in (("vLLM_custom_graph", 4.4), ("SGLang_CustomAllReduce_graph", 2.6), ("TRTLLM", 2.6)):
        rows = frame[(frame.backend_kernel == name) & (frame.payload_bytes <= ENGINE_BYTES)]
        us = kernel_us(rows.payload_bytes.to_numpy(float), rows.ranks.to_numpy(float), 450.0, least)
        assert np.abs(us / rows.latency_us.to_numpy() - 1).mean() < 0.12

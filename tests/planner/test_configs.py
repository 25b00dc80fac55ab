"""A model's ``config.json`` as a plan's source: parameters as published, kinds of blocks, and what is refused.

The configs are the models' published sizes, written down by hand; left out is what does not change a decoder's size.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from said import plain
from typer.testing import CliRunner

from foretrace.commands import app
from planner.parallel.decoder import config_path, decoder_of_config, read_config, read_decoder
from planner.parallel.planning import plan
from planner.parallel.published_configs import CONFIGS
from tracer.parallel_plan import PlanError
from tracer.shape_only.transformer import TransformerShape


def config(kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Most types' names of fields."""
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "intermediate_size": ffn, "vocab_size": vocab, **more}


KV8 = {"num_key_value_heads": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": config("llama", 32, 4096, 32, 14_336, 128_256, **KV8),
    "Llama 3.2 1B": config("llama", 16, 2048, 32, 8192, 128_256, tie_word_embeddings=True, head_dim=64, **KV8),
    "Mixtral 8x7B": config("mixtral", 32, 4096, 32, 14_336, 32_000, num_local_experts=8, **KV8),
    "Qwen1.5-MoE-A2.7B": config("qwen2_moe", 24, 2048, 16, 5632, 151_936, num_experts=60, num_experts_per_tok=4,
                                moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "Gemma 7B": config("gemma", 28, 3072, 16, 24_576, 256_000, num_key_value_heads=16, head_dim=256),
    "Gemma 3 27B, text": {"model_type": "gemma3", "text_config": {
        "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "intermediate_size": 21_504, "sliding_window": 1024}},
    "Phi-3 mini": config("phi3", 32, 3072, 32, 8192, 32_064, sliding_window=2047),
    "GPT-2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257},
    "GPT-2 XL": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50_257},
    "GPT-NeoX-20B": config("gpt_neox", 44, 6144, 64, 24_576, 50_432, max_position_embeddings=2048),
    "DeepSeek-V2-Lite": config("deepseek_v2", 27, 2048, 16, 10_944, 102_400, q_lora_rank=None, kv_lora_rank=512,
                               qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=1408,
                               n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1),
    "Falcon 7B": {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
                  "vocab_size": 65_024, "multi_query": True, "parallel_attn": True, "bias": False},
    "Falcon 40B": {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
                   "vocab_size": 65_024, "new_decoder_architecture": True, "num_kv_heads": 8, "bias": False},
    "MPT-7B": {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50_432,
               "expansion_ratio": 4, "no_bias": True, "max_seq_len": 2048, "attn_config": {"alibi": True}},
    "OPT-6.7B": {"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                 "ffn_dim": 16_384, "vocab_size": 50_272, "max_position_embeddings": 2048},
    "BLOOM": {"model_type": "bloom", "n_layer": 70, "hidden_size": 14_336, "n_head": 112, "vocab_size": 250_880},
    "DBRX": {"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100_352,
             "max_seq_len": 32_768, "attn_config": {"kv_n_heads": 8},
             "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4}},
    "Mamba-2 2.7B": {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
                     "head_dim": 64, "state_size": 128, "n_groups": 1, "vocab_size": 50_288,
                     "tie_word_embeddings": True},
    "Bamba 9B": config("bamba", 32, 4096, 32, 14_336, 128_256, attn_layer_indices=[9, 18, 27], mamba_n_heads=128,
                       mamba_d_head="auto", mamba_d_state=128, mamba_n_groups=1, **KV8),
    "Falcon-H1 7B": config("falcon_h1", 44, 3072, 12, 12_288, 130_048, num_key_value_heads=2, head_dim=128,
                           mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=2),
}
PUBLISHED_TOTALS = {
    "Llama 3 8B": 8.03e9, "Llama 3.2 1B": 1.236e9,
    "Mixtral 8x7B": 46.70e9, "Qwen1.5-MoE-A2.7B": 14.32e9, "Gemma 7B": 8.54e9,
    "Gemma 3 27B, text": 27.01e9, "Phi-3 mini": 3.82e9, "GPT-2": 124.4e6, "GPT-2 XL": 1.5576e9, "GPT-NeoX-20B": 20.55e9,
    "DeepSeek-V2-Lite": 15.71e9, "Falcon 7B": 6.92e9, "Falcon 40B": 41.30e9, "MPT-7B": 6.65e9, "OPT-6.7B": 6.66e9,
    "BLOOM": 176.25e9, "DBRX": 131.6e9, "deepseek-v2": 235.7e9, "deepseek-v3": 671.0e9, "mistral-7b": 7.24e9,
    "mixtral-8x22b": 140.6e9, "qwen2.5-7b": 7.62e9, "qwen3-30b-a3b": 30.5e9, "qwen3-235b-a22b": 235.1e9,
    "gemma-2-9b": 9.24e9, "gemma-2-27b": 27.23e9, "gpt-oss-20b": 20.91e9, "gpt-oss-120b": 116.8e9,
    "Mamba-2 2.7B": 2.70e9, "Bamba 9B": 9.78e9, "Falcon-H1 7B": 7.65e9, "nemotron-h-8b": 8.10e9,
    "granite-4.0-h-small": 32.2e9, "kimi-k2": 1.03e12, "glm-5": 744e9, "minimax-m2": 229e9, "qwen3.5-397b-a17b": 397e9,
    "llama-2-7b": 6.74e9, "llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9, "llama-3.1-405b": 405.85e9,
    "qwen3-8b": 8.19e9, "qwen3-14b": 14.77e9, "qwen3-32b": 32.76e9}
"""Parameters as the models' cards give them; Falcon 7B's 7.22e9 counts its tied matrix twice."""
ACTIVE = {"deepseek-v2": 21e9, "deepseek-v3": 37e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9,
          "kimi-k2": 32e9, "glm-5": 40e9, "qwen3.5-397b-a17b": 17e9,
          "gpt-oss-20b": 3.6e9, "gpt-oss-120b": 5.1e9, "granite-4.0-h-small": 9e9}
EVERY = {**OTHERS, **CONFIGS}


def shape_of(name: str, *settings: str) -> TransformerShape:
    return decoder_of_config(EVERY[name], name, "config.json", settings).shape


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_those_published(name: str) -> None:
    shape = shape_of(name)
    assert shape.parameters == pytest.approx(PUBLISHED_TOTALS[name], rel=0.005)
    # gpt-oss counts the logits' matrix and not the embedding.
    count = shape.active_parameters - (shape.vocabulary_parameters() if name.startswith("gpt-oss") else 0)
    assert count == pytest.approx(ACTIVE.get(name, count), rel=0.03)


def runs(shape: TransformerShape) -> list[tuple[int, int, int]]:
    return [(run.layers, run.window, run.experts) for run in shape.runs]


def test_layers_are_of_the_kinds_that_the_types_have() -> None:
    assert runs(shape_of("deepseek-v3")) == [(3, 0, 0), (58, 0, 256)]
    assert shape_of("deepseek-v3").predictions == 1 and shape_of("deepseek-v3").runs[1].shared_ffn == 2048
    assert runs(shape_of("gemma-2-9b"))[:3] == [(1, 4096, 0), (1, 0, 0), (1, 4096, 0)]
    assert runs(shape_of("Gemma 3 27B, text"))[:3] == [(5, 1024, 0), (1, 0, 0), (5, 1024, 0)]
    assert runs(shape_of("gpt-oss-20b"))[:2] == [(1, 128, 32), (1, 0, 32)]
    assert runs(shape_of("mistral-7b")) == [(32, 4096, 0)]
    assert runs(shape_of("qwen3-30b-a3b")) == [(48, 0, 128)]
    said = {**CONFIGS["gemma-2-9b"], "num_hidden_layers": 4,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]}
    assert runs(decoder_of_config(said, "x", "x").shape) == [(2, 0, 0), (1, 4096, 0), (1, 0, 0)]
    sparse = {**EVERY["Qwen1.5-MoE-A2.7B"], "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert runs(decoder_of_config(sparse, "x", "x").shape) == [(1, 0, 0), (1, 0, 60), (2, 0, 0)]
    dense = {**EVERY["DeepSeek-V2-Lite"], "n_routed_experts": None}
    assert runs(decoder_of_config(dense, "x", "x").shape) == [(27, 0, 0)]


def test_settings_say_what_a_config_does_not() -> None:
    usual = shape_of("deepseek-v3")
    assert (usual.seq, usual.dtype, usual.runs[1].imbalance) == (4096, "bf16", 1.04)
    changed = shape_of("deepseek-v3", "seq=8192", "layers=4", "dtype=fp16", "imbalance=1.5", "predictions=0")
    assert runs(changed) == [(3, 0, 0), (1, 0, 256)]
    assert all((run.seq, run.dtype, run.imbalance) == (8192, "fp16", 1.5) for run in changed.runs)
    assert changed.predictions == 0
    assert shape_of("GPT-2").seq == 1024
    for setting, says in (("depth=3", "no setting of a config's decoder"), ("seq=0", "whole number from 1"),
                          ("layers=70", "from 1 to 61"), ("dtype=int8", "give bf16"),
                          ("imbalance=nan", "from 1 to 256"), ("imbalance=0.5", "from 1 to 256"),
                          ("seq=1e3", "whole number"), ("batch=x", "whole number")):
        with pytest.raises(PlanError, match=says):
            decoder_of_config(CONFIGS["deepseek-v3"], "x", "x", [setting])
    with pytest.raises(PlanError, match="longer than the model's 1024 learned positions"):
        shape_of("GPT-2", "seq=2048")


def test_an_unknown_type_is_read_by_its_fields() -> None:
    for name in ("Llama 3 8B", "DeepSeek-V2-Lite", "GPT-2"):
        found = decoder_of_config({**OTHERS[name], "model_type": "mine", "architectures": ["MineForCausalLM"]},
                                  "mine", "config.json")
        assert found.shape == shape_of(name)
        assert any("The model type mine is not known" in note for note in found.notes)
    for changed, told in (({"layer_types": ["strange_attention"] * 32}, "all attend to everything"),
                          ({"vision_config": {"depth": 32}}, "Left out of the model: vision_config"),
                          ({"model_type": "frobnicator", "frob_layers": 3, "bos_token_id": 1}, "of it: frob_layers."),
                          ({"torch_dtype": "int7"}, "type of numbers, int7")):
        assert told in " ".join(decoder_of_config({**OTHERS["Llama 3 8B"], **changed}, "x", "x").notes)


@pytest.mark.parametrize(("changed", "says"), [
    ({"hidden_size": None}, "lacks hidden_size"), ({"hidden_size": "4096"}, "hidden_size='4096' in"),
    ({"num_hidden_layers": -1}, "no size of a decoder"), ({"num_hidden_layers": True}, "no size of a decoder"),
    ({"vocab_size": 2**40}, "from 1 to 2,147,483,647"), ({"vocab_size": 1e300}, "no size of a decoder"),
    ({"vocab_size": float("nan")}, "no size of a decoder"), ({"num_hidden_layers": 10**6}, "from 1 to 10,000"),
    ({"num_key_value_heads": 5}, "do not divide"), ({"hidden_size": 4097}, "does not divide into"),
    ({"tie_word_embeddings": "yes"}, "neither true nor false"), ({"model_type": 3}, "is no word"),
    ({"model_type": "bert"}, "is of bert, which is no decoder"), ({"is_encoder_decoder": True}, "which is no decoder"),
    ({"model_type": "x", "architectures": ["XForSequenceClassification"]}, "is no decoder"),
    ({"model_type": "jamba", "mamba_d_state": 16}, "state-space layers"),
    ({"model_type": "nemotron_h"}, "lacks hybrid_override_pattern"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "names the kind of 2 layers"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX", "num_hidden_layers": 2}, "of the kind 'X'"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "E", "num_hidden_layers": 1, "n_routed_experts": 2,
      "moe_latent_size": 8}, "experts on a narrower stream"),
    ({"model_type": "bamba", "mamba_n_heads": 10, "mamba_n_groups": 3}, "10 heads of a state-space mixer in 3 groups"),
    ({"model_type": "gemma2", "sliding_window": 64, "layer_types": ["full_attention"]}, "names the kind of 1 layers"),
    ({"model_type": "gemma2", "layer_types": ["linear_attention"] * 32}, "the kind linear_attention"),
    ({"model_type": "qwen2_moe"}, "lacks num_experts"),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3"),
    ({"model_type": "deepseek_v3"}, "lacks kv_lora_rank"), ({"model_type": "gemma3", "text_config": 3}, "no object")])
def test_what_is_no_decoder_is_refused_in_a_sentence(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        decoder_of_config({**OTHERS["Llama 3 8B"], **changed}, "x", "config.json")
    assert "\n" not in str(refused.value)


def test_damaged_values_are_refused_or_planned() -> None:
    random, odd = Random(7), [None, "", "x", -1, 0, 3, 2**31, 10**40, 1.5, float("inf"), [], {}, [[]], True, "4096"]
    for _ in range(400):
        values = dict(random.choice(list(EVERY.values())))
        for _ in range(random.randint(1, 3)):
            values[random.choice([*values, "sliding_window", "layer_types", "head_dim"])] = random.choice(odd)
        try:
            shape = decoder_of_config(values, "x", "config.json").shape
        except PlanError:
            continue
        assert shape.parameters > 0 and sum(run.layers for run in shape.runs) == shape.layers


def test_files_that_are_configs_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(OTHERS["Llama 3 8B"]))
    other = tmp_path / "model.json"
    other.write_text(path.read_text())
    assert config_path(str(tmp_path / "mine")) == config_path(str(path)) == path
    assert config_path(str(other)) == other
    assert read_config(path).name == "mine" and read_config(other).name == "model"
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": [{"args": {"hidden_size": 3}}]}')
    for none in (trace, tmp_path, tmp_path / "nowhere.json"):
        assert config_path(str(none)) is None
    for text, says in (("{", "is no config of a model"), ("[1]", "is an object of fields"), ("", "is no config"),
                       ("[" * 5000, "is no config"), (" " * 2**21, "longer than any"), ('{"a": NaN}', "is no config"),
                       ("\x00\xff", "is no config"), ("{}", "lacks num_attention_heads")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(PlanError, match=says):
            read_config(path)
    with pytest.raises(PlanError, match="does not exist"):
        read_config(tmp_path / "nowhere.json")


def test_the_command_plans_a_config(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    small = config("mixtral", 4, 256, 4, 512, 1000, num_local_experts=4, num_key_value_heads=2, torch_dtype="float32")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small))
    base = ["plan", str(tmp_path), "--gpus", "4", "--set", "seq=128", "--parallel", "dp=2,ep=2,pp=2,microbatches=2"]
    shown = CliRunner().invoke(app, base)
    assert shown.exit_code == 0, shown.stderr
    for text in ("4 experts of which 2 work", "sequences of 128 tokens", "give --set dtype=fp32", "1.04 times"):
        assert text in plain(shown.stdout)
    values = json.loads(CliRunner().invoke(app, [*base, "--json"]).stdout)
    assert values["parameters"] == read_config(path).shape.parameters
    named = CliRunner().invoke(app, ["plan", "qwen2.5-7b", "--gpus", "8", "--parallel", "fsdp2", "--set", "layers=2"])
    assert named.exit_code == 0 and "qwen2.5-7b" in plain(named.stdout)
    path.write_text("{")
    for command, says in ((base, "is no config of a model"),
                          (["plan", "gpt-oss-20b", "--gpus", "8", "--preset", "8b"], "leave --preset 8b out")):
        wrong = CliRunner().invoke(app, command)
        assert wrong.exit_code == 2 and says in plain(wrong.stderr)


def test_the_decoder_of_a_model_that_reads_pictures_is_its_text_part() -> None:
    found = decoder_of_config({"model_type": "sees", "architectures": ["SeesForConditionalGeneration"],
                               "text_config": OTHERS["Llama 3 8B"], "vision_config": {"depth": 2}}, "x", "x")
    assert found.shape.hidden == 4096 and found.shape.gated and "not known" not in " ".join(found.notes)
    with pytest.raises(PlanError, match="no decoder"):
        decoder_of_config({"model_type": "clip", "text_config": OTHERS["Llama 3 8B"]}, "x", "x")


def test_how_a_model_is_trained_can_be_said_of_any_source(tmp_path: Path) -> None:
    """Unfused attention and dropout change what is kept for backward; a workload's types of numbers lack fp16."""
    said = ["attention=unfused", "dropout=0.1", "dtype=fp16"]
    values = {**OTHERS["Llama 3 8B"], "attn_implementation": "eager", "resid_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for source in ("gpt2", "llama-3.1-8b", "qwen3-30b-a3b"):
        shape = read_decoder(source, said)[1]
        assert {(kind.flash, kind.dropout, kind.dtype) for kind in shape.kinds} == {(False, 0.1, "fp16")}
    _, shape, _, notes = read_decoder(str(tmp_path))
    assert (shape.flash, shape.dropout) == (False, 0.1)
    assert "attention is not fused" in " ".join(notes) and "Dropout of 0.1" in " ".join(notes)
    _, shape, _, notes = read_decoder(str(tmp_path), ["attention=fused", "dropout=0"])
    assert (shape.flash, shape.dropout) == (True, 0.0) and "fused" not in " ".join(notes)
    assert read_config(tmp_path / "config.json").shape.flash  # what is served is not trained
    for wrong in ("attention=eager", "dropout=1", "dropout=nan"):
        with pytest.raises(PlanError, match=f"{wrong} is not"):
            read_decoder("gpt2", [wrong])


def test_a_device_without_matrix_units_for_bf16_says_what_to_plan_in() -> None:
    pytest.importorskip("torch")
    for settings, said in ((("depth=2", "seq=64"), True), (("depth=2", "seq=64", "dtype=fp16"), False)):
        found = plan("gpt2", 1, device="v100-sxm2-32g", only="dp=1,microbatches=1", settings=settings)
        assert said == ("give --set dtype=fp16" in " ".join(found.notes))

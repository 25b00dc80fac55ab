"""Steps of served decoders: what they grow with, what they are made of, and what fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import find_device
from planner.serving.kept_modules import with_kept_modules
from planner.serving.serve import prompt_time, serve
from planner.serving.setup import ServingError, ServingSetup, Speculation, cache_account, engine_of, weight_type
from planner.serving.source import published_name, served_decoder, types_of_config
from planner.serving.step_grids import PrefillChunk
from planner.serving.steps import ServedStep, ServingModel
from tracer.errors import ForetraceError
from tracer.parallel_plan import PlanError

H200 = find_device("h200-sxm")


def model_of(name: str = "llama-3.1-70b", device: str = "h200-sxm", **setup: object) -> ServingModel:
    spec, made = find_device(device), ServingSetup(**setup)  # type: ignore[arg-type]
    return ServingModel(served_decoder(name).shape, made, spec, CollectiveModel(topology_of(spec, made.gpus)))


def decode_us(model: ServingModel, sequences: int, context: int) -> float:
    return model.time(ServedStep(sequences, context)).us


@pytest.mark.parametrize(("name", "setup"), [
    ("llama-3.1-70b", {"tp": 4}), ("qwen3-235b-a22b", {"tp": 8, "ep": 8, "precision": "fp8_block"}),
    ("gpt-oss-120b", {"tp": 2, "experts": "mxfp4"}),
    ("qwen3.5-397b-a17b", {"tp": 8, "ep": 8, "precision": "fp8_block"})])
def test_decoding_takes_longer_with_more_sequences_and_longer_contexts(name: str, setup: dict[str, object]) -> None:
    model = model_of(name, **setup)
    by_batch = [decode_us(model, batch, 2048) for batch in (1, 4, 16, 64, 256, 512)]
    by_context = [decode_us(model, 32, context) for context in (128, 1000, 4096, 16_384, 65_536)]
    by_prompt = [prompt_time(model, tokens).us for tokens in (64, 512, 2048, 8192, 20_000, 60_000)]
    for times in (by_batch, by_context, by_prompt):
        assert times == sorted(times) and times[-1] > 1.2 * times[0]


@pytest.mark.parametrize("setup", [{"tp": 2}, {"tp": 1, "attention_dp": 8, "ep": 8}, {"tp": 2, "pp": 2},
                                   {"tp": 2, "speculation": Speculation(3, 2.5)}, {"tp": 2, "graphs": False}])
def test_the_surface_gives_the_same_times(setup: dict[str, object]) -> None:
    model = model_of("qwen3-235b-a22b", **setup)
    for step in (ServedStep(1, 100), ServedStep(33, 3000), ServedStep(700, 900),
                 ServedStep(17, 2000, (PrefillChunk(1, 700, 0), PrefillChunk(2, 100, 3000)), 2),
                 ServedStep(0, 0, (PrefillChunk(8, 1024),), 8)):
        found = model.time(step)
        assert model.surface.us(step.sequences, step.context, step.pieces, step.finished) == pytest.approx(
            found.us, rel=1e-6)
        assert found.products + found.others + found.collectives + found.host + found.engine == pytest.approx(found.us)
        assert found.low < found.us < found.high


@pytest.mark.parametrize(("name", "setup"), [("llama-3.1-70b", {"tp": 4}), ("deepseek-v3", {"tp": 8})])
def test_operations_of_one_step_add_up_to_what_the_grid_says(name: str, setup: dict[str, object]) -> None:
    model = model_of(name, **setup)
    for step in (ServedStep(16, 4096), ServedStep(20, 3000), ServedStep(0, 0, (PrefillChunk(1, 1500),), 1)):
        named = sum(each.us for each in model.operations(step))
        parts = model.time(step)
        assert named == pytest.approx(parts.products + parts.others + parts.collectives, rel=0.06)


def test_weights_are_read_and_products_done_as_the_sizes_say() -> None:
    model = model_of("llama-3.1-8b")
    found = {each.name: each for each in model.operations(ServedStep(1, 1000))}
    shape = model.shape
    weights = 3 * shape.hidden * shape.ffn * shape.layers
    assert found["feed-forward part"].flops == pytest.approx(2 * weights)
    assert found["feed-forward part"].moved_bytes == pytest.approx(2 * weights, rel=0.001)
    assert found["attention of decoding"].moved_bytes == pytest.approx(1000 * 32 * 2 * 8 * 128 * 2, rel=0.1)
    narrow = model_of("llama-3.1-8b", precision="int4")
    less = {each.name: each for each in narrow.operations(ServedStep(1, 1000))}["feed-forward part"]
    assert less.moved_bytes / found["feed-forward part"].moved_bytes == pytest.approx((0.5 + 2 / 128) / 2, rel=0.01)
    assert weight_type("int4", H200).widened and not weight_type("fp8", H200).widened
    assert weight_type("fp8", find_device("a100-sxm-80g")).widened


def test_a_prompt_longer_than_a_step_is_read_in_pieces() -> None:
    whole = model_of(tp=4, chunk=32_768)
    pieces = model_of(tp=4, chunk=2048)
    assert prompt_time(pieces, 16_384).us == pytest.approx(prompt_time(whole, 16_384).us, rel=0.25)
    assert prompt_time(pieces, 16_384).engine > prompt_time(whole, 16_384).engine


ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(126) for name in "qkvo"]
ENDS = [f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 125) for name in ("gate", "up", "down")]


@pytest.mark.parametrize(("said", "kept"), [
    ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*ATTENTION, *ENDS, "lm_head"]}, (126, 2)),
    ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "model.layers.1", "lm_head"]}, (126, 1)),
    ({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn", "re:.*layers.0.mlp"],
      "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}}}, (126, 1)),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.*.self_attn*", "lm_head"]},
     (126, 0)),
    ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "visual.layers.0.self_attn"]}, (0, 0))])
def test_modules_that_a_checkpoint_does_not_quantise_are_kept(said: dict[str, object], kept: tuple[int, int],
                                                              tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16_384, "num_hidden_layers": 126,
        "intermediate_size": 53_248, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "quantization_config": said}))
    decoder = served_decoder(str(tmp_path))
    attention, feed_forward = 2 * 16_384 * (16_384 + 1024), 3 * 16_384 * 53_248
    parameters = 126 * (attention + feed_forward) + kept[0] * attention + kept[1] * feed_forward + 4 * 128_256 * 16_384
    setup = ServingSetup(tp=8, precision=decoder.weights("", "")[0])
    assert 8 * cache_account(decoder.shape, setup, H200, 1).weights == pytest.approx(parameters, rel=1e-3)
    model = ServingModel(decoder.shape, setup, H200, CollectiveModel(topology_of(H200, 8)))
    read = {each.name: each.moved_bytes for each in model.operations(ServedStep(1, 1))}
    assert 8 * read["attention's output"] == pytest.approx((126 + kept[0]) * 16_384**2, rel=0.01)
    assert 8 * read["feed-forward part"] == pytest.approx((126 + kept[1]) * feed_forward, rel=0.01)
    assert any("Not quantised" in note for note in decoder.notes) is any(kept)
    assert not any(run.kept for run in decoder.in_type("int4").shape.runs)


@pytest.mark.parametrize(("patterns", "said"), [
    (["re:(a+)+$"], "may take too long"), (["re:.*a.*b.*c.*d"], "may take too long"), (["re:("], "no regular expr"),
    ([f"re:.*mlp{number}" for number in range(201)], "more than 200 patterns"), (["*" * 300], "may take too long"),
    (["re:x{99999999999999999999}"], "no regular expr"), ("lm_head", "no list"), ([["a"]], "no list"),
    ([1], "no list")])
def test_patterns_that_may_take_for_ever_and_what_is_no_list_of_names_are_refused(patterns: Any, said: str) -> None:
    shape = served_decoder("llama-3.1-405b").shape
    with pytest.raises(PlanError, match=said):
        with_kept_modules(shape, types_of_config({"quant_method": "fp8", "ignore": patterns}, []).kept)
    even = [f"model.layers.{layer}.self_attn*" for layer in range(0, 126, 2)]
    kept = with_kept_modules(shape, [*even, r"re:.*layers\.1\.mlp\..*proj$", r"re:.*\.layers\.\d+\.mlp\.gate$"]).runs
    for part, layers in (("attention", 63), ("feed-forward part", 1)):
        assert sum(run.layers for run in kept if part in run.kept) == layers


@pytest.mark.parametrize(("device", "tp", "us"), [
    ("a100-sxm-80g", 2, 10.97), ("a100-sxm-80g", 4, 14.68), ("a100-sxm-80g", 8, 21.27), ("h100-sxm", 2, 6.79),
    ("h100-sxm", 4, 10.09), ("h100-sxm", 8, 16.24)])
def test_an_engine_without_kernels_of_its_own_waits_for_nccl(device: str, tp: int, us: float) -> None:
    """NCCL's 8 KiB in ``nccl_single_node``; the formula alone is the larger one on two H100."""
    nemo, served = (model_of("llama-2-7b", device, tp=tp, engine=engine_of(name)) for name in ("nemo", "trtllm"))
    of = {each.name: each for each in nemo.operations(ServedStep(1, 300))}["all-reduce"]
    assert of.us / of.count == pytest.approx(us, rel=0.17)
    assert nemo.time(ServedStep(1, 300)).us > 1.1 * served.time(ServedStep(1, 300)).us
    assert engine_of("NeMo/TensorRT-LLM") == engine_of("nemo")


def test_a_session_that_is_made_for_each_batch_delays_its_first_token() -> None:
    made = model_of("llama-2-7b", "a100-sxm-80g", engine=engine_of("nemo"))
    once = made._other(setup=dataclasses.replace(made.setup, engine=dataclasses.replace(made.setup.engine, begin_us=0)))
    for model in (made, once):
        prompt = ServedStep(0, 0, (PrefillChunk(1, 128),), 1)
        assert model.surface.us(0, 0, prompt.pieces, 1) == pytest.approx(model.time(prompt).us)
    assert prompt_time(made, 128).us - prompt_time(once, 128).us == pytest.approx(15_000)
    assert decode_us(made, 1, 128) == decode_us(once, 1, 128)


@pytest.mark.parametrize(("engine", "new"), [("sglang", 100), ("vllm", 300), ("trtllm", 2000)])
def test_prompts_of_a_step_share_a_kernel_of_attention(engine: str, new: int) -> None:
    model = model_of("llama-3.1-8b", "h100-sxm", engine=engine_of(engine))
    one, nine = (ServedStep(0, 0, (PrefillChunk(1, new),) * count, count) for count in (1, 9))
    together = ServedStep(0, 0, (PrefillChunk(9, new),), 9)
    assert model.time(nine).us == pytest.approx(model.time(together).us)
    assert model.surface.us(0, 0, nine.pieces, 9) == pytest.approx(model.time(nine).us)
    found = {each.name: each.us for each in model.operations(together)}
    alone = {each.name: each.us for each in model.operations(one)}
    products = sum(found[name] for name in ("attention of prompts", "queries, keys, values", "attention's output",
                                            "feed-forward part", "logits"))
    assert model.time(nine).products == pytest.approx(products, rel=0.06)
    assert found["attention of prompts"] < (4 if new == 100 else 9) * alone["attention of prompts"]
    assert model.parts(nine)[4] == model.parts(ServedStep(0, 0, (PrefillChunk(1, 9 * new),), 9))[4]


def test_short_prompts_of_vllm_are_graphs_between_attentions() -> None:
    captured, eager = (model_of("llama-3.1-8b", "h100-sxm", graphs=graphs) for graphs in (True, False))
    assert eager.time(ServedStep(1, 512)).us > captured.time(ServedStep(1, 512)).us
    assert captured.time(ServedStep(1, 512)).host < 1.0
    for tokens, pieces in ((100, True), (512, True), (513, False)):
        step = ServedStep(0, 0, (PrefillChunk(1, tokens),), 1)
        hosts = [model.parts(step)[4] for model in (captured, eager)]
        assert hosts[0] == (64 if pieces else hosts[1])
        assert captured.surface.us(0, 0, step.pieces, 1) == pytest.approx(captured.time(step).us)


def test_accepted_drafts_make_tokens_come_faster() -> None:
    plain, drafted = (serve("llama-3.1-70b", tp=8, batch=4, context=2048, speculate=each) for each in (None, "3:3"))
    assert drafted.decode.us > plain.decode.us and drafted.tokens_per_second > 1.5 * plain.tokens_per_second


@pytest.mark.parametrize(("name", "setup", "token", "sequence"), [
    ("llama-3.1-70b", {}, 80 * 2 * 8 * 128 * 2, 0),
    ("llama-3.1-70b", {"tp": 8, "kv": "fp8"}, 80 * 2 * 128, 0),
    ("llama-3.1-70b", {"tp": 16}, 80 * 2 * 128 * 2, 0),
    ("deepseek-v3", {"tp": 8}, 61 * 576 * 2, 0),
    ("gpt-oss-120b", {}, 18 * 2 * 8 * 64 * 2, 18 * 2 * 8 * 64 * 2 * 128)])
def test_the_cache_is_as_large_as_its_heads_say(name: str, setup: dict[str, object], token: int, sequence: int) -> None:
    cache = cache_account(served_decoder(name).shape, ServingSetup(**setup), H200, 8192)  # type: ignore[arg-type]
    assert (cache.token, cache.sequence) == (token, sequence)


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    found = serve("llama-3.1-8b", device="h100-sxm", batch=1, context=4096)
    most = found.largest_batch
    assert serve("llama-3.1-8b", device="h100-sxm", batch=most, context=4096).batch == most
    with pytest.raises(ServingError, match=f"the largest batch is {most}"):
        serve("llama-3.1-8b", device="h100-sxm", batch=most + 1, context=4096)
    held = found.cache.of(4096) * most
    assert held <= found.cache.room < held + found.cache.of(4096)


@pytest.mark.parametrize(("arguments", "said"), [
    ({"source": "llama-3.1-70b"}, "does not fit"), ({"source": "llama-3.1-70b", "tp": 3}, "64 heads cannot be split"),
    ({"source": "llama-3.1-8b", "tp": 0}, "tp=0 is not possible"),
    ({"source": "llama-3.1-8b", "ep": 2, "tp": 2}, "needs experts"),
    ({"source": "llama-3.1-8b", "context": 200_000}, "longer than the 131,072"),
    ({"source": "gpt2", "preset": "xl", "context": 1025}, "longer than the 1,024"),
    ({"source": "llama-3.1-8b", "rate": 1.0, "concurrency": 4}, "give one of --rate"),
    ({"source": "llama-3.1-8b", "rate": -1.0}, "no number of requests"),
    ({"source": "llama-3.1-8b", "concurrency": 4, "prompt": "0"}, "cannot be"),
    ({"source": "llama-3.1-8b", "speculate": "3:9"}, "yields from 1 to 4"),
    ({"source": "llama-3.1-8b", "precision": "fp7"}, "no type of weights"),
    ({"source": "llama-3.1-8b", "engine": "tgi"}, "no engine"),
    ({"source": "llama-3.1-8b", "batch": 0}, "batch=0"),
    ({"source": "llama-3.1-8b", "gpu_memory_utilization": 1.2}, "no share of a GPU's memory"),
    ({"source": "llama-3.1-8b", "cached_prefix": 10}, "cached-prefix is of a load"),
    ({"source": "llama-3.1-8b", "device": "cpu"}, "stands for any processor"),
    ({"source": "llama-9"}, "llama-3.1"),
    ({"source": "llama-3.1-8b", "pp": 40}, "more than the model's 32 layers"),
    ({"source": "llama-3.1-8b", "experts": "fp8"}, "the model has none"),
    ({"source": "llama-3.1-8b", "settings": ["batch=64"]}, "give --batch"),
    ({"source": "llama-3.1-8b", "requests": 10}, "is of a load"),
    ({"source": "llama-3.1-8b", "concurrency": 10, "requests": 5}, "do not keep 10 clients busy"),
    ({"source": "llama-3.1-8b", "rate": 1e-300}, "no number of requests"),
    ({"source": "llama-3.1-8b", "rate": 1.0, "seed": -1}, "no seed"),
    ({"source": "DeepSeek-R1-Distill-Qwen-32B"}, "neither a path nor a model"),
    ({"source": "llama-3.1-8b-extra-large"}, "llama-3.1-8b")])
def test_what_cannot_be_served_is_said_in_one_sentence(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        serve(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "known"), [
    ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"), ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"), ("some/folder/of/mine", "some/folder/of/mine"),
    # Other sizes under a model's name are no such model.
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B")])
def test_names_of_hugging_face_are_known(name: str, known: str) -> None:
    assert published_name(name) == known


@pytest.mark.parametrize(("name", "precision", "experts", "gigabytes"), [
    ("deepseek-ai/DeepSeek-V3", "fp8_block", "", 681), ("openai/gpt-oss-120b", "bf16", "mxfp4", 65),
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8_block", "", 237), ("Qwen/Qwen3-235B-A22B", "bf16", "", 471),
    ("moonshotai/Kimi-K2.5", "bf16", "int4", 560), ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8", "", 9.1),
    ("Qwen/Qwen3-8B-AWQ", "int4", "", 6.1)])
def test_weights_are_in_the_type_that_they_are_published_in(name: str, precision: str, experts: str, gigabytes: float
                                                            ) -> None:
    decoder = served_decoder(name)
    assert decoder.weights("", "") == (precision, experts)
    assert decoder.weights("bf16", "") == ("bf16", "")
    tp = 8 if gigabytes > 70 else 1
    cache = cache_account(decoder.shape, ServingSetup(tp=tp, precision=precision, experts=experts), H200, 1024)
    assert cache.weights * tp / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize(("said", "types"), [
    ({}, ("", "")), ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8_block", "")),
    ({"quant_method": "fp8"}, ("fp8", "")), ({"quant_method": "mxfp4"}, ("bf16", "mxfp4")),
    ({"quant_method": "gptq", "bits": 8}, ("int8", "")), ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
                                                          ("nvfp4", "")),
    ({"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": {"type": "float", "num_bits": 8}}}},
     ("fp8", "")),
    ({"quant_method": "quip"}, None), ({"quant_method": 3}, None), ({"quant_method": "awq", "bits": "four"}, None),
    ({"bits": 4}, None), ({"quant_method": "compressed-tensors", "config_groups": [1]}, None)])
def test_a_config_s_quantisation_is_read_or_said_to_be_unknown(said: dict[str, object], types: Any) -> None:
    notes: list[str] = []
    found = types_of_config(said, notes)
    assert (found.precision, found.experts) == (types or ("", ""))
    assert ["give --precision" in note for note in notes] == ([] if types else [True])


def test_a_rate_is_met_or_it_is_said_that_it_is_not() -> None:
    easy, hard = (serve("llama-3.1-8b", rate=rate, prompt=1024, output=64) for rate in (10.0, 500.0))
    assert easy.served is not None and hard.served is not None
    assert easy.served.keeps_up and not hard.served.keeps_up
    assert easy.served.requests.requests_per_second == pytest.approx(10.0, rel=0.03)
    assert ["does not keep up" in " ".join(each.notes) for each in (easy, hard)] == [False, True]
    # What a replica that is too slow answers is as uncertain as its steps.
    assert hard.served.tokens_per_second.high > 1.1 * hard.served.tokens_per_second.low


def test_a_result_is_shown_and_is_plain_values() -> None:
    assert serve("llama-3.1-8b", rate=1.0, output=1).to_json()["load"]["tpot_ms"] is None
    found = serve("llama-3.1-8b", batch=8, context=1024, concurrency=8, prompt=512, output=64, requests=32)
    assert "llama-3.1-8b" in repr(found) and "TPOT" in repr(found)
    assert len(found.to_pandas("requests")) == 24  # without the first of each client
    assert found.to_pandas("decode")["share"].sum() == pytest.approx(1.0)
    values = found.to_json()
    assert values["load"]["tpot_ms"]["low"] < values["load"]["tpot_ms"]["value"] < values["load"]["tpot_ms"]["high"]
    assert values["largest_batch"] == found.largest_batch and "decode" in found._repr_html_()


def test_engines_differ_in_what_their_hosts_take() -> None:
    assert {engine_of(name).name for name in ("vLLM", "sglang", "trtllm")} == {"vllm", "sglang", "trtllm"}
    vllm = engine_of("vllm")
    one, other = (model_of("llama-3.1-8b", engine=each).time(ServedStep(8, 512)).us
                  for each in (vllm, dataclasses.replace(vllm, step_us=5000.0)))
    assert other - one == pytest.approx(5000 - vllm.step_us)


def test_sockets_are_ranks_whose_memory_decides_how_quickly_they_decode(tmp_path: Path) -> None:
    # He et al., "Distributed Inference Performance Optimization for LLMs on CPUs" (2024): a model of 72 billion
    # parameters on four Xeon 8575C makes a token in 140 ms.
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 24_576, "vocab_size": 152_064, "torch_dtype": "bfloat16",
        "max_position_embeddings": 32_768, "tie_word_embeddings": False}))
    found = serve(str(tmp_path), device="xeon-8575c", tp=4, context=512)
    assert found.decode.us == pytest.approx(140_000, rel=0.25)
    assert found.decode.low < 140_000 < found.decode.high < 2 * found.decode.low
    assert found.decode.us > found.cache.weights / 358.4e3
    assert any("socket" in note for note in found.notes)
    # 16 bits without units for them are emulated: at an unknown rate.
    other = serve("llama-3.1-8b", device="i9-10940x").decode
    assert other.high > 10 * other.low


def test_the_engine_s_share_of_memory_can_be_said() -> None:
    half, most = (serve("llama-3.1-8b", gpu_memory_utilization=share).cache for share in (0.5, 0.95))
    assert most.room - half.room == pytest.approx(0.45 * half.device)
    assert half.weights == most.weights

"""Published decoders by name, with the fields of their ``config.json``: figures of model cards and papers."""

from __future__ import annotations

from typing import Any

_DEEPSEEK = {"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163_840}
_BY_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_QWEN3 = {"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
          "num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 6144, "max_position_embeddings": 40_960}
_GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128,
            "vocab_size": 201_088, "attention_bias": True, "max_position_embeddings": 131_072,
            "quantization_config": {"quant_method": "mxfp4"}}
_LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
_QWEN3_DENSE = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
                "max_position_embeddings": 40_960}
_GEMMA2 = {"model_type": "gemma2", "vocab_size": 256_000, "sliding_window": 4096, "max_position_embeddings": 8192}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v2": {**_DEEPSEEK, "model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60,
                    "intermediate_size": 12_288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
                    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
                    "vocab_size": 102_400},
    "deepseek-v3": {**_DEEPSEEK, **_BY_BLOCKS, "model_type": "deepseek_v3", "hidden_size": 7168,
                    "num_hidden_layers": 61, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
                    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                    "first_k_dense_replace": 3, "vocab_size": 129_280, "num_nextn_predict_layers": 1},
    "kimi-k2": {**_DEEPSEEK, **_BY_BLOCKS, "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61,
                "num_attention_heads": 64, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
                "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
                "vocab_size": 163_840, "max_position_embeddings": 262_144},
    "glm-5": {"model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
              "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
              "v_head_dim": 256, "intermediate_size": 12_288, "moe_intermediate_size": 2048, "n_routed_experts": 256,
              "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 154_880,
              "max_position_embeddings": 202_752},
    "minimax-m2": {**_BY_BLOCKS, "model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62,
                   "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536,
                   "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200_064,
                   "max_position_embeddings": 196_608},
    "qwen3.5-397b-a17b": {"model_type": "qwen3_5_moe", "hidden_size": 4096, "num_hidden_layers": 60,
                          "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
                          "intermediate_size": 1024,
                          "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
                          "shared_expert_intermediate_size": 1024, "full_attention_interval": 4,
                          "linear_num_value_heads": 64, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                          "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248_320,
                          "max_position_embeddings": 262_144},
    "llama-2-7b": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "intermediate_size": 11_008, "vocab_size": 32_000, "max_position_embeddings": 4096,
                   "torch_dtype": "float16"},
    "llama-3.1-8b": {**_LLAMA3, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "intermediate_size": 14_336},
    "llama-3.1-70b": {**_LLAMA3, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                      "intermediate_size": 28_672},
    "llama-3.1-405b": {**_LLAMA3, "hidden_size": 16_384, "num_hidden_layers": 126, "num_attention_heads": 128,
                       "intermediate_size": 53_248},
    "qwen3-8b": {**_QWEN3_DENSE, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "intermediate_size": 12_288},
    "qwen3-14b": {**_QWEN3_DENSE, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                  "intermediate_size": 17_408},
    "qwen3-32b": {**_QWEN3_DENSE, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
                  "intermediate_size": 25_600},
    "mistral-7b": {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000,
                   "sliding_window": 4096, "max_position_embeddings": 32_768},
    "mixtral-8x22b": {"model_type": "mixtral", "hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48,
                      "num_key_value_heads": 8, "intermediate_size": 16_384, "vocab_size": 32_000,
                      "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 65_536},
    "qwen2.5-7b": {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064,
                   "max_position_embeddings": 131_072},
    "qwen3-30b-a3b": {**_QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                      "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {**_QWEN3, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
                        "moe_intermediate_size": 1536},
    "gemma-2-9b": {**_GEMMA2, "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14_336},
    "gemma-2-27b": {**_GEMMA2, "hidden_size": 4608, "num_hidden_layers": 46, "num_attention_heads": 32,
                    "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 36_864},
    "nemotron-h-8b": {"model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52,
                      "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                      "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21_504,
                      "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
                      "vocab_size": 131_072, "max_position_embeddings": 8192},
    "granite-4.0-h-small": {"model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40,
                            "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
                            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 768,
                            "shared_intermediate_size": 1536, "num_local_experts": 72, "num_experts_per_tok": 10,
                            "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
                            "vocab_size": 100_352, "tie_word_embeddings": True, "max_position_embeddings": 131_072},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}
"""Config by name. Sources are the cards of all models, and papers. DeepSeek-V2 (2405.04434, section 3.1.2), V3
(2412.19437, section 4.2); Mistral 7B (2310.06825); Mixtral (2401.04088); Qwen2.5 (2412.15115); Qwen3 (2505.09388);
Gemma 2 (2408.00118); ``gpt-oss`` (2508.10925); Nemotron-H (2504.03624, section 2.1); Llama 2 (2307.09288), 3.1
(2407.21783); Kimi K2 (2507.20534). Granite 4.0, GLM-5, MiniMax M2 and Qwen3.5: cards alone."""

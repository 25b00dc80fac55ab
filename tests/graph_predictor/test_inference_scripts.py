"""No-grad steps of programs of one's own: prefill, decode over a cache of one's own, caches and generate() of
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from said import Run

OWN = '''
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, batch, tokens):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        for name in "kv":
            self.register_buffer(name, torch.zeros(batch, heads, tokens, width // heads))

    def forward(self, x, at):
        batch, new, width = x.shape
        q, k, v = self.qkv(x).view(batch, new, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        self.k[:, :, at], self.v[:, :, at] = k, v
        mask = torch.arange(self.k.shape[2], device=x.device)[None] <= at[:, None]
        found = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).reshape(batch, new, width))


def made(batch, new, tokens=2048):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = nn.ModuleList(Block(512, 8, batch, tokens) for _ in range(2)).to(device).eval()
    words, at = torch.zeros(batch, new, 512, device=device), torch.arange(new, device=device)

    @torch.inference_mode()
    def step():
        x = words
        for block in blocks:
            x = block(x, at)
        return torch.multinomial(x[:, -1].softmax(-1), 1)

    return step


def decode(batch=8):
    return made(batch, 1)


def prefill(batch=8):
    return made(batch, 512)
'''
GENERATED = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

CONFIG = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, vocab_size=500)


def generate(batch=2):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(device).eval()
    words = torch.randint(3, 500, (batch, 16), device=device)
    return lambda: model.generate(words, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)


def static(batch=2):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(**CONFIG)
    model, cache = LlamaForCausalLM(config).to(device).eval(), StaticCache(config=config, max_cache_len=64)
    words = torch.randint(3, 500, (batch, 1), device=device)

    @torch.no_grad()
    def step():
        out = model(words, past_key_values=cache, use_cache=True, cache_position=torch.tensor([16], device=device))
        return out.logits[:, -1].argmax(-1)

    return step
'''


@pytest.mark.slow
def test_prefill_and_decode_over_a_cache_of_one_s_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    decode, prefill = (run("predict", f"{path}:{name}", "--device", "h100-sxm", "--json").json
                       for name in ("decode", "prefill"))
    # Both have as many operations, so that the host is alike and what the device does is not.
    assert 0.0 < decode["gpu_active_us"] < prefill["gpu_active_us"]
    assert decode["families_us"]["attention"] > 0


@pytest.mark.slow
def test_static_caches_and_generate_of_transformers(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path, out = tmp_path / "generated.py", tmp_path / "out.foretrace"
    path.write_text(GENERATED)
    assert run("predict", f"{path}:static", "--device", "h100-sxm", "--json").json["gpu_active_us"] > 0
    # Whether an answer has ended is a value, which shapes do not have.
    done = run("predict", f"{path}:generate", "--device", "h100-sxm")
    assert done.code == 2 and "--selected 0.5" in done.err
    assert run("predict", f"{path}:generate", "--device", "h100-sxm", "--selected", "0.5", "--json").code == 0
    assert run("trace", f"{path}:generate", "--device", "h100-sxm", "--selected", "0.5", "-o", out).code == 0
    assert run("predict", out, "--json").json["gpu_active_us"] > 0

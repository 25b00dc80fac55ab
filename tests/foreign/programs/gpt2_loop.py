"""Train a small GPT-2 of Hugging Face transformers in a plain loop."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 3000


def build(batch: int = 4, seq: int = 64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=192, n_layer=3, n_head=6, bos_token_id=0,
        eos_token_id=0)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (batch, seq)).to(device)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch, options.seq)
    for _ in range(options.steps):
        train()

"""Train a small T5 of Hugging Face transformers: an encoder, a decoder, relative positions, Adafactor-like schedule."""

import argparse

import torch
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY = 2000


def build(batch: int = 4, seq: int = 32):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4,
        decoder_start_token_id=0)).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def step() -> None:
        source = torch.randint(2, VOCABULARY, (batch, seq)).to(device)
        target = torch.randint(2, VOCABULARY, (batch, seq // 2)).to(device)
        optimizer.zero_grad()
        model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).loss.backward()
        optimizer.step()
        schedule.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch, options.seq)
    for _ in range(options.steps):
        train()

"""Train a small Llama of Hugging Face transformers with accelerate, two micro-batches to an update, in bf16."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 500
ACCUMULATION = 2


def make_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512))


def build(batch: int = 2, seq: int = 32):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        for _ in range(ACCUMULATION):
            tokens = torch.randint(VOCABULARY, (batch, seq)).to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            (loss / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16",
                              cpu=not torch.cuda.is_available())
    tokens = torch.randint(VOCABULARY, (options.batch * options.steps * ACCUMULATION, options.seq))
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=3e-4),
        DataLoader(TensorDataset(tokens), batch_size=options.batch, shuffle=True))
    model.train()
    for (ids,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

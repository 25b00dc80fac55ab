import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .data import batches


def build(batch=2, seq=16, folder=str(Path(__file__).parent)):
    config = AutoConfig.from_pretrained(folder)
    net = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = batches(batch, seq, config.vocab_size)

    def step():
        ids = next(data)
        optimizer.zero_grad()
        net(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    step = build(parser.parse_args().batch)
    for _ in range(30):
        step()

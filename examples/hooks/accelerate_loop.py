"""Capture a loop of one's own with Accelerate: python examples/hooks/accelerate_loop.py runs/accelerate"""

import argparse

import torch
from accelerate import Accelerator

from foretrace.hooks import AccelerateCapture


def main(out):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.rand(2048, 64), torch.randint(0, 8, (2048,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with AccelerateCapture(accelerator, out, timed=6) as capture:
        for features, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            capture.step()
            if capture.finished:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="directory of the capture")
    main(parser.parse_args().out)

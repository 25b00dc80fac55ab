import torch

from . import DEFAULT_BATCH


def build(batch=DEFAULT_BATCH):
    net = torch.nn.GRU(24, 32, batch_first=True)
    optimizer = torch.optim.RMSprop(net.parameters())
    x = torch.randn(batch, 6, 24)

    def step():
        optimizer.zero_grad()
        net(x)[0].mean().backward()
        optimizer.step()

    return step

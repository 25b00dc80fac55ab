import torch


class Stack(torch.nn.Sequential):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(*(layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())))

import argparse
import dataclasses

import torch

from vision import create_model


@dataclasses.dataclass
class Recipe:
    model: str = "small_net"
    batch: int = 4
    image: int = 32


def build(batch=4, image=32, model="small_net"):
    recipe = Recipe(model, batch, image)
    net = create_model(recipe.model, classes=5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    x, y = torch.randn(recipe.batch, 3, recipe.image, recipe.image), torch.randint(5, (recipe.batch,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    for each in dataclasses.fields(Recipe):
        parser.add_argument(f"--{each.name}", type=type(each.default), default=each.default)
    step = build(**vars(parser.parse_args()))
    for _ in range(30):
        step()

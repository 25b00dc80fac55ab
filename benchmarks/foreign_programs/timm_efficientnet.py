"""timm's test_efficientnet classifies images."""

from collections.abc import Callable

from timm_images import build as built


def build(batch: int = 4, image: int = 64) -> Callable[[], None]:
    return built(batch, image, "test_efficientnet")


if __name__ == "__main__":
    from support import run

    run(build)

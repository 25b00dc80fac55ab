import sys

from runner import DEFAULT_BATCH
from runner.loop import build

if __name__ == "__main__":
    assert sys.argv[0].endswith("__main__.py")
    step = build(int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_BATCH)
    for _ in range(30):
        step()

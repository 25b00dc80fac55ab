"""The registry of families, asked first by several threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
sys.setswitchinterval(1e-6)
from kernel_models.families import registry
NAMES = ("aten::addmm", "aten::convolution", "aten::embedding", "aten::_foreach_add_", "aten::native_layer_norm")
ready, found = threading.Barrier(3), []

def ask():
    ready.wait()
    found.append(sum(registry.forward_rule(name) is not None for name in NAMES))

threads = [threading.Thread(target=ask) for _ in range(3)]
[one.start() for one in threads]
[one.join() for one in threads]
print(*found)
"""


def test_every_thread_finds_all_families() -> None:
    """One that asks while another imports them waits; it priced all work as unknown."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5"] * 3

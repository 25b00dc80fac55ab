"""``benchmarks/walks.py`` names imports inside functions that do not say why."""

from __future__ import annotations

from pathlib import Path

import pytest
from walks import overruns

PLANTED = '''
def late() -> None:
    """# No comment."""
    {}
'''


@pytest.mark.parametrize(("imports", "lines"), [
    ("import json", [4]),
    ("import json  # noqa: F401", [4]),
    ("import json  # type: ignore[attr-defined]", [4]),
    ("import json  # ok", [4]),
    ("import json  # noqa: F401 - the forks have it", []),
    ("import torch.distributed", []),
    ("import torch, json", [4]),
    ("import torchvision", [4]),
    ("from tracer.shape_only.trace import trace_step", []),
    ("# slow to load\n    import json\n    from os import (\n        path,\n    )\n\n    from tracer import job", []),
    ("import json  # slow to load\n    import os", [5]),
    ("# slow to load\n    import json\n    print()\n    import os", [7]),
])
def test_an_import_inside_a_function_says_why(imports: str, lines: list[int], tmp_path: Path) -> None:
    (tmp_path / "tracer").mkdir()
    (tmp_path / "tracer" / "__init__.py").write_text(PLANTED.format(imports))
    found = overruns(tmp_path, {})
    assert [text.partition(" ")[0] for text in found] == [f"tracer/__init__.py:{line}" for line in lines]
    assert all("does not say why" in text for text in found)

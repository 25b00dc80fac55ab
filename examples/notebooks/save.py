"""Run notebooks and keep what their cells show: python examples/notebooks/save.py [NAME.ipynb …]

A kernel is not needed: cells are plain Python. The last expression of a cell is shown as Jupyter shows it (its HTML
beside its text), and each figure as a picture.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_cells(notebook: dict[str, Any]) -> None:
    """Run the code cells in order and put their outputs in, in the folder of the notebooks."""
    import matplotlib

    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = [*_stream(printed.getvalue()), *_shown(value, number), *_figures()]


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def _stream(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []


def _shown(value: Any, number: int) -> list[dict[str, Any]]:
    if value is None or type(value).__module__.startswith("matplotlib"):
        return []
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if (page := getattr(value, "_repr_html_", lambda: None)()) is not None:
        data["text/html"] = page.splitlines(keepends=True)
    return [{"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}]


def _figures() -> list[dict[str, Any]]:
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=60)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return found


def main() -> None:
    for path in [Path(name).resolve() for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        os.chdir(HERE)
        begun = time.monotonic()
        run_cells(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()

"""Machine code is compiled once, kept wherever something can be written, and loaded without numba."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import GenericAlias
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import pytest

from tracer import machine_code
from tracer.machine_code import kept_loop

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import sys
import numpy as np
from tracer.machine_code import kept_loop

def _double(x):
    return 2 * x

@kept_loop("int64[:]", "float64[:,:]", "boolean[:]", "int64", "float64", inner=(_double,))
def total(one, two, chosen, number, factor):
    found = 0
    for i in range(one.shape[0]):
        if chosen[i]:
            found += _double(one[i]) * number
    for i in range(two.shape[0]):
        for j in range(two.shape[1]):
            two[i, j] = factor * (i - j)
    return found

if __name__ == "__main__":
    two = np.zeros((2, 3))
    print(total(np.arange(4), two, np.array([True, False, False, True]), 5, 0.5), two.sum(), "numba" in sys.modules)
"""


def _ran(folder: Path, temporary: Path) -> list[str]:
    """Run the module where neither its folder nor a home can be written to (also for root, whom no mode stops)."""
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(MODULE)
    (folder / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    ran = subprocess.run([sys.executable, str(folder / "loop.py")], capture_output=True, text=True, check=False, env={
        **kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/dev/null",
        "TMPDIR": str(temporary)})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize("array", [
    npt.NDArray[np.int64], np.ndarray[Any, np.dtype[np.int64]], GenericAlias(list, (np.int64,))],
    ids=["NumPy's", "before 2.5", "from 2.5 on"])
def test_types_of_arrays_are_read_from_any_numpys_annotations(array: Any) -> None:
    record = type("Record", (), {"__annotations__": {"column": array}})
    assert machine_code._dtypes(record) == {"column": np.dtype(np.int64)}


def test_what_is_kept_or_shipped_is_loaded_without_numba_and_damage_made_again(tmp_path: Path) -> None:
    folder, private = tmp_path / "code", tmp_path / f"foretrace-{os.getuid()}"
    assert _ran(folder, tmp_path) == ["30", "-1.5", "True"]
    assert _ran(folder, tmp_path) == ["30", "-1.5", "False"]
    assert private.stat().st_mode & 0o777 == 0o700
    [kept] = private.glob("*.o")
    assert kept.name.startswith("__main__.total")
    if llvm.get_process_triple() != "x86_64-unknown-linux-gnu":
        pytest.skip("bitcode is shipped for 64-bit x86 and Linux")
    subprocess.run([sys.executable, "-c", "import loop; loop.total.ship()"], check=True, cwd=folder, env={
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])})
    [shipped] = (folder / "shipped").glob("total-*")
    kept.write_bytes(damaged := kept.read_bytes()[:-1])
    assert _ran(folder, tmp_path) == ["30", "-1.5", "False"]
    assert kept.read_bytes() != damaged
    shipped.write_bytes(b"damaged")
    (tmp_path / "other").mkdir()
    assert _ran(folder, tmp_path / "other") == ["30", "-1.5", "True"]


def test_every_loop_is_shipped_as_it_is() -> None:
    """After a change of a loop: make loops."""
    if llvm.get_process_triple() != "x86_64-unknown-linux-gnu":
        pytest.skip("bitcode is shipped for 64-bit x86 and Linux")
    loops = list(runpy.run_path(str(ROOT / "ci" / "ship_loops.py"))["loops"]())
    assert len(loops) > 4
    assert [loop.__name__ for loop in loops if not loop.shipped.is_file()] == []
    # Nothing of libc or libm is found from kept machine code: a call of it would be one of address 0.
    outside = {loop.__name__: re.findall(rb"\0(mem(?:set|cpy|move)|(?:log|exp)\w*|pow|sqrt)\0", loop._compiled())
               for loop in loops}
    assert {name for name, found in outside.items() if found} == set()


def test_other_types_are_refused_and_sizes_stay_in_memory_while_a_loop_runs() -> None:
    @kept_loop("int8[:,:]")
    def first(values):  # type: ignore[no-untyped-def]
        return values[0, 0]

    for wrong in (np.zeros((3, 1)), np.zeros(3, np.int8), np.zeros((6, 2), np.int8)[::2]):
        with pytest.raises(TypeError, match="argument 0"):
            first(wrong)
    with pytest.raises(TypeError, match="1 arguments, not 2"):
        first(np.zeros((3, 5), np.int8), 1)
    found: list[int] = []

    def entry(sizes: int, *_: int) -> int:
        others = [np.full(2, -7, np.int64) for _ in range(64)]  # as another thread's, in what would have been freed
        found.extend((ctypes.c_int64 * 2).from_address(sizes))
        return len(others)

    vars(first)["_entry"] = entry
    first(np.zeros((3, 5), np.int8))
    assert found == [3, 5]


def test_threads_run_a_loop_beside_each_other_each_with_the_sizes_of_its_own_arrays() -> None:
    @kept_loop("float64[:,:]", "float64[:,:]")
    def copied(given, result):  # type: ignore[no-untyped-def]
        for _ in range(20):
            for i in range(given.shape[0]):
                for j in range(given.shape[1]):
                    result[i, j] = given[i, j]
        return given.shape[0] * 1000 + given.shape[1]

    def run(rows: int) -> bool:
        given = np.full((rows, 50 + rows % 7), float(rows))
        result = np.zeros(given.shape)
        return bool(copied(given, result) == rows * 1000 + given.shape[1]) and bool((given == result).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(1, 200)))

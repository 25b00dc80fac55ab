"""How far fits are: lines where nobody looks, bars on a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest

from step_views.cli.fit import showing_fits


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream, says", [
    (io.StringIO, "fitting gemm, lib: 9 calls\nfitting norm, lib: 3 calls\n"), (Terminal, None)])
def test_a_line_for_each_fit_or_bars(
    stream: type[io.StringIO], says: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with showing_fits() as progress:
        for share in (0.0, 0.25):
            progress("gemm, lib: 9 calls", share)
            progress("norm, lib: 3 calls", share)
        progress("norm, lib: 3 calls", 1.0)
    if says is not None:
        assert written.getvalue() == says
        return
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    [last] = [line for line in text.splitlines() if line.strip()][-1:]
    assert "Fitting gemm, lib: 9 calls" in last and "25%" in last and "fitting" not in text

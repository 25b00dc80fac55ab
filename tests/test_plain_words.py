"""Texts are read once: a linter finds long sentences and words to avoid, and no text gets worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import plain_words


def test_no_text_is_over_its_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain_words.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("text, rules", [
    ("Short sentences pass. `code that is told` too.\n", []),
    ("The machine is told so.\n", ["'told'"]),
    ("One.\n\n```console\n$ told\n```\n\n| told |\n|---|\n", []),
    (f"It has {'many ' * 30}words.\n", ["33 words"]),
    (f"It has {'many ' * 20}words. It has {'many ' * 20}words.\n", []),
])
def test_a_page_is_read_without_its_code_and_tables(tmp_path: Path, text: str, rules: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert [found.rule for found in plain_words.all_findings(page)] == rules


def test_docstrings_and_help_of_python_are_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Nobody reads it."""\nx = "told"\nf(help="What is told.")\n'
                      f'"""Args:\n    one: {"many " * 20}\n    two, three: {"many " * 20}"""\n', encoding="utf-8")
    assert [(found.line, found.rule) for found in plain_words.all_findings(module)] == [(1, "'Nobody'"), (3, "'told'")]

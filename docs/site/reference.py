"""Generates the reference of the command line from the commands themselves, when mkdocs builds the site.

mkdocs calls ``on_page_markdown`` for each page; the page ``reference/commands.md`` gets, under its own words, every
command with what its ``--help`` says. ``on_pre_build`` makes sure that the interpreter has the command line.
"""

from __future__ import annotations

import os
from typing import Any

COMMANDS = "reference/commands.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text; that of the commands with their help appended."""
    if page.file.src_uri != COMMANDS:
        return markdown
    return "\n".join([markdown, *_sections()])


def _sections() -> list[str]:
    import click
    from typer.main import get_command

    from foretrace.commands import app

    os.environ["COLUMNS"] = "100"
    root = get_command(app)
    found: list[str] = []

    def walk(command: Any, path: str, parent: Any) -> None:
        context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent, max_content_width=100)
        if path != "foretrace":
            found.extend([f"## {path}", "", "```text", command.get_help(context).rstrip(), "```", ""])
        names = command.list_commands(context) if hasattr(command, "list_commands") else []
        for name in names:
            walk(command.get_command(context, name), f"{path} {name}", context)

    walk(root, "foretrace", None)
    return found

"""Pages read back without a browser: their data, tables and texts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

_VOID = {"meta", "input", "br", "img", "link"}


class PageFile(HTMLParser):
    """A page: its elements' data by id, its static tables by id, and all text outside of scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.data: dict[str, Any] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.titles: dict[str, list[str]] = {}
        self.sections: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._script: dict[str, str | None] | None = None
        self._style = False
        self._table = ""
        self._cell: list[str] | None = None
        self.feed(self.source)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "script":
            self._script = values
        elif tag == "style":
            self._style = True
        elif tag == "section":
            self.sections.append(values["id"] or "")
        elif tag == "table":
            self._table = (values["id"] or "").removeprefix("table-")
            self.tables[self._table], self.titles[self._table] = [], []
        elif tag == "tr" and self._table:
            self.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None
        elif tag == "style":
            self._style = False
        elif tag == "table":
            self.titles[self._table] = self.tables[self._table].pop(0)
            self._table = ""
        elif tag in ("td", "th") and self._cell is not None:
            self.tables[self._table][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            if key := self._script.get("id"):
                self.data[key] = (self._script, data)
        elif not self._style:
            self.text += data
            if self._cell is not None:
                self._cell.append(data)

    def value(self, key: str) -> Any:
        """A JSON value of the page."""
        attributes, text = self.data[f"data-{key}"]
        return json.loads(gzip.decompress(base64.b64decode(text)) if "data-form" in attributes else text)

    def rows(self, key: str) -> list[list[str]]:
        """A table's texts, whether it is plain HTML or made by a browser."""
        return self.value(key)["rows"] if f"data-{key}" in self.data else self.tables[key]

    def events(self, key: str = "timeline") -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """A timeline's head and columns, with times from zero."""
        _, text = self.data[f"data-{key}"]
        head_text, _, body = gzip.decompress(base64.b64decode(text)).partition(b"\n")
        head, columns, at = json.loads(head_text), {}, 0
        for name, width, length in head["columns"]:
            planes = np.frombuffer(body[at:at + width * length], np.uint8).reshape(width, length)
            columns[name] = sum(planes[i].astype(np.int64) << 8 * i for i in range(width))
            at += width * length
        return head, columns


def shown_numbers(text: str) -> set[str]:
    """Numbers with decimals in a text, as they are written."""
    return set(re.findall(r"[+-]?[\d,]*\d\.\d+", text))

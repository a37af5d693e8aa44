"""The documentation runs: the ```python blocks of *.md and docs/*.md, a file's in order, in one namespace.

A ```text block right behind one is what it prints.
"""

import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[tuple[str, str]]:
    """File and anchor, either may be empty, of the page's links inside the project."""
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(text))
    return [target.partition("#")[::2] for target in targets if "://" not in target]


def anchors(text: str) -> set[str]:
    """What links to the page's headings are called, as GitHub and others do: a repeated one is numbered."""
    found, count = set(), Counter()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{name}-{count[name]}" if count[name] else name)
        count[name] += 1
    return found


class Block(NamedTuple):
    code: str  # pushed down by empty lines so that tracebacks name the page's line
    output: str | None  # what the page says that it prints


def blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", text, re.MULTILINE | re.DOTALL)
    return [Block("\n" * text.count("\n", 0, each.start(1)) + each[1], each[2]) for each in found]


def test_blocks_keep_their_line_numbers_and_their_output():
    text = "a\n```python\nx = 1\n```\n```text\n1\n```\n```python\ny\n```\nb\n```text\nno\n```\n"
    assert blocks(text) == [("\n\nx = 1\n", "1\n"), ("\n" * 8 + "y\n", None)]


def test_links_are_read_with_their_anchors_and_without_code():
    text = "[a](b.md) [c](d/e.md#f) [g](#h) [i](https://j.k#l)\n```\n[m](n)\n```\n"
    assert links(text) == [("b.md", ""), ("d/e.md", "f"), ("", "h")]


def test_anchors_are_lower_case_and_numbered():
    text = "# A b\n## `c.d`, e-f\n## A b\n```\n# no\n```\n"
    assert anchors(text) == {"a-b", "cd-e-f", "a-b-1"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of(page):
    missing = []
    for target, anchor in links(read(page)):
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(read(file))):
            missing.append(f"{target}#{anchor}")
    assert missing == [], f"{page.name} links to what is not there"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(read(page))], ids=lambda page: page.name)
def test_code_of(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, output in blocks(read(page)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        if output is not None:
            assert [line.rstrip() for line in printed.getvalue().splitlines()] == output.splitlines()

"""The documentation runs: the ```python blocks of *.md and docs/*.md, a file's in order, in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def linked_files(text: str) -> list[str]:
    """Targets of the page's links to other files of the project."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [target for target in targets if "://" not in target]


def blocks(text: str) -> list[str]:
    """The code of each ```python block, pushed down by empty lines so that tracebacks name the page's line."""
    return [
        "\n" * text.count("\n", 0, found.start(1)) + found[1]
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def test_blocks_keep_their_line_numbers():
    assert blocks("a\n```python\nx = 1\n```\n```text\nno\n```\n") == ["\n\nx = 1\n"]


def test_links_are_read_without_their_anchors():
    assert linked_files("[a](b.md) [c](d/e.md#f) [g](#h) [i](https://j.k)") == ["b.md", "d/e.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of(page):
    missing = [target for target in linked_files(page.read_text()) if not (page.parent / target).exists()]
    assert missing == [], f"{page.name} links to files that are not there"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: page.name)
def test_code_of(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code in blocks(page.read_text()):
        exec(compile(code, str(page), "exec"), namespace)

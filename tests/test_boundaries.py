"""What the tree promises: who imports whom, how large a file grows, that the README shows the tree there is."""

import ast
import re
import sys
from pathlib import Path

import pytest

import comhe

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
SOURCES = sorted(SRC.rglob("*.py"))
LIBRARY = sorted((SRC / "comhe").rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_packages(source: str) -> set[str]:
    """Top-level names of every import, also those inside functions; relative ones are one's own."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def listed_files(readme: str) -> set[str]:
    """Files of the fenced block that begins with `src/comhe/`: two spaces a level, folders end in a slash."""
    block = re.search(r"^```\w*\nsrc/comhe/.*?\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block that begins with src/comhe/"
    files, folders = set(), []
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip(" "))) // 2
        folders = folders[: depth - 1]
        if name.endswith("/"):
            folders.append(name)
        else:
            files.add("".join(folders) + name)
    return files


def test_the_reader_of_imports_sees_every_form():
    source = "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert imported_packages(source) == {"a", "c", "d", "i"}


def test_the_reader_of_the_tree_sees_nested_folders():
    block = "```\nsrc/comhe/\n  a.py   one\n  b/\n    c.py  two\n    d/\n      e.py\n  f.py\n```\n"
    assert listed_files(block) == {"a.py", "b/c.py", "b/d/e.py", "f.py"}


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_the_library_imports_torch_alone(path):
    assert imported_packages(path.read_text(encoding="utf-8")) <= {"torch", "comhe", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_are_small_and_named_for_what_they_hold(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 300, f"{relative(path)}: {lines} lines, at most 300: perhaps it holds two ideas"
    assert not {path.stem.strip("_"), path.parent.name} & {"utils", "util", "common", "helpers", "misc"}


def test_the_readme_shows_the_tree_as_it_is():
    files = {path.relative_to(SRC / "comhe").as_posix() for path in LIBRARY}
    listed = {name for name in listed_files((ROOT / "README.md").read_text(encoding="utf-8")) if name.endswith(".py")}
    assert sorted(files - listed) == [], "files that README.md's tree lacks"
    assert sorted(listed - files) == [], "files of README.md's tree that are not there"


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_the_readme_lists_the_programs(folder):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path for path in map(relative, (ROOT / folder).glob("*.py")) if f"\n{path} " not in readme]
    assert missing == [], "programs that README.md does not list"


def test_the_citation_names_this_version():
    assert f"\nversion: {comhe.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")

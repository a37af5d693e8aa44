"""The examples run, shortened, and print what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_digits_prints_a_row_for_each_method():
    done = run("digits.py", "--seeds", "2", "--steps", "3", "--split", "validation")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("method")
    assert "validation error %" in header
    assert [row.split()[0] for row in rows] == ["initial", "baseline", "hs-mhe", "rp-comhe"]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "remedy"), [("--seeds 0", "at least 1"), ("--labels 500", "at most")])
def test_digits_refuses(words, remedy):
    done = run("digits.py", *words.split())
    assert done.returncode != 0
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr

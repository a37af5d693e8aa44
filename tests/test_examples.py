"""The examples and benchmarks run, shortened where they can be, and print what they promise."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "examples" / "digits.py"


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_digits_prints_a_row_for_each_method():
    done = run(DIGITS, "--seeds", "2", "--steps", "3", "--split", "validation")
    assert done.returncode == 0, done.stderr
    table, conclusion = done.stdout.split("\n\n")
    header, *rows = table.splitlines()
    assert header.startswith("method")
    assert "validation error %" in header
    assert [row.split()[0] for row in rows] == ["initial", "baseline", "hs-mhe", "rp-comhe"]
    meaning, _, *verdicts = conclusion.splitlines()
    assert meaning.startswith("Mean ± standard deviation over 2 seeds.")
    assert [line.split(":")[0] for line in verdicts] == ["hs-mhe", "rp-comhe"]


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        ([-0.5], "of the error one seed says nothing"),
        ([-1.0, 1.5, -0.5, 0.5], "error +0.12, standard error 0.55: within the spread between seeds"),
        ([-1.0, -1.5, -0.5, -1.0], "error -1.00, standard error 0.20: lower"),
        ([1.0, 1.5, 0.5], "error +1.00, standard error 0.29: within the spread between seeds"),
        ([1.0, 1.5, 0.5, 1.0], "error +1.00, standard error 0.20: higher"),
    ],
)
def test_what_digits_concludes_follows_from_its_numbers(apart, words):
    assert runpy.run_path(str(DIGITS))["verdict"](apart) == words


@pytest.mark.slow
@pytest.mark.parametrize(("words", "remedy"), [("--seeds 0", "at least 1"), ("--labels 500", "at most")])
def test_digits_refuses(words, remedy):
    done = run(DIGITS, *words.split())
    assert done.returncode != 0
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmark_begins_to_print_its_numbers(program):
    """The first three lines: a whole one takes minutes."""
    with subprocess.Popen([sys.executable, "-u", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(3)]
        running.kill()
    assert all(any(sign.isdigit() for sign in line) for line in lines), lines

"""How an unknown word is answered: the choices, and the nearest one first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: '; did you mean ...? Choose one of ...'."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"{guess} Choose one of: {', '.join(known) or '(none)'}"

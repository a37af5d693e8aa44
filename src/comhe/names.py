"""How an unknown word is answered: the choices, and the nearest one first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of an error message: '; did you mean ...? Choose one of ...'."""
    known = sorted(choices)
    folded = {choice.casefold(): choice for choice in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.4)
    guess = f"; did you mean {folded[close[0]]!r}?" if close else "."
    return f"{guess} Choose one of: {', '.join(known) or '(none)'}"

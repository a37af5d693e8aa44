"""docs/options.md says what the code says: every setting of every call, with its default."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

import comhe
from comhe.methods import ALIASES, METHODS
from comhe.penalties import PENALTIES
from comhe.projections import REGISTRY, Projection

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
REQUIRED = "required"


def section(title: str) -> str:
    """What stands under a heading of any level, up to the next one of that level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"docs/options.md has no heading {title!r}"
    rest = found.string[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(title: str) -> list[list[str]]:
    """The cells of the section's first table, without its head and without backquotes."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def evaluated(text: str) -> Any:
    """A default as the page writes it."""
    return REQUIRED if text == REQUIRED else eval(text, dict(REGISTRY))


def settings(text: str) -> dict[str, Any]:
    """ "dim=30, mode='x'" as a dictionary."""
    return eval(f"dict({text})")


def defaults(function: Any) -> dict[str, Any]:
    """The named parameters of a function or class, in their order."""
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return {p.name: REQUIRED if p.default is p.empty else p.default for p in named}


def of_field(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@pytest.mark.parametrize(
    "function",
    [
        comhe.attach,
        comhe.build,
        comhe.Regularizer,
        comhe.discover,
        comhe.energy,
        comhe.sampled_energy,
        comhe.audit,
        comhe.parametrizations.rotate,
        comhe.parametrizations.low_rank,
    ],
    ids=lambda function: function.__name__,
)
def test_the_settings_of(function: Any) -> None:
    home = "comhe.parametrizations" if hasattr(comhe.parametrizations, function.__name__) else "comhe"
    written = {name: evaluated(default) for name, default, _ in rows(f"{home}.{function.__name__}")}
    assert list(written.items()) == list(defaults(function).items())


def test_the_settings_of_a_rule() -> None:
    written = {name: evaluated(default) for name, default, _ in rows("comhe.Rule")}
    assert list(written.items()) == [(f.name, of_field(f)) for f in fields(comhe.Rule)]


def test_the_settings_of_projections() -> None:
    written = {name: (settings(text), period) for name, text, period in rows("Projections")}
    assert written.keys() == REGISTRY.keys()
    for name, kind in REGISTRY.items():
        assert written[name][0] == {f.name: f.default for f in fields(kind)}, name
        every = written[name][1].split(";")[0]
        if kind.draw is Projection.draw:
            assert every == "no basis"
        else:
            assert every == str(kind().redraw_every or "never"), name


def test_the_settings_of_penalties() -> None:
    written = {name: settings(text) for name, text in rows("Penalties")}
    expected = {name: {k: v for k, v in defaults(f).items() if v != REQUIRED} for name, f in PENALTIES.items()}
    assert written == expected


def test_the_settings_of_methods() -> None:
    written = {name: (projection, settings(text), float(weight)) for name, projection, text, weight in rows("Methods")}
    assert written == {name: (m.projection, dict(m.settings), m.classifier_weight) for name, m in METHODS.items()}
    for alias, name in ALIASES.items():
        assert f"`{alias}` is `{name}`" in section("Methods")

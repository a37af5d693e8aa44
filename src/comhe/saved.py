"""Whether a saved state is of the same layers and projections as the regularizer that is to load it."""

from __future__ import annotations


def compare_layers(saved: dict[str, list[str]], here: dict[str, list[str]]) -> None:
    def flat(layers: dict[str, list[str]]) -> dict[str, str]:
        return {name: address for address, names in layers.items() for name in names}

    old, new = flat(saved), flat(here)
    differences = [
        *(f"{name} is missing here" for name in sorted(old.keys() - new.keys())),
        *(f"{name} is not in the saved state" for name in sorted(new.keys() - old.keys())),
        *(
            f"{name} had basis {old[name]} and has {new[name]}"
            for name in sorted(old.keys() & new.keys())
            if old[name] != new[name]
        ),
    ]
    if differences:
        raise ValueError(f"the saved state is of other layers: {'; '.join(differences)}")


def compare_bases(saved: dict[str, str], here: dict[str, str], layers: dict[str, list[str]]) -> None:
    differences = [
        f"{', '.join(layers[address])} had {old} and has {here[address]}"
        for address, old in saved.items()
        if old != here[address]
    ]
    if differences:
        raise ValueError(f"the saved state is of other projections: {'; '.join(differences)}")

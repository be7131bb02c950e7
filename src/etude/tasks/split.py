"""Which side of training a function falls on.

Where in the flow: harvest -> **split** -> tasks and pretraining text. `final` and `heldout` are whole packages; of the
others, `rl` becomes training tasks and `base` pretraining and fine-tuning text. A function that shares its name or its
body with a callable one of a more protected side is left out, so that no answer has been seen before:
final, then heldout, then rl, then base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etude.tasks.harvest import Function

SPLITS = ("base", "rl", "heldout", "final")
RL_SHARE = 0.7
"""Of the callable training functions' names."""


_SIDES = ("final", "heldout", "train")
"""Roles of packages, the most protected first."""
_Copies = list[Function]
"""Functions with one body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What `assign` decided."""

    splits: Mapping[str, str]
    """`body_key` -> one of `SPLITS`; bodies that were left out are absent."""
    dropped: Mapping[str, int]
    """Why -> how many functions left their side for sharing a body or a name with the side named first:
    `final-in-heldout`, `final-in-train`, `heldout-in-train`, `rl-in-base`."""


def assign(functions: Iterable[Function], roles: Mapping[str, str]) -> Split:
    """Splits of `functions`, whose packages have `roles` (package name -> train, heldout or final).

    Depends on the set of functions, not on their order. Functions with one `body_key` are decided together: they go to
    the most protected side that any of them has, and are left out if any of their names forbids that side.
    """
    bodies: dict[str, _Copies] = {}
    for row in functions:
        bodies.setdefault(row.body_key, []).append(row)
    dropped = {"final-in-heldout": 0, "final-in-train": 0, "heldout-in-train": 0, "rl-in-base": 0}
    by_side: dict[str, list[_Copies]] = {side: [] for side in _SIDES}
    for copies in bodies.values():
        side = min((roles[row.package] for row in copies), key=_SIDES.index)
        by_side[side].append(copies)
        for row in copies:
            if roles[row.package] != side:
                dropped[f"{side}-in-{roles[row.package]}"] += 1
    final = by_side["final"]
    heldout, dropped_now = _without(by_side["heldout"], _protected_names(final))
    dropped["final-in-heldout"] += dropped_now
    train, dropped_now = _without(by_side["train"], _protected_names(final))
    dropped["final-in-train"] += dropped_now
    train, dropped_now = _without(train, _protected_names(heldout))
    dropped["heldout-in-train"] += dropped_now
    rl = [copies for copies in train if any(row.callable and _is_rl_name(row.name) for row in copies)]
    chosen = {copies[0].body_key for copies in rl}
    rest = [copies for copies in train if copies[0].body_key not in chosen]
    base, dropped["rl-in-base"] = _without(rest, _protected_names(rl))
    sides = zip(SPLITS, (base, rl, heldout, final), strict=True)
    return Split(splits={copies[0].body_key: name for name, found in sides for copies in found}, dropped=dropped)


def _protected_names(bodies: Iterable[_Copies]) -> set[str]:
    """All names of the bodies that can be called."""
    return {row.name for copies in bodies if any(row.callable for row in copies) for row in copies}


def _without(bodies: Iterable[_Copies], names: set[str]) -> tuple[list[_Copies], int]:
    """The bodies none of whose functions has one of `names`, and the number of functions left out."""
    kept, left_out = [], 0
    for copies in bodies:
        if any(row.name in names for row in copies):
            left_out += len(copies)
        else:
            kept.append(copies)
    return kept, left_out


def _is_rl_name(name: str) -> bool:
    """By hash of the name: callable functions of one name are on one side."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < RL_SHARE * 2**64

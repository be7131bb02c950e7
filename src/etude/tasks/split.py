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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What `assign` decided."""

    splits: Mapping[str, str]
    """`body_key` -> one of `SPLITS`; functions that were left out are absent."""
    dropped: Mapping[str, int]
    """Why -> how many were left out: `final-in-heldout`, `final-in-train`, `heldout-in-train`, `rl-in-base`."""


def assign(functions: Iterable[Function], roles: Mapping[str, str]) -> Split:
    """Splits of `functions`, whose packages have `roles` (package name -> train, heldout or final).

    Depends on the set of functions, not on their order. Functions with one `body_key` count as one, on the most
    protected side that any of them has.
    """
    rows = list(functions)
    sides = {side: [row for row in rows if roles[row.package] == side] for side in ("final", "heldout", "train")}
    splits: dict[str, str] = {}
    dropped = {"final-in-heldout": 0, "final-in-train": 0, "heldout-in-train": 0, "rl-in-base": 0}
    final = _Protected(sides["final"])
    heldout_rows = [row for row in sides["heldout"] if row not in final]
    dropped["final-in-heldout"] = len(sides["heldout"]) - len(heldout_rows)
    heldout = _Protected(heldout_rows)
    train = []
    for row in sides["train"]:
        if row in final:
            dropped["final-in-train"] += 1
        elif row in heldout:
            dropped["heldout-in-train"] += 1
        else:
            train.append(row)
    rl_rows = [row for row in train if row.callable and _is_rl_name(row.name)]
    rl = _Protected(rl_rows)
    for row in train:
        if row.callable and _is_rl_name(row.name):
            splits[row.body_key] = "rl"
        elif row in rl:
            dropped["rl-in-base"] += 1
        else:
            splits.setdefault(row.body_key, "base")
    splits.update((row.body_key, "heldout") for row in heldout_rows)
    splits.update((row.body_key, "final") for row in sides["final"])
    return Split(splits=splits, dropped=dropped)


class _Protected:
    """Names and bodies of the callable functions of a side."""

    def __init__(self, rows: Iterable[Function]) -> None:
        kept = [row for row in rows if row.callable]
        self.names = {row.name for row in kept}
        self.bodies = {row.body_key for row in kept}

    def __contains__(self, row: Function) -> bool:
        return row.name in self.names or row.body_key in self.bodies


def _is_rl_name(name: str) -> bool:
    """By hash of the name: functions of one name are never on both sides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < RL_SHARE * 2**64

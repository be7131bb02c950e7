"""Admission: when a new group may start, and which running groups a step must wait for.

S is the newest step that every engine taking new work has committed; requests carry it as their minimum, so that no
token of a group is older than the S at which it was admitted. Let K = groups_per_step and M = max_staleness. A group
admitted at S must be trained at weights S + M at the latest: its deadline. A group may start while

    admitted - abandoned  <  (S + M + 1) * K                                             (surviving lineage)

and the step at weights v, which takes the K oldest ready groups, may be taken if afterwards

    for every d >= v:  number of groups left with deadline <= d   is at most   (d - v) * K

The second rule is earliest-deadline-first feasibility. Together they bound the staleness of every trained token by M,
make M = 0 exactly synchronous, and cannot deadlock: running groups end, abandoned ones give their place back. To wait
only for the groups whose deadline is v itself is not enough: steps that took newer groups while old ones were still
running leave more than K of them for one step (tests/rl/test_admission.py shows 5 where 4 is the bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule's constants. Every step in and out counts optimizer steps."""

    groups_per_step: int
    max_staleness: int

    def may_start(self, *, admitted: int, abandoned: int, engine_step: int) -> bool:
        """Whether one more group may be admitted now."""
        return admitted - abandoned < (engine_step + self.max_staleness + 1) * self.groups_per_step

    def wait_until(self, *, ready: Sequence[int], running: Sequence[int], weights_step: int) -> int | None:
        """None if the step at `weights_step` may leave all running groups behind.

        Else a step s: at least one running group that was admitted at s or before must be waited for (or dropped).
        `ready` and `running` hold the admission steps of the groups in these states.
        """
        left = sorted(ready)[self.groups_per_step :]
        for age in range(self.max_staleness, -1, -1):
            admitted = weights_step - age
            room = (self.max_staleness - age) * self.groups_per_step
            behind = sum(step <= admitted for step in running)
            if behind and behind + sum(step <= admitted for step in left) > room:
                return admitted
        return None

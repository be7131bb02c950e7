"""How much does staleness cost, and what does each correction of it give back?

    python studies/staleness.py            # options as in learning.py

    0                     synchronous: nothing to correct
    1, 2, 4, 8            max_staleness, with each of rl.correction = none, truncated, masked

Sixty steps of the same number of episodes each, so that the arms differ in who sampled them, not in how many there are.
"""

from __future__ import annotations

from arms import Arm, main

STEPS = ("budget.steps=60", "budget.wall_s=3600")
ARMS = {"0": Arm(2, (*STEPS, "rl.max_staleness=0"))} | {
    f"{age}-{kind}": Arm(2, (*STEPS, f"rl.max_staleness={age}", f"rl.correction={kind}"), must_gain=None)
    for age in (1, 2, 4, 8)
    for kind in ("none", "truncated", "masked")
}

if __name__ == "__main__":
    main("staleness", ARMS, __doc__)

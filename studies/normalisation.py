"""What does dividing advantages by a group's standard deviation, or by an episode's length, do?

    python studies/normalisation.py        # options as in learning.py

    none          reward minus the group's mean (Dr. GRPO, and the Composer 2 report)
    group_std     divided by the group's standard deviation: groups that hardly differ count as much as those that do
    per_length    divided by the episode's sampled tokens: long wrong episodes are cheap, short right ones dear

Every episode of a group is trained on in all arms (`rl.min_advantage = 0`), for a threshold would hide what division
does to small advantages. Sixty steps each; the table's last column shows what happens to length.
"""

from __future__ import annotations

from arms import Arm, main

SHARED = ("rl.min_advantage=0", "budget.steps=60", "budget.wall_s=3600")
ARMS = {
    "none": Arm(3, SHARED),
    "group_std": Arm(3, (*SHARED, "rl.credit=group_std"), must_gain=None),
    "per_length": Arm(3, (*SHARED, "rl.credit=per_length"), must_gain=None),
}

if __name__ == "__main__":
    main("normalisation", ARMS, __doc__)

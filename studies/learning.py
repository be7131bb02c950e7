"""Does the quickstart's agent learn, for the right reason, and what does the way it is trained matter?

    python studies/learning.py                          # all arms without a result: hours; Ctrl-C, and go on later
    python studies/learning.py --arms shuffled lr-0     # some of them
    python studies/learning.py --table                  # only the table of what is there; --plot FILE.svg draws it
    python studies/learning.py --smoke                  # every arm for seconds: that the study runs, not what it says

    long            30 minutes, asynchronous, half the learning rate (at the quickstart's, a run four times as long may
                    break down), on all tasks of the pool
    async           10 minutes, asynchronous                            synchronous  10 minutes, max_staleness = 0
    rejection       10 minutes, rejection-sampling SFT
    shuffled        10 minutes, rewards dealt out at random: must not improve
    lr-0            10 minutes, learning rate 0: must not improve

All but `long` use the 2,225 tasks of the pool that the quickstart's rates know as neither too easy nor too hard, `long`
all 15,660; a machine that gets through them sooner ends sooner, and then the arms are compared at equal episodes.
Every arm stands beside its own start, and beside that start barred from finishing until a test passes, at the same
budget of sampled tokens: skill without persistence.
"""

from __future__ import annotations

from arms import Arm, main

TEN, THIRTY = "budget.wall_s=600", "budget.wall_s=1800"
ARMS = {
    "long": Arm(3, (THIRTY, "tasks.solve_rate=[0,1]", "train.lr=1e-4", "train.output_scale_rate=100")),
    "async": Arm(3, (TEN,)),
    "synchronous": Arm(3, (TEN, "rl.max_staleness=0")),
    "rejection": Arm(3, (TEN, "rl.credit=rejection")),
    "shuffled": Arm(3, (TEN, "rl.credit=shuffled"), must_gain=False),
    "lr-0": Arm(1, (TEN, "train.lr=0"), must_gain=False),
}

if __name__ == "__main__":
    main("learning", ARMS, __doc__)

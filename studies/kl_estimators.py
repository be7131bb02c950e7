"""What does a KL to the starting policy do, by its estimator and its coefficient?

    python studies/kl_estimators.py        # options as in learning.py

    none          no KL                              k1-*     in the reward, of all that follows a token
    k2-*          a loss, token by token             k3-*     a loss, token by token, along the forward KL

tests/train/test_kl.py holds the estimators to an enumerated policy and to the closed forms of unit Gaussians; here they
meet real ones. Sixty steps each. The curves `kl_k1` of results/kl_estimators.jsonl say how far each arm went.
"""

from __future__ import annotations

from arms import Arm, main

STEPS = ("budget.steps=60", "budget.wall_s=3600")
ARMS = {"none": Arm(3, STEPS)} | {
    f"{kind}-{coef}": Arm(seeds, (*STEPS, f"rl.kl.kind={kind}", f"rl.kl.coef={coef}"), must_gain=None)
    for kind, coef, seeds in (("k1", 0.01, 3), ("k1", 0.1, 1), ("k2", 0.01, 1), ("k3", 0.01, 3))
}

if __name__ == "__main__":
    main("kl_estimators", ARMS, __doc__)

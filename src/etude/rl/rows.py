"""What a step's metrics row says, and the clock that splits the trainer side's time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean

from etude.agent.recipe import TOOL_NAMES
from etude.protocols import EngineStats
from etude.rl.samples import oldest_step
from etude.types import Group, Opened, Scored


class BusyClock:
    """Wall time of training over all resumptions, and how much of it went where."""

    def __init__(self, before_s: float) -> None:
        self._before_s = before_s
        self._start = time.monotonic()
        self.seconds: dict[str, float] = {}

    @property
    def wall_s(self) -> float:
        return self._before_s + time.monotonic() - self._start

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def tool_counts(members: Sequence[Scored]) -> dict[str, int]:
    """How often each tool was called, and how often it failed in which way: `calls_TOOL`, `errors_TOOL_KIND`.

    A name that is no tool counts as `unknown_tool`: what a model may write has no end.
    """
    counts: Counter[str] = Counter()
    for member in members:
        for turn in member.episode.turns:
            for call, result in zip(turn.calls, turn.results, strict=False):
                name = call.name if call.name in TOOL_NAMES else "unknown_tool"
                counts[f"calls_{name}"] += 1
                if result.error is not None:
                    counts[f"errors_{name}_{result.error}"] += 1
    return dict(sorted(counts.items()))


def rerendered_share(members: Sequence[Scored]) -> float:
    """Of all turns, those before which the chat format wrote the conversation anew, in a context of its own."""
    contexts = sum(one.opened is Opened.RERENDER for member in members for one in member.episode.contexts)
    return contexts / max(sum(len(member.episode.turns) for member in members), 1)


def step_row(
    groups: Sequence[Group],
    *,
    weights_step: int,
    trained: Mapping[str, float],
    clock: BusyClock,
    stats: EngineStats,
) -> dict[str, float | int | str | None]:
    """One optimizer step in numbers. Seconds are sums since the start of this process, unless a name says otherwise.

    `staleness` of a token is the step of the weights that train on it minus that of those that sampled it; a group's
    is that of its oldest token.
    """
    members = [member for group in groups for member in group.members]
    staleness = [weights_step - oldest for group in groups if (oldest := oldest_step(group)) is not None]
    flat = sum(len({member.reward.total for member in group.members}) == 1 for group in groups)
    efforts = [member.episode.effort for member in members]
    histogram = {f"staleness_{age}": staleness.count(age) for age in sorted(set(staleness))}
    row: dict[str, float | int | str | None] = {
        "step": weights_step + 1,
        "wall_s": clock.wall_s,
        "groups": len(groups),
        "zero_variance_groups": flat,
        "reward_mean": fmean(member.reward.total for member in members),
        "solve_rate": fmean(member.evidence.solved for member in members),
        "turns_mean": fmean(effort.turns for effort in efforts),
        "rerendered_share": rerendered_share(members),
        "sampled_tokens_mean": fmean(
            sum(int(context.sampled.sum()) for context in member.episode.contexts) for member in members
        ),
        "staleness_mean": fmean(staleness) if staleness else 0.0,
        "staleness_max": max(staleness, default=0),
        "wait_s": clock.seconds.get("wait", 0.0),
        "train_s": clock.seconds.get("train", 0.0),
        "engine_busy_s": stats.busy_s,
        "engine_sampled_tokens": stats.sampled_tokens,
        "engine_prefilled_tokens": stats.prefilled_tokens,
        "engine_reused_tokens": stats.reused_tokens,
        "engine_stale_reused_tokens": stats.stale_reused_tokens,
        "engine_swaps": stats.swaps,
        "engine_swap_pause_s": stats.swap_pause_s,
        "fault_count": sum(len(group.faults) for group in groups),
    }
    row |= tool_counts(members)
    for name in ("generate", "tools", "sandbox", "grade"):
        row[f"episode_{name}_s"] = fmean(member.episode.timings.get(name, 0.0) for member in members)
    return row | histogram | {f"trainer_{name}" if name in row else name: value for name, value in trained.items()}

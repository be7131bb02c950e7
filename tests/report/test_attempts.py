from pathlib import Path

import msgspec
import pytest

from etude.data.episodes import EpisodeRecord, EpisodeWriter
from etude.report.attempts import MAX_CHARS, SHARES, Seen, Tally, choose, clean, view
from etude.types import Fault, StopReason, ToolCall
from report.made_run import record_episodes, scored, task


def tally(solved: int, total: int, when: str = "before") -> Tally:
    made = Tally()
    for number in range(total):
        attempt = scored(task(0), f"{when}{number}", solved=number < solved)
        made.add(EpisodeRecord(task=task(0), scored=attempt, when=when))
    return made


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [(1, 3, "improved"), (3, 1, "worsened"), (4, 4, "solved"), (0, 0, "unsolved"), (2, 2, "mixed")],
)
def test_a_task_is_named_by_how_its_solve_rate_changed(before: int, after: int, change: str) -> None:
    seen = Seen(task=task(0), tallies={"before": tally(before, 4), "after": tally(after, 4)})
    assert seen.change == change


def test_of_each_occasion_the_first_attempt_is_shown_and_the_first_of_the_other_outcome() -> None:
    shown = tally(2, 5).shown
    assert [record.scored.episode.episode_id for record in shown] == ["before0", "before2"]
    assert len(tally(5, 5).shown) == 1


def test_worsened_tasks_are_shown_too_and_no_kind_crowds_out_the_others(tmp_path: Path) -> None:
    record_episodes(tmp_path, tasks=20)
    chosen = choose(tmp_path / "episodes")
    changes = [seen.change for seen in chosen]
    assert changes.count("improved") == SHARES["improved"]
    assert changes.count("worsened") == 1


def test_without_an_evaluation_the_first_training_episodes_are_shown(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path)
    for number in range(40):
        attempt = scored(task(number), "e", solved=False)
        writer.append(EpisodeRecord(task=task(number), scored=attempt, when="train", step=number))
    writer.close()
    chosen = choose(tmp_path)
    assert [seen.task.task_id for seen in chosen] == [task(number).task_id for number in range(sum(SHARES.values()))]
    assert choose(tmp_path / "missing") == []


def test_an_attempt_shows_calls_results_reward_parts_and_the_patch(tmp_path: Path) -> None:
    record_episodes(tmp_path, tasks=1)
    shown = view(choose(tmp_path / "episodes")[0])
    assert shown.counts == [("before", 4, 4), ("after", 0, 4), ("control", 0, 4)]
    assert [line.number for line in shown.files[0][1]] == [1, 2, 3, 4, 5]
    solved = shown.attempts[0][0]
    assert [turn.calls[0].name for turn in solved.turns] == [
        "run_tests", "edit_file", "run_tests", "edit_file", "run_tests", "finish",
    ]  # fmt: skip
    edit = solved.turns[3].calls[0]
    assert edit.arguments == [("path", "solution.py"), ("line", "4")]
    assert [(line.kind, line.text) for line in edit.edit] == [("del", "return high"), ("add", "return low")]
    assert [turn.calls[0].verdict for turn in solved.turns] == ["fail", "", "fail", "", "pass", ""]
    assert [name for name, _ in solved.parts] == ["verify", "length"]
    assert [line.text for line in solved.diff if line.kind in ("add", "del")] == [
        "-        return high",
        "+        return low",
    ]
    assert solved.checks == "2 of 2 checks pass"


def test_a_broken_call_an_unanswered_one_and_a_fault_are_shown() -> None:
    attempt = scored(task(0), "e", solved=False)
    turn = msgspec.structs.replace(
        attempt.episode.turns[0],
        calls=(ToolCall(name="edit", arguments={}, error="no tool edit"), ToolCall(name="run_tests", arguments={})),
        results=(),
        stop=StopReason.LENGTH,
    )
    fault = Fault(boundary="sandbox", message="it died")
    episode = msgspec.structs.replace(attempt.episode, turns=(turn,), fault=fault, patch="")
    seen = Seen(task=task(0))
    seen.tallies["before"] = Tally()
    seen.tallies["before"].add(
        EpisodeRecord(task=task(0), scored=msgspec.structs.replace(attempt, episode=episode), when="before")
    )
    shown = view(seen).attempts[0][0]
    assert [call.error for call in shown.turns[0].calls] == ["no tool edit", ""]
    assert [call.result for call in shown.turns[0].calls] == ["no answer", "no answer"]
    assert (shown.turns[0].stop, shown.fault) == ("length", "sandbox: it died")


def test_a_removed_line_that_looks_like_a_head_is_a_removed_line() -> None:
    attempt = scored(task(0), "e", solved=False)
    patch = "diff --git a/q b/q\n--- a/q\n+++ b/q\n@@ -1,2 +1,1 @@\n--- comment\n kept\n"
    episode = msgspec.structs.replace(attempt.episode, patch=patch)
    seen = Seen(task=task(0), tallies={"before": Tally()})
    seen.tallies["before"].add(
        EpisodeRecord(task=task(0), scored=msgspec.structs.replace(attempt, episode=episode), when="before")
    )
    kinds = [line.kind for line in view(seen).attempts[0][0].diff]
    assert kinds == ["head", "head", "head", "hunk", "del", ""]


def test_characters_that_hide_or_reorder_others_are_made_visible() -> None:
    assert clean("a\u202eb\0c\u200bd\x1b[31m\ud800") == "a<U+202E>b<U+0000>c<U+200B>d<U+001B>[31m<U+D800>"
    assert clean("tab\tline\nend") == "tab\tline\nend"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert clean("x" * (MAX_CHARS + 5)) == "x" * MAX_CHARS + "\n... 5 more characters are not shown"

"""Each format as its program writes it, and what hostile files come to."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.interactive import Saved
from etude.data.episodes import EpisodeRecord, EpisodeWriter
from etude.errors import SessionError
from etude.frames import encode, write_file
from etude.protocols import Message, ServedTurn
from etude.sessions.readers import FORMATS, format_of, logs, read_log
from etude.types import (
    Effort,
    Episode,
    Evidence,
    IOChecks,
    Opened,
    Outcome,
    Reward,
    Scored,
    StopReason,
    Task,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    Turn,
)
from sessions import logs as made_logs
from sessions import made


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(path: Path, format: str | None = None) -> tuple[list[ServedTurn], Counter[str]]:
    skipped: Counter[str] = Counter()
    name = format or format_of(path)
    assert name is not None
    turns = list(read_log(path, name, made.owner(), skipped))
    assert [turn.number for turn in turns] == list(range(len(turns)))
    assert len({turn.turn_id for turn in turns}) == len(turns)
    for turn in turns:
        encode(turn)
        assert turn.tokens is None
    return turns, skipped


def refusal(path: Path, format: str) -> str | None:
    """Why a file was refused, if it was. Any other error fails the test."""
    try:
        read(path, format)
    except SessionError as error:
        return str(error)
    return None


def said(turn: ServedTurn) -> list[str]:
    found = []
    for message in turn.messages:
        found += [f"{message.role}: {message.text}"] if message.text else []
        found += [f"result: {result.text}" for result in message.results]
    return found


@pytest.mark.parametrize("name", made_logs.FILES)
def test_every_log_is_told_by_its_looks(name: str, tmp_path: Path) -> None:
    path = put(tmp_path, name, made_logs.FILES[name])
    assert format_of(path) == made_logs.FORMAT_OF[name]
    assert read(path)[0]


def test_claude_code(tmp_path: Path) -> None:
    turns, skipped = read(put(tmp_path, "s.jsonl", made_logs.CLAUDE))
    assert [turn.context for turn in turns] == [0, 0, 0, 0, 1, 2, 3]
    assert [turn.opened for turn in turns] == [
        Opened.TASK, None, None, None, Opened.FORK, Opened.SUBAGENT, Opened.SUMMARY,
    ]  # fmt: skip
    first, second, third, fourth, fork, side, summary = turns
    assert said(first) == ["user: total() is wrong, repair it"]
    assert first.reply.text == "I look at it."
    assert first.reply.calls == (ToolCall(name="Read", arguments={"file_path": "/home/dana/shop/app.py"}),)
    assert first.model == "claude-sonnet-4-5-20250929"
    assert first.repository is not None
    assert (first.repository.root, first.repository.branch) == ("shop", "main")
    assert (first.started_at, first.wall_s) == (1759395601.12, 2.0)
    assert said(second) == ["result: 1\tdef total(): ..."]
    assert [call.name for call in second.reply.calls] == ["Edit", "Bash"]
    assert said(third) == ["result: updated", "result: 1 failed"]
    assert third.messages[0].results[1].error == ToolErrorKind.UNEXPECTED_ENVIRONMENT
    assert said(fourth) == ["user: go on"]
    assert said(fork)[-1] == "user: leave it, write a test"
    assert said(fork)[:2] == ["user: total() is wrong, repair it", "assistant: I look at it."]
    assert "user: go on" not in said(fork)
    assert said(side) == ["user: count the files"]
    assert said(summary) == ["user: This session is being continued: ..."]
    assert skipped == {"record summary": 1, "record file-history-snapshot": 1, "record system": 1, "block thinking": 1,
                       "block image": 1, "record of an API error": 1}  # fmt: skip
    (old,), _ = read(put(tmp_path, "old.jsonl", made_logs.CLAUDE_OLD))
    assert old.reply.stop == StopReason.LENGTH
    assert old.repository is not None
    assert old.repository.root == "shop"
    name = "projects/-home-dana-shop/agent-77.jsonl"
    (agent,), _ = read(put(tmp_path, name, made_logs.FILES[name]))
    assert agent.session_id == "6f1c2b9e-0000-4000-8000-000000000001/agent-77"
    assert agent.opened == Opened.SUBAGENT


def test_codex(tmp_path: Path) -> None:
    turns, skipped = read(put(tmp_path, "rollout-1.jsonl", made_logs.CODEX))
    assert [turn.context for turn in turns] == [0, 0, 0, 0, 0, 1, 2]
    assert [turn.opened for turn in turns if turn.opened] == [Opened.TASK, Opened.FORK, Opened.SUMMARY]
    first, second, third, fourth, fifth, fork, summary = turns
    assert said(first) == ["system: be brief", "user: <environment_context>...</environment_context>",
                           "user: make f return 2"]  # fmt: skip
    assert first.reply.calls[0].arguments == {"command": "cat src/app.py"}
    assert (first.model, first.reply.effort.message_tokens) == ("gpt-5-codex", 31)
    assert first.repository is not None
    assert (first.repository.root, first.repository.commit) == ("shop", "b" * 40)
    assert second.reply.calls == (ToolCall(name="apply_patch", arguments={"input": made_logs.PATCH}),)
    assert said(third) == ["result: Success"]
    assert fourth.reply.calls[0].name == "local_shell"
    assert fifth.messages[0].results[0].error == ToolErrorKind.UNEXPECTED_ENVIRONMENT
    assert said(fork)[-1] == "user: thanks"
    assert "user: no, undo it" not in said(fork)
    assert said(summary) == ["user: the summary", "user: next"]
    assert skipped == {"item reasoning": 1, "event user_message": 1, "record a_new_kind": 1}
    bare, skipped = read(put(tmp_path, "rollout-2.jsonl", made_logs.CODEX_BARE))
    assert [turn.session_id for turn in bare] == ["f3a1", "f3a1"]
    assert bare[1].messages[0].results[0].error is not None
    assert skipped == {"record state": 2, "item reasoning": 1} or skipped == {"record state": 2, "record reasoning": 1}
    (only,), _ = read(put(tmp_path, "rollout-3.json", made_logs.CODEX_FIRST))
    assert (only.session_id, only.reply.text) == ("zz", "Hi.")


def test_opencode(tmp_path: Path) -> None:
    path = put(tmp_path, "export.json", json.dumps(made_logs.OPENCODE))
    turns, skipped = read(path)
    check_opencode(turns)
    assert skipped == {"part text": 1, "part reasoning": 1, "part patch": 1, "part compaction": 1}
    storage = tmp_path / "storage"
    put(storage, "session/p1/ses_1.json", json.dumps(made_logs.OPENCODE["info"]))
    old = tmp_path / "old"
    put(old, "session/info/ses_1.json", json.dumps(made_logs.OPENCODE["info"]))
    for message in made_logs.OPENCODE["messages"]:
        name = message["info"]["id"]
        put(storage, f"message/ses_1/{name}.json", json.dumps(message["info"]))
        put(old, f"session/message/ses_1/{name}.json", json.dumps(message["info"]))
        for part in message["parts"]:
            put(storage, f"part/{name}/{part['id']}.json", json.dumps(part))
            put(old, f"session/part/ses_1/{name}/{part['id']}.json", json.dumps(part))
    for folder in (storage, old):
        found = [log for log in logs([folder]) if format_of(log)]
        assert [log.name for log in found] == ["ses_1.json"]
        check_opencode(read(found[0])[0])
    put(storage, "part/msg_001/prt_9.json", "{broken")
    assert read(storage / "session/p1/ses_1.json")[1]["broken JSON"] == 1


def check_opencode(turns: list[ServedTurn]) -> None:
    first, second, summary, third = turns
    assert said(first) == ["user: repair f", "user: [file a.png]"]
    assert (first.model, first.reply.effort.message_tokens) == ("kimi-k2", 50)
    assert [call.name for call in first.reply.calls] == ["edit", "bash"]
    assert said(second) == ["result: ok", "result: no such file"]
    assert second.messages[0].results[1].error == ToolErrorKind.UNEXPECTED_ENVIRONMENT
    assert second.reply.text == "Done."
    assert summary.reply.text == "We repaired f."
    assert (third.context, third.opened, third.reply.stop) == (1, Opened.SUMMARY, StopReason.CANCELLED)
    assert said(third) == ["assistant: We repaired f.", "user: go on"]


def test_mini_swe_agent(tmp_path: Path) -> None:
    for value in (made_logs.MINI_V0, made_logs.MINI_V1):
        turns, skipped = read(put(tmp_path, "x.traj.json", json.dumps(value)))
        assert [[call.arguments["command"] for call in turn.reply.calls] for turn in turns] == [
            ["cat app.py"], [], ["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"],
        ]  # fmt: skip
        assert said(turns[1]) == ["result: <returncode>0</returncode>\n<output>\ndef f\n</output>"]
        assert said(turns[2])[0].startswith("user: Please always provide")
        assert skipped == {}
    assert turns[0].model == "claude-sonnet-4"
    (first, second), skipped = read(put(tmp_path, "y.traj.json", json.dumps(made_logs.MINI_V2)))
    assert [call.error is None for call in first.reply.calls] == [True, False]
    assert (first.model, first.started_at) == ("openai/gpt-5.5", 1_770_000_000.5)
    assert [result.error for result in second.messages[0].results] == [None, ToolErrorKind.UNEXPECTED_ENVIRONMENT]
    assert (second.model, second.reply.text) == ("gpt-5.5-2026", "done")
    assert second.reply.calls[0].arguments["command"].startswith("cat <<'EOF' > app.py")
    assert skipped == {"item reasoning": 1, "message of exit": 1}


def test_our_own_episodes_and_conversations(tmp_path: Path) -> None:
    check = IOChecks(path="a.py", checks=())
    task = Task.make(prompt="Repair f.", workspace={}, verifier=check, category="repair", source={})
    call, result = ToolCall(name="edit_file", arguments={"path": "a.py", "old": "1", "new": "2"}), ToolResult(text="ok")
    played = [
        Turn(text=f"turn {n}", calls=(call,), results=(result,), stop=StopReason.END, effort=Effort(), span=None,
             wall_s=2)
        for n in range(2)
    ]  # fmt: skip
    episode = Episode(episode_id="e-1", task_id=task.task_id, contexts=(), turns=tuple(played),
                      outcome=Outcome.FINISHED,
                      patch="", files={}, effort=Effort(), fault=None, timings={})  # fmt: skip
    evidence = Evidence(task_id=task.task_id, episode_id="e-1", passed=(True,), detail="", wall_s=1.0)
    writer = EpisodeWriter(tmp_path)
    scored = Scored(episode=episode, evidence=evidence, reward=Reward(total=1.0, parts={}))
    writer.append(EpisodeRecord(task=task, scored=scored, when="train", step=3))
    writer.close()
    (path,) = tmp_path.glob("*.mp")
    first, second = read(path)[0]
    assert said(first) == ["user: Repair f."]
    assert said(second) == ["result: ok"]
    assert (second.session_id, second.model, second.reply.calls) == ("e-1", "step 3", (call,))
    conversation = (Message(role="system", text="s"), Message(role="user", text="u"),
                    Message(role="assistant", text="a", calls=(call,)), Message(role="tool", results=(result,)),
                    Message(role="assistant", text="b"))  # fmt: skip
    kept = tmp_path / "20260101-000000" / "conversation.mp"
    kept.parent.mkdir()
    write_file(kept, Saved(folder="/home/dana/shop", conversation=conversation, changes={}))
    first, second = read(kept)[0]
    assert said(first) == ["system: s", "user: u"]
    assert said(second) == ["result: ok"]
    assert first.repository is not None
    assert first.repository.root == "shop"
    kept.write_bytes(b"\xc1 damaged")
    with pytest.raises(SessionError):
        read(kept)


def test_reading_again_gives_the_same_ids_and_another_person_others(tmp_path: Path) -> None:
    path = put(tmp_path, "s.jsonl", made_logs.CLAUDE)
    ids = [turn.turn_id for turn in read(path)[0]]
    assert [turn.turn_id for turn in read(path)[0]] == ids
    others = read_log(path, "claude-code", made.owner(user="bob"), Counter())
    assert not set(ids) & {turn.turn_id for turn in others}
    with path.open("a") as file:
        file.write('{"type": "user", "cut')
    turns, skipped = read(path)
    assert [turn.turn_id for turn in turns] == ids
    assert skipped["cut line"] == 1


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 40,
    "not json": b"hello\nworld\n",
    "deep": b'{"type":"user","sessionId":"s","parentUuid":null,"message":'
    + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"\n",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "a huge line": b'{"type":"user","sessionId":"s","parentUuid":null,"message":{"content":"'
    + b"x" * 3_000_000 + b'"}}\n',
    "wrong types": made_logs.lines(
        {"type": 1}, {"type": "user", "message": 3}, {"type": "assistant", "message": {"content": {"a": 1}, "id": []}},
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "input": [], "name": 5}, 7, None]}},
        {"type": "response_item", "payload": {"type": "function_call", "arguments": 5}}, [], "x", None, 1e400,
        {"type": "session_meta", "payload": {"id": 4, "git": []}}, {"type": "compacted", "payload": {}},
        {"type": "response_item", "payload": {"type": "function_call_output", "output": [[1], None, {"text": 3}]}},
        {"info": 3, "messages": [{"info": 1, "parts": 2},
                               {"info": {"role": "assistant"}, "parts": [{"type": "tool"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}, {"role": ["user"]}]},
    ).encode(),
    "surrogates": b'{"type":"user","sessionId":"\\ud800","parentUuid":null,"message":{"content":"\\udfff"}}\n',
    "times": made_logs.lines(
        *({"type": "assistant", "sessionId": "s", "parentUuid": "x", "timestamp": stamp, "uuid": "u",
           "message": {"content": "x", "usage": {"output_tokens": -1e14}}}
          for stamp in (1e300, -5, "9999999", "x", True)),
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_counted_or_refused_by_name(name: str, format: str, tmp_path: Path) -> None:
    for file in ("rollout-x.jsonl", "rollout-x.json", "session/ses_x.json", "conversation.mp", "train-000000.mp"):
        path = put(tmp_path, file, HOSTILE[name])
        format_of(path)
        assert refusal(path, format) is None or str(tmp_path) in str(refusal(path, format))


def mutate(value: Any, dice: random.Random, odd: Any) -> Any:
    """The value with a few of its parts replaced, removed or doubled."""
    if dice.random() < 0.02:
        return odd
    if isinstance(value, dict):
        pairs = {key: mutate(item, dice, odd) for key, item in value.items() if dice.random() > 0.02}
        return pairs | ({"new": odd} if dice.random() < 0.05 else {})
    if isinstance(value, list):
        items = [mutate(item, dice, odd) for item in value if dice.random() > 0.02]
        return items + items[:1] if dice.random() < 0.05 else items
    return value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(made_logs.FILES)), st.randoms(use_true_random=False), json_values)
def test_damaged_logs_never_break_a_reader(tmp_path: Path, name: str, dice: random.Random, odd: Any) -> None:
    text = made_logs.FILES[name]
    if name.endswith(".jsonl"):
        records = [mutate(json.loads(line), dice, odd) for line in text.splitlines()]
        dice.shuffle(records) if dice.random() < 0.2 else None
        data = made_logs.lines(*records).encode(errors="replace")
    else:
        data = json.dumps(mutate(json.loads(text), dice, odd)).encode(errors="replace")
    for _ in range(dice.choice([0, 0, 1, 5])):
        at = dice.randrange(len(data) + 1)
        data = data[:at] + dice.randbytes(3) + data[at + dice.randrange(4) :]
    path = put(tmp_path, name, data)
    message = refusal(path, made_logs.FORMAT_OF[name])
    assert message is None or str(path) in message


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FORMATS)), st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path: Path, format: str, data: bytes) -> None:
    for name in ("x.jsonl", "rollout-x.json", "conversation.mp", "train-000000.mp"):
        refusal(put(tmp_path, name, data), format)

"""Logs as the programs write them, made up, in several of their formats: name -> text of the file."""

from __future__ import annotations

import json
from typing import Any

PATCH = "*** Begin Patch\n*** Update File: src/app.py\n@@\n def f():\n-    return 1\n+    return 2\n*** End Patch"


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _claude(kind: str, uuid: str, parent: str | None, content: Any, second: int, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        message |= {"id": more.pop("id"), "type": "message", "model": "claude-sonnet-4-5-20250929", "stop_reason": None,
                    "stop_sequence": None, "usage": {"input_tokens": 4, "cache_read_input_tokens": 12000,
                                                     "output_tokens": 77, "service_tier": "standard"}}  # fmt: skip
        more.setdefault("requestId", "req_011")
    return {
        "parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/dana/shop",
        "sessionId": "6f1c2b9e-0000-4000-8000-000000000001", "version": "2.0.14", "gitBranch": "main", "type": kind,
        "message": message, "uuid": uuid, "timestamp": f"2025-10-02T09:00:{second:02d}.120Z", **more,
    }  # fmt: skip


def _use(call_id: str, name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "tool_use", "id": call_id, "name": name, "input": arguments}]


def _result(call_id: str, content: Any, *, is_error: bool = False) -> list[dict[str, Any]]:
    block = {"tool_use_id": call_id, "type": "tool_result", "content": content}
    return [block | ({"is_error": True} if is_error else {})]


CLAUDE = lines(
    {"type": "summary", "summary": "Repair the shop", "leafUuid": "a4"},
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}, "isSnapshotUpdate": False},
    _claude("user", "u1", None, "total() is wrong, repair it", 0, thinkingMetadata={"level": "high"}),
    _claude("assistant", "a1", "u1", [{"type": "thinking", "thinking": "hm", "signature": "EqQ="}], 1, id="msg_1"),
    _claude("assistant", "a2", "a1", [{"type": "text", "text": "I look at it."}], 2, id="msg_1"),
    _claude("assistant", "a3", "a2", _use("toolu_1", "Read", file_path="/home/dana/shop/app.py"), 3, id="msg_1"),
    _claude("user", "r1", "a3", _result("toolu_1", "1\tdef total(): ..."), 4, toolUseResult={"type": "text"}),
    _claude("assistant", "a4", "r1", _use("toolu_2", "Edit", file_path="/home/dana/shop/app.py", old_string="return 1",
                                         new_string="return 2\nreturn 3", replace_all=False), 5, id="msg_2"),
    # two calls of one reply: the result of the first comes before the record of the second
    _claude("user", "r2", "a4", _result("toolu_2", [{"type": "text", "text": "updated"}]), 6,
            toolUseResult={"structuredPatch": [{"oldStart": 1, "lines": ["-return 1", "+return 2"]}]}),
    _claude("assistant", "a5", "a4", _use("toolu_3", "Bash", command="pytest -q"), 7, id="msg_2"),
    _claude("user", "r3", "a5", _result("toolu_3", "1 failed", is_error=True), 8),
    {"type": "system", "subtype": "turn_duration", "durationMs": 900, "uuid": "s1", "parentUuid": "r3"},
    _claude("assistant", "a6", "r3", [{"type": "text", "text": "Not yet."}], 9, id="msg_3"),
    _claude("user", "u2", "a6", [{"type": "text", "text": "go on"}, {"type": "image", "source": {}}], 10),
    _claude("assistant", "a7", "u2", [{"type": "text", "text": "Done."}], 11, id="msg_4"),
    # the person went back and asked something else instead of "go on"
    _claude("user", "u3", "a6", "leave it, write a test", 12),
    _claude("assistant", "a8", "u3", [{"type": "text", "text": "Here."}], 13, id="msg_5"),
    _claude("user", "q1", None, "count the files", 14, isSidechain=True),
    _claude("assistant", "q2", "q1", [{"type": "text", "text": "12"}], 15, id="msg_6", isSidechain=True),
    {"type": "system", "subtype": "compact_boundary", "parentUuid": None, "logicalParentUuid": "a8", "uuid": "c1",
     "content": "Conversation compacted", "compactMetadata": {"trigger": "auto", "preTokens": 155000}},
    _claude("user", "u4", "c1", "This session is being continued: ...", 16, isCompactSummary=True),
    _claude("assistant", "a9", "u4", [{"type": "text", "text": "I go on."}], 17, id="msg_7"),
    _claude("assistant", "e1", "a9", [{"type": "text", "text": "API Error: 529"}], 18, id="x", isApiErrorMessage=True),
)  # fmt: skip

CLAUDE_OLD = lines(
    {"parentUuid": None, "isSidechain": False, "userType": "external", "cwd": "C:\\Users\\dana\\shop",
     "sessionId": "old", "version": "1.0.3", "type": "user", "message": {"role": "user", "content": "hello"},
     "uuid": "1", "timestamp": "2025-05-26T07:27:40.079Z"},
    {"parentUuid": "1", "isSidechain": False, "sessionId": "old", "version": "1.0.3", "type": "assistant",
     "message": {"id": "msg_a", "role": "assistant", "model": "claude-3-5-sonnet", "content": "Hi.",
                 "stop_reason": "max_tokens"}, "uuid": "2", "timestamp": "2025-05-26T07:27:44.079Z", "costUSD": 0.01},
)  # fmt: skip


def _codex(kind: str, second: int, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2025-10-29T00:59:{second:02d}.317Z", "type": kind, "payload": payload}


def _item(second: int, kind: str, **fields: Any) -> dict[str, Any]:
    return _codex("response_item", second, type=kind, **fields)


def _said(role: str, text: str) -> dict[str, Any]:
    part = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": part, "text": text}]}


CODEX = lines(
    _codex("session_meta", 0, id="019a2d7a", timestamp="2025-10-29T00:59:00.308Z", cwd="/Users/dana/shop",
           originator="codex_cli_rs", cli_version="0.50.0", instructions=None, source="cli", model_provider="openai",
           git={"commit_hash": "b" * 40, "branch": "main", "repository_url": "git@github.com:acme/shop.git"}),
    _codex("response_item", 1, **_said("developer", "be brief")),
    _codex("response_item", 1, **_said("user", "<environment_context>...</environment_context>")),
    _codex("turn_context", 1, cwd="/Users/dana/shop", model="gpt-5-codex", effort="high", summary="auto"),
    _codex("response_item", 2, **_said("user", "make f return 2")),
    _codex("event_msg", 2, type="user_message", message="make f return 2"),
    _item(3, "reasoning", summary=[{"type": "summary_text", "text": "Plan"}], encrypted_content="gAAAA"),
    _item(4, "function_call", name="shell_command", arguments='{"command": "cat src/app.py"}', call_id="call_1"),
    _codex("event_msg", 4, type="token_count", info={"last_token_usage": {"output_tokens": 31}}),
    _item(5, "function_call_output", call_id="call_1", output="Exit code: 0\nOutput:\ndef f():"),
    _item(6, "custom_tool_call", status="completed", call_id="call_2", name="apply_patch", input=PATCH),
    _item(7, "custom_tool_call_output", call_id="call_2", output='{"output": "Success", "metadata": {"exit_code": 0}}'),
    _codex("response_item", 8, **_said("assistant", "Done.")),
    _codex("response_item", 9, **_said("user", "no, undo it")),
    _item(10, "local_shell_call", call_id="call_3", status="completed",
          action={"type": "exec", "command": ["git", "checkout", "."]}),
    _item(11, "function_call_output", call_id="call_3", output={"content": "denied", "success": False}),
    _codex("response_item", 12, **_said("assistant", "I could not.")),
    _codex("event_msg", 12, type="thread_rolled_back", num_turns=1),
    _codex("response_item", 13, **_said("user", "thanks")),
    _codex("response_item", 14, **_said("assistant", "Welcome.")),
    _codex("compacted", 15, message="the summary", replacement_history=[_said("user", "the summary")]),
    _codex("response_item", 16, **_said("user", "next")),
    _codex("response_item", 17, **_said("assistant", "Yes?")),
    _codex("a_new_kind", 18, anything=[1, 2]),
)  # fmt: skip

CODEX_BARE = lines(
    {"id": "f3a1", "timestamp": "2025-06-28T16:00:00.000Z", "instructions": "x", "git": {"branch": "main",
     "commit_hash": "c" * 40, "repository_url": "https://github.com/acme/shop.git"}},
    {"record_type": "state"},
    _said("user", "make f return 2"),
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "id": "fc_1", "name": "shell", "call_id": "c1",
     "arguments": json.dumps({"command": ["bash", "-lc", f"apply_patch <<'EOF'\n{PATCH}\nEOF\n"]})},
    {"type": "function_call_output", "call_id": "c1", "output": '{"output": "boom", "metadata": {"exit_code": 1}}'},
    {"record_type": "state"},
    _said("assistant", "It failed."),
)  # fmt: skip

CODEX_FIRST = json.dumps(
    {"session": {"timestamp": "2025-04-20T10:00:00.000Z", "id": "zz", "instructions": ""},
     "items": [_said("user", "hello"), _said("assistant", "Hi."), 7]}
)  # fmt: skip


def _message(number: int, role: str, parts: list[dict[str, Any]], **info: Any) -> dict[str, Any]:
    name = f"msg_{number:03d}"
    base = {"id": name, "sessionID": "ses_1", "role": role, "time": {"created": 1_759_000_000_000 + number * 1000}}
    if role == "assistant":
        base |= {"modelID": "kimi-k2", "providerID": "moonshot", "mode": "build", "cost": 0.1, "parentID": "msg_000",
                 "path": {"cwd": "/home/dana/shop", "root": "/home/dana/shop"}, "tokens": {"input": 1}}  # fmt: skip
    keys = {"sessionID": "ses_1", "messageID": name}
    numbered = [{"id": f"prt_{number:03d}_{place}", **keys, **part} for place, part in enumerate(parts)]
    return {"info": base | info, "parts": numbered}


def _tool(call_id: str, tool: str, state: dict[str, Any]) -> dict[str, Any]:
    times = {"start": 1_759_000_010_000, "end": 1_759_000_011_000}
    return {"type": "tool", "callID": call_id, "tool": tool, "state": {"time": times, **state}}


OPENCODE = {
    "info": {"id": "ses_1", "projectID": "p1", "directory": "/home/dana/shop", "title": "Repair", "version": "1.0.2",
             "time": {"created": 1_759_000_000_000, "updated": 1_759_000_050_000}},
    "messages": [
        _message(0, "user", [{"type": "text", "text": "repair f"},
                             {"type": "file", "filename": "a.png", "url": "data:"},
                             {"type": "text", "text": "not for the model", "ignored": True}]),
        _message(1, "assistant", [
            {"type": "step-start", "snapshot": "x"}, {"type": "reasoning", "text": "hm"},
            {"type": "text", "text": "I edit."},
            _tool("c1", "edit", {"status": "completed", "output": "ok", "title": "", "metadata": {}, "input": {
                "filePath": "/home/dana/shop/app.py", "oldString": "return 1", "newString": "return 2"}}),
            _tool("c2", "bash", {"status": "error", "error": "no such file", "input": {"command": "pytst"}}),
            {"type": "step-finish", "reason": "tool-calls", "tokens": {"output": 50}, "cost": 0},
            {"type": "step-start"}, {"type": "text", "text": "Done."},
            {"type": "step-finish", "reason": "stop", "tokens": {"output": 3}, "cost": 0},
            {"type": "patch", "hash": "h", "files": ["app.py"]}], finish="stop"),
        _message(2, "user", [{"type": "compaction", "auto": True}]),
        _message(3, "assistant", [{"type": "text", "text": "We repaired f."}], summary=True),
        _message(4, "user", [{"type": "text", "text": "go on"}]),
        _message(5, "assistant", [{"type": "text", "text": "On it"},
                                  _tool("c3", "bash", {"status": "running", "input": {"command": "sleep 9"}})],
                 error={"name": "MessageAbortedError", "data": {"message": "aborted"}}),
    ],
}  # fmt: skip

MINI_V0 = [
    {"role": "system", "content": "You can interact with a computer."},
    {"role": "user", "content": "Please solve this issue: f is wrong"},
    {"role": "assistant", "content": "THOUGHT: look\n\n```bash\ncat app.py\n```"},
    {"role": "user", "content": "<returncode>0</returncode>\n<output>\ndef f\n</output>"},
    {"role": "assistant", "content": "no command here"},
    {"role": "user", "content": "Please always provide EXACTLY ONE action in triple backticks."},
    {"role": "assistant", "content": "OK\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"},
    {"role": "user", "content": ""},
]
MINI_V1 = {
    "info": {"exit_status": "Submitted", "submission": "diff --git", "mini_version": "1.14.0",
             "model_stats": {"instance_cost": 0.1, "api_calls": 3},
             "config": {"model": {"model_name": "anthropic/claude-sonnet-4"}}},
    "messages": [{**message, "extra": {"response": {"model": "claude-sonnet-4", "usage": {"completion_tokens": 9},
                                                    "choices": [{"finish_reason": "stop"}]}}}
                 if message["role"] == "assistant" else message for message in MINI_V0],
    "trajectory_format": "mini-swe-agent-1",
}  # fmt: skip
MINI_V2 = {
    "info": {"mini_version": "2.2.8", "exit_status": "Submitted", "submission": "diff",
             "config": {"model": {"model_name": "openai/gpt-5.5"}, "agent_type": "x"}},
    "trajectory_format": "mini-swe-agent-1.1",
    "messages": [
        {"role": "system", "content": "system"}, {"role": "user", "content": "task"},
        {"role": "assistant", "content": "look", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
            {"id": "t2", "type": "function", "function": {"name": "bash", "arguments": "{broken"}}],
         "extra": {"actions": [{"command": "ls", "tool_call_id": "t1"}], "timestamp": 1_770_000_000.5}},
        {"role": "tool", "tool_call_id": "t1", "content": "app.py", "extra": {"returncode": 0}},
        {"role": "tool", "tool_call_id": "t2", "content": "bad", "extra": {"exception_info": "JSONDecodeError"}},
        {"object": "response", "model": "gpt-5.5-2026", "created_at": 1_770_000_009, "usage": {"output_tokens": 40},
         "output": [{"type": "reasoning", "summary": []},
                    {"type": "message", "content": [{"type": "output_text", "text": "done"}]},
                    {"type": "function_call", "call_id": "t3", "name": "bash",
                     "arguments": '{"command": "cat <<\'EOF\' > app.py\\ndef f():\\n    return 2\\nEOF"}'}]},
        {"type": "function_call_output", "call_id": "t3", "output": ""},
        {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}},
    ],
}  # fmt: skip

FILES = {
    "projects/-home-dana-shop/6f1c2b9e-0000-4000-8000-000000000001.jsonl": CLAUDE,
    "projects/-home-dana-shop/agent-77.jsonl": lines(
        _claude("user", "q1", None, "count the files", 14, isSidechain=True, agentId="77"),
        _claude("assistant", "q2", "q1", [{"type": "text", "text": "12"}], 15, id="msg_6", isSidechain=True),
    ),
    "projects/old/old.jsonl": CLAUDE_OLD,
    "sessions/2025/10/29/rollout-2025-10-29T00-59-00-019a2d7a.jsonl": CODEX,
    "sessions/2025/06/28/rollout-2025-06-28-f3a1.jsonl": CODEX_BARE,
    "sessions/rollout-2025-04-20-zz.json": CODEX_FIRST,
    "export.json": json.dumps(OPENCODE),
    "v0.traj.json": json.dumps(MINI_V0),
    "v1.traj.json": json.dumps(MINI_V1),
    "v2.traj.json": json.dumps(MINI_V2),
}  # fmt: skip
FORMAT_OF = {name: "claude-code" if "projects" in name else "codex" if "rollout" in name
             else "opencode" if name == "export.json" else "mini-swe-agent" for name in FILES}  # fmt: skip

"""Anthropic's own client against the server: texts, calls, streams, counts, and the exact ids behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest

from etude.types import Opened
from serve.speaking import Site, calls, check_exact, decoded, says, serving, windows_of

SHELL: Any = {
    "name": "shell",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
ASK: Any = {
    "model": "qwen",
    "max_tokens": 500,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "What is here?"}],
    "tools": [SHELL],
}


def talk(script: Any, body: Callable[[anthropic.AsyncAnthropic, Site], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with (
            serving(script, **settings) as site,
            anthropic.AsyncAnthropic(base_url=site.url, api_key="none", max_retries=0) as client,
        ):
            await body(client, site)

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_with_calls_is_one_window_of_exact_ids(streamed: bool) -> None:
    script = [calls("shell", "I look.", command="ls"), says("There is a.py."), says("Bye.")]

    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        history = list(ASK["messages"])
        for _ in range(3):
            asked = {**ASK, "messages": history}
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    text = "".join([part async for part in stream.text_stream])
                    got = await stream.get_final_message()
                assert text == "".join(block.text for block in got.content if block.type == "text")
            else:
                got = await client.messages.create(**asked)
            history.append({"role": "assistant", "content": [block.model_dump() for block in got.content]})
            uses = [block for block in got.content if block.type == "tool_use"]
            for use in uses:
                assert use.input == {"command": "ls"}
                answer = [{"type": "text", "text": "a.py"}]
                result = {"type": "tool_result", "tool_use_id": use.id, "content": answer}
                history.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
            assert got.stop_reason == ("tool_use" if uses else "end_turn")
            if not uses:
                history.append({"role": "user", "content": "And now?"})
        check_exact(site.recorder.turns, site.engine, site.engine.answers)
        (window,) = windows_of(site.recorder.turns).values()
        assert decoded(window.ids).endswith("Bye.<|im_end|>")
        assert [turn.opened for turn in site.recorder.turns] == [Opened.TASK, None, None]
        assert [m.role for m in site.recorder.turns[1].messages] == ["tool", "user"]
        assert {turn.source for turn in site.recorder.turns} == {"anthropic"}
        assert got.usage.output_tokens == len(script[-1])

    talk(script, body)


def test_the_stream_has_every_event_in_order() -> None:
    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        stream = await client.messages.create(**ASK, stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start"
        deltas = [kind for kind in kinds if kind != "content_block_delta"]
        assert deltas == ["message_start", "content_block_start", "content_block_stop", "content_block_start",
                          "content_block_stop", "message_delta", "message_stop"]  # fmt: skip

    talk([calls("shell", "I look, and I look again.", command="ls")], body)


def test_tokens_are_counted_as_the_engine_will_see_them() -> None:
    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        counted = await client.messages.count_tokens(**{k: v for k, v in ASK.items() if k != "max_tokens"})
        await client.messages.create(**ASK)
        assert counted.input_tokens == len(site.engine.requests[0].ids)

    talk([says("ok")], body)


def test_a_stop_sequence_is_named() -> None:
    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        got = await client.messages.create(**ASK, stop_sequences=["six", "four"])
        assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "four")
        assert [block.text for block in got.content if block.type == "text"] == ["one two three "]

    talk([says("one two three four five six")], body)


def test_a_session_is_named_by_metadata_as_coding_agents_do() -> None:
    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        spelled = '{"device_id": "d", "session_id": "abc"}'
        for user in ("user_1_account__session_abc", spelled, "abc"):
            await client.messages.create(**ASK, metadata={"user_id": user})
        assert len({turn.session_id for turn in site.recorder.turns}) == 1

    talk([says("ok")], body)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "not served"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "image"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, 400, "other"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(change: Any, status: int, words: str) -> None:
    async def body(client: anthropic.AsyncAnthropic, site: Site) -> None:
        with pytest.raises(anthropic.APIStatusError, match=words) as found:
            await client.messages.create(**{**ASK, **change})
        assert found.value.status_code == status
        assert isinstance(found.value.body, dict)
        assert found.value.body["type"] == "error"

    talk([says("ok")], body)

"""OpenAI's own client against the server: texts, calls, streams, log-probs, and the exact ids behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from etude.types import Opened, StopReason
from serve.speaking import Site, calls, check_exact, decoded, says, serving, spelled, windows_of

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
ASK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is here?"}]


def talk(script: Any, body: Callable[[openai.AsyncOpenAI, Site], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with (
            serving(script, **settings) as site,
            openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
        ):
            await body(client, site)

    asyncio.run(run())


def test_a_conversation_with_calls_is_one_window_of_exact_ids() -> None:
    script = [calls("shell", "I look.", command="ls"), says("There is a.py."), says("Bye.")]

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        history = list(ASK)
        for answer in ("a.py\n", None, None):
            got = await client.chat.completions.create(model="qwen", messages=history, tools=[SHELL])
            message = got.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"command": "ls"}
                history.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            if not message.tool_calls:
                history.append({"role": "user", "content": "And now?"})
        assert got.choices[0].finish_reason == "stop"
        assert got.usage is not None
        check_exact(site.recorder.turns, site.engine, site.engine.answers)
        (window,) = windows_of(site.recorder.turns).values()
        text = decoded(window.ids)
        assert text.count("<|im_start|>assistant") == 3
        assert "<tool_response>\na.py\n\n</tool_response>" in text
        assert text.endswith("Bye.<|im_end|>")
        assert [turn.opened for turn in site.recorder.turns] == [Opened.TASK, None, None]
        assert [turn.number for turn in site.recorder.turns] == [0, 1, 2]
        assert len({request.context_id for request in site.engine.requests}) == 1
        assert [message.role for message in site.recorder.turns[1].messages] == ["tool"]
        assert [message.role for message in site.recorder.turns[2].messages] == ["user"]

    talk(script, body)


def test_a_stream_says_the_same_as_a_whole_answer() -> None:
    text = "Naïve 😀 text with <marks> and { braces }.\n\nEnd"
    script = [spelled(text)] * 2

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        whole = await client.chat.completions.create(model="qwen", messages=ASK, logprobs=True)
        stream = await client.chat.completions.create(
            model="qwen", messages=ASK, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content == text
        assert len([part for part in parts if part]) > 3
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].choices[0].finish_reason == "stop"
        logprobs = [row for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
                    for row in chunk.choices[0].logprobs.content or ()]  # fmt: skip
        assert logprobs == whole.choices[0].logprobs.content
        assert len(logprobs) == len(script[0])

    talk(script, body)


def test_calls_come_out_of_a_stream() -> None:
    script = [calls("shell", "I look.", command="cat 'ü.py'")]

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        stream = await client.chat.completions.create(model="qwen", messages=ASK, tools=[SHELL], stream=True)
        chunks = [chunk async for chunk in stream]
        found = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert found[0].function.name == "shell"
        assert json.loads("".join(part.function.arguments for part in found)) == {"command": "cat 'ü.py'"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."

    talk(script, body)


def test_a_call_that_cannot_be_read_is_said_as_text() -> None:
    broken = 'So <tool_call>\n{"name": "shell", "arguments": {"command": }}\n</tool_call>'

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        got = await client.chat.completions.create(model="qwen", messages=ASK, tools=[SHELL])
        message = got.choices[0].message
        assert message.tool_calls is None
        assert message.content == broken
        history = [*ASK, message.model_dump(exclude_none=True), {"role": "user", "content": "That was no call."}]
        await client.chat.completions.create(model="qwen", messages=history, tools=[SHELL])
        assert site.recorder.turns[1].opened is None
        check_exact(site.recorder.turns, site.engine, site.engine.answers)

    talk([spelled(broken), says("ok")], body)


def test_what_the_client_wrote_itself_opens_a_new_context() -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        for said in ("It is a.py.", "It is b.py."):
            history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
            first = await client.chat.completions.create(model="qwen", messages=ASK)
            assert first.choices[0].message.content == "It is a.py."
            await client.chat.completions.create(model="qwen", messages=history)
        assert [turn.opened for turn in site.recorder.turns] == [
            Opened.TASK, None, Opened.TASK, Opened.CLIENT_REWRITE,
        ]  # fmt: skip
        check_exact(site.recorder.turns, site.engine, site.engine.answers)

    talk([says("It is a.py.")], body)


def test_two_spellings_of_one_history_go_on_in_one_window() -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        got = await client.chat.completions.create(model="qwen", messages=ASK, tools=[SHELL])
        (call,) = got.choices[0].message.tool_calls or ()
        spelled_anew = {"name": "shell", "arguments": '{ "n":1.0,\n"command" :"l\\u0073" }'}
        history = [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            ASK[1],
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": call.id, "type": "function", "function": spelled_anew}]},
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "a"}]},
        ]  # fmt: skip
        await client.chat.completions.create(model="qwen", messages=history, tools=[SHELL])  # type: ignore[arg-type]
        assert site.recorder.turns[1].opened is None
        check_exact(site.recorder.turns, site.engine, site.engine.answers)

    talk([calls("shell", command="ls", n=1), says("ok")], body)


@pytest.mark.parametrize("length", [1, 9000])  # long texts are encoded in a thread
def test_an_earlier_reply_and_a_window_that_is_busy_are_forked_with_the_same_ids(length: int) -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        first = await client.chat.completions.create(model="qwen", messages=ASK)
        history = [*ASK, {"role": "assistant", "content": first.choices[0].message.content}]
        async with asyncio.TaskGroup() as group:
            for words in ("one", "two"):
                asked = [*history, {"role": "user", "content": words * length}]
                group.create_task(client.chat.completions.create(model="qwen", messages=asked))
        asked = [*history, {"role": "user", "content": "three"}]
        await client.chat.completions.create(model="qwen", messages=asked)
        opened = [turn.opened for turn in site.recorder.turns]
        assert sorted(map(str, opened)) == sorted(["task", "None", "fork", "fork"])
        assert len({turn.session_id for turn in site.recorder.turns}) == 1
        sampled = sum(int(turn.tokens.sampled.sum()) for turn in site.recorder.turns if turn.tokens)
        assert sampled == 4 * len(says("ok"))  # every token counts as sampled once

    talk([says("ok")], body)


def test_a_session_can_be_named_and_its_id_used() -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        create = client.chat.completions.with_raw_response.create
        first = await create(model="qwen", messages=ASK, extra_headers={"x-etude-session": "mine"})
        other = await create(model="qwen", messages=[{"role": "user", "content": "else"}], user="mine")
        session = first.headers["x-etude-session"]
        again = await create(model="qwen", messages=ASK, extra_headers={"x-etude-session": session})
        assert session == other.headers["x-etude-session"] == again.headers["x-etude-session"]
        assert first.headers["x-etude-turn"] == site.recorder.turns[0].turn_id
        assert (await create(model="qwen", messages=ASK)).headers["x-etude-session"] != session
        assert [turn.context for turn in site.recorder.turns] == [0, 1, 2, 0]

    talk([says("ok")], body)


def test_a_reply_is_cut_by_its_limit_and_by_a_stop_text() -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        cut = await client.chat.completions.create(model="qwen", messages=ASK, max_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        assert site.recorder.turns[0].reply.stop is StopReason.LENGTH
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 2
        for stream in (False, True):
            got: Any = await client.chat.completions.create(model="qwen", messages=ASK, stop=["four"], stream=stream)
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in got])
            else:
                text = got.choices[0].message.content
            assert text == "one two three "
        history = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        await client.chat.completions.create(model="qwen", messages=history)
        turns = site.recorder.turns
        assert [turn.opened for turn in turns] == [Opened.TASK, Opened.TASK, Opened.TASK, None]
        windows = windows_of(turns)
        assert len(windows) == 3
        assert "<|im_start|>assistant\none two three four" in decoded(windows[turns[3].session_id, 0].ids)

    talk([says("one two three four five six")], body)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "not served"),
        ({"n": 2}, 400, "n must be 1"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "image"),
        ({"tool_choice": "required"}, 400, "no tool"),
        ({"response_format": {"type": "json_object"}}, 400, "json_object"),
        ({"temperature": 3}, 400, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], status: int, words: str) -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        with pytest.raises(openai.APIStatusError, match=words) as found:
            await client.chat.completions.create(**{"model": "qwen", "messages": ASK, **change})
        assert found.value.status_code == status
        assert site.engine.requests == []

    talk([says("ok")], body)


def test_options_that_the_engine_lacks_are_named_or_refused() -> None:
    async def named(client: openai.AsyncOpenAI, site: Site) -> None:
        got = await client.chat.completions.with_raw_response.create(model="qwen", messages=ASK, top_p=0.5)
        assert got.headers["x-etude-ignored"] == "top_p"

    async def refused(client: openai.AsyncOpenAI, site: Site) -> None:
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.chat.completions.create(model="qwen", messages=ASK, top_p=0.5)

    talk([says("ok")], named)
    talk([says("ok")], refused, strict=True)


def test_a_forced_call_begins_in_the_prompt() -> None:
    rest = spelled('ls"}}\n</tool_call>')

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        def reply(request: Any) -> list[int]:
            prompt = decoded(request.ids)
            assert prompt.rpartition("<|im_start|>assistant\n")[2].startswith('<tool_call>\n{"name": "shell"')
            return spelled(("" if prompt.endswith('{"') else '{"') + 'command": "ls"}}\n</tool_call>')

        site.engine._script = reply
        for choice in ("required", {"type": "function", "function": {"name": "shell"}}):
            got = await client.chat.completions.create(
                model="qwen",
                messages=ASK,
                tools=[SHELL],
                tool_choice=choice,  # type: ignore[arg-type]
            )
            (call,) = got.choices[0].message.tool_calls or ()
            assert json.loads(call.function.arguments) == {"command": "ls"}
        check_exact(site.recorder.turns, site.engine, site.engine.answers)

    talk([rest], body)


def test_models_are_listed() -> None:
    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        assert [model.id async for model in client.models.list()] == ["qwen"]
        assert (await client.models.retrieve("qwen")).id == "qwen"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    talk([says("ok")], body)

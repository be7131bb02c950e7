"""OpenAI's responses with its own client, as a coding agent uses them: items back and forth, exact ids behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from etude.types import Opened, ToolCall
from serve.speaking import Site, calls, check_exact, says, serving, spelled, windows_of

SHELL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Apply a patch."}
HOSTED: Any = {"type": "web_search"}


@pytest.mark.parametrize("streamed", [False, True])
def test_items_go_back_and_forth_in_one_window(streamed: bool) -> None:
    patch = ToolCall(name="apply_patch", arguments={"input": "*** Begin\n+é"})
    two = spelled("Both.", ToolCall(name="shell", arguments={"command": ["ls"]}), patch)
    script = [calls("shell", command=["pwd"]), two, says("Done.")]

    async def body(client: openai.AsyncOpenAI, site: Site) -> None:
        items: list[Any] = [{"role": "user", "content": "go"}]
        for number in range(3):
            asked: Any = {"model": "qwen", "instructions": "Be brief.", "input": items, "store": False,
                          "tools": [SHELL, PATCH, HOSTED], "prompt_cache_key": "abc"}  # fmt: skip
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    kinds = [event.type async for event in stream]
                    got = await stream.get_final_response()
                assert kinds[0] == "response.created"
                assert kinds[-1] == "response.completed"
            else:
                got = await client.responses.create(**asked)
            for item in got.output:
                items.append(item.model_dump(exclude_none=True))
            answers = [item for item in got.output if item.type.endswith("call")]
            for item in reversed(answers):
                kind = f"{item.type}_output"
                items.append({"type": kind, "call_id": item.call_id, "output": f"of {item.name}"})  # type: ignore[union-attr]
            if number == 1:
                assert [item.type for item in got.output] == ["message", "function_call", "custom_tool_call"]
                assert json.loads(got.output[1].arguments) == {"command": ["ls"]}  # type: ignore[union-attr]
                assert got.output[2].input == "*** Begin\n+é"  # type: ignore[union-attr]
        assert got.output_text == "Done."
        assert got.usage is not None
        assert got.usage.output_tokens == len(script[-1])
        check_exact(site.recorder.turns, site.engine, site.engine.answers)
        assert len(windows_of(site.recorder.turns)) == 1
        assert [turn.opened for turn in site.recorder.turns] == [Opened.TASK, None, None]
        results = site.recorder.turns[2].messages[0].results
        assert [result.text for result in results] == ["of shell", "of apply_patch"]

    async def run() -> None:
        async with (
            serving(script) as site,
            openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
        ):
            await body(client, site)

    asyncio.run(run())


def test_what_is_not_kept_for_clients_is_refused() -> None:
    async def run() -> None:
        async with (
            serving([says("ok")]) as site,
            openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client,
        ):
            with pytest.raises(openai.BadRequestError, match="whole history"):
                await client.responses.create(model="qwen", input="hi", previous_response_id="resp_1")
            got = await client.responses.with_raw_response.create(model="qwen", input="hi", tools=[HOSTED])
            assert got.headers["x-etude-ignored"] == "tool web_search"

    asyncio.run(run())

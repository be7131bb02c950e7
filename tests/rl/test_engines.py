import asyncio

import numpy as np
import pytest

from agent.scripted_engine import V1, ScriptedEngine
from etude.errors import VersionError
from etude.protocols import GenerateRequest
from etude.rl.engines import EngineSet
from etude.types import Version

V2 = Version(incarnation=1, n=2, step=2)


def a_set(*versions: Version) -> tuple[EngineSet, list[ScriptedEngine]]:
    engines = [ScriptedEngine(lambda request: [7], version=version) for version in versions]
    return EngineSet(engines), engines  # type: ignore[arg-type]


def ask(name: str, *ids: int, keep: bool = True) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, context_id=name, ids=np.array(ids, np.int32), max_new_tokens=4, stop_ids=(), keep_context=keep
    )


async def answer(engines: EngineSet, request: GenerateRequest) -> None:
    async for _ in engines.generate(request):
        pass


def test_equal_prompts_meet_and_a_context_stays_where_it_began() -> None:
    async def run() -> list[ScriptedEngine]:
        engines, parts = a_set(V1, V1)
        for prompt in range(16):
            for sibling in range(4):
                name = f"{prompt}-{sibling}"
                await answer(engines, ask(name, prompt, 5))
                await answer(engines, ask(name, prompt, 5, 7, sibling))
        return parts

    parts = asyncio.run(run())
    seen = [{request.context_id for request in part.requests} for part in parts]
    assert seen[0].isdisjoint(seen[1])
    prompts = [{name.partition("-")[0] for name in names} for names in seen]
    assert prompts[0].isdisjoint(prompts[1])
    assert min(map(len, prompts)) >= 4, "one engine has all the work"


def test_forgetting_goes_to_the_engine_that_knows_the_context() -> None:
    async def run() -> list[list[str]]:
        engines, parts = a_set(V1, V1)
        for name in "abcd":
            await answer(engines, ask(name, ord(name)))
            await engines.forget(name)
        await answer(engines, ask("once", 1, keep=False))
        for name in ("once", "never seen"):
            await engines.forget(name)
        asked = [[request.context_id for request in part.requests if request.keep_context] for part in parts]
        assert [part.forgotten for part in parts] == asked
        return asked

    assert sorted(name for names in asyncio.run(run()) for name in names) == list("abcd")


def test_what_it_names_and_scores_by_is_the_oldest_version() -> None:
    async def run() -> None:
        engines, parts = a_set(V2, V1)
        assert (await engines.stats()).version == V1
        parts[0].score = None  # type: ignore[assignment]
        await engines.score(np.array([1, 2], np.int32))
        parts[0].version = None  # type: ignore[assignment]
        assert (await engines.stats()).version is None

    asyncio.run(run())


def test_an_engine_that_does_not_serve_the_version_says_so() -> None:
    async def run() -> None:
        engines, _ = a_set(V1)
        request = GenerateRequest(
            request_id="r", context_id="c", ids=np.array([1], np.int32), max_new_tokens=1, stop_ids=(), exact=V2
        )
        with pytest.raises(VersionError):
            await answer(engines, request)

    asyncio.run(run())

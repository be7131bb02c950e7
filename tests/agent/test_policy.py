from collections.abc import Sequence

import numpy as np
import pytest

from agent.scenes import FIX, READ, clamp_task, in_loop, real_pool
from agent.scripted_engine import V1, ScriptedEngine
from agent.text_renderer import END, TextRenderer, ids, spoken
from etude.agent.loop import run_episode
from etude.agent.policy import EnginePolicy, ScriptedPolicy, TokenLimits, say, turn_seed
from etude.agent.recipe import AgentRecipe
from etude.errors import EngineError, OverloadedError, VersionError
from etude.protocols import Message, Policy, Reply
from etude.types import Opened, Outcome, Span, StopReason, ToolResult, Version

WIDE = TokenLimits(context_tokens=4000, reply_tokens=1000)
OPEN = [Message(role="user", text="hi")]
PROMPT = "[user]hi[assistant]"


def policy(engine: ScriptedEngine, limits: TokenLimits = WIDE, **settings: object) -> EnginePolicy:
    return EnginePolicy(engine, TextRenderer(), episode_id="e", limits=limits, **settings)  # type: ignore[arg-type]


def grown(reply: Reply, *texts: str) -> list[Message]:
    """What the loop adds after a reply."""
    results = tuple(ToolResult(text=text) for text in texts)
    return [
        Message(role="assistant", text=reply.text, calls=reply.calls),
        Message(role="tool", results=results),
    ]


def two_turns(engine: ScriptedEngine, the_policy: EnginePolicy) -> tuple[Reply, Reply]:
    async def run() -> tuple[Reply, Reply]:
        first = await the_policy.reply(OPEN)
        second = await the_policy.reply([*OPEN, *grown(first, "seen")])
        return first, second

    return in_loop(run())


def test_both_are_policies() -> None:
    assert isinstance(policy(ScriptedEngine([])), Policy)
    assert isinstance(ScriptedPolicy([]), Policy)


def test_a_later_turns_ids_extend_the_earlier_ones_exactly() -> None:
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    first, second = two_turns(engine, policy(engine))
    whole_first = ids(PROMPT) + spoken("look", READ)
    assert list(engine.requests[0].ids) == ids(PROMPT)
    assert list(engine.requests[1].ids) == whole_first + ids("[tool]seen[assistant]")
    assert first.span == Span(context=0, start=len(PROMPT), end=len(whole_first))
    assert (second.text, second.calls, second.stop) == ("bye", (), StopReason.END)


def test_the_context_is_what_was_seen_and_sampled() -> None:
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    the_policy = policy(engine)
    _, second = two_turns(engine, the_policy)
    (context,) = the_policy.contexts()
    assert context.opened is Opened.TASK
    assert list(context.ids) == list(engine.requests[1].ids) + spoken("bye")
    reply_length = len(spoken("look", READ))
    expected = np.zeros(len(context.ids), bool)
    expected[len(PROMPT) : len(PROMPT) + reply_length] = True
    assert second.span is not None
    expected[second.span.start :] = True
    assert (context.sampled == expected).all()
    assert (context.logprobs == np.where(expected, np.float32(-0.5), np.float32(0))).all()
    assert [(run.start, run.version) for run in context.versions] == [(len(PROMPT), V1)]
    assert context.routes is not None
    assert len(context.routes.experts) == len(context.ids) - 1
    assert context.routes.valid.all()


def test_effort_is_counted_by_kind_and_adds_up_to_the_window() -> None:
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    first, second = two_turns(engine, policy(engine))
    assert first.effort.thinking_tokens == len("look")
    assert first.effort.call_tokens == len(spoken("look", READ)) - len("look")
    assert (first.effort.output_tokens, first.effort.calls, first.effort.turns) == (0, 1, 1)
    assert second.effort.message_tokens == len(spoken("bye"))
    assert second.effort.output_tokens == len("[tool]seen[assistant]")
    both = first.effort + second.effort
    total = both.thinking_tokens + both.call_tokens + both.message_tokens + both.output_tokens
    assert total == len(engine.requests[1].ids) + len(spoken("bye")) - len(PROMPT)


def test_requests_carry_the_context_the_seed_of_the_turn_and_the_versions_asked_for() -> None:
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    two_turns(engine, policy(engine, seed=7, min_step=1, exact=V1, temperature=0.5))
    first, second = engine.requests
    assert first.context_id == second.context_id == "e"
    assert first.request_id != second.request_id
    assert (first.seed, second.seed) == (turn_seed(7, 0), turn_seed(7, 1))
    assert first.seed != second.seed
    assert (first.min_step, first.exact, first.temperature, first.stop_ids) == (1, V1, 0.5, (END,))


def test_a_reply_is_cut_at_the_nearest_limit() -> None:
    long = ids("a" * 500)
    assert _room(TokenLimits(context_tokens=100, reply_tokens=1000), long) == 100 - len(PROMPT)
    assert _room(TokenLimits(context_tokens=4000, reply_tokens=40), long) == 40
    assert _room(TokenLimits(context_tokens=4000, reply_tokens=1000, sampled_tokens=30), long) == 30


def _room(limits: TokenLimits, reply: list[int]) -> int:
    engine = ScriptedEngine([reply])
    answer = in_loop(policy(engine, limits).reply(OPEN))
    assert answer.stop is StopReason.LENGTH
    assert answer.span is not None
    return answer.span.end - answer.span.start


def test_results_that_leave_no_room_are_not_in_the_window() -> None:
    engine = ScriptedEngine([spoken("look", READ)])
    the_policy = policy(engine, TokenLimits(context_tokens=len(PROMPT) + 70, reply_tokens=1000))

    async def run() -> Reply:
        first = await the_policy.reply(OPEN)
        return await the_policy.reply([*OPEN, *grown(first, "x" * 100)])

    second = in_loop(run())
    assert (second.stop, second.effort.turns, second.span) == (StopReason.CONTEXT, 0, None)
    assert list(the_policy.contexts()[0].ids) == ids(PROMPT) + spoken("look", READ)
    assert len(engine.requests) == 1


def test_a_budget_of_sampled_tokens_holds_over_all_turns() -> None:
    engine = ScriptedEngine(lambda request: spoken("go on", READ))
    per_turn = len(spoken("go on", READ))
    the_policy = policy(engine, TokenLimits(context_tokens=4000, reply_tokens=1000, sampled_tokens=2 * per_turn + 5))

    async def run() -> list[StopReason]:
        conversation, stops = list(OPEN), []
        for _ in range(4):
            reply = await the_policy.reply(conversation)
            stops.append(reply.stop)
            conversation += grown(reply, "seen")
        return stops

    assert in_loop(run()) == [StopReason.END, StopReason.END, StopReason.LENGTH, StopReason.CONTEXT]
    assert the_policy.contexts()[0].sampled.sum() == 2 * per_turn + 5


def test_a_prompt_that_fills_the_window_is_kept_without_a_reply() -> None:
    engine = ScriptedEngine([])
    the_policy = policy(engine, TokenLimits(context_tokens=5, reply_tokens=10))
    assert in_loop(the_policy.reply(OPEN)).effort.turns == 0
    (context,) = the_policy.contexts()
    assert list(context.ids) == ids(PROMPT)
    assert not context.sampled.any()


def test_a_swap_between_turns_shows_in_the_versions() -> None:
    v2 = Version(incarnation=1, n=2, step=2)
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    the_policy = policy(engine)

    async def run() -> Reply:
        first = await the_policy.reply(OPEN)
        engine.version = v2
        return await the_policy.reply([*OPEN, *grown(first, "seen")])

    second = in_loop(run())
    assert second.span is not None
    runs = the_policy.contexts()[0].versions
    assert [(run.start, run.version) for run in runs] == [(len(PROMPT), V1), (second.span.start, v2)]


def test_an_exact_version_that_does_not_serve_is_refused() -> None:
    engine = ScriptedEngine([spoken("x")])
    with pytest.raises(VersionError):
        in_loop(policy(engine, exact=Version(incarnation=9, n=9, step=9)).reply(OPEN))


def test_an_overloaded_engine_is_asked_again() -> None:
    class Busy(ScriptedEngine):
        tries = 0

        async def generate(self, request):  # type: ignore[no-untyped-def]
            self.tries += 1
            if self.tries < 3:
                raise OverloadedError("full")
            async for chunk in super().generate(request):
                yield chunk

    engine = Busy([spoken("bye")])
    assert in_loop(policy(engine).reply(OPEN)).text == "bye"
    assert engine.tries == 3


def test_a_stream_that_ends_without_a_reason_is_an_engine_error() -> None:
    class Cut(ScriptedEngine):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            async for chunk in super().generate(request):
                if chunk.stop is None:
                    yield chunk

    with pytest.raises(EngineError, match="without a reason"):
        in_loop(policy(Cut([spoken("bye")])).reply(OPEN))


def test_closing_frees_the_context_even_if_the_engine_is_gone() -> None:
    class Gone(ScriptedEngine):
        async def forget(self, context_id: str) -> None:
            await super().forget(context_id)
            raise EngineError("gone")

    async def run(engine: ScriptedEngine) -> list[str]:
        the_policy = policy(engine)
        await the_policy.reply(OPEN)
        await the_policy.close()
        return engine.forgotten

    assert in_loop(run(ScriptedEngine([spoken("x")]))) == ["e"]
    assert in_loop(run(Gone([spoken("x")]))) == ["e"]


def test_a_conversation_that_was_rewritten_is_refused() -> None:
    engine = ScriptedEngine([spoken("look", READ), spoken("bye")])
    the_policy = policy(engine)

    async def run() -> None:
        await the_policy.reply(OPEN)
        await the_policy.reply([*OPEN, Message(role="user", text="more")])

    with pytest.raises(ValueError, match="goes on with the reply and its results"):
        in_loop(run())


def test_a_whole_episode_over_an_engine_keeps_ids_and_spans_together() -> None:
    engine = ScriptedEngine([spoken("fix", FIX), spoken("", FIX), spoken("done")])

    async def run() -> None:
        task = clamp_task()
        pool = real_pool()
        sandbox = await pool.acquire(task.workspace)
        episode = await run_episode(task, sandbox, policy(engine), AgentRecipe(), episode_id="e")
        await sandbox.close()
        assert episode.outcome is Outcome.STOPPED
        (context,) = episode.contexts
        for turn in episode.turns:
            assert turn.span is not None
            assert context.sampled[turn.span.start : turn.span.end].all()
        assert context.sampled.sum() == sum(turn.span.end - turn.span.start for turn in episode.turns if turn.span)
        assert episode.effort.turns == 3

    in_loop(run())


def test_a_script_goes_on_with_silence() -> None:
    async def run() -> list[str]:
        scripted = ScriptedPolicy([say("one")])
        return [(await scripted.reply(OPEN)).text for _ in range(2)]

    assert in_loop(run()) == ["one", ""]


class Forgetful(TextRenderer):
    """A format that cannot go on after a reply that speaks of `again`."""

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray | None:
        return None if "again" in reply.text else super().follow(window, start, reply, new)


def test_where_a_format_cannot_go_on_a_new_context_opens_and_says_why() -> None:
    engine = ScriptedEngine([spoken("look again", READ), spoken("and look", READ), spoken("bye")])
    the_policy = EnginePolicy(engine, Forgetful(), episode_id="e", limits=WIDE)

    async def run() -> list[Reply]:
        conversation, replies = list(OPEN), []
        for _ in range(3):
            replies.append(await the_policy.reply(conversation))
            conversation += grown(replies[-1], "seen")
        await the_policy.close()
        return replies

    first, second, third = in_loop(run())
    assert [request.context_id for request in engine.requests] == ["e", "e#1", "e#1"]
    opened = ids("[user]hi[assistant]look again[tool][assistant]")
    assert list(engine.requests[1].ids) == opened
    assert [context.opened for context in the_policy.contexts()] == [Opened.TASK, Opened.RERENDER]
    assert [len(context.ids) for context in the_policy.contexts()] == [
        len(ids(PROMPT) + spoken("look again", READ)), len(engine.requests[2].ids) + len(spoken("bye")),
    ]  # fmt: skip
    assert [reply.span.context for reply in (first, second, third) if reply.span] == [0, 1, 1]
    assert engine.forgotten == ["e", "e#1"]

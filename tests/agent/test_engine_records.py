"""The policy over the real engine: what the two of them record of a whole episode is what really happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent.scenes import READ, clamp_task, in_loop, real_pool
from engine_driver import manifest, serving, teacher_forced, version
from etude.agent.loop import run_episode
from etude.agent.policy import EnginePolicy, TokenLimits
from etude.agent.recipe import AgentRecipe
from etude.data.render import Parsed
from etude.protocols import Message, Reply
from etude.types import Episode, KVEpoch, Outcome, Run
from tiny import random_ids, tiny_model

MOE = "qwen3_moe"
VOCAB = 97


class AnyReplyReads:
    """A chat format in which whatever a random model says is a call of read_file."""

    stop_ids: tuple[int, ...] = tuple(range(30))

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        return random_ids(20, vocab=VOCAB).numpy()

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray:
        return random_ids(5, vocab=VOCAB, seed=1).numpy()

    def parse(self, tokens: Sequence[int] | np.ndarray) -> Parsed:
        return Parsed(text="", calls=(READ,), thinking_tokens=0, call_tokens=len(tokens), message_tokens=0)


class SwapsAfterTheFirstReply(EnginePolicy):
    async def reply(self, conversation: Sequence[Message]) -> Reply:
        if len(conversation) > 1:
            await self._engine.load(manifest(1))
        return await super().reply(conversation)


async def play(policy_kind: type[EnginePolicy]) -> Episode:
    async def fetch(_: object) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in tiny_model(MOE, seed=1).hub_tensors().items()}

    async with serving(tiny_model(MOE), fetch=fetch) as engine:
        limits = TokenLimits(context_tokens=120, reply_tokens=100)
        policy = policy_kind(engine, AnyReplyReads(), episode_id="e", limits=limits, seed=3)
        task = clamp_task()
        sandbox = await real_pool().acquire(task.workspace)
        try:
            return await run_episode(task, sandbox, policy, AgentRecipe(max_turns=4), episode_id="e")
        finally:
            await sandbox.close()
            await policy.close()


def test_log_probs_of_a_whole_episode_are_those_of_plain_transformers_on_the_recorded_routes() -> None:
    episode = in_loop(play(EnginePolicy))
    assert (episode.outcome, len(episode.turns)) == (Outcome.TURN_LIMIT, 4)
    (context,) = episode.contexts
    assert context.routes is not None
    assert context.routes.valid.all()
    assert len(context.routes.valid) == len(context.ids) - 1
    plain = teacher_forced(tiny_model(MOE), context.ids, context.routes)
    assert np.abs(plain - context.logprobs)[context.sampled].max() < 1e-4
    assert context.versions == (Run(start=20, version=version(0)),)
    assert context.kv_epochs == (KVEpoch(first=20, runs=(Run(start=0, version=version(0)),)),)


def test_a_swap_between_turns_is_in_every_record() -> None:
    episode = in_loop(play(SwapsAfterTheFirstReply))
    (context,) = episode.contexts
    first, second = episode.turns[0].span, episode.turns[1].span
    assert first is not None
    assert second is not None
    assert context.versions == (Run(start=20, version=version(0)), Run(start=second.start, version=version(1)))
    # the first reply's last token is computed by the request that follows it
    (epoch,) = context.kv_epochs
    assert epoch.runs == (Run(start=0, version=version(0)), Run(start=first.end - 1, version=version(1)))

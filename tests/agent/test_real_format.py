"""SmolLM2-135M, unmodified, in the agent's loop, through its own chat format: it fails, and every failure is data."""

from __future__ import annotations

import collections
import json

import pytest

from agent.scenes import in_loop, real_pool
from etude.agent.loop import run_episode
from etude.agent.policy import EnginePolicy, TokenLimits
from etude.agent.recipe import AgentRecipe
from etude.agent.tool import schema
from etude.agent.tools import TOOLS
from etude.data.formats import open_renderer
from etude.data.template import TemplateRenderer
from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import load_model
from etude.protocols import Message
from etude.tasks.file import load_tasks
from etude.types import Episode, Outcome, ToolErrorKind, Version
from smollm2 import smollm2_folder

NAMES = ("read_file", "edit_file", "list_dir", "shell", "run_tests", "finish")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def test_the_first_turn_is_that_of_the_models_own_template() -> None:
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    renderer, official = open_renderer(folder, []), AutoTokenizer.from_pretrained(folder)
    assert isinstance(renderer, TemplateRenderer)
    for system, text in (
        ("", "Repair clamp."),
        ("Be brief.", "def f(x):\n    return x\n"),
        ("a", "b"),
        ("", "\u00e9\u4e2d \U0001f600"),
    ):
        messages = [Message(role="system", text=system)] * bool(system) + [Message(role="user", text=text)]
        chat = [{"role": message.role, "content": message.text} for message in messages]
        wanted = official.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert renderer.open(messages).tolist() == list(wanted)


def test_every_failure_of_a_model_that_cannot_do_it_is_data() -> None:
    folder = smollm2_folder()
    tasks = load_tasks("etude:repair/heldout")[:6]
    recipe = AgentRecipe(tools=NAMES, max_turns=3, max_calls=6, context_tokens=2048, reply_tokens=200)
    renderer = open_renderer(folder, [schema(TOOLS[name]) for name in NAMES])

    async def play() -> list[Episode]:
        engine = TorchEngine(load_model(str(folder)), EngineRecipe(threads=2, max_concurrent=8))
        await engine.set_version(Version(incarnation=1, n=0, step=0))
        limits, found = TokenLimits(context_tokens=2048, reply_tokens=200), []
        for number, task in enumerate(tasks):
            sandbox = await real_pool().acquire(task.workspace)
            policy = EnginePolicy(engine, renderer, episode_id=str(number), limits=limits, seed=number)
            found.append(await run_episode(task, sandbox, policy, recipe, episode_id=str(number)))
            await policy.close()
            await sandbox.close()
        await engine.close()
        return found

    episodes = in_loop(play())
    errors = collections.Counter(result.error for one in episodes for turn in one.turns for result in turn.results)
    print(json.dumps({"outcomes": [one.outcome for one in episodes], "errors": {str(k): v for k, v in errors.items()}}))
    assert all(one.outcome in set(Outcome) - {Outcome.FAULT} for one in episodes)
    assert ToolErrorKind.UNKNOWN not in errors
    for one in episodes:
        (context,) = one.contexts
        assert sum(turn.effort.thinking_tokens + turn.effort.call_tokens + turn.effort.message_tokens
                   for turn in one.turns) == int(context.sampled.sum())  # fmt: skip

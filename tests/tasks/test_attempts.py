"""What a model tries first: sampled, carried out in a real sandbox, and kept where it failed."""

import asyncio

from agent.scripted_engine import ScriptedEngine
from etude.data.corpus import Edit, edit_call
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.models.recipe import SHIPPED
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.tasks.attempts import Attempt, try_first_edits
from etude.types import ToolCall
from tasks.repair_tasks import FAULTY, RIGHT, entry

RENDERER = NanoRenderer(Tokenizer.load(SHIPPED["etude-nano"]))
FINISH = ToolCall(name="finish", arguments={"message": "Done."})


def reply(*calls: ToolCall) -> list[int]:
    return RENDERER.reply("", calls).tolist()


def tried(*replies: list[int]) -> tuple[Attempt, ...]:
    """What is kept of these replies to one task; also counts the progress."""
    task, done = entry().task, []

    async def run() -> tuple[Attempt, ...]:
        engine = ScriptedEngine(replies)
        async with NamespacePool(SandboxRecipe(spares=1, nice=0)) as pool:
            found = await try_first_edits(
                [task], engine, RENDERER, pool, samples=len(replies), progress=lambda: done.append(1)
            )
        assert sorted(engine.forgotten) == sorted(request.context_id for request in engine.requests)
        assert len({request.seed for request in engine.requests}) == len(replies)
        return found[task.task_id]

    found = asyncio.run(run())
    assert len(done) == len(replies)
    return found


def test_a_failed_edit_is_kept_once_with_what_the_tools_said() -> None:
    wrong = Edit(old="max(x", new="max(9", line=2)
    (attempt,) = tried(reply(edit_call(wrong)), reply(edit_call(wrong), FINISH))
    assert attempt.edit == wrong
    assert attempt.said == "ok"
    assert attempt.text == FAULTY.replace("max(x", "max(9")
    assert attempt.failure == "clamp(7, 0, 5) -> 9, expected 5\n2 of 2 fail"


def test_an_edit_that_does_not_fit_leaves_the_file_as_it_was() -> None:
    (attempt,) = tried(reply(edit_call(Edit(old="mim", new="min", line=2))))
    assert attempt.said == "error: old does not occur in the file"
    assert attempt.text == FAULTY
    assert "fail" in attempt.failure


def test_what_passes_and_what_is_no_edit_is_not_kept() -> None:
    right = edit_call(Edit(old="max(x", new="min(x", line=2))
    broken = reply(right)
    broken.remove(RENDERER.tokenizer.control("<|arg|>"))
    assert RENDERER.parse(broken).calls[0].error
    assert tried(reply(right), reply(FINISH), broken) == ()
    assert FAULTY.replace("max(x", "min(x") == RIGHT

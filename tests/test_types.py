import pickle
import random

import msgspec
import numpy as np
import pytest

from etude import errors, frames, protocols, types
from etude.types import (
    Context,
    Effort,
    Evidence,
    IOCheck,
    IOChecks,
    Manifest,
    Noun,
    Opened,
    Part,
    Routes,
    Run,
    Sample,
    Task,
    ToolCall,
    Version,
    digest_of,
)

NOUNS = [
    kind
    for module in (types, protocols)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Noun) and kind is not Noun
]


def version(step: int) -> Version:
    return Version(incarnation=1, n=step, step=step)


def make_task(**changes: object) -> Task:
    fields = {
        "prompt": "Repair f.",
        "workspace": {"b.py": "B", "a.py": "A"},
        "verifier": IOChecks(path="a.py", checks=(IOCheck(call="f()", expected="1", visible=True),)),
        "category": "repair",
        "source": {"package": "p"},
    }
    return Task.make(**{**fields, **changes})


@pytest.mark.parametrize("kind", NOUNS, ids=lambda kind: kind.__name__)
def test_every_noun_is_frozen_and_keyword_only(kind: type[Noun]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.forbid_unknown_fields
    assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__slots__
    with pytest.raises(TypeError):
        kind(*[None] * len(kind.__struct_fields__))


def test_a_noun_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        version(1).step = 2  # type: ignore[misc]


def test_a_misspelt_field_is_refused_on_the_way_in() -> None:
    data = frames.encode({"incarnation": 1, "n": 1, "step": 1, "setp": 2})
    with pytest.raises(msgspec.ValidationError, match="setp"):
        frames.decode(data, Version)


def test_equal_tasks_have_one_id_however_their_files_are_ordered() -> None:
    assert make_task().task_id == make_task(workspace={"a.py": "A", "b.py": "B"}, source={"package": "q"}).task_id


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "Repair g."},
        {"workspace": {"a.py": "A", "b.py": "C"}},
        {"workspace": {"a.py": "AB", "b.py": ""}},
        {"verifier": IOChecks(path="a.py", checks=(IOCheck(call="f()", expected="2", visible=True),))},
        {"verifier": IOChecks(path="a.py", checks=(IOCheck(call="f()", expected="1", visible=False),))},
    ],
)
def test_what_a_task_asks_is_in_its_id(changes: dict[str, object]) -> None:
    assert make_task(**changes).task_id != make_task().task_id


def test_a_digest_knows_where_its_parts_end() -> None:
    assert len({digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc"), digest_of("abc", "")}) == 4


def test_effort_adds_up_field_by_field() -> None:
    total = Effort(call_tokens=3, turns=1) + Effort(call_tokens=4, thinking_tokens=1, turns=1)
    assert total == Effort(call_tokens=7, thinking_tokens=1, turns=2)


def test_nothing_checked_is_not_solved() -> None:
    evidence = {"task_id": "t", "episode_id": "e", "detail": "", "wall_s": 0.0}
    assert not Evidence(passed=(), **evidence).solved
    assert not Evidence(passed=(True, False), **evidence).solved
    assert Evidence(passed=(True, True), **evidence).solved


def test_the_argument_of_a_call_may_be_any_plain_value() -> None:
    arguments = {"path": "a.py", "line": 3, "flags": [True, None, 1.5], "deep": {"x": ["y"]}}
    call = ToolCall(name="edit_file", arguments=arguments)
    assert frames.decode(frames.encode(call), ToolCall) == call


def test_a_context_survives_the_way_through_a_frame_bit_for_bit() -> None:
    context = Context(
        ids=np.array([5, 9, 7], np.int32),
        sampled=np.array([False, False, True]),
        logprobs=np.array([0, 0, -1.25], np.float32),
        versions=(Run(start=2, version=version(4)),),
        kv_epochs=(),
        routes=Routes(experts=np.arange(8, dtype=np.uint8).reshape(2, 2, 2), valid=np.array([True, False])),
        opened=Opened.TASK,
    )
    back = frames.decode(frames.encode(context), Context)
    assert back.routes is not None
    assert context.routes is not None
    for name in ("ids", "sampled", "logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(context, name), strict=True)
    np.testing.assert_array_equal(back.routes.experts, context.routes.experts, strict=True)
    np.testing.assert_array_equal(back.routes.valid, context.routes.valid, strict=True)
    assert (back.versions, back.opened) == (context.versions, Opened.TASK)


def test_wrong_types_in_a_noun_are_refused_with_the_field_named() -> None:
    manifest = Manifest(version=version(1), parent=None, parts=(), changes=(), digest="d", nonce="n")
    plain = msgspec.msgpack.decode(frames.encode(manifest))
    for field, wrong in {"version": 3, "full": "yes", "parts": [{"name": 1}], "nonce": None}.items():
        with pytest.raises(msgspec.ValidationError, match=field):
            frames.decode(frames.encode({**plain, field: wrong}), Manifest)


def test_random_bytes_are_never_read_as_a_noun() -> None:
    chance = random.Random(0)
    for _ in range(300):
        data = chance.randbytes(chance.randrange(60))
        for kind in (Sample, Part, Task):
            with pytest.raises(ValueError, match=r"."):
                frames.decode(data, kind)


def test_an_error_says_cause_and_hint_and_crosses_processes() -> None:
    error = errors.VersionError("version 3 is not served", cause="the engine is at 2", hint="wait")
    assert str(error) == "version 3 is not served\ncause: the engine is at 2\nhint: wait"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is errors.VersionError
    assert (back.message, back.cause, back.hint) == (error.message, error.cause, error.hint)


def test_every_error_can_be_named_over_a_socket_and_has_an_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EtudeError)]
    assert {kind.__name__: kind for kind in kinds} == errors.BY_NAME
    assert {kind.exit_code for kind in kinds} == {1, 2}
    assert all(kind("m").message == "m" for kind in kinds)

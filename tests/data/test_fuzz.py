"""A few of fuzz.py's outputs; `python tests/data/fuzz.py` makes as many as one likes."""

from __future__ import annotations

import pytest

from data.fuzz import Fuzz, fuzz_some, look
from data.test_formats import EACH
from etude.data.calls import made, read_hermes
from etude.frames import encode


@pytest.mark.parametrize("name", EACH)
def test_no_output_breaks_a_parser_or_the_check_of_arguments(name: str) -> None:
    _, count, calls, failure = fuzz_some((name, 0, 200))
    assert failure is None
    assert (count, calls > 0) == (200, True), "nothing came out whole: the outputs are too far from real ones"


def test_the_search_sees_a_parser_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = Fuzz("template", 0)
    reply = fuzz.real[0]
    assert look(fuzz, reply)[1] is None
    monkeypatch.setattr(type(fuzz.renderer), "parse", lambda self, ids: {}["what"])
    assert look(fuzz, reply) == (0, "KeyError: 'what'")


@pytest.mark.parametrize("arguments", ['"\\ud800"', '{"\\ud800": 1}', '{"a": [' + "9" * 40 + "]}", "[1]", "null", "3"])
def test_arguments_that_no_episode_can_keep_are_an_error(arguments: str) -> None:
    _, (call,) = read_hermes(f'<tool_call>{{"name": "grep", "arguments": {arguments}}}</tool_call>')
    assert call.error is not None
    encode(call)


@pytest.mark.parametrize("name", [{"a": 1}, None, 5, "\ud800"])
def test_a_name_that_is_no_text_is_an_error(name: object) -> None:
    call = made(name, {})
    assert (call.name, call.error is None) == ("", False)

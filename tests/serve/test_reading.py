"""What may be said of a reply while it grows: in any pieces the same text, and never a call's beginning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_formats import CALL, EACH, renderer_of
from data.test_formats import spelled as spelled_in
from etude.data.render import Renderer
from etude.serve.reading import ReplyReader
from serve.speaking import QwenChat, spelled

TEXTS = st.text(st.sampled_from(" \n<>{}[]abtool_call/\"'\u00e9\U0001f600\u4e2d"), max_size=40)


def said(renderer: Renderer, ids: list[int], cuts: list[int], **options: object) -> tuple[str, ReplyReader]:
    reader = ReplyReader(renderer, **options)  # type: ignore[arg-type]
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = [reader.feed(np.array(ids[a:b], np.int32)) for a, b in itertools.pairwise(places)]
    rest, _, _ = reader.finish()
    return "".join(parts) + rest, reader


@pytest.mark.parametrize("name", EACH)
@settings(max_examples=15, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8), has_call=st.booleans())
def test_pieces_make_the_whole(name: str, text: str, cuts: list[int], has_call: bool) -> None:
    renderer = renderer_of(name)
    ids = spelled_in(name, text, [CALL] if has_call else [])
    parsed = renderer.parse(ids)
    got, reader = said(renderer, ids, cuts)
    assert got == reader.told
    if not any(call.error for call in parsed.calls):
        assert got.strip() == parsed.text.strip()
    if has_call and text.isalnum():
        assert "read_file" not in got


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=8), stop=st.sampled_from(["three", " four", "o", "e\n"]))
def test_a_stop_text_ends_it_wherever_the_pieces_fall(cuts: list[int], stop: str) -> None:
    whole = "one two three\n four five"
    got, reader = said(QwenChat().renderer(()), spelled(whole), cuts, stops=[stop])
    assert got == whole[: whole.index(stop)]
    assert reader.cut_by == stop


def test_a_broken_call_is_its_text_or_stays_a_call() -> None:
    broken = 'Look. <tool_call>\n{"name": }\n</tool_call>'
    renderer = QwenChat().renderer(())
    for cuts in ([], [2], [1, 5, 9]):
        assert said(renderer, spelled(broken), cuts)[0] == broken
    reader = ReplyReader(renderer, keeps_broken=True)
    reader.add(np.array(spelled(broken), np.int32))
    assert reader.finish()[1][0].error is not None

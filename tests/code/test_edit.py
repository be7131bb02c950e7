import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.code.edit import EditError, apply_edit

TEXT = "def f(a, b):\n    if a < b:\n        return a < b\n    return b\n"


def test_a_unique_piece_is_replaced() -> None:
    assert apply_edit(TEXT, "return b", "return a") == TEXT.replace("return b", "return a")


def test_a_line_number_picks_one_of_several() -> None:
    assert apply_edit(TEXT, "a < b", "a <= b", line=3) == TEXT.replace("return a < b", "return a <= b")


def test_a_piece_may_span_lines_and_counts_where_it_begins() -> None:
    assert apply_edit("a\nb\na\nb\n", "a\nb", "c", line=3) == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("", "x", None, "old is empty"),
        ("b", "b", None, "old and new are equal"),
        ("zzz", "x", None, "old does not occur in the file"),
        ("a < b", "x", None, "old occurs 2 times, on lines 2, 3: give line or more text"),
        ("a < b", "x", 4, "old does not begin on line 4, but on lines 2, 3"),
        ("def", "x", 4, "old does not begin on line 4, but on line 1"),
        ("b", "x", 5, "no line 5: the file has 4 lines"),
        ("b", "x", 0, "no line 0: the file has 4 lines"),
        ("    ", "x", 3, "old occurs 5 times on line 3: give more of it"),
    ],
)
def test_an_edit_that_could_be_mistaken_is_refused_with_a_usable_message(
    old: str, new: str, line: int | None, message: str
) -> None:
    with pytest.raises(EditError) as caught:
        apply_edit(TEXT, old, new, line)
    assert str(caught.value) == message


def test_overlapping_occurrences_are_not_unique() -> None:
    with pytest.raises(EditError, match="occurs 2 times"):
        apply_edit("aaa", "aa", "b")


@settings(deadline=None)
@given(st.text("ab\n", max_size=20), st.text("ab\n", min_size=1, max_size=3), st.text("abc", max_size=3))
def test_a_successful_edit_changes_exactly_one_place(text: str, old: str, new: str) -> None:
    try:
        edited = apply_edit(text, old, new)
    except EditError:
        return
    head, tail = text.split(old, 1)
    assert edited == head + new + tail
    assert old not in tail


def test_a_large_file_of_equal_letters_costs_no_more_than_reading_it() -> None:
    start = time.process_time()
    with pytest.raises(EditError, match="occurs 500000 times on line 2"):
        apply_edit("b\n" + "a" * 500_000 + "\nb\n", "a", "c", line=2)
    assert apply_edit("a" * 500_000 + "\na", "a", "c", line=2).endswith("\nc")
    assert time.process_time() - start < 5

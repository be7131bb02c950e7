from dataclasses import dataclass

from etude.code.view import cut, failure_text, numbered


@dataclass
class Outcome:
    call: str
    expected: str
    got: str
    passed: bool


def test_every_line_carries_its_number() -> None:
    assert numbered("a\n\nb\n") == "1\ta\n2\t\n3\tb\n"
    assert numbered("a\nb") == "1\ta\n2\tb\n"
    assert numbered("a\n", start=7) == "7\ta\n"
    assert numbered("") == ""


def test_only_line_feeds_end_lines() -> None:
    assert numbered("a\fb\rc\u2028d\n") == "1\ta\fb\rc\u2028d\n"


def test_cut_keeps_short_texts_and_marks_long_ones() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abc..."


def test_a_pass_is_one_word() -> None:
    assert failure_text([Outcome("f(1)", "1", "1", True)]) == "ok"


def test_a_failure_shows_the_first_failing_check_and_counts_the_rest() -> None:
    outcomes = [Outcome("f(1)", "1", "1", True), Outcome("f(2)", "4", "5", False), Outcome("f(3)", "9", "8", False)]
    assert failure_text(outcomes) == "f(2) -> 5, expected 4\n2 of 3 fail"


def test_long_values_are_cut_one_by_one() -> None:
    text = failure_text([Outcome("f(" + "1" * 100 + ")", "a" * 100, "b" * 100, False)])
    call, rest = text.split(" -> ")
    assert len(call) == 60
    assert rest == "b" * 57 + "..., expected " + "a" * 57 + "...\n1 of 1 fail"

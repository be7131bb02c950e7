"""The tokenizer of the shipped nano, and training one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.tokenizer import CONTROLS, FORCED, Tokenizer, train
from etude.errors import ModelError
from etude.models.recipe import SHIPPED

TOKENIZER = Tokenizer.load(SHIPPED["etude-nano"])
CONTROL_IDS = {TOKENIZER.control(name) for name in CONTROLS}
TEXTS = st.text() | st.text(alphabet="ab1 \t\n=<|>_.endargpad") | st.sampled_from(CONTROLS)


def spelled(text: str) -> list[str]:
    return [TOKENIZER.decode([number]) for number in TOKENIZER.encode(text)]


@settings(deadline=None)
@given(TEXTS)
def test_any_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(deadline=None)
@given(TEXTS)
def test_a_text_never_becomes_a_control_token(text: str) -> None:
    assert not CONTROL_IDS & set(TOKENIZER.encode(text).tolist())


def test_control_tokens_are_the_first_ids() -> None:
    assert [TOKENIZER.control(name) for name in CONTROLS] == list(range(9))
    assert TOKENIZER.vocab_size == 2048


@pytest.mark.parametrize("piece", FORCED)
def test_forced_pieces_are_one_token_where_a_text_begins(piece: str) -> None:
    assert len(TOKENIZER.encode(piece)) == 1


def test_line_numbers_operators_and_numbers_stand_alone() -> None:
    assert spelled("1\tx = 1\n10\t    return x<=42\n") == [
        "1\t", "x", " =", " 1", "\n", "10\t", "    ", "return", " x", "<=", "42", "\n",
    ]  # fmt: skip


def test_a_word_and_its_attribute_are_cut_the_same_alone_and_in_a_line() -> None:
    assert spelled("a != b")[1] == spelled(" !=")[0] == " !="


def test_a_tab_after_a_number_inside_a_line_is_no_line_number() -> None:
    assert "1\t" not in spelled("x = 1\ty")


def test_spans_cover_the_text_in_order() -> None:
    text = "5\t    if x >= 10:\n"
    spans = TOKENIZER.pieces(text)
    assert [text[start:end] for start, end in spans] == ["5\t", "    ", "if", " x", " >=", " 10", ":", "\n"]


def test_many_texts_are_encoded_as_one_by_one() -> None:
    texts = ["a\n", "", "def f(): pass"]
    assert [ids.tolist() for ids in TOKENIZER.encode_many(texts)] == [TOKENIZER.encode(t).tolist() for t in texts]


def test_a_new_tokenizer_is_the_same_for_the_same_texts_and_survives_a_file(tmp_path: Path) -> None:
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    texts = [f"def {a}{b}({b}{a}):\n    return {b}{a} + {a}\n" for a in syllables for b in syllables]
    Tokenizer(train(texts, 620)).save(tmp_path)
    first = (tmp_path / "tokenizer.json").read_text()
    Tokenizer(train(texts, 620)).save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == first
    assert Tokenizer.load(tmp_path).vocab_size == 620


def test_too_little_text_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot train a tokenizer of 5000"):
        train(["def f(): pass"], 5000)


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "not json"])
def test_a_missing_or_broken_file_is_a_model_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_control_tokens_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no token <\|nothing\|>"):
        TOKENIZER.control("<|nothing|>")

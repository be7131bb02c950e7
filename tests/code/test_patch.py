"""Patches: what `diff` writes comes back whole, what does not fit is refused by name, nothing raises anything else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.code.diff import unified_diff
from etude.code.globs import matcher
from etude.code.patch import PatchError, apply_patch, parse_patch

LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "-- x", "++ y", "@@ z", "*** w"]), max_size=12)
TEXTS = st.builds(lambda lines, end: "\n".join(lines) + end * bool(lines), LINES, st.sampled_from(["\n", ""]))


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["x.py", "d/y.py", "z"]), TEXTS),
    st.dictionaries(st.sampled_from(["x.py", "d/y.py", "z"]), TEXTS),
)
def test_our_own_diffs_are_applied_exactly(before: dict[str, str], after: dict[str, str]) -> None:
    patch = unified_diff(before, after)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if any((before.get(path) or after.get(path)) in ("", None) for path in changed) or not patch:
        return  # a file that is empty before or after has no hunk to read it from
    files = {path: before.get(path) for path in before.keys() | after.keys()}
    found = apply_patch(files, parse_patch(patch))
    assert {path: text for path, text in found.items() if text is not None} == {
        **{p: t for p, t in before.items() if p not in changed},
        **{p: after[p] for p in changed if p in after},
    }


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="abc +-@*\n /dev/nulBegin PatchUpdate File:", max_size=200))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(PatchError):
        apply_patch({}, parse_patch(text))


def test_a_hunk_whose_numbers_are_wrong_goes_to_the_nearest_place_that_fits() -> None:
    text = "".join(f"{word}\n" for word in ["x", "same", "y", "same", "z", "same"])
    patch = "--- a/f\n+++ b/f\n@@ -5,1 +5,1 @@\n-same\n+other\n"
    found = apply_patch({"f": text}, parse_patch(patch))["f"]
    assert found is not None
    assert found.split() == ["x", "same", "y", "other", "z", "same"]


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("hello", "changes no file"),
        ("*** Begin Patch\n*** Update File: f\n-a\n+b\n", "cut off"),
        ("*** Begin Patch\n*** Add File: f\nx\n*** End Patch", "begin with"),
        ("*** Begin Patch\n*** Add File: f\n+x\n*** End Patch", "exists already"),
        ("*** Begin Patch\n*** Delete File: nowhere\n*** End Patch", "does not exist"),
        ("*** Begin Patch\n*** Update File: f\n@@ gone\n-a\n+b\n*** End Patch", "no line 'gone'"),
        ("*** Begin Patch\n*** Update File: f\n-a\n+b\n*** End Patch", "fits at 2 places"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-zzz\n+b\n", "does not fit"),
    ],
)
def test_what_is_wrong_is_said(patch: str, words: str) -> None:
    with pytest.raises(PatchError, match=words):
        apply_patch({"f": "a\nb\na\n"}, parse_patch(patch))


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.py", ["a.py", "d/b.py"], ["a.pyc", "py"]),
        ("src/*.py", ["src/a.py"], ["src/d/a.py", "a.py"]),
        ("src/**/*.py", ["src/a.py", "src/d/e/a.py"], ["a.py", "src/a.txt"]),
        ("**", ["a", "b"], []),
        ("d/**", ["d/a", "d/b/c"], ["a"]),
        ("[ab]?.{py,txt}", ["ax.py", "by.txt"], ["cx.py", "a.py"]),
        ("[!a].py", ["b.py"], ["a.py"]),
        ("./x/y", ["x/y"], ["y"]),
        ("a[", ["a["], ["a"]),
        ("a{b", ["a{b"], ["ab"]),
        ("{{a}", ["{a"], ["a"]),
        ("{a/b,c{d,e}}", ["a/b", "cd", "ce"], ["c", "b"]),
        ("[z-a]b", [], ["ab"]),
        ("**/x/**", ["x/a", "a/x/b/c"], ["x", "a/x"]),
    ],
)
def test_patterns_match_as_in_a_shell(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = matcher(pattern)
    assert [path for path in matching + others if matches(path)] == matching


@pytest.mark.timeout(20)
def test_no_pattern_takes_long() -> None:
    assert not matcher("*a" * 40 + "b")("a" * 200)
    assert not matcher("**/" * 40 + "x")("a/" * 60)
    with pytest.raises(ValueError, match="braces"):
        matcher("{a,b}" * 30)

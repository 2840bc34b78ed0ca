"""Stop strings: what leaves, what is held back, and who wins."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_rt.bridge.stops import StopFinder

PIECES = ["alpha", " be", "ta ga", "mma!", " delta"]


def pushed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    out = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.is_matched:
            return out, True
    out.append(finder.flush())
    return out, False


def test_a_stop_string_across_tokens_never_leaks() -> None:
    assert pushed(PIECES, ["beta gamma"]) == (["alpha", " ", "", ""], True)


def test_what_only_looked_like_a_stop_string_is_given_back_whole() -> None:
    out, is_matched = pushed(PIECES, ["betamax"])
    assert ("".join(out), is_matched) == ("alpha beta gamma! delta", False)
    assert out[:2] == ["alpha", " "]


def test_the_stop_string_that_begins_first_wins_whatever_its_place_in_the_list() -> None:
    for stops in (["a g", "beta"], ["beta", "a g"]):
        assert "".join(pushed(PIECES, stops)[0]) == "alpha "


def test_after_a_match_nothing_more_comes_out() -> None:
    finder = StopFinder(["x"])
    assert finder.push("axb") == "a"
    assert finder.push("more") + finder.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert pushed(["a", "b"], []) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", [["aab"], ["abab"], ["aa", "ab"]])
def test_only_the_longest_possible_beginning_is_held(stops: list[str]) -> None:
    finder = StopFinder(stops)
    sent = ""
    for character in "aaabab":
        sent += finder.push(character)
        if finder.is_matched:
            break
    at = min(place for place in map("aaabab".find, stops) if place >= 0)
    assert sent == "aaabab"[:at]


@given(
    st.text(alphabet="ab", max_size=24),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_the_text_before_the_first_match_comes_out_and_no_more_is_held_than_must_be(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    finder = StopFinder(stops)
    seen = out = ""
    for start, stop in pairwise(edges):
        seen += text[start:stop]
        out += finder.push(text[start:stop])
        begins = [at for at in map(seen.find, stops) if at >= 0]
        assert finder.is_matched == bool(begins)
        if begins:
            assert out == seen[: min(begins)]
            return
        held = len(seen) - len(out)
        could_begin = [
            n
            for n in range(1, len(seen) + 1)
            for s in stops
            if n < len(s) and s.startswith(seen[-n:])
        ]
        assert held == max(could_begin, default=0)
    assert out + finder.flush() == text

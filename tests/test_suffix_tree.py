"""The automaton against a model that scans the texts, and how it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.drafters import suffix_tree
from hvd.drafters.suffix_tree import COUNT, LEAST_CONTEXT, N_EDGES, N_STATES, OWN, Rules, SuffixTree

Texts = Sequence[Sequence[int]]
F32 = np.float32


def rules(mode: str = "longest", depth: int = 64, max_draft: int = 64, **other: float) -> Rules:
    return Rules(
        arctic=mode == "arctic",
        depth=depth,
        max_draft=max_draft,
        factor=F32(other.get("factor", 1.0)),
        offset=F32(other.get("offset", 0.0)),
        min_prob=F32(other.get("min_prob", 0.1)),
        vocab_size=int(other.get("vocab_size", 1000)),
    )


# --------------------------------------------------------------------------------- a model by scanning


def occurrences(texts: Texts, w: Sequence[int]) -> int:
    return sum(list(text[i : i + len(w)]) == list(w) for text in texts for i in range(len(text) - len(w) + 1))


def followers(texts: Texts, w: Sequence[int]) -> list[int]:
    """The tokens behind the occurrences of w, in the order in which they were written."""
    n = len(w)
    return [text[i + n] for text in texts for i in range(len(text) - n) if list(text[i : i + n]) == list(w)]


def latest_of_the_most_frequent(tokens: list[int]) -> int:
    most = max(tokens.count(token) for token in tokens)
    return next(token for token in reversed(tokens) if tokens.count(token) == most)


def arctic_first_child(tokens: list[int]) -> int:
    """The head of ArcticInference's list of children after these were seen: see `_see_arctic` for the rule."""
    order: list[tuple[int, int]] = []
    for token in tokens:
        at = next((i for i, (other, _) in enumerate(order) if other == token), None)
        if at is None:
            order.append((token, 1))
            continue
        count = order[at][1]
        group = next(i for i, (_, n) in enumerate(order) if n == count)
        if group == at:  # it led its equals: it goes before those that it now equals
            group = next(i for i, (_, n) in enumerate(order) if n <= count + 1)
        del order[at]
        order.insert(group, (token, count + 1))
    return order[0][0]


ModelDraft = tuple[list[int], list[int], list[int], F32]


def model_walk(texts: Texts, match: Sequence[int], room: int, r: Rules) -> ModelDraft:
    """Tokens, counts, parent counts and score behind a match."""
    context, product, score = list(match), F32(1), F32(0)
    tokens: list[int] = []
    counts: list[int] = []
    parents: list[int] = []
    while len(tokens) < room:
        ends = 0
        while not r.arctic and len(context) > LEAST_CONTEXT and not followers(texts, context):
            context, ends = context[1:], 1
        if not (seen := followers(texts, context)):
            break
        token = arctic_first_child(seen) if r.arctic else latest_of_the_most_frequent(seen)
        parent = occurrences(texts, context) - ends
        product *= F32(seen.count(token)) / F32(parent)
        if product < r.min_prob or token >= r.vocab_size:
            break
        tokens, counts, parents = [*tokens, token], [*counts, seen.count(token)], [*parents, parent]
        score += product
        context = [*context, token][-(r.depth - 1) :]
    return tokens, counts, parents, score


def model_arctic(texts: Texts, text: list[int], r: Rules) -> tuple[int, ModelDraft]:
    best: tuple[int, ModelDraft] = (0, ([], [], [], F32(0)))
    for match_len in range(1, min(len(text), r.depth)):
        match = text[-match_len:]
        if not occurrences(texts, match):
            break
        cap = int(float(F32(match_len) * r.factor + r.offset) + 1e-6)
        draft = model_walk(texts, match, max(0, min(r.max_draft, cap, r.depth - match_len)), r)
        if draft[0] and draft[3] >= best[1][3]:
            best = match_len, draft
    return best


def model_longest(texts: Texts, text: list[int]) -> int:
    lengths = range(1, len(text) + 1)
    return max((n for n in lengths if followers(texts, text[-n:])), default=0)


def model_propose(own: list[int], responses: Texts, r: Rules) -> tuple[int, bool, ModelDraft]:
    """Match length, own?, draft."""
    if r.arctic:
        mine, theirs = model_arctic([own], own, r), model_arctic(responses, own, r)
        local = mine[1][3] >= theirs[1][3]
        return (mine if local else theirs)[0], local, (mine if local else theirs)[1]
    mine_len, their_len = (min(model_longest(texts, own), r.depth - 1) for texts in ([own], responses))
    local = mine_len >= their_len
    n = max(mine_len, their_len)
    if n == 0:
        return 0, True, ([], [], [], F32(0))
    return n, local, model_walk([own] if local else responses, own[-n:], r.max_draft, r)


# ------------------------------------------------------------------------------------- the same, asked


class Request:
    """A text with its tree, beside a tree of responses."""

    def __init__(self, responses: Texts, r: Rules) -> None:
        self.rules, self.shared, self.own = r, SuffixTree(), SuffixTree()
        self.match = np.zeros(3, np.int64)
        self.out, self.copy = suffix_tree.buffers(r.max_draft), suffix_tree.buffers(r.max_draft)
        self.left = np.zeros(3, np.int64)
        for text in responses:
            self.shared.reserve(len(text))
            suffix_tree.insert(self.shared.packed, np.array(text, np.int32), tuple(r))

    def observe(self, tokens: Sequence[int], generated: bool = False) -> list[int]:
        hits = np.zeros(len(tokens), np.uint8)
        self.own.reserve(len(tokens))
        array = np.array(tokens, np.int32)
        trees = self.own.packed, self.shared.packed
        rules, out, copy = tuple(self.rules), tuple(self.out), tuple(self.copy)
        suffix_tree.observe(*trees, self.match, array, hits, generated, rules, out, copy, self.left)
        return [int(hit) for hit in hits]

    def propose(self, room: int = 64) -> tuple[int, bool, ModelDraft]:
        n, match_len, source, score = suffix_tree.propose(
            self.own.packed, self.shared.packed, self.match, room, tuple(self.rules), tuple(self.out)
        )
        tokens, counts, parents = (array[:n].tolist() for array in self.out[:3])
        return match_len, source == OWN, (tokens, counts, parents, F32(score))


tokens = st.integers(0, 3)
texts = st.lists(tokens, min_size=1, max_size=40)
any_rules = st.builds(
    rules,
    mode=st.sampled_from(["longest", "arctic"]),
    depth=st.sampled_from([2, 3, 5, 8, 64]),
    max_draft=st.sampled_from([1, 4, 12]),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4]),
    vocab_size=st.sampled_from([4, 3]),
)


@settings(max_examples=120, deadline=None)
@given(own=texts, responses=st.lists(texts, max_size=3), r=any_rules)
def test_every_draft_equals_the_models(own: list[int], responses: list[list[int]], r: Rules) -> None:
    request = Request(responses, r)
    for i in range(len(own)):
        request.observe(own[i : i + 1])
        match_len, local, draft = model_propose(own[: i + 1], responses, r)
        found = request.propose()
        assert found[2][:3] == draft[:3]
        assert found[2][3] == draft[3]
        if draft[0]:
            assert found[:2] == (match_len, local)


@settings(max_examples=120, deadline=None)
@given(inserted=st.lists(texts, min_size=1, max_size=4), w=st.lists(tokens, min_size=1, max_size=6))
def test_counts_are_occurrences(inserted: list[list[int]], w: list[int]) -> None:
    tree = Request(inserted, rules()).shared
    match = np.zeros(3, np.int64)
    suffix_tree.rematch(tree.packed, match, np.array(w, np.int32), tuple(rules()))
    found = tree.arrays.states[match[0], COUNT] if match[1] == len(w) else 0
    assert found == occurrences(inserted, w)


@settings(max_examples=60, deadline=None)
@given(own=texts, responses=st.lists(texts, max_size=2), cut=st.integers(0, 40), r=any_rules)
def test_hits_say_whether_the_draft_would_have_begun_right(
    own: list[int], responses: list[list[int]], cut: int, r: Rules
) -> None:
    prompt, response = own[:cut], own[cut:]
    at_once, one_by_one = Request(responses, r), Request(responses, r)
    assert at_once.observe(prompt) == [0] * len(prompt)
    one_by_one.observe(prompt)
    expected = []
    for token in response:
        expected.append(int(one_by_one.propose()[2][0][:1] == [token]))
        one_by_one.observe([token])
    assert at_once.observe(response, generated=True) == expected


@settings(max_examples=60, deadline=None)
@given(own=texts, responses=st.lists(texts, max_size=2), r=any_rules, pieces=st.integers(1, 7))
def test_text_in_pieces_or_whole_is_the_same(own: list[int], responses: list[list[int]], r: Rules, pieces: int) -> None:
    whole, parts = Request(responses, r), Request(responses, r)
    whole.observe(own)
    for i in range(0, len(own), pieces):
        parts.observe(own[i : i + pieces])
    assert whole.propose() == parts.propose()
    for a, b in zip(whole.own.arrays[:2], parts.own.arrays[:2], strict=True):
        used = whole.own.arrays.meta[N_STATES if a.shape[0] == len(whole.own.arrays.states) else N_EDGES]
        assert np.array_equal(a[:used], b[:used])


@settings(max_examples=60, deadline=None)
@given(own=texts, responses=st.lists(texts, min_size=1, max_size=3), r=any_rules)
def test_a_text_is_found_anew_in_a_tree_that_has_changed(own: list[int], responses: list[list[int]], r: Rules) -> None:
    late = Request([], r)
    late.observe(own)
    late.shared = Request(responses, r).shared
    suffix_tree.rematch(late.shared.packed, late.match, np.array(own[-r.depth :], np.int32), tuple(r))
    early = Request(responses, r)
    early.observe(own)
    assert late.propose() == early.propose()


# ---------------------------------------------------------------------------------------------- growth


def fibonacci(n: int) -> np.ndarray:
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    return np.array(b[:n], np.int32)


HISTORIES = {
    "one id": lambda n: np.full(n, 7, np.int32),
    "a-b-a-b": lambda n: np.arange(n, dtype=np.int32) % 2,
    "fibonacci": fibonacci,
    "random": lambda n: np.random.default_rng(0).integers(0, 50_000, n).astype(np.int32),
    "two ids": lambda n: np.random.default_rng(0).integers(0, 2, n).astype(np.int32),
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("mode", ["longest", "arctic"])
def test_size_is_linear_and_within_what_is_reserved(name: str, mode: str) -> None:
    for n in (1_000, 20_000):
        request = Request([], rules(mode, vocab_size=50_000))
        request.observe(HISTORIES[name](n))
        meta = request.own.arrays.meta
        assert meta[N_STATES] <= 2 * n
        assert meta[N_EDGES] <= 3 * n
        assert np.count_nonzero(request.own.arrays.table) <= n


@settings(max_examples=60, deadline=None)
@given(inserted=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=30))
def test_many_texts_stay_within_what_is_reserved(inserted: list[list[int]]) -> None:
    tree = Request(inserted, rules()).shared
    n = sum(len(text) for text in inserted)
    assert tree.tokens == n
    assert tree.arrays.meta[N_STATES] <= 2 * n + 2
    assert tree.arrays.meta[N_EDGES] <= 3 * n + 4
    assert np.count_nonzero(tree.arrays.table) <= n


def test_work_of_a_draft_does_not_grow_with_the_history() -> None:
    """K5-07: a draft visits fewer than `depth` states, the text's suffixes, however long the text is."""
    for make in HISTORIES.values():
        for n in (1_000, 50_000):
            request = Request([], rules(vocab_size=50_000))
            request.observe(make(n))
            arrays = request.own.arrays
            state, visited = arrays.meta[suffix_tree.TAIL], 0
            while state != suffix_tree.ROOT_STATE:
                state, visited = arrays.states[state, suffix_tree.LINK], visited + 1
            assert visited < 64


def test_bytes_are_those_of_the_arrays_and_known_before_growing() -> None:
    tree = SuffixTree()
    for more in (1, 15, 1, 40, 1000, 3):
        foreseen = tree.bytes_with(more)
        tree.reserve(more)
        assert tree.nbytes == foreseen == sum(array.nbytes for array in tree.arrays)


@pytest.mark.parametrize("period", [1, 2, 5, 11])
def test_a_loops_draft_goes_round_more_than_once(period: int) -> None:
    request = Request([], rules())
    request.observe([*range(100, 120), *(list(range(period)) * 12)])
    assert request.propose()[2][0] == [i % period for i in range(64)]

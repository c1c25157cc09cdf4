"""The suffix cache's data structure alone: a suffix automaton with occurrence counts, on flat int32 arrays, in Numba.

Every substring of the texts inserted so far belongs to one *state*: the set of substrings that end at the same places.
An *edge* leads from a state to the one reached by appending a token. For a substring `w` of at most `depth - 1` tokens
and a token `c`,

    states[v, COUNT] = occurrences of w,      edges[e, SEEN] = occurrences of w + c,

which are the counts of a suffix trie capped at `depth`, in at most 2 states and 3 edges a token whatever the depth. The
suffixes of a text are the states on the chain of links from its end, so appending a token touches only that chain: at
most `depth` states, most often fewer than ten. (Automaton: Blumer et al., "The smallest automaton recognizing the
subwords of a text", 1985. Drafting rules: SuffixDecoding, arXiv 2411.04975, as ArcticInference 0.3.0 has it.)

Functions here take tokens and a `Rules` tuple and know neither requests nor scopes; see suffix.py for those. Importing
this module imports Numba; the first call compiles, later processes load the compiled code from Numba's cache (beside
this file, or in the user's cache folder when that is read-only). All kernels are in one file: `hvd/jit.py` says why.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hvd import jit
from hvd.types import Float32Array, Int32Array, Int64Array

UInt8Array = NDArray[np.uint8]

# Columns of a state: length of its longest substring, suffix link, occurrences, most frequent edge, first edge made,
# number of the last text that it occurred in.
LENGTH, LINK, COUNT, BEST, FIRST, TEXT = range(6)
# Columns of an edge: where from, token, where to, occurrences, next edge of the same state, rank among equals (arctic).
SOURCE, TOKEN, TARGET, SEEN, NEXT, RANK = range(6)
# Entries of `meta`: states and edges in use, state of the whole text, state and length of its last `depth - 1` tokens,
# clock of the ranks, number of texts.
N_STATES, N_EDGES, LAST, TAIL, TAIL_LENGTH, CLOCK, N_TEXTS = range(7)

NONE = -1
ROOT_STATE = 0

LEAST_CONTEXT = 4
"""A draft that came to the end of a text goes on with a shorter context no shorter than this."""
LEAST_COPY = 3
"""A draft behind a match at least so long is taken for a copy: where the text leaves it, its rest is remembered."""
RESYNC = 8
"""Most tokens compared to find the place in a copy at which a text has come back to it."""


class Rules(NamedTuple):
    """How drafts are made: the scalars of `SuffixConfig` as the kernels want them, and the size of the vocabulary."""

    arctic: bool
    depth: int
    max_draft: int
    factor: np.float32
    offset: np.float32
    min_prob: np.float32
    vocab_size: int


class Arrays(NamedTuple):
    """One automaton.

    states   int32 [S, 6]   columns LENGTH, LINK, COUNT, BEST, FIRST, TEXT
    edges    int32 [E, 6]   columns SOURCE, TOKEN, TARGET, SEEN, NEXT, RANK
    table    int32 [2^k]    open addressing, (state, token) -> edge + 1; 0 = empty; a state's first edge is not in it
    meta     int64 [7]      entries N_STATES ... N_TEXTS
    """

    states: Int32Array
    edges: Int32Array
    table: Int32Array
    meta: Int64Array


PackedArrays = tuple[Int32Array, Int32Array, Int32Array, Int64Array]
PackedRules = tuple[bool, int, int, np.float32, np.float32, np.float32, int]
PackedBuffers = tuple[Int32Array, Int32Array, Int32Array, Float32Array]
"""The kernels take `Arrays`, `Rules` and `Buffers` as plain tuples: Numba unpacks those in a third of the time."""


class Buffers(NamedTuple):
    """Where a kernel writes a draft: tokens, counts, parent counts int32 [max_draft], probs float32 [max_draft]."""

    tokens: Int32Array
    counts: Int32Array
    parents: Int32Array
    probs: Float32Array


# ---------------------------------------------------------------------------------------------------- structure


@jit.jit
def _slot(state: int, token: int, mask: int) -> int:
    mixed = state * 0x9E3779B97F4A7C1 + token * 0x2545F4914F6CDD1D
    return (mixed ^ (mixed >> 29)) & mask


@jit.jit
def _find(tree: Arrays, state: int, token: int) -> int:
    """The edge of `state` for `token`, or NONE."""
    edges = tree.edges
    edge: int = tree.states[state, BEST]
    if edge == NONE or edges[edge, TOKEN] == token:
        return edge
    edge = tree.states[state, FIRST]
    if edges[edge, TOKEN] == token:
        return edge
    if edges[edge, NEXT] == NONE:
        return NONE
    mask = tree.table.size - 1
    slot = _slot(state, token, mask)
    while True:
        edge = tree.table[slot] - 1
        if edge == NONE or (edges[edge, SOURCE] == state and edges[edge, TOKEN] == token):
            return edge
        slot = (slot + 1) & mask


@jit.jit
def _new_state(tree: Arrays, length: int, link: int, count: int) -> int:
    state: int = tree.meta[N_STATES]
    tree.meta[N_STATES] += 1
    row = tree.states[state]
    row[LENGTH], row[LINK], row[COUNT], row[BEST], row[FIRST], row[TEXT] = (
        length,
        link,
        count,
        NONE,
        NONE,
        NONE,
    )
    return state


@jit.jit
def _enter(tree: Arrays, edge: int) -> None:
    """Put an edge into the table."""
    mask = tree.table.size - 1
    slot = _slot(tree.edges[edge, SOURCE], tree.edges[edge, TOKEN], mask)
    while tree.table[slot] != 0:
        slot = (slot + 1) & mask
    tree.table[slot] = edge + 1


@jit.jit
def _new_edge(tree: Arrays, state: int, token: int, target: int, seen: int, rank: int) -> int:
    edge: int = tree.meta[N_EDGES]
    tree.meta[N_EDGES] += 1
    row = tree.edges[edge]
    row[SOURCE], row[TOKEN], row[TARGET], row[SEEN], row[NEXT], row[RANK] = (
        state,
        token,
        target,
        seen,
        NONE,
        rank,
    )
    first = tree.states[state, FIRST]
    if first == NONE:
        tree.states[state, FIRST] = edge
        tree.states[state, BEST] = edge
    else:
        row[NEXT] = tree.edges[first, NEXT]
        tree.edges[first, NEXT] = edge
        _enter(tree, edge)
    return edge


@jit.jit
def _split(tree: Arrays, parent: int, token: int, state: int) -> int:
    """Give the substrings of `state` no longer than parent's longest + `token` a state of their own, and return it."""
    states, edges = tree.states, tree.edges
    upper = _new_state(tree, states[parent, LENGTH] + 1, states[state, LINK], states[state, COUNT])
    edge = states[state, FIRST]
    while edge != NONE:
        row = edges[edge]
        copy = _new_edge(tree, upper, row[TOKEN], row[TARGET], row[SEEN], row[RANK])
        if edge == states[state, BEST]:
            states[upper, BEST] = copy
        edge = row[NEXT]
    states[state, LINK] = upper
    while parent != NONE:
        edge = _find(tree, parent, token)
        if edges[edge, TARGET] != state:
            break
        edges[edge, TARGET] = upper
        parent = states[parent, LINK]
    return upper


@jit.jit
def _extend(tree: Arrays, token: int) -> None:
    """Append `token` to the text whose end is LAST. New edges have SEEN 0 until `_count` comes by."""
    states, edges = tree.states, tree.edges
    parent = tree.meta[LAST]
    edge = _find(tree, parent, token)
    if edge == NONE:
        end = _new_state(tree, states[parent, LENGTH] + 1, ROOT_STATE, 0)
        while parent != NONE:
            edge = _find(tree, parent, token)
            if edge != NONE:
                break
            _new_edge(tree, parent, token, end, 0, 0)
            parent = states[parent, LINK]
        tree.meta[LAST] = end
    if edge == NONE:
        return
    target = edges[edge, TARGET]
    if states[target, LENGTH] != states[parent, LENGTH] + 1:
        target = _split(tree, parent, token, target)
    if tree.meta[LAST] == parent:  # another text went this way before: its state is ours too
        tree.meta[LAST] = target
    else:
        states[tree.meta[LAST], LINK] = target


# ------------------------------------------------------------------------------------------------------- counts


@jit.jit
def _leads_equals(tree: Arrays, state: int, edge: int) -> bool:
    """Whether no edge of `state` seen as often as `edge` comes before it in ArcticInference's order."""
    edges = tree.edges
    seen, rank = edges[edge, SEEN], edges[edge, RANK]
    first = tree.states[state, FIRST]
    other = edges[edge, NEXT]
    while other != NONE:
        if edges[other, SEEN] == seen and edges[other, RANK] < rank:
            return False
        other = edges[other, NEXT]
    other = first
    while other != edge:
        if edges[other, SEEN] == seen and edges[other, RANK] < rank:
            return False
        other = edges[other, NEXT]
    return True


@jit.jit
def _see_arctic(tree: Arrays, state: int, edge: int) -> None:
    """Count `edge` once more; ties as ArcticInference 0.3.0 breaks them.

    It keeps children in order of counts. One that rises stands behind its new equals, except that the leader of its old
    equals goes before the new ones. RANK orders equals: the clock for those behind, its negative for those in front.
    """
    edges = tree.edges
    seen, best = edges[edge, SEEN], tree.states[state, BEST]
    top = edges[best, SEEN]
    tree.meta[CLOCK] += 1
    leads = seen > 0 and _leads_equals(tree, state, edge)
    edges[edge, SEEN] = seen + 1
    edges[edge, RANK] = -tree.meta[CLOCK] if leads else tree.meta[CLOCK]
    if edge != best and seen > 0 and (seen == top or (leads and seen + 1 == top)):
        tree.states[state, BEST] = edge


@jit.jit
def _see(tree: Arrays, state: int, edge: int) -> None:
    """Count `edge` once more; of equals the one seen last is the best."""
    tree.edges[edge, SEEN] += 1
    if tree.edges[edge, SEEN] >= tree.edges[tree.states[state, BEST], SEEN]:
        tree.states[state, BEST] = edge


@jit.jit
def _slide(tree: Arrays, state: int, length: int, limit: int) -> tuple[int, int]:
    """Shorten a substring of `state` by its first token if it is longer than `limit`."""
    if length <= limit:
        return state, length
    link = tree.states[state, LINK]
    return (link if tree.states[link, LENGTH] >= limit else state), limit


@jit.jit
def _shorten(tree: Arrays, state: int, length: int) -> int:
    """The state of the last `length` tokens of `state`'s longest substring."""
    while state != ROOT_STATE and tree.states[tree.states[state, LINK], LENGTH] >= length:
        state = tree.states[state, LINK]
    return state


@jit.jit
def _count(tree: Arrays, token: int, rules: Rules) -> None:
    """Count `token` behind every suffix of up to `depth - 1` tokens of the text before it."""
    states, edges, meta = tree.states, tree.edges, tree.meta
    state = _shorten(tree, meta[TAIL], meta[TAIL_LENGTH])  # the tail's state may just have been split
    end = before = NONE
    while state != NONE:
        edge = _find(tree, state, token)
        if rules.arctic and state != ROOT_STATE:
            _see_arctic(tree, state, edge)
        else:
            _see(tree, state, edge)
        target = edges[edge, TARGET]
        if target != before:
            states[target, COUNT] += 1
            states[target, TEXT] = meta[N_TEXTS]
            before = target
        if end == NONE:
            end = target
        state = states[state, LINK]
    meta[TAIL], meta[TAIL_LENGTH] = _slide(tree, end, meta[TAIL_LENGTH] + 1, rules.depth - 1)


@jit.jit
def _append(tree: Arrays, token: int, rules: Rules) -> None:
    _extend(tree, token)
    _count(tree, token, rules)


@jit.jit
def _advance(tree: Arrays, state: int, length: int, token: int, limit: int) -> tuple[int, int]:
    """State and length, at most `limit`, of the longest suffix of (matched substring + token) that occurs in `tree`."""
    edge = _find(tree, state, token)
    while edge == NONE:
        if state == ROOT_STATE:
            return ROOT_STATE, 0
        state = tree.states[state, LINK]
        length = tree.states[state, LENGTH]
        edge = _find(tree, state, token)
    return _slide(tree, tree.edges[edge, TARGET], length + 1, limit)


# ------------------------------------------------------------------------------------------------------- drafts


@jit.jit
def _walk(tree: Arrays, state: int, length: int, room: int, rules: Rules, out: Buffers) -> tuple[int, np.float32]:
    """Follow the best edges from a matched substring; returns tokens written and their score.

    Ends at `room` tokens, where the running product of count ratios falls below min_prob, at an id that is none of the
    vocabulary's, or where nothing follows. In mode "longest" it goes on behind the end of a text with the longest
    shorter context, of LEAST_CONTEXT tokens or more, that was continued (the end just met is not counted against it): a
    loop's draft is then not confined to one round of it. The score is the sum of the running products, in float32 as in
    ArcticInference.
    """
    product = np.float32(1.0)
    score = np.float32(0.0)
    n = ends = 0
    while n < room:
        edge = tree.states[state, BEST]
        if edge == NONE:
            state = tree.states[state, LINK]
            if rules.arctic or state == NONE or tree.states[state, LENGTH] < LEAST_CONTEXT:
                break
            length, ends = tree.states[state, LENGTH], 1
            continue
        row = tree.edges[edge]
        parent = tree.states[state, COUNT] - ends
        ratio = np.float32(row[SEEN]) / np.float32(parent)
        product *= ratio
        if product < rules.min_prob or row[TOKEN] < 0 or row[TOKEN] >= rules.vocab_size:
            break
        out.tokens[n], out.counts[n], out.parents[n], out.probs[n] = row[TOKEN], row[SEEN], parent, ratio
        score += product
        n, ends = n + 1, 0
        state, length = _slide(tree, row[TARGET], length + 1, rules.depth - 1)
    return n, score


@jit.jit
def _longest(tree: Arrays, state: int, length: int) -> tuple[int, int]:
    """The longest match, no longer than the one given, behind which anything was seen: state and length."""
    while state != ROOT_STATE and tree.states[state, BEST] == NONE:
        state = tree.states[state, LINK]
        length = tree.states[state, LENGTH]
    return state, length


@jit.jit
def _cap(match_len: int, room: int, rules: Rules) -> int:
    """Most tokens behind a match of this length in arctic mode."""
    spec = int(np.float64(np.float32(match_len) * rules.factor + rules.offset) + 1e-6)
    return max(0, min(room, spec, rules.depth - match_len))


@jit.jit
def _score_maximal(
    tree: Arrays, state: int, length: int, room: int, rules: Rules, out: Buffers
) -> tuple[int, int, int, np.float32]:
    """Of all suffixes of a match the one with the best-scoring draft: state, match length, draft length, score.

    Among equals the longer match. Suffixes of one state have the same draft but for its length: it is walked once.
    """
    best_state, best_match, best_n, best_score = ROOT_STATE, 0, 0, np.float32(0.0)
    while state != ROOT_STATE:
        link = tree.states[state, LINK]
        shortest = tree.states[link, LENGTH] + 1
        most = 0
        for match_len in range(shortest, length + 1):
            most = max(most, _cap(match_len, room, rules))
        n, _ = _walk(tree, state, shortest, most, rules, out)
        for match_len in range(length, shortest - 1, -1):
            capped = min(n, _cap(match_len, room, rules))
            score = _score(out, capped)
            if score > best_score:
                best_state, best_match, best_n, best_score = state, match_len, capped, score
        state, length = link, shortest - 1
    return best_state, best_match, best_n, best_score


@jit.jit
def _score(out: Buffers, n: int) -> np.float32:
    product = np.float32(1.0)
    score = np.float32(0.0)
    for i in range(n):
        product *= out.probs[i]
        score += product
    return score


# ------------------------------------------------------------------------------------------------------- copies

# Entries of `left`: tokens of the copy left behind (0 = none), tokens committed since, match length when it was left.
N_LEFT, AGE, ORIGIN = range(3)


@jit.jit
def _place(copy: Buffers, n: int, age: int, tail: Int32Array) -> tuple[int, int]:
    """Where in a copy a text that left it goes on: index of the next token, or NONE; and the tokens that say so.

    The place behind most of the text's last tokens, of equals the one nearest to `age` tokens behind the leaving point.
    Where no token of the copy agrees with the last one, as if the text had replaced as many tokens as it wrote.
    """
    best, most = (age if age < n else NONE), 0
    for i in range(1, n):
        same = 0
        while same < min(i, tail.size) and copy.tokens[i - 1 - same] == tail[tail.size - 1 - same]:
            same += 1
        if same > most or (same == most and same > 0 and abs(i - age) < abs(best - age)):
            best, most = i, same
    return best, most


@jit.jit
def _follow(
    local: Arrays,
    shared: Arrays,
    match: Int64Array,
    token: int,
    rules: Rules,
    out: Buffers,
    copy: Buffers,
    left: Int64Array,
) -> bool:
    """Before a generated token is appended: whether the draft begins with it; remembers a copy that it leaves."""
    n, length, _, _ = _propose(local, shared, match, rules.max_draft if rules.arctic else 1, rules, out)
    hit = n > 0 and out.tokens[0] == token
    if length >= LEAST_COPY:
        left[N_LEFT] = 0
        if not hit and n > 0:
            left[N_LEFT], left[ORIGIN], _, _ = _propose(local, shared, match, rules.max_draft, rules, copy)
            left[AGE] = 0
    left[AGE] += 1
    return hit


# ------------------------------------------------------------------------------------------------------ kernels

OWN = -1

# Entries of a request's `match`: state and length of the longest suffix found in the shared tree, tokens of the text.
SHARED_STATE, SHARED_LENGTH, TEXT_LENGTH = range(3)


@jit.jit
def _source(tree: Arrays, state: int) -> int:
    text: int = tree.states[tree.edges[tree.states[state, BEST], TARGET], TEXT]
    return text


@jit.jit
def _propose(
    local: Arrays, shared: Arrays, match: Int64Array, room: int, rules: Rules, out: Buffers
) -> tuple[int, int, int, np.float32]:
    if rules.arctic:
        return _propose_arctic(local, shared, match, room, rules, out)
    state, length = _longest(local, local.meta[TAIL], local.meta[TAIL_LENGTH])
    other, other_length = _longest(shared, match[SHARED_STATE], match[SHARED_LENGTH])
    if max(length, other_length) == 0:
        return 0, 0, OWN, np.float32(0.0)
    if length >= other_length:
        n, score = _walk(local, state, length, room, rules, out)
        return n, length, OWN, score
    n, score = _walk(shared, other, other_length, room, rules, out)
    return n, other_length, _source(shared, other), score


@jit.jit
def _propose_arctic(
    local: Arrays, shared: Arrays, match: Int64Array, room: int, rules: Rules, out: Buffers
) -> tuple[int, int, int, np.float32]:
    """Its context is the last `depth` tokens, of which it matches at most all but one."""
    state, length, n, score = _score_maximal(local, local.meta[TAIL], local.meta[TAIL_LENGTH], room, rules, out)
    limit = max(0, min(match[TEXT_LENGTH], rules.depth) - 1)
    other, other_length = _slide(shared, match[SHARED_STATE], match[SHARED_LENGTH], limit)
    other, other_length, other_n, other_score = _score_maximal(shared, other, other_length, room, rules, out)
    if score >= other_score:
        _walk(local, state, length, n, rules, out)
        return n, length, OWN, score
    _walk(shared, other, other_length, other_n, rules, out)
    return other_n, other_length, _source(shared, other), other_score


@jit.jit
def propose(
    local: PackedArrays,
    shared: PackedArrays,
    match: Int64Array,
    room: int,
    rules: PackedRules,
    out: PackedBuffers,
) -> tuple[int, int, int, np.float32]:
    """Draft at most `room` tokens behind the text of `local` into `out`.

    Returns draft length, match length, source and score. The source is OWN (the request's own tree won) or the number
    of the last text of the shared tree in which match and first draft token occurred.
    """
    named = Rules(*rules)
    return _propose(Arrays(*local), Arrays(*shared), match, min(room, named.max_draft), named, Buffers(*out))


@jit.jit
def propose_scored(
    local: PackedArrays,
    shared: PackedArrays,
    match: Int64Array,
    room: int,
    rules: PackedRules,
    out: PackedBuffers,
) -> tuple[int, int, int, np.float32]:
    """As `propose`, but behind the suffix whose draft, cut to the suffix's length, has the best score.

    The draft itself is not cut. Its score is the one it was chosen by.
    """
    own, other, named, buffers = Arrays(*local), Arrays(*shared), Rules(*rules), Buffers(*out)
    room = min(room, named.max_draft)
    # Only from matches that were continued: behind the others a walk would begin elsewhere.
    state, length = _longest(own, own.meta[TAIL], own.meta[TAIL_LENGTH])
    state, length, n, score = _score_maximal(own, state, length, room, named, buffers)
    state2, length2 = _longest(other, match[SHARED_STATE], match[SHARED_LENGTH])
    state2, length2, n2, score2 = _score_maximal(other, state2, length2, room, named, buffers)
    if max(n, n2) == 0:
        return 0, 0, OWN, score
    if score >= score2:
        n, _ = _walk(own, state, length, room, named, buffers)
        return n, length, OWN, score
    n2, _ = _walk(other, state2, length2, room, named, buffers)
    return n2, length2, _source(other, state2), score2


@jit.jit
def resume(copy: PackedBuffers, left: Int64Array, tail: Int32Array) -> tuple[int, int]:
    """Where a copy that the text has left goes on (index of the next token, NONE = nowhere); tokens that say so.

    tail   int32 [<= RESYNC]   the text's last tokens
    """
    return _place(Buffers(*copy), left[N_LEFT], left[AGE], tail)


@jit.jit
def observe(
    local: PackedArrays,
    shared: PackedArrays,
    match: Int64Array,
    tokens: Int32Array,
    hits: UInt8Array,
    generated: bool,
    rules: PackedRules,
    out: PackedBuffers,
    copy: PackedBuffers,
    left: Int64Array,
) -> None:
    """Append tokens to `local`, follow them in `shared`; for generated ones note whether the cache would have hit.

    tokens       int32 [n]
    hits         uint8 [n]   written: 1 where the first token of the draft just before equals the token; 0 for prompt
                             tokens
    copy, left   the copy that the text has left, for `resume`; left: int64 [3], entries N_LEFT, AGE, ORIGIN
    """
    own, other, named, buffers = Arrays(*local), Arrays(*shared), Rules(*rules), Buffers(*out)
    for i in range(tokens.size):
        token = tokens[i]
        hits[i] = 0
        if generated:
            hits[i] = _follow(own, other, match, token, named, buffers, Buffers(*copy), left)
        _append(own, token, named)
        match[TEXT_LENGTH] += 1
        match[SHARED_STATE], match[SHARED_LENGTH] = _advance(
            other, match[SHARED_STATE], match[SHARED_LENGTH], token, named.depth - 1
        )


@jit.jit
def insert(tree: PackedArrays, tokens: Int32Array, rules: PackedRules) -> None:
    """Add a text of its own to the tree; texts are numbered from 0. tokens: int32 [n]."""
    arrays, named = Arrays(*tree), Rules(*rules)
    arrays.meta[LAST] = arrays.meta[TAIL] = ROOT_STATE
    arrays.meta[TAIL_LENGTH] = 0
    for token in tokens:
        _append(arrays, token, named)
    arrays.meta[N_TEXTS] += 1


@jit.jit
def rematch(shared: PackedArrays, match: Int64Array, tokens: Int32Array, rules: PackedRules) -> None:
    """Find the text's end anew in a shared tree that has changed. tokens: int32 [n], at least its last `depth`."""
    arrays, named = Arrays(*shared), Rules(*rules)
    state, length = ROOT_STATE, 0
    for token in tokens:
        state, length = _advance(arrays, state, length, token, named.depth - 1)
    match[SHARED_STATE], match[SHARED_LENGTH] = state, length


@jit.jit
def fill_table(tree: PackedArrays) -> None:
    """Enter every edge but the first of each state into an empty table."""
    arrays = Arrays(*tree)
    for edge in range(arrays.meta[N_EDGES]):
        if arrays.states[arrays.edges[edge, SOURCE], FIRST] != edge:
            _enter(arrays, edge)


# ------------------------------------------------------------------------------------------------------ storage


class SuffixTree:
    """Owns the arrays of one automaton and makes room in them. `nbytes` is what they take.

    Room for n tokens is 2n + 2 states, 3n + 4 edges and 2n table entries: what n tokens can need at most, so the
    kernels check nothing. (A state's first edge is not in the table, and at most n others exist.)
    """

    def __init__(self, tokens: int = 0) -> None:
        self._capacity = 0
        self.tokens = 0
        meta = np.zeros(7, np.int64)
        meta[N_STATES] = 1
        self.arrays = Arrays(np.zeros((0, 6), np.int32), np.zeros((0, 6), np.int32), np.zeros(1, np.int32), meta)
        self._allocate(max(tokens, 16))
        self.arrays.states[ROOT_STATE] = (0, NONE, 0, NONE, NONE, NONE)

    def bytes_with(self, more: int) -> int:
        """Bytes of all arrays after `reserve(more)`."""
        return self.nbytes if self.tokens + more <= self._capacity else _bytes(self._next_capacity(more))

    def reserve(self, more: int) -> None:
        """Make room for `more` tokens and count them as used; call before every kernel that appends."""
        if self.tokens + more > self._capacity:
            self._allocate(self._next_capacity(more))
        self.tokens += more

    def _next_capacity(self, more: int) -> int:
        return (self.tokens + more) * 5 // 4

    def _allocate(self, capacity: int) -> None:
        old = self.arrays
        states = np.empty((2 * capacity + 2, 6), np.int32)
        edges = np.empty((3 * capacity + 4, 6), np.int32)
        n_states, n_edges = int(old.meta[N_STATES]), int(old.meta[N_EDGES])
        states[: min(n_states, len(old.states))] = old.states[:n_states]
        edges[:n_edges] = old.edges[:n_edges]
        self.arrays = Arrays(states, edges, np.zeros(_table_size(capacity), np.int32), old.meta)
        self.packed = cast(PackedArrays, tuple(self.arrays))
        self._capacity = capacity
        self.nbytes = _bytes(capacity)
        if n_edges:
            fill_table(self.packed)


BYTES_PER_TOKEN = 2 * 24 + 3 * 24 + 4 * 4
"""Of a full tree, at most (the table has two to four entries a token)."""


def _table_size(capacity: int) -> int:
    return 1 << (2 * capacity - 1).bit_length()


def _bytes(capacity: int) -> int:
    return 24 * (2 * capacity + 2) + 24 * (3 * capacity + 4) + 4 * _table_size(capacity) + 56


def buffers(max_draft: int) -> Buffers:
    """Room for one draft."""
    ints = [np.zeros(max_draft, np.int32) for _ in range(3)]
    return Buffers(ints[0], ints[1], ints[2], np.zeros(max_draft, np.float32))


def compiled() -> bool:
    """Whether an earlier process left compiled code that is no older than this file."""
    return jit.compiled(observe)

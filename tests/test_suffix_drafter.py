"""The suffix cache as a drafter: lives of requests, scopes, eviction; hard cases K4-09, K5-01, K5-03, K5-05, K5-09."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvd.config import SuffixConfig
from hvd.drafters import suffix_tree
from hvd.drafters.suffix import SuffixDrafter
from hvd.errors import RequestError
from hvd.types import Arm, Draft
from test_suffix_tree import model_propose, occurrences, rules

MIB = 1024 * 1024


def make(config: SuffixConfig | None = None, vocab_size: int = 60_000) -> SuffixDrafter:
    return SuffixDrafter(config or SuffixConfig(), vocab_size, "tok")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def start(drafter: SuffixDrafter, key: int, prompt: np.ndarray, scope: str = "s") -> Draft | None:
    drafter.open(key, scope)
    drafter.observe(key, prompt, None, prompt=True)
    return drafter.propose(key, 64)


def ask(drafter: SuffixDrafter, prompt: np.ndarray, scope: str = "s") -> list[int]:
    """What a new request with this prompt would be drafted."""
    draft = start(drafter, 10**9, prompt, scope)
    drafter.close(10**9, keep=False)
    return [] if draft is None else draft.tokens.tolist()


def respond(drafter: SuffixDrafter, key: int, response: np.ndarray, scope: str = "s", keep: bool = True) -> None:
    """A whole request."""
    start(drafter, key, ids(1), scope)
    drafter.observe(key, response, None, prompt=False)
    drafter.close(key, keep=keep)


# ---------------------------------------------------------------------------------------------------- drafts


def test_a_draft_continues_what_stood_in_the_prompt() -> None:
    drafter = make()
    draft = start(drafter, 0, ids(5, 6, 7, 8, 9, 5, 6))
    assert draft is not None
    assert draft.tokens.tolist() == [7, 8, 9, 5, 6]
    assert draft.match_len == 2
    assert draft.arm is Arm.CACHE
    assert draft.local
    assert draft.is_chain
    assert draft.counts.tolist() == [1, 1, 1, 1, 1]
    assert draft.parent_counts.tolist() == [2, 1, 1, 1, 1]
    assert draft.probs.tolist() == [0.5, 1, 1, 1, 1]
    assert draft.score == 2.5
    assert [array.dtype for array in (draft.tokens, draft.parents, draft.counts, draft.parent_counts)] == [np.int32] * 4
    assert draft.probs.dtype == np.float32


FORM = (11, 12, 13, 14, 20, 21, 15, 16, 17, 18, 19)


def resumed(drafter: SuffixDrafter, key: int = 0, room: int = 64) -> Draft | None:
    return next((draft for draft in drafter.alternatives(key, room) if draft.age), None)


def test_a_copy_that_was_left_is_resumed() -> None:
    """The form is written out again with other words in its gap: 30 for 20, then 30 31 32 for 20 21."""
    drafter = make()
    start(drafter, 0, ids(*FORM, 0, 11, 12, 13))
    drafter.observe(0, ids(14), None, prompt=False)
    assert resumed(drafter) is None
    drafter.observe(0, ids(30), None, prompt=False)
    draft = resumed(drafter)
    assert draft is not None
    assert draft.tokens[:5].tolist() == [21, 15, 16, 17, 18]
    assert (draft.age, draft.origin, draft.match_len, draft.local) == (1, 4, 0, True)
    drafter.observe(0, ids(31, 32, 15), None, prompt=False)
    draft = resumed(drafter, room=2)
    assert draft is not None
    assert draft.tokens.tolist() == [16, 17]
    assert (draft.age, draft.origin, draft.match_len) == (4, 4, 1)
    assert len(draft.probs) == len(draft.counts) == len(draft.parent_counts) == len(draft.parents) == 2
    drafter.observe(0, ids(16, 17), None, prompt=False)
    assert resumed(drafter) is not None
    drafter.observe(0, ids(18), None, prompt=False)  # a match of three tokens had foretold it: that copy has taken over
    assert resumed(drafter) is None


def test_what_is_resumed_depends_on_the_text_alone() -> None:
    """Not on how it was cut into cycles."""
    drafter, response = make(), (11, 12, 13, 14, 30, 31, 15, 16, 40)
    for key in (0, 1):
        start(drafter, key, ids(*FORM, 0))
    drafter.observe(0, ids(*response), None, prompt=False)
    for token in response:
        drafter.observe(1, ids(token), None, prompt=False)
    one, other = resumed(drafter, 0), resumed(drafter, 1)
    assert one is not None
    assert other is not None
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.age, one.origin, one.match_len) == (other.age, other.origin, other.match_len)


def test_the_best_scored_draft_begins_behind_a_match_that_was_continued() -> None:
    """The longest match stands at the end of a kept response; its shorter part was continued."""
    drafter, phrase = make(), ids(1, 2, 3, 4, 5, 6)
    respond(drafter, 1, np.concatenate((phrase, ids(7, 8, 9))))
    respond(drafter, 2, np.concatenate((ids(0), phrase)))
    draft = start(drafter, 3, np.concatenate((ids(0), phrase)))
    scored = [other for other in drafter.alternatives(3, 64) if not other.age]
    assert draft is not None
    assert [(other.match_len, other.tokens.tolist()) for other in scored] == [(6, [7, 8, 9])]
    assert draft.match_len == 6


def test_the_best_scored_draft_is_another_where_a_shorter_match_is_surer() -> None:
    drafter = make()
    often = [2, 3, 4, 5, 6] * 6
    draft = start(drafter, 0, ids(1, 2, 3, 9, *often, 0, 1, 2, 3, 8, 7, 1, 2, 3))
    scored = [other for other in drafter.alternatives(0, 64) if not other.age]
    assert draft is not None
    assert draft.match_len == 3
    assert [other.tokens[:3].tolist() for other in scored] == [[4, 5, 6]]
    assert scored[0].match_len < draft.match_len
    assert drafter.alternatives(0, 0) == ()


def test_a_draft_is_the_callers_to_keep() -> None:
    drafter = make()
    first = start(drafter, 0, ids(5, 6, 7, 8, 9, 5, 6))
    assert first is not None
    start(drafter, 1, ids(1, 2, 1))
    assert first.tokens.tolist() == [7, 8, 9, 5, 6]


@pytest.mark.parametrize(("room", "tokens"), [(0, None), (-3, None), (1, [7]), (3, [7, 8, 9])])
def test_no_draft_is_longer_than_the_room(room: int, tokens: list[int] | None) -> None:
    drafter = make()
    start(drafter, 0, ids(5, 6, 7, 8, 9, 5, 6))
    draft = drafter.propose(0, room)
    assert (None if draft is None else draft.tokens.tolist()) == tokens


def test_nothing_to_offer() -> None:
    drafter = make()
    drafter.open(0)
    assert drafter.propose(0, 8) is None
    drafter.observe(0, ids(), None, prompt=True)
    drafter.observe(0, ids(1, 2, 3), None, prompt=True)
    assert drafter.propose(0, 8) is None


@pytest.mark.parametrize("mode", ["longest", "arctic"])
@pytest.mark.parametrize("bad", [-1, 100, 105, 2**31 - 1])
def test_k4_09_a_draft_ends_at_the_first_id_outside_the_vocabulary(mode: str, bad: int) -> None:
    drafter = make(SuffixConfig(mode=mode, max_spec_factor=4), vocab_size=100)
    draft = start(drafter, 0, ids(1, 2, 3, bad, 4, 1, 2))
    assert draft is not None
    assert draft.tokens.tolist() == [3]
    drafter.observe(0, ids(3), None, prompt=False)
    assert drafter.propose(0, 8) is None


def test_last_hits_are_of_the_last_observe() -> None:
    drafter = make()
    start(drafter, 0, ids(5, 6, 7, 8, 5, 6))
    assert drafter.last_hits(0).tolist() == [0] * 6
    drafter.observe(0, ids(7, 8, 1), None, prompt=False)
    assert drafter.last_hits(0).tolist() == [1, 1, 0]


def test_k5_03_a_rejected_draft_is_not_offered_again_in_the_same_place() -> None:
    """The target's own token behind the rejected draft is committed: it is what the same words bring up next time."""
    drafter = make()
    context, wrong = ids(5, 6, 7), ids(*range(20, 30))
    draft = start(drafter, 0, np.concatenate([context, wrong, context]))
    assert draft is not None
    assert draft.tokens[:10].tolist() == wrong.tolist()
    drafter.observe(0, ids(40), None, prompt=False)  # all of it rejected
    assert drafter.propose(0, 64) is None
    drafter.observe(0, context, None, prompt=False)
    draft = drafter.propose(0, 64)
    assert draft is not None
    assert draft.tokens[0] == 40


@pytest.mark.parametrize("mode", ["longest", "arctic"])
def test_a_draft_depends_on_the_text_alone_whatever_was_offered_before(mode: str) -> None:
    rng = np.random.default_rng(3)
    text = np.tile(rng.integers(0, 3, 30), 4).astype(np.int32)
    drafter = make(SuffixConfig(mode=mode))
    drafter.open(0, "s")
    for i in range(len(text)):
        drafter.observe(0, text[i : i + 1], None, prompt=False)
        draft = drafter.propose(0, 64)
        assert ask(drafter, text[: i + 1]) == ([] if draft is None else draft.tokens.tolist())


# -------------------------------------------------------------------------------------------- lives of requests


def test_k5_05_keys_are_opened_and_closed_once() -> None:
    drafter = make(SuffixConfig(shared=False))
    calls: list[Callable[[], object]] = [
        lambda: drafter.observe(0, ids(1), None, prompt=True),
        lambda: drafter.propose(0, 8),
        lambda: drafter.last_hits(0),
        lambda: drafter.close(0, keep=True),
    ]
    for _ in range(3):
        for call in calls:
            with pytest.raises(RequestError, match="request 0 is not open"):
                call()
        drafter.open(0)
        with pytest.raises(RequestError, match="request 0 is already open"):
            drafter.open(0)
        assert drafter.live_requests == 1
        assert drafter.bytes_used > 0
        drafter.close(0, keep=True)
        assert drafter.live_requests == 0
        assert drafter.bytes_used == 0


def test_two_hundred_rounds_leave_nothing_behind() -> None:
    drafter = make(SuffixConfig(shared=False))
    rng = np.random.default_rng(1)
    live: dict[int, int] = {}
    for key in range(200):
        drafter.open(key)
        live[key] = key
        for other in list(live):
            drafter.observe(other, rng.integers(0, 9, int(rng.integers(0, 40))).astype(np.int32), None, prompt=False)
            drafter.propose(other, 8)
        if len(live) > 8:
            drafter.close(live.pop(int(rng.choice(list(live)))), keep=bool(key % 2))
    for key in live:
        drafter.close(key, keep=False)
    assert drafter.live_requests == drafter.bytes_used == 0


def test_a_kept_response_serves_its_scope_from_its_end_on() -> None:
    drafter = make()
    start(drafter, 0, ids(1, 2, 3), "a")
    drafter.observe(0, ids(11, 12, 13), None, prompt=False)
    assert ask(drafter, ids(11), "a") == []
    drafter.close(0, keep=True)
    assert ask(drafter, ids(11), "a") == [12, 13]
    assert ask(drafter, ids(2), "a") == []  # prompts are not shared
    assert ask(drafter, ids(11), "b") == []
    assert ask(drafter, ids(11), "") == []


def test_k5_09_cancelled_requests_leave_no_trace() -> None:
    drafter = make()
    respond(drafter, 0, ids(11, 12, 13, 14))
    before = ask(drafter, ids(3, 11, 12)), drafter.stats
    for key in range(1, 40):
        respond(drafter, key, ids(11, 12, key, key), keep=False)
    assert (ask(drafter, ids(3, 11, 12)), drafter.stats) == before


def test_a_running_request_sees_what_its_scope_learns_meanwhile() -> None:
    drafter = make()
    start(drafter, 0, ids(3, 11, 12))
    assert drafter.propose(0, 8) is None
    respond(drafter, 1, ids(11, 12, 13, 14))
    draft = drafter.propose(0, 8)
    assert draft is not None
    assert draft.tokens.tolist() == [13, 14]
    assert not draft.local
    assert draft.match_len == 2


def test_prompts_in_chunks_are_one_prompt() -> None:
    drafter = make()
    drafter.open(0, "s")
    drafter.observe(0, ids(1, 2), None, prompt=True)
    drafter.observe(0, ids(3, 4), None, prompt=True)
    drafter.observe(0, ids(5), None, prompt=False)
    drafter.observe(0, ids(6), None, prompt=False)
    drafter.close(0, keep=True)
    assert [(name, [text.tolist() for text in texts]) for name, texts in drafter.shared] == [("s", [[5, 6]])]


# ------------------------------------------------------------------------------------------------------ eviction


@pytest.mark.parametrize(("count", "length"), [(150, 1000), (6_000, 25)], ids=["long", "short"])
def test_k5_01_bytes_level_off_and_lookups_find_live_text_only(
    count: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 3 * MIB
    drafter = make(SuffixConfig(max_bytes=bound), vocab_size=500)
    inserted = count_inserted(monkeypatch)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 500, (count, length)).astype(np.int32)
    used, work = [], []
    for i, text in enumerate(texts):
        before = inserted[0]
        drafter.add_response("s", text)
        used.append(drafter.bytes_used)
        work.append(inserted[0] - before)
        if i % (count // 50) == 0:
            check_live(drafter, texts[int(rng.integers(0, i + 1))])
    assert max(used) <= bound
    assert min(used[count // 2 :]) > bound / 6
    assert max(work) <= 6 * length + 2048  # no insert waits for a whole rebuild
    assert drafter.stats.evicted > count / 2
    assert drafter.stats.evicted + drafter.stats.responses == count


def count_inserted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tokens that go into trees; the count is the list's only entry."""
    total, insert = [0], suffix_tree.insert

    def counting(tree: suffix_tree.PackedArrays, tokens: np.ndarray, r: suffix_tree.PackedRules) -> None:
        total[0] += len(tokens)
        insert(tree, tokens, r)

    monkeypatch.setattr(suffix_tree, "insert", counting)
    return total


def check_live(drafter: SuffixDrafter, text: np.ndarray) -> None:
    """A draft behind the beginning of `text` stands in a response that the cache holds, and its counts are true."""
    [(_, live)] = list(drafter.shared)
    draft = start(drafter, 10**9, text[:3])
    drafter.close(10**9, keep=False)
    if draft is None or draft.local:
        return
    found = [*text[3 - draft.match_len : 3].tolist(), *draft.tokens.tolist()]
    windows = [response.tolist() for response in live]
    assert occurrences(windows, found[: draft.match_len + 1]) == draft.counts[0]
    if draft.counts[-1] == 1 and len(found) <= 64:
        assert occurrences(windows, found) == 1


def test_the_least_recently_used_leave_first() -> None:
    """A response that goes on being used outlives a hundred that came after it."""
    drafter = make(SuffixConfig(max_bytes=2 * MIB))
    rng = np.random.default_rng(0)
    precious = rng.integers(0, 60_000, 300).astype(np.int32)
    forgotten = rng.integers(0, 60_000, 300).astype(np.int32)
    drafter.add_response("s", forgotten)
    drafter.add_response("s", precious)
    for _ in range(200):
        drafter.add_response("s", rng.integers(0, 60_000, 300).astype(np.int32))
        assert ask(drafter, precious[:5]) == precious[5:69].tolist()
    assert ask(drafter, forgotten[:5]) == []


def test_the_least_recently_used_scope_leaves_first() -> None:
    drafter = make(SuffixConfig(max_bytes=MIB))
    for i in range(400):
        drafter.add_response(f"scope {i}", np.arange(100, dtype=np.int32) + i)
        assert drafter.bytes_used <= MIB
        assert ask(drafter, ids(7), "scope 0") != []
    kept = [name for name, _ in drafter.shared]
    assert "scope 0" in kept
    assert "scope 1" not in kept
    assert "scope 399" in kept


def test_of_a_response_larger_than_the_bound_the_end_is_kept() -> None:
    drafter = make(SuffixConfig(max_bytes=MIB))
    text = np.random.default_rng(0).integers(0, 60_000, 50_000).astype(np.int32)
    drafter.add_response("s", text)
    assert drafter.bytes_used <= MIB
    assert ask(drafter, text[-10:-5]) == text[-5:].tolist()
    assert ask(drafter, text[:5]) == []


def test_running_requests_push_finished_responses_out_and_stop_at_the_bound() -> None:
    drafter = make(SuffixConfig(max_bytes=MIB))
    drafter.add_response("s", np.arange(1000, dtype=np.int32))
    prompt = np.tile(np.arange(500, dtype=np.int32), 6)
    for key in range(4):
        start(drafter, key, prompt)
        assert drafter.bytes_used <= MIB + 4 * 4096 * 4  # the texts themselves are kept in any case
    assert drafter.stats.responses == 0
    assert drafter.propose(0, 8) is not None
    assert drafter.propose(3, 8) is None
    drafter.observe(3, ids(1, 2), None, prompt=False)
    assert drafter.last_hits(3).tolist() == [0, 0]
    for key in range(4):
        drafter.close(key, keep=False)
    assert drafter.bytes_used == 0


# ------------------------------------------------------------------------------------------ all of it, at random


class Lives(RuleBasedStateMachine):
    """Requests of two scopes that start, grow, draft and end at will, against the model that scans texts."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SuffixConfig(max_depth=6, max_draft=8)
        self.rules = rules(depth=6, max_draft=8)
        self.drafter = make(self.config, vocab_size=1000)
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.scopes: dict[int, str] = {}
        self.responses: dict[str, list[list[int]]] = {"a": [], "b": []}
        self.next_key = 0

    @rule(scope=st.sampled_from(["a", "b"]), prompt=st.lists(st.integers(0, 2), max_size=12))
    def begin(self, scope: str, prompt: list[int]) -> None:
        key = self.next_key
        self.next_key += 1
        self.drafter.open(key, scope)
        self.drafter.observe(key, ids(*prompt), None, prompt=True)
        self.texts[key], self.prompts[key], self.scopes[key] = prompt, len(prompt), scope

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=6))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        key = data.draw(st.sampled_from(sorted(self.texts)))
        self.drafter.observe(key, ids(*tokens), None, prompt=False)
        self.texts[key] = self.texts[key] + tokens

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.texts)))
        self.drafter.close(key, keep=keep)
        response = self.texts.pop(key)[self.prompts[key] :]
        if keep and response:
            self.responses[self.scopes[key]].append(response)

    @invariant()
    def drafts_equal_the_models(self) -> None:
        for key, text in self.texts.items():
            match_len, local, (tokens, counts, parents, _) = model_propose(
                text, self.responses[self.scopes[key]], self.rules
            )
            draft = self.drafter.propose(key, 64)
            if draft is None:
                assert tokens == []
                continue
            assert (draft.match_len, draft.local) == (match_len, local)
            assert draft.tokens.tolist() == tokens
            assert draft.counts.tolist() == counts
            assert draft.parent_counts.tolist() == parents


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# ------------------------------------------------------------------------------------------------------ start-up


def test_numba_is_imported_when_a_drafter_is_made_not_before() -> None:
    check = "import sys, hvd.drafters.suffix; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_where_no_cache_can_be_written_every_process_compiles() -> None:
    check = """
import sys, tempfile
def refuse(*args, **kwargs): raise OSError("read-only")
import numba
tempfile.TemporaryFile = refuse
from hvd.drafters import suffix_tree
sys.exit(suffix_tree.compiled())
"""
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_compiling_is_announced_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    make()
    assert suffix_tree.compiled()
    SuffixDrafter(SuffixConfig(), 10, "tok", said.append)
    assert said == []
    monkeypatch.setattr(suffix_tree, "compiled", lambda: False)
    SuffixDrafter(SuffixConfig(), 10, "tok", said.append)
    [line] = said
    assert line.startswith("compiling the suffix cache, once")
    assert "\n" not in line


def test_no_kind_of_array_makes_numba_compile_again() -> None:
    """A compilation in the midst of a request would take seconds."""
    drafter = make()
    respond(drafter, 0, ids(1, 2, 3))
    names = ("observe", "propose", "propose_scored", "resume", "insert", "rematch")
    kernels = [getattr(suffix_tree, name) for name in names]
    known = [kernel.signatures for kernel in kernels]
    read_only = np.frombuffer(ids(1, 2, 3, 1).tobytes(), np.int32)
    for key, tokens in enumerate((read_only, np.arange(8, dtype=np.int64)[::2], ids(4, 5, 4).tolist())):
        start(drafter, key, tokens)
        drafter.observe(key, tokens, None, prompt=False)
        drafter.propose(key, np.int64(3))
        drafter.observe(key, ids(1, 2, 3, 1, 9), None, prompt=False)
        drafter.alternatives(key, 3)
        drafter.close(key, keep=True)
        drafter.add_response("t", tokens)
    assert [kernel.signatures for kernel in kernels] == known

"""Mode "arctic" against drafts of ArcticInference 0.3.0 (data/arctic_golden.npz, by scripts/make_arctic_golden.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hvd.config import SuffixConfig
from hvd.drafters.suffix import SuffixDrafter
from hvd.types import Draft

GOLDEN = Path(__file__).parent / "data" / "arctic_golden.npz"


@dataclass(frozen=True)
class State:
    """What ArcticInference drafted somewhere in a request."""

    position: int
    tokens: np.ndarray
    probs: np.ndarray
    score: float
    match_len: int


@dataclass(frozen=True)
class Request:
    text: np.ndarray
    prompt: int
    states: list[State]


@dataclass(frozen=True)
class Session:
    config: SuffixConfig
    requests: list[Request]


def read_sessions() -> Iterator[Session]:
    g = dict(np.load(GOLDEN))
    text_ends = np.cumsum(g["request_tokens"])
    draft_ends = np.cumsum(g["state_length"])
    for s in range(len(g["session_factor"])):
        requests = []
        for r in np.flatnonzero(g["request_session"] == s):
            states = []
            for n in np.flatnonzero(g["state_request"] == r):
                part = slice(draft_ends[n] - g["state_length"][n], draft_ends[n])
                states.append(
                    State(
                        int(g["state_position"][n]),
                        g["draft_tokens"][part],
                        g["draft_probs"][part],
                        float(g["state_score"][n]),
                        int(g["state_match_len"][n]),
                    )
                )
            text = g["texts"][text_ends[r] - g["request_tokens"][r] : text_ends[r]]
            requests.append(Request(text, int(g["request_prompt"][r]), states))
        config = SuffixConfig(
            mode="arctic",
            max_draft=int(g["session_max_spec_tokens"][s]),
            max_spec_factor=float(g["session_factor"][s]),
            max_spec_offset=float(g["session_offset"][s]),
            min_token_prob=float(g["session_min_prob"][s]),
        )
        yield Session(config, requests)


def assert_equal(draft: Draft | None, state: State, where: str) -> None:
    if not len(state.tokens):
        assert draft is None, where
        return
    assert draft is not None, where
    assert draft.tokens.tolist() == state.tokens.tolist(), where
    running = np.multiply.accumulate(draft.probs, dtype=np.float32)
    assert running.tolist() == state.probs.tolist(), where
    assert draft.score == state.score, where
    assert draft.match_len == state.match_len, where
    assert draft.is_chain
    assert (draft.counts >= 1).all()
    assert draft.probs.tolist() == (draft.counts / draft.parent_counts).astype(np.float32).tolist()


def test_drafts_probs_scores_and_match_lengths_equal_arctic_inference() -> None:
    states = nonempty = shared = 0
    for s, session in enumerate(read_sessions()):
        drafter = SuffixDrafter(session.config, vocab_size=1000, tokenizer_fingerprint="golden")
        for key, request in enumerate(session.requests):
            drafter.open(key, "session")
            drafter.observe(key, request.text[: request.prompt], None, prompt=True)
            at = request.prompt
            for state in request.states:
                drafter.observe(key, request.text[at : state.position], None, prompt=False)
                at = state.position
                draft = drafter.propose(key, 64)
                assert_equal(draft, state, f"session {s}, request {key}, position {at}")
                states += 1
                nonempty += draft is not None
                shared += draft is not None and not draft.local
            drafter.observe(key, request.text[at:], None, prompt=False)
            drafter.close(key, keep=True)
    assert states >= 5000
    assert nonempty >= 5000
    assert shared >= 300  # the tree of earlier responses won often enough to be tested


@pytest.mark.parametrize("mode", ["arctic", "longest"])
def test_sharing_off_leaves_only_the_own_text(mode: str) -> None:
    drafter = SuffixDrafter(SuffixConfig(mode=mode, shared=False), vocab_size=1000, tokenizer_fingerprint="golden")
    text = np.array([1, 2, 3, 4, 5, 6], np.int32)
    drafter.open(0, "session")
    drafter.observe(0, text, None, prompt=False)
    drafter.close(0, keep=True)
    drafter.open(1, "session")
    drafter.observe(1, text[:3], None, prompt=True)
    assert drafter.propose(1, 8) is None

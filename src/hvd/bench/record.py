"""One prompt under one method: what `hvd bench --json` keeps of it."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hvd.bench.peers import PeerAnswer
from hvd.engine.llm import Completion
from hvd.traces.prompts import Prompt
from hvd.training.loops import loop_onset
from hvd.types import StepRecord

PHASES = ("propose", "gate", "forward", "walk")
POSITION_EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048)
"""Where stretches of an answer begin; the last one has no end."""


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """One prompt under one method.

    policy               name of the policy, or of the peer's method
    peer                 the peer that ran it; None for our own engine
    tokens               generated
    decoded              tokens made within `decode_seconds`: all of ours; a peer's without those that its prefill gave
    decode_seconds       of decoding; prefill and tokenization are not in it
    prefill_seconds      a peer's: up to its first token
    wall_seconds         of the whole request, as its caller sees it
    drafted, accepted    draft tokens verified, accepted; 0 for peers
    cycles, positions    passes, and positions computed in them; 0 for peers, which do not tell
    phases               seconds by phase: propose, gate, forward, walk; empty for peers
    identical            token ids equal plain decoding's (a peer's need not: its arithmetic is another)
    differs_at           first output position that differs, None when identical
    loop_onset           where the output got stuck repeating itself; None when it did not
    output               digest of the token ids
    stretches            [first position, tokens, cycles, seconds] of the cycles that began in each stretch of
                         `POSITION_EDGES`; empty for peers
    """

    id: str
    dataset: str
    category: str
    policy: str
    peer: str | None
    prompt_tokens: int
    tokens: int
    decoded: int
    decode_seconds: float
    prefill_seconds: float
    wall_seconds: float
    cycles: int
    drafted: int
    accepted: int
    positions: int
    arms: dict[str, dict[str, int]]
    phases: dict[str, float]
    finish_reason: str
    identical: bool
    differs_at: int | None
    loop_onset: int | None
    output: str
    stretches: list[tuple[int, int, int, float]]

    def as_json(self) -> dict[str, object]:
        """The record as `hvd bench --json` writes it."""
        return asdict(self)


def own_record(
    id_: str, prompt: Prompt, policy: str, completion: Completion, wall: float, plain: Sequence[int]
) -> BenchRecord:
    """The record of one of our engines. `plain`: the token ids of plain decoding."""
    stats, ids = completion.stats, completion.token_ids
    differs = first_difference(ids, plain)
    return BenchRecord(
        id=id_,
        dataset=prompt.dataset,
        category=prompt.category,
        policy=policy,
        peer=None,
        prompt_tokens=stats.prompt_tokens,
        tokens=len(ids),
        decoded=len(ids),
        decode_seconds=stats.decode_seconds,
        prefill_seconds=stats.prefill_seconds,
        wall_seconds=wall,
        cycles=stats.cycles,
        drafted=sum(arm.drafted for arm in stats.arms.values()),
        accepted=sum(arm.accepted for arm in stats.arms.values()),
        positions=stats.width,
        arms={
            arm.value: {"cycles": of.cycles, "drafted": of.drafted, "accepted": of.accepted}
            for arm, of in stats.arms.items()
        },
        phases={name: sum(getattr(step.times, name) for step in completion.records) for name in PHASES},
        finish_reason=completion.finish_reason.value,
        identical=differs is None,
        differs_at=differs,
        loop_onset=loop_onset(np.asarray(ids, np.int32)),
        output=digest(ids),
        stretches=stretches(completion.records),
    )


def peer_record(
    id_: str, prompt: Prompt, method: str, peer: str, prompt_tokens: int, answer: PeerAnswer, plain: Sequence[int]
) -> BenchRecord:
    """The record of a peer's method."""
    differs = first_difference(answer.tokens, plain)
    return BenchRecord(
        id=id_,
        dataset=prompt.dataset,
        category=prompt.category,
        policy=method,
        peer=peer,
        prompt_tokens=prompt_tokens,
        tokens=len(answer.tokens),
        decoded=answer.decoded,
        decode_seconds=answer.decode_seconds,
        prefill_seconds=answer.prefill_seconds,
        wall_seconds=answer.wall_seconds,
        cycles=0,
        drafted=0,
        accepted=0,
        positions=0,
        arms={},
        phases={},
        finish_reason=answer.finish_reason,
        identical=differs is None,
        differs_at=differs,
        loop_onset=loop_onset(np.asarray(answer.tokens, np.int32)),
        output=digest(answer.tokens),
        stretches=[],
    )


def digest(ids: Sequence[int]) -> str:
    """16 hex digits that stand for token ids."""
    return hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing on one side); None when equal."""
    for i, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(plain) else min(len(ours), len(plain))


def stretches(steps: Sequence[StepRecord]) -> list[tuple[int, int, int, float]]:
    """(first position, tokens, cycles, seconds) by where a cycle began; stretches without a cycle are left out."""
    sums: dict[int, list[float]] = {}
    for step in steps:
        edge = POSITION_EDGES[bisect_right(POSITION_EDGES, step.position) - 1]
        seconds = sum(getattr(step.times, name) for name in PHASES)
        of = sums.setdefault(edge, [0, 0, 0.0])
        for i, more in enumerate((step.committed, 1, seconds)):
            of[i] += more
    return [(edge, int(tokens), int(cycles), seconds) for edge, (tokens, cycles, seconds) in sorted(sums.items())]

"""Measures methods interleaved: every prompt runs under all of them before the next, in an order that rotates.

Each policy has an engine of its own (its own suffix cache, its own learning), all share one loaded target and one cost
model; peers run the same prompts between them. The machine's slow and fast moments then fall on all alike, and none
profits from another's cache. What is analysed is analysed behind each prompt, outside of anything timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from hvd.bench.findings import Analyst
from hvd.bench.peers import PeerAnswer, PeerMethod
from hvd.bench.record import BenchRecord, own_record, peer_record
from hvd.config import SamplingParams
from hvd.drafters.base import Drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.llm import LLM, Completion
from hvd.errors import ConfigError, RequestError
from hvd.payoff.predictor import Predictor
from hvd.traces.conversation import Conversation
from hvd.traces.prompts import Prompt
from hvd.types import Arm

PLAIN = "plain"
SCOPES = ("none", "dataset", "all")
"""Whose earlier answers a request's cache may draw on: none but its own text, those of its data set, all."""
AGAIN = "plain-again"
"""Plain decoding measured a second time: what it differs from `plain` by is noise."""


@dataclass(slots=True)
class Outcome:
    """What one conversation gave.

    records    one a turn and method
    findings   one a turn, when there is an analyst (`hvd.bench.findings`)
    skipped    (id, why) of turns that could not run
    failed     (id, method, error) where a peer failed
    """

    records: list[BenchRecord] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str, str]] = field(default_factory=list)


class Runner:
    """Runs conversations under several methods; see the module's docstring.

    base         a loaded model; its target, tokenizer, head and cost model are used
    policies     names; plain decoding is put in front when missing, since everything is compared with it
    params       sampling parameters. ConfigError when they sample without a seed: the texts would differ each time;
                 and when they sample at all beside peers, which decode greedily
    predictors   at most one of each kind; each policy takes the kind it needs
    scope        one of SCOPES
    repeat       measure plain decoding a second time, as `plain-again`
    peers        methods of other programs
    analyse      replay each answer for what `hvd.bench.analysis` adds up
    """

    def __init__(
        self,
        base: LLM,
        policies: Sequence[str],
        params: SamplingParams,
        *,
        predictors: Sequence[Predictor] = (),
        scope: str = "none",
        repeat: bool = False,
        peers: Sequence[PeerMethod] = (),
        analyse: bool = True,
    ) -> None:
        if scope not in SCOPES:
            raise ConfigError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        if not params.greedy and params.seed is None:
            raise ConfigError("a benchmark with temperature > 0 needs a seed; else the outputs can't be compared")
        if peers and not params.greedy:
            raise ConfigError("peers decode greedily; leave out --temperature, or --peers")
        self._params, self._scope = params, scope
        names = {name: name for name in [PLAIN, *policies]} | ({AGAIN: PLAIN} if repeat else {})
        self._engines = {
            name: policy_engine(base, policy, predictors, shared=scope != "none") for name, policy in names.items()
        }
        self._peers = {peer.name: peer for peer in peers}
        self._order = deque([*self._engines, *self._peers])
        self._analyst = Analyst(base, list(names), predictors, scope, params.max_tokens) if analyse else None

    @property
    def policies(self) -> list[str]:
        """What is measured, in the order of the tables: policies, then peers' methods."""
        return [*self._engines, *self._peers]

    def warm_up(self) -> None:
        """Run every method once, so that no measurement pays for compiling or for first passes."""
        engine = next(iter(self._engines.values()))
        ids = engine.chat_prompt([{"role": "user", "content": "List: one two three one two three one two three"}])
        for llm in self._engines.values():
            llm.generate([ids], SamplingParams(max_tokens=16, ignore_eos=True), scope="warm-up")
        for peer in self._peers.values():
            self._ask(peer, ids, 16)
        if self._analyst is not None:
            self._analyst.begin()

    def run(self, prompt: Prompt, on_turn: Callable[[], None] = lambda: None) -> Outcome:
        """Measure one conversation, turn by turn. Plain decoding's answers go into the history of open ones."""
        outcome, conversation = Outcome(), Conversation(prompt)
        for id_, messages in conversation:
            try:
                ids = self._engines[PLAIN].chat_prompt(messages)
                own, peers = self._measure(ids, prompt.dataset)
            except RequestError as error:
                outcome.skipped.append((id_, str(error)))
                conversation.answered("")
                continue
            finally:
                on_turn()
            self._take(outcome, id_, prompt, own, peers, len(ids))
            if self._analyst is not None:
                done = {name: completion for name, (completion, _) in own.items()}
                outcome.findings.append(self._analyst.find(id_, prompt, messages, done))
            conversation.answered(own[PLAIN][0].text)
        return outcome

    def _measure(
        self, ids: list[int], dataset: str
    ) -> tuple[dict[str, tuple[Completion, float]], dict[str, PeerAnswer | str]]:
        """(completion, wall seconds) by policy; the answer, or the error, by peer's method."""
        scope = dataset if self._scope == "dataset" else ""
        most = self._most_tokens(ids)
        own: dict[str, tuple[Completion, float]] = {}
        peers: dict[str, PeerAnswer | str] = {}
        for name in self._order:
            if name in self._peers:
                peers[name] = self._ask(self._peers[name], ids, most)
                continue
            started = perf_counter()
            [completion] = self._engines[name].generate([ids], self._params, scope=scope)
            own[name] = completion, perf_counter() - started
        self._order.rotate(-1)
        return own, peers

    def _most_tokens(self, ids: Sequence[int]) -> int:
        room = self._engines[PLAIN].target.spec.context_limit - len(ids)
        return room if self._params.max_tokens is None else min(room, self._params.max_tokens)

    def _ask(self, peer: PeerMethod, ids: Sequence[int], most: int) -> PeerAnswer | str:
        if most < 1:
            return "no room for an answer"
        try:
            peer.prepare(len(ids) + most)
            return peer.decode(ids, most)
        except Exception as error:  # noqa: BLE001 - another program's failure is a finding, not ours
            return " ".join(str(error).split()) or type(error).__name__

    def _take(
        self,
        outcome: Outcome,
        id_: str,
        prompt: Prompt,
        own: Mapping[str, tuple[Completion, float]],
        peers: Mapping[str, PeerAnswer | str],
        prompt_tokens: int,
    ) -> None:
        """Make records of what was measured, in the order of the tables."""
        plain = own[PLAIN][0].token_ids
        outcome.records += [own_record(id_, prompt, name, *own[name], plain) for name in self._engines]
        for name, peer in self._peers.items():
            answer = peers[name]
            if isinstance(answer, str):
                outcome.failed.append((id_, name, answer))
            else:
                outcome.records.append(peer_record(id_, prompt, name, peer.peer, prompt_tokens, answer, plain))


def policy_engine(base: LLM, policy: str, predictors: Sequence[Predictor] = (), *, shared: bool = False) -> LLM:
    """An engine of its own over a loaded model: a fresh suffix cache; target, head, cost model and predictors shared.

    policy   a name, or "name@mode" with a mode of the suffix cache (`SuffixConfig.mode`): fixed rules verify whole
             drafts, and do better with the shorter ones of "arctic"
    shared   whether the cache keeps finished answers for later requests of the same scope
    """
    name, _, mode = policy.partition("@")
    suffix = replace(base.config.suffix, shared=shared, mode=mode or base.config.suffix.mode)
    config = replace(base.config, policy=name, record=True, suffix=suffix)
    drafters: dict[Arm, Drafter] = dict(base.drafters)
    if Arm.CACHE in drafters:
        fingerprint = base.tokenizer.fingerprint if base.tokenizer is not None else ""
        drafters[Arm.CACHE] = SuffixDrafter(suffix, base.target.spec.vocab_size, fingerprint)
    return LLM.from_parts(base.target, base.tokenizer, drafters, base.cost, config, predictors)

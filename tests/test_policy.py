"""Policies: their contract under any situation, their names, and never slower than the simple choices.

The simulations count modelled seconds, never measured ones, and draw from seeded generators: the same every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel, Surface
from hvd.payoff.features import STATE_NAMES
from hvd.payoff.history import History
from hvd.payoff.hybrid import Hybrid
from hvd.payoff.policy import Choice, Policy, Situation, make_policy, policy_names
from hvd.payoff.predictor import MLPWeights, Predictor, ScalarPredictor, SurvivalPredictor
from hvd.types import Arm, Draft, Int32Array

BUILT_IN = ["plain", "cache", "eagle3", "any-match", "match-len", "score", "hvd-paper", "hvd"]


def cpu_cost(*, min_width: int = 2) -> CostModel:
    """A pass on two cores: bound by arithmetic from a width of 8 on."""
    seconds = np.array([[14, 18, 24, 40, 80, 160], [43, 55, 75, 109, 180, 330]]) / 1e3
    head = Surface((1, 4), (0,), np.array([[0.003, 0.012]]))
    return CostModel(
        Surface((2, 4, 8, 16, 32, 64), (512, 4096), seconds),
        eagle3=head,
        backlog_seconds=1e-4,
        overhead=1e-3,
        min_width=min_width,
        shared_passes=False,
    )


def gpu_cost() -> CostModel:
    """Nearly flat in width, shared by a batch until arithmetic binds."""
    seconds = np.array([[10, 10.5, 12, 30]]) / 1e3
    head = Surface((1, 4), (0,), np.array([[0.0006, 0.0024]]))
    return CostModel(Surface((1, 16, 64, 256), (0,), seconds), eagle3=head, overhead=5e-4)


def constant_survival(logit: float) -> SurvivalPredictor:
    inputs = len(SurvivalPredictor.input_names)
    layer = (np.zeros((inputs, 1), np.float32), np.array([logit], np.float32))
    return SurvivalPredictor(MLPWeights((layer,), np.zeros(inputs, np.float32), np.ones(inputs, np.float32)))


def inverted_survival() -> SurvivalPredictor:
    """Confident where the cache has been wrong, hopeless where it has been right."""
    names = SurvivalPredictor.input_names
    weight = np.zeros((len(names), 1), np.float32)
    weight[names.index("hits_8")] = -12.0
    layer = (weight, np.array([6.0], np.float32))
    return SurvivalPredictor(MLPWeights((layer,), np.zeros(len(names), np.float32), np.ones(len(names), np.float32)))


def scalar(bias: float) -> ScalarPredictor:
    inputs = len(STATE_NAMES)
    layer = (np.zeros((inputs, 1), np.float32), np.array([bias], np.float32))
    return ScalarPredictor(MLPWeights((layer,), np.zeros(inputs, np.float32), np.ones(inputs, np.float32)))


def predictor_for(name: str) -> Predictor | None:
    return scalar(7.0) if name == "hvd-paper" else None


def chain(n: int, match_len: int = 4, score: float = 2.0, count: int = 1) -> Draft:
    counts = np.full(n, count, np.int32)
    return Draft.chain(
        np.arange(n, dtype=np.int32), Arm.CACHE, np.ones(n, np.float32), score, match_len, counts, counts
    )


def situation(
    draft: Draft | None = None, *, room: int = 100, eagle3: int = 0, history: History | None = None
) -> Situation:
    return Situation(draft, history or History(History.UNKNOWN_CLASSES), room, 500, eagle3, 1 if eagle3 else 0)


# -- the contract ------------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> list[Situation]:
    made = []
    for _ in range(draw(st.integers(0, 5))):
        history = History(np.arange(256).astype(np.uint8))
        history.prompt(np.arange(draw(st.integers(1, 20)), dtype=np.int32))
        hits = np.array(draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)), np.uint8)
        history.commit(np.arange(len(hits), dtype=np.int32), hits, Arm.CACHE, len(hits), len(hits) - 1, 9)
        n = draw(st.integers(0, 70))
        counts = np.sort(np.array(draw(st.lists(st.integers(1, 50), min_size=n, max_size=n)), np.int32))[::-1]
        parents = np.concatenate((counts[:1], counts[:-1])).astype(np.int32)
        probs = (counts / np.maximum(1, parents)).astype(np.float32)
        ids = np.array(draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)), np.int32)
        score, match_len = draw(st.floats(0, 70)), draw(st.integers(0, 64))
        draft = Draft.chain(ids, Arm.CACHE, probs, score, match_len, counts.copy(), parents)
        room, eagle3 = draw(st.integers(0, 80)), draw(st.integers(0, 12))
        cache = draft if draw(st.booleans()) else None
        made.append(Situation(cache, history, room, draw(st.integers(1, 8000)), eagle3, draw(st.integers(0, 99))))
    return made


@pytest.mark.parametrize("cost", [cpu_cost, gpu_cost])
@pytest.mark.parametrize("name", [*BUILT_IN, "match-len:1", "score:0.5", "hvd-paper:1"])
@settings(max_examples=25, deadline=None)
@given(batch=situations())
def test_contract(name: str, cost: Callable[[], CostModel], batch: list[Situation]) -> None:
    policy = make_policy(name, predictor=predictor_for(name.partition(":")[0]))
    again = make_policy(name, predictor=predictor_for(name.partition(":")[0]))
    for _ in range(2):
        choices = policy.choose(batch, cost())
        assert len(choices) == len(batch)
        other = again.choose(batch, cost())
        assert [(c.arm, c.length, c.reason) for c in choices] == [(c.arm, c.length, c.reason) for c in other]
        for place, choice in zip(batch, choices, strict=True):
            assert 0 <= choice.length <= place.room
            assert choice.arm is Arm.PLAIN or choice.arm in policy.uses
            offered = {Arm.PLAIN: 0, Arm.EAGLE3: place.eagle3, Arm.CACHE: len(place.cache) if place.cache else 0}
            assert choice.length <= offered[choice.arm]
            assert (choice.length == 0) == (choice.arm is Arm.PLAIN)
            assert np.isnan(choice.expected) or 0.0 <= choice.expected <= choice.length
            policy.observe(place, choice, choice.length // 2)
            again.observe(place, choice, choice.length // 2)


def test_rules_decide_as_they_say() -> None:
    draft = chain(20, match_len=4, score=2.5)
    table = {
        "plain": (Arm.PLAIN, Arm.PLAIN),
        "cache": (Arm.CACHE, Arm.CACHE),
        "eagle3": (Arm.PLAIN, Arm.EAGLE3),
        "any-match": (Arm.CACHE, Arm.CACHE),
        "match-len": (Arm.CACHE, Arm.CACHE),
        "match-len:5": (Arm.PLAIN, Arm.EAGLE3),
        "score": (Arm.PLAIN, Arm.EAGLE3),
        "score:2.5": (Arm.CACHE, Arm.CACHE),
        "hvd-paper": (Arm.CACHE, Arm.CACHE),
        "hvd-paper:7": (Arm.PLAIN, Arm.EAGLE3),
    }
    for name, (alone, with_head) in table.items():
        policy = make_policy(name, predictor=predictor_for(name.partition(":")[0]))
        for eagle3, arm in ((0, alone), (4, with_head)):
            choice = policy.choose([situation(draft, eagle3=eagle3)], cpu_cost())[0]
            assert choice.arm is arm, (name, eagle3)
            assert choice.length == {Arm.CACHE: 20, Arm.EAGLE3: 4, Arm.PLAIN: 0}[arm]
            none = policy.choose([situation(None, eagle3=eagle3)], cpu_cost())[0]
            assert none.arm is (Arm.EAGLE3 if eagle3 and name not in ("plain", "cache") else Arm.PLAIN)


# -- names -------------------------------------------------------------------------------------------------------------


def test_all_names_build_and_say_their_name() -> None:
    assert policy_names()[: len(BUILT_IN)] == BUILT_IN
    for name in BUILT_IN:
        assert make_policy(name, predictor=predictor_for(name)).name == name


@pytest.mark.parametrize("name", ["", "hvd2", "oracle", "HVD", ":4"])
def test_unknown_names_list_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown policy.*plain.*match-len.*hvd"):
        make_policy(name)


@pytest.mark.parametrize(
    "name", ["match-len:x", "match-len:", "match-len:-1", "match-len:nan", "score:inf", "plain:3", "hvd:6", "cache:"]
)
def test_bad_arguments_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        make_policy(name)


def test_predictors_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="'survival'"):
        make_policy("hvd", predictor=scalar(1.0))
    for wrong in (None, constant_survival(0.0)):
        with pytest.raises(ConfigError, match="'scalar'"):
            make_policy("hvd-paper", predictor=wrong)
    with pytest.raises(ConfigError, match="tau"):
        make_policy("hvd-paper:-1", predictor=scalar(1.0))
    with pytest.raises(ConfigError, match="bogus"):
        make_policy("hvd", bogus=1)


def test_others_register_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, name: str, value: object) -> None:
            self.name = name
            self.load = lambda: value

    class Mine(Policy):
        name: ClassVar[str] = "mine"

        def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
            return [Choice(Arm.PLAIN) for _ in situations]

    known = [Entry("mine", Mine), Entry("broken", "no class")]
    monkeypatch.setattr(
        "hvd.payoff.policy.entry_points", lambda group, name=None: [e for e in known if name in (None, e.name)]
    )
    assert isinstance(make_policy("mine"), Mine)
    assert policy_names()[-2:] == ["broken", "mine"]
    with pytest.raises(ConfigError, match="derived from"):
        make_policy("broken")
    with pytest.raises(ConfigError, match="no argument"):
        make_policy("mine:3")


# -- hvd looks at costs ------------------------------------------------------------------------------------------------


def test_a_free_token_is_always_taken() -> None:
    draft = chain(30, match_len=0)
    policy = Hybrid(constant_survival(-6.0))
    assert policy.choose([situation(draft)], cpu_cost(min_width=2))[0].length == 1
    assert policy.choose([situation(draft)], cpu_cost(min_width=1))[0].length == 1  # 1 and 2 were measured alike
    steep = CostModel(Surface((1, 2, 64), (0,), np.array([[0.01, 0.02, 0.64]])))
    choice = policy.choose([situation(draft)], steep)[0]
    assert choice.arm is Arm.PLAIN
    assert "first token" in choice.reason


def test_the_dearer_the_width_the_shorter_the_draft() -> None:
    lengths = []
    for slope in (0.0, 2e-4, 1e-3, 4e-3, 2e-2):
        cost = CostModel(Surface((1, 65), (0,), np.array([[0.01, 0.01 + 64 * slope]])))
        lengths.append(Hybrid(constant_survival(2.0)).choose([situation(chain(60))], cost)[0].length)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 25
    assert lengths[-1] < 3


def test_a_bad_head_is_left_alone_and_a_good_one_kept() -> None:
    for accepted, share in ((0, 0.05), (4, 0.95)):
        policy, cost, history = Hybrid(), cpu_cost(), History(History.UNKNOWN_CLASSES)
        used = 0
        for _ in range(300):
            place = situation(None, eagle3=4, history=history)
            choice = policy.choose([place], cost)[0]
            used += choice.arm is Arm.EAGLE3
            policy.observe(place, choice, min(choice.length, accepted))
        assert used / 300 < share if accepted == 0 else used / 300 > share


def test_a_long_backlog_does_not_keep_a_good_head_from_beginning() -> None:
    history = History(History.UNKNOWN_CLASSES)
    place = Situation(None, history, room=100, context=500, eagle3=4, backlog=400)
    for backlog_seconds, arm in ((5e-5, Arm.EAGLE3), (1e-2, Arm.PLAIN)):
        cost = CostModel(
            Surface((1, 64), (0,), np.array([[0.01, 0.02]])),
            eagle3=Surface((1,), (0,), np.array([[1e-3]])),
            backlog_seconds=backlog_seconds,
        )
        assert Hybrid().choose([place], cost)[0].arm is arm


def test_a_whole_head_drafts_all_or_nothing() -> None:
    place = dataclasses.replace(situation(None, eagle3=8), whole=True)
    choice = Hybrid().choose([place], gpu_cost())[0]
    assert (choice.arm, choice.length) == (Arm.EAGLE3, 8)


def test_requests_of_a_shared_pass_compete_for_width() -> None:
    """The lengths chosen are the best there are: no other split of the same drafts has a better ratio."""
    cost = CostModel(Surface((1, 4, 40), (0,), np.array([[0.010, 0.012, 0.100]])))
    places = [situation(chain(n, match_len=m)) for n, m in ((5, 1), (6, 8), (4, 30))]
    policy = Hybrid()
    lengths = [c.length for c in policy.choose(places, cost)]
    survivals = [policy.survival.forecast(p.history, p.cache).survival for p in places if p.cache is not None]

    def ratio(split: tuple[int, ...]) -> float:
        tokens = 3 + sum(float(s[:n].sum()) for s, n in zip(survivals, split, strict=True))
        return tokens / cost.verify(3 + sum(split), 0)

    best = max(ratio((a, b, c)) for a in range(6) for b in range(7) for c in range(5))
    assert ratio(tuple(lengths)) >= best * 0.997
    assert lengths == sorted(lengths)
    assert sum(lengths) < 15


@pytest.mark.parametrize("cost", [cpu_cost, gpu_cost])
def test_the_better_of_two_cache_drafts_is_taken_and_learned_from(cost: Callable[[], CostModel]) -> None:
    weak, strong = (
        chain(20, match_len=1),
        dataclasses.replace(chain(20, match_len=30, count=9), tokens=np.arange(20, 40)),
    )
    place = dataclasses.replace(situation(weak), alternatives=(strong,))
    policy = Hybrid()
    choice = policy.choose([place], cost())[0]
    assert choice.arm is Arm.CACHE
    assert choice.draft is strong
    assert len(policy.foretold(place, choice)[Arm.CACHE]) == 20
    hoped = choice.expected
    for _ in range(20):
        policy.observe(place, choice, 0)
        choice = policy.choose([place], cost())[0]
    assert choice.draft is not strong or choice.expected < hoped / 3


def test_a_draft_that_only_begins_another_changes_nothing() -> None:
    draft = chain(20, match_len=8)
    alone, beside = situation(draft), dataclasses.replace(situation(draft), alternatives=(draft.first(6),))
    one, other = (Hybrid().choose([place], cpu_cost())[0] for place in (alone, beside))
    assert (one.arm, one.length, other.draft) == (other.arm, other.length, draft)


def test_a_crowded_batch_speculates_less() -> None:
    cost = gpu_cost()
    alone = Hybrid(constant_survival(1.0)).choose([situation(chain(30))], cost)[0].length
    crowd = Hybrid(constant_survival(1.0)).choose([situation(chain(30)) for _ in range(64)], cost)
    assert max(c.length for c in crowd) < alone


def test_equal_situations_get_equal_choices_whatever_small_noise_the_costs_have() -> None:
    policy, cost, history = Hybrid(), cpu_cost(), History(History.UNKNOWN_CLASSES)
    history.commit(np.arange(9, dtype=np.int32), np.ones(9, np.uint8), Arm.CACHE, 8, 8, 20)
    rng = np.random.default_rng(0)
    lengths = []
    for _ in range(100):
        choice = policy.choose([situation(chain(40, 12), history=history)], cost)[0]
        lengths.append(choice.length)
        width = choice.length + 1
        cost.observe_verify([width], [500], cpu_cost().verify(width, 500) * float(rng.normal(1, 0.05)))
    assert max(lengths) - min(lengths) <= 4


# -- never slower ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Text:
    """A synthetic reply: at each position what the cache offers, and how much of it is right."""

    drafts: list[Draft | None]
    payoffs: Int32Array
    hits: NDArray[np.uint8]


def make_text(copied: NDArray[np.bool_], rng: np.random.Generator, false_matches: float, longest_false: int) -> Text:
    """`copied`: positions whose token the cache knows. Elsewhere it offers wrong drafts, with this probability."""
    n = len(copied)
    wrong = np.where(copied, n, np.arange(n))
    payoffs = (np.minimum.accumulate(wrong[::-1])[::-1] - np.arange(n)).astype(np.int32)
    run = 0
    drafts: list[Draft | None] = []
    for t in range(n):
        if copied[t]:
            run += 1
            drafts.append(chain(32, match_len=min(run + 1, 60)))
        else:
            run = 0
            match = int(rng.integers(1, longest_false + 1))
            drafts.append(chain(32, match_len=match) if rng.random() < false_matches else None)
    return Text(drafts, np.minimum(payoffs, 32).astype(np.int32), copied.astype(np.uint8))


def all_hits(rng: np.random.Generator) -> Text:
    return make_text(np.ones(500, np.bool_), rng, 0.0, 1)


def all_misses(rng: np.random.Generator) -> Text:
    return make_text(np.zeros(500, np.bool_), rng, 1.0, 6)


def alternating(rng: np.random.Generator) -> Text:
    """Copies of twelve, then four new tokens where the cache is as sure of itself as before."""
    return make_text(np.tile(np.arange(16) < 12, 31), rng, 1.0, 12)


def rare_copies(rng: np.random.Generator) -> Text:
    """Mostly new text with short false matches, now and then a copy of sixty."""
    return make_text(np.tile(np.arange(200) >= 140, 3), rng, 0.4, 2)


REGIMES = (all_hits, all_misses, alternating, rare_copies)
PREDICTORS: dict[str, Callable[[], SurvivalPredictor | None]] = {
    "none": lambda: None,
    "sure of everything": lambda: constant_survival(6.0),
    "sure of nothing": lambda: constant_survival(-6.0),
    "inverted": inverted_survival,
}


def decode(text: Text, policy: Policy, cost: CostModel) -> float:
    """Modelled seconds of one request, kept as the engine keeps it."""
    history = History(History.UNKNOWN_CLASSES)
    history.prompt(np.arange(300, dtype=np.int32))
    n, t, seconds = len(text.payoffs), 0, 0.0
    while t < n:
        room = n - t - 1
        draft = text.drafts[t]
        place = Situation(draft if room else None, history, room, 300 + t)
        choice = policy.choose([place], cost)[0]
        accepted = min(choice.length, int(text.payoffs[t]), room) if choice.arm is Arm.CACHE else 0
        seconds += cost.verify(choice.length + 1, 300 + t) + cost.overhead
        stop = t + accepted + 1
        history.commit(np.arange(t, stop, dtype=np.int32), text.hits[t:stop], choice.arm, choice.length, accepted, 32)
        policy.observe(place, choice, accepted)
        t = stop
    return seconds


def total(regime: Callable[[np.random.Generator], Text], policy: Policy, cost: CostModel) -> float:
    return sum(decode(regime(np.random.default_rng(seed)), policy, cost) for seed in range(5))


@pytest.mark.parametrize("cost", [cpu_cost, gpu_cost])
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("regime", REGIMES)
def test_never_slower_than_plain_or_match_len(
    regime: Callable[[np.random.Generator], Text], predictor: str, cost: Callable[[], CostModel]
) -> None:
    best = min(total(regime, make_policy(name), cost()) for name in ("plain", "match-len"))
    ours = total(regime, Hybrid(PREDICTORS[predictor]()), cost())
    assert ours <= best / 0.97


def test_all_regimes_through_one_engine() -> None:
    """Requests of all kinds, one after the other: what was learned of one kind must not hurt the next."""
    policies = [make_policy("plain"), make_policy("match-len"), make_policy("hvd")]
    seconds = np.zeros((3, 2))
    for i, policy in enumerate(policies):
        for j, cost in enumerate((cpu_cost(), gpu_cost())):
            for seed in range(3):
                for regime in REGIMES:
                    seconds[i, j] += decode(regime(np.random.default_rng(seed)), policy, cost)
    assert (seconds[2] <= seconds[:2].min(axis=0) / 0.97).all()

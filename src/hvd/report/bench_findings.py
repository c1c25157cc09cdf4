"""Sections of the benchmark's page about drafts: what pays, whether that is foreseen, their origin, what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd.report.bench_sections import section
from hvd.report.bench_view import OURS, WHOLE, BenchView
from hvd.report.html import Cell, bars, figure, label, legend, table, text
from hvd.report.plots import diagonal, histogram, steps

_ROLES = ("system", "user", "assistant", "tool", "template", "answer", "shared", "unknown")
_DEPTHS = ("1", "6", "16")
"""Depths whose calibration is shown at once."""

_MODELS = {"online": "ours", "survival": "other"}


def payoff(view: BenchView) -> str:
    """How many tokens of the cache's drafts are accepted."""
    states = view.finding("payoff")
    if not states:
        return ""
    edges: Sequence[int] = view.content["analysis"]["payoff_edges"]
    names = [_bin(edges, i) for i in range(len(edges))]
    live = OURS if OURS in states else next((name for name in states if name != "offline"), None)
    shown = [(name, kind) for name, kind in (("offline", "other"), (live, "ours")) if name in states]
    heights = [_shares(states[name]["histogram"]) for name, _ in shown if name is not None]
    keys = legend((f"part {kind}", _states(str(name))) for name, kind in shown)
    rows = [
        [
            label(name),
            figure(of["states"], ",d"),
            figure(of["paying"], ".1%"),
            figure(of["mean"]),
            figure(of["mean_length"], ".1f"),
            figure(of["bare"], ",d"),
            figure(of["censored"], ",d"),
        ]
        for name, of in states.items()
    ]
    columns = ("states", "with a draft", "paying", "mean payoff", "mean length", "without a draft", "payoff unknown")
    return section(
        "Do the cache\u2019s drafts pay?",
        keys,
        histogram(heights, names, [kind for _, kind in shown], "accepted tokens of a draft"),
        table(columns, rows),
        _paying_sets(view),
        note="Payoff: accepted tokens of the draft on offer; it pays from 6 on. Offline: at every token of answers; "
        "live: at the beginnings of a policy\u2019s cycles, the only states that a gate sees.",
    )


def _states(name: str) -> str:
    return "at every token (offline)" if name == "offline" else f"at {name}\u2019s cycles (live)"


def _bin(edges: Sequence[int], i: int) -> str:
    if i + 1 == len(edges):
        return f"{edges[i]}+"
    return str(edges[i]) if edges[i + 1] == edges[i] + 1 else f"{edges[i]}\u2013{edges[i + 1] - 1}"


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts) or 1.0
    return [count / total for count in counts]


def _paying_sets(view: BenchView) -> str:
    sets = view.analysis("payoff", "dataset")
    columns = list(dict.fromkeys(name for states in sets.values() for name in states))
    rows = [
        [label(name), *(figure(states.get(column, {}).get("paying"), ".0%") for column in columns)]
        for name, states in sets.items()
    ]
    return (
        f"<details><summary>Share that pays, by set</summary>{table(('set', *columns), rows)}</details>" if rows else ""
    )


def gates(view: BenchView) -> str:
    """Which gate knows which drafts pay."""
    parts = []
    for states, of in view.finding("gates").items():
        rows = [
            [label(gate), *(figure(found[key], ".1%") for key in ("precision", "recall", "f1"))]
            for gate, found in of.items()
        ]
        parts.append(f"<div><h4>{text(_states(states))}</h4>{table(('gate', 'precision', 'recall', 'F1'), rows)}</div>")
    return section(
        "Is it known beforehand which drafts pay?",
        f'<div class="pair">{"".join(parts)}</div>' if parts else "",
        note="Each gate asked about every draft on offer. Survival: the trained model; online: the same as corrected "
        "while decoding.",
    )


def calibration(view: BenchView) -> str:
    """Foretold against what came."""
    shown: list[str] = []
    more: list[str] = []
    for states, models in view.finding("calibration").items():
        for k in dict.fromkeys(k for of in models.values() for k in of):
            plot = _calibration_plot(states, k, models)
            (shown if states != "offline" and k in _DEPTHS else more).append(plot)
    keys = legend([("part ours", "online (what hvd decides by)"), ("part other", "trained model alone")])
    return section(
        "Calibration",
        *([keys, f'<div class="pair">{"".join(shown)}</div>'] if shown or more else []),
        f'<details><summary>All depths, and offline</summary><div class="pair">{"".join(more)}</div></details>'
        if more
        else "",
        note="Predicted P(accepted length \u2265 k) against how often it was so; on the dashed line "
        "they agree. Size: number of states.",
    )


def _calibration_plot(states: str, k: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    series, errors = [], []
    for model, kind in _MODELS.items():
        of = models.get(model, {}).get(k)
        bins = [each for each in of["bins"] if each["states"]] if of else []
        if of and bins:
            most = max(each["states"] for each in bins)
            series.append((kind, [(b["predicted"], b["observed"], b["states"] / most) for b in bins]))
            errors.append(f"{model} {of['error']:.1%}")
    if not series:
        return ""
    title = f"k = {k}, {_states(states)}"
    return (
        f"<div><h4>{text(title)}</h4>{diagonal(series, title)}"
        f'<p class="caption">Expected calibration error: {text(", ".join(errors))}</p></div>'
    )


def sources(view: BenchView) -> str:
    """Where accepted cache tokens were copied from."""
    found = view.finding("sources")
    drawn, plots = [], []
    for policy, of in found.items():
        share = {role: float(value) for role, value in of["share"].items() if value}
        drawn.append((policy, [(f"role-{role}", share.get(role, 0.0)) for role in _ROLES], f"{of['tokens']:,}"))
        if policy == view.main and sum(of["tenths"]):
            names = [f"{10 * i}\u2009%" for i in range(len(of["tenths"]))]
            plots.append(
                f"<h4>Place in the prompt, {text(policy)}</h4>"
                + histogram([_shares(of["tenths"])], names, ["ours"], "accepted tokens by place in the prompt")
            )
    used = [r for r in _ROLES if any(of["share"].get(r) for of in found.values())]
    meaning = {"template": "chat template", "answer": "the answer itself", "shared": "earlier answers"}
    keys = legend((f"part role-{role}", meaning.get(role, role)) for role in used)
    return section(
        "Where accepted cache tokens come from",
        *([keys, bars(drawn)] if drawn else []),
        *plots,
        note="By role of the message that they were copied from; the figure is the number of tokens.",
    )


def losses(view: BenchView) -> str:
    """What wrong guesses cost, and how far from the best possible it is."""
    guesses, regret = view.finding("wrong_guesses"), view.finding("regret")
    keys = ("cycles", "drafted", "rejected", "wasted_cycles", "seconds_lost", "forgone")
    forms = {"seconds_lost": ".2f"}
    guessed = [
        [label(policy), *(figure(of.get(key), forms.get(key, ".0f")) for key in keys)] for policy, of in guesses.items()
    ]
    names = ("policy", "cycles", "drafted", "rejected", "wasted cycles", "seconds lost", "forgone")
    played = [
        [label(policy), figure(of["speedup"], unit="\u00d7"), figure(of["regret"], ".1%"), figure(of["seconds"])]
        for policy, of in sorted(regret.items(), key=lambda item: item[1]["regret"] or 0.0)
    ]
    return section(
        "What is lost",
        *([_regret_bars(view)] if played else []),
        *([table(("policy", "speed", "regret", "seconds"), played)] if played else []),
        *(["<h4>Wrong guesses, per 1,000 tokens</h4>", table(names, guessed)] if guessed else []),
        note="Regret: seconds over those of an oracle that knows every payoff beforehand, played on the same answers "
        "with the cost model. Forgone: tokens that cost a pass though a draft on offer held them.",
    )


def _regret_bars(view: BenchView) -> str:
    regret = view.finding("regret")
    most = max((float(of["regret"] or 0.0) for of in regret.values()), default=0.0) or 1.0
    rows = [
        (
            policy,
            [("ours" if policy == view.main else "rival", float(of["regret"] or 0.0) / most)],
            f"{of['regret']:.0%}",
        )
        for policy, of in sorted(regret.items(), key=lambda item: item[1]["regret"] or 0.0)
        if policy != "oracle" and of["regret"] is not None
    ]
    return bars(rows)


def head_by_context(view: BenchView) -> str:
    """How the EAGLE3 head's accepted length changes with the context."""
    parts = []
    for policy, ranges in view.finding("eagle3_by_context").items():
        used = [each for each in ranges if each["cycles"]]
        if not used:
            continue
        names = [f"{each['from']}+" for each in used]
        cells = [
            [
                Cell(name, each["from"]),
                figure(each["cycles"], ",d"),
                figure(each["accepted"]),
                figure(each["acceptance"], ".0%"),
            ]
            for name, each in zip(names, used, strict=True)
        ]
        plot = steps(
            names, [("eagle3", [each["accepted"] for each in used])], ".1f", "accepted tokens a cycle by context"
        )
        columns = ("context", "cycles", "accepted a cycle", "acceptance")
        parts.append(f"<div><h4>{text(policy)}</h4>{plot}{table(columns, cells)}</div>")
    return section(
        "The EAGLE3 head by length of context", f'<div class="pair">{"".join(parts)}</div>' if parts else "",
        note="Accepted tokens in a cycle of the head, by tokens in front of it.",
    )  # fmt: skip


def groups(view: BenchView) -> str:
    """Precision, recall and regret of the page's method, set by set."""
    gate_sets, regret_sets, main = view.analysis("gates", "dataset"), view.analysis("regret", "dataset"), view.main
    rows = []
    for name in dict.fromkeys((*gate_sets, *regret_sets)):
        live = gate_sets.get(name, {}).get(str(main), {}).get("online", {})
        lost = regret_sets.get(name, {}).get(str(main), {})
        rows.append(
            [label(name), figure(live.get("precision"), ".0%"), figure(live.get("recall"), ".0%"),
             figure(lost.get("regret"), ".1%"), figure(lost.get("speedup"), unit="\u00d7")]
        )  # fmt: skip
    columns = ("set", "precision", "recall", "regret", "speed by the cost model")
    return section(f"{text(main)}, set by set", table(columns, rows) if rows and main else "")


SECTIONS = (payoff, gates, calibration, sources, losses, groups, head_by_context)
"""In the order of the page."""

__all__ = ["SECTIONS", "WHOLE", "calibration", "gates", "groups", "head_by_context", "losses", "payoff", "sources"]

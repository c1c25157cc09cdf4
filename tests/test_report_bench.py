"""The benchmark's page: figures are those of the file, sections come and go with their data, text stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hvd.bench.file import BenchFile
from hvd.bench.matrix import matrix
from hvd.bench.runner import Runner
from hvd.config import SamplingParams
from hvd.report.bench_page import bench_page
from hvd.report.bench_view import BenchView
from hvd.report.html import Cell, Mark, bars, dots, figure, label, table, ticks_to
from hvd.report.plots import diagonal, histogram, steps
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.prompts import Prompt, Turn
from support import OracleDrafter, make_llm, plain

V = 512
PARAMS = SamplingParams(max_tokens=80)
HOSTILE = 'evil</script><img src="http://example.org/x"> & \u202e'
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def measure(tokenizer: Tokenizer) -> dict[str, Any]:
    """A small benchmark over a fake target with a head: three sets, one with a name that must stay text."""
    target = FakeTarget(V, context_limit=1024, order=1, seed=3)
    prompts = [_talk(f"{name}/{i}", name) for name in ("edits", "chat", HOSTILE) for i in range(2)]
    ids = {p.id: make_llm(target, tokenizer).chat_prompt(p.turns[0].messages) for p in prompts}
    answers = {tuple(each): plain(target, each, PARAMS).token_ids for each in ids.values()}
    base = make_llm(target, tokenizer, eagle3=OracleDrafter(answers, V, wrong_every=6))
    runner = Runner(base, ["cache", "eagle3", "match-len:4", "hvd"], PARAMS, repeat=True, analyse=True)
    model = {"name": "fake <b>model</b>", "fingerprint": "f", "family": "llama", "backend": "fake", "weights": "none"}
    settings = {"policies": ["hvd"], "sampling": {"max_tokens": 80, "temperature": 0.0}, "scope": "none"}
    file = BenchFile(None, {**model, "eagle3": "head"}, settings, {"files": [HOSTILE]})
    for prompt in prompts:
        file.add(runner.run(prompt))
    return dict(json.loads(json.dumps(file.content(), allow_nan=False)))


def _talk(id_: str, dataset: str) -> Prompt:
    messages = ({"role": "system", "content": "abc abc"}, {"role": "user", "content": f"{id_[:8]} says abc abc " * 3})
    return Prompt(id_, dataset, dataset[:4], "test", (Turn(messages, None),))


def page_of(*contents: dict[str, Any]) -> str:
    return bench_page(contents, matrix(contents))


def headings(page: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", page)


def cells(page: str, first: str) -> list[str]:
    """The figures of the first row with this name, as they are shown."""
    row = re.search(rf'<tr><th scope="row"[^>]*>{re.escape(first)}</th>(.*?)</tr>', page)
    assert row is not None, first
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row[1])]


@pytest.fixture(scope="module")
def content(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    return measure(Tokenizer.from_directory(tiny_model("llama", vocab=V)))


def straight(content: dict[str, Any]) -> dict[str, Any]:
    """The same without the variant of prompts that don't loop."""
    other = deepcopy(content)
    other["summary"]["looped"] = 0
    return other


def test_every_section_is_there_and_says_what_the_file_says(content: dict[str, Any]) -> None:
    page = page_of(straight(content))
    assert headings(page) == [
        "Over all sets", "By set", "Time of a cycle", "Share of arms", "By length",
        "Do the cache\u2019s drafts pay?", "Is it known beforehand which drafts pay?", "Calibration",
        "Where accepted cache tokens come from", "What is lost", "hvd, set by set",
        "The EAGLE3 head by length of context", "Against each baseline", "Requests",
    ]  # fmt: skip
    view = BenchView(content, True)
    row = view.whole["hvd"]
    shown = cells(page, "hvd")
    assert shown[0] == f"{row['speedup_macro']:.2f}\u00d7"
    assert shown[1] == f"{row['macro_low']:.2f}\u2009\u2013\u2009{row['macro_high']:.2f}"
    assert shown[6] == f"{row['tokens_per_cycle']:.2f}"
    edits = cells(page, "edits")
    assert edits[0] == "2"
    speed = view.groups("dataset")["edits"]["cache"]["speedup_micro"]
    assert edits[1 + view.methods.index("cache")].startswith(f"{speed:.2f}\u00d7")
    regret = view.finding("regret")["hvd"]
    assert f"{regret['regret']:.1%}" in page
    assert "plain-again" not in page.split('id="data"')[0].split("<h3>Requests</h3>")[0]


def test_the_page_is_about_hvd_or_the_fastest(content: dict[str, Any]) -> None:
    assert BenchView(content, True).main == "hvd"
    other = deepcopy(content)
    rows = other["summary"]["rows"]
    other["summary"]["rows"] = [row for row in rows if row["policy"] != "hvd"]
    fastest = max((r["speedup_macro"], r["policy"]) for r in other["summary"]["rows"]
                  if r["level"] == "all" and r["loops"] and r["policy"] not in ("plain", "plain-again"))  # fmt: skip
    assert BenchView(other, True).main == fastest[1]
    page_of(other)


def test_sections_without_data_are_left_out(content: dict[str, Any]) -> None:
    bare = straight(content)
    bare["analysis"] = {"matrix": bare["analysis"]["matrix"], "payoff_edges": [], "groups": []}
    bare["summary"] |= {"by_prompt_length": [], "by_position": [], "noise": None}
    page = page_of(bare)
    assert headings(page) == [
        "Over all sets", "By set", "Time of a cycle", "Share of arms", "Against each baseline", "Requests",
    ]  # fmt: skip
    assert "noise" not in page
    del bare["analysis"]["groups"]
    page_of(bare)


def test_prompts_that_loop_can_be_left_out(content: dict[str, Any]) -> None:
    looping = deepcopy(content)
    looping["summary"]["looped"] = 2
    looping["summary"]["rows"] = [r for r in looping["summary"]["rows"] if r["loops"]]
    looping["summary"]["rows"] += [{**r, "loops": False} for r in looping["summary"]["rows"]]
    page = page_of(looping)
    assert "without the 2 whose plain output loops" in page
    assert page.count("<h3>Over all sets</h3>") == 2
    assert "whose plain output loops" not in page_of(straight(content))


def test_an_output_that_differs_is_on_top(content: dict[str, Any]) -> None:
    wrong = straight(content)
    wrong["summary"] |= {"identical": False, "different": [{"id": "edits/0", "policy": "hvd", "differs_at": 17}]}
    page = page_of(wrong)
    assert cells(page, "edits/0") == ["hvd", "17"]
    assert '<span class="value">NO</span>' in page


def test_several_models_share_a_page(content: dict[str, Any]) -> None:
    other = deepcopy(content)
    other["model"]["name"] = "other"
    page = page_of(straight(content), straight(other))
    assert headings(page)[:2] == ["Models", "Against each baseline"]
    assert page.count("<article") == 2
    assert page.count('data-key="1-') == 6
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [len(requests) for requests in data["requests"]] == [6, 6]


def test_text_of_the_file_stays_text(content: dict[str, Any]) -> None:
    page = page_of(content)
    assert page.count("<script") == 3
    assert "<img" not in page
    assert "<b>model" not in page
    assert "\u202e" not in page
    assert "evil&lt;/script&gt;&lt;img src=&quot;http://example.org/x&quot;&gt; &amp; \u2039U+202E\u203a" in page


def test_what_is_missing_is_named(content: dict[str, Any]) -> None:
    lacking = straight(content)
    lacking["peers"] = {"methods": {"llama.cpp": "wall clock"}, "missing": {"vllm": "not installed"}}
    lacking["data"]["missing"] = [{"name": "Spider", "why": "offline", "local": "spider_sql"}]
    lacking["skipped"] = [{"id": "edits/9", "why": "longer than the context"}]
    lacking["failed"] = [{"id": "edits/1", "method": "llama.cpp", "why": "crashed"}]
    lacking["summary"]["agreement"] = {
        "llama.cpp": {"prompts": 3, "identical": 2, "tokens_before_difference": 0.5}
    }  # fmt: skip
    page = page_of(lacking)
    for word in ("not installed", "offline", "longer than the context", "crashed", "wall clock"):
        assert word in page
    assert cells(page, "llama.cpp") == ["3", "2", "50%"]


@pytest.mark.parametrize("name", ["bench-smollm2.json", "bench-qwen-coder.json"])
def test_the_committed_results_have_a_page(name: str) -> None:
    from hvd.bench.file import read_bench

    content = read_bench(RESULTS / name)
    page = page_of(content)
    assert "Over all sets" in headings(page)
    assert len(page) < 3_000_000


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_a_missing_figure_is_a_dash_and_sorts_last() -> None:
    assert figure(None) == Cell("\u2013")
    assert figure(float("nan")) == Cell("\u2013")
    assert figure(0.0) == Cell("0.00", 0.0)
    drawn = table(("a", "b"), [[label("<x>"), figure(None)], [label("y"), figure(2.5, ".1f", unit="\u00d7")]])
    assert 'data-v="&lt;x&gt;">&lt;x&gt;</th>' in drawn
    assert "<td>\u2013</td>" in drawn
    assert '<td data-v="2.5">2.5\u00d7</td>' in drawn


def test_marks_and_bars_lie_where_their_figures_say() -> None:
    drawn = dots([("m", [Mark(2.0, 1.0, 3.0, "ours")], "2")], 4.0, [0.0, 1.0])
    assert 'cx="50.00%"' in drawn
    assert 'x1="25.00%" x2="75.00%"' in drawn
    drawn = bars([("m", [("a", 0.25), ("b", 0.0), ("c", 0.5)], "")])
    assert re.findall(r'class="part (\w)" x="([\d.]+)%" width="([\d.]+)%"', drawn) == [
        ("a", "0.00", "25.00"), ("c", "25.00", "50.00")
    ]  # fmt: skip


@pytest.mark.parametrize("most", [0.3, 1.0, 1.9, 3.3, 7.7, 42.0, 900.0])
def test_an_axis_has_a_few_ticks_one_of_them_at_one(most: float) -> None:
    ticks = ticks_to(max(most, 1.0))
    assert 1.0 in ticks
    assert 2 <= len(ticks) <= 9
    assert all(0.0 <= tick <= max(most, 1.0) for tick in ticks)


def test_plots_bear_emptiness() -> None:
    for drawn in (
        histogram([[]], [], ["ours"], "t"),
        diagonal([("ours", [])], "t"),
        steps(["a"], [("ours", [None])], ".1f", "t"),
    ):
        assert "nan" not in drawn.lower()
    assert histogram([[0.5, 0.25]], ["0", "1"], ["ours"], "t").count("<rect") == 2
    assert 'cx="' in diagonal([("ours", [(0.5, 0.25, 1.0)])], "t")

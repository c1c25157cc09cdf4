"""The pages in a real Chromium: they draw, say nothing on the console, ask the network for nothing, and can be used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser
from hvd.config import SamplingParams
from hvd.report.explain import ExplainedRequest, explain_live
from hvd.report.explain_page import explain_page
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from support import OracleDrafter, make_llm, plain
from test_report_bench import measure, page_of
from test_report_explain import PROMPT, still_cost, with_head, worst_case

V = 512
PARAMS = SamplingParams(max_tokens=150)
HOSTILE = 'x</script><img src="http://example.org/x"><b>&lt; \u202e\u2066abc \U0001f980\u200d\x1b[31m\x00 \u0627\u0644'

CONTRAST = """
(() => {
  const rgb = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 1 : 255;
    return { c: parts.slice(0, 3).map((v) => v / scale), a: parts.length > 3 ? parts[3] : 1 };
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(rgb(getComputedStyle(at).backgroundColor));
    let out = [1, 1, 1];
    for (const { c, a } of layers.reverse()) out = out.map((v, i) => v * (1 - a) + c[i] * a);
    return out;
  };
  let worst = { ratio: 99, text: "" };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length || node.closest("script, style, button:disabled")) continue;
    const style = getComputedStyle(node);
    const ink = node.closest("svg") ? style.fill : style.color;
    const a = light(rgb(ink).c), b = light(behind(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) worst = { ratio, text: walker.currentNode.data.slice(0, 40), ink };
  }
  return worst;
})()
"""  # noqa: E501
"""The text with the least contrast to what lies behind it, by WCAG 2's formula."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def request_(tiny_model: Callable[..., Path]) -> ExplainedRequest:
    """An answer by three arms, whose prompt holds what must stay text."""
    target, tokenizer = (
        FakeTarget(V, context_limit=2048, order=1, seed=3),
        Tokenizer.from_directory(tiny_model("llama", vocab=V)),
    )
    prompt = tokenizer.encode(HOSTILE)
    answer = plain(target, prompt, PARAMS).token_ids
    head = OracleDrafter({tuple(prompt): answer}, V, wrong_every=7)
    return explain_live(make_llm(target, tokenizer, eagle3=head, cost=still_cost()), prompt, PARAMS, "hvd")


@pytest.fixture(scope="module")
def explained(request_: ExplainedRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "page.html"
    path.write_text(explain_page(request_, HOSTILE), "utf-8")
    return path


def sound(browser: Browser) -> None:
    """Nothing on the console, nothing asked of the network, nothing wider than the window."""
    assert browser.complaints == []
    assert browser.requests == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def cycle_shown(browser: Browser) -> int:
    """The number of the cycle in the panel; 0 when none is visible."""
    text: str = browser.run("document.querySelector('#panel .which b')?.checkVisibility() ? "
                            "document.querySelector('#panel .which b').textContent : ''")  # fmt: skip
    return int(text.split()[1]) if text else 0


# -- hvd explain ------------------------------------------------------------------------------------------------------


def test_explain_shows_the_answer_with_its_arms(browser: Browser, explained: Path, request_: ExplainedRequest) -> None:
    browser.open(explained)
    sound(browser)
    arms = request_.tokens_by_arm()
    assert all(arms.values()), arms
    assert browser.run("document.querySelectorAll('#answer .cycle').length") == len(request_.cycles)
    drafted = {arm: sum(c.record.arm == arm and c.record.accepted > 0 for c in request_.cycles) for arm in arms}
    for arm in ("cache", "eagle3"):
        assert browser.run(f"document.querySelectorAll('#answer .got.{arm}').length") == drafted[arm] > 0
    assert browser.run("document.querySelectorAll('#rhythm path').length") == 3
    assert str(len(request_.cycles)) in browser.run("document.querySelector('.tiles').textContent")


def test_hostile_text_stays_text(browser: Browser, explained: Path) -> None:
    browser.open(explained)
    browser.click("#prompt-box summary")
    shown = browser.run("document.getElementById('prompt').textContent")
    assert '</script><img src="http://example.org/x"><b>&lt; \u2039U+202E\u203a\u2039U+2066\u203aabc' in shown
    assert "\U0001f980\u200d\u241b[31m\u2400" in shown
    assert browser.run("document.querySelectorAll('img, b:not(.which b):not(.legend b)').length") == 0
    assert browser.run("document.title").startswith("Why this draft? x</script>")
    sound(browser)


def test_keys_hover_and_click_open_a_cycle(browser: Browser, explained: Path, request_: ExplainedRequest) -> None:
    browser.open(explained)
    browser.key("Home")
    assert cycle_shown(browser) == 1
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert cycle_shown(browser) == 3
    browser.key("ArrowLeft")
    assert cycle_shown(browser) == 2
    assert browser.run("location.hash") == "#cycle=2"
    browser.key("End")
    assert cycle_shown(browser) == len(request_.cycles)
    browser.click("#answer .cycle[data-i='4']")
    assert cycle_shown(browser) == 5
    browser.hover("#answer .cycle[data-i='2']")
    assert cycle_shown(browser) == 3
    browser.hover("h2")
    assert cycle_shown(browser) == 5, "what was clicked comes back when the mouse leaves"
    browser.click("#panel button[aria-label='Next cycle']")
    assert cycle_shown(browser) == 6
    browser.hover("#answer .cycle[data-i='1']")
    browser.key("End")
    browser.run("new Promise((done) => setTimeout(done, 200))")
    assert cycle_shown(browser) == len(request_.cycles), "the page scrolled under a resting mouse"
    browser.run("pin(5, true); document.querySelector('#answer .cycle[tabindex=\"0\"]').focus()")
    browser.key("ArrowRight")
    assert browser.run("Number(document.activeElement.dataset.i)") == 6
    sound(browser)


def test_every_cycle_can_be_shown(browser: Browser, explained: Path, request_: ExplainedRequest) -> None:
    browser.open(explained)
    seen: list[dict[str, Any]] = browser.run(
        """cycles.map((cycle, i) => { pin(i, false); const all = (s) => document.querySelectorAll('#panel ' + s).length;
        return { yes: all('.t.yes'), no: all('.t.no'), from: all('.from'), plots: all('.plot'), rows: all('tbody tr'),
                 text: document.getElementById('panel').textContent }; })"""
    )
    for panel, cycle in zip(seen, request_.cycles, strict=True):
        assert panel["yes"] == cycle.record.accepted
        assert panel["no"] == (cycle.record.accepted < cycle.record.drafted)
        assert panel["from"] == (cycle.source is not None)
        assert panel["plots"] == (2 if cycle.explanation.prospects else 0)
        assert panel["rows"] > len(cycle.explanation.prospects)
        assert cycle.record.reason in panel["text"]
    assert not any(word in panel["text"] for panel in seen for word in ("NaN", "undefined", "Infinity"))
    sound(browser)


def test_the_place_of_the_match_is_marked(browser: Browser, explained: Path, request_: ExplainedRequest) -> None:
    here = len(request_.prompt)
    index = next(i for i, c in enumerate(request_.cycles) if c.source is not None and c.source.start >= here + 5)
    browser.open(explained)
    browser.run(f"pin({index}, false)")
    marked = browser.run("[...document.querySelectorAll('#answer .cycle.from')].map((span) => Number(span.dataset.i))")
    assert marked
    assert max(marked) < index


def test_the_plot_is_what_was_predicted(browser: Browser, explained: Path, request_: ExplainedRequest) -> None:
    browser.open(explained)
    for index, cycle in enumerate(request_.cycles[:10]):
        told = browser.run(f"spelled(cycles[{index}]).w.map((each) => each.v)")
        for ours, prospect in zip(told, cycle.explanation.prospects, strict=True):
            assert prospect.survival is not None
            assert np.allclose(ours, prospect.survival, atol=1 / 4095)


@pytest.mark.parametrize("dark", [False, True])
def test_explain_on_a_phone(browser: Browser, explained: Path, dark: bool) -> None:
    browser.open(explained, width=360, height=740, dark=dark)
    sound(browser)
    assert cycle_shown(browser) == 0, "the panel covers nothing before somebody asks for it"
    browser.click("#answer .cycle[data-i='6']")
    assert cycle_shown(browser) == 7
    box = browser.run(
        "(() => { const b = document.querySelector('.cycle.now').getClientRects()[0]; return b.bottom })()"
    )
    assert box < browser.run("document.getElementById('panel').getBoundingClientRect().top"), (
        "the panel hides the cycle"
    )
    assert browser.run("Math.min(...[...document.querySelectorAll('#panel button')].map((b) => b.offsetHeight))") >= 44
    sound(browser)
    browser.click("#close")
    assert cycle_shown(browser) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_explain_can_be_read(browser: Browser, explained: Path, dark: bool) -> None:
    browser.open(explained, dark=dark)
    browser.click("#prompt-box summary")
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (max(int(part) for part in background[4:-1].split(",")) < 60) == dark
    for index in range(0, 12, 3):
        browser.run(f"pin({index}, false)")
        worst = browser.run(CONTRAST)
        assert worst["ratio"] >= 4.5, worst


def test_a_tree_is_shown_level_by_level(browser: Browser, tmp_path: Path) -> None:
    request = explain_live(with_head(tree=True), PROMPT, SamplingParams(max_tokens=60), "eagle3")
    path = tmp_path / "tree.html"
    path.write_text(explain_page(request, "tree"), "utf-8")
    browser.open(path)
    index = next(i for i, c in enumerate(request.cycles) if c.draft is not None and c.record.accepted > 2)
    browser.run(f"pin({index}, false)")
    cycle = request.cycles[index]
    assert cycle.draft is not None
    assert not cycle.draft.is_chain
    count = "document.querySelectorAll('#panel .t{}').length"
    assert browser.run(count.format(".eagle3")) == len(cycle.draft)
    assert browser.run(count.format(".yes")) == cycle.record.accepted
    assert browser.run("document.querySelectorAll('#panel .draft').length") == (len(cycle.draft) + 1) // 2
    sound(browser)


def test_a_long_answer_can_be_used(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "long.html"
    path.write_text(explain_page(worst_case(), "long"), "utf-8")
    browser.open(path)
    assert browser.run("document.querySelectorAll('#answer .cycle').length") == 4000
    browser.click("#prompt-box summary")
    milliseconds = browser.run("(() => { const t = performance.now(); for (let i = 0; i < 50; i++) pin(80 * i, true);"
                               "return (performance.now() - t) / 50 })()")  # fmt: skip
    assert milliseconds < 500  # 10 or so; this only tells a page that hangs from one that does not
    assert cycle_shown(browser) == 3921
    sound(browser)


def test_an_empty_answer_and_a_wild_hash_do_no_harm(browser: Browser, explained: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(
        explain_page(ExplainedRequest(np.asarray([1], np.int32), np.zeros(0, np.int32), [], "hvd")), "utf-8"
    )
    browser.open(path)
    sound(browser)
    for wild in ("#cycle=0", "#cycle=99999", "#<b>"):
        browser.open(explained)
        browser.run(f"location.hash = {wild!r}; location.reload()")
        browser.run("new Promise((done) => setTimeout(done, 100))")
        assert cycle_shown(browser) >= 1


# -- hvd bench, hvd report --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A page of two models, one of them with prompts that loop."""
    content = measure(Tokenizer.from_directory(tiny_model("llama", vocab=V)))
    other = copy.deepcopy(content)
    other["model"]["name"] = "other"
    other["summary"]["looped"] = 3
    path = tmp_path_factory.mktemp("bench") / "page.html"
    path.write_text(page_of(content, other), "utf-8")
    return path, content


def column(browser: Browser, table: str, index: int) -> list[str]:
    shown: list[str] = browser.run(
        f"[...document.querySelectorAll({table!r})][0].tBodies[0].rows.length && "
        f"[...document.querySelector({table!r}).tBodies[0].rows].map((row) => row.cells[{index}].textContent)"
    )
    return shown


def test_the_benchmark_is_drawn(browser: Browser, measured: tuple[Path, dict[str, Any]]) -> None:
    browser.open(measured[0])
    sound(browser)
    assert browser.run("document.querySelectorAll('article').length") == 2
    assert browser.run("document.querySelectorAll('#requests tbody tr').length") == 12
    assert browser.run("document.querySelectorAll('svg.plot').length") > 6
    assert "fake <b>model</b>" in browser.run("document.querySelector('h1').textContent")
    text = browser.run("document.body.innerText")
    assert not any(word in text for word in ("NaN", "undefined", "Infinity", "None"))


def test_tables_sort_by_click_and_by_key(browser: Browser, measured: tuple[Path, dict[str, Any]]) -> None:
    browser.open(measured[0])
    speed = "#requests th:nth-child(7) button"
    browser.click(speed)
    assert browser.run("document.querySelector('#requests th:nth-child(7)').ariaSort") == "descending"
    values = [float(text[:-1]) for text in column(browser, "#requests table", 6)]
    assert values == sorted(values, reverse=True)
    browser.run(f"document.querySelector({speed!r}).focus()")
    browser.key("Enter")
    assert [float(text[:-1]) for text in column(browser, "#requests table", 6)] == sorted(values)
    browser.click("#requests th:nth-child(2) button")
    names = column(browser, "#requests table", 1)
    assert names == sorted(names)
    assert browser.run("document.querySelectorAll('#requests thead th[aria-sort]').length") == 1
    assert browser.run("compare(null, 1, 1) > 0 && compare(null, 1, -1) > 0 && compare('a10', 'a9', 1) > 0")
    sound(browser)


def test_a_request_can_be_opened(browser: Browser, measured: tuple[Path, dict[str, Any]]) -> None:
    path, content = measured
    browser.open(path)
    browser.click("button.open[data-key='0-1']")
    id_ = browser.run("document.querySelector(\"button.open[data-key='0-1']\").textContent")
    rows = browser.run("[...document.querySelectorAll('tr.detail tbody tr')].map((row) => "
                       "[...row.cells].map((cell) => cell.textContent))")  # fmt: skip
    records = {record["policy"]: record for record in content["records"] if record["id"] == id_}
    assert [row[0] for row in rows] == list(records)
    for row in rows:
        record = records[row[0]]
        assert row[3:5] == [str(record["tokens"]), str(record["cycles"])]
        assert row[6:9] == [str(record["drafted"]), str(record["accepted"]), str(record["positions"])]
        assert row[-1] == "identical"
    assert browser.run("document.querySelector(\"button.open[data-key='0-1']\").ariaExpanded") == "true"
    browser.click("button.open[data-key='1-2']")
    assert browser.run("document.querySelectorAll('tr.detail').length") == 1
    browser.run("document.querySelector(\"button.open[data-key='1-2']\").focus()")
    browser.key("Enter")
    assert browser.run("document.querySelectorAll('tr.detail').length") == 0
    sound(browser)


def test_requests_are_filtered_and_loops_left_out(browser: Browser, measured: tuple[Path, dict[str, Any]]) -> None:
    browser.open(measured[0])
    browser.click("#filter")
    browser.send("Input.insertText", text="EDITS")
    shown = browser.run("[...document.querySelectorAll('#requests tbody tr')].filter((row) => !row.hidden).length")
    assert shown == 4
    one, two = (
        f"document.querySelector('#model-1 .variant[data-loops={kind}]').checkVisibility()"
        for kind in ("all", "straight")
    )
    assert (browser.run(one), browser.run(two)) == (True, False)
    browser.click("input[value='straight']")
    assert (browser.run(one), browser.run(two)) == (False, True)
    assert browser.run("document.querySelector('#model-0 .variant').checkVisibility()"), "it has no other variant"
    sound(browser)


@pytest.mark.parametrize("dark", [False, True])
def test_the_benchmark_on_a_phone(browser: Browser, measured: tuple[Path, dict[str, Any]], dark: bool) -> None:
    browser.open(measured[0], width=360, height=740, dark=dark)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.click("button.open[data-key='0-0']")
    sound(browser)
    assert browser.run("document.querySelectorAll('tr.detail').length") == 1
    drawn = "[...document.querySelectorAll('svg text')].filter((each) => each.getClientRects().length)"
    small = browser.run(f"Math.min(...{drawn}.map((each) => each.getBoundingClientRect().height))")
    assert small >= 9, "axis labels can't be read"


@pytest.mark.parametrize("dark", [False, True])
def test_the_benchmark_can_be_read(browser: Browser, measured: tuple[Path, dict[str, Any]], dark: bool) -> None:
    browser.open(measured[0], dark=dark)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.click("button.open[data-key='0-0']")
    worst = browser.run(CONTRAST)
    assert worst["ratio"] >= 4.5, worst

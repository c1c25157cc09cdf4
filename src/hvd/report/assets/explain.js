"use strict";
/* Draws one request. A cycle's keys: p position, a arm, n drafted, k accepted, m committed, r reason,
   pl ms of a plain pass, c cache draft on offer {t its tokens behind those of s, n length, m match, s score, l local,
   q counts, g [tokens since the text left the copy that this resumes, match length there]}, f features,
   s source [start, length], d head's draft {t tokens, u parents, y accepted path}, b backlog, t ms by phase,
   w prospects {a arm, z longest, ms at lengthsShown, v survival, packed}. */
const ARMS = ["cache", "eagle3", "plain"];
const NAMES = ["suffix cache", "EAGLE3 head", "plain decoding"];
const { cycles, texts, prompt, output, features, replayed } = DATA;
const answer = byId("answer"), panel = byId("panel"), spans = [];
const flow = prompt.length;
let pinned = 0, shown = -1;

/* As in explain.py: powers of two, the end, the chosen one. */
function lengthsShown(n, chosen) {
  const lengths = new Set([n]);
  for (let k = 1; k <= n; k *= 2) lengths.add(k);
  if (chosen > 0 && chosen <= n) lengths.add(chosen);
  return [...lengths].sort((a, b) => a - b);
}

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

function unpack(letters) {
  const shares = [];
  for (let i = 0; i < letters.length; i += 2) shares.push((LETTERS.indexOf(letters[i]) * 64 + LETTERS.indexOf(letters[i + 1])) / 4095);
  return shares;
}

/* A cycle with its prospects' lengths and survival spelled out, and its draft's tokens as texts. */
function spelled(cycle) {
  const w = cycle.w.map((each) => ({ ...each, l: lengthsShown(each.z, cycle.n), v: each.v && unpack(each.v) }));
  if (!cycle.c) return { ...cycle, w };
  const [start, length] = cycle.s || [0, 0], copied = [];
  const most = (cycle.a === 0 ? cycle.n : 0) + 16;
  for (let i = 0; i < Math.min(length, most); i++) copied.push(at(start + i));
  return { ...cycle, w, c: { ...cycle.c, t: [...copied, ...cycle.c.t.map(word)] } };
}

const word = (number) => texts[number];
const at = (index) => word(index < flow ? prompt[index] : output[index - flow]);
const between = (from, to) => { let text = ""; for (let i = Math.max(0, from); i < to; i++) text += at(i); return text; };
const inline = (text) => (text === "" ? "\u25cc" : text.replace(/\n/g, "\u21b5\n"));
const oneLine = (text) => text.replace(/\n/g, "\u21b5");

/* -- the text -------------------------------------------------------------------------------------------------- */

function drawAnswer() {
  const all = document.createDocumentFragment();
  cycles.forEach((cycle, index) => {
    const got = output.slice(cycle.p, cycle.p + cycle.k).map(word).join("");
    const own = output.slice(cycle.p + cycle.k, cycle.p + cycle.m).map(word).join("");
    const span = el("span", { class: "cycle", role: "option", tabindex: -1, "data-i": index, "aria-selected": "false" },
      cycle.k > 0 && el("span", { class: `got ${ARMS[cycle.a]}` }, got), own);
    spans.push(span);
    all.append(span);
  });
  answer.append(all);
}

function drawPrompt(marks) {
  const box = byId("prompt"), parts = [];
  if (!byId("prompt-box").open) return;
  let last = 0;
  for (const [from, to, kind] of marks) {
    parts.push(between(last, Math.min(from, flow)), el("span", { class: kind }, between(from, Math.min(to, flow))));
    last = Math.min(to, flow);
  }
  box.replaceChildren(...parts, between(last, flow));
  const mark = box.querySelector(".from, .key");
  if (mark) box.scrollTop += mark.getBoundingClientRect().top - box.getBoundingClientRect().top - 60;
}

/* Where the draft was read: in the prompt the very tokens, in the answer the cycles that hold them. */
function markSource(cycle) {
  for (const span of answer.querySelectorAll(".from")) span.classList.remove("from");
  if (!cycle.s) return drawPrompt([]);
  const [start, length] = cycle.s, begin = start - cycle.c.m;
  const marks = [[begin, start, "key"], [start, start + length, "from"]].filter(([from]) => from < flow);
  drawPrompt(marks);
  cycles.forEach((other, index) => {
    const from = flow + other.p;
    if (from < start + length && from + other.m > start && from + other.m <= flow + cycle.p) spans[index].classList.add("from");
  });
}

/* -- every cycle in one picture ---------------------------------------------------------------------------------- */

function drawRhythm() {
  const box = byId("rhythm"), top = Math.max(2, ...cycles.map((cycle) => cycle.m)), count = Math.max(40, cycles.length);
  box.setAttribute("viewBox", `0 0 ${count} ${top}`);
  const gap = count < 160 ? 0.22 : 0;
  const paths = ["", "", ""];
  const bar = (i, from, to) => `M${i + gap / 2} ${top - from}V${top - to}h${1 - gap}V${top - from}z`;
  cycles.forEach((cycle, i) => {
    if (cycle.k) paths[cycle.a] += bar(i, 0, cycle.k);
    paths[2] += bar(i, cycle.k, cycle.m);
  });
  paths.forEach((d, arm) => box.append(svg("path", { d, class: `bar ${ARMS[arm]}` })));
  box.append(svg("rect", { class: "now", id: "rhythm-now", y: 0, width: 1, height: top }));
  box.addEventListener("click", (event) => {
    const place = (event.clientX - box.getBoundingClientRect().left) / box.clientWidth;
    pin(Math.min(cycles.length - 1, Math.floor(place * count)), true);
  });
}

/* -- one cycle -------------------------------------------------------------------------------------------------- */

const arm = (index) => el("span", { class: `arm ${ARMS[index]}` }, NAMES[index]);

function verdict(cycle) {
  if (cycle.a === 2) {
    const offered = cycle.c ? `; the cache offered ${plural(cycle.c.n, "token")}` : "; nothing was on offer";
    return el("p", { class: "verdict" }, arm(2), ": one token, no draft verified", offered, ".");
  }
  const all = cycle.n === cycle.k ? "all of them accepted" : cycle.k === 0 ? "none accepted" : `${cycle.k} accepted`;
  return el("p", { class: "verdict" }, `${plural(cycle.n, "token")} of the `, arm(cycle.a), ` verified: ${all}, and one of the model\u2019s own on top.`);
}

function fate(index, cycle, path) {
  if (path) return path.includes(index) ? "yes" : "lost";
  if (index < cycle.k) return "yes";
  if (index >= cycle.n) return "off";
  return index === cycle.k ? "no" : "lost";
}

function tokenRow(tokens, cycle, kind, taken, more = 0) {
  return el("div", { class: "draft" }, ...tokens.map((token, i) =>
    el("span", { class: `t ${taken ? fate(i, cycle) : "off"} ${kind}` }, inline(token))),
    more > 0 && el("span", { class: "muted" }, ` \u2026 and ${more} more`));
}

function treeRows(draft, cycle) {
  const depth = [], levels = [];
  draft.t.forEach((token, i) => {
    depth[i] = draft.u[i] < 0 ? 0 : depth[draft.u[i]] + 1;
    (levels[depth[i]] ||= []).push(el("span", { class: `t ${fate(i, cycle, draft.y)} eagle3` }, oneLine(word(token)) || "\u25cc"));
  });
  return levels.map((level, i) => el("div", { class: "draft" }, el("span", { class: "muted" }, `${i + 1}  `), ...level.flatMap((token) => [token, " "])));
}

function fates(cycle, offered) {
  const right = output[cycle.p + cycle.k];
  const said = [el("li", {}, `${cycle.k} accepted`)];
  if (cycle.k < cycle.n) said.push(el("li", {}, "refused; the model says ", el("span", { class: "t own" }, oneLine(word(right)) || "\u25cc")));
  if (offered > cycle.n) said.push(el("li", {}, `${offered - cycle.n} not verified`));
  return el("ul", { class: "say" }, ...said);
}

function drafts(cycle) {
  const out = [];
  if (cycle.c) {
    const taken = cycle.a === 0;
    out.push(el("h3", {}, taken ? "Draft of the cache" : "On offer from the cache, not taken"), tokenRow(cycle.c.t, cycle, "cache", taken, cycle.c.n - cycle.c.t.length));
    if (taken) out.push(fates(cycle, cycle.c.n));
  }
  if (cycle.a === 1) {
    out.push(el("h3", {}, "Draft of the EAGLE3 head"));
    if (!cycle.d) out.push(el("p", { class: "reason" }, "Simulated: how many tokens were right is known, not which they were."));
    else if (cycle.d.u) out.push(...treeRows(cycle.d, cycle));
    else out.push(tokenRow(cycle.d.t.map(word), cycle, "eagle3", true));
    out.push(fates(cycle, cycle.n));
  }
  return out;
}

function sourceOf(cycle) {
  if (!cycle.c) return [];
  const { m, s, l, q, g } = cycle.c;
  const seen = `Matched the last ${plural(m, "token")}; what followed was seen ${q[0]} of ${plural(q[1], "time")}. Score ${fixed(s, 1)}.`;
  const out = [el("h3", {}, "Where it was found"), el("p", { class: "reason" }, seen)];
  if (g) out.push(el("p", { class: "reason" }, `It resumes a copy that the text left ${plural(g[0], "token")} ago, after a match of ${g[1]}.`));
  if (!cycle.s) out.push(el("p", { class: "reason" }, l ? "The place is not known." : "In an earlier answer."));
  else {
    const [start, length] = cycle.s, place = start < flow ? `token ${start + 1} of the prompt` : `token ${start - flow + 1} of the answer`;
    out.push(el("p", { class: "reason" }, `Copied from ${place} on:`));
    const clip = (text, end) => (text.length > 160 ? (end ? "\u2026" + text.slice(-160) : text.slice(0, 160) + "\u2026") : text);
    out.push(el("div", { class: "snip" }, clip(oneLine(between(start - m - 12, start - m)), true),
      el("span", { class: "key" }, clip(oneLine(between(start - m, start)), true)),
      el("span", { class: "from" }, clip(oneLine(between(start, start + length))))));
  }
  return out;
}

/* -- plots ------------------------------------------------------------------------------------------------------ */

const W = 400, LEFT = 34, RIGHT = 10;

function frame(height, most, ticks, label) {
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${W} ${height + 26}`, role: "img", "aria-label": label });
  const x = (k) => LEFT + ((W - LEFT - RIGHT) * k) / most, y = (share) => 6 + (height - 6) * (1 - share);
  for (const [share, text] of ticks) {
    plot.append(svg("path", { class: "axis", d: `M${LEFT} ${y(share)}H${W - RIGHT}` }),
      svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, text));
  }
  const step = [1, 2, 4, 8, 16, 32].find((each) => most / each <= 8) || 64;
  for (let k = 0; k <= most; k += step) plot.append(svg("text", { x: x(k), y: height + 18, "text-anchor": "middle" }, k));
  return { plot, x, y };
}

const longest = (cycle) => Math.max(1, ...cycle.w.map((each) => each.z));

function pickLine(cycle, x, y, plot) {
  if (cycle.n) plot.append(svg("path", { class: "axis pick", d: `M${x(cycle.n)} ${y(0)}V${y(1)}` }),
    svg("text", { class: "name", x: x(cycle.n) + (cycle.n > 0.7 * longest(cycle) ? -5 : 5), y: y(0) - 6, "text-anchor": cycle.n > 0.7 * longest(cycle) ? "end" : "start" }, `chosen: ${cycle.n}`));
}

function survivalPlot(cycle) {
  const known = cycle.w.filter((each) => each.v);
  if (!known.length) return [];
  const { plot, x, y } = frame(120, longest(cycle), [[0, "0"], [0.5, "50 %"], [1, "100 %"]], "Predicted probability that at least k draft tokens are accepted");
  for (const { a, v } of known) {
    const line = "M" + [1, ...v].map((value, k) => `${x(k)} ${y(value)}`).join("L");
    plot.append(svg("path", { class: `area ${ARMS[a]}`, d: `${line}L${x(v.length)} ${y(0)}L${x(0)} ${y(0)}z` }), svg("path", { class: `line ${ARMS[a]}`, d: line }));
    if (a === cycle.a) plot.append(svg("circle", { class: `dot ${ARMS[a]}`, cx: x(cycle.k), cy: y(cycle.k ? v[Math.min(cycle.k, v.length) - 1] : 1), r: 4.5 }));
  }
  pickLine(cycle, x, y, plot);
  const what = cycle.a === 2 ? "" : ` The dot: ${cycle.k} were.`;
  return [el("h3", {}, "Predicted: at least k tokens accepted"), plot, el("p", { class: "caption" }, `k draft tokens.${what}`)];
}

const atLength = (each, k) => {
  const i = each.l.findIndex((length) => length >= k);
  if (each.l[i] === k) return each.ms[i];
  const share = (k - each.l[i - 1]) / (each.l[i] - each.l[i - 1]);
  return each.ms[i - 1] + share * (each.ms[i] - each.ms[i - 1]);
};

function ratesOf(each) {
  let gain = 0;
  return each.v.map((value, i) => { gain += value; return { gain, rate: (1000 * (1 + gain)) / atLength(each, i + 1) }; });
}

function ratePlot(cycle) {
  const known = cycle.w.filter((each) => each.v).map((each) => ({ each, rates: ratesOf(each) }));
  if (!known.length) return [];
  const plain = 1000 / cycle.pl, top = 1.08 * Math.max(plain, ...known.flatMap(({ rates }) => rates.map(({ rate }) => rate)));
  const { plot, x, y } = frame(96, longest(cycle), [[0, "0"], [1 / 1.08, fixed(top / 1.08, 0)]], "Expected tokens a second by length of the draft");
  plot.append(svg("path", { class: "line plain", d: `M${x(0)} ${y(plain / top)}H${W - RIGHT}` }),
    svg("text", { x: (W + LEFT) / 2, y: y(plain / top) - 4, "text-anchor": "middle" }, "plain decoding"));
  for (const { each, rates } of known) {
    const line = `M${x(0)} ${y(plain / top)}L` + rates.map(({ rate }, i) => `${x(i + 1)} ${y(rate / top)}`).join("L");
    plot.append(svg("path", { class: `line ${ARMS[each.a]}`, d: line }));
  }
  pickLine(cycle, x, y, plot);
  return [el("h3", {}, "Expected tokens a second, by length"), plot];
}

function costTable(cycle) {
  const rows = [[2, 0, cycle.pl, 0]];
  for (const each of cycle.w) {
    const rates = each.v && ratesOf(each);
    each.l.forEach((length, i) => rows.push([each.a, length, each.ms[i], rates ? rates[length - 1].gain : null]));
  }
  const body = rows.map(([which, length, ms, gain]) => {
    const picked = which === cycle.a && length === cycle.n;
    return el("tr", { class: picked && "pick" }, el("td", {}, length ? `${ARMS[which]} ${length}` : "plain"), el("td", {}, fixed(ms, 1)),
      el("td", {}, gain === null ? "\u2013" : fixed(1 + gain, 2)), el("td", {}, gain === null ? "\u2013" : fixed((1000 * (1 + gain)) / ms, 1)));
  });
  const head = el("tr", {}, ...["verify", "ms", "tokens expected", "tokens/s"].map((name) => el("th", { scope: "col" }, name)));
  const out = [el("h3", {}, "What each choice costs and brings"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)))];
  if (cycle.b && cycle.w.some((each) => each.a === 1)) out.push(el("p", { class: "caption" },
    `The head would have to catch up with ${plural(cycle.b, "token")} first; the policy spreads that over later drafts.`));
  return out;
}

function featureList(cycle) {
  if (!cycle.f) return [];
  const value = (number, i) => (/a cycle|in a row/.test(features[i]) ? fixed(number, number % 1 ? 1 : 0) : percent(number));
  return [el("h3", {}, "What the prediction looks at"), el("dl", { class: "facts-grid" }, ...cycle.f.flatMap((number, i) => [el("dt", {}, features[i]), el("dd", {}, value(number, i))]))];
}

function timeLine(cycle) {
  if (!cycle.t) return replayed ? [el("p", { class: "caption" }, "Replayed: times are those of the cost model.")] : [];
  const sum = cycle.t.reduce((a, b) => a + b, 0);
  const parts = ["propose", "gate", "forward", "walk"].map((name, i) => `${name} ${fixed(cycle.t[i], 2)}`).join(", ");
  return [el("h3", {}, `Took ${fixed(sum, 1)} ms`), el("p", { class: "reason" }, parts)];
}

function drawPanel(index) {
  const cycle = spelled(cycles[index]), last = cycle.p + cycle.m;
  const tokens = cycle.m === 1 ? `token ${cycle.p + 1}` : `tokens ${cycle.p + 1}\u2013${last}`;
  const go = (to, sign, name) => el("button", { type: "button", "aria-label": name, disabled: to < 0 || to >= cycles.length, onclick: () => pin(to, true) }, sign);
  panel.replaceChildren(
    el("div", { class: "head" }, go(index - 1, "\u2190", "Previous cycle"), go(index + 1, "\u2192", "Next cycle"),
      el("span", { class: "which" }, el("b", {}, `Cycle ${index + 1} of ${cycles.length}`), tokens),
      el("button", { type: "button", id: "close", "aria-label": "Close", onclick: close }, "\u2715")),
    verdict(cycle), el("p", { class: "reason" }, `Reason: ${word(cycle.r) || "none given"}`),
    ...drafts(cycle), ...survivalPlot(cycle), ...ratePlot(cycle), ...costTable(cycle), ...sourceOf(cycle), ...featureList(cycle), ...timeLine(cycle));
}

/* -- selecting -------------------------------------------------------------------------------------------------- */

function show(index) {
  if (index === shown || !cycles[index]) return;
  if (spans[shown]) { spans[shown].classList.remove("now"); spans[shown].tabIndex = -1; spans[shown].setAttribute("aria-selected", "false"); }
  shown = index;
  spans[index].classList.add("now");
  spans[index].tabIndex = 0;
  spans[index].setAttribute("aria-selected", "true");
  byId("rhythm-now").setAttribute("x", index);
  drawPanel(index);
  markSource(cycles[index]);
}

function pin(index, scroll) {
  if (!cycles[index]) return;
  pinned = index;
  document.body.classList.add("open");
  show(index);
  if (scroll) spans[index].scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#cycle=${index + 1}`);
}

function close() {
  document.body.classList.remove("open");
  spans[pinned].focus({ preventScroll: true });
}

function listen() {
  const which = (event) => { const span = event.target.closest(".cycle"); return span ? Number(span.dataset.i) : null; };
  const wide = window.matchMedia("(min-width: 861px)");
  const hovers = (event) => event.pointerType === "mouse" && wide.matches;
  let mouse = "";  // a page that scrolls under a resting mouse is no hovering
  answer.addEventListener("pointermove", (event) => {
    const index = which(event), place = `${event.clientX} ${event.clientY}`;
    if (hovers(event) && index !== null && place !== mouse) show(index);
    mouse = place;
  });
  answer.addEventListener("pointerleave", (event) => { if (hovers(event)) show(pinned); });
  answer.addEventListener("click", (event) => { const index = which(event); if (index !== null) pin(index, true); });
  answer.addEventListener("focusin", (event) => { const index = which(event); if (index !== null && index !== shown) show(index); });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const to = { ArrowLeft: pinned - 1, ArrowRight: pinned + 1, Home: 0, End: cycles.length - 1 }[event.key];
    if (event.key === "Escape") return close();
    if (event.key === "Enter" && which(event) !== null) return pin(which(event), true);
    if (to === undefined || !cycles[to]) return;
    event.preventDefault();
    pin(to, true);
    if (answer.contains(document.activeElement)) spans[to].focus({ preventScroll: true });
  });
}

drawAnswer();
if (cycles.length) {
  drawRhythm();
  listen();
  const wanted = Number((location.hash.match(/^#cycle=(\d+)$/) || [])[1]);
  const most = cycles.reduce((best, cycle, i) => (cycle.k > cycles[best].k ? i : best), 0);
  if (cycles[wanted - 1]) pin(wanted - 1, true);
  else { pinned = most; show(most); }
} else drawPrompt([]);
byId("prompt-box").addEventListener("toggle", () => { if (cycles[shown]) markSource(cycles[shown]); });

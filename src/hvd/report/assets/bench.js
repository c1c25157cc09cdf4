"use strict";
/* Sorts tables, opens requests, filters them, and switches between all prompts and those that don't loop.
   A request's entry: [method, tokens, tokens a second, prefill seconds, cycles, drafted, accepted, positions,
   cycles by arm, ms by phase, finish reason, position that differs or null, 1 for a peer]. */

const value = (cell) => {
  const given = cell && cell.dataset.v;
  if (given === undefined) return null;
  const number = Number(given);
  return given.trim() === "" || Number.isNaN(number) ? given : number;
};

/* Numbers by size, texts by letter, missing values always last. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function sort(heading) {
  const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
  close(table);
  const rows = [...body.rows];
  const numbers = rows.some((row) => typeof value(row.cells[column]) === "number");
  const before = heading.getAttribute("aria-sort");
  const way = before === null ? (numbers ? "descending" : "ascending") : before === "ascending" ? "descending" : "ascending";
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", way);
  const sign = way === "ascending" ? 1 : -1;
  rows.sort((a, b) => compare(value(a.cells[column]), value(b.cells[column]), sign));
  body.append(...rows);
}

function close(scope) {
  for (const row of scope.querySelectorAll("tr.detail")) row.remove();
  for (const button of scope.querySelectorAll("button.open")) button.setAttribute("aria-expanded", "false");
}

function detail(entry) {
  const plain = (entry.find(([method]) => method === "plain") || [])[2];
  const names = ["method", "tokens/s", "speed", "tokens", "cycles", "tokens per cycle", "drafted", "accepted", "positions",
    "cycles by arm", ...DATA.phases.map((phase) => `${phase}, ms`), "prefill, s", "ends by", "output"];
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
  const rows = entry.map(([method, tokens, rate, prefill, cycles, drafted, accepted, positions, arms, ms, finish, differs, peer]) => {
    const output = differs === null ? "identical" : `${peer ? "its own" : "DIFFERS"} from token ${differs}`;
    const cells = [fixed(rate, 1), plain ? `${fixed(rate / plain, 2)}\u00d7` : "\u2013", tokens, cycles || "\u2013",
      cycles ? fixed(tokens / cycles, 2) : "\u2013", drafted, accepted, positions || "\u2013",
      Object.entries(arms).map(([arm, count]) => `${arm} ${count}`).join(", ") || "\u2013",
      ...ms.map((each) => fixed(each, 1)), fixed(prefill, 2), finish, output];
    return el("tr", {}, el("th", { scope: "row" }, method), ...cells.map((cell) => el("td", {}, cell)));
  });
  return el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function open(button) {
  const row = button.closest("tr"), expanded = button.getAttribute("aria-expanded") === "true";
  close(row.closest("table"));
  if (expanded) return;
  const [file, number] = button.dataset.key.split("-").map(Number);
  button.setAttribute("aria-expanded", "true");
  row.after(el("tr", { class: "detail" }, el("td", { colspan: row.cells.length }, el("div", { class: "box" }, detail(DATA.requests[file][number])))));
}

document.addEventListener("click", (event) => {
  const sorter = event.target.closest("button.sort"), opener = event.target.closest("button.open");
  if (sorter) sort(sorter.closest("th"));
  if (opener) open(opener);
});
document.addEventListener("change", (event) => {
  if (event.target.name === "loops") document.body.classList.toggle("straight", event.target.value === "straight");
});
const filter = byId("filter");
if (filter) filter.addEventListener("input", () => {
  const table = byId("requests").querySelector("table"), wanted = filter.value.trim().toLowerCase();
  close(table);
  for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});

"use strict";
const root = document.documentElement;
const WORDS = { light: "Theme: light", dark: "Theme: dark" };

/* Figures: the page holds each as JSON; its colours may be variables of the style sheet, so that they follow the theme. */
const value = (name) => getComputedStyle(root).getPropertyValue(name).trim();

function resolved(part, key = "") {
  if (typeof part === "string") {
    return /color/i.test(key) ? part.replace(/^var\((--[\w-]+)\)$/, (_, name) => value(name)) : part;
  }
  if (Array.isArray(part)) return part.map((item) => resolved(item, key));
  if (part === null || typeof part !== "object") return part;
  return Object.fromEntries(Object.entries(part).map(([name, item]) => [name, resolved(item, name)]));
}

function template(narrow) {
  const soft = { color: value("--soft"), size: narrow ? 11 : 12 };
  const axis = {
    gridcolor: value("--grid"), linecolor: value("--line"), zerolinecolor: value("--line"), automargin: true,
    tickfont: soft, title: { font: soft, standoff: 8 }, ticklabelstandoff: 4,
  };
  const font = { color: value("--ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 };
  return { layout: {
    font, paper_bgcolor: value("--paper"), plot_bgcolor: value("--paper"), xaxis: axis, yaxis: axis,
    hoverlabel: { bgcolor: value("--tint"), bordercolor: value("--soft"), font: { color: value("--ink") }, align: "left" },
    colorway: ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", value("--states")],
  } };
}

function draw(plot, width) {
  const { data, layout } = resolved(JSON.parse(plot.closest(".drawing").querySelector("script").textContent));
  const narrow = (width ?? plot.clientWidth) < 600;
  Object.assign(layout, { template: template(narrow), uirevision: "kept", width, height: plot.clientHeight, autosize: !width });
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger scrolls the page; buttons zoom
  Plotly.react(plot, data, layout, { displayModeBar: false, responsive: !width, scrollZoom: false, doubleClick: "reset" });
  if (!plot.whole && plot.layout.xaxis) {
    plot.whole = layout.meta?.whole ? [0, layout.meta.whole] : [...plot.layout.xaxis.range]; // the axis may be cut off
    plot.on("plotly_relayout", () => tellRange(plot));
  }
}

const plots = window.Plotly ? [...document.querySelectorAll(".plot")] : [];
const PRINT_WIDTH_PX = 700;
const drawAll = (width) => plots.filter(shown).forEach((plot) => draw(plot, width));

const shown = (plot) => !plot.closest("details:not([open])");
async function drawInTurn() {
  for (const plot of plots.filter(shown)) {
    draw(plot);
    await new Promise((done) => setTimeout(done));
  }
  root.dataset.drawn = "yes";
}

/* Theme: what the system prefers, unless the reader chose otherwise; print is always light. */
let printing = false;
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => { try { return localStorage.getItem("theme"); } catch { return null; } };

function applyTheme(shown) {
  root.dataset.theme = shown;
  button.textContent = WORDS[shown];
}
const currentTheme = () => chosen() ?? (dark.matches ? "dark" : "light");
button.addEventListener("click", () => {
  const next = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", next); } catch { /* a browser that keeps nothing */ }
  applyTheme(next);
  drawAll();
});
dark.addEventListener("change", () => { if (!printing) { applyTheme(currentTheme()); drawAll(); } });

let unfolded = [];
function print(begins) {
  if (begins === printing) return;
  printing = begins;
  if (begins) unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const part of unfolded) part.open = begins;
  applyTheme(begins ? "light" : currentTheme());
  drawAll(begins ? PRINT_WIDTH_PX : undefined);
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", (event) => print(event.matches));

/* A link to a section opens it. */
function unfold() {
  const part = location.hash && document.querySelector(`${location.hash} > details`);
  if (part) part.open = true;
}
addEventListener("hashchange", unfold);

/* What is folded is drawn when it is opened. */
document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", () => {
  if (part.open && !printing) plots.filter((plot) => part.contains(plot)).forEach((plot) => draw(plot));
}));

/* Zoom along the time axis, by drag (Plotly's own) and by buttons. */
function tellRange(plot) {
  const output = plot.closest(".drawing").querySelector("output");
  const [first, last] = plot.layout.xaxis.range;
  const digits = last - first < 10 ? 3 : 1;
  if (output) output.textContent = `${first.toFixed(digits)} to ${last.toFixed(digits)} ms`;
}

function zoom(plot, how) {
  const [low, high] = plot.whole;
  let [first, last] = plot.layout.xaxis.range;
  const quarter = (last - first) / 4;
  const moves = { in: [1, -1], out: [-2, 2], earlier: [-2, -2], later: [2, 2] };
  if (how === "all") [first, last] = [low, high];
  else [first, last] = [first + moves[how][0] * quarter, last + moves[how][1] * quarter];
  if (first < low) [first, last] = [low, Math.min(high, last + low - first)];
  if (last > high) [first, last] = [Math.max(low, first - last + high), high];
  Plotly.relayout(plot, { "xaxis.range": [first, last] });
}
document.querySelectorAll("[data-zoom]").forEach((control) => control.addEventListener("click", () =>
  zoom(control.closest(".drawing").querySelector(".plot"), control.dataset.zoom)));

/* Tables: rows in the order of a column's raw values; missing ones stay last. */
const number = (text) => ({ inf: Infinity, "-inf": -Infinity })[text] ?? Number(text);

function sort(heading) {
  const body = heading.closest("table").tBodies[0];
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = [...body.rows].map((row) => [row.cells[heading.cellIndex].dataset.value, row]);
  const known = rows.filter(([raw]) => raw !== "");
  const numeric = known.every(([raw]) => !Number.isNaN(number(raw)));
  const compare = numeric ? (a, b) => (number(a) < number(b) ? -1 : number(a) > number(b) ? 1 : 0)
    : (a, b) => a.localeCompare(b, "en", { numeric: true });
  known.sort(([a], [b]) => sign * compare(a, b));
  body.append(...[...known, ...rows.filter(([raw]) => raw === "")].map(([, row]) => row));
  for (const other of heading.parentNode.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
}
document.querySelectorAll("th button").forEach((control) =>
  control.addEventListener("click", () => sort(control.closest("th"))));

/* What a column means: at its heading by mouse, keyboard or touch, and at each of its cells by mouse. */
const tip = document.getElementById("tip");
let explained = null;

function explain(target) {
  explained = target.closest?.("th, td") ?? null;
  tip.hidden = true;
  if (!explained) return;
  const heading = explained.closest("table").tHead.rows[0].cells[explained.cellIndex];
  const own = explained.dataset.meaning;
  const label = own ? explained.textContent : heading.querySelector("span").textContent;
  const unit = own ? "" : heading.querySelector("small")?.textContent;
  const meaning = own ?? heading.querySelector("[hidden]").textContent;
  tip.hidden = !meaning;
  tip.textContent = `${label}${unit ? `, ${unit}` : ""}: ${meaning}`;
  placeTip();
}

function placeTip() {
  if (tip.hidden) return;
  const box = explained.getBoundingClientRect(), mine = tip.getBoundingClientRect();
  const above = box.top - mine.height - 6;
  tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - mine.width - 4))}px`;
}
addEventListener("mouseover", (event) => { if (event.target !== tip) explain(event.target); });
addEventListener("focusin", (event) => explain(event.target));
addEventListener("scroll", placeTip, true);
addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

applyTheme(root.dataset.theme);
unfold();
drawInTurn();
document.getElementById("no-script").hidden = window.Plotly || !document.querySelector(".plot");

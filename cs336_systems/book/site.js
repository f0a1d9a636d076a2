"use strict";
// The book's search, sliders, figures and theme. INDEX, SPECS and SLIDERS are set by the scripts before this one.

// Search: every word must begin a word of the section; titles and whole phrases count more.
const escaped = word => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const fold = text => text.toLowerCase().replaceAll(",", "");
const wordsOf = query => fold(query).split(/\s+/).filter(Boolean);

function search(index, query) {
  const words = wordsOf(query), phrase = words.join(" ");
  const starts = words.map(word => new RegExp("(?<![\\p{L}\\d])" + escaped(word), "gu"));
  const found = [];
  for (const [url, title, heading, text] of words.length ? index : []) {
    const head = fold(title + " " + heading), body = fold(text);
    let score = words.length > 1 && (head + " " + body).includes(phrase) ? 20 : 0;
    for (const start of starts) {
      const inBody = Math.min(5, body.match(start)?.length ?? 0);
      const hits = 8 * (head.match(start)?.length ?? 0) + inBody;
      if (!hits) { score = 0; break; }
      score += hits;
    }
    if (score) found.push({ score, url, title, heading, text });
  }
  return found.sort((a, b) => b.score - a.score).slice(0, 20);
}

// Sliders. Each returns numbers that Python has calculated: tests compare them with `analysis`.
function memoryOf(data, model, ranks, recompute) {
  const place = data.ranks.indexOf(ranks);
  return Object.entries(data.gib[model]).map(([scheme, cases]) => {
    const parts = cases[recompute ? "recompute" : "keep"][place];
    return { scheme, parts, total: parts.reduce((sum, part) => sum + part, 0) };
  });
}

function plansOf(data, model, gpu, sequences, gpus) {
  const rows = data.cases[model][gpu][sequences][data.gpus.indexOf(gpus)];
  const plans = rows.map(([plan, recompute, gib, fits, utilization]) => {
    return { plan: data.plans[plan], recompute: !!recompute, gib, fits: !!fits, utilization };
  });
  const best = plans.filter(one => one.fits).sort((a, b) => b.utilization - a.utilization)[0];
  return { plans, best };
}

function start() {
  const root = document.documentElement, get = id => document.getElementById(id);
  get("menu").onclick = () => {
    get("menu").setAttribute("aria-expanded", document.body.classList.toggle("menu"));
  };
  get("theme").onclick = () => {
    const isDark = getComputedStyle(root).colorScheme === "dark" ||
      (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = isDark ? "light" : "dark";
    try { localStorage.theme = root.dataset.theme } catch {}
  };
  searchBox(get("query"), get("found"));
  if (typeof SLIDERS !== "undefined") {
    if (get("slider-memory")) memorySlider(get("slider-memory"), SLIDERS.memory);
    if (get("slider-plans")) planSlider(get("slider-plans"), SLIDERS.plans);
  }
  if (typeof SPECS === "undefined") return;
  draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
}

function make(name, content = "", facts = {}) {
  const element = Object.assign(document.createElement(name), facts);
  element.append(...[content].flat());
  return element;
}

function searchBox(query, list) {
  query.oninput = () => {
    const found = search(INDEX, query.value), words = wordsOf(query.value);
    const pattern = new RegExp(`(${words.map(escaped).join("|")})`, "gi");
    list.hidden = !words.length;
    list.replaceChildren(...found.map(({ url, title, heading, text }) => {
      const at = Math.max(0, fold(text).indexOf(words.join(" ")), text.toLowerCase().indexOf(words[0]));
      const part = "…" + text.slice(Math.max(0, at - 40), at + 120) + "…";
      // With a group in the pattern, every other piece is a word that was searched for.
      const pieces = part.split(pattern).map((piece, place) => place % 2 ? make("mark", piece) : piece);
      const name = heading ? `${title} › ${heading}` : title;
      return make("a", [name, make("small", pieces)], { href: url });
    }));
    if (!found.length) list.append(make("p", "Nothing found.", { className: "quiet" }));
  };
  addEventListener("keydown", event => {
    if (event.key === "/" && !/INPUT|SELECT/.test(document.activeElement.tagName)) {
      event.preventDefault();
      query.focus();
    }
    if (event.key === "Escape") { list.hidden = true; query.blur(); }
    if (event.key === "Enter" && document.activeElement === query) list.querySelector("a")?.click();
  });
  addEventListener("click", event => { if (!event.target.closest("header")) list.hidden = true; });
}

// A control of a slider: a choice of names, a range over numbers, or a box to tick.
function control(form, name, values, initial) {
  if (typeof initial === "boolean") {
    const box = make("input", "", { type: "checkbox", checked: initial });
    form.append(make("label", [box, name]));
    return () => box.checked;
  }
  if (typeof initial === "string") {
    const select = make("select", values.map(value => make("option", value)), { value: initial });
    select.value = initial;
    form.append(make("label", [name, select]));
    return () => select.value;
  }
  const range = make("input", "", { type: "range", min: 0, max: values.length - 1 });
  range.value = values.indexOf(initial);
  const output = make("output", initial.toLocaleString("en"));
  range.addEventListener("input", () => { output.value = values[range.value].toLocaleString("en"); });
  form.append(make("label", [name, range, output]));
  return () => values[range.value];
}

const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"];

function memorySlider(place, data) {
  const form = make("form"), bars = make("div"), key = make("div", "", { className: "key" });
  const model = control(form, "model", Object.keys(data.gib), "xl");
  const ranks = control(form, "ranks", data.ranks, 2);
  const recompute = control(form, "recompute activations", [], false);
  key.append(...data.parts.map((part, number) => {
    const patch = make("i");
    patch.style.background = COLORS[number];
    return make("span", [patch, part]);
  }));
  place.replaceChildren(form, bars, key);
  const show = () => {
    const rows = memoryOf(data, model(), ranks(), recompute());
    const most = Math.max(data.limit * 1.05, ...rows.map(row => row.total));
    bars.replaceChildren(...rows.map(({ scheme, parts, total }) => {
      const pieces = parts.map((part, number) => {
        const piece = make("i", "", { title: `${data.parts[number]}: ${part.toFixed(1)} GiB` });
        piece.style.cssText = `width: ${100 * part / most}%; background: ${COLORS[number]}`;
        return piece;
      });
      const limit = make("u", "", { title: `${data.gpu}: ${data.limit} GiB` });
      limit.style.left = `${100 * data.limit / most}%`;
      const track = make("span", [...pieces, limit], { className: "track" });
      const said = `${total.toFixed(1)} GiB${total > data.limit ? " ✗" : ""}`;
      return make("div", [make("b", scheme), track, make("span", said)], { className: "bar" });
    }));
  };
  form.addEventListener("input", show);
  show();
}

function planSlider(place, data) {
  const form = make("form"), body = make("tbody"), answer = make("p");
  const model = control(form, "model", Object.keys(data.cases), "xl");
  const gpu = control(form, "GPU", data.hardware, "H200");
  const sequences = control(form, "sequences a replica", data.sequences, "4");
  const gpus = control(form, "GPUs", data.gpus, 8);
  const heads = ["plan", "recompute", "GiB a GPU", "fits", "MFU"].map(name => make("th", name));
  const table = make("table", [make("thead", make("tr", heads)), body]);
  place.replaceChildren(form, answer, make("div", table, { className: "scroll" }));
  const show = () => {
    const { plans, best } = plansOf(data, model(), gpu(), sequences(), gpus());
    const words = best?.recompute ? ", with activations computed again" : "";
    answer.textContent = best
      ? `Fastest of those that fit: ${best.plan}${words}, ${(100 * best.utilization).toFixed(1)} % of the peak.`
      : "None fits: more GPUs, or fewer tokens a GPU.";
    body.replaceChildren(...plans.map(one => {
      const cells = [one.plan, one.recompute ? "yes" : "no", one.gib.toFixed(1)];
      cells.push(one.fits ? "yes" : "no", `${(100 * one.utilization).toFixed(1)} %`);
      const row = make("tr", cells.map(cell => make("td", cell)));
      row.className = one === best ? "best" : "";
      return row;
    }));
  };
  form.addEventListener("input", show);
  show();
}

// Figures: the Vega-Lite specifications of the pages, as wide as the page. Their ink is the page's.
async function draw() {
  for (const [id, spec] of Object.entries(structuredClone(SPECS))) {
    const place = document.getElementById(id), room = place.clientWidth, narrow = room < 600;
    const config = spec.config;
    for (const part of ["axis", "legend", "header"])
      Object.assign(config[part], { labelFontSize: 12, titleFontSize: 12 });
    Object.assign(config.axis, { labelOverlap: "greedy" }, narrow ? { labelLimit: 110 } : {});
    if (narrow) {
      breakNames(spec);
      Object.assign(config.title, { fontSize: 13, subtitleFontSize: 12 });
      if (typeof spec.title === "string") spec.title = { text: spec.title };
      for (const [part, letter] of [["text", 8.5], ["subtitle", 7]]) // pixels of a letter
        if (spec.title?.[part]?.length) spec.title[part] = wrap(spec.title[part], room / letter);
    }
    if (narrow || spec.facet) {
      dropLegends(spec);
      const columns = spec.facet && !narrow ? 4 : spec.facet ? 2 : 1;
      Object.assign(config.legend, { orient: "bottom", columns, labelLimit: 0 });
    }
    if (spec.facet) {
      spec.columns = narrow ? 1 : spec.columns ?? 1;
      spec.spec.width = room / spec.columns - (narrow ? 80 : 60);
    } else if (!spec.hconcat && !spec.vconcat && !spec.concat) {
      spec.width = room;
      spec.autosize = { type: "fit-x", contains: "padding" };
    }
    const options = { actions: false, renderer: "svg" };
    await vegaEmbed(place, spec, options);
    // The words beside panels are as wide as they are: what is too much is taken from the panels.
    const excess = place.scrollWidth - room;
    if (excess > 0) {
      if (spec.facet) spec.spec.width -= Math.ceil(excess / spec.columns) + 2;
      else spec.width -= excess + 2;
      await vegaEmbed(place, spec, options);
    }
  }
}

// A legend's own place and columns would win over those of the page.
function dropLegends(part) {
  if (part === null || typeof part !== "object") return;
  if (part.legend && typeof part.legend === "object") {
    delete part.legend.orient;
    delete part.legend.columns;
  }
  Object.values(part).forEach(dropLegends);
}

// Long names beside horizontal bars have two lines.
function breakNames(part) {
  if (part === null || typeof part !== "object") return;
  if (part.y?.type === "nominal") {
    const name = part.y.axis?.labelExpr ?? "datum.label";
    const labelExpr = `split(replace(${name}, /^(?=.{17})(.{5,15}) /, '$1\\n'), '\\n')`;
    part.y.axis = { ...part.y.axis, labelExpr };
  }
  Object.values(part).forEach(breakNames);
}

function wrap(text, letters) {
  const lines = [""];
  for (const word of [text].flat().join(" ").split(" ")) {
    if ((lines.at(-1) + word).length > letters) lines.push(word);
    else lines.push((lines.pop() + " " + word).trim());
  }
  return lines;
}

if (typeof module !== "undefined") module.exports = { search, memoryOf, plansOf };
if (typeof document !== "undefined") start();

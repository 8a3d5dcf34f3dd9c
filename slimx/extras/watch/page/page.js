// Live page of a run. Text of the run is assigned only to textContent, so it is never interpreted as HTML.
"use strict";

const EVERY_MS = 3000;
const SHADES = ["#4a86cf", "#dd8a33", "#3f9f7f", "#b05c9f", "#c8574f", "#8f8340", "#3aa3b4", "#8a78c9"];
const GOOD = "#3f9f7f", BAD = "#c8574f";
const CHARTS = ["curves", "time", "compared"];  // tabs with charts
const byId = (id) => document.getElementById(id);
let chartsVersion = "";
let steps = [];

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function request(path) {
  const answer = await fetch(path);
  if (answer.status === 403) throw new Error(await answer.text());
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

function shown(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  return size >= 999.5 ? Math.round(value).toLocaleString("en")
    : size > 0 && size < 0.0001 ? value.toExponential(2).replace(/\.?0*e-(\d)$/, "e-0$1") : String(Number(value.toPrecision(3)));
}

const counted = (count, noun, nouns = `${noun}s`) => `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`;

function drawStatus(status) {
  document.title = `${status.name}: step ${status.step} of ${status.steps}`;
  byId("name").textContent = status.name;
  byId("state").textContent = `${status.state}, step ${status.step} of ${status.steps}`;
  byId("state").className = `state ${status.state}`;
  byId("lines").textContent = status.lines.join("\n");
  drawTerms(status.terms);
  byId("engines").hidden = status.engines.length === 0;
  byId("engines").previousElementSibling.hidden = status.engines.length === 0;
  byId("engines").tBodies[0].replaceChildren(...status.engines.map((engine) => {
    const row = element("tr");
    const state = engine.standing in status.states ? `${status.states[engine.standing]} (${engine.standing})` : engine.standing;
    const standing = status.running ? state : `ended; before: ${state}`;
    for (const cell of [engine.name, engine.frozen ? "frozen" : engine.role, standing, engine.restarts, engine.url || ""])
      row.append(element("td", "", cell));
    return row;
  }));
}

function drawTerms(terms) {
  if (byId("terms").children.length) return;
  for (const [term, meaning] of Object.entries(terms)) {
    const words = element("dd");
    words.append(...coded(meaning));
    byId("terms").append(element("dt", "", term), words);
  }
}

// A title that opens the explanation of a card or chart. Texts contain names in backticks.
function explained(title, about) {
  const made = element("details", "about"), summary = element("summary"), body = element("div");
  summary.append(title);
  for (const item of about) {
    const line = element("p");
    if (item.label) line.append(element("b", "", `${item.label}: `));
    line.append(...coded(item.meaning));
    if (item.good) line.append(" ", element("b", "", "Good: "), ...coded(item.good));
    line.append(" ", element("code", "", `${item.metric} (docs/metrics.md#${item.section})`));
    body.append(line);
  }
  made.append(summary, body);
  return made;
}

const coded = (text) => text.split("`").map((part, at) => at % 2 ? element("code", "", part) : part);

// Updates existing cards in place, so that open explanations stay open.
function drawCards(cards) {
  const container = byId("numbers");
  const old = new Map([...container.children].map((cell) => [cell.dataset.title, cell]));
  container.replaceChildren(...cards.map((card) => {
    const cell = old.get(card.title) ?? element("div");
    if (!cell.dataset.title) {
      const title = element("dt");
      title.append(explained(card.title, card.about));
      cell.append(title);
      cell.dataset.title = card.title;
    }
    while (cell.children.length > 1) cell.lastChild.remove();
    cell.append(element("dd", "value", card.value), ...[card.scope, ...card.more].map((line) => element("dd", "", line)));
    return cell;
  }));
}

// Updates existing charts in place, so that zoom and hover are kept.
function drawCharts(charts) {
  for (const block of CHARTS) {
    const wanted = charts.filter((chart) => chart.block === block);
    if (block === "compared") document.querySelector("[data-tab=compared]").hidden = wanted.length === 0;
    const container = byId(block);
    while (container.children.length > wanted.length) container.lastChild.remove();
    wanted.forEach((chart, number) => {
      let card = container.children[number];
      if (!card) {
        card = element("div", "card");
        card.append(element("div"), element("div", "chart"), element("div", "notes"));
        container.append(card);
      }
      card.className = chart.wide ? "card wide" : "card";
      const words = JSON.stringify([chart.title, chart.about]);
      if (card.words !== words) {
        card.words = words;
        card.children[0].replaceChildren(explained(element("h4", "", chart.title), chart.about));
      }
      card.children[2].replaceChildren(...chart.notes.map((note) => element("p", "soft", note)));
      card.children[1].style.height = `${chart.height}px`;
      chart.figure.layout.uirevision = chart.title;
      card.chart = chart;
      if (!container.hidden) draw(card);
    });
  }
}

function draw(card) {
  if (!card.chart) return;
  const {data, layout} = card.chart.figure, chart = card.children[1], first = !chart.on;
  card.whole = structuredClone(layout.xaxis);  // plotly.js changes the figure
  if (card.zoomed) layout.xaxis = {...layout.xaxis, tickmode: "auto"};
  Plotly.react(chart, data, layout, {displayModeBar: false, responsive: true});
  if (first) retick(card, chart);
  card.chart = null;
}

// Ticks are fixed for the whole run. In a part of it that a reader zooms into, plotly.js chooses them.
function retick(card, chart) {
  chart.on("plotly_relayout", (change) => {
    const whole = card.whole, start = change["xaxis.range[0]"], reset = start === whole.range?.[0] || change["xaxis.autorange"];
    if (!whole.tickvals || start === undefined && !reset) return;
    card.zoomed = !reset;
    Plotly.relayout(chart, reset ? {"xaxis.tickmode": "array", "xaxis.range": [...whole.range]} : {"xaxis.tickmode": "auto"});
  });
}

// Rollouts -------------------------------------------------------------------------------------------------------------

function drawSteps(found) {
  if (found.length === steps.length && found.every((step, at) => step === steps[at])) return;
  const first = steps.length === 0;
  steps = found;
  document.querySelectorAll(".side").forEach((side, number) => {
    const select = side.querySelector(".step");
    const chosen = select.value;
    select.replaceChildren(...steps.map((step) => new Option(step, step)));
    select.value = steps.includes(Number(chosen)) && chosen ? chosen : number === 0 ? steps[steps.length - 1] : steps[0];
    if (first || select.value !== chosen) load(side);
  });
}

async function load(side) {
  const step = side.querySelector(".step").value;
  if (step === "" || side.hidden || byId("rollouts").hidden) return;
  side.querySelector(".count").textContent = "loading";
  try {
    side.found = await request(`/api/steps/${step}`);
  } catch (error) {
    side.found = null;
    side.querySelector(".groups").replaceChildren();
    side.querySelector(".count").textContent = error.message;
    return;
  }
  const sets = new Set([...byId("dataset").options].map((option) => option.value));
  for (const group of side.found.groups)
    if (group.prompt.dataset && !sets.has(group.prompt.dataset)) {
      sets.add(group.prompt.dataset);
      byId("dataset").append(new Option(group.prompt.dataset, group.prompt.dataset));
    }
  drawGroups(side);
}

const known = (value) => value !== null && value !== undefined;
const sampled = (each) => each.tokens.sampled;
const passed = (side, each) => known(each.reward) && each.reward >= side.found.passing;
const textOf = (each) => each.parts.map((part) => part.text).join("");

function chosenOf(group) {
  const low = byId("lowest").value, high = byId("highest").value, long = byId("longest").value;
  const words = byId("words").value.toLowerCase(), set = byId("dataset").value;
  if (set && group.prompt.dataset !== set) return [];
  return group.trajectories.filter((each) =>
    (low === "" || (each.reward !== null && each.reward >= Number(low))) &&
    (high === "" || (each.reward !== null && each.reward <= Number(high))) &&
    (long === "" || sampled(each) >= Number(long)) &&
    (words === "" || (group.prompt.text + textOf(each)).toLowerCase().includes(words)));
}

function drawGroups(side) {
  if (!side.found) return;
  const order = byId("order").value, sign = order.startsWith("-") ? -1 : 1, key = order.replace("-", "");
  const value = (each) => key === "length" ? sampled(each) : each[key] ?? -Infinity;
  const best = (group) => Math.min(...group.kept.map((each) => sign * value(each)));
  const groups = side.found.groups.map((group) => ({...group, kept: chosenOf(group)})).filter((group) => group.kept.length);
  if (key) {
    for (const group of groups) group.kept.sort((a, b) => sign * (value(a) - value(b)));
    groups.sort((a, b) => best(a) - best(b));
  }
  const count = groups.reduce((sum, group) => sum + group.kept.length, 0);
  side.querySelector(".count").textContent =
    `trained at version ${side.found.version}: ${counted(count, "trajectory", "trajectories")} in ${counted(groups.length, "group")}` +
    side.found.problems.map((problem) => `; ${problem}`).join("");
  side.querySelector(".groups").replaceChildren(...groups.map((group) => drawGroup(side, group)));
  // If the filters leave a single trajectory, its tokens are opened.
  if (count === 1) side.querySelector(".trajectory").click();
}

function drawImage(side, group, name, index) {
  const image = element("img", "image");
  image.alt = image.title = name ?? "an image in the prompt file";
  image.loading = "lazy";
  if (name !== null) image.src = `/api/steps/${side.found.step}/image?${new URLSearchParams({group, index})}`;
  return image;
}

function drawGroup(side, group) {
  const card = element("div", "group");
  const set = group.prompt.dataset ? `, ${group.prompt.dataset}` : "";
  card.append(element("div", "soft", `group ${group.id}, prompt ${group.prompt.id}${set}, mean reward ${shown(group.reward)}`));
  card.append(element("div", "prompt", group.prompt.text));
  card.append(...group.prompt.images.map((name, index) => drawImage(side, group.id, name, index)));
  for (const each of group.kept) {
    const row = element("div", "trajectory");
    const versions = [...new Set(each.versions.map((version) => version[2]))].join("+") || "none";
    const parts = Object.entries(each.reward_parts).map(([name, reward]) => `${name} ${shown(reward)}`).join(", ");
    const turns = new Set(each.parts.filter((part) => part.source === "sampled").map((part) => part.turn)).size;
    const verdict = element("div"), right = passed(side, each);
    verdict.append(element("b", right ? "up" : "down", `${right ? "✓ passed" : "✗ failed"}, reward ${shown(each.reward)}`));
    if (parts) verdict.append(` (parts: ${parts})`);
    if (known(group.prompt.answer)) verdict.append(", expected ", element("mark", "", shortened(group.prompt.answer)));
    const head = element("div", "soft", `${each.id}${each.policy === "actor" ? "" : " of " + each.policy}: ${each.status} (${each.finish_reason}), version ${versions}, ` +
      `${counted(sampled(each), "token")}, ${counted(turns, "turn")}`);
    if (known(each.advantage)) head.append(`, advantage ${shown(each.advantage)}`);
    if (known(each.gap)) head.append(`, largest log-prob gap ${shown(each.gap)}`);
    if (known(each.other_experts)) head.append(`, ${counted(each.other_experts, "token")} routed to other experts`);
    const text = element("div", "text");
    for (const [part, found] of each.parts.flatMap((part) => part.marked)) text.append(found ? element("mark", "", part) : part);
    row.append(verdict, head, text);
    row.tabIndex = 0;
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") row.click(); });
    row.addEventListener("click", () => openTokens(side, group.id, each.id, row, text), {once: true});
    card.append(row);
  }
  return card;
}

const shortened = (text) => text.length > 160 ? text.slice(0, 160) + " ..." : text;

// Tokens of one trajectory ---------------------------------------------------------------------------------------------

async function openTokens(side, group, id, row, text) {
  let found;
  try {
    found = await request(`/api/steps/${side.found.step}/tokens?group=${encodeURIComponent(group)}`);
  } catch (error) {
    row.append(element("p", "soft", error.message));
    return;
  }
  row.tokens = found.groups[0].trajectories.find((each) => each.id === id).each_token;
  const legend = element("div", "soft legend"), line = element("div", "tokens");
  for (const token of row.tokens) {
    const span = element("span", token.source === "prompt" ? "prompt-token" : token.source, token.text);
    if (!token.trained && token.source === "sampled") span.classList.add("untrained");
    span.title = tooltipOf(token);
    line.append(span);
  }
  // Tokens do not mark the expected answer, so the text that does stays.
  if (text.querySelector("mark")) text.after(legend, line);
  else text.replaceWith(legend, line);
  paint(row);
}

const gapOf = (token) => known(token.trainer_logprob) && known(token.logprob) ? Math.abs(token.trainer_logprob - token.logprob) : null;

function tooltipOf(token) {
  const lines = [`token ${token.position}`, `id ${token.id}`, token.source];
  if (token.version !== null) lines.push(`version ${token.version}`, `log-prob ${shown(token.logprob)}`);
  if (token.version !== null && known(token.trainer_logprob))
    lines.push(`trainer's log-prob ${shown(token.trainer_logprob)}`, `gap ${shown(gapOf(token))}`);
  if (token.trained && known(token.advantage)) lines.push(`advantage ${shown(token.advantage)}`);
  if (token.version !== null && token.other_experts) lines.push("routed to different experts than in the engine");
  if (token.version !== null && !token.trained) lines.push("not trained");
  return lines.join(", ");
}

// Each function below returns `color`, which maps a token to a color and an opacity from 0 to 1, or to null, and the
// `entries` and `words` of the legend.
function byVersion(tokens) {
  const versions = [...new Set(tokens.map((token) => token.version).filter((version) => version !== null))];
  const shade = (version) => SHADES[versions.indexOf(version) % SHADES.length];
  return {
    color: (token) => token.version === null ? null : [shade(token.version), 0.16 + Math.min(1, -(token.logprob ?? 0) / 5) * 0.7],
    entries: versions.map((version) => [shade(version), `version ${version}`]),
    words: "stronger color: less likely token",
  };
}

// The opacity increases by a seventh per decade, from a gap of 1e-7 (the precision of a log-prob) to a gap of 1.
function byGap() {
  const color = (token) => gapOf(token) === null ? null
    : gapOf(token) === 0 ? [GOOD, 0.25] : [BAD, Math.max(0.12, Math.min(1, 1 + Math.log10(gapOf(token)) / 7))];
  return {color, entries: [[GOOD, "no gap"], [BAD, "log-prob gap"]], words: "from pale (at most 1e-6) to full color (at least 1)"};
}

function byAdvantage(tokens) {
  const trained = tokens.filter((token) => token.trained && known(token.advantage));
  const most = trained.reduce((found, token) => Math.max(found, Math.abs(token.advantage)), 0) || 1;
  return {
    color: (token) => token.trained && known(token.advantage) && token.advantage !== 0
      ? [token.advantage > 0 ? GOOD : BAD, 0.15 + 0.6 * Math.abs(token.advantage) / most] : null,
    entries: [[GOOD, "made more likely"], [BAD, "made less likely"]],
    words: `strongest color: advantage of ${shown(most)} or -${shown(most)}`,
  };
}

function byExperts() {
  const color = (token) => token.version === null || !known(token.other_experts) ? null
    : token.other_experts ? [BAD, 0.7] : [GOOD, 0.2];
  return {color, entries: [[GOOD, "same experts as in the engine"], [BAD, "other experts in at least one layer"]], words: ""};
}

const COLORINGS = {"": byVersion, gap: byGap, advantage: byAdvantage, experts: byExperts};

function paint(row) {
  const chosen = COLORINGS[byId("color").value](row.tokens);
  const legend = row.querySelector(".legend"), spans = row.querySelectorAll(".tokens > span");
  const colors = row.tokens.map(chosen.color);
  legend.replaceChildren(...chosen.entries.map(([shade, words]) => {
    const entry = element("span"), mark = element("i");
    mark.style.background = shade;
    entry.append(mark, words);
    return entry;
  }));
  const missing = colors.every((color) => color === null) ? "this step has no values to color by" : chosen.words;
  legend.append([missing, "dotted: inserted", "pale: not trained"].filter(Boolean).join("; "));
  colors.forEach((color, at) => {
    spans[at].style.background = color === null ? ""
      : color[0] + Math.round(255 * color[1]).toString(16).padStart(2, "0");
  });
}

// The page ---------------------------------------------------------------------------------------------------------------

async function refresh() {
  try {
    drawStatus(await request("/api/status"));
    const found = await request(`/api/charts?since=${chartsVersion}`);
    chartsVersion = found.version;
    if (found.charts) {
      drawCards(found.cards);
      drawCharts(found.charts);
    }
    drawSteps(await request("/api/steps"));
    byId("stale").hidden = true;
  } catch (error) {
    byId("stale").textContent = `no update since ${new Date().toISOString().slice(11, 19)} UTC: ${error.message}`;
    byId("stale").hidden = false;
  }
  setTimeout(refresh, EVERY_MS);
}

function choose(tab) {
  document.querySelectorAll("nav button").forEach((button) => button.classList.toggle("chosen", button.dataset.tab === tab));
  document.querySelectorAll("main > section").forEach((section) => { section.hidden = section.id !== tab; });
  if (CHARTS.includes(tab)) [...byId(tab).children].forEach(draw);
  if (tab === "rollouts") document.querySelectorAll(".side").forEach((side) => { if (!side.found) load(side); });
  remember(tab);
}

// The URL contains the tab and the filters, so that a link to it shows the same view.
const FILTERS = ["lowest", "highest", "dataset", "longest", "words", "order", "color", "compare"];

function remember(tab) {
  const wanted = new URLSearchParams();
  for (const id of FILTERS) {
    const input = byId(id), value = id === "compare" ? (input.checked ? "1" : "") : input.value;
    if (value) wanted.set(id, value);
  }
  const query = wanted.toString();
  history.replaceState(null, "", `${query ? "?" + query : location.pathname}#${tab ?? location.hash.slice(1)}`);
}

function recall() {
  for (const [id, value] of new URLSearchParams(location.search)) {
    if (!FILTERS.includes(id)) continue;
    if (id === "compare") byId(id).checked = true;
    else {
      if (id === "dataset") byId(id).append(new Option(value, value));
      byId(id).value = value;
    }
  }
  document.querySelectorAll(".side")[1].hidden = !byId("compare").checked;
}

document.querySelectorAll("nav button").forEach((button) => button.addEventListener("click", () => choose(button.dataset.tab)));
document.querySelectorAll(".side").forEach((side) => side.querySelector(".step").addEventListener("change", () => load(side)));
byId("filters").addEventListener("input", (event) => {
  // A change of color repaints open tokens without closing them.
  if (event.target.id === "color") document.querySelectorAll(".trajectory").forEach((row) => { if (row.tokens) paint(row); });
  else document.querySelectorAll(".side").forEach(drawGroups);
  remember();
});
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("compare").addEventListener("input", () => {
  const second = document.querySelectorAll(".side")[1];
  second.hidden = !byId("compare").checked;
  load(second);
});
recall();
if ([...CHARTS, "rollouts"].includes(location.hash.slice(1))) choose(location.hash.slice(1));
refresh();

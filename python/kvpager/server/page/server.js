// The server's state, drawn once a second.

import { at, bytes, seconds } from "./common.js";

const HISTORY = 120; // states that the drawings go back
const WHERE = { r: "in the pool", h: "host memory", d: "disk", s: "snapshot", "-": "released" };
const lines = { generated: [], prompt: [] };
let rows = []; // the shown conversation's chunks over time

const num = (text) => ({ number: String(text) });
const link = (id) => ({ session: id });
const ms = (value) => (value === null ? "–" : (1000 * value).toFixed(value < 0.1 ? 1 : 0));
const rate = (value) => value.toFixed(value < 10 ? 1 : 0);

export function show(state) {
  at("server-model").textContent = `${state.model}, kvpager ${state.version}, up ${seconds(state.uptime_s)}`;
  at("generated").textContent = rate(state.generated_tokens_per_s);
  at("prompt").textContent = rate(state.prompt_tokens_per_s);
  line("generated", state.generated_tokens_per_s);
  line("prompt", state.prompt_tokens_per_s);
  at("first50").textContent = ms(state.first_token_s.p50);
  at("first99").textContent = ms(state.first_token_s.p99);
  at("between50").textContent = ms(state.between_tokens_s.p50);
  at("between99").textContent = ms(state.between_tokens_s.p99);
  at("running").textContent = state.running;
  at("waiting").textContent = state.waiting;
  const { used, blocks, chunk_tokens } = state.pool;
  at("pool-text").textContent = `${used} of ${blocks} blocks are taken; each holds a chunk of ${chunk_tokens} tokens`;
  at("pool-meter").firstElementChild.style.width = (100 * used) / blocks + "%";
  at("pool-meter").setAttribute("aria-label", `${Math.round((100 * used) / blocks)}% of the pool is in use`);
  fill("tiers", Object.entries(state.tiers).map(([tier, size]) => [tier, num(bytes(size))]));
  fill("requests", state.requests.map((one) => [one.id ? link(one.id) : "unnamed", one.state, num(one.prompt_tokens), num(one.generated), num(one.seconds.toFixed(1))]));
  at("sessions-count").textContent = state.sessions_in_all ? `(${state.sessions_in_all})` : "";
  fill("sessions", state.sessions.map((one) => [link(one.id), num(one.tokens), num(bytes(one.bytes)), one.tier, num(seconds(one.age_s))]));
}

// Only cells that changed are touched: a link keeps the focus.
function fill(id, table) {
  const body = at(id);
  while (body.rows.length > table.length) body.deleteRow(-1);
  table.forEach((cells, r) => {
    const row = body.rows[r] || body.insertRow();
    cells.forEach((cell, c) => {
      const td = row.cells[c] || row.insertCell();
      td.colSpan = 1;
      const text = cell.number ?? cell.session ?? cell;
      td.className = cell.number === undefined ? "" : "number";
      if (c === 0) td.title = text;
      if (td.textContent === text && Boolean(td.firstElementChild) === Boolean(cell.session)) return;
      td.textContent = text;
      if (cell.session) {
        const anchor = Object.assign(document.createElement("a"), { href: "#c/" + encodeURIComponent(text), textContent: text });
        td.replaceChildren(anchor);
      }
    });
  });
  if (!table.length) {
    const cell = body.insertRow().insertCell();
    cell.colSpan = 6;
    cell.className = "quiet";
    cell.textContent = "none";
  }
}

function line(name, value) {
  const values = lines[name];
  values.push(value);
  if (values.length > HISTORY) values.shift();
  const top = Math.max(1, ...values);
  const points = values.map((v, i) => `${HISTORY - values.length + i},${30 - (28 * v) / top}`);
  const svg = at(name + "-line");
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 32`);
  svg.setAttribute("preserveAspectRatio", "none");
  if (!svg.firstChild) svg.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  svg.firstChild.setAttribute("d", "M" + points.join("L"));
}

// --- the chunks of one conversation over time ---

export function forgetStrip() {
  rows = [];
  at("strip").hidden = true;
}

export function strip(found) {
  if (!found) {
    if (!at("strip").hidden) at("strip-text").textContent = "Not in memory";
    at("cells").replaceChildren();
    return;
  }
  rows.push(found);
  if (rows.length > HISTORY) rows.shift();
  const counts = {};
  for (const letter of found.chunks) counts[letter] = (counts[letter] || 0) + 1;
  const places = Object.entries(counts);
  at("strip").hidden = false;
  at("strip-text").textContent = `${found.chunks.length} chunks, ${places.map(([letter, n]) => `${n} ${WHERE[letter]}`).join(", ")}`;
  cells(found.chunks);
  fill("strip-table", places.map(([letter, n]) => [WHERE[letter], num(n)]));
  if (at("strip").open) draw();
}

// One cell a chunk, or for several where there are more than fit.
function cells(chunks) {
  const most = 96, each = Math.ceil(chunks.length / most), parent = at("cells");
  const letters = [];
  for (let i = 0; i < chunks.length; i += each) letters.push(chunks[i]);
  while (parent.childElementCount > letters.length) parent.lastElementChild.remove();
  letters.forEach((letter, i) => {
    const cell = parent.children[i] || parent.appendChild(document.createElement("i"));
    const name = letter === "-" ? "" : letter;
    if (cell.className !== name) cell.className = name;
  });
}

function draw() {
  const canvas = at("strip-canvas"), style = getComputedStyle(document.documentElement);
  const width = (canvas.width = Math.max(1, ...rows.map((row) => row.chunks.length)));
  canvas.height = HISTORY;
  const pen = canvas.getContext("2d");
  rows.forEach((row, y) => {
    const recalled = new Set(row.recalled), before = rows[y - 1];
    for (let x = 0; x < width && x < row.chunks.length; x++) {
      const moved = recalled.has(x) && before && before.chunks[x] !== "r" && row.chunks[x] === "r";
      const letter = moved ? "x" : row.chunks[x];
      if (letter === "-") continue;
      pen.fillStyle = style.getPropertyValue("--" + letter);
      pen.fillRect(x, y, 1, 1);
    }
  });
}

at("strip").addEventListener("toggle", () => at("strip").open && draw());

"use strict";
// The page of `kvpager serve`: a conversation, and the server's state as it comes.

const HISTORY = 120; // states that the drawings go back
const RETRY_MS = 2000;
const WHERE = { r: "in the pool", h: "host memory", d: "disk", s: "snapshot", "-": "released" };
const at = (id) => document.getElementById(id);
const history_ = { generated: [], prompt: [] };
let key = "", messages = [], session = newSession(), asking = null, looking = null, rows = [], watching = null;

function newSession() {
  return "page-" + Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}

function headers() {
  return key ? { authorization: "Bearer " + key } : {};
}

// Server-sent events of a fetch, so that a key can be sent with it.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value.replaceAll("\r\n", "\n");
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const data = held.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

// --- the server's state ---

async function watch() {
  if (watching) watching.abort();
  const mine = (watching = new AbortController());
  while (!mine.signal.aborted) {
    try {
      const query = looking ? "?session=" + encodeURIComponent(looking) : "";
      const response = await fetch("monitor/events" + query, { headers: headers(), signal: mine.signal });
      if (response.status === 401) {
        at("key-form").hidden = false;
        connection("needs a key", true);
        return;
      }
      if (!response.ok) throw new Error(response.status);
      connection("connected", false);
      for await (const data of eventsOf(response)) show(JSON.parse(data));
      throw new Error("the server ended the stream");
    } catch (error) {
      if (mine.signal.aborted) return;
      connection("disconnected, trying again", true);
      await new Promise((wake) => setTimeout(wake, RETRY_MS));
    }
  }
}

function connection(text, lost) {
  if (at("connection").textContent !== text) at("connection").textContent = text;
  at("connection").classList.toggle("lost", lost);
}

function show(state) {
  at("model").textContent = `${state.model}, kvpager ${state.version}, up ${seconds(state.uptime_s)}`;
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
  fill("requests", state.requests.map((one) => [one.id || "unnamed", one.state, num(one.prompt_tokens), num(one.generated), num(one.seconds.toFixed(1))]));
  at("sessions-count").textContent = state.sessions_in_all ? `(${state.sessions_in_all})` : "";
  fill("sessions", state.sessions.map((one) => [one.id, num(one.tokens), num(bytes(one.bytes)), one.tier, num(seconds(one.age_s)), one.tier === "disk" ? "" : look(one.id)]));
  if (looking) strip(state.strip);
}

const num = (text) => ({ number: String(text) });
const look = (id) => ({ button: "Show", label: `Show the chunks of ${id}`, press: () => lookAt(id) });

// Only cells that changed are touched: a button keeps the focus.
function fill(id, table) {
  const body = at(id);
  while (body.rows.length > table.length) body.deleteRow(-1);
  table.forEach((cells, r) => {
    const row = body.rows[r] || body.insertRow();
    cells.forEach((cell, c) => {
      const td = row.cells[c] || row.insertCell();
      td.colSpan = 1;
      if (cell && cell.button) {
        if (td.firstElementChild && td.firstElementChild.dataset.for === cell.label) return;
        const button = Object.assign(document.createElement("button"), { type: "button", textContent: cell.button, onclick: cell.press });
        button.setAttribute("aria-label", cell.label);
        button.dataset.for = cell.label;
        td.replaceChildren(button);
      } else {
        const text = cell && cell.number !== undefined ? cell.number : cell;
        td.className = cell && cell.number !== undefined ? "number" : "";
        if (td.textContent !== text || td.firstElementChild) td.textContent = text;
        if (c === 0) td.title = text;
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
  const values = history_[name];
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

// --- the chunks of one session over time ---

function lookAt(id) {
  looking = id;
  rows = [];
  at("strip").hidden = !id;
  at("strip-name").textContent = id || "";
  if (id) at("strip").scrollIntoView({ block: "nearest" });
  watch();
}

function strip(found) {
  if (!found) {
    at("strip-text").textContent = "It is not in memory.";
    return;
  }
  rows.push(found);
  if (rows.length > HISTORY) rows.shift();
  at("strip-text").textContent = `${found.tokens} tokens in ${found.chunks.length} chunks; the last ${rows.length} seconds from top to bottom`;
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
  const counts = {};
  for (const letter of found.chunks) counts[letter] = (counts[letter] || 0) + 1;
  fill("strip-table", Object.entries(counts).map(([letter, count]) => [WHERE[letter], num(count)]));
}

// --- the conversation ---

function said(role, text) {
  const item = document.createElement("li"), who = document.createElement("b"), pre = document.createElement("pre");
  who.textContent = role === "user" ? "You" : at("model").textContent.split(",")[0] || "Model";
  pre.textContent = text;
  item.append(who, pre);
  at("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return pre;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  said("user", text);
  const pre = said("assistant", "");
  asking = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  let answer = "", told = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: asking.signal,
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ messages, session_id: session, stream: true, stream_options: { include_usage: true } }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) {
        const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
        told = `${prompt_tokens} tokens of prompt, ${prompt_tokens_details.cached_tokens} of them cached; ${completion_tokens} generated`;
      }
      const delta = chunk.choices.length ? chunk.choices[0].delta.content : "";
      if (delta) pre.textContent = answer += delta;
      at("messages").scrollTop = at("messages").scrollHeight;
    }
    messages.push({ role: "assistant", content: answer });
  } catch (error) {
    messages.pop(); // the server has not kept this turn either
    told = asking.signal.aborted ? "stopped; this turn is not kept" : String(error.message || error);
  }
  at("usage").textContent = told;
  asking = null;
  at("send").disabled = false;
  at("stop").disabled = true;
}

// --- texts of numbers ---

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < 4; unit++) size /= 1024;
  return (unit ? size.toFixed(1) : size) + " " + units[unit];
}

function seconds(value) {
  if (value < 90) return Math.round(value) + " s";
  if (value < 5400) return Math.round(value / 60) + " min";
  return value < 172800 ? Math.round(value / 3600) + " h" : Math.round(value / 86400) + " d";
}

const ms = (value) => (value === null ? "–" : (1000 * value).toFixed(value < 0.1 ? 1 : 0));
const rate = (value) => value.toFixed(value < 10 ? 1 : 0);

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || asking) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => asking && asking.abort());
at("new").addEventListener("click", () => {
  if (asking) asking.abort();
  messages = [];
  session = newSession();
  at("messages").replaceChildren();
  at("usage").textContent = "";
  at("text").focus();
});
at("strip-close").addEventListener("click", () => lookAt(null));
at("key-form").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  at("key-form").hidden = true;
  watch();
});
watch();

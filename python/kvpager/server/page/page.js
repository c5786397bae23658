// The page of `kvpager serve`: a list of conversations, one of them open, and the server's state.

import { elementsOf } from "./markdown.js";
import { Refused, ago, at, count, eventsOf, json, request, session, wait } from "./common.js";
import { forgetStrip, show, strip } from "./server.js";

const PAGE = 40; // conversations that the list grows by
const SHOWN = 100; // messages that are drawn at first
const RETRY_MS = [500, 1000, 2000, 4000];
const SETTINGS = ["temperature", "maximum", "system"];

// --- what this browser remembers: settings, and the answers that were under way ---

const stored = (name) => JSON.parse(localStorage.getItem("kvpager." + name) || "{}");
const store = (name, value) => localStorage.setItem("kvpager." + name, JSON.stringify(value));

function remember(name, responseId) {
  const answers = stored("answers");
  if (responseId) answers[name] = responseId;
  else delete answers[name];
  store("answers", answers);
}

// --- the list ---

const list = { after: null, names: new Set(), running: new Set(), inAll: null, work: Promise.resolve() };

// Loads the list again as far as it is shown, or the next page of it; one call after another.
function fillList(options) {
  const done = list.work.then(() => loadList(options));
  list.work = done.catch(() => {});
  return done;
}

async function loadList({ more = false, anew = false } = {}) {
  const shown = more || anew ? PAGE : Math.min(1000, Math.max(PAGE, list.names.size));
  const query = new URLSearchParams({ limit: shown, chosen: true });
  const contains = at("search").value.trim();
  if (contains) query.set("contains", contains);
  if (more && list.after) query.set("after", list.after);
  const found = await json("v1/sessions?" + query);
  if (contains !== at("search").value.trim()) return; // another search has begun
  if (!more) {
    list.names.clear();
    at("list").replaceChildren();
  }
  for (const one of found.data) addToList(one.id, `${count(one.tokens, "token")}, ${ago(one.age_s)}`);
  list.after = found.data.length ? found.data[found.data.length - 1].id : list.after;
  at("more").hidden = !found.has_more;
  at("list-empty").hidden = list.names.size > 0;
  at("list-empty").textContent = contains ? "No name contains this." : "No conversation yet.";
  mark();
}

function addToList(name, about, first = false) {
  if (list.names.has(name)) return;
  list.names.add(name);
  at("list-empty").hidden = true;
  const item = document.createElement("li"), link = document.createElement("a");
  const title = document.createElement("span"), small = document.createElement("small");
  link.href = "#c/" + encodeURIComponent(name);
  link.dataset.name = link.title = title.textContent = name;
  small.textContent = about;
  link.append(title, small);
  item.append(link);
  if (first) at("list").prepend(item);
  else at("list").append(item);
}

function mark() {
  for (const link of at("list").querySelectorAll("a")) {
    const name = link.dataset.name;
    if (open && open.name === name && !at("talk").hidden) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    link.classList.toggle("running", list.running.has(name));
  }
}

// --- the open conversation ---

// name: null of a new one. total: of its messages. following: the id of the answer that is read.
// stop: ends the reading.
let open = null;
let modelName = "Model";

function draw(name, messages) {
  at("talk").hidden = false;
  at("server").hidden = true;
  at("name").textContent = name || "New conversation";
  document.title = name ? `${name} · kvpager` : "kvpager";
  at("menu-button").hidden = !name;
  at("welcome").hidden = Boolean(name);
  at("usage").textContent = "";
  at("usage").classList.remove("error");
  at("messages").replaceChildren();
  open.total = messages.length;
  at("earlier").hidden = messages.length <= SHOWN;
  const from = Math.max(0, messages.length - SHOWN);
  messages.slice(from).forEach((message, i) => at("messages").append(drawn(message, from + i + 1)));
  at("earlier").onclick = () => {
    const height = at("scroll").scrollHeight;
    at("messages").prepend(...messages.slice(0, from).map((message, i) => drawn(message, i + 1)));
    at("earlier").hidden = true;
    at("scroll").scrollTop += at("scroll").scrollHeight - height;
  };
  forgetStrip();
  answering(null);
  toEnd(true);
  mark();
}

function leave() {
  if (open?.stop) open.stop.abort(); // reading ends; the answer goes on
  open = { name: null, total: 0, stop: null, following: null };
  return open;
}

function showNew() {
  leave();
  draw(null, []);
  watch();
  at("text").focus();
}

async function showOne(name) {
  const mine = leave();
  mine.name = name;
  draw(name, []);
  at("scroll").setAttribute("aria-busy", "true");
  watch();
  let found = { data: [], response_id: null };
  const known = stored("answers")[name];
  try {
    found = await json(session(name, "/messages"));
  } catch (error) {
    if (mine !== open) return;
    if (!(error.status === 404 && known)) {
      at("scroll").removeAttribute("aria-busy");
      told(error.status === 404 ? "There is no such conversation." : error.message, true);
      return;
    }
  }
  if (mine !== open) return;
  at("scroll").removeAttribute("aria-busy");
  draw(name, found.data);
  const response = found.response_id || known;
  if (!response) return;
  // An answer is under way, or was when this browser last looked: after a restart of the server it
  // goes on because it is asked for.
  let asked;
  try {
    asked = await json(`v1/responses/${response}/input_items?limit=1`); // the last one
  } catch {
    if (mine !== open) return;
    remember(name, null); // it has ended meanwhile
    if (found.response_id) showOne(name);
    else if (!found.data.length) told("There is no such conversation.", true);
    return;
  }
  if (mine !== open) return;
  const text = asked.data.flatMap((item) => item.content ?? []).map((part) => part.text).join("");
  if (!found.response_id && found.data.at(-2)?.content === text) draw(name, found.data.slice(0, -2)); // saved unfinished
  add({ role: "user", content: text });
  await follow(mine, response, text, null);
}

// Draws one more message of the open conversation.
function add(message) {
  open.total += 1;
  const item = drawn(message);
  at("messages").append(item);
  return item;
}

function told(text, isError = false) {
  at("usage").textContent = text;
  at("usage").classList.toggle("error", isError);
}

const WHO = { user: "You", system: "System prompt", tool: "Tool" };

function drawn(message, number = null) {
  const item = document.createElement("li"), head = document.createElement("div"), body = document.createElement("div");
  const who = document.createElement("b");
  item.className = message.role;
  head.className = "head";
  body.className = "body";
  who.textContent = WHO[message.role] ?? modelName;
  head.append(who);
  item.append(head, body);
  const text = (message.content ?? "") + (message.tool_calls ? "\n```json\n" + JSON.stringify(message.tool_calls, null, 2) + "\n```" : "");
  write(body, text, message.role === "assistant");
  head.append(button("Copy", "Copy this message", (event) => copy(event.currentTarget, body.dataset.text)));
  if (message.role === "assistant" && number) head.append(forkButton(number));
  return item;
}

const forkButton = (number) => button("Fork", "Go on from here in a new conversation", () => fork(number));

function button(text, label, press) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title: label, onclick: press });
  made.className = "plain small";
  return made;
}

function write(body, text, isAnswer) {
  body.dataset.text = text;
  if (!isAnswer || !at("markdown").checked) {
    body.textContent = text;
    body.classList.add("plain-text");
    return;
  }
  body.classList.remove("plain-text");
  const open_ = body.querySelector(":scope > details")?.open;
  body.replaceChildren(elementsOf(text));
  const reasoning = body.querySelector(":scope > details");
  if (reasoning && open_) reasoning.open = true;
  for (const pre of body.querySelectorAll("pre")) {
    const frame = document.createElement("div");
    frame.className = "code";
    pre.replaceWith(frame);
    frame.append(pre, button("Copy", "Copy this code", (event) => copy(event.currentTarget, pre.textContent)));
    pre.tabIndex = 0;
  }
}

async function copy(pressed, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that did not come over TLS from another machine
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  pressed.textContent = "Copied";
  await wait(1200);
  pressed.textContent = "Copy";
}

function toEnd(always = false) {
  const area = at("scroll");
  if (always || area.scrollHeight - area.scrollTop - area.clientHeight < 120) area.scrollTop = area.scrollHeight;
}

// --- an answer ---

function answering(responseId) {
  at("stop").hidden = !responseId;
  at("send").hidden = Boolean(responseId);
  at("stop").disabled = false;
}

// A name of the first words; other letters than a name can have are left out.
async function newName(text) {
  const plain = text.normalize("NFKD").replace(/[\u0300-\u036f]/g, "").toLowerCase();
  let name = plain.replace(/[^a-z0-9]+/g, "-").replace(/^-+/, "").slice(0, 48);
  if (name.length === 48) name = name.replace(/-[^-]*$/, "");
  name = name.replace(/-+$/, "") || "conversation";
  const found = await json("v1/sessions?" + new URLSearchParams({ contains: name, limit: 1000 }));
  const taken = new Set([...found.data.map((one) => one.id), ...list.running]);
  for (let number = 1; number < 1000; number++) {
    const free = number === 1 ? name : `${name}-${number}`;
    if (!taken.has(free)) return free;
  }
  return `${name}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`;
}

async function ask(text) {
  const mine = open, isNew = !mine.name;
  at("send").disabled = true;
  told("");
  let response;
  const body = { input: text, stream: true, background: true, store: false };
  if (at("temperature").value) body.temperature = Number(at("temperature").value);
  if (at("maximum").value) body.max_output_tokens = Number(at("maximum").value);
  if (isNew && at("system").value.trim()) body.instructions = at("system").value.trim();
  mine.stop = new AbortController();
  try {
    while (!response) {
      if (isNew) mine.name = await newName(text);
      body.session_id = mine.name;
      const [first, answer] = at("messages").querySelectorAll(":scope > .user > .body, :scope > .assistant > .body");
      if (mine.total === 2 && first?.dataset.text === text) {
        // Alone it would ask for the first answer again.
        body.input = [["user", text], ["assistant", answer.dataset.text], ["user", text]].map(([role, content]) => ({ role, content }));
      }
      try {
        response = await request("v1/responses", { method: "POST", body, signal: mine.stop.signal });
      } catch (error) {
        if (!isNew || error.status !== 409) throw error;
        list.running.add(mine.name); // another tab has just begun one of this name
      }
    }
  } catch (error) {
    if (isNew) mine.name = null;
    if (mine === open) {
      giveBack(text);
      told(error.message, true);
    }
    return;
  } finally {
    at("send").disabled = false;
  }
  if (mine !== open) return;
  at("welcome").hidden = true;
  if (isNew && body.instructions) add({ role: "system", content: body.instructions });
  add({ role: "user", content: text });
  if (isNew) {
    history.replaceState(null, "", "#c/" + encodeURIComponent(mine.name));
    at("name").textContent = mine.name;
    document.title = `${mine.name} · kvpager`;
    at("menu-button").hidden = false;
    addToList(mine.name, "just now", true);
    watch();
  }
  list.running.add(mine.name);
  mark();
  await follow(mine, null, text, response);
}

function giveBack(text) {
  if (!at("text").value) at("text").value = text;
  grow();
}

// Reads an answer to its end, over broken connections and restarts of the server.
//   responseId: of one that runs; null: its events come with `response`.
async function follow(mine, responseId, question, response) {
  mine.stop ??= new AbortController();
  const item = add({ role: "assistant", content: "" }), body = item.lastElementChild;
  item.classList.add("growing");
  at("messages").setAttribute("aria-busy", "true");
  toEnd(true);
  let text = "", seen = -1, last = null, failures = 0, begun = performance.now(), painting = false;
  const paint = () => {
    painting = false;
    if (last || mine !== open) return;
    write(body, text, true);
    toEnd();
  };
  while (!last) {
    try {
      if (!response) {
        const path = `v1/responses/${responseId}?stream=true&starting_after=${seen}`;
        response = await request(path, { signal: mine.stop.signal });
      }
      for await (const one of eventsOf(response)) {
        failures = 0;
        seen = one.sequence_number;
        if (one.type === "response.created") {
          responseId = one.response.id;
          mine.following = responseId;
          remember(mine.name, responseId);
          if (mine === open) answering(responseId);
        } else if (one.type === "response.output_text.delta") {
          text += one.delta;
          if (!painting) {
            painting = true;
            setTimeout(paint, 60);
          }
        } else if (["response.completed", "response.incomplete", "response.failed"].includes(one.type)) {
          last = one.response;
        }
      }
      if (!last && !responseId) throw new Refused(500, "the server ended the answer before it began");
    } catch (error) {
      if (mine.stop.signal.aborted) return; // another conversation is shown
      if (error instanceof Refused && error.status !== 503) {
        if (responseId && error.status === 404) break; // it ended while nobody listened
        last = { status: "failed", error };
      }
    }
    response = null;
    if (!last && mine === open) {
      if (failures) told("The connection is lost; the answer goes on when it is back.", true);
      await wait(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
    }
    if (mine !== open) return;
  }
  mine.following = null;
  mine.stop = null;
  remember(mine.name, null);
  list.running.delete(mine.name);
  if (mine !== open) return;
  at("messages").removeAttribute("aria-busy");
  item.classList.remove("growing");
  answering(null);
  fillList().catch(() => {});
  if (!last) {
    await showOne(mine.name);
    return;
  }
  if (last.status === "failed" || last.status === "cancelled") {
    item.previousElementSibling.remove();
    item.remove();
    open.total -= 2;
    giveBack(question);
    told(last.status === "cancelled" ? "Stopped before the answer began; the message was not kept." : last.error.message, true);
    return;
  }
  write(body, text, true);
  item.querySelector(".head").append(forkButton(open.total));
  told(summary(last, (performance.now() - begun) / 1000));
  toEnd();
}

function summary(response, duration) {
  const { input_tokens, input_tokens_details, output_tokens } = response.usage;
  const parts = [`${input_tokens} tokens of prompt, ${input_tokens_details.cached_tokens} of them cached; ${output_tokens} generated in ${duration.toFixed(1)} s`];
  const reason = response.incomplete_details?.reason;
  if (reason === "max_output_tokens") parts.push("the maximum was reached");
  if (reason === "stopped") parts.push("stopped");
  return parts.join("; ");
}

async function stopAnswer({ keep = true } = {}) {
  if (!open?.following) return;
  at("stop").disabled = true;
  try {
    await request(`v1/responses/${open.following}/cancel?keep=${keep}`, { method: "POST" });
  } catch (error) {
    if (error.status !== 404 && error.status !== 400) told(error.message, true); // else it has ended
  }
}

// --- actions of a conversation ---

async function fork(messages) {
  const from = open.name, base = from.replace(/-fork(-\d+)?$/, "");
  for (let number = 1; ; number++) {
    const id = `${base.slice(0, 180)}-fork${number === 1 ? "" : "-" + number}`;
    try {
      await request(session(from, "/fork"), { method: "POST", body: { id, messages } });
    } catch (error) {
      if (error.status === 409) continue;
      told(error.message, true);
      return;
    }
    addToList(id, "just now", true);
    location.hash = "#c/" + encodeURIComponent(id);
    at("text").focus();
    return;
  }
}

async function exported(format, suffix) {
  at("menu").hidePopover();
  const name = open.name;
  try {
    const response = await request(session(name, "/export?format=" + format));
    const url = URL.createObjectURL(await response.blob());
    Object.assign(document.createElement("a"), { href: url, download: `${name}.${suffix}` }).click();
    URL.revokeObjectURL(url);
  } catch (error) {
    told(error.message, true);
  }
}

// Opens a dialog whose form does something; it stays open with the error if that fails.
function dialog(kind, act) {
  const box = at(kind + "-dialog"), error = at(kind + "-error");
  box.querySelector(".cancel").onclick = () => box.close();
  box.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    try {
      await act();
      box.close();
    } catch (refused) {
      error.textContent = refused.message;
    }
  };
  return () => {
    at("menu").hidePopover();
    error.textContent = "";
    at("new-name").value = at("delete-name").textContent = open.name;
    box.showModal();
    if (kind === "rename") at("new-name").select();
  };
}

at("rename").onclick = dialog("rename", async () => {
  const from = open.name, to = at("new-name").value;
  if (from === to) return;
  await request(session(from, "/rename"), { method: "POST", body: { id: to } });
  open.name = to;
  history.replaceState(null, "", "#c/" + encodeURIComponent(to));
  at("name").textContent = to;
  document.title = `${to} · kvpager`;
  watch();
  await fillList();
});

at("delete").onclick = dialog("delete", async () => {
  await stopAnswer({ keep: false });
  await request(session(open.name), { method: "DELETE" });
  remember(open.name, null);
  location.hash = "";
  await fillList();
});

// --- the server's state, as it comes ---

let watching = null;

async function watch() {
  if (watching) watching.abort();
  const mine = (watching = new AbortController());
  const query = open?.name ? "?session=" + encodeURIComponent(open.name) : "";
  while (!mine.signal.aborted) {
    try {
      const response = await request("monitor/events" + query, { signal: mine.signal });
      connected("connected", false);
      for await (const state of eventsOf(response)) {
        if (mine.signal.aborted) return;
        tick(state);
      }
      throw new Error("the server ended the stream");
    } catch {
      if (mine.signal.aborted) return;
      connected("disconnected, trying again", true);
      await wait(2000);
    }
  }
}

function connected(text, lost) {
  if (at("connection").textContent !== text) at("connection").textContent = text;
  at("connection").classList.toggle("lost", lost);
}

function tick(state) {
  modelName = state.model;
  at("model").textContent = state.model;
  show(state);
  if (open?.name) strip(state.strip);
  list.running = new Set(state.requests.map((one) => one.id).filter(Boolean));
  if (open?.following) list.running.add(open.name);
  if (!at("search").value) {
    for (const one of state.requests) if (one.response_id && one.id !== one.response_id) addToList(one.id, "just now", true);
  }
  mark();
  if (list.inAll !== null && list.inAll !== state.sessions_in_all && at("side").scrollTop < 40) fillList().catch(() => {});
  list.inAll = state.sessions_in_all;
}

// --- the page ---

function route() {
  const hash = location.hash;
  side(false);
  if (hash === "#server") {
    at("talk").hidden = true;
    at("server").hidden = false;
    document.title = "Server · kvpager";
    mark();
  } else if (hash.startsWith("#c/")) {
    const name = decodeURIComponent(hash.slice(3));
    if (open?.name === name) reveal();
    else showOne(name);
  } else showNew();
  if (hash === "#server") at("to-server").setAttribute("aria-current", "page");
  else at("to-server").removeAttribute("aria-current");
}

// Shows the open conversation again.
function reveal() {
  at("talk").hidden = false;
  at("server").hidden = true;
  document.title = `${open.name} · kvpager`;
  mark();
}

function side(isOpen) {
  document.body.classList.toggle("side-open", isOpen);
  at("veil").hidden = !isOpen;
  for (const one of document.querySelectorAll(".open-side")) one.setAttribute("aria-expanded", String(isOpen));
  if (isOpen) at("new").focus();
}

function grow() {
  const area = at("text");
  area.style.height = "auto";
  area.style.height = Math.min(area.scrollHeight + 2, 220) + "px";
}

const start = () => (location.hash ? (location.hash = "") : showNew());

at("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || at("send").hidden || at("send").disabled) return;
  for (const name of ["temperature", "maximum"]) {
    if (!at(name).checkValidity()) {
      at("settings").open = true;
      at(name).reportValidity();
      return;
    }
  }
  at("text").value = "";
  grow();
  ask(text);
};
at("text").oninput = grow;
at("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
};
at("stop").onclick = () => stopAnswer();
at("new").onclick = () => {
  side(false);
  start();
};
at("as-markdown").onclick = () => exported("markdown", "md");
at("as-json").onclick = () => exported("json", "json");
at("as-snapshot").onclick = () => exported("snapshot", "kvsnap");
at("more").onclick = () => fillList({ more: true }).catch((error) => told(error.message, true));
at("veil").onclick = () => side(false);
at("side").onclick = (event) => event.target.closest("a") && side(false);
for (const one of document.querySelectorAll(".open-side")) one.onclick = () => side(!document.body.classList.contains("side-open"));
for (const one of at("ideas").children) one.onclick = () => ask(one.textContent);
let typing = 0;
at("search").oninput = () => {
  clearTimeout(typing);
  typing = setTimeout(() => fillList({ anew: true }).catch((error) => told(error.message, true)), 200);
};
for (const name of SETTINGS) {
  at(name).value = stored("settings")[name] ?? "";
  at(name).onchange = () => store("settings", { ...stored("settings"), [name]: at(name).value });
}
at("markdown").checked = stored("settings").markdown ?? true;
at("markdown").onchange = () => {
  store("settings", { ...stored("settings"), markdown: at("markdown").checked });
  for (const body of at("messages").querySelectorAll(".assistant .body")) write(body, body.dataset.text, true);
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) {
    if (document.body.classList.contains("side-open")) side(false);
    else stopAnswer();
  } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    side(true);
    at("search").select();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    start();
  }
};
window.onhashchange = route;
route();
fillList().catch((error) => told(error.message, true));

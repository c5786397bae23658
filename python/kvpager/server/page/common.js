// Requests to the server, and texts of numbers.

const KEY = "kvpager.key";
export const at = (id) => document.getElementById(id);
export const wait = (ms) => new Promise((wake) => setTimeout(wake, ms));

// An answer that is no success.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
let asked = null; // while a key is asked for, what its dialog resolves

export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { "x-kvpager": "1" };
    if (key) headers.authorization = "Bearer " + key;
    if (body !== undefined) headers["content-type"] = "application/json";
    const text = body === undefined ? undefined : JSON.stringify(body);
    const response = await fetch(path, { method, headers, body: text, signal });
    if (response.ok) return response;
    let message = response.statusText;
    try {
      message = (await response.json()).error.message;
    } catch {} // it is no error of this server
    if (response.status !== 401) throw new Refused(response.status, message);
    await keyOtherThan(key, message);
  }
}

export const json = async (path, options) => (await request(path, options)).json();
export const session = (name, part = "") => `v1/sessions/${encodeURIComponent(name)}${part}`;

// Asks for a key once, whoever needs it; the user can only give one.
function keyOtherThan(refused, message) {
  if (sessionStorage.getItem(KEY) !== refused) return undefined; // given meanwhile
  at("key-error").textContent = refused ? message : "";
  asked ??= new Promise((resolve) => {
    const dialog = at("key-dialog");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, at("key").value.trim());
      at("key").value = "";
      asked = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asked;
}

// Server-sent events of a response of `fetch`, with which a key can be sent.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value.replaceAll("\r\n", "\n");
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const data = held.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < 4; unit++) size /= 1024;
  return (unit ? size.toFixed(1) : size) + " " + units[unit];
}

export function seconds(value) {
  if (value < 90) return Math.round(value) + " s";
  if (value < 5400) return Math.round(value / 60) + " min";
  return value < 172800 ? Math.round(value / 3600) + " h" : Math.round(value / 86400) + " d";
}

export const ago = (value) => (value < 60 ? "just now" : seconds(value) + " ago");
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// Markdown as elements. The text is a model's, so nothing in it is trusted: HTML in it is shown as
// text, and of what Markdown makes of it only these elements and attributes are left.

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["href", "title", "start", "align", "rel", "target"];
const LINKS = /^(?:https?|mailto):/i;
const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

const parser = new marked.Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Nothing is loaded from elsewhere: a picture is a link to it.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

function sanitized(html) {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_ARIA_ATTR: false,
    ALLOW_DATA_ATTR: false,
    ALLOWED_URI_REGEXP: LINKS,
    RETURN_DOM_FRAGMENT: true,
  });
}

// The elements of a text; its reasoning, where the model marked any, folds away.
export function elementsOf(text) {
  const whole = document.createDocumentFragment();
  const thought = /^\s*<think>([^]*?)(<\/think>|$)/.exec(text);
  if (thought) {
    const folded = document.createElement("details"), summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    folded.append(summary, sanitized(parser.parse(thought[1].trim())));
    whole.append(folded);
    text = text.slice(thought[0].length);
  }
  whole.append(sanitized(parser.parse(text)));
  for (const table of whole.querySelectorAll("table")) {
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return whole;
}

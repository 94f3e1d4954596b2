"use strict";
// What both pages share. All text from outside is set as text, never as HTML.

/** An element: el("div.card#x", {title: "…"}, "text", child, …). */
function el(what, attributes, ...children) {
  const [, tag, rest] = /^([a-z0-9]*)(.*)$/.exec(what);
  const node = document.createElement(tag || "div");
  for (const part of rest.match(/[.#][^.#]+/g) || []) {
    if (part[0] === ".") node.classList.add(part.slice(1));
    else node.id = part.slice(1);
  }
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

const unpacked = new Map();

/** The value of a packed block. */
function block(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack(document.getElementById(name).textContent));
  return unpacked.get(name);
}

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** A button that goes from light to dark and back; without it the page follows the system. */
function themeButton() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const turn = () => { root.dataset.theme = dark() ? "light" : "dark"; };
  return el("button.theme", { onclick: turn, title: "light or dark", "aria-label": "light or dark" }, "◐");
}

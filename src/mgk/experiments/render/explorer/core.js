"use strict";

// One page, one or two models, one example. The data are in the page: see explorer_page.py for their form.
// The files are joined in the order core, heads, map, panel, app.

const explorer = document.getElementById("explorer");
const given = JSON.parse(document.getElementById("explorer-data").textContent);
const panels = [];
// What all models share: the direction, the scale of the colours, and the component that is shown (-1: all).
const shared = { incoming: false, byMap: false, component: -1 };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const percent = (value) =>
  value > 0 && value < 0.0005 ? "<0.1%" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`;
const hexadecimal = (letter) => `\\x${letter.charCodeAt(0).toString(16).padStart(2, "0")}`;
const visible = (token) =>
  token
    .replace(/^ (?=.)/, "")
    .replace(/ /g, "␣")
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\0-\x1f\x7f-\x9f]/g, hexadecimal) || "∅";
const startsWord = (token) => /^\s+\S/.test(token);
// In running text a space is a dot, which is less to read.
const letter = (token) => (token === " " ? "·" : visible(token));
const quoted = (token) => `“${visible(token)}”`;

// Colours of the style sheet, as numbers, for the canvas.

let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map((start) => parseInt(hex.slice(start, start + 2), 16));
  };
  const text = (name) => style.getPropertyValue(name).trim();
  colours = {
    paper: rgb("--paper"),
    ink: text("--ink"),
    faint: text("--faint"),
    components: [2, 3, 4, 5, 6].map((number) => rgb(`--series-${number}`)),
  };
}

const component = (r) => colours.components[r % colours.components.length];
const css = (rgb, alpha = 1) => `rgb(${rgb.join(" ")} / ${alpha.toFixed(3)})`;

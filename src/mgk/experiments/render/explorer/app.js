// What concerns all models

function showAll() {
  for (const panel of panels) {
    panel.showGrid();
    panel.show();
  }
}

function showComponent(r) {
  shared.component = r;
  showAll();
}

function toggle(name, texts, title) {
  const button = (value) =>
    element(
      "button",
      {
        type: "button",
        "aria-pressed": shared[name] === value,
        onclick: () => {
          shared[name] = value;
          group
            .querySelectorAll("button")
            .forEach((other, n) => other.setAttribute("aria-pressed", Boolean(n) === value));
          showAll();
        },
      },
      texts[Number(value)],
    );
  const group = element(
    "div",
    { class: "toggle", role: "group", "aria-label": title },
    button(false),
    button(true),
  );
  return group;
}

// Layer, head and token are kept in the address, so that a view can be passed on.
function remember() {
  const places = panels.map((panel) => `${panel.layer + 1}.${panel.index + 1}.${panel.token + 1}`);
  try {
    history.replaceState(null, "", `#${places.join(",")}`);
  } catch {
    /* some readers forbid it for files */
  }
}

function recall() {
  location.hash
    .slice(1)
    .split(",")
    .forEach((text, number) => {
      const [layer, index, token] = text.split(".").map((part) => parseInt(part, 10) - 1);
      const panel = panels[number];
      if (!panel || !panel.heads[layer]?.[index]) return;
      Object.assign(panel, { layer, index });
      panel.headChoice.fill(panel.heads[layer].length);
      if (panel.tokens[token] !== undefined) panel.token = token;
    });
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input")) return;
  const panel = panels[Number(explorer.dataset.shown ?? 0)] ?? panels[0];
  const actions = {
    h: () => panel.choose(panel.layer, panel.index + 1),
    H: () => panel.choose(panel.layer, panel.index - 1),
    l: () => panel.choose(panel.layer + 1, panel.index),
    L: () => panel.choose(panel.layer - 1, panel.index),
    c: () =>
      showComponent(
        shared.component + 1 < Math.max(...panels.map((p) => p.head.components)) ? shared.component + 1 : -1,
      ),
    ArrowLeft: () => panel.select(panel.token - 1),
    ArrowRight: () => panel.select(panel.token + 1),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

function tabs() {
  if (panels.length === 1) return null;
  const made = panels.map((panel, number) =>
    element(
      "button",
      {
        type: "button",
        "aria-pressed": number === 0,
        onclick: () => {
          explorer.dataset.shown = number;
          made.forEach((button, n) => button.setAttribute("aria-pressed", n === number));
          panel.map.draw();
        },
      },
      panel.model.name,
    ),
  );
  return element("div", { class: "toggle tabs", role: "group", "aria-label": "Model" }, ...made);
}

async function start() {
  readColours();
  for (const [number, model] of given.models.entries())
    panels.push(new Panel(model, await unpack(model), number));
  recall();
  explorer.dataset.models = panels.length;
  explorer.dataset.shown = 0;
  explorer.replaceChildren(
    element(
      "div",
      { class: "bar-of-controls" },
      tabs(),
      toggle("incoming", ["Attends to", "Attended by"], "Direction"),
      toggle("byMap", ["Scaled by row", "Scaled by map"], "Scale of the colours"),
    ),
    element("div", { class: "panels" }, ...panels.map((panel) => panel.place)),
  );
  showAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    showAll();
  });
  addEventListener("keydown", shortcut);
  explorer.dataset.ready = true;
}

start().catch((error) => {
  explorer.textContent = `This page needs a browser of 2023 or later (${error}).`;
  throw error;
});

// A model: its tokens, what the chosen one attends to, the prediction, and all its heads.

const THUMBNAIL = 48; // pixels of a small map
const MOST_KEYS = 8; // rows of the table of keys
const CONTEXT = 4; // letters shown on either side of a letter in that table

class Panel {
  constructor(model, heads, number) {
    Object.assign(this, { model, heads, number });
    this.tokens = model.tokens;
    this.layer = heads.length - 1;
    this.index = 0;
    this.token = this.tokens.length - 1;
    this.hovered = null; // a token under the pointer
    this.map = new AttentionMap(this);
    this.build();
  }

  get head() {
    return this.heads[this.layer][this.index];
  }

  get query() {
    return this.hovered ?? this.token;
  }

  // The panels whose tokens are the same move together.
  get linked() {
    return panels.filter(
      (other) =>
        other.tokens.length === this.tokens.length && other.tokens.every((t, i) => t === this.tokens[i]),
    );
  }

  build() {
    const { model } = this;
    this.layerChoice = this.choice("Layer", this.heads.length, (value) => this.choose(value, this.index));
    this.headChoice = this.choice("Head", this.heads[0].length, (value) => this.choose(this.layer, value));
    this.title = element("h2", {}, model.name);
    this.list = element("ol", {
      class: model.image ? "tokens image" : "tokens",
      role: "listbox",
      tabindex: 0,
      "aria-label": `Tokens read by ${model.name}`,
      onkeydown: (event) => this.tokenKey(event),
      onpointerleave: () => this.hover(null),
    });
    if (model.image) this.list.style.setProperty("--columns", model.image.width);
    this.chips = this.tokens.map((token, i) => this.chip(token, i));
    for (const [i, chip] of this.chips.entries()) {
      this.list.append(chip);
      if (this.tokens[i].includes("\n")) this.list.append(element("li", { class: "break", role: "presentation" }));
    }
    this.details = element("div", { class: "details", "aria-live": "polite" });
    this.grid = element("div", {
      class: "heads",
      role: "group",
      "aria-label": "All layers and heads",
      onkeydown: (event) => this.gridKey(event),
    });
    this.place = element(
      "section",
      {
        class: `panel ${model.letters ? "letters" : this.tokens.some(startsWord) ? "pieces" : ""}`,
        id: `model-${this.number + 1}`,
        "aria-label": model.name,
      },
      element("header", {}, this.title, element("p", { class: "about" }, model.about)),
      element("div", { class: "chooser" }, this.layerChoice.label, this.headChoice.label),
      element("div", { class: "reading" }, this.list, this.details),
      element(
        "div",
        { class: "looking" },
        this.map.canvas,
        this.map.under,
        element("h3", {}, "Layers (rows) and heads (columns)"),
        element("div", { class: "scroll" }, this.grid),
      ),
    );
  }

  choice(name, count, onchange) {
    const select = element("select", { onchange: () => onchange(select.selectedIndex) });
    const label = element("label", {}, `${name} `, select);
    const fill = (count) =>
      select.replaceChildren(
        ...Array.from({ length: count }, (_, n) => element("option", {}, `${n + 1} of ${count}`)),
      );
    fill(count);
    return { select, label, fill };
  }

  chip(token, i) {
    const image = this.model.image;
    const offset = image ? this.tokens.length - image.colours.length : 0;
    const chip = element(
      "li",
      {
        role: "option",
        id: `token-${this.number}-${i}`,
        "data-token": i,
        title: image ? `${i + 1}: ${token}` : undefined,
        onpointerenter: (event) => event.pointerType === "mouse" && this.hover(i),
        onclick: () => this.select(i),
      },
      element("span", {}, image && i >= offset ? "" : letter(token)),
      this.model.letters && !token.trim() ? element("wbr") : null,
    );
    if (image && i >= offset) chip.style.setProperty("--pixel", image.colours[i - offset]);
    if (startsWord(token)) chip.classList.add("spaced");
    if (!token.trim()) chip.classList.add("blank");
    return chip;
  }

  // Choices

  choose(layer, index) {
    this.layer = Math.max(0, Math.min(this.heads.length - 1, layer));
    this.index = Math.max(0, Math.min(this.heads[this.layer].length - 1, index));
    this.headChoice.fill(this.heads[this.layer].length);
    this.show();
    remember();
  }

  select(i) {
    for (const panel of this.linked) {
      panel.token = Math.max(0, Math.min(this.tokens.length - 1, i));
      panel.hovered = null;
      panel.showToken();
    }
    remember();
  }

  hover(i) {
    for (const panel of this.linked) {
      if (panel.hovered === i) continue;
      panel.hovered = i;
      panel.showToken();
    }
  }

  // What is shown

  show() {
    this.layerChoice.select.selectedIndex = this.layer;
    this.headChoice.select.selectedIndex = this.index;
    this.map.show(`layer ${this.layer + 1}, head ${this.index + 1}`);
    for (const button of this.grid.querySelectorAll("button")) {
      const isChosen =
        button.dataset.layer === String(this.layer) && button.dataset.head === String(this.index);
      button.setAttribute("aria-pressed", isChosen);
      button.tabIndex = isChosen ? 0 : -1;
    }
    this.showToken();
  }

  showGrid() {
    const widest = Math.max(...this.heads.map((layer) => layer.length));
    this.grid.style.setProperty("--columns", widest);
    const numbers = Array.from({ length: widest }, (_, h) =>
      element("span", { class: "head" }, String(h + 1)),
    );
    this.grid.replaceChildren(
      element("span"),
      ...numbers,
      ...this.heads.flatMap((layer, l) => [
        element("span", { class: "layer" }, String(l + 1)),
        ...layer.map((head, h) =>
          element(
            "button",
            {
              type: "button",
              "data-layer": l,
              "data-head": h,
              title: `Layer ${l + 1}, head ${h + 1}`,
              "aria-label": `Layer ${l + 1}, head ${h + 1}`,
              onclick: () => this.choose(l, h),
            },
            head.picture(Math.min(THUMBNAIL, this.tokens.length)),
          ),
        ),
        ...Array.from({ length: widest - layer.length }, () => element("span")),
      ]),
    );
  }

  // The weight between the chosen token and token k, and the pair it belongs to.
  pair(k) {
    return shared.incoming ? [k, this.query] : [this.query, k];
  }

  showToken() {
    const { head, query } = this;
    const r = head.components > 1 ? shared.component : -1;
    const weights = this.tokens.map((_, k) => head.through(...this.pair(k), r));
    const most = shared.byMap ? head.largest : Math.max(...weights) || 1;
    this.chips.forEach((chip, k) => {
      const alpha = Math.sqrt(Math.min(1, weights[k] / most)) * 0.65; // so that the letters stay readable
      chip.style.setProperty("--fill", this.fill(...this.pair(k), r, alpha));
      chip.setAttribute("aria-selected", k === this.token);
      chip.classList.toggle("query", k === query);
    });
    this.list.setAttribute("aria-activedescendant", this.chips[this.token].id);
    this.showDetails(weights);
    this.map.draw();
  }

  // A token's background: as wide a part in each component's colour as the component has of the weight.
  fill(i, j, r, alpha) {
    const { head } = this;
    if (alpha < 0.02) return "none";
    if (head.components === 1 || r >= 0) {
      const colour = css(component(Math.max(0, r)), alpha);
      return `linear-gradient(${colour}, ${colour})`;
    }
    let end = 0;
    const stops = Array.from({ length: head.components }, (_, s) => {
      const start = end;
      end += 100 * head.share(i, j, s);
      return `${css(component(s), alpha)} ${start.toFixed(1)}% ${end.toFixed(1)}%`;
    });
    return `linear-gradient(90deg, ${stops.join(", ")})`;
  }

  showDetails(weights) {
    const { query, tokens } = this;
    const order = weights
      .map((weight, k) => [weight, k])
      .sort((a, b) => b[0] - a[0])
      .slice(0, MOST_KEYS);
    const verb = shared.incoming ? "is attended to by" : "attends to";
    const parts = [
      element("h3", {}, `${quoted(tokens[query])}, token ${query + 1} of ${tokens.length}, ${verb}`),
      this.keyTable(order.filter(([weight]) => weight > 0)),
      this.prediction(),
      this.componentTable(),
    ];
    this.details.replaceChildren(...parts.filter((part) => part !== null));
  }

  // A token in the table of keys; a letter with those around it.
  label(k) {
    const text = (start, end) => this.tokens.slice(Math.max(0, start), end).map(letter).join("");
    const parts = this.model.letters
      ? [text(k - CONTEXT, k), element("b", {}, text(k, k + 1)), text(k + 1, k + 1 + CONTEXT)]
      : [text(k, k + 1)];
    return element("span", { class: "label" }, ...parts);
  }

  keyTable(rows) {
    const { head } = this;
    const several = head.components > 1;
    const most = rows.length ? rows[0][0] : 1;
    const body = rows.map(([weight, k]) => {
      const [i, j] = this.pair(k);
      const parts = Array.from({ length: head.components }, (_, r) => head.share(i, j, r));
      const shown = several && shared.component >= 0 ? [shared.component] : parts.map((_, r) => r);
      const bar = element(
        "span",
        { class: "bar" },
        ...shown.map((r) => {
          const part = element("i");
          const length = (weight * (shown.length > 1 ? parts[r] : 1)) / most;
          part.style.width = `${(100 * length).toFixed(1)}%`;
          part.style.background = css(component(r));
          return part;
        }),
      );
      const gamma = several
        ? element("td", { class: "number" }, parts.map((part) => part.toFixed(2)).join(" · "))
        : null;
      return element(
        "tr",
        { "data-key": k },
        element("th", { scope: "row" }, this.label(k), element("small", {}, ` ${k + 1}`)),
        element("td", { class: "number" }, percent(weight)),
        element("td", { class: "bars" }, bar),
        gamma,
      );
    });
    if (!body.length) return element("p", { class: "about" }, "Nothing: no weight here.");
    const columns = [
      shared.incoming ? "query" : "key",
      "weight",
      "",
      ...(several ? ["responsibilities"] : []),
    ];
    return element(
      "table",
      { class: "keys" },
      element(
        "thead",
        {},
        element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))),
      ),
      element("tbody", {}, ...body),
    );
  }

  componentTable() {
    const { head, query } = this;
    if (head.components === 1) return null;
    const rows = Array.from({ length: head.components }, (_, r) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.background = css(component(r));
      const isOnly = shared.component === r;
      const button = element(
        "button",
        {
          type: "button",
          "aria-pressed": isOnly,
          title: isOnly ? "Show all components" : "Show this component only",
          onclick: () => showComponent(isOnly ? -1 : r),
        },
        swatch,
        ` ${r + 1}`,
      );
      const numbers = [head.prior[r].toFixed(3), percent(head.use(query, r)), percent(head.meanUse(r))];
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, button),
        ...numbers.map((text) => element("td", { class: "number" }, text)),
      );
    });
    const columns = ["component", "prior", "of this query", "of all queries"];
    return element(
      "table",
      { class: "components" },
      element(
        "thead",
        {},
        element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))),
      ),
      element("tbody", {}, ...rows),
    );
  }

  prediction() {
    const { prediction } = this.model;
    if (!prediction) return null;
    const at = prediction.kind === "label" ? 0 : this.query;
    const token = quoted(this.tokens[this.query]);
    const titles = {
      label: "Prediction",
      next: `Next token after ${token}`,
      token: `Token at ${token}`,
      tag: `Label of ${token}`,
    };
    const rows = prediction.candidates[at].map(([name, value]) => {
      const bar = element("i");
      bar.style.width = `${(100 * value).toFixed(1)}%`;
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, visible(name)),
        element("td", { class: "number" }, percent(value)),
        element("td", { class: "bars" }, element("span", { class: "bar plain" }, bar)),
      );
    });
    const actual =
      prediction.kind === "next" && at < prediction.actual.length
        ? element(
            "p",
            { class: "about" },
            `The text goes on with ${quoted(this.tokens[at + 1])}: ${percent(prediction.actual[at])}.`,
          )
        : null;
    return element(
      "div",
      { class: "prediction" },
      element("h3", {}, titles[prediction.kind]),
      element("table", {}, element("tbody", {}, ...rows)),
      actual,
    );
  }

  // The keyboard

  tokenKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    let to = null;
    if (event.key in moves) to = this.token + moves[event.key];
    else if (event.key === "ArrowUp" || event.key === "ArrowDown")
      to = this.beside(event.key === "ArrowDown" ? 1 : -1);
    if (to === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.select(to);
    this.chips[this.token].scrollIntoView({ block: "nearest" });
  }

  // The token of the line above or below that is nearest.
  beside(direction) {
    const box = (chip) => chip.getBoundingClientRect();
    const own = box(this.chips[this.token]);
    let best = this.token,
      distance = Infinity;
    this.chips.forEach((chip, i) => {
      const other = box(chip),
        down = (other.top - own.top) * direction;
      const apart = 4 * down + Math.abs(other.left - own.left);
      if (down > own.height / 2 && apart < distance) [best, distance] = [i, apart];
    });
    return best;
  }

  gridKey(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!steps) return;
    event.preventDefault();
    event.stopPropagation();
    this.choose(this.layer + steps[0], this.index + steps[1]);
    this.grid.querySelector("[aria-pressed=true]").focus();
  }
}

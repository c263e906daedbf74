// The map of a panel's head: a row per query, a column per key. It can be zoomed and moved.

const SMALLEST_VIEW = 6; // tokens across the map at the largest zoom
const LABEL = { narrowest: 46, widest: 76, line: 13, letters: 10 };
const ROUND_STEPS = [1, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000];

class AttentionMap {
  constructor(panel) {
    this.panel = panel;
    this.cell = null; // a pair under the pointer, [query, key]
    this.view = { x: 0, y: 0, span: panel.tokens.length };
    const longest = Math.max(...panel.tokens.map((token) => visible(token).length));
    this.margin = Math.min(LABEL.widest, Math.max(LABEL.narrowest, 12 + 6.4 * longest));
    this.canvas = element("canvas", { class: "map", tabindex: 0, role: "img" });
    this.readout = element("p", { class: "readout" });
    const tool = (text, label, onclick) =>
      element("button", { type: "button", "aria-label": label, title: label, onclick }, text);
    const tools = element(
      "div",
      { class: "tools" },
      tool("+", "Zoom in", () => this.zoom(0.6, ...this.middle)),
      tool("−", "Zoom out", () => this.zoom(1 / 0.6, ...this.middle)),
      tool("Fit", "Show the whole map", () => this.zoom(Infinity, 0, 0)),
    );
    this.under = element("div", { class: "under" }, this.readout, tools);
    this.connect();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get middle() {
    return [this.view.x + this.view.span / 2, this.view.y + this.view.span / 2];
  }

  // Another head.
  show(title) {
    this.bitmap = this.panel.head.picture(this.panel.tokens.length);
    this.canvas.setAttribute("aria-label", `Attention map of ${title}: a row is a query, a column a key`);
  }

  draw() {
    const width = this.canvas.clientWidth,
      scale = devicePixelRatio || 1;
    if (!width || !this.bitmap) return;
    const side = Math.round(width * scale);
    if (this.canvas.width !== side) this.canvas.width = this.canvas.height = side;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, width);
    const { view } = this,
      margin = this.margin,
      size = width - margin - 1,
      cell = size / view.span;
    this.size = { margin, size };
    context.imageSmoothingEnabled = false;
    context.drawImage(this.bitmap, view.x, view.y, view.span, view.span, margin, margin, size, size);
    context.strokeStyle = colours.faint;
    context.strokeRect(margin - 0.5, margin - 0.5, size + 1, size + 1);
    this.drawLabels(context, cell);
    const line = (i, isRow, colour) => {
      const start = margin + (i - (isRow ? view.y : view.x)) * cell;
      if (start < margin - cell / 2 || start > margin + size - 1) return;
      context.fillStyle = colour;
      for (const place of [start - 1, start + cell]) {
        if (isRow) context.fillRect(margin, place, size, 1);
        else context.fillRect(place, margin, 1, size);
      }
    };
    line(this.panel.query, !shared.incoming, colours.ink);
    if (this.cell) {
      line(this.cell[0], true, colours.faint);
      line(this.cell[1], false, colours.faint);
    }
    this.showReadout();
  }

  drawLabels(context, cell) {
    const { view } = this,
      { margin, size } = this.size;
    const needed = Math.max(1, Math.ceil(LABEL.line / cell));
    // Single letters say nothing where most are left out: their numbers do.
    const isNumbered = this.panel.model.letters && needed > 1;
    const step = isNumbered ? (ROUND_STEPS.find((round) => round >= 2 * needed) ?? needed) : needed;
    const text = (i) => (isNumbered ? String(i + 1) : visible(this.panel.tokens[i]));
    const shorten = (token) =>
      token.length > LABEL.letters ? `${token.slice(0, LABEL.letters - 1)}…` : token;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const write = (place, token, isColumn, colour) => {
      context.save();
      context.fillStyle = colour;
      if (isColumn) {
        context.translate(place, margin - 6);
        context.rotate(Math.PI / 2);
        context.textAlign = "right";
        context.fillText(shorten(token), 0, 0);
      } else context.fillText(shorten(token), margin - 6, place);
      context.restore();
    };
    for (const isColumn of [false, true]) {
      const start = isColumn ? view.x : view.y;
      const first = Math.ceil(start / step) * step;
      for (let i = isNumbered ? first + step - 1 : first; i < start + view.span; i += step) {
        const place = margin + (i + 0.5 - start) * cell;
        if (place > margin + 4 && place < margin + size - 4)
          write(place, text(i), isColumn, colours.faint);
      }
    }
    context.fillStyle = colours.faint;
    context.textAlign = "left";
    context.fillText("query ↓", 2, margin - 22);
    context.fillText("key →", 2, margin - 8);
  }

  showReadout() {
    const [i, j] = this.cell ?? [null, null];
    if (i === null) {
      this.readout.textContent =
        "Point at the map, tap it, or focus it and use the arrow keys. A click or a tap chooses the row's token.";
      return;
    }
    const { head, tokens } = this.panel;
    const parts = [
      `${quoted(tokens[i])} (${i + 1}) to ${quoted(tokens[j])} (${j + 1}): ${percent(head.weight(i, j))}`,
    ];
    if (head.components > 1) {
      const shares = Array.from(
        { length: head.components },
        (_, r) => `${r + 1}: ${head.share(i, j, r).toFixed(2)}`,
      );
      parts.push(`responsibilities ${shares.join(", ")}`);
    }
    this.readout.textContent = parts.join("; ");
  }

  zoom(factor, x, y) {
    const length = this.panel.tokens.length,
      { view } = this;
    const span = Math.min(length, Math.max(Math.min(SMALLEST_VIEW, length), view.span * factor));
    const keep = span / view.span;
    view.x = x - (x - view.x) * keep;
    view.y = y - (y - view.y) * keep;
    view.span = span;
    this.move(0, 0);
  }

  move(x, y) {
    const { view } = this,
      last = this.panel.tokens.length - view.span;
    view.x = Math.max(0, Math.min(last, view.x + x || 0));
    view.y = Math.max(0, Math.min(last, view.y + y || 0));
    this.canvas.classList.toggle("zoomed", last > 0);
    this.draw();
  }

  // Where a pointer is, in tokens: [column, row].
  position(event) {
    const box = this.canvas.getBoundingClientRect(),
      { margin, size } = this.size,
      { view } = this;
    const along = (value, start) => start + ((value - margin) / size) * view.span;
    return [along(event.clientX - box.left, view.x), along(event.clientY - box.top, view.y)];
  }

  cellAt(event) {
    const [x, y] = this.position(event),
      { view } = this;
    const isInside = x >= view.x && y >= view.y && x < view.x + view.span && y < view.y + view.span;
    const last = this.panel.tokens.length - 1;
    return isInside ? [Math.min(last, Math.floor(y)), Math.min(last, Math.floor(x))] : null;
  }

  pointTo(cell) {
    this.cell = cell;
    this.draw();
  }

  connect() {
    const { canvas } = this,
      fingers = new Map();
    let start = null,
      hasMoved = false;
    const gap = () => {
      const [a, b] = [...fingers.values()];
      return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    };
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
      [start, hasMoved] = [event, fingers.size > 1];
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return event.pointerType === "mouse" && this.pointTo(this.cellAt(event));
      if (Math.hypot(event.clientX - start.clientX, event.clientY - start.clientY) > 5) hasMoved = true;
      const wide = fingers.size === 2 ? gap() : 0;
      const [x, y] = this.position(before),
        [nowX, nowY] = this.position(event);
      fingers.set(event.pointerId, event);
      if (wide) this.zoom(wide / Math.max(1, gap()), ...this.position(event));
      else if (hasMoved) this.move(x - nowX, y - nowY);
    });
    const end = (event) => {
      fingers.delete(event.pointerId);
      const cell = event.type === "pointerup" && !hasMoved && this.cellAt(event);
      if (cell) {
        this.cell = cell;
        this.panel.select(cell[shared.incoming ? 1 : 0]);
      }
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.pointTo(null));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.5, ...this.position(event)));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return; // else the page could not be scrolled
        event.preventDefault();
        this.zoom(Math.exp(event.deltaY / 300), ...this.position(event));
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { view } = this;
    const [i, j] = this.cell ?? [this.panel.query, this.panel.query];
    const last = this.panel.tokens.length - 1;
    if (steps[event.key]) {
      const cell = [i, j].map((value, axis) => Math.max(0, Math.min(last, value + steps[event.key][axis])));
      this.cell = cell;
      const outside = (value, first) =>
        value < first ? value - first : Math.max(0, value + 1 - first - view.span);
      this.move(outside(cell[1], view.x), outside(cell[0], view.y));
    } else if (event.key === "Enter") this.panel.select(shared.incoming ? j : i);
    else if (event.key === "+" || event.key === "=")
      this.zoom(0.6, ...(this.cell ? [j + 0.5, i + 0.5] : this.middle));
    else if (event.key === "-") this.zoom(1 / 0.6, ...this.middle);
    else if (event.key === "0") this.zoom(Infinity, 0, 0);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

"use strict";
const SHOWN = 100;  // rows of a table before its button is pressed
const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
}

function hide() { tip.hidden = true; }

document.addEventListener("pointermove", event => {
  const at = event.target.closest?.("[data-tip]");
  if (at) show(at.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest?.(".timeline svg")) hide();
});
document.addEventListener("focusin", event => {
  const at = event.target.closest("[data-tip]");
  if (!at) return;
  const box = at.getBoundingClientRect();
  show(at.dataset.tip, box.right, box.bottom);
});
document.addEventListener("focusout", hide);
document.addEventListener("scroll", hide, true);
document.addEventListener("keydown", event => { if (event.key === "Escape") hide(); });

// Tables: a click on a heading sorts; long tables show their first rows until a button is pressed.

function limit(table) {
  const rows = [...table.tBodies[0].rows], isAll = table.dataset.all === "yes";
  rows.forEach((row, index) => { row.hidden = !isAll && index >= SHOWN; });
}

function sort(table, head) {
  const column = head.cellIndex, body = table.tBodies[0];
  const isDown = head.getAttribute("aria-sort") === "ascending";
  const key = row => {
    const cell = row.cells[column];
    if (!("k" in cell.dataset)) return cell.textContent.trim() || null;
    return cell.dataset.k === "" ? null : Number(cell.dataset.k);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
  const keyed = [...body.rows].map(row => [key(row), row]);
  keyed.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : isDown ? compare(b, a) : compare(a, b));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  body.append(...keyed.map(([, row]) => row));
  limit(table);
}

for (const table of document.querySelectorAll("table")) {
  table.tHead.addEventListener("click", event => {
    const head = event.target.closest("th");
    if (head) sort(table, head);
  });
  const count = table.tBodies[0].rows.length;
  if (count > SHOWN) {
    const line = document.createElement("p"), button = document.createElement("button");
    line.className = "more";
    button.type = "button";
    button.className = "plain";
    const name = () => {
      button.textContent = table.dataset.all === "yes" ? `Show ${SHOWN} rows` : `Show all ${count} rows (${SHOWN} shown)`;
    };
    button.addEventListener("click", () => {
      table.dataset.all = table.dataset.all === "yes" ? "no" : "yes";
      limit(table);
      name();
    });
    name();
    line.append(button);
    table.parentElement.after(line);
    limit(table);
  }
}
addEventListener("beforeprint", () => {
  for (const table of document.querySelectorAll("table")) { table.dataset.all = "yes"; limit(table); }
});

// Timelines

const WORKER = 26, MOST_ROW = 14, PANEL = 360, GAP = 4, LABELS = 108, AXIS = 22, NARROW = 0.8;

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

class Timeline {
  constructor(box) {
    this.data = JSON.parse(box.querySelector("script").textContent);
    this.output = box.querySelector("output");
    this.svg = element("svg", {tabindex: "0", role: "application", "aria-label": "timeline; arrow keys select tasks"});
    this.drawn = box.querySelector(".drawn");
    this.drawn.replaceChildren(this.svg);
    this.total = Math.max(1, this.data.ns);
    this.from = 0;
    this.to = this.total;
    this.chosen = null;
    box.querySelector(".controls").addEventListener("click", event => {
      const what = event.target.dataset.do;
      if (what === "in") this.zoom(0.5);
      if (what === "out") this.zoom(2);
      if (what === "all") this.view(0, this.total);
    });
    this.svg.addEventListener("pointermove", event => this.move(event));
    this.svg.addEventListener("pointerleave", hide);
    this.svg.addEventListener("pointerdown", event => {
      this.dragged = {x: event.clientX, from: this.from, to: this.to};
      this.svg.setPointerCapture(event.pointerId);
      this.svg.classList.add("dragged");
    });
    const drop = () => { this.dragged = null; this.svg.classList.remove("dragged"); };
    this.svg.addEventListener("pointerup", drop);
    this.svg.addEventListener("pointercancel", drop);
    this.svg.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.clientX));
    }, {passive: false});
    this.svg.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => { if (this.drawn.clientWidth !== this.width) this.draw(); }).observe(this.drawn);
    this.draw();
  }

  time(clientX) {
    const x = clientX - this.svg.getBoundingClientRect().left - LABELS;
    return this.from + x / (this.width - LABELS) * (this.to - this.from);
  }

  view(from, to) {
    const length = Math.min(this.total, Math.max(to - from, Math.min(this.total, 100)));
    this.from = Math.max(0, Math.min(from, this.total - length));
    this.to = this.from + length;
    hide();
    this.draw();
  }

  zoom(factor, around = this.middle()) {
    this.view(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  middle() {
    const bar = this.chosen && this.bar(this.chosen);
    return bar && bar[0] + bar[1] > this.from && bar[0] < this.to ? bar[0] + bar[1] / 2 : (this.from + this.to) / 2;
  }

  bar({row, index}) { return this.data.rows[row].bars[index]; }

  draw() {
    this.width = this.drawn.clientWidth;
    const scale = (this.width - LABELS) / (this.to - this.from);
    this.shown = [];
    this.places = [];
    let y = 0, panel = this.data.rows[0]?.panel, rects = "";
    const names = [], counts = {};
    for (const row of this.data.rows) counts[row.panel] = (counts[row.panel] ?? 0) + 1;
    this.data.rows.forEach(({name, panel: own, bars}, row) => {
      if (own !== panel) { y += 8; panel = own; }
      const whole = own === "workers" ? WORKER + GAP : Math.min(MOST_ROW, PANEL / counts[own]);
      const height = own === "workers" ? WORKER : 0.92 * whole;
      this.places.push([y, height]);
      const number = row - this.data.rows.findIndex(other => other.panel === own);
      if (own === "workers" || number % Math.ceil(11 / whole) === 0) names.push([name, y + height / 2 + 4]);
      const last = {};
      let first = this.shown.length;
      bars.forEach((bar, index) => {
        const [start, length, kind, , lane, lanes, count] = bar;
        if (start + length < this.from || start > this.to) return;
        const before = last[lane + "/" + lanes];
        if (before && (start + length - before.start) * scale < NARROW) {  // narrower than a pixel together
          before.end = Math.max(before.end, start + length);
          before.count += count;
          before.times[kind] = (before.times[kind] ?? 0) + length;
          before.kind = Object.keys(before.times).reduce((a, b) => before.times[b] > before.times[a] ? b : a);
          return;
        }
        const made = {row, index, start, end: start + length, kind, lane, lanes, count, times: {[kind]: length}};
        last[lane + "/" + lanes] = made;
        this.shown.push(made);
      });
      for (; first < this.shown.length; first++) {
        const {start, end, kind, lane, lanes} = this.shown[first];
        const left = LABELS + Math.max(0, (start - this.from) * scale);
        const right = LABELS + Math.min((end - this.from) * scale, this.width - LABELS);
        rects += `<rect data-i="${first}" class="k${kind}" x="${left.toFixed(2)}" y="${(y + height * lane / lanes).toFixed(1)}"`
          + ` width="${(right - left < 2 ? right - left + 0.35 : right - left).toFixed(2)}" height="${(height / lanes).toFixed(1)}"/>`;
      }
      y += whole;
    });
    this.height = y + AXIS;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.innerHTML = rects;  // numbers only
    const texts = names.map(([name, at]) => {
      const text = element("text", {x: LABELS - 6, y: at, class: "end"});
      text.textContent = name.length > 15 ? name.slice(0, 14) + "\u2026" : name;
      return text;
    });
    this.svg.append(...texts, ...this.axis(y, scale));
    if (this.chosen) {
      const [start, length, , , lane, lanes] = this.bar(this.chosen), [top, height] = this.places[this.chosen.row];
      const x = LABELS + (start - this.from) * scale;
      if (x + length * scale >= LABELS && x <= this.width) {
        this.svg.append(element("rect", {
          class: "here", fill: "none", x, y: top + height * lane / lanes, width: Math.max(1, length * scale),
          height: height / lanes,
        }));
      }
    }
    this.output.textContent = `${ms(this.from)} to ${ms(this.to)} of ${ms(this.total)} ${this.data.mark}`;
  }

  axis(y, scale) {
    const raw = (this.to - this.from) / Math.max(2, this.width / 160), decade = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(factor => factor * decade).find(each => each >= raw);
    const made = [element("path", {class: "axis", d: `M${LABELS} ${y}H${this.width}`})];
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = LABELS + (tick - this.from) * scale;
      const isEnd = x > this.width - 40;
      const text = element("text", {x: isEnd ? this.width : x, y: y + 16, class: isEnd ? "end" : "mid"});
      text.textContent = `${Number((tick / 1e6).toPrecision(12)).toLocaleString("en", {maximumFractionDigits: 9})} ms`;
      made.push(element("path", {class: "axis", d: `M${x.toFixed(1)} ${y}v4`}), text);
    }
    return made;
  }

  describe(shown) {
    const {data} = this, bar = data.rows[shown.row].bars[shown.index];
    const place = bar[7] >= 0 ? data.texts[bar[7]] : data.rows[shown.row].name;
    const text = data.texts[bar[3]], name = shown.count > bar[6] ? `${shown.count} bars, the first: ${text}` : text;
    return `${name}\n${place}\nstart ${ms(shown.start)} ${data.mark}\nduration ${ms(shown.end - shown.start)} ${data.mark}\n${data.origin}`;
  }

  move(event) {
    if (this.dragged) {
      const by = (this.dragged.x - event.clientX) / (this.width - LABELS) * (this.dragged.to - this.dragged.from);
      this.view(this.dragged.from + by, this.dragged.to + by);
      return;
    }
    const at = event.target.dataset?.i;
    if (at === undefined) hide();
    else show(this.describe(this.shown[at]), event.clientX, event.clientY);
  }

  key(event) {
    const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.view(0, this.total);
    else if (!steps) return;
    else this.step(...steps);
    event.preventDefault();
  }

  step(down, right) {
    const {rows} = this.data;
    const inside = bars => Math.max(0, bars.findIndex(([start, length]) => start + length > this.from));
    if (!this.chosen) this.chosen = {row: 0, index: inside(rows[0].bars)};
    else if (down) {
      const row = Math.max(0, Math.min(rows.length - 1, this.chosen.row + down)), [at] = this.bar(this.chosen);
      const index = rows[row].bars.findIndex(([start, length]) => start + length > at);
      this.chosen = {row, index: index < 0 ? rows[row].bars.length - 1 : index};
    } else {
      const {row, index} = this.chosen;
      this.chosen = {row, index: Math.max(0, Math.min(rows[row].bars.length - 1, index + right))};
    }
    const bar = this.bar(this.chosen);
    if (!bar) { this.chosen = null; return; }
    const [start, length] = bar, width = this.to - this.from;
    if (start < this.from || start + length > this.to) this.view(start - width / 2, start + width / 2);
    else this.draw();
    const here = this.svg.querySelector(".here")?.getBoundingClientRect();
    const shown = {...this.chosen, start, end: start + length, count: bar[6]};
    if (here) show(this.describe(shown), here.left, here.bottom);
  }
}

function ms(ns) {
  return (ns / 1e6).toLocaleString("en", {minimumFractionDigits: 3, maximumFractionDigits: ns < 1e5 ? 6 : 3}) + " ms";
}

for (const box of document.querySelectorAll(".timeline")) new Timeline(box);
document.documentElement.dataset.ready = "yes";

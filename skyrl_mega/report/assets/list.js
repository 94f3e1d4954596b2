// The list at left: filters, order, and rows that exist only while they are in sight.

const ROW = 58;  // pixels of a row, as in browse.css
const ORDERS = {
  "as stored": (x, i) => i,
  "reward": (x, i) => x.reward[i] ?? -Infinity,
  "tokens": (x, i) => x.response_length[i],
  "turns": (x, i) => x.turns[i],
  "seconds": (x, i) => (x.generate[i] || 0) + (x.env[i] || 0),
  "log-prob": (x, i) => x.logprob[i] ?? 0,
  "prompt": (x, i) => x.uid[i],
};

function shortStatus(status) {
  return status.replace("truncated_", "truncated · ").replace("error_env_timeout", "env timeout").replace("error_infrastructure", "infrastructure").replace("error_env", "env error");
}

function statusKind(status) {
  return status === "completed" ? "" : status.startsWith("truncated") ? ".warn" : ".bad";
}

function rewardText(reward) {
  return reward == null ? "–" : Number.isInteger(reward) ? String(reward) : reward.toFixed(3);
}

function rewardChip(reward) {
  const kind = reward > 0 ? ".good" : reward < 0 ? ".bad" : "";
  return el(`span.chip.num${kind}`, { title: "reward" }, rewardText(reward));
}

class List {
  /** @param index the page's index; @param open called with a trajectory's number when it is chosen. */
  constructor(index, open) {
    this.index = index;
    this.open = open;
    this.count = index.uid.length;
    this.shown = [];
    this.at = -1;
    this.asked = 0;
    const unique = (values) => [...new Set(values)];
    const choose = (all, values, text = String) =>
      el("select", { onchange: () => this.filter(), "aria-label": all },
        el("option", { value: "" }, all), values.map((v) => el("option", { value: v }, text(v))));
    const number = (label) => el("input", { type: "number", step: "any", placeholder: label, "aria-label": `reward ${label}`, oninput: () => this.filter() });
    const runs = unique(index.run);
    this.text = el("input", { type: "search", placeholder: "search text   /", "aria-label": "search text", oninput: () => this.filter() });
    this.run = choose("all runs", runs);
    this.step = choose("all steps", unique(index.step).filter((s) => s != null), (s) => `step ${s}`);
    this.status = choose("any status", unique(index.status).sort(), shortStatus);
    this.low = number("min");
    this.high = number("max");
    this.order = el("select", { onchange: () => this.filter(), "aria-label": "order" },
      Object.keys(ORDERS).map((name) => el("option", { value: name }, name)));
    this.down = el("button", { title: "turn the order around", "aria-label": "turn the order around", onclick: () => this.turn() }, "↑");
    this.sum = el("div.sum.num");
    this.rows = el("div.rows", { role: "listbox", "aria-label": "trajectories" });
    this.scroll = el("div.scroll", { onscroll: () => this.draw(), tabindex: "-1" }, this.rows);
    this.node = el("aside.side", null,
      el("div.filters", null,
        this.text,
        el("div.pair", null, runs.length > 1 && this.run, this.step, this.status),
        el("div.pair", null, el("span.soft", null, "reward"), this.low, el("span.soft", null, "to"), this.high),
        el("div.pair", null, el("span.soft", null, "order"), this.order, this.down),
        this.sum),
      this.scroll);
    addEventListener("resize", () => this.draw());
  }

  turn() {
    this.down.textContent = this.down.textContent === "↑" ? "↓" : "↑";
    this.filter();
  }

  /** Shows what the filters take, and keeps the open trajectory in sight. */
  async filter() {
    const asked = ++this.asked;
    const x = this.index;
    const low = this.low.value === "" ? -Infinity : Number(this.low.value);
    const high = this.high.value === "" ? Infinity : Number(this.high.value);
    const bounded = low > -Infinity || high < Infinity;
    let found = [];
    for (let i = 0; i < this.count; i++) {
      if (this.run.value && x.run[i] !== this.run.value) continue;
      if (this.step.value && String(x.step[i]) !== this.step.value) continue;
      if (this.status.value && x.status[i] !== this.status.value) continue;
      if (bounded && !(x.reward[i] >= low && x.reward[i] <= high)) continue;
      found.push(i);
    }
    const wanted = this.text.value.toLowerCase();
    if (wanted) found = await this.search(found, wanted, asked);
    if (asked !== this.asked) return;  // a newer filter has taken over
    const key = ORDERS[this.order.value];
    const sign = this.down.textContent === "↑" ? 1 : -1;
    found.sort((a, b) => sign * (key(x, a) - key(x, b)) || a - b);
    const open = this.shown[this.at];
    this.shown = found;
    this.at = found.indexOf(open);
    const rewards = found.map((i) => x.reward[i]).filter((r) => r != null);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const of = found.length === this.count ? "" : ` of ${this.count.toLocaleString("en")}`;
    this.sum.textContent = `${found.length.toLocaleString("en")}${of} trajectories` + (rewards.length ? ` · mean reward ${mean.toFixed(3)}` : "");
    this.rows.style.height = `${found.length * ROW}px`;
    if (this.at < 0 && found.length) this.go(0);
    else this.reveal();
  }

  async search(among, wanted, asked) {
    const found = [];
    let number = -1, texts = [];
    for (const i of among) {
      if (Math.floor(i / this.index.block) !== number) {
        number = Math.floor(i / this.index.block);
        texts = await block(`text-${number}`);
        if (asked !== this.asked) return found;
      }
      const text = texts[i % this.index.block];
      text.folded ??= [...text.parts.flatMap((part) => part.messages.map((m) => m[1])), ...text.judged.map((pair) => pair.join(" ")), text.error].join("\n").toLowerCase();
      if (text.folded.includes(wanted)) found.push(i);
    }
    return found;
  }

  /** Opens the trajectory at a place of the list. */
  go(place) {
    if (!this.shown.length) return;
    this.at = Math.max(0, Math.min(this.shown.length - 1, place));
    this.reveal();
    this.open(this.shown[this.at]);
  }

  /** Opens a trajectory by its number, in the list where it is there. */
  show(number) {
    const place = this.shown.indexOf(number);
    if (place >= 0) return this.go(place);
    this.at = -1;
    this.draw();
    this.open(number);
  }

  reveal() {
    const top = this.at * ROW, box = this.scroll;
    if (this.at >= 0 && (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight))
      box.scrollTop = top - box.clientHeight / 2 + ROW / 2;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - 4);
    const last = Math.min(this.shown.length, Math.ceil((this.scroll.scrollTop + this.scroll.clientHeight) / ROW) + 4);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.row(place));
    this.rows.replaceChildren(...rows);
  }

  row(place) {
    const x = this.index, i = this.shown[place];
    const step = x.step[i] == null ? "" : `step ${x.step[i]} · `;
    const node = el(`div.row${place === this.at ? ".open" : ""}`, {
      role: "option", "aria-selected": String(place === this.at), onclick: () => this.go(place), "data-number": i,
    },
      el("div.line.num", null, rewardChip(x.reward[i]), el("span.where", null, `${step}prompt ${x.uid[i]} · ${x.sample[i] < 0 ? "greedy" : `#${x.sample[i]}`}`),
        x.status[i] !== "completed" && el(`span.dot${statusKind(x.status[i])}`, { title: shortStatus(x.status[i]) }),
        el("span.soft.end", null, x.turns[i] > 1 ? `${x.turns[i]} turns · ${x.response_length[i]}` : x.response_length[i])),
      el("div.snippet.mono", null, visible(x.snippet[i]) || "(nothing written)"));
    node.style.top = `${place * ROW}px`;
    return node;
  }
}

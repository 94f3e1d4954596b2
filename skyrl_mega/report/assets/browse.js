// The page: a list, a trajectory, and keys to go from one to the next.

const VIEWS = { conversation: "1", tokens: "2", samples: "3" };
const KEYS = [
  ["j  k", "next, previous"], ["←  →", "previous, next sample of the same prompt"], ["1  2  3", "conversation, tokens, samples"],
  ["s", "shade the policy's words by probability"], ["/", "search"], ["g  G", "first, last"], ["?", "this list"],
];

class Page {
  constructor(index) {
    this.index = index;
    this.view = "conversation";
    this.shaded = false;
    this.number = -1;
    this.list = new List(index, (number) => this.open(number));
    this.main = el("main", { tabindex: "-1" });
    this.tip = el("div.tip", { hidden: true, role: "tooltip" });
    this.help = el("dialog.help", { onclick: () => this.help.close() }, el("h2", null, "Keys"),
      el("table", null, el("tbody", null, KEYS.map(([key, what]) => el("tr", null, el("th.mono", null, key), el("td", null, what))))));
    document.getElementById("app").append(this.list.node, this.main, this.tip, this.help);
    document.addEventListener("keydown", (event) => this.key(event));
    this.main.addEventListener("mouseover", (event) => this.hover(event.target.closest?.("[data-at]")));
    this.main.addEventListener("mouseleave", () => this.hover(null));
  }

  async start() {
    const asked = Number(location.hash.slice(1) || NaN);
    await this.list.filter();
    if (asked >= 0 && asked < this.index.uid.length && location.hash.length > 1) this.list.show(asked);
    if (!this.list.count) this.main.replaceChildren(el("p.empty.soft", null, "No trajectories."));
  }

  async open(number) {
    const moved = number !== this.number;
    this.number = number;
    const index = this.index;
    const [text, tokens, pieces] = await Promise.all([textOf(index, number), tokensOf(index, number), block("pieces")]);
    const view = { text, tokens, pieces };
    const content = this.view === "samples" ? await samples(index, number, (i) => this.list.show(i))
      : this.view === "tokens" ? tokenView(view)
      : [this.shaded && legend(false), toolsOf(text), ...conversation(view, this.shaded), truthOf(text)];
    if (number !== this.number) return;  // somebody has gone on
    this.main.replaceChildren(this.head(number), el("div.content", null, errorOf(text), content.flat().filter(Boolean)),
      el("footer", null, facts("judged", text.judged), facts("the prompt's data", text.extras), el("p.soft", null, text.file)));
    if (moved) this.main.scrollTop = 0;
    this.hover(null);
    this.mark();
    history.replaceState(null, "", `#${number}`);
  }

  head(i) {
    const x = this.index;
    const tab = ([name, key]) => el(`button.tab${name === this.view ? ".on" : ""}`, { title: `key ${key}`, onclick: () => this.look(name) }, name);
    const figure = (name, value, title) => el("div.figure", { title }, el("span.soft", null, name), el("span.num", null, value));
    const several = new Set(x.run).size > 1;
    return el("header.head", null,
      el("div.title", null,
        el("h1", null, `prompt ${x.uid[i]}`, el("span.soft", null, x.sample[i] < 0 ? " greedy answer" : ` sample ${x.sample[i]}`)),
        rewardChip(x.reward[i]), el(`span.chip${statusKind(x.status[i])}`, null, shortStatus(x.status[i])),
        el("span.end", null,
          el("button", { title: "previous: k", "aria-label": "previous", onclick: () => this.list.go(this.list.at - 1) }, "‹"),
          el("button", { title: "next: j", "aria-label": "next", onclick: () => this.list.go(this.list.at + 1) }, "›"),
          el("button", { title: "keys: ?", "aria-label": "keys", onclick: () => this.help.showModal() }, "?"), themeButton())),
      el("div.figures", null,
        several && figure("run", x.run[i]), x.step[i] != null && figure("step", x.step[i]), figure("environment", x.env_class[i]), figure("turns", x.turns[i]),
        figure("tokens", `${x.prompt_length[i]} + ${x.response_length[i]}`, "prompt + all that follows"),
        figure("written", x.wrote[i], "tokens that the policy wrote"),
        figure("log-prob", x.logprob[i] == null ? "–" : x.logprob[i].toFixed(3), "mean over the policy's tokens, in nats"),
        figure("generate", seconds(x.generate[i])), figure("env", seconds(x.env[i])), figure("weights", x.weights[i], "weight versions, by step")),
      el("nav.tabs", null, Object.entries(VIEWS).map(tab),
        this.view === "conversation" && el("label.end.soft", { title: "key s" },
          el("input", { type: "checkbox", checked: this.shaded, onchange: () => this.shadeWords() }), " shade by probability")));
  }

  look(view) {
    this.view = view;
    this.open(this.number);
  }

  shadeWords() {
    this.shaded = !this.shaded;
    this.look("conversation");
  }

  /** Goes along the samples of the prompt that is open. */
  sibling(by) {
    const x = this.index, n = this.number;
    const same = x.uid.map((_, i) => i).filter((i) => x.uid[i] === x.uid[n] && x.step[i] === x.step[n] && x.run[i] === x.run[n]);
    same.sort((a, b) => x.sample[a] - x.sample[b]);
    const to = same[same.indexOf(n) + by];
    if (to != null) this.list.show(to);
  }

  hover(token) {
    this.tip.hidden = !token;
    if (!token) return;
    const { at, id, milli } = token.dataset;
    this.tip.textContent = `token ${at} · id ${id}` + (milli == null ? " · masked" : ` · log-prob ${(-milli / 1000).toFixed(3)} · p ${probability(milli)}`);
    const box = token.getBoundingClientRect();
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - this.tip.offsetWidth - 8))}px`;
    this.tip.style.top = `${box.top > 40 ? box.top - 32 : box.bottom + 8}px`;
  }

  /** Shows where the searched text is. */
  mark() {
    if (!window.CSS?.highlights) return;
    CSS.highlights.delete("found");
    const wanted = this.list.text.value.toLowerCase();
    if (!wanted) return;
    const ranges = [];
    const walker = document.createTreeWalker(this.main.querySelector(".content"), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      if (text.length !== node.data.length) continue;
      for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + wanted.length);
        ranges.push(range);
      }
    }
    CSS.highlights.set("found", new Highlight(...ranges));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape" || event.key === "Enter") event.target.blur();
      return;
    }
    const list = this.list;
    const does = {
      j: () => list.go(list.at + 1), ArrowDown: () => list.go(list.at + 1), k: () => list.go(list.at - 1), ArrowUp: () => list.go(list.at - 1),
      ArrowRight: () => this.sibling(1), ArrowLeft: () => this.sibling(-1), g: () => list.go(0), G: () => list.go(Infinity),
      1: () => this.look("conversation"), 2: () => this.look("tokens"), 3: () => this.look("samples"), s: () => this.shadeWords(),
      "/": () => list.text.focus(), "?": () => this.help.showModal(),
    }[event.key];
    if (!does || this.help.open || this.number < 0) return;
    event.preventDefault();
    does();
  }
}

block("index").then((index) => new Page(index).start());

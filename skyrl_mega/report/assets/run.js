// A line at the step under the mouse, in every plot at once, and that step's values beside it.

const AREA = { width: 440, height: 200, left: 52, right: 10, top: 8, bottom: 22 };  // as in plots.py

/** Adds what the program draws into the report: the button and the line at the mouse. */
function startReport() {
  const header = document.querySelector(".report > header");
  if (header) header.append(themeButton());
  return block("points").then(followMouse);
}

function followMouse(points) {
  const hint = el("div.hint", { hidden: true });
  document.body.append(hint);
  const figures = Object.keys(points).map((id) => document.getElementById(id));

  const clear = () => {
    hint.hidden = true;
    document.querySelectorAll(".cursor").forEach((line) => line.remove());
  };

  const show = (id, event) => {
    const box = document.querySelector(`#${id} svg`).getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * AREA.width;
    const { low, high, marks, series } = points[id];
    const share = (across - AREA.left) / (AREA.width - AREA.left - AREA.right);
    const steps = [...new Set(series.flatMap((s) => s.xs))];
    const at = low === high ? low : low + share * (high - low);
    const step = steps.reduce((best, x) => (Math.abs(x - at) < Math.abs(best - at) ? x : best), steps[0]);
    clear();
    for (const figure of figures) cursor(figure, points[figure.id], step);
    const rows = series.map((s) => [s, s.ys[s.xs.indexOf(step)]]).filter(([, y]) => y != null);
    hint.replaceChildren(el("b", null, `step ${step}`), ...rows.map(([s, y]) =>
      el("div", null, el("span", null, el(`i.key.s${s.colour}`), s.name), el("span.num", null, Number(y.toPrecision(4)).toString()))));
    const near = marks.filter(([x]) => Math.abs(x - step) <= 0.5);
    hint.append(...near.flatMap(([, text]) => text.split("\n")).map((line) => el("p.event", null, line)));
    hint.hidden = false;
    const right = event.clientX + 18 + hint.offsetWidth > innerWidth;
    hint.style.left = `${right ? event.clientX - hint.offsetWidth - 18 : event.clientX + 18}px`;
    hint.style.top = `${Math.max(8, Math.min(event.clientY - 20, innerHeight - hint.offsetHeight - 8))}px`;
  };

  for (const figure of figures) {
    const svg = figure.querySelector("svg");
    svg.addEventListener("pointermove", (event) => show(figure.id, event));
    svg.addEventListener("pointerleave", clear);
  }
}

function cursor(figure, { low, high }, step) {
  if (step < low || step > high) return;
  const inner = AREA.width - AREA.left - AREA.right;
  const x = AREA.left + (low === high ? 0.5 : (step - low) / (high - low)) * inner;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ class: "cursor", x1: x, x2: x, y1: AREA.top, y2: AREA.height - AREA.bottom })) line.setAttribute(name, value);
  figure.querySelector("svg").append(line);
}

startReport();

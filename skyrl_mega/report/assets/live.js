// The bar at the top of a live page: progress, alarms, connection. A new version of the report replaces the old one
// in place, so scrolling and folded parts stay.

const POLL_MS = 3000;
const PATIENCE_MS = 20000;  // for a reply; a busy machine answers late
const PHASES = { starting: "starting", training: "training", restarting: "restarting", fault: "ended by a fault", ended: "ended" };
const bar = el("section.live", { "aria-live": "polite" });
const named = document.title;
let version = "";
let newest = null;
let answeredAt = Date.now();

function span(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function stepsText([first, last]) {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

function showBar(problem) {
  const state = newest;
  const lines = [];
  if (state) {
    const ended = state.phase === "ended" || state.phase === "fault";
    const of = state.planned ? ` of ${state.planned}` : "";
    const since = state.age_s + (Date.now() - answeredAt) / 1000;
    const usual = state.usual_s && state.phase === "training" ? `, a step usually takes ${span(state.usual_s)}` : "";
    const kind = state.phase === "fault" ? ".bad" : ended || problem ? "" : ".good";
    lines.push(el("p.num", null,
      el(`span.chip${kind}`, null, PHASES[state.phase]), ` step ${state.step}${of} `,
      el("span.soft", null, ended ? "" : `last news ${span(since)} ago${usual}`)));
    if (state.stage && !ended) lines.push(el("p.soft", null, state.stage));
    for (const alarm of state.alarms) {
      lines.push(el(`p.alarm.${alarm.level}`, { role: "alert" },
        el("b", null, alarm.kind), alarm.steps ? el("span.num", null, stepsText(alarm.steps)) : null, el("span", null, alarm.text)));
    }
    const loud = state.alarms.filter((alarm) => alarm.level !== "past").length;
    document.title = `${loud ? `(${loud} ⚠) ` : ""}${named}`;
  }
  if (problem || (state && state.problem)) lines.push(el("p.alarm.warn", { role: "alert" }, problem || state.problem));
  bar.replaceChildren(...lines);
}

function lost() {
  if (newest && !newest.running) return "The run has ended, and the page is no longer served. This is its last state.";
  const at = new Date(answeredAt).toLocaleTimeString();
  return `No answer since ${at}: the run was ended, or the connection is lost. The page tries again and follows a resumed run.`;
}

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (reply.status === 401) throw new Error("The token is not valid any more: open the address that the run printed.");
  return reply.ok ? reply : null;  // null: too many requests, or the folder is not readable yet
}

async function replaceReport() {
  const reply = await ask("/");
  if (!reply) return;
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  const program = (of) => of.querySelector("body > script:not([type])").textContent;
  if (program(page) !== program(document)) {
    location.reload();  // the run was resumed by another version of the program
    return;
  }
  const summaries = (of) => [...of.querySelectorAll(".report details")];
  const open = new Set(summaries(document).filter((part) => part.open).map((part) => part.className + part.querySelector("summary").textContent.replace(/\d+/g, "")));
  document.querySelectorAll(".hint").forEach((hint) => hint.remove());
  document.querySelector(".report").replaceWith(document.adoptNode(page.querySelector(".report")));
  for (const part of summaries(document)) {
    if (open.has(part.className + part.querySelector("summary").textContent.replace(/\d+/g, ""))) part.open = true;
  }
  for (const name of ["points", "live"]) document.getElementById(name).textContent = page.getElementById(name).textContent;
  unpacked.clear();
  version = (await block("live")).version;
  await startReport();
}

async function follow() {
  let problem = "";
  try {
    const reply = await ask("/state.json");
    if (reply) {
      newest = await reply.json();
      answeredAt = Date.now();
      // Not while text is selected: the selection would be lost.
      if (newest.version !== version && getSelection().type !== "Range") await replaceReport();
    }
  } catch (error) {
    problem = error instanceof TypeError || error.name === "TimeoutError" ? lost() : error.message;
  }
  showBar(problem);
  setTimeout(follow, POLL_MS);
}

document.body.prepend(bar);
block("live").then((values) => {
  version = values.version;
  follow();
});

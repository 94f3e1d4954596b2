// One trajectory at right: as a conversation, token by token, and beside the other samples of its prompt.

const LONG = 1500;  // characters of a prompt that stay open
const LONG_TOKENS = 250;  // tokens of a prompt that stay open
const MANY = 6000;  // tokens that are drawn at once
const SHADES = 12;

/** Control characters and marks that turn the direction of text, written out. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `[U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** Text whose tags (<search>, </answer>) stand out. */
function tagged(text) {
  return visible(text).split(/(<\/?[A-Za-z_][\w-]*>)/).map((part, i) => (i % 2 ? el("span.tag", null, part) : part));
}

function seconds(s) {
  return s == null ? "–" : s < 0.9995 ? `${(1000 * s).toFixed(s < 0.00995 ? 1 : 0)} ms` : s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

function signed(value) {
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(3);
}

function plural(n, one) {
  return `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;
}

/** 0 for a sure token, up to SHADES - 1 from a log-prob of -7 on. */
function shade(milli) {
  return Math.min(SHADES - 1, Math.round(Math.sqrt(milli / 7000) * (SHADES - 1)));
}

function probability(milli) {
  const p = Math.exp(-milli / 1000);
  return p > 0.9995 ? "≈ 1" : p >= 0.001 ? p.toFixed(3) : p.toExponential(1);
}

/** The tokens of one stretch as elements; hovering tells about one. */
function tokenSpan(view, { from, to, policy, before }) {
  const box = document.createDocumentFragment();
  for (let i = from; i < to; i++) {
    const [id, text] = view.pieces[view.tokens.places[i]];
    const milli = policy ? view.tokens.logprobs[before + i - from] : null;
    const token = el(policy ? `span.t.l${shade(milli)}` : "span.t", { "data-at": i, "data-id": id, "data-milli": milli });
    token.append(text == null ? `${id} ` : visible(text).replaceAll("\n", "↵\n"));
    box.append(token);
  }
  return box;
}

/** Stretches with what the views need: whose they are, and how many of the policy's log-probs stand before. */
function stretches(tokens) {
  let before = 0, turn = 0;
  return tokens.stretches.map(([kind, from, to]) => {
    const policy = kind === "response";
    const stretch = { kind, from, to, policy, before, turn: policy ? ++turn : turn };
    if (policy) before += to - from;
    return stretch;
  });
}

function legend(masked) {
  const marks = [[0, "1"], [105, ".9"], [693, ".5"], [2303, ".1"], [4605, ".01"], [6908, ".001"]];
  return el("div.legend", null, el("span.soft", null, "the policy's tokens, by probability"),
    marks.map(([milli, p]) => el(`span.key.t.l${shade(milli)}`, null, p)), masked && el("span.key.masked", null, "not the policy's: masked"));
}

/** What is known of a response, in words. */
function notesOf(part, stretch, tokens) {
  const notes = [];
  if (stretch) {
    const n = stretch.to - stretch.from;
    const sum = tokens.logprobs.slice(stretch.before, stretch.before + n).reduce((a, b) => a + b, 0);
    notes.push(plural(n, "token"), `mean log-prob ${(-sum / n / 1000).toFixed(2)}`);
  }
  if (part.at) notes.push(`after ${seconds(part.at)}`);
  if (part.generate != null) notes.push(`generate ${seconds(part.generate)}`);
  if (part.env != null) notes.push(`env ${seconds(part.env)}`);
  return notes.join(" · ");
}

function body(text, long) {
  const pre = el("pre.said", null, tagged(text.replace(/^\n+|\s+$/g, "")));
  return long && text.length > LONG ? cut(pre, plural(text.length, "character")) : pre;
}

/** The beginning of something long, and a button that shows the rest. */
function cut(pre, all) {
  pre.classList.add("cut");
  const more = el("button.more", { onclick: () => { pre.classList.remove("cut"); more.remove(); } }, `show all ${all}`);
  return [pre, more];
}

/** The conversation; with `shaded`, the policy's words are its tokens. */
function conversation(view, shaded) {
  const { text, tokens } = view;
  const last = text.parts.findLastIndex((part) => part.kind === "response");
  const policy = stretches(tokens).filter((stretch) => stretch.policy);
  const fits = policy.length === text.parts.filter((part) => part.kind === "response").length;
  let turn = 0, conversations = 0;
  return text.parts.flatMap((part, i) => {
    if (part.kind === "prompt") return [...newConversation(++conversations), ...promptSpeeches(part)];
    if (part.kind !== "response") return part.messages.map((message) => otherSpeech(part, message, last >= 0 && i > last));
    const stretch = fits ? policy[turn] : null;
    turn++;
    return part.messages.map(([, content]) => el("article.speech.policy", null,
      el("header", null, el("b", null, "policy"), el("span", null, `turn ${turn}`),
        part.reward != null && el("span.chip.num", { title: "reward of this turn" }, `reward ${rewardText(part.reward)}`),
        part.finish && part.finish !== "stop" && el("span.chip.warn", { title: "what ended this response" }, part.finish),
        el("span.soft.num", null, notesOf(part, stretch, tokens))),
      shaded && stretch ? el("pre.said.tokens", null, tokenSpan(view, stretch)) : body(content, false),
      (part.calls || []).map(([name, rest]) => el("div.call.mono", null, el("b", null, visible(name || "tool call")), ` ${visible(rest)}`))));
  });
}

/** A mark in front of every conversation but the first. */
function newConversation(number) {
  return number < 2 ? [] : [el("p.soft", null, `conversation ${number}: the policy sees nothing of the above`)];
}

/** A prompt's last message; those before it (a system message, worked examples) are folded. */
function promptSpeeches(part) {
  const speeches = part.messages.map((message) => otherSpeech(part, message, false));
  if (speeches.length < 2) return speeches;
  const before = speeches.slice(0, -1);
  const characters = part.messages.slice(0, -1).reduce((sum, [, content]) => sum + content.length, 0);
  const title = `${plural(before.length, "message")} before it in the prompt, ${plural(characters, "character")}`;
  return [el("details.before", { open: characters < 200 }, el("summary", null, title), before), speeches[speeches.length - 1]];
}

function otherSpeech(part, [role, content], unread) {
  const prompt = part.kind === "prompt";
  return el(`article.speech${prompt ? ".prompt" : ".env"}`, null,
    el("header", null, el("b", null, role), !prompt && el("span.soft", null, "environment"),
      unread && el("span.soft", { title: "it came after the last turn" }, "not read by the policy")),
    body(content, prompt));
}

/** Every token in order: prompt, turns, observations. */
function tokenView(view) {
  const { tokens, text } = view;
  const parts = stretches(tokens);
  const draw = (from) => {
    const nodes = [];
    let drawn = 0, i = from;
    for (; i < parts.length && drawn < MANY; i++) {
      const part = parts[i], n = part.to - part.from;
      drawn += n;
      const weights = part.policy && versionsIn(text.versions, part.from, part.to);
      nodes.push(el(`article.speech${part.policy ? ".policy" : ".masked"}`, null,
        el("header", null, el("b", null, part.policy ? "policy" : part.kind), part.policy && el("span", null, `turn ${part.turn}`),
          el("span.soft.num", null, `${plural(n, "token")}, from ${part.from}${part.policy ? "" : " · masked"}`),
          weights && el("span.soft", null, `weights ${weights}`)),
        part.kind === "prompt" && n > LONG_TOKENS
          ? cut(el("pre.said.tokens", null, tokenSpan(view, part)), plural(n, "token"))
          : el("pre.said.tokens", null, tokenSpan(view, part))));
    }
    if (i < parts.length) {
      const more = el("button.more", { onclick: () => more.replaceWith(...draw(i)) }, `show ${plural(parts.length - i, "more part")}`);
      nodes.push(more);
    }
    return nodes;
  };
  const numbers = view.pieces.length && view.pieces[tokens.places[0]]?.[1] == null;
  return [legend(true), numbers && el("p.soft", null, "The model's tokenizer.json was not found: tokens are shown by their numbers."), ...draw(0)];
}

/** Weight versions of the policy's tokens in [from, to). */
function versionsIn(versions, from, to) {
  const inside = versions.filter(([, start], i) => start < to && (versions[i + 1]?.[1] ?? Infinity) > from);
  return [...new Set(inside.map(([version]) => version))].join(", ");
}

/** The samples of one prompt in columns. */
async function samples(index, number, open) {
  const same = index.uid.map((_, i) => i).filter((i) =>
    index.uid[i] === index.uid[number] && index.step[i] === index.step[number] && index.run[i] === index.run[number]);
  same.sort((a, b) => index.sample[a] - index.sample[b]);
  const drawn = same.filter((i) => index.sample[i] >= 0); // ReMax's greedy answer is none of them
  const mean = drawn.reduce((sum, i) => sum + (index.reward[i] ?? 0), 0) / Math.max(drawn.length, 1);
  const texts = await Promise.all(same.map((i) => textOf(index, i)));
  const opening = (text) => text.parts[0]?.kind === "prompt" ? 1 : 0;
  const signedReward = (i) => signed((index.reward[i] ?? 0) - mean);
  return [
    el("details.common", null, el("summary", null, `the prompt, and ${plural(drawn.length, "sample")} with a mean reward of ${mean.toFixed(3)}`),
      texts[0].parts.slice(0, opening(texts[0])).flatMap(promptSpeeches)),
    el("div.columns", null, same.map((i, n) =>
      el(`section.column${i === number ? ".open" : ""}`, null,
        el("button.head", { onclick: () => open(i), title: "open this one" },
          el("b", null, index.sample[i] < 0 ? "greedy answer" : `sample ${index.sample[i]}`), rewardChip(index.reward[i]),
          el("span.soft.num", { title: "reward less the samples' mean, and length" }, `${signedReward(i)} · ${plural(index.response_length[i], "token")}`),
          index.status[i] !== "completed" && el(`span.chip${statusKind(index.status[i])}`, null, shortStatus(index.status[i]))),
        texts[n].parts.slice(opening(texts[n])).flatMap((part) => part.messages.map(([role, content]) =>
          el(`article.speech${part.kind === "response" ? ".policy" : ".env"}`, null,
            el("header", null, el("b", null, part.kind === "response" ? "policy" : role)), body(content, false))))))),
  ];
}

async function textOf(index, i) {
  return (await block(`text-${Math.floor(i / index.block)}`))[i % index.block];
}

async function tokensOf(index, i) {
  return (await block(`tokens-${Math.floor(i / index.block)}`))[i % index.block];
}

/** The error of a failed trajectory. */
function errorOf(text) {
  return text.error && el("article.speech.failed", null, el("header", null, el("b", null, "error")), body(text.error, true));
}

/** The tools in the prompt: a line each, with the schema folded. */
function toolsOf(text) {
  return text.tools.length > 0 && el("article.speech.prompt.tools", null,
    el("header", null, el("b", null, "tools"), el("span.soft", null, "offered in the prompt")),
    text.tools.map(([line, schema]) => el("details", null, el("summary.mono", null, visible(line)), body(schema, true))));
}

/** What a right answer is compared with. */
function truthOf(text) {
  return text.truth != null && el("article.speech.truth", null, el("header", null, el("b", null, "ground truth")), body(text.truth, true));
}

/** Names and values at the foot of a trajectory. */
function facts(title, pairs) {
  return pairs.length > 0 && el("details.facts", { open: title === "judged" }, el("summary", null, title),
    el("table", null, el("tbody", null, pairs.map(([name, value]) => el("tr", null, el("th", null, name), el("td.mono", null, visible(value)))))));
}

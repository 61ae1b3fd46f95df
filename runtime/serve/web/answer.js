/* --- one answer --- */
const newAnswer = (setting, isOther) => ({
  setting, isOther, steps: [], text: "", calls: [], finish: null, error: "", timings: null, used: null, first: 0, last: 0, saved: "",
});
const hasSteps = (a) => a.steps.length > 1;
/* The answer as one step of one token, with its figures. */
function slim(a) {
  const f = figures(a), part = (isThinking) => a.steps.flatMap((s) => s.tokens.filter((t) => t[3] === isThinking).map((t) => t[0])).join("");
  const tokens = [[part(true), true], [part(false), false]].filter(([text]) => text).map(([text, isThinking]) => [text, null, "next", isThinking]);
  const timings = a.timings ?? { predicted_n: f.tokens, forwards: f.forwards, predicted_per_second: f.speed, tokens_per_forward: f.gain };
  return { ...a, steps: tokens.length ? [{ number: 1, at: a.last, tokens }] : [], timings };
}
const tokensOf = (a) => a.steps.reduce((n, s) => n + s.tokens.length, 0);
function figures(a) {
  const t = a.timings ?? {}, tokens = t.predicted_n ?? tokensOf(a), forwards = t.forwards ?? a.steps.filter((s) => s.tokens.length).length;
  const after = tokens - (a.steps[0]?.tokens.length ?? 0), time = (a.last - a.first) / 1000;
  return {
    tokens, forwards, speed: t.predicted_per_second || (time > 0 && after > 0 ? after / time : null),
    gain: t.tokens_per_forward ?? (forwards ? tokens / forwards : null), first: a.first || null,
    cached: a.usage?.prompt_tokens_details?.cached_tokens ?? t.cached_n ?? null, prompt: a.usage?.prompt_tokens ?? (t.prompt_n == null ? null : t.prompt_n + (t.cached_n ?? 0)),
  };
}
const round = (x, digits = 0) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(x < 10 && !digits ? 1 : digits));
const span = (name, text) => { const e = document.createElement("span"); e.className = name; e.textContent = text; return e; };
const make = (tag, name, ...children) => { const e = document.createElement(tag); if (name) e.className = name; e.append(...children); return e; };

class View {
  /* Draws one answer; `now` is the one whose figures stand beside the talk. */
  constructor(answer) {
    this.answer = answer; this.drawn = 0; this.due = 0;
    this.mode = make("span", "mode"); this.state = make("span", "state");
    this.text = make("div", "text"); this.thought = make("div", "thought"); this.thought.dir = "auto";
    this.fold = make("details", "thinking", make("summary", "", "Thinking"), this.thought); this.fold.hidden = true;
    this.calls = make("div", "calls"); this.calls.hidden = true;
    this.note = make("p", "note"); this.note.hidden = true;
    this.foot = make("div", "foot"); this.foot.hidden = true;
    this.text.setAttribute("role", "group"); this.text.dir = "auto";
    this.root = make("article", "answer", make("div", "top", this.mode, this.state), this.fold, this.text, this.calls, this.note, this.foot);
    this.text.addEventListener("keydown", (e) => this.walk(e));
    for (const kind of ["pointerenter", "focusin"]) this.root.addEventListener(kind, () => this.show());
  }
  draw() {
    if (!this.due) this.due = requestAnimationFrame(() => { this.due = 0; this.drawNow(); });
  }
  drawNow() {
    const a = this.answer, parts = document.createDocumentFragment(), thoughts = document.createDocumentFragment();
    for (; this.drawn < a.steps.length; this.drawn++) {
      const step = a.steps[this.drawn];
      if (step.mark) { const m = make("span", "mark", step.mark); m.setAttribute("aria-label", `from here ${step.mark}`); parts.append(m); }
      step.tokens.forEach((token, i) => {
        const [text, p, how, isThinking] = token, e = span(`t ${how}`, text);
        if (i === 0) e.classList.add("first");
        if (i === step.tokens.length - 1) e.classList.add("last");
        if (p != null) e.style.setProperty("--k", sureness(p));
        e.tabIndex = -1; e.at = [this.drawn, i];
        (isThinking ? thoughts : parts).append(e);
      });
    }
    this.text.append(parts); this.thought.append(thoughts); this.fold.hidden = !this.thought.hasChildNodes();
    if (!this.entry && (this.entry = this.text.querySelector(".t"))) this.entry.tabIndex = 0;
    const live = a.finish == null && !a.error;
    this.root.classList.toggle("live", live); this.root.setAttribute("aria-busy", String(live));
    this.mode.textContent = label(a.used ?? a.setting);
    this.text.setAttribute("aria-label", `Answer, ${this.mode.textContent}. Left and right arrows go from token to token.`);
    this.state.textContent = live ? (a.steps.length ? "" : a.waits ? "waits: each has the machine to itself" : a.opens ? "loading the model" : "reading the prompt") : endings[a.finish] ?? "";
    const f = figures(a);
    this.foot.hidden = !f.tokens;
    if (f.tokens) {
      const items = [[f.tokens, "tokens"], [round(f.speed), "tokens/s"], [round(f.gain, 2), "tokens/forward"]];
      if (f.first) items.push([round(f.first), "ms to the first"]);
      if (f.prompt != null) items.push([`${f.cached ?? 0} of ${f.prompt}`, "prompt tokens from cache"]);
      this.foot.replaceChildren(...items.map(([value, words]) => make("span", "", make("b", "", String(value)), ` ${words}`)));
    }
    this.note.hidden = !a.error; this.note.className = "note bad"; this.note.textContent = a.error;
    if (!live) this.drawCalls();
    if (now === this) drawFigures(a);
    follow();
  }
  drawCalls() {
    const found = callsOf(this.answer);
    this.calls.hidden = !found.length;
    this.calls.replaceChildren(...found.map(drawCall));
  }
  show() { if (now !== this && now?.answer.finish != null) { now = this; drawFigures(this.answer); } }
  clear() { this.drawn = 0; this.entry = null; this.text.replaceChildren(); this.thought.replaceChildren(); this.fold.hidden = this.calls.hidden = true; }
  walk(e) {
    if (!e.target.classList.contains("t")) return;
    const all = [...this.text.querySelectorAll(".t")], i = all.indexOf(e.target);
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1 }[e.key];
    if (to === undefined || !all[to]) return;
    e.preventDefault();
    e.target.tabIndex = -1; all[to].tabIndex = 0; this.entry = all[to]; all[to].focus();
  }
}
const endings = {
  stop: "", eos: "", length: "cut: most tokens reached", cancelled: "stopped", deadline: "cut: out of time", capacity: "cut: the context is full",
  tool_calls: "", interrupted: "interrupted by a reload", error: "failed",
};
const sureness = (p) => Math.min(1, Math.max(0.04, p) ** 3).toFixed(3); // 0.95 is to look unlike 1
const views = new Map();
let now = null;

/* --- tool calls: those of the interface, or a text that is nothing but calls --- */
function textOf(a) {
  const shown = a.text || a.steps.flatMap((s) => s.tokens.filter((t) => !t[3]).map((t) => t[0])).join("");
  return shown || (a.calls.length ? JSON.stringify(a.calls.map((c) => ({ name: c.name, arguments: parse(c.arguments) }))) : "");
}
function callsOf(a) {
  if (a.calls.length) return a.calls.map((c) => [c.name, parse(c.arguments), c.arguments]);
  const text = textOf(a).trim();
  const tagged = [...text.matchAll(/<tool_call>([\s\S]*?)<\/tool_call>/g)].map((m) => parse(m[1]));
  const list = tagged.length ? tagged : parse(text);
  const calls = Array.isArray(list) ? list : [list];
  const are = calls.length && calls.every((c) => c && typeof c === "object" && typeof c.name === "string" && "arguments" in c);
  return are ? calls.map((c) => [c.name, typeof c.arguments === "string" ? parse(c.arguments) : c.arguments, String(c.arguments)]) : [];
}
function parse(text) { try { return JSON.parse(text); } catch { return undefined; } }
function drawCall([name, args, raw]) {
  const list = make("dl", "");
  if (args && typeof args === "object" && !Array.isArray(args)) {
    for (const [k, v] of Object.entries(args)) list.append(make("dt", "", k), make("dd", "", json(v, 0)));
  } else list.append(make("dt", "", "arguments"), make("dd", "", args === undefined ? String(raw) : json(args, 0)));
  return make("figure", "call", make("figcaption", "", String(name), span("", "tool call")), list);
}
function json(value, depth) {
  const parts = document.createDocumentFragment(), pad = "  ".repeat(depth + 1), end = "  ".repeat(depth);
  if (value === null || typeof value === "boolean") parts.append(span("j-word", String(value)));
  else if (typeof value === "number") parts.append(span("j-number", String(value)));
  else if (typeof value === "string") parts.append(span("j-string", JSON.stringify(value)));
  else if (depth > 20) parts.append(JSON.stringify(value));
  else {
    const isList = Array.isArray(value), entries = isList ? value.map((v) => [null, v]) : Object.entries(value);
    parts.append(isList ? "[" : "{");
    entries.forEach(([k, v], i) => {
      parts.append(`\n${pad}`);
      if (k !== null) parts.append(span("j-key", JSON.stringify(k)), ": ");
      parts.append(json(v, depth + 1), i < entries.length - 1 ? "," : `\n${end}`);
    });
    parts.append(isList ? "]" : "}");
  }
  return parts;
}

/* --- figures beside the talk --- */
const MOST_BARS = 32;
function drawFigures(a) {
  const f = figures(a), put = (id, value, unit) => $(id).replaceChildren(value, ...(unit ? [" ", make("small", "", unit)] : []));
  put("f-speed", round(f.speed)); put("f-gain", round(f.gain, 2));
  put("f-first", round(f.first), f.first ? "ms" : "");
  put("f-cache", f.prompt == null ? "–" : String(f.cached ?? 0), f.prompt == null ? "" : `of ${f.prompt}`);
  const steps = a.steps.filter((s) => s.tokens.length), box = $("steps");
  const bar = (s) => {
    const e = make("div", s.mark ? "bar changed" : "bar");
    for (const [, p, how] of s.tokens.slice(0, 16)) { const i = make("i", how); i.style.setProperty("--k", p == null ? 1 : sureness(p)); e.append(i); }
    return e;
  };
  if (box.answer !== a || box.count > steps.length) { box.replaceChildren(); box.answer = a; box.count = Math.max(0, steps.length - MOST_BARS); }
  for (; box.count < steps.length; box.count++) box.append(bar(steps[box.count]));
  while (box.children.length > MOST_BARS) box.firstChild.remove();
  const tallest = Math.min(16, Math.max(1, ...steps.slice(-MOST_BARS).map((s) => s.tokens.length)));
  box.style.setProperty("--cell", `${Math.max(4, Math.min(11, Math.floor(96 / tallest) - 1))}px`);
  const counts = { next: 0, accepted: 0, verified: 0, forced: 0 };
  for (const s of steps) for (const t of s.tokens) counts[t[2]]++;
  box.setAttribute("aria-label", steps.length ? `${f.tokens} tokens in ${f.forwards} forwards` : "No steps yet");
  $("legend").replaceChildren(...Object.entries(HOW).map(([how, words]) => {
    const sample = span(`t ${how} first last`, how); sample.style.setProperty("--k", "0.95");
    return make("li", "", sample, make("small", "", words), span("", String(counts[how])));
  }));
}

/* --- pointing at a token --- */
const visible = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (c) => ({ "\n": "⏎", "\t": "⇥" })[c] ?? `U+${c.codePointAt(0).toString(16).padStart(4, "0").toUpperCase()}`).replace(/ /g, "␣");
function point(e) {
  const target = e.target instanceof Element ? e.target.closest(".text .t, .thought .t") : null, tip = $("tip");
  if (!target) { tip.hidden = true; return; }
  const view = views.get(target.closest("article")), step = view?.answer.steps[target.at[0]];
  if (!step) return;
  const [text, p, how] = step.tokens[target.at[1]];
  const bar = make("div", "bar", make("i", "")); bar.style.setProperty("--p", `${(p ?? 0) * 100}%`);
  tip.replaceChildren(make("code", "", visible(text)), ...(p == null ? [] : [bar, `${(p * 100).toFixed(p > 0.999 ? 2 : 1)} % · `]),
    `step ${step.number}, ${target.at[1] + 1} of ${step.tokens.length}`, make("br", ""), `${how}: ${HOW[how]}`);
  tip.hidden = false;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  target.setAttribute("aria-describedby", "tip");
  const at = target.getClientRects()[0], box = tip.getBoundingClientRect();
  const x = Math.max(8, Math.min(at.left + at.width / 2 - box.width / 2, innerWidth - box.width - 8));
  const y = at.top > box.height + 12 ? at.top - box.height - 6 : at.bottom + 6;
  tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}
for (const kind of ["pointerover", "focusin"]) $("talk").addEventListener(kind, point);
for (const kind of ["pointerleave", "focusout"]) $("talk").addEventListener(kind, () => { $("tip").hidden = true; });
$("scroll").addEventListener("scroll", () => { $("tip").hidden = true; sticks = atEnd(); }, { passive: true });

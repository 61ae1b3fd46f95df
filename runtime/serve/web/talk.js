/* --- the talk --- */
let sticks = true;
const atEnd = () => { const s = $("scroll"); return s.scrollHeight - s.scrollTop - s.clientHeight < 60; };
const follow = () => { if (sticks) $("scroll").scrollTop = $("scroll").scrollHeight; };
function drawTurn(t) {
  if (t.system) $("talk").append(make("div", "system", `system: ${t.system}`));
  $("talk").append(make("div", "user", t.user));
  const box = make("div", t.answers.length > 1 ? "turn pair" : "turn"), made = [];
  for (const a of t.answers) { const view = new View(a); views.set(view.root, view); made.push(view); box.append(view.root); }
  $("talk").append(box);
  if (t.answers.length > 1) document.body.classList.add("wide-talk");
  now = made[0];
  made.forEach((view) => view.drawNow());
  return { box, made };
}
function drawTalk() {
  $("talk").replaceChildren(); views.clear(); document.body.classList.remove("wide-talk");
  for (const t of talk) {
    for (const a of t.answers) if (a.finish == null && !a.error) a.finish = "interrupted";
    const { box } = drawTurn(t);
    drawRace(box, t);
  }
  $("empty").hidden = talk.length > 0; showSystem();
  if (!talk.length) { now = null; drawFigures(newAnswer({}, false)); }
  sticks = true;
  if (talk.length) follow(); else $("scroll").scrollTop = 0;
}
function drawRace(box, t) {
  const [a, b] = t.answers;
  if (!b || !a.timings || !b.timings) return;
  const most = Math.max(figures(a).speed ?? 0, figures(b).speed ?? 0) || 1;
  const lane = (x, name) => {
    const i = make("i", ""); i.style.setProperty("--share", `${(100 * (figures(x).speed ?? 0)) / most}%`);
    return make("div", `lane ${name}`, make("span", "", label(x.used ?? x.setting)), make("div", "track", i), make("span", "", `${round(figures(x).speed)} tokens/s`));
  };
  const times = (figures(a).speed ?? 0) / (figures(b).speed || Infinity);
  const same = a.text === b.text;
  const verdict = make("div", "verdict", make("b", "", `${times.toFixed(2)}×`), make("span", "", same ? "the same text" : "the texts differ"));
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches && a.steps.length && b.steps.length) {
    const again = make("button", "chip", "Replay together"); again.type = "button";
    again.addEventListener("click", () => replay(box, again)); verdict.append(again);
  }
  box.querySelector(".race")?.remove();
  const race = make("div", "race", lane(a, "now"), lane(b, "one"), verdict);
  race.setAttribute("role", "group"); race.setAttribute("aria-label", "Comparison");
  box.append(race);
}
function replay(box, button) {
  // Both again at the times at which their steps came, now side by side.
  button.disabled = true;
  const shown = [...box.querySelectorAll("article")].map((e) => views.get(e));
  let left = shown.length;
  for (const view of shown) {
    const whole = view.answer;
    view.answer = { ...whole, steps: [], finish: null, timings: null };
    view.clear(); view.drawNow();
    const begun = performance.now();
    const tick = () => {
      const passed = performance.now() - begun;
      while (view.answer.steps.length < whole.steps.length && whole.steps[view.answer.steps.length].at <= passed) {
        view.answer.steps.push(whole.steps[view.answer.steps.length]);
        view.answer.last = view.answer.steps.at(-1).at;
      }
      const isOver = view.answer.steps.length === whole.steps.length;
      if (isOver) { view.answer = whole; if (--left === 0) button.disabled = false; }
      view.drawNow();
      if (!isOver && view.root.isConnected) requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }
}
function history(t) {
  const messages = [];
  for (const turn of talk) {
    if (turn.system && messages[0]?.role !== "system") messages.unshift({ role: "system", content: turn.system });
    const said = turn === t ? null : textOf(turn.answers[0]);
    if (said === "") continue; // a question that got no answer
    messages.push({ role: "user", content: turn.user });
    if (turn === t) break;
    messages.push({ role: "assistant", content: said });
  }
  return messages;
}

/* --- a request that runs --- */
let running = null;
class Run {
  constructor(t, made, box) { this.chat = chat; this.turn = t; this.made = made; this.box = box; this.stopper = new AbortController(); this.id = null; this.steered = 0; }
  body(setting) {
    const body = { model: settings.model || undefined, messages: history(this.turn), stream: true, stream_options: { include_usage: true }, return_steps: true, max_tokens: settings.most };
    if (setting.profile) body.profile = setting.profile;
    else if (setting.exact) body.exact = true;
    else { body.tau = setting.tau; if (setting.metric !== "probability") body.metric = setting.metric; }
    return this.more(body);
  }
  more(body) {
    if (settings.masks) body.masks = /^\d+$/.test(settings.masks) ? Number(settings.masks) : settings.masks;
    if (!$("sampling").hidden) {
      if (settings.temperature > 0) { body.temperature = settings.temperature; body.seed = settings.seed; }
      if (settings.temperature > 0 && settings.top_p < 1) body.top_p = settings.top_p;
    }
    if (settings.tools.trim() && !$("tools-label").hidden) body.tools = parse(settings.tools);
    return body;
  }
  async answers() {
    for (const view of this.made) {
      this.view = view; this.id = null;
      await this.answer(view);
      if (leaves) return;
      if (this.stopper.signal.aborted) break;
    }
    for (const { answer: a } of this.made) if (a.finish == null && !a.error) a.finish = "cancelled";
    if (this.box.isConnected) now = this.made[0];
    this.made.forEach((view) => view.drawNow());
    drawRace(this.box, this.turn);
    follow();
  }
  async answer(view) {
    const a = view.answer, begun = performance.now();
    a.waits = false; a.opens = !isOpen(model());
    if (!a.isOther) Object.assign(a.setting, chosen());
    this.sent = JSON.stringify(control());
    now = this.made[0] === view || now?.answer.finish != null ? view : now;
    view.draw();
    try {
      const body = this.body(a.setting);
      if (a.isOther) body.cache_salt = "one token"; // what the other has just read must not make this one quicker
      const response = await ask("v1/chat/completions", body, this.stopper.signal);
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Error(chunk.error.message ?? "The server failed.");
        this.take(a, chunk, performance.now() - begun);
        view.draw(); saveChat(this.chat);
      }
      a.finish ??= "stop";
    } catch (error) {
      if (leaves) return; // a reload breaks it off; the page that comes says so
      if (error.name === "AbortError") a.finish = "cancelled";
      else {
        a.finish = "error";
        a.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
        if (error instanceof TypeError) meet(); // until it is there again
        if (error.status === 401 || error.status === 403) openSettings(error.message);
      }
    }
    if (view.due) { cancelAnimationFrame(view.due); view.due = 0; }
    view.drawNow(); saveChat(this.chat, true);
    const f = figures(a);
    $("told").textContent = a.error ? `Failed: ${a.error}` : `Answer ${a.finish === "cancelled" ? "stopped" : "complete"}: ${f.tokens} tokens, ${round(f.gain, 2)} tokens per forward.`;
  }
  take(a, chunk, at) {
    if (chunk.id && !this.id) { this.id = chunk.id; if (!a.isOther) this.steer(); }
    if (chunk.mars) a.used = { ...a.setting, ...chunk.mars };
    if (chunk.timings) a.timings = chunk.timings;
    if (chunk.usage) a.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const text = choice.delta?.content ?? "", thought = choice.delta?.reasoning_content ?? "";
    a.text += text;
    for (const c of choice.delta?.tool_calls ?? []) {
      const call = (a.calls[c.index ?? 0] ??= { name: "", arguments: "" });
      call.name += c.function?.name ?? ""; call.arguments += c.function?.arguments ?? "";
    }
    // A server that tells no steps: its text stands as it is.
    const steps = choice.steps ?? [...(thought ? [{ tokens: [{ text: thought, thinking: true }] }] : []), ...(text ? [{ tokens: [{ text }] }] : [])];
    for (const step of steps) {
      const isExact = step.tokens.some((t) => t.how === "verified");
      const tokens = step.tokens.map((t, i) => [String(t.text), t.p ?? null, howOf(t.how ?? "next", i, isExact), Boolean(t.thinking)]);
      if (!tokens.length) continue;
      if (!a.steps.length) a.first = at;
      a.last = at;
      a.steps.push({ number: a.steps.length + 1, at, tokens, ...(a.mark ? { mark: a.mark } : {}) });
      a.mark = "";
    }
    if (choice.finish_reason) a.finish = choice.finish_reason;
  }
  /* What the knobs say goes to the answer that runs; never more than one word on its way. */
  async steer() {
    const view = this.view;
    if (!this.id || this.isSteering || view?.answer.isOther || view?.answer.finish != null) return;
    const body = control(), wanted = JSON.stringify(body);
    if (wanted === this.sent) return;
    this.isSteering = true;
    try {
      await new Promise((done) => setTimeout(done, 40)); // a slider that is dragged says much
      const last = control();
      this.sent = JSON.stringify(last);
      await ask(`v1/mars/streams/${encodeURIComponent(this.id)}`, last, this.stopper.signal);
      view.answer.mark = label({ ...chosen(), profile: "" }); Object.assign(view.answer.setting, chosen());
    } catch (error) {
      if (error instanceof Refusal && error.status !== 404) { $("told").textContent = error.message; view.state.textContent = error.message; }
    } finally { this.isSteering = false; }
    this.steer();
  }
}
const chosen = () => ({ exact: settings.exact && !settings.profile, tau: settings.profile ? null : settings.tau, metric: settings.metric, profile: settings.profile });
const control = () => (settings.exact ? { exact: true } : { tau: settings.tau });
/* Each step has one ordinary prediction: at a tau its first token, in exact mode the one after the verified tokens. */
function howOf(how, i, isExact) {
  if (how === "forced" || how === "verified") return how;
  return i === 0 || isExact ? "next" : "accepted";
}
function isReady(text) {
  if (running || !text.trim()) return false;
  const isList = !settings.tools.trim() || Array.isArray(parse(settings.tools));
  if (!isList) openSettings("Tools are no JSON list.");
  return isList;
}
async function send(text) {
  if (!isReady(text)) return;
  const t = { user: text, system: talk.length ? "" : settings.system.trim(), answers: [newAnswer(chosen(), false)] };
  if (settings.pair) {
    const one = newAnswer({ exact: false, tau: isEntropy() ? 0 : 1, metric: settings.metric, profile: "" }, true);
    one.waits = true; t.answers.push(one);
  }
  talk.push(t); $("empty").hidden = true; sticks = true; showSystem();
  const { box, made } = drawTurn(t);
  running = new Run(t, made, box);
  showGo(); saveChat(running.chat, true); keep(session, "mars.chat", chat.id);
  try { await running.answers(); } finally {
    saveChat(running.chat, true); running = null; showGo();
    if (models.length > 1) meetModels(); // one may have been loaded, another one closed
  }
}
const stop = () => running?.stopper.abort();
function showGo() {
  const go = $("go");
  go.textContent = running ? "Stop" : "Send"; go.classList.toggle("stop", Boolean(running));
  go.disabled = !running && !$("say").value.trim();
}
function submit() {
  const text = $("say").value;
  if (!isReady(text)) return;
  $("say").value = ""; fit(); send(text);
}
function fit() { const e = $("say"); if (!CSS.supports("field-sizing", "content")) { e.style.height = "auto"; e.style.height = `${Math.min(e.scrollHeight, 176)}px`; } showGo(); }

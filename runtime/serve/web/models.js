/* --- the server; addresses are relative, so that the page works below a prefix --- */
class Refusal extends Error {
  constructor(status, message) { super(message); this.status = status; }
}
async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store", credentials: "omit",
    referrerPolicy: "no-referrer",
  });
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try { message = String((await answer.json()).error.message); } catch { /* not in OpenAI's form */ }
  const wait = answer.headers.get("Retry-After");
  if (wait && answer.status !== 401) message += ` (try again in ${wait} s)`;
  throw new Refusal(answer.status, message);
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // ":" is a ping
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
  throw new Error("The answer broke off: the connection to the server was lost.");
}

/* --- models --- */
let models = [];
const model = () => models.find((m) => m.id === settings.model);
async function meet() {
  const health = $("health");
  try {
    await ask("health");
    health.dataset.state = "ready"; health.firstChild.textContent = "ready";
  } catch (error) {
    const starts = error instanceof Refusal && error.status === 503;
    health.dataset.state = starts ? "" : "down"; health.firstChild.textContent = starts ? "starting" : "no server";
    setTimeout(meet, 2000);
    if (!(error instanceof Refusal)) return;
  }
  await meetModels();
}
async function meetModels() {
  try {
    const all = (await (await ask("v1/models")).json()).data ?? [];
    const bases = new Set(all.map((m) => m.id));
    models = all.filter((m) => { const at = m.id.lastIndexOf(":"); return at < 0 || !bases.has(m.id.slice(0, at)); });
    if (!model() && models.length) settings.model = models[0].id;
    const list = $("model"), options = models.map((m) => new Option(nameOf(m), m.id, false, m.id === settings.model));
    list.replaceChildren(...options);
    list.title = describe(model());
    showProfiles();
  } catch (error) {
    if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
      openSettings("This server wants an API key.");
    }
  }
}
const isOpen = (m) => (m?.mars?.state ?? "loaded") === "loaded";
const nameOf = (m) => (isOpen(m) ? m.id : `${m.id} (${{ unloaded: "not loaded" }[m.mars.state] ?? m.mars.state})`);
function describe(m) {
  const about = m?.mars ?? {};
  const parts = [about.precision, about.block && `block ${about.block}`, about.context && `context ${about.context}`];
  return parts.filter(Boolean).join(" · ");
}
const profileNames = (m) => (m?.mars?.profiles ?? []).map((p) => (typeof p === "string" ? p : String(p.name ?? "")));
function showProfiles() {
  const names = profileNames(model());
  if (models.length && !names.includes(settings.profile)) settings.profile = "";
  $("profiles").hidden = !names.length;
  $("profile").replaceChildren(new Option("by hand", ""), ...names.map((n) => new Option(n, n)));
  $("profile").value = settings.profile;
  const about = model()?.mars ?? {};
  $("sampling").hidden = about.sampling === false;
  $("tools-label").hidden = about.structured === false;
  showKnobs();
}

/* --- how fast, how sure --- */
const isEntropy = () => settings.metric === "entropy";
const isOneToken = (s) => !s.exact && !s.profile && (s.metric === "entropy" ? s.tau <= 0 : s.tau >= 1);
function label(s) {
  if (isOneToken(s)) return "one token";
  const how = s.exact ? "exact" : s.tau == null ? "" : `tau ${Number(s.tau).toFixed(2)}`;
  return [s.profile && `profile ${s.profile}`, how].filter(Boolean).join(", ");
}
function showKnobs() {
  const exact = settings.exact && !settings.profile;
  for (const [id, on] of [["exact", exact], ["free", !exact && !settings.profile]]) {
    $(id).setAttribute("aria-checked", String(on));
    $(id).tabIndex = on || (settings.profile && id === "exact") ? 0 : -1;
  }
  const slider = $("tau");
  slider.max = isEntropy() ? 3 : 1; slider.value = settings.tau;
  $("tau-label").classList.toggle("off", exact || Boolean(settings.profile));
  $("tau-name").textContent = isEntropy() ? "tau (nats, at most)" : "tau";
  $("tau-value").textContent = settings.tau.toFixed(2);
  slider.setAttribute("aria-valuetext", `${settings.tau.toFixed(2)}${isOneToken({ ...settings, exact: false, profile: "" }) ? ", one token a step" : ""}${exact ? ", exact mode is on" : ""}`);
  $("pair").setAttribute("aria-pressed", String(settings.pair));
  $("shade").setAttribute("aria-pressed", String(settings.shade));
  document.body.classList.toggle("plain-text", !settings.shade); showSystem();
}
function turn(change) {
  Object.assign(settings, change);
  if ("tau" in change || "exact" in change) { settings.profile = ""; $("profile").value = ""; }
  saveSettings(); showKnobs();
  if (running) running.steer();
}

/* --- theme, settings --- */
const dark = matchMedia("(prefers-color-scheme: dark)");
function showTheme() {
  document.documentElement.dataset.theme = settings.theme || (dark.matches ? "dark" : "light");
  const words = { "": "as the system", light: "light", dark: "dark" }[settings.theme];
  $("theme").setAttribute("aria-label", `Colours: ${words}`); $("theme").title = `Colours: ${words}`;
}
dark.addEventListener("change", showTheme);
$("theme").addEventListener("click", () => {
  const other = dark.matches ? "light" : "dark", same = dark.matches ? "dark" : "light";
  settings.theme = { "": other, [other]: same, [same]: "" }[settings.theme]; saveSettings(); showTheme();
});
const FIELDS = ["system", "most", "metric", "masks", "temperature", "top_p", "seed", "tools"];
function showSystem() {
  const system = talk.length ? talk[0].system : settings.system.trim();
  const words = system ? `System: ${system}` : "No system message";
  $("system-now").textContent = words; $("system-now").title = `${words}${talk.length ? " (of this chat)" : ""}`;
}
function openSettings(note) {
  for (const name of FIELDS) $(name).value = settings[name];
  $("key").value = key; $("settings-note").hidden = !note; $("settings-note").textContent = note ?? "";
  if (!$("settings").open) $("settings").showModal();
  if (note) $("key").focus();
}
function takeSettings() {
  const before = key;
  for (const name of FIELDS) {
    const isNumber = typeof DEFAULTS[name] === "number", value = isNumber ? Number($(name).value) : $(name).value;
    settings[name] = isNumber && !Number.isFinite(value) ? DEFAULTS[name] : value;
  }
  settings.most = Math.max(1, Math.round(settings.most) || DEFAULTS.most);
  if (!isEntropy() && settings.tau > 1) settings.tau = DEFAULTS.tau;
  key = $("key").value.trim(); keep(session, "mars.key", key);
  saveSettings(); showKnobs();
  if (key !== before || !models.length) meet();
}
$("settings-form").addEventListener("submit", takeSettings); // before the dialog's close, which comes later
$("settings").addEventListener("close", () => { takeSettings(); $("say").focus(); });

/* --- hands --- */
$("form").addEventListener("submit", (e) => { e.preventDefault(); if (running) stop(); else submit(); });
$("say").addEventListener("input", fit);
$("say").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); if (!running) submit(); }
});
$("tau").addEventListener("input", (e) => turn({ tau: Number(e.target.value), exact: false }));
$("exact").addEventListener("click", () => turn({ exact: true }));
$("free").addEventListener("click", () => turn({ exact: false }));
document.querySelector(".switch").addEventListener("keydown", (e) => {
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(e.key)) return;
  e.preventDefault(); turn({ exact: !settings.exact }); $(settings.exact ? "exact" : "free").focus();
});
$("pair").addEventListener("click", () => { settings.pair = !settings.pair; saveSettings(); showKnobs(); });
$("shade").addEventListener("click", () => { settings.shade = !settings.shade; saveSettings(); showKnobs(); });
$("model").addEventListener("change", (e) => { settings.model = e.target.value; e.target.title = describe(model()); saveSettings(); showProfiles(); });
$("profile").addEventListener("change", (e) => { settings.profile = e.target.value; saveSettings(); showKnobs(); });
for (const id of ["new", "chats-new"]) $(id).addEventListener("click", startChat);
$("open-chats").addEventListener("click", openChats);
$("chats-find").addEventListener("input", drawChats);
$("chats-find").addEventListener("keydown", (e) => {
  if (e.key === "Enter") { e.preventDefault(); $("chats-list").querySelector(".open")?.click(); }
});
$("open-settings").addEventListener("click", () => openSettings());
$("system-now").addEventListener("click", () => { openSettings(); $("system").focus(); });
document.addEventListener("keydown", (e) => {
  if (document.querySelector("dialog[open]") || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "Escape") { if (!$("tip").hidden) $("tip").hidden = true; stop(); return; }
  if (/^(TEXTAREA|INPUT|SELECT)$/.test(e.target.tagName) && e.target.type !== "range") return;
  if (e.key === "/") { e.preventDefault(); $("say").focus(); }
  if (e.key === "e" || e.key === "E") turn({ exact: !settings.exact });
  if (e.key === "c" || e.key === "C") openChats();
  if (e.key === "[" || e.key === "]") {
    const tau = Math.min(Number($("tau").max), Math.max(0, settings.tau + (e.key === "[" ? -0.05 : 0.05)));
    turn({ tau: Math.round(tau * 100) / 100, exact: false });
  }
});
let leaves = false;
addEventListener("beforeunload", () => { leaves = true; });
addEventListener("pageshow", () => { leaves = false; });
addEventListener("pagehide", () => { leaves = true; if (running) saveChat(running.chat, true); });
for (const [system, text] of TRIES) {
  const b = make("button", "", text, ...(system ? [make("small", "", `system: ${system}`)] : [])); b.type = "button";
  b.addEventListener("click", () => { if (!talk.length) { settings.system = system; saveSettings(); } send(text); });
  $("tries").append(b);
}
showTheme(); showKnobs(); openChat(chat);
fit(); meet();

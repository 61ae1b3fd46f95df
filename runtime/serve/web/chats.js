"use strict";
const $ = (id) => document.getElementById(id);
const HOW = {
  next: "the ordinary next token", accepted: "sure enough for tau", verified: "guessed, and the next step agreed",
  forced: "the grammar left no choice",
};
const TRIES = [
  ["Reply with tool calls.", "turn on the kitchen light and set a timer for 12 minutes"],
  ["", "Tom has 12 apples. He buys 5 more and gives 4 away. How many apples are left?"],
  ["", "What is the capital of France?"],
];
const DEFAULTS = {
  exact: true, tau: 0.95, pair: false, shade: true, model: "", profile: "", system: "", most: 256, metric: "probability",
  masks: "", temperature: 0, top_p: 1, seed: 0, tools: "", theme: "",
};

/* --- what the browser keeps: settings and chats for good, the key and which chat is open for this tab --- */
const storage = (name) => { try { return window[name]; } catch { return null; } }; // blocked: nothing is kept
const local = storage("localStorage"), session = storage("sessionStorage");
const stored = (place, name, otherwise) => {
  try { return JSON.parse(place.getItem(name)) ?? otherwise; } catch { return otherwise; }
};
const keep = (place, name, value) => {
  try { place.setItem(name, JSON.stringify(value)); return true; } catch { return false; }
};
const forget = (place, name) => { try { place.removeItem(name); } catch { /* blocked */ } };
const settings = { ...DEFAULTS };
for (const [name, value] of Object.entries(stored(local, "mars.settings", {}))) {
  if (name in DEFAULTS && typeof value === typeof DEFAULTS[name]) settings[name] = value;
}
let key = String(stored(session, "mars.key", ""));
const saveSettings = () => keep(local, "mars.settings", settings);

/* --- chats: "mars.chats" lists them, newest first; each is "mars.chat.ID". `held` has those the browser refuses --- */
const MOST_CHATS = 50, MOST_TITLE = 60;
const held = new Map();
let heldList = [];
const newChat = () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2, 6), talk: [] });
const chatName = (id) => `mars.chat.${id}`;
const isChat = (c) => typeof c?.id === "string" && Array.isArray(c.talk);
const readChat = (id) => [stored(local, chatName(id), null), held.get(id)].find(isChat);
function listChats() {
  const list = stored(local, "mars.chats", heldList);
  return Array.isArray(list) ? list.filter((c) => typeof c?.id === "string") : [];
}
const titleOf = (c) => [...c.talk[0].user.trim().split("\n")[0]].slice(0, MOST_TITLE).join("");
function write(name, value, id) {
  while (!keep(local, name, value)) if (!makeRoom(id)) { forget(local, name); return false; }
  return true;
}
/* Texts are worth more than the steps of their tokens; the oldest chats lose theirs first, then go. */
function makeRoom(id) {
  const others = listChats().map((c) => c.id).filter((other) => other !== id && stored(local, chatName(other), null)).reverse();
  for (const other of others) {
    const c = readChat(other), name = chatName(other);
    if (!c?.talk.some((t) => t.answers.some(hasSteps))) continue;
    c.talk.forEach((t) => { t.answers = t.answers.map(slim); });
    if (!keep(local, name, c)) forget(local, name);
    return true;
  }
  if (others.length) forget(local, chatName(others[0]));
  return others.length > 0;
}
let saveTimer = 0;
function saveChat(c, now) {
  if (!now) { saveTimer ||= setTimeout(() => saveChat(c, true), 400); return; }
  clearTimeout(saveTimer); saveTimer = 0;
  if (!c.talk.length || c.isDeleted) return;
  held.set(c.id, c);
  const slimmed = { ...c, talk: [...c.talk] };
  let isKept = write(chatName(c.id), c, c.id);
  for (let i = 0; !isKept && i < c.talk.length; i++) {
    slimmed.talk[i] = { ...c.talk[i], answers: c.talk[i].answers.map(slim) };
    isKept = keep(local, chatName(c.id), slimmed);
  }
  const before = listChats(), named = before.find((other) => other.id === c.id && other.isNamed);
  const list = [{ title: titleOf(c), ...named, id: c.id, at: Date.now() }, ...before.filter((other) => other.id !== c.id)];
  for (const { id } of list.splice(MOST_CHATS)) { forget(local, chatName(id)); held.delete(id); }
  heldList = list;
  write("mars.chats", list, c.id);
}
function deleteChat(id) {
  heldList = listChats().filter((c) => c.id !== id);
  for (const c of [held.get(id), chat]) if (c?.id === id) c.isDeleted = true;
  held.delete(id); forget(local, chatName(id));
  write("mars.chats", heldList, id);
}
function renameChat(id, name) {
  const title = [...name.trim()].slice(0, MOST_TITLE).join(""), first = titleOf(readChat(id));
  heldList = listChats().map((c) => (c.id === id ? { ...c, title: title || first, isNamed: Boolean(title) } : c));
  write("mars.chats", heldList, id);
}
let chat = readChat(stored(session, "mars.chat", "")) ?? newChat();
let talk = chat.talk;
function openChat(c) {
  stop();
  chat = c; talk = c.talk; keep(session, "mars.chat", c.id);
  try { drawTalk(); } catch { chat = newChat(); talk = chat.talk; drawTalk(); } // what another version kept
}
/* The title or any text of a chat has these words. */
function isFound(c, title, words) {
  const texts = [title, ...c.talk.flatMap((t) => [t.user, ...t.answers.map(textOf)])].map((text) => String(text).toLowerCase());
  return texts.some((text) => text.includes(words));
}
function drawChats() {
  const words = $("chats-find").value.trim().toLowerCase(), all = listChats().filter(({ id }) => readChat(id));
  const list = words ? all.filter(({ id, title }) => isFound(readChat(id), title, words)) : all;
  $("chats-find").hidden = !all.length;
  $("chats-note").textContent = words && !list.length ? "No chat has this text." : all.length ? `Kept in this browser only, the newest ${MOST_CHATS} at most.` : "No chats yet. They are kept in this browser only.";
  $("chats-list").replaceChildren(...list.map(({ id, title, at }) => {
    const open = make("button", "open", String(title)), name = make("button", "icon", "✎"), gone = make("button", "icon", "✕"), when = make("time", "", new Date(at).toLocaleDateString());
    open.type = name.type = gone.type = "button"; open.title = String(title); open.dir = "auto";
    if (id === chat.id) open.setAttribute("aria-current", "true");
    name.setAttribute("aria-label", `Rename chat: ${title}`); name.title = "Rename";
    name.addEventListener("click", () => {
      const given = prompt("Name of the chat (empty: its first line)", title);
      if (given !== null) { renameChat(id, given); drawChats(); }
      $("chats-list").children[list.findIndex((c) => c.id === id)]?.querySelector(".open").focus();
    });
    gone.setAttribute("aria-label", `Delete chat: ${title}`); gone.title = "Delete";
    open.addEventListener("click", () => { $("chats").close(); if (id !== chat.id) openChat(readChat(id) ?? newChat()); });
    gone.addEventListener("click", () => {
      if (!confirm(`Delete the chat "${title}"?`)) return;
      deleteChat(id);
      if (id === chat.id) openChat(newChat());
      drawChats(); ($("chats-list").querySelector("button") ?? $("chats-new")).focus();
    });
    return make("li", "", open, when, name, gone);
  }));
}
function openChats() { $("chats-find").value = ""; drawChats(); $("chats").showModal(); $("chats-list").querySelector("[aria-current]")?.focus(); }
const startChat = () => { $("chats").close(); openChat(newChat()); $("say").focus(); };

// The page: what the visitor does, and what is shown of it. Names and messages only ever become text, never HTML.

import { download } from "./csv.js";
import { showLooked } from "./curious.js";
import { droppedFiles, pickedFiles } from "./files.js";
import { about, gathered, post } from "./server.js";
import * as state from "./state.js";
import { thumbnail } from "./thumbnails.js";

const COLOURS = ["#1F83C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F"];
const byId = (id) => document.getElementById(id);
const copyOf = (id) => byId(id).content.firstElementChild.cloneNode(true);
const tiles = new Map(); // picture id -> its element
const cards = new Map(); // class id -> its element
let limits = null;
let running = null; // the request under way
let labelledBefore = false;
let changed = false; // since the last labelling

const colourOf = (id) => COLOURS[state.classes.findIndex((one) => one.id === id) % COLOURS.length];
const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

function say(text) {
  byId("status").textContent = text;
}

function complain(text) {
  byId("problem-text").textContent = text;
  byId("problem").hidden = !text;
}

// ---- classes

function newClass(focus) {
  if (limits && state.classes.length >= limits.classes) {
    complain(`${limits.classes} classes are the limit.`);
    return null;
  }
  const added = state.addClass();
  const card = copyOf("class-template");
  const name = card.querySelector(".class-name");
  name.placeholder = added.fallback;
  name.addEventListener("input", () => {
    added.name = name.value;
    touched();
  });
  card.querySelector(".remove-class").addEventListener("click", () => dropClass(added.id));
  takesFiles(card, added.id);
  cards.set(added.id, card);
  byId("classes").append(card);
  touched();
  if (focus) name.focus();
  return added;
}

function dropClass(id) {
  for (const picture of state.examplesOf(id)) if (picture.home === id) dropPicture(picture);
  state.removeClass(id);
  cards.get(id).remove();
  cards.delete(id);
  touched();
  byId("add-class").focus();
}

// ---- pictures

function addFiles(found, home) {
  const room = limits.pictures - state.pictures.size;
  const tooMany = found.length > room;
  if (tooMany) {
    complain(`${limits.pictures} pictures are the limit: ${found.length - room} of these ${found.length} were left out.`);
  }
  for (const { file, name } of found.slice(0, room)) {
    const picture = state.addPicture(file, name, home);
    if (file.size > limits.file_bytes) {
      picture.error = `${name}: it has ${megabytes(file.size)}, more than ${megabytes(limits.file_bytes)}: shrink it first`;
    }
    showNew(picture);
  }
  if (found.length > 0) touched();
}

const megabytes = (bytes) => `${Math.round(bytes / 1e5) / 10} MB`;

function showNew(picture) {
  const tile = copyOf(picture.home === state.PILE ? "pile-template" : "example-template");
  const [image, blank, remove] = ["img", ".no-picture", ".remove"].map((what) => tile.querySelector(what));
  tile.title = picture.name;
  remove.setAttribute("aria-label", `Remove ${picture.name}`);
  remove.addEventListener("click", () => {
    const next = tile.nextElementSibling ?? tile.previousElementSibling;
    const home = tile.parentElement.parentElement;
    dropPicture(picture);
    touched();
    (next?.querySelector(".remove") ?? home.querySelector(".add input")).focus(); // the keyboard stays where it was
  });
  if (picture.home === state.PILE) {
    tile.querySelector(".name").textContent = picture.name;
    const select = tile.querySelector(".correct");
    select.setAttribute("aria-label", `Label of ${picture.name}`);
    select.addEventListener("change", () => {
      picture.said = select.value || null;
      touched();
    });
  }
  tiles.set(picture.id, tile);
  listOf(picture).append(tile);
  thumbnail(picture.file, limits.pixels).then(
    (address) => {
      if (!state.pictures.has(picture.id)) return URL.revokeObjectURL(address); // removed in the meantime
      picture.thumbnail = image.src = address;
      image.alt = picture.name;
      image.hidden = false;
      blank.hidden = true;
    },
    () => {}, // it may still be a picture that the server can read
  );
}

const listOf = (picture) =>
  picture.home === state.PILE ? byId("pile-pictures") : cards.get(picture.home).querySelector(".examples");

function dropPicture(picture) {
  if (picture.thumbnail) URL.revokeObjectURL(picture.thumbnail);
  state.pictures.delete(picture.id);
  tiles.get(picture.id).remove();
  tiles.delete(picture.id);
}

// An element that files can be dropped on, with an input to pick them.
function takesFiles(element, home) {
  const input = element.querySelector(".add input");
  input.addEventListener("change", () => {
    addFiles(pickedFiles(input.files), home);
    input.value = ""; // so that the same file can be picked again
  });
  const mark = (over) => (event) => {
    event.preventDefault();
    element.classList.toggle("over", over);
  };
  element.addEventListener("dragover", mark(true));
  element.addEventListener("dragleave", mark(false));
  element.addEventListener("drop", async (event) => {
    mark(false)(event);
    try {
      const { found, folder } = await droppedFiles(event.dataTransfer);
      const ofClass = state.classes.find((one) => one.id === home);
      if (folder && ofClass && !ofClass.name) {
        ofClass.name = cards.get(home).querySelector(".class-name").value = folder.slice(0, 80);
      }
      addFiles(found, home);
    } catch (error) {
      complain(`What was dropped cannot be read: ${error.message}`);
    }
  });
}

function pasted(event) {
  const files = [...event.clipboardData.files];
  if (files.length === 0) return;
  event.preventDefault();
  const card = document.activeElement.closest(".class");
  const home = [...cards].find(([, element]) => element === card)?.[0] ?? state.PILE;
  addFiles(pickedFiles(files), home);
}

// ---- showing the state

// Something is other than it was when the pile was last labelled.
function touched() {
  changed = true;
  show();
}

function show() {
  for (const one of state.classes) showClass(one);
  for (const picture of state.pictures.values()) showPicture(picture);
  const pile = state.inPile();
  const bad = pile.filter((picture) => picture.error).length;
  const said = pile.filter((picture) => picture.said).length;
  byId("pile-count").textContent = [
    counted(pile.length, "picture"),
    said ? counted(said, "correction") : "",
    bad ? `${bad} cannot be read` : "",
  ].filter(Boolean).join(", ");
  byId("results-tools").hidden = !pile.some((picture) => picture.ranking || picture.said);
  byId("empty-pile").hidden = pile.length === 0;
  byId("pile").classList.toggle("stale", labelledBefore && changed);
  byId("go").textContent = labelledBefore ? "Label again" : "Label the pile";
  if (running || !limits) return;
  const hindrance = state.hindrance(limits);
  byId("go").disabled = hindrance !== null;
  byId("look").disabled = hindrance !== null;
  if (changed) say(hindrance ?? (labelledBefore ? "Something has changed: label again." : "Ready."));
}

function showClass(one) {
  const card = cards.get(one.id);
  const name = state.nameOf(one.id);
  card.style.setProperty("--swatch", colourOf(one.id));
  card.querySelector(".class-name").setAttribute("aria-label", `Name of class ${state.classes.indexOf(one) + 1}`);
  card.querySelector(".remove-class").setAttribute("aria-label", `Remove class ${name}`);
  card.querySelector(".add input").setAttribute("aria-label", `Add pictures to ${name}`);
  const fromPile = state.examplesOf(one.id).filter((picture) => picture.said).length;
  card.querySelector(".from-pile").textContent = fromPile ? `and ${fromPile} from the pile, as you said` : "";
}

function showPicture(picture) {
  const tile = tiles.get(picture.id);
  tile.classList.toggle("bad", Boolean(picture.error));
  tile.querySelector(".error").textContent = picture.error ?? "";
  if (picture.home !== state.PILE) return;
  tile.classList.toggle("corrected", Boolean(picture.said));
  const verdict = tile.querySelector(".verdict");
  verdict.hidden = !picture.said && !picture.ranking;
  if (verdict.hidden) return;
  const [label, sure] = picture.said ? [picture.said, 1] : picture.ranking[0];
  const percent = Math.round(100 * sure);
  tile.style.setProperty("--swatch", colourOf(label));
  tile.querySelector(".label").textContent = state.nameOf(label);
  tile.querySelector(".percent").textContent = picture.said ? "you said so" : `${percent} %`;
  const meter = tile.querySelector(".confidence");
  meter.setAttribute("aria-valuenow", percent);
  meter.setAttribute("aria-label", `How sure of ${state.nameOf(label)}`);
  meter.hidden = Boolean(picture.said);
  meter.firstElementChild.style.width = `${100 * sure}%`;
  const second = picture.said ? null : picture.ranking[1];
  tile.querySelector(".second").textContent = second
    ? `else ${state.nameOf(second[0])}, ${Math.round(100 * second[1])} %`
    : "";
  const select = tile.querySelector(".correct");
  const options = [["", picture.said ? "take that back" : "correct it …"]];
  options.push(...state.classes.map((one) => [one.id, `it is ${state.nameOf(one.id)}`]));
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = picture.said ?? "";
}

function sort() {
  const how = byId("sort").value;
  const sure = (picture) => (picture.said ? 2 : picture.ranking ? picture.ranking[0][1] : -1);
  const label = (picture) => picture.said ?? picture.ranking?.[0][0];
  const place = (picture) => state.classes.findIndex((one) => one.id === label(picture));
  const order = {
    added: () => 0,
    unsure: (a, b) => sure(a) - sure(b),
    sure: (a, b) => sure(b) - sure(a),
    label: (a, b) => place(a) - place(b) || sure(b) - sure(a),
  }[how];
  byId("pile-pictures").append(...state.inPile().sort(order).map((picture) => tiles.get(picture.id)));
}

// ---- asking the server

async function ask(path, doing, use) {
  if (running) return;
  complain("");
  const sent = gathered();
  const total = sent.labelled.length + sent.pile.length;
  const since = Date.now();
  let share = 0;
  const tell = () => {
    const seconds = Math.round((Date.now() - since) / 1000);
    say(share < 1 ? `Sending ${counted(total, "picture")} …` : `${doing} ${counted(total, "picture")}, ${seconds} s …`);
  };
  running = post(path, sent.form, (part) => {
    share = part;
    if (part < 1) byId("progress").value = part;
    else byId("progress").removeAttribute("value"); // from here on nobody knows how long
    tell();
  });
  const clock = setInterval(tell, 1000);
  busy(true);
  tell();
  try {
    use(await running.answer, sent);
  } catch (error) {
    if (error.name === "AbortError") say("Cancelled.");
    else {
      error.answer?.labelled?.forEach((one, place) => (sent.labelled[place].error = one.error));
      complain(sentence(error.message));
      say("That did not work.");
    }
  } finally {
    running = null;
    clearInterval(clock);
    busy(false);
    show();
  }
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

function busy(on) {
  for (const id of ["progress", "cancel"]) byId(id).hidden = !on;
  byId("progress").value = 0;
  // What was sent must be what the answer is put beside.
  for (const part of document.querySelectorAll("main button, main input, main select, #go")) part.disabled = on;
  (on ? byId("cancel") : byId("go")).focus({ preventScroll: true });
}

function labelled(answer, sent) {
  const ids = new Map(answer.classes.map((name, place) => [name, sent.classIds[place]]));
  answer.labelled.forEach((one, place) => (sent.labelled[place].error = one.error));
  answer.pile.forEach((one, place) => {
    sent.pile[place].error = one.error;
    sent.pile[place].ranking = one.ranking?.map(([name, share]) => [ids.get(name), share]) ?? null;
  });
  labelledBefore = true;
  changed = false;
  showWeights([answer.weights]);
  sort();
  const bad = [...answer.labelled, ...answer.pile].filter((one) => one.error).length;
  const done = answer.pile.filter((one) => one.ranking).length;
  say(`${counted(done, "picture")} labelled${bad ? `, ${bad} cannot be read` : ""}.`);
}

function looked(answer, sent) {
  const shown = answer.pictures.map((one) => {
    const picture = sent[one.from][one.place];
    const isExample = one.from === "labelled";
    const own = isExample ? (picture.said ?? picture.home) : picture.ranking?.[0][0];
    return { ...one, name: picture.name, classId: own, isExample };
  });
  showLooked(byId("looked"), shown.filter((one) => one.classId), answer, colourOf);
  say("Shown below.");
  byId("looked").scrollIntoView({ block: "nearest" });
}

// Pictures of the pile are shown in the colour of their label, so they need one first.
async function look() {
  if (!labelledBefore || changed) await ask("api/label", "Labelling", labelled);
  if (labelledBefore && !changed) await ask("api/look", "Looking at", looked);
}

function showWeights(all) {
  const code = (text) => Object.assign(document.createElement("code"), { textContent: text });
  const parts = all.flatMap((one) => [code(one.name), ` (${one.described})`, " or "]).slice(0, -1);
  parts.unshift(all.length > 1 ? "The weights, by how many examples there are: " : "The weights: ", "");
  parts.push(`. Pictures are scaled to ${all[0].size}x${all[0].size} pixels. `);
  if (all[0].comes_along) {
    parts.push("They were trained on photographs of everyday things and animals; drawings and scans are strange to them. ");
    parts.push("How accurate they were measured to be, and on what: ", code(`trident weights ${all[0].name}`), ".");
  }
  byId("weights").replaceChildren(...parts);
}

// ---- the start

byId("add-class").addEventListener("click", () => newClass(true));
byId("dismiss").addEventListener("click", () => complain(""));
byId("go").addEventListener("click", () => ask("api/label", "Labelling", labelled));
byId("look").addEventListener("click", look);
byId("cancel").addEventListener("click", () => running?.abort());
byId("sort").addEventListener("change", sort);
byId("download").addEventListener("click", download);
byId("empty-pile").addEventListener("click", () => {
  state.inPile().forEach(dropPicture);
  touched();
  byId("pile-files").focus();
});
takesFiles(byId("pile"), state.PILE);
document.addEventListener("paste", pasted);
// A picture dropped beside its place must not make the browser leave the page.
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());

try {
  const found = await about();
  limits = found.limits;
  showWeights(found.weights);
  byId("limits").textContent =
    `Limits: ${limits.pictures} pictures, ${limits.labelled} of them examples, ${limits.classes} classes, ` +
    `${megabytes(limits.file_bytes)} and ${Math.round(limits.pixels / 1e5) / 10} million pixels a picture.`;
  newClass(false);
  newClass(false);
} catch (error) {
  say("");
  complain(`The page could not be set up: ${error.message}`);
}

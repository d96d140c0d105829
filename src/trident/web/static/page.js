// The page: handles the visitor's actions.

import { download } from "./csv.js";
import { showLooked } from "./latents.js";
import { droppedFiles, pickedFiles } from "./files.js";
import { about, gathered, post } from "./server.js";
import { byId, cards, complain, copyOf, counted, megabytes, say, tiles } from "./show.js";
import { showClass, showPicture, showWeights, sort } from "./show.js";
import * as state from "./state.js";
import { thumbnail } from "./thumbnails.js";

let limits = null;
let running = null; // the current request
let labelledBefore = false;
let changed = false; // since the last labelling

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
    (next?.querySelector(".remove") ?? home.querySelector(".add input")).focus(); // keep the keyboard focus nearby
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
    () => {}, // the server may still be able to read it
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
      complain(`The dropped files cannot be read: ${error.message}`);
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

// Something changed after the last labelling.
function touched() {
  changed = true;
  show();
  if (limits && !running) say(state.hindrance(limits) ?? (labelledBefore ? "You changed something: label again." : "Ready."));
}

function show() {
  for (const one of state.classes) showClass(one);
  for (const picture of state.pictures.values()) showPicture(picture);
  const pile = state.inPile();
  const bad = pile.filter((picture) => picture.error).length;
  const said = pile.filter((picture) => picture.said).length;
  const none = pile.filter((picture) => state.labelOf(picture) === state.NONE).length;
  byId("pile-count").textContent = [
    counted(pile.length, "picture"),
    none ? `${none} in none of the classes` : "",
    said ? counted(said, "correction") : "",
    bad ? `${bad} cannot be read` : "",
  ].filter(Boolean).join(", ");
  byId("results-tools").hidden = !pile.some(state.labelOf);
  byId("empty-pile").hidden = pile.length === 0;
  byId("pile").classList.toggle("stale", labelledBefore && changed);
  byId("go").textContent = labelledBefore ? "Label again" : "Label the pile";
  if (running || !limits) return;
  const hindrance = state.hindrance(limits);
  byId("go").disabled = hindrance !== null;
  byId("look").disabled = hindrance !== null;
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
    else byId("progress").removeAttribute("value"); // the remaining time is unknown
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
      complain(error.message);
      say("That did not work.");
    }
  } finally {
    running = null;
    clearInterval(clock);
    busy(false);
    show();
  }
}

function busy(on) {
  for (const id of ["progress", "cancel"]) byId(id).hidden = !on;
  byId("progress").value = 0;
  // No changes while waiting: the answer must fit what was sent.
  for (const part of document.querySelectorAll("main button, main input, main select, #go")) part.disabled = on;
  (on ? byId("cancel") : byId("go")).focus({ preventScroll: true });
}

function labelled(answer, sent) {
  const ids = new Map(answer.classes.map((name, place) => [name, sent.classIds[place]]));
  answer.labelled.forEach((one, place) => (sent.labelled[place].error = one.error));
  answer.pile.forEach((one, place) => {
    const picture = sent.pile[place];
    picture.error = one.error;
    picture.ranking = one.ranking?.map(([name, share]) => [ids.get(name), share]) ?? null;
    picture.atypical = one.none_of_these;
    picture.typicality = one.typicality;
    picture.mark = one.picture;
  });
  labelledBefore = true;
  changed = false;
  showWeights([answer.weights]);
  sort();
  const bad = [...answer.labelled, ...answer.pile].filter((one) => one.error).length;
  const done = answer.pile.filter((one) => one.ranking).length;
  const none = answer.pile.filter((one) => one.none_of_these).length;
  const more = [none && `, ${none} in none of the classes`, bad && `, ${bad} cannot be read`].filter(Boolean).join("");
  const expected = answer.expected ? ` Judged by your examples, ${answer.expected}.` : "";
  say(`${counted(done, "picture")} labelled${more}.${expected}`);
}

function looked(answer, sent) {
  const shown = answer.pictures.map((one) => {
    const picture = sent[one.from][one.place];
    const isExample = one.from === "labelled";
    const own = isExample ? (picture.said ?? picture.home) : picture.ranking?.[0][0];
    return { ...one, name: picture.name, classId: own, isExample };
  });
  showLooked(byId("looked"), shown.filter((one) => one.classId), answer);
  say("Done.");
  byId("looked").scrollIntoView({ block: "nearest" });
}

// Pictures are shown in the colour of their label, so they are labelled first.
async function look() {
  if (!labelledBefore || changed) await ask("api/label", "Labelling", labelled);
  if (labelledBefore && !changed) await ask("api/look", "Analysing", looked);
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
// Only this tab has the pictures and the corrections: ask before they are lost.
window.addEventListener("beforeunload", (event) => {
  if (state.pictures.size > 0) event.preventDefault();
});
// Dropping a picture in the wrong place must not make the browser leave the page.
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());

try {
  const found = await about();
  limits = found.limits;
  byId("hint").textContent = found.hint ? `For whoever runs this server: ${found.hint}.` : "";
  showWeights(found.weights);
  byId("limits").textContent =
    `Limits: ${limits.pictures} pictures, ${limits.labelled} of them examples, ${limits.classes} classes, ` +
    `${megabytes(limits.file_bytes)} and ${Math.round(limits.pixels / 1e5) / 10} million pixels a picture; ` +
    "JPEG, PNG, WebP, GIF, BMP, TIFF and PPM work, HEIC does not.";
  newClass(false);
  newClass(false);
} catch (error) {
  say("");
  complain(`The page could not be loaded: ${error.message}`);
}

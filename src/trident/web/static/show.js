// Shows the state. Names and messages are inserted as text, never as HTML.

import * as state from "./state.js";

const COLOURS = ["#1F83C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F"];
export const tiles = new Map(); // picture id -> its element
export const cards = new Map(); // class id -> its element

export const byId = (id) => document.getElementById(id);
export const copyOf = (id) => byId(id).content.firstElementChild.cloneNode(true);
export const placeOf = (id) => state.classes.findIndex((one) => one.id === id);
export const colourOf = (id) => (id === state.NONE ? "transparent" : COLOURS[placeOf(id) % COLOURS.length]);

// ---- words

export const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
export const megabytes = (bytes) => `${Math.round(bytes / 1e5) / 10} MB`;
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

// Never 0 % or 100 %. The space does not break.
function percent(share) {
  const whole = Math.round(100 * share);
  return `${share > 0.995 ? ">99" : share < 0.005 ? "<1" : whole}\u00a0%`;
}

export function say(text) {
  byId("status").textContent = text;
}

export function complain(text) {
  byId("problem-text").textContent = text && sentence(text);
  byId("problem").hidden = !text;
}

// ---- classes and pictures

export function showClass(one) {
  const card = cards.get(one.id);
  const name = state.nameOf(one.id);
  card.style.setProperty("--swatch", colourOf(one.id));
  card.querySelector(".class-name").setAttribute("aria-label", `Name of class ${state.classes.indexOf(one) + 1}`);
  card.querySelector(".remove-class").setAttribute("aria-label", `Remove class ${name}`);
  card.querySelector(".add input").setAttribute("aria-label", `Add pictures to ${name}`);
  const fromPile = state.examplesOf(one.id).filter((picture) => picture.said).length;
  card.querySelector(".from-pile").textContent = fromPile ? `and ${fromPile} from the pile, labelled by you` : "";
}

export function showPicture(picture) {
  const tile = tiles.get(picture.id);
  tile.classList.toggle("bad", Boolean(picture.error));
  tile.querySelector(".error").textContent = picture.error ?? "";
  if (picture.home !== state.PILE) return;
  const label = state.labelOf(picture);
  tile.classList.toggle("corrected", Boolean(picture.said));
  tile.classList.toggle("none", label === state.NONE);
  const verdict = tile.querySelector(".verdict");
  verdict.hidden = !label;
  if (verdict.hidden) return;
  tile.style.setProperty("--swatch", colourOf(label));
  tile.querySelector(".label").textContent = state.nameOf(label);
  showHowSure(picture, label, tile);
  const select = tile.querySelector(".correct");
  const options = [["", picture.said ? "undo" : "correct it …"]];
  options.push(...state.classes.map((one) => [one.id, `it is ${state.nameOf(one.id)}`]));
  options.push([state.NONE, `it is ${state.NONE_NAME}`]);
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = picture.said ?? "";
}

// The probability, and the second best class. For a picture of none of the classes: the best class.
function showHowSure(picture, label, tile) {
  const none = label === state.NONE;
  const [first, second] = picture.said ? [[label, 1]] : picture.ranking;
  const sure = first[1];
  const guess = ([id, share]) => `${state.nameOf(id)}, ${percent(share)}`;
  tile.querySelector(".percent").textContent = picture.said ? "your label" : none ? "" : percent(sure);
  const meter = tile.querySelector(".confidence");
  meter.setAttribute("aria-valuenow", Math.round(100 * sure));
  meter.setAttribute("aria-label", `Probability of ${state.nameOf(first[0])}`);
  meter.hidden = Boolean(picture.said) || none;
  meter.firstElementChild.style.width = `${100 * sure}%`;
  const other = none ? `best guess: ${guess(first)}` : second && `or ${guess(second)}`;
  tile.querySelector(".second").textContent = picture.said ? "" : other;
}

// The order of `trident predict --least-sure-first`: pictures of none of the classes, and your own labels last.
function certainty(picture) {
  if (picture.said) return 2;
  if (!picture.ranking) return -2;
  return picture.ranking[0][1] - (picture.atypical ? 1 : 0);
}

export function sort() {
  const how = byId("sort").value;
  const sure = certainty;
  const place = (picture) => {
    const label = state.labelOf(picture);
    return label === state.NONE ? state.classes.length : placeOf(label);
  };
  const order = {
    added: () => 0,
    unsure: (a, b) => sure(a) - sure(b),
    sure: (a, b) => sure(b) - sure(a),
    label: (a, b) => place(a) - place(b) || sure(b) - sure(a),
  }[how];
  byId("pile-pictures").append(...state.inPile().sort(order).map((picture) => tiles.get(picture.id)));
}

// ---- the weights

export function showWeights(all) {
  const code = (text) => Object.assign(document.createElement("code"), { textContent: text });
  const parts = all.flatMap((one) => [code(one.name), one.described && ` (${one.described})`, " or "]).slice(0, -1);
  const features = all[0].features;
  const many = all.length > 1;
  parts.unshift(features ? "Features of " : many ? "Weights, chosen by the number of examples: " : "Weights: ");
  parts.push(`. Pictures are scaled to ${all[0].size}x${all[0].size} pixels. `);
  if (all[0].included) {
    parts.push("They were trained on photographs of everyday things and animals, and do worse on drawings and scans. ");
    parts.push("For their measured accuracy, run ", code(`trident weights ${all[0].name.replace("weights:", "")}`), ".");
  }
  byId("weights").replaceChildren(...parts);
  byId("by-features").hidden = !features;
  byId("by-weights").hidden = features;
  byId("curious").hidden = !all.some((one) => one.latents);
}

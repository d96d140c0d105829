// The visitor's classes and pictures. They are stored only here, in the browser.

export const PILE = "pile";
export const NONE = "none"; // in place of a class: the picture belongs to none
export const NONE_NAME = "none of these"; // as `trident predict` writes and reads it
export const classes = []; // {id, name, fallback}
export const pictures = new Map(); // id -> a picture, see `addPicture`
let next = 0;

export function addClass() {
  const id = `class-${++next}`;
  const taken = new Set(classes.map((one) => one.fallback));
  let number = 1;
  while (taken.has(`Class ${number}`)) number += 1;
  const added = { id, name: "", fallback: `Class ${number}` };
  classes.push(added);
  return added;
}

export function removeClass(id) {
  classes.splice(classes.findIndex((one) => one.id === id), 1);
  for (const picture of pictures.values()) {
    if (picture.said === id) picture.said = null;
    if (picture.ranking?.some(([of]) => of === id)) picture.ranking = null;
  }
}

export function nameOf(id) {
  if (id === NONE) return NONE_NAME;
  const found = classes.find((one) => one.id === id);
  return found.name.normalize("NFC").trim().replace(/\s+/g, " ") || found.fallback;
}

// `home` is the pile or a class. For a picture of the pile, `said` is the visitor's class or NONE; `ranking`, `atypical`
// and `typicality` are the network's answer, and `mark` is the server's mark of the file's content.
export function addPicture(file, name, home) {
  const answer = { error: null, ranking: null, atypical: false, typicality: null, mark: "" };
  const picture = { id: `picture-${++next}`, file, name, home, said: null, thumbnail: null, ...answer };
  pictures.set(picture.id, picture);
  return picture;
}

export const inPile = () => [...pictures.values()].filter((picture) => picture.home === PILE);
export const examplesOf = (id) => [...pictures.values()].filter((picture) => (picture.said ?? picture.home) === id);
// The visitor's word, or the network's; undefined if there is neither.
export const labelOf = (picture) => picture.said ?? (picture.ranking && picture.atypical ? NONE : picture.ranking?.[0][0]);
export const toLabel = () => inPile().filter((picture) => !picture.said && !picture.error);
export const examples = () => classes.map((one) => examplesOf(one.id).filter((picture) => !picture.error));

// Why the pile cannot be labelled yet; null if it can.
export function hindrance(limits) {
  const names = classes.map((one) => nameOf(one.id));
  const twice = names.find((name, place) => names.indexOf(name) !== place);
  const empty = classes.find((one, place) => examples()[place].length === 0);
  const labelled = examples().flat().length;
  if (classes.length < 2) return "Add a class: at least two are needed.";
  if (twice !== undefined) return `Two classes are called “${twice}”: give each its own name.`;
  if (names.includes(NONE_NAME)) return `“${NONE_NAME}” cannot be the name of a class: choose it below a picture instead.`;
  if (empty) {
    const unread = examplesOf(empty.id).length > 0;
    return `“${nameOf(empty.id)}” has no picture${unread ? " that can be read" : ""} yet: add one.`;
  }
  if (labelled > limits.labelled) return `${labelled} examples are too many: ${limits.labelled} is the limit.`;
  const bytes = [...examples().flat(), ...toLabel()].reduce((sum, picture) => sum + picture.file.size, 0);
  if (bytes > limits.request_bytes) {
    return `All pictures together have ${Math.round(bytes / 1e6)} MB: ${limits.request_bytes / 1e6} MB is the limit.`;
  }
  if (toLabel().length === 0) return "Put pictures on the pile to label them.";
  return null;
}

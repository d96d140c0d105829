// The plot of label latents, and the redrawn pictures.

import { colourOf, placeOf } from "./show.js";
import { nameOf } from "./state.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = 20;
// One shape for each class, so that colour is not the only difference. Each is centred on (0, 0).
const SHAPES = [
  "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0 -12 0Z",
  "M-5.5 -5.5H5.5V5.5H-5.5Z",
  "M0 -7L7 5.5H-7Z",
  "M0 -7.5L7.5 0L0 7.5L-7.5 0Z",
  "M0 7L-7 -5.5H7Z",
  "M-2.5 -7H2.5V-2.5H7V2.5H2.5V7H-2.5V2.5H-7V-2.5H-2.5Z",
  "M-6 -7L0 -2.5L6 -7L2.5 0L6 7L0 2.5L-6 7L-2.5 0Z",
  "M0 -8L2 -2.5L8 -2.5L3.2 1.2L5 7L0 3.5L-5 7L-3.2 1.2L-8 -2.5L-2 -2.5Z",
];

// `shown` has for each picture: point, name, classId, isExample, seen, painted.
export function showLooked(place, shown, answer) {
  const share = Math.round(100 * answer.shares.reduce((sum, one) => sum + one, 0));
  place.replaceChildren(
    text(
      `Colour and shape show the label; large marks with a rim are examples. A label latent has ${answer.latents} numbers; ` +
        `the plot shows ${share} % of their variance.`,
    ),
    plot(shown, Math.min(Math.max(place.clientWidth, 280), 760)),
    legend(new Set(shown.map((one) => one.classId))),
    text("Left: the picture as the network sees it. Right: redrawn from the two latents."),
    paintings(shown),
  );
}

function text(words) {
  const made = document.createElement("p");
  made.className = "soft";
  made.textContent = words;
  return made;
}

function make(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const shapeOf = (id, more) =>
  make("path", { d: SHAPES[placeOf(id) % SHAPES.length], fill: colourOf(id), "fill-opacity": 0.85, ...more });

function plot(shown, width) {
  const height = Math.round(0.66 * width);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "plot", role: "img" });
  svg.setAttribute("aria-label", `Plot of the label latents of ${shown.length} pictures`);
  const to = scale(shown.map((one) => one.point), [width, height]);
  for (const one of [...shown].sort((a, b) => a.isExample - b.isExample)) {
    const [x, y] = to(one.point);
    const mark = shapeOf(one.classId, { transform: `translate(${x} ${y}) scale(${one.isExample ? 1.4 : 1})` });
    if (one.isExample) mark.classList.add("example-mark");
    const title = make("title", {});
    title.textContent = `${one.name}: ${nameOf(one.classId)}`;
    mark.append(title);
    svg.append(mark);
  }
  return svg;
}

function legend(ids) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const id of [...ids].sort((a, b) => placeOf(a) - placeOf(b))) {
    const entry = document.createElement("li");
    const svg = make("svg", { viewBox: "-9 -9 18 18", width: 18, height: 18, "aria-hidden": "true" });
    svg.append(shapeOf(id, {}));
    entry.append(svg, nameOf(id));
    list.append(entry);
  }
  return list;
}

// Both axes have the same scale, so that distances are right.
function scale(points, size) {
  const low = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
  const high = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
  const room = size.map((side) => side - 2 * MARGIN);
  const factor = Math.min(...[0, 1].map((axis) => room[axis] / Math.max(high[axis] - low[axis], 1e-9)));
  const along = (value, axis) => factor * (value - (low[axis] + high[axis]) / 2);
  return ([x, y]) => [size[0] / 2 + along(x, 0), size[1] / 2 - along(y, 1)];
}

function paintings(shown) {
  const grid = document.createElement("div");
  grid.className = "paintings";
  for (const one of shown) {
    const figure = document.createElement("figure");
    const pair = document.createElement("div");
    for (const [source, what] of [[one.seen, "as the network sees it"], [one.painted, "as the network redraws it"]]) {
      const image = document.createElement("img");
      image.src = source;
      image.alt = `${one.name}, ${what}`;
      pair.append(image);
    }
    const caption = document.createElement("figcaption");
    caption.textContent = `${nameOf(one.classId)}: ${one.name}`;
    figure.append(pair, caption);
    grid.append(figure);
  }
  return grid;
}

// The plot of label latents, and what the network paints.

import { nameOf } from "./state.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, MARGIN] = [720, 460, 44];

// `shown` has for each picture: point, name, classId, isExample, seen, painted.
export function showLooked(place, shown, answer, colourOf) {
  const share = Math.round(100 * answer.shares.reduce((sum, one) => sum + one, 0));
  const text = document.createElement("p");
  text.className = "soft";
  text.textContent =
    `Diamonds are examples, circles pictures of the pile, in the colour of their label. A label latent has ` +
    `${answer.latents} numbers; the two directions shown hold ${share} % of how they differ.`;
  const below = document.createElement("p");
  below.className = "soft";
  below.textContent = "Left: a picture as the network sees it. Right: what it paints from the two latents alone.";
  place.replaceChildren(text, plot(shown, colourOf), below, paintings(shown));
}

function make(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function plot(shown, colourOf) {
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", role: "img" });
  svg.setAttribute("aria-label", `Label latents of ${shown.length} pictures in the plane`);
  const to = scale(shown.map((one) => one.point));
  for (const one of [...shown].sort((a, b) => a.isExample - b.isExample)) {
    const [x, y] = to(one.point);
    const mark = one.isExample
      ? make("path", { d: `M${x} ${y - 9}L${x + 9} ${y}L${x} ${y + 9}L${x - 9} ${y}Z`, class: "example-mark" })
      : make("circle", { cx: x, cy: y, r: 6, "fill-opacity": 0.8 });
    mark.setAttribute("fill", colourOf(one.classId));
    const title = make("title", {});
    title.textContent = `${one.name}: ${nameOf(one.classId)}`;
    mark.append(title);
    svg.append(mark);
  }
  // A name beside each class's examples, for those who cannot go by the colour.
  for (const id of new Set(shown.map((one) => one.classId))) {
    const points = shown.filter((one) => one.classId === id && one.isExample).map((one) => to(one.point));
    if (points.length === 0) continue;
    const mean = [0, 1].map((axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length);
    const label = make("text", { x: Math.min(Math.max(mean[0], 80), WIDTH - 80), y: Math.max(mean[1] - 16, 18) });
    label.textContent = nameOf(id).slice(0, 24);
    svg.append(label);
  }
  return svg;
}

// Both directions to the same scale, so that distances are what they are.
function scale(points) {
  const low = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
  const high = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
  const room = [WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN];
  const factor = Math.min(...[0, 1].map((axis) => room[axis] / Math.max(high[axis] - low[axis], 1e-9)));
  return ([x, y]) => [
    WIDTH / 2 + factor * (x - (low[0] + high[0]) / 2),
    HEIGHT / 2 - factor * (y - (low[1] + high[1]) / 2),
  ];
}

function paintings(shown) {
  const grid = document.createElement("div");
  grid.className = "paintings";
  for (const one of shown) {
    const figure = document.createElement("figure");
    const pair = document.createElement("div");
    for (const [source, what] of [[one.seen, "as the network sees it"], [one.painted, "as the network paints it"]]) {
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

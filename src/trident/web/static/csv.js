// The labels as CSV: the table of `trident predict`, with what the visitor said in the column `correction`.

import { guarded } from "./spreadsheets.js";
import { NONE, inPile, labelOf, nameOf } from "./state.js";

const HEAD = ["path", "label", "probability", "runner_up", "runner_up_probability", "best_guess"];
HEAD.push("none_of_these", "typicality", "picture", "correction");

export function table() {
  const rows = inPile().filter(labelOf).map((picture) => [picture.name, ...cells(picture)].map(guarded));
  return [HEAD, ...rows].map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

function cells(picture) {
  const label = labelOf(picture);
  const [name, none] = label === NONE ? ["", "yes"] : [nameOf(label), ""];
  if (picture.said) return [name, none ? "0.0000" : "1.0000", "", "0.0000", name, none, "", picture.mark, nameOf(label)];
  const [[first, sure], [second, lesser]] = picture.ranking;
  const typical = picture.typicality?.toFixed(3) ?? "";
  return [name, sure.toFixed(4), nameOf(second), lesser.toFixed(4), nameOf(first), none, typical, picture.mark, ""];
}

const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

export function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
  link.download = "labels.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// The labels as CSV, with the columns of `trident predict` and said_by: the model, or you.

import { inPile, nameOf } from "./state.js";

const HEAD = ["path", "label", "probability", "runner_up", "runner_up_probability", "said_by"];

export function table() {
  const rows = [HEAD];
  for (const picture of inPile()) {
    if (picture.said) rows.push([path(picture.name), nameOf(picture.said), "", "", "", "you"]);
    else if (picture.ranking) {
      const [[first, sure], [second, lesser]] = picture.ranking;
      rows.push([path(picture.name), nameOf(first), sure.toFixed(4), nameOf(second), lesser.toFixed(4), "model"]);
    }
  }
  return rows.map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

// Spreadsheets read such names as formulas, so ./ is put before them.
const path = (name) => (/^[=+\-@\t]/.test(name) ? `./${name}` : name);
const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

export function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([table()], { type: "text/csv" }));
  link.download = "labels.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

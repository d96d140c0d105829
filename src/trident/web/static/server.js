// Requests to the server. Each contains everything, because the server stores nothing.

import { classes, examples, nameOf, toLabel } from "./state.js";

// Lets the server recognise pictures that this tab sent before. Nobody else knows it.
const tab = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export async function about() {
  const answer = await fetch("api/about");
  if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
  return answer.json();
}

// The request, and the order of its pictures, which the answer follows.
export function gathered() {
  const form = new FormData();
  const labelled = [];
  form.append("tab", tab);
  for (const one of classes) form.append("class", nameOf(one.id));
  examples().forEach((ofClass, place) => {
    for (const picture of ofClass) {
      form.append(`labelled-${place}`, picture.file, picture.name);
      labelled.push(picture);
    }
  });
  const pile = toLabel();
  for (const picture of pile) form.append("pile", picture.file, picture.name);
  return { form, labelled, pile, classIds: classes.map((one) => one.id) };
}

export class Refused extends Error {
  constructor(message, answer) {
    super(message);
    this.answer = answer;
  }
}

// XMLHttpRequest, because fetch does not report upload progress.
export function post(path, form, onSent) {
  const request = new XMLHttpRequest();
  const answer = new Promise((resolve, reject) => {
    request.open("POST", path);
    request.upload.onprogress = (event) => event.lengthComputable && onSent(event.loaded / event.total);
    request.upload.onload = () => onSent(1);
    request.onabort = () => reject(new DOMException("Cancelled.", "AbortError"));
    request.onerror = () =>
      reject(new Refused("The server cannot be reached, or a picture has been moved since it was added.", {}));
    request.onload = () => {
      let found = {};
      try {
        found = JSON.parse(request.responseText);
      } catch {
        found = { error: `the server failed (${request.status})` };
      }
      if (request.status === 200) resolve(found);
      else reject(new Refused(found.error ?? `the server answered ${request.status}`, found));
    };
  });
  request.send(form);
  return { answer, abort: () => request.abort() };
}

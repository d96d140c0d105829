// Dropped, pasted or picked files, including the files in folders.

const PICTURES = /\.(jpe?g|png|bmp|gif|webp|tiff?|ppm|pgm)$/i;

// [{file, name}], and the folder's name if a single folder was dropped.
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (entries.length === 0) return { found: pickedFiles(transfer.files), folder: null };
  const found = [];
  for (const entry of entries) await walk(entry, found, true);
  const folder = entries.length === 1 && entries[0].isDirectory ? entries[0].name : null;
  return { found, folder };
}

export const pickedFiles = (files) => [...files].map((file) => ({ file, name: file.name }));

async function walk(entry, found, named) {
  if (entry.isFile) {
    // Take every file that was dropped itself, but only pictures from folders.
    if (!named && !PICTURES.test(entry.name)) return;
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    found.push({ file, name: entry.fullPath.replace(/^\//, "") });
    return;
  }
  const reader = entry.createReader();
  const inside = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // a hundred at a time
    if (some.length === 0) break;
    inside.push(...some.filter((inner) => !inner.name.startsWith(".")));
  }
  inside.sort((a, b) => (a.name < b.name ? -1 : 1));
  for (const inner of inside) await walk(inner, found, false);
}

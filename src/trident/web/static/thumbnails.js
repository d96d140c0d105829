// Thumbnails, made one at a time, so that many photographs do not fill a phone's memory.

const SIDE = 240;
let last = Promise.resolve();

// The thumbnail's URL. Fails if the browser cannot show the picture, or if it has too many pixels.
export function thumbnail(file, mostPixels) {
  const made = last.then(() => make(file, mostPixels));
  last = made.catch(() => {});
  return made;
}

async function make(file, mostPixels) {
  const address = URL.createObjectURL(file);
  try {
    const image = new Image();
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = reject;
      image.src = address;
    });
    const { naturalWidth: width, naturalHeight: height } = image;
    // Only the header is read so far; the pixels are decoded when the picture is drawn.
    if (width * height > mostPixels || width * height === 0) throw new Error("not shown");
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = SIDE;
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, SIDE, SIDE);
    const side = Math.min(width, height);
    context.drawImage(image, (width - side) / 2, (height - side) / 2, side, side, 0, 0, SIDE, SIDE);
    const small = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.86));
    return URL.createObjectURL(small);
  } finally {
    URL.revokeObjectURL(address);
  }
}

// Small copies of pictures, made one after another, so that a hundred photographs do not fill a phone's memory.

const SIDE = 240;
let last = Promise.resolve();

// The address of the small copy; it fails for what the browser cannot show, or should not try to.
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
    // The header is read by now, the pixels are not: they are when the picture is drawn.
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

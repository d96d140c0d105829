"""Take a screenshot of `trident web` at work: `python tools/web_screenshot.py FOLDER docs/web.png`.

FOLDER holds one folder of pictures for each class. The first few of each are given as examples, the next few make the
pile. Needs the dev extra and a Chromium. The one in the documentation is of pictures that
`python tools/draw_pictures.py FOLDER` draws.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@contextmanager
def running_server(*options: str) -> Iterator[str]:
    """The address of a `trident web` that is stopped in the end."""
    command = [sys.executable, "-m", "trident", "web", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise SystemExit("trident web did not start")
            yield line.split()[0]
        finally:
            server.terminate()


def fill_in(page: Page, folder: Path, examples: int, pile: int) -> None:
    """Give the examples and the pile, mixed, as a visitor would."""
    by_class = {entry.name: sorted(entry.iterdir()) for entry in sorted(folder.iterdir()) if entry.is_dir()}
    for _ in range(len(by_class) - page.locator(".class").count()):
        page.click("#add-class")
    for place, (name, files) in enumerate(by_class.items()):
        card = page.locator(".class").nth(place)
        card.locator(".class-name").fill(name)
        card.locator("input[type=file]").set_input_files(files[:examples])
    rest = [files[examples : examples + pile] for files in by_class.values()]
    mixed = [files[place] for place in range(pile) for files in rest if place < len(files)]
    page.set_input_files("#pile-files", mixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--examples", type=int, default=2, help="of each class")
    parser.add_argument("--pile", type=int, default=3, help="pictures of each class on the pile")
    parser.add_argument("--width", type=int, default=1080)
    parser.add_argument("--height", type=int, default=750)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--curious", action="store_true", help="with the folded part open, and the whole page")
    parser.add_argument("--sort", default="unsure", choices=["added", "unsure", "sure", "label"])
    chosen = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with running_server() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(
            viewport={"width": chosen.width, "height": chosen.height},
            color_scheme="dark" if chosen.dark else "light",
        )
        page.goto(address)
        page.wait_for_selector(".class")
        fill_in(page, chosen.folder, chosen.examples, chosen.pile)
        page.click("#go")
        page.wait_for_selector("#status:has-text('labelled')", timeout=60_000)
        page.select_option("#sort", chosen.sort)
        if chosen.curious:
            page.click("#curious summary")
            page.click("#look")
            page.wait_for_selector(".plot", timeout=60_000)
        page.wait_for_timeout(500)  # the last small copies
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        page.screenshot(path=chosen.out, full_page=chosen.curious)
        browser.close()


if __name__ == "__main__":
    main()

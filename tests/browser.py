"""Pages seen by a real browser, headless: what stands where, and what it prints."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REQUIRED = "DCD_BROWSER_REQUIRED"  # set where a test without a browser must fail instead of being skipped
PAPER_WIDTH = 703  # CSS pixels between margins of 12 mm on A4, which is narrower than US letter
MEASURE = """
const seen = {};
function end(element) { return element.getBoundingClientRect().right; }
function wide(element) {
  return [element.parentElement, element.ownerDocument.body].some(frame => end(element) - end(frame) > 1);
}
function broken(image) { return !image.complete || !image.naturalWidth || !image.alt || wide(image); }
function light(text) {
  const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
  const line = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return [0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2], a];
}
function behind(view, element) {
  for (; element; element = element.parentElement) {
    const [value, alpha] = light(view.getComputedStyle(element).backgroundColor);
    if (alpha > 0) return value;
  }
  return 1;
}
function contrast(view, element) {
  const pair = [light(view.getComputedStyle(element).color)[0], behind(view, element)].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}
function words(element) { return element.textContent.trim().slice(0, 60); }
function measure(frame) {
  const doc = frame.contentDocument, view = frame.contentWindow, root = doc.documentElement;
  const own = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  const text = [...doc.body.querySelectorAll("*")].filter(e => own(e) && e.getClientRects().length);
  return {
    width: root.clientWidth,
    needed: root.scrollWidth,
    text: text.length,
    tables: doc.querySelectorAll("table").length,
    wide_tables: [...doc.querySelectorAll("table")].filter(wide).map(words),
    cut_cells: [...doc.querySelectorAll("td, th")].filter(c => c.scrollWidth > c.clientWidth + 1).map(words),
    images: doc.images.length,
    broken_images: [...doc.images].filter(broken).map(i => i.alt),
    faint: text.filter(e => contrast(view, e) < 4.5).map(words),
  };
}
window.onload = () => {
  for (const frame of document.querySelectorAll("iframe")) seen[frame.id] = measure(frame);
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
"""


def browser() -> str:
    """The browser on this machine; without one the calling test is skipped, or fails where one is required."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        stop = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        stop("no headless browser: install the system package chromium (apt-get install chromium)")
    return found


def start(profile: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the browser once; its log holds what pages complain about."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ]
    flags += [f"--user-data-dir={profile}", "--enable-logging=stderr"]
    return subprocess.run([browser(), *flags, *arguments], capture_output=True, text=True, timeout=120, check=True)


def look(page: str, folder: Path, widths: dict[str, int]) -> tuple[dict[str, dict], str]:
    """What a page looks like with every fold open, in frames of several widths, and the browser's log.

    A frame called "print" is laid out by the rules for printing.
    """
    opened = page.replace("<details>", "<details open>")
    frames = ""
    for name, width in widths.items():
        shown = as_printed(opened) if name == "print" else opened
        frames += f'<iframe id="{name}" style="border:0;width:{width}px" srcdoc="{html.escape(shown)}"></iframe>\n'
    wrapper = folder / "looked-at.html"
    wrapper.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><pre id="seen"></pre>{frames}<script>{MEASURE}</script>',
        encoding="utf-8",
    )
    done = start(folder / "profile", "--window-size=1300,900", "--dump-dom", wrapper.as_uri())
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.S)
    return json.loads(html.unescape(found[1])), done.stderr


def as_printed(page: str) -> str:
    """The page with its rules for printing in force and those for screens alone not."""
    assert "@media print" in page
    return re.sub(r"@media screen[^{]*", "@media not all ", page.replace("@media print", "@media all"))

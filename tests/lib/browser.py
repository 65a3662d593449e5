"""What a page looks like in a real browser: height, cards, horizontal overflow, text that leaves its box."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()

MEASURE = """
const boxes = "td, th, summary, .card, dd, dt, label, h1, h2, h3, p";
function shown(e) { return e.getClientRects().length > 0; }
function scrolls(e, root) {
  for (let x = e; x && x !== root; x = x.parentElement)
    if (getComputedStyle(x).overflowX === "auto") return true;
  return false;
}
function measured(doc) {
  const root = doc.documentElement, spilled = [];
  for (const box of doc.querySelectorAll(boxes)) {
    if (!shown(box)) continue;
    const edge = box.getBoundingClientRect().right + 1.5;
    const range = doc.createRange();
    range.selectNodeContents(box);
    for (const r of range.getClientRects())
      if (r.right > edge) { spilled.push(box.tagName + ": " + box.textContent.trim().slice(0, 60)); break; }
  }
  for (const stage of doc.querySelectorAll("svg g.stage")) {
    const box = stage.querySelector("rect.box");
    if (!box || !shown(box)) continue;
    const edge = box.getBoundingClientRect();
    for (const t of stage.querySelectorAll("text")) {
      const r = t.getBoundingClientRect();
      if (r.right > edge.right + 1.5 || r.left < edge.left - 1.5) spilled.push("stage: " + t.textContent);
    }
  }
  for (const svg of doc.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const edge = svg.getBoundingClientRect();
    for (const t of svg.querySelectorAll("text")) {
      const r = t.getBoundingClientRect();
      if (r.right > edge.right + 1.5 || r.left < edge.left - 1.5) spilled.push("svg: " + t.textContent);
    }
  }
  const wide = [...doc.querySelectorAll("body *")].filter(
    e => shown(e) && !scrolls(e, root) && e.getBoundingClientRect().right > root.clientWidth + 1.5);
  return {
    height: Math.ceil(root.scrollHeight),
    cards: [...doc.querySelectorAll(".card")].filter(shown).length,
    overflow: root.scrollWidth - root.clientWidth,
    wide: wide.slice(0, 5).map(e => e.tagName + "." + e.className),
    spilled,
  };
}
function run() {
  const frame = document.querySelector("iframe");
  const found = { folded: measured(frame.contentDocument) };
  for (const d of frame.contentDocument.querySelectorAll("details")) d.open = true;
  found.open = measured(frame.contentDocument);
  document.querySelector("#found").textContent = JSON.stringify(found);
}
"""


@dataclass(frozen=True)
class Look:
    """A page at one width, in pixels. ``spilled``: texts that leave their boxes; ``wide``: elements that leave the page
    and are in nothing that scrolls."""

    height: int
    cards: int
    overflow: int
    wide: list[str]
    spilled: list[str]


def look(page: str, width: int, folder: Path) -> tuple[Look, Look]:
    """How ``page`` looks at ``width`` pixels: as it opens, and with every fold opened.

    The page is measured in a frame of that width, since a browser's window has a least width.
    """
    assert CHROMIUM is not None
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{escape(page)}" onload="run()"></iframe>'
    path = folder / f"look{width}.html"
    path.write_text(f"<!doctype html><script>{MEASURE}</script>{frame}<pre id=found></pre>", encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        given = [f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=8000", "--dump-dom"]
        done = subprocess.run(
            [CHROMIUM, *SWITCHES, *given, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
    said = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None and said[1], done.stderr[-2000:]
    found = json.loads(unescape(said[1]))
    return Look(**found["folded"]), Look(**found["open"])

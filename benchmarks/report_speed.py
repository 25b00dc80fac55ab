"""Size of HTML reports, first paint, and what a zoom of their timelines takes, in headless Chromium.

Prints one row a page. A zoom is timed from the request to the frame after next, so that drawing and showing are in it
(two frames are 33 ms); the figures are the median and the largest of 40 zooms, in and out around the middle of the
step, and the median of what the page itself takes to draw. The targets: 5 MB, 2 s, 100 ms.

Usage: python benchmarks/report_speed.py PAGE.html... [--images FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path
from typing import Any

ZOOM = """async () => {
  const timeline = document.querySelector("[data-timeline]")?.timeline;
  if (!timeline) return null;
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const times = [], draws = [];
  for (let i = 0; i < 40; i++) {
    const begun = performance.now();
    timeline.zoom(i % 20 < 10 ? 0.6 : 1 / 0.6);
    await frame();
    await frame();
    times.push(performance.now() - begun);
    draws.push(timeline.last_ms);
  }
  return [timeline.events, times, draws];
}"""
PAINT = ("performance.getEntriesByType('paint').filter(e => e.name === 'first-contentful-paint')[0].startTime")
SHOTS = (("desk", 1440, 900, "light", "body"), ("timeline", 1440, 900, "dark", "#timeline"),
         ("phone", 390, 844, "dark", "body"))
"""Name, width, height, scheme and what is at the top of each picture."""


def measured(browser: Any, path: Path) -> str:
    """The row of one page."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("body[data-ready]")
    paint = page.evaluate(PAINT)
    row = f"{path.name:<32} {path.stat().st_size / 1e6:>6.2f} {paint:>9.0f}"
    timeline = page.query_selector("[data-timeline]")
    if timeline is not None:
        timeline.evaluate("e => e.scrollIntoView({behavior: 'instant', block: 'center'})")
        timeline.wait_for_selector("xpath=self::*[@data-done]")
        events, times, draws = page.evaluate(ZOOM)
        row += f" {events:>9,} {statistics.median(times):>9.0f} {max(times):>9.0f} {statistics.median(draws):>9.1f}"
    page.close()
    return row


def pictured(browser: Any, path: Path, folder: Path) -> None:
    """Write what a desk and a phone show of a page and of its timeline, as PNGs."""
    for name, width, height, scheme, top in SHOTS:
        page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("body[data-ready]")
        page.locator(top).first.evaluate("e => e.scrollIntoView({behavior: 'instant'})")
        if top != "body":
            page.wait_for_selector(f"{top} [data-done]")
        page.screenshot(path=folder / f"{path.stem}-{name}.png")
        page.context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description="time HTML reports in Chromium")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--images", type=Path, help="also write screenshots there")
    options = parser.parse_args()
    print(f"{'page':<32} {'MB':>6} {'paint ms':>9} {'events':>9} {'zoom ms':>9} {'most ms':>9} {'draw ms':>9}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for path in options.pages:
            print(measured(browser, path))
            if options.images is not None:
                pictured(browser, path, options.images)
        browser.close()


if __name__ == "__main__":
    main()

"""Pages in a real Chromium: quiet, offline, usable by mouse, keyboard, touch and phone, light and dark."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_traces import EVIL, evil_step

sync_api = pytest.importorskip("playwright.sync_api", reason="pages are tried with the extra `browser-test`")
pytest.importorskip("vl_convert", reason="pages need the extra `report`")
pytest.importorskip("itables", reason="pages need the extra `report`")

from step_views.pages.events import EventNames, Track, pack
from step_views.pages.overview import report_page
from step_views.pages.page import Provenance, write_page
from step_views.pages.parts import PageSection, ReportPage, TrackEvents
from tracer.job import read_job

CHROMIUM = os.environ.get("FORETRACE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is absent: install Debian's package chromium, or "
                                                         "name one with FORETRACE_CHROMIUM")
PATIENCE_MS = 120_000
"""What a part of a page may take to be made where the machine is busy with something else."""
DESK, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 760}
ALL_DONE = ("[...document.querySelectorAll('[data-table],[data-plot],[data-timeline]')]"
            ".filter(e => e.getClientRects().length && !e.dataset.done).length")


MARKS = ("host", "launch", "compute", "copy", "comm", "waiting", "loading", "sync", "forward", "backward", "optimizer",
         "other", "lit")


@dataclass
class Heard:
    """What a page said and asked for."""

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    job = read_job(evil_step().write(folder / "trace.json"))
    write_page(report_page(job, Provenance((str(folder / EVIL[0]),), f"foretrace report {EVIL[1]}"), step="-1"),
               folder / "page.html")
    return folder / "page.html"


def opened(browser: Any, path: Path, viewport: dict[str, int], **options: Any) -> tuple[Any, Heard]:
    """A page that is open and whose parts are all made."""
    heard = Heard()
    page = browser.new_context(viewport=viewport, **options).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: heard.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.console.append(f"error: {error}"))
    page.on("request", lambda request: heard.requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]")
    for details in page.query_selector_all("details"):
        details.evaluate("e => e.open = true")
    for part in page.query_selector_all("[data-table],[data-plot],[data-timeline]"):
        part.evaluate("e => e.scrollIntoView({behavior: 'instant', block: 'center'})")
        part.wait_for_selector("xpath=self::*[@data-done]")
    assert page.evaluate(ALL_DONE) == 0
    return page, heard


@pytest.fixture(scope="module")
def desk(browser: Any, page_path: Path) -> Iterator[tuple[Any, Heard]]:
    page, heard = opened(browser, page_path, DESK)
    yield page, heard
    page.context.close()


@pytest.fixture(scope="module")
def phone(browser: Any, page_path: Path) -> Iterator[Any]:
    page, heard = opened(browser, page_path, PHONE, color_scheme="dark", has_touch=True, is_mobile=True,
                         reduced_motion="reduce")
    assert heard.console == []
    yield page
    page.context.close()


def test_it_is_quiet_and_offline(desk: tuple[Any, Heard], page_path: Path) -> None:
    _, heard = desk
    assert heard.console == []
    assert heard.requests[0] == page_path.as_uri()
    # Its own libraries, unpacked in the page, are the only other things it opens.
    assert all(url.startswith("blob:") for url in heard.requests[1:])


def test_names_that_are_markup_do_nothing(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, svg[onload]").count() == 0
    assert page.evaluate("[...document.querySelectorAll('*')].every(e => [...e.attributes].every("
                         "a => !a.name.startsWith('on')))")
    shown = page.locator("#by-kernel, [data-table=by-kernel]").first.inner_text()
    assert "<img src=x onerror=" in shown and "</script>" in shown


def test_a_table_is_filtered_and_sorted(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    box = page.locator("[data-table=by-kernel]")
    box.locator("input[type=search]").fill("operation_00")
    names = box.locator("tbody tr td:first-child").all_inner_texts()
    assert names and all("operation_00" in name for name in names)
    assert "in all" in box.locator(".dt-info").inner_text()
    box.locator("input[type=search]").fill("")
    header = box.locator("thead th", has_text="mean µs")

    def values() -> list[float]:
        return [float(text.replace(",", "")) for text in box.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    header.click()
    page.wait_for_selector("[data-table=by-kernel] th[aria-sort=descending]")
    assert values() == sorted(values(), reverse=True)
    header.locator("[tabindex='0']").focus()
    page.keyboard.press("Enter")  # by keyboard too
    page.wait_for_selector("[data-table=by-kernel] th[aria-sort=ascending]")
    assert values() == sorted(values())


def view(page: Any) -> tuple[float, float]:
    state = page.evaluate("(() => { const s = document.querySelector('[data-timeline]').timeline.state; "
                          "return [s.from, s.to]; })()")
    return state[0], state[1]


def test_the_timeline_zooms_and_moves(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    figure = page.locator("[data-timeline]")
    figure.scroll_into_view_if_needed()
    whole = view(page)
    figure.locator("[data-do=in]").click()
    assert view(page)[1] - view(page)[0] == pytest.approx((whole[1] - whole[0]) / 2)
    canvas = figure.locator("canvas")
    canvas.focus()
    before = view(page)
    page.keyboard.press("ArrowRight")
    assert view(page)[0] > before[0]
    page.keyboard.press("+")
    assert view(page)[1] - view(page)[0] < before[1] - before[0]
    place = canvas.bounding_box()
    page.mouse.move(place["x"] + 300, place["y"] + 40)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    wheeled = view(page)
    assert wheeled[1] - wheeled[0] < before[1] - before[0]
    page.mouse.down()
    page.mouse.move(place["x"] + 400, place["y"] + 40, steps=4)
    page.mouse.up()
    assert view(page)[0] < wheeled[0] or view(page)[0] == 0
    page.keyboard.press("0")
    assert view(page) == whole


def test_the_timeline_finds_and_names_events(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    figure = page.locator("[data-timeline]")
    figure.locator("input").fill("operation_004")
    assert re.fullmatch(r"[1-9]\d* found", figure.locator(".hits").inner_text())
    figure.locator("[data-do=next]").click()
    said = figure.locator(".selected").inner_text()
    assert "operation_004" in said and "µs" in said
    figure.locator("input").fill(EVIL[0])
    page.keyboard.press("Enter")
    assert EVIL[0] in figure.locator(".selected").inner_text()
    figure.locator("input").fill("")
    figure.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    assert " · " in figure.locator(".selected").inner_text()
    figure.locator("[data-do=all]").click()


def test_tracks_can_be_hidden_and_the_path_lit_alone(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    figure = page.locator("[data-timeline]")
    button = figure.get_by_role("button", name="measured")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert page.evaluate("[...document.querySelector('[data-timeline]').timeline.state.hidden]") == ["measured"]
    button.click()
    figure.get_by_role("button", name="critical path alone").click()
    assert page.evaluate("document.querySelector('[data-timeline]').timeline.state.bright") is True


def test_plots_are_drawn_and_say_what_they_show(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    plots = page.locator("[data-plot]")
    assert plots.count() >= 2
    for plot in plots.all():
        assert plot.locator("svg path").count() > 3
        assert len(plot.get_attribute("aria-label") or "") > 20
    box = page.locator("[data-plot=icicle-gpu] svg .mark-rect path").nth(1)
    whole = box.get_attribute("d")
    page.locator("[data-plot=icicle-gpu] svg .mark-rect path").last.click()
    sync_api.expect(box).not_to_have_attribute("d", whole)


def test_keyboard_reaches_everything_and_focus_is_seen(desk: tuple[Any, Heard]) -> None:
    page, _ = desk
    page.evaluate("document.querySelector('.skip').focus()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.hash") == "#overview"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    assert page.evaluate("[...document.querySelectorAll('button, input, canvas, .scroll, a')].every("
                         "e => e.tabIndex >= 0 || e.disabled || e.getAttribute('aria-disabled') === 'true')")
    unnamed = page.evaluate("[...document.querySelectorAll('canvas, [role=img], [role=region], nav, table')].filter("
                            "e => !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby') && "
                            "!e.closest('.dt-paging, svg, #vg-tooltip-element')).map(e => e.outerHTML.slice(0, 90))")
    assert unnamed == []


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(desk: tuple[Any, Heard], scheme: str) -> None:
    """Text 4.5 to its ground, marks 3, as WCAG AA asks."""
    page, _ = desk
    page.emulate_media(color_scheme=scheme)
    found = page.evaluate("""(names) => {
      const probe = document.body.appendChild(document.createElement("span"));
      const of = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
      const all = Object.fromEntries(names.map((name) => [name, of(name)]));
      probe.remove();
      return all;
    }""", ["ground", "raised", "text", "quiet", "accent", "warning", "on-mark", *MARKS])
    page.emulate_media(color_scheme="light")

    def contrast(one: str, other: str) -> float:
        light, dark = sorted((luminance(found[one]), luminance(found[other])), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    for text in ("text", "quiet", "accent", "warning"):
        for ground in ("ground", "raised"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for mark in MARKS:
        assert contrast(mark, "raised") >= 3.0, mark
        assert contrast("on-mark", mark) >= 4.5, mark


def test_dark_mode_reaches_plots_and_timeline(desk: tuple[Any, Heard], phone: Any) -> None:
    light, _ = desk
    for one, dark in ((light, False), (phone, True)):
        ground = one.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(ground) < 0.1) is dark
        fill = one.locator("[data-plot] svg .role-axis-label text, [data-plot] svg .mark-text text").first.evaluate(
            "e => getComputedStyle(e).fill")
        assert fill != "rgb(0, 0, 0)"
        pixel = one.evaluate("(() => { const c = document.querySelector('[data-timeline] canvas'); "
                             "return [...c.getContext('2d').getImageData(c.width - 3, c.height - 3, 1, 1).data]"
                             ".slice(0, 3).join(', '); })()")
        assert (luminance(pixel) < 0.1) is dark


def test_a_phone_scrolls_down_only(phone: Any) -> None:
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = phone.evaluate(f"[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > "
                          f"{PHONE['width']} + 1 && !e.closest('.scroll, svg, details:not([open]), .dt-paging'))"
                          ".map(e => e.outerHTML.slice(0, 90))")
    assert wide == []
    small = phone.evaluate("[...document.querySelectorAll('button, input')].filter(e => e.getClientRects().length && "
                           "e.getBoundingClientRect().height < 24).length")
    assert small == 0
    assert phone.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_a_finger_moves_the_timeline(phone: Any) -> None:
    figure = phone.locator("[data-timeline]")
    figure.scroll_into_view_if_needed()
    figure.locator("[data-do=in]").tap()
    before = view(phone)
    session = phone.context.new_cdp_session(phone)
    place = figure.locator("canvas").bounding_box()
    x, y = place["x"] + 250, place["y"] + 60
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for by in (20, 60, 120):
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x - by, "y": y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert view(phone)[0] > before[0]
    span = view(phone)[1] - view(phone)[0]
    points = [[{"x": left, "y": y, "id": 0}, {"x": right, "y": y, "id": 1}] for left, right in ((120, 220), (60, 280))]
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": points[0]})
    session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": points[0]})
    session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": points[1]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert view(phone)[1] - view(phone)[0] < span


def test_a_hundred_thousand_events(browser: Any, tmp_path: Path) -> None:
    """All are there, and what is searched for is found among them."""
    count = 100_000
    start = np.arange(count, dtype=np.int64) // 4 * 1_000
    row = np.arange(count, dtype=np.int64) % 4
    names = EventNames()
    code = np.array([names.code(f"kernel {i}") for i in range(500)], np.int64)[np.arange(count) % 500]
    track = Track("stream", "", "", row, start, start + 900, code, np.full(count, 5, np.int64), np.zeros(count, bool),
                  True)
    columns, said = pack([track], names, int(track.end.max()))
    assert said == "100,000 events."
    write_page(ReportPage("many", "many", [PageSection("timeline", "Timeline", [
        TrackEvents("timeline", "many", "Many events.", columns)])]), tmp_path / "many.html")
    page, heard = opened(browser, tmp_path / "many.html", DESK)
    assert heard.console == []
    assert page.evaluate("document.querySelector('[data-timeline]').timeline.events") == count
    page.locator("input").fill("kernel 499")
    assert page.locator(".hits").inner_text() == "200 found"
    page.context.close()

"use strict";
/* The timeline: a hundred thousand events on a canvas. Our own, since no kept library that fits into a page draws so
   many at once: within a row events do not overlap, so that the first one in view is found by halving, and events
   narrower than a pixel are drawn as one. */
foretrace.timeline = async (figure) => {
  const { head, columns } = await foretrace.columns(`data-${figure.dataset.timeline}`);
  const { start: delta, length, name, kind, lit } = columns;
  const start = new Float64Array(delta.length), end = new Float64Array(delta.length);
  for (const track of head.tracks)
    for (const [first, count] of track.runs)
      for (let i = first, at = 0; i < first + count; i++) {
        at += delta[i];
        start[i] = at * head.unit_ns;
        end[i] = (at + length[i]) * head.unit_ns;
      }
  const canvas = figure.querySelector("canvas"), said = figure.querySelector(".selected");
  const pane = document.createElement("div"), space = document.createElement("div");
  pane.className = "pane";
  pane.style.cssText = "overflow-y:auto;overflow-x:hidden;position:relative;border-radius:5px";
  canvas.before(pane);
  pane.append(canvas, space);
  canvas.style.position = "sticky";
  canvas.style.top = "0";
  const AXIS = 24, TITLE = 17, ROW = 15, GAP = 5, LEAST_NS = 20;
  const state = { from: 0, to: head.length_ns, bright: false, hidden: new Set(), hits: null, at: -1, selected: null };
  let lines = [], full = 0, width = 0, height = 0, colours = [], ink = {}, asked = false;
  const open = new Set(head.tracks.map((track, i) => track.open ? i : -1).filter((i) => i >= 0));

  function layOut() {
    lines = [];
    let y = AXIS, group = null;
    head.tracks.forEach((track, t) => {
      if (state.hidden.has(track.source)) return;
      if (track.group !== group && track.group) {
        y += GAP;
        lines.push({ y, h: TITLE + 2, group: track.group });
        y += TITLE + 2;
      }
      group = track.group;
      const many = track.runs.length > 1;
      lines.push({ y, h: TITLE, title: (many ? (open.has(t) ? "▾ " : "▸ ") : "") + track.title, t, fold: many });
      y += TITLE;
      track.runs.slice(0, open.has(t) ? undefined : 1).forEach((run, row) => {
        lines.push({ y, h: ROW, run, t, row });
        y += ROW;
      });
      y += GAP;
    });
    full = y + GAP;
    const tall = Math.min(full, Math.max(300, Math.min(innerHeight * 0.72, 640)));
    canvas.style.height = pane.style.maxHeight = `${tall}px`;
    space.style.height = `${Math.max(full - tall, 0)}px`;
    resize();
  }
  function resize() {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    width = canvas.clientWidth;
    height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    later();
  }
  function recolour() {
    colours = head.kinds.map(([, colour]) => foretrace.colour(colour));
    ink = Object.fromEntries(["raised", "text", "quiet", "line", "faint", "lit", "on-mark", "accent"].map((c) => [c, foretrace.colour(c)]));
    later();
  }
  function later() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  }
  /* The first event of a row that ends after a time. */
  function firstAfter([first, count], time) {
    let low = first, high = first + count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  function draw() {
    const begun = performance.now(), context = canvas.getContext("2d"), top = pane.scrollTop;
    const scale = width / (state.to - state.from);
    context.fillStyle = ink.raised;
    context.fillRect(0, 0, width, height);
    context.textBaseline = "middle";
    ticks(context, scale);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    for (const line of lines) {
      const y = line.y - top;
      if (y + line.h < AXIS || y > height) continue;
      if (line.run) { events(context, line, y, scale); continue; }
      context.font = (line.group ? "600 12px" : "12px") + " system-ui, sans-serif";
      if (line.group) { context.fillStyle = ink.faint; context.fillRect(0, y, width, line.h); }
      context.fillStyle = line.group ? ink.text : ink.quiet;
      context.fillText(line.group ?? line.title, 6, y + line.h / 2 + 1);
    }
    context.restore();
    figure.timeline.last_ms = performance.now() - begun;
    figure.timeline.draws++;
  }
  function events(context, line, y, scale) {
    const [first, count] = line.run, last = first + count, hits = state.hits, step = 1 / scale;
    const sought = hits || state.bright;
    let edge = -1, i = firstAfter(line.run, state.from), alpha = 1, colour = null;
    context.font = "11px system-ui, sans-serif";
    context.globalAlpha = 1;
    const pen = (wantedAlpha, wantedColour) => { // setting what is set already costs as much as drawing
      if (alpha !== wantedAlpha) context.globalAlpha = alpha = wantedAlpha;
      if (colour !== wantedColour) context.fillStyle = colour = wantedColour;
    };
    while (i < last && start[i] < state.to) {
      const left = (start[i] - state.from) * scale, right = (end[i] - state.from) * scale;
      const bright = (hits ? hits.has(name[i]) : !state.bright || lit[i]);
      let x = Math.max(left, -2), w = Math.min(right, width + 2) - x;
      if (w < 1.2) {
        /* What falls into a pixel that is drawn already is skipped, unless it is what is looked for. */
        if (x + 1 <= edge && !(sought && bright)) { i = sought ? i + 1 : Math.max(i + 1, skip(i, last, step)); continue; }
        w = 1.2;
      }
      pen(bright ? 1 : 0.22, colours[kind[i]]);
      context.fillRect(x, y + 1, w > 3 ? w - 0.6 : w, ROW - 2);
      if (lit[i]) { pen(1, ink.lit); context.fillRect(x, y + ROW - 3, w, 2.5); }
      if (w > 34 && bright) {
        pen(1, ink["on-mark"]);
        const room = Math.floor((w - 8) / 5.6), text = head.names[name[i]];
        context.fillText(text.length > room ? text.slice(0, room - 1) + "…" : text, x + 4, y + ROW / 2, w - 6);
      }
      if (i === state.at) {
        context.globalAlpha = alpha = 1;
        context.strokeStyle = ink.text;
        context.lineWidth = 2;
        context.strokeRect(x, y + 1, Math.max(w, 3), ROW - 2);
      }
      edge = x + w;
      i++;
    }
    context.globalAlpha = 1;
  }
  /* Over a dense stretch: the first event that starts a pixel later. */
  function skip(i, last, step) {
    const wanted = start[i] + step * 0.5;
    let by = 1;
    while (i + by < last && start[i + by] < wanted) by <<= 1;
    let low = i + (by >> 1), high = Math.min(i + by, last);
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }
  function ticks(context, scale) {
    const wanted = (state.to - state.from) / Math.max(width / 110, 2);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= wanted);
    context.strokeStyle = ink.faint;
    context.fillStyle = ink.quiet;
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    for (let at = Math.ceil(state.from / every) * every; at < state.to; at += every) {
      const x = Math.round((at - state.from) * scale) + 0.5;
      context.beginPath();
      context.moveTo(x, AXIS);
      context.lineTo(x, height);
      context.stroke();
      context.fillText(time(at, every), Math.min(x + 3, width - 40), AXIS / 2);
    }
  }
  function time(ns, step = 0) {
    const size = Math.max(Math.abs(ns), step);
    const [unit, by] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : size >= 1e3 ? ["µs", 1e3] : ["ns", 1];
    const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / by))) : by === 1 ? 0 : 3;
    return `${(ns / by).toFixed(Math.min(digits, 6))} ${unit}`;
  }
  function show(from, to) {
    const span = Math.min(Math.max(to - from, LEAST_NS), head.length_ns);
    from = Math.min(Math.max(from, 0), head.length_ns - span);
    [state.from, state.to] = [from, from + span];
    later();
  }
  function zoom(by, around = (state.from + state.to) / 2) {
    show(around - (around - state.from) * by, around + (state.to - around) * by);
  }
  const pan = (share) => { const by = (state.to - state.from) * share; show(state.from + by, state.to + by); };
  function lineAt(y) { return lines.find((line) => y + pane.scrollTop >= line.y && y + pane.scrollTop < line.y + line.h); }
  function eventAt(x, y) {
    const line = y < AXIS ? null : lineAt(y);
    if (!line?.run) return [line, -1];
    const slack = (state.to - state.from) / width * 2, at = state.from + x / width * (state.to - state.from);
    const i = firstAfter(line.run, at - slack);
    return [line, i < line.run[0] + line.run[1] && start[i] <= at + slack ? i : -1];
  }
  function select(line, i) {
    state.at = i;
    state.selected = line;
    if (i >= 0) {
      const track = head.tracks[line.t];
      said.textContent = `${head.names[name[i]]} · ${time(end[i] - start[i])} · from ${time(start[i])} · ` +
        `${head.kinds[kind[i]][0]}${lit[i] ? ", on the critical path" : ""} · ${[track.group, track.title].filter(Boolean).join(", ")}`;
    }
    later();
  }
  function reveal(i) {
    const t = head.tracks.findIndex((track) => track.runs.some(([first, count]) => i >= first && i < first + count));
    const row = head.tracks[t].runs.findIndex(([first, count]) => i >= first && i < first + count);
    state.hidden.delete(head.tracks[t].source);
    if (row > 0 && !open.has(t)) { open.add(t); }
    layOut();
    const line = lines.find((one) => one.t === t && one.row === row);
    if (line.y - pane.scrollTop < AXIS || line.y - pane.scrollTop > height - ROW) pane.scrollTop = line.y - height / 2;
    const span = Math.min(Math.max((end[i] - start[i]) * 12, (state.to - state.from) / 6, LEAST_NS), state.to - state.from);
    const middle = (start[i] + end[i]) / 2;
    show(middle - span / 2, middle + span / 2);
    select(line, i);
  }
  /* -- search ---------------------------------------------------------------------------------------------------- */
  const input = figure.querySelector("input"), status = figure.querySelector(".hits");
  let found = [], place = -1;
  function search() {
    const text = input.value.trim().toLowerCase();
    state.hits = text ? new Set(head.names.flatMap((one, i) => one.toLowerCase().includes(text) ? [i] : [])) : null;
    found = [];
    place = -1;
    if (text) for (let i = 0; i < name.length; i++) if (state.hits.has(name[i])) found.push(i);
    found.sort((a, b) => start[a] - start[b]);
    status.textContent = text ? `${found.length.toLocaleString("en-US")} found` : "";
    later();
  }
  function go(by) {
    if (!found.length) return;
    place = (place + by + found.length) % found.length;
    status.textContent = `${(place + 1).toLocaleString("en-US")} of ${found.length.toLocaleString("en-US")}`;
    reveal(found[place]);
  }
  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") go(event.shiftKey ? -1 : 1); });
  const actions = { in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, head.length_ns), next: () => go(1), previous: () => go(-1) };
  figure.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));
  /* -- toggles --------------------------------------------------------------------------------------------------- */
  const toggles = figure.querySelector(".toggles");
  function toggle(text, pressed, change) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-pressed", pressed);
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", now);
      change(now);
    });
    toggles.append(button, " ");
  }
  const sources = [...new Set(head.tracks.map((track) => track.source))].filter(Boolean);
  if (sources.length > 1) for (const source of sources)
    toggle(source, true, (on) => { on ? state.hidden.delete(source) : state.hidden.add(source); layOut(); });
  if (lit.some((one) => one)) toggle("critical path alone", false, (on) => { state.bright = on; later(); });
  /* -- mouse, touch, keys ---------------------------------------------------------------------------------------- */
  const fingers = new Map();
  let moved = 0, spread = 0;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
    moved = 0;
    spread = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) {
      const [line, i] = eventAt(event.offsetX, event.offsetY);
      canvas.style.cursor = line?.fold ? "pointer" : "";
      if (i >= 0 && i !== state.at) select(line, i);
      return;
    }
    const before = fingers.get(event.pointerId), span = state.to - state.from;
    fingers.set(event.pointerId, event.offsetX);
    if (fingers.size === 1) {
      moved += Math.abs(event.offsetX - before);
      canvas.classList.add("dragging");
      show(state.from - (event.offsetX - before) / width * span, state.to - (event.offsetX - before) / width * span);
    } else {
      moved = 99;
      const [a, b] = [...fingers.values()], now = Math.max(Math.abs(a - b), 10);
      if (spread) zoom(spread / now, state.from + (a + b) / 2 / width * span);
      spread = now;
    }
  });
  const lift = (event) => { fingers.delete(event.pointerId); spread = 0; canvas.classList.remove("dragging"); };
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerup", (event) => {
    lift(event);
    if (moved > 4) return;
    const [line, i] = eventAt(event.offsetX, event.offsetY);
    if (line?.fold) { open.has(line.t) ? open.delete(line.t) : open.add(line.t); layOut(); }
    else if (i >= 0) select(line, i);
  });
  canvas.addEventListener("dblclick", (event) => { const [, i] = eventAt(event.offsetX, event.offsetY); if (i >= 0) reveal(i); });
  canvas.addEventListener("wheel", (event) => {
    const around = state.from + event.offsetX / width * (state.to - state.from);
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(event.deltaY * 0.004), around); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / width);
    }
  }, { passive: false });
  function neighbour(by) {
    const line = state.selected ?? lines.find((one) => one.run);
    const i = state.at < 0 ? firstAfter(line.run, state.from) : state.at + by;
    if (i < line.run[0] || i >= line.run[0] + line.run[1]) return;
    if (start[i] > state.to || end[i] < state.from) pan(by * 0.5);
    select(line, i);
  }
  function otherRow(by) {
    const rows = lines.filter((one) => one.run);
    const old = rows.findIndex((one) => one.t === state.selected?.t && one.row === state.selected?.row);
    const line = rows[Math.min(Math.max(old + by, 0), rows.length - 1)];
    const time_ = state.at >= 0 ? start[state.at] : state.from;
    const i = Math.min(firstAfter(line.run, time_), line.run[0] + line.run[1] - 1);
    if (line.y - pane.scrollTop < AXIS || line.y - pane.scrollTop > height - ROW) pane.scrollTop = line.y - height / 2;
    select(line, i);
  }
  const keys = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, head.length_ns),
                 w: () => zoom(0.6), s: () => zoom(1 / 0.6), a: () => pan(-0.2), d: () => pan(0.2), n: () => go(1), p: () => go(-1),
                 Enter: () => state.at >= 0 && reveal(state.at), ArrowUp: () => otherRow(-1), ArrowDown: () => otherRow(1) };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const act = along ? () => event.shiftKey ? neighbour(along) : pan(along * 0.15) : keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  pane.addEventListener("scroll", later, { passive: true });
  new ResizeObserver(() => { if (canvas.clientWidth !== width) layOut(); }).observe(canvas);
  foretrace.dark.addEventListener("change", recolour);
  const legend = figure.querySelector(".legend-line");
  for (const [text, colour] of head.legend) {
    const item = document.createElement("span"), swatch = document.createElement("span");
    swatch.className = `swatch ${colour}`;
    item.append(swatch, text);
    legend.append(item);
  }
  figure.timeline = { state, show, zoom, pan, draw, draws: 0, last_ms: 0, events: name.length, open, search };
  recolour();
  layOut();
  figure.dataset.done = "yes";
};

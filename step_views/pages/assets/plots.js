"use strict";
/* Plots: Vega draws them as SVG. Their colours are the page's own, so that they follow it into the dark. */
foretrace.plotConfig = () => {
  const c = foretrace.colour;
  const axis = { labelColor: c("quiet"), titleColor: c("quiet"), gridColor: c("faint"), domainColor: c("line"),
                 tickColor: c("line"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: 220 };
  return {
    background: "transparent", font: "system-ui, sans-serif", axis, view: { stroke: null },
    legend: { labelColor: c("text"), titleColor: c("quiet"), labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
              orient: "bottom", labelLimit: 240, columns: innerWidth < 620 ? 2 : 5, symbolLimit: 20 },
    text: { color: c("text") }, rule: { color: c("text") }, header: { labelColor: c("text"), titleColor: c("quiet") },
  };
};
/* "@{name}" stands for the page's colour of that name. */
foretrace.coloured = (value) => {
  if (typeof value === "string") return value.replace(/@\{([\w-]+)\}/g, (_, name) => foretrace.colour(name));
  if (Array.isArray(value)) return value.map(foretrace.coloured);
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, k === "values" ? v : foretrace.coloured(v)]));
  return value;
};
foretrace.plot = async (element) => {
  const spec = await foretrace.value(`data-${element.dataset.plot}`);
  await foretrace.library("library-plots");
  element.view?.finalize();
  const result = await window.vegaEmbed(element, foretrace.coloured(spec), {
    ast: true, renderer: "svg", actions: false, config: foretrace.plotConfig(), mode: element.dataset.vega ? "vega" : "vega-lite",
    tooltip: { theme: "custom" } });
  element.view = result.view;
  element.setAttribute("aria-label", spec.description);
  element.dataset.done = "yes";
};

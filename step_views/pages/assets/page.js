"use strict";
/* What is far down is made when it comes near. */
(() => {
  const makers = [["[data-table]", foretrace.table], ["[data-plot]", foretrace.plot], ["[data-timeline]", foretrace.timeline]];
  const made = new Map();
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || made.has(entry.target)) continue;
      const [, make] = makers.find(([selector]) => entry.target.matches(selector));
      made.set(entry.target, make);
      near.unobserve(entry.target);
      make(entry.target).catch((error) => { entry.target.dataset.failed = String(error); console.error(error); });
    }
  }, { rootMargin: "300px" });
  for (const [selector] of makers) document.querySelectorAll(selector).forEach((element) => near.observe(element));
  foretrace.dark.addEventListener("change", () => {
    for (const [element, make] of made) if (make === foretrace.plot) make(element);
  });
  const links = new Map([...document.querySelectorAll(".sections a")].map((a) => [a.hash.slice(1), a]));
  const here = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach((a) => a.removeAttribute("aria-current"));
      const link = links.get(entry.target.id), bar = document.querySelector(".sections ul");
      link?.setAttribute("aria-current", "true");
      if (link) bar.scrollLeft = link.offsetLeft - bar.offsetLeft - (bar.clientWidth - link.offsetWidth) / 2;
    }
  }, { rootMargin: "-15% 0px -80% 0px" });
  document.querySelectorAll("main > section").forEach((section) => here.observe(section));
  document.body.dataset.ready = "yes";
})();

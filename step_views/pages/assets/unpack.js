"use strict";
/* Data of the page: JSON as it is or gzipped, packed columns, and libraries as modules. */
const foretrace = { ready: {} };
foretrace.bytes = (id) => {
  const text = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
};
foretrace.unzipped = async (id) => {
  const stream = new Blob([foretrace.bytes(id)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};
foretrace.value = async (id) => {
  const element = document.getElementById(id);
  if (!element.dataset.form) return JSON.parse(element.textContent);
  return JSON.parse(new TextDecoder().decode(await foretrace.unzipped(id)));
};
foretrace.columns = async (id) => {
  const bytes = await foretrace.unzipped(id);
  const end = bytes.indexOf(10);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  const found = {};
  let at = end + 1;
  for (const [name, width, length] of head.columns) {
    const column = width === 1 ? new Uint8Array(length) : width === 2 ? new Uint16Array(length) : new Uint32Array(length);
    const own = new Uint8Array(column.buffer); // every machine with a browser is little-endian
    for (let plane = 0; plane < width; plane++)
      for (let i = 0; i < length; i++) own[i * width + plane] = bytes[at++];
    found[name] = column;
  }
  return { head, columns: found };
};
/* A library is unpacked when it is first needed, and once. */
foretrace.library = (id) => foretrace.ready[id] ??= (async () => {
  const url = URL.createObjectURL(new Blob([await foretrace.unzipped(id)], { type: "text/javascript" }));
  const module = await import(url);
  URL.revokeObjectURL(url);
  return module;
})();
foretrace.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
foretrace.dark = matchMedia("(prefers-color-scheme: dark)");

"use strict";
/* Long tables: DataTables sorts, filters and leafs through them. Cells are texts and never markup. */
foretrace.table = async (element) => {
  const key = element.dataset.table;
  const [library, data] = await Promise.all([
    foretrace.library("library-tables"), foretrace.value(`data-${key}`)]);
  const escaped = library.default.util.escapeHtml;
  const rows = data.rows.map((row, i) => Object.assign([...row], { at: i }));
  const columns = data.titles.map((title, c) => ({
    title: escaped(title),
    className: data.number[c] ? "number" + (data.share[c] ? " share" : "") : "name",
    type: data.order[c] ? "num" : "string",
    orderSequence: data.number[c] ? ["desc", "asc"] : ["asc", "desc"],
    render: (value, kind, row) => {
      if (kind === "sort" || kind === "type") return data.order[c] ? data.order[c][row.at] ?? -Infinity : row[c];
      if (kind === "filter") return row[c];
      const text = escaped(row[c]);
      return !data.number[c] && row[c].length > 40 ? `<span class="long-name${data.path[c] ? " path" : ""}" title="${text}"><bdi>${text}</bdi></span>` : text;
    },
    createdCell: (cell, value, row) => {
      const share = data.share[c]?.[row.at];
      if (share != null) cell.style.setProperty("--share", Math.min(Math.max(share, 0), 1));
    },
  }));
  const table = element.querySelector("table");
  table.querySelector("thead").remove();
  const made = new library.default(table, {
    data: rows, columns, order: [], pageLength: data.page, autoWidth: false, deferRender: true,
    layout: { topStart: "search", topEnd: null, bottomStart: rows.length > data.page ? "paging" : null, bottomEnd: "info" },
    pagingType: "simple_numbers",
    language: { search: "Filter", info: "_START_ to _END_ of _TOTAL_", infoFiltered: "(of _MAX_ in all)",
                infoEmpty: "none", zeroRecords: "Nothing matches.", paginate: { previous: "‹", next: "›" } },
  });
  element.dataset.done = "yes";
  return made;
};

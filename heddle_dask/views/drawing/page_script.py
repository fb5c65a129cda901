"""The script of a page: its theme, saving a chart as SVG, and a table that can be sorted, searched and paged."""

SCRIPT = """
(() => {
  const root = document.documentElement;
  document.getElementById("theme").onclick = () => {
    const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const dark = (root.dataset.theme || wanted) === "dark";
    root.dataset.theme = dark ? "light" : "dark";
  };
  for (const figure of document.querySelectorAll("figure")) {
    const chart = figure.querySelector("svg");
    if (!chart) continue;
    const button = document.createElement("button");
    button.className = "save tools-save"; button.type = "button"; button.textContent = "SVG";
    button.title = "Save this chart as an SVG file, in the light colours";
    button.onclick = () => {
      const before = root.dataset.theme; root.dataset.theme = "light";
      const style = getComputedStyle(root);
      const value = (_, name) => style.getPropertyValue(name).trim();
      const text = chart.outerHTML.replace(/var\\((--[\\w-]+),[^)]*\\)/g, value)
        .replace(">", '><style>text{font:11px sans-serif;fill:' + style.getPropertyValue("--ink") + '}</style>');
      if (before) root.dataset.theme = before; else delete root.dataset.theme;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
      const heading = figure.closest("section")?.querySelector("h2,h3");
      link.download = (heading ? heading.textContent : "chart").toLowerCase().replace(/[^a-z0-9]+/g, "-") + ".svg";
      link.click();
    };
    figure.prepend(button);
  }
  const data = document.getElementById("rows-data");
  if (!data) return;
  const {columns, rows} = JSON.parse(data.textContent);
  const place = document.getElementById("rows"), size = 25;
  let shown = rows, from = 0, by = -1, down = true;
  const head = place.querySelector("thead tr"), body = place.querySelector("tbody");
  const count = document.getElementById("rows-count"), search = document.getElementById("rows-search");
  const cell = (value, column) => {
    const td = document.createElement("td");
    if (column.text) td.className = "text";
    td.textContent = value === null ? "" : column.text ? value
      : value.toLocaleString("en", {minimumFractionDigits: column.digits, maximumFractionDigits: column.digits});
    return td;
  };
  const draw = () => {
    body.replaceChildren(...shown.slice(from, from + size).map(row => {
      const tr = document.createElement("tr");
      tr.append(...row.map((value, i) => cell(value, columns[i])));
      return tr;
    }));
    const last = Math.min(from + size, shown.length);
    count.textContent = shown.length ? `${from + 1} to ${last} of ${shown.length}` : "none";
  };
  columns.forEach((column, i) => {
    const th = document.createElement("th");
    th.textContent = column.name; th.className = column.text ? "sorts text" : "sorts"; th.tabIndex = 0;
    th.onclick = () => {
      down = by === i ? !down : !column.text; by = i; from = 0;
      const sign = down ? -1 : 1;
      const order = (x, y) => x === y ? 0 : x === null ? 1 : y === null ? -1 : x < y ? -sign : sign;
      shown = [...shown].sort((a, b) => order(a[i], b[i]));
      for (const other of head.children) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw();
    };
    th.onkeydown = event => { if (event.key === "Enter") th.click(); };
    head.append(th);
  });
  search.oninput = () => {
    const words = search.value.toLowerCase();
    const has = value => String(value ?? "").toLowerCase().includes(words);
    shown = rows.filter(row => row.some((value, i) => columns[i].text && has(value)));
    from = 0; draw();
  };
  document.getElementById("rows-before").onclick = () => { from = Math.max(0, from - size); draw(); };
  document.getElementById("rows-after").onclick = () => { if (from + size < shown.length) from += size; draw(); };
  draw();
})();
"""

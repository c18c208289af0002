// Numbers and times as people read them. Text from elsewhere goes into the page as text, never as markup.

export const number = (value) => {
  const found = typeof value === "string" ? Number(value) : value;
  return found === null || found === undefined || Number.isNaN(found) ? null : found;
};

export const count = (value) => (number(value) === null ? "–" : Math.round(value).toLocaleString("en"));

const notFinite = (value) => ["nan", "inf", "-inf"].includes(value);  // for which JSON has no word

export const short = (value) => {
  if (notFinite(value)) return value;
  let found = number(value);
  if (found === null || !Number.isFinite(found)) return found === null ? "–" : String(found);
  for (const unit of ["", "k", "M", "G", "T", "P"]) {
    if (Math.abs(found) < 999.5) return `${Number(found.toPrecision(3))}${unit}`;
    found /= 1000;
  }
  return `${Number(found.toPrecision(3))}E`;
};

export const flops = (value) => {
  const text = short(value);
  return /[A-Z]$/i.test(text) ? `${text.slice(0, -1)} ${text.slice(-1)}FLOP/s` : `${text} FLOP/s`;
};

export const figure = (value) => {
  if (notFinite(value)) return value;
  const found = number(value);
  if (found === null) return "–";
  if (found === 0 || (Math.abs(found) >= 1e-3 && Math.abs(found) < 1e5)) return found.toFixed(4);
  return found.toExponential(3);
};

export const bytes = (value) => {
  let found = number(value);
  if (found === null) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (Math.abs(found) < 999.5) return `${Number(found.toPrecision(3))} ${unit}`;
    found /= 1000;
  }
  return `${Number(found.toPrecision(3))} PB`;
};

export const brief = (seconds) => {
  const found = number(seconds);
  if (found === null) return "–";
  if (found === 0) return "0 s";
  if (Math.abs(found) >= 1) return `${Number(found.toPrecision(3))} s`;
  if (Math.abs(found) >= 1e-3) return `${Number((found * 1e3).toPrecision(3))} ms`;
  return `${Number((found * 1e6).toPrecision(3))} µs`;
};

export const duration = (seconds) => {
  const found = number(seconds);
  if (found === null || !Number.isFinite(found)) return "–";
  const whole = Math.max(0, Math.round(found));
  const days = Math.floor(whole / 86400);
  const pad = (n) => String(n).padStart(2, "0");
  const hours = Math.floor((whole % 86400) / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const clock = whole >= 3600 ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
  return days ? `${days} d ${clock}` : clock;
};

// 100 % is all of it: what is short of that by a hair is not done.
export const percent = (share) => {
  const found = number(share);
  if (found === null) return "–";
  const hundredths = found < 1 ? Math.min(100 * found, 99) : 100 * found;
  return `${hundredths.toFixed(found > 0 && found < 0.0995 ? 1 : 0)} %`;
};

export const clock = (epoch) => new Date(1000 * epoch).toLocaleTimeString("en-GB");

export const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
};

// A table; a column is [heading, cell(row), options]. The first column heads its row.
export const table = (caption, columns, rows, rowClass = () => "") => {
  const head = element("thead", {}, element("tr", {}, ...columns.map(([name, , options = {}]) =>
    element("th", { scope: "col", class: options.number && "number" }, name))));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", { class: rowClass(row) || null },
    ...columns.map(([name, cell, options = {}], index) => element(index ? "td" : "th",
      { scope: index ? null : "row", class: options.number ? "number" : options.class, "data-label": name },
      element("span", { class: "cell" }, ...[cell(row)].flat()))))));
  return element("table", {}, element("caption", { class: "hidden" }, caption), head, body);
};

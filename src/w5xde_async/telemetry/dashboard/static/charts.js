// Charts: loss, throughput and workers by uPlot, the timeline on canvases of its own.
import { clock, figure, percent, short } from "./format.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const made = new Map();

const axis = (options = {}) => ({
  stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 },
  font: "12px system-ui, sans-serif", ...options,
});

const size = (place) => ({
  width: Math.max(place.clientWidth, 200),
  height: Math.max(place.clientHeight - (place.classList.contains("tall") ? 30 : 0), 90),
});

const show = (id, data, options) => {
  const place = document.getElementById(id);
  const empty = data[0].length === 0;
  place.hidden = empty;
  if (empty) return;
  const known = made.get(id);
  if (known) {
    known.setData(data);
    return;
  }
  const chart = new uPlot({ ...size(place), ...options }, data, place);
  made.set(id, chart);
};

export const loss = (rows, logarithmic) => {
  const pick = (column) => rows.map((row) => row[column]);
  const smooth = [];
  const weight = 2 / (1 + Math.max(3, rows.length / 40));
  let mean = null;
  for (const row of rows) {
    if (row[2] !== null) mean = mean === null ? row[2] : mean + weight * (row[2] - mean);
    smooth.push(mean);
  }
  show("chart-loss", [pick(0), pick(3), pick(4), pick(2), smooth], {
    scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
    axes: [axis({ values: (u, ticks) => ticks.map((value) => short(value)) }), axis({ size: 60, values: (u, ticks) => ticks.map((value) => (value === null ? "" : short(value))) })],
    bands: [{ series: [2, 1], fill: color("band") }],
    cursor: { points: { size: 6 } },
    legend: { live: true },
    series: [
      { label: "step", value: (u, value) => (value === null ? "–" : value.toLocaleString("en")) },
      { label: "lowest", stroke: "transparent", width: 0, points: { show: false }, value: (u, value) => figure(value) },
      { label: "highest", stroke: "transparent", width: 0, points: { show: false }, value: (u, value) => figure(value) },
      { label: "loss", stroke: color("compute"), width: 1, alpha: 0.55, points: { show: rows.length < 40, size: 4 }, value: (u, value) => figure(value) },
      { label: "smoothed", stroke: color("accent"), width: 2.5, points: { show: false }, value: (u, value) => figure(value) },
    ],
  });
};

const overTime = (id, rows, column, label, name, format, extra = {}) => show(
  id, [rows.map((row) => row[1]), rows.map((row) => row[column])], {
    legend: { show: false },
    axes: [axis({ space: 80, values: (u, ticks) => ticks.map(clock) }), axis({ size: 60, space: 28, values: (u, ticks) => ticks.map((value) => short(value)), ...extra.axis })],
    scales: { y: { range: (u, low, high) => [0, Math.max(high * 1.1, 1)] } },
    series: [
      { label: "time", value: (u, value) => (value === null ? "–" : clock(value)) },
      { label, stroke: color(name), width: 2, points: { show: false }, value: (u, value) => format(value), ...extra.series },
    ],
  });

export const rate = (rows) => overTime("chart-rate", rows, 5, "samples/s", "compute", short);

export const workers = (rows) => overTime("chart-workers", rows, 6, "workers", "network",
  (value) => (value === null ? "–" : String(value)),
  { axis: { incrs: [1, 2, 5, 10, 20, 50, 100], space: 18 }, series: { paths: uPlot.paths.stepped({ align: 1 }) } });

export const forget = () => {
  for (const chart of made.values()) chart.destroy();
  made.clear();
};

export const resize = () => {
  for (const [id, chart] of made) {
    const place = document.getElementById(id);
    if (place.clientWidth) chart.setSize(size(place));
  }
};

// One lane: what each slice of time was spent on, between ``begin`` and ``end`` (seconds since 1970).
export const lane = (canvas, rows, begin, end) => {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  paint.fillStyle = color("away");
  paint.fillRect(0, 0, width, height - 12);
  paint.fillStyle = color("strip");
  paint.fillRect(0, height - 12, width, 12);
  const at = (time) => Math.round(((time - begin) / Math.max(end - begin, 1)) * width);
  const colors = { compute: color("compute"), wait: color("wait"), network: color("network") };
  const top = height - 12;
  let usual = 1;
  let before = null;
  const sums = { seconds: 0, compute: 0, wait: 0, network: 0 };
  for (const [time, compute, wait, network] of rows) {
    if (compute === null) { before = null; continue; }
    if (before !== null) usual = Math.min(Math.max(time - before, 0.5), 3600);
    const from = at(before === null ? time - usual : before), to = at(time);
    const wide = Math.max(to - from, 1);
    paint.fillStyle = colors.wait;
    paint.fillRect(from, 0, wide, top - 1);
    paint.fillStyle = colors.compute;
    paint.fillRect(from, (top - 1) * (1 - compute), wide, (top - 1) * compute);
    if (network) {
      paint.fillStyle = colors.network;
      paint.fillRect(from, height - 11 * Math.max(network, 0.1), wide, 11 * Math.max(network, 0.1));
    }
    sums.seconds += 1;
    sums.compute += compute;
    sums.wait += wait;
    sums.network += network || 0;
    before = time;
  }
  if (!sums.seconds) return "nothing measured yet";
  const share = (name) => percent(sums[name] / sums.seconds);
  return `computing ${share("compute")}, waiting ${share("wait")}, network ${share("network")}`;
};

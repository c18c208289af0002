// Charts: loss, throughput and workers by uPlot, the timeline on canvases of its own.
import { clock, count, figure, percent, short } from "./format.js";

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

// Steps: in full where short ones would be alike.
const steps = (u, ticks) => {
  const brief = ticks.map(short);
  return new Set(brief).size < ticks.length ? ticks.map(count) : brief;
};

// Powers of ten, and what lies between where there are few: uPlot's own never end where values are 1e-24 and less.
const decades = (u, at, low, high) => {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 8)), ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const digit of last - first < 3 ? [1, 2, 5] : [1]) ticks.push(Number(`${digit}e${power}`));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
};

const powers = {
  incrs: [1e300], splits: decades, filter: (u, ticks) => ticks,  // an increment is wanted, though it has no meaning
  values: (u, ticks) => ticks.map((value) => (value >= 1e-3 && value < 1e6 ? short(value) : value.toExponential())),
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
    axes: [axis({ space: (u, at, low, high) => Math.max(50, 20 + 7 * count(high).length), values: steps }),
      axis({ size: 60, ...(logarithmic ? powers : { values: (u, ticks) => ticks.map(short) }) })],
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

// Where somebody has set the clock back, what was before moves back with it: uPlot wants time to go on.
const times = (rows) => {
  const found = rows.map((row) => row[1]);
  let back = 0;
  for (let i = found.length - 2; i >= 0; i--) {
    back = Math.max(back, found[i] - found[i + 1]);
    found[i] -= back;
  }
  return found;
};

const overTime = (id, rows, column, label, name, format, extra = {}) => show(
  id, [times(rows), rows.map((row) => row[column])], {
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
  { axis: { incrs: [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)), space: 18 }, series: { paths: uPlot.paths.stepped({ align: 1 }) } });

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

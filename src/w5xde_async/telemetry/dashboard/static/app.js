// The run as pages: one snapshot, then updates (server-sent events). Only the page that is shown is drawn.
import * as charts from "./charts.js";
import { brief, bytes, clock, count, duration, element, figure, flops, number, percent, short, table } from "./format.js";

const PAGES = ["status", "workers", "timeline", "checkpoints", "config", "logs"];
const MOST_ROWS = 3000, MOST_LOGS = 400, SILENT_MS = 20000;
const by = (id) => document.getElementById(id);

let run = {}, settings = {}, status = {}, rows = [], workers = new Map(), lanes = new Map();
let evaluations = [], checkpoints = [], logs = [], finished = null, at = 0, begun = 0;
let page = "status", drawing = false, heard = 0, connected = false;

// -- data

const thin = (list) => {  // neighbours become one, so that the whole run stays
  const fewer = [];
  for (let i = 0; i + 1 < list.length; i += 2) {
    const [a, b] = [list[i], list[i + 1]];
    fewer.push(b.map((value, column) => {
      const other = a[column];
      if (value === null) return column < 2 ? value : other;
      if (other === null || ![2, 3, 4, 5, 7].includes(column)) return value;
      return column === 3 ? Math.min(value, other) : column === 4 ? Math.max(value, other) : (value + other) / 2;
    }));
  }
  if (list.length % 2) fewer.push(list[list.length - 1]);
  return fewer;
};

const take = (data, whole) => {
  at = data.time;
  begun ||= at;
  heard = Date.now();
  status = data.status;
  finished = data.finished;
  if (whole) {
    run = data.run;
    settings = data.settings;
    rows = data.series.rows;
    workers = new Map(data.workers.map((worker) => [worker.worker_id, worker]));
    lanes = new Map(Object.entries(data.timelines.rows));
    ({ evaluations, checkpoints, logs } = data);
  } else {
    rows.push(...(data.series || []));
    if (rows.length > MOST_ROWS) rows = thin(rows);
    for (const id of data.removed || []) { workers.delete(id); lanes.delete(id); }
    for (const worker of data.workers || []) workers.set(worker.worker_id, worker);
    for (const [id, more] of Object.entries(data.timelines || {})) {
      const known = [...(lanes.get(id) || []), ...more];
      lanes.set(id, known.length > 2000 ? known.slice(-1500) : known);
    }
    evaluations.push(...(data.evaluations || []));
    checkpoints = [...checkpoints, ...(data.checkpoints || [])].slice(-50);
    logs = [...logs, ...(data.logs || [])].slice(-MOST_LOGS);
  }
  draw();
};

// -- pages

const tile = (name, value, note = "") => element("div", {}, element("dt", {}, name),
  element("dd", {}, value, ...(note ? [element("small", {}, note)] : [])));

const badge = () => {
  const kinds = { running: "good", finished: "good", waiting: "warn", starting: "", stopped: "warn", failed: "bad" };
  const state = status.state || "connecting";
  by("state").textContent = state;
  by("state").className = `badge ${kinds[state] || ""}`;
};

const drawStatus = () => {
  const total = number(status.total_steps) || 0, step = number(status.step) || 0;
  by("progress").max = total || 1;
  by("progress").value = step;
  const eta = number(status.eta_s) ? `about ${duration(status.eta_s)} left` : "";
  by("progress-text").textContent = total ? `${count(step)} of ${count(total)} steps · ${percent(step / total)}${eta ? ` · ${eta}` : ""}` : `${count(step)} steps`;
  const last = evaluations[evaluations.length - 1];
  const vain = number(status.leaves_in_vain) || 0, leaves = number(status.leaves) || 0;
  const arithmetic = [...workers.values()].reduce((sum, worker) => sum + (number(worker.flops_per_s) || 0), 0);
  by("tiles").replaceChildren(
    tile("Loss", figure(status.loss), status.epoch === undefined ? "" : `epoch ${count(status.epoch)}`),
    ...Object.entries(status.metrics || {}).slice(0, 4).map(([name, value]) => tile(name, figure(value), `metric of step ${count(status.step)}`)),
    tile("Throughput", `${short(status.samples_per_s)}/s`, status.step_s ? `samples; ${brief(status.step_s)} a step` : "samples"),
    tile("Workers", count(status.num_workers || 0), status.num_joining ? `${count(status.num_joining)} joining` : ""),
    tile("In vain", leaves + vain ? percent(vain / (leaves + vain)) : "–", "leaves computed and not used"),
    ...(number(status.staleness) === null ? [] : [tile("Staleness", short(status.staleness), "versions, of the last results")]),
    tile("Learning rate", number(status.learning_rate) === null ? "–" : Number(status.learning_rate).toPrecision(3),
      number(status.gradient_norm) === null ? "" : `gradient norm ${short(status.gradient_norm)}`),
    tile("Network", bytes((number(status.bytes_sent) || 0) + (number(status.bytes_received) || 0)),
      `${bytes(status.bytes_sent)} out, ${bytes(status.bytes_received)} in`),
    tile("Elapsed", duration(status.uptime_s), run.resumed_step ? `resumed at step ${count(run.resumed_step)}` : ""),
    tile("Compute", arithmetic ? flops(arithmetic) : "–", `coordinator's memory ${bytes(status.host_bytes)}`),
    ...Object.entries(last ? last.metrics : {}).slice(0, 4).map(([name, value]) => tile(name, figure(value), `evaluated at step ${count(last.step)}`)),
  );
  charts.loss(rows, by("log-scale").checked);
  charts.rate(rows);
  charts.workers(rows);
  by("now-rate").textContent = `${short(status.samples_per_s)} samples/s now`;
  by("now-workers").textContent = `${count(status.num_workers || 0)} now`;
  const phases = Object.entries(status.phases_s || {});
  const most = Math.max(...phases.map(([, seconds]) => number(seconds) || 0), 1e-9);
  by("phases").replaceChildren(...(phases.length ? phases.map(([name, seconds]) => bar(name, seconds / most, brief(seconds)))
    : [element("p", { class: "empty shown" }, "No step yet.")]));
  const verdicts = [["applied", leaves, "leaves"], ["wasted", vain, "leaves"], ["stale", status.leases_stale, "leases that came too late"],
    ["duplicate", status.leases_duplicate, "leases that another had done"], ["rejected", status.leases_rejected, "leases that the rule refused"],
    ["backed up", status.leases_backed_up, "leases given to a second worker"],
    ...[["held", status.results_held, "odd results, computed by another too"], ["agreed", status.audits_agreed, "audits"],
      ["disagreed", status.audits_disagreed, "audits"], ["quarantined", status.workers_quarantined, "workers"]].filter((row) => row[1])];
  by("verdicts").replaceChildren(table("Verdicts", [["Verdict", (row) => row[0]], ["", (row) => row[2], { class: "dim" }],
    ["Number", (row) => count(row[1] || 0), { number: true }]], verdicts));
  const names = last ? Object.keys(last.metrics) : [];
  const best = evaluations.filter((row) => row.best).pop();
  by("evaluations").replaceChildren(names.length ? table("Evaluations", [["Step", (row) => `${count(row.step)}${row === best ? " · best" : ""}`],
    ...names.map((name) => [name, (row) => figure(row.metrics[name]), { number: true }])], evaluations.slice(-8).reverse())
    : element("p", { class: "empty shown" }, "None yet."));
};

const bar = (name, share, text) => {
  const label = element("span", {}, name);
  return element("div", { class: "bar" }, label,
    element("meter", { min: 0, max: 1, value: Math.max(0, Math.min(1, share)), "aria-label": `${name}: ${text}` }), element("span", {}, text));
};

const sorted = () => [...workers.values()].sort((a, b) => Boolean(a.left) - Boolean(b.left) || String(a.name).localeCompare(String(b.name)));

const drawWorkers = () => {
  const list = sorted();
  if (!list.length) {
    by("workers").replaceChildren(element("p", { class: "empty shown" },
      "No worker has joined yet. The coordinator has printed the command that starts one."));
    return;
  }
  const small = (text) => element("small", {}, text);
  // Without a codec both counts are equal and no time is spent: nothing to tell.
  const coded = (worker) => number(worker.encoded_bytes) && (worker.encode_s > 0 || worker.raw_bytes !== worker.encoded_bytes);
  const ratio = (worker) => (coded(worker) ? worker.raw_bytes / worker.encoded_bytes : null);
  by("workers").replaceChildren(table("Workers", [
    ["Worker", (worker) => [String(worker.name || worker.worker_id)]],
    ["State", (worker) => [element("span", { class: `badge ${{ ready: "good", late: "warn", lost: "bad" }[worker.state] || ""}` }, worker.state || "joining")]],
    ["Device", (worker) => [`${worker.device || "–"}`, small(`${worker.threads || 0} thread${worker.threads === 1 ? "" : "s"} · ${worker.peer || ""}${worker.link === "shm" ? " · shared memory" : ""}`)]],
    ["Waits for", (worker) => (worker.left ? [`left: ${worker.waits_for}`] : [worker.waits_for || "–", ...(worker.waits_for ? [] : [small("computing")])]), { class: "path" }],
    ["Busy", (worker) => percent(worker.busy), { number: true }],
    ["Speed", (worker) => [`${short(worker.leaves_per_s)} leaves/s`, ...(number(worker.flops_per_s) ? [small(flops(worker.flops_per_s))] : [])], { number: true }],
    ["Share", (worker) => [percent(worker.share), small(`${count(worker.leaves)} leaves`)], { number: true }],
    ["Round trip", (worker) => [number(worker.rtt_s) === null ? "–" : brief(worker.rtt_s),
      ...(number(worker.retransmits) ? [small(`${count(worker.retransmits)} sent again`)] : [])], { number: true }],
    ["Network", (worker) => [`${bytes(worker.bytes_sent)} sent`, small(`${bytes(worker.bytes_received)} received`),
      ...(ratio(worker) ? [small(`codec ${ratio(worker).toFixed(1)}×, ${brief(worker.encode_s)}`)] : [])], { number: true }],
    ["Memory", (worker) => [number(worker.host_bytes) ? bytes(worker.host_bytes) : "–",
      ...(number(worker.device_total_bytes) ? [small(`device ${bytes(worker.device_bytes)} of ${bytes(worker.device_total_bytes)}`)] : [])], { number: true }],
  ], list, (worker) => (worker.left ? "gone" : "")));
};

const drawTimeline = () => {
  const place = by("timeline"), list = sorted().filter((worker) => (lanes.get(worker.worker_id) || []).length);
  if (!list.length) {
    place.replaceChildren(element("p", { class: "empty shown" }, "Nothing measured yet: the timeline begins with the first worker."));
    return;
  }
  let begin = Infinity, end = 0;
  for (const worker of list) {
    const lane = lanes.get(worker.worker_id);
    begin = Math.min(begin, lane[0][0]);
    end = Math.max(end, lane[lane.length - 1][0]);
  }
  const wanted = list.map((worker) => worker.worker_id).join(" ");
  if (place.dataset.shown !== wanted) {
    place.dataset.shown = wanted;
    place.replaceChildren(...list.map((worker) => element("div", { class: "lane", "data-id": worker.worker_id },
      element("h3", {}, element("span", {}, String(worker.name)), element("span", { class: "dim" })),
      element("canvas", { role: "img" }))), element("div", { class: "axis" }, element("span", {}), element("span", {})));
  }
  for (const [index, worker] of list.entries()) {
    const box = place.children[index], canvas = box.querySelector("canvas");
    const text = charts.lane(canvas, lanes.get(worker.worker_id), begin, end);
    canvas.setAttribute("aria-label", `${worker.name}: ${text}`);
    box.querySelector(".dim").textContent = `${text}${worker.left ? ` · ${worker.state}` : ""}`;
  }
  const [from, to] = place.lastElementChild.children;
  from.textContent = clock(begin);
  to.textContent = clock(end);
};

const drawCheckpoints = () => by("checkpoints").replaceChildren(checkpoints.length ? table("Checkpoints", [
  ["Step", (row) => count(row.step)], ["Written", (row) => clock(row.time)], ["Size", (row) => bytes(row.nbytes), { number: true }],
  ["Took", (row) => brief(row.seconds), { number: true }], ["Run paused", (row) => brief(row.pause_s), { number: true }],
  ["Path", (row) => row.path, { class: "path" }]], [...checkpoints].reverse())
  : element("p", { class: "empty shown" }, "None written yet in this session."));

const pairs = (caption, values) => table(caption, [["Name", (row) => row[0]], ["Value", (row) => row[1], { class: "path" }]],
  Object.entries(values).map(([name, value]) => [name, value === null || value === "" ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)]));

const drawConfig = () => {
  by("run").replaceChildren(pairs("Run", run));
  const flat = Object.assign({}, ...Object.values(settings).map((value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {})));
  by("settings").replaceChildren(pairs("Settings", Object.keys(flat).length ? flat : settings));
};

const drawLogs = () => {
  const wanted = by("log-filter").value.toLowerCase(), warnings = by("log-warnings").checked;
  const lines = logs.filter((line) => (!warnings || !["info", "debug"].includes(line.level)) && line.text.toLowerCase().includes(wanted));
  by("logs").replaceChildren(...(lines.length ? lines.reverse().map((line) => element("li", { class: line.level },
    element("time", {}, clock(line.time)), element("span", { class: "level" }, line.level), element("span", { class: "text" }, line.text)))
    : [element("li", {}, logs.length ? "No line matches." : "Nothing has been logged.")]));
};

const DRAW = { status: drawStatus, workers: drawWorkers, timeline: drawTimeline, checkpoints: drawCheckpoints, config: drawConfig, logs: drawLogs };

const draw = () => {
  if (drawing || !at) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    badge();
    const name = run.run_name || "w5xde-async";
    by("run-name").textContent = name;
    const total = number(status.total_steps);
    document.title = total ? `${percent((number(status.step) || 0) / total)} ${name}` : name;
    const waits = status.state === "waiting" && status.waits_for;
    by("waiting").hidden = !waits;
    if (waits) by("waiting").textContent = `Waiting: ${status.waits_for}`;
    if (finished) {
      by("waiting").hidden = !finished.reason;
      by("waiting").textContent = `The run is ${finished.outcome}: ${finished.reason}`;
    }
    by("updated").textContent = `Updated ${clock(at)}.`;
    DRAW[page]();
  });
};

// -- moving about

const go = () => {
  const wanted = location.hash.slice(1);
  page = PAGES.includes(wanted) ? wanted : "status";
  for (const name of PAGES) by(`page-${name}`).hidden = name !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
  charts.resize();
};

const dress = (theme) => {
  document.documentElement.dataset.theme = theme;
  by("theme").textContent = theme === "dark" ? "Light" : "Dark";
  charts.forget();
  draw();
};

const stored = () => { try { return localStorage.getItem("w5xde-theme"); } catch { return null; } };
const preferred = matchMedia("(prefers-color-scheme: dark)");
dress(stored() || (preferred.matches ? "dark" : "light"));
preferred.addEventListener("change", (event) => { if (!stored()) dress(event.matches ? "dark" : "light"); });
by("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("w5xde-theme", theme); } catch { /* private windows may keep nothing */ }
  dress(theme);
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  if (event.key >= "1" && event.key <= String(PAGES.length)) location.hash = PAGES[event.key - 1];
  else if (event.key === "t") by("theme").click();
});
by("log-scale").addEventListener("change", () => { charts.forget(); draw(); });
by("log-filter").addEventListener("input", draw);
by("log-warnings").addEventListener("change", draw);
window.addEventListener("hashchange", go);
window.addEventListener("resize", () => { charts.resize(); draw(); });
go();

// -- the connection

const say = (text, trouble = "") => {
  by("live").textContent = text;
  by("trouble").hidden = !trouble;
  by("trouble").textContent = trouble;
};

const connect = () => {
  const events = new EventSource("/events");
  events.addEventListener("snapshot", (event) => { connected = true; say("live"); take(JSON.parse(event.data), true); });
  events.addEventListener("update", (event) => { if (!connected) { connected = true; say("live"); } take(JSON.parse(event.data), false); });
  events.onerror = () => {
    connected = false;
    const since = at ? ` Shown is the run as it was at ${clock(at)}.` : "";
    if (finished) {
      say("ended", "");
      events.close();
    } else {
      const refused = events.readyState === EventSource.CLOSED;
      const why = refused ? "The coordinator lets this page in no more; if it was started anew, open the link that it has printed."
        : "The coordinator does not answer; trying again.";
      say("not connected", why + since);
      if (refused) setTimeout(connect, 3000);
    }
  };
};
connect();
setInterval(() => {
  if (connected && !finished && Date.now() - heard > SILENT_MS) say("live, nothing new");
}, 5000);

// The page of `umbra dash`: asks the server for what is new, and draws it. In a report, the answers are in
// the page. Texts of the run are only ever set as text, never as HTML.
"use strict";

const POLL_MS = 2000;
const LONG_S = 30; // a wait or step may be a hang if it is also three times as long as the last step
const NUMBERS = [["Reward", "rollout/reward_mean"], ["Held-out accuracy", "eval/accuracy"],
  ["Tokens per second", "rollout/tokens_per_s"], ["Seconds per step", "time/step_s"],
  ["Tokens per completion", "rollout/completion_len_mean"], ["Largest staleness", "rollout/staleness_max"]];
const RESULTS = [["Accuracy before", "accuracy_before"], ["Accuracy after", "accuracy_after"],
  ["Reward, first tenth", "reward_first"], ["Reward, last tenth", "reward_last"], ["Engine restarts", "engine_restarts"]];
const STATES = { STARTING: ["warn", "starting"], PENDING_WEIGHTS: ["warn", "waiting for weights"],
  UPDATING: ["busy", "getting weights"], PAUSED: ["busy", "paused"], SERVING: ["good", "serving"], ASLEEP: ["", "asleep"],
  WAKING: ["busy", "waking"], DEAD: ["bad", "dead"] };
const EVENTS = { restart: "warn", fault: "warn", lost: "bad", sync_failed: "warn", failed: "bad", serves: "good", joined: "good" };
const FAULTS = ["rollout/engines_lost", "sync/failed_engines"];

const $ = (id) => document.getElementById(id);
const rows = new Map(); // by step
const charts = [];
const files = {}; // which file each kind of lines came from
const recorded = JSON.parse($("recorded")?.textContent ?? "null"); // a report's answers by address
const evaluations = new Map(); // by step
let run = null, events = [], numEvents = 0, numMetrics = 0, numEvaluations = 0;
// The list of samples: what was asked for, at which progress of the run, and whether it is on its way.
let query = "order=newest", listed = null, listing = false;

function el(tag, attributes, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

async function get(path) {
  if (recorded) {
    const answer = recorded[decodeURIComponent(path)];
    if (answer === undefined) throw new Error("not in this report: umbra dash RUN_DIR shows all samples");
    return answer;
  }
  const response = await fetch(path);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return value.toExponential(1);
  if (Math.abs(value) >= 1e3 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toPrecision(3);
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const inOrder = () => [...rows.keys()].sort((a, b) => a - b);
const progress = () => `${inOrder().at(-1)} ${run?.job ? "running" : "ended"}`;
const lastOf = (key) => inOrder().reverse().map((step) => rows.get(step)[key]).find((v) => v !== undefined && v !== null);

// -- what is new ---------------------------------------------------------------------------

async function poll() {
  if (!document.hidden || recorded) {
    try {
      [run] = await Promise.all([get("api/state"), readMetrics(), readEvents(), readEvaluations()]);
      for (const show of [showStatus, showNumbers, showSettings, showJob, showCharts, showEvents, showEvaluations]) show();
      $("problem").hidden = true;
      if (!listing && listed !== progress()) listSamples(); // it may take long, and has its own errors
    } catch (error) {
      $("problem").textContent = error instanceof TypeError
        ? `The server does not answer: ${error.message}. Is umbra dash running?` : error.message;
      $("problem").hidden = false;
    }
  }
  if (!recorded) setTimeout(poll, POLL_MS);
}

// Lines from `from` on; if the file was replaced, because steps are repeated, all after `forget`.
async function news(kind, from, forget) {
  const answer = await get(`api/${kind}?from=${from}`);
  const isOther = kind in files && files[kind] !== answer.file;
  files[kind] = answer.file;
  if (!isOther) return answer;
  forget();
  return get(`api/${kind}?from=0`);
}

async function readMetrics() {
  const answer = await news("metrics", numMetrics, () => rows.clear());
  numMetrics = answer.num_rows;
  for (const row of answer.rows) rows.set(row.step, { ...rows.get(row.step), ...row });
}

async function readEvents() {
  const answer = await news("events", numEvents, () => { events = []; });
  numEvents = answer.num_rows;
  events = [...events, ...answer.rows].slice(-500);
}

async function readEvaluations() {
  const answer = await news("evaluations", numEvaluations, () => evaluations.clear());
  numEvaluations = answer.num_rows;
  for (const row of answer.rows) evaluations.set(row.step, row.samples); // a resumed run repeats steps
}

// -- the page ------------------------------------------------------------------------------

function status() {
  if (run.job) return ["good", "running"];
  if (run.problem) return ["bad", run.problem];
  if (run.summary) return ["", run.summary.stopped_by ? `stopped by ${run.summary.stopped_by}` : "ended"];
  const last = lastOf("time");
  return last ? ["warn", `no supervisor answers here; last step ${duration(run.time - last)} ago`] : ["", "no step done yet"];
}

function showStatus() {
  const done = Math.max(0, ...rows.keys());
  const [kind, text] = status();
  $("name").textContent = run.name;
  document.title = `${run.name} – umbra`;
  $("status").className = `badge ${kind}`;
  $("status").textContent = text;
  $("progress").max = run.steps ?? Math.max(1, done);
  $("progress").value = done;
}

function showNumbers() {
  const steps = inOrder();
  const done = steps.at(-1) ?? 0;
  const cells = [["Step", run.steps ? `${done} of ${run.steps}` : `${done}`],
    ...NUMBERS.map(([name, key]) => [name, lastOf(key)]).filter(([, v]) => v !== undefined).map(([n, v]) => [n, number(v)])];
  if (run.job && lastOf("time/left_s") !== undefined) cells.push(["Time left", duration(lastOf("time/left_s"))]);
  if (run.summary) {
    const found = RESULTS.filter(([, key]) => (run.summary[key] ?? null) !== null);
    cells.push(...found.map(([name, key]) => [name, number(run.summary[key])]), ["Duration", duration(run.summary.wall_s)]);
  }
  showCells($("numbers"), cells);
}

function showSettings() {
  const chosen = Object.entries(run.settings);
  $("settings-section").hidden = !chosen.length;
  $("settings").textContent = chosen.map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join("\n");
}

function showCells(list, cells) {
  list.replaceChildren(...cells.map(([name, value]) =>
    el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
}

function showJob() {
  const { job } = run;
  for (const id of ["waiting-section", "queues-section", "engines-section"]) $(id).hidden = !job;
  if (!job) return;
  $("waiting").replaceChildren(...waits(job).map((text) => el("li", { textContent: text })));
  const work = job.rollouts;
  $("queues-section").hidden = !work;
  if (work) {
    showCells($("queues"), [["Requests waiting for an engine", number(work.turns_waiting)],
      ["Prompts waiting for the reward", work.groups_scoring ? `${number(work.groups_scoring)}, ${duration(work.scoring_s)}` : "0"],
      ["Trajectories being generated", number(work.trajectories_open)], ["Prompts in flight", number(work.groups_open)],
      ["Prompts scored, of a batch", `${number(work.groups_ready)} of ${number(work.groups_per_step)}`],
      ["Prompts being trained on", number(work.groups_leased)], ["Prompts trained on", number(work.groups_trained)],
      ["Prompts dropped", number(work.groups_dropped)]]);
  }
  const engines = job.pools.flatMap((pool) => pool.engines);
  const states = Map.groupBy(engines, (engine) => engine.state);
  $("engines-note").textContent = [...states].map(([state, those]) => `${those.length} ${STATES[state][1]}`).join(", ");
  const stopped = new Set(stoppedProcesses(job).map(([name]) => name));
  $("engines").replaceChildren(...engines.map((engine) => engineTile(engine, stopped.has(engine.name))));
}

function waits(job) {
  const ranks = job.nodes.flatMap((node) => node.ranks).filter((rank) => rank.waits_for).sort((a, b) => a.rank - b.rank);
  const calls = [...Map.groupBy(ranks, (rank) => rank.waits_for)].map(([call, those]) =>
    `${those.length === 1 ? "Rank" : "Ranks"} ${ranges(those.map((rank) => rank.rank))}: ${
      duration(Math.max(...those.map((rank) => rank.waits_s)))} in ${call}`);
  const nodes = job.nodes.filter((node) => node.problem).map((node) => `${node.name}: ${node.problem}`);
  const upper = job.phase.charAt(0).toUpperCase() + job.phase.slice(1);
  const stopped = stoppedProcesses(job).map(([name, pid]) =>
    `${name} (pid ${pid}) is stopped by a signal: kill -CONT ${pid} lets it continue`);
  const hint = stopped.length || mayHang(job) ? "umbra dump RUN_DIR shows where every process is" : "";
  return [job.failure, upper, ...stopped, hint, ...calls, ...nodes].filter(Boolean);
}

function stoppedProcesses(job) {
  const ranks = job.nodes.flatMap((node) => node.ranks).map((rank) => ({ ...rank, name: `rank ${rank.rank}` }));
  const processes = [...ranks, ...job.nodes.flatMap((node) => node.actors)];
  return processes.filter((one) => one.is_stopped).map((one) => [one.name, one.pid]);
}

function mayHang(job) {
  const ages = job.nodes.flatMap((node) => node.ranks).map((rank) => rank.waits_s);
  const done = lastOf("time");
  if (done) ages.push(run.time - done);
  return Math.max(0, ...ages, job.rollouts?.scoring_s ?? 0) > Math.max(LONG_S, 3 * (lastOf("time/step_s") ?? 0));
}

function ranges(numbers) {
  const ends = numbers.filter((n) => !numbers.includes(n + 1));
  return numbers.filter((n) => !numbers.includes(n - 1)).map((n, idx) => (n === ends[idx] ? n : `${n}–${ends[idx]}`)).join(", ");
}

function engineTile(engine, isStopped) {
  const [color, state] = STATES[engine.state];
  const lines = [isStopped ? "stopped by a signal" : "", `${state} for ${duration(engine.state_age_s)}`,
    engine.version === null ? "" : `version ${engine.version}`,
    engine.running === null ? "" : `${engine.running} running, ${engine.waiting} waiting`,
    engine.num_restarts ? `restarted ${count(engine.num_restarts, "time")}` : ""];
  return el("div", {}, el("strong", {}, el("i", { className: `dot ${isStopped ? "bad" : color}` }), engine.name),
    ...lines.filter(Boolean).map((line) => el("p", { textContent: line })));
}

function showEvents() {
  $("strip").hidden = events.length === 0;
  if (events.length === 0) return $("events").replaceChildren(el("li", { textContent: "Nothing so far." }));
  const start = Math.min(events[0].time, [...rows.values()][0]?.time ?? Infinity);
  const end = Math.max(events.at(-1).time, run.job ? run.time : lastOf("time") ?? 0);
  $("strip").replaceChildren(...events.map((event) => {
    const dot = el("i", { className: `dot ${EVENTS[event.kind] ?? ""}`, title: `${clock(event.time)} ${event.text}` });
    dot.style.left = `${(100 * (event.time - start)) / Math.max(1, end - start)}%`;
    return dot;
  }));
  if ($("events").dataset.last === `${numEvents}`) return; // so that what is unfolded stays so
  $("events").dataset.last = numEvents;
  $("events").replaceChildren(...events.slice(-100).reverse().map((event) => {
    const [first, ...more] = event.text.split("\n");
    const rest = more.length ? el("details", {}, el("summary", { textContent: count(more.length, "more line") }),
      el("pre", { textContent: more.join("\n") })) : "";
    return el("li", {}, el("time", { textContent: clock(event.time) }), el("i", { className: `dot ${EVENTS[event.kind] ?? ""}` }),
      first.includes(event.who) ? first : `${event.who}: ${first}`, rest);
  }));
}

// -- charts --------------------------------------------------------------------------------

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function valuesOf(chart, steps) {
  const columns = Object.keys(chart.series).map((name) => steps.map((step) => rows.get(step)[name] ?? null));
  const labels = Object.values(chart.series);
  if (chart.is_step_time) {
    labels.push("rest");
    columns.push(steps.map((step, at) => (rows.get(step)["time/step_s"] === undefined ? null
      : Math.max(0, columns.reduce((left, part) => left - (part[at] ?? 0), rows.get(step)["time/step_s"])))));
  }
  const present = columns.map((column) => column.some((value) => value !== null));
  return { columns: columns.filter((_, idx) => present[idx]), labels: labels.filter((_, idx) => present[idx]) };
}

function showCharts() {
  const steps = inOrder();
  const names = [...new Set([...rows.values()].slice(-50).flatMap((row) => Object.keys(row)))].filter((name) => name.includes("/")).sort();
  if ($("metric").length !== names.length + 1) {
    const chosen = $("metric").value;
    $("metric").replaceChildren(new Option("choose", ""), ...names.map((name) => new Option(name, name)));
    $("metric").value = chosen;
  }
  const other = $("metric").value;
  const wanted = other ? [...run.panels, { title: other, series: { [other]: "value" }, lowest_top: null }] : run.panels;
  wanted.forEach((chart, idx) => showChart(chart, idx, steps));
  for (const gone of charts.splice(wanted.length)) gone?.figure.remove();
}

function showChart(chart, idx, steps) {
  const { columns, labels } = valuesOf(chart, steps);
  const key = `${chart.title} ${labels} ${color("--text")}`;
  let drawn = charts[idx];
  if (drawn && drawn.key !== key) {
    drawn.plot.destroy();
    drawn.figure.remove();
    drawn = charts[idx] = undefined;
  }
  if (!columns.length || (chart.only_with && !steps.some((step) => rows.get(step)[chart.only_with]))) return;
  const shown = chart.is_step_time ? columns.map((own, at) => steps.map((_, s) =>
    own[s] === null ? null : columns.slice(0, at + 1).reduce((sum, column) => sum + column[s], 0))) : columns;
  if (!drawn) {
    drawn = charts[idx] = { key, figure: el("figure", {}, el("figcaption", { textContent: chart.title })) };
    const before = charts.slice(idx + 1).find((later) => later)?.figure ?? null;
    $("charts").insertBefore(drawn.figure, before);
    drawn.plot = newPlot(chart, labels, drawn);
  }
  drawn.raw = columns;
  // The lowest layer of a stack is drawn last, over the others.
  drawn.plot.setData([steps, ...(chart.is_step_time ? shown.toReversed() : shown)]);
}

function newPlot(chart, labels, drawn) {
  const fromZero = chart.is_step_time || chart.lowest_top !== null;
  const range = (_, __, top) => [0, Math.max(top * 1.05, chart.lowest_top ?? 0) || 1];
  const size = () => ({ width: Math.max(200, drawn.figure.clientWidth - 28), height: 180 });
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false },
    font: "11px system-ui" };
  const series = labels.map((label, at) => {
    const stroke = color(`--c${at % 5}`);
    const value = (_, __, ___, at_) => number(drawn.raw[at][at_ ?? drawn.raw[at].findLastIndex((v) => v !== null)]);
    return { label, stroke, width: chart.is_step_time ? 0 : 1.5, fill: chart.is_step_time ? stroke : undefined, spanGaps: true, value,
      points: { show: (u, idx) => u.data[idx].filter((v) => v !== null).length < 40 && !chart.is_step_time } };
  });
  const plot = new uPlot({
    ...size(), scales: { x: { time: false }, y: fromZero ? { range } : {} },
    axes: [{ ...axis, size: 26 }, { ...axis, size: 52, values: (_, ticks) => ticks.map(number) }],
    series: [{ label: "step", value: (u, v) => v ?? u.data[0].at(-1) }, ...(chart.is_step_time ? series.toReversed() : series)],
    cursor: { y: false, sync: { key: "steps" }, points: { show: !chart.is_step_time } },
    hooks: { draw: [markFaults] },
  }, [[]], drawn.figure);
  plot.over.addEventListener("click", () => {
    const step = plot.data[0][plot.cursor.idx];
    if (step > 0) {
      $("step").value = step;
      showSamples();
    }
  });
  new ResizeObserver(() => plot.setSize(size())).observe(drawn.figure);
  return plot;
}

function markFaults(plot) {
  const { left, top, height } = plot.bbox;
  plot.ctx.fillStyle = color("--bad");
  for (const step of plot.data[0]) {
    if (FAULTS.some((name) => rows.get(step)?.[name] > 0)) {
      plot.ctx.fillRect(left + plot.valToPos(step, "x", true) - left, top, devicePixelRatio, height);
    }
  }
}

// -- samples -------------------------------------------------------------------------------

function showSamples() {
  const step = $("step").value;
  query = `order=${$("order").value}${step ? `&step=${step}` : ""}`;
  $("samples-note").textContent = "reading";
  return listSamples();
}

async function listSamples() {
  const asked = query;
  [listed, listing] = [progress(), true];
  try {
    const found = await get(`api/samples?${asked}`);
    if (asked !== query) return; // another list was chosen meanwhile
    const focused = $("samples").contains(document.activeElement) && document.activeElement.textContent;
    const head = ["Sample", "Step", "Reward", "Tokens", "Versions", "State"];
    $("samples").replaceChildren(
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { textContent: name })))),
      el("tbody", {}, ...found.samples.map(sampleRow)));
    [...$("samples").querySelectorAll("button")].find((button) => button.textContent === focused)?.focus({ preventScroll: true });
    $("samples-note").textContent = `${found.samples.length} of ${count(found.num_samples, "sample")}`;
  } catch (error) {
    $("samples-note").textContent = error.message;
  } finally {
    listing = false;
  }
}

function sampleRow(sample) {
  const cells = [sample.step ?? "–", number(sample.reward), number(sample.num_tokens), sample.versions.join(", ") || "–",
    [sample.state, sample.drop_reason || sample.finish_reason].filter(Boolean).join(", ")];
  const row = el("tr", { onclick: () => showSample(sample.sample_id) },
    el("td", {}, el("button", { textContent: sample.sample_id })),
    ...cells.map((cell) => el("td", { textContent: cell })));
  return row;
}

function showEvaluations() {
  if ($("evaluations").dataset.last === `${numEvaluations}`) return; // so that what is unfolded stays so
  $("evaluations").dataset.last = numEvaluations;
  $("evaluations-section").hidden = !evaluations.size;
  $("evaluations").replaceChildren(...[...evaluations].map(([step, samples]) =>
    el("details", {}, el("summary", { textContent: `after step ${step}` }), ...samples.flatMap((sample) => [
      ...part(`reward ${number(sample.reward)}, ${count(sample.num_tokens, "token")}, ${sample.finish_reason}`, sample.prompt, "prompt"),
      el("pre", { className: "policy", textContent: sample.completion })]))));
}

const part = (who, text, kind) => [el("p", { className: "who", textContent: who }), el("pre", { className: kind, textContent: text })];

async function showSample(sampleId) {
  $("sample-title").textContent = sampleId;
  $("sample-facts").textContent = "reading";
  $("sample-text").replaceChildren();
  if (!$("sample").open) $("sample").showModal();
  try {
    const sample = await get(`api/sample/${sampleId.split("/").map(encodeURIComponent).join("/")}`);
    const facts = [sample.state, sample.step && `step ${sample.step}`, sample.finish_reason, sample.drop_reason,
      `reward ${number(sample.reward)}`, count(sample.num_tokens, "token"),
      sample.interruptions && count(sample.interruptions, "interruption")];
    $("sample-facts").textContent = facts.filter(Boolean).join(", ");
    $("sample-text").replaceChildren(
      ...part(sample.is_prompt_of_loop ? "prompt of the agent loop" : "prompt", sample.prompt ?? "not in prompts.msgpack", "prompt"),
      ...sample.turns.flatMap((turn) => part(
        [turn.versions.length ? `policy, version ${turn.versions.join(", ")}` : "given", count(turn.stop - turn.start, "token"),
          turn.finish_reason].filter(Boolean).join(", "), turn.text, turn.versions.length ? "policy" : "given")),
      ...(sample.is_kept ? [] : part("completion", "no longer kept, see rollout.ledger_gb", "given")),
      ...Object.entries(sample.recorded).flatMap(([key, value]) =>
        part(`recorded ${key}`, typeof value === "string" ? value : JSON.stringify(value), "given")));
  } catch (error) {
    $("sample-facts").textContent = error.message;
  }
}

$("choose").addEventListener("submit", (event) => {
  event.preventDefault();
  showSamples();
});
$("metric").addEventListener("change", showCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showCharts);
poll();

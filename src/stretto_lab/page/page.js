"use strict";
// Draws the charts of the page from the numbers in its element #data. Nothing is fetched, and text is never HTML.

const data = JSON.parse(document.getElementById("data").textContent);

// Paul Tol's "bright" scheme: told apart with any colour vision, on light and on dark ground.
const RUN_COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const PARTS = { compute: ["compute", "#4477aa"], exposed: ["exposed communication", "#ee6677"], data: ["waiting for data", "#ccbb44"] };
const KIND_COLOURS = {
  "micro-batch": "#4477aa", data: "#ccbb44", exposed: "#ee6677", reduce: "#66ccee", step: "#228833", gather: "#aa3377",
  preview: "#88cc99", leaving: "#a9d3e3", average: "#dd9944", launch: "#c98cc0", land: "#8899dd", guard: "#ee8866",
  evaluation: "#bbbbbb", checkpoint: "#8a8f98", other: "#777777",
};
// Name, shape and size. A ring fits around the cross of the incident that a fault becomes.
const EVENTS = {
  fault: ["faults on purpose", "circle-open", 16], incident: ["incidents", "x", 10], restart: ["restarts", "star", 12],
  skipped: ["skipped rounds", "square-open", 10],
};
const AXIS_TITLES = {
  updates: "committed updates", samples: "samples of all ranks, every use counted",
  loads: "samples that all ranks loaded", seconds: "training seconds", bytes: "bytes sent by rank 0",
};
const CONFIG = { displaylogo: false, displayModeBar: false, responsive: true, plotlyServerURL: "" };
const canHover = matchMedia("(hover: hover)").matches;

const element = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// Plotly reads a few tags in its texts: no text of a run may be one.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function draw(id, traces, layout) {
  const place = element(id);
  if (!place) return;
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("ink"), size: 13, family: "system-ui, sans-serif" },
    margin: { l: 8, r: 12, t: 8, b: 8 }, hovermode: "closest", dragmode: canHover ? "zoom" : false,
    legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: { color: colour("ink") } },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
  Plotly.react(place, traces, base, CONFIG);
}

const title = (text) => ({ text, font: { color: colour("soft"), size: 12 } });
const chosenAxis = () => (element("axis") ? element("axis").value : "updates");

function drawLoss() {
  const axis = chosenAxis();
  const traces = [];
  data.runs.forEach((run, index) => {
    const line = { color: RUN_COLOURS[index % RUN_COLOURS.length], dash: DASHES[Math.floor(index / RUN_COLOURS.length) % DASHES.length] };
    const name = plain(run.name);
    if (run.loss) {
      traces.push({ x: run.loss[axis], y: run.loss.y, name: `${name}, training`, mode: "lines", opacity: 0.6, line: { ...line, width: 1.3 },
        hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>" });
    }
    for (const [kind, [label, symbol, size]] of Object.entries(run.events ? EVENTS : {})) {
      const of = (values) => values.filter((_, place) => run.events.kind[place] === kind);
      if (!run.events.kind.includes(kind)) continue;
      traces.push({ x: of(run.events[axis]), y: of(run.events.y), text: of(run.events.text).map(plain), name: `${name}, ${label}`, mode: "markers",
        marker: { symbol, size: run.events.kind.length <= 60 ? size : 0.6 * size, color: colour("warn") }, hovertemplate: "%{text}<extra></extra>" });
    }
    if (run.heldout.y.length) {
      traces.push({ x: run.heldout[axis], y: run.heldout.y, name: `${name}, held-out`, mode: run.heldout.y.length > 60 ? "lines" : "lines+markers", line: { ...line, width: 2.5 },
        marker: { size: 6 }, hovertemplate: "%{y:.5g}<extra>%{fullData.name}</extra>" });
    }
  });
  draw("loss", traces, {
    height: 420, xaxis: { title: title(AXIS_TITLES[axis]), rangemode: "tozero" },
    yaxis: { title: title("loss"), type: element("logarithmic").checked ? "log" : "linear" },
  });
}

function drawTime() {
  const runs = data.runs.filter((run) => run.time);
  const names = runs.map((run) => plain(run.name));
  const parts = Object.entries({ ...PARTS, undivided: ["not divided", "#9aa0a8"] }).filter(([part]) => runs.some((run) => run.time[part] !== null));
  const traces = parts.map(([part, [name, fill]]) => ({
    type: "bar", orientation: "h", y: names, x: runs.map((run) => run.time[part]), name, marker: { color: fill },
    hovertemplate: "%{x:.4g} ms<extra>%{fullData.name}</extra>",
  }));
  if (runs.some((run) => run.time.model !== null)) {
    traces.push({ y: names, x: runs.map((run) => run.time.model), name: "the time model says", mode: "markers",
      marker: { symbol: "diamond", size: 11, color: colour("ink"), line: { color: colour("card"), width: 1.5 } },
      hovertemplate: "%{x:.4g} ms<extra>the time model says</extra>" });
  }
  const isNarrow = innerWidth < 600;  // each entry of the legend has a line of its own there
  draw("time", traces, { barmode: "stack", bargap: 0.45, height: 91 + 19 * (isNarrow ? traces.length : 1) + 44 * runs.length,
    xaxis: { title: title("ms per update"), tickangle: 0, nticks: isNarrow ? 4 : 0 },
    yaxis: { type: "category", autorange: "reversed", fixedrange: true } });
}

function drawParts() {
  const axis = chosenAxis();
  data.runs.forEach((run, index) => {
    if (!run.parts) return;
    const traces = Object.entries(PARTS).map(([part, [name, fill]]) => ({
      x: run.parts[axis], y: run.parts[part], name, stackgroup: "one", line: { width: 0.5, color: fill }, fillcolor: fill,
      hovertemplate: "%{y:.4g} ms<extra>%{fullData.name}</extra>",
    }));
    draw(`parts-${index}`, traces, { height: 260, xaxis: { title: title(AXIS_TITLES[axis]) }, yaxis: { title: title("ms per update"), rangemode: "tozero" } });
  });
}

function drawCourse() {
  const axis = chosenAxis();
  data.runs.forEach((run, index) => {
    if (!run.course) return;
    for (const [part, scale] of [["rate", "linear"], ["norm", "log"], ["speed", "linear"]]) {
      const traces = [{ x: run.course[axis], y: run.course[part], mode: run.course[part].length > 60 ? "lines" : "lines+markers",
        line: { color: RUN_COLOURS[index % RUN_COLOURS.length], width: 1.3 }, marker: { size: 4 }, hovertemplate: "%{y:.4g}<extra></extra>" }];
      draw(`${part}-${index}`, traces, { height: 180, showlegend: false, xaxis: { title: title(AXIS_TITLES[axis]) }, yaxis: { type: scale } });
    }
  });
}

function drawInput() {
  const axis = chosenAxis();
  data.runs.forEach((run, index) => {
    if (!run.input) return;
    const traces = [["fresh", "#4477aa"], ["echoed", "#ccbb44"]].map(([part, fill]) => ({
      x: run.input[axis], y: run.input[part], name: part, stackgroup: "one", line: { width: 0.5, color: fill }, fillcolor: fill,
      hovertemplate: "%{y:,.0f} batches<extra>%{fullData.name}</extra>",
    }));
    draw(`input-${index}`, traces, { height: 240, xaxis: { title: title(AXIS_TITLES[axis]) }, yaxis: { title: title("batches of rank 0"), rangemode: "tozero" } });
  });
}

function drawAverages() {
  const axis = chosenAxis();
  data.runs.forEach((run, index) => {
    if (!run.averages) return;
    const traces = [["interval", "interval, updates", "#4477aa"], ["noise", "σ of the noise", "#ee6677"], ["divergence", "divergence", "#228833"]].map(([part, name, fill]) => ({
      x: run.averages[axis], y: run.averages[part], name, mode: "lines+markers", line: { color: fill }, marker: { size: 5 },
      hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
    }));
    draw(`averages-${index}`, traces, { height: 260, xaxis: { title: title(AXIS_TITLES[axis]) }, yaxis: { type: "log" } });
  });
}

function drawMemory() {
  data.memory.forEach((run, index) => {
    const traces = run.ranks.map((rank, place) => ({ x: rank.updates, y: rank.y, name: `rank ${rank.rank}`, mode: "lines",
      line: { color: RUN_COLOURS[place % RUN_COLOURS.length], dash: DASHES[Math.floor(place / RUN_COLOURS.length) % DASHES.length], shape: "hv" },
      hovertemplate: "%{y:,.1f} MB<extra>%{fullData.name}</extra>" }));
    draw(`memory-${index}`, traces, { height: 240, xaxis: { title: title(AXIS_TITLES.updates) }, yaxis: { title: title("most MB in use"), rangemode: "tozero" } });
  });
}

// The timeline of one run: what is narrower than a pixel is merged, so that any stretch can be seen whole and in detail.
class Timeline {
  constructor(run, index) {
    this.run = run;
    this.id = `timeline-${index}`;
    this.stretch = run.stretches[0];
    const place = element(this.id);
    this.addLegend();
    const chosen = element(`${this.id}-stretch`);
    chosen.addEventListener("change", () => { this.stretch = run.stretches[chosen.selectedIndex]; this.begin(); });
    const moves = { earlier: [-0.5, 1], later: [0.5, 1], nearer: [0, 0.5], farther: [0, 2], whole: null };
    for (const [name, move] of Object.entries(moves)) {
      element(`${this.id}-${name}`).addEventListener("click", () => this.move(move));
    }
    const keys = { ArrowLeft: moves.earlier, ArrowRight: moves.later, "+": moves.nearer, "-": moves.farther, 0: null };
    place.addEventListener("keydown", (event) => {
      if (event.key in keys && !event.ctrlKey && !event.metaKey) { event.preventDefault(); this.move(keys[event.key]); }
    });
    this.begin();
    place.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) this.show(0, this.end);
      else if (change["xaxis.range[0]"] !== undefined) this.show(Number(change["xaxis.range[0]"]) * 1e6, Number(change["xaxis.range[1]"]) * 1e6);
    });
  }

  addLegend() {
    const used = new Set(this.run.stretches.flatMap((stretch) => stretch.rows.flatMap((row) => [...new Set(row.kind)])));
    for (const kind of [...used].sort((one, other) => one - other)) {
      const item = document.createElement("li");
      item.textContent = this.run.kinds[kind];
      item.style.setProperty("--fill", KIND_COLOURS[this.run.kinds[kind]]);
      element(`${this.id}-legend`).append(item);
    }
  }

  begin() {
    let end = 1;
    const first = [];
    for (const row of this.stretch.rows) {
      row.start.forEach((start, index) => { end = Math.max(end, start + row.length[index]); });
      if (!first.length && row.start.length) first.push(row);
    }
    this.end = end;
    // About six updates from the middle: enough to see the pattern.
    const steps = first.length ? first[0].step : [];
    const middle = steps[Math.floor(steps.length / 2)];
    const within = steps.findIndex((step) => step >= middle - 2), behind = steps.findIndex((step) => step > middle + 3);
    if (within > 0 && behind > 0) this.show(first[0].start[within], first[0].start[behind]);
    else this.show(0, end);
  }

  move(move) {
    if (move === null) return this.show(0, this.end);
    const [shift, zoom] = move, width = this.to - this.from, middle = (this.from + this.to) / 2 + shift * width;
    this.show(middle - (zoom * width) / 2, middle + (zoom * width) / 2);
  }

  show(from, to) {
    if (!(to - from >= 1)) return;
    [this.from, this.to] = [from, to];
    const rows = this.stretch.rows, height = rows.length > 24 ? 15 : 26;
    const traces = [];
    this.segments().forEach((found, kind) => {
      const name = this.run.kinds[kind];
      if (found.x.length) {
        // Evaluations and checkpoints lie under what happens in them.
        traces[["evaluation", "checkpoint"].includes(name) ? "unshift" : "push"]({ x: found.x, y: found.y, text: found.text, name, mode: "lines", connectgaps: false,
          line: { color: KIND_COLOURS[name], width: height * 0.62, simplify: false }, hovertemplate: "%{text}<extra></extra>" });
      }
    });
    const marks = this.stretch.marks.filter(([time]) => time >= from && time <= to);
    traces.push({ x: marks.map(([time]) => time / 1e6), y: marks.map(() => -0.75), text: marks.map(([, text]) => plain(text)), mode: "markers",
      marker: { symbol: "x", size: 10, color: colour("warn") }, hovertemplate: "%{text}<extra></extra>", cliponaxis: false });
    draw(this.id, traces, {
      height: 60 + height * rows.length, showlegend: false,
      xaxis: { range: [from / 1e6, to / 1e6], tickformat: "~s", ticksuffix: "s", zeroline: false },
      yaxis: { range: [rows.length - 0.4, -1], fixedrange: true, zeroline: false, showgrid: false, tickmode: "array",
        tickvals: rows.map((_, index) => index), ticktext: rows.map((row) => (row.lane === "compute" ? `rank ${row.rank} compute` : "comm.")) },
    });
  }

  segments() {
    const width = this.to - this.from, pixel = width / Math.max(200, element(this.id).clientWidth - 110);
    const least = this.from - width, most = this.to + width;
    const found = this.run.kinds.map(() => ({ x: [], y: [], text: [] }));
    const add = (kind, y, start, end, text) => {
      const place = found[kind], parts = Math.min(60, Math.max(1, Math.round((end - start) / (30 * pixel))));
      for (let part = 0; part <= parts; part++) {
        place.x.push((start + ((end - start) * part) / parts) / 1e6); place.y.push(y); place.text.push(text);
      }
      place.x.push(null); place.y.push(null); place.text.push("");
    };
    this.stretch.rows.forEach((row, y) => {
      const name = `rank ${row.rank}, ${row.lane}`;
      let cell = -1, merged = null;
      const flush = () => { if (merged) add(merged.kind, y, merged.start, merged.end, `${name}: ${this.run.kinds[merged.kind]} and others; zoom in to see each`); merged = null; };
      row.start.forEach((start, index) => {
        const end = start + row.length[index], kind = row.kind[index];
        if (end < least || start > most) return;
        if (row.length[index] >= 1.5 * pixel) {
          const text = `${name}<br>${this.run.kinds[kind]}, ${(row.length[index] / 1000).toPrecision(4)} ms, update ${row.step[index]}`;
          return add(kind, y, Math.max(start, least), Math.min(end, most), text);
        }
        const place = Math.floor(start / pixel);
        if (merged && place <= cell + 1 && merged.kind === kind) { merged.end = Math.max(merged.end, (place + 1) * pixel); }
        else if (merged && place === cell) { if (row.length[index] > merged.longest) { merged.kind = kind; merged.longest = row.length[index]; } }
        else { flush(); merged = { kind, start: place * pixel, end: (place + 1) * pixel, longest: row.length[index] }; }
        cell = place;
      });
      flush();
    });
    return found;
  }
}

let timelines = [];
function drawAll() {
  if (element("loss")) drawLoss();
  if (element("time")) drawTime();
  drawParts();
  drawCourse();
  drawInput();
  drawAverages();
  drawMemory();
  if (timelines.length) timelines.forEach((one) => one.show(one.from, one.to));
  else timelines = data.timelines.map((run, index) => new Timeline(run, index));
}

drawAll();
for (const id of ["axis", "logarithmic"]) {
  if (element(id)) element(id).addEventListener("change", drawAll);
}
// Paper is light.
for (const [name, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(name, () => { document.documentElement.classList.toggle("printed", isPrinted); drawAll(); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.documentElement.dataset.drawn = performance.now().toFixed();  // milliseconds until all was there

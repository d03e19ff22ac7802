"use strict";
// Draws the charts of the page from the numbers in its element #data. Nothing is fetched, and text is never HTML.

const data = JSON.parse(document.getElementById("data").textContent);

// Paul Tol's "bright" scheme: told apart with any colour vision, on light and on dark ground.
const RUN_COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const PARTS = { compute: ["compute", "#4477aa"], exposed: ["exposed communication", "#ee6677"], data: ["waiting for data", "#ccbb44"] };
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
  const isNarrow = innerWidth < 600;  // each entry of the legend has a line of its own there
  draw("time", traces, { barmode: "stack", bargap: 0.45, height: 91 + 19 * (isNarrow ? traces.length : 1) + 44 * runs.length,
    xaxis: { title: title("ms per update"), tickangle: 0, nticks: isNarrow ? 4 : 0 },
    yaxis: { type: "category", autorange: "reversed", fixedrange: true } });
}

function drawAll() {
  if (element("loss")) drawLoss();
  if (element("time")) drawTime();
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

// Draws the charts with uPlot while they are visible. charts.py declares the charts and packs their data.

const AXIS_LABELS = { step: "step", tokens: "tokens", hours: "hours in steps" };
const HEIGHTS = { wide: 260, narrow: 220 };
const WHOLE = Array.from({ length: 10 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** i)).flat();
const MARGIN_PX = 300; // a chart is drawn when it is this close to the visible area
const [xAxis, yAxis, smoothing, resetZoom] = ["x-axis", "y-axis", "smoothing", "reset-zoom"].map((id) => document.getElementById(id));
const runs = [];
const figures = new Map();
let zoom = null; // [min, max] of the x-axis, or null for all steps

function unpack(text, Type) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Type(bytes.buffer);
}

function addRun(packed) {
  const run = { name: packed.name, parts: [], axes: new Map(), metrics: new Map() };
  runs.push(run);
  append(run, packed);
}

// Appends steps to a run. Metrics are unpacked when they are drawn.
function append(run, part) {
  for (const [name, text] of Object.entries(part.axes)) {
    run.axes.set(name, [...(run.axes.get(name) || []), ...unpack(text, Float64Array)]);
  }
  run.parts.push(part);
}

// Returns the values of a metric. Values that are not finite are null.
function metric(run, name) {
  const known = run.metrics.get(name) || { values: [], numParts: 0 };
  if (!Object.hasOwn(run.parts[0].metrics, name)) return run.axes.get("step").map(() => null);
  for (const part of run.parts.slice(known.numParts)) {
    for (const value of unpack(part.metrics[name], Float32Array)) known.values.push(Number.isFinite(value) ? value : null);
  }
  known.numParts = run.parts.length;
  run.metrics.set(name, known);
  return known.values;
}

function sum(run, names) {
  const columns = names.map((name) => metric(run, name));
  if (columns.length === 1) return columns[0];
  return run.axes.get("step").map((_, i) => columns.reduce((total, column) => total + (column[i] || 0), 0));
}

function lineValues(line) {
  const run = runs[line.run];
  const values = sum(run, line.metrics);
  if (line.minus.length === 0) return values;
  const less = sum(run, line.minus);
  return values.map((value, i) => (value === null ? null : Math.max(0, value - less[i])));
}

// Returns the exponential moving average in which the past has this weight. The weights are normalized, so the first
// average equals the first value. Missing values stay missing.
function smooth(values, weight) {
  let total = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

// Returns whether a chart has a log axis, which omits values that are not positive. It needs at least one positive value.
function isLog(chart, columns) {
  const wants = yAxis.value === "log" || (yAxis.value === "auto" && chart.log);
  return wants && !chart.stack && columns.some((column) => column.some((value) => value > 0));
}

function colorOf(line, i) {
  return "--series-" + (1 + (runs.length > 1 ? line.run : i));
}

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e5) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  return size > 0 && size < 1e-3 ? value.toExponential(size < 1e-99 ? 0 : 1).replace(".0e", "e") : number(value);
}

function ticks(chart) {
  return (plot, splits) => splits.map((value) => (value !== null && chart.share ? short(100 * value) + " %" : short(value)));
}

// Returns the series of a chart: faint unsmoothed lines, bounds of the shaded area, and lines. All have `values`, and
// lines have `shown` values for the legend.
function seriesOf(figure) {
  const { chart, hidden } = figure;
  const weight = Number(smoothing.value);
  const lines = chart.lines.map((line, i) => ({ line, i, run: line.run, color: colorOf(line, i), raw: lineValues(line) }));
  const visible = lines.filter(({ line }) => !hidden.has(line.label));
  const series = [];
  const add = (like, values, more) => series.push({ ...like, values, ...more });
  if (weight > 0 && !chart.stack) visible.forEach((line) => add(line, line.raw, { alpha: 0.25 }));
  const first = visible[0];
  if (first && first.i === 0 && (chart.band.length || chart.spread)) {
    const spread = chart.spread && metric(runs[first.run], chart.spread);
    const move = (sign) => first.raw.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
    const bounds = chart.spread ? [move(-1), move(1)] : chart.band.map((name) => metric(runs[first.run], name));
    for (const bound of bounds) add(first, smooth(bound, weight), { alpha: 0 });
  }
  let below = null;
  for (const line of visible) {
    const shown = smooth(line.raw, weight);
    const base = below;
    const values = chart.stack ? shown.map((value, i) => (value || 0) + (base ? base[i] : 0)) : shown;
    below = values;
    add(line, values, { alpha: 1, shown });
  }
  return series;
}

// Returns uPlot's data: the joined x values, and the values of each series at these positions.
function aligned(series, axis) {
  const runsOf = [...new Set(series.map((item) => item.run))];
  const tables = runsOf.map((run) => [runs[run].axes.get(axis) || [], ...series.filter((item) => item.run === run).map((item) => item.values)]);
  const ordered = runsOf.flatMap((run) => series.filter((item) => item.run === run));
  return [tables.length === 1 ? tables[0] : uPlot.join(tables), ordered];
}

// Returns uPlot's data and its series, and whether the y-axis is logarithmic.
function dataOf(figure) {
  const { chart } = figure;
  const [data, series] = aligned(seriesOf(figure), xAxis.value);
  const log = isLog(chart, series.map((item) => item.values));
  const omit = (value) => (value === undefined || value > 0 ? value : null);
  if (log) data.forEach((column, i) => i && (data[i] = column.map(omit)));
  // Areas are filled from top to bottom, so that each covers the lower part of the previous one.
  if (chart.stack) [series, data].forEach((list, i) => list.push(...list.splice(i).reverse()));
  return { data, series, log };
}

function draw(figure) {
  figure.plot?.destroy();
  figure.plot = null;
  if (!figure.isVisible) return;
  const { chart } = figure;
  const { data, series, log } = dataOf(figure);
  const [low, high] = series.flatMap((item, i) => (item.alpha === 0 ? [i + 1] : []));
  const bands = high ? [{ series: [high, low], fill: tint(cssColor(series[low - 1].color), 0.18) }] : [];
  const options = {
    width: figure.root.clientWidth,
    height: HEIGHTS[chart.wide ? "wide" : "narrow"],
    legend: { show: false },
    scales: { x: { time: false, range: xRange }, y: { distr: log ? 3 : 1, ...yRange(chart, log) } },
    axes: [xAxisStyle(), axisStyle({ size: 62, values: ticks(chart) }, log ? { filter: decades } : {})],
    series: [{}, ...series.map((item) => lineStyle(item, chart))],
    bands,
    cursor: {
      sync: { key: "megarl", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => setZoom(null) },
      points: { show: (plot, i) => (series[i - 1].shown ? undefined : false) },
      dataIdx: nearest,
      y: false,
    },
    hooks: { setCursor: [() => showValues(figure)], setSelect: [selectZoom] },
  };
  figure.series = series;
  figure.isLog = log;
  figure.plot = new uPlot(options, data, figure.root);
  showValues(figure);
}

// Adds new steps to a chart that is already drawn.
function update(figure) {
  if (!figure.plot) return;
  const { data, series, log } = dataOf(figure);
  if (log !== figure.isLog) return draw(figure);
  figure.series = series;
  figure.plot.setData(data);
  showValues(figure);
}

function xRange(plot, min, max) {
  if (zoom !== null) return zoom;
  return min === max ? [(min || 0) - 0.6, (max || 0) + 0.6] : [min, max];
}

function yRange(chart, log) {
  if (log) return {};
  if (chart.share) return { range: [-0.02, 1.02] };
  return chart.stack ? { range: (plot, min, max) => [0, 1.03 * max || 1] } : {};
}

function xAxisStyle() {
  const incrs = xAxis.value === "step" ? { incrs: WHOLE } : {};
  return axisStyle({ label: AXIS_LABELS[xAxis.value], labelSize: 18, size: 30, values: (plot, splits) => splits.map(short), ...incrs });
}

// Draws lines only at powers of ten if the axis has at least four of them, and at all ticks otherwise.
function decades(plot, values) {
  const isPower = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  return values.filter(isPower).length > 3 ? values.map((value) => (isPower(value) ? value : null)) : values;
}

function axisStyle(options, lines = {}) {
  const line = { stroke: cssColor("--grid"), width: 1, ...lines };
  return { stroke: cssColor("--muted"), font: "12px system-ui", labelFont: "12px system-ui", grid: line, ticks: line, ...options };
}

function tint(rgb, alpha) {
  return rgb + Math.round(255 * alpha).toString(16).padStart(2, "0");
}

function lineStyle(item, chart) {
  const stroke = tint(cssColor(item.color), item.alpha);
  const numValues = item.values.filter((value) => value !== null).length;
  return {
    stroke,
    width: chart.stack ? 0 : 1.6,
    fill: chart.stack ? stroke : undefined,
    spanGaps: numValues < item.values.length / 2, // connects sparse values, such as evaluation metrics
    points: { size: 5, fill: stroke, stroke, ...(item.alpha === 0 ? { show: false } : {}) },
  };
}

// Returns the index of the nearest value of a series, because runs and metrics may lack values at the cursor.
function nearest(plot, i, index) {
  const values = plot.data[i];
  const isMissing = (place) => values[place] === null || values[place] === undefined;
  for (let distance = 0; distance < values.length; distance++) {
    if (index - distance >= 0 && !isMissing(index - distance)) return index - distance;
    if (index + distance < values.length && !isMissing(index + distance)) return index + distance;
  }
  return index;
}

// Shows the values under the cursor, or the last values, in the legend.
function showValues(figure) {
  const { plot, chart } = figure;
  if (!plot) return;
  const hovered = plot.cursor.left >= 0 && plot.cursor.idx !== null && plot.cursor.idx !== undefined;
  const index = hovered ? plot.cursor.idx : plot.data[0].length - 1;
  for (const button of figure.buttons) {
    const place = figure.series.findIndex((item) => item.shown && item.line.label === button.dataset.label);
    const output = button.querySelector("output");
    if (place < 0 || index < 0) {
      output.textContent = "";
      continue;
    }
    const values = plot.data[place + 1];
    const at = nearest(plot, place + 1, index);
    const below = chart.stack && place + 1 < figure.series.length ? plot.data[place + 2][at] : 0;
    const value = values[at] === null || values[at] === undefined ? null : values[at] - below;
    output.textContent = value === null ? "–" : chart.share ? short(100 * value) + " %" : short(value);
  }
  figure.at.textContent = hovered ? AXIS_LABELS[xAxis.value] + " " + short(plot.data[0][index]) : "";
}

function selectZoom(plot) {
  const { left, width } = plot.select;
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (width > 2) setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
}

function setZoom(range) {
  zoom = range;
  resetZoom.disabled = range === null;
  for (const { plot } of figures.values()) {
    if (!plot) continue;
    const [min, max] = xRange(plot, plot.data[0][0] ?? null, plot.data[0].at(-1) ?? null);
    plot.setScale("x", { min, max });
  }
}

function redraw() {
  for (const figure of figures.values()) draw(figure);
}

// Arrow keys move the cursor, + and − change the zoom, and 0 or Escape resets it.
function onKey(figure, event) {
  const { plot } = figure;
  if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const { min, max } = plot.scales.x;
  const x = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const scale = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
  if (step) {
    const index = Math.min(plot.data[0].length - 1, Math.max(0, (plot.cursor.left >= 0 ? plot.cursor.idx : plot.valToIdx(x)) + step));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 10 }, true, true);
  } else if (scale) {
    setZoom([x - (x - min) * scale, x + (max - x) * scale]);
  } else if (event.key === "0" || event.key === "Escape") {
    setZoom(null);
  } else return;
  event.preventDefault();
}

function legendButton(figure, line, i) {
  const mark = element("span", "mark", "");
  mark.style.backgroundColor = "var(" + colorOf(line, i) + ")";
  const button = element("button", "line", [mark, line.label + " ", element("output", "", "")]);
  button.type = "button";
  button.dataset.label = line.label;
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    const hides = !figure.hidden.delete(line.label);
    if (hides) figure.hidden.add(line.label);
    button.setAttribute("aria-pressed", String(!hides));
    draw(figure);
  });
  return button;
}

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const figure = figures.get(entry.target);
      if (!figure || figure.isVisible === entry.isIntersecting) continue;
      figure.isVisible = entry.isIntersecting;
      draw(figure);
    }
  },
  { rootMargin: MARGIN_PX + "px" },
);

function addFigure(chart) {
  const root = element("div", "plot", "");
  root.style.height = HEIGHTS[chart.wide ? "wide" : "narrow"] + "px";
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", chart.title + ". Arrow keys move the cursor, plus and minus zoom, 0 resets the zoom.");
  const at = element("span", "at", "");
  const figure = { chart, root, at, hidden: new Set(), isVisible: false, plot: null, series: [] };
  figure.buttons = chart.lines.map((line, i) => legendButton(figure, line, i));
  const caption = element("figcaption", "", [chart.title, element("span", "", chart.explanation)]);
  const node = element("figure", chart.wide ? "wide" : "", [caption, element("div", "lines", [...figure.buttons, at]), root]);
  root.addEventListener("keydown", (event) => onKey(figure, event));
  figures.set(root, figure);
  document.getElementById(chart.place).append(node);
  observer.observe(root);
}

function addFigures(charts) {
  for (const place of ["charts", "evaluation-charts", "other-charts"]) document.getElementById(place)?.replaceChildren();
  for (const figure of figures.values()) figure.plot?.destroy();
  figures.clear();
  observer.disconnect();
  charts.forEach(addFigure);
  for (const option of xAxis.options) option.disabled = !runs.every((run) => run.axes.has(option.value));
}

{
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  data.runs.forEach(addRun);
  addFigures(data.charts);
}
xAxis.addEventListener("input", () => {
  setZoom(null);
  redraw();
});
yAxis.addEventListener("input", redraw);
smoothing.addEventListener("input", () => {
  document.getElementById("smoothing-value").textContent = smoothing.value;
  redraw();
});
resetZoom.addEventListener("click", () => setZoom(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 100);
});

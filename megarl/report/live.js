// Polls the server for changes and inserts them. Controls, open sections and the scroll position are preserved.
const POLL_MS = 2000;
let hashes = JSON.parse(document.body.dataset.hashes);

// The server escapes all text in the sections. Rollouts and metrics are inserted as text.
function insert(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const part = document.getElementById(id);
    const open = [...part.querySelectorAll("details")].map((node) => node.open);
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((node, i) => (node.open = open[i] ?? node.open));
  }
}

function updateSteps(order, changed, changedThumbnails) {
  const known = new Map([...steps, ...changed].map((step) => [step.step, step]));
  const isSame = changed.length === 0 && order.length === steps.length;
  if (isSame) return;
  const atLast = stepSelect.selectedIndex === steps.length - 1;
  const selected = stepSelect.value;
  steps.splice(0, steps.length, ...order.map((number) => known.get(number)));
  Object.assign(thumbnails, changedThumbnails);
  const used = new Set(steps.flatMap((step) => step.thumbnails));
  for (const name of Object.keys(thumbnails)) if (!used.has(name)) delete thumbnails[name];
  fill(atLast ? null : selected);
}

// Adds the metrics of new steps, or replaces all charts if the run has other metrics or has rewritten steps.
function updateCharts(charts, points) {
  if (charts) {
    const [{ name }] = runs.splice(0);
    addRun({ name, ...points });
    addFigures(charts);
  } else if (points) {
    append(runs[0], points);
    for (const figure of figures.values()) update(figure);
  }
}

async function poll() {
  const note = document.getElementById("live");
  try {
    const answer = await fetch("changes?" + new URLSearchParams(hashes), { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const changes = await answer.json();
    hashes = changes.hashes;
    insert(changes.sections);
    updateCharts(changes.charts, changes.points);
    updateSteps(changes.order, changes.steps, changes.thumbnails);
    note.textContent = changes.state;
  } catch (error) {
    note.textContent = "megarl watch has stopped. This page shows the last state.";
  }
  setTimeout(poll, POLL_MS);
}

setTimeout(poll, POLL_MS);

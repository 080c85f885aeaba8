// Polls the server for changes and inserts them. Controls, open sections and the scroll position are preserved.
const POLL_MS = 2000;
const OTHERS = "other-charts";
const others = document.getElementById("others");
let hashes = JSON.parse(document.body.dataset.hashes);

// The server escapes all text in the sections. Rollouts are inserted as text.
function insert(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const part = document.getElementById(id);
    const open = [...part.querySelectorAll("details")].map((node) => node.open);
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((node, i) => (node.open = Boolean(open[i])));
  }
}

function updateSteps(order, changed) {
  const known = new Map([...steps, ...changed].map((step) => [step.step, step]));
  const isSame = changed.length === 0 && order.length === steps.length;
  if (isSame) return;
  const atLast = stepSelect.selectedIndex === steps.length - 1;
  const selected = stepSelect.value;
  steps.splice(0, steps.length, ...order.map((number) => known.get(number)));
  fill(atLast ? null : selected);
}

async function poll() {
  const note = document.getElementById("live");
  try {
    const query = new URLSearchParams(hashes);
    if (others.open && !query.has(OTHERS)) query.set(OTHERS, "");
    if (!others.open) query.delete(OTHERS);
    const answer = await fetch("changes?" + query, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const changes = await answer.json();
    hashes = { ...(OTHERS in hashes ? { [OTHERS]: hashes[OTHERS] } : {}), ...changes.hashes };
    insert(changes.sections);
    updateSteps(changes.order, changes.steps);
    note.textContent = "live";
  } catch (error) {
    note.textContent = "megarl watch has stopped. This page shows the last state.";
  }
  setTimeout(poll, POLL_MS);
}

others.addEventListener("toggle", () => others.open && !(OTHERS in hashes) && (document.getElementById(OTHERS).textContent = "…"));
setTimeout(poll, POLL_MS);

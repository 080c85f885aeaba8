// Polls the server and reloads the page when the run has changed. Controls and scroll position are preserved.
const POLL_MS = 2000;
const KEPT = "megarl-watch";
const shown = document.body.dataset.state;

function keep() {
  const atLast = stepSelect.selectedIndex === steps.length - 1;
  const values = CONTROLS.slice(1).map((id) => document.getElementById(id).value);
  const open = [...document.querySelectorAll("details")].map((node) => node.open);
  const step = atLast ? null : stepSelect.value;
  sessionStorage.setItem(KEPT, JSON.stringify({ step, values, open, top: window.scrollY }));
}

function restore() {
  const kept = JSON.parse(sessionStorage.getItem(KEPT));
  if (kept === null) return;
  CONTROLS.slice(1).forEach((id, i) => (document.getElementById(id).value = kept.values[i]));
  if (kept.step !== null) stepSelect.value = kept.step;
  document.querySelectorAll("details").forEach((node, i) => (node.open = kept.open[i]));
  if (steps.length > 0) show();
  window.scrollTo(0, kept.top);
}

async function poll() {
  const note = document.getElementById("live");
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if ((await answer.text()) !== shown) {
      keep();
      location.reload();
      return;
    }
    note.textContent = "live";
  } catch (error) {
    note.textContent = "megarl watch has stopped. This page shows the last state.";
  }
  setTimeout(poll, POLL_MS);
}

restore();
setTimeout(poll, POLL_MS);

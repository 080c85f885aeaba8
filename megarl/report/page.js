// Rollout text is inserted with textContent only, so that markup in it is never interpreted.
const steps = JSON.parse(document.getElementById("rollouts").textContent);
const CONTROLS = ["step", "order", "view", "color", "outcome", "stop", "text", "least", "most"];
const [stepSelect, order, view, color, outcome, stop, text, least, most] = CONTROLS.map((id) => document.getElementById(id));
const [previous, next] = ["previous", "next"].map((id) => document.getElementById(id));

function stopReason(sample) {
  return sample.stop_reason || sample.finish_reason || "";
}

function facts(sample) {
  const failed = sample.reward === null;
  const nodes = [element("span", failed ? "reward failed" : "reward", failed ? "no reward" : number(sample.reward))];
  const add = (content, className = "") => nodes.push(element("span", className, content));
  if (sample.failure) add(asText(sample.failure), "failed");
  for (const [name, value] of Object.entries(sample.parts || {})) add(name + " " + number(value));
  if (sample.answer !== null) add("answer " + asText(sample.answer));
  if (sample.advantage !== null) add("advantage " + number(sample.advantage));
  if (sample.mean_logprob !== null) add("log-prob " + number(sample.mean_logprob) + " per token");
  if (sample.num_response_tokens !== null) add(sample.num_response_tokens + " tokens");
  if (sample.finish_reason === "length") add("truncated", "cut");
  if (sample.stop_reason && sample.stop_reason !== "length") add(asText(sample.stop_reason));
  const runs = sample.version || [];
  if (runs.length === 1) add("weights " + runs[0].version);
  if (runs.length > 1) add("weights " + runs.map((run) => run.version + " × " + run.count).join(", "));
  if (sample.sample_id !== null) add(asText(sample.sample_id), "id");
  return element("div", "facts", nodes);
}

function response(sample, scales) {
  return element("div", "response", responseBlocks(sample, color.value, scales, view.value === "turns"));
}

function card(sample, scales) {
  const prompt = element("div", "", [element("h3", "", "Prompt"), element("pre", "", sample.prompt)]);
  const answer = element("div", "", [element("h3", "", "Response"), response(sample, scales)]);
  return element("article", "sample", [facts(sample), element("div", "texts", [prompt, answer])]);
}

// Returns one row of cards per group. A step may have several groups for a prompt; rollout ids are STEP.GROUP.NUMBER.
function groupCards(samples, scales) {
  const groups = new Map();
  for (const sample of samples) {
    const rollout = asText(sample.rollout_id ?? sample.sample_id ?? "");
    const key = asText([sample.prompt_id ?? sample.prompt, rollout.slice(0, Math.max(0, rollout.lastIndexOf(".")))]);
    groups.set(key, [...(groups.get(key) || []), sample]);
  }
  return [...groups.values()].map((group) => {
    const cards = group.map((sample) => element("article", "sample", [facts(sample), response(sample, scales)]));
    const head = element("div", "prompt", [element("h3", "", "Prompt · " + group.length + " samples"), element("pre", "", group[0].prompt)]);
    return element("section", "group", [head, element("div", "beside", cards)]);
  });
}

function matchesFilters(sample) {
  const bounded = least.value !== "" || most.value !== "";
  if (bounded && sample.reward === null) return false;
  if (least.value !== "" && sample.reward < Number(least.value)) return false;
  if (most.value !== "" && sample.reward > Number(most.value)) return false;
  if (outcome.value === "failed" && sample.reward !== null) return false;
  if (outcome.value === "scored" && sample.reward === null) return false;
  if (stop.value !== "" && stopReason(sample) !== stop.value) return false;
  const turns = (sample.turns || []).map((turn) => asText(turn.content === undefined ? "" : turn.content));
  const searched = [sample.prompt, sample.response, asText(sample.answer), ...turns].join("\n").toLowerCase();
  return searched.includes(text.value.toLowerCase());
}

function worstFirst(samples) {
  const scored = samples.filter((sample) => sample.reward !== null);
  return scored.reverse().concat(samples.filter((sample) => sample.reward === null));
}

function show() {
  const step = steps[stepSelect.selectedIndex];
  const samples = (order.value === "worst" ? worstFirst(step.samples) : step.samples).filter(matchesFilters);
  const all = step.num_samples === step.samples.length ? "" : ", " + step.num_samples + " in the step";
  document.getElementById("count").textContent = samples.length + " of " + step.samples.length + " samples" + all;
  const scales = scalesOf(step.samples);
  const cards = view.value === "groups" ? groupCards(samples, scales) : samples.map((sample) => card(sample, scales));
  document.getElementById("legend").textContent = legend(color.value, scales);
  document.getElementById("samples").replaceChildren(...cards);
  previous.disabled = stepSelect.selectedIndex === 0;
  next.disabled = stepSelect.selectedIndex === steps.length - 1;
}

function move(distance) {
  stepSelect.selectedIndex += distance;
  show();
}

// Fills the controls with the steps, and shows the step with this label or the last step.
function fill(label = null) {
  if (steps.length === 0) return;
  stepSelect.replaceChildren(...steps.map((step) => element("option", "", "step " + step.step)));
  stepSelect.value = label;
  if (stepSelect.selectedIndex < 0) stepSelect.selectedIndex = steps.length - 1;
  const reason = stop.value;
  stop.replaceChildren(stop.options[0]);
  const samples = steps.flatMap((step) => step.samples);
  for (const reason of [...new Set(samples.map(stopReason))].filter((reason) => reason).sort()) {
    stop.append(element("option", "", reason));
  }
  stop.value = [...stop.options].some((option) => option.value === reason) ? reason : "";
  color.disabled = !samples.some((sample) => sample.detail);
  document.getElementById("controls").hidden = false;
  show();
}

{
  for (const control of [stepSelect, order, view, color, outcome, stop, text, least, most]) control.addEventListener("input", show);
  previous.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  fill();
}

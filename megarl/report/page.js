"use strict";
// Text from rollouts enters the page through textContent only, so that markup in it stays text.
const steps = JSON.parse(document.getElementById("rollouts").textContent);
const [stepSelect, order, text, least, most, previous, next] = ["step", "order", "text", "least", "most", "previous", "next"]
  .map((id) => document.getElementById(id));

function element(tag, className, content) {
  const node = document.createElement(tag);
  node.className = className;
  if (typeof content === "string") node.textContent = content;
  else node.append(...content);
  return node;
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function number(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : asText(value);
}

function facts(sample) {
  const failed = sample.reward === null;
  const nodes = [element("span", failed ? "reward failed" : "reward", failed ? "no reward" : number(sample.reward))];
  const add = (content, className = "") => nodes.push(element("span", className, content));
  if (sample.failure) add(asText(sample.failure), "failed");
  for (const [name, value] of Object.entries(sample.parts || {})) add(name + " " + number(value));
  if (sample.answer !== null) add("answer " + asText(sample.answer));
  if (sample.advantage !== null) add("advantage " + number(sample.advantage));
  if (sample.mean_logprob !== null) add("log-prob " + number(sample.mean_logprob) + " a token");
  if (sample.num_response_tokens !== null) add(sample.num_response_tokens + " tokens");
  if (sample.finish_reason === "length") add("truncated", "cut");
  const runs = sample.version || [];
  if (runs.length === 1) add("weights " + runs[0].version);
  if (runs.length > 1) add("weights " + runs.map((run) => run.version + " × " + run.count).join(", "));
  if (sample.sample_id !== null) add(asText(sample.sample_id), "id");
  return element("div", "facts", nodes);
}

function card(sample) {
  const column = (title, content) => element("div", "", [element("h3", "", title), element("pre", "", content)]);
  const texts = element("div", "texts", [column("Prompt", sample.prompt), column("Response", sample.response)]);
  return element("article", "sample", [facts(sample), texts]);
}

function wanted(sample) {
  const bounded = least.value !== "" || most.value !== "";
  if (bounded && sample.reward === null) return false;
  if (least.value !== "" && sample.reward < Number(least.value)) return false;
  if (most.value !== "" && sample.reward > Number(most.value)) return false;
  const searched = [sample.prompt, sample.response, asText(sample.answer)].join("\n").toLowerCase();
  return searched.includes(text.value.toLowerCase());
}

function worstFirst(samples) {
  const scored = samples.filter((sample) => sample.reward !== null);
  return scored.reverse().concat(samples.filter((sample) => sample.reward === null));
}

function show() {
  const step = steps[stepSelect.selectedIndex];
  const samples = (order.value === "worst" ? worstFirst(step.samples) : step.samples).filter(wanted);
  const all = step.num_samples === step.samples.length ? "" : ", " + step.num_samples + " in the step";
  document.getElementById("count").textContent = samples.length + " of " + step.samples.length + " samples" + all;
  document.getElementById("samples").replaceChildren(...samples.map(card));
  previous.disabled = stepSelect.selectedIndex === 0;
  next.disabled = stepSelect.selectedIndex === steps.length - 1;
}

function move(distance) {
  stepSelect.selectedIndex += distance;
  show();
}

if (steps.length > 0) {
  for (const step of steps) stepSelect.append(element("option", "", "step " + step.step));
  stepSelect.selectedIndex = steps.length - 1;
  for (const control of [stepSelect, order, text, least, most]) control.addEventListener("input", show);
  previous.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  document.getElementById("controls").hidden = false;
  show();
}

// Rollout text is inserted with textContent only, so that markup in it is never interpreted.
const { steps, thumbnails } = JSON.parse(document.getElementById("rollouts").textContent);
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
  if (sample.mean_logprob !== null) add("log-prob " + number(sample.mean_logprob) + " per " + (isImage(sample) ? "denoising step" : "token"));
  if (sample.num_response_tokens !== null) add(counted(sample.num_response_tokens, "token"));
  if (isImage(sample)) add(counted(sample.num_denoising_steps, "denoising step"));
  if (sample.finish_reason === "length") add("truncated", "cut");
  if (sample.stop_reason && sample.stop_reason !== "length") add(asText(sample.stop_reason));
  const runs = sample.version || [];
  if (runs.length === 1) add("weights " + runs[0].version);
  if (runs.length > 1) add("weights " + runs.map((run) => run.version + " × " + run.count).join(", "));
  if (sample.sample_id !== null) add(asText(sample.sample_id), "id");
  return element("div", "facts", nodes);
}

function isImage(sample) {
  return typeof sample.num_denoising_steps === "number";
}

function image(sample) {
  if (!sample.image_uri) return element("p", "note", sample.image ? "not shown: " + sample.image.split("/").pop() : "not stored");
  const node = element("img", sample.image_is_small ? "small" : "", "");
  node.src = sample.image_uri;
  node.alt = asText(sample.sample_id);
  return node;
}

// Returns an image of a prompt. Thumbnails are shared by all steps, because equal images have equal names.
function promptImage(image) {
  const thumbnail = thumbnails[image.thumbnail];
  const label = "num_tokens" in image ? counted(image.num_tokens, "token") : "image";
  if (!thumbnail) {
    const state = image.thumbnail ? "image not shown · " : "image not stored · ";
    return element("span", "prompt-image", [element("span", "", state + label)]);
  }
  const { image_uri, image_is_small } = thumbnail;
  const node = element("img", image_is_small ? "small" : "", "");
  node.src = image_uri;
  node.alt = "image";
  return element("span", "prompt-image", [node, element("span", "", label)]);
}

// Returns a text with images in their places.
function withImages(parts, toNodes = (text) => [text]) {
  return parts.flatMap((part) => (typeof part === "string" ? toNodes(part) : [promptImage(part)]));
}

function promptText(sample) {
  return element("pre", "", sample.content_parts ? withImages(sample.content_parts) : sample.prompt);
}

// Returns an image with its reward and advantage.
function picture(sample) {
  const failed = sample.reward === null;
  const reward = element("b", failed ? "reward failed" : "reward", failed ? "no reward" : number(sample.reward));
  const nodes = [image(sample), reward];
  if (sample.advantage !== null) nodes.push(element("span", "", "advantage " + number(sample.advantage)));
  const node = element("div", "picture", nodes);
  node.title = [sample.sample_id, sample.failure].filter((text) => text !== null).map(asText).join("\n");
  return node;
}

function response(sample, scales) {
  if (isImage(sample)) return image(sample);
  return element("div", "response", responseBlocks(sample, color.value, scales, view.value === "turns"));
}

function card(sample, scales) {
  const prompt = element("div", "", [element("h3", "", "Prompt"), promptText(sample)]);
  const answer = element("div", "", [element("h3", "", "Response"), response(sample, scales)]);
  return element("article", "sample", [facts(sample), element("div", "texts", [prompt, answer])]);
}

// Returns the samples side by side: images in an element of this class, texts as cards.
function beside(samples, scales, className) {
  if (samples.every(isImage)) return element("div", className, samples.map(picture));
  const cards = samples.map((sample) => element("article", "sample", [facts(sample), response(sample, scales)]));
  return element("div", "beside", cards);
}

function promptSection(title, sample, rows) {
  const head = element("div", "prompt", [element("h3", "", title), promptText(sample)]);
  return element("section", "group", [head, ...rows]);
}

function grouped(samples, keyOf) {
  const groups = new Map();
  for (const sample of samples) groups.set(keyOf(sample), [...(groups.get(keyOf(sample)) || []), sample]);
  return groups;
}

function promptOf(sample) {
  return asText(sample.prompt_id ?? sample.prompt);
}

// Returns one section per group, those with images first. A step may have several groups for a prompt; rollout ids are
// STEP.GROUP.NUMBER.
function groupSections(samples, scales) {
  const groups = grouped(samples, (sample) => {
    const rollout = asText(sample.rollout_id ?? sample.sample_id ?? "");
    return asText([promptOf(sample), rollout.slice(0, Math.max(0, rollout.lastIndexOf(".")))]);
  });
  const sections = (group) => promptSection("Prompt · " + counted(group.length, "sample"), group[0], [beside(group, scales, "pictures")]);
  const isShown = (part) => thumbnails[part.thumbnail];
  const hasImages = (group) => group.some((sample) => sample.image_uri || (sample.content_parts || []).some(isShown));
  const all = [...groups.values()];
  return [...all.filter(hasImages), ...all.filter((group) => !hasImages(group))].map(sections);
}

const MAX_PROMPTS = 12;

// Returns one section per prompt with a row for each of its steps, for the prompts with the most steps.
function stepSections(ordered) {
  const prompts = grouped(steps.flatMap((step) => ordered(step).map((sample) => ({ ...sample, at: step }))), promptOf);
  const rows = [...prompts.values()].map((samples) => [...grouped(samples, (sample) => sample.at)]);
  rows.sort((a, b) => b.length - a.length);
  const sections = rows.slice(0, MAX_PROMPTS).map((row) => {
    const strips = row.map(([step, samples]) => {
      const strip = beside(samples, scalesOf(step.samples), "strip");
      strip.prepend(element("h4", "when", "step " + step.step));
      return strip;
    });
    return promptSection("Prompt · " + counted(row.length, "step"), row[0][1][0], strips);
  });
  return { sections, count: Math.min(MAX_PROMPTS, rows.length) + " of " + counted(rows.length, "prompt") };
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

function ordered(step) {
  return (order.value === "worst" ? worstFirst(step.samples) : step.samples).filter(matchesFilters);
}

function show() {
  const step = steps[stepSelect.selectedIndex];
  const overSteps = view.value === "steps";
  const scales = scalesOf(step.samples);
  let sections, count;
  if (overSteps) ({ sections, count } = stepSections(ordered));
  else {
    const samples = ordered(step);
    const all = step.num_samples === step.samples.length ? "" : ", " + step.num_samples + " in the step";
    count = samples.length + " of " + counted(step.samples.length, "sample") + all;
    sections = view.value === "groups" ? groupSections(samples, scales) : samples.map((sample) => card(sample, scales));
  }
  document.getElementById("count").textContent = count;
  document.getElementById("legend").textContent = legend(color.value, scales);
  document.getElementById("samples").replaceChildren(...sections);
  stepSelect.disabled = overSteps;
  previous.disabled = overSteps || stepSelect.selectedIndex === 0;
  next.disabled = overSteps || stepSelect.selectedIndex === steps.length - 1;
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
  const controls = document.getElementById("controls");
  if (controls.hidden && view.value === "samples" && samples.some(isImage)) view.value = "groups";
  controls.hidden = false;
  show();
}

{
  for (const control of [stepSelect, order, view, color, outcome, stop, text, least, most]) control.addEventListener("input", show);
  previous.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  fill();
}

// Renders a response as blocks: conversation turns, or spans of trained and masked tokens with token colors.

const TOOL_CALL = /<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<function=[\s\S]*?(?:<\/function>|$)|\[TOOL_CALLS\][^\n]*/g;

// Returns [begin, end] for each tool call in a text.
function toolCalls(text) {
  return [...text.matchAll(TOOL_CALL)].map((match) => [match.index, match.index + match[0].length]);
}

function withToolCalls(text) {
  const nodes = [];
  let place = 0;
  for (const [begin, end] of toolCalls(text)) {
    nodes.push(text.slice(place, begin), element("span", "toolcall", text.slice(begin, end)));
    place = end;
  }
  return [...nodes, text.slice(place)];
}

function block(className, title, content) {
  return element("div", "block " + className, [element("h4", "", title), element("pre", "", content)]);
}

function turnBlocks(turns) {
  return turns.map((turn) => {
    const text = asText(turn.content === null || turn.content === undefined ? "" : turn.content);
    const content = withImages(turn.content_parts || [text], withToolCalls);
    for (const call of turn.tool_calls || []) content.push(element("span", "toolcall", asText(call)));
    return block("role-" + turn.role, asText(turn.role), content);
  });
}

// Expands run-length encoded weight versions to one version per token.
function versions(runs) {
  return (runs || []).flatMap((run) => Array(run.count).fill(run.version));
}

const COLORS = {
  "none": () => null,
  "log-prob": (detail, i) => sequential(detail.logprobs && detail.logprobs[i], -5),
  "difference": (detail, i, scales) => diverging(detail.differences && detail.differences[i], scales.differences),
  "advantage": (detail, i, scales) => diverging(detail.advantages && detail.advantages[i], scales.advantages),
  "version": (detail, i, scales) => {
    const version = detail.versions[i];
    return version === undefined ? null : "var(--series-" + (1 + ((version - scales.firstVersion) % 5)) + ")";
  },
};

function shade(color, share) {
  return "color-mix(in srgb, var(" + color + ") " + Math.round(75 * Math.min(1, share)) + "%, transparent)";
}

function sequential(value, full) {
  return typeof value === "number" ? shade("--series-2", value / full) : null;
}

function diverging(value, scale) {
  if (typeof value !== "number" || !(scale > 0)) return null;
  return shade(value < 0 ? "--bad" : "--good", Math.abs(value) / scale);
}

// Returns color scales that are shared by all samples in a step, so that their colors are comparable.
function scalesOf(samples) {
  const details = samples.map((sample) => sample.detail).filter((detail) => detail);
  const largest = (name) => Math.max(0, ...details.map((d) => Math.max(0, ...(d[name] || []).map((x) => Math.abs(x || 0)))));
  const first = Math.min(...samples.flatMap((sample) => (sample.version || []).map((run) => run.version)));
  return { differences: largest("differences"), advantages: largest("advantages"), firstVersion: first };
}

function legend(color, scales) {
  if (color === "log-prob") return "log-prob under the sampling policy: transparent at 0, full color at −5 or less";
  if (color === "difference") return "trainer log-prob − engine log-prob: full color at ±" + number(scales.differences) + ", red is negative";
  if (color === "advantage") return "advantage: full color at ±" + number(scales.advantages) + ", red is negative";
  return color === "version" ? "each weight version has its own color" : "";
}

function isMasked(detail, i) {
  return Boolean(detail.mask) && detail.mask[i] !== undefined && !detail.mask[i];
}

function tip(detail, i) {
  const facts = ["token " + (i + 1)];
  if (isMasked(detail, i)) facts.push("not trained on");
  for (const [name, key] of [["log-prob", "logprobs"], ["difference", "differences"], ["advantage", "advantages"]]) {
    if (detail[key] && typeof detail[key][i] === "number") facts.push(name + " " + number(detail[key][i]));
  }
  if (detail.versions[i] !== undefined) facts.push("weights " + detail.versions[i]);
  return facts.join(", ");
}

// Returns one block for each span of tokens with the same mask.
function tokenBlocks(sample, color, scales) {
  const detail = { ...sample.detail, versions: versions(sample.version) };
  const calls = toolCalls(detail.tokens.join(""));
  const blocks = [];
  let place = 0;
  let turn = 0;
  for (let begin = 0; begin < detail.tokens.length; ) {
    const masked = isMasked(detail, begin);
    const nodes = [];
    let end = begin;
    for (; end < detail.tokens.length && isMasked(detail, end) === masked; end++) {
      const text = detail.tokens[end];
      const inCall = calls.some(([from, to]) => place >= from && place < to);
      const node = element("span", "token" + (masked ? " masked" : "") + (inCall ? " toolcall" : ""), text);
      const background = masked ? null : COLORS[color](detail, end, scales);
      if (background !== null) node.style.backgroundColor = background;
      node.title = tip(detail, end);
      nodes.push(node);
      place += text.length;
    }
    if (!masked) turn += 1;
    const title = masked ? "masked, not trained on" : "turn " + turn;
    blocks.push(block(masked ? "read" : "made", title + " · " + counted(end - begin, "token"), nodes));
    begin = end;
  }
  const left = (sample.num_response_tokens || 0) - detail.tokens.length;
  if (left > 0) blocks.push(element("p", "note", counted(left, "more token")));
  return blocks;
}

function responseBlocks(sample, color, scales, byTurns) {
  if (sample.turns && (byTurns || !sample.detail)) return turnBlocks(sample.turns);
  if (sample.detail) return tokenBlocks(sample, color, scales);
  return [element("pre", "", withToolCalls(sample.response))];
}

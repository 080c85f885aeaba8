"use strict";
// Creates elements. Text is inserted as text nodes only, so that markup in it is never interpreted.

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

// Returns a number of things, such as "1 step" or "2,000 steps".
function counted(count, noun) {
  return count.toLocaleString("en") + " " + noun + (count === 1 ? "" : "s");
}

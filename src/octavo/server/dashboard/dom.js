// A few helpers around the document.

export const $ = (id) => document.getElementById(id);

// An element with properties (`class`, `text`, `data-…`, `aria-…`, or any DOM property) and children.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

// A patch of the colour that `kind` names, beside a text that says the same.
export const swatch = (kind = "") => h("i", { class: `swatch ${kind}`, "aria-hidden": "true" });

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

// Makes the children of `parent` those of `items`, in order. An element stays the same as long as its key does, so that
// focus and transitions survive: `make(item)` builds one, `update(element, item)` fills it.
export function keyed(parent, items, key, make, update) {
  const known = parent.octavoKeyed ?? new Map();
  const next = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const element = known.get(name) ?? make(item);
    known.delete(name);
    next.set(name, element);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
    update(element, item);
  }
  for (const element of known.values()) element.remove();
  parent.octavoKeyed = next;
}

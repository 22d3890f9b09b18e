// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export const count = (n) => whole.format(n);

export const decimal = (n) => (n > 0 && n < 10 ? n.toFixed(1) : count(n));

export function many(n, one, more = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : more}`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) {
    n /= 1024;
    i += 1;
  }
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  const p = 100 * share;
  return `${p > 0 && p < 10 ? p.toFixed(1) : p > 99 && p < 100 ? "99" : Math.round(p)} %`;
}

export function milliseconds(s) {
  if (!Number.isFinite(s)) return "–";
  const ms = 1000 * s;
  if (ms >= 10000) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

export function duration(s) {
  if (s < 1) return "less than 1 s";
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

export const ago = (s) => (s < 1 ? "just now" : `${duration(s)} ago`);

export const time = (unix) => clock.format(new Date(1000 * unix));

// A name that a machine made up, as short as it still tells apart.
export const short = (name) => (/^[0-9a-f-]{16,}/.test(name) ? name.replace(/^([0-9a-f]{8})[0-9a-f-]*/, "$1…") : name);

export function requestName(id) {
  if (!id) return "an unnamed request";
  return /^req/i.test(id) ? id : `request ${short(id)}`;
}

// Whose something is: its label, or the request it came from, and the tenant where there are any.
export function whose(owner) {
  if (!owner) return "nobody known";
  const name = owner.label || requestName(owner.request_id);
  return owner.tenant ? `${name} (${owner.tenant})` : name;
}

"use strict";
// The twin of units.py: the same text for the same number, held by a test that asks both.
const DASH = "–";
const COUNT_STEPS = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const BYTE_STEPS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const TIME_STEPS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const ENERGY_STEPS = [[1, "J"], [1e-3, "mJ"], [1e-6, "µJ"], [1e-9, "nJ"]];

/** Fixed digits; a tie goes to the even digit, as in Python. Only odd multiples of 2^-(digits + 1) are ties. */
function fixed(value, digits) {
  const halves = value * 2 ** (digits + 1);
  if (Number.isInteger(halves) && Math.abs(halves % 2) === 1) {
    const below = Math.floor(value * 10 ** digits);
    return ((below % 2 ? below + 1 : below) / 10 ** digits).toFixed(digits);
  }
  return value.toFixed(digits);
}

function scaled(value, divisor, suffix) {
  const number = value / divisor;
  const digits = Math.abs(number) < 10 ? 2 : Math.abs(number) < 100 ? 1 : 0;
  return `${fixed(number, digits)} ${suffix}`;
}

function stepped(value, steps) {
  const step = steps.find(([divisor]) => Math.abs(value) >= divisor);
  return step ? scaled(value, step[0], step[1]) : null;
}

const count = (value) => stepped(value, COUNT_STEPS) ?? (Number.isInteger(value) ? fixed(value, 0) : fixed(value, 2));
const size = (bytes) => stepped(bytes, BYTE_STEPS) ?? `${fixed(bytes, 0)} B`;
const duration = (seconds) => stepped(seconds, TIME_STEPS) ?? "0 s";
const ratio = (value) => (value >= 10 ? fixed(value, 1) : fixed(value, 2));

function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  return share >= 0.9995 && share < 1 ? ">99.9%" : `${fixed(share * 100, 1)}%`;
}

/** The twin of times in report/sweep_files.py. */
const times = (value) => (value >= 2 ? fixed(value, 1) : fixed(value, 2));

const energy = (joules) => stepped(joules, ENERGY_STEPS) ?? (joules ? `${Number(joules.toPrecision(2))} J` : "0 J");
const plain = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4))));

const FORMATS = {
  text: String,
  flag: (value) => (value ? "yes" : "no"),
  number: plain,
  count,
  bytes: size,
  ratio,
  share: percent,
  time: duration,
  energy,
  factor: (value) => `${times(value)}×`,
  ms: (value) => duration(value / 1e3),
  mib: (value) => size(value * 2 ** 20),
  points: (value) => fixed(100 * value, 2),
};

/** A value for people: scaled, with its unit, a dash where there is none. */
const shown = (value, kind) => (value === null || value === undefined ? DASH : FORMATS[kind](value));

/** An interval for people; its upper end may be open. */
function between(low, high, kind) {
  if (high === null || high === undefined) return `from ${shown(low, kind)}, upper end unknown`;
  return kind === "factor" ? `${times(low)}–${times(high)}` : `${shown(low, kind)} to ${shown(high, kind)}`;
}

/** What to divide by, and the unit, so that an axis has short numbers. */
function axisScale(largest, kind) {
  const steps = { count: COUNT_STEPS, bytes: BYTE_STEPS, time: TIME_STEPS }[kind];
  return steps.find(([divisor]) => largest >= divisor) ?? [1, { count: "", bytes: "B", time: "s" }[kind]];
}

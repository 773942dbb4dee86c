"use strict";
// The dashboard of `sinew serve`. Everything that came over a wire is shown as text, never as markup.

const LONGEST = 300; // answers that are remembered
const SHOWN = 120; // bars of the latency strip
const SESSIONS = 50;
const MINE = "dashboard"; // the session of requests that this page makes
const STAGES = ["queue", "preprocess", "vision", "prefix", "text", "head", "postprocess"];
const COLOURS = ["#8250df", "#0969da", "#1a7f37", "#bf8700", "#1b7c83", "#bc4c00", "#cf222e"];
const $ = (id) => document.getElementById(id);
const state = { about: null, answers: [], last: null, previous: null, arrived: 0, looking: false, paused: false, sessions: new Map(), dirty: false };
let key = sessionStorage.getItem("sinew-key") || "";

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = "Bearer " + key;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

// ------------------------------------------------------------------ events

async function follow() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 5000)) {
    try {
      const reply = await ask("/v1/events");
      if (reply.status === 401) {
        say("a key is wanted", "bad");
        await wanted();
        wait = 250;
        continue;
      }
      if (!reply.ok) throw new Error((await reply.text()).slice(0, 200));
      $("key-form").hidden = true;
      wait = 250;
      await read(reply.body.getReader());
      say("the server has ended the connection; trying again", "bad");
    } catch (error) {
      say("not connected (" + error.message + "); trying again", "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const [event, data] = text.slice(0, end).split("\ndata: ");
      HEARD[event.slice("event: ".length)]?.(JSON.parse(data));
    }
  }
}

function wanted() {
  const form = $("key-form");
  $("key-error").textContent = key ? "The server did not take this key." : "";
  form.hidden = false;
  $("key").focus();
  return new Promise((resolve) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value.trim();
      sessionStorage.setItem("sinew-key", key);
      $("key").value = "";
      resolve();
    };
  });
}

function say(text, kind) {
  const line = $("status");
  if (line.textContent !== text) line.textContent = text;
  line.className = kind;
}

const HEARD = {
  about(about) {
    state.about = about;
    const { policy } = about;
    document.title = `${policy.name} · Sinew`;
    if (!about.as_seen) $("cameras-note").textContent = "As they came: this server does not know the policy's resize.";
    card(about);
    cameras(policy.cameras);
    const names = jointNames(policy.action);
    state.joints = charts($("joints"), names);
    tryForm(about);
    look();
  },
  health(health) {
    const memory = health.memory_bytes ? `, ${(health.memory_bytes / 2 ** 30).toFixed(2)} GiB` : "";
    const counts = `${health.served} served, ${health.waiting} waiting, ${health.superseded} superseded, ${health.busy} busy, ${health.late} late`;
    if (health.status === "ok") say(`running for ${Math.round(health.uptime_s)} s: ${counts}${memory}`, "good");
    else say(`${health.status}: ${health.problems.join("; ")}`, "bad");
    if (state.about) engine(state.about, health);
    if (health.host) host(health.host, health.gpu);
    wiring(health.wiring || []);
    if (!state.paused) robots((state.robots = health.robots || []));
  },
  answers(answers) {
    keep(answers);
    if (state.paused) return;
    for (const answer of answers) {
      state.answers.push(answer);
      if (state.answers.length > LONGEST) state.answers.shift();
      session(answer);
      if (!answer.actions) continue; // the newest chunk of a message has its numbers, what is tried by hand has none
      state.previous = state.last;
      state.last = answer;
      state.arrived = performance.now() - 1000 * answer.age;
    }
    state.dirty = true;
  },
  frames({ cameras }) {
    if (state.paused) return;
    for (const img of $("cameras").querySelectorAll("img")) {
      if (!cameras[img.dataset.camera]) continue;
      img.src = "data:image/jpeg;base64," + cameras[img.dataset.camera];
      img.dataset.at = String(performance.now());
    }
  },
};

// ------------------------------------------------------------------ cameras

function cameras(known) {
  $("cameras").replaceChildren(...known.map((camera) => {
    const figure = element("figure");
    figure.append(
      element("img", null, { alt: `camera ${camera.name}`, "data-camera": camera.name, width: camera.width, height: camera.height, src: paint(camera.width, camera.height).toDataURL("image/png") }),
      element("figcaption", `${camera.name}: no frame yet`));
    return figure;
  }));
}

// Pictures are sent while they can be seen: a hidden page costs the server none.
async function look() {
  if (state.looking) return;
  state.looking = true;
  for (;;) {
    const stop = new AbortController();
    const turned = () => { if (document.hidden) stop.abort(); };
    document.addEventListener("visibilitychange", turned);
    try {
      if (!document.hidden) {
        const reply = await ask("/v1/frames", { signal: stop.signal });
        if (reply.ok) await read(reply.body.getReader());
      }
    } catch { /* the events tell that the server is gone */ }
    document.removeEventListener("visibilitychange", turned);
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

function ages() {
  for (const img of $("cameras").querySelectorAll("img[data-at]")) {
    const age = Math.round(performance.now() - Number(img.dataset.at));
    img.nextElementSibling.textContent = `${img.dataset.camera}: ${age < 1000 ? age + " ms" : (age / 1000).toFixed(1) + " s"} old`;
  }
}

// ------------------------------------------------------------------ charts

function jointNames(vector) {
  return Array.from({ length: vector.dim }, (_, index) => {
    const unit = (vector.units || [])[index];
    return ((vector.names || [])[index] || String(index)) + (unit ? ` [${unit}]` : "");
  });
}

function charts(parent, names) {
  const made = names.map((name) => {
    const canvas = element("canvas", null, { height: 120, role: "img", "aria-label": name });
    const caption = element("figcaption", name);
    const figure = element("figure");
    figure.append(canvas, caption);
    return { name, canvas, caption, figure };
  });
  parent.replaceChildren(...made.map((chart) => chart.figure));
  return made;
}

function surface(canvas) {
  const ratio = window.devicePixelRatio || 1, height = Number(canvas.getAttribute("height"));
  const shown = canvas.dataset.height || height;
  canvas.dataset.height = shown;
  const width = canvas.clientWidth || 230;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(shown * ratio)) canvas.height = Math.round(shown * ratio);
  canvas.style.height = shown + "px";
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, shown);
  return [context, width, Number(shown)];
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Round numbers from low to high, about so many.
function ticks(low, high, many) {
  if (!(high > low)) return [low];
  const raw = (high - low) / many, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
  const found = [];
  for (let each = Math.ceil(low / step - 1e-9); each * step <= high + 1e-9 * step; each += 1) found.push(each * step);
  return found;
}

const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(3))));

// Scales with a grid: across and up are [pixel, label].
function axes(context, { left, right, top, bottom }, across, up) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("--faint");
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const [place, label] of up) {
    context.beginPath(); context.moveTo(left, place); context.lineTo(right, place); context.stroke();
    context.fillText(label, left - 4, place);
  }
  context.textBaseline = "top";
  across.forEach(([place, label], index) => {
    context.beginPath(); context.moveTo(place, bottom); context.lineTo(place, bottom + 3); context.stroke();
    context.textAlign = place > right - 14 ? "right" : index === 0 && place < left + 14 ? "left" : "center";
    context.fillText(label, Math.min(place, right), bottom + 4);
  });
}

// The running chunk solid, the previous one faded and shifted by the rows between them, the cursor at `now` (rows).
function draw(chart, joint, rows, previous, shift, now) {
  const [context, width, height] = surface(chart.canvas);
  const column = (actions) => actions.map((row) => row[joint]);
  const current = column(rows), old = previous ? column(previous) : [];
  const finite = [...current, ...old].filter((value) => value !== null);
  const low = Math.min(...finite), high = Math.max(...finite), spare = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.01;
  const hz = state.about?.policy.control_hz, last = Math.max(rows.length - 1, 1);
  const box = { left: 42, right: width - 6, top: 6, bottom: height - 16 };
  const x = (row) => box.left + (row / last) * (box.right - box.left);
  const y = (value) => box.bottom - ((value - low + spare) / (high - low + 2 * spare)) * (box.bottom - box.top);
  const across = hz ? ticks(0, last / hz, 3).map((each) => [x(each * hz), `${short(each)} s`]) : ticks(0, last, 3).map((each) => [x(each), String(each)]);
  axes(context, box, across, ticks(low - spare, high + spare, 3).map((each) => [y(each), short(each)]));
  const line = (values, offset, style, thick) => {
    context.strokeStyle = style;
    context.lineWidth = thick;
    context.beginPath();
    let open = false;
    values.forEach((value, row) => {
      if (value === null || row + offset < 0) { open = false; return; }
      if (open) context.lineTo(x(row + offset), y(value)); else context.moveTo(x(row + offset), y(value));
      open = true;
    });
    context.stroke();
  };
  if (old.length) { context.globalAlpha = 0.45; line(old, -shift, colour("--faint"), 1); context.globalAlpha = 1; }
  line(current, 0, colour("--mark"), 2);
  const at = now === null ? null : Math.min(now, rows.length - 1);
  if (at !== null) {
    context.strokeStyle = now > rows.length - 1 ? colour("--bad") : colour("--ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(at), box.top);
    context.lineTo(x(at), box.bottom);
    context.stroke();
  }
  const value = current[at === null ? 0 : Math.round(at)];
  chart.caption.textContent = `${chart.name}: ${value === null ? "not finite" : value.toPrecision(4)} (${low.toPrecision(3)} to ${high.toPrecision(3)})`;
  chart.canvas.setAttribute("aria-label", chart.caption.textContent);
}

function chunk() {
  if (!state.last || !state.joints) return;
  const hz = state.about.policy.control_hz;
  const passed = (performance.now() - state.arrived) / 1000;
  const shift = hz && state.previous ? (state.last.time - state.previous.time) * hz : 0;
  state.joints.forEach((chart, joint) =>
    draw(chart, joint, state.last.actions, state.previous && state.previous.session === state.last.session ? state.previous.actions : null, shift, hz ? passed * hz : null));
  const about = hz ? `at ${hz} actions per second` : "the bundle states no control rate, so there is no cursor and both begin at the left";
  $("chunk-note").textContent = `${state.last.actions.length} actions of ${state.last.wire}${state.last.session ? ", session " + state.last.session : ""}, ${about}. Solid: the running chunk; faded: the one before; the line: now.`;
}

function latency() {
  const done = state.answers.filter((answer) => answer.timing);
  if (!done.length) return;
  const shown = done.slice(-SHOWN);
  const recent = done.filter((answer) => answer.time > done.at(-1).time - 60).map((answer) => answer.ms).sort((a, b) => a - b);
  const part = (share) => recent[Math.min(recent.length - 1, Math.ceil(share * recent.length) - 1)].toFixed(1);
  const missed = state.answers.filter((answer) => answer.missed).length;
  $("quantiles").textContent = `p50 ${part(0.5)}, p95 ${part(0.95)}, p99 ${part(0.99)}, max ${recent.at(-1).toFixed(1)} ms of ${recent.length} answers in a minute; ${missed} of the last ${state.answers.length} missed their deadline`;
  const canvas = $("latency"), [context, width, height] = surface(canvas);
  const deadline = shown.at(-1).deadline_ms;
  const top = 1.1 * Math.max(...shown.map((answer) => answer.ms), deadline || 0);
  const box = { left: 58, right: width - 6, top: 8, bottom: height - 18 }, tall = box.bottom - box.top;
  const bar = Math.min((box.right - box.left) / shown.length, 24);
  const place = (index) => box.left + index * bar;
  const now = shown.at(-1).time, few = Math.max(1, Math.ceil(shown.length / 5), Math.ceil(60 / bar));
  const across = shown.flatMap((answer, index) => ((shown.length - 1 - index) % few === 0 ? [[place(index) + bar / 2, index === shown.length - 1 ? "now" : `-${short(now - answer.time)} s`]] : []));
  axes(context, box, across, ticks(0, top, 4).map((each) => [box.bottom - (each / top) * tall, `${short(each)} ms`]));
  shown.forEach((answer, index) => {
    let base = box.bottom;
    const thick = Math.max(bar - 1, 1);
    STAGES.forEach((stage, number) => {
      const size = ((answer.timing[stage + "_ms"] || 0) / top) * tall;
      context.fillStyle = COLOURS[number];
      context.fillRect(place(index), base - size, thick, size);
      base -= size;
    });
    const whole = box.bottom - (answer.ms / top) * tall;
    context.fillStyle = colour("--faint"); // what is in no stage: the wire, decoding
    if (whole < base) context.fillRect(place(index), whole, thick, base - whole);
    if (answer.missed) { context.fillStyle = colour("--bad"); context.fillRect(place(index), box.top, thick, 6); }
  });
  if (deadline) {
    context.strokeStyle = colour("--bad");
    context.beginPath();
    context.moveTo(box.left, box.bottom - (deadline / top) * tall);
    context.lineTo(box.right, box.bottom - (deadline / top) * tall);
    context.stroke();
  }
  canvas.setAttribute("aria-label", `Latency of the last ${shown.length} answers: ${$("quantiles").textContent}${deadline ? `; deadline ${deadline} ms` : ""}`);
}

// The server keeps an hour, so a page that is loaded again begins with it.
async function history() {
  for (;;) {
    try {
      if (state.about && !document.hidden && !state.paused) {
        const reply = await ask("/v1/history");
        if (reply.ok) hour((state.hour = await reply.json()));
      }
    } catch { /* the events tell that the server is gone */ }
    await new Promise((resolve) => setTimeout(resolve, state.about ? 5000 : 500));
  }
}

function hour({ now, span_s: span, spans, points }) {
  if (!points.length) return;
  const whole = span * spans, sum = (name) => points.reduce((total, each) => total + each[name], 0);
  const canvas = $("hour"), [context, width, height] = surface(canvas);
  const box = { left: 58, right: width - 6, top: 8, bottom: height - 18 };
  const span_shown = Math.min(whole, Math.max(60, now - points[0].time)), begin = now - span_shown;
  const top = 1.1 * Math.max(...points.map((each) => each.max_ms), 1e-3);
  const x = (time) => box.left + Math.max(0, (time - begin) / span_shown) * (box.right - box.left);
  const y = (ms) => box.bottom - (ms / top) * (box.bottom - box.top);
  const minutes = span_shown / 60;
  axes(context, box, ticks(-minutes, 0, 5).map((each) => [x(now + 60 * each), each === 0 ? "now" : `${short(each)} min`]), ticks(0, top, 4).map((each) => [y(each), `${short(each)} ms`]));
  for (const [name, style, thick] of [["max_ms", "--line", 1], ["p95_ms", "--faint", 1.5], ["p50_ms", "--mark", 2]]) {
    context.strokeStyle = colour(style);
    context.lineWidth = thick;
    context.beginPath();
    points.forEach((each, index) => {
      const joined = index && each.time - points[index - 1].time <= span && each.answers && points[index - 1].answers;
      const place = [x(each.time + span / 2), y(each[name])];
      if (joined) context.lineTo(...place); else { context.moveTo(place[0] - 2, place[1]); context.lineTo(...place); }
    });
    context.stroke();
  }
  context.fillStyle = colour("--bad");
  for (const each of points) if (each.missed + each.refused) context.fillRect(x(each.time), box.top, Math.max(2, x(each.time + span) - x(each.time) - 1), 5);
  const text = `${sum("answers")} answers, ${sum("missed")} past their deadline, ${sum("refused")} refused in ${short(span_shown / 60)} min. Each ${span} s: p50 strong, p95 grey, largest faint; red where one was missed or refused.`;
  $("hour-note").textContent = text;
  canvas.setAttribute("aria-label", text);
}

// ------------------------------------------------------------------ pause, snapshot, recording

const kept = { on: false, lines: [] };
const MOST_KEPT = 20000; // answers of one recording of this page

function save(name, text) {
  const link = element("a", null, { download: name, href: URL.createObjectURL(new Blob([text], { type: "application/json" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function keep(answers) {
  if (!kept.on) return;
  kept.lines.push(...answers.map((answer) => JSON.stringify(answer)));
  $("keep-note").textContent = `${kept.lines.length} answers`;
  if (kept.lines.length >= MOST_KEPT) recording();
}

const stamp = () => new Date().toISOString().replace(/[:.]/g, "-");

function recording() {
  kept.on = !kept.on;
  $("keep").setAttribute("aria-pressed", String(kept.on));
  $("keep").textContent = kept.on ? "Stop and save" : "Record";
  if (kept.on) kept.lines = [];
  else if (kept.lines.length) save(`answers-${stamp()}.jsonl`, kept.lines.join("\n") + "\n");
  $("keep-note").textContent = kept.on ? "0 answers" : `${kept.lines.length} answers saved`;
}

function pausing() {
  state.paused = !state.paused;
  $("pause").setAttribute("aria-pressed", String(state.paused));
  $("pause").textContent = state.paused ? "Go on" : "Pause";
}

function snapshot() {
  const pictures = Object.fromEntries([...$("cameras").querySelectorAll("img[data-at]")].map((img) => [img.dataset.camera, img.src]));
  save(`snapshot-${stamp()}.json`, JSON.stringify({ about: state.about, answer: state.last, robots: state.robots, cameras: pictures }));
}

// ------------------------------------------------------------------ sessions, policy

function session(answer) {
  const name = [answer.wire, answer.client, answer.session].join("\n");
  const row = state.sessions.get(name) || { answers: 0, missed: 0, refused: 0, times: [], wire: answer.wire, client: answer.client, session: answer.session };
  state.sessions.delete(name); // the newest stand last
  state.sessions.set(name, row);
  if (state.sessions.size > SESSIONS) state.sessions.delete(state.sessions.keys().next().value);
  if (answer.outcome === "ok") row.answers += 1; else { row.refused += 1; row.error = `${answer.outcome}: ${answer.error}`; }
  row.missed += answer.missed ? 1 : 0;
  row.prompt = answer.prompt || row.prompt || "";
  row.text = answer.text || row.text || "";
  row.times.push(answer.time);
  if (row.times.length > 20) row.times.shift();
  const told = answer.warnings && answer.warnings.length ? answer.warnings.join("; ") : row.error && answer.error ? row.error : "";
  if (told && $("warnings").textContent !== told) $("warnings").textContent = told;
}

function sessions() {
  $("sessions").replaceChildren(...[...state.sessions.values()].reverse().map((row) => {
    const span = row.times.at(-1) - row.times[0];
    const line = element("tr");
    const rate = span > 0 ? ((row.times.length - 1) / span).toFixed(1) : "";
    const cells = { wire: row.wire, client: row.client, session: row.session, "per second": rate, answers: row.answers, missed: row.missed, refused: row.refused, instruction: row.prompt, "last words": row.text };
    for (const [label, cell] of Object.entries(cells)) line.append(element("td", String(cell), { "data-label": label }));
    return line;
  }));
}

// What looks wired otherwise than in the training data, a line per robot.
function wiring(robots) {
  const lines = robots.map(({ wire, client, session: name, findings }) =>
    `${[wire, client, name].filter(Boolean).join(" ")}: ${findings.map((each) => `${each.subject} ${each.level}: ${each.seen}`).join("; ")}`);
  if ([...$("wiring").children].map((line) => line.textContent).join("\n") === lines.join("\n")) return;
  $("wiring").replaceChildren(...lines.map((line) => element("li", line)));
}

// What robots say of their own runs. A hold between two chunks is nothing to tell.
function robots(rows) {
  const says = (row) => row.state + (row.reason && `: ${row.reason}`);
  const stands = (row) => ["paused", "aligning"].includes(row.state) || (row.state === "holds" && row.rows_hz < row.hz / 10);
  const still = rows.filter(stands), note = $("robots-note");
  const text = still.length ? `Standing still: ${still.length} of ${rows.length}. ${still.map((row) => `robot ${row.number} ${says(row)}`).join("; ")}`
    : rows.length ? `${rows.length} report; none stands still.` : "No robot reports. `sinew run` does, over the native wire.";
  if (note.textContent !== text) note.textContent = text; // it is read out
  note.className = still.length ? "bad" : "note";
  $("robots-table").hidden = !rows.length;
  showArms(rows);
  const counts = (parts) => Object.entries(parts).map(([name, count]) => `${count} x ${name}`).join(", ");
  $("robots").replaceChildren(...rows.map((row) => {
    const line = element("tr");
    const cells = {
      robot: [row.number, row.name, row.policy].filter(Boolean).join(" "),
      state: says(row) + (row.heard_s > 4 ? `, ${Math.round(row.heard_s)} s ago` : ""),
      client: [row.client, row.session].filter(Boolean).join(" "),
      "rows per second": `${row.rows_hz.toFixed(1)}; ticks ${row.rate_hz.toFixed(1)} of ${short(row.hz)}, ${row.late} late, ${row.skipped} skipped`,
      "row age": row.age_p50_ms === null ? "" : `p50 ${Math.round(row.age_p50_ms)}, p95 ${Math.round(row.age_p95_ms)} ms`,
      episodes: row.episodes === null ? "" : `${row.successes} of ${row.episodes} won`,
      "by hand": row.takeovers ? `${row.takeovers} times, ${row.steps_by_hand} steps` : "",
      clipped: row.limits.length ? `${row.clipped_commands} (${counts(row.clipped) || "none"}); limits: ${row.limits.join(", ")}` : "no limits",
      held: `${Object.values(row.held).reduce((sum, count) => sum + count, 0)} of ${row.steps} steps: ${counts(row.held)}`.replace(/: $/, ""),
    };
    for (const [label, cell] of Object.entries(cells)) line.append(element("td", cell, { "data-label": label, class: label === "state" && stands(row) ? "bad" : "" }));
    return line;
  }));
}

// Where arms stand that a robot knows (setting kinematics), in metres of their bases: dragged or by arrow keys seen from elsewhere.
const arms = new Map(); // robot's number -> its figure, from where it is looked at, where its tip was
function showArms(rows) {
  const known = rows.filter((row) => row.arm.length);
  for (const number of [...arms.keys()].filter((number) => !known.some((row) => row.number === number))) arms.delete(number);
  for (const row of known) {
    const arm = arms.get(row.number) || newArm(row.number);
    arm.points = Array.from({ length: row.arm.length / 3 }, (_, i) => row.arm.slice(3 * i, 3 * i + 3));
    const tip = arm.points.at(-1), last = arm.trail.at(-1);
    if (!last || tip.some((x, i) => Math.abs(x - last[i]) > 1e-3)) arm.trail.push(tip);
    if (arm.trail.length > 60) arm.trail.shift();
    arm.caption.textContent = `robot ${row.number}: tip at ${tip.map((x) => x.toFixed(3)).join(", ")} m`;
    arm.canvas.setAttribute("aria-label", `Arm of ${arm.caption.textContent}. Arrow keys turn it.`);
    drawArm(arm);
  }
  const figures = [...arms.values()].map((arm) => arm.figure), shown = [...$("arms").children];
  if (figures.length !== shown.length || figures.some((figure, i) => figure !== shown[i])) $("arms").replaceChildren(...figures);
}

function newArm(number) {
  const canvas = element("canvas", null, { height: 240, role: "img", tabindex: 0 }), caption = element("figcaption"), figure = element("figure");
  const arm = { canvas, caption, figure, points: [], trail: [], turn: -0.9, tilt: 0.45 };
  const look = (turn, tilt) => {
    arm.turn += turn;
    arm.tilt = Math.min(1.5, Math.max(-0.2, arm.tilt + tilt));
    drawArm(arm);
  };
  canvas.style.touchAction = "pan-y"; // a page is still scrolled on a phone
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => event.buttons && look(event.movementX / 100, event.movementY / 100));
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] }[event.key];
    if (way) event.preventDefault(), look(...way);
  });
  figure.append(canvas, caption);
  arms.set(number, arm);
  return arm;
}

function drawArm({ canvas, points, trail, turn, tilt }) {
  const [context, width, height] = surface(canvas), style = getComputedStyle(canvas);
  const reach = points.slice(1).reduce((sum, point, i) => sum + Math.hypot(...point.map((x, axis) => x - points[i][axis])), 0) || 1;
  const scale = 0.75 * Math.min(width, height) / reach;
  const seen = ([x, y, z]) => { // turned about the vertical, then tilted; without perspective, so that lengths compare
    const across = x * Math.cos(turn) - y * Math.sin(turn), away = x * Math.sin(turn) + y * Math.cos(turn);
    return [width / 2 + scale * across, 0.72 * height - scale * (z * Math.cos(tilt) + away * Math.sin(tilt))];
  };
  const line = (path, colour, thick) => {
    context.strokeStyle = colour;
    context.lineWidth = thick;
    context.beginPath();
    path.map(seen).forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.stroke();
  };
  const [faint, ink, mark] = ["--line", "--ink", "--mark"].map((name) => style.getPropertyValue(name));
  context.clearRect(0, 0, width, height);
  const far = reach / 2;
  for (let at = -far; at <= far; at += far / 2) { // the ground, a quarter of its reach a square
    line([[at, -far, 0], [at, far, 0]], faint, 1);
    line([[-far, at, 0], [far, at, 0]], faint, 1);
  }
  line(points.map(([x, y]) => [x, y, 0]), faint, 3); // its shadow
  line(trail, mark, 1);
  line(points, ink, 5);
  context.fillStyle = mark;
  for (const [x, y] of points.map(seen)) context.beginPath(), context.arc(x, y, 4, 0, 7), context.fill();
}

// What computes, which a faster form may take over from while the page is open.
function engine(about, { identity, engine, engine_reason, prepare }) {
  const { server } = about;
  const faster = prepare ? `${prepare.state}: ${prepare.text}` : "";
  if (!engine || (server.engine === engine && server.engine_reason === engine_reason && (server.faster || "") === faster && server.identity?.hash === identity?.hash)) return;
  Object.assign(server, { identity, engine, engine_reason, faster });
  card(about);
}

function card({ server, policy, deadline_ms: deadline }) {
  $("policy-line").textContent = `${policy.name} (${policy.architecture}), engine ${server.engine}, ${server.dtype} on ${server.device}`;
  const rows = [
    ["bundle", `${policy.name} (${policy.architecture})`],
    ...(server.identity ? [["identity", `${server.identity.hash.slice(0, 12)} from ${server.identity.source}, file of ${server.identity.date}, by ${server.identity.version}`]] : []),
    ["engine", `${server.engine}: ${server.engine_reason}`],
    ...(server.faster ? [["faster form", server.faster]] : []),
    ["device", `${server.device}: ${server.device_reason}`],
    ["precision", `${server.dtype}: ${server.dtype_reason}`],
    ["recipe", server.ignored_recipe ? `IGNORED: ${server.ignored_recipe}` : "followed, or there is none"],
    ["threads", `${server.threads}: ${server.threads_reason}`],
    ["hardware", server.hardware],
    ["version", `sinew ${server.version}`],
    ["cameras", policy.cameras.map((camera) => `${camera.name} ${camera.height} x ${camera.width}`).join(", ")],
    ["state", jointNames(policy.state).join(", ")],
    ["action", `${jointNames(policy.action).join(", ")}; chunks of ${policy.chunk_size}`],
    ["control rate", policy.control_hz ? `${policy.control_hz} actions per second` : "not stated"],
    ["solver", `${policy.solver_steps} steps`],
    ["deadline", deadline ? `${deadline} ms for requests that bring none` : "none unless a request brings one"],
  ];
  if (server.replay) rows.push(["REPLAY", `${server.replay.chunks} recorded chunks of ${server.replay.records}; matched: ${server.replay.matched}`]);
  rows.push(["host now", ""]);
  $("card").replaceChildren(...rows.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}

function host({ cores, cpu, own_cores: own, memory }, gpu) {
  const size = ({ limit, available }) => `${((limit - available) / 2 ** 30).toFixed(1)} of ${(limit / 2 ** 30).toFixed(1)} GiB in use`;
  const parts = [];
  if (cpu !== undefined) parts.push(`${Math.round(100 * cpu)} % of ${cores} cores busy`);
  if (own !== undefined) parts.push(`this server ${own.toFixed(2)} of them`);
  parts.push(`memory ${size(memory)}`);
  if (gpu) parts.push(`${gpu.name}: ${size(gpu.memory)}, ${(gpu.own / 2 ** 30).toFixed(1)} GiB by this server, at most ${(gpu.peak / 2 ** 30).toFixed(1)}`);
  const place = [...$("card").querySelectorAll("dt")].find((row) => row.textContent === "host now");
  if (place) place.nextElementSibling.textContent = parts.join("; ");
}

// ------------------------------------------------------------------ try it

const tried = { pictures: new Map(), values: [] };

function tryForm({ policy, state_range: range }) {
  if (tried.policy === JSON.stringify([policy, range])) return; // the same server again: keep what was entered
  tried.policy = JSON.stringify([policy, range]);
  tried.pictures.clear();
  $("try-cameras").replaceChildren(...policy.cameras.map(drop));
  $("try-prompt").value = policy.default_prompt || "";
  tried.charts = null;
  $("try-joints").replaceChildren();
  tried.values = new Array(policy.state.dim).fill(0);
  $("try-state").replaceChildren(...jointNames(policy.state).map((name, index) => slider(name, index, range)));
}

function slider(name, index, range) {
  const low = range?.low?.[index] ?? -1, high = range?.high?.[index] ?? 1;
  const middle = (low + high) / 2;
  tried.values[index] = middle;
  const row = element("div", null, { class: "slider" });
  const id = `state-${index}`;
  const bar = element("input", null, { type: "range", id, min: low, max: high, step: (high - low) / 1000 || 0.001, value: middle });
  const number = element("input", null, { type: "number", step: "any", value: middle.toPrecision(4), "aria-label": name });
  bar.addEventListener("input", () => { tried.values[index] = Number(bar.value); number.value = Number(bar.value).toPrecision(4); });
  number.addEventListener("input", () => { tried.values[index] = Number(number.value); bar.value = number.value; });
  row.append(element("label", name + (range?.low?.[index] === undefined || range.low[index] === null ? " (range unknown)" : ""), { for: id }), bar, number);
  return row;
}

function drop(camera) {
  const figure = element("figure");
  const id = `picture-${camera.name}`;
  const img = element("img", null, { alt: `picture for ${camera.name}`, width: camera.width, height: camera.height });
  const file = element("input", null, { type: "file", accept: "image/*", id });
  const label = element("label", `${camera.name}: drop a picture or choose one; grey until then`, { for: id });
  const take = async (picture) => {
    if (!picture) return;
    try {
      tried.pictures.set(camera.name, await png(picture));
      img.src = tried.pictures.get(camera.name);
      label.textContent = `${camera.name}: ${picture.name}`;
    } catch { label.textContent = `${camera.name}: ${picture.name} is no picture that this browser reads`; }
  };
  file.addEventListener("change", () => take(file.files[0]));
  figure.addEventListener("dragover", (event) => { event.preventDefault(); figure.classList.add("over"); });
  figure.addEventListener("dragleave", () => figure.classList.remove("over"));
  figure.addEventListener("drop", (event) => { event.preventDefault(); figure.classList.remove("over"); take(event.dataTransfer.files[0]); });
  img.src = tried.grey = paint(camera.width, camera.height).toDataURL("image/png");
  tried.pictures.set(camera.name, img.src);
  figure.append(img, label, file);
  return figure;
}

function paint(width, height, picture) {
  const canvas = element("canvas", null, { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(128 128 128)";
  context.fillRect(0, 0, width, height);
  if (picture) context.drawImage(picture, 0, 0);
  return canvas;
}

// Any format that the browser reads becomes PNG: nothing is lost, and the server decodes JPEG and PNG alone.
async function png(file) {
  const picture = await createImageBitmap(file);
  return paint(picture.width, picture.height, picture).toDataURL("image/png");
}

async function send(event) {
  event.preventDefault();
  const { policy } = state.about || {};
  if (!policy) return;
  const button = $("try-send"), result = $("try-result");
  button.disabled = true;
  result.className = "";
  result.textContent = "asking";
  try {
    const images = Object.fromEntries([...tried.pictures].map(([name, url]) => [name, url.split(",")[1]]));
    const body = JSON.stringify({ images, state: tried.values, prompt: $("try-prompt").value, seed: 0, session: MINE });
    const reply = await ask("/v1/try", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const found = await reply.json();
    if (!reply.ok) throw new Error(found.error.message);
    tried.charts ||= charts($("try-joints"), jointNames(policy.action));
    tried.charts.forEach((chart, joint) => draw(chart, joint, found.actions, tried.before, 0, null));
    tried.before = found.actions;
    const warnings = found.warnings.length ? " Warnings: " + found.warnings.join("; ") : "";
    result.textContent = `${found.actions.length} actions in ${found.timing.total_ms.toFixed(1)} ms, seed ${found.seed}. Faded: the answer before.${warnings}`;
  } catch (error) {
    result.className = "bad";
    result.textContent = error.message;
  } finally { button.disabled = false; }
}

// ------------------------------------------------------------------ together

function paintAll() {
  if (!document.hidden) {
    if (!state.paused) chunk();
    ages();
    if (state.dirty) { latency(); sessions(); state.dirty = false; }
  }
  setTimeout(() => requestAnimationFrame(paintAll), 100);
}

STAGES.forEach((stage, number) => {
  const swatch = element("span", null, { class: "swatch" }), entry = element("span");
  swatch.style.background = COLOURS[number];
  entry.append(swatch, stage);
  $("stages").append(entry);
});
$("stages").append(element("span", "grey: wire and decoding"), element("span", "red tick: deadline missed"));
$("try").addEventListener("submit", send);
$("pause").addEventListener("click", pausing);
$("snapshot").addEventListener("click", snapshot);
$("keep").addEventListener("click", recording);
addEventListener("resize", () => { state.dirty = true; if (state.hour) hour(state.hour); });
// A link brings no key; where one is wanted the description is saved instead.
$("openapi").addEventListener("click", async (event) => {
  if (!key) return;
  event.preventDefault();
  const reply = await ask("/openapi.json");
  if (reply.ok) save("openapi.json", await reply.text());
});
if (matchMedia("(max-width: 480px)").matches) document.querySelector("details").open = false;
follow();
history();
requestAnimationFrame(paintAll);

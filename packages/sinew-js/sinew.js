// SPDX-License-Identifier: Apache-2.0
// A client of a Sinew server or an openpi server. It sends observations and receives chunks of actions over a WebSocket, as
// msgpack maps. Each array is a map with the keys data (bytes), dtype and shape (docs/protocol-openpi.md).
//
// The client has no dependencies. The same file runs in browsers and in Node. The types are in sinew.d.ts.

const OPTIONS = ["seed", "solver_steps", "delay", "horizon", "noise", "previous", "time", "beta", "rtc", "schedule",
  "subtask", "question", "text_only", "text_tokens", "adapter", "advantage", "guidance_scale", "session_id", "deadline_ms"];
const REALS = new Set(["time", "beta", "guidance_scale", "deadline_ms"]);
const READ = new Set(["images", "state", "prompt", ...OPTIONS]);
const MAX_DEPTH = 16; // nested maps and lists in a reply
const MAX_ROWS = 1024, MAX_DIM = 1024; // limits of a chunk, the same as in the Python client
const MAX_REPLY = 2 ** 28; // bytes of a message, the same as in the C++ client
const MAX_TOLD = 2 ** 16; // characters of an error message
const LONGEST_MS = 2 ** 31 - 1; // a longer timer would fire immediately
const text = new TextEncoder(), words = new TextDecoder("utf-8", { fatal: true });

export class SinewError extends Error {
  constructor(code, message) {
    super(`${message} [${code}]`);
    this.name = "SinewError";
    this.code = code;
  }
}

// Return a server's text in a form that is safe to print: one line of at most 1,000 characters, without control characters.
const plain = (text) => text.slice(0, 1000).replace(/[\u0000-\u001f\u007f-\u009f]/g, " ").trim();

const refuse = (field, expected, got) => {
  throw new SinewError("bad_observation", `${field}: expected ${expected}, got ${got}`);
};

// A number that is always encoded as float64, even if it is a whole number.
class Real {
  constructor(value) { this.value = value; }
}

class Writer {
  constructor() { this.parts = []; }
  put(...bytes) { this.parts.push(Uint8Array.from(bytes)); }
  // Write the type and size of a text, array or map. A size below limit is part of the byte small. Otherwise, wide contains
  // the type codes for sizes of 8, 16 and 32 bits. 0 means that msgpack has no such code.
  head(size, small, limit, ...wide) {
    if (size < limit) this.put(small | size);
    else if (size < 256 && wide[0]) this.put(wide[0], size);
    else if (size < 65536) this.put(wide[1], size >> 8, size & 255);
    else this.put(wide[2], size >>> 24, size >> 16 & 255, size >> 8 & 255, size & 255);
  }
  view(code, size, set) {
    const bytes = new Uint8Array(1 + size);
    bytes[0] = code;
    set(new DataView(bytes.buffer), 1);
    this.parts.push(bytes);
  }
  integer(value) {
    if (value >= 0) {
      if (value < 128) this.put(value);
      else if (value < 256) this.put(0xcc, value);
      else if (value < 65536) this.view(0xcd, 2, (view, at) => view.setUint16(at, value));
      else if (value < 2 ** 32) this.view(0xce, 4, (view, at) => view.setUint32(at, value));
      else this.view(0xcf, 8, (view, at) => view.setBigUint64(at, BigInt(value)));
    } else if (value >= -32) this.put(value & 255);
    else if (value >= -128) this.view(0xd0, 1, (view, at) => view.setInt8(at, value));
    else if (value >= -32768) this.view(0xd1, 2, (view, at) => view.setInt16(at, value));
    else if (value >= -(2 ** 31)) this.view(0xd2, 4, (view, at) => view.setInt32(at, value));
    else this.view(0xd3, 8, (view, at) => view.setBigInt64(at, BigInt(value)));
  }
  any(value) {
    if (value === null || value === undefined) this.put(0xc0);
    else if (typeof value === "boolean") this.put(value ? 0xc3 : 0xc2);
    else if (typeof value === "bigint") {
      if (value < 0n || value >= 2n ** 64n) refuse("integer", "0 to 2^64 - 1", value);
      this.view(0xcf, 8, (view, at) => view.setBigUint64(at, value));
    }
    else if (value instanceof Real) this.view(0xcb, 8, (view, at) => view.setFloat64(at, value.value));
    else if (typeof value === "number") {
      if (Number.isSafeInteger(value)) this.integer(value);
      else this.any(new Real(value));
    } else if (typeof value === "string") {
      const bytes = text.encode(value);
      this.head(bytes.length, 0xa0, 32, 0xd9, 0xda, 0xdb);
      this.parts.push(bytes);
    } else if (value instanceof Uint8Array) {
      this.head(value.length, 0, 0, 0xc4, 0xc5, 0xc6);
      this.parts.push(value);
    } else if (Array.isArray(value)) {
      this.head(value.length, 0x90, 16, 0, 0xdc, 0xdd);
      for (const each of value) this.any(each);
    } else {
      const entries = value instanceof Map ? [...value] : Object.entries(value);
      this.head(entries.length, 0x80, 16, 0, 0xde, 0xdf);
      for (const [key, each] of entries) this.any(key), this.any(each);
    }
  }
}

export function pack(value) {
  const writer = new Writer();
  writer.any(value);
  const whole = new Uint8Array(writer.parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of writer.parts) whole.set(part, at), at += part.length;
  return whole;
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }
  take(size) {
    if (size > this.bytes.length - this.at) throw new SinewError("bad_reply", "the reply: expected msgpack, got a part of it");
    this.at += size;
    return this.at - size;
  }
  size(width) {
    const at = this.take(width);
    return width === 1 ? this.view.getUint8(at) : width === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }
  blob(size) {
    const at = this.take(size);
    return this.bytes.subarray(at, at + size);
  }
  list(size, depth) {
    const found = [];
    while (size-- > 0) found.push(this.any(depth));
    return found;
  }
  map(size, depth) {
    const found = Object.create(null); // without a prototype, "__proto__" is an ordinary key
    while (size-- > 0) {
      const key = this.any(depth);
      found[key instanceof Uint8Array ? words.decode(key) : String(key)] = this.any(depth);
    }
    return found;
  }
  whole(value) { return value >= -Number.MAX_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : value; }
  any(depth = 0) {
    if (depth > MAX_DEPTH) throw new SinewError("bad_reply", `the reply: expected at most ${MAX_DEPTH} levels, got more`);
    const code = this.size(1), { view } = this;
    if (code < 0x80) return code;
    if (code < 0x90) return this.map(code & 15, depth + 1);
    if (code < 0xa0) return this.list(code & 15, depth + 1);
    if (code < 0xc0) return words.decode(this.blob(code & 31));
    if (code >= 0xe0) return code - 256;
    switch (code) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: case 0xc5: case 0xc6: return this.blob(this.size(1 << code - 0xc4));
      case 0xca: return view.getFloat32(this.take(4));
      case 0xcb: return view.getFloat64(this.take(8));
      case 0xcc: case 0xcd: case 0xce: return this.size(1 << code - 0xcc);
      case 0xcf: return this.whole(view.getBigUint64(this.take(8)));
      case 0xd0: return view.getInt8(this.take(1));
      case 0xd1: return view.getInt16(this.take(2));
      case 0xd2: return view.getInt32(this.take(4));
      case 0xd3: return this.whole(view.getBigInt64(this.take(8)));
      case 0xd9: case 0xda: case 0xdb: return words.decode(this.blob(this.size(1 << code - 0xd9)));
      case 0xdc: case 0xdd: return this.list(this.size(2 << code - 0xdc), depth + 1);
      case 0xde: case 0xdf: return this.map(this.size(2 << code - 0xde), depth + 1);
    }
    throw new SinewError("bad_reply", `the reply: expected msgpack, got the byte ${code}`);
  }
}

export function unpack(bytes) {
  const reader = new Reader(bytes);
  try {
    const value = reader.any();
    if (reader.at === bytes.length) return value;
  } catch (error) {
    if (error instanceof SinewError) throw error;
    throw new SinewError("bad_reply", `the reply: ${error.message}`); // for example a text that is not UTF-8
  }
  throw new SinewError("bad_reply", "the reply: expected one msgpack value, got more behind it");
}

const key = (name) => text.encode(name); // openpi's map of an array has keys of type bytes

function array(bytes, dtype, shape) {
  return new Map([[key("__ndarray__"), true], [key("data"), bytes], [key("dtype"), dtype], [key("shape"), [...shape]]]);
}

function floats(name, values, shape) {
  const numbers = Float32Array.from(values ?? refuse(name, "numbers", "nothing"));
  if (shape.reduce((a, b) => a * b, 1) !== numbers.length) refuse(name, `numbers of shape [${shape}]`, `${numbers.length}`);
  const bytes = new Uint8Array(numbers.length * 4), view = new DataView(bytes.buffer);
  numbers.forEach((number, index) => view.setFloat32(4 * index, number, true));
  return array(bytes, "<f4", shape);
}

function pixels(name, frame) {
  const given = frame?.data;
  if (!(given?.buffer instanceof ArrayBuffer)) refuse(`images.${name}`, "{ data, height, width } of bytes", typeof given);
  const count = frame.height * frame.width;
  const bytes = new Uint8Array(given.buffer, given.byteOffset, given.byteLength);
  if (bytes.length === 3 * count) return array(bytes, "|u1", [frame.height, frame.width, 3]);
  if (bytes.length !== 4 * count) refuse(`images.${name}`, "3 or 4 bytes a pixel", `${bytes.length} for ${count}`);
  const colours = new Uint8Array(3 * count);
  for (let at = 0; at < count; at++) colours.set(bytes.subarray(4 * at, 4 * at + 3), 3 * at);
  return array(colours, "|u1", [frame.height, frame.width, 3]);
}

export function encode(observation, metadata) {
  for (const each of Object.keys(observation)) if (!READ.has(each)) refuse(each, `one of ${[...READ].join(", ")}`, "an unknown key");
  if (!observation.images) refuse("images", "a frame of each camera", "nothing");
  const cameras = metadata.policy?.cameras ?? [], keys = metadata.image_keys ?? [];
  const states = metadata.state_keys ?? ["state"], request = new Map();
  for (const [name, frame] of Object.entries(observation.images)) {
    const place = cameras.findIndex((camera) => camera?.name === name);
    request.set(place >= 0 ? keys[place] ?? name : name, pixels(name, frame));
  }
  const state = observation.state ?? refuse("state", "numbers", "nothing");
  if (typeof state.length === "number") {
    if (states.length > 1) refuse("state", `numbers by key: ${states.join(", ")}`, "one array");
    request.set(states[0], floats("state", state, [state.length]));
  } else for (const [name, values] of Object.entries(state)) request.set(name, floats(name, values, [values.length]));
  if (observation.prompt !== undefined) request.set(metadata.prompt_key ?? "prompt", observation.prompt);
  for (const name of OPTIONS) {
    const value = observation[name];
    if (value === undefined || value === null) continue;
    if (name === "noise" || name === "previous") request.set(name, floats(name, value.data, value.shape));
    else request.set(name, REALS.has(name) ? new Real(value) : value);
  }
  return pack(request);
}

const KINDS = { "<f4": [4, "getFloat32", Float32Array], "<f8": [8, "getFloat64", Float64Array] };

export function decode(reply) {
  const found = unpack(reply), { actions } = found ?? {};
  const kind = KINDS[actions?.dtype], shape = actions?.shape, counts = Array.isArray(shape) && shape.every(Number.isSafeInteger);
  if (!kind || !counts || shape.length !== 2 || shape[0] < 0 || shape[1] < 1 || !(actions.data instanceof Uint8Array) ||
      shape[0] * shape[1] * kind[0] !== actions.data.length)
    throw new SinewError("bad_reply", "actions: expected float32 or float64 [rows, dim], got something else");
  if (shape[0] > MAX_ROWS || shape[1] > MAX_DIM)
    throw new SinewError("unsafe_chunk", `actions: expected at most ${MAX_ROWS} rows of ${MAX_DIM} numbers, got ${shape[0]} of ${shape[1]}`);
  const [size, get, Numbers] = kind, numbers = new Numbers(shape[0] * shape[1]);
  const view = new DataView(actions.data.buffer, actions.data.byteOffset, actions.data.byteLength);
  for (let index = 0; index < numbers.length; index++) numbers[index] = view[get](size * index, true);
  if (!numbers.every(Number.isFinite)) throw new SinewError("unsafe_chunk", "the reply holds actions that are not finite");
  return { ...found, actions: numbers, rows: shape[0], dim: shape[1] };
}

// Return true if nobody on the network can read the messages: the connection is encrypted, or the server is on this
// machine. The class URL converts each spelling of an IP address to one form, so simple comparisons are enough.
function isPrivate(url) {
  let found;
  try {
    found = new URL(url);
  } catch { // the constructor of the WebSocket reports an invalid URL
    return true;
  }
  const host = found.hostname;
  return found.protocol === "wss:" || host === "localhost" || host === "[::1]" || /^127\.\d+\.\d+\.\d+$/.test(host) || host.startsWith("[::ffff:7f");
}

export class Client {
  #url; #options; #closed = false; #socket = null; #opened = null; #waiting = null; #turn = Promise.resolve();

  constructor(url, options = {}) {
    this.#url = url;
    this.#options = options;
  }

  metadata() {
    return this.#take((end) => this.#connect(end));
  }

  infer(observation) {
    return this.#take(async (end) => {
      const request = encode(observation, await this.#connect(end));
      const reply = await this.#ask(request, end);
      let chunk;
      try {
        chunk = decode(reply);
        if (chunk.rows < 1 && !observation.text_only && !observation.question)
          throw new SinewError("bad_reply", "actions: expected at least one row, got none");
      } catch (error) {
        // Replies have no number. After a malformed reply, the next reply may belong to another request, so reconnect.
        if (error.code === "bad_reply") this.#forget();
        throw error;
      }
      if ((chunk.adapter ?? "") !== (observation.adapter ?? ""))
        throw new SinewError("unsafe_chunk", `adapter: expected an answer of '${observation.adapter ?? ""}', got '${chunk.adapter ?? ""}'`);
      return chunk;
    });
  }

  reset(session) {
    return this.#take(async (end) => {
      await this.#connect(end);
      await this.#ask(pack(session ? { endpoint: "reset", session_id: session } : { endpoint: "reset" }), end);
    });
  }

  close() {
    this.#closed = true;
    this.#forget(new SinewError("connection_lost", "the client was closed"));
  }

  // Run the calls one after another. A failed call does not stop the next call.
  #take(call) {
    const made = this.#turn.then(() => {
      if (this.#closed) throw new SinewError("connection_lost", "the client was closed");
      return call(performance.now() + (this.#options.timeoutMs ?? 10000));
    });
    this.#turn = made.catch(() => undefined);
    return made;
  }

  #connect(end) {
    if (this.#opened) return this.#opened;
    const Socket = this.#options.WebSocket ?? globalThis.WebSocket, apiKey = this.#options.apiKey;
    if (!Socket) throw new SinewError("unsupported", "WebSocket: expected Node 22, `node --experimental-websocket`, or options.WebSocket, got none");
    if (apiKey && !isPrivate(this.#url) && globalThis.process?.env.SINEW_ALLOW_UNENCRYPTED_KEY !== "1")
      throw new SinewError("bad_address", `url: expected wss:// for the API key, got a plain connection to another machine: ${this.#url}; ` +
        "start the server with --tls-cert, use an ssh tunnel, or on a network that you trust set SINEW_ALLOW_UNENCRYPTED_KEY=1");
    if (apiKey && globalThis.document)
      throw new SinewError("unsupported", "apiKey: a browser sends no header with a WebSocket; put a proxy that adds it before the server");
    let socket;
    try {
      socket = apiKey ? new Socket(this.#url, { headers: { Authorization: `Api-Key ${apiKey}` } }) : new Socket(this.#url);
    } catch (error) {
      throw new SinewError("bad_address", `url: expected ws://HOST:PORT or wss://HOST:PORT, got ${this.#url}: ${error.message}`);
    }
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    let said = "", open = false;
    socket.onopen = () => { open = true; };
    socket.onmessage = ({ data }) => {
      if (this.#socket !== socket) return;
      const [size, most] = typeof data === "string" ? [data.length, MAX_TOLD] : [data.byteLength, MAX_REPLY];
      if (size > most) this.#forget(new SinewError("bad_reply", `the reply: expected at most ${most} bytes, got ${size}`));
      else if (typeof data === "string") { // the server sends an error as text, and then closes the connection
        said = data;
      } else if (this.#waiting) this.#waiting.resolve(new Uint8Array(data));
      else this.#forget();
    };
    socket.onclose = socket.onerror = ({ type, reason }) => {
      if (this.#socket !== socket || (type === "error" && said)) return; // the close event follows and has the reason
      const never = `no server of this protocol answers at ${this.#url}, the key is not its own, or ` + (this.#url.startsWith("wss:")
        ? "its certificate is not trusted (Node takes one more from NODE_EXTRA_CA_CERTS)" : "it wants wss://");
      const told = said || reason || (open ? `the connection to ${this.#url} was lost` : never);
      const code = /\[(\w{1,64})\]\s*$/.exec(told);
      this.#forget(code ? new SinewError(code[1], plain(told.slice(0, code.index))) : new SinewError("connection_lost", plain(told)));
    };
    this.#opened = this.#next(end).then((greeting) => {
      const said = unpack(greeting), { policy, image_keys, state_keys } = said ?? {};
      const lists = [policy?.cameras, image_keys, state_keys].every((each) => each === undefined || each === null || Array.isArray(each));
      if (said === null || typeof said !== "object" || !lists)
        throw new SinewError("bad_reply", "metadata: expected a map with lists of cameras, image_keys and state_keys, got something else");
      return said;
    });
    this.#opened.catch(() => this.#forget());
    return this.#opened;
  }

  #ask(request, end) {
    if (!this.#socket) throw new SinewError("connection_lost", `no connection to ${this.#url}`);
    const reply = this.#next(end);
    this.#socket.send(request);
    return reply;
  }

  // Return the next binary message.
  #next(end) {
    return new Promise((resolve, reject) => {
      const late = () => this.#forget(new SinewError("timeout", `no answer from ${this.#url} in time`));
      const timer = setTimeout(late, Math.min(LONGEST_MS, Math.max(0, end - performance.now())));
      const finish = (settle) => (value) => { clearTimeout(timer); this.#waiting = null; settle(value); };
      this.#waiting = { resolve: finish(resolve), reject: finish(reject) };
    });
  }

  // Close the connection and reject the waiting call. The next call opens a new connection.
  #forget(error) {
    const socket = this.#socket;
    this.#socket = this.#opened = null;
    this.#waiting?.reject(error ?? new SinewError("connection_lost", `no connection to ${this.#url}`));
    socket?.close();
  }
}

/** A camera's frame in row-major order: 3 bytes for each pixel (RGB), or 4 bytes (RGBA, the format of a canvas). */
export interface Frame {
  readonly data: Uint8Array | Uint8ClampedArray;
  readonly height: number;
  readonly width: number;
}

/** An array of numbers in row-major order: all values of the first row, then the second row. */
export interface Rows {
  readonly data: ArrayLike<number>;
  /** The shape [rows, columns]. Noise may have more axes. */
  readonly shape: readonly number[];
}

/** The optional fields of a request. docs/protocol-openpi.md and docs/guidance.md describe each field. */
export interface RequestOptions {
  seed?: number;
  solver_steps?: number;
  session_id?: string;
  /** The capture time of the observation, in seconds of the robot's clock. */
  time?: number;
  /** The server rejects the request if it waits longer than this number of milliseconds after its arrival. */
  deadline_ms?: number;
  noise?: Rows;
  /** The remaining actions of the running chunk, which the new chunk continues. */
  previous?: Rows;
  delay?: number;
  horizon?: number;
  rtc?: string;
  schedule?: string;
  beta?: number;
  subtask?: boolean;
  question?: string;
  text_only?: boolean;
  text_tokens?: number;
  adapter?: string;
  advantage?: string;
  guidance_scale?: number;
}

/** The robot's observation and instruction, with the optional fields of the request. */
export interface Observation extends RequestOptions {
  /** The frames. A key is the camera's name, or the key for this camera in the server's metadata (image_keys). */
  images: Readonly<Record<string, Frame>>;
  /** The state in the robot's own units. If the server's metadata has several state_keys, one array for each key. */
  state: ArrayLike<number> | Readonly<Record<string, ArrayLike<number>>>;
  prompt?: string;
}

/** The answer to an observation: actions, or generated text. */
export interface Chunk {
  /** The actions in the robot's own units, shape [rows, dim] in row-major order. */
  readonly actions: Float32Array | Float64Array;
  /** Number of actions. */
  readonly rows: number;
  /** Number of values in an action. */
  readonly dim: number;
  readonly seed?: number;
  readonly session_id?: string;
  readonly adapter?: string;
  readonly text?: string;
  readonly warnings?: readonly string[];
  readonly policy_timing?: Readonly<Record<string, number>>;
  readonly server_timing?: Readonly<Record<string, number>>;
}

export interface Options {
  /** The time limit of each call in milliseconds, including the connection. The default is 10,000. */
  timeoutMs?: number;
  /**
   * The API key. The client sends the key as an HTTP header. A browser cannot send this header, so the client rejects a key
   * in a browser. With a key, the address of another machine must start with wss://, unless SINEW_ALLOW_UNENCRYPTED_KEY is
   * 1 in the environment.
   */
  apiKey?: string;
  /** The WebSocket class for a version of Node that has no globalThis.WebSocket. */
  WebSocket?: new (url: string, options?: any) => WebSocket;
}

/**
 * The error of each function here. The client itself sets the codes `timeout`, `connection_lost`, `bad_reply`, `bad_address`,
 * `unsafe_chunk` and `unsupported`. The client or the server sets `bad_observation`. The server sets all other codes.
 */
export class SinewError extends Error {
  readonly code: string;
  constructor(code: string, message: string);
}

/**
 * A client of one server, with openpi's protocol. The first call opens the connection. After a connection error or a timeout,
 * the next call opens a new connection. The client runs one call at a time, in the order of the calls.
 */
export class Client {
  constructor(url: string, options?: Options);
  /** Return the metadata that the server sent when the connection was opened. */
  metadata(): Promise<Record<string, any>>;
  /** Return the actions for one observation. Throws SinewError. */
  infer(observation: Observation): Promise<Chunk>;
  /** Tell the server that a new episode starts in a session. */
  reset(session?: string): Promise<void>;
  /** Close the connection. Waiting calls and all later calls fail with `connection_lost`. */
  close(): void;
}

/** Encode a request as bytes. `metadata` is the server's metadata, which contains the keys of cameras and states. */
export function encode(observation: Observation, metadata: Record<string, any>): Uint8Array;
/** Decode a reply to a chunk. Throws SinewError. */
export function decode(reply: Uint8Array): Chunk;
/** Encode a value as msgpack. */
export function pack(value: unknown): Uint8Array;
/** Decode one msgpack value. Throws SinewError. */
export function unpack(bytes: Uint8Array): any;

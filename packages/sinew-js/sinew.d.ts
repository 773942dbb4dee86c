/** A frame of a camera: 3 bytes a pixel (RGB), or 4 (RGBA, as a canvas gives it), row by row. */
export interface Frame {
  readonly data: Uint8Array | Uint8ClampedArray;
  readonly height: number;
  readonly width: number;
}

/** Rows of numbers, one behind the other. */
export interface Rows {
  readonly data: ArrayLike<number>;
  /** [rows, columns], or more axes for noise. */
  readonly shape: readonly number[];
}

/** What stands beside an observation; docs/protocol-openpi.md and docs/guidance.md say what each does. */
export interface RequestOptions {
  seed?: number;
  solver_steps?: number;
  session_id?: string;
  /** Seconds of the robot's clock. */
  time?: number;
  /** A request that would begin later than so many milliseconds after its arrival is refused. */
  deadline_ms?: number;
  noise?: Rows;
  /** The rows of the running chunk from this frame on, to be continued. */
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

export interface Observation extends RequestOptions {
  /** By the camera's name, or by the key under which this server's openpi clients send it. */
  images: Readonly<Record<string, Frame>>;
  /** World units; by key where the server names several. */
  state: ArrayLike<number> | Readonly<Record<string, ArrayLike<number>>>;
  prompt?: string;
}

export interface Chunk {
  /** [rows, dim], row by row, in world units. */
  readonly actions: Float32Array | Float64Array;
  readonly rows: number;
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
  /** Milliseconds for each call, connecting included; 10,000 where nothing is said. */
  timeoutMs?: number;
  /**
   * Sent as a header, which Node can and browsers cannot: there it is rejected. An address of another machine has to be
   * wss://, unless SINEW_ALLOW_UNENCRYPTED_KEY is 1 in the environment.
   */
  apiKey?: string;
  /** In the place of globalThis.WebSocket, for a Node without one. */
  WebSocket?: new (url: string, options?: any) => WebSocket;
}

/**
 * What went wrong. `code`: `timeout`, `connection_lost`, `bad_reply`, `bad_address`, `unsafe_chunk`, `unsupported`, made here;
 * `bad_observation`, made here or by the server; else the server's own.
 */
export class SinewError extends Error {
  readonly code: string;
  constructor(code: string, message: string);
}

/**
 * Asks one server over openpi's WebSocket. The first call connects; after an error of the connection or of time the
 * next call opens another. Calls take turns.
 */
export class Client {
  constructor(url: string, options?: Options);
  /** Return what the server said of itself when the connection began. */
  metadata(): Promise<Record<string, any>>;
  infer(observation: Observation): Promise<Chunk>;
  /** Say that a new episode begins in a session. */
  reset(session?: string): Promise<void>;
  /** End the connection; calls that wait, and later ones, fail with `connection_lost`. */
  close(): void;
}

/** Return the bytes of a request to a server that says `metadata` of itself. */
export function encode(observation: Observation, metadata: Record<string, any>): Uint8Array;
/** Return the chunk of a reply. Throws SinewError. */
export function decode(reply: Uint8Array): Chunk;
export function pack(value: unknown): Uint8Array;
export function unpack(bytes: Uint8Array): any;

#!/usr/bin/env -S node --experimental-websocket
// ask.js URL PROMPT --image CAMERA=FILE.ppm ... --state 0.1,0.2 [--seed N] [--key KEY, else SINEW_API_KEY] [--times N] [--bytes FILE]
//
// An example program. It sends one request, or N requests, and prints the actions of each chunk. The exit status is 0, or 1
// after an error, which it prints with its code. --bytes FILE writes the first request to FILE and sends no observation.

import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { Client, SinewError, encode } from "./sinew.js";

function picture(path) {
  if (!existsSync(path)) throw new SinewError("bad_observation", `${path}: expected a PPM (P6) picture, got no file`);
  const bytes = readFileSync(path), head = /^P6\s+(\d+)\s+(\d+)\s+255\s/.exec(bytes.subarray(0, 64).toString("latin1"));
  if (!head) throw new SinewError("bad_observation", `${path}: expected a PPM (P6) picture of 8 bits, got something else`);
  return { data: bytes.subarray(head[0].length), width: Number(head[1]), height: Number(head[2]) };
}

let client;
try {
  const [url, prompt, ...rest] = process.argv.slice(2), seen = { images: {}, state: [], prompt };
  let apiKey = process.env.SINEW_API_KEY, bytes, times = 1;
  if (!prompt) throw new SinewError("usage", "expected URL PROMPT --image CAMERA=FILE.ppm ... --state NUMBER,NUMBER");
  for (let at = 0; at < rest.length; at += 2) {
    const [option, value] = rest.slice(at, at + 2), [camera, file] = String(value).split("=");
    if (option === "--image") seen.images[camera] = picture(file);
    else if (option === "--state") seen.state = value.split(",").map(Number);
    else if (option === "--seed") seen.seed = Number(value);
    else if (option === "--key") apiKey = value;
    else if (option === "--times") times = Number(value);
    else if (option === "--bytes") bytes = value;
    else throw new SinewError("usage", `unknown option ${option}`);
  }
  client = new Client(url, { apiKey });
  if (bytes) writeFileSync(bytes, encode(seen, await client.metadata()));
  for (let turn = 0; !bytes && turn < times; turn++) {
    const { actions, dim, warnings } = await client.infer(seen);
    for (let at = 0; at < actions.length; at += dim) console.log(Array.from(actions.subarray(at, at + dim), String).join(" "));
    for (const warning of warnings ?? []) console.error(`warning: ${warning}`);
  }
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
} finally {
  client?.close();
}

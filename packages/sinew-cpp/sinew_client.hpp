// SPDX-License-Identifier: Apache-2.0
// Asks a Sinew server for actions: C++17, POSIX sockets, no other library.
//
// The native wire: Protobuf messages (packages/sinew-client/src/sinew_client/sinew.proto) over ZMTP 3.
// One request, one reply, a time limit on each; or a stream, which waits for nothing (docs/stream.md).

#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sinew {

// Says what went wrong. code: timeout, connection_lost, unsafe_chunk, bad_reply or bad_address, made here; bad_observation,
// made here or by the server; else the server's own (docs/troubleshooting.md): bad_request, busy, superseded, deadline ...
struct Error : std::runtime_error {
  std::string code;
  Error(std::string code, const std::string& message)
      : std::runtime_error(message + " [" + code + "]"), code(std::move(code)) {}
};

// One camera's frame. It is read while infer runs, and not copied before.
struct Image {
  std::string camera;
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;      // bytes
  std::uint32_t height = 0;  // 0: data is a JPEG or PNG file
  std::uint32_t width = 0;

  // Describe height * width * 3 bytes, row by row, RGB interleaved.
  static Image rgb(std::string camera, const std::uint8_t* data, std::uint32_t height, std::uint32_t width) {
    return {std::move(camera), data, std::size_t(height) * width * 3, height, width};
  }
  // Describe the bytes of a JPEG or PNG file.
  static Image compressed(std::string camera, const std::uint8_t* data, std::size_t size) {
    return {std::move(camera), data, size, 0, 0};
  }
};

// What a robot sees and is asked to do. Of a policy of several moments images has each camera once for each moment and
// state the numbers of all, oldest first. Fields that are empty are not sent; their meaning is in sinew.proto.
struct Observation {
  std::vector<Image> images;
  std::vector<float> state;  // world units
  std::string prompt;
  std::vector<std::int32_t> tokens;  // in the place of prompt
  std::vector<float> noise;          // [H, noise_dim], row by row
  std::optional<std::uint64_t> seed;
  std::optional<std::uint32_t> solver_steps;
  std::string session;
  std::optional<double> time;        // seconds, echoed
  std::optional<float> deadline_ms;  // from arrival; a request that would begin later is refused

  // Real-time chunking: the rows of the running chunk from this frame on, [R, action_dim], and how they are continued.
  std::vector<float> previous;
  std::optional<std::uint32_t> delay, horizon;
  std::string rtc, schedule;
  std::optional<float> beta;

  std::optional<std::string> advantage;
  std::optional<double> guidance_scale;
  std::string adapter;
  bool subtask = false, text_only = false;
  std::string question;
  std::uint32_t text_tokens = 0;
};

struct Timing {  // milliseconds
  float preprocess_ms = 0, vision_ms = 0, prefix_ms = 0, postprocess_ms = 0, total_ms = 0, queue_ms = 0, server_ms = 0,
        text_ms = 0;
  std::vector<float> step_ms;
  std::uint32_t batch = 1;
};

struct Chunk {
  std::vector<float> actions;  // [rows, dim], row by row, world units
  std::uint32_t rows = 0, dim = 0;
  Timing timing;
  std::optional<std::uint64_t> seed;
  std::string session;
  std::optional<double> time;
  std::vector<std::string> warnings;
  std::string text, adapter;
  double round_trip_ms = 0;
};

// Nodes step, step + 1 ... of a trajectory; node k belongs to k / rate seconds of the robot's clock, on which sample_time
// and frame_time are those of the newest sample and frame in it. No rows: the answer comes later than they would reach.
struct Window {
  std::int64_t step = 0;
  std::vector<float> actions;  // [rows, dim], row by row, world units
  std::uint32_t rows = 0, dim = 0;
  double sample_time = 0, frame_time = 0;
  float prefix_age_ms = 0, sensor_age_ms = 0, head_ms = 0;  // of the server's clock
  std::uint64_t run = 0, request_id = 0;                    // request_id: of the message with that sample
  std::string label, text, said;
};

struct Options {
  double timeout_s = 10;  // of each call, connecting included
  std::string api_key;    // not encrypted: rejected for other machines, unless SINEW_ALLOW_UNENCRYPTED_KEY is 1
  std::uint32_t max_rows = 1024;
  std::vector<float> low, high;  // limits of each action; an answer outside is refused. Empty: none
};

// One connection, as a socket of ZMTP.
class Socket {
 public:
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  void close();

 protected:
  Socket(const std::string& address, Options options, std::string kind);
  ~Socket();
  void connect(double end);
  void send(const std::string& bytes, double end);
  bool arrived();  // appends what has come to buffer_
  void receive(std::size_t count, double end);
  bool take(int& flags, std::string& body);      // the next whole frame of buffer_
  std::string heard(const std::string& command);  // what it is answered with
  std::string message(double end, bool handshake);

  Options options_;
  std::string host_, port_, policy_, kind_, buffer_;
  std::uint64_t last_id_ = 0;
  int socket_ = -1;
};

// Talks to one server. Not thread-safe. The first call connects; a connection that breaks or misses its reply is thrown
// away and the next call opens another, so that a late reply answers nothing else.
class Client : public Socket {
 public:
  // address: [tcp://]HOST:PORT[/POLICY]. Throws Error bad_address, also for a key that would travel unencrypted.
  explicit Client(const std::string& address, Options options = {});

  // Return the actions for one observation. timeout_s: for this call only, where above 0. Throws Error.
  Chunk infer(const Observation& observation, double timeout_s = 0);
  // Return, as JSON, what the server runs and expects.
  std::string metadata(double timeout_s = 0);
  // Return status and counters, as JSON.
  std::string health(double timeout_s = 0);
  // Say that a new episode begins in a session.
  void reset(const std::string& session = "", double timeout_s = 0);

 private:
  std::string ask(const std::string& request, double end);
  template <class Read>
  auto kept(Read read) -> decltype(read());
  std::string control(int kind, const std::string& session, double timeout_s);
};

// Streams to one server: samples and frames go out, windows come in. Not thread-safe. After an Error connection_lost or
// bad_reply the next send opens another connection and begins anew; after the server's own the stream stands.
class Stream : public Socket {
 public:
  // rate: nodes per second. interpolation: "", linear or hold. Throws Error bad_address.
  Stream(const std::string& address, double rate, Options options = {}, std::string interpolation = "");
  ~Stream();

  // Connect, where no connection stands, within the time limit. send does it too.
  void open();
  // Send a sample with the frames that are new, or none; false, and nothing is sent, where four messages have not left.
  // Waits for nothing once the connection stands. sample: of it images, state, prompt, session, seed, solver_steps, rtc,
  // text_tokens; time, in seconds of the robot's clock; delay, nodes from its own to the first that the answer can still
  // reach (1 if absent). frame_time: when the frames were exposed, time if absent.
  bool send(const Observation& sample, std::optional<double> frame_time = {});
  // Return the next window of this stream, none where none has come after so many seconds. Throws Error, also the server's.
  std::optional<Window> next(double wait_s = 0);
  // End it: no window of what was sent before is returned, and the next sample begins another that knows nothing of this.
  void end();

 private:
  void put(const std::string& request);
  void flush();

  double rate_;
  std::string interpolation_, session_;
  std::deque<std::string> unsent_;
  std::uint64_t ended_ = 0;  // the last message of the stream before
};

// Between bytes and what they mean; no sockets.
std::string encode_infer(const Observation& observation, std::uint64_t request_id, const std::string& api_key = "",
                         const std::string& policy = "");
std::string encode_sample(const Observation& sample, double rate, std::optional<double> frame_time, std::uint64_t request_id,
                          const std::string& api_key = "", const std::string& policy = "",
                          const std::string& interpolation = "");
Window decode_window(const std::string& message, const Options& options = {});
// words: none but words were asked for, so that there need be no actions.
Chunk decode_reply(const std::string& reply, std::uint64_t request_id, const Options& options = {}, bool words = false);

}  // namespace sinew

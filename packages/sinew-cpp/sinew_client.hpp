// SPDX-License-Identifier: Apache-2.0
// A client of a Sinew server, which sends observations and receives chunks of actions. It needs C++17 and POSIX sockets,
// and no other library.
//
// The client uses the native protocol: Protobuf messages (packages/sinew-client/src/sinew_client/sinew.proto) over ZMTP 3.
// A Client sends one request and waits for its reply, with a time limit. A Stream sends samples and reads windows, and
// never waits for the server (docs/stream.md).
//
// Arrays of actions are in row-major order: all values of one action, then the next action. States and actions are in the
// robot's own units.

#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sinew {

// The error of each function here. The client itself sets the codes timeout, connection_lost, unsafe_chunk, bad_reply and
// bad_address. The client or the server sets bad_observation. The server sets all other codes, such as bad_request, busy,
// superseded and deadline (docs/troubleshooting.md).
struct Error : std::runtime_error {
  std::string code;
  Error(std::string code, const std::string& message)
      : std::runtime_error(message + " [" + code + "]"), code(std::move(code)) {}
};

// One camera's frame. The client does not copy the data, so the data must stay valid until infer returns.
struct Image {
  std::string camera;
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;      // number of bytes
  std::uint32_t height = 0;  // pixels; 0 means that data is a JPEG or PNG file
  std::uint32_t width = 0;

  // Return an image of height * width * 3 bytes in row-major order, RGB interleaved.
  static Image rgb(std::string camera, const std::uint8_t* data, std::uint32_t height, std::uint32_t width) {
    return {std::move(camera), data, std::size_t(height) * width * 3, height, width};
  }
  // Return an image from the bytes of a JPEG or PNG file.
  static Image compressed(std::string camera, const std::uint8_t* data, std::size_t size) {
    return {std::move(camera), data, size, 0, 0};
  }
};

// The robot's observation and instruction. The client does not send empty fields. sinew.proto describes each field.
//
// Some policies read several time steps. For such a policy, images contains each camera once for each time step, and state
// contains the values of all time steps. The oldest time step comes first.
struct Observation {
  std::vector<Image> images;
  std::vector<float> state;  // the robot's own units
  std::string prompt;
  std::vector<std::int32_t> tokens;  // the instruction as token ids, instead of prompt
  std::vector<float> noise;          // [H, noise_dim]
  std::optional<std::uint64_t> seed;
  std::optional<std::uint32_t> solver_steps;
  std::string session;
  std::optional<double> time;        // capture time in seconds; the chunk has the same value
  std::optional<float> deadline_ms;  // the server rejects the request if it waits longer than this after its arrival

  // Real-time chunking: previous contains the remaining actions of the running chunk, [R, action_dim]. The other fields
  // tell the server how to continue them.
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

// Durations on the server in milliseconds. step_ms has one entry for each solver step, and batch is the number of requests
// that were computed together.
struct Timing {
  float preprocess_ms = 0, vision_ms = 0, prefix_ms = 0, postprocess_ms = 0, total_ms = 0, queue_ms = 0, server_ms = 0,
        text_ms = 0;
  std::vector<float> step_ms;
  std::uint32_t batch = 1;
};

// The answer to an observation: a chunk of actions, or generated text.
struct Chunk {
  std::vector<float> actions;       // [rows, dim]
  std::uint32_t rows = 0, dim = 0;  // number of actions, and of values in an action
  Timing timing;
  std::optional<std::uint64_t> seed;
  std::string session;
  std::optional<double> time;
  std::vector<std::string> warnings;
  std::string text, adapter;
  double round_trip_ms = 0;
};

// The nodes step, step + 1 and so on of a stream's trajectory. Node k belongs to k / rate seconds of the robot's clock.
// sample_time and frame_time are the times of the newest sample and frame that the server used, on the same clock. A window
// has no nodes (rows is 0) if the answer came too late for all of them.
struct Window {
  std::int64_t step = 0;
  std::vector<float> actions;  // [rows, dim]
  std::uint32_t rows = 0, dim = 0;
  double sample_time = 0, frame_time = 0;
  float prefix_age_ms = 0, sensor_age_ms = 0, head_ms = 0;  // durations on the server's clock
  std::uint64_t run = 0, request_id = 0;                    // request_id is the number of the newest sample's message
  std::string label, text, said;
};

struct Options {
  double timeout_s = 10;  // time limit of each call in seconds, including the connection
  // The key travels unencrypted. The client rejects a key for another machine, unless SINEW_ALLOW_UNENCRYPTED_KEY is 1.
  std::string api_key;
  std::uint32_t max_rows = 1024;  // the client rejects chunks with more actions
  // Limits for each value of an action. The client rejects a chunk with a value outside. Empty: no limits.
  std::vector<float> low, high;
};

// One connection to a server, as a ZMTP socket.
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
  bool arrived();  // appends received bytes to buffer_
  void receive(std::size_t count, double end);
  bool take(int& flags, std::string& body);      // removes the next complete frame from buffer_
  std::string heard(const std::string& command);  // returns the reply to a ZMTP command
  std::string message(double end, bool handshake);

  Options options_;
  std::string host_, port_, policy_, kind_, buffer_;
  std::uint64_t last_id_ = 0;
  int socket_ = -1;
};

// A client of one server. It is not thread-safe. The first call opens the connection. If the connection breaks or a reply
// is late, the client closes the connection, and the next call opens a new one. So a late reply cannot be taken for the
// reply to a later request.
class Client : public Socket {
 public:
  // The form of address is [tcp://]HOST:PORT[/POLICY]. Throws Error bad_address for another form, and for a key that would
  // travel unencrypted to another machine.
  explicit Client(const std::string& address, Options options = {});

  // Return the actions for one observation. A timeout_s above 0 replaces the time limit of Options for this call. Throws
  // Error.
  Chunk infer(const Observation& observation, double timeout_s = 0);
  // Return a description of the server and of its policy's inputs and outputs, as JSON.
  std::string metadata(double timeout_s = 0);
  // Return the server's status and counters, as JSON.
  std::string health(double timeout_s = 0);
  // Tell the server that a new episode starts in a session.
  void reset(const std::string& session = "", double timeout_s = 0);

 private:
  std::string ask(const std::string& request, double end);
  template <class Read>
  auto kept(Read read) -> decltype(read());
  std::string control(int kind, const std::string& session, double timeout_s);
};

// A stream to one server: it sends samples and frames, and receives windows. It is not thread-safe. After Error
// connection_lost or bad_reply, the next send opens a new connection and starts a new stream. After an error from the
// server, the stream continues.
class Stream : public Socket {
 public:
  // rate is the number of nodes per second. interpolation is "", linear or hold. Throws Error bad_address.
  Stream(const std::string& address, double rate, Options options = {}, std::string interpolation = "");
  ~Stream();

  // Open the connection within the time limit, if it is not open. send also opens the connection.
  void open();
  // Send a sample with its new frames, if there are any. Return false and send nothing if four earlier messages have not
  // left yet. An open connection never makes this call wait.
  //
  // Of sample, the stream uses the fields images, state, prompt, session, seed, solver_steps, rtc, text_tokens, time and
  // delay. time is required, in seconds of the robot's clock. delay is the number of nodes from the sample's node to the
  // first node that the answer can still change (1 if absent). frame_time is the time when the cameras captured the frames
  // (time if absent).
  bool send(const Observation& sample, std::optional<double> frame_time = {});
  // Return the next window of this stream, or nothing if no window arrives within wait_s seconds. Throws Error, also for
  // errors from the server.
  std::optional<Window> next(double wait_s = 0);
  // End the stream. After this call, next returns no window of this stream. The next sample starts a new, independent
  // stream.
  void end();

 private:
  void put(const std::string& request);
  void flush();

  double rate_;
  std::string interpolation_, session_;
  std::deque<std::string> unsent_;
  std::uint64_t ended_ = 0;  // number of the last message of the previous stream
};

// These functions encode requests and decode replies. They use no sockets.
std::string encode_infer(const Observation& observation, std::uint64_t request_id, const std::string& api_key = "",
                         const std::string& policy = "");
std::string encode_sample(const Observation& sample, double rate, std::optional<double> frame_time, std::uint64_t request_id,
                          const std::string& api_key = "", const std::string& policy = "",
                          const std::string& interpolation = "");
Window decode_window(const std::string& message, const Options& options = {});
// words is true if the request asked only for text, so that a reply without actions is valid.
Chunk decode_reply(const std::string& reply, std::uint64_t request_id, const Options& options = {}, bool words = false);

}  // namespace sinew

// fields request FILE: writes a request with every field; fields reply FILE: reads a reply and prints it, or its error;
// fields reset ADDRESS TIMES: resets a session so often, with half a second for each call. As the first two sample and
// window, of a stream; fields stream ADDRESS KEY streams twice, then wrongly; fields full ADDRESS sends without end.

#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "sinew_client.hpp"

static sinew::Observation everything() {
  static const std::uint8_t pixels[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255}, file[3] = {0xff, 0xd8, 0xff};
  sinew::Observation seen;
  seen.images = {sinew::Image::rgb("front", pixels, 2, 2), sinew::Image::compressed("wrist", file, 3)};
  seen.state = {0.1f, -2, 3e8f};
  seen.prompt = "gr\xc3\xbc\xc3\x9f dich";
  seen.tokens = {1, 300, 70000};
  seen.noise = {0.5f, -0.5f};
  seen.seed = 0;
  seen.solver_steps = 10;
  seen.session = "arm";
  seen.time = 12.5;
  seen.deadline_ms = 100;
  seen.previous = {1, 2, 3, 4};
  seen.delay = 0;
  seen.horizon = 2;
  seen.rtc = "guided";
  seen.schedule = "exp";
  seen.beta = 5;
  seen.advantage = "";
  seen.guidance_scale = 1.5;
  seen.adapter = "kitchen";
  seen.subtask = seen.text_only = true;
  seen.question = "what?";
  seen.text_tokens = 16;
  return seen;
}

static void print(const sinew::Window& window) {
  std::printf("%lld %u %u", static_cast<long long>(window.step), window.rows, window.dim);
  for (float action : window.actions) std::printf(" %.9g", double(action));
}

static void reply(const std::string& bytes, bool window) {
  try {
    if (window) {
      sinew::Window found = sinew::decode_window(bytes);
      print(found);
      std::printf(" | %.17g %.17g %.9g %.9g %.9g %llu %llu %s %s %s\n", found.sample_time, found.frame_time,
                  double(found.prefix_age_ms), double(found.sensor_age_ms), double(found.head_ms), (unsigned long long)found.run,
                  (unsigned long long)found.request_id, found.label.c_str(), found.text.c_str(), found.said.c_str());
      return;
    }
    sinew::Chunk chunk = sinew::decode_reply(bytes, 7);
    std::printf("%u %u", chunk.rows, chunk.dim);
    for (float action : chunk.actions) std::printf(" %.9g", double(action));
    std::printf(" | %llu %s %.17g %s %s %s | %.9g %.9g %.9g %u\n", (unsigned long long)chunk.seed.value_or(0),
                chunk.session.c_str(), chunk.time.value_or(0), chunk.text.c_str(), chunk.adapter.c_str(),
                chunk.warnings.empty() ? "" : chunk.warnings[0].c_str(), double(chunk.timing.total_ms),
                double(chunk.timing.step_ms.empty() ? 0 : chunk.timing.step_ms.back()), double(chunk.timing.text_ms),
                chunk.timing.batch);
  } catch (const sinew::Error& error) {
    std::printf("%s\n", error.what());
  }
}

static int reset(const char* address, int times, double seconds) {
  sinew::Client client(address);
  for (int turn = 0; turn < times; ++turn) try {
      client.reset("arm", seconds);
      std::printf("one\n");
    } catch (const sinew::Error& error) {
      std::printf("%s\n", error.what());
    }
  return 0;
}

static int stream(const char* address, const char* key) {
  sinew::Options options;
  options.api_key = key, options.timeout_s = 60;
  sinew::Stream robot(address, 100, options);
  std::vector<std::uint8_t> pixels(16 * 16 * 3, 7);
  sinew::Observation seen;
  seen.images = {sinew::Image::rgb("front", pixels.data(), 16, 16)};
  seen.state = {0.5f, 0.25f}, seen.prompt = "go", seen.session = "arm", seen.seed = 7, seen.time = 0;
  for (int turn = 0; turn < 3; ++turn) try {
      if (turn == 2) seen.state.pop_back();
      robot.send(seen);
      auto window = robot.next(60);
      if (!window) return 1;
      print(*window), std::printf(" of %llu\n", (unsigned long long)window->request_id);
      robot.end();
    } catch (const sinew::Error& error) {
      std::printf("%s\n", error.what());
    }
  seen.time.reset();
  try {
    robot.send(seen);
  } catch (const sinew::Error& error) {
    std::printf("%s\n", error.what());
  }
  return 0;
}

static int full(const char* address) {
  sinew::Stream robot(address, 100);
  std::vector<std::uint8_t> pixels(1024 * 1024 * 3);
  sinew::Observation seen;
  seen.images = {sinew::Image::rgb("front", pixels.data(), 1024, 1024)};
  seen.time = 0;
  int sent = 0;
  for (int sample = 0; sample < 30; ++sample) sent += robot.send(seen);
  std::printf("%s\n", sent >= 4 && sent < 30 && !robot.next() ? "dropped" : "sent");
  return 0;
}

int main(int, char** given) {
  std::string verb = given[1];
  if (verb == "reset") return reset(given[2], std::stoi(given[3]), std::stod(given[4]));
  if (verb == "stream") return stream(given[2], given[3]);
  if (verb == "full") return full(given[2]);
  if (verb == "request" || verb == "sample") {
    std::uint64_t id = std::uint64_t(1) << 40;
    std::ofstream(given[2], std::ios::binary) << (verb == "request"
                                                      ? sinew::encode_infer(everything(), id, "key", "policy")
                                                      : sinew::encode_sample(everything(), 30, 12.25, id, "key", "policy", "hold"));
    return 0;
  }
  std::ifstream file(given[2], std::ios::binary);
  std::string whole(std::istreambuf_iterator<char>(file), {});
  reply(whole, verb == "window");
  for (std::size_t size = 0; size < whole.size(); ++size) reply(whole.substr(0, size), verb == "window");  // cut off anywhere
}

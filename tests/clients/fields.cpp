// fields request FILE: writes a request with every field; fields reply FILE: reads a reply and prints it, or its error;
// fields reset ADDRESS TIMES: resets a session so often, with half a second for each call.

#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "sinew_client.hpp"

static int request(const char* path) {
  const std::uint8_t pixels[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255}, file[3] = {0xff, 0xd8, 0xff};
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
  std::string bytes = sinew::encode_infer(seen, std::uint64_t(1) << 40, "key", "policy");
  std::ofstream(path, std::ios::binary) << bytes;
  return 0;
}

static void reply(const std::string& bytes) {
  try {
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

static int reset(const char* address, int times) {
  sinew::Client client(address);
  for (int turn = 0; turn < times; ++turn) try {
      client.reset("arm", 0.5);
      std::printf("one\n");
    } catch (const sinew::Error& error) {
      std::printf("%s\n", error.what());
    }
  return 0;
}

int main(int, char** given) {
  if (std::string(given[1]) == "reset") return reset(given[2], std::stoi(given[3]));
  if (std::string(given[1]) == "request") return request(given[2]);
  std::ifstream file(given[2], std::ios::binary);
  std::string whole(std::istreambuf_iterator<char>(file), {});
  reply(whole);
  for (std::size_t size = 0; size < whole.size(); ++size) reply(whole.substr(0, size));  // cut off anywhere
}

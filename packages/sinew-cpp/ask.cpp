// ask ADDRESS PROMPT --image CAMERA=FILE ... --state 0.1,0.2 [--seed N] [--key KEY, else SINEW_API_KEY] [--times N] [--rate HZ]
//     [--bytes FILE]
//
// An example program. It sends one request, or N requests, and prints the actions of each chunk. The exit status is 0, or 1 after an
// error, which it prints with its code.
//
// FILE is a PPM (P6), JPEG or PNG file. The pixels of a PPM file are sent uncompressed.
// --rate HZ opens a stream and sends HZ samples per second. The program ends after N windows, and prints one line for each window: the
// first step and the nodes.
// --bytes FILE writes the first request to FILE and sends nothing.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <list>
#include <sstream>

#include "sinew_client.hpp"

static sinew::Image picture(const std::string& camera, const std::string& path, std::string& bytes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw sinew::Error("bad_observation", "images." + camera + ": expected a file, got " + path + ", which cannot be read");
  bytes.assign(std::istreambuf_iterator<char>(file), {});
  auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  unsigned width = 0, height = 0, top = 0;
  int used = 0;
  if (std::sscanf(bytes.c_str(), "P6 %u %u %u%n", &width, &height, &top, &used) != 3)
    return sinew::Image::compressed(camera, data, bytes.size());
  if (top != 255 || bytes.size() != used + 1 + std::size_t(width) * height * 3)
    throw sinew::Error("bad_observation", path + ": expected a whole PPM of 8 bits");
  return sinew::Image::rgb(camera, data + used + 1, height, width);
}

// Send samples at the given rate, and print the given number of windows.
static void stream(sinew::Stream& robot, sinew::Observation& seen, double rate, int times) {
  robot.open();
  auto begun = std::chrono::steady_clock::now();
  auto now = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
  for (int sample = 1; times > 0; ++sample) {
    seen.time = now();
    robot.send(seen);
    while (times > 0) {
      auto window = robot.next(sample / rate - now());
      if (!window) break;
      std::printf("%lld:", static_cast<long long>(window->step));
      for (float action : window->actions) std::printf(" %.9g", double(action));
      std::printf("\n");
      seen.delay = 1 + unsigned((now() - window->sample_time) * rate);  // assume that the next window is as late as this window
      --times;
    }
  }
}

int main(int count, char** given) try {
  if (count < 3) throw sinew::Error("usage", "expected ADDRESS PROMPT --image CAMERA=FILE ... --state NUMBER,NUMBER");
  sinew::Observation seen;
  sinew::Options options;
  if (const char* key = std::getenv("SINEW_API_KEY")) options.api_key = key;
  std::list<std::string> files;  // owns the data of the images
  std::string bytes;
  int times = 1;
  double rate = 0;
  seen.prompt = given[2];
  for (int index = 3; index < count; index += 2) {
    std::string option = given[index], value = index + 1 < count ? given[index + 1] : "";
    if (option == "--image") {
      std::size_t equal = value.find('=');
      if (equal == std::string::npos) throw sinew::Error("usage", "--image: expected CAMERA=FILE, got " + value);
      files.emplace_back();
      seen.images.push_back(picture(value.substr(0, equal), value.substr(equal + 1), files.back()));
    } else if (option == "--state") {
      std::istringstream numbers(value);
      for (std::string number; std::getline(numbers, number, ',');) seen.state.push_back(std::stof(number));
    } else if (option == "--seed") {
      seen.seed = std::stoull(value);
    } else if (option == "--key") {
      options.api_key = value;
    } else if (option == "--times") {
      times = std::stoi(value);
    } else if (option == "--rate") {
      rate = std::stod(value);
    } else if (option == "--bytes") {
      bytes = value;
    } else {
      throw sinew::Error("usage", "unknown option " + option);
    }
  }
  if (rate > 0) {
    sinew::Stream robot(given[1], rate, options);
    stream(robot, seen, rate, times);
    return 0;
  }
  sinew::Client client(given[1], options);
  if (!bytes.empty()) {
    std::ofstream(bytes, std::ios::binary) << sinew::encode_infer(seen, 1, options.api_key);
    return 0;
  }
  for (int turn = 0; turn < times; ++turn) {
    sinew::Chunk chunk = client.infer(seen);
    for (std::size_t index = 0; index < chunk.actions.size(); ++index)  // 9 digits print each float32 exactly
      std::printf("%.9g%c", double(chunk.actions[index]), (index + 1) % chunk.dim ? ' ' : '\n');
    for (const std::string& warning : chunk.warnings) std::cerr << "warning: " << warning << "\n";
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}

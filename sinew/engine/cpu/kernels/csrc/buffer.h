// A buffer that a thread keeps between calls, and the macro that exports a function of the library.
#pragma once
#include <cstdlib>
#include <new>

#include "kernels.h"

#define PUBLIC __attribute__((visibility("default")))

namespace lowbit {

class Buffer {
 public:
  ~Buffer() { std::free(at_); }
  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(at_);
      size_ = 0;
      at_ = std::aligned_alloc(64, round_up(bytes, 64));
      if (at_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return at_;
  }

 private:
  void* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lowbit

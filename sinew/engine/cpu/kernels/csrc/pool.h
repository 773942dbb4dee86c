// Threads that take numbered tasks from a counter. Between two jobs, a thread polls for the next job for the time
// PATIENCE and then sleeps. A thread that spins for longer takes time from other programs on a robot
// (research/log/2026-11-21.md). But a chunk has thousands of jobs a few microseconds apart, and waking a thread takes
// tens of microseconds. The limit is a time and not a number of loops, so that a thread without a core sleeps at once
// when it runs again. Results do not depend on the number of threads.
#pragma once
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lowbit {

class Pool {
 public:
  // Return the pool of this process. A child of fork() has none of its parent's threads, so it gets a new pool.
  static Pool& get() {
    static std::mutex lock;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> held(lock);
    if (pool == nullptr || owner != getpid()) {
      pool = new Pool;  // never destroyed, because its threads may sleep in it when the process ends
      owner = getpid();
    }
    return *pool;
  }

  // Call task(0) .. task(tasks - 1) on this thread and up to threads - 1 other threads, and return when all are
  // finished. If another caller uses the pool, this thread computes its tasks alone.
  void run(int threads, int tasks, const std::function<void(int)>& task) {
    if (threads <= 1 || tasks <= 1) {
      for (int i = 0; i < tasks; ++i) task(i);
      return;
    }
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {
      for (int i = 0; i < tasks; ++i) task(i);
      return;
    }
    auto job = std::make_shared<Job>(task, tasks);
    bool asleep;
    {
      std::lock_guard<std::mutex> held(lock_);
      while (workers_ < threads - 1) {
        std::thread(&Pool::work, this, workers_).detach();
        ++workers_;
      }
      job_ = job;
      helpers_ = threads - 1 < tasks - 1 ? threads - 1 : tasks - 1;
      number_.fetch_add(1, std::memory_order_release);
      asleep = sleeping_ > 0;
    }
    if (asleep) wake_.notify_all();
    job->take();
    // Wait for tasks only, never for a thread that has no core yet.
    const auto finished = [&] { return job->done.load(std::memory_order_acquire) == job->tasks; };
    const bool soon = within_patience(finished);
    std::unique_lock<std::mutex> held(lock_);
    if (!soon) {
      waiting_ = true;
      done_.wait(held, finished);
      waiting_ = false;
    }
    job_.reset();
  }

 private:
  static constexpr std::chrono::microseconds PATIENCE{60};

  struct Job {
    Job(const std::function<void(int)>& f, int n) : task(f), tasks(n) {}
    // A claimed task keeps run() waiting, so `task` exists whenever a thread calls it.
    int take() {
      int finished = 0;
      for (int i = next.fetch_add(1); i < tasks; i = next.fetch_add(1), ++finished) task(i);
      return done += finished;
    }
    const std::function<void(int)>& task;
    const int tasks;
    std::atomic<int> next{0}, done{0};
  };

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Return whether `condition` became true within PATIENCE.
  template <class Condition>
  static bool within_patience(const Condition& condition) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 8; ++i) {
        if (condition()) return true;
        pause();
      }
    } while (std::chrono::steady_clock::now() - start < PATIENCE);
    return condition();
  }

  void work(int index) {
    long seen = 0;
    const auto called = [&] { return number_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      const bool soon = within_patience(called);
      std::unique_lock<std::mutex> held(lock_);
      if (!soon) {
        ++sleeping_;
        wake_.wait(held, called);
        --sleeping_;
      }
      seen = number_;
      if (index >= helpers_ || !job_) continue;
      std::shared_ptr<Job> job = job_;
      held.unlock();
      const bool last = job->take() == job->tasks;
      if (!last) continue;
      held.lock();
      if (waiting_) done_.notify_one();
    }
  }

  std::mutex turn_, lock_;
  std::condition_variable wake_, done_;
  std::shared_ptr<Job> job_;
  int workers_ = 0, helpers_ = 0, sleeping_ = 0;
  bool waiting_ = false;
  std::atomic<long> number_{0};
};

}  // namespace lowbit

// Threads that take numbered tasks from a counter and sleep in between: on a robot other programs want the cores, and a
// thread that spins takes their time (docs/log/2026-11-21.md). Results do not depend on how many there are.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lowbit {

class Pool {
 public:
  // The pool of this process. A child of fork() has none of its parent's threads, so it starts anew.
  static Pool& get() {
    static std::mutex lock;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> held(lock);
    if (pool == nullptr || owner != getpid()) {
      pool = new Pool;  // never destroyed: its threads may sleep in it when the process ends
      owner = getpid();
    }
    return *pool;
  }

  // Call task(0) .. task(tasks - 1) on this thread and up to threads - 1 others; returns when all are done. While
  // another caller has the pool, this thread does its own tasks alone.
  void run(int threads, int tasks, const std::function<void(int)>& task) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (threads <= 1 || tasks <= 1 || !turn.owns_lock()) {
      for (int i = 0; i < tasks; ++i) task(i);
      return;
    }
    auto job = std::make_shared<Job>(task, tasks);
    {
      std::lock_guard<std::mutex> held(lock_);
      while (workers_ < threads - 1) {
        std::thread(&Pool::work, this, workers_).detach();
        ++workers_;
      }
      job_ = job;
      helpers_ = threads - 1 < tasks - 1 ? threads - 1 : tasks - 1;
      ++number_;
    }
    wake_.notify_all();
    job->take();
    std::unique_lock<std::mutex> held(lock_);
    // Only tasks are waited for, never a thread that has not been given a core yet.
    done_.wait(held, [&] { return job->done == job->tasks; });
    job_.reset();
  }

 private:
  struct Job {
    Job(const std::function<void(int)>& f, int n) : task(f), tasks(n) {}
    // A task that was claimed keeps run() waiting, so `task` is alive wherever it is called.
    int take() {
      int finished = 0;
      for (int i = next.fetch_add(1); i < tasks; i = next.fetch_add(1), ++finished) task(i);
      return done += finished;
    }
    const std::function<void(int)>& task;
    const int tasks;
    std::atomic<int> next{0}, done{0};
  };

  void work(int index) {
    long seen = 0;
    std::unique_lock<std::mutex> held(lock_);
    for (;;) {
      wake_.wait(held, [&] { return number_ != seen; });
      seen = number_;
      if (index >= helpers_ || !job_) continue;
      std::shared_ptr<Job> job = job_;
      held.unlock();
      const bool last = job->take() == job->tasks;
      held.lock();
      if (last) done_.notify_one();
    }
  }

  std::mutex turn_, lock_;
  std::condition_variable wake_, done_;
  std::shared_ptr<Job> job_;
  int workers_ = 0, helpers_ = 0;
  long number_ = 0;
};

}  // namespace lowbit

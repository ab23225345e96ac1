// The device and order of execution of an operation: every operation takes a Stream first.
//
// On the CPU an operation has finished when its call returns; on a GPU it has been enqueued.
#pragma once

#include "device/cpu/thread_pool.h"

namespace fathom {

enum class DeviceKind { kCpu };

class Stream {
 public:
  explicit Stream(ThreadPool& pool) : pool_(&pool) {}

  DeviceKind device() const { return DeviceKind::kCpu; }
  ThreadPool& pool() const { return *pool_; }

 private:
  ThreadPool* pool_;
};

}  // namespace fathom

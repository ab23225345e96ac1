// A file descriptor that becomes readable when the process's abort word is set, for threads that
// wait in poll(). It stays readable until quiet().
#pragma once

#include "comm/abort_word.h"
#include "comm/socket.h"

namespace fathom {

class AbortBell {
 public:
  explicit AbortBell(AbortWord& abort_word);
  ~AbortBell();
  AbortBell(const AbortBell&) = delete;
  AbortBell& operator=(const AbortBell&) = delete;

  int fd() const { return fd_.get(); }
  bool rung() const { return abort_word_.aborted(); }
  // Makes fd() readable without an abort. Any thread.
  void ring();
  // For the only thread that polls this bell: afterwards it looks at rung() and all else that it
  // may have been rung for.
  void quiet();

 private:
  AbortWord& abort_word_;
  Fd fd_;
  int watch_;
};

}  // namespace fathom

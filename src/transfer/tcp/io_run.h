// Runs an I/O thread's handlers until none is left.
#pragma once

#include <boost/asio/io_context.hpp>
#include <new>

namespace fathom {

// A handler that finds no memory is given up: what it was about is closed when it is late.
inline void run_io(boost::asio::io_context& context) {
  for (;;) {
    try {
      context.run();
      return;
    } catch (const std::bad_alloc&) {
    }
  }
}

}  // namespace fathom

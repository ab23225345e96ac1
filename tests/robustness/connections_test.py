#!/usr/bin/env python3
"""Connections that do nothing or hardly anything: those that work do not feel them, slow ones are closed.

Test 5 of the reliability targets.
"""
import resource
import time
import unittest

from robustness import (CHAT, IS_LONG, QUESTION, SLACK, Server, connect, figure, percentile,
                        read_to_end, status_of)

IDLE = 10000 if IS_LONG else 400
SLOW = 1000 if IS_LONG else 50


class Connections(unittest.TestCase):
    def test_idle_and_slow_ones(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = IDLE + SLOW + 200
        self.assertGreaterEqual(hard, wanted, "the limit of open files (ulimit -n)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        server = Server("--max-connections", str(wanted), "--no-log-requests")
        self.addCleanup(server.kill)
        alone, resident = self.times(server), server.resident_bytes()
        idle = [connect(server) for _ in range(IDLE)]
        slow = [connect(server) for _ in range(SLOW)]
        begin = time.monotonic()
        beside, closed_after = [], None
        while closed_after is None:
            for connection in slow:
                try:
                    connection.sendall(b"X" if time.monotonic() - begin > 1 else b"POST / HTTP/1.1\r\nA: ")
                except OSError:
                    pass  # it has been closed
            beside += self.times(server, 10)
            self.assertLess(time.monotonic() - begin, 10 + 4 * SLACK, "slow ones are still open")
            if server.metric("fathom_http_connections") <= IDLE + 1:
                closed_after = time.monotonic() - begin
        # A byte that came after the refusal makes a reset of it; the last one has an answer.
        answered = 0
        for connection in slow:
            try:
                answered += status_of(read_to_end(connection)) == 408
            except OSError:
                pass
        figure("connections", f"{IDLE} idle and {SLOW} slow ones: "
               f"{(server.resident_bytes() - resident) / 2 ** 20:.0f} MiB; slow ones closed after "
               f"{closed_after:.1f} s, {answered} with a 408; a request p99 "
               f"{percentile(alone, .99) * 1e3:.0f} ms alone, {percentile(beside, .99) * 1e3:.0f} ms "
               "beside them")
        self.assertLessEqual(percentile(beside, 0.5), (1.1 * percentile(alone, 0.5) + 0.01) * SLACK)
        for connection in (*idle, *slow):
            connection.close()
        self.assertEqual(server.stop(), 0)

    def times(self, server, count=40):
        found = []
        for _ in range(count):
            start = time.monotonic()
            server.post(CHAT, {"messages": QUESTION, "max_tokens": 4})
            found.append(time.monotonic() - start)
        return found


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/env python3
"""Connections that do nothing or hardly anything: those that work do not feel them, slow ones are closed.

Test 5 of the reliability targets.
"""
import resource
import selectors
import threading
import time
import unittest

from robustness import (CHAT, IS_LONG, QUESTION, SLACK, Server, connect, cores_apart, figure,
                        percentile, status_of)

IDLE = 10000 if IS_LONG else 400
SLOW = 1000 if IS_LONG else 50
REQUESTS = 500 if IS_LONG else 40


class Slow:
    """A connection that sends a head byte by byte, and when it was closed."""

    def __init__(self, server):
        self.connection = connect(server)
        self.started = self.seconds = None
        self.answer = b""

    def send(self):
        try:
            if self.started is None:
                self.started = time.monotonic()
                self.connection.sendall(b"POST / HTTP/1.1\r\nA: ")
            else:
                self.connection.sendall(b"X")
        except OSError:
            pass  # it has been closed

    def read(self):
        """False at the end."""
        try:
            part = self.connection.recv(4096)
        except OSError:
            part = b""  # a byte that came after the server's close makes a reset of it
        self.answer += part
        if not part:
            self.seconds = time.monotonic() - self.started
        return bool(part)


def wait_for_ends(slow):
    with selectors.DefaultSelector() as selector:
        for one in slow:
            selector.register(one.connection, selectors.EVENT_READ, one)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


class Connections(unittest.TestCase):
    def test_idle_and_slow_ones(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = IDLE + SLOW + 200
        self.assertGreaterEqual(hard, wanted, "the limit of open files (ulimit -n)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        server = Server("--max-connections", str(wanted), "--no-log-requests", **cores_apart(self.addCleanup))
        self.addCleanup(server.kill)
        self.times(server, REQUESTS // 5)  # the first are slower
        alone, resident = self.times(server, REQUESTS), server.resident_bytes()
        idle = [connect(server) for _ in range(IDLE)]
        slow = [Slow(server) for _ in range(SLOW)]
        held = server.resident_bytes() - resident
        reader = threading.Thread(target=wait_for_ends, args=(slow,), daemon=True)
        begin = time.monotonic()
        beside = []
        while any(one.seconds is None for one in slow):
            # A few at a time, so that they are spread as a thousand clients are.
            for part in range(10):
                for one in slow[part::10]:
                    if one.seconds is None:
                        one.send()
                beside += self.times(server, 1)
            if reader.ident is None:
                reader.start()
            self.assertLess(time.monotonic() - begin, 10 + 4 * SLACK, "slow ones are still open")
        last = max(one.seconds for one in slow)
        answered = sum(status_of(one.answer) == 408 for one in slow)
        figure("connections", f"{IDLE} idle and {SLOW} slow ones: {held / 2 ** 20:.0f} MiB; slow "
               f"ones closed after {min(one.seconds for one in slow):.2f} to {last:.2f} s, "
               f"{answered} with a 408; a request p50 {percentile(alone, .5) * 1e3:.1f} ms and p99 "
               f"{percentile(alone, .99) * 1e3:.1f} ms alone, {percentile(beside, .5) * 1e3:.1f} "
               f"and {percentile(beside, .99) * 1e3:.1f} ms beside them ({len(beside)} requests)")
        # 10 s by the server's clock, which begins with the first byte's arrival.
        self.assertLessEqual(last, 10 + 0.1 * SLACK)
        self.assertLessEqual(percentile(beside, 0.99), (1.1 * percentile(alone, 0.99) + 0.001) * SLACK)
        self.assertGreaterEqual(server.metric("fathom_http_connections"), IDLE)
        for connection in idle:
            connection.close()
        self.assertEqual(server.stop(), 0)

    def times(self, server, count):
        found = []
        for _ in range(count):
            start = time.monotonic()
            server.post(CHAT, {"messages": QUESTION, "max_tokens": 4})
            found.append(time.monotonic() - start)
        return found


if __name__ == "__main__":
    unittest.main(verbosity=2)

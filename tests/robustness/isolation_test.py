#!/usr/bin/env python3
"""What one client may learn of another: routes and keys, salts and canaries, ports.

Tests 46, 48 and 49 of the reliability targets.
"""
import json
import os
import re
import unittest

from robustness import CHAT, LONG, QUESTION, Server

PUBLIC = {("GET", path) for path in ("/", "/health", "/ping", "/ready",
                                         "/version", "/openapi.json")}


def routes(server):
    """(method, path) of every route, from the server's own document: api_document_test.cc proves
    that it has all that there are."""
    paths = json.loads(server.ask("GET", "/openapi.json")[2])["paths"]
    return {(method.upper(), path.replace("{id}", "fathom-tiny"))
            for path, operations in paths.items() for method in operations}


# A client's key does not open them where there is an admin's.
OPERATORS = ("/flush_cache",)


class Keys(unittest.TestCase):
    def test_every_route(self):
        server = Server("--api-key", "user-key", "--admin-api-key", "admin-key")
        self.addCleanup(server.kill)
        everything = routes(server)
        self.assertGreater(len(everything), 18)
        self.assertLessEqual(PUBLIC, everything)
        for method, path in sorted(everything):
            for key, allowed in ((None, False), ("wrong", False), ("user-ke", False),
                                 ("user-key2", False), ("user-key", True), ("admin-key", True)):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                status = server.ask(method, path, b"{" if method == "POST" else None, headers)[0]
                if key == "user-key" and path in OPERATORS:
                    self.assertEqual(status, 403, (method, path, key))
                elif allowed or (method, path) in PUBLIC:
                    self.assertNotIn(status, (401, 403), (method, path, key))
                else:
                    self.assertEqual(status, 401, (method, path, key))
        for path in ("/nothing", "/v1/", "/metrics/", "//metrics", "/%6detrics", "/v1/../metrics"):
            self.assertIn(server.ask("GET", path)[0], (400, 401, 404), path)
        self.assertNotIn("user-key", "".join(server.log))
        self.assertEqual(server.stop(), 0)


class Tenants(unittest.TestCase):
    def test_canaries_and_salts(self):
        # Little room, so that pages of aborted requests are taken by others at once.
        server = Server("--max-total-tokens", "4096", "--max-num-seqs", "8")
        self.addCleanup(server.kill)
        canary = "CANARY-7f3a-ZEBRA"
        body = {"messages": QUESTION, "max_tokens": 20, "temperature": 0}
        expected = server.post(CHAT, body)["choices"][0]["message"]["content"]
        for turn in range(12):
            secret = {"messages": [{"role": "user", "content": f"{turn} {canary} " * 20}],
                      "cache_salt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
            connection, response = server.open("POST", CHAT, secret)
            response.read(100)
            if turn % 2:
                connection.close()
                response.close()
            other = server.post(CHAT, {**body, "cache_salt": f"b{turn}"})
            text = other["choices"][0]["message"]["content"]
            self.assertEqual(text, expected)
            story = server.post(CHAT, {**LONG, "max_tokens": 100, "cache_salt": "b"})
            self.assertNotIn("CANARY", str(story))
            self.assertNotIn("ZEBRA", str(story))
            connection.close()
        prompt = {"messages": [{"role": "user", "content": "one two three " * 60}], "max_tokens": 1}
        cached = []
        for salt in ("a", "a", "b", None):
            reply = server.post(CHAT, {**prompt, **({"cache_salt": salt} if salt else {})})
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        self.assertEqual(cached, [False, True, False, False])
        self.assertNotIn(canary, "".join(server.log))
        self.assertEqual(server.stop(), 0)


class Ports(unittest.TestCase):
    def test_one_port_on_loopback(self):
        server = Server()
        self.addCleanup(server.kill)
        inodes = set()
        for entry in os.listdir(f"/proc/{server.process.pid}/fd"):
            try:
                found = re.match(r"socket:\[(\d+)\]", os.readlink(
                    f"/proc/{server.process.pid}/fd/{entry}"))
            except OSError:
                continue
            if found:
                inodes.add(found.group(1))
        listening = []
        for table in ("tcp", "tcp6", "udp", "udp6"):
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                for line in list(file)[1:]:
                    fields = line.split()
                    if fields[9] in inodes and (table.startswith("udp") or fields[3] == "0A"):
                        listening.append((table, fields[1]))
        self.assertEqual(listening, [("tcp", f"0100007F:{server.port:04X}")])
        self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

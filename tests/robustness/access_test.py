#!/usr/bin/env python3
"""Who may do what: keys and the requests that belong to them, web pages, names of the server, clients that
close half of their connection."""
import json
import socket
import unittest

from robustness import CHAT, LONG, QUESTION, SLACK, Server, connect, encode, faulty, read_to_end, send_raw
from fathom_server import ANSWER  # in the folder that robustness adds

# Steps take so much longer that a long answer runs until something is done to it.
SLOWLY = "step_ms:100"
FIRST, SECOND, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("sk-first", "sk-second", "root"))


class Owners(unittest.TestCase):
    """Two clients with a key each, and an admin."""

    def start(self, *flags):
        self.server = faulty(SLOWLY, "--api-key", "sk-first", "--api-key", "sk-second", *flags)
        self.addCleanup(self.server.kill)
        self.addCleanup(lambda: [connection.close() for connection, _ in self.streams])
        self.streams = []

    def stream(self, key, name):
        """A long answer that has begun; its id."""
        connection, response = self.server.open("POST", CHAT, {**LONG, "stream": True},
                                                {**key, "X-Request-Id": name})
        self.assertEqual(response.status, 200)
        self.streams.append((connection, response))
        return json.loads(response.readline().decode().removeprefix("data: "))["id"]

    def abort(self, key, status=200, **body):
        return self.server.post("/abort_request", body, status, headers=key).get("aborted")

    def running(self):
        _, _, text = self.server.ask("GET", "/metrics", headers=FIRST)
        return sum(int(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if line.startswith("vllm:num_requests_running{"))

    def test_a_request_belongs_to_the_key_that_made_it(self):
        self.start("--admin-api-key", "root")
        mine = self.stream(FIRST, "same-name")
        theirs = self.stream(SECOND, "same-name")
        self.assertEqual(self.abort(SECOND, rid=mine), 0)
        self.assertEqual(self.abort(SECOND, rid="same-name"), 1, "its own, and not the other's")
        self.assertEqual(self.abort(SECOND, rid=theirs), 0, "it has ended")
        self.assertEqual(self.abort(FIRST, rid=mine), 1)
        third = self.stream(FIRST, "third")
        self.assertEqual(self.abort(ADMIN, rid=third), 1)
        connection, response = self.server.open("POST", "/generate", {
            "text": "A river", "stream": True, "rid": "their-own",
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}, FIRST)
        response.readline()
        self.assertEqual(self.abort(SECOND, rid="their-own"), 0)
        self.assertEqual(self.abort(FIRST, rid="their-own"), 1)
        connection.close()
        self.assertEqual(self.server.stop(), 0)

    def test_what_touches_all_wants_the_admins_key(self):
        self.start("--admin-api-key", "root")
        self.stream(FIRST, "one")
        self.assertIsNone(self.abort(FIRST, 403, abort_all=True))
        self.assertIsNone(self.abort({}, 401, abort_all=True))
        self.server.post("/flush_cache", {}, 403, headers=SECOND)
        self.server.post("/flush_cache", {}, 401)
        self.assertEqual(self.running(), 1)
        self.server.post("/flush_cache", {}, headers=ADMIN)
        self.assertEqual(self.abort(ADMIN, abort_all=True), 1)
        self.assertEqual(self.server.stop(), 0)

    def test_without_an_admin_all_means_the_callers_own(self):
        self.start()
        self.stream(FIRST, "one")
        self.stream(SECOND, "two")
        self.assertEqual(self.abort(SECOND, abort_all=True), 1)
        self.assertEqual(self.abort(FIRST, rid="one"), 1, "it was still there")
        self.server.post("/flush_cache", {}, headers=SECOND)
        self.assertEqual(self.server.stop(), 0)

    def test_without_keys_all_clients_are_equal(self):
        server = faulty(SLOWLY)
        self.addCleanup(server.kill)
        connection, response = server.open("POST", CHAT, {**LONG, "stream": True})
        response.readline()
        self.assertEqual(server.post("/abort_request", {"abort_all": True}), {"aborted": 1})
        connection.close()
        self.assertEqual(server.post("/flush_cache", {}), {"status": "ok"})
        self.assertEqual(server.stop(), 0)


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--allowed-origins", "https://chat.example", "--allowed-hosts", "fathom.example",
                            "--metrics-prefix", "fathom")

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.log[-20:])

    def ask(self, headers, body=None):
        status, _, text = self.server.ask("POST", CHAT, body or {"messages": QUESTION, "temperature": 0},
                                          headers)
        return status, json.loads(text).get("error", {}).get("code")

    def test_what_a_page_of_another_origin_can_send(self):
        self.assertEqual(self.ask({}), (200, None))
        evil = {"Origin": "http://evil.example"}
        self.assertEqual(self.ask(evil), (403, "origin_not_allowed"))
        self.assertEqual(self.ask({"Sec-Fetch-Site": "cross-site"}), (403, "origin_not_allowed"))
        self.assertEqual(self.ask({"Content-Type": "text/plain"}), (415, "unsupported_content_type"))
        self.assertEqual(self.ask({"Content-Type": "application/x-www-form-urlencoded"}),
                         (415, "unsupported_content_type"))
        self.assertEqual(self.ask({"Content-Encoding": "gzip"}), (415, "unsupported_content_encoding"))
        self.assertEqual(self.ask({"Host": "evil.example"}), (421, "host_not_allowed"))
        self.assertEqual(self.ask({"Host": "evil.example", **evil}), (421, "host_not_allowed"))

    def test_what_pages_of_this_server_and_allowed_ones_send(self):
        own = f"http://127.0.0.1:{self.server.port}"
        self.assertEqual(self.ask({"Origin": own, "Sec-Fetch-Site": "same-origin"}), (200, None))
        self.assertEqual(self.ask({"Origin": own}), (200, None))
        self.assertEqual(self.ask({"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}), (200, None))
        self.assertEqual(self.ask({"Host": "fathom.example"}), (200, None))
        self.assertEqual(self.ask({"Host": "localhost"}), (200, None))

    def test_every_endpoint_that_takes_a_body(self):
        _, _, text = self.server.ask("GET", "/openapi.json")
        posted = 0
        for path, methods in json.loads(text)["paths"].items():
            if "post" not in methods or "200" not in methods["post"]["responses"]:
                continue
            posted += 1
            for headers, status in (({"Content-Type": "text/plain"}, 415), ({"Origin": "null"}, 403),
                                    ({"Host": "evil.example"}, 421)):
                self.assertEqual(self.server.ask("POST", path, {}, headers)[0], status, path)
                self.assertIn(str(status), methods["post"]["responses"])
        self.assertGreaterEqual(posted, 10)

    def test_a_half_closed_connection_is_answered(self):
        answer = send_raw(self.server, encode(CHAT, {"messages": QUESTION, "temperature": 0}), ends=True)
        head, _, body = answer.partition(b"\r\n\r\n")
        self.assertTrue(head.startswith(b"HTTP/1.1 200 OK\r\n"), head)
        self.assertEqual(json.loads(body)["choices"][0]["message"]["content"], ANSWER)
        streamed = send_raw(self.server, encode(CHAT, {"messages": QUESTION, "stream": True}), ends=True)
        self.assertTrue(streamed.startswith(b"HTTP/1.1 200 OK\r\n"), streamed)
        self.assertIn(b"data: [DONE]", streamed)

    def test_a_prefix_exports_metrics_twice(self):
        _, _, text = self.server.ask("GET", "/metrics")
        for line in ("vllm:num_requests_running{", "fathom_num_requests_running{", "fathom_build_info{version=",
                     "vllm:cache_config_info{", "fathom_iteration_tokens_total_bucket{",
                     "process_start_time_seconds{}", "process_cpu_seconds_total{}"):
            self.assertIn("\n" + line, text)
        steps = self.server.metric("fathom_steps_total")
        self.assertEqual(self.server.metric("vllm:iteration_tokens_total_count"), steps)
        self.server.post(CHAT, {"messages": QUESTION, "max_tokens": 4, "ignore_eos": True})
        self.assertGreaterEqual(self.server.metric("fathom_steps_total"), steps + 4)
        self.assertGreater(self.server.metric("fathom_step_seconds_total"), 0)
        self.assertGreater(self.server.metric("vllm:iteration_tokens_total_sum"), 4)


class Endings(unittest.TestCase):
    def test_a_half_closed_client_waits_for_a_slow_answer_and_a_closed_one_ends_it(self):
        server = faulty("step_ms:20")
        self.addCleanup(server.kill)
        body = {"messages": QUESTION, "max_tokens": 30, "ignore_eos": True}
        answer = send_raw(server, encode(CHAT, body), ends=True)
        self.assertTrue(answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer)
        with connect(server) as connection:
            connection.sendall(encode(CHAT, LONG))
            server.wait_for("vllm:num_requests_running", 1)
        server.wait_for("vllm:num_requests_running", 0)
        self.assertEqual(server.metric("fathom_client_disconnects_total"), 1)
        self.assertEqual(server.stop(), 0)

    def test_an_aborted_request_is_not_worth_another_try(self):
        server = faulty(SLOWLY)
        self.addCleanup(server.kill)
        with connect(server) as connection:
            connection.sendall(encode(CHAT, LONG, ["X-Request-Id: mine"]))
            server.wait_for("vllm:num_requests_running", 1)
            self.assertEqual(server.post("/abort_request", {"rid": "mine"}), {"aborted": 1})
            answer = read_to_end(connection)
        self.assertTrue(answer.startswith(b"HTTP/1.1 500 "), answer)
        self.assertIn(b"\r\nx-should-retry: false\r\n", answer)
        self.assertNotIn(b"Retry-After", answer)
        self.assertIn(b'"code":"aborted"', answer)
        self.assertEqual(server.stop(), 0)

    def test_an_ipv6_address_with_brackets(self):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            self.skipTest("there is no IPv6 here")
        for host in ("[::1]", "::1"):
            server = Server("--host", host)
            self.addCleanup(server.kill)
            self.assertTrue(any(f" on http://[::1]:{server.port}" in line for line in server.log), server.log)
            with socket.create_connection(("::1", server.port), 30 * SLACK) as connection:
                connection.sendall(encode("/health", method="GET").replace(b"localhost", b"[::1]"))
                answer = read_to_end(connection)
            self.assertTrue(answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer)
            self.assertEqual(server.stop(), 0)

    def test_a_bad_prefix_is_refused(self):
        server = Server("--metrics-prefix", "9a b", ready=False, port=1)
        self.assertEqual(server.wait(), 2)
        self.assertIn("--metrics-prefix is '9a b'", "".join(server.log))


if __name__ == "__main__":
    unittest.main(verbosity=2)

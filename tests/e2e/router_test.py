"""`fathom route` in front of two `fathom serve` of the bundled model: equal answers, affinity, drain, a
replica that is killed; and in front of replicas of this script that break where they are told to."""
import http.client
import http.server
import json
import re
import signal
import socket
import subprocess
import threading
import time
import unittest

from fathom_server import (ANSWER, ENVIRONMENT, LONG, PROGRAM, QUESTION, SLACK, Server)

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
FAST = ("--health-check-interval-secs", "1", "--connect-timeout", "2")


class Router(Server):
    """The router over replicas at these ports."""

    def __init__(self, ports, *flags, port=0):  # pylint: disable=super-init-not-called
        urls = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        self.process = subprocess.Popen([PROGRAM, "route", "--port", str(port), *urls, *FAST, *flags],
                                        stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
        self.log, self.port, self.ready = [], None, threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        assert self.ready.wait(60 * SLACK) and self.port, "".join(self.log)

    def read(self):
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"routing to .* on https?://[^ ]*:(\d+)", line):
                self.port = int(found.group(1))
                self.ready.set()
        self.ready.set()

    def wait_ready(self, count):
        self.wait_until(lambda: self.metric("fathom_router_replica_ready") == count,
                        f"{count} ready replicas")


class Scripted(http.server.BaseHTTPRequestHandler):
    """A replica that is ready and answers as its server's `mode` says."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, b"{}")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests += 1
        mode = self.server.mode
        if mode == "lose":
            self.close_connection = True
            return
        if mode in ("503", "500"):
            return self.reply(int(mode), b'{"error":{"message":"scripted"}}')
        if mode == "cut_body":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
            return
        if mode in ("cut_stream", "flood"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                if mode == "cut_stream":
                    for piece in (b"data: 1\n\n", b"data: {\"unfinish"):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                else:
                    event = b"data: " + b"x" * 65000 + b"\n\n"
                    while self.server.sent < 256 << 20:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                        self.server.sent += len(event)
            except OSError:
                self.server.left.set()
            self.close_connection = True
            return
        self.reply(200, json.dumps({"from": self.server.server_port}).encode())


def scripted(mode="ok"):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.daemon_threads = True
    server.mode, server.requests, server.sent, server.left = mode, 0, 0, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class FaultyReplicas(unittest.TestCase):
    """Faults, with replicas of this script."""

    def start(self, *modes, flags=()):
        replicas = [scripted(mode) for mode in modes]
        router = Router([r.server_port for r in replicas], *flags)
        self.addCleanup(router.kill)
        router.wait_ready(len(modes))
        return router, replicas

    def test_lost_before_the_reply_is_asked_once_more(self):
        router, replicas = self.start("lose", "lose", "lose", flags=("--policy", "round_robin"))
        status, _, text = router.ask("POST", "/v1/chat/completions", {"messages": QUESTION})
        self.assertEqual(status, 502, text)
        self.assertEqual(sum(r.requests for r in replicas), 2)
        replicas[2].mode = replicas[1].mode = "ok"
        for _ in range(3):
            self.assertEqual(router.ask("POST", "/v1/completions", {"prompt": "x"})[0], 200)

    def test_busy_replicas_are_passed_over(self):
        router, replicas = self.start("503", "ok", flags=("--policy", "round_robin"))
        for _ in range(4):
            self.assertEqual(router.ask("POST", "/v1/completions", {"prompt": "x"})[0], 200)
        self.assertEqual(replicas[1].requests, 4)
        replicas[1].mode = "503"  # the last one's reply is passed on
        status, _, text = router.ask("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual((status, json.loads(text)["error"]["message"]), (503, "scripted"))

    def test_no_retry_after_the_first_byte(self):
        router, replicas = self.start("cut_body", "cut_body")
        status, _, text = router.ask("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual(status, 502, text)
        self.assertEqual(sum(r.requests for r in replicas), 1)

    def test_a_broken_stream_ends_with_an_error(self):
        router, replicas = self.start("cut_stream", "cut_stream")
        for path, event in (("/v1/chat/completions", "data: {\"error\":"),
                            ("/v1/messages", "event: error\ndata: {\"type\":\"error\""),
                            ("/v1/responses", "event: error\ndata: {\"type\":\"error\"")):
            before = sum(r.requests for r in replicas)
            status, _, text = router.ask("POST", path, {"stream": True})
            self.assertEqual(status, 200)
            self.assertTrue(text.startswith("data: 1\n\n" + event), text)
            self.assertNotIn("unfinish", text)
            self.assertNotIn("[DONE]", text)
            self.assertEqual(sum(r.requests for r in replicas), before + 1)

    def test_the_breaker_opens_and_closes(self):
        router, (replica, _) = self.start("500", "500", flags=(
            "--policy", "round_robin", "--cb-failure-threshold", "2", "--cb-timeout-duration-secs",
            "5"))
        for _ in range(4):
            self.assertEqual(router.ask("POST", "/v1/completions", {})[0], 500)
        status, headers, text = router.ask("POST", "/v1/messages", {})
        self.assertEqual(status, 503, text)
        self.assertEqual(json.loads(text)["type"], "error")
        self.assertIn("Retry-After", headers)
        self.assertEqual(router.ask("GET", "/ready")[0], 503)
        self.assertEqual(router.metric("fathom_router_breaker_opened_total"), 2)
        replica.mode = "ok"
        router.wait_until(lambda: router.ask("POST", "/v1/completions", {})[0] == 200, "recovery")

    def test_a_slow_client_slows_the_replica_and_a_gone_one_ends_it(self):
        router, (replica,) = self.start("flood")
        client = socket.create_connection(("127.0.0.1", router.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                       b"application/json\r\nContent-Length: 2\r\n\r\n{}")
        client.recv(1000)
        sent = -1
        while sent != replica.sent:  # until nothing moves
            sent = replica.sent
            time.sleep(0.5 * SLACK)
        self.assertLess(sent, 64 << 20)
        self.assertFalse(replica.left.is_set())  # the replica waits; the client is not given up
        client.close()
        self.assertTrue(replica.left.wait(20 * SLACK))
        router.wait_for("fathom_router_outstanding_requests", 0)

    def test_prefill_and_decode_are_refused(self):
        done = subprocess.run([PROGRAM, "route", "--prefill", "http://a:1"], env=ENVIRONMENT,
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("not available", done.stderr)


class RealReplicas(unittest.TestCase):
    """Two servers with the bundled model behind one router."""

    def setUp(self):
        self.replicas = [Server("--max-num-seqs", "16") for _ in range(2)]
        self.router = Router([r.port for r in self.replicas], "--admin-api-key", "boss")
        for server in (self.router, *self.replicas):
            self.addCleanup(server.kill)
        self.router.wait_ready(2)

    def test_answers_equal_those_of_a_replica(self):
        direct = self.replicas[0]
        chat = {"messages": QUESTION, "temperature": 0}
        content = self.router.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        self.assertEqual(content, ANSWER)
        self.assertEqual(self.router.ask("GET", "/v1/models")[2].replace(" ", "")[:40],
                         direct.ask("GET", "/v1/models")[2].replace(" ", "")[:40])
        requests = (
            ("/v1/chat/completions", {**chat, "tools": TOOLS, "tool_choice": "required"}),
            ("/v1/completions", {"prompt": "1 + 1 =", "max_tokens": 8, "temperature": 0}),
            ("/v1/messages", {"messages": QUESTION, "max_tokens": 30, "temperature": 0}),
            ("/v1/messages?beta=true", {"messages": [], "max_tokens": 30}))

        def stripped(text):
            return re.sub(r'"(id|created|created_at)":("[^"]*"|\d+)|call_\w+|toolu_\w+|'
                          r'"cached_tokens":\d+|"cache_\w+":\d+|"prompt_cache_\w+":\d+|"input_tokens":\d+', "", text)
        for path, body in requests:
            for stream in (False, True):
                full = {**body, "stream": stream}
                through, straight = (s.ask("POST", path, full) for s in (self.router, direct))
                self.assertEqual(through[0], straight[0], through[2])
                self.assertEqual(stripped(through[2]), stripped(straight[2]))
                self.assertEqual(through[1].get("Content-Type"), straight[1].get("Content-Type"))

    def test_a_conversation_stays_where_its_prefix_is(self):
        for number in range(4):
            begin = f"Story {number}: " + "a long way to go. " * 60
            cached = []
            for turn in range(3):
                reply = self.router.post("/v1/completions", {
                    "prompt": begin + "And then? " * turn, "max_tokens": 1})
                details = reply["usage"].get("prompt_tokens_details") or {}
                cached.append(details.get("cached_tokens", 0))
            self.assertGreater(min(cached[1:]), 128, cached)

    def test_drain_and_return(self):
        url = f"http://127.0.0.1:{self.replicas[0].port}"
        boss = {"Authorization": "Bearer boss"}
        self.assertEqual(self.router.ask("POST", "/replicas", {"url": url, "action": "drain"})[0],
                         401)
        self.router.post("/replicas", {"url": url, "action": "drain"}, headers=boss)
        before = self.replicas[0].metric("vllm:prompt_tokens_total")
        for number in range(8):
            self.router.post("/v1/completions", {"prompt": f"{number} is", "max_tokens": 1})
        self.assertEqual(self.replicas[0].metric("vllm:prompt_tokens_total"), before)
        self.router.post("/replicas", {"url": url, "action": "add"}, headers=boss)
        self.router.post("/replicas", {"url": url, "action": "remove"}, headers=boss)
        self.router.post("/replicas", {"url": url, "action": "drain"}, 404, headers=boss)
        self.router.post("/replicas", {"url": url, "action": "stop"}, 400, headers=boss)

    def test_a_killed_replica_under_load(self):
        results, stopping = [], threading.Event()
        self.addCleanup(stopping.set)

        def load(number):
            while not stopping.is_set():
                stream = number % 2 == 0
                body = {"messages": QUESTION, "temperature": 0, "stream": stream}
                try:
                    status, _, text = self.router.ask("POST", "/v1/chat/completions", body,
                                                      {"X-Session-Id": str(number)})
                except (OSError, http.client.HTTPException) as error:
                    results.append(f"no reply: {error!r}")
                    continue
                if status != 200:
                    results.append("error" if json.loads(text)["error"]["message"] else text)
                elif stream and "[DONE]" not in text:
                    results.append("error" if '"error":' in text else f"silent end: {text}")
                else:
                    said = "".join(re.findall(r'"content":"([^"]*)"', text))
                    results.append("right" if said == ANSWER else f"wrong: {text}")
        threads = [threading.Thread(target=load, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        self.router.wait_until(lambda: results.count("right") >= 20, "right replies")
        self.replicas[1].process.send_signal(signal.SIGKILL)
        self.replicas[1].process.wait()
        before = results.count("right")
        self.router.wait_until(lambda: results.count("right") >= before + 40, "and without it")
        stopping.set()
        for thread in threads:
            thread.join()
        self.assertEqual(set(results) - {"right", "error"}, set())
        self.assertLessEqual(results.count("error"), 16)
        self.assertIn("right", results[-8:])

    def test_sigterm_finishes_answers(self):
        connection, response = self.router.open("POST", "/v1/chat/completions",
                                                {**LONG, "max_tokens": 300, "stream": True})
        response.read(10)
        self.router.process.send_signal(signal.SIGTERM)
        self.assertTrue(response.read().endswith(b"data: [DONE]\n\n"))
        connection.close()
        self.assertEqual(self.router.wait(), 0)

    def test_a_client_that_leaves_ends_its_request(self):
        connection, response = self.router.open("POST", "/v1/chat/completions",
                                                {**LONG, "stream": True})
        response.read(10)
        response.close()
        connection.close()
        for replica in self.replicas:
            replica.wait_for("vllm:num_requests_running", 0)
        self.router.wait_for("fathom_router_client_disconnects_total", 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/env python3
"""`fathom serve` with the bundled model over plain sockets: endpoints, errors, API keys, shutdown.

    server_test.py PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS
"""
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import unittest

from fathom_server import ANSWER, ENVIRONMENT, LONG, MODEL, PROGRAM, QUESTION, SLACK, Server
from faulty_server import SLOW, StepGate, faulty


class OneServer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--served-model-name", "tiny", "--served-model-name", "gpt-4o")

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "".join(cls.server.log[-20:])


class Interfaces(OneServer):
    def test_chat(self):
        reply = self.server.post("/v1/chat/completions",
                                 {"model": "tiny", "messages": QUESTION, "temperature": 0})
        self.assertEqual(reply["object"], "chat.completion")
        self.assertEqual(reply["choices"][0]["message"]["content"], ANSWER)
        self.assertEqual(reply["choices"][0]["finish_reason"], "stop")
        usage = reply["usage"]
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])

    def test_chat_streamed(self):
        events = self.server.events("/v1/chat/completions", {
            "messages": QUESTION, "temperature": 0, "stream_options": {"include_usage": True}})
        self.assertEqual(events[-1][1], "[DONE]")
        chunks = [data for _, data in events[:-1]]
        self.assertEqual(chunks[0]["choices"][0]["delta"]["role"], "assistant")
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        self.assertEqual(text, ANSWER)
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertGreater(chunks[-1]["usage"]["completion_tokens"], 5)

    def test_several_choices_and_logprobs(self):
        reply = self.server.post("/v1/chat/completions", {
            "messages": QUESTION, "n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2,
            "max_tokens": 4})
        self.assertEqual([c["index"] for c in reply["choices"]], [0, 1, 2])
        for choice in reply["choices"]:
            self.assertEqual(len(choice["logprobs"]["content"]), 4)
            self.assertEqual(len(choice["logprobs"]["content"][0]["top_logprobs"]), 2)

    def test_completions_with_several_prompts(self):
        reply = self.server.post("/v1/completions", {
            "prompt": ["The sun", "A river"], "max_tokens": 5, "temperature": 0, "echo": True})
        self.assertEqual(len(reply["choices"]), 2)
        self.assertTrue(reply["choices"][1]["text"].startswith("A river"))

    def test_anthropic_messages(self):
        body = {"model": "tiny", "max_tokens": 40, "messages": QUESTION, "temperature": 0}
        reply = self.server.post("/v1/messages", body)
        self.assertEqual(reply["content"], [{"type": "text", "text": ANSWER}])
        self.assertEqual(reply["stop_reason"], "end_turn")
        names = [name for name, _ in self.server.events("/v1/messages", body)]
        self.assertEqual(names[0], "message_start")
        self.assertEqual(names[-1], "message_stop")
        counted = self.server.post("/v1/messages/count_tokens", {"model": "tiny", "messages": QUESTION})
        self.assertEqual(counted["input_tokens"], reply["usage"]["input_tokens"])

    def test_responses(self):
        body = {"model": "tiny", "input": "What is 12 + 30?", "temperature": 0}
        reply = self.server.post("/v1/responses", body)
        self.assertEqual(reply["status"], "completed")
        texts = [part["text"] for item in reply["output"] if item["type"] == "message"
                 for part in item["content"]]
        self.assertEqual("".join(texts), ANSWER)
        names = [name for name, _ in self.server.events("/v1/responses", body)]
        self.assertEqual((names[0], names[-1]), ("response.created", "response.completed"))

    def test_generate_and_tokens(self):
        tokens = self.server.post("/tokenize", {"prompt": "What is 12 + 30?"})["tokens"]
        self.assertEqual(self.server.post("/detokenize", {"tokens": tokens})["prompt"],
                         "What is 12 + 30?")
        reply = self.server.post("/generate", {
            "input_ids": tokens, "sampling_params": {"max_new_tokens": 3, "temperature": 0},
            "return_logprob": True})
        self.assertEqual(len(reply["output_ids"]), 3)

    def test_structured_output(self):
        schema = {"type": "object", "required": ["n"], "additionalProperties": False,
                  "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}}
        reply = self.server.post("/v1/chat/completions", {
            "messages": QUESTION, "seed": 3, "response_format": {
                "type": "json_schema", "json_schema": {"name": "digit", "schema": schema}}})
        parsed = json.loads(reply["choices"][0]["message"]["content"])
        self.assertIn(parsed["n"], range(1, 10))
        reply = self.server.post("/v1/chat/completions", {
            "messages": QUESTION, "guided_choice": ["yes", "no"], "seed": 4})
        self.assertIn(reply["choices"][0]["message"]["content"], ("yes", "no"))
        error = self.server.post("/v1/chat/completions", {
            "messages": QUESTION, "guided_regex": "("}, status=400)["error"]
        self.assertEqual(error["param"], "guided_regex", error)
        self.assertIn("regex", error["message"])

    def test_required_tool_call(self):
        tool = {"type": "function", "function": {
            "name": "get_weather", "description": "Weather of a city",
            "parameters": {"type": "object", "required": ["city"], "additionalProperties": False,
                           "properties": {"city": {"type": "string", "maxLength": 20}}}}}
        reply = self.server.post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [tool], "tool_choice": "required", "temperature": 0})
        choice = reply["choices"][0]
        self.assertEqual(choice["finish_reason"], "tool_calls")
        call = choice["message"]["tool_calls"][0]["function"]
        self.assertEqual(call["name"], "get_weather")
        self.assertIsInstance(json.loads(call["arguments"])["city"], str)

    def test_models_version_and_page(self):
        _, _, text = self.server.ask("GET", "/v1/models")
        self.assertEqual([m["id"] for m in json.loads(text)["data"]], ["tiny", "gpt-4o"])
        self.assertEqual(self.server.ask("GET", "/v1/models/gpt-4o")[0], 200)
        self.assertEqual(self.server.ask("GET", "/v1/models/other")[0], 404)
        for path in ("/version", "/get_model_info", "/server_info", "/openapi.json"):
            status, _, text = self.server.ask("GET", path)
            self.assertEqual(status, 200, path)
            json.loads(text)
        status, headers, text = self.server.ask("GET", "/")
        self.assertEqual(status, 200)
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertIn("<!doctype html>", text[:100].lower())

    def test_a_long_prefix_is_computed_once(self):
        story = "The quick brown fox jumps over the lazy dog. " * 40
        body = {"messages": [{"role": "user", "content": story + "Why?"}], "max_tokens": 1}
        self.server.post("/flush_cache", {})
        first = self.server.post("/v1/chat/completions", body)["usage"]
        second = self.server.post("/v1/chat/completions", body)["usage"]
        cached = [u["prompt_tokens_details"]["cached_tokens"] for u in (first, second)]
        self.assertEqual(cached[0], 0)
        self.assertGreater(cached[1], first["prompt_tokens"] - 130)
        salted = self.server.post("/v1/chat/completions", {**body, "cache_salt": "other"})["usage"]
        self.assertEqual(salted["prompt_tokens_details"]["cached_tokens"], 0)


class Errors(OneServer):
    def check(self, body, status, param=None, code=None, path="/v1/chat/completions"):
        error = self.server.post(path, body, status=status)["error"]
        self.assertEqual(error["param"], param, error)
        if code:
            self.assertEqual(error["code"], code)
        return error["message"]

    def test_name_field_value_and_limit(self):
        message = self.check({"messages": QUESTION, "temperature": 3}, 400, "temperature")
        self.assertIn("3", message)
        self.assertIn("2", message)
        self.check({"messages": []}, 400, "messages")
        self.check({}, 400, "messages")
        self.check({"messages": QUESTION, "n": 33}, 400, "n")
        self.check("{", 400)
        self.check('{"messages": "\\ud800"}', 400)

    def test_context_length(self):
        message = self.check({"messages": QUESTION, "max_tokens": 10 ** 6}, 400,
                             "messages", "context_length_exceeded")
        self.assertIn("1000000", message)

    def test_routes(self):
        self.assertEqual(self.server.ask("GET", "/nothing")[0], 404)
        status, headers, _ = self.server.ask("GET", "/v1/chat/completions")
        self.assertEqual((status, headers["Allow"]), (405, "POST, OPTIONS"))
        status, _, text = self.server.ask("POST", "/v1/messages", "{}")
        self.assertEqual((status, json.loads(text)["type"]), (400, "error"))

    def test_log_lines_stay_lines(self):
        self.server.ask("POST", "/v1/chat/completions",
                        {"messages": QUESTION, "max_tokens": 1, "evil\nline\x1b[31m": 1},
                        {"X-Request-Id": "abc-1"})
        self.server.wait_until(lambda: any("request id=abc-1 " in line for line in self.server.log),
                               "the request's line")
        log = "".join(self.server.log)
        self.assertNotIn("\x1b[31m", log)
        self.assertFalse([line for line in self.server.log if line.startswith("line")])


class Lanes(unittest.TestCase):
    def cached_pages(self, server):
        """Cached pages of each data-parallel rank."""
        pages = {}
        for line in server.ask("GET", "/metrics")[2].splitlines():
            if line.startswith("fathom_kv_pages{") and 'state="cached"' in line:
                pages[re.search(r'dp_rank="(\d+)"', line).group(1)] = int(line.rsplit(" ", 1)[1])
        return [pages["0"], pages["1"]]

    def test_a_header_chooses_the_lane_and_the_placement_is_told(self):
        server = Server("--tp", "1", "--dp", "2", "-t", "2", "--no-log-requests")
        self.addCleanup(server.kill)
        placement = json.loads(server.ask("GET", "/server_info")[2])["placement"]
        self.assertEqual(placement, {"world_size": 2, "tensor_parallel_size": 1,
                                     "data_parallel_size": 2, "enable_expert_parallel": False,
                                     "ranks_of_nodes": [[0, 1]]})
        expected = [0, 0]
        # The lane with the least work would be the other one each second time.
        for number, lane in enumerate((1, 1, 1, 0, 0, 1)):
            body = {"prompt": [number + 5] * 70, "max_tokens": 2, "ignore_eos": True}
            server.post("/v1/completions", body, headers={"X-data-parallel-rank": str(lane)})
            expected[lane] += 1  # a page of 64 tokens
            server.wait_until(lambda: self.cached_pages(server) == expected,
                              f"{expected} pages are cached")
        for text, words in (("one", "the header X-Data-Parallel-Rank is 'one', must be a rank's number"),
                            ("-1", "the header X-Data-Parallel-Rank is '-1', must be a rank's number"),
                            ("2", "the data-parallel rank is 2, there are 2: 0 to 1")):
            reply = server.post("/v1/completions", {"prompt": "Hi"}, 400,
                                headers={"X-Data-Parallel-Rank": text})
            self.assertIn(words, reply["error"]["message"])
        self.assertEqual(server.stop(), 0)


class Ends(unittest.TestCase):
    def test_a_client_that_leaves_frees_its_pages(self):
        server = faulty(SLOW)
        for _ in range(3):
            connection, response = server.open("POST", "/v1/chat/completions",
                                               {**LONG, "stream": True})
            response.read(200)
            response.close()
            connection.close()
        server.wait_for("vllm:num_requests_running", 0)
        server.wait_for("vllm:num_requests_waiting", 0)
        self.assertEqual(server.metric("vllm:kv_cache_usage_perc"), 0)
        self.assertEqual(server.metric("fathom_client_disconnects_total"), 3)
        self.assertEqual(server.stop(), 0)

    def test_abort_by_id(self):
        server = faulty(SLOW)
        connection, response = server.open("POST", "/v1/chat/completions", {**LONG, "stream": True},
                                           {"X-Request-Id": "to-be-aborted"})
        response.read(100)
        aborted = server.post("/abort_request", {"rid": "to-be-aborted"})
        self.assertEqual(aborted, {"aborted": 1})
        self.assertNotIn("[DONE]", response.read().decode())
        connection.close()
        self.assertEqual(server.stop(), 0)

    def test_a_full_queue_is_429(self):
        server = faulty(SLOW, "--max-num-seqs", "1", "--max-queued-requests", "1")
        streams = []
        for running, waiting in ((1, 0), (1, 1)):
            streams.append(server.open("POST", "/v1/chat/completions", {**LONG, "stream": True}))
            server.wait_for("vllm:num_requests_running", running)
            server.wait_for("vllm:num_requests_waiting", waiting)
        status, headers, text = server.ask("POST", "/v1/chat/completions", {"messages": QUESTION})
        self.assertEqual((status, json.loads(text)["error"]["code"]), (429, "queue_full"))
        self.assertIn("Retry-After", headers)
        for connection, _ in streams:
            connection.close()
        self.assertEqual(server.stop(), 0)

    def test_sigterm_lets_answers_end_and_refuses_new_ones(self):
        gate = StepGate()
        server = gate.serve("--shutdown-timeout", str(int(60 * SLACK)))
        results = []
        body = {**LONG, "max_tokens": 100}
        thread = threading.Thread(target=lambda: results.append(
            server.ask("POST", "/v1/chat/completions", body)))
        thread.start()
        gate.allow(3)
        gate.wait_until_held()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.ask("GET", "/ready")[0] == 503, "the drain")
        status = server.ask("POST", "/v1/chat/completions", {"messages": QUESTION})[0]
        self.assertEqual(status, 503)
        self.assertEqual(server.ask("GET", "/health")[0], 200)
        gate.open()
        thread.join()
        self.assertEqual(results[0][0], 200)
        self.assertEqual(json.loads(results[0][2])["usage"]["completion_tokens"], 100)
        self.assertEqual(server.wait(), 0)

    def test_shutdown_timeout_ends_what_is_left(self):
        server = faulty(SLOW, "--shutdown-timeout", "1")
        connection, response = server.open("POST", "/v1/chat/completions", {**LONG, "stream": True})
        response.read(50)
        server.process.send_signal(signal.SIGTERM)
        text = response.read().decode()
        self.assertIn('"error"', text)
        self.assertNotIn("[DONE]", text.split('"error"')[0])
        self.assertEqual(server.wait(), 0)
        connection.close()

    def test_keys(self):
        server = Server("--api-key", "secret")
        self.assertEqual(server.ask("GET", "/health")[0], 200)
        self.assertEqual(server.ask("GET", "/v1/models")[0], 401)
        for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
            self.assertEqual(server.ask("GET", "/v1/models", headers=headers)[0], 200)
        self.assertEqual(server.ask("GET", "/metrics")[0], 401)
        self.assertEqual(server.stop(signal.SIGINT), 0)

    def test_a_launch_line_of_another_engine_with_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "serving.yaml")
            with open(path, "w") as file:
                file.write("served-model-name: [from-file, alias]\nmax_num_seqs: 3\n"
                           "api_key: [one, two]\nlog-level: debug\n")
            server = Server("--config", path, "--trust-remote-code", "--tp", "1", "--page-size",
                            "64", "--mem-fraction-static", "0.9", "--disable-log-requests",
                            environment={"FATHOM_MAX_NUM_SEQS": "5"})
        key = {"Authorization": "Bearer two"}
        status, _, text = server.ask("GET", "/v1/models", headers=key)
        self.assertEqual(status, 200)
        self.assertEqual([one["id"] for one in json.loads(text)["data"]], ["from-file", "alias"])
        _, _, text = server.ask("GET", "/server_info", headers=key)
        self.assertEqual(json.loads(text)["max_num_seqs"], 5)
        self.assertEqual(server.ask("GET", "/v1/models")[0], 401)
        self.assertEqual(server.stop(), 0)
        log = "".join(server.log)
        self.assertIn("--trust-remote-code has no effect: ", log)
        self.assertIn("--mem-fraction-static has no effect: ", log)
        self.assertNotIn("path=", log)

    def test_a_flag_lets_clients_have_priority(self):
        body = {"prompt": "Hi", "max_tokens": 1, "priority": -7}
        for flags, status in (((), 400), (("--scheduling-policy", "fcfs"), 400),
                              (("--enable-priority",), 200),
                              (("--scheduling-policy", "priority"), 200),
                              (("--enable-priority-scheduling",), 200)):  # SGLang's
            server = Server("--strict", *flags)
            self.addCleanup(server.kill)
            reply = server.post("/v1/completions", body, status)
            if status != 200:
                self.assertEqual(reply["error"]["param"], "priority", flags)
            self.assertEqual(server.stop(), 0)

    def test_a_service_manager_is_told(self):
        with tempfile.TemporaryDirectory() as folder, \
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            path = os.path.join(folder, "notify")
            manager.bind(path)
            manager.settimeout(20 * SLACK)
            server = Server(environment={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "200000"})
            self.assertEqual(manager.recv(64), b"READY=1")
            self.assertEqual(manager.recv(64), b"WATCHDOG=1")
            server.process.send_signal(signal.SIGTERM)
            said = manager.recv(64)
            while said == b"WATCHDOG=1":
                said = manager.recv(64)
            self.assertEqual(said, b"STOPPING=1")
            self.assertEqual(server.wait(), 0)

    def test_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            done = subprocess.run([PROGRAM, "serve", MODEL, "--port", port], capture_output=True,
                                  timeout=30 * SLACK, env=ENVIRONMENT, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"127.0.0.1:{port}", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)

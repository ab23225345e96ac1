#!/usr/bin/env python3
"""`fathom serve --role prefill` and `--role decode` as processes over loopback: answers are those of one
server, or errors; a side that is gone, strangers at the port, and sides that do not belong together.

    separation_server_test.py PROGRAM SOURCE_DIR [TEST…]
"""
import http.client
import json
import os
import socket
import struct
import subprocess
import threading
import unittest

from fathom_server import ENVIRONMENT, MODEL, PROGRAM, QUESTION, SLACK, Server
from separated_servers import FLAGS, SECRET, OneServer, Pair, labelled, said, secret_file, story

SCHEMA = {"type": "object", "required": ["name", "age"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}


def requests():
    """(path, body): around a page's tokens, several chunks, equal beginnings, every kind of sampling.
    A word is about 1.4 tokens."""
    yield "/v1/chat/completions", {"messages": QUESTION, "temperature": 0}
    for number, words in enumerate((1, 40, 60, 130, 300)):
        yield "/v1/completions", {"prompt": story(words), "max_tokens": 8, "temperature": 0,
                                  "logprobs": 3}
        yield "/v1/completions", {"prompt": story(min(words, 80), number), "max_tokens": 10, "seed": 7,
                                  "temperature": 0.9, "top_p": 0.9, "logprobs": 2}
    yield "/v1/completions", {"prompt": story(150, 8), "n": 4, "seed": 3, "temperature": 1,
                              "max_tokens": 8, "logprobs": 1}
    yield "/v1/completions", {"prompt": story(80, 9), "max_tokens": 8, "temperature": 0,
                              "presence_penalty": 0.7, "frequency_penalty": 0.3}
    yield "/v1/completions", {"prompt": story(80, 10), "max_tokens": 4, "temperature": 0,
                              "prompt_logprobs": 1}
    yield "/v1/chat/completions", {
        "messages": [{"role": "user", "content": story(80, 11)}], "temperature": 0,
        "max_tokens": 60, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    yield "/v1/completions", {"prompt": [5 + i % 90 for i in range(129)], "max_tokens": 1,
                              "temperature": 0}


class Answers(unittest.TestCase):
    """Two rounds: in the second all prompts are cached on both sides."""

    def compare(self, *both):
        plain = OneServer.with_flags(*both)
        pair = Pair(*both)
        self.addCleanup(pair.kill)
        for turn in range(2):
            for path, body in requests():
                self.assertEqual(said(pair.decode.post(path, body)), plain.said(path, body),
                                 f"round {turn}: {body}")
        self.assertGreaterEqual(pair.outcome("arrived"), 8)
        self.assertEqual(pair.outcome("failed"), 0)
        accepted = labelled(pair.decode, "fathom_transfer_pieces_total", 'verdict="accepted"')
        self.assertGreaterEqual(accepted, 16)
        self.assertEqual(pair.decode.metric("fathom_transfer_pieces_total"), accepted)
        pair.prefill.wait_for("fathom_transfer_sent_pieces_total", accepted)
        self.assertGreater(pair.decode.metric("fathom_transfer_received_bytes_total"), 1e6)
        pair.wait_for_no_page()
        return pair

    def test_equal_to_one_server(self):
        pair = self.compare()
        body = {"prompt": story(100, 20), "max_tokens": 20, "temperature": 0}
        got = "".join(data["choices"][0]["text"] for _, data in
                      pair.decode.events("/v1/completions", body) if data != "[DONE]")
        choices, _, _ = OneServer.with_flags().said("/v1/completions", body)
        self.assertEqual(got, choices[0]["text"])

    def test_equal_with_drafts(self):
        self.compare("--mtp", "2", "--mtp-always")

    def test_pages_by_tcp_and_through_shared_memory(self):
        bodies = [body for _, body in requests() if len(body.get("prompt", "")) > 500]
        expected = [OneServer.with_flags().said("/v1/completions", body) for body in bodies]
        for backend in ("tcp", "ucx"):
            with self.subTest(backend):
                try:
                    pair = Pair("--transfer-backend", backend)
                except AssertionError as problem:  # it did not start
                    self.assertEqual(backend, "ucx")
                    self.assertRegex(str(problem), "--transfer-backend ucx: .*UCX")
                    self.skipTest("UCX is not here")
                self.addCleanup(pair.kill)
                got = [said(pair.decode.post("/v1/completions", body)) for body in bodies]
                self.assertEqual(got, expected)
                pieces = pair.decode.metric("fathom_transfer_pieces_total")
                self.assertGreater(pieces, 10)
                self.assertEqual(pair.decode.metric("fathom_transfer_received_by_ucx_total"),
                                 pieces if backend == "ucx" else 0)
                pair.prefill.wait_for("fathom_transfer_sent_by_ucx_total",
                                      pieces if backend == "ucx" else 0)

    def test_hits_of_the_prefill_side_are_reported(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        body = {"prompt": story(250, 30), "max_tokens": 1, "temperature": 0}

        def cached():
            details = pair.decode.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
            return (details or {}).get("cached_tokens", 0)
        self.assertEqual(cached(), 0)
        pair.decode.ask("POST", "/flush_cache")
        hits = cached()
        self.assertGreater(hits, 256)
        self.assertEqual(hits % 64, 0)
        self.assertEqual(pair.decode.metric("fathom_prefill_cached_tokens_total"), hits)

    def test_a_prefill_server_answers_nobody(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        status, headers, text = pair.prefill.ask("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual(status, 503, text)
        self.assertIn("--role prefill", text)
        self.assertIn("Retry-After", headers)
        self.assertEqual(pair.prefill.ask("GET", "/ready")[0], 200)


class Ranks(unittest.TestCase):
    """--prefill-ranks and --decode-ranks: one process."""

    def compare(self, *flags, both=()):
        plain = OneServer.with_flags(*both)
        server = Server(*FLAGS, *both, *flags, "--transfer-digests")
        self.addCleanup(server.kill)
        tokens = {"prompt": 0, "generation": 0}
        for turn in range(2):
            for path, body in requests():
                expected = plain.said(path, body)
                self.assertEqual(said(server.post(path, body)), expected, f"round {turn}: {body}")
                tokens["prompt"] += expected[1] * body.get("n", 1)
                tokens["generation"] += expected[2]
        self.assertGreaterEqual(
            labelled(server, "fathom_prefill_orders_total", 'outcome="arrived"'), 8)
        self.assertEqual(labelled(server, "fathom_prefill_orders_total", 'outcome="failed"'), 0)
        self.assertEqual(server.metric("fathom_transfer_pieces_total"),
                         labelled(server, "fathom_transfer_pieces_total", 'verdict="accepted"'))
        for name, count in tokens.items():
            self.assertEqual(server.metric(f"vllm:{name}_tokens_total"), count, name)
        for state in ("used", "quarantined"):
            server.wait_until(
                lambda st=state: labelled(server, "fathom_kv_pages", f'state="{st}"') == 0,
                f"no page {state}")
        return server

    def test_equal_to_one_engine(self):
        server = self.compare("--dp", "2", "--prefill-ranks", "1", "--decode-ranks", "0")
        for rank, role in ((0, "decode"), (1, "prefill")):
            self.assertEqual(
                labelled(server, "fathom_lane_role", f'dp_rank="{rank}",role="{role}"'), 1)
        self.assertEqual(server.metric("fathom_role_changes_total"), 0)
        self.assertGreater(labelled(server, "fathom_kv_pages", 'dp_rank="1",state="cached"'), 0)
        placement = json.loads(server.ask("GET", "/server_info")[2])["placement"]
        self.assertEqual(placement["prefill_ranks"], [1])
        self.assertEqual(placement["decode_ranks"], [0])
        status, _, text = server.ask("POST", "/v1/completions", {"prompt": "x"},
                                     {"X-Data-Parallel-Rank": "1"})
        self.assertEqual(status, 400, text)
        self.assertIn("the data-parallel rank is 1, which computes prompts", text)
        self.assertEqual(server.stop(), 0)

    def test_weights_are_loaded_once(self):
        def resident(*flags, lanes=({},)):
            server = Server("--max-total-tokens", "4096", "--threads", "2", "--dp", "2", *flags)
            self.addCleanup(server.kill)
            for lane in lanes:  # each rank has used its cache and working space
                server.post("/v1/completions", {"prompt": story(200), "max_tokens": 2},
                            headers=lane)
            return server.resident_bytes()
        together = resident(lanes=[{"X-Data-Parallel-Rank": lane} for lane in "01"])
        apart = resident("--prefill-ranks", "0", "--decode-ranks", "1")
        weights = sum(file.stat().st_size for file in os.scandir(MODEL)
                      if file.name.endswith(".safetensors"))
        self.assertLess(apart, together + weights // 2)

    def test_equal_with_drafts_and_tensor_parallel_ranks(self):
        self.compare("--dp", "2", "--prefill-ranks", "0,1", "--decode-ranks", "2,3",
                     both=("--tp", "2", "--mtp", "2", "--mtp-always", "--dtype", "float32"))

    def test_a_full_decode_side_is_helped(self):
        """Prefill lanes take whole requests while all slots of the others are taken."""
        server = Server(*FLAGS, "--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1",
                        "--max-num-seqs", "1")
        self.addCleanup(server.kill)
        long = {"prompt": "Once", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        streams = [server.open("POST", "/v1/completions", long) for _ in range(2)]
        server.wait_until(
            lambda: labelled(server, "fathom_lane_role", 'dp_rank="0",role="both"') == 1,
            "another role")
        server.post("/v1/completions", {"prompt": "Twice", "max_tokens": 3})
        self.assertEqual(server.metric("fathom_role_requests_total"), 1)
        self.assertEqual(labelled(server, "fathom_role_changes_total", 'role="prefill"'), 1)
        for connection, _ in streams:
            connection.close()
        server.wait_until(
            lambda: labelled(server, "fathom_lane_role", 'dp_rank="0",role="prefill"') == 1,
            "its own role")


# Words of a prompt of more than `most_rows_here` (512) tokens.
LONG = 450


class Faults(unittest.TestCase):
    def test_without_the_prefill_side(self):
        """Short prompts and those of an idle server are computed here, others get 503."""
        pair = Pair()
        self.addCleanup(pair.kill)
        pair.prefill.kill()
        pair.wait_ready(0)
        for words in (60, LONG):
            body = {"prompt": story(words, 40), "max_tokens": 5, "temperature": 0}
            self.assertEqual(said(pair.decode.post("/v1/completions", body)),
                             OneServer.with_flags().said("/v1/completions", body))
        self.assertEqual(labelled(pair.decode, "fathom_prefill_fallbacks_total", "computed_here"), 2)
        connection, response = pair.decode.open("POST", "/v1/completions", {
            "prompt": "Once", "max_tokens": 6000, "ignore_eos": True, "stream": True})
        response.read(10)
        pair.decode.wait_for("vllm:num_requests_running", 1)
        status, headers, text = pair.decode.ask("POST", "/v1/completions",
                                                {"prompt": story(LONG, 41), "max_tokens": 5})
        self.assertEqual(status, 503, text)
        self.assertIn("Retry-After", headers)
        self.assertIn("no prefill side takes orders", text)
        pair.decode.post("/v1/completions", {"prompt": story(60, 41), "max_tokens": 5})
        connection.close()
        pair.prefill = pair.start_prefill()
        pair.wait_ready()
        sent = pair.outcome("arrived")
        pair.decode.post("/v1/completions", {"prompt": story(100, 42), "max_tokens": 5})
        self.assertEqual(pair.outcome("arrived"), sent + 1)

    def test_the_decode_side_killed(self):
        """Its orders end, and the next one gets its own."""
        pair = Pair()
        self.addCleanup(pair.kill)
        thread = threading.Thread(target=lambda: self.ask_and_forget(pair.decode))
        thread.start()
        pair.prefill.wait_until(
            lambda: pair.prefill.metric("fathom_transfer_orders_total") >= 1, "an order")
        pair.decode.process.kill()
        thread.join()
        pair.prefill.wait_for("fathom_transfer_sessions", 0)
        pair.prefill.wait_until(lambda: pair.prefill.metric("vllm:num_requests_running") +
                                pair.prefill.metric("vllm:num_requests_waiting") == 0, "no orders")
        self.assertEqual(labelled(pair.prefill, "fathom_kv_pages", 'state="used"'), 0)
        pair.decode = Server(*pair.flags, "--role", "decode", "--prefill", pair.address)
        pair.wait_ready()
        pair.decode.post("/v1/completions", {"prompt": story(100, 61), "max_tokens": 3})
        self.assertEqual(pair.outcome("arrived"), 1)

    @staticmethod
    def ask_and_forget(server):
        try:
            server.ask("POST", "/v1/completions", {"prompt": story(1500, 60), "max_tokens": 3})
        except (OSError, http.client.HTTPException):
            pass


class Strangers(unittest.TestCase):
    def test_garbage_at_the_port(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        before = pair.prefill.resident_bytes()
        frame = struct.Struct("<IIQ")
        magic = 0x46546846
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), frame.pack(magic, 1, 1 << 62),
                     frame.pack(magic, 7, 1 << 40), frame.pack(magic, 12, 1 << 20)):
            with socket.create_connection(("127.0.0.1", pair.port)) as stranger:
                stranger.settimeout(60 * SLACK)
                try:
                    stranger.sendall(data)
                    self.assertEqual(stranger.recv(100), b"")
                except ConnectionError:
                    pass
        pair.prefill.wait_until(
            lambda: labelled(pair.prefill, "fathom_transfer_refused_connections_total",
                             'reason="malformed"') == 5, "five counted")
        self.assertLess(pair.prefill.resident_bytes() - before, 64 << 20)
        pair.decode.post("/v1/completions", {"prompt": story(100, 70), "max_tokens": 3})
        self.assertEqual(pair.outcome("arrived"), 1)

    def refused(self, pair, *flags):
        done = subprocess.run([PROGRAM, "serve", MODEL, "--port", "0", "--role", "decode",
                               "--prefill", pair.address, *flags], env=ENVIRONMENT, text=True,
                              capture_output=True, timeout=60 * SLACK)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_sides_that_do_not_belong_together(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        secret = ("--transfer-secret-file", SECRET)
        text = self.refused(pair, *FLAGS, *secret, "--kv-cache-dtype", "fp8")
        self.assertIn("--kv-cache-dtype is 'fp8' on the decode side and 'bf16' on the prefill side",
                      text)
        text = self.refused(pair, *FLAGS, *secret, "--mtp", "1")
        self.assertIn("drafts by the MTP layer is 'on' on the decode side and 'off'", text)
        text = self.refused(pair, *FLAGS, "--transfer-secret-file", secret_file("x" * 40))
        self.assertIn("the transfer secrets of the decode side and the prefill side differ", text)
        self.assertEqual(labelled(pair.prefill, "fathom_transfer_refused_connections_total",
                                  'reason="secret"'), 1)
        self.assertEqual(labelled(pair.prefill, "fathom_transfer_refused_connections_total",
                                  'reason="facts"'), 2)


class Flags(unittest.TestCase):
    def test_refused_values(self):
        for flags, words in (
                (("--role", "prefill"), "--role prefill needs --transfer-addr"),
                (("--role", "decode"), "--role decode needs --prefill"),
                (("--prefill", "127.0.0.1:1"), "--prefill is 127.0.0.1:1 with --role both"),
                (("--role", "decode", "--prefill", "127.0.0.1:1", "--transfer-addr",
                  "127.0.0.1:2"), "--transfer-addr is 127.0.0.1:2 with --role decode"),
                (("--role", "decode", "--prefill", "10.0.0.1:1"),
                 "only an address of this machine is allowed without --transfer-secret-file"),
                (("--transfer-addr", "0.0.0.0:1"), "only an address of this machine"),
                (("--transfer-addr", "127.0.0.1"), "--transfer-addr: "),
                (("--transfer-addr", "127.0.0.1:1", "--transfer-secret", "short"),
                 "--transfer-secret has 5 bytes, must have 16 or more"),
                (("--transfer-addr", "127.0.0.1:1", "--transfer-secret-file", "/none"),
                 "--transfer-secret-file: /none cannot be read"),
                (("--transfer-addr", "127.0.0.1:1", "--kv-offload-gib", "1"), "--kv-offload-gib"),
                (("--role", "decode", "--prefill", "127.0.0.1:1,127.0.0.1:x"), "--prefill: "),
                (("--dp", "2", "--prefill-ranks", "0"),
                 "--prefill-ranks is 0 without --decode-ranks"),
                (("--dp", "2", "--decode-ranks", "0,1"),
                 "--decode-ranks is 0,1 without --prefill-ranks"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "2"),
                 "--decode-ranks names rank 2, the ranks of --tp and --dp are 0 to 1"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "0"),
                 "rank 0 is named 2 times by --prefill-ranks and --decode-ranks"),
                (("--dp", "3", "--prefill-ranks", "0", "--decode-ranks", "2"),
                 "rank 1 is neither in --prefill-ranks nor in --decode-ranks"),
                (("--dp", "2", "--prefill-ranks", "0,", "--decode-ranks", "1"),
                 "--prefill-ranks is '0,', expected numbers of ranks with commas"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "-1"),
                 "--decode-ranks is '-1', expected numbers of ranks with commas"),
                (("--tp", "2", "--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1,2,3"),
                 "ranks 0 to 1 are one data-parallel rank of --tp 2: they have one role"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1", "--role", "prefill",
                  "--transfer-addr", "127.0.0.1:1"), "--prefill-ranks is 0 with --role prefill"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1", "--transfer-addr",
                  "127.0.0.1:1"), "--prefill-ranks is 0 with --transfer-addr 127.0.0.1:1"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1",
                  "--enable-expert-parallel"), "--prefill-ranks is 0 with --enable-expert-parallel"),
                (("--dp", "2", "--prefill-ranks", "0", "--decode-ranks", "1", "--kv-offload-gib",
                  "1"), "--kv-offload-gib")):
            done = subprocess.run([PROGRAM, "serve", MODEL, "--port", "0", *flags], text=True,
                                  capture_output=True, env=ENVIRONMENT, timeout=60 * SLACK)
            self.assertIn(done.returncode, (1, 2), f"{flags}\n{done.stderr}")
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)

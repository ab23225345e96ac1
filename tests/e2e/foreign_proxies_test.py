#!/usr/bin/env python3
"""Proxies of other engines before a prefill and a decode server: vLLM's, which asks one after the other,
and SGLang's, which asks both at once. Answers are those of one server.

    foreign_proxies_test.py PROGRAM SOURCE_DIR [TEST…]
"""
import concurrent.futures
import json
import os
import unittest
import uuid

from fathom_server import QUESTION, SOURCE, Server
from separated_servers import FLAGS, SECRET, OneServer, Pair, free_port, labelled, said, story


def recorded(name):
    with open(os.path.join(SOURCE, "tests/data/proxies", name), encoding="utf-8") as file:
        return json.load(file)


def filled(request, client, **words):
    body = {key: words.get(value, value) if isinstance(value, str) else value
            for key, value in request.items()}
    assert body.pop("CLIENT")
    return {**client, **body}


def vllm_proxy(prefill, decode, path, client):
    """What vLLM's proxy does with a client's body; returns both replies."""
    exchange = recorded("vllm.json")
    headers = {"X-Request-Id": str(uuid.uuid4()), "Authorization": "Bearer none"}
    body = filled(exchange["prefill"]["request"], {k: v for k, v in client.items() if k != "min_tokens"})
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    first = prefill.post(path, body, headers=headers)
    params = first["kv_transfer_params"]
    form = exchange["prefill"]["reply"]
    assert {k: type(v) for k, v in params.items()} == {k: type(v) for k, v in form.items()}, params
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    body = filled(exchange["decode"]["request"], client, REPLY=params)
    return first, decode.post(path, body, headers=headers)


def cases():
    for number, words in enumerate((5, 70, 200)):
        yield "/v1/completions", {"prompt": story(words, number), "max_tokens": 12, "temperature": 0,
                                  "logprobs": 2, "min_tokens": 3}
    yield "/v1/completions", {"prompt": story(120, 7), "max_tokens": 10, "n": 3, "seed": 5,
                              "temperature": 0.9}
    yield "/v1/chat/completions", {"messages": QUESTION, "temperature": 0}
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": story(90, 9)}],
                                   "max_completion_tokens": 14, "temperature": 0.7, "seed": 1}


class TwoPrefillServers:
    """Two prefill servers and a decode server that names both."""

    def __init__(self):
        self.ports = [free_port(), free_port()]
        flags = (*FLAGS, "--transfer-secret-file", SECRET)
        self.prefill = [Server(*flags, "--role", "prefill", "--transfer-addr", f"127.0.0.1:{port}")
                        for port in self.ports]
        self.decode = Server(*flags, "--role", "decode", "--transfer-digests", "--prefill",
                             ",".join(f"127.0.0.1:{port}" for port in self.ports))
        self.decode.wait_for("fathom_prefill_servers_ready", 2)

    def kill(self):
        for server in (*self.prefill, self.decode):
            server.kill()


class Vllm(unittest.TestCase):
    def test_answers_are_those_of_one_server(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        for path, client in cases():
            first, second = vllm_proxy(pair.prefill, pair.decode, path, client)
            self.assertEqual(said(second), OneServer.with_flags().said(path, client), client)
            self.assertEqual(first["usage"]["completion_tokens"], client.get("n", 1))
            pages = -(-first["usage"]["prompt_tokens"] // 64)
            self.assertEqual(first["kv_transfer_params"]["remote_block_ids"], list(range(pages)))
            self.assertNotIn("kv_transfer_params", second)
        self.assertEqual(pair.outcome("failed"), 0)
        self.assertGreaterEqual(pair.outcome("arrived"), 4)
        pair.wait_for_no_page()

    def test_the_server_that_has_the_prompt_sends_it(self):
        """In turns, whatever the text's hash says. Its cache has all full pages by then."""
        three = TwoPrefillServers()
        self.addCleanup(three.kill)
        for number in range(4):
            before = three.decode.metric("fathom_prefill_cached_tokens_total")
            client = {"prompt": story(200, 20 + number), "max_tokens": 2, "temperature": 0}
            vllm_proxy(three.prefill[number % 2], three.decode, "/v1/completions", client)
            hits = three.decode.metric("fathom_prefill_cached_tokens_total") - before
            self.assertGreater(hits, 192, f"request {number}")
            orders = [server.metric("fathom_transfer_orders_total") for server in three.prefill]
            self.assertEqual(orders, [number // 2 + 1, (number + 1) // 2])

    def test_parameters_that_are_wrong_or_old(self):
        """They cost time and change no token."""
        pair = Pair()
        self.addCleanup(pair.kill)
        plain = Server(*FLAGS)
        self.addCleanup(plain.kill)
        client = {"prompt": story(150, 30), "max_tokens": 8, "temperature": 0}
        expected = said(plain.post("/v1/completions", client))
        other = vllm_proxy(pair.prefill, pair.decode, "/v1/completions",
                           {**client, "prompt": story(100, 31)})[0]["kv_transfer_params"]
        for params in (other, {**other, "remote_engine_id": "another"},
                       {**other, "remote_host": "10.0.0.1", "remote_port": 1},
                       {"do_remote_prefill": True}, {}, {**other, "remote_block_ids": [7, -1, "x"]}):
            body = {**client, "kv_transfer_params": params}
            self.assertEqual(said(pair.decode.post("/v1/completions", body)), expected)
            self.assertEqual(said(plain.post("/v1/completions", body)), expected)

    def test_refused(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        plain = Server(*FLAGS)
        self.addCleanup(plain.kill)
        there = {"do_remote_decode": True}
        body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": there}
        for server, change, words in (
                (plain, {}, "this server was started without --transfer-addr"),
                (pair.prefill, {"max_tokens": 2}, "max_tokens is 2, must be 1"),
                (pair.prefill, {"max_tokens": None}, "max_tokens is absent, must be 1"),
                (pair.prefill, {"stream": True}, "stream is true, must be false"),
                (pair.prefill, {"prompt": ["x", "y"]}, "prompt has 2 prompts, must be one"),
                (pair.prefill, {"kv_transfer_params": {**there, "do_remote_prefill": True}},
                 "are both true"),
                (pair.prefill, {"kv_transfer_params": {"do_remote_decode": 3}}, "do_remote_decode")):
            status, _, text = server.ask("POST", "/v1/completions", {**body, **change})
            self.assertEqual(status, 400, f"{change}\n{text}")
            self.assertIn(words, text)


class Sglang(unittest.TestCase):
    def ask_both(self, pair, path, client):
        request = recorded("sglang.json")["both"]["request"]
        body = filled(request, client, HOST="127.0.0.1", PORT=pair.port, ROOM=uuid.uuid4().int >> 65)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(pair.prefill.post, path, body)
            second = pool.submit(pair.decode.post, path, body)
            return first.result(), second.result()

    def test_answers_are_those_of_one_server(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        plain = OneServer.with_flags()
        for path, client in cases():
            first, second = self.ask_both(pair, path, client)
            self.assertEqual(said(second), plain.said(path, client), client)
            self.assertEqual(first["usage"]["completion_tokens"], client.get("n", 1))
            self.assertNotIn("kv_transfer_params", first)
        client = {"text": story(100, 40), "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
        first, second = self.ask_both(pair, "/generate", client)
        self.assertEqual(second["output_ids"],
                         plain.server.post("/generate", client)["output_ids"])
        self.assertEqual(len(first["output_ids"]), 1)
        self.assertEqual(pair.outcome("failed"), 0)
        pair.wait_for_no_page()

    def test_the_named_server_is_asked(self):
        three = TwoPrefillServers()
        self.addCleanup(three.kill)
        for number in range(4):
            three.decode.post("/v1/completions", {
                "prompt": story(100, 50 + number), "max_tokens": 1, "bootstrap_host": "127.0.0.1",
                "bootstrap_port": three.ports[1], "bootstrap_room": number})
        self.assertEqual([server.metric("fathom_transfer_orders_total") for server in three.prefill],
                         [0, 4])
        self.assertEqual(labelled(three.decode, "fathom_prefill_orders_total", "failed"), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

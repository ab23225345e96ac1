#!/usr/bin/env python3
"""Nodes with a bad network between them: links that go down, a slow proxy that cuts. Within the bounds
of node_faults_test.py there is an error or the right answer; no node hangs, and none leads beside
node 0.

Links are veth pairs between network namespaces of the test's own, for which it has to be root.
"""
import http.client
import json
import os
import random
import signal
import threading
import time
import unittest

from cluster import DEAD, WHERE, Follower, free_port, node_flags
from fathom_server import SLACK, Server
from faulty_server import WITH_FAULTS
from namespaces import Star, enter, may_make_namespaces
from slow_proxy import OWN, Proxy

ERROR_SECONDS = 3
BODY = {"prompt": "One, two, three,", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
SLOW = {"FATHOM_FAULT": "step_ms:50"}  # the answer lasts 5 s


def answer_of_one():
    server = Server("-t", "2")
    try:
        return server.post("/v1/completions", BODY)["choices"][0]["text"]
    finally:
        server.kill()


class Asked:
    """A completion, on a thread of its own: `text` or `error`, and when it came."""

    def __init__(self, server):
        self.text = self.error = None
        self.ended_at = 0.0
        self.thread = threading.Thread(target=self.ask, args=(server,), daemon=True)
        self.thread.start()

    def ask(self, server):
        try:
            status, _, text = server.ask("POST", "/v1/completions", BODY)
            if status == 200:
                self.text = json.loads(text)["choices"][0]["text"]
            else:
                self.error = json.loads(text)["error"]["message"]
        except (OSError, http.client.HTTPException) as problem:
            self.error = f"({problem})"
        self.ended_at = time.monotonic()

    def wait(self):
        self.thread.join(60 * SLACK)
        assert not self.thread.is_alive(), "a request hangs"


@unittest.skipUnless(may_make_namespaces(), "network namespaces cannot be made here: not root")
class Links(unittest.TestCase):
    """Node n in namespace n."""

    @classmethod
    def setUpClass(cls):
        cls.expected = answer_of_one()
        cls.home = open("/proc/thread-self/ns/net", encoding="ascii")

    @classmethod
    def tearDownClass(cls):
        cls.home.close()

    def setUp(self):
        self.star = Star(3, self.addCleanup)
        # Node 0 and the requests are in its namespace.
        self.star.enter(0)
        self.addCleanup(enter, f"/proc/self/fd/{self.home.fileno()}")

    def start(self, nnodes):
        flags = ("--tp", str(nnodes), "-t", "1")
        self.followers = [
            Follower(*flags, *node_flags(nnodes, node, 5000, "10.77.0.1"),
                     prefix=("ip", "netns", "exec", self.star.names[node]))
            for node in range(1, nnodes)]
        self.leader = Server(*flags, *node_flags(nnodes, 0, 5000, "10.77.0.1"), program=WITH_FAULTS,
                             environment=SLOW)
        self.addCleanup(self.kill)

    def kill(self):
        self.leader.kill()
        for follower in self.followers:
            follower.kill()

    def running(self):
        asked = Asked(self.leader)
        self.leader.wait_for("vllm:num_requests_running", 1)
        time.sleep(0.5)
        return asked

    def check_all_ended(self, asked, since):
        asked.wait()
        self.assertIsNone(asked.text)
        took = asked.ended_at - since
        self.assertRegex(asked.error, rf"(rank|node) \d.*{WHERE}")
        self.assertLessEqual(took, ERROR_SECONDS * SLACK)
        self.assertEqual(self.leader.wait(), DEAD)
        for follower in self.followers:
            self.assertEqual(follower.wait(), DEAD, follower.log)
        print(f"  error after {took:.2f} s: {asked.error}", flush=True)

    def test_a_link_that_is_down_for_a_moment(self):
        self.start(2)
        asked = self.running()
        self.star.link(1, "down")
        time.sleep(1)
        self.star.link(1, "up")
        asked.wait()
        print(f"  down for 1 s: {asked.error or 'the right answer'}", flush=True)
        if asked.error:  # TCP may take longer than the silence that is allowed
            self.assertRegex(asked.error, "rank|node")
            self.assertEqual((self.leader.wait(), self.followers[0].wait()), (DEAD, DEAD))
            return
        self.assertEqual(len(asked.text), len(self.expected_of("2")))
        self.assertEqual(asked.text, self.expected_of("2"))
        self.assertEqual((self.leader.stop(), self.followers[0].wait()), (0, 0))

    def expected_of(self, tp):
        server = Server("-t", "2", "--tp", tp)
        self.addCleanup(server.kill)
        return server.post("/v1/completions", BODY)["choices"][0]["text"]

    def test_a_link_that_is_down_for_five_seconds(self):
        self.start(2)
        asked = self.running()
        since = time.monotonic()
        self.star.link(1, "down")
        time.sleep(5)
        self.star.link(1, "up")
        self.check_all_ended(asked, since)

    def test_a_partition(self):
        """Node 2 of three is cut off: nodes 0 and 1, which still hear each other, end too, and so
        does node 2."""
        self.start(3)
        asked = self.running()
        since = time.monotonic()
        self.star.link(2, "down")
        self.check_all_ended(asked, since)

    def test_a_frozen_node(self):
        self.start(3)
        asked = self.running()
        since = time.monotonic()
        # `ip netns exec` has become the program.
        os.kill(self.followers[0].process.pid, signal.SIGSTOP)
        asked.wait()
        self.assertRegex(asked.error, rf"rank 1.*{WHERE}")
        self.assertLessEqual(asked.ended_at - since, ERROR_SECONDS * SLACK)
        self.assertEqual((self.leader.wait(), self.followers[1].wait()), (DEAD, DEAD))
        os.kill(self.followers[0].process.pid, signal.SIGCONT)
        self.assertEqual(self.followers[0].wait(), DEAD)


class SlowNetwork(unittest.TestCase):
    BODY = {"prompt": "One, two, three,", "max_tokens": 6, "temperature": 0, "ignore_eos": True}

    def start(self):
        port = free_port()
        flags = ("--tp", "2", "-t", "1")
        leader = Server(*flags, *node_flags(2, 0, port), ready=False, port=free_port())
        self.addCleanup(leader.kill)
        proxy = Proxy(leader.process.pid, 0.02)
        self.addCleanup(proxy.stop)
        follower = Follower(*flags, *node_flags(2, 1, port, OWN))
        self.addCleanup(follower.kill)
        self.assertTrue(leader.ready.wait(60 * SLACK) and leader.process.poll() is None,
                        "".join(leader.log) + follower.log)
        return leader, follower, proxy

    def test_a_slow_network_gives_the_right_answer(self):
        server = Server("-t", "2", "--tp", "2")
        self.addCleanup(server.kill)
        expected = server.post("/v1/completions", self.BODY)["choices"]
        leader, follower, proxy = self.start()
        since = time.monotonic()
        self.assertEqual(leader.post("/v1/completions", self.BODY)["choices"], expected)
        print(f"  6 tokens in {time.monotonic() - since:.2f} s over {proxy.connections()} connections",
              flush=True)
        self.assertEqual((leader.stop(), follower.wait()), (0, 0))

    def test_cuts_at_random(self):
        numbers = random.Random(1)
        for number in range(6):
            leader, follower, proxy = self.start()
            asked = Asked(leader)
            time.sleep(numbers.random())
            since = time.monotonic()
            proxy.cut(number)
            asked.wait()
            if asked.error is not None:
                self.assertLessEqual(asked.ended_at - since, ERROR_SECONDS * SLACK)
            self.assertEqual((leader.wait(), follower.wait()), (DEAD, DEAD), follower.log)
            print(f"  cut: {asked.error or 'the answer was there'}", flush=True)


if __name__ == "__main__":
    unittest.main(verbosity=2)

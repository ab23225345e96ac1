#!/usr/bin/env python3
"""Two processes compute the same steps, whatever comes when: random arrivals and aborts, idle lanes,
prompts beside answers, experts that move, and ranks that are late to their collectives at random."""
import random
import re
import sys
import threading
import time
import unittest

from cluster import Cluster
from fathom_server import ANSWER, QUESTION, SLACK

FLAGS = ("--tp", "2", "--dp", "2", "--enable-expert-parallel", "--enable-eplb",
         "--eplb-rebalance-num-iterations", "50", "--max-num-seqs", "6",
         "--max-num-batched-tokens", "128", "--max-total-tokens", "512")
DELAY_US = 300
LONGEST_WAIT_SECONDS = 2


class Client(threading.Thread):
    """Asks for completions, one after the other, until it is told to end; closes some early."""

    def __init__(self, server, seed):
        super().__init__(daemon=True)
        self.server, self.random = server, random.Random(seed)
        self.ending = threading.Event()
        self.completed = self.aborted = 0
        self.problem = None

    def run(self):
        try:
            while not self.ending.is_set():
                self.ask()
                if self.random.random() < 0.2:
                    time.sleep(self.random.random() * 0.3)
        except Exception as problem:  # a failure is the test's to report
            self.problem = problem

    def ask(self):
        pick = self.random
        body = {"prompt": "One two three four. " * pick.choice((1, 1, 1, 3, 20, 60)),
                "max_tokens": pick.randint(1, 60), "temperature": pick.choice((0, 1.0)),
                "seed": pick.randint(0, 1 << 30), "n": pick.choice((1, 1, 1, 2)),
                "stream": True, "ignore_eos": True}
        connection, response = self.server.open("POST", "/v1/completions", body)
        assert response.status == 200, response.read()
        leaves_after = pick.choice((None, None, None, pick.randint(1, 10)))
        text, events = b"", 0
        while line := response.readline():
            text += line
            events += line.startswith(b"data: ")
            if events == leaves_after:
                connection.close()
                self.aborted += 1
                return
        connection.close()
        assert b"[DONE]" in text and b'"error"' not in text, text[-1000:]
        self.completed += 1


class Agreement(unittest.TestCase):
    def run_steps(self, steps):
        faults = f"meeting_delay:{DELAY_US}"
        cluster = Cluster(2, *FLAGS, faults={0: faults, 1: faults})
        self.addCleanup(cluster.kill)
        clients = [Client(cluster.leader, seed) for seed in range(8)]
        since = time.monotonic()
        for client in clients:
            client.start()
        while (done := cluster.leader.metric("fathom_steps_total")) < steps:
            time.sleep(0.2)
            for client in clients:
                self.assertIsNone(client.problem)
        for client in clients:
            client.ending.set()
        for client in clients:
            client.join(120 * SLACK)
            self.assertFalse(client.is_alive(), "a request hangs")
            self.assertIsNone(client.problem)
        reply = cluster.leader.post("/v1/chat/completions",
                                    {"messages": QUESTION, "temperature": 0})
        self.assertEqual(reply["choices"][0]["message"]["content"], ANSWER)
        moves = cluster.leader.metric("fathom_expert_moves_total")
        preemptions = cluster.leader.metric("vllm:num_preemptions_total")
        cluster.leader.wait_for("vllm:num_requests_running", 0)
        self.assertEqual(cluster.stop(), [0, 0], cluster.followers[0].log)
        waits = [float(re.search(r"longest wait in a collective: ([0-9.]+) s", log).group(1))
                 for log in ("".join(cluster.leader.log), cluster.followers[0].log)]
        print(f"  {done:.0f} steps in {time.monotonic() - since:.0f} s, "
              f"{sum(client.completed for client in clients)} requests completed, "
              f"{sum(client.aborted for client in clients)} aborted, {preemptions:.0f} preemptions, "
              f"{moves:.0f} moves of experts, longest wait {max(waits):.3f} s", flush=True)
        self.assertGreater(min(waits), 0)
        self.assertLessEqual(max(waits), LONGEST_WAIT_SECONDS * SLACK)


class Some(Agreement):
    def test_300_steps(self):
        self.run_steps(300)


class All(Agreement):
    def test_20000_steps(self):
        self.run_steps(20_000)


if __name__ == "__main__":
    unittest.main(defaultTest=None if len(sys.argv) > 1 else "Some", verbosity=2)

#!/usr/bin/env python3
"""A node of several that is killed, stopped or throws: the others end in time, name it, and serve
again when they are started again."""
import concurrent.futures
import http.client
import json
import signal
import threading
import time
import unittest

from cluster import DEAD, WHERE, Cluster
from fathom_server import ANSWER, LONG, QUESTION, SLACK

# From a fault to the error of a request, and from there to a server that no longer says it is well.
ERROR_SECONDS, HEALTH_SECONDS = 3, 2
AGAIN_SECONDS = 10  # from the start of all processes to the first answer
# Steps that last, so that requests run when the fault comes.
SLOW = "step_ms:20"


class Stream:
    """A completion that is being streamed; reads until its end on a thread."""

    def __init__(self, server, body=LONG):
        self.connection, self.response = server.open("POST", "/v1/chat/completions",
                                                     {**body, "stream": True})
        self.server, self.text, self.ended_at = server, "", 0.0
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        try:
            while line := self.response.readline():
                self.text += line.decode()
        except (http.client.HTTPException, OSError) as problem:
            self.text += f"({problem})"
        self.ended_at = time.monotonic()
        self.connection.close()

    def error(self):
        """The message of the error that ended it."""
        self.thread.join(60 * SLACK)
        for line in self.text.splitlines():
            if line.startswith("data: {") and '"error"' in line:
                return json.loads(line[6:])["error"]["message"]
        raise AssertionError(f"no error: {self.text[-500:]}\nthe server, which ended with "
                             f"{self.server.process.poll()}: {''.join(self.server.log)[-2000:]}")


def is_well(server):
    try:
        return server.ask("GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


class Faults(unittest.TestCase):
    def cluster(self, nnodes, *flags, **options):
        cluster = Cluster(nnodes, *flags, **options)
        self.addCleanup(cluster.kill)
        return cluster

    def running(self, cluster):
        """A stream that has begun to answer."""
        stream = Stream(cluster.leader)
        cluster.leader.wait_until(lambda: stream.text.count("data: ") > 5, "the answer begins")
        return stream

    def check_server_ends(self, cluster, stream, since, words):
        message = stream.error()
        took = stream.ended_at - since
        for word in words:
            self.assertRegex(message, word)
        self.assertLessEqual(took, ERROR_SECONDS * SLACK)
        cluster.leader.wait_until(lambda: not is_well(cluster.leader), "/health is false",
                                  HEALTH_SECONDS)
        self.assertEqual(cluster.leader.wait(), DEAD)
        log = "".join(cluster.leader.log)
        self.assertIn("the engine is dead: ", log)
        print(f"  error after {took:.2f} s: {message}", flush=True)

    def check_followers_end(self, followers, words):
        for follower in followers:
            self.assertEqual(follower.wait(), DEAD, follower.log)
            for word in words:
                self.assertRegex(follower.log.splitlines()[-1], word)

    def check_serves_again(self, old, *flags):
        old.kill()
        start = time.monotonic()
        cluster = Cluster(1 + len(old.followers), *flags, port=old.port)
        self.addCleanup(cluster.kill)
        reply = cluster.leader.post("/v1/chat/completions",
                                    {"messages": QUESTION, "temperature": 0})
        self.assertEqual(reply["choices"][0]["message"]["content"], ANSWER)
        took = time.monotonic() - start
        self.assertLessEqual(took, AGAIN_SECONDS * SLACK)
        print(f"  serves again {took:.2f} s after the start", flush=True)
        self.assertEqual(set(cluster.stop()), {0})

    def hit_follower(self, which, flags, words):
        cluster = self.cluster(2, *flags, faults={0: SLOW})
        stream = self.running(cluster)
        since = time.monotonic()
        cluster.signal(1, which)
        self.check_server_ends(cluster, stream, since, words)
        if which == signal.SIGSTOP:  # a node that went on would be one too many
            cluster.signal(1, signal.SIGCONT)
            self.check_followers_end(cluster.followers, ["node 0|rank 0"])
        return cluster

    def test_a_killed_follower(self):
        flags = ("--tp", "2")
        cluster = self.hit_follower(signal.SIGKILL, flags, ["rank 1", WHERE])
        self.check_serves_again(cluster, *flags)

    def test_a_stopped_follower(self):
        self.hit_follower(signal.SIGSTOP, ("--tp", "2"), ["rank 1", WHERE])

    def test_a_killed_follower_with_a_lane(self):
        self.hit_follower(signal.SIGKILL, ("--dp", "2", "--max-num-seqs", "1"), ["rank 1"])

    def test_a_stopped_follower_with_a_lane(self):
        # One sequence a lane: two requests run on both.
        cluster = self.cluster(2, "--dp", "2", "--max-num-seqs", "1", faults={0: SLOW})
        streams = [self.running(cluster), self.running(cluster)]
        since = time.monotonic()
        cluster.signal(1, signal.SIGSTOP)
        for stream in streams:
            self.check_server_ends(cluster, stream, since, ["rank 1", WHERE])

    def hit_leader(self, which):
        cluster = self.cluster(3, "--tp", "3", faults={0: SLOW})
        stream = self.running(cluster)
        since = time.monotonic()
        cluster.signal(0, which)
        self.check_followers_end(cluster.followers, [r"node 0|rank 0"])
        took = time.monotonic() - since
        self.assertLessEqual(took, ERROR_SECONDS * SLACK)
        print(f"  followers ended after {took:.2f} s: {cluster.followers[0].log.splitlines()[-1]}",
              flush=True)
        return cluster, stream

    def test_a_killed_leader(self):
        cluster, _ = self.hit_leader(signal.SIGKILL)
        self.check_serves_again(cluster, "--tp", "3")

    def test_a_stopped_leader_ends_when_it_goes_on(self):
        cluster, stream = self.hit_leader(signal.SIGSTOP)
        cluster.signal(0, signal.SIGCONT)
        self.assertRegex(stream.error(), "rank|node")
        self.assertEqual(cluster.leader.wait(), DEAD)

    def at_once(self, check, cases):
        """check(*case) for all cases at the same time: each waits for seconds until a silent node is
        taken for lost."""
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            for done in [pool.submit(check, *case) for case in cases]:
                done.result()

    def test_faults_while_nothing_runs(self):
        def check(victim, which):
            cluster = self.cluster(2, "--tp", "2")
            since = time.monotonic()
            cluster.signal(victim, which)
            if victim == 0:
                self.check_followers_end(cluster.followers, [r"node 0|rank 0"])
            else:
                cluster.leader.wait_until(lambda: not is_well(cluster.leader), "/health is false",
                                          ERROR_SECONDS + HEALTH_SECONDS)
                self.assertEqual(cluster.leader.wait(), DEAD)
                self.assertRegex("".join(cluster.leader.log), "the engine is dead: .*rank 1")
            print(f"  idle, node {victim}, signal {int(which)}: others ended after "
                  f"{time.monotonic() - since:.2f} s", flush=True)
            cluster.kill()
        self.at_once(check, [(0, signal.SIGKILL), (0, signal.SIGSTOP),
                             (1, signal.SIGKILL), (1, signal.SIGSTOP)])

    def test_a_fault_before_a_collective(self):
        """Before the 5th and the 40th: in the first step, and in a later one."""
        def check(kind, number):
            cluster = self.cluster(2, "--tp", "2", faults={1: f"meeting_{kind}:{number}"})
            since = time.monotonic()
            stream = Stream(cluster.leader)
            words = ["rank 1", rf"#{number}\b|#{number - 1}\b"]
            if kind == "throw":
                words.append(f"a fault at meeting {number}")
            self.check_server_ends(cluster, stream, since, words)
            cluster.kill()
        for kind in ("throw", "stop", "kill"):
            self.at_once(check, [(kind, 5), (kind, 40)])

    def test_a_leader_that_throws(self):
        cluster = self.cluster(2, "--tp", "2", faults={0: "meeting_throw:50"})
        stream = Stream(cluster.leader)
        self.assertRegex(stream.error(), "rank 0 failed: a fault at meeting 50")
        self.check_followers_end(cluster.followers, ["rank 0 failed: a fault at meeting 50"])
        self.assertEqual(cluster.leader.wait(), DEAD)


if __name__ == "__main__":
    unittest.main(verbosity=2)

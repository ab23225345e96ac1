#!/usr/bin/env python3
"""A rank that fails before, in and after each kind of collective, in one process and in one of two:
requests end in time with an error that names rank and collective, and every process ends."""
import itertools
import sys
import time
import unittest

from cluster import DEAD, Cluster
from fathom_server import SLACK
from faulty_server import faulty
from node_faults_test import HEALTH_SECONDS, Stream, is_well

EXPERTS = ("--enable-expert-parallel",)
# Numbers as in src/comm/collective.h. The second of each: all of them are in a prompt's step.
KINDS = {"all_reduce": 1, "reduce_scatter": 3, "all_gather": 4, "dispatch": 6, "combine": 7}
PHASES = {"before": 1, "in": 2, "after": 3}
# So long that ranks divide its rows.
PROMPT = {"messages": [{"role": "user", "content": "Count: " + "one two three four " * 40}],
          "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
ACROSS_SECONDS, WITHIN_SECONDS = 3, 1


def fault(what, kind, phase):
    return f"meeting_{what}:2,meeting_kind:{KINDS[kind] + 1},meeting_phase:{PHASES[phase]}"


class Case(unittest.TestCase):
    def check_end(self, server, words, seconds):
        """From the request on: its step comes to the fault in less than a moment."""
        since = time.monotonic()
        stream = Stream(server, PROMPT)
        message = stream.error()
        took = stream.ended_at - since
        for word in words:
            self.assertRegex(message, word)
        self.assertLessEqual(took, seconds * SLACK)
        server.wait_until(lambda: not is_well(server), "/health is false", HEALTH_SECONDS)
        self.assertEqual(server.wait(), DEAD)
        return f"{took:.2f} s: {message}"

    def across(self, what, kind, phase):
        """Rank 1, on node 1, fails."""
        cluster = Cluster(2, "--tp", "2", *EXPERTS, faults={1: fault(what, kind, phase)})
        try:
            # After its last collective the others wait for the step's result.
            words = ["rank 1", r"#\d+|node 0 was waiting for a message of node 1"]
            ended = self.check_end(cluster.leader, words, ACROSS_SECONDS)
            if what == "throw":
                self.assertEqual(cluster.followers[0].wait(), DEAD)
            print(f"  {what} {phase} {kind}: {ended}", flush=True)
        finally:
            cluster.kill()

    def within(self, kind, phase):
        """A rank, whichever is first, throws; the others are threads of the same process."""
        server = faulty(fault("throw", kind, phase), "-t", "2", "--tp", "2", "--dp", "2", *EXPERTS)
        try:
            ended = self.check_end(server, [r"rank \d", "a fault at meeting 2"], WITHIN_SECONDS)
            print(f"  one process, {phase} {kind}: {ended}", flush=True)
        finally:
            server.kill()


class Some(Case):
    def test_in_two_processes(self):
        self.across("kill", "dispatch", "in")
        self.across("stop", "combine", "after")
        self.across("throw", "reduce_scatter", "in")

    def test_in_one_process(self):
        self.within("combine", "in")
        self.within("all_reduce", "after")


class All(Case):
    def test_in_two_processes(self):
        for case in itertools.product(("throw", "stop", "kill"), KINDS, PHASES):
            with self.subTest(case=case):
                self.across(*case)

    def test_in_one_process(self):
        for case in itertools.product(KINDS, PHASES):
            with self.subTest(case=case):
                self.within(*case)


if __name__ == "__main__":
    unittest.main(defaultTest=None if len(sys.argv) > 1 else "Some", verbosity=2)

"""Starts one engine as several processes (nodes) for tests: node 0 as a Server, others as Followers.

A test that imports this is called as TEST PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS.
"""
import atexit
import signal
import socket
import subprocess
import threading

from fathom_server import ENVIRONMENT, MODEL, PROGRAM, SLACK, Server
from faulty_server import WITH_FAULTS

DEAD = 3  # exit status of a node when another one has failed
# Where a node can have been when another one failed, as its message says it.
WHERE = r"(all_reduce #\d+|between steps|(sending to|waiting for a message of) node \d)"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Follower:
    """A node other than 0, with its log."""

    def __init__(self, *flags, faults="", model=MODEL, prefix=(), command="serve", program=None):
        self.process = subprocess.Popen(
            [*prefix, program or (WITH_FAULTS if faults else PROGRAM), command, model, *flags],
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace",
            env={**ENVIRONMENT, **({"FATHOM_FAULT": faults} if faults else {})})
        atexit.register(lambda: self.process.poll() is None and self.process.kill())
        self.log = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.log += line

    def wait(self, seconds=30):
        status = self.process.wait(seconds * SLACK)
        self.reader.join(10 * SLACK)
        assert "Sanitizer: " not in self.log and "runtime error: " not in self.log, self.log
        return status

    def signal(self, which):
        self.process.send_signal(which)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def node_flags(nnodes, node, port, host="127.0.0.1"):
    return ["--nnodes", str(nnodes), "--node-rank", str(node), "--dist-init-addr", f"{host}:{port}"]


class Cluster:
    """`nnodes` processes of one thread each; node 0 serves. faults[node]: as FATHOM_FAULT."""

    def __init__(self, nnodes, *flags, faults=None, port=None, model=MODEL, **options):
        self.port = port or free_port()
        faults = faults or {}
        self.followers = [
            Follower("-t", "1", *flags, *node_flags(nnodes, node, self.port),
                     faults=faults.get(node, ""), model=model)
            for node in range(1, nnodes)]
        if 0 in faults:
            options = {**options, "program": WITH_FAULTS,
                       "environment": {"FATHOM_FAULT": faults[0]}}
        self.leader = Server("-t", "1", *flags, *node_flags(nnodes, 0, self.port), model=model,
                             **options)

    def signal(self, node, which):
        (self.leader.process if node == 0 else self.followers[node - 1].process).send_signal(which)

    def others(self, node):
        """The processes beside this one."""
        return [one for number, one in enumerate([self.leader, *self.followers]) if number != node]

    def stop(self):
        """An orderly end; the exit status of each node."""
        statuses = [self.leader.stop()]
        return statuses + [follower.wait() for follower in self.followers]

    def kill(self):
        for one in [self.leader, *self.followers]:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
        self.leader.kill()
        for follower in self.followers:
            follower.kill()

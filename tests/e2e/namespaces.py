"""Network namespaces for tests: what makes them, and threads that are in one. For root alone."""
import ctypes
import os
import subprocess
import threading

CLONE_NEWNET = 0x40000000


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def may_make_namespaces():
    name = f"fathom-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
        return True
    except (OSError, subprocess.CalledProcessError):
        return False


def enter(namespace):
    """Moves the calling thread, and what it starts from now on, into a network namespace."""
    with open(namespace, encoding="ascii") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0


class Star:
    """Node n in a namespace of its own, at 10.77.0.(n + 1); a bridge in another one joins them."""

    def __init__(self, count, add_cleanup):
        self.names = [f"fathom-{os.getpid()}-{node}" for node in range(count)]
        self.hub = f"fathom-{os.getpid()}-hub"
        for name in [self.hub, *self.names]:
            run("ip", "netns", "add", name)
            add_cleanup(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for node, name in enumerate(self.names):
            run("ip", "-n", self.hub, "link", "add", f"to{node}", "type", "veth", "peer", "name",
                "eth", "netns", name)
            run("ip", "-n", self.hub, "link", "set", f"to{node}", "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth")
            run("ip", "-n", name, "link", "set", "eth", "up")

    @staticmethod
    def address(node):
        return f"10.77.0.{node + 1}"

    def link(self, node, state):
        """The cable between the bridge and a node: "up" or "down"."""
        run("ip", "-n", self.hub, "link", "set", f"to{node}", state)

    def enter(self, node):
        enter(f"/run/netns/{self.names[node]}")

    def at(self, node, function):
        """What the function returns, called at a node."""
        result = []

        def call():
            self.enter(node)
            try:
                result.append((function(), None))
            except Exception as problem:  # pylint: disable=broad-except
                result.append((None, problem))
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        value, problem = result[0]
        if problem is not None:
            raise problem
        return value

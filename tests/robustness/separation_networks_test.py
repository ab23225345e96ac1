#!/usr/bin/env python3
"""A router, two prefill servers and a decode server in network namespaces, and links that go down and up
under load: every reply is the right one or an error, there is success within 5 s of a link that is back,
and no page waits for ever. ROBUST_SECONDS long; the target's form has 600.

Links are veth pairs between namespaces of the test's own, for which it has to be root.
"""
import random
import threading
import time
import unittest

from robustness import IS_LONG, SECONDS, SLACK, Server, figure
from namespaces import Star, enter, may_make_namespaces
from router_test import Router
from separated_servers import SECRET, labelled, said, story
from separation_test import FLAGS, Load

ROUTER, PREFILL, DECODE = 0, (1, 2), 3
HTTP_PORT, TRANSFER_PORT = 8000, 9000
SECONDS_TO_SUCCESS = 5
EVERYBODY = ("--host", "0.0.0.0", "--allowed-hosts", "*", "--transfer-secret-file", SECRET)
# As long as a link is down a replica is asked again soon, and counts as failed for a second.
SOON = ("--health-check-timeout-secs", "1", "--cb-timeout-duration-secs", "1")


class NodeRouter(Router):
    """The router over a replica that is no process of this namespace."""

    def __init__(self, address):
        super().__init__([], "--replica", f"http://{address}:{HTTP_PORT}", *SOON)


class Site:
    def __init__(self, star):
        transfers = ",".join(f"{star.address(node)}:{TRANSFER_PORT}" for node in PREFILL)
        self.servers = {}
        for node in PREFILL:
            self.servers[node] = star.at(node, lambda n=node: Server(
                *FLAGS, *EVERYBODY, "--role", "prefill", "--transfer-addr",
                f"{star.address(n)}:{TRANSFER_PORT}", port=HTTP_PORT))
        self.servers[DECODE] = star.at(DECODE, lambda: Server(
            *FLAGS, *EVERYBODY, "--role", "decode", "--prefill", transfers, "--transfer-digests",
            port=HTTP_PORT))
        self.star = star
        star.at(DECODE, lambda: self.servers[DECODE].wait_for("fathom_prefill_servers_ready", 2))
        self.router = NodeRouter(star.address(DECODE))
        self.router.wait_ready(1)

    def wait_for_no_page(self):
        for node, server in self.servers.items():
            for state in ("used", "quarantined"):
                self.star.at(node, lambda s=server, st=state: s.wait_until(
                    lambda: labelled(s, "fathom_kv_pages", f'state="{st}"') == 0, f"no page {st}"))

    def kill(self):
        for server in (self.router, *self.servers.values()):
            server.kill()


class Probe:
    """Asks until an answer is right: a client that comes anew, whatever others wait for. Few ask at once:
    a machine with too much to do does not get more from each."""

    MOST = 4
    asking = []

    def __init__(self, load):
        self.begun, self.seconds = time.monotonic(), None
        self.thread = threading.Thread(target=self.ask, args=(load,))
        self.thread.start()

    def ask(self, load):
        count = load.count("right")
        while self.seconds is None:
            Probe.asking = [thread for thread in Probe.asking if thread.is_alive()]
            if len(Probe.asking) < Probe.MOST:
                Probe.asking.append(threading.Thread(
                    target=load.ask_once, args=("probe", random.getrandbits(32)), daemon=True))
                Probe.asking[-1].start()
            end = time.monotonic() + 0.5
            while time.monotonic() < end and self.seconds is None:
                if load.count("right") > count:
                    self.seconds = time.monotonic() - self.begun
                time.sleep(0.01)
            assert time.monotonic() < self.begun + 60 * SLACK, "no success again"


@unittest.skipUnless(may_make_namespaces(), "network namespaces cannot be made here: not root")
class Links(unittest.TestCase):
    def test_links_go_down_and_up_under_load(self):
        plain = Server(*FLAGS)
        self.addCleanup(plain.kill)
        bodies = [{"prompt": story(60 + 60 * n, 50 + n), "max_tokens": 6, "seed": n,
                   "temperature": 0.8} for n in range(8)]
        right = [said(plain.post("/v1/completions", body)) for body in bodies]
        plain.kill()
        home = open("/proc/thread-self/ns/net", encoding="ascii")
        self.addCleanup(home.close)
        star = Star(4, self.addCleanup)
        star.enter(ROUTER)
        self.addCleanup(enter, f"/proc/self/fd/{home.fileno()}")
        site = Site(star)
        self.addCleanup(site.kill)
        load = Load(site, bodies, right)
        self.addCleanup(load.stop)
        site.router.wait_until(lambda: load.count("right") >= 4, "right replies")
        choose = random.Random(1)
        times, end = [], time.monotonic() + SECONDS
        while time.monotonic() < end or len(times) < 3:
            node = (1, 2, 3)[len(times) % 3] if len(times) < 3 else choose.choice((1, 2, 3))
            star.link(node, "down")
            # Now and then for longer than a silent session is kept.
            time.sleep(13 if IS_LONG and len(times) % 10 == 9 else choose.uniform(0.1, 3))
            star.link(node, "up")
            probe = Probe(load)
            probe.thread.join()
            times.append(probe.seconds)
        load.stop()
        self.assertEqual(set(load.results) - {"right", "refused", "lost"}, set())
        self.assertLess(max(times), SECONDS_TO_SUCCESS * SLACK)
        site.wait_for_no_page()
        decode = site.servers[DECODE]
        star.at(DECODE, lambda: decode.wait_for("fathom_prefill_servers_ready", 2))
        star.at(DECODE, lambda: decode.wait_for("fathom_prefill_orders_held", 0))
        figure("links down and up under load",
               f"{len(times)} times in {SECONDS:.0f} s or more; {load.count('right')} right replies, "
               f"{load.count('refused')} errors, {load.count('lost')} without a reply; success at "
               f"most {max(times):.1f} s after a link was up")
        for server in (site.router, *site.servers.values()):
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

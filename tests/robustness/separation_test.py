#!/usr/bin/env python3
"""A prefill server, two decode servers and a router before them, of which one kind is killed and started
again under load: every reply is the right one or an error, there is success within 5 s, and nothing is left
behind. Two kills of each; 100 where the load may last (ROBUST_SECONDS), over which the others' memory, mappings
and descriptors stay."""
import atexit
import collections
import http.client
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
import unittest

from robustness import IS_LONG, MODEL, SLACK, Server, figure, most_memory, pages
from router_test import Router
from separated_servers import SECRET, free_port, labelled, said, story

KILLS = 100 if IS_LONG else 2
CLIENTS = 4
LAYERS = int(os.environ.get("ROBUST_LAYERS", "0"))
# Words by which each prompt is longer than the one before it; no prompt is cached.
WORDS = 60 if IS_LONG and not LAYERS else 20
# Before these kills memory is not compared: buffers grow to what a kill needs.
WARM = 10 if IS_LONG else 1
MARKS = (WARM, (WARM + KILLS) // 2, KILLS)
SECONDS_TO_SUCCESS = 5
# 64 pages, all of which are soon touched, and buffers of few: what grows then is no cache.
FLAGS = ("--attention", "absorbed", "--max-total-tokens", "4096", "--threads", "1")
SEPARATED = (*FLAGS, "--transfer-secret-file", SECRET, "--transfer-window-mib", "8",
             "--transfer-backend", os.environ.get("ROBUST_BACKEND", "auto"))


def model_of(layers):
    """The bundled model's first layers. What they say is nothing, but the same everywhere."""
    if not layers:
        return MODEL
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    for name in os.listdir(MODEL):
        os.symlink(os.path.join(os.path.abspath(MODEL), name), os.path.join(folder, name))
    config = os.path.join(folder, "config.json")
    with open(config, encoding="utf-8") as file:
        fields = json.load(file)
    os.unlink(config)
    with open(config, "w", encoding="utf-8") as file:
        json.dump({**fields, "num_hidden_layers": layers, "num_nextn_predict_layers": 0}, file)
    return folder


SERVED = model_of(LAYERS)


class Site:
    """Each server has its port as long as this lives."""

    def __init__(self):
        self.transfer = f"127.0.0.1:{free_port()}"
        self.ports = [free_port(), free_port()]
        self.router_port = free_port()
        self.prefill = self.start_prefill()
        self.decode = [self.start_decode(port) for port in self.ports]
        for server in self.decode:
            server.wait_for("fathom_prefill_servers_ready", 1)
        self.router = self.start_router()
        self.router.wait_ready(2)

    def start_prefill(self):
        return Server(*SEPARATED, "--role", "prefill", "--transfer-addr", self.transfer,
                      model=SERVED)

    def start_decode(self, port):
        return Server(*SEPARATED, "--role", "decode", "--prefill", self.transfer,
                      "--transfer-digests", model=SERVED, port=port)

    def start_router(self):
        # In turns: by prefix a server that has come back would get nothing.
        return Router(self.ports, "--policy", "round_robin", port=self.router_port)

    def servers(self):
        return [*self.engines(), self.router]

    def engines(self):
        return [self.prefill, *self.decode]

    def arrived(self):
        return sum(labelled(server, "fathom_prefill_orders_total", 'outcome="arrived"')
                   for server in self.decode)

    def kill(self):
        for server in self.servers():
            server.kill()


class Load:
    """Clients of the router. What they get is right, refused (an error of the API), lost (no reply, as
    long as the router is gone), or wrong."""

    def __init__(self, site, bodies, right):
        self.site, self.bodies, self.right = site, bodies, right
        self.results = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.ask_again_and_again, args=(n,))
                        for n in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def ask_again_and_again(self, number):
        turn = number
        while not self.stopping.is_set():
            turn += 1
            self.ask_once(number, turn)

    def ask_once(self, number, turn):
        which = turn % len(self.bodies)
        # A salt of its own, so that the prompt is not cached yet.
        body = {**self.bodies[which], "cache_salt": f"{number} {turn}"}
        try:
            status, headers, text = self.site.router.ask("POST", "/v1/completions", body)
        except (OSError, http.client.HTTPException):
            self.results.append("lost")
            time.sleep(0.01)
            return
        if status == 200:
            same = said(json.loads(text)) == self.right[which]
            self.results.append("right" if same else f"wrong: {text}")
        elif status == 502 or (status == 503 and "Retry-After" in headers):
            assert json.loads(text)["error"]["message"]
            self.results.append("refused")
        else:
            self.results.append(f"{status}: {text}")

    def count(self, what):
        return self.results.count(what)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


class Footprint:
    """Resident bytes, mappings and descriptors of a process."""

    def __init__(self, server):
        folder = f"/proc/{server.process.pid}"
        self.resident = server.resident_bytes()
        with open(f"{folder}/maps", encoding="ascii") as file:
            self.mappings = len(file.readlines())
        self.files = len(os.listdir(f"{folder}/fd"))

    def __str__(self):
        return f"{self.resident / 2**20:.0f}/{self.mappings}/{self.files}"


class Kills(unittest.TestCase):
    def check_flat(self, past, server):
        before, last = past[WARM - 1], Footprint(server)
        residents = [one.resident >> 20 for one in past]
        self.assertLess(last.resident, most_memory(before.resident, 0.15), f"MiB before: {residents}")
        self.assertLess(last.mappings, before.mappings + 100)
        # The load's own are closed by now or soon; a session has three.
        server.wait_until(lambda: Footprint(server).files < before.files + 3, "descriptors are closed")

    def kill_under_load(self, role, victim, restart, is_back):
        """Kills victim(n) again and again. is_back(n) is a function that says whether the one started
        after it has had success."""
        site = Site()
        self.addCleanup(site.kill)
        plain = Server(*FLAGS, model=SERVED)
        self.addCleanup(plain.kill)
        bodies = [{"prompt": story(WORDS + WORDS * n, 50 + n), "max_tokens": 6, "seed": n,
                   "temperature": 0.8} for n in range(8)]
        right = [said(plain.post("/v1/completions", body)) for body in bodies]
        load = Load(site, bodies, right)
        self.addCleanup(load.stop)
        if IS_LONG:
            for server in site.engines():
                server.wait_until(lambda s=server: pages(s)["free"] == 0, "every page has been used")
        times, history = [], collections.defaultdict(list)
        for number in range(KILLS):
            count = load.count("right")
            site.prefill.wait_until(lambda c=count: load.count("right") >= c + 3, "right replies")
            dead = victim(site, number)
            dead.process.send_signal(signal.SIGKILL)
            dead.wait()
            time.sleep(0.1 * (number % 4))  # also while the others try to connect
            restart(site, number)
            begun = time.monotonic()
            condition = is_back(site, load, number)
            site.prefill.wait_until(condition, "success again")
            times.append(time.monotonic() - begun)
            for server in site.servers():
                history[server].append(Footprint(server))
        load.stop()
        self.assertEqual(set(load.results) - {"right", "refused", "lost"}, set())
        if role != "router":
            self.assertEqual(load.count("lost"), 0)
        self.assertGreaterEqual(load.count("right"), 3 * KILLS)
        self.assertLess(max(times), SECONDS_TO_SUCCESS * SLACK)
        for server in site.servers():
            if IS_LONG and len(history[server]) == KILLS:  # it was never killed
                self.check_flat(history[server], server)
        for server in site.decode:
            server.wait_for("fathom_prefill_orders_held", 0)
        for server in site.engines():
            for state in ("used", "quarantined"):
                server.wait_until(
                    lambda s=server, st=state: labelled(s, "fathom_kv_pages", f'state="{st}"') == 0,
                    f"no page {state}")
        figure(f"{role} killed under load",
               f"{KILLS} times; {load.count('right')} right replies, {load.count('refused')} errors, "
               f"{load.count('lost')} without a reply; success at most {max(times):.1f} s after it "
               f"was ready again, median {statistics.median(times):.1f} s, within {SECONDS_TO_SUCCESS} s "
               f"{sum(one < SECONDS_TO_SUCCESS for one in times)} times; MiB, mappings and "
               f"descriptors of the others after kills {MARKS}: " + ", ".join(
                   " ".join(str(past[mark - 1]) for mark in MARKS)
                   for past in history.values() if len(past) == KILLS))
        for server in (site.router, *site.decode, site.prefill):
            self.assertEqual(server.stop(), 0)

    def test_prefill(self):
        def restart(site, _):
            site.prefill = site.start_prefill()

        def is_back(site, _load, _number):
            arrived = site.arrived()
            return lambda: site.arrived() > arrived
        self.kill_under_load("prefill server", lambda site, _: site.prefill, restart, is_back)

    def test_decode(self):
        def restart(site, number):
            site.decode[number % 2] = site.start_decode(site.ports[number % 2])

        def is_back(site, _load, number):
            server = site.decode[number % 2]
            return lambda: labelled(server, "fathom_prefill_orders_total", 'outcome="arrived"') > 0
        self.kill_under_load("decode server", lambda site, number: site.decode[number % 2], restart,
                             is_back)

    def test_router(self):
        def restart(site, _):
            site.router = site.start_router()

        def is_back(_site, load, _number):
            count = load.count("right")
            return lambda: load.count("right") > count
        self.kill_under_load("router", lambda site, _: site.router, restart, is_back)


if __name__ == "__main__":
    unittest.main(verbosity=2)

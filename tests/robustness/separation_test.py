#!/usr/bin/env python3
"""A prefill server that is killed and started again under load: every reply is the right one or 503, and
nothing is left behind. Three kills; 100 where the load may last (ROBUST_SECONDS)."""
import json
import signal
import threading
import time
import unittest

from robustness import IS_LONG, Server, figure
from separated_servers import FLAGS, Pair, said, story

KILLS = 100 if IS_LONG else 3


class Kills(unittest.TestCase):
    def test_killed_and_restarted_under_load(self):
        pair = Pair()
        self.addCleanup(pair.kill)
        plain = Server(*FLAGS)
        self.addCleanup(plain.kill)
        bodies = [{"prompt": story(60 + 60 * n, 50 + n), "max_tokens": 6, "seed": n,
                   "temperature": 0.8} for n in range(8)]
        right = [said(plain.post("/v1/completions", body)) for body in bodies]
        results, stopping = [], threading.Event()

        def load(number):
            turn = number
            while not stopping.is_set():
                turn += 1
                body = {**bodies[turn % len(bodies)], "cache_salt": f"{number} {turn}"}
                status, headers, text = pair.decode.ask("POST", "/v1/completions", body)
                if status == 200:
                    same = said(json.loads(text)) == right[turn % len(bodies)]
                    results.append("right" if same else f"wrong: {text}")
                elif status == 503 and "Retry-After" in headers:
                    results.append("refused")
                else:
                    results.append(f"{status}: {text}")
        threads = [threading.Thread(target=load, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for number in range(KILLS):
            arrived = pair.outcome("arrived")
            pair.decode.wait_until(lambda a=arrived: pair.outcome("arrived") >= a + 3, "orders")
            pair.prefill.process.send_signal(signal.SIGKILL)
            pair.prefill.wait()
            pair.wait_ready(0)
            time.sleep(0.1 * (number % 4))  # also while the decode server tries to connect
            pair.prefill = pair.start_prefill()
            pair.wait_ready()
        arrived = pair.outcome("arrived")
        pair.decode.wait_until(lambda: pair.outcome("arrived") >= arrived + 3, "orders again")
        stopping.set()
        for thread in threads:
            thread.join()
        self.assertEqual(set(results) - {"right", "refused"}, set())
        self.assertGreaterEqual(results.count("right"), 3 * KILLS)
        self.assertEqual(pair.decode.metric("fathom_transfer_sessions_lost_total"), KILLS)
        pair.wait_for_no_page()
        pair.decode.wait_for("fathom_prefill_orders_held", 0)
        figure("prefill server killed under load",
               f"{KILLS} times; {results.count('right')} right replies, "
               f"{results.count('refused')} times 503, nothing else")
        self.assertEqual(pair.decode.stop(), 0)
        self.assertEqual(pair.prefill.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)

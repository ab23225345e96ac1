#!/usr/bin/env python3
"""One engine over several processes: the same answers as one process to the bit, agreement before
loading, and orderly ends."""
import collections
import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from cluster import DEAD, Cluster, Follower, free_port, node_flags
from fathom_server import ENVIRONMENT, MODEL, PROGRAM, SLACK, SOURCE, Server

EXPERTS = ("--enable-expert-parallel",)
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
          "additionalProperties": False}


def requests():
    """Twelve chats with all that a sample row can carry."""
    found = []
    for i in range(12):
        body = {"messages": [{"role": "user", "content": f"What is {i} + {3 * i + 1}?"}],
                "max_tokens": 24, "temperature": 0.9, "seed": 100 + i, "logprobs": True,
                "top_logprobs": 3}
        if i % 4 == 1:
            body.update(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.1,
                        logit_bias={"42": 5, "77": -5})
        if i % 4 == 2:
            body["response_format"] = {"type": "json_schema",
                                       "json_schema": {"name": "s", "schema": SCHEMA}}
        if i % 4 == 3:
            body.update(n=3, min_tokens=8, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01)
        found.append(body)
    return found


def sparse_model(folder):
    """A model with sparse attention: the form of tests/goldens/v32, 16 keys a row, with the bundled model's
    tokens, for --load-format dummy. Every prompt of requests() is longer than 16."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
        vocab_size = json.load(file)["vocab_size"]
    with open(os.path.join(SOURCE, "tests/goldens/v32/config.json"), encoding="utf-8") as file:
        config = json.load(file) | {"vocab_size": vocab_size}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return folder


def answers(server):
    """What each choice of all requests has: text and log-probabilities, to the last digit."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda body: server.post("/v1/chat/completions", body), requests()))
    return [[(choice["message"]["content"], choice["finish_reason"], choice["logprobs"])
             for choice in reply["choices"]] for reply in replies]


class Equality(unittest.TestCase):
    maxDiff = 2000

    def answers_of_nodes(self, nnodes, *flags, model=MODEL):
        cluster = Cluster(nnodes, *flags, model=model)
        self.addCleanup(cluster.kill)
        found = answers(cluster.leader)
        self.assertEqual(cluster.stop(), [0] * nnodes, "".join(cluster.leader.log))
        return found

    of_one = {}  # by flags and model: several clusters are compared with the same server

    def answers_of_one(self, *flags, model=MODEL):
        if (flags, model) not in self.of_one:
            server = Server("-t", "2", *flags, model=model)
            self.addCleanup(server.kill)
            self.of_one[flags, model] = answers(server)
            self.assertEqual(server.stop(), 0)
        return self.of_one[flags, model]

    def test_tensor_parallel(self):
        self.assertEqual(self.answers_of_nodes(2, "--tp", "2"), self.answers_of_one("--tp", "2"))

    def test_sparse_attention(self):
        with tempfile.TemporaryDirectory() as folder:
            model = sparse_model(folder)
            for flags in (("--tp", "2"), ("--tp", "2", "--dsa-dense-threshold", "0"), ("--dp", "2", *EXPERTS)):
                with self.subTest(flags):
                    flags = ("--load-format", "dummy", *flags)
                    one = self.answers_of_one(*flags, model=model)
                    self.assertEqual(self.answers_of_nodes(2, *flags, model=model), one)

    def test_tensor_parallel_uneven(self):
        self.assertEqual(self.answers_of_nodes(2, "--tp", "3"), self.answers_of_one("--tp", "3"))

    def test_data_parallel(self):
        one = self.answers_of_one()
        self.assertEqual(self.answers_of_nodes(2, "--dp", "2"), one)
        self.assertEqual(self.answers_of_nodes(3, "--dp", "4"), one)

    def test_both_on_two_and_four(self):
        one = self.answers_of_one("--tp", "2")
        self.assertEqual(self.answers_of_nodes(2, "--tp", "2", "--dp", "2"), one)
        self.assertEqual(self.answers_of_nodes(4, "--tp", "2", "--dp", "2"), one)

    def test_a_lane_over_a_node_border(self):
        # Ranks 0 to 1, 2 and 3: the second lane has its first rank on one node and its second on another.
        self.assertEqual(self.answers_of_nodes(3, "--tp", "2", "--dp", "2"),
                         self.answers_of_one("--tp", "2"))
        # Ranks 0 to 1, 2 to 3, 4 to 5: node 1 has the end of the first lane, and the second's first rank.
        self.assertEqual(self.answers_of_nodes(3, "--tp", "3", "--dp", "2"),
                         self.answers_of_one("--tp", "3"))

    def check_experts(self, cluster, nnodes):
        """What node 0 tells of the experts of all nodes."""
        info = json.loads(cluster.leader.ask("GET", "/server_info")[2])
        self.assertEqual(info["placement"]["ranks_of_nodes"], [[rank] for rank in range(nnodes)])
        placement = info["experts"]
        self.assertEqual(placement["num_ranks"], nnodes)
        for layer in placement["layers"]:
            self.assertEqual(len(layer), nnodes)
            self.assertEqual(set(sum(layer, [])), set(range(placement["num_experts"])))
        routed = collections.Counter()
        for line in cluster.leader.ask("GET", "/metrics")[2].splitlines():
            found = re.match(r'fathom_expert_tokens_total\{.*layer="(\d+)".*\} (\d+)', line)
            if found:
                routed[found.group(1)] += int(found.group(2))
        self.assertEqual(len(routed), len(placement["layers"]))
        # Every layer routes every token, of all lanes.
        self.assertEqual(len(set(routed.values())), 1, routed)
        self.assertGreater(routed["0"], 1000)

    def test_experts(self):
        one = self.answers_of_one()
        self.assertEqual(self.answers_of_nodes(2, "--dp", "2", *EXPERTS), one)
        cluster = Cluster(4, "--dp", "4", *EXPERTS, "--ep-num-redundant-experts", "4",
                          "--enable-eplb", "--eplb-rebalance-num-iterations", "4")
        self.addCleanup(cluster.kill)
        self.assertEqual(answers(cluster.leader), one)
        self.check_experts(cluster, 4)
        self.assertGreaterEqual(cluster.leader.metric("fathom_expert_moves_total"), 1)
        self.assertEqual(cluster.stop(), [0] * 4, "".join(cluster.leader.log))

    def test_experts_of_tensor_parallel_lanes(self):
        one = self.answers_of_one("--tp", "2", *EXPERTS)
        self.assertEqual(self.answers_of_nodes(2, "--tp", "2", *EXPERTS), one)
        self.assertEqual(self.answers_of_nodes(2, "--tp", "2", "--dp", "2", *EXPERTS), one)
        self.assertEqual(self.answers_of_nodes(4, "--tp", "2", "--dp", "2", *EXPERTS,
                                               "--enable-eplb", "--eplb-rebalance-num-iterations",
                                               "4"), one)

    def test_drafts(self):
        # With --tp 2 both nodes need what the first has sampled; with --dp 2 each samples its own.
        for flags, same in ((("--tp", "2"), ("--tp", "2")), (("--dp", "2"), ()), (("--dp", "2", *EXPERTS), ())):
            with self.subTest(flags):
                cluster = Cluster(2, *flags, "--mtp", "3", "--mtp-always")
                self.addCleanup(cluster.kill)
                self.assertEqual(answers(cluster.leader), self.answers_of_one(*same))
                drafted, right = (cluster.leader.metric(f"vllm:spec_decode_num_{what}_tokens_total")
                                  for what in ("draft", "accepted"))
                self.assertGreater(right, drafted / 4)
                self.assertEqual(cluster.stop(), [0, 0], "".join(cluster.leader.log))

    def test_preemption_and_prompt_log_probabilities(self):
        # What a chunk holds depends on what arrives when, and bf16 rounds chunks differently.
        flags = ("--dtype", "float32", "--dp", "2", "--max-total-tokens", "256", "--max-num-batched-tokens", "64",
                 "--max-num-seqs", "8")
        body = {"prompt": "One two three four five six seven eight nine ten eleven twelve. " * 6,
                "max_tokens": 40, "temperature": 0, "logprobs": 2, "echo": True, "ignore_eos": True}

        def ask(server):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                replies = pool.map(lambda _: server.post("/v1/completions", body), range(4))
                choices = [choice for reply in replies for choice in reply["choices"]]
            for choice in choices:
                self.assertEqual(len(choice["logprobs"]["token_logprobs"]),
                                 len(choice["logprobs"]["tokens"]))
            return [(choice["text"], choice["logprobs"]["tokens"]) for choice in choices]

        cluster = Cluster(2, *flags)
        self.addCleanup(cluster.kill)
        found = ask(cluster.leader)
        self.assertEqual(cluster.stop(), [0, 0])
        server = Server("-t", "2", *flags)
        self.addCleanup(server.kill)
        self.assertEqual(found, ask(server))


class Agreement(unittest.TestCase):
    def run_both(self, leader=(), follower=(), model=MODEL, nnodes=2, program=None,
                 leader_model=MODEL):
        """A leader and a follower that cannot agree: their exit statuses and last words."""
        port = free_port()
        other = Follower("--quiet", *(follower or ()), *node_flags(nnodes, 1, port), model=model,
                         command="run", program=program)
        self.addCleanup(other.kill)
        own = subprocess.run(
            [PROGRAM, "run", leader_model, "Hello", "--quiet", *leader, *node_flags(2, 0, port)],
            env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60 * SLACK)
        status = other.wait()
        return (own.returncode, own.stderr.splitlines()[-1], status, other.log.splitlines()[-1])

    def check_difference(self, what, theirs, ours, **nodes):
        own, words, other, other_words = self.run_both(**nodes)
        self.assertEqual((own, other), (2, 2), (words, other_words))
        sentence = f"fathom: node 1 has {what} {theirs}, node 0 has {ours}"
        self.assertRegex(words, sentence)
        self.assertRegex(other_words, sentence)

    def test_flags_must_be_equal(self):
        self.check_difference("--dp", "'2'", "'1'", leader=("--tp", "2"), follower=("--dp", "2"))
        self.check_difference("--tp", "'3'", "'2'", leader=("--tp", "2"), follower=("--tp", "3"))
        self.check_difference("--kv-cache-dtype", "'fp8'", "'bf16'", leader=("--tp", "2"),
                              follower=("--tp", "2", "--kv-cache-dtype", "fp8"))
        self.check_difference("--dtype", "'bfloat16'", "'float32'",
                              leader=("--tp", "2", "--dtype", "float32", "--kv-cache-dtype", "bf16"),
                              follower=("--tp", "2"))
        self.check_difference("--mtp", "'0'", "'3'", leader=("--tp", "2", "--mtp", "3"), follower=("--tp", "2"))

    def test_thresholds_of_sparse_attention_must_be_equal(self):
        with tempfile.TemporaryDirectory() as folder:
            model = sparse_model(folder)
            common = ("--load-format", "dummy", "--tp", "2")
            self.check_difference("--dsa-dense-threshold", "'8'", "'16'", model=model, leader_model=model,
                                  leader=common, follower=(*common, "--dsa-dense-threshold", "8"))

    def test_placements_of_experts_must_be_equal(self):
        self.check_difference("--enable-expert-parallel", "'off'", "'on'",
                              leader=("--dp", "2", *EXPERTS), follower=("--dp", "2"))
        self.check_difference("--num-redundant-experts", "'2'", "'0'", leader=("--dp", "2", *EXPERTS),
                              follower=("--dp", "2", *EXPERTS, "--num-redundant-experts", "2"))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "placement.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"format": "fathom-expert-placement", "version": 1, "num_experts": 16,
                           "num_ranks": 2, "layers": [[list(range(8, 16)), list(range(8))]] * 7}, file)
            self.check_difference("table of experts", "'[0-9a-f]{16}'", "'[0-9a-f]{16}'",
                                  leader=("--dp", "2", *EXPERTS),
                                  follower=("--dp", "2", *EXPERTS, "--init-expert-location", path))

    def test_versions_must_be_equal(self):
        version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True,
                                 check=True).stdout.splitlines()[0].split()[-1]
        other = version[:-1] + ("8" if version[-1] == "9" else "9")
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "fathom")
            with open(PROGRAM, "rb") as file:
                code = file.read()
            self.assertIn(version.encode(), code)
            with open(program, "wb") as file:
                file.write(code.replace(version.encode(), other.encode()))
            os.chmod(program, 0o755)
            self.check_difference("version", f"'{re.escape(other)}'", f"'{re.escape(version)}'",
                                  leader=("--tp", "2"), follower=("--tp", "2"), program=program)

    def test_model_files_must_be_equal(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in os.listdir(MODEL):
                os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
            config = os.path.join(folder, "config.json")
            with open(config, encoding="utf-8") as file:
                text = file.read()
            os.remove(config)
            with open(config, "w", encoding="utf-8") as file:
                file.write(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06'))
            self.check_difference("model files", "'[0-9a-f]{32}'", "'[0-9a-f]{32}'",
                                  leader=("--tp", "2"), follower=("--tp", "2"), model=folder)

    def test_numbers_of_nodes_must_be_equal(self):
        self.check_difference("nnodes", "3", "2", leader=("--tp", "3"), follower=("--tp", "3"),
                              nnodes=3)

    def refusal(self, *flags):
        done = subprocess.run([PROGRAM, "run", MODEL, "Hello", "--quiet", *flags], env=ENVIRONMENT,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=60 * SLACK)
        return done.returncode, done.stderr.splitlines()[-1]

    def test_what_one_node_can_see_is_refused_at_once(self):
        for flags, words in (
                ((), "there are 2 nodes and 1 rank (--tp times --dp): each node needs a rank"),
                (("--tp", "2", "--kv-offload-gib", "1"),
                 "--kv-offload-gib is 1 and --kv-offload-dir '' with --nnodes 2: pages of other "
                 "nodes cannot be offloaded"),
                (("--tp", "9"), "--tp is 9"),
                (("--dp", "2", *EXPERTS, "--num-redundant-experts", "17"),
                 "--num-redundant-experts is 17, allowed are 0 to 16")):
            status, last = self.refusal(*flags, *node_flags(2, 0, free_port()))
            self.assertEqual(status, 2, last)
            self.assertIn(words, last)

    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            status, last = self.refusal("--tp", "2", *node_flags(2, 0, port))
        self.assertEqual(status, 2, last)
        self.assertIn(f"port {port} of 127.0.0.1 is in use by another process", last)

    def test_who_does_not_come_is_named(self):
        alone = [subprocess.Popen(
            [PROGRAM, "run", MODEL, "Hello", "--quiet", "--tp", "2", "--dist-timeout", "2",
             *node_flags(2, node, free_port())], env=ENVIRONMENT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for node in (0, 1)]
        for node in alone:
            self.addCleanup(lambda node=node: node.poll() is None and node.kill())
        for node, words in zip(alone, (
                "gave up after 2 s: waiting for node 1 of 2 at 127.0.0.1:",
                "gave up after 2 s: waiting for node 0 to answer at 127.0.0.1:")):
            _, log = node.communicate(timeout=60 * SLACK)
            self.assertEqual(node.returncode, DEAD, log)
            self.assertIn(words, log.splitlines()[-1])
            # It said before what it waits for.
            self.assertRegex(log, r"info: waiting for node .* s of 2 s\)")

    def test_a_node_that_comes_twice(self):
        port = free_port()
        flags = ("--tp", "3", "-t", "1", "--quiet")
        first = Follower(*flags, *node_flags(3, 1, port))
        self.addCleanup(first.kill)
        leader = Server(*flags, *node_flags(3, 0, port), ready=False, port=free_port())
        self.addCleanup(leader.kill)
        leader.wait_until(lambda: "joins node 0" in first.log, "the first joins")
        time.sleep(0.5)  # one of the two is first; which does not matter
        second = Follower(*flags, *node_flags(3, 1, port))
        self.addCleanup(second.kill)
        leader.wait_until(lambda: first.process.poll() is not None or
                          second.process.poll() is not None, "one is refused")
        refused, stays = (first, second) if first.process.poll() is not None else (second, first)
        self.assertEqual(refused.wait(), 2)
        self.assertIn("node rank 1 has come already, from 127.0.0.1", refused.log)
        last = Follower(*flags, *node_flags(3, 2, port))
        self.addCleanup(last.kill)
        self.assertTrue(leader.ready.wait(60 * SLACK) and leader.process.poll() is None,
                        "".join(leader.log))
        self.assertEqual(leader.stop(), 0)
        self.assertEqual((stays.wait(), last.wait()), (0, 0))


class Ends(unittest.TestCase):
    def test_a_follower_says_what_it_is(self):
        cluster = Cluster(2, "--tp", "2")
        self.addCleanup(cluster.kill)
        self.assertEqual(cluster.stop(), [0, 0])
        log = cluster.followers[0].log
        self.assertIn("node 1 (rank 1) of 2 joins node 0 at 127.0.0.1:", log)
        self.assertIn("node 1 (rank 1) is ready and computes what node 0 sends", log)
        self.assertIn("node 0 has ended", log)
        self.assertNotIn("serving", log)
        # One memory plan and one progress bar.
        self.assertNotIn("GiB", log)

    def test_a_follower_finishes_what_runs_after_sigterm(self):
        cluster = Cluster(2, "--tp", "2")
        self.addCleanup(cluster.kill)
        cluster.signal(1, signal.SIGTERM)
        cluster.leader.wait_until(lambda: "SIGTERM" in cluster.followers[0].log, "SIGTERM")
        reply = cluster.leader.post("/v1/completions", {"prompt": "One, two,", "max_tokens": 4})
        self.assertEqual(len(reply["choices"]), 1)
        self.assertEqual(cluster.stop(), [0, 0])

    def test_nodes_share_the_memory_of_their_machine(self):
        cluster = Cluster(4, "--dp", "4")
        self.addCleanup(cluster.kill)
        self.assertEqual(cluster.stop(), [0] * 4)
        available = float(re.search(r"available +([0-9.]+) GiB", "".join(cluster.leader.log)).group(1))
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
        self.assertGreater(available, 0)
        self.assertLessEqual(available, whole / 4)

    def test_bench_on_two_nodes(self):
        port = free_port()
        program = [PROGRAM, "bench", "throughput", MODEL, "--num-prompts", "4", "--input-len", "32",
                   "--output-len", "8", "--dp", "2", "-t", "1", "--quiet"]
        other = subprocess.Popen([*program, *node_flags(2, 1, port)], env=ENVIRONMENT,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: other.poll() is None and other.kill())
        own = subprocess.run([*program, *node_flags(2, 0, port)], env=ENVIRONMENT,
                             capture_output=True, text=True, timeout=60 * SLACK)
        out, log = other.communicate(timeout=60 * SLACK)
        self.assertEqual(own.returncode, 0, own.stderr)
        self.assertEqual((other.returncode, out), (0, ""), log)


class LeaderWorkerSet(unittest.TestCase):
    def test_its_variables_are_read(self):
        """Number and count are those of the set; the port, which it fixes, is a free one here."""
        port = free_port()
        program = [PROGRAM, "run", MODEL, "What is 12 + 30?", "--temperature", "0", "--tp", "2", "-t", "1",
                   "--quiet", "--dist-init-addr", f"127.0.0.1:{port}"]
        variables = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2"}
        nodes = [subprocess.Popen(program, env={**ENVIRONMENT, **variables, "LWS_WORKER_INDEX": str(node)},
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for node in range(2)]
        for node in nodes:
            self.addCleanup(lambda node=node: node.poll() is None and node.kill())
        found = [node.communicate(timeout=60 * SLACK) for node in nodes]
        self.assertEqual([node.returncode for node in nodes], [0, 0], found)
        self.assertEqual(found[0][0].strip(), "12 + 30 = 42.")
        self.assertEqual(found[1][0], "")
        self.assertIn(f"node 1 (rank 1) of 2 joins node 0 at 127.0.0.1:{port}", found[1][1])


@unittest.skipUnless(shutil.which("mpirun"), "Open MPI's mpirun is not installed")
class Mpirun(unittest.TestCase):
    def test_two_processes_need_no_flags(self):
        environment = {**ENVIRONMENT, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", PROGRAM, "run", MODEL,
             "What is 12 + 30?", "--temperature", "0", "--tp", "2", "-t", "1", "--quiet"],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120 * SLACK)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.strip(), "12 + 30 = 42.")
        self.assertRegex(done.stderr, r"node 1 \(rank 1\) of 2 joins node 0 at 127\.0\.0\.1:\d+")


if __name__ == "__main__":
    unittest.main(verbosity=2)

#!/usr/bin/env python3
"""`fathom bench serve` on `fathom serve` with the bundled model: every kind of dataset, the labels that
scripts parse, counts that agree with the server's own, clients that disconnect.

    bench_serve_test.py PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS
"""
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

PROGRAM, SOURCE, WITH_FAULTS = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
TRACES = os.path.join(SOURCE, "tests/data/traces")
# Keeps FATHOM_CPU_ISA: the suite also runs with slow kernels.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}
FIRST_LABELS = [
    "Successful requests:", "Failed requests:", "Maximum request concurrency:",
    "Request rate configured (RPS):", "Benchmark duration (s):", "Total input tokens:",
    "Total generated tokens:", "Request throughput (req/s):", "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):", "Peak concurrent requests:",
    "Total token throughput (tok/s):"]
SECTIONS = {"TTFT": "---------------Time to First Token----------------",
            "TPOT": "-----Time per Output Token (excl. 1st token)------",
            "ITL": "---------------Inter-token Latency----------------",
            "E2EL": "----------------End-to-end Latency----------------"}


def bench(port, *flags, status=0):
    """Returns the report and the object of --save-result."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        done = subprocess.run(
            [PROGRAM, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}",
             "--save-result", "--result-filename", path, *flags],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        result = None
        if os.path.exists(path):
            with open(path) as file:
                result = json.load(file)
        return done.stdout, done.stderr, result


def figure(report, label):
    found = re.findall(rf"^{re.escape(label)} +([0-9.]+) *$", report, re.MULTILINE)
    assert len(found) == 1, f"{label} in\n{report}"
    return float(found[0])


class OneServer(unittest.TestCase):
    program, environment = PROGRAM, ENVIRONMENT

    @classmethod
    def setUpClass(cls):
        cls.process = subprocess.Popen(
            [cls.program, "serve", MODEL, "--port", "0", "--api-key", "sesame",
             "--no-log-requests"], stderr=subprocess.PIPE, env=cls.environment, text=True)
        cls.port = None
        for line in cls.process.stderr:
            found = re.search(r"serving .* on http://[^ ]*:(\d+)", line)
            if found:
                cls.port = int(found.group(1))
                break
        assert cls.port, "the server did not start"
        cls.reader = threading.Thread(target=cls.process.stderr.read, daemon=True)
        cls.reader.start()

    @classmethod
    def tearDownClass(cls):
        cls.process.send_signal(signal.SIGTERM)
        assert cls.process.wait(60) == 0
        cls.reader.join(10)
        cls.process.stderr.close()

    def metric(self, name):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics",
                                         headers={"Authorization": "Bearer sesame"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            text = reply.read().decode()
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                  if re.match(rf"{name}[{{ ]", line)]
        assert values, name
        return sum(values)

    def bench(self, *flags, status=0):
        return bench(self.port, "--api-key", "sesame", *flags, status=status)


class WithServer(OneServer):
    def test_random(self):
        before = self.metric("vllm:generation_tokens_total")
        report, _, result = self.bench(
            "--num-prompts", "12", "--random-input-len", "64", "--random-output-len", "16",
            "--ignore-eos", "--max-concurrency", "4", "--request-rate", "100", "--seed", "7",
            "--metric-percentiles", "99,99.9", "--goodput", "e2el:60000")
        lines = report.splitlines()
        self.assertEqual(lines[0], "============ Serving Benchmark Result ============")
        self.assertEqual(lines[-1], "=" * 50)
        at = -1
        for label in FIRST_LABELS:
            place = [i for i, line in enumerate(lines) if line.startswith(label)]
            self.assertEqual(len(place), 1, label)
            self.assertGreater(place[0], at, f"{label} is out of order")
            at = place[0]
        for name, title in SECTIONS.items():
            self.assertGreater(lines.index(title), at)
            at = lines.index(title)
            for i, kind in enumerate(("Mean", "Median", "P99", "P99.9"), 1):
                self.assertTrue(lines[at + i].startswith(f"{kind} {name} (ms):"), lines[at + i])
        self.assertEqual(figure(report, "Successful requests:"), 12)
        self.assertEqual(figure(report, "Failed requests:"), 0)
        self.assertEqual(figure(report, "Total input tokens:"), 12 * 64)
        self.assertEqual(figure(report, "Total generated tokens:"), 12 * 16)
        self.assertLessEqual(figure(report, "Peak concurrent requests:"), 4)
        self.assertGreater(figure(report, "Request goodput (req/s):"), 0)
        self.assertEqual(result["completed"], 12)
        self.assertEqual(result["max_concurrency"], 4)
        self.assertEqual(result["request_rate"], 100)
        self.assertEqual(result["request_goodput"], result["request_throughput"])
        for key in ("mean_ttft_ms", "median_tpot_ms", "p99_itl_ms", "p99.9_e2el_ms"):
            self.assertGreater(result[key], 0, key)
        self.assertGreaterEqual(result["mean_e2el_ms"], result["mean_ttft_ms"])
        self.assertEqual(self.metric("vllm:generation_tokens_total") - before, 12 * 16)

    def test_lines_of_other_load_generators(self):
        before = self.metric("vllm:generation_tokens_total")
        _, err, result = self.bench(
            "--backend", "vllm", "--model", "fathom-tiny", "--tokenizer", "fathom-tiny",
            "--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "128",
            "--prefix-repetition-suffix-len", "16", "--prefix-repetition-num-prefixes", "2",
            "--prefix-repetition-output-len", "4", "--num-prompts", "8", "--num-warmups", "3",
            "--ready-check-timeout-sec", "5", "--flush-cache", "--disable-tqdm", "--ignore-eos",
            "--max-concurrency", "1", "--goodput", "ttft:60000", "e2el:60000", "--top-p", "0.9",
            "--extra-body", '{"seed": 3}', "--metadata", "run=1", "--label", "night")
        self.assertIn("--tokenizer has no effect", err)
        self.assertEqual(result["completed"], 8)
        self.assertEqual(result["total_input_tokens"], 8 * 144)
        # All prompts but a prefix's first find it in the cache; the warm-up's pages are evicted.
        self.assertEqual(result["total_cached_tokens"], 6 * 128)
        self.assertEqual((result["backend"], result["label"], result["run"]), ("vllm", "night", "1"))
        self.assertEqual(self.metric("vllm:generation_tokens_total") - before, (8 + 3) * 4)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [PROGRAM, "bench", "serve", "--base-url", f"http://127.0.0.1:{self.port}",
                 "--api-key", "sesame", "--backend", "sglang-oai-chat", "--num-prompts", "1",
                 "--random-output-len", "2", "--random-input-len", "8", "--result-dir", folder,
                 "--result-filename", "r.json"], env=ENVIRONMENT, capture_output=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(folder, "r.json")) as file:
                self.assertEqual(json.load(file)["endpoint"], "/v1/chat/completions")

    def test_sharegpt_to_both_endpoints(self):
        talk = [{"conversations": [{"from": "human", "value": f"What is {i} + 30?"},
                                   {"from": "gpt", "value": "x" * 32}]} for i in range(6)]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(talk, file)
            file.flush()
            for endpoint in ("/v1/completions", "/v1/chat/completions"):
                report, _, result = self.bench(
                    "--dataset-name", "sharegpt", "--dataset-path", file.name, "--endpoint",
                    endpoint, "--ignore-eos", "--percentile-metrics", "ttft")
                self.assertEqual(result["completed"], 6, endpoint)
                self.assertEqual(result["total_output_tokens"], 6 * 8)
                self.assertGreater(result["total_input_tokens"], 6 * 5)
                self.assertIn("Mean TTFT (ms):", report)
                self.assertNotIn("E2EL", report)

    def test_ids_to_a_chat(self):
        _, _, result = self.bench("--num-prompts", "3", "--random-input-len", "40",
                                  "--random-output-len", "4", "--ignore-eos", "--endpoint",
                                  "/v1/chat/completions")
        self.assertEqual((result["completed"], result["total_output_tokens"]), (3, 12))
        # One token per letter, and the chat's markup.
        self.assertTrue(3 * 40 <= result["total_input_tokens"] <= 3 * 60, result)

    def test_azure(self):
        path = os.path.join(TRACES, "azure_conversation.csv")
        _, _, result = self.bench("--dataset-name", "azure", "--dataset-path", path,
                                  "--num-prompts", "8", "--time-scale", "0.1", "--length-scale",
                                  "0.1", "--ignore-eos")
        self.assertEqual(result["completed"], 8)
        with open(path) as file:
            rows = [line.strip().split(",") for line in file][1:9]
        self.assertEqual(result["total_input_tokens"], sum(round(int(r[1]) / 10) for r in rows))
        self.assertEqual(result["total_output_tokens"], sum(round(int(r[2]) / 10) for r in rows))
        first, last = (float(rows[i][0].rsplit(":", 1)[1]) for i in (0, -1))
        self.assertGreaterEqual(result["duration"], (last - first) / 10)

    def test_mooncake_shares_its_prefixes(self):
        path = os.path.join(TRACES, "mooncake_conversation.jsonl")
        _, _, result = self.bench("--dataset-name", "mooncake", "--dataset-path", path,
                                  "--time-scale", "0.05", "--length-scale", "0.125", "--ignore-eos",
                                  "--max-concurrency", "1")
        with open(path) as file:
            rows = [json.loads(line) for line in file]
        self.assertEqual(result["completed"], len(rows))
        # Blocks of 64 tokens, one page each; earlier whole pages are found in the cache. The last
        # token of a prompt is always computed.
        seen, shared = set(), 0
        for row in rows:
            length = round(row["input_length"] / 8)
            blocks = row["hash_ids"][:length // 64]
            hits = 0
            while hits < len(blocks) and blocks[hits] in seen and (hits + 1) * 64 < length:
                hits += 1
            shared += hits * 64
            seen.update(blocks)
        self.assertGreater(shared, 0)
        self.assertEqual(result["total_cached_tokens"], shared)

    def test_refusals_are_counted(self):
        _, errors, result = bench(self.port, "--model", "fathom-tiny", "--vocab-size", "100",
                                  "--num-prompts", "3", status=1)
        self.assertEqual((result["completed"], result["failed"]), (0, 3))
        self.assertIn("3 failed: 401", errors)
        _, errors, result = self.bench("--num-prompts", "2", "--random-input-len", "9000", status=1)
        self.assertEqual(result["failed"], 2)
        self.assertIn("2 failed: 400", errors)


class WithSlowServer(OneServer):
    # Steps of at least 5 ms: no completion ends before its client disconnects.
    program, environment = WITH_FAULTS, {**ENVIRONMENT, "FATHOM_FAULT": "step_ms:5"}

    def test_clients_that_leave(self):
        report, _, result = self.bench(
            "--num-prompts", "20", "--random-input-len", "16", "--random-output-len", "2000",
            "--ignore-eos", "--cancel-rate", "1", "--cancel-delay", "0.3")
        self.assertEqual((result["cancelled"], result["completed"], result["failed"]), (20, 0, 0))
        self.assertEqual(figure(report, "Cancelled requests:"), 20)
        end = time.monotonic() + 60
        while self.metric("vllm:num_requests_running") > 0:
            self.assertLess(time.monotonic(), end, "the server works for nobody")
            time.sleep(0.05)


class WithoutServer(unittest.TestCase):
    def test_bad_flags(self):
        for flags, expected in ((["--request-rate", "-1"], "--request-rate"),
                                (["--base-url", "https://x"], "base URL"),
                                (["--percentile-metrics", "x"], "--percentile-metrics"),
                                (["--metric-percentiles", "101"], "--metric-percentiles"),
                                (["--goodput", "itl:1"], "--goodput"),
                                (["--cancel-rate", "2"], "--cancel-rate"),
                                (["--dataset-name", "azure", "--vocab-size", "9", "--model", "m"],
                                 "--dataset-path")):
            done = subprocess.run([PROGRAM, "bench", "serve", *flags], env=ENVIRONMENT,
                                  capture_output=True, text=True, timeout=30)
            self.assertEqual(done.returncode, 2, flags)
            self.assertIn(expected, done.stderr)

    def test_a_stream_that_breaks_off_has_failed(self):
        class Breaks(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n')

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaks) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            _, errors, result = bench(server.server_port, "--model", "m", "--vocab-size", "100",
                                      "--num-prompts", "2", status=1)
            server.shutdown()
        self.assertEqual(result["failed"], 2)
        self.assertIn("[DONE]", errors)


if __name__ == "__main__":
    unittest.main()

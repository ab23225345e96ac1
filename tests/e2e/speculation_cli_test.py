#!/usr/bin/env python3
"""Speculation in the whole program: its flags, and what replies, reports and metrics say of it.

    speculation_cli_test.py PROGRAM SOURCE_DIR [TEST…]
"""
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

from fathom_server import ANSWER, ENVIRONMENT, MODEL, PROGRAM, QUESTION, SLACK, SOURCE, Server

COMPUTE = "What is 12 + 30?"
WITHOUT_LAYER = os.path.join(SOURCE, "tests/goldens/v2lite")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# A build without CUDA prints a line more on a machine with a GPU.
ON_CPU = {**ENVIRONMENT, "FATHOM_DEVICE": "cpu"}


def fathom(*arguments, stdin="", status=0):
    done = subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, text=True,
                          timeout=600 * SLACK, env=ON_CPU)
    assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def run(model, *flags, status=0):
    return fathom("run", model, COMPUTE, "--temperature", "0", "-q", *flags, status=status)


def copy_without(tensor):
    """Returns a folder of links to the bundled model in which a tensor has another name."""
    folder = tempfile.mkdtemp(prefix="fathom-mtp-")
    for name in os.listdir(MODEL):
        os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
    index_path = os.path.join(folder, "model.safetensors.index.json")
    with open(index_path, encoding="utf-8") as file:
        index = json.load(file)
    other = tensor[:-1] + "x"  # as long: offsets stay
    shard = os.path.join(folder, index["weight_map"][tensor])
    index["weight_map"][other] = index["weight_map"].pop(tensor)
    os.remove(index_path)
    with open(index_path, "w", encoding="utf-8") as file:
        json.dump(index, file)
    with open(shard, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8:8 + length]
    quoted = f'"{tensor}"'.encode()
    assert header.count(quoted) == 1
    os.remove(shard)
    with open(shard, "wb") as file:
        file.write(data[:8] + header.replace(quoted, f'"{other}"'.encode()) + data[8 + length:])
    return folder


class Flags(unittest.TestCase):
    def test_refused_values(self):
        for flags, parts in (
                (["--mtp", "4"], ["--mtp", "4", "0", "3"]),
                (["--mtp", "-1"], ["--mtp", "-1"]),
                (["--speculative-num-steps", "9"], ["9", "3"]),
                (["--mtp", "2", "--no-mtp"], ["--mtp 2", "--no-mtp"]),
                (["--mtp", "2", "--speculative-config", '{"method": "mtp"}'],
                 ["--mtp 2", "--speculative-config"]),
                (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 4}'],
                 ["num_speculative_tokens is 4", "0 to 3"])):
            with self.subTest(flags):
                _, err = run(MODEL, *flags, status=2)
                self.assertEqual(err.count("\n"), 1, err)
                for part in parts:
                    self.assertIn(part, err)

    def test_a_model_without_the_layer_runs_with_one_line(self):
        bench = ["bench", "latency", WITHOUT_LAYER, "--input-len", "8", "--output-len", "4",
                 "--batch-size", "1", "--num-iters", "1", "--num-iters-warmup", "0", "--device", "cpu"]
        lines = [line for line in fathom(*bench, "--mtp", "2")[1].splitlines() if "MTP" in line]
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("--mtp 2", lines[0])
        self.assertIn("has no MTP layer", lines[0])
        for flags in ([], ["--no-mtp"], ["--mtp", "0"]):
            self.assertNotIn("no MTP layer", fathom(*bench, *flags)[1], flags)

    def test_missing_tensors_are_refused_by_name_if_drafts_are_wanted(self):
        for tensor in ("model.layers.8.eh_proj.weight", "model.layers.8.mlp.experts.3.up_proj.weight"):
            folder = copy_without(tensor)
            self.addCleanup(shutil.rmtree, folder)
            _, err = run(folder, "--mtp", "2", status=2)
            self.assertIn(f'"{tensor}"', err)
            self.assertIn("--no-mtp", err)
            for flags in ([], ["--no-mtp"], ["--mtp", "0"]):
                self.assertEqual(run(folder, *flags)[0], ANSWER + "\n", flags)

    def test_answers_and_the_last_line(self):
        without, _ = run(MODEL, "--no-mtp")
        for drafts in "123":
            out, err = fathom("run", MODEL, COMPUTE, "--temperature", "0", "--mtp", drafts,
                              "--mtp-always")
            self.assertEqual(out, without)
            found = re.search(r"([\d.]+) tokens a step with (\d+) of (\d+) drafts accepted",
                              err.splitlines()[-1])
            self.assertTrue(found, err)
            self.assertGreater(float(found[1]), 1)
            self.assertLessEqual(int(found[2]), int(found[3]))
        _, err = fathom("run", MODEL, COMPUTE, "--temperature", "0", "--no-mtp")
        self.assertNotIn("drafts", err)

    def test_evaluation_sets_score_the_same(self):
        sets = [part for name in ("arithmetic", "json", "tools")
                for part in ("--set", os.path.join(SOURCE, "tests/data/eval", f"{name}.jsonl"))]

        def evaluate(*flags):
            out, err = fathom("eval", MODEL, *sets, "--limit", "6", "--json", "--wrong", "-q",
                              "--device", "cpu", *flags)
            return ({name: (score["correct"], score["of"], score["generated_tokens"])
                     for name, score in json.loads(out)["scores"].items()}, err)

        without = evaluate("--no-mtp")
        self.assertEqual(len(without[0]), 3)
        self.assertEqual(evaluate("--mtp", "3", "--mtp-always"), without)

    def test_chats_statistics_by_position(self):
        shown = fathom("chat", MODEL, "--mtp", "2", "--mtp-always", "--temperature", "0",
                       stdin=f"{COMPUTE}\n/stats\n/exit\n")
        self.assertRegex("".join(shown), r"Drafts: \d+ of \d+ accepted \([\d.]+ %; by position [\d.]+")


class Serving(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--mtp", "3", "--mtp-always", "--device", "cpu")

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    def test_usage_of_every_interface_is_what_the_metrics_count(self):
        server = self.server
        chat = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}

        def of_stream(path, body, name, *keys):
            value = [data for event, data in server.events(path, body)
                     if event == name and data != "[DONE]" and keys[0] in data][-1]
            for key in keys:
                value = value[key]
            return value

        asked = (
            lambda: server.post("/v1/chat/completions", chat)["usage"]["completion_tokens_details"],
            lambda: server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 40})
            ["usage"]["completion_tokens_details"],
            lambda: server.post("/v1/responses", {"input": COMPUTE, "temperature": 0})
            ["usage"]["output_tokens_details"],
            lambda: server.post("/v1/messages", chat)["usage"],
            lambda: of_stream("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}},
                              None, "usage")["completion_tokens_details"],
            lambda: of_stream("/v1/responses", {"input": COMPUTE, "temperature": 0},
                              "response.completed", "response", "usage", "output_tokens_details"),
            lambda: of_stream("/v1/messages", chat, "message_delta", "usage"))
        for number, ask in enumerate(asked):
            before = self.counts()
            details = ask()
            # A reply's last bytes may leave before its step's counts are published.
            server.wait_until(lambda: self.counts() == [was + step for was, step in zip(
                before, [details["accepted_tokens"]] * 2)], f"reply {number}: {details}, {before}")
            self.assertGreater(details["accepted_tokens"], 0, number)

    def counts(self):
        return [self.server.metric("vllm:spec_decode_num_accepted_tokens_total"),
                self.server.metric(PER_POSITION)]

    def test_a_request_may_want_fewer(self):
        server = self.server
        texts = []
        for drafts in (0, 1, 2, 3):
            drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
            reply = server.post("/v1/chat/completions",
                                {"messages": QUESTION, "temperature": 0, "speculation": drafts})
            texts.append(reply["choices"][0]["message"]["content"])
            details = reply["usage"]["completion_tokens_details"]
            self.assertEqual("accepted_tokens" in details, drafts > 0)
            if drafts == 0:
                self.assertEqual(server.metric("vllm:spec_decode_num_draft_tokens_total"), drafted)
        self.assertEqual(set(texts), {ANSWER})
        for wrong in (-1, 4, "2", 1.5):
            error = server.post("/v1/chat/completions",
                                {"messages": QUESTION, "speculation": wrong}, status=400)["error"]
            self.assertEqual(error["param"], "speculation", wrong)

    def test_the_load_generators_report(self):
        before = self.counts()[0]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "result.json")
            out, _ = fathom("bench", "serve", "--base-url", f"http://127.0.0.1:{self.server.port}",
                            "--num-prompts", "4", "--random-input-len", "32", "--random-output-len",
                            "24", "--ignore-eos", "--save-result", "--result-filename", path)
            with open(path, encoding="utf-8") as file:
                result = json.load(file)
        accepted = int(re.search(r"^Accepted draft tokens: +(\d+) *$", out, re.MULTILINE)[1])
        self.assertGreater(accepted, 0)
        self.assertEqual(result["total_accepted_tokens"], accepted)
        self.server.wait_until(lambda: self.counts()[0] == before + accepted, "the counts")


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""The program with the bundled model, called as by a person or a script.

    cli_test.py PROGRAM SOURCE_DIR PROGRAM_WITH_FAULTS
"""
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest

PROGRAM, SOURCE, WITH_FAULTS = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
MODEL = os.path.join(SOURCE, "models/fathom-tiny")
# Keeps FATHOM_CPU_ISA: the suite also runs with slow kernels.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}


def fathom(*arguments, stdin="", status=0, environment=None):
    done = subprocess.run([PROGRAM, *arguments], input=stdin.encode(), capture_output=True,
                          timeout=120, env={**ENVIRONMENT, **(environment or {})})
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{out}\n{err}"
    return out, err


class Run(unittest.TestCase):
    def test_answers_on_stdout_and_the_rest_on_stderr(self):
        out, err = fathom("run", MODEL, "What is 12 + 30?", "--temperature", "0")
        self.assertEqual(out, "12 + 30 = 42.\n")
        self.assertIn("Memory plan", err)
        self.assertRegex(err.splitlines()[-1],
                         r"^12 tokens, first after [\d.]+ ms, then [\d.,]+ tokens/s \(prompt of 14")
        self.assertNotIn("\033", err)

    def test_ranks_have_one_plan_and_one_progress_bar(self):
        _, alone = fathom("run", MODEL, "Hi", "--max-tokens", "1")
        self.assertNotIn("a rank", alone)
        _, err = fathom("run", MODEL, "Hi", "--max-tokens", "1", "--tp", "2")
        self.assertEqual(err.count("Memory plan"), 1)
        self.assertEqual(err.count("Loading weights: 100 %"), 1)
        self.assertEqual(err.count("Loading"), alone.count("Loading"))
        amounts = {name: float(amount) for name, amount in
                   re.findall(r"^  (\w[\w ,]*?) {2,}([\d.]+) GiB", err, re.MULTILINE)}
        found = re.search(r"a rank, of 2 .* ([\d.]+) weights, ([\d.]+) working space, ([\d.]+) latent", err)
        # Amounts are told to 0.0001 GiB. Working space: of the larger of the two ranks.
        for name, amount in zip(("weights", "working space", "latent cache"), found.groups()):
            self.assertAlmostEqual(float(amount), amounts[name] / 2, delta=0.005, msg=name)
        self.assertAlmostEqual(amounts["a rank, of 2"], sum(map(float, found.groups())), delta=0.0003)

    def test_prompt_from_stdin_and_without_a_model(self):
        for arguments in ([MODEL], [MODEL, "-"], []):
            out, _ = fathom("run", "-q", *arguments, "--temperature", "0",
                            stdin="What is 12 + 30?\n")
            self.assertEqual(out, "12 + 30 = 42.\n")
        out, _ = fathom("run", "-q", "What is 12 + 30?", "--temperature", "0")
        self.assertEqual(out, "12 + 30 = 42.\n")

    def test_one_word_that_is_no_model_is_the_prompt(self):
        out, err = fathom("run", "-q", "hello", "--max-tokens", "3")
        self.assertTrue(out)
        self.assertIn('fathom: "hello" is no model here, so it is the text for the bundled model\n',
                      err)
        # With a prompt on stdin the word is taken as a model, which does not exist.
        _, err = fathom("run", "-q", "hello", stdin="What is 12 + 30?", status=2)
        self.assertIn("hello: neither a directory nor in the Hugging Face cache", err)
        _, err = fathom("run", "-q", "modles/fathom-tiny", status=2)
        self.assertIn("the prompt on stdin is empty", err)
        out, _ = fathom("tokenize", "hello", "--json")
        self.assertIn("ids", json.loads(out))

    def test_reasoning_is_not_part_of_a_piped_answer(self):
        out, _ = fathom("run", "-q", "What is 12 + 30?", "--temperature", "0", "--thinking")
        self.assertEqual(out, "12 + 30 = 42.\n")

    def test_answer_matches_a_schema_a_regex_or_a_choice(self):
        schema = {"type": "object", "required": ["n", "kind"], "properties": {
            "n": {"type": "integer", "minimum": 10, "maximum": 99}, "kind": {"enum": ["a", None]}}}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(schema))
            file.flush()
            for given in (json.dumps(schema), file.name):
                out, _ = fathom("run", "-q", MODEL, "Anything.", "--json-schema", given, "--seed", "1")
                self.assertEqual(sorted(json.loads(out)), ["kind", "n"])
        out, _ = fathom("run", "-q", "What is 12 + 30?", "--regex", "[0-9]{2} (apples|pears)",
                        "--thinking", "--temperature", "0")
        self.assertRegex(out, r"^[0-9]{2} (apples|pears)\n$")
        out, _ = fathom("run", "-q", "What is 12 + 30?", "--choice", "41", "--choice", "42",
                        "--temperature", "0")
        self.assertEqual(out, "42\n")

    def test_what_cannot_be_matched_is_refused(self):
        for arguments, message in (
                (["--regex", "a", "--choice", "b"],
                 "--json-schema, --regex and --choice exclude each other"),
                (["--regex", "a(?!b)"],
                 "regex: Regex parsing error at position 4: Lookahead is not supported yet."),
                (["--json-schema", '{"type": "object", "not": {}}'],
                 "json_schema: not is not supported"),
                (["--json-schema", "no-such-file"], "--json-schema: no-such-file: ")):
            _, err = fathom("run", "-q", MODEL, "Anything.", *arguments, status=2)
            self.assertIn(message, err)

    def test_json_has_ids_and_logprobs(self):
        out, _ = fathom("run", MODEL, "--ids", "0,8176,1407,8177,8189", "--max-tokens", "5",
                        "--temperature", "0", "--ignore-eos", "--logprobs", "20",
                        "--prompt-logprobs", "--json", "-q")
        reply = json.loads(out)
        self.assertEqual(list(reply), ["prompt_ids", "ids", "text", "logprobs", "prompt_logprobs",
                                       "finish_reason", "usage", "timings"])
        self.assertEqual(reply["prompt_ids"], [0, 8176, 1407, 8177, 8189])
        self.assertEqual(len(reply["ids"]), 5)
        self.assertEqual([t["id"] for t in reply["logprobs"]], reply["ids"])
        for token in reply["logprobs"]:  # greedy: the token is the most likely one
            self.assertEqual(len(token["top"]), 20)
            self.assertEqual(token["top"][0], {"id": token["id"], "logprob": token["logprob"]})
        self.assertIsNone(reply["prompt_logprobs"][0])
        self.assertEqual([t["id"] for t in reply["prompt_logprobs"][1:]], reply["prompt_ids"][1:])
        self.assertEqual(reply["finish_reason"], "length")
        self.assertEqual(reply["usage"]["total_tokens"], 10)

    def test_the_same_seed_gives_the_same_tokens(self):
        def ids(seed, *more):
            out, _ = fathom("run", "-q", "Tell me a story", "--json", "--max-tokens", "20",
                            "--temperature", "1.2", "--seed", seed, *more)
            return json.loads(out)
        self.assertEqual(ids("7")["ids"], ids("7")["ids"])
        self.assertNotEqual(ids("7")["ids"], ids("8")["ids"])
        choices = ids("7", "--choices", "3")["choices"]
        self.assertEqual([c["index"] for c in choices], [0, 1, 2])
        self.assertEqual(choices[0]["ids"], ids("7")["ids"])

    def test_stop_ends_the_text_before_it(self):
        out, _ = fathom("run", "-q", "What is 12 + 30?", "--temperature", "0", "--stop", " =")
        self.assertEqual(out, "12 + 30\n")

    def test_environment_counts_unless_a_flag_does(self):
        out, _ = fathom("run", "-q", "Tell me a story", "--json",
                        environment={"FATHOM_MAX_TOKENS": "3"})
        self.assertEqual(len(json.loads(out)["ids"]), 3)

    def test_chat_template_names_a_format_or_holds_one(self):
        with open(os.path.join(MODEL, "tokenizer_config.json"), encoding="utf-8") as file:
            template = json.load(file)["chat_template"]
        ask = ("run", "-q", MODEL, "What is 12 + 30?", "--temperature", "0", "--chat-template")
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
            file.write(template)
            file.flush()
            for given in (file.name, "fathom-tiny"):
                self.assertEqual(fathom(*ask, given)[0], "12 + 30 = 42.\n")
            _, err = fathom(*ask, file.name, "--chat-format", "deepseek-v3", status=2)
            self.assertIn("--chat-format and --chat-template", err)
        with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
            file.write("{{ messages }}")
            file.flush()
            _, err = fathom(*ask, file.name, status=2)
            self.assertIn("holds no template that Fathom knows; known are deepseek-v2", err)
        _, err = fathom(*ask, "/no/such/file", status=2)
        self.assertIn("--chat-template: /no/such/file", err)

    def test_float32_and_fp8_cache_run(self):
        for flags in (["--dtype", "float32"], ["--kv-cache-dtype", "fp8"],
                      ["--attention", "mha"], ["--attention", "absorbed"], ["--threads", "1"]):
            out, _ = fathom("run", "-q", "What is 12 + 30?", "--temperature", "0", *flags)
            self.assertEqual(out, "12 + 30 = 42.\n", flags)


class BadInput(unittest.TestCase):
    def check(self, arguments, part):
        out, err = fathom(*arguments, status=2)
        self.assertEqual(out, "")
        self.assertTrue(err.startswith("fathom: "), err)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertIn(part, err)

    def test_paths(self):
        for command in ("run", "chat", "inspect", "tokenize", "eval"):
            self.check([command, "/nonexistent/model", *(["x"] if command == "run" else [])],
                       "/nonexistent/model")

    def test_folders_that_are_no_models(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check(["run", folder, "x"], "config.json")
            config = os.path.join(folder, "config.json")
            with open(config, "w") as file:
                file.write("{")
            self.check(["run", folder, "x"], "config.json")
            with open(os.path.join(MODEL, "config.json")) as source, open(config, "w") as file:
                file.write(source.read().replace('"hidden_size": 256', '"hidden_size": -1'))
            self.check(["run", folder, "x"], "hidden_size")
            os.remove(config)
            for name in ("config.json", "tokenizer.json"):
                os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
            self.check(["run", folder, "x"], "safetensors")

    def test_flags(self):
        self.check(["run", "--tempratur", "0", "x y"], "did you mean --temperature?")
        self.check(["run", "-q", "x y", "--max-tokens", "9000"], "max_tokens")
        self.check(["run", "-q", "x y", "--device", "cpu", "--deterministic"], "--deterministic")


class Others(unittest.TestCase):
    def test_tokenize_and_back(self):
        text = "Höhle 123 <think>"
        out, _ = fathom("tokenize", MODEL, text, "--json")
        ids = json.loads(out)["ids"]
        self.assertEqual(ids[-1], 8188)
        out, _ = fathom("tokenize", MODEL, "--decode", ",".join(map(str, ids)))
        self.assertEqual(out, text + "\n")
        out, _ = fathom("tokenize", MODEL, text, "--json", "--no-special")
        self.assertNotIn(8188, json.loads(out)["ids"])
        out, _ = fathom("tokenize", MODEL, "--count", stdin=text)
        self.assertEqual(int(out), len(ids))

    def test_inspect(self):
        out, _ = fathom("inspect", MODEL)
        self.assertIn("deepseek_v3", out)
        out, _ = fathom("inspect", MODEL, "--json")
        self.assertIsInstance(json.loads(out), dict)

    def test_eval(self):
        out, _ = fathom("eval", MODEL, "-q", "--limit", "10", "--json", "--set",
                        os.path.join(SOURCE, "tests/data/eval/json.jsonl"))
        scores = json.loads(out)["scores"]["json"]
        self.assertEqual((scores["of"], scores["correct"]), (10, 10))

    def test_bench_tells_the_loads_of_experts(self):
        out, _ = fathom("bench", "throughput", "-q", "--num-prompts", "4", "--input-len", "16",
                        "--output-len", "8", "--dp", "2", "--enable-expert-parallel", "--json")
        result = json.loads(out)
        tokens = result["expert_tokens"]
        self.assertEqual([len(layer) for layer in tokens], [16] * 7)
        # Every layer routes every token to 4 experts; the last token of a completion is not computed.
        routed = set(map(sum, tokens))
        self.assertEqual(len(routed), 1)
        self.assertEqual(routed.pop() % 4, 0)
        self.assertGreaterEqual(sum(tokens[0]), 4 * 4 * (16 + 7))
        self.assertEqual(len(result["expert_layer_balance"]), 7)
        for balance in [result["expert_balance"], *result["expert_layer_balance"]]:
            self.assertTrue(0.5 <= balance <= 1, balance)
        self.assertEqual(result["expert_moves"], 0)

    def test_bench(self):
        out, _ = fathom("bench", "latency", "-q", "--input-len", "16", "--output-len", "8",
                        "--num-iters", "2", "--json")
        report = json.loads(out)
        self.assertEqual(len(report["latencies"]), 2)
        self.assertGreater(report["decode_tokens_per_second"], 0)
        out, _ = fathom("bench", "throughput", "-q", "--num-prompts", "4", "--input-len", "16",
                        "--output-len", "8")
        self.assertRegex(out, r"Successful requests: +4 *\n")
        self.assertRegex(out, r"Total generated tokens: +32 *\n")
        trace = os.path.join(SOURCE, "tests/data/traces/azure_conversation.csv")
        out, _ = fathom("bench", "throughput", "-q", "--num-prompts", "3", "--dataset-name", "azure",
                        "--dataset-path", trace, "--json")
        with open(trace) as file:
            lengths = [line.split(",") for line in file.read().splitlines()[1:4]]
        report = json.loads(out)
        self.assertEqual(report["total_input_tokens"], sum(int(line[1]) for line in lengths))
        self.assertEqual(report["total_output_tokens"], sum(int(line[2]) for line in lengths))
        _, err = fathom("bench", "throughput", "--dataset-path", trace, status=2)
        self.assertIn("--dataset-name random reads no file", err)

    def test_dummy_weights_need_only_a_config(self):
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(os.path.join(MODEL, "config.json"), os.path.join(folder, "config.json"))
            out, _ = fathom("bench", "latency", folder, "-q", "--load-format", "dummy",
                            "--num-hidden-layers", "2", "--output-len", "4", "--num-iters", "1",
                            "--json")
            self.assertEqual(json.loads(out)["num_layers"], 2)

    def test_help_and_version(self):
        self.assertIn("run", fathom("--help")[0])
        self.assertIn("--max-model-len", fathom("run", "--help")[0])
        version = fathom("--version")[0]
        self.assertRegex(version, r"^fathom \d+\.\d+\.\d+\S*\ncommit \S+.*\nCPU: .*\nGPU: "
                         r"(none, built without CUDA and NCCL|\S+, CUDA \d\S*, NCCL \S+)\n$")
        program = json.loads(fathom("env", "--json")[0])["fathom"]
        self.assertIn(program["commit"], version)
        self.assertIn(program["version"], version)

    def test_help_about_a_word(self):
        out, _ = fathom("serve", "--help=queue")
        self.assertIn("--max-queued-requests", out)
        self.assertNotIn("--threads", out)
        _, err = fathom("serve", "--help=zeppelin", status=2)
        self.assertEqual(err, 'fathom: fathom serve has no flag about "zeppelin"\n')

    def test_env_is_a_report_without_keys(self):
        environment = {"FATHOM_API_KEY": "sk-secret", "FATHOM_THREADS": "2"}
        report = json.loads(fathom("env", "--json", environment=environment)[0])
        report["environment"].pop("FATHOM_CPU_ISA", None)  # of the suite with slow kernels
        report["environment"].pop("FATHOM_DEVICE", None)  # of the suite on a machine with a GPU
        self.assertEqual(report["environment"],
                         {"FATHOM_API_KEY": "(set)", "FATHOM_THREADS": "2"})
        text, _ = fathom("env", environment=environment)
        self.assertIn("FATHOM_THREADS", text)
        self.assertNotIn("sk-secret", text)


class Chat(unittest.TestCase):
    def test_lines_from_a_pipe(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "chat.json")
            out, err = fathom("chat", MODEL, "-q", "--temperature", "0", stdin=(
                'What is 3 + 4?\n/stats\n/reset\n"""What is\n12 + 30?"""\n/save ' + path + "\n"))
            self.assertTrue(out.startswith("3 + 4 = 7.\n"), out)
            self.assertIn("2 messages", err)
            with open(path) as file:
                messages = json.load(file)["messages"]
            self.assertEqual([m["role"] for m in messages], ["user", "assistant"])
            self.assertEqual(messages[0]["content"], "What is\n12 + 30?")

    def test_an_unknown_command_is_said_and_counts_as_failure(self):
        _, err = fathom("chat", MODEL, "-q", stdin="/rest\n", status=1)
        self.assertIn("did you mean /reset?", err)

    def test_ctrl_c_stops_the_answer_only(self):
        pid, terminal = pty.fork()
        if pid == 0:
            # Steps of at least 10 ms: the completion is still running when it is interrupted.
            os.execve(WITH_FAULTS, [WITH_FAULTS, "chat", MODEL, "-q", "--ignore-eos",
                                    "--temperature", "0"],
                      {**ENVIRONMENT, "TERM": "xterm", "FATHOM_FAULT": "step_ms:10"})
        seen = b""

        def read_until(part, seconds=60):
            nonlocal seen
            end = time.monotonic() + seconds
            while part not in seen:
                self.assertLess(time.monotonic(), end, seen[-400:])
                if not select.select([terminal], [], [], 1)[0]:
                    continue
                try:
                    seen += os.read(terminal, 4096)
                except OSError:
                    self.fail(f"ended after {seen[-400:]}")
            seen = seen[seen.index(part) + len(part):]

        try:
            read_until(b"> ")
            os.write(terminal, b"What is 3 + 4?\n")
            read_until(b"3 + 4 = 7.")  # continues, because end-of-sequence is ignored
            os.write(terminal, b"\x03")
            read_until(b"stopped")
            read_until(b"> ")
            os.write(terminal, b"/stats\n")
            read_until(b"2 messages")
            read_until(b"> ")
            os.write(terminal, b"\x03")
            read_until(b"once more")
            read_until(b"> ")
            os.write(terminal, b"\x03")
            status = None
            end = time.monotonic() + 30
            while status is None and time.monotonic() < end:
                done, code = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                time.sleep(0.05)
            self.assertEqual(status, 130)
        finally:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(terminal)


if __name__ == "__main__":
    unittest.main()

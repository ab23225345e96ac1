#!/usr/bin/env python3
"""The manual page and the shell completions that the program generates.

    generate_test.py PROGRAM
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("FATHOM_")}
COMMANDS = ["run", "chat", "serve", "route", "eval", "bench latency", "bench throughput",
            "bench serve", "inspect", "quantize", "convert", "tokenize", "env"]


def output(*command, **options):
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
                          **options)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def flags_of(command):
    """Returns the long flags in the left column of --help."""
    text, _ = output(PROGRAM, *command.split(), "--help")
    return {name for line in text.splitlines() if re.match(r"  -", line)
            for name in re.findall(r"--[a-z][a-z0-9-]*", line[2:].split("  ")[0])}


class Generate(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def made(self, what):
        path = os.path.join(self.folder, what)
        text, _ = output(PROGRAM, "generate", what)
        with open(path, "w") as file:
            file.write(text)
        return path, text

    def test_the_page_has_every_flag_and_no_warning(self):
        path, text = self.made("man")
        plain = text.replace("\\-", "-")
        for command in COMMANDS:
            begin = plain.index(f'.SS "fathom {command}"')
            section = plain[begin:plain.find(".SS", begin + 1)]
            flags = flags_of(command)
            self.assertIn("--help", flags)
            for flag in flags:
                self.assertIn(f"\\fB{flag}\\fR", section, command)
        if shutil.which("groff"):
            shown, warnings = output("groff", "-man", "-Tutf8", "-K", "utf8", "-ww", path)
            self.assertEqual(warnings, "")
            self.assertIn("max-num-seqs", shown)

    def complete_bash(self, path, line):
        script = (f"source {path}; COMP_WORDS=({line} ''); "
                  "COMP_WORDS[${#COMP_WORDS[@]}-1]=$2; "
                  "COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _fathom; printf '%s\\n' \"${COMPREPLY[@]}\"")
        return script

    def test_bash_completes_commands_flags_and_values(self):
        path, _ = self.made("bash")

        def completed(line, current):
            out, err = output("bash", "-c", self.complete_bash(path, line), "bash", "", current,
                              cwd=self.folder)
            self.assertEqual(err, "")
            return out.split()

        self.assertEqual(set(completed("fathom", "")), {c.split()[0] for c in COMMANDS})
        self.assertEqual(completed("fathom", "tok"), ["tokenize"])
        self.assertEqual(completed("fathom bench", ""), ["latency", "throughput", "serve"])
        self.assertEqual(completed("fathom run", "--max-model"), ["--max-model-len"])
        self.assertEqual(completed("fathom bench serve", "--prefix-repetition-num"),
                         ["--prefix-repetition-num-prefixes"])
        self.assertEqual(completed("fathom run --dtype", "f"), ["float32"])
        self.assertEqual(completed("fathom run --dtype float32", "--dt"), ["--dtype"])
        os.mkdir(os.path.join(self.folder, "deepseek"))
        self.assertEqual(completed("fathom serve", "deep"), ["deepseek"])
        for command in COMMANDS:
            self.assertEqual(flags_of(command) - set(completed(f"fathom {command}", "-")), set())

    def test_the_other_shells_read_theirs(self):
        for shell in ("zsh", "fish"):
            path, text = self.made(shell)
            self.assertIn("max-num-seqs", text)
            if shutil.which(shell):
                output(shell, "-n", path)
        if shutil.which("fish"):
            out, _ = output("fish", "--no-config", "-c",
                            f"source {path}; complete -C 'fathom run --dtype '; "
                            "complete -C 'fathom bench serve --prefix-repetition-num'")
            self.assertEqual([line.split("\t")[0] for line in out.splitlines()],
                             ["auto", "bfloat16", "float32", "--prefix-repetition-num-prefixes"])


if __name__ == "__main__":
    unittest.main()

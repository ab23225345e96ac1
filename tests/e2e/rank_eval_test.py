#!/usr/bin/env python3
"""The evaluation sets over ranks, as `fathom eval` scores them: each set within a point of one rank;
over data- and expert-parallel ranks the answers of one rank, as far as counts and wrong answers tell.

Called as TEST PROGRAM SOURCE_DIR [LIMIT]: LIMIT questions of each set, 0: all. Slow.
"""
import json
import os
import subprocess
import sys
import unittest

PROGRAM, SOURCE = sys.argv.pop(1), sys.argv.pop(1)
LIMIT = sys.argv.pop(1) if len(sys.argv) > 1 else "0"
SETS = ("arithmetic", "json", "retrieval", "tools")
# Each prompt in one step: where a prompt is cut, which depends on a lane's load, decides over last bits.
WHOLE_PROMPTS = ("--max-num-batched-tokens", "8192")


def evaluate(*flags):
    """Correct answers of each set and their number, and the wrong answers."""
    command = [PROGRAM, "eval", os.path.join(SOURCE, "models/fathom-tiny"), "--device", "cpu",
               "--quiet", "--json", "--wrong", "--limit", LIMIT, *WHOLE_PROMPTS, *flags]
    for name in SETS:
        command += ["--set", os.path.join(SOURCE, "tests/data/eval", f"{name}.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)["scores"]
    print(" ".join(flags) or "one rank",
          {name: f"{scores[name]['correct']}/{scores[name]['of']}" for name in SETS}, flush=True)
    return scores, done.stderr


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scores, cls.wrong = evaluate()

    def expect_same(self, *flags):
        scores, wrong = evaluate(*flags)
        for name in SETS:
            self.assertEqual(scores[name]["correct"], self.scores[name]["correct"], name)
        self.assertEqual(wrong, self.wrong)

    def expect_near(self, *flags):
        scores, _ = evaluate(*flags)
        for name in SETS:
            point = max(1, self.scores[name]["of"] / 100)
            self.assertAlmostEqual(scores[name]["correct"], self.scores[name]["correct"],
                                   delta=point, msg=name)

    def test_data_parallel(self):
        self.expect_same("--dp", "2")

    def test_expert_parallel(self):
        self.expect_same("--dp", "2", "--enable-expert-parallel")

    def test_tensor_parallel(self):
        self.expect_near("--tp", "2")

    def test_both(self):
        self.expect_near("--tp", "2", "--dp", "2")


if __name__ == "__main__":
    unittest.main(verbosity=2)

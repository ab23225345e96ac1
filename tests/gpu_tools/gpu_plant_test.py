#!/usr/bin/env python3
"""tools/gpu_plant.sh says which planted faults the tests miss, and counts no crash as seen.
usage: gpu_plant_test.py ROOT"""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
# What `make gpu-plant` builds: the script needs no other.
PROGRAMS = re.findall(r"\w+_test", re.search(r"--build \$\(PLANT\) --target (.*)",
                                            (ROOT / "Makefile").read_text()).group(1))


class Plant(unittest.TestCase):
    def run_with(self, body):
        """The script over test programs that are this shell code; $FATHOM_PLANT is the fault."""
        with tempfile.TemporaryDirectory() as folder:
            for name in PROGRAMS:
                program = pathlib.Path(folder) / name
                program.write_text(f"#!/bin/sh\n{body}\n")
                program.chmod(0o755)
            return subprocess.run([str(ROOT / "tools/gpu_plant.sh"), folder], text=True,
                                  capture_output=True, check=False)

    SEES = '[ "$FATHOM_PLANT" = none ] || { echo "a.cc:1: Failure"; echo "[  FAILED  ] x"; exit 1; }'

    def test_all_seen(self):
        done = self.run_with(self.SEES)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("0 not as they must be", done.stdout)

    def test_one_missed(self):
        done = self.run_with('[ "$FATHOM_PLANT" = half_logit ] && exit 0\n' + self.SEES)
        script = (ROOT / "tools/gpu_plant.sh").read_text()
        listed = re.findall(r"(?m)^half_logit ", script)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(re.findall(r"(\w+) +NOT SEEN", done.stdout), ["half_logit"] * len(listed))

    def test_a_crash_is_not_seen(self):
        done = self.run_with('[ "$FATHOM_PLANT" = wrong_key ] && exit 139\n' + self.SEES)
        self.assertEqual(done.returncode, 1)
        self.assertIn("(status 139)", done.stdout)

    def test_a_test_that_fails_without_a_fault(self):
        done = self.run_with('echo "a.cc:1: Failure"; echo "[  FAILED  ] x"; exit 1')
        self.assertEqual(done.returncode, 1)
        self.assertIn("no fault: ", done.stdout)

    def test_every_fault_of_the_kernels_is_planted(self):
        source = (ROOT / "src/device/cuda/planted_fault.cc").read_text()
        names = re.findall(r'"(\w+)"', source[source.index("kNames"):source.index("static_assert")])
        script = (ROOT / "tools/gpu_plant.sh").read_text()
        for name in names:
            if name != "none":
                self.assertRegex(script, rf"(?m)^{name} ")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

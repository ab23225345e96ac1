#!/usr/bin/env python3
"""Which of racecheck's reports tools/gpu_sanitize.sh takes for known handoffs: those with known code on
either side, and no others. usage: gpu_sanitize_test.py ROOT"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
PASSED = "[  PASSED  ] 3 tests.\n"


def report(kind, first, second):
    return (f"========= {kind}: Race reported between {first[0]} access at {first[1]}+0x10 in a.cu:1\n"
            f"=========     and {second[0]} access at {second[1]}+0x20 in a.cuh:2 [16 hazards]\n"
            "========= \n")


JOIN = "void scaled_few_tokens::Products<(bool)1>::join<(int)8>(float (&)[8])"
MULTIPLY = "ScaledExpertMultiplier<Shape<(int)2>>::multiply(int)"
SCALES = "ScaledExpertScaler<Shape<(int)2>>::write(int)"
END = "latent_8_bit::RowsAttention<Row>::end(const LatentDecodePart &, int)"
OUT = "void latent_8_bit::write_out<(int)64, Shared>(Shared &)"
OUT_OF_FEW = "void latent_8_bit::write_out<(int)16, Shared>(Shared &)"
OTHER = "void other_kernel<(int)1>(Arguments)"


class Reports(unittest.TestCase):
    def accepted(self, log):
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            file.write(log)
            file.flush()
            return subprocess.run([str(ROOT / "tools/gpu_sanitize.sh"), "--check-log", file.name],
                                  check=False).returncode == 0

    def test_both_sides_known(self):
        for first, second in ((JOIN, JOIN), (MULTIPLY, SCALES), (SCALES, MULTIPLY), (END, OUT),
                              (OUT, OUT)):
            self.assertTrue(self.accepted(
                report("Error", ("Write", first), ("Read", second)) + PASSED), (first, second))

    def test_one_side_known(self):
        for known in (JOIN, MULTIPLY, SCALES, END, OUT):
            for pair in ((known, OTHER), (OTHER, known)):
                self.assertFalse(self.accepted(
                    report("Error", ("Write", pair[0]), ("Read", pair[1])) + PASSED), pair)

    def test_sides_of_different_handoffs(self):
        for first, second in ((JOIN, OUT), (MULTIPLY, MULTIPLY), (END, OUT_OF_FEW)):
            self.assertFalse(self.accepted(
                report("Error", ("Write", first), ("Read", second)) + PASSED), (first, second))

    def test_one_unknown_among_known_ones(self):
        known = report("Error", ("Write", JOIN), ("Read", JOIN))
        unknown = report("Error", ("Write", OTHER), ("Read", OTHER))
        for log in (known + unknown, unknown + known):
            self.assertFalse(self.accepted(log + PASSED))

    def test_a_last_report_without_a_line_behind_it(self):
        log = PASSED + report("Error", ("Write", OTHER), ("Read", OTHER)).removesuffix("========= \n")
        self.assertFalse(self.accepted(report("Error", ("Write", JOIN), ("Read", JOIN)) + log))

    def test_failed_tests(self):
        known = report("Error", ("Write", JOIN), ("Read", JOIN))
        self.assertFalse(self.accepted(known))
        self.assertFalse(self.accepted(known + PASSED + "[  FAILED  ] 1 test\n"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

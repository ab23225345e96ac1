#!/usr/bin/env python3
"""Which of racecheck's reports tools/gpu_sanitize.sh takes for known handoffs: those with known code on
either side, and no others. Where a report has only a kernel and an offset, machine code says which code it is.
usage: gpu_sanitize_test.py ROOT"""

import os
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

LAYERS = "decode_layers_kernel::"
COPY = "copy_bytes_under(unsigned long, void *, const void *, int, unsigned long *)"
SLOT_READS = (f"Pair {LAYERS}multiply_step_bf16<(int)4096>(const unsigned char *, const uint4 &, int)",
              "Pair multiply_step<(int)0>(const unsigned char *, const Sixteen &, int)",
              f"uint2 {LAYERS}load_rope<Row>(const std::byte *, int)",
              f"void {LAYERS}load_words(const std::byte *, unsigned int (&)[4])",
              f"void {LAYERS}V2LiteLayers<Row, Layout>::products<Lambda>(int, int, const float *)",
              f"{LAYERS}Steps<Row, Layout, Layers>::absorb()")
RUN = f"{LAYERS}Steps<Row, Layout, Layers>::run()"
PAGES = f"{LAYERS}FeederOf<Row, Layout, Feeder>::keys_of(int, int) const"
JOIN_GROUPS = f"void {LAYERS}Steps<Row, Layout, Layers>::join_groups(int, int, KeySums<Row> &) const"
NEWEST = f"void {LAYERS}Steps<Row, Layout, Layers>::put_newest_keys(int, int, const KeyRange &) const"
LATENT = "void store_latent<Row>(const Eight (&)[2], int, std::byte *)"
VALUES = f"{LAYERS}Steps<Row, Layout, Layers>::values()"


class Reports(unittest.TestCase):
    def accepted(self, log, *program):
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            file.write(log)
            file.flush()
            return subprocess.run([str(ROOT / "tools/gpu_sanitize.sh"), "--check-log", file.name, *program],
                                  check=False, capture_output=True).returncode == 0

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

    def test_each_access_of_a_report_is_a_pair(self):
        known = report("Error", ("Write", JOIN), ("Read", JOIN)).removesuffix("========= \n")
        for further, expected in ((JOIN, True), (OTHER, False)):
            log = f"{known}=========     and Read access at {further}+0x30 in a.cuh:3\n========= \n"
            self.assertEqual(self.accepted(log + PASSED), expected, further)

    def test_pairs_of_decode_layers_alone(self):
        pairs = [(COPY, read) for read in SLOT_READS]
        pairs += [("store_release_in_block(unsigned int *, unsigned int)",
                   "load_acquire_in_block(const unsigned int *)"), (RUN, PAGES), (COPY, NEWEST),
                  (LATENT, NEWEST), ("store_eight(const Eight &, __nv_bfloat16 *)", NEWEST)]
        for first, second in pairs:
            log = report("Error", ("Write", first), ("Read", second)) + PASSED
            self.assertTrue(self.accepted(log, "/gpu/decode_layers_cuda_test"), (first, second))
            self.assertFalse(self.accepted(log, "/gpu/scaled_linear_cuda_test"), (first, second))
            self.assertFalse(self.accepted(log), (first, second))
        for first, second in ((COPY, COPY), (COPY, RUN), (RUN, JOIN_GROUPS), (JOIN_GROUPS, VALUES),
                              (LATENT, SLOT_READS[2]), (OTHER, PAGES)):
            log = report("Error", ("Write", first), ("Read", second)) + PASSED
            self.assertFalse(self.accepted(log, "/gpu/decode_layers_cuda_test"), (first, second))

    def test_warnings_of_references(self):
        read = "fathom::cuda::latent_rows::Attention<(int)1, (LatentKeys)1>::multiply_others_values(int)"
        write = "fathom::cuda::latent_rows::Attention<(int)1, (LatentKeys)1>::publish(const unsigned int (&)[16])"
        for kind, first, second, expected in (("Warning", read, write, True), ("Error", read, write, False),
                                              ("Warning", read, OTHER, False), ("Warning", OTHER, write, False)):
            self.assertEqual(self.accepted(report(kind, ("Read", first), ("Write", second)) + PASSED), expected)

    def test_a_last_report_without_a_line_behind_it(self):
        log = PASSED + report("Error", ("Write", OTHER), ("Read", OTHER)).removesuffix("========= \n")
        self.assertFalse(self.accepted(report("Error", ("Write", JOIN), ("Read", JOIN)) + log))

    def test_failed_tests(self):
        known = report("Error", ("Write", JOIN), ("Read", JOIN))
        self.assertFalse(self.accepted(known))
        self.assertFalse(self.accepted(known + PASSED + "[  FAILED  ] 1 test\n"))


class Lines(unittest.TestCase):
    """Which programs are run, over a sanitizer that finds nothing."""

    def programs(self, only):
        done = subprocess.run([str(ROOT / "tools/gpu_sanitize.sh"), "/nowhere", "memcheck"],
                              env={**os.environ, "COMPUTE_SANITIZER": "/bin/true", "ONLY": only},
                              check=True, capture_output=True, text=True)
        return [line.split()[1] for line in done.stdout.splitlines()]

    def test_all_or_those_named(self):
        every = self.programs("")
        self.assertGreater(len(every), 20)
        self.assertEqual(len(every), len(set(every)))
        wanted = ["mtp_rows_cuda_test", "sparse_latent_cuda_test"]
        self.assertEqual(sorted(self.programs(" ".join(wanted))), wanted)
        self.assertEqual(self.programs("rows_cuda_test"), [])  # no program's whole name


KERNEL = "_ZN3gpu7productILi{}EEEv4Maps"  # void gpu::product<N>(Maps)
SOURCE = """\
// First class.
class Other {
 public:
  __device__ void join() {
    write();
  }
};

// Second class.
class Products {
 public:
  template <int kCount>
  __device__ bool join(float (&d)[kCount]) {
    exchange[0] = d[0];
    if (late) {
      d[0] += exchange[0];
    }
  }
  int count_ = 0;

  __device__ void down() {
    sums[0] += d[0];
  }
};

__global__ void product(Maps maps) {
  run(maps);
}
"""


class Sites(unittest.TestCase):
    """Reports that name a kernel and offsets, over tools that print this machine code."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.source = self.folder / "products.cuh"
        self.source.write_text(SOURCE)
        self.lines = SOURCE.splitlines()
        self.code = ""
        self.write_tool("cuobjdump", "cat > one.cubin <<'END'\n_ZN3gpu7productILi1EEEv4Maps\nEND\n")

    def write_tool(self, name, body):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}")
        path.chmod(0o755)

    def kernel(self, number, *instructions, name=KERNEL):
        """Instructions: offset and text of the line of source that they are from."""
        name = name.format(number)
        self.code += f'\t.section\t.text.{name},"ax",@progbits\n.text.{name}:\n'
        for offset, text in instructions:
            line = 1 + next(i for i, line in enumerate(self.lines) if text in line)
            self.code += (f'\t//## File "{self.source}", line {line} inlined at "{self.source}", line 27\n'
                          f'\t//## File "{self.source}", line 27\n'
                          f"        /*{offset:04x}*/                   LDS.128 R16, [R2] ;\n"
                          f"        /*{offset + 16:04x}*/                   NOP ;\n")
        self.write_tool("nvdisasm", f"cat <<'END'\n{self.code}END\n")

    def accepted(self, *offsets, kernel="void gpu::<unnamed>::product<(int)1>(Maps)"):
        log = self.folder / "log"
        first, second = (f"{kernel}+{offset:#x}" for offset in offsets)
        log.write_text(f"========= Error: Race reported between Write access at {first}\n"
                       f"=========     and Read access at {second} in a.cu:3 [16 hazards]\n"
                       "========= \n" + PASSED)
        done = subprocess.run([str(ROOT / "tools/gpu_sanitize.sh"), "--check-log", log, "program"],
                              env={**os.environ, "CUDA_TOOLS": str(self.folder)}, check=False)
        return done.returncode == 0

    def test_known_on_both_sides(self):
        self.kernel(1, (0x100, "exchange[0] = d[0]"), (0x25260, "d[0] += exchange"))
        self.assertTrue(self.accepted(0x100, 0x25270))
        self.assertTrue(self.accepted(0x25260, 0x110))

    def test_known_on_one_side(self):
        for other in ("sums[0] += d[0]", "write();", "int count_", "run(maps)"):
            self.code = ""
            self.kernel(1, (0x100, "exchange[0] = d[0]"), (0x200, other))
            self.assertFalse(self.accepted(0x100, 0x200), other)
            self.assertFalse(self.accepted(0x200, 0x100), other)

    def test_offsets_of_another_kernel(self):
        self.kernel(1, (0x100, "exchange[0] = d[0]"))
        self.kernel(2, (0x200, "exchange[0] = d[0]"))
        self.assertFalse(self.accepted(0x100, 0x200))
        self.assertTrue(self.accepted(0x200, 0x200, kernel="void gpu::<unnamed>::product<(int)2>(Maps)"))

    def test_kernels_of_one_name_that_differ(self):
        offsets = range(0x100, 0x500, 0x40)
        self.kernel(1, *((offset, "exchange[0] = d[0]") for offset in offsets))
        self.kernel(1, *((offset, "sums[0] += d[0]") for offset in offsets),
                    name="_ZN5other7productILi{}EEEv4Maps")
        for offset in offsets:
            self.assertFalse(self.accepted(offset, offset))

    def test_without_the_tools(self):
        self.write_tool("nvdisasm", "exit 1\n")
        self.assertFalse(self.accepted(0x100, 0x100))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

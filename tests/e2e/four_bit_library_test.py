#!/usr/bin/env python3
"""Four-bit checkpoints of other seeds than the stored ones, written and read by the publishers'
libraries, against Fathom's reader to the bit.

usage: four_bit_library_test.py CHECKPOINT_TEST SOURCE_DIR [SEEDS]

Needs the packages of tools/requirements-four-bits.txt (tools/test_slow.sh installs them).
"""

import os
import pathlib
import subprocess
import sys
import tempfile


def main():
    program, source = sys.argv[1], pathlib.Path(sys.argv[2])
    seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(source / "tools/make_four_bit_goldens.py"), folder,
                        "--seeds", ",".join(str(seed + 1) for seed in range(seeds))], check=True)
        for seed in sorted(os.listdir(folder)):
            subprocess.run([program, "--gtest_filter=*FourBitLibrary*", "--gtest_brief=1"], check=True,
                           env={**os.environ,
                                "FATHOM_FOUR_BIT_GOLDENS": os.path.join(folder, seed)})
    print(f"{seeds} passed, 0 failed")


if __name__ == "__main__":
    main()

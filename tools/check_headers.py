#!/usr/bin/env python3
"""Proves that every header compiles on its own, with what it includes itself. Those that need CUDA are
left out where its toolkit is not."""
import concurrent.futures
import os
import pathlib
import subprocess
import sys


CUDA = pathlib.Path("/usr/local/cuda/include")


def needs_cuda(header: pathlib.Path) -> bool:
    return "device/cuda" in header.as_posix() or header.stem.endswith("_cuda")


def compile_alone(root: pathlib.Path, header: pathlib.Path) -> str:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-I", str(root / "src"),
               "-I", str(root / "bench"), "-isystem", str(CUDA), "-x", "c++", "-include", str(header), "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    headers = sorted(header for header in (root / "src").rglob("*.h")
                     if CUDA.is_dir() or not needs_cuda(header))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [text for text in pool.map(lambda h: compile_alone(root, h), headers) if text]
    print("\n".join(failures) if failures else f"self-contained headers: ok ({len(headers)})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

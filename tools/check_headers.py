#!/usr/bin/env python3
"""Proves that every header compiles on its own, with what it includes itself. A header that a source
includes before all else is proven by the build, unless the source's room is built in batches, where
others come before it; the rest are compiled here. Those that need CUDA are left out where its toolkit
is not. --all: compiles each of them, without relying on the build."""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys


CUDA = pathlib.Path("/usr/local/cuda/include")
FIRST_DIRECTIVE = re.compile(r"^\s*#\s*(.*)$", re.MULTILINE)


def needs_cuda(header: pathlib.Path) -> bool:
    return "device/cuda" in header.as_posix() or header.stem.endswith("_cuda")


def proven_by_build(src: pathlib.Path) -> set[pathlib.Path]:
    """The headers that a source compiled by itself begins with. nvcc's sources do not count: it
    includes the CUDA runtime before them."""
    rooms = [file.parent for file in src.rglob("CMakeLists.txt")
             if "fathom_build_in_batches" not in file.read_text()]
    proven = set()
    for source in (source for room in rooms for source in room.glob("*.cc")):
        first = FIRST_DIRECTIVE.search(source.read_text())
        if first and (own := re.match(r'include "(.*)"', first[1])):
            proven.add(src / own[1])
    return proven


def compile_alone(root: pathlib.Path, header: pathlib.Path) -> str:
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-I", str(root / "src"),
               "-I", str(root / "bench"), "-isystem", str(CUDA), "-x", "c++", "-include", str(header), "/dev/null"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    headers = sorted(header for header in (root / "src").rglob("*.h")
                     if CUDA.is_dir() or not needs_cuda(header))
    alone = set(headers) if "--all" in sys.argv[1:] else set(headers) - proven_by_build(root / "src")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [text for text in pool.map(lambda h: compile_alone(root, h), sorted(alone)) if text]
    print("\n".join(failures) if failures else
          f"self-contained headers: ok ({len(headers)}, {len(alone)} of them compiled alone)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

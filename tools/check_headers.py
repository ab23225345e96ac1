#!/usr/bin/env python3
"""Proves that every header compiles on its own, with what it includes itself. Those that need CUDA are
left out where its toolkit is not.

Libraries' headers take most of the time, so some sets of them are compiled beforehand. A header is given
a set only if it includes all of it, directly or through others: then it has nothing from the set that it
would not have alone."""
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = pathlib.Path("/usr/local/cuda/include")
# What is compiled beforehand; the first that fits is taken.
STATUS = ["fmt/format.h", "string", "tl/expected.hpp"]
JSON = [*STATUS, "boost/json.hpp"]
SETS = [[*JSON, "chrono", "condition_variable", "functional"], JSON, STATUS,
        ["string", "vector"], ["string"], ["vector"]]
COMPILE = ["g++", "-std=c++20", "-Wall", "-Wextra", "-I", str(ROOT / "src"), "-I", str(ROOT / "bench"),
           "-isystem", str(CUDA), "-isystem", "/usr/include/eigen3", "--param", "ggc-min-heapsize=524288"]
INCLUDE = re.compile(r'^\s*#\s*include\s*(<[^>]*>|"[^"]*")', re.MULTILINE)


def needs_cuda(header: pathlib.Path) -> bool:
    return "device/cuda" in header.as_posix() or header.stem.endswith("_cuda")


@functools.cache
def libraries_of(header: pathlib.Path) -> frozenset[str]:
    """The headers of libraries that it includes, through others of the project too."""
    found = set()
    for name in INCLUDE.findall(header.read_text()):
        own = ROOT / "src" / name[1:-1]
        if name[0] == "<":
            found.add(name[1:-1])
        elif own.exists():
            found |= libraries_of(own)
    return frozenset(found)


def compile_beforehand(header: pathlib.Path, libraries: list[str]) -> None:
    header.write_text("".join(f"#include <{name}>\n" for name in libraries))
    subprocess.run([*COMPILE, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)


def compile_alone(folder: pathlib.Path, header: pathlib.Path) -> str:
    first = [folder / f"{i}.h" for i, libraries in enumerate(SETS)
             if libraries_of(header).issuperset(libraries)][:1]
    includes = [word for file in (*first, header) for word in ("-include", str(file))]
    result = subprocess.run([*COMPILE, "-fsyntax-only", "-x", "c++", *includes, "/dev/null"],
                            capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def main() -> int:
    headers = sorted(header for header in (ROOT / "src").rglob("*.h")
                     if CUDA.is_dir() or not needs_cuda(header))
    with tempfile.TemporaryDirectory() as name, \
            concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = pathlib.Path(name)
        list(pool.map(lambda i: compile_beforehand(folder / f"{i}.h", SETS[i]), range(len(SETS))))
        failures = [text for text in pool.map(lambda h: compile_alone(folder, h), headers) if text]
    print("\n".join(failures) if failures else f"self-contained headers: ok ({len(headers)})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Prints a log of racecheck with the functions that its accesses are in.

    tools/sanitizer_sites.py PROGRAM LOG

In large programs the sanitizer names an access by its kernel and an offset alone, although the code there
is inlined from elsewhere: "access at void kernel<(int)1>(Arguments)+0x252a0". This finds the line of source at
that offset in the program's machine code, and the function around the line, and writes its name instead:
"access at Products<>::join<>()+0x252a0 in products_cuda.cuh:193". What it cannot resolve stays as it is.

Needs cuobjdump and nvdisasm of the CUDA toolkit (PATH, /usr/local/cuda/bin, or the folder CUDA_TOOLS),
c++filt, and a program built with -lineinfo.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The offset is taken for the kernel's: an access whose inlined function is named has an own name.
ACCESS = re.compile(r"access at (?P<name>[^=\n]*?)\+0x(?P<offset>[0-9a-f]+)(?: in \S+:\d+)?")


def tool(name):
    folders = [os.environ.get("CUDA_TOOLS", ""), *os.environ["PATH"].split(":"), "/usr/local/cuda/bin"]
    return shutil.which(name, path=":".join(filter(None, folders)))


def kernel_key(name):
    """A kernel's last name with its template arguments, as the sanitizer and as c++filt write them."""
    name = re.sub(r"\(bool\)([01])", lambda match: ("false", "true")[int(match[1])], name)
    name = name.replace("(anonymous namespace)", "").replace("<unnamed>", "")
    name = re.sub(r"\((?:unsigned |signed )?(?:int|long|short|char)\)", "", name)
    depth, begin = 0, 0
    for i, char in enumerate(name):
        depth += (char == "<") - (char == ">")
        if depth == 0 and char in ": ":
            begin = i + 1
        if depth == 0 and char == "(":
            return name[begin:i].replace(" ", "")
    return name[begin:].replace(" ", "")


def sites_of(disassembly):
    """{(kernel, offset): (file, line)}, the innermost place of each instruction."""
    sites, kernel, place, is_new = {}, None, None, True
    for line in disassembly.splitlines():
        if section := re.match(r"\.text\.(\S+):", line):
            kernel, place = section[1], None
        elif comment := re.match(r'\s*//## File "([^"]*)", line (\d+)', line):
            if is_new:  # the first of several is the innermost
                place, is_new = (comment[1], int(comment[2])), False
        elif instruction := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+\S", line):
            is_new = True
            if kernel and place:
                sites[kernel, int(instruction[1], 16)] = place
    return sites


def function_around(path, line):
    """The function that a line of source is in, "Class<>::name<>()"; none where layout does not tell."""
    file = pathlib.Path(path)
    if not file.exists() and "/src/" in path:  # built elsewhere
        file = ROOT / "src" / path.split("/src/", 1)[1]
    if not file.exists():
        return None
    lines = file.read_text().splitlines()[:line]
    indent, name = None, None
    for text in reversed(lines):
        if name is None and re.match(r"( {2})?}", text) and text is not lines[-1]:
            return None  # behind a function's end
        if name is None:
            # clang-format: a member begins two spaces from the left, another function at the margin.
            begin = re.match(r"( {2})?(?! )(?:[\w:<>*&, ]+ )?__(?:device|global)__ .*?(\w+)\(", text)
            if begin:
                indent, name = len(begin[1] or ""), begin[2]
                if indent == 0:
                    return f"{name}<>()"
        elif owner := re.match(r"(?:class|struct) (\w+)", text):
            return f"{owner[1]}<>::{name}<>()"
    return None


def read_sites(program, names):
    """Sites of the kernels with these keys: {(key, offset): {(file, line)}}."""
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if not cuobjdump or not nvdisasm:
        print("sanitizer_sites: cuobjdump and nvdisasm are not found", file=sys.stderr)
        return {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xelf", "all", os.path.abspath(program)], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        for cubin in pathlib.Path(folder).iterdir():
            code = cubin.read_bytes()
            if not any(re.match(r"\w+", name)[0].encode() in code for name in names):
                continue
            text = subprocess.run([nvdisasm, "--print-line-info-inline", cubin], check=True,
                                  capture_output=True, text=True).stdout
            sites = sites_of(text)
            mangled = sorted({kernel for kernel, _ in sites})
            plain = subprocess.run(["c++filt"], input="\n".join(mangled), check=True,
                                   capture_output=True, text=True).stdout.splitlines()
            keys = dict(zip(mangled, map(kernel_key, plain)))
            for (kernel, offset), place in sites.items():
                found.setdefault((keys[kernel], offset), set()).add(place)
    return found


def main():
    program, log = sys.argv[1:]
    text = pathlib.Path(log).read_text(errors="replace")
    names = {kernel_key(match["name"]) for match in ACCESS.finditer(text)}
    sites = read_sites(program, {name for name in names if re.match(r"\w", name)})

    def resolved(match):
        places = sites.get((kernel_key(match["name"]), int(match["offset"], 16)), set())
        if len(places) != 1:  # none, or kernels of one name
            return match[0]
        path, line = next(iter(places))
        function = function_around(path, line)
        if function is None:
            return match[0]
        return f"access at {function}+0x{match['offset']} in {os.path.basename(path)}:{line}"

    sys.stdout.write(ACCESS.sub(resolved, text))


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as failure:
        sys.exit(f"sanitizer_sites: {failure}")

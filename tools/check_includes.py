#!/usr/bin/env python3
"""Proves the direction of includes: a room includes only the rooms below it.

The table is the plan of the house (ARCHITECTURE.md, "Rooms"). A room that is not in it, or an
include that is not allowed, is an error with its file and line.
"""
import pathlib
import re
import sys

ROOMS = {
    "base": [],
    "tensor": ["base"],
    "device": ["base", "tensor"],
    "checkpoint": ["base", "tensor"],
    "tokenizer": ["base"],
    "chat": ["base"],
    "cache": ["base", "tensor", "device"],
    "ops": ["base", "tensor", "device", "cache"],
    "model": ["base", "tensor", "device", "cache", "checkpoint", "ops"],
    "engine": ["base", "tensor", "device", "cache", "checkpoint", "tokenizer", "ops", "model"],
    "cli": ["base", "tensor", "device", "cache", "checkpoint", "tokenizer", "chat", "ops", "model",
            "engine", "bench"],
}
# Tests and benchmarks may use more: the machine probe, JSON for the files they make up.
FOR_TESTS = re.compile(r"(_test|_bench)\.cc$|(^|/)fake_[a-z_]+\.(cc|h)$")
# What a room must not see although it is no room of ours.
FORBIDDEN = {
    "engine": [re.compile(r"boost/|base/json\.h|CLI/")],
    "ops": [re.compile(r"boost/|base/json\.h")],
    "model": [re.compile(r"boost/|base/json\.h")],
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    errors = []
    files = 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cc"):
            continue
        files += 1
        for_tests = FOR_TESTS.search(str(path.relative_to(root)))
        room = path.relative_to(root).parts[0]
        if room not in ROOMS:
            errors.append(f"{path}: room '{room}' is not in the table of tools/check_includes.py")
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = match.group(1) or match.group(2)
            other = target.split("/")[0]
            allowed = other == room or other in ROOMS[room] or (for_tests and other == "bench")
            if match.group(1) and not allowed:
                errors.append(f"{path}:{number}: {room} may not include {target}")
            if not for_tests and any(pattern.match(target) for pattern in FORBIDDEN.get(room, [])):
                errors.append(f"{path}:{number}: {room} may not include {target}")
    print("\n".join(errors) if errors else f"include direction: ok ({files} files)")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

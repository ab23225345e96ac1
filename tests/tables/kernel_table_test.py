#!/usr/bin/env python3
"""The tables of docs/kernels/README.md name every CUDA room that holds a kernel, each of its .cu files in one
row, and no room or file that is gone. usage: kernel_table_test.py ROOT"""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
ROOM = re.compile(r"fathom_cuda_room\(\s*(\w+)\s+SOURCES\s+([^)]*)\)")


def rooms_of(root):
    """The .cu files of each target that fathom_cuda_room() makes, by its name without fathom_."""
    rooms = {}
    for folder in ("src", "tests"):
        for path in sorted((root / folder).rglob("CMakeLists.txt")):
            for name, arguments in ROOM.findall(path.read_text()):
                sources = arguments.split("DEPS")[0].split()
                rooms[name] = {pathlib.PurePath(source).name for source in sources if source.endswith(".cu")}
    return rooms


def rows_of(text):
    """Each table row with its cells by their column's head."""
    rows, head = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = cells
        elif not set(line) <= set("|- "):
            rows.append((line, dict(zip(head, cells, strict=True))))
    return rows


def problems(text, rooms):
    found, named = [], {}
    for line, cells in rows_of(text):
        room = cells["room"].strip("`")
        if room not in rooms:
            found.append(f"no room {room}: {line}")
            continue
        for file in re.findall(r"`(\w+\.cu)`", cells["kernel"]):
            if file not in rooms[room]:
                found.append(f"room {room} has no {file}")
            named[room, file] = named.get((room, file), 0) + 1
    for room, files in rooms.items():
        for file in sorted(files):
            count = named.get((room, file), 0)
            if count != 1:
                found.append(f"{count} rows name {file} of room {room}, one should")
    return found


class KernelTable(unittest.TestCase):
    def setUp(self):
        self.rooms = rooms_of(ROOT)
        self.text = (ROOT / "docs/kernels/README.md").read_text()

    def test_every_room_is_found_in_the_build_files(self):
        calls = sum(path.read_text().count("fathom_cuda_room(") for folder in ("src", "tests")
                    for path in (ROOT / folder).rglob("CMakeLists.txt"))
        self.assertEqual(len(self.rooms), calls)
        self.assertGreater(calls, 40)

    def test_every_room_with_a_kernel_is_named(self):
        self.assertEqual(problems(self.text, self.rooms), [])

    def test_a_row_that_is_removed_is_missed(self):
        with_kernel = [line for line, cells in rows_of(self.text) if ".cu`" in cells["kernel"]]
        self.assertGreater(len(with_kernel), 40)
        for line in with_kernel:
            self.assertNotEqual(problems(self.text.replace(line + "\n", ""), self.rooms), [], line)

    def test_a_room_that_is_gone_is_seen(self):
        first = rows_of(self.text)[0][1]["room"]
        self.assertNotEqual(problems(self.text.replace(first, "`gone_cuda`"), self.rooms), [])


if __name__ == "__main__":
    unittest.main()

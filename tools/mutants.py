#!/usr/bin/env python3
"""Plants single faults in the sources, one at a time, and reports which ones the tests see.

tests/mutants/ROOM.toml lists the faults of a room. An entry:

    [[fault]]
    name  = "second-piece-from-the-firsts-offset"
    file  = "src/checkpoint/load_plan.cc"
    text  = "entry.offset + first + done"   # occurs exactly once in the file
    fault = "entry.offset + first"          # what stands there instead
    tests = ["checkpoint"]                  # ctest names; one of them has to fail
    first = "LoadPlan.*"                    # optional: the tests that probably see it run first

A test is a program of GoogleTest, or a script of Python's unittest that is given programs of the
build (robust_lifecycle); `first` then is "Class.test".

The work is done in build/mutants/tree, a copy of the checkout with a build folder of its own; the
checkout itself is only read. A fault is seen if a test program fails, crashes or exceeds its time
limit. Results go to build/mutants/results.jsonl as they come.

    tools/mutants.py                     all faults
    tools/mutants.py engine 'cache/*'    a room's, or those whose ROOM/NAME matches
    tools/mutants.py --check             only whether every text is found exactly once
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
BUILD = TREE / "build" / "release"
RESULTS = WORK / "results.jsonl"
FIELDS = {"name", "file", "text", "fault", "tests"}
OPTIONAL_FIELDS = {"first"}

# A test program may take so many times what it takes without a fault, and never less than this.
TIME_FACTOR = 10
LEAST_LIMIT_S = 60
BASELINE_LIMIT_S = 900
BUILD_LIMIT_S = 3600


class Refused(Exception):
    """What keeps the script from going on; one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Fault:
    room: str
    name: str
    file: str
    text: str
    fault: str
    tests: tuple
    first: str = ""

    @property
    def title(self):
        return f"{self.room}/{self.name}"

    @property
    def is_compiled(self):
        """Otherwise its tests read the file while they run: nothing else is planted meanwhile."""
        return self.file.endswith((".cc", ".h", ".cu", ".cuh"))

    @property
    def key(self):
        what = (self.title, self.file, self.text, self.fault, self.tests)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def read_faults():
    faults = []
    for path in sorted((ROOT / "tests" / "mutants").glob("*.toml")):
        where = path.relative_to(ROOT)
        try:
            entries = tomllib.loads(path.read_text(encoding="utf-8")).get("fault", [])
        except tomllib.TOMLDecodeError as failure:
            raise Refused(f"{where}: {failure}") from failure
        for entry in entries:
            if set(entry) - OPTIONAL_FIELDS != FIELDS:
                raise Refused(f"{where}: {entry.get('name')}: fields are {sorted(FIELDS)} and, "
                              f"where wanted, {sorted(OPTIONAL_FIELDS)}")
            entry["tests"] = tuple(entry["tests"])
            faults.append(Fault(room=path.stem, **entry))
    titles = [fault.title for fault in faults]
    for title in titles:
        if titles.count(title) > 1:
            raise Refused(f"tests/mutants: {title} is there twice")
    return faults


def what_is_wrong(fault):
    """Why the fault cannot be planted in this checkout; empty if it can."""
    path = ROOT / fault.file
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    if fault.text == fault.fault or not fault.tests:
        return "changes nothing, or names no test"
    if text is not None and text.count(fault.text) == 1:
        return ""
    if text is not None and text.count(fault.text) > 1:
        return f"{fault.file} has its text {text.count(fault.text)} times; give more of the line"
    elsewhere = [
        str(other.relative_to(ROOT))
        for other in sorted((ROOT / "src").rglob("*.cc"))
        if other != path and fault.text in other.read_text(encoding="utf-8")
    ]
    hint = f"; {', '.join(elsewhere)} has it" if elsewhere else ""
    gone = "does not have its text any more" if text is not None else "is no file any more"
    return f"{fault.file} {gone}{hint}"


def check(faults):
    wrong = [(fault, what_is_wrong(fault)) for fault in faults]
    wrong = [(fault, reason) for fault, reason in wrong if reason]
    for fault, reason in wrong:
        print(f"tests/mutants/{fault.room}.toml: {fault.name}: {reason}", file=sys.stderr)
    return not wrong


# Processes that run, each the leader of a group: a signal ends them with all that they started.
_running = set()


def run(command, limit_s, **options):
    """(exit status, output); the status is None if the limit was exceeded."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **options,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output.decode(errors="replace")
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        return None, output.decode(errors="replace")
    except BaseException:  # interrupted
        kill(process)
        raise
    finally:
        _running.discard(process)


def kill(process):
    """First so that ninja ends its compilers, which are no members of its group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            pass
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def write_if_different(path, data, mode):
    """Keeps the time of what is equal, so that it is not built again."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def sync_tree():
    """Makes the tree what the checkout is: tracked files and new ones, as they are on the disk."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode().split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for name in names:
        source = ROOT / name
        write_if_different(TREE / name, source.read_bytes(), source.stat().st_mode)
    for path in list(TREE.rglob("*")):
        name = path.relative_to(TREE)
        if name.parts[0] != "build" and path.is_file() and str(name) not in names:
            path.unlink()
    third_party = TREE / "build" / "third_party"
    if (ROOT / "build" / "third_party").is_dir() and not third_party.exists():
        third_party.parent.mkdir(parents=True, exist_ok=True)
        third_party.symlink_to(ROOT / "build" / "third_party")


def configure(faults):
    alone = ";".join(sorted({fault.file for fault in faults}))
    command = ["cmake", "--preset", "release", "-DFATHOM_CUDA=OFF", "-DFATHOM_BENCHMARKS=OFF",
               f"-DFATHOM_ALONE={alone}"]
    if shutil.which("ccache"):
        command += ["-DCMAKE_C_COMPILER_LAUNCHER=ccache", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    status, output = run(command, BUILD_LIMIT_S, cwd=TREE)
    if status != 0:
        raise Refused(f"the tree cannot be configured:\n{output[-4000:]}")


@functools.cache
def registered_tests():
    """What ctest runs, by its name."""
    status, output = run(["ctest", "--show-only=json-v1"], 60, cwd=BUILD)
    if status != 0:
        raise Refused(f"ctest does not list the tests:\n{output[-4000:]}")
    return {test["name"]: test for test in json.loads(output)["tests"]}


@dataclasses.dataclass(frozen=True)
class TestCommand:
    """How a test is run: its command, without the names of tests, and its variables."""
    command: tuple
    environment: dict

    @staticmethod
    def of(test):
        if test not in registered_tests():
            raise Refused(f"the build has no test named {test}")
        registered = registered_tests()[test]
        properties = {one["name"]: one["value"] for one in registered["properties"]}
        # A program that is not built yet has no command.
        command = registered.get("command", [f"{properties['WORKING_DIRECTORY']}/{test}_test"])
        return TestCommand(tuple(command),
                           dict(one.split("=", 1) for one in properties.get("ENVIRONMENT", [])))

    @property
    def is_script(self):
        return self.command[0].endswith("python3")

    @property
    def programs(self):
        """Those of the build that it runs."""
        return [pathlib.Path(part) for part in self.command if part.startswith(f"{BUILD}/")]

    def copied_to(self, folder):
        """The same over copies, which the next build does not change. Libraries that a script
        preloads lie beside its program."""
        command = list(self.command)
        for program in self.programs:
            shutil.copy2(program, folder)
            command[self.command.index(str(program))] = str(folder / program.name)
            for library in program.parent.glob("*.so") if self.is_script else ():
                shutil.copy2(library, folder)
        return dataclasses.replace(self, command=tuple(command))


def build(tests, jobs):
    targets = {program.name for test in tests for program in TestCommand.of(test).programs}
    return run(["cmake", "--build", str(BUILD), "--parallel", str(jobs), "--target",
                *sorted(targets)], BUILD_LIMIT_S)


def run_test(test, folder, limit_s, names=""):
    """(passed, seconds, first failed test or how it ended); without names all of its tests."""
    if test.is_script:
        command = [*test.command, *names.split(), "--failfast"]
    else:
        command = [*test.command, "--gtest_brief=1", "--gtest_fail_fast",
                   f"--gtest_filter={names or '*'}"]
    start = time.monotonic()
    status, output = run(command, limit_s, cwd=folder, env={**os.environ, **test.environment})
    seconds = time.monotonic() - start
    if status == 0:
        return True, seconds, ""
    failed = (re.search(r"^(?:FAIL|ERROR): (\w+)", output, re.MULTILINE) if test.is_script else
              re.search(r"\[  FAILED  \] ([\w/]+\.[\w/]+)", output))
    if status is None:
        return False, seconds, f"longer than {limit_s:.0f} s"
    return False, seconds, failed.group(1) if failed else f"ended with status {status}"


class Limits:
    """Seconds that test programs may take: many times what they take without a fault."""

    def __init__(self, jobs):
        self.jobs, self.seconds = jobs, {}

    def __getitem__(self, test):
        return self.seconds[test]

    def measure(self, tests):
        """Builds and runs the programs that have not been; the tree is without a fault."""
        new = [test for test in tests if test not in self.seconds]
        if not new:
            return
        print(f"without a fault: building {' '.join(new)}", flush=True)
        status, output = build(new, self.jobs)
        if status != 0:
            raise Refused(f"the tree does not build without a fault:\n{output[-4000:]}")
        for test in new:
            command = TestCommand.of(test)
            passed, seconds, how = run_test(command, command.programs[0].parent, BASELINE_LIMIT_S)
            if not passed:
                raise Refused(f"{test} fails without a fault: {how}")
            print(f"without a fault: {test} passes in {seconds:.1f} s", flush=True)
            self.seconds[test] = max(LEAST_LIMIT_S, TIME_FACTOR * seconds)


def judge(copies, first, limits, folder):
    """Runs copies of the tests of one fault until one of them sees it."""
    seconds = 0.0
    try:
        for names in ([first] if first else []) + [""]:
            for test, (command, home) in copies.items():
                passed, took, how = run_test(command, home, limits[test], names)
                seconds += took
                if not passed:
                    return "seen", how, seconds
        return "MISSED", f"by {', '.join(copies)}", seconds
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Report:
    def __init__(self, total):
        self.total, self.results = total, {}

    def add(self, fault, result, how, seconds, record=True):
        self.results[fault] = result
        print(f"[{len(self.results):3}/{self.total}] {result:7} {fault.title}  {seconds:.1f} s  {how}",
              flush=True)
        if record:
            entry = {"title": fault.title, "key": fault.key, "result": result, "how": how,
                     "seconds": round(seconds, 1)}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def share_seen(self):
        return 100 * list(self.results.values()).count("seen") / max(1, len(self.results))

    def print_summary(self):
        rooms = sorted({fault.room for fault in self.results})
        for room in rooms:
            of_room = [result for fault, result in self.results.items() if fault.room == room]
            print(f"{room:16} {of_room.count('seen'):3} of {len(of_room):3} seen")
        for fault, result in self.results.items():
            if result != "seen":
                print(f"{result}: {fault.title} ({fault.file})")
        seen = list(self.results.values()).count("seen")
        print(f"{seen} of {len(self.results)} seen, {self.share_seen():.1f} %")


def earlier_results():
    if not RESULTS.is_file():
        return {}
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return {entry["key"]: entry for entry in map(json.loads, lines)}


class Planter:
    """Plants one fault at a time in the tree; the checkout's text stands there otherwise."""

    def __init__(self):
        self.path, self.original = None, ""

    def plant(self, fault):
        path = TREE / fault.file
        if self.path != path:
            self.restore()
            self.path, self.original = path, path.read_text(encoding="utf-8")
        path.write_text(self.original.replace(fault.text, fault.fault), encoding="utf-8")

    def restore(self):
        if self.path is not None:
            self.path.write_text(self.original, encoding="utf-8")
        self.path = None


def plant_all(faults, report, jobs):
    """Builds one fault while the test programs of others run."""
    limits, planter, pending = Limits(jobs), Planter(), {}

    def collect(most_left):
        while len(pending) > most_left:
            done, _ = concurrent.futures.wait(
                pending, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                report.add(pending.pop(future), *future.result())

    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            for fault in faults:
                if any(test not in limits.seconds for test in fault.tests):
                    planter.restore()
                    limits.measure(fault.tests)
                if not fault.is_compiled:
                    collect(most_left=0)
                planter.plant(fault)
                start = time.monotonic()
                status, output = build(fault.tests, jobs)
                if status != 0:
                    error = re.search(r"error: .*", output)
                    report.add(fault, "BROKEN", error.group(0) if error else "does not build",
                               time.monotonic() - start)
                    continue
                folder = pathlib.Path(tempfile.mkdtemp(dir=WORK, prefix="run-"))
                copies = {}
                for test in fault.tests:
                    command = TestCommand.of(test)
                    copies[test] = (command.copied_to(folder), command.programs[0].parent)
                pending[pool.submit(judge, copies, fault.first, limits, folder)] = fault
                collect(most_left=jobs - 1 if fault.is_compiled else 0)
            collect(most_left=0)
        finally:
            for process in list(_running):  # none, unless something was thrown
                kill(process)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="a room, or a pattern of ROOM/NAME; default: all")
    parser.add_argument("--check", action="store_true",
                        help="only check that every fault can be planted in these sources")
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--jobs", type=int, default=2, metavar="N",
                        help="compilers, and test programs, at a time (default: %(default)s)")
    parser.add_argument("--continue", dest="goes_on", action="store_true",
                        help="keep what an earlier run saw of entries that have not changed")
    parser.add_argument("--least", type=float, default=98, metavar="PERCENT",
                        help="fail below this share (default: %(default)s)")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    every = read_faults()
    faults = [
        fault for fault in every
        if not arguments.names
        or any(fault.room == name or fnmatch.fnmatch(fault.title, name) for name in arguments.names)
    ]
    if not faults:
        raise Refused(f"no fault is named {' or '.join(arguments.names)}")
    if arguments.list:
        for fault in faults:
            print(f"{fault.title}  {fault.file}  {' '.join(fault.tests)}")
        return 0
    if not check(faults):
        return 1
    if arguments.check:
        print(f"mutants: {len(faults)} can be planted")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    for left in WORK.glob("run-*"):  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    report = Report(len(faults))
    earlier = earlier_results() if arguments.goes_on else {}
    if not arguments.goes_on:
        RESULTS.unlink(missing_ok=True)
    to_do = []
    for fault in sorted(faults, key=lambda fault: (fault.tests, fault.file)):
        entry = earlier.get(fault.key)
        if entry is not None and entry["result"] == "seen":
            report.add(fault, entry["result"], entry["how"], entry["seconds"], record=False)
        else:
            to_do.append(fault)
    if to_do:
        sync_tree()
        configure(every)  # all: what is compiled alone does not depend on the choice
        plant_all(to_do, report, arguments.jobs)
    report.print_summary()
    return 0 if report.share_seen() >= arguments.least else 1


if __name__ == "__main__":
    os.nice(5)  # others may work here meanwhile
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except Refused as refusal:
        print(f"mutants: {refusal}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        for running in list(_running):
            kill(running)
        print("mutants: interrupted; --continue keeps what was seen", file=sys.stderr)
        sys.exit(130)

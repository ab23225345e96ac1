#!/usr/bin/env python3
"""The runtime image of deploy/Dockerfile installs every library that the program links or loads.

    image_test.py PROGRAM SOURCE_DIR
"""
import os
import re
import subprocess
import sys

PROGRAM, SOURCE = sys.argv[1:]


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def package_of(library):
    """The Debian package of a file, whichever of its names dpkg knows (/lib is a link to /usr/lib)."""
    for path in (library, os.path.realpath(library), library.removeprefix("/usr")):
        found = subprocess.run(["dpkg-query", "-S", path], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    raise AssertionError(f"no package has {library}")


def with_dependencies(packages):
    known, waiting = set(), list(packages)
    while waiting:
        package = waiting.pop()
        if package in known:
            continue
        known.add(package)
        shown = subprocess.run(["dpkg-query", "-W", "-f", "${Pre-Depends}, ${Depends}\n", package],
                               capture_output=True, text=True)
        waiting += [word.split()[0].split(":")[0]
                    for word in re.split(r"[,|\n]", shown.stdout) if word.strip()]
    return known


def stages(dockerfile):
    """Each stage's base and commands by its name; the last one's name is empty."""
    found = {}
    for text in re.split(r"^FROM ", dockerfile.replace("\\\n", " "), flags=re.M)[1:]:
        head, _, commands = text.partition("\n")
        base, _, name = head.partition(" AS ")
        found[name.strip()] = (base.strip(), commands)
    return found


def installs(stage):
    """What its apt-get lines name."""
    lines = re.findall(r"--no-install-recommends +([^&\n]*)", STAGES[stage][1])
    return [package for line in lines for package in line.split()]


with open(os.path.join(SOURCE, "deploy/Dockerfile")) as file:
    DOCKERFILE = file.read()
STAGES = stages(DOCKERFILE)
installed = installs("runtime-cpu")
linked = re.findall(r"=> (/\S+)", output("ldd", PROGRAM))
# A build under a sanitizer links what an image never has.
linked = [path for path in linked if not re.search(r"lib(a|ub|t|l)san\.so", path)]
assert len(linked) > 5, linked
needed = {package_of(path) for path in linked}
missing = needed - with_dependencies(installed)
assert not missing, f"deploy/Dockerfile does not install {sorted(missing)}"
with open(PROGRAM, "rb") as file:
    loads_ucx = b"libucp.so.0" in file.read()
assert not loads_ucx or "libucx0" in installed, "deploy/Dockerfile does not install libucx0"
unneeded = set(installed) - needed - {"libzmq5", "libucx0"}  # of libraries that a build may be without
assert not unneeded, f"deploy/Dockerfile installs {sorted(unneeded)}, which nothing links"
print(f"{len(linked)} libraries of {len(needed)} packages")

# The image for a GPU: nvcc where it is built, cuBLASLt where it runs, both of the version that the
# build asks for, and the driver's libraries let in.
assert DOCKERFILE.split("\nFROM ")[0].endswith("ARG DEVICE=cpu\n")
assert STAGES["build"][0] == "tools-${DEVICE}" and STAGES[""][0] == "runtime-${DEVICE}", STAGES
for kind in ("tools", "runtime"):
    assert STAGES[f"{kind}-gpu"][0] == f"{kind}-cpu", STAGES[f"{kind}-gpu"][0]
with open(os.path.join(SOURCE, "CMakeLists.txt")) as file:
    cuda = re.search(r"find_package\(CUDAToolkit (\d+)\.(\d+) REQUIRED\)", file.read()).groups()
gpu_packages = installs("tools-gpu") + installs("runtime-gpu")
for package in (f"cuda-nvcc-{cuda[0]}-{cuda[1]}", f"libcublas-{cuda[0]}-{cuda[1]}"):
    assert package in gpu_packages, package
assert f"/usr/local/cuda-{cuda[0]}.{cuda[1]}/bin" in STAGES["tools-gpu"][1]
assert "FATHOM_CUDA=OFF" in STAGES["tools-cpu"][1] and "FATHOM_CUDA=ON" in STAGES["tools-gpu"][1]
assert "-DFATHOM_CUDA=$FATHOM_CUDA" in STAGES["build"][1]
for setting in ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
                "FATHOM_DEVICE=cuda:0"):
    assert setting in STAGES["runtime-gpu"][1] and setting not in STAGES["runtime-cpu"][1], setting

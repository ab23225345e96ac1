# One-word commands over CMakePresets.json. `make run` and `make test` work on a fresh Debian 12:
# what is missing is installed first.

PROMPT ?= Compute 314 + 159.
MODEL ?= models/fathom-tiny
PORT ?= 8000
FLAGS ?=
FUZZ_SECONDS ?= 60
EXAMPLES ?= 20
ROBUST_SECONDS ?= 60
RELEASE := build/release
FATHOM := $(RELEASE)/src/cli/fathom

.DEFAULT_GOAL := help
.PHONY: help setup build run serve test test-slow test-page test-conformance test-robust bench bench-host benchmarks gpu gpu-test gpu-bench gpu-carry gpu-sanitize asan tsan fuzz format check clean

help:
	@echo "make run [PROMPT='…']  answer a prompt with the bundled model"
	@echo "make serve [PORT=8000] serve it over HTTP [MODEL=…] [FLAGS='…']"
	@echo "make test              build everything and run the fast tests"
	@echo "make test-slow         the slow comparisons too (test-time Python packages from PyPI)"
	@echo "make test-page         click through the web page in headless Chromium [SERVER=URL]"
	@echo "make test-conformance  the official clients, and requests made from the server's own document"
	@echo "                       [EXAMPLES=$(EXAMPLES)] for each operation; 500 take some minutes"
	@echo "make test-robust       the tests of tests/robustness, $(ROBUST_SECONDS) s of load each, and their figures"
	@echo "make bench             measure the bundled model and the V2-Lite shape"
	@echo "make bench-host        measure what the host adds: server and engine over a null device"
	@echo "make benchmarks        build the programs that measure single operations (*_bench)"
	@echo "make gpu-test          the tests of what runs on a GPU, on a machine with one (Hopper; CUDA 13)"
	@echo "make gpu-bench         its benchmarks; make gpu: build both"
	@echo "make gpu-carry         pack what they need of Debian's packages, for a machine without them"
	@echo "make gpu-sanitize      a choice of its tests under compute-sanitizer's four tools"
	@echo "make asan | tsan       the tests under sanitizers"
	@echo "make fuzz              every fuzz target for $(FUZZ_SECONDS) s each"
	@echo "make format | check    format the sources | prove format, include direction and headers"

# What a fresh Debian 12 lacks; quiet and quick when nothing is missing.
setup:
	@tools/install_packages.sh build

$(RELEASE)/build.ninja: | setup
	@cmake --preset release > build.log 2>&1 || (cat build.log; exit 1); rm -f build.log

build: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target fathom

run: build
	@$(FATHOM) run $(MODEL) --prompt "$(PROMPT)"

serve: build
	@$(FATHOM) serve $(MODEL) --port $(PORT) $(FLAGS)

test: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE)
	@ctest --test-dir $(RELEASE) --output-on-failure --parallel 2 -LE 'slow|load'

test-slow: test
	@tools/test_slow.sh $(RELEASE)

# SERVER: the server whose page and answers are tested beside the scripted ones.
test-page:
	@tools/install_packages.sh page
	@tests/page/run.sh $(if $(SERVER),--server $(SERVER))

test-conformance: build
	@tools/install_packages.sh conformance
	@tests/conformance/run.sh $(FATHOM) $(EXAMPLES)

# Loads of ROBUST_SECONDS each; limits of time are those that docs/reliability.md states.
test-robust: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target fathom fathom_with_faults shifted_clock truncated_file
	@ROBUST_SECONDS=$(ROBUST_SECONDS) tests/robustness/run.sh $(RELEASE)

bench: build
	@tools/bench_cpu.sh $(FATHOM)

# On two cores, with a device that returns random tokens at once.
benchmarks: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target benchmarks

# What runs on a GPU, built where CUDA's compiler is. A machine that has build/carried (unpacked from
# what gpu-carry makes elsewhere) needs CUDA, CMake and g++, none of Debian's packages.
ifneq ($(wildcard build/carried),)
GPU := build/gpu/gpu
gpu:
	@cmake --preset carried > build/gpu.log 2>&1 || (cat build/gpu.log; exit 1)
	@cmake --build build/gpu --target gpu --parallel
else
GPU := $(RELEASE)/gpu
gpu: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target gpu
endif

# Not left as a folder: here the packages are installed.
gpu-carry: setup
	@tools/carry_packages.sh build

gpu-test: gpu
	@for test in $(GPU)/*_test; do $$test || exit 1; done

gpu-bench: gpu
	@for bench in $(GPU)/*_bench; do $$bench || exit 1; done

gpu-sanitize: gpu
	@tools/gpu_sanitize.sh $(GPU)

bench-host: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target engine_bench server_api_bench
	@taskset -c 0,1 $(RELEASE)/src/engine/engine_bench --benchmark_filter='/256/'
	@taskset -c 0,1 $(RELEASE)/src/server/api/server_api_bench

asan: setup
	@cmake --preset asan
	@cmake --build build/asan
	@ctest --test-dir build/asan --output-on-failure --parallel 2 -LE 'slow|load'

# What shares memory between threads.
tsan: setup
	@cmake --preset tsan
	@cmake --build build/tsan --target threaded_tests
	@ctest --test-dir build/tsan --output-on-failure -L threaded -LE 'slow|load'

fuzz:
	@tools/install_packages.sh build fuzz
	@cmake --preset fuzz
	@cmake --build build/fuzz --target fuzz_targets
	@tools/run_fuzz.sh build/fuzz/fuzz $(FUZZ_SECONDS)

format:
	@tools/install_packages.sh check
	@git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

check:
	@tools/install_packages.sh build check
	@tools/check.sh

clean:
	@rm -rf build

# One-word commands over CMakePresets.json. `make run` and `make test` work on a fresh Debian 12:
# what is missing is installed first.

PROMPT ?= Compute 314 + 159.
MODEL ?= models/fathom-tiny
PORT ?= 8000
FLAGS ?=
FUZZ_SECONDS ?= 60
FAULTS ?=
EXAMPLES ?= 20
ROBUST_SECONDS ?= 60
COUNT ?= 10
TESTS ?=
RELEASE := build/release
FATHOM := $(RELEASE)/src/cli/fathom

.DEFAULT_GOAL := help
.PHONY: help setup build run serve test test-repeat test-slow test-page test-conformance test-robust bench bench-host benchmarks plots gpu gpu-test gpu-bench gpu-carry gpu-sanitize gpu-plant gpu-report tables asan tsan fuzz mutants format check package package-test clean

help:
	@echo "make run [PROMPT='…']  answer a prompt with the bundled model"
	@echo "make serve [PORT=8000] serve it over HTTP [MODEL=…] [FLAGS='…']"
	@echo "make test              build everything and run the fast tests"
	@echo "make test-repeat       each test ten times alone, beside four busy processes, and with scalar"
	@echo "                       kernels [COUNT=10] [TESTS=REGEX]"
	@echo "make test-slow         the slow comparisons too (test-time Python packages from PyPI)"
	@echo "make test-page         click through the web page in headless Chromium [SERVER=URL]"
	@echo "make test-conformance  the official clients, and requests made from the server's own document"
	@echo "                       [EXAMPLES=$(EXAMPLES)] for each operation; 500 take some minutes"
	@echo "make test-robust       the tests of tests/robustness, $(ROBUST_SECONDS) s of load each, and their figures"
	@echo "make bench             measure the bundled model and the V2-Lite shape"
	@echo "make bench-host        measure what the host adds: server and engine over a null device"
	@echo "make benchmarks        build the programs that measure single operations (*_bench)"
	@echo "make plots             draw docs/images/*.svg from bench/results"
	@echo "make gpu-test          the tests of what runs on a GPU, on a machine with one (Hopper; CUDA 13)"
	@echo "make gpu-bench         its benchmarks; make gpu: build both"
	@echo "make gpu-carry         pack what they need of Debian's packages, for a machine without them"
	@echo "make gpu-sanitize      a choice of its tests under compute-sanitizer's four tools"
	@echo "make gpu-plant         faults planted in kernels, one at a time: says which tests miss one"
	@echo "make gpu-report        every GPU figure of the documents, three times each [ONLY=kernels,…]"
	@echo "make tables            the documents' tables from bench/results"
	@echo "make package           a Debian package, in build/package; package-test installs it in a bare root"
	@echo "make asan | tsan       the tests under sanitizers"
	@echo "make fuzz              every fuzz target for $(FUZZ_SECONDS) s each"
	@echo "make mutants           plant single faults and report which ones the tests see [FAULTS='engine cache']"
	@echo "make format | check    format the sources | prove format, include direction, headers, clang-tidy"

# What a fresh Debian 12 lacks; quiet and quick when nothing is missing.
setup:
	@tools/install_packages.sh build

$(RELEASE)/build.ninja: | setup
	@cmake --preset release > build.log 2>&1 || (cat build.log; exit 1); rm -f build.log

build: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target fathom

# Its last line says how many tokens a step gave, and how many drafts were right.
run: build
	@$(FATHOM) run $(MODEL) --mtp 3 --prompt "$(PROMPT)"

serve: build
	@$(FATHOM) serve $(MODEL) --port $(PORT) $(FLAGS)

# Four at a time on two cores: half of the tests wait, for a state or for a limit to pass.
test: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE)
	@ctest --test-dir $(RELEASE) --output-on-failure --parallel 4 -LE slow

test-repeat: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE)
	@TESTS='$(TESTS)' tools/repeat_tests.sh $(RELEASE) $(COUNT)

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

# The figures of docs/, from bench/results.
plots:
	@tools/install_packages.sh plots
	@/usr/bin/python3 tools/plots.py

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

# Programs of their own, in which a kernel can be told to have a fault.
PLANT := build/plant
gpu-plant: $(if $(wildcard build/carried),,setup)
	@cmake --preset $(if $(wildcard build/carried),carried,release) -B $(PLANT) -DFATHOM_PLANT_FAULTS=ON > build/plant.log 2>&1 || (cat build/plant.log; exit 1)
	@cmake --build $(PLANT) --target decode_layers_cuda_test four_bit_moe_cuda_test gpu_decode_layers_test gpu_engine_test gpu_ranks_test indexer_cuda_test mha_prefill_cuda_test moe_over_ranks_cuda_test mtp_rows_cuda_test peer_rows_cuda_test peer_sum_cuda_test sparse_latent_cuda_test --parallel
	@tools/gpu_plant.sh $(PLANT)/gpu

# Groups and their times: tools/gpu_report.py --list. On a machine with carried packages the program is
# one that was built elsewhere (FATHOM=…); tools/gpu_report.py --programs takes benchmarks so, too.
gpu-report: gpu $(if $(wildcard build/carried),,build)
	@tools/gpu_report.py --programs $(GPU) --fathom $(FATHOM) $(if $(ONLY),--only $(ONLY)) $(if $(AZURE),--azure $(AZURE)) $(if $(COMMIT),--commit $(COMMIT))
	@tools/make_tables.py

tables:
	@tools/make_tables.py

bench-host: setup $(RELEASE)/build.ninja
	@cmake --build $(RELEASE) --target engine_bench server_api_bench
	@taskset -c 0,1 $(RELEASE)/src/engine/engine_bench --benchmark_filter='/256/'
	@taskset -c 0,1 $(RELEASE)/src/server/api/server_api_bench

package: setup $(RELEASE)/build.ninja
	@tools/install_packages.sh package
	@cmake --build $(RELEASE) --target fathom documents
	@tools/make_package.sh $(RELEASE) build/package

# As root: in a bare Debian that debootstrap makes.
package-test: package
	@tools/install_packages.sh package-test
	@tests/package/package_test.sh "$$(ls -t build/package/*.deb | head -1)"

asan: setup
	@cmake --preset asan
	@cmake --build build/asan
	@ctest --test-dir build/asan --output-on-failure --parallel 2 -LE slow

# What shares memory between threads.
tsan: setup
	@cmake --preset tsan
	@cmake --build build/tsan --target threaded_tests
	@ctest --test-dir build/tsan --output-on-failure -L threaded -LE slow

fuzz:
	@tools/install_packages.sh build fuzz
	@cmake --preset fuzz
	@cmake --build build/fuzz --target fuzz_targets
	@tools/run_fuzz.sh build/fuzz/fuzz $(FUZZ_SECONDS)

# Works in build/mutants; FAULTS: rooms of tests/mutants, or patterns of ROOM/NAME. All of them take hours.
mutants: setup
	@python3 tools/mutants.py $(FAULTS)

format:
	@tools/install_packages.sh check
	@git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

check:
	@tools/install_packages.sh build check
	@tools/check.sh

clean:
	@rm -rf build

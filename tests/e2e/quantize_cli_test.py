#!/usr/bin/env python3
"""`fathom quantize` and `--quantization fp8`, called as by a person.

    quantize_cli_test.py PROGRAM SOURCE_DIR MAX_MIB

MAX_MIB: memory limit, for a model larger than that.
The source is the bundled FP8 model dequantized to float32. The largest weight of each block is 448 times
its scale, so quantizing must restore the same codes.
"""
import array
import json
import math
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE, MAX_MIB = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
BUNDLED = os.path.join(SOURCE, "models/fathom-tiny")
# Keeps FATHOM_CPU_ISA: the suite also runs with slow kernels.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith("FATHOM_")}
QUESTION = ["What is 12 + 30?", "--temperature", "0", "-q", "--device", "cpu"]


# Prints the peak memory of a program in KiB. Measured from a small parent, because a child's peak
# includes the size of the process that forked it, here the test's.
PEAK = """
import os, sys
_, status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def fathom(*arguments, status=0, before=None):
    return run([PROGRAM, *arguments], status, before)


def run(arguments, status=0, before=None):
    done = subprocess.run(arguments, capture_output=True, timeout=300, env=ENVIRONMENT,
                          preexec_fn=before)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{out}\n{err}"
    return out, err


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 0x80 else size


CODES = [e4m3(code) for code in range(256)]


def read_model(folder):
    """Returns {name: (dtype, shape, bytes)} of all shards."""
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        length, = struct.unpack_from("<Q", content)
        for tensor, entry in json.loads(content[8:8 + length]).items():
            if tensor != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[tensor] = (entry["dtype"], entry["shape"], content[begin:end])
    return tensors


def multiplied_out(tensors):
    """Returns FP8 weights dequantized to float32, and other tensors unchanged."""
    wide = {}
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if dtype != "F8_E4M3":
            wide[name] = (dtype, shape, data)
            continue
        _, grid, scale_bytes = tensors[name + "_scale_inv"]
        scales = array.array("f", scale_bytes)
        tables = [[code * scale for code in CODES] for scale in scales]
        rows, cols = shape
        out = array.array("f")
        for row in range(rows):
            for block in range(grid[1]):
                table = tables[row // 128 * grid[1] + block]
                begin = row * cols + 128 * block
                end = min(begin + 128, (row + 1) * cols)
                out.extend(map(table.__getitem__, data[begin:end]))
        wide[name] = ("F32", shape, out.tobytes())
    return wide


def read_bytes(folder, name):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def write_bytes(folder, name, content):
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)


def write_model(folder, tensors):
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
    with open(os.path.join(BUNDLED, "config.json")) as file:
        config = json.load(file)
    del config["quantization_config"]
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(BUNDLED, name), folder)


class Quantize(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.wide = os.path.join(cls.folder.name, "wide")
        cls.made = os.path.join(cls.folder.name, "made")
        os.mkdir(cls.wide)
        cls.bundled = read_model(BUNDLED)
        write_model(cls.wide, multiplied_out(cls.bundled))
        cls.out, cls.err = fathom("quantize", cls.wide, "--output", cls.made)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_gives_the_bundled_checkpoint_again(self):
        self.assertIn("456 of 517 tensors in e4m3", self.out)
        self.assertIn("Quantising: 100 %", self.err)
        made = read_model(self.made)
        self.assertEqual(made.keys(), self.bundled.keys())
        for name, (dtype, shape, data) in self.bundled.items():
            self.assertEqual(made[name][:2], (dtype, shape), name)
            if not name.endswith("_scale_inv"):
                self.assertEqual(made[name][2], data, name)
                continue
            # Multiplying a scale by 448 and dividing again may change its last bit.
            for one, other in zip(array.array("i", made[name][2]), array.array("i", data)):
                self.assertLessEqual(abs(one - other), 1, name)

    def test_what_it_makes_answers(self):
        self.assertEqual(fathom("run", self.made, *QUESTION)[0], "12 + 30 = 42.\n")
        self.assertIn("blocks of 128x128", fathom("inspect", self.made)[0])
        questions = os.path.join(SOURCE, "tests/data/eval/json.jsonl")
        for flags in ([self.made], [self.wide, "--quantization", "fp8"]):
            out, _ = fathom("eval", *flags, "-q", "--limit", "10", "--json", "--set", questions,
                            "--device", "cpu")
            report = json.loads(out)
            self.assertEqual(report["scores"]["json"]["correct"], 10)
            self.assertEqual(report["quantization"], "fp8" if len(flags) > 1 else "auto")

    def test_damaged_four_bits(self):
        """Exit status 2 and one sentence from each command, whatever of the format does not fit."""
        made = os.path.join(self.folder.name, "int4")
        fathom("quantize", self.wide, made, "--format", "int4-g32", "-q")
        self.assertEqual(fathom("run", made, *QUESTION)[0].count("42"), 1)
        expert = "model.layers.1.mlp.experts.0.up_proj"
        whole = {name: read_bytes(made, name) for name in ("config.json", "model.safetensors")}
        (length,) = struct.unpack_from("<Q", whole["model.safetensors"])
        header, data = json.loads(whole["model.safetensors"][8:8 + length]), 8 + length
        config = json.loads(whole["config.json"])

        def refused(part, commands=("inspect", "run")):
            for command in commands:
                arguments = ([command, made] if command == "inspect" else
                             [command, made, *QUESTION])
                _, err = fathom(*arguments, status=2)
                self.assertRegex(err, r"\Afathom: [^\n]+\n\Z")
                self.assertIn(part, err)

        def weights_config(**fields):
            changed = json.loads(whole["config.json"])
            changed["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)
            write_bytes(made, "config.json", json.dumps(changed).encode())

        for part, fields in [("group_size is 48", {"group_size": 48}), ("num_bits 8", {"num_bits": 8}),
                             ("strategy is \"tensor_group\"", {"strategy": "tensor_group"}),
                             (expert.rsplit(".", 3)[0], {"group_size": 64})]:
            weights_config(**fields)
            refused(part)
        config["quantization_config"]["format"] = "marlin-24"
        write_bytes(made, "config.json", json.dumps(config).encode())
        refused("marlin-24")
        write_bytes(made, "config.json", whole["config.json"])

        def with_header(name, **fields):
            text = json.dumps({**header, name: {**header[name], **fields}}).encode()
            write_bytes(made, "model.safetensors",
                        struct.pack("<Q", len(text)) + text + whole["model.safetensors"][data:])

        rows, words = header[expert + ".weight_packed"]["shape"]
        with_header(expert + ".weight_packed", shape=[words, rows])
        refused("weight_packed")
        rows, groups = header[expert + ".weight_scale"]["shape"]
        with_header(expert + ".weight_scale", shape=[groups, rows])
        refused("weight_scale")
        with_header(expert + ".weight_scale", dtype="F16")  # f16 is as legal as bf16, and as wide
        fathom("inspect", made)
        # What only the values tell, loading sees.
        changed = bytearray(whole["model.safetensors"])
        begin = data + header[expert + ".weight_scale"]["data_offsets"][0]
        changed[begin:begin + 2] = b"\x80\x7f"  # infinite
        write_bytes(made, "model.safetensors", bytes(changed))
        refused("a scale is a finite number", ("run",))
        write_bytes(made, "model.safetensors", whole["model.safetensors"][:-1])
        refused("model.safetensors")

    def test_damaged_zero_points_and_orders(self):
        """Faults of GPTQ that only the values show. The goldens' folders have no tokenizer."""
        ids = ("--ids", "0,1,2", "--max-tokens", "1", "-q", "--device", "cpu")

        def refused(golden, tensor, change, part):
            made = os.path.join(self.folder.name, golden)
            shutil.copytree(os.path.join(SOURCE, "tests/goldens/four_bits", golden), made)
            fathom("run", made, *ids)
            content = bytearray(read_bytes(made, "model.safetensors"))
            (length,) = struct.unpack_from("<Q", content)
            name = "model.layers.0.self_attn.o_proj." + tensor
            begin, end = json.loads(content[8:8 + length])[name]["data_offsets"]
            values = array.array("i", content[8 + length + begin:8 + length + end])
            change(values)
            content[8 + length + begin:8 + length + end] = values.tobytes()
            write_bytes(made, "model.safetensors", bytes(content))
            _, err = fathom("run", made, *ids, status=2)
            self.assertRegex(err, r"\Afathom: [^\n]+\n\Z")
            self.assertIn(tensor, err)
            self.assertIn(part, err)
            shutil.rmtree(made)

        def assign(index, value):
            return lambda values: values.__setitem__(index, value)

        refused("gptq_g64", "qzeros", lambda values: values.__setitem__(0, values[0] ^ 1),
                "quantization_config says symmetric")
        for golden in ("gptq_g64_order", "gptq_v2_g64_order"):
            refused(golden, "g_idx", assign(5, 4), "holds 4 at index 5; there are 4 groups")
            refused(golden, "g_idx", assign(5, -1), "holds -1 at index 5; there are 4 groups")
            refused(golden, "g_idx", lambda values: values.__setitem__(
                0, (values[0] + 1) % 4), "quantization_config.group_size is 64")

    def test_a_full_disk(self):
        """A limit on the size of files stands for the disk's: no file has its final name in part."""
        made = os.path.join(self.folder.name, "full")

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

        command = ("quantize", self.wide, made, "--format", "int4-g32", "-q")
        out, err = fathom(*command, status=2, before=limit)
        self.assertEqual(out, "")
        self.assertRegex(err, r"\Afathom: [^\n]+\n\Z")
        self.assertNotIn("config.json", os.listdir(made))
        for name in os.listdir(made):
            self.assertFalse(name.endswith(".safetensors"), name)
        # With room the same command goes on.
        fathom(*command)
        fathom("inspect", made)

    def test_loading_quantises_and_the_plan_knows(self):
        weights = {}
        for quantization in ("none", "fp8"):
            out, err = fathom("run", self.wide, "What is 12 + 30?", "--temperature", "0",
                              "--device", "cpu", "--quantization", quantization)
            self.assertEqual(out, "12 + 30 = 42.\n")
            weights[quantization] = float(err.split("  weights ")[1].split()[0])
        self.assertLess(weights["fp8"], 0.4 * weights["none"])

    def test_memory_is_not_the_models(self):
        """Creates a shard of more than 300 MiB as a sparse file of zeros."""
        folder = os.path.join(self.folder.name, "large")
        os.mkdir(folder)
        write_model(folder, {})
        path = os.path.join(folder, "config.json")
        with open(path) as file:
            config = json.load(file)
        hidden, width = 2048, 20_480
        config.update(num_hidden_layers=1, num_nextn_predict_layers=0, hidden_size=hidden,
                      intermediate_size=width)
        with open(path, "w") as file:
            json.dump(config, file)
        header, offset = {}, 0
        for name, (_, shape, _) in self.bundled.items():
            if name.endswith("_scale_inv") or ".layers." in name and ".layers.0." not in name:
                continue
            shape = [hidden if size == 256 else width if size == 768 and ".mlp." in name else size
                     for size in shape]
            end = offset + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with open(os.path.join(folder, "model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
        self.assertGreater(offset, 300 << 20)
        out, _ = run([sys.executable, "-c", PEAK, PROGRAM, "quantize", folder, folder + "-made",
                      "--threads", "2", "--quiet"])
        self.assertLess(int(out.split()[-1]) / 1024, MAX_MIB)

    def test_what_cannot_be_done_is_said(self):
        _, err = fathom("quantize", self.wide, self.made, status=2)
        self.assertIn("is not empty", err)
        _, err = fathom("quantize", BUNDLED, self.made + "-2", status=2)
        self.assertIn("quantised already, to FP8 with scales by blocks of 128x128", err)
        self.assertFalse(os.path.exists(self.made + "-2"))
        _, err = fathom("run", BUNDLED, *QUESTION, "--quantization", "awq", status=2)
        self.assertIn("awq", err)
        goldens = os.path.join(SOURCE, "tests/goldens/v2_fp8_tensor")
        _, err = fathom("bench", "latency", goldens, "-q", "--quantization", "fp8", status=2)
        self.assertIn("quantised already, with one scale a tensor", err)
        # The checkpoint already has the requested form.
        self.assertEqual(fathom("run", BUNDLED, *QUESTION, "--quantization", "fp8")[0],
                         "12 + 30 = 42.\n")


if __name__ == "__main__":
    unittest.main(verbosity=1)

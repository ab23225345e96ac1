#!/usr/bin/env python3
"""The program with a sparse-attention checkpoint (DeepSeek-V3.2): sizes, the threshold flag, bad input.

    sparse_cli_test.py PROGRAM SOURCE_DIR
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv.pop(1), sys.argv.pop(1)
MODEL = os.path.join(SOURCE, "tests/goldens/v32")  # 2 layers, an MTP layer, index_topk 16
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if k in ("FATHOM_CPU_ISA", "FATHOM_DEVICE") or not k.startswith(("FATHOM_", "SGLANG_"))}
BENCH = ["bench", "latency", "-q", "--input-len", "24", "--output-len", "2", "--num-iters", "1",
         "--num-iters-warmup", "0", "--device", "cpu"]


def fathom(*arguments, **environment):
    done = subprocess.run([PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
                          env=ENVIRONMENT | environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Sparse(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="fathom-sparse-")
        self.addCleanup(shutil.rmtree, self.scratch)

    def copy(self, **fields):
        """A copy of the checkpoint with these fields of config.json replaced; None removes one."""
        path = os.path.join(self.scratch, str(len(os.listdir(self.scratch))))
        os.mkdir(path)
        os.symlink(os.path.join(MODEL, "model.safetensors"), os.path.join(path, "model.safetensors"))
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        for key, value in fields.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return path

    def edited(self, change):
        """A copy whose header of model.safetensors went through change()."""
        path = self.copy()
        name = os.path.join(path, "model.safetensors")
        with open(name, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header, data = json.loads(file.read(length)), file.read()
        change(header)
        text = json.dumps(header).encode()
        os.remove(name)
        with open(name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)
        return path

    def refused(self, part, *arguments, **environment):
        status, out, err = fathom(*arguments, **environment)
        shown = f"{arguments}: {status}\n{out}\n{err}"
        self.assertEqual(status, 2, shown)
        self.assertEqual(out, "", shown)
        self.assertRegex(err, r"\A(warning: [^\n]+\n)*fathom: [^\n]+\n\Z", shown)
        self.assertIn(part, err, shown)

    def test_inspect_tells_both_rows_of_the_cache(self):
        status, out, err = fathom("inspect", MODEL, "--json")
        self.assertEqual(status, 0, err)
        shown = json.loads(out)
        self.assertEqual(shown["config"]["indexer"], {"num_heads": 16, "head_dim": 32, "topk": 16,
                                                      "num_layers": 2, "interleaved": False})
        # Two layers of 48 + 16 values, and an index key of 32 bytes and a scale, or of 32 floats.
        self.assertEqual(shown["cache_bytes_per_token"]["bf16"], 2 * (64 * 2 + 36))
        self.assertEqual(shown["cache_bytes_per_token"]["f32"], 2 * (64 * 4 + 32 * 4))
        _, out, _ = fathom("inspect", MODEL)
        self.assertIn("16 heads of 32, 16 keys a row, in 2 of 2 layers", out)
        self.assertIn("128 x 2 layers, index keys 36 x 2", out)
        self.assertIn("328 bytes a token, 72 of them index keys", out)

    def test_bad_sizes(self):
        for field, value in [("index_topk", 0), ("index_topk", -5), ("index_topk", 4097),
                             ("index_topk", None), ("index_n_heads", 0), ("index_n_heads", 1000),
                             ("index_head_dim", 8), ("index_head_dim", 48), ("index_head_dim", None),
                             ("indexer_types", ["shared", "full"]), ("indexer_types", ["full"]),
                             ("index_topk_freq", 0), ("indexer_rope_interleave", "yes"),
                             ("hc_mult", 4), ("linear_attn_config", {"head_dim": 8})]:
            with self.subTest(f"{field} {value}"):
                path = self.copy(**{field: value})
                self.refused(field, "inspect", path)
                self.refused(field, *BENCH, path)

    def test_bad_sizes_end_before_anything_is_allocated(self):
        """The published model has 671 GB of weights: no machine of these tests could hold them."""
        with open(os.path.join(SOURCE, "tests/data/configs/deepseek_v3_2.json"), encoding="utf-8") as file:
            published = json.load(file)
        for field, value in [("index_topk", 0), ("index_topk", -1), ("index_topk", published["max_position_embeddings"] + 1),
                             ("index_n_heads", 0), ("index_head_dim", 96)]:
            with self.subTest(f"{field} {value}"):
                path = os.path.join(self.scratch, f"{field}{value}")
                os.mkdir(path)
                with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
                    json.dump(published | {field: value}, file)
                self.refused(f"{field} is {value}", *BENCH, path, "--load-format", "dummy")

    def test_bad_tensors(self):
        name = "model.layers.1.self_attn.indexer.{}"
        # Tensors of the wrong shape, by their own sizes or by config.json's.
        for field, value, tensor in [("index_n_heads", 8, "wq_b.weight"), ("index_head_dim", 64, "wq_b.weight")]:
            self.refused("indexer." + tensor, *BENCH, self.copy(**{field: value}))
        for tensor in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            with self.subTest(tensor):
                def rename(header, key=name.format(tensor)):
                    header["renamed"] = header.pop(key)
                self.refused(name.format(tensor), *BENCH, self.edited(rename))
                def flatten(header, key=name.format(tensor)):
                    size = 1
                    for count in header[key]["shape"]:
                        size *= count
                    header[key]["shape"] = [size, 1, 1]
                self.refused(name.format(tensor), *BENCH, self.edited(flatten))

    def test_an_mtp_layer_without_its_indexer(self):
        def rename(header):
            header["renamed"] = header.pop("model.layers.2.self_attn.indexer.wk.weight")
        path = self.edited(rename)
        self.refused("model.layers.2.self_attn.indexer.wk.weight", *BENCH, path, "--mtp", "1")
        status, _, err = fathom(*BENCH, path, "--no-mtp")
        self.assertEqual(status, 0, err)
        self.assertIn("no multi-token prediction", err)

    def test_the_threshold(self):
        for threshold in ("0", "7", "16"):
            status, _, err = fathom(*BENCH, MODEL, "--dsa-dense-threshold", threshold)
            self.assertEqual(status, 0, err)
        self.refused("--dsa-dense-threshold is 17, at most index_topk of the model, 16", *BENCH, MODEL,
                     "--dsa-dense-threshold", "17")
        for name in ("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
                     "SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"):
            self.refused(f"{name} is 8192, at most", *BENCH, MODEL, **{name: "8192"})
            self.refused(f'{name} is "many"', *BENCH, MODEL, **{name: "many"})
            status, _, err = fathom(*BENCH, MODEL, **{name: "9"})
            self.assertEqual(status, 0, err)
            # The flag goes first.
            status, _, err = fathom(*BENCH, MODEL, "--dsa-dense-threshold", "9", **{name: "8192"})
            self.assertEqual(status, 0, err)
        status, _, err = fathom(*BENCH, os.path.join(SOURCE, "tests/goldens/v3"), "--dsa-dense-threshold", "9")
        self.assertEqual(status, 0, err)
        self.assertIn("the model has no sparse attention", err)


if __name__ == "__main__":
    unittest.main(verbosity=2)

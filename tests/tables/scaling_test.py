#!/usr/bin/env python3
"""The model behind docs/scaling.md: it gives back what was measured, it adds up, and its document's
tables are its own. usage: scaling_test.py ROOT"""

import pathlib
import random
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "tools"))
import make_tables  # noqa: E402
import scaling  # noqa: E402
import scaling_tables  # noqa: E402
from scaling import Network, Placement  # noqa: E402

MODEL = scaling.Model(scaling.Measured(ROOT))
ONE_GPU = Placement(1, 1, False)
EVERY = [each for placements in scaling.PLACEMENTS.values() for each in placements]


class Measured(unittest.TestCase):
    def test_a_layer_on_one_gpu_is_the_measured_one(self):
        for rows in scaling.MEASURED_BATCHES:
            self.assertAlmostEqual(sum(MODEL.compute(ONE_GPU, rows, rows, 1024, "fp8")),
                                   MODEL.measured.layer(1, rows), 6)

    def test_a_layer_of_the_slice_is_the_measured_one(self):
        for rows in {*scaling.MEASURED_BATCHES, *scaling.SLICE_BYTES}:
            self.assertAlmostEqual(sum(MODEL.compute(scaling.ON_8[0], rows, rows, 1024, "fp8")),
                                   MODEL.measured.layer(8, rows), 6)
        for rows in scaling.SLICE_BYTES:
            self.assertAlmostEqual(
                sum(MODEL.compute(scaling.ON_8[0], rows, rows, 1024, "fp8", rows)),
                MODEL.measured.layer(8, 1, new=rows), 6)
        launches = scaling.Model(MODEL.measured, launches=True)
        self.assertAlmostEqual(sum(launches.compute(scaling.ON_8[0], 1, 1, 1024, "fp8")),
                               scaling.value("slice_launches_us"), 6)

    def test_the_persistent_kernel_ends_at_its_bytes(self):
        launches = scaling.Model(MODEL.measured, launches=True)
        for rows, most in scaling.SLICE_BYTES.items():
            keys = int(most / 656)
            for neighbours, context in ((1, keys // rows), (rows, keys)):
                for more, is_equal in ((0, False), (1, True)):
                    work = (scaling.ON_8[0], rows, rows, context + more, "fp8", neighbours)
                    self.assertEqual(MODEL.compute(*work) == launches.compute(*work), is_equal, work)

    def test_the_sum_of_kernels_is_near_the_layer(self):
        for points in MODEL.measured.factors.values():
            for _, factor in points:
                self.assertLess(abs(factor - 1), 0.12)

    def test_a_step_of_five_layers_is_the_measured_one(self):
        for rows in scaling.MEASURED_BATCHES:
            self.assertAlmostEqual(
                2 * MODEL.measured.layer(1, rows) + MODEL.measured.rest(1, rows),
                MODEL.measured.layer(1, rows, "step_of_fewer_layers_us"), 6)

    def test_experts_by_rank_are_the_measured_launches(self):
        def us(touched, rows):
            return MODEL.measured.launch + touched * MODEL.measured.expert(rows)
        few = {row["shape"]: row["us"] for row in
               MODEL.measured.read("scaled_moe_launch_h200.json")["results"]}
        many = {row["tokens"]: row["us"] for row in
                MODEL.measured.read("scaled_moe_many_rows_h200.json")["results"]
                if row["model"] == "V3, 32 experts"}
        self.assertAlmostEqual(us(8, 1), few["8 experts x 1"], 6)
        self.assertAlmostEqual(us(32, 1), few["32 experts x 4"], 6)
        self.assertAlmostEqual(us(32, 64), many[256], 6)  # 256 tokens x 8 over 32 experts
        self.assertAlmostEqual(us(32, 192), many[768], 6)
        self.assertAlmostEqual(MODEL.measured.expert(384), 2 * MODEL.measured.expert(192), 6)

    def test_measured_points_are_met_and_lines_go_on(self):
        points = ((1, 10.0), (4, 16.0), (8, 20.0))
        self.assertEqual([scaling.interpolated(points, x) for x in (0, 1, 2, 4, 6, 8, 10)],
                         [10, 10, 12, 16, 18, 20, 22])
        self.assertEqual([scaling.by_share(80, 10, share) for share in (1, 1 / 8, 9 / 16)],
                         [80, 10, 45])


class Memory(unittest.TestCase):
    def test_weights_of_one_gpu_are_those_of_the_model(self):
        # 671,026 M parameters without MTP; embedding, head and router are bf16.
        bf16 = scaling.HEAD_BYTES + scaling.MOE_LAYERS * scaling.EXPERTS * scaling.HIDDEN
        self.assertAlmostEqual(ONE_GPU.weight_bytes() / (671.026e9 + bf16), 1, 4)

    def test_the_cache_holds_its_capacity_and_not_more(self):
        memory = scaling.value("memory_mib") * 2**20 * scaling.value("memory_share")
        for placement in EVERY:
            for cache, row in scaling.CACHE_BYTES.items():
                capacity = placement.capacity(4096, cache)
                lanes = placement.dp * placement.replicas
                self.assertEqual(capacity % lanes, 0)
                weights, of_lane = placement.weight_bytes(), capacity / lanes
                self.assertLessEqual(weights + of_lane * 4096 * row, memory)
                self.assertGreater(weights + (of_lane + 1) * 4096 * row, memory)
                self.assertIsNone(MODEL.tokens_per_second(placement, capacity + 1, 4096, cache))
                self.assertIsNotNone(MODEL.tokens_per_second(placement, capacity, 4096, cache))

    def test_bytes_of_a_cached_token(self):
        self.assertEqual(scaling.CACHE_BYTES, {"fp8": 40016, "bf16": 70272})

    def test_attention_by_heads_copies_the_cache(self):
        tp, dp = scaling.ON_8[0], scaling.ON_8[-1]
        self.assertGreater(dp.capacity(4096, "fp8"), 5 * tp.capacity(4096, "fp8"))
        self.assertEqual(ONE_GPU.capacity(4096, "fp8"), 0)  # 673 GB do not fit


class Routing(unittest.TestCase):
    def test_draws_are_eight_experts_of_four_groups(self):
        draw = random.Random(1).random
        for _ in range(200):
            experts = scaling.draw_experts(draw)
            self.assertEqual(len(set(experts)), 8)
            self.assertLessEqual(len({expert // 32 for expert in experts}), 4)
            self.assertTrue(all(0 <= expert < 256 for expert in experts))

    def test_touched_ranks_are_the_mean_of_draws(self):
        draw = random.Random(2).random
        tokens = [scaling.draw_experts(draw) for _ in range(4000)]
        for world in (2, 8, 16, 64):
            mean = sum(len({expert * world // 256 for expert in token}) for token in tokens) / 4000
            self.assertAlmostEqual(scaling.touched_ranks(world) / mean, 1, delta=0.01)

    def test_the_busiest_rank_has_no_less_than_the_mean(self):
        for world in scaling.ROUTED_WORLDS:
            excess = []
            for tokens in (*scaling.ROUTED_TOKENS, 4096):
                touched, rows = scaling.busiest(world, tokens)
                self.assertGreaterEqual(touched, 256 / world * (1 - (1 - 1 / 32)**tokens))
                self.assertLessEqual(touched, 256 / world)
                excess.append(rows * world / (8 * tokens))
            for less, more in zip(excess, excess[1:]):
                self.assertGreater(less, more)
            self.assertGreater(excess[-1], 1)


class Collectives(unittest.TestCase):
    def test_measured_sizes(self):
        for size, us in scaling.ALL_REDUCE_8:
            self.assertAlmostEqual(Network().all_reduce(8, size), us, 6)
        self.assertEqual(Network().all_reduce(1, 1e6), 0)
        self.assertEqual(Network(all_reduce_us=24.7).all_reduce(8, 14336), 24.7)

    def test_more_ranks_are_not_faster(self):
        for size in (14336, 1e6, 5e7):
            times = [Network().all_reduce(ranks, size) for ranks in (1, 2, 4, 8, 16, 64)]
            self.assertEqual(times, sorted(times))

    def test_exchanges(self):
        for world, us in scaling.DEEPEP_US.items():
            self.assertAlmostEqual(sum(Network().exchange(world, 128)), sum(us), 6)
            self.assertLess(sum(Network(copy_a_node=True).exchange(world, 128)), sum(us))
        latency, us = Network().exchange(8, 128)
        # 7 of 8 ranks are elsewhere: 3.63 copies go, 8 rows come back.
        self.assertAlmostEqual(us, 128 * 7 / 8 * (3.629 * 7456 + 8 * 14336) / 336e3, 2)
        self.assertEqual(latency, 3 * 4.75)
        self.assertLess(Network(return_a_rank=True).exchange(8, 128)[1], us)
        self.assertEqual(Network(hidden=1.0).exchange(8, 128), (latency, 0))


class Steps(unittest.TestCase):
    def test_parts_are_not_negative_and_make_the_speed(self):
        for placement in EVERY:
            for requests in (1, 7, 64, 250):
                step = MODEL.step(placement, requests, 4096)
                for part in step.PARTS:
                    self.assertGreaterEqual(getattr(step, part), 0, (placement, part))
                speed = MODEL.tokens_per_second(placement, requests * placement.replicas, 4096)
                self.assertAlmostEqual(speed * step.us / 1e6, requests * placement.replicas, 6)

    def test_more_work_takes_longer(self):
        for placement in EVERY:
            for context in (1024, 4096):
                times = [MODEL.step(placement, requests, context).us
                         for requests in (1, 8, 64, 256, 1024)]
                self.assertEqual(times, sorted(times), placement)
            self.assertLess(MODEL.step(placement, 64, 1024).us, MODEL.step(placement, 64, 4096).us)

    def test_collectives_of_a_step(self):
        tp = MODEL.step(scaling.ON_8[0], 1, 1024)
        self.assertAlmostEqual(tp.latency, 122 * 4.75, 6)
        self.assertEqual(tp.bytes, 0)
        dp = MODEL.step(scaling.ON_8[-1], 8, 1024)
        self.assertAlmostEqual(dp.latency, 58 * 3 * 4.75, 6)

    def test_prefill(self):
        # 4,096 tokens on 8 GPUs by heads, and on each of 8 lanes; 61 measured layers of each form.
        for placement, lanes, width in ((scaling.ON_8[0], 1, 8), (scaling.ON_8[-1], 8, 1)):
            us = MODEL.measured.layer(width, 1, new=4096, cached=0)
            us += (2 * Network().all_reduce(8, 4096 * 14336) if lanes == 1
                   else sum(Network().exchange(8, 4096)))
            self.assertAlmostEqual(MODEL.prefill(placement), 4096 * lanes / (61 * us) * 1e6, 3)

    def test_the_largest_part_has_a_name(self):
        for rows, name in ((64, "expert weights"), (65, "expert GEMMs")):
            step = scaling.Step(experts=2, attention=1, rows_an_expert=rows)
            self.assertEqual(scaling_tables.bound(step), name)
        self.assertEqual(scaling_tables.bound(scaling.Step(latency=2, bytes=1)),
                         "collectives' latency")

    def test_the_chosen_placement_is_within_the_margin_of_the_fastest(self):
        for gpus in scaling.PLACEMENTS:
            for context in (1024, 4096):
                before = 0
                for first, last, placement in scaling_tables.segments(MODEL, gpus, context):
                    self.assertEqual(first, before + 1)
                    before = last
                    for requests in {first, (first + last) // 2, last}:
                        best = max(MODEL.with_queue(each, requests, context)
                                   for each in scaling.PLACEMENTS[gpus])
                        self.assertLess(
                            best, 1.06 * MODEL.with_queue(placement, requests, context),
                            (gpus, context, requests))

    def test_the_ends_of_the_choice(self):
        for gpus, placements in scaling.PLACEMENTS.items():
            found = scaling_tables.segments(MODEL, gpus, 4096)
            self.assertEqual(found[0][2], placements[0])  # a request alone: heads over 8 GPUs
            self.assertEqual((found[-1][2].tp, found[-1][2].dp, found[-1][2].by_rank), (1, 8, True))
        # What the document says of mixes on one node.
        for context in (1024, 4096):
            names = [best.name for _, _, best in scaling_tables.segments(MODEL, 8, context)]
            self.assertEqual(names, ["tp 8", "dp 8", "dp 8, ep"])


class Document(unittest.TestCase):
    def check(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "scaling.md"
            path.write_text(text, encoding="utf-8")
            return make_tables.run(ROOT, [path], check=True)

    def test_tables_are_the_models(self):
        text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8")
                       for name in ("scaling.md", "speculation.md"))
        for name, make in scaling_tables.TABLES.items():
            self.assertIn(f"<!-- table: {name} -->\n{make(ROOT)}{make_tables.END}", text,
                          "run tools/make_tables.py")
            self.assertGreater(len(re.findall(r"\d", make(ROOT))), 5, name)

    def test_a_figure_changed_by_hand_is_seen(self):
        text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
        self.assertEqual(self.check(text), [], "run tools/make_tables.py")
        at = text.index("tp 8", text.index("<!-- table: scaling_choice -->"))
        self.assertEqual(len(self.check(text[:at] + "tp 4" + text[at + 4:])), 1)

    def test_figure_is_there(self):
        self.assertIn("images/scaling.svg", (ROOT / "docs/scaling.md").read_text(encoding="utf-8"))
        self.assertTrue((ROOT / "docs/images/scaling.svg").exists())

    def test_a_computed_table_in_no_document_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "README.md").write_text("<!-- table: scaling_assumed -->\n<!-- end -->\n")
            with self.assertRaises(make_tables.TableError) as caught:
                make_tables.run(root, [], check=True)
            self.assertIn("is in no document", str(caught.exception))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

// GPU resources that launches may count on. Numbers only: plans are host code that needs no CUDA.
#pragma once

#include <algorithm>

namespace fathom::cuda {

// Number of clusters of so many CTAs, each alone on its SM, that run at a time: a GPU's partitions
// are of unequal size, so that larger clusters leave some SMs idle. These are an H200's.
struct ClusterCounts {
  int of_1 = 132, of_2 = 66, of_4 = 30, of_8 = 15;

  int of(int ctas) const { return ctas == 1 ? of_1 : ctas == 2 ? of_2 : ctas == 4 ? of_4 : of_8; }
};

// The SMs that an engine's launches may use. One object, made with the engine, and passed to every
// launch whose CTAs wait for one another (device/cuda/co_resident.h).
struct SmBudget {
  int sms = 132;
  ClusterCounts clusters;

  // The share of each of so many ranks on the device, whose launches are there at the same time.
  SmBudget divided_by(int ranks) const {
    return {sms / ranks,
            {clusters.of_1 / ranks, clusters.of_2 / ranks, clusters.of_4 / ranks,
             clusters.of_8 / ranks}};
  }

  SmBudget limited_to(int most) const {
    const auto at_most = [&](int count, int ctas) { return std::min(count, most / ctas); };
    return {std::min(sms, most),
            {at_most(clusters.of_1, 1), at_most(clusters.of_2, 2), at_most(clusters.of_4, 4),
             at_most(clusters.of_8, 8)}};
  }
};

}  // namespace fathom::cuda

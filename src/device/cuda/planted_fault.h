// Faults that a build with FATHOM_PLANT_FAULTS can inject, to test the tests: `make gpu-plant` runs
// each test that must detect one and reports those that pass. FATHOM_PLANT names the fault when the
// program starts. In other builds nothing of this is compiled.
//
//   struct Arguments { …  FATHOM_PLANTED_FAULT };           the fault travels with a launch
//   if (FATHOM_PLANTED(arguments, kSwappedHead)) …          where it happens; else false
#pragma once

namespace fathom::cuda {

enum class PlantedFault {
  kNone,
  // decode_layers' faults.
  kWrongKey,         // one warp scores its neighbour's key in the newest run of keys
  kSwappedHead,      // W_o reads the last two heads swapped
  kSkippedHandoff,   // W_o does not wait for the heads' packets
  kDroppedExpert,    // the last selected expert has no weight
  kWrongLayerScale,  // W_o's scales are those of the rows 128 before
  kExtraRow,         // the cache row is written to the neighbouring slot too
  // Those of sums over ranks (V3's shape), and of two tokens.
  kDroppedPeer,       // sums over ranks lack the last rank's part
  kSharedExpertOnce,  // an expert that both tokens choose adds to the first one alone
  kHiddenNeighbour,   // the second of two neighbours does not see the first
  kStaleKeys,         // what a slot of the ring holds behind the newest key is not zeroed
  kForeignKeys,       // a token adds other sequences' keys, with weights of 0
  // Those of V2-Lite's shape alone.
  kSkippedKeyHandoff,   // the new cache row does not wait for the other CTAs' rows of W_kv_a
  kHalfLogit,           // a logit is the first half of its columns' alone
  kSkippedActivations,  // down does not wait for the activations
  // Faults of any step.
  kWrongRow,           // row 5 of a step writes its cache row a slot further
  kSwappedQueryHead,   // row 3's last two heads swap their rotary queries
  kStaleToken,         // row 2 takes the token that row 1 has sampled
  kSkippedLaunchWait,  // the rotation does not wait for the projection before it
  // Faults of exchanges between ranks.
  kAnyPacket,       // the sum of few rows takes packets of any epoch
  kUnorderedPeers,  // rank 1 adds its own part last
  kSkippedBegin,    // the sum of many rows does not wait for the other ranks' parts
  kSkippedEnd,      // it ends before the other ranks have written
  kWrongOwner,      // rows by index take the residual of the next rank
  // Faults of the exchange of experts' rows.
  kSkippedMeet,       // the experts' results are combined before the other ranks have them
  kWrongPeer,         // a row for the experts is read from the rank after its own
  kUnorderedExperts,  // rank 1 adds its experts' results in the order of the top-k list
  // Faults of sparse latent attention.
  kDroppedListKey,    // a list's last key is left out
  kNeighbourListKey,  // a tile's sixth key is copied from the row beside it
  kOtherSequence,     // a row's positions are looked up in the first sequence's block table
  kLostSplit,         // the last split of a list is not combined
  kBatchOrder,        // in a batch of many rows lists are taken in another order
  // Those of four-bit experts of few rows.
  kSwappedScale,    // the first 32 columns of a block take the scale of the others
  kRepeatedTokens,  // an expert's second eight tokens are the first again
  // Faults of sparse attention's indexer.
  kWrongIndexRow,   // row 5 of a step writes its index key a slot further
  kWrongIndexPage,  // the second page of 256 keys is scored as the first
  kCoarseLimit,     // the choice takes the k-th score's upper 22 bits for all of it
  kSeenHiddenKey,   // it takes a key 0 that is not there
  // Those of latent attention over an 8-bit cache.
  kUnboundedQueries,  // queries of 0 are brought up by 2^126
  kRoundedReference,  // a reference is multiplied with the softmax scale, and rounded, by itself
  kLast = kRoundedReference,
};

// The fault that FATHOM_PLANT names; kNone where it is unset. Ends the program if the name is
// unknown.
PlantedFault planted_fault();

}  // namespace fathom::cuda

#ifdef FATHOM_PLANT_FAULTS
#define FATHOM_PLANTED_FAULT PlantedFault planted = planted_fault();
#define FATHOM_PLANTED(arguments, fault) ((arguments).planted == PlantedFault::fault)
#else
#define FATHOM_PLANTED_FAULT
#define FATHOM_PLANTED(arguments, fault) false
#endif

#include "cli/foreign_flag_table.h"

namespace fathom {
namespace {

constexpr ForeignGroup kGroups[] = {
    {Asked::kAlias, "--max-model-len", "", "", "-c ctx-size"},
    {Asked::kAlias, "--max-num-seqs", "", "", "-np parallel"},
    {Asked::kAlias, "--served-model-name", "", "", "-a alias"},
    {Asked::kAlias, "--seed", "", "", "-s random-seed"},
    {Asked::kAlias, "--max-num-batched-tokens", "", "", "-b batch-size"},
    {Asked::kAlias, "--ssl-keyfile", "", "", "ssl-key-file"},
    {Asked::kAlias, "--ssl-certfile", "", "", "ssl-cert-file"},
    {Asked::kAlias, "--allowed-origins", "", "", "cors-origins"},
    {Asked::kAlias, "--kv-offload-gib", "", "", "kv-offloading-size"},
    {Asked::kAlias, "--enable-prefix-caching", "", "cache-prompt", ""},
    {Asked::kAlias, "--log-level=debug", "", "-v log-verbose verbose", ""},
    {Asked::kAlias, "--tokenizer", "", "", "tokenizer-path"},
    {Asked::kAlias, "--device", "", "", "-dev"},
    {Asked::kAlias, "--tp", "", "", "-tp"},
    {Asked::kAlias, "--dp", "", "", "-dp"},
    {Asked::kAlias, "--enable-expert-parallel", "", "-ep", ""},
    {Asked::kRefused, "", "fathom --version, fathom env and fathom serve --help say it",
     "-cl cache-list completion-bash list-devices usage version", ""},
    {Asked::kNote, "",
     "a request has its own; the server has defaults for temperature, top_p and top_k only",
     "ignore-eos",
     "-l -r adaptive-decay adaptive-target dry-allowed-length dry-base dry-multiplier "
     "dry-penalty-last-n dry-sequence-breaker dynatemp-exp dynatemp-range frequency-penalty "
     "logit-bias min-p mirostat mirostat-ent mirostat-lr presence-penalty repeat-last-n "
     "repeat-penalty reverse-prompt sampler-seq samplers sampling-seq top-n-sigma top-nsigma "
     "typical typical-p xtc-probability xtc-threshold"},
    {Asked::kOnly, "1", "parallelism over devices is not there yet", "",
     "-dcp -dpl -pcp -pp attention-context-parallel-size attention-data-parallel-size "
     "attn-cp-size attn-dp-size data-parallel-size-local dcp-size "
     "decode-context-parallel-size dwdp-size elastic-ep-initial-size "
     "elastic-ep-max-dp-size max-ep-size "
     "moe-data-parallel-size moe-dense-tp-size moe-dp-size pipeline-parallel-size pp pp-size "
     "prefill-context-parallel-size shared-experts-tp-size"},
    {Asked::kOnly, "0", "node 0 has the requests of all data-parallel ranks", "",
     "-dpn -dpr data-parallel-rank data-parallel-start-rank"},
    {Asked::kAlias, "--dist-timeout", "", "", "distributed-timeout-seconds"},
    {Asked::kRefused, "", "--dist-init-addr HOST:PORT says where node 0 listens", "",
     "master-addr master-port"},
    {Asked::kNote, "", "nodes other than 0 have no HTTP server", "headless", ""},
    {Asked::kRefused, "", "parallelism over devices is not there yet",
     "-dpe -dph -dpm data-parallel-external-lb data-parallel-hybrid-lb "
     "data-parallel-multi-port-external-lb "
     "enable-dsa-prefill-context-parallel enable-elastic-ep "
     "enable-nsa-prefill-context-parallel enable-pdmux enable-prefill-cp use-ray",
     "-ts rpc tensor-split"},
    {Asked::kOnly, "64", "pages of the cache have 64 tokens", "", "block-size page-size"},
    {Asked::kRefused, "", "adapters (LoRA) are not served", "enable-lora",
     "default-mm-loras lora lora-scaled uno-lora-path", "lora-modules lora-paths"},
    {Asked::kNote, "", "adapters (LoRA) are not served",
     "enable-lora-overlap-loading enable-mixed-moe-lora-format enable-moe-shared-loras "
     "enable-tower-connector-lora experts-shared-outer-loras fully-sharded-loras "
     "lora-init-without-apply lora-strict-loading lora-use-virtual-experts "
     "specialize-active-lora",
     "lora-backend lora-drain-wait-threshold lora-dtype lora-eviction-policy "
     "lora-extra-vocab-size max-cpu-loras max-loaded-loras max-lora-chunk-size "
     "max-lora-cls-labels max-lora-rank max-loras max-loras-per-batch",
     "lora-target-modules"},
    {Asked::kRefused, "", "control vectors are not applied", "",
     "control-vector control-vector-scaled", "control-vector-layer-range"},
    {Asked::kOnly, "auto generate", "the server generates text, no embeddings and no scores", "",
     "runner task"},
    {Asked::kOnly, "auto none", "the server generates text, no embeddings and no scores", "",
     "convert"},
    {Asked::kRefused, "", "the server generates text, no embeddings and no scores",
     "embedding embeddings enable-mis is-embedding rerank reranking",
     "multi-item-scoring-delimiter override-pooler-config pooler-config"},
    {Asked::kNote, "", "the server generates text, no embeddings and no scores",
     "enable-flash-late-interaction", "embd-normalize pooling"},
    {Asked::kRefused, "", "pictures and sound are not understood",
     "enable-mm-embeds enable-prompt-embeds encoder-only mm-encoder-only",
     "-mm -mmu mmproj mmproj-url", "encoder-register-urls encoder-urls"},
    {Asked::kRefused, "", "a server computes whole requests, none of its parts",
     "checkpoint-engine-wait-weights-before-ready enable-pd-role-switch enable-scale-out "
     "prefill-only-disable-kv-cache skip-tokenizer-init tokens-only",
     "data-parallel-supervisor-port decoupled-spec-role ec-manager-config ec-transfer-config "
     "engine-info-bootstrap-port gated-launch-port sidecar"},
    {Asked::kRefused, "", "prompts of other servers are computed with --role and --transfer-addr",
     "", "kv-transfer-config"},
    {Asked::kOnly, "null", "a server computes whole requests, none of its parts", "",
     "disaggregation-mode"},
    {Asked::kRefused, "", "HTTP/1.1 over TCP is what is spoken",
     "enable-http2 grpc grpc-mode smg-grpc-mode",
     "grpc-http-sidecar-port grpc-port smg-http-sidecar-port uds"},
    {Asked::kRefused, "", "client certificates are not asked for; let a proxy do it", "",
     "ssl-ca-certs"},
    {Asked::kOnly, "0", "client certificates are not asked for; let a proxy do it", "",
     "ssl-cert-reqs"},
    {Asked::kRefused, "", "the key file must be readable without a password", "",
     "ssl-keyfile-password"},
    {Asked::kRefused, "", "TLS 1.2 and later is spoken with OpenSSL's own choice of ciphers", "",
     "ssl-ciphers"},
    {Asked::kNote, "", "a new certificate needs a restart", "enable-ssl-refresh", ""},
    {Asked::kRefused, "", "--chat-format chooses among the formats that are built in", "",
     "completion-template hf-chat-template-name"},
    {Asked::kRefused, "", "a request says it in chat_template_kwargs", "",
     "chat-template-kwargs default-chat-template-kwargs reasoning-effort-map"},
    {Asked::kOnly, "auto", "a request says whether the model reasons first", "", "", "",
     "-rea reasoning"},
    {Asked::kOnly, "default", "a request says whether the model reasons first", "",
     "reasoning-effort"},
    {Asked::kOnly, "-1", "reasoning is not cut short", "", "reasoning-budget"},
    {Asked::kOnly, "auto deepseek", "reasoning is returned as reasoning_content", "",
     "reasoning-format"},
    {Asked::kOnly, "assistant", "answers are of the role assistant", "", "response-role"},
    {Asked::kRefused, "", "config.json says what the model is; change it there", "",
     "decrypted-config-file hf-config-path hf-overrides json-model-override-args "
     "model-class-overrides override-kv quantization-config rope-freq-base rope-freq-scale "
     "rope-scale rope-scaling rope-theta yarn-attn-factor yarn-beta-fast yarn-beta-slow "
     "yarn-ext-factor yarn-orig-ctx"},
    {Asked::kRefused, "", "no foreign code is run", "enable-custom-logit-processor",
     "forward-hooks io-processor-plugin reasoning-parser-plugin scheduler-cls "
     "tool-parser-plugin worker-cls worker-extension-cls",
     "custom-weight-loader logits-processors middleware"},
    {Asked::kRefused, "", "the server runs no tools; its clients do",
     "-ag agent ui-mcp-proxy webui-mcp-proxy",
     "mcp-servers-config mcp-servers-json tool-server tools tools-runtime"},
    {Asked::kRefused, "",
     "nothing is downloaded: MODEL is a directory with safetensors, or an id in the local hub "
     "cache",
     "embd-gemma-default fim-qwen-1.5b-default fim-qwen-14b-spec fim-qwen-30b-default "
     "fim-qwen-3b-default fim-qwen-7b-default fim-qwen-7b-spec gpt-oss-120b-default "
     "gpt-oss-20b-default spec-default vision-gemma-12b-default vision-gemma-4b-default",
     "-dr -hf -hff -hfr -mu docker-repo hf-file hf-repo model-url"},
    {Asked::kNote, "", "nothing is downloaded; HF_HUB_CACHE names the local hub cache", "offline",
     "-hft download-dir hf-token"},
    {Asked::kNote, "", "a hub id is the snapshot that its refs/main names", "",
     "code-revision revision tokenizer-revision"},
    {Asked::kRefused, "", "one server has one model", "models-autoload",
     "models-dir models-max models-preset"},
    {Asked::kRefused, "", "a request says what its answer has to match", "",
     "-j -jf grammar grammar-file json-schema json-schema-file"},
    {Asked::kRefused, "", "--temperature, --top-p and --top-k set the defaults of requests", "",
     "override-generation-config preferred-sampling-params"},
    {Asked::kRefused, "", "answers carry no watermark", "enable-watermark",
     "watermark watermark-config"},
    {Asked::kRefused, "", "this is not a diffusion model", "", "diffusion-config dllm-algorithm"},
    {Asked::kRefused, "", "hidden states and routes are not returned",
     "enable-return-aux-hidden-states enable-return-hidden-states enable-return-indexer-topk "
     "enable-return-routed-experts return-sampling-mask",
     "return-hidden-states-mode", "return-aux-hidden-state-layer-ids"},
    {Asked::kRefused, "", "weights stay as they were loaded",
     "delete-ckpt-after-loading enable-memory-saver enable-sleep-mode quantize-and-serve "
     "remote-instance-weight-loader-start-seed-via-transfer-engine",
     "modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path "
     "modelopt-quant torchao-config weight-transfer-config",
     "", "model-checksum"},
    {Asked::kRefused, "", "paths begin at /; let a proxy add a prefix", "", "api-prefix"},
    {Asked::kRefused, "", "the one page is built in; no files are served", "", "path"},
    {Asked::kRefused, "", "a prompt that is too long is refused, not cut",
     "allow-auto-truncate context-shift", ""},
    {Asked::kRefused, "", "caches of requests are not written to files by name", "",
     "slot-save-path"},
    {Asked::kRefused, "", "prompts and answers are never written to logs or files",
     "enable-log-outputs", "-lcd crash-dump-folder log-prompts-dir lookup-cache-dynamic"},
    {Asked::kNote, "", "answers are the same without speculation",
     "-cmoed cpu-moe-draft enable-multi-layer-eagle spec-draft-backend-sampling "
     "spec-draft-cpu-moe speculative-adaptive "
     "speculative-dspark-align-verify-tokens-to-graph-tier "
     "speculative-enable-w4a4-mxfp4-megamoe speculative-use-block-verification "
     "speculative-use-rejection-sampling",
     "-Cbd -Cd -Crd -ctkd -ctvd -devd -hfd -hfrd -lcs -md -ncmoed -ngld -otd -sc -tbd -td "
     "cache-type-k-draft cache-type-v-draft cpu-mask-batch-draft cpu-mask-draft "
     "cpu-range-draft cpu-strict-batch-draft cpu-strict-draft decoupled-spec-bind-endpoint "
     "decoupled-spec-connect-endpoints decoupled-spec-rank device-draft draft draft-max "
     "draft-min draft-n draft-n-min draft-p-min draft-p-split gpu-layers-draft hf-repo-draft "
     "lookup-cache-static model-draft n-cpu-moe-draft n-gpu-layers-draft num-lookahead-slots "
     "num-speculative-tokens override-tensor-draft per-request-spec-decode-metrics "
     "poll-batch-draft poll-draft prio-batch-draft prio-draft spec-draft-cpu-mask "
     "spec-draft-cpu-mask-batch spec-draft-cpu-range spec-draft-cpu-strict "
     "spec-draft-cpu-strict-batch spec-draft-device spec-draft-hf spec-draft-model "
     "spec-draft-n-cpu-moe spec-draft-n-max spec-draft-n-min spec-draft-ncmoe spec-draft-ngl "
     "spec-draft-override-tensor spec-draft-p-min spec-draft-p-split spec-draft-poll "
     "spec-draft-poll-batch spec-draft-prio spec-draft-prio-batch spec-draft-sampling "
     "spec-draft-threads spec-draft-threads-batch spec-draft-type-k spec-draft-type-v "
     "spec-method spec-model spec-ngram-map-k-min-hits spec-ngram-map-k-size-m "
     "spec-ngram-map-k-size-n spec-ngram-map-k4v-min-hits spec-ngram-map-k4v-size-m "
     "spec-ngram-map-k4v-size-n spec-ngram-min-hits spec-ngram-mod-n-match "
     "spec-ngram-mod-n-max spec-ngram-mod-n-min spec-ngram-simple-min-hits "
     "spec-ngram-simple-size-m spec-ngram-simple-size-n spec-ngram-size-m spec-ngram-size-n "
     "spec-synth-len spec-synth-rates spec-tokens spec-trace-dir spec-type "
     "speculative-accept-threshold-acc speculative-accept-threshold-single "
     "speculative-adaptive-config speculative-algorithm speculative-attention-mode "
     "speculative-dflash-block-size speculative-domino-candidate-pool-size "
     "speculative-draft-attention-backend speculative-draft-kv-cache-dtype "
     "speculative-draft-load-format speculative-draft-model speculative-draft-model-path "
     "speculative-draft-model-quantization speculative-draft-model-revision "
     "speculative-draft-sink-size speculative-draft-window-size speculative-dsa-topk-backend "
     "speculative-dspark-block-size speculative-dspark-confidence-sts-path "
     "speculative-dspark-sps-table-path speculative-eagle-topk speculative-model "
     "speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity "
     "speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path "
     "speculative-ngram-external-sam-budget speculative-ngram-match-type "
     "speculative-ngram-max-bfs-breadth speculative-ngram-max-trie-depth "
     "speculative-ngram-min-bfs-breadth speculative-num-draft-tokens "
     "speculative-token-map threads-batch-draft threads-draft"},
    {Asked::kNote, "", "no code of a checkpoint is ever run", "trust-remote-code", ""},
    {Asked::kNote, "", "kernels are compiled, and the engine chooses the sizes of captured graphs",
     "cudagraph-metrics debug-cuda-graph disable-cuda-graph-padding disable-decode-cuda-graph "
     "disable-flashinfer-autotune disable-piecewise-cuda-graph disable-prefill-cuda-graph "
     "enable-cudagraph-gc enable-flashinfer-autotune enable-layerwise-nvtx-marker "
     "enable-layerwise-nvtx-tracing enable-profile-cuda-graph enable-torch-compile "
     "enable-torch-compile-debug-mode enforce-piecewise-cuda-graph jit-monitor-verbose "
     "sleep-mode-offload-cudagraph",
     "-O -cc compilation-config cuda-graph-backend-decode cuda-graph-backend-prefill "
     "cuda-graph-config cuda-graph-max-bs cuda-graph-max-bs-decode cuda-graph-max-bs-prefill "
     "cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context jit-monitor-mode "
     "kernel-config max-cudagraph-capture-size max-seq-len-to-capture optimization-level "
     "performance-mode piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens "
     "piecewise-cuda-graph-tokens profiler-config torch-compile-max-bs",
     "cuda-graph-bs cuda-graph-bs-decode cuda-graph-bs-prefill cudagraph-capture-sizes "
     "flashinfer-autotune-skip-ops"},
    {Asked::kNote, "", "--attention chooses the form of attention",
     "disable-cascade-attn disable-chunked-prefix-cache disable-mla disable-sliding-window "
     "enable-flashinfer-mla enable-lean-attention flashinfer-mla-disable-ragged "
     "triton-attention-reduce-in-fp32",
     "-ac attention-backend attention-config decode-attention-backend dsa-decode-backend "
     "dsa-paged-mqa-logits-backend dsa-prefill-backend dsa-prefill-cp-mode dsa-topk-backend "
     "dsa-triton-union dsv4-attn-backend dsv4-prefill-backend linear-attn-backend "
     "linear-attn-decode-backend linear-attn-prefill-backend linear-attn-verify-backend "
     "nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode prefill-attention-backend "
     "sparse-indexer-topk-backend triton-attention-num-kv-splits "
     "triton-attention-split-tile-size",
     "", "-fa flash-attn"},
    {Asked::kNote, "", "kernels are chosen by shape and type",
     "-bs -cmoe -nr backend-sampling cpu-moe disable-aiter-allreduce-fusion-in-decode "
     "disable-aiter-allreduce-fusion-in-prefill disable-flashinfer-cutlass-moe-fp4-allgather "
     "disable-shared-experts-fusion enable-aiter-allreduce-fusion enable-amd-monokernel "
     "enable-deepep-moe enable-ep-moe enable-flashinfer-allreduce-fusion "
     "enable-flashinfer-cutlass-moe enable-flashinfer-trtllm-moe enable-fp32-lm-head "
     "enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope "
     "enable-megamoe-for-layernorm-sp enable-nvidia-megakernel enable-tf32-matmul "
     "enable-triton-kernel-moe enable-w4a4-mxfp4-megamoe "
     "enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion monokernel "
     "op-offload repack use-fp64-gumbel",
     "-ncmoe bf16-gemm-backend flashinfer-a2a-dispatch-type "
     "flashinfer-allreduce-fusion-backend flashinfer-mxfp4-moe-precision fp4-gemm-backend "
     "fp8-gemm-backend gdn-prefill-backend ir-op-priority kda-decode-backend "
     "kda-prefill-backend linear-backend moe-a2a-backend moe-backend moe-cache-mib "
     "moe-runner-backend monokernel-backend n-cpu-moe sampling-backend"},
    {Asked::kNote, "", "--max-total-tokens sets the size of the cache", "-kvu -no-kvu kv-unified",
     "-fitc -fitt device-memory-utilization fit-ctx fit-target gpu-memory-utilization "
     "kv-cache-memory-bytes kv-unified-per-slot mem-fraction-static num-gpu-blocks-override",
     "", "-fit fit"},
    {Asked::kNote, "", "--kv-cache-dtype sets the format of the latent cache", "",
     "-ctk -ctv cache-type-k cache-type-v quantization-param-path", "kv-cache-dtype-skip-layers"},
    {Asked::kNote, "", "--kv-offload-gib gives host memory to the cache",
     "-kvo -nkvo cache-idle-slots enable-flexkv enable-hicache enable-hierarchical-cache "
     "enable-lmcache enable-unified-cache-external-linker kv-offload",
     "-cram cache-ram flexkv-config-file hicache-host-memory-fraction hicache-host-memory-mode "
     "hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend "
     "hicache-storage-backend-extra-config hicache-storage-prefetch-policy "
     "hicache-storage-prefetch-retry-max-attempts hicache-storage-prefetch-retry-poll-interval "
     "hicache-write-policy kv-offloading-backend lmcache-config-file swap-space "
     "unified-cache-external-linker-backend unified-cache-external-linker-config"},
    {Asked::kRefused, "", "--kv-events-endpoint tells what the cache has", "", "kv-events-config"},
    {Asked::kNote, "", "prefixes are kept by pages, the least recently used leave first",
     "enable-session-radix-cache",
     "-cms -ctxcp -sps cache-reuse checkpoint-min-step ctx-checkpoints keep "
     "prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit "
     "radix-cache-backend radix-eviction-policy radix-eviction-policy-config "
     "slot-prompt-similarity swa-checkpoints"},
    {Asked::kNote, "", "weights are held once, where they are computed with",
     "enable-draft-weights-cpu-backup enable-paged-experts enable-weights-cpu-backup "
     "ple-offload-embedding",
     "-ncffn -ngl -ot cpu-offload-gb gpu-layers kt-cpuinfer kt-max-deferred-experts-per-token "
     "kt-method kt-num-gpu-experts kt-threadpool-count kt-weight-path n-cpu-ffn n-gpu-layers "
     "offload-backend offload-group-size offload-mode offload-num-in-group "
     "offload-prefetch-step override-tensor paged-experts-num-resident ple-offload-backend "
     "ple-offload-dir",
     "cpu-offload-params offload-params"},
    {Asked::kNote, "", "--device chooses the GPU", "",
     "-mg -sm base-gpu-id gpu-id-step main-gpu split-mode", "device-ids"},
    {Asked::kNote, "", "--threads sets the CPU threads", "numa-bind sleep-on-idle",
     "-C -Cb -Cr -Crb -tb cpu-mask cpu-mask-batch cpu-range cpu-range-batch cpu-strict "
     "cpu-strict-batch detokenizer-worker-num numa poll poll-batch prio prio-batch "
     "renderer-num-workers threads-batch threads-http tokenizer-pool-size tokenizer-pool-type "
     "tokenizer-worker-num",
     "numa-bind-cpus numa-bind-nodes numa-node"},
    {Asked::kNote, "", "the format follows from the model, --chat-format overrides it",
     "cohere-is-reasoning-model enable-strict-thinking exclude-tools-when-tool-choice-none "
     "jinja reasoning-preserve skip-chat-parsing spm-infill strip-thinking-cache "
     "trust-request-chat-template trust-request-mm-kwargs",
     "anthropic-disabled-thinking-effort chat-template-content-format "
     "chat-template-text-format cohere-format config-format model-config-parser model-impl "
     "reasoning-budget-message reasoning-config reasoning-parser tool-call-parser "
     "tool-strict-level"},
    {Asked::kNote, "", "it is always on",
     "-cb async-scheduling cont-batching enable-auto-tool-choice enable-cache-report "
     "enable-chunked-prefill enable-metrics enable-metrics-for-all-schedulers "
     "enable-prompt-tokens-details enable-reasoning enable-request-id-headers "
     "incremental-streaming-output metrics prefill-assistant",
     ""},
    {Asked::kNote, "", "steps overlap with the host and sequences join and leave at each",
     "-nocb disable-async-output-proc disable-overlap-schedule enable-dbo "
     "enable-single-batch-overlap enable-two-batch-overlap multi-step-stream-outputs "
     "scheduler-reserve-full-isl use-v2-block-manager",
     "-ub dbo-decode-token-threshold dbo-prefill-token-threshold min-free-slots-delay "
     "num-continuous-decode-steps num-scheduler-steps scheduler-delay-factor "
     "scheduler-recv-interval tbo-token-distribution-threshold ubatch-size"},
    {Asked::kNote, "", "long prompts are always computed in chunks beside what runs",
     "disable-chunked-mm-input enable-dynamic-chunking enable-mixed-chunk "
     "enable-prefill-delayer long-prefill-token-threshold-adaptive",
     "long-prefill-token-threshold max-micro-batch-size max-num-active-seqs "
     "max-num-scheduled-tokens max-prefill-tokens pp-async-batch-depth pp-max-micro-batch-size "
     "prefill-decode-interval prefill-decode-interval-min-bs prefill-delayer-max-delay-ms "
     "prefill-delayer-max-delay-passes prefill-delayer-queue-min-ratio "
     "prefill-delayer-token-usage-low-watermark prefill-kv-cache-dequant-dtype "
     "prefill-max-requests prefill-schedule-interval",
     "prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets"},
    {Asked::kAlias, "--enable-priority", "", "enable-priority-scheduling", ""},
    {Asked::kAlias, "--sampling-defaults", "", "", "generation-config"},
    {Asked::kNote, "", "requests run in order, --enable-priority lets them say another",
     "abort-on-priority-when-disabled disable-priority-preemption "
     "schedule-low-priority-values-first",
     "default-priority-value priority-scheduling-preemption-threshold schedule-policy"},
    {Asked::kNote, "", "sequences are preempted when the cache is full",
     "disable-hybrid-kv-cache-manager disable-hybrid-swa-memory swa-bounded-replay swa-full",
     "-dt defrag-thold num-reserved-decode-tokens preemption-mode retraction-policy "
     "schedule-conservativeness swa-full-tokens-ratio swa-prefix-tails"},
    {Asked::kNote, "", "XGrammar makes the masks",
     "constrained-json-disable-any-whitespace disable-jump-forward disable-outlines-disk-cache",
     "constrained-json-max-whitespace-cnt constrained-json-whitespace-pattern grammar-backend "
     "guided-decoding-backend structured-outputs-config"},
    {Asked::kNote, "", "figures are at /metrics only",
     "aggregate-engine-logging collect-tokens-histogram disable-log-stats "
     "enable-forward-pass-metrics enable-logging-iteration-details enable-mfu-metrics "
     "enable-per-request-metrics enable-request-time-stats-logging enable-server-load-tracking "
     "export-metrics-to-file kv-cache-metrics perf show-time-cost",
     "decode-log-interval expert-balancedness-report-mode "
     "expert-distribution-recorder-buffer-size expert-distribution-recorder-mode "
     "export-metrics-to-file-dir extra-metric-labels forward-pass-metrics-ipc-name "
     "forward-pass-metrics-worker-id kv-cache-metrics-sample load-publish-endpoint "
     "load-snapshot-publish-interval show-hidden-metrics-for-version "
     "tokenizer-metrics-custom-labels-header",
     "bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token "
     "collect-detailed-traces custom-histogram-buckets generation-tokens-buckets "
     "prompt-tokens-buckets tokenizer-metrics-allowed-custom-labels"},
    {Asked::kNote, "", "there are no traces and no dumps",
     "check-tensors enable-nan-detection enable-trace enable-trace-replay log-error-stack "
     "ray-workers-use-nsight",
     "debug-tensor-dump-inject debug-tensor-dump-input-file debug-tensor-dump-output-folder "
     "gc-warning-threshold-secs kv-canary kv-canary-real-data kv-canary-sweep-interval "
     "msprobe-dump-config otlp-service-name otlp-traces-endpoint rl-on-policy-target "
     "rl-quant-profile trace-modules",
     "debug-tensor-dump-layers gc-threshold"},
    {Asked::kNote, "", "--log-level is the one level of all lines, which go to stderr",
     "disable-uvicorn-access-log enable-log-deltas log-disable log-jsonl log-prefix "
     "log-timestamps",
     "-lv disable-access-log-for-endpoints log-config-file log-file log-level-http "
     "log-requests-format log-requests-level log-verbosity logging-config max-log-len "
     "uvicorn-log-level verbosity",
     "log-requests-target uvicorn-access-log-exclude-prefixes", "log-colors"},
    {Asked::kNote, "", "there is one tokenizer",
     "-e -sp disable-tokenizer-batch-decode enable-dynamic-batch-tokenizer "
     "enable-tokenizer-batch-encode escape special",
     "dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout "
     "tokenizer-backend tokenizer-mode"},
    {Asked::kNote, "",
     "--tp, --dp and --nnodes say how ranks meet; sums and exchanges are the engine's own",
     "dcp-q-replicate dcp-replicate-q-proj disable-attn-tp-gather "
     "disable-custom-all-reduce disable-frontend-multiprocessing "
     "disable-nccl-for-dp-synchronization enable-attn-tp-input-scattered "
     "enable-batch-sharded-sampling enable-cp-decode-attn-tp enable-dense-mlp-attn-tp "
     "enable-dp-attention-local-control-broadcast enable-dp-lm-head "
     "enable-elastic-expert-backup enable-fault-tolerance "
     "enable-mscclpp enable-nccl-comm-suspend enable-nccl-nvls enable-p2p-check "
     "enable-quant-communications enable-shared-experts-attn-tp enable-shm-tensor-arena "
     "enable-symm-mem enable-torch-symm-mem enable-tp-lm-head-all-to-all mm-enable-dp-encoder "
     "pre-warm-nccl",
     "-asc -dpa -dpb -dpp all2all-backend api-server-count batch-notify-size "
     "boundary-reduction cp-kv-cache-interleave-size cp-strategy "
     "cpu-distributed-timeout-seconds data-parallel-address data-parallel-backend "
     "data-parallel-rpc-port dcp-comm-backend dcp-kv-cache-interleave-size deepep-config "
     "deepep-dispatcher-output-dtype deepep-mode deepep-v2-mode disaggregation-ib-device "
     "distributed-executor-backend "
     "dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s "
     "dp-supervisor-probe-timeout-s dp-sync-interval elastic-ep-backend elastic-ep-join-mode "
     "elastic-ep-join-rank-offset elastic-ep-scale-timeout ep-dispatch-algorithm "
     "eplb-algorithm eplb-config "
     "eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk "
     "expert-placement-strategy fault-tolerance-config "
     "fuseep-mode load-balance-method "
     "max-parallel-loading-workers mm-encoder-tp-mode mooncake-ib-device nccl-init-addr "
     "nccl-port"},
    {Asked::kNote, "", "tokens are sent as they come",
     "enable-force-include-usage return-input-ids return-output-ids return-tokens-as-token-ids "
     "stream-response-default-include-usage",
     "stream-interval"},
    {Asked::kNote, "", "an idle stream gets a comment every 15 s", "",
     "sse-keep-alive-interval sse-ping-interval"},
    {Asked::kNote, "", "--request-timeout and --queue-timeout end requests", "",
     "-to sleep-idle-seconds soft-watchdog-timeout timeout watchdog-config"},
    {Asked::kNote, "", "a request may ask for up to 20", "", "logprobs-mode max-logprobs"},
    {Asked::kNote, "", "max_tokens of a request bounds its answer", "", "-n n-predict predict"},
    {Asked::kNote, "", "the one page is built in",
     "disable-fastapi-docs enable-offline-docs ui webui",
     "tags ui-config ui-config-file webui-config webui-config-file"},
    {Asked::kNote, "", "--allowed-origins is all that CORS has",
     "allow-credentials cors-credentials", "cors-headers cors-methods",
     "allowed-headers allowed-methods"},
    {Asked::kNote, "", "paths begin at /; a proxy strips its prefix", "",
     "fastapi-root-path root-path"},
    {Asked::kNote, "", "limits of requests are at the end of fathom serve --help",
     "enable-http-worker-reuseport reuse-port",
     "grpc-response-timeout-secs h11-max-header-count h11-max-incomplete-event-size "
     "http2-initial-connection-window-size http2-max-concurrent-streams"},
    {Asked::kNote, "", "there is no such endpoint",
     "enable-response-store enable-streaming-session enable-tokenizer-info-endpoint props "
     "slots",
     "asr-max-concurrent-sessions file-storage-path"},
    {Asked::kNote, "", "text is all that is understood",
     "disable-fast-image-processor disable-mm-preprocessor-cache "
     "enable-adaptive-dispatch-to-encoder enable-broadcast-mm-inputs-process "
     "enable-encoder-swa-bounded-replay enable-mm-global-cache enable-multimodal "
     "enable-prefix-mm-cache interleave-mm-strings keep-mm-feature-on-device "
     "language-model-only language-only mm-device-do-normalize mmproj-auto mmproj-offload "
     "skip-mm-profiling trust-mm-content-hashes",
     "-mmdev allowed-local-media-path asr-max-buffer-seconds encoder-bootstrap-port "
     "encoder-transfer-backend image-max-tokens image-min-tokens image-processor-backend "
     "limit-mm-data-per-request limit-mm-per-prompt media-io-kwargs media-path "
     "media-url-max-file-size-mb mm-attention-backend mm-encoder-attn-backend "
     "mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin "
     "mm-encoder-fp8-scale-save-path mm-feature-transport mm-global-cache-backend "
     "mm-hasher-algorithm mm-io-worker-num mm-ipc-gpu-memory-gb mm-preprocess-cache-size-mb "
     "mm-process-config mm-processor-cache-gb mm-processor-cache-type mm-processor-device "
     "mm-processor-kwargs mm-processor-worker-num mm-shm-cache-max-object-size-mb "
     "mm-tensor-ipc mmproj-device mtmd-batch-max-tokens video-ffmpeg-dir video-fps "
     "video-pruning-method video-pruning-rate video-timestamp-interval",
     "allowed-media-domains"},
    {Asked::kNote, "", "no warm-up requests are sent", "skip-server-warmup warmup", "warmups"},
    {Asked::kNote, "", "safetensors are read directly, by several threads",
     "allow-deprecated-quantization use-tqdm-on-load "
     "weight-loader-disable-mmap weight-loader-drop-cache-after-load "
     "weight-loader-prefetch-checkpoints",
     "-lm -lzm lazy-mode load-mode model-loader-extra-config modelexpress-config "
     "pt-load-map-location remote-instance-weight-loader-backend "
     "remote-instance-weight-loader-seed-instance-ip "
     "remote-instance-weight-loader-seed-instance-service-port "
     "remote-instance-weight-loader-send-weights-group-ports safetensors-load-strategy "
     "safetensors-prefetch-block-size safetensors-prefetch-num-threads "
     "startup-weight-load-mode weight-cache-mode weight-cache-socket "
     "weight-cache-timeout weight-loader-prefetch-num-threads weight-version",
     "ignore-patterns"},
    {Asked::kNote, "", "DeepSeek models have no state-space layers",
     "enable-int8-mamba-checkpoint enable-linear-replayssm enable-linear-replayssm-spec "
     "enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint "
     "enable-scattered-sconv mlx-enable-sampling use-replayssm",
     "engram-config int8-mamba-ckpt-size linear-replayssm-cache-len mamba-backend "
     "mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds "
     "mamba-full-memory-ratio mamba-max-states-per-path mamba-radix-cache-strategy "
     "mamba-ssm-cache-dtype mamba-ssm-dtype mamba-ssu-algorithm mamba-track-interval "
     "max-mamba-cache-size replayssm-buffer-len"},
    {Asked::kNote, "", "nodes compute whole requests",
     "disaggregation-decode-enable-offload-kvcache disaggregation-decode-enable-radix-cache "
     "disaggregation-enable-kv-checksum",
     "disaggregation-bootstrap-port disaggregation-decode-allocation-policy "
     "disaggregation-decode-extra-slots disaggregation-decode-host-receive-threshold "
     "disaggregation-decode-polling-interval disaggregation-decode-retraction-backup "
     "disaggregation-transfer-backend optimistic-prefill-attempts"},
    {Asked::kNote, "", "there is nothing like it here",
     "-no-ag dllm-fdfo enable-beta-spec enable-cumem-allocator "
     "enable-decoder-swa-bounded-replay enable-deepseek-v4-fp4-indexer "
     "enable-dsa-cache-layer-split enable-dsa-fused-indexer enable-ep-weight-filter "
     "enable-hc-sp enable-hisparse enable-kv-cache-sharding enable-layernorm-sp "
     "enable-linker-mla-dedup enable-page-major-kv-layout "
     "enable-precise-embedding-interpolation enable-unified-memory enable-waterfill "
     "fail-on-environ-validation kv-sharing-fast-prefill",
     "-dc additional-config aux-output-config c128-page-size context-bucket "
     "decrypted-draft-config-file dllm-algorithm-config fingerprint-mode fingerprint-value "
     "hierarchical-sparse-attention-extra-config hisparse-config override-neuron-config "
     "pdmux-config-path qsa-indexer-dtype sampling-mask-max-tokens sidecar-args "
     "sleep-mode-backend sm-group-num",
     "sleep-preserve-parameter-names"},
};

constexpr ForeignGroup kLoadGroups[] = {
    {Asked::kAlias, "--quiet", "", "disable-tqdm", ""},
    {Asked::kAlias, "--ignore-eos=false", "", "disable-ignore-eos", ""},
    {Asked::kAlias, "--num-warmups", "", "", "warmup-requests"},
    {Asked::kAlias, "--result-filename", "", "", "output-file"},
    {Asked::kAlias, "--extra-body", "", "", "extra-request-body"},
    {Asked::kAlias, "--label", "", "", "tag"},
    {Asked::kNote, "", "prompts are token ids, and the server counts its tokens",
     "trust-remote-code skip-tokenizer-init tokenize-prompt", "tokenizer tokenizer-mode"},
    {Asked::kNote, "", "a chat is formatted by the server, a text is sent as it is",
     "apply-chat-template skip-chat-template enable-multimodal-chat", "chat-template-kwargs"},
    {Asked::kNote, "", "a dataset's prompts are taken in their order, and once",
     "disable-shuffle no-oversample use-trace-timestamps custom-ensure-client-side-data",
     "sharegpt-context-len random-batch-size"},
    {Asked::kNote, "", "the object that is written has counts, rates and percentiles",
     "save-detailed output-details append-result plot-timeline plot-dataset-stats plot-throughput "
     "print-requests cache-report self-timed return-logprob",
     "timeline-itl-thresholds request-id-prefix probe-request-rate top-logprobs-num "
     "logprob-start-len",
     "token-ids-logprob"},
    {Asked::kNote, "", "the load comes from this process", "rust-client", "rust-worker-threads"},
    {Asked::kNote, "", "certificates are those of the server's own machine", "insecure", ""},
    {Asked::kRefused, "", "answers are always streamed", "no-stream disable-stream", ""},
    {Asked::kRefused, "", "adapters (LoRA) are not served", "",
     "lora-assignment lora-request-distribution lora-zipf-alpha", "lora-modules lora-name"},
    {Asked::kRefused, "", "beams are not searched", "use-beam-search", ""},
    {Asked::kRefused, "", "the rate does not change while it runs", "",
     "ramp-up-strategy ramp-up-start-rps ramp-up-end-rps"},
    {Asked::kRefused, "", "no other headers than the key's are sent", "", "", "header"},
    {Asked::kRefused, "", "the server has no profiler to start",
     "profile profile-by-stage pd-separated fake-prefill return-routed-experts",
     "profile-start-step profile-steps profile-num-steps profile-output-dir profile-prefix",
     "profile-activities profile-stages profile-prefill-url profile-decode-url"},
};

}  // namespace

std::span<const ForeignGroup> server_groups() { return kGroups; }
std::span<const ForeignGroup> load_groups() { return kLoadGroups; }

}  // namespace fathom

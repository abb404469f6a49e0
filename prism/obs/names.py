"""Every metric Prism has. Nobody else writes a metric's name out; ``docs/metrics.md`` is generated from here.

Labels: ``model`` is the catalog's name (never an alias), ``device`` a device id such as ``local/cuda:0`` (empty where a
request ended before it had one), ``key`` the name of an API key (never its secret).
"""

from __future__ import annotations

from typing import Final

from prism.obs.definition import FAST_BUCKETS, STEP_BUCKETS, MetricDef, counter, gauge, histogram

# --- requests, seen by the front door ---

REQUESTS: Final = counter(
    "prism_requests_total",
    "Requests that ended. `outcome`: ok, rejected (429), failed, cancelled (the client went away), invalid.",
    "model",
    "device",
    "outcome",
    promql='sum by (model) (rate(prism_requests_total{outcome="ok"}[5m]))',
)
TTFT_SECONDS: Final = histogram(
    "prism_ttft_seconds",
    "From the request read to its first token sent to the client.",
    "model",
    "device",
    promql="histogram_quantile(0.99, sum by (le, model) (rate(prism_ttft_seconds_bucket[5m])))",
)
TPOT_SECONDS: Final = histogram(
    "prism_tpot_seconds",
    "Mean time per output token after the first, one observation per request.",
    "model",
    "device",
    buckets=STEP_BUCKETS,
    promql="histogram_quantile(0.99, sum by (le, model) (rate(prism_tpot_seconds_bucket[5m])))",
)
E2E_SECONDS: Final = histogram(
    "prism_e2e_seconds",
    "From the request read to its last token sent.",
    "model",
    "device",
    promql="histogram_quantile(0.5, sum by (le, model) (rate(prism_e2e_seconds_bucket[5m])))",
)
SLO: Final = counter(
    "prism_slo_requests_total",
    "Finished requests by whether they met an objective. `objective`: ttft, tpot; `met`: true, false.",
    "model",
    "device",
    "objective",
    "met",
    promql='sum by (model) (rate(prism_slo_requests_total{objective="ttft",met="true"}[5m])) '
    '/ sum by (model) (rate(prism_slo_requests_total{objective="ttft"}[5m]))',
)
WAITING: Final = gauge(
    "prism_requests_waiting",
    "Requests that have no token yet.",
    "model",
    merge="livesum",
    promql="sum by (model) (prism_requests_waiting)",
)
STREAMING: Final = gauge(
    "prism_requests_streaming",
    "Requests between their first and last token.",
    "model",
    merge="livesum",
    promql="sum(prism_requests_streaming)",
)
PROMPT_TOKENS: Final = counter(
    "prism_prompt_tokens_total",
    "Prompt tokens of accepted requests.",
    "model",
    promql="sum by (model) (rate(prism_prompt_tokens_total[5m]))",
)
CACHED_TOKENS: Final = counter(
    "prism_cached_tokens_total",
    "Prompt tokens found in a prefix cache.",
    "model",
    promql="sum by (model) (rate(prism_cached_tokens_total[5m])) "
    "/ sum by (model) (rate(prism_prompt_tokens_total[5m]))",
)
GENERATED_TOKENS: Final = counter(
    "prism_generated_tokens_total",
    "Tokens sent to clients.",
    "model",
    promql="sum by (model) (rate(prism_generated_tokens_total[5m]))",
)
RESUMED: Final = counter(
    "prism_requests_resumed_total",
    "Requests run again with the tokens they already had, because an engine, agent or placement changed under them.",
    "model",
    promql="sum by (model) (increase(prism_requests_resumed_total[1h]))",
)
REFUSED: Final = counter(
    "prism_refused_total",
    "Requests refused at the door. `reason`: queue_full, rate_limit, draining, too_large, unauthorized, forbidden.",
    "reason",
    promql="sum by (reason) (rate(prism_refused_total[5m]))",
)
KEY_REQUESTS: Final = counter(
    "prism_key_requests_total",
    "Requests by API key.",
    "key",
    promql="topk(10, sum by (key) (rate(prism_key_requests_total[5m])))",
)
KEY_TOKENS: Final = counter(
    "prism_key_tokens_total",
    "Prompt and generated tokens by API key.",
    "key",
    promql="topk(10, sum by (key) (rate(prism_key_tokens_total[5m])))",
)
HTTP: Final = counter(
    "prism_http_requests_total",
    "HTTP requests by route template and status.",
    "method",
    "route",
    "status",
    promql='sum by (route) (rate(prism_http_requests_total{status=~"5.."}[5m]))',
)

# --- queues and devices, seen by the node agent ---

QUEUE_LENGTH: Final = gauge(
    "prism_queue_length",
    "Unfinished requests in a Redis queue. `queue`: a device id, or inactive.",
    "queue",
    promql="max by (queue) (prism_queue_length)",
)
DEVICE_WAITING: Final = gauge(
    "prism_device_waiting",
    "Requests the device's scheduler holds back, by model.",
    "model",
    "device",
    promql="sum by (device) (prism_device_waiting)",
)
DEVICE_RUNNING: Final = gauge(
    "prism_device_running",
    "Requests running in engines, by model.",
    "model",
    "device",
    promql="sum by (device) (prism_device_running)",
)
CAPACITY_BYTES: Final = gauge(
    "prism_device_capacity_bytes",
    "Cap of a device's memory account.",
    "device",
    promql="prism_device_capacity_bytes",
)
DEVICE_FAULT: Final = gauge(
    "prism_device_fault",
    "1 while no engine starts on the device, else 0; `prism ps` says why.",
    "device",
    promql="max by (device) (prism_device_fault) > 0",
)
MAPPED_BYTES: Final = gauge(
    "prism_device_mapped_bytes",
    "Memory in use on a device. `use`: weights, kv, outside (engines' own), foreign (other programs').",
    "device",
    "use",
    promql="sum by (device) (prism_device_mapped_bytes) / sum by (device) (prism_device_capacity_bytes)",
)
MODEL_BYTES: Final = gauge(
    "prism_model_mapped_bytes",
    "Physical memory of one model on one device. `use`: weights, kv.",
    "model",
    "device",
    "use",
    promql="sum by (device, model) (prism_model_mapped_bytes)",
)
LENT_BYTES: Final = gauge(
    "prism_lent_bytes",
    "Memory that a device (`lender`) lends for the KV of a model on another device (`borrower`).",
    "lender",
    "borrower",
    promql="sum by (lender, borrower) (prism_lent_bytes)",
)
MODEL_ACTIVE: Final = gauge(
    "prism_model_active",
    "1 while the model is ready on the device, else 0.",
    "model",
    "device",
    promql="sum by (device) (prism_model_active)",
)
ENGINES: Final = gauge(
    "prism_engines",
    "Engine workers. `state`: starting, parked, active.",
    "device",
    "state",
    promql="sum by (device, state) (prism_engines)",
)
ENGINE_DEATHS: Final = counter(
    "prism_engine_deaths_total",
    "Engine workers that ended without being asked to.",
    "device",
    promql="sum by (device) (increase(prism_engine_deaths_total[1h]))",
)
HELD_SECONDS: Final = counter(
    "prism_held_seconds_total",
    "Time for which engines made no decode step so that their neighbours kept their time per token.",
    "model",
    "device",
    promql="sum by (device) (rate(prism_held_seconds_total[5m]))",
)
RETRACTIONS: Final = counter(
    "prism_retractions_total",
    "Running requests that gave their KV memory up for others and went on later from where they were.",
    "model",
    "device",
    promql="sum by (model) (increase(prism_retractions_total[5m]))",
)
KV_BROUGHT: Final = counter(
    "prism_kv_brought_tokens_total",
    "Tokens whose KV an engine brought back from outside instead of computing it again.",
    "model",
    "device",
    promql="sum by (model) (rate(prism_kv_brought_tokens_total[5m]))",
)
COMPUTED_TOKENS: Final = counter(
    "prism_computed_tokens_total",
    "Tokens that engines prefilled: prompts that no cache had, and what was computed again.",
    "model",
    "device",
    promql="sum by (model) (rate(prism_computed_tokens_total[5m]))",
)
LONG_PROMPTS: Final = counter(
    "prism_long_prompts_total",
    "Prompts whose KV is larger than their device that an engine began; again, if their KV was lost.",
    "model",
    "device",
    promql="sum by (model) (increase(prism_long_prompts_total[1h]))",
)
LONG_BYTES: Final = gauge(
    "prism_long_prompt_bytes",
    "KV of prompts larger than their device, outside of it. `tier`: host (memory), lent (by other devices).",
    "model",
    "device",
    "tier",
    promql="sum by (model, tier) (prism_long_prompt_bytes)",
)
LONG_BROUGHT_BYTES: Final = counter(
    "prism_long_brought_bytes_total",
    "KV of prompts larger than their device that was brought in, layer by layer, for a step.",
    "model",
    "device",
    promql="sum by (model, device) (rate(prism_long_brought_bytes_total[5m]))",
)
LIVE_STARTS: Final = counter(
    "prism_live_starts_total",
    "Instances that served before all their weights were there (`live_scaling`).",
    "model",
    "device",
    promql="sum by (model) (increase(prism_live_starts_total[1h]))",
)
LIVE_SECONDS: Final = histogram(
    "prism_live_seconds",
    "How long an instance served with layers running in others, until it had all its weights.",
    "model",
    promql="histogram_quantile(0.5, sum by (le, model) (rate(prism_live_seconds_bucket[1h])))",
)
ACTIVATIONS: Final = counter(
    "prism_activations_total",
    "Activations. `source`: where the weights came from (host, disk, remote, device); `outcome`: ok, failed.",
    "model",
    "device",
    "source",
    "outcome",
    promql="sum by (source) (increase(prism_activations_total[1h]))",
)
ACTIVATION_SECONDS: Final = histogram(
    "prism_activation_seconds",
    "Time from the command to a ready engine.",
    "model",
    "source",
    promql="histogram_quantile(0.5, sum by (le, source) (rate(prism_activation_seconds_bucket[1h])))",
)
ACTIVATION_PHASE_SECONDS: Final = histogram(
    "prism_activation_phase_seconds",
    "Time of one phase of an activation.",
    "phase",
    promql="sum by (phase) (rate(prism_activation_phase_seconds_sum[1h])) "
    "/ sum by (phase) (rate(prism_activation_phase_seconds_count[1h]))",
)
HELPED_BYTES: Final = counter(
    "prism_load_helped_bytes_total",
    "Bytes of weights that were loaded over another device's link to host memory. `helper`: that device.",
    "model",
    "helper",
    promql="sum by (helper) (rate(prism_load_helped_bytes_total[5m]))",
)

# --- weights between machines, seen by the controller ---

WEIGHT_BLOCKS: Final = counter(
    "prism_weight_blocks_total",
    "Blocks of weights that came to a machine from another one.",
    "source",
    "node",
    promql="sum by (source, node) (rate(prism_weight_blocks_total[5m]))",
)
WEIGHT_BYTES: Final = counter(
    "prism_weight_received_bytes_total",
    "Bytes of weights that came to a machine from another one.",
    "source",
    "node",
    promql="sum by (source, node) (rate(prism_weight_received_bytes_total[5m]))",
)
LINK_RATE: Final = gauge(
    "prism_link_bytes_per_second",
    "Rate of the latest transfers of weights from one machine to another, while they ran.",
    "source",
    "node",
    promql="min by (node) (prism_link_bytes_per_second)",
)
WEIGHT_ARRIVALS: Final = counter(
    "prism_weight_arrivals_total",
    "Packs of weights that were fetched from other machines. `outcome`: ok, failed.",
    "node",
    "outcome",
    promql='sum by (node) (increase(prism_weight_arrivals_total{outcome="failed"}[1h]))',
)
POOL_PACKS: Final = gauge(
    "prism_pool_packs",
    "Packs of weights that must have a copy in the fleet's host memory. `state`: home (it is where it belongs), "
    "coming, no_room.",
    "state",
    promql='prism_pool_packs{state!="home"}',
)
POOL_BYTES: Final = gauge(
    "prism_pool_bytes",
    "Host memory that a machine keeps for weights on behalf of the fleet.",
    "node",
    promql="sum by (node) (prism_pool_bytes)",
)
HOST_WEIGHT_BYTES: Final = gauge(
    "prism_host_weight_bytes",
    "Weights in a machine's host memory, further copies included.",
    "node",
    promql="sum(prism_host_weight_bytes) / sum(prism_pool_bytes)",
)

# --- decisions ---

DECISIONS: Final = counter(
    "prism_decisions_total",
    "Decisions carried out. `scheduler`: cluster, device; `action`: its effect (Dispatch, Activate, ...); "
    "`reason`: its reason code.",
    "scheduler",
    "action",
    "reason",
    promql="sum by (action, reason) (rate(prism_decisions_total[5m]))",
)
EVICTIONS: Final = counter(
    "prism_evictions_total",
    "Models that left a device. `reason`: make_room, starvation, keep_alive, migrated, operator, ...",
    "model",
    "device",
    "reason",
    promql="sum by (reason) (increase(prism_evictions_total[1h]))",
)
MIGRATIONS: Final = counter(
    "prism_migrations_total",
    "Models that moved to another device.",
    "model",
    promql="sum by (model) (increase(prism_migrations_total[1h]))",
)
PREWARMED: Final = counter(
    "prism_prewarmed_total",
    "Instances loaded before anybody asked. `outcome`: used (a request came), wasted (left without one).",
    "outcome",
    promql="sum by (outcome) (increase(prism_prewarmed_total[1h]))",
)
PREWARM_SAVED: Final = counter(
    "prism_prewarm_saved_seconds_total",
    "Activations that requests did not wait for because their model was loaded before, as long as they usually take.",
    promql="increase(prism_prewarm_saved_seconds_total[1h])",
)
DECISION_SECONDS: Final = histogram(
    "prism_decision_seconds",
    "Time a scheduler took for one event. `scheduler`: cluster, device.",
    "scheduler",
    buckets=FAST_BUCKETS,
    promql="histogram_quantile(0.99, sum by (le, scheduler) (rate(prism_decision_seconds_bucket[5m])))",
)
KVPR: Final = gauge(
    "prism_device_kvpr",
    "KV pressure ratio of a device: sum of r/s over its models, per byte left for KV.",
    "device",
    promql="max(prism_device_kvpr) / avg(prism_device_kvpr)",
)
DEVICE_TIME_ERROR: Final = gauge(
    "prism_device_time_error",
    "By what share the time per token that the cluster scheduler expects on a device was off lately, on average.",
    "device",
    promql="max(prism_device_time_error)",
)
DEVICE_WORK: Final = gauge(
    "prism_device_work",
    "Bandwidth that a device's models are expected to take over time (`placement: goodput`); above 1 they are slow.",
    "device",
    promql="max(prism_device_work) / avg(prism_device_work)",
)
MODEL_RATE: Final = gauge(
    "prism_model_rate",
    "Requests per second of a model, as the cluster scheduler counts them.",
    "model",
    promql="topk(10, prism_model_rate)",
)

# --- the server itself ---

RESTARTS: Final = counter(
    "prism_process_restarts_total",
    "Processes the supervisor started again. `process`: valkey, front, controller, agent, zygote.",
    "process",
    promql="sum by (process) (increase(prism_process_restarts_total[1h]))",
)
STORE_ERRORS: Final = counter(
    "prism_store_errors_total",
    "Redis commands that had to be repeated.",
    "process",
    promql="sum by (process) (rate(prism_store_errors_total[5m]))",
)
RELOADS: Final = counter(
    "prism_reloads_total",
    "Catalog reloads. `outcome`: applied, unchanged, invalid.",
    "outcome",
    promql='increase(prism_reloads_total{outcome="invalid"}[1h])',
)
INFO: Final = gauge(
    "prism_info",
    "Always 1; the version is a label.",
    "version",
    merge="mostrecent",
    promql="prism_info",
)

METRICS: Final[tuple[MetricDef, ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, MetricDef)
)
"""All of them, in the order of this file."""

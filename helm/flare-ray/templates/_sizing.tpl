{{/*
What fits where. `flare.sizing` returns a YAML mapping:
  enginesPerNode  engines that fit one worker (STRICT_PACK: all ranks of one on one node)
  nodes           workers that `replicas` need
  rankBytes       bytes of one rank, usableBytes what its GPU or its share of the pod's memory offers
  tableBytes      bytes of one rank's tables, wherever they lie
  hostBytes       host memory that all ranks of a worker lock: tables and the prefix cache's host tier
  rankSum         the same as a sum in words
*/}}

{{- define "flare.preset" -}}
{{- $models := .Files.Get "files/models.yaml" | fromYaml -}}
{{- $preset := get $models.presets .Values.model.preset -}}
{{- if not $preset -}}
{{- fail (printf "model.preset %q is unknown; this chart has %s" .Values.model.preset (keys $models.presets | sortAlpha | join ", ")) -}}
{{- end -}}
{{- toYaml $preset -}}
{{- end -}}

{{/* Bytes of a quantity in Mi, Gi or Ti. */}}
{{- define "flare.bytes" -}}
{{- $units := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Z]i$" . -}}
{{- mul (trimSuffix $unit . | int64) (get $units $unit | int64) -}}
{{- end -}}

{{/* Half of /dev/shm; the rest is NCCL's and torch's. Ray would take 30 % of the pod's memory, which may be more. */}}
{{- define "flare.objectStore" -}}
{{ div (include "flare.bytes" . | int64) 2 | quote }}
{{- end -}}

{{- define "flare.gib" -}}
{{- printf "%.1f" (divf . 1073741824.0) -}}
{{- end -}}

{{/* CPUs of one engine: its ranks, and 0.5 for its controller (flare_ray.actors.preflight). */}}
{{- define "flare.engineCpus" -}}
{{- addf (mulf .Values.tensorParallelSize (.Values.engineDeployment.cpus_per_rank | default 1.0)) 0.5 -}}
{{- end -}}

{{- define "flare.engineGpus" -}}
{{- $each := ternary 1.0 0.0 (eq .Values.device "cuda") -}}
{{- if not (kindIs "invalid" .Values.engineDeployment.gpus_per_rank) -}}
{{- $each = .Values.engineDeployment.gpus_per_rank -}}
{{- end -}}
{{- mulf .Values.tensorParallelSize $each -}}
{{- end -}}

{{- define "flare.sizing" -}}
{{- $values := .Values -}}
{{- $preset := include "flare.preset" . | fromYaml -}}
{{- $ranks := int64 $values.tensorParallelSize -}}
{{- $plan := get $preset.ranks (toString $ranks) -}}
{{- if not $plan -}}
{{- fail (printf "tensorParallelSize is %d, %s splits over %s ranks" $ranks $values.model.preset (keys $preset.ranks | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if ne $preset.device $values.device -}}
{{- fail (printf "device is %s, preset %s is sized for %s; choose another model.preset" $values.device $values.model.preset $preset.device) -}}
{{- end -}}
{{- $dtype := $values.engine.dtype | default "bfloat16" -}}
{{- if ne $dtype $preset.dtype -}}
{{- fail (printf "engine.dtype is %s, preset %s is sized for %s: change engine.dtype" $dtype $values.model.preset $preset.dtype) -}}
{{- end -}}
{{- $weights := get $plan.weights $values.model.weightFormat -}}
{{- if not $weights -}}
{{- fail (printf "model.weightFormat %q: preset %s has %s" $values.model.weightFormat $values.model.preset (keys $plan.weights | sortAlpha | join ", ")) -}}
{{- end -}}

{{- $slots := $values.engine.concurrency | default 4 | int64 -}}
{{- $context := $values.engine.context_tokens | default 4096 | int64 -}}
{{- if gt $context (int64 $preset.maxContextTokens) -}}
{{- fail (printf "engine.context_tokens is %d, %s holds %d" $context $values.model.preset (int64 $preset.maxContextTokens)) -}}
{{- end -}}
{{- $pool := $values.engine.page_pool_tokens | default (mul $slots $context) | int64 -}}
{{- if lt $pool $context -}}
{{- fail (printf "engine.page_pool_tokens is %d, below context_tokens %d: one request could never finish" $pool $context) -}}
{{- end -}}
{{- if gt $pool 1000000000000 -}}
{{- fail (printf "engine.page_pool_tokens is %d; no GPU holds more than 1000000000000" $pool) -}}
{{- end -}}
{{- $capacity := ($values.engine.speculation | default dict).token_capacity | default 128 | int64 -}}
{{- $pageBytes := mul (add (div (add $pool 63) 64) 1) (int64 $plan.page) -}}
{{- $cache := $values.engine.prefix_cache | default dict -}}
{{- $cached := dig "enabled" true $cache -}}
{{- $snapshots := mul $slots (int64 (.Files.Get "files/models.yaml" | fromYaml).snapshotsPerSlot) -}}
{{- if not (kindIs "invalid" $cache.device_bytes) -}}
{{- $snapshots = div (int64 $cache.device_bytes) (int64 $plan.snapshot) -}}
{{- if and $cached (eq (int64 $snapshots) 0) -}}
{{- fail (printf "engine.prefix_cache.device_bytes is %d, one snapshot takes %d: raise it or set engine.prefix_cache.enabled: false" (int64 $cache.device_bytes) (int64 $plan.snapshot)) -}}
{{- end -}}
{{- end -}}
{{- /* Slots count a publication row each, of a snapshot's size; without a cache there are none. */ -}}
{{- $kept := mul (ternary $snapshots (sub -1 $slots) $cached) (int64 $plan.snapshot) -}}
{{- $stateBytes := add (int64 $plan.fixed) (mul $slots (int64 $plan.slot)) $kept -}}
{{- $scratch := div (mul (int64 $plan.scratch) (max $capacity 128)) 128 -}}
{{- $graphs := 0 -}}
{{- if and $preset.pool (not $values.engine.eager) -}}
{{- $p := $preset.pool -}}
{{- $scores := add (int64 $p.row) (mul (mul (div (add $context 63) 64) 64) (int64 $p.contextToken)) -}}
{{- $prompts := add (mul ($values.engine.prefill_tokens | default 512 | int64) $scores) (mul (int64 $p.scoredRows) (int64 $p.logitRow)) -}}
{{- $rounds := mul (max $capacity $slots) (add $scores (int64 $p.logitRow)) -}}
{{- $graphs = add (int64 $p.fixed) (max $prompts $rounds) -}}
{{- end -}}
{{- $tables := get $plan.tables $values.model.weightFormat | int64 -}}
{{- $place := $values.engine.tables | default "device" -}}
{{- $here := ternary $tables 0 (eq $place "device") -}}
{{- $rank := add (int64 $weights) $here $pageBytes $stateBytes $graphs $scratch -}}

{{- $perNode := floor (divf (floor $values.worker.cpus) (include "flare.engineCpus" .)) | int64 -}}
{{- $gpus := include "flare.engineGpus" . | float64 -}}
{{- if gt $gpus 0.0 -}}
{{- $perNode = min $perNode (floor (divf $values.worker.gpus $gpus)) | int64 -}}
{{- end -}}

{{- $offered := 0 -}}
{{- if eq $values.device "cuda" -}}
{{- $offered = mulf $values.worker.gpuMemoryGiB 1073741824.0 | int64 -}}
{{- else -}}
{{- $offered = div (sub (include "flare.bytes" $values.worker.memory | int64) (include "flare.bytes" $values.worker.shm | int64)) (mul (max $perNode 1) $ranks) -}}
{{- end -}}
{{- $headroom := (.Files.Get "files/models.yaml" | fromYaml).headroomPercent | int64 -}}
{{- $usable := div (mul $offered (sub 100 $headroom)) 100 -}}

enginesPerNode: {{ $perNode }}
nodes: {{ ceil (divf (include "flare.engines" . | int64) (max $perNode 1)) | int64 }}
fewestNodes: {{ ceil (divf $values.replicas (max $perNode 1)) | int64 }}
rankBytes: {{ $rank }}
usableBytes: {{ $usable }}
tableBytes: {{ $tables }}
hostBytes: {{ mul (max $perNode 1) $ranks (add (sub $tables $here) (ternary ($cache.host_bytes | default 0 | int64) 0 $cached)) }}
rankSum: {{ printf "weights %s + tables %s + pages %s + state %s + graphs %s + scratch %s = %s GiB a rank" (include "flare.gib" $weights) (include "flare.gib" $here) (include "flare.gib" $pageBytes) (include "flare.gib" $stateBytes) (include "flare.gib" $graphs) (include "flare.gib" $scratch) (include "flare.gib" $rank) | quote }}
offered: {{ printf "%s GiB usable (%s less %d %% headroom)" (include "flare.gib" $usable) (include "flare.gib" $offered) $headroom | quote }}
{{- end -}}

{{/* Engines that there may be at once. */}}
{{- define "flare.engines" -}}
{{- $scaling := .Values.engineDeployment.autoscaling | default dict -}}
{{ $scaling.max_replicas | default .Values.replicas | int64 }}
{{- end -}}

{{/* Fewest and most worker nodes; without the autoscaler of nodes both follow from the most engines. */}}
{{- define "flare.leastNodes" -}}
{{- $sizing := include "flare.sizing" . | fromYaml -}}
{{- $least := ternary $sizing.fewestNodes $sizing.nodes .Values.autoscaler.enabled -}}
{{- if and .Values.autoscaler.enabled (not (kindIs "invalid" .Values.autoscaler.minNodes)) -}}
{{- $least = .Values.autoscaler.minNodes -}}
{{- end -}}
{{ int64 $least }}
{{- end -}}

{{- define "flare.mostNodes" -}}
{{- $most := (include "flare.sizing" . | fromYaml).nodes -}}
{{- if and .Values.autoscaler.enabled (not (kindIs "invalid" .Values.autoscaler.maxNodes)) -}}
{{- $most = .Values.autoscaler.maxNodes -}}
{{- end -}}
{{ int64 $most }}
{{- end -}}

{{/* HTTP replicas for which the worker nodes' CPUs suffice. */}}
{{- define "flare.httpCapacity" -}}
{{- $sizing := include "flare.sizing" . | fromYaml -}}
{{- $each := .Values.httpReplicas.cpus | default 0.5 -}}
{{- if eq (float64 $each) 0.0 -}}
1000000
{{- else -}}
{{- $engine := include "flare.engineCpus" . | float64 -}}
{{- $total := mul (floor (divf (floor .Values.httpWorkers.cpus) $each) | int64) (int64 .Values.httpWorkers.replicas) -}}
{{- $left := include "flare.engines" . | int64 -}}
{{- range until (int $sizing.nodes) -}}
{{- $here := min $left (int64 $sizing.enginesPerNode) -}}
{{- $left = sub $left $here -}}
{{- $spare := subf (floor $.Values.worker.cpus) (mulf $here $engine) -}}
{{- $total = add $total (floor (divf $spare $each) | int64) -}}
{{- end -}}
{{ $total }}
{{- end -}}
{{- end -}}

{{/* Everything that values can get wrong together; each message says what to change. */}}

{{- define "flare.checks" -}}
{{- $v := .Values -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %q has %d characters; KubeRay takes 47: set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q must begin with a letter and hold a-z, 0-9 and - only: set fullnameOverride" $name) -}}
{{- end -}}
{{- include "flare.checkFit" . -}}
{{- include "flare.checkWeights" . -}}
{{- include "flare.checkUpgrade" . -}}
{{- include "flare.checkAccess" . -}}
{{- include "flare.checkPods" . -}}
{{- end -}}

{{/*
What a pod's values may not repeat. Kubernetes takes the last of two variables and says nothing; of two volumes or
mounts it takes neither, but only once KubeRay makes the pod.
*/}}
{{- define "flare.checkPods" -}}
{{- $v := .Values -}}
{{- $env := include "flare.env" . | fromYamlArray -}}
{{- range $section, $kind := dict "head" "head" "worker" "engine" "httpWorkers" "http" -}}
{{- $pod := get $v $section -}}
{{- $context := dict "root" $ "kind" $kind "pod" $pod -}}
{{- include "flare.checkOnce" (dict "where" (printf "%s.extraEnv" $section) "field" "name" "given" $pod.extraEnv "own" $env) -}}
{{- include "flare.checkOnce" (dict "where" (printf "%s.extraVolumes" $section) "field" "name" "given" $pod.extraVolumes "own" (include "flare.volumes" $context | fromYamlArray)) -}}
{{- include "flare.checkOnce" (dict "where" (printf "%s.extraVolumeMounts" $section) "field" "mountPath" "given" $pod.extraVolumeMounts "own" (include "flare.mounts" $context | fromYamlArray)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z0-9][-.a-z0-9]*/[-._a-zA-Z0-9]+$" $v.worker.gpuResource) -}}
{{- fail (printf "worker.gpuResource %q is not a device plugin's resource: name it as VENDOR/NAME, such as nvidia.com/gpu" $v.worker.gpuResource) -}}
{{- end -}}
{{- end -}}

{{/* Refuse an entry without its `field`, or one that repeats another's or the chart's. Arguments: where, field, given, own. */}}
{{- define "flare.checkOnce" -}}
{{- $seen := dict -}}
{{- range .own -}}{{- $_ := set $seen (get . $.field) "the chart sets it itself" -}}{{- end -}}
{{- range .given -}}
{{- $name := get . $.field | toString -}}
{{- if not $name -}}
{{- fail (printf "%s: an entry has no %s: %s" $.where $.field (toJson .)) -}}
{{- end -}}
{{- with get $seen $name -}}
{{- fail (printf "%s: %s %q stands twice (%s): remove it" $.where $.field $name .) -}}
{{- end -}}
{{- $_ := set $seen $name "both in this list" -}}
{{- end -}}
{{- end -}}

{{/* Refuse what no DNS name can be. Arguments: where, host. */}}
{{- define "flare.checkHost" -}}
{{- if not (regexMatch "^([*][.])?([a-z0-9]([-a-z0-9]*[a-z0-9])?[.])*[a-z0-9]([-a-z0-9]*[a-z0-9])?$" .host) -}}
{{- fail (printf "%s %q is not a DNS name: write it in lower case, without scheme, port or path" .where .host) -}}
{{- end -}}
{{- end -}}

{{- define "flare.checkFit" -}}
{{- $v := .Values -}}
{{- $sizing := include "flare.sizing" . | fromYaml -}}
{{- $gpus := include "flare.engineGpus" . | float64 -}}
{{- $cpus := include "flare.engineCpus" . | float64 -}}
{{- if and (eq $v.device "cpu") (gt (int64 $v.worker.gpus) 0) -}}
{{- fail "device is cpu: set worker.gpus to 0, or GPUs stay reserved and idle" -}}
{{- end -}}
{{- if and (eq $v.device "cpu") (gt $gpus 0.0) -}}
{{- fail "device is cpu: leave out engineDeployment.gpus_per_rank or set it to 0" -}}
{{- end -}}
{{- if gt $gpus (float64 $v.worker.gpus) -}}
{{- fail (printf "one engine needs %g GPUs on one node (STRICT_PACK), worker.gpus is %d: raise worker.gpus or lower tensorParallelSize" $gpus (int64 $v.worker.gpus)) -}}
{{- end -}}
{{- if and (eq $v.device "cuda") (ne $gpus (float64 $v.tensorParallelSize)) -}}
{{- fail (printf "engineDeployment.gpus_per_rank is %g: a rank on cuda takes one GPU, by which its bytes are counted; set it to 1" (float64 $v.engineDeployment.gpus_per_rank)) -}}
{{- end -}}
{{- if lt (int64 $sizing.enginesPerNode) 1 -}}
{{- fail (printf "one engine needs %g CPUs on one node, worker.cpus is %g: raise worker.cpus or lower engineDeployment.cpus_per_rank" $cpus (float64 $v.worker.cpus)) -}}
{{- end -}}
{{- if gt (int64 $sizing.rankBytes) (int64 $sizing.usableBytes) -}}
{{- fail (printf "%s as %s on %d rank(s) does not fit: %s, %s; raise tensorParallelSize or memory, or lower engine.page_pool_tokens, context_tokens or concurrency" $v.model.preset $v.model.weightFormat (int64 $v.tensorParallelSize) $sizing.rankSum $sizing.offered) -}}
{{- end -}}
{{- include "flare.checkTables" . -}}
{{- $wanted := $v.httpReplicas.max_replicas | default 4 | int64 -}}
{{- if gt (int64 ($v.httpReplicas.min_replicas | default 1)) $wanted -}}
{{- fail (printf "httpReplicas.min_replicas is %d, max_replicas %d: change either" (int64 $v.httpReplicas.min_replicas) $wanted) -}}
{{- end -}}
{{- if and (gt (int64 $v.httpWorkers.replicas) 0) (lt (float64 $v.httpWorkers.cpus) 1.0) -}}
{{- fail (printf "httpWorkers.cpus is %g: Ray counts whole CPUs, so nothing would run there; raise it" (float64 $v.httpWorkers.cpus)) -}}
{{- end -}}
{{- $capacity := include "flare.httpCapacity" . | int64 -}}
{{- if gt $wanted $capacity -}}
{{- fail (printf "httpReplicas.max_replicas is %d, beside the engines there are CPUs for %d: raise worker.cpus or httpWorkers.replicas, or lower max_replicas" $wanted $capacity) -}}
{{- end -}}
{{- range $name, $pod := dict "head" $v.head "worker" $v.worker "httpWorkers" $v.httpWorkers -}}
{{- if gt (include "flare.bytes" $pod.shm | int64) (div (include "flare.bytes" $pod.memory | int64) 2) -}}
{{- fail (printf "%s.shm %s is more than half of %s.memory %s, and counts towards it" $name $pod.shm $name $pod.memory) -}}
{{- end -}}
{{- end -}}
{{- with $v.engineDeployment.autoscaling -}}
{{- if le (int64 (.max_replicas | default 0)) (int64 $v.replicas) -}}
{{- fail (printf "engineDeployment.autoscaling.max_replicas is %d, replicas %d: raise max_replicas, or leave autoscaling out" (int64 (.max_replicas | default 0)) (int64 $v.replicas)) -}}
{{- end -}}
{{- end -}}
{{- $away := int64 $v.podDisruptionBudget.maxUnavailable -}}
{{- $always := include "flare.leastNodes" . | int64 -}}
{{- if and $v.podDisruptionBudget.enabled (gt $away 0) (ge $away $always) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable is %d of %d node(s): lower it, or set podDisruptionBudget.enabled: false" $away $always) -}}
{{- end -}}
{{- $a := $v.autoscaler -}}
{{- if $a.enabled -}}
{{- $least := include "flare.leastNodes" . | int64 -}}
{{- $most := kindIs "invalid" $a.maxNodes | ternary (int64 $sizing.nodes) (int64 $a.maxNodes) -}}
{{- if gt $least $most -}}
{{- fail (printf "autoscaler.minNodes %d exceeds maxNodes %d" $least $most) -}}
{{- end -}}
{{- if gt (int64 $sizing.nodes) $most -}}
{{- fail (printf "%d engine(s) need %d nodes, autoscaler.maxNodes is %d: raise it" (include "flare.engines" . | int64) (int64 $sizing.nodes) $most) -}}
{{- end -}}
{{- else if not (and (kindIs "invalid" $a.minNodes) (kindIs "invalid" $a.maxNodes)) -}}
{{- fail "autoscaler.minNodes and maxNodes need autoscaler.enabled; without it nodes follow from replicas" -}}
{{- end -}}
{{- end -}}

{{/* Where tables and experts lie, and whether the worker's memory holds what is off the GPUs. */}}
{{- define "flare.checkTables" -}}
{{- $v := .Values -}}
{{- $sizing := include "flare.sizing" . | fromYaml -}}
{{- $place := $v.engine.tables | default "device" -}}
{{- if and (ne $place "device") (eq (int64 $sizing.tableBytes) 0) -}}
{{- fail (printf "engine.tables is %s, %s has no tables: leave it out" $place $v.model.preset) -}}
{{- end -}}
{{- if and (eq $place "disk") (eq $v.device "cuda") -}}
{{- fail "engine.tables: disk needs device: cpu; set host or device" -}}
{{- end -}}
{{- $experts := $v.engine.expert_weights | default "auto" -}}
{{- $plain := or (eq $v.model.weightFormat "bfloat16") (eq $v.model.weightFormat "float32") -}}
{{- if and $plain (eq $experts "packed") -}}
{{- fail (printf "engine.expert_weights is packed, model.weightFormat %s is not: change one" $v.model.weightFormat) -}}
{{- end -}}
{{- if and (not $plain) (eq $experts "dequantised") -}}
{{- fail (printf "engine.expert_weights is dequantised, the sum counts model.weightFormat %s: set weightFormat bfloat16 or leave expert_weights out" $v.model.weightFormat) -}}
{{- end -}}
{{- if eq $v.device "cuda" -}}
{{- $room := sub (include "flare.bytes" $v.worker.memory | int64) (include "flare.bytes" $v.worker.shm | int64) -}}
{{- $usable := div (mul $room 95) 100 -}}
{{- if gt (int64 $sizing.hostBytes) $usable -}}
{{- fail (printf "%d engine(s) on a worker lock %s GiB of host memory (tables and prefix_cache.host_bytes), worker.memory less shm leaves %s GiB: raise worker.memory, lower prefix_cache.host_bytes or set engine.tables: device" (int64 $sizing.enginesPerNode) (include "flare.gib" $sizing.hostBytes) (include "flare.gib" $usable)) -}}
{{- end -}}
{{- else -}}
{{- $each := add (int64 $sizing.rankBytes) (div (int64 $sizing.hostBytes) (mul (max (int64 $sizing.enginesPerNode) 1) (int64 $v.tensorParallelSize))) -}}
{{- if gt $each (int64 $sizing.usableBytes) -}}
{{- fail (printf "a rank and its engine.prefix_cache.host_bytes take %s GiB of %s: raise worker.memory or lower host_bytes" (include "flare.gib" $each) $sizing.offered) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "flare.checkWeights" -}}
{{- $w := .Values.weights -}}
{{- if and (eq $w.source "existingClaim") (not $w.existingClaim) -}}
{{- fail "weights.source is existingClaim: set weights.existingClaim" -}}
{{- end -}}
{{- if and (ne $w.source "existingClaim") $w.existingClaim -}}
{{- fail (printf "weights.existingClaim is set, weights.source is %s: change one" $w.source) -}}
{{- end -}}
{{- if and (eq $w.source "hostPath") (not $w.hostPath) -}}
{{- fail "weights.source is hostPath: set weights.hostPath" -}}
{{- end -}}
{{- if and (ne $w.source "hostPath") $w.hostPath -}}
{{- fail (printf "weights.hostPath is set, weights.source is %s: change one" $w.source) -}}
{{- end -}}
{{- if has ".." (splitList "/" .Values.model.checkpoint) -}}
{{- fail (printf "model.checkpoint %s leads out of its folder: give the path without .." .Values.model.checkpoint) -}}
{{- end -}}
{{- if and (ne $w.source "image") (hasPrefix "/" .Values.model.checkpoint) (not (hasPrefix (printf "%s/" $w.mountPath) .Values.model.checkpoint)) -}}
{{- fail (printf "model.checkpoint %s lies outside weights.mountPath %s" .Values.model.checkpoint $w.mountPath) -}}
{{- end -}}
{{- if and (eq $w.source "image") (not (hasPrefix "/" .Values.model.checkpoint)) -}}
{{- fail "weights.source is image: give model.checkpoint as an absolute path in the image" -}}
{{- end -}}
{{- $nodes := (include "flare.sizing" . | fromYaml).nodes | int64 -}}
{{- $pods := add $nodes (int64 .Values.httpWorkers.replicas) -}}
{{- if and (eq $w.source "claim") (gt $pods 1) (not (has "ReadWriteMany" $w.claim.accessModes)) -}}
{{- fail (printf "%d pods mount the weights: weights.claim.accessModes needs ReadWriteMany" $pods) -}}
{{- end -}}
{{- $f := $w.fetch -}}
{{- if $f.enabled -}}
{{- if not $f.repository -}}
{{- fail "weights.fetch.enabled: set weights.fetch.repository (ORG/NAME)" -}}
{{- end -}}
{{- if or (eq $w.source "image") (eq $w.source "hostPath") -}}
{{- fail (printf "weights.fetch writes to a claim, weights.source is %s" $w.source) -}}
{{- end -}}
{{- if and $f.token.existingSecret $f.token.value -}}
{{- fail "weights.fetch.token: give existingSecret or value, not both" -}}
{{- end -}}
{{- if and $f.private (not (or $f.token.existingSecret $f.token.value)) -}}
{{- fail "weights.fetch.private needs a token: set weights.fetch.token.existingSecret (or value)" -}}
{{- end -}}
{{- else if or $f.repository $f.private $f.token.existingSecret $f.token.value -}}
{{- fail "weights.fetch.repository, private and token do nothing unless weights.fetch.enabled" -}}
{{- end -}}
{{- end -}}

{{- define "flare.checkUpgrade" -}}
{{- $u := .Values.upgrade -}}
{{- $delay := include "flare.deletionDelay" . | int64 -}}
{{- if lt $delay (int64 .Values.longestGenerationSeconds) -}}
{{- fail (printf "upgrade.deletionDelaySeconds is %d: the old cluster would be deleted under answers that may take longestGenerationSeconds %d" $delay (int64 .Values.longestGenerationSeconds)) -}}
{{- end -}}
{{- if eq $u.type "NewClusterWithIncrementalUpgrade" -}}
{{- if not .Values.autoscaler.enabled -}}
{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs autoscaler.enabled: the new cluster grows as traffic moves" -}}
{{- end -}}
{{- if not $u.incremental.gatewayClassName -}}
{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs upgrade.incremental.gatewayClassName" -}}
{{- end -}}
{{- if gt (int64 $u.incremental.stepSizePercent) (int64 $u.incremental.maxSurgePercent) -}}
{{- fail "upgrade.incremental.stepSizePercent exceeds maxSurgePercent" -}}
{{- end -}}
{{- else if $u.incremental.gatewayClassName -}}
{{- fail (printf "upgrade.incremental.gatewayClassName is set, upgrade.type is %s: change one" $u.type) -}}
{{- end -}}
{{- end -}}

{{- define "flare.checkAccess" -}}
{{- $i := .Values.ingress -}}
{{- $g := .Values.gateway -}}
{{- if and $i.enabled $g.enabled -}}
{{- fail "ingress and gateway are both enabled: choose one" -}}
{{- end -}}
{{- if $i.enabled -}}
{{- if not $i.host -}}
{{- fail "ingress.enabled: set ingress.host" -}}
{{- end -}}
{{- include "flare.checkHost" (dict "where" "ingress.host" "host" $i.host) -}}
{{- if and (not $i.tlsSecret) (not $i.allowPlainHttp) -}}
{{- fail "ingress.enabled without ingress.tlsSecret: prompts would travel in plain text; name the certificate's secret or set allowPlainHttp" -}}
{{- end -}}
{{- else if or $i.host $i.tlsSecret $i.className -}}
{{- fail "ingress.host, tlsSecret and className do nothing unless ingress.enabled" -}}
{{- end -}}
{{- if and (not $g.enabled) (or $g.name $g.namespace $g.sectionName $g.hostnames) -}}
{{- fail "gateway.name, namespace, sectionName and hostnames do nothing unless gateway.enabled" -}}
{{- end -}}
{{- range $g.hostnames -}}
{{- include "flare.checkHost" (dict "where" "gateway.hostnames" "host" .) -}}
{{- end -}}
{{- if and $g.enabled (not $g.name) -}}
{{- fail "gateway.enabled: set gateway.name" -}}
{{- end -}}
{{- if and $g.enabled (not $g.sectionName) (not $g.allowPlainHttp) -}}
{{- fail "gateway.enabled without gateway.sectionName: a listener without TLS would serve too; name the HTTPS listener or set allowPlainHttp" -}}
{{- end -}}
{{- if has (toString .Values.http.port) (list "6379" "8080" "8265" "10001") -}}
{{- fail (printf "http.port %d is Ray's own in every pod: choose another" (int64 .Values.http.port)) -}}
{{- end -}}
{{- $k := .Values.apiKeys -}}
{{- if and $k.existingSecret $k.file -}}
{{- fail "apiKeys: give existingSecret or file, not both" -}}
{{- end -}}
{{- if and .Values.tests.apiKey.existingSecret (not (include "flare.keysSecret" .)) -}}
{{- fail "tests.apiKey.existingSecret is set, the service asks for no keys: leave it out or set apiKeys" -}}
{{- end -}}
{{- if and (eq .Values.auth.mode "disabled") .Values.auth.existingSecret -}}
{{- fail "auth.existingSecret is set, auth.mode is disabled: change one" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false: set serviceAccount.name" -}}
{{- end -}}
{{- if and .Values.gcsFaultTolerance.existingSecret (not .Values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.existingSecret needs redisAddress" -}}
{{- end -}}
{{- end -}}

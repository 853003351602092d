{{/* Names, labels, the image, and parts that head and workers share. */}}

{{- define "flare.fullname" -}}
{{- .Values.fullnameOverride | default (printf "%s" .Release.Name) | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{- define "flare.selector" -}}
app.kubernetes.io/part-of: flare-ray
app.kubernetes.io/instance: {{ include "flare.fullname" . }}
{{- end -}}

{{/* Not app.kubernetes.io/name on pods: KubeRay selects the head by its own value of it. */}}
{{- define "flare.labels" -}}
{{ include "flare.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "flare.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end -}}
{{- end -}}

{{- define "flare.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "flare.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* Absolute folder of the checkpoint. */}}
{{- define "flare.checkpoint" -}}
{{- if hasPrefix "/" .Values.model.checkpoint -}}
{{ .Values.model.checkpoint }}
{{- else -}}
{{ .Values.weights.mountPath }}/{{ .Values.model.checkpoint }}
{{- end -}}
{{- end -}}

{{- define "flare.claim" -}}
{{- if eq .Values.weights.source "existingClaim" -}}
{{ .Values.weights.existingClaim }}
{{- else -}}
{{ include "flare.fullname" . }}-weights
{{- end -}}
{{- end -}}

{{- define "flare.tokenSecret" -}}
{{- .Values.weights.fetch.token.existingSecret | default (printf "%s-hub" (include "flare.fullname" .)) -}}
{{- end -}}

{{/* Seconds that the old cluster lives on after an upgrade. */}}
{{- define "flare.deletionDelay" -}}
{{- $delay := .Values.upgrade.deletionDelaySeconds -}}
{{- if kindIs "invalid" $delay -}}
{{ add (int64 .Values.longestGenerationSeconds) 60 }}
{{- else -}}
{{ int64 $delay }}
{{- end -}}
{{- end -}}

{{/* Ray reads these when it starts, so head and workers have the same. */}}
{{- define "flare.env" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS
  value: "1"
- name: RAY_SERVE_LOG_TO_STDERR
  value: "1"
{{- if .Values.http.haproxy }}
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_THROUGHPUT_OPTIMIZED
  value: "1"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "1"
{{- end }}
{{- end -}}

{{- define "flare.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "flare.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "flare.weightsVolume" -}}
- name: weights
  {{- if eq .Values.weights.source "hostPath" }}
  hostPath:
    path: {{ .Values.weights.hostPath | quote }}
    type: Directory
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "flare.claim" . | quote }}
  {{- end }}
{{- end -}}

{{/* Arguments of `flare-ray fetch`, as the job and the waiting pods give them. */}}
{{- define "flare.fetchArguments" -}}
- fetch
- {{ .Values.weights.fetch.repository }}
- --out
- {{ include "flare.checkpoint" . }}
- --revision
- {{ .Values.weights.fetch.revision | quote }}
{{- end -}}

{{- define "flare.hubEnv" -}}
{{- with .Values.weights.fetch.endpoint }}
- name: HF_ENDPOINT
  value: {{ . }}
{{- end }}
- name: HF_HOME
  value: /tmp/hub
{{- if or .Values.weights.fetch.token.existingSecret .Values.weights.fetch.token.value }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "flare.tokenSecret" . | quote }}
      key: {{ .Values.weights.fetch.token.key }}
{{- end }}
{{- end -}}

{{/* Secret of the API keys: named, or created; empty = there are none. */}}
{{- define "flare.keysSecret" -}}
{{- if .Values.apiKeys.file -}}
{{ include "flare.fullname" . }}-api-keys
{{- else -}}
{{ .Values.apiKeys.existingSecret }}
{{- end -}}
{{- end -}}

{{/*
Folder of the API keys. The volume is mounted whole: a file mounted by subPath would never change.
*/}}
{{- define "flare.keysPath" -}}
/etc/flare-ray/keys
{{- end -}}
